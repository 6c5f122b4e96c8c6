-- Files to be removed with what is in them: taken away, given up, or past their retention and not read by a batch.
-- $1: how many at most, $2 and $3: see content.time_v1.
update content.file as file
set state = 'deleted'
where file_id in (
    select file_id
    from content.file as old
    where
        expires_at <= (select now from content.time_v1($2, $3))
        and not exists (
            select from content.batch
            where input_file_id = old.file_id and status in ('validating', 'in_progress', 'finalizing', 'cancelling')
        )
    order by expires_at
    limit $1::int
    for update skip locked
)
returning file_id, key_id, batch_id, failures
