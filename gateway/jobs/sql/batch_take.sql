-- A batch that has not ended, for as long as the transaction lasts; nothing where another process has it. The row is not
-- locked meanwhile, so that a caller can ask for its end: each step is guarded by the status that it leaves.
-- $1: batch id, $2 and $3: see content.time_v1.
select
    batch_id, key_id, last_job_id, input_file_id, endpoint, status, output_retention_s,
    extract(epoch from deadline_at - clock.now)::float8 as remaining_s
from content.batch, content.time_v1($2, $3) as clock
where
    batch_id = $1 and status in ('validating', 'in_progress', 'finalizing', 'cancelling')
    and pg_try_advisory_xact_lock(hashtextextended($1::text, 0))
