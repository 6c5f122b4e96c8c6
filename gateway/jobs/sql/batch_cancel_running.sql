-- Ask the owners of the running jobs of a batch to take them back.
-- $1: key, $2: after this id, $3: up to this id.
update content.job
set cancel_requested = true
where
    key_id = $1 and status = 'running' and job_id > $2 and job_id <= $3 and not cancel_requested
returning job_id
