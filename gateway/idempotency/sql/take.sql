-- Take an idempotency key from a request that is gone and sent nothing. No row: it was not so any more.
-- $1 key, $2 idempotency key, $3 request and $4 state that were seen, $5 request, $6 debit, $7 owner.
update content.idempotent_call
set request_id = $5, debit_id = $6, owner = $7, state = 'waiting'
where key_id = $1 and idempotency_key = $2 and request_id = $3 and state = $4
returning request_id
