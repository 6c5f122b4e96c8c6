-- Tie an Idempotency-Key to a submission, in the transaction that inserts its jobs. Waits for another transaction that
-- does the same; no row is returned when that one won.
-- $1: submission id, $2: key, $3: idempotency key, $4: digest of the body, $5: the answer, $6: retention in seconds,
-- $7 and $8: see content.time_v1.
insert into content.submission (submission_id, key_id, idempotency_key, body_digest, answer, created_at, expires_at)
select $1, $2, $3, $4, $5, clock.wall, clock.now + make_interval(secs => $6::float8)
from content.time_v1($7, $8) as clock
on conflict (key_id, idempotency_key) do nothing
returning submission_id
