-- Just before a dispatch: from here on something may have been sent. No row: the key is not this request's any more.
-- $1 key, $2 idempotency key, $3 request.
update content.idempotent_call
set state = 'sent'
where key_id = $1 and idempotency_key = $2 and request_id = $3 and state in ('waiting', 'sent')
returning request_id
