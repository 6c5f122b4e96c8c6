-- active(after, most) -> rows: the keys that may be used, but for those that expire later, in the order of their ids:
-- those after this one (null: from the first), at most so many. Read after the version, so that what is read is never
-- older than the version it is kept under; what changes between two pages has another one.
select key_id, name, digest, scopes, extract(epoch from expires_at)::float8 as expires_at, models, providers,
       tags::text as tags, limits::text as limits, previous_digest,
       extract(epoch from previous_until)::float8 as previous_until
from control.api_key cross join (select control.now_v1() as now offset 0) clock
where revoked_at is null and (expires_at is null or expires_at > clock.now)
  and ($1::uuid is null or key_id > $1)
order by key_id
limit $2
