-- Whether any job of a batch has not ended.
-- $1: the batch.
select exists (
    select from content.job
    where submission_id = $1 and file_id is not null and status in ('queued', 'running')
) as open
