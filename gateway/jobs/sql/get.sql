-- One job of one key. A foreign one is as absent as one that never was.
-- $1: job id, $2: the caller's key.
select
    job_id, submission_id, line, custom_id, url, model, session_id, klass, options, status, created_at, not_before,
    deadline_at, claimed_at, attempts, wait_reason, wait_groups, outcome, error_code, error_message, error_param,
    cancel_requested, ended_at, expires_at, result, result_status, (select ahead from control.store) as ahead
from content.job
where job_id = $1 and key_id = $2
