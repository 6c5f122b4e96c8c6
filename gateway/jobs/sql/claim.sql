-- Take queued jobs that are due: functions/30_claim.sql.
-- $1: this process's incarnation, $2: how many at most, $3: models that are not to be taken from, $4: keys whose jobs are
-- not to be taken, $5 and $6: see content.time_v1.
select
    job_id, key_id, url, model, body, file_line, options, claims, returned, runs, attempts_allowed, attempts, outcome,
    remaining_s, background
from content.claim_v1($1, $2, $3, $4, $5, $6)
