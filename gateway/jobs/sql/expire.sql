-- End queued jobs whose deadline has passed.
-- $1: how many at most, $2: retention in seconds.
with clock as materialized (select clock_timestamp() as now),
overdue as materialized (
    select job_id
    from content.job
    where status = 'queued' and deadline_at <= (select now from clock)
    order by deadline_at
    limit $1::int
    for update skip locked
)
update content.job as job
set status = 'expired', error_code = 'expired', error_message = 'the job''s deadline passed before it could run',
    ended_at = clock.now, expires_at = clock.now + make_interval(secs => $2::float8)
from clock, overdue
where job.job_id = overdue.job_id
returning job.job_id
