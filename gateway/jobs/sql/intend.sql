-- Record that attempts are about to be sent. Acts only for the claim that holds the job: without a row returned the
-- attempt must not be sent.
-- $1: owner, then arrays: $2 job ids, $3 claims, $4 attempts.
update content.job as job
set intent_attempt = said.attempt, attempts = greatest(job.attempts, said.attempt)
from unnest($2::uuid[], $3::int[], $4::int[]) as said (job_id, claims, attempt)
where job.job_id = said.job_id and job.status = 'running' and job.owner = $1 and job.claims = said.claims
returning job.job_id, job.cancel_requested
