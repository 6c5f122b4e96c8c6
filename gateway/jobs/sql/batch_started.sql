-- The lines of a batch have become jobs, in this transaction. No row is returned where it was cancelled meanwhile.
-- $1: batch id, $2: how many.
update content.batch
set status = 'in_progress', total = $2, in_progress_at = clock_timestamp()
where batch_id = $1 and status = 'validating'
returning batch_id
