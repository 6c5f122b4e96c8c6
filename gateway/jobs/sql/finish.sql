-- Step three of a job's end: the one terminal transition. Acts only for the claim that holds the job; a second one
-- finds no running row. An answer that could not be stored before comes along with it.
-- $1: owner, then arrays: $2 job ids, $3 claims, $4 statuses, $5 error codes, $6 messages, $7 params, $8 outcomes,
-- $9 attempts made, $10 response bodies, $11 their status; $12: retention in seconds,
-- $13 and $14: see content.time_v1.
update content.job as job
set status = said.status, error_code = said.error_code, error_message = said.error_message,
    error_param = said.error_param, outcome = coalesce(said.outcome, job.outcome),
    attempts = greatest(job.attempts, said.attempts),
    result = case when said.status = 'succeeded' then coalesce(said.result, job.result) end,
    result_status = case when said.status = 'succeeded' then coalesce(said.result_status, job.result_status) end,
    wait_reason = null, ended_at = clock.wall, expires_at = clock.now + make_interval(secs => $12::float8)
from
    unnest(
        $2::uuid[], $3::int[], $4::text[], $5::text[], $6::text[], $7::text[], $8::text[], $9::int[], $10::text[],
        $11::smallint[]
    ) as said (
        job_id, claims, status, error_code, error_message, error_param, outcome, attempts, result, result_status
    ),
    content.time_v1($13, $14) as clock
where job.job_id = said.job_id and job.status = 'running' and job.owner = $1 and job.claims = said.claims
returning job.job_id
