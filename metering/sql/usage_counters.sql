select c.day, c.key_id, o.provider, o.model, o.upstream_model, o.run, o.step, null::text as session,
                   null::text as skill, null::text as tool, null::text as role, null::text as transport,
                   null::text as status, o.tags, o.grouped, o.counted,
                   o.times * c.charged_usd as charged_usd, o.times * c.attempts as attempts,
                   o.times * c.unknown_attempts as unknown_attempts,
                   o.times * c.unknown_upper_bound_usd as unknown_upper_bound_usd,
                   o.times * c.unbounded_attempts as unbounded_attempts, o.times * c.input_tokens as input_tokens,
                   o.times * c.output_tokens as output_tokens, 0 as reserved_attempts, 0::numeric as reserved_usd,
                   0 as unbounded_reserved
              from (
                -- By what is asked for alone: there may be a million of them, and few groups.
                select k.kind, {day} as day, {key_id} as key_id, {names} as names,
                       sum(k.charged_usd) as charged_usd, sum(k.attempts)::bigint as attempts,
                       sum(k.unknown_attempts)::bigint as unknown_attempts,
                       sum(k.unknown_upper_bound_usd) as unknown_upper_bound_usd,
                       sum(k.unbounded_attempts)::bigint as unbounded_attempts,
                       sum(k.input_tokens)::bigint as input_tokens, sum(k.output_tokens)::bigint as output_tokens
                  from control.counter k
                 where k.kind = any ({kinds}) and k.day between {first} and {last} and {keys}
                 group by 1, 2, 3, 4) c
             cross join lateral ({parts})
                as o (provider, model, upstream_model, run, step, tags, grouped, counted, times)
