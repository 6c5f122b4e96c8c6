-- record_v2: writes what these attempts used and cost, and raises the counters, inside the settlement's transaction.
-- Called by admission's guarded transition, once for each attempt it moved; `was` is the state before.
--
-- What is known of an attempt is its intent, written at grant, overlaid by the record of its end. An attempt whose
-- process died has only the former; a correction is overlaid on what was written before. Counters are raised in sorted
-- order: unsorted they deadlock.

create or replace function control.record_v2(p_shard smallint, p_lines control.ledger_line[])
returns table (ticket_id uuid, counters jsonb)
language plpgsql as $$
#variable_conflict use_column
declare
    v_lines control.ledger_line[] := p_lines;
    l control.ledger_line;
begin
    if p_lines is null then
        return;
    end if;
    foreach l in array p_lines loop
        if l.was = 'unknown' then
            -- Its month may be on its way out. Who looks before that has ended, with a snapshot from before, would find
            -- neither the month nor what is kept of it.
            lock table only control.invocation in access share mode;
            v_lines := control.overlaid_v1(p_lines);
            exit;
        end if;
    end loop;

    return query
    with written as (
    insert into control.invocation (
        ticket_id, correction, granted_at, settled_at, day, key_id, debit_id, attempt, group_id, state,
        request_id, transport, session_id, scope_id, run_id, step_id, skill, skill_version, tool, role, tags, class,
        requested_model, route_id, provider, upstream_model, protocol, served_model, provider_request_id, is_fallback,
        fallback_index, failed_provider, failure_reason, left_out, input_total, cache_read, cache_write_5m,
        cache_write_1h, output_total, reasoning, usd, upper_bound_usd, cost_reason, price_version, status, ended,
        error_class, error_code, http_status, created_at, queued_ms, cooldown_ms, first_byte_ms, total_ms, retries,
        service_tier, list_usd, flags, resolved_by, note, evidence)
    select l.ticket_id,
           case when l.was = 'open' then 0 else coalesce((l.facts ->> 'correction')::integer, 0) + 1 end,
           l.granted_at, clock_timestamp(), l.day, l.key_id, l.debit_id, l.attempt, l.group_id, l.state,
           x.request_id, x.transport, x.session_id, x.scope_id, x.run_id, x.step_id, x.skill, x.skill_version, x.tool,
           x.role, x.tags, x.class, x.requested_model, x.route_id, x.provider, x.upstream_model, x.protocol,
           x.served_model, x.provider_request_id, x.is_fallback, x.fallback_index, x.failed_provider,
           x.failure_reason, x.left_out, x.input_total, x.cache_read, x.cache_write_5m, x.cache_write_1h,
           x.output_total, x.reasoning,
           case l.state when 'charged' then x.usd when 'zero' then 0 end,
           case when l.state = 'unknown' then x.upper_bound_usd end,
           x.cost_reason, x.price_version,
           case when x.status in ('success', 'error', 'timeout', 'cancelled', 'not_dispatched', 'unknown') then x.status end,
           x.ended, x.error_class, x.error_code, x.http_status,
           x.created_at, x.queued_ms, x.cooldown_ms, x.first_byte_ms, x.total_ms, coalesce(x.retries, 0), x.service_tier,
           x.list_usd, x.flags, x.resolved_by, x.note, x.evidence
      from unnest(v_lines) l,
           jsonb_to_record(l.facts) as x (
               request_id text, transport text, session_id text, scope_id text, run_id text, step_id text, skill text,
               skill_version text, tool text, role text, tags jsonb, class text, requested_model text, route_id text,
               provider text, upstream_model text, protocol text, served_model text, provider_request_id text,
               is_fallback boolean, fallback_index smallint, failed_provider text, failure_reason text, left_out jsonb,
               input_total bigint, cache_read bigint, cache_write_5m bigint, cache_write_1h bigint,
               output_total bigint, reasoning bigint, usd numeric, upper_bound_usd numeric, cost_reason text,
               price_version text, status text, ended text, error_class text, error_code text, http_status smallint,
               created_at timestamptz, queued_ms integer, cooldown_ms integer, first_byte_ms integer, total_ms integer,
               retries smallint, service_tier text, list_usd numeric, flags jsonb, resolved_by uuid, note text,
               evidence text)
    ), line as materialized (
        -- What the counters need of each, looked up once: by the counter it would be many times.
        select l.ticket_id, l.day, l.day::text as day_name, l.key_id, l.key_id::text as key_name,
               l.key_id || '/' || l.day as key_day_name, l.facts ->> 'session_id' as session_id,
               l.key_id || '/' || (l.facts ->> 'session_id') as session_name,
               array[coalesce(l.facts ->> 'provider', ''), coalesce(l.facts ->> 'requested_model', ''),
                     coalesce(l.facts ->> 'upstream_model', '')] as route,
               case when l.facts ? 'run_id' then array[l.facts ->> 'run_id'] end as run,
               case when l.facts ? 'step_id' then array[coalesce(l.facts ->> 'run_id', ''), l.facts ->> 'step_id'] end
                   as step,
               l.facts -> 'tags' as tags,
               case when l.state = 'charged' then (l.facts ->> 'usd')::numeric else 0 end as charged_usd,
               (l.was = 'open')::int as attempts,
               (l.state = 'unknown')::int - (l.was = 'unknown')::int as unknown_attempts,
               case when l.state = 'unknown' then coalesce((l.facts ->> 'upper_bound_usd')::numeric, 0)
                    when l.was = 'unknown' then -coalesce((l.facts ->> 'was_upper_bound_usd')::numeric, 0)
                    else 0 end as unknown_upper_bound_usd,
               (l.state = 'unknown' and l.facts ->> 'upper_bound_usd' is null)::int
                   - (l.was = 'unknown' and l.facts ->> 'was_upper_bound_usd' is null)::int as unbounded_attempts,
               -- Tokens count as soon as they are told, whatever is known of their cost.
               coalesce((l.facts ->> 'input_total')::bigint, 0)
                   - coalesce((l.facts ->> 'was_input_total')::bigint, 0) as input_tokens,
               coalesce((l.facts ->> 'output_total')::bigint, 0)
                   - coalesce((l.facts ->> 'was_output_total')::bigint, 0) as output_tokens
          from unnest(v_lines) l
    ), raised as (
        insert into control.counter as c (kind, name, shard, day, key_id, names, charged_usd, attempts, unknown_attempts,
                                          unknown_upper_bound_usd, unbounded_attempts, input_tokens, output_tokens)
        select k.kind, k.name, p_shard, min(k.day), (array_agg(k.key_id))[1], min(k.names), sum(l.charged_usd),
               sum(l.attempts), sum(l.unknown_attempts), sum(l.unknown_upper_bound_usd), sum(l.unbounded_attempts),
               sum(l.input_tokens), sum(l.output_tokens)
          from line l
         cross join lateral (
            values ('total', '', null::date, null::uuid, null::text[]),
                   ('day', l.day_name, null, null, null),
                   ('key', l.key_name, null, null, null),
                   ('key_day', l.key_day_name, null, null, null),
                   ('session', l.session_name, null, l.key_id, array[l.session_id]),
                   ('route_day', l.key_day_name || l.route::text, l.day, l.key_id, l.route),
                   ('run_day', l.key_day_name || l.run::text, l.day, l.key_id, l.run),
                   ('step_day', l.key_day_name || l.step::text, l.day, l.key_id, l.step)
            union all
            select 'tag_day', l.key_day_name || array[t.key, t.value]::text, l.day, l.key_id, array[t.key, t.value]
              from jsonb_each_text(l.tags) t) as k (kind, name, day, key_id, names)
         where k.name is not null
         group by k.kind, k.name
         order by k.kind, k.name
        on conflict (kind, name, shard) do update
           set charged_usd = c.charged_usd + excluded.charged_usd, attempts = c.attempts + excluded.attempts,
               unknown_attempts = c.unknown_attempts + excluded.unknown_attempts,
               unknown_upper_bound_usd = c.unknown_upper_bound_usd + excluded.unknown_upper_bound_usd,
               unbounded_attempts = c.unbounded_attempts + excluded.unbounded_attempts,
               input_tokens = c.input_tokens + excluded.input_tokens,
               output_tokens = c.output_tokens + excluded.output_tokens
        returning c.kind, c.name, c.charged_usd
    ), sums as materialized (
        -- This shard as it is now, and the others.
        select r.kind, r.name,
               (r.charged_usd + coalesce((select sum(c.charged_usd) from control.counter c
                                           where c.kind = r.kind and c.name = r.name and c.shard <> p_shard), 0))::text
                   as usd
          from raised r where r.kind in ('total', 'day', 'session')
    )
    select l.ticket_id, jsonb_build_object(
               'day', l.day,
               'session_usd', (select s.usd from sums s where s.kind = 'session' and s.name = l.session_name),
               'day_usd', (select s.usd from sums s where s.kind = 'day' and s.name = l.day_name),
               'total_usd', (select s.usd from sums s where s.kind = 'total'))
      from line l;
end $$;

-- Corrections with the facts that were written before under theirs, and what the counters hold of them. Apart from the
-- usual, which must not open every month of the ledger.
create or replace function control.overlaid_v1(p_lines control.ledger_line[]) returns control.ledger_line[]
language sql stable as $$
    select array_agg(row(
               l.ticket_id, l.was, l.state, l.granted_at, l.day, l.key_id, l.debit_id, l.attempt, l.group_id,
               case when l.was = 'unknown' then coalesce(b.facts, '{}') || l.facts else l.facts end)::control.ledger_line)
      from unnest(p_lines) l
      left join lateral (
          select jsonb_strip_nulls(to_jsonb(i) || jsonb_build_object(
                     'usd', null, 'upper_bound_usd', null, 'cost_reason', null, 'flags', null, 'list_usd', null,
                     'was_upper_bound_usd', i.upper_bound_usd, 'was_input_total', i.input_total,
                     'was_output_total', i.output_total)) as facts
            from control.invocation i
           where l.was = 'unknown' and i.granted_at = l.granted_at and i.ticket_id = l.ticket_id
           order by i.correction desc limit 1) b on true
     where l.key_id is not null
$$;
