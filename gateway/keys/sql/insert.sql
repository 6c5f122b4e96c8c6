-- insert(key_id, name, digest, description, scopes, models, providers, tags, limits, expires_at, most) -> row, or none
-- where there are `most` active keys. A name that an active key has violates api_key_active_name.
insert into control.api_key
    (key_id, name, digest, description, scopes, models, providers, tags, limits, expires_at)
select $1, $2, $3, $4, $5, $6, $7, $8::text::jsonb, $9::text::jsonb, $10
where (select count(*) from control.api_key where revoked_at is null) < $11::bigint
returning key_id, name, description, scopes, models, providers, tags::text as tags, limits::text as limits, created_at, changed_at,
          expires_at, revoked_at, case when previous_until > control.now_v1() then previous_until end as previous_until
