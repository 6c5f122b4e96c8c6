select i.day, i.key_id, i.provider, i.requested_model as model, i.upstream_model, i.run_id as run, i.step_id as step,
                   i.session_id as session, i.skill, i.tool, i.role, i.transport, i.status, i.tags, true as grouped,
                   true as counted, coalesce(i.usd, 0) as charged_usd, 1 as attempts,
                   (i.state = 'unknown')::int as unknown_attempts,
                   coalesce(i.upper_bound_usd, 0) as unknown_upper_bound_usd,
                   (i.state = 'unknown' and i.upper_bound_usd is null)::int as unbounded_attempts,
                   coalesce(i.input_total, 0) as input_tokens, coalesce(i.output_total, 0) as output_tokens,
                   0 as reserved_attempts, 0::numeric as reserved_usd, 0 as unbounded_reserved
              from control.invocation i
             where i.day between {first} and {last}
               -- The day is that of the zone which was declared then: it names the partitions within two days.
               and i.granted_at >= ({first}::date - 2)::timestamp at time zone 'UTC'
               and i.granted_at < ({last}::date + 3)::timestamp at time zone 'UTC'
               and not exists (
                   select from control.invocation j
                    where j.granted_at = i.granted_at and j.ticket_id = i.ticket_id and j.correction > i.correction
                      and j.correction > 0
                      and j.granted_at >= ({first}::date - 2)::timestamp at time zone 'UTC'
                      and j.granted_at < ({last}::date + 3)::timestamp at time zone 'UTC')
