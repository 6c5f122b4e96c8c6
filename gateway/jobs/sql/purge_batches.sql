-- Delete batches past their retention, a few at a time.
-- $1: how many at most, $2 and $3: see content.time_v1.
delete from content.batch
where batch_id in (
    select batch_id
    from content.batch
    where expires_at <= (select now from content.time_v1($2, $3))
    order by expires_at
    limit $1::int
    for update skip locked
)
returning batch_id
