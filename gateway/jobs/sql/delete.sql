-- Delete an ended job and its content.
-- $1: job id, $2: the caller's key.
delete from content.job
where job_id = $1 and key_id = $2 and status in ('succeeded', 'failed', 'cancelled', 'expired')
returning job_id
