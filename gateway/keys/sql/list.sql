-- list(after, most) -> rows: every key there ever was, in the order of their ids, which is that of their making; those
-- after this id (null: from the first), at most so many. Without the digests.
select key_id, name, description, scopes, models, providers, tags::text as tags, limits::text as limits, created_at, changed_at,
          expires_at, revoked_at, case when previous_until > control.now_v1() then previous_until end as previous_until
from control.api_key
where $1::uuid is null or key_id > $1
order by key_id
limit $2
