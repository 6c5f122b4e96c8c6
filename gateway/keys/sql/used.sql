-- used(key_id, zone) -> row: what this key has in the gateway now, and its money in the day and the month of the zone, and
-- altogether.
select t.day, u.others as concurrency, u.day_spent, u.day_unknown, u.day_reserved, u.month_spent, u.month_unknown,
       u.month_reserved, u.total_spent, u.total_unknown, u.total_reserved
from (select (clock_timestamp() at time zone $2::text)::date as day offset 0) as t,
     control.use_of_key_v1($1::uuid, '{}', t.day) as u
