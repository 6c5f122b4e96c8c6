-- What an idempotency key stands for. $1 key, $2 idempotency key.
select digest, request_id, debit_id, owner, state, answer
from content.idempotent_call
where key_id = $1 and idempotency_key = $2
