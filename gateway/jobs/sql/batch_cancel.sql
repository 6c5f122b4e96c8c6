-- Ask for the end of a batch. One that has ended, or is about to, is left as it is.
-- $1: batch id, $2: the caller's key.
update content.batch
set status = 'cancelling', cancelling_at = clock_timestamp()
where batch_id = $1 and key_id = $2 and status in ('validating', 'in_progress')
returning batch_id
