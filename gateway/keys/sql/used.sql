-- used(key_id, zone) -> row: what this key has in the gateway now, what is left of its minute (as control.hold_to_limits_v1
-- reckons it; null where it has no such limit), and its money in the day and the month of the zone, and altogether.
select t.day, u.others as concurrency,
       -- The greatest of nothing and 0 would be 0.
       case when b.requests > 0 then floor(b.requests) else b.requests * 0 end::bigint as requests_left,
       case when b.tokens > 0 then floor(b.tokens) else b.tokens * 0 end::bigint as tokens_left,
       u.day_spent, u.day_unknown, u.day_reserved, u.month_spent, u.month_unknown, u.month_reserved, u.total_spent,
       u.total_unknown, u.total_reserved
from (select (clock_timestamp() at time zone $2::text)::date as day, control.now_v1() as now offset 0) as t
     cross join control.use_of_key_v1($1::uuid, '{}', t.day) as u
     left join lateral (
         select control.filled_v1(k.requests_left, k.requests_per_minute, k.filled_at, t.now) as requests,
                control.filled_v1(k.tokens_left - (u.tokens_told - k.tokens_seen), k.tokens_per_minute, k.filled_at, t.now)
                    - u.tokens_live as tokens
         from control.key_limit k where k.key_id = $1::uuid
     ) as b on true
