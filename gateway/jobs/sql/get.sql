-- Jobs, each of one key: functions/50_jobs.sql.
-- $1: job ids, $2: the callers' keys.
select
    job_id, key_id, submission_id, line, custom_id, url, model, session_id, klass, options, status, created_at, not_before,
    deadline_at, claimed_at, attempts, wait_reason, wait_groups, outcome, error_code, error_message, error_param,
    cancel_requested, ended_at, expires_at, result, result_status, (select ahead from control.store) as ahead
from content.jobs_v1($1, $2)
