-- The request of a response that was asked for in the background.
-- $1: job id, $2: the caller's key.
select body from content.job where job_id = $1 and key_id = $2 and response_head is not null
