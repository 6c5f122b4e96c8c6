-- Delete a batch that has ended. Its jobs and files are gone already.
-- $1: batch id, $2: the caller's key.
delete from content.batch where batch_id = $1 and key_id = $2 and ended_at is not null
