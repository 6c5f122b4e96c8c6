-- The first day of which all runs, steps and tags are counted, where something was used before, and those before were not
-- dropped since; else null. $1 the zone.
select greatest(
           (select max(f.before) from control.forgotten f where f.what <> 'log'),
           (select (m.applied_at at time zone $1)::date + 1
              from control.migration m
             where m.component = 'metering' and m.name = '0004_counts.sql'
               and (exists (select from control.counter c
                             where c.kind = 'route_day' and c.day < (m.applied_at at time zone $1)::date)
                    or exists (select from control.invocation i where i.granted_at < m.applied_at)))) as kept_from
