-- Nothing was sent, so the key is free again. $1 key, $2 idempotency key, $3 request.
delete from content.idempotent_call
where key_id = $1 and idempotency_key = $2 and request_id = $3 and state <> 'ended'
