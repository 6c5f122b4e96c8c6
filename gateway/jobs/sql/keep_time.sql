-- Makes up for a step of the server's clock, where this process has noticed it and nobody has made up for it since. Where
-- the offset has changed, the process learns from it instead: two that know different times would set it for ever.
-- $1 and $2: see content.time_v1, whose rule this is.
with clock as materialized (select clock_timestamp() as wall)
update control.store as s
set ahead = $1::timestamptz - clock.wall, steps = s.steps + 1
from clock
where s.steps = $2::bigint and clock.wall + s.ahead - $1 not between interval '-1 second' and interval '1 minute'
