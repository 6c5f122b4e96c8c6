-- How a request ended, once. $1 key, $2 idempotency key, $3 request, $4 answer, $5 retention in seconds.
update content.idempotent_call
set state = 'ended', answer = $4,
    expires_at = (select now from content.time_v1(null, -1)) + make_interval(secs => $5::float8)
where key_id = $1 and idempotency_key = $2 and request_id = $3 and state <> 'ended'
