-- get(key_id) -> row: this key, revoked or not.
select key_id, name, description, scopes, models, providers, tags::text as tags, limits::text as limits, created_at, changed_at,
          expires_at, revoked_at, case when previous_until > control.now_v1() then previous_until end as previous_until
from control.api_key
where key_id = $1
