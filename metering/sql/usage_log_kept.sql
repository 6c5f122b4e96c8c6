-- The first day that the log has whole, where it does not reach back to $1; else null.
--
-- The counters by route are never dropped: what they have of a day and the log has not was dropped there. Months that
-- were dropped by configuration are known: of these some rows are kept.
select greatest((select f.before from control.forgotten f where f.what = 'log' and f.before > $1::date),
       case
           when o.day is null then (select max(c.day) + 1 from control.counter c where c.kind = 'route_day')
           when $1::date > o.day then null
           when (select sum(c.attempts) from control.counter c where c.kind = 'route_day' and c.day = o.day)
                <> (select count(*) from control.invocation i
                     where i.day = o.day and i.correction = 0
                       and i.granted_at < (o.day + 3)::timestamp at time zone 'UTC') then o.day + 1
           when exists (select from control.counter c where c.kind = 'route_day' and c.day < o.day) then o.day
       end) as kept_from
  from (select (select i.day from control.invocation i order by i.granted_at limit 1) as day) o
