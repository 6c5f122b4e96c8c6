-- revoke(key_id, name) -> row: the active key of this id or (id null) this name. Revoked once: a second call finds none.
update control.api_key
set revoked_at = clock_timestamp()
where revoked_at is null and case when $1::uuid is null then name = $2::text else key_id = $1 end
returning key_id, name, description, scopes, models, providers, tags::text as tags, limits::text as limits, created_at, changed_at,
          expires_at, revoked_at, case when previous_until > control.now_v1() then previous_until end as previous_until
