-- The batches that somebody must do something about: those that are not merely waiting for their jobs.
select batch.batch_id
from content.batch
where
    batch.status in ('validating', 'finalizing', 'cancelling')
    or (
        batch.status = 'in_progress'
        -- Looked up one by one: as `not exists` it may become a join that reads every open job of all batches.
        and (
            select true
            from content.job
            where
                job.submission_id = batch.batch_id and job.file_id is not null and job.status in ('queued', 'running')
            order by job.line
            limit 1
        ) is null
    )
order by batch.batch_id
