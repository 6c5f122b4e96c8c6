-- Take an idempotency key that is free, or past its retention. No row: somebody has it. A call that has not ended keeps it
-- for a day more, so that no retention however short lets a second one run beside it.
-- $1 key, $2 idempotency key, $3 digest, $4 request, $5 debit, $6 owner, $7 retention in seconds.
insert into content.idempotent_call as c
    (key_id, idempotency_key, digest, request_id, debit_id, owner, state, expires_at)
select $1, $2, $3, $4, $5, $6, 'waiting', t.now + make_interval(secs => $7::float8)
from content.time_v1(null, -1) t
on conflict (key_id, idempotency_key) do update
set digest = excluded.digest, request_id = excluded.request_id, debit_id = excluded.debit_id, owner = excluded.owner,
    state = excluded.state, answer = null, expires_at = excluded.expires_at
where c.expires_at + case when c.state = 'ended' then interval '0' else interval '1 day' end <= (select now from content.time_v1(null, -1))
returning c.request_id
