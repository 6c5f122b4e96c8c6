-- A page of one key's jobs in the order of their ids: by time of submission, then by line.
-- $1: key, $2: after this id, $3: up to this id, $4: status, $5: session, $6: custom id (null: any), $7: page size.
select
    job_id, submission_id, line, custom_id, url, model, session_id, klass, options, status, created_at, not_before,
    deadline_at, claimed_at, attempts, wait_reason, wait_groups, outcome, error_code, error_message, error_param,
    cancel_requested, ended_at, expires_at, null::text as result, result_status, (select ahead from control.store) as ahead
from content.job
where
    key_id = $1 and job_id > $2 and job_id <= $3
    and ($4::text is null or status = $4)
    and ($5::text is null or session_id = $5)
    and ($6::text is null or custom_id = $6)
order by job_id
limit $7::int
