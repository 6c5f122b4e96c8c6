-- The first day of which all runs, steps and tags are counted, where something was used before; else null. $1 the zone.
select (m.applied_at at time zone $1)::date + 1 as kept_from
  from control.migration m
 where m.component = 'metering' and m.name = '0004_counts.sql'
   and (exists (select from control.counter c
                 where c.kind = 'route_day' and c.day < (m.applied_at at time zone $1)::date)
        or exists (select from control.invocation i where i.granted_at < m.applied_at))
