-- What an API key has kept here: how many idempotency keys, and the bytes of their answers. $1 key.
select count(*) as keys, coalesce(sum(octet_length(answer)), 0)::bigint as bytes
from content.idempotent_call
where key_id = $1
