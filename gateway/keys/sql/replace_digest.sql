-- replace_digest(name, digest) -> key_id: the active key of this name gets another secret, and the old one is worth
-- nothing from then on. None where there is no such key.
update control.api_key
set digest = $2
where name = $1 and revoked_at is null
returning key_id
