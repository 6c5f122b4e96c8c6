-- One response of one key that was asked for in the background. A foreign one, and a job that is none, are as absent as one
-- that never was.
-- $1: job id, $2: the caller's key.
select
    status, created_at, model, response_head, outcome, error_code, error_message, error_param, ended_at, result
from content.job
where job_id = $1 and key_id = $2 and response_head is not null
