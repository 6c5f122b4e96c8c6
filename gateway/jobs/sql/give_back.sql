-- Return running jobs to the queue; one whose caller took it back in the meantime ends as cancelled instead. Acts only
-- for the claim that holds the job.
-- $1: owner, then arrays: $2 job ids, $3 claims, $4 seconds until it is due again (0: it keeps its place), $5 given back
-- in order (1) or lost with its process (0), $6 whether the run counts (1 or 0), $7 why it waits, $8 outcomes,
-- $9 attempts made, $13 the capacity groups it waits for, each a JSON array.
-- $10: retention in seconds, $11 and $12: see content.time_v1.
update content.job as job
set status = case when job.cancel_requested then 'cancelled' else 'queued' end,
    owner = null,
    not_before = case when said.delay_s > 0 then clock.now + make_interval(secs => said.delay_s) else job.not_before end,
    returned = job.returned + said.in_order, runs = job.runs + said.counts, intent_attempt = null,
    wait_reason = said.reason,
    wait_groups = nullif(array(select jsonb_array_elements_text(said.groups::jsonb)), '{}'),
    outcome = coalesce(said.outcome, job.outcome),
    attempts = greatest(job.attempts, said.attempts),
    error_code = case when job.cancel_requested then 'cancelled' end,
    error_message = case when job.cancel_requested then 'the caller took the job back' end,
    ended_at = case when job.cancel_requested then clock.wall end,
    expires_at = case when job.cancel_requested then clock.now + make_interval(secs => $10::float8) end
from
    unnest(
        $2::uuid[], $3::int[], $4::float8[], $5::int[], $6::int[], $7::text[], $8::text[], $9::int[], $13::text[]
    ) as said (job_id, claims, delay_s, in_order, counts, reason, outcome, attempts, groups),
    content.time_v1($11, $12) as clock
where job.job_id = said.job_id and job.status = 'running' and job.owner = $1 and job.claims = said.claims
returning job.job_id, job.status
