-- Nobody waits for the end of this request any more. $1 key, $2 idempotency key, $3 request.
update content.idempotent_call
set state = 'left'
where key_id = $1 and idempotency_key = $2 and request_id = $3 and state = 'sent'
