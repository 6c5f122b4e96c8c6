-- What an Idempotency-Key stands for.
-- $1: the caller's key, $2: idempotency key.
select submission_id, body_digest, answer from content.submission where key_id = $1 and idempotency_key = $2
