-- rotate(key_id, digest, overlap_s) -> row: another secret, beside which the one before is good for so many seconds
-- more; one from before that is worth nothing from now on. The key is held.
update control.api_key
set digest = $2,
    previous_digest = case when $3::float8 > 0 then digest end,
    previous_until = case when $3 > 0 then control.now_v1() + make_interval(secs => $3) end,
    changed_at = clock_timestamp()
where key_id = $1
returning key_id, name, description, scopes, models, providers, tags::text as tags, limits::text as limits, created_at, changed_at,
          expires_at, revoked_at, case when previous_until > control.now_v1() then previous_until end as previous_until
