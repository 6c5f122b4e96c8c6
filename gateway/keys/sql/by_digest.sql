-- by_digest(digest) -> row: the key of this secret, active or not. `replaced`: it is the one from before a rotation.
select key_id, name, revoked_at, expires_at <= control.now_v1() as expired, digest <> $1 as replaced
from control.api_key
where digest = $1 or previous_digest = $1
