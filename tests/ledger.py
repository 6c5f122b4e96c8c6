"""
Counters against the rows they count, in one statement and so in one snapshot: what must hold whenever anybody looks.

The sums are made here from `control.invocation` alone, the last row of each attempt, in nobody else's words: a counter
that the ledger forgets to raise, raises twice or raises for another day or key is one that differs.
"""

from __future__ import annotations

from typing import Final

import asyncpg

#: A counter that differs appears twice: as it is there, and as its rows make it.
_DIFFERENCES: Final = """
with last as (
    select distinct on (i.granted_at, i.ticket_id) i.*
      from control.invocation i
     order by i.granted_at, i.ticket_id, i.correction desc
), wanted as (
    select k.kind, k.name, k.day, k.key_id, k.names, sum(coalesce(l.usd, 0)) as usd, count(*) as attempts,
           count(*) filter (where l.state = 'unknown') as unknown,
           sum(coalesce(case when l.state = 'unknown' then l.upper_bound_usd end, 0)) as bound,
           count(*) filter (where l.state = 'unknown' and l.upper_bound_usd is null) as unbounded,
           sum(coalesce(l.input_total, 0)) as tokens_in, sum(coalesce(l.output_total, 0)) as tokens_out
      from last l
     cross join lateral (
        values ('total', '', null::date, null::uuid, null::text[]),
               ('day', l.day::text, null, null, null),
               ('key', l.key_id::text, null, null, null),
               ('key_day', l.key_id || '/' || l.day, null, null, null),
               ('session', l.key_id || '/' || l.session_id, null, l.key_id, array[l.session_id]),
               ('route_day', null, l.day, l.key_id, array[coalesce(l.provider, ''), coalesce(l.requested_model, ''),
                                                          coalesce(l.upstream_model, '')]),
               ('run_day', null, l.day, l.key_id, array[l.run_id]),
               ('step_day', null, l.day, l.key_id, array[coalesce(l.run_id, ''), l.step_id])
        union all
        select 'tag_day', null, l.day, l.key_id, array[t.key, t.value] from jsonb_each_text(l.tags) t
     ) as k (kind, name, day, key_id, names)
     where k.kind in ('total', 'day', 'key', 'key_day', 'route_day', 'tag_day')
        or (k.kind = 'session' and l.session_id is not null)
        or (k.kind = 'run_day' and l.run_id is not null)
        or (k.kind = 'step_day' and l.step_id is not null)
     group by k.kind, k.name, k.day, k.key_id, k.names
), counted as (
    select c.kind, case when c.day is null then c.name end as name, c.day, c.key_id, c.names, sum(c.charged_usd) as usd,
           sum(c.attempts) as attempts, sum(c.unknown_attempts) as unknown, sum(c.unknown_upper_bound_usd) as bound,
           sum(c.unbounded_attempts) as unbounded, sum(c.input_tokens) as tokens_in, sum(c.output_tokens) as tokens_out
      from control.counter c
     group by 1, 2, 3, 4, 5
)
(select 'counter' as side, x.* from (select * from counted except select * from wanted) x)
union all
(select 'rows' as side, x.* from (select * from wanted except select * from counted) x)
order by kind, name, day, key_id, names, side
"""


async def counters_that_differ(connection: asyncpg.Connection) -> list[str]:
    """One line for each that is not what its rows make, and for each that its rows want; none where all is well."""
    return [" ".join(f"{name}={value}" for name, value in row.items()) for row in await connection.fetch(_DIFFERENCES)]
