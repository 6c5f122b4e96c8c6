-- The running jobs of one process, for recovery after it died.
-- $1: its incarnation, $2: job ids that are accounted for, $3: how many at most.
select
    job_id, key_id, url, options, claims, returned, runs, attempts_allowed, attempts, intent_attempt, cancel_requested,
    outcome, result, result_attempt
from content.job
where owner = $1 and status = 'running' and job_id <> all($2::uuid[])
order by job_id
limit $3::int
