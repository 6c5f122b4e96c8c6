-- Forget idempotency keys past their retention, a few at a time; as in reserve.sql. $1: how many at most. By the place of
-- the row, which is held: by its key the planner may read the whole table.
with due as materialized (
    select ctid
    from content.idempotent_call
    where expires_at <= (select now from content.time_v1(null, -1))
      and expires_at + case when state = 'ended' then interval '0' else interval '1 day' end
          <= (select now from content.time_v1(null, -1))
    order by expires_at
    limit $1::int
    for update skip locked
)
delete from content.idempotent_call
where ctid = any (array(select ctid from due))
returning request_id
