-- by_digest(digest) -> row: the key of this secret, active or not.
select key_id, name, revoked_at, expires_at <= clock_timestamp() as expired
from control.api_key
where digest = $1
