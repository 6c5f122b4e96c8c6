-- hold(key_id, name) -> row: the active key of this id or (id null) this name, which nobody else changes before the
-- transaction ends.
select key_id, name, description, scopes, models, providers, tags::text as tags, limits::text as limits, created_at, changed_at,
          expires_at, revoked_at, case when previous_until > control.now_v1() then previous_until end as previous_until
from control.api_key
where revoked_at is null and case when $1::uuid is null then name = $2::text else key_id = $1 end
for update
