-- End queued jobs whose deadline has passed.
-- $1: how many at most, $2: retention in seconds, $3 and $4: see content.time_v1.
with clock as materialized (select now, wall from content.time_v1($3, $4)),
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
    ended_at = clock.wall, expires_at = clock.now + make_interval(secs => $2::float8)
from clock, overdue
where job.job_id = overdue.job_id
returning job.job_id
