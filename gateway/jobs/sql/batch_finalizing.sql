-- All jobs of a batch have ended. No row is returned where it was cancelled meanwhile.
-- $1: batch id.
update content.batch
set status = 'finalizing', finalizing_at = clock_timestamp()
where batch_id = $1 and status = 'in_progress'
returning batch_id
