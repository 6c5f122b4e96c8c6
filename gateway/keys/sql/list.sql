-- list() -> rows: every key there ever was, oldest first. Without the digests.
select key_id, name, scopes, tags::text as tags, created_at, expires_at, revoked_at
from control.api_key
order by created_at, key_id
