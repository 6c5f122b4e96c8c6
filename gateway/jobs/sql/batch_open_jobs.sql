-- Whether any job of a batch has not ended.
-- $1: the batch.
select (
    select true
    from content.job
    where submission_id = $1 and file_id is not null and status in ('queued', 'running')
    order by line
    limit 1
) is not null as open
