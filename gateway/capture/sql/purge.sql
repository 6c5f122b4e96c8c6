-- Forget what is past its retention, a few at a time; how many. $1: how many at most. By the place of the row, which is
-- held: by its key the planner may read the whole table.
with due as materialized (
    select ctid from content.capture where expires_at <= clock_timestamp() order by expires_at limit $1::int
    for update skip locked
)
delete from content.capture where ctid = any (array(select ctid from due)) returning request_id
