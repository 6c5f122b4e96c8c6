select t.day, t.key_id, i.intent ->> 'provider', i.intent ->> 'requested_model', i.intent ->> 'upstream_model',
                   i.intent ->> 'run_id', i.intent ->> 'step_id', i.intent ->> 'session_id', i.intent ->> 'skill',
                   i.intent ->> 'tool', i.intent ->> 'role', i.intent ->> 'transport', 'open', i.intent -> 'tags', true, true,
                   0, 0, 0, 0, 0, 0, 0,
                   1, coalesce((i.intent ->> 'upper_bound_usd')::numeric, 0), (i.intent ->> 'upper_bound_usd' is null)::int
              from control.ticket t cross join lateral (select t.intent::jsonb as intent) i
             where t.state <> 'queued' and t.state in ('active', 'quarantined') and t.day between {first} and {last}
               and (select true from control.attempt a where a.ticket_id = t.ticket_id) is null
