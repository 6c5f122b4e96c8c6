-- Forget idempotency keys past their retention, a few at a time; as in reserve.sql. $1: how many at most.
delete from content.idempotent_call
where (key_id, idempotency_key) in (
    select key_id, idempotency_key
    from content.idempotent_call, content.time_v1(null, -1) t
    where expires_at <= t.now
      and expires_at + case when state = 'ended' then interval '0' else interval '1 day' end <= t.now
    order by expires_at
    limit $1::int
    for update of idempotent_call skip locked
)
returning request_id
