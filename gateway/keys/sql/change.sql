-- change(key_id, name, description, scopes, models, providers, tags, limits, expires_at) -> row. The key is held.
update control.api_key
set name = $2, description = $3, scopes = $4, models = $5, providers = $6, tags = $7::text::jsonb,
    limits = $8::text::jsonb, expires_at = $9, changed_at = clock_timestamp()
where key_id = $1
returning key_id, name, description, scopes, models, providers, tags::text as tags, limits::text as limits, created_at, changed_at,
          expires_at, revoked_at, case when previous_until > control.now_v1() then previous_until end as previous_until
