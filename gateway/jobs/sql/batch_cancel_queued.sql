-- End some of the queued jobs of a batch that is being cancelled.
-- $1: key, $2: after this id, $3: up to this id, $4: how many at most, $5: retention in seconds,
-- $6 and $7: see content.time_v1.
with clock as materialized (select now, wall from content.time_v1($6, $7)),
waiting as materialized (
    select job_id
    from content.job
    where key_id = $1 and status = 'queued' and job_id > $2 and job_id <= $3
    order by job_id
    limit $4::int
    for update skip locked
)
update content.job as job
set status = 'cancelled', cancel_requested = true, error_code = 'cancelled',
    error_message = 'the caller took the job back', wait_reason = null, ended_at = clock.wall,
    expires_at = clock.now + make_interval(secs => $5::float8)
from clock, waiting
where job.job_id = waiting.job_id
returning job.job_id
