-- Take a job back: a queued one ends at once, of a running one its owner is asked. An ended one is left as it is.
-- $1: job id, $2: the caller's key, $3: retention in seconds, $4 and $5: see content.time_v1.
update content.job as job
set cancel_requested = true,
    status = case when status = 'queued' then 'cancelled' else status end,
    error_code = case when status = 'queued' then 'cancelled' end,
    error_message = case when status = 'queued' then 'the caller took the job back' end,
    wait_reason = case when status = 'queued' then null else wait_reason end,
    ended_at = case when status = 'queued' then clock.wall end,
    expires_at = case when status = 'queued' then clock.now + make_interval(secs => $3::float8) end
from content.time_v1($4, $5) as clock
where job_id = $1 and key_id = $2 and status in ('queued', 'running')
returning status
