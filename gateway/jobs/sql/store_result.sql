-- Step one of a job's end: keep the answer, before it is settled. Acts only for the claim that holds the job.
-- $1: owner, then arrays: $2 job ids, $3 claims, $4 attempts, $5 response bodies, $6 their status.
update content.job as job
set result = said.result, result_status = said.status, result_attempt = said.attempt
from unnest($2::uuid[], $3::int[], $4::int[], $5::text[], $6::smallint[])
    as said (job_id, claims, attempt, result, status)
where job.job_id = said.job_id and job.status = 'running' and job.owner = $1 and job.claims = said.claims
returning job.job_id
