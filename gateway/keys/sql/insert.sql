-- insert(key_id, name, digest, scopes, tags, expires_at, most) -> row, or none where there are `most` active keys.
-- A name that an active key has violates api_key_active_name.
insert into control.api_key (key_id, name, digest, scopes, tags, expires_at)
select $1, $2, $3, $4, $5::text::jsonb, $6
where (select count(*) from control.api_key where revoked_at is null) < $7::bigint
returning key_id, name, scopes, tags::text as tags, created_at, expires_at, revoked_at
