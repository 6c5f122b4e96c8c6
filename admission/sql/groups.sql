-- Every group with its slots, its queue, and what keeps it back, for operators. Slots whose quarantine has passed are
-- free. Times are the server's own.
with clock as materialized (
    select clock_timestamp() + s.ahead as now, s.ahead from control.store s
)
select json_build_object(
    'group', g.group_id, 'endpoints', g.endpoints, 'concurrency', g.concurrency,
    'quarantine_headroom', g.quarantine_headroom, 'queue_bound', g.queue_bound,
    'breaker', case when g.breaker = 'open' and g.cooldown_until <= c.now then 'half_open' else g.breaker end,
    'generation', g.generation, 'ramp', g.ramp,
    'openings', g.opened_total, 'opened_for', g.opened_for, 'open_since', g.open_since,
    'cooldown_s', case when g.breaker = 'open'
        then greatest(0, round(extract(epoch from g.cooldown_until - c.now)::numeric, 3)) end,
    'active', s.active, 'quarantined', s.quarantined, 'queued', q.total,
    'expected_wait_s', case when q.total > 0 then round(control.expected_ms_v1(g, q.total::integer - 1, c.now) / 1000.0, 3) end,
    'floors', (
        select coalesce(json_agg(json_build_object(
                   'credential', f.credential, 'model', nullif(f.model, ''), 'cause', control.floor_cause_v1(f.kind),
                   'remaining_s', round(extract(epoch from f.until - c.now)::numeric, 3)) order by f.until), '[]')
          from control.floor f where f.group_id = g.group_id and f.until > c.now),
    'allowances', (
        select coalesce(json_agg(json_build_object(
                   'model', nullif(a.model, ''), 'concurrency', a.concurrency,
                   'requests_per_minute', a.requests_per_minute, 'tokens_per_minute', a.tokens_per_minute,
                   'requests_left', floor(control.filled_v1(a.requests_left, a.requests_per_minute, a.filled_at, c.now)),
                   'tokens_left', floor(control.filled_v1(a.tokens_left, a.tokens_per_minute, a.filled_at, c.now)))
                   order by a.model), '[]')
          from control.allowance a where a.group_id = g.group_id),
    'queued_by_class', json_build_object('interactive', q.interactive, 'batch', q.total - q.interactive),
    'slots', s.slots, 'waiting', q.first) as occupancy
  from control.capacity_group g
 cross join clock c
 cross join lateral (
    select count(*) filter (where t.state <> 'quarantined') as active,
           count(*) filter (where t.state = 'quarantined') as quarantined,
           coalesce(json_agg(json_build_object(
               'ticket_id', t.ticket_id, 'state', t.state, 'class', case t.class when 0 then 'interactive' else 'batch' end,
               'model', t.model, 'credential', t.credential, 'attempt', t.attempt, 'debit_id', t.debit_id,
               'key_id', t.key_id, 'owner', t.owner_id, 'host', o.host, 'pid', o.pid, 'since', t.granted_at,
               'hard_deadline', t.hard_deadline - c.ahead, 'quarantined_until', t.quarantined_until - c.ahead,
               'quarantined_s', round(extract(epoch from t.quarantined_until - c.now)::numeric, 3)) order by t.number),
               '[]') as slots
      from control.ticket t left join control.owner o on o.owner_id = t.owner_id
     where t.group_id = g.group_id and t.state <> 'queued'
       and (t.quarantined_until is null or t.quarantined_until > c.now)) s
 cross join lateral (
    select (select count(*) from control.ticket t where t.group_id = g.group_id and t.state = 'queued') as total,
           (select count(*) from control.ticket t
             where t.group_id = g.group_id and t.state = 'queued' and t.class = 0) as interactive,
           coalesce(json_agg(json_build_object(
               'position', w.position, 'class', case w.class when 0 then 'interactive' else 'batch' end, 'model', w.model,
               'reason', r.reason, 'key_id', w.key_id,
               'expected_wait_s', round(control.expected_ms_v2(g, w.ticket, r.reason, r.until, w.position::integer - 1, c.now)
                                        / 1000.0, 3),
               'since', w.queued_at - c.ahead, 'debit_id', w.debit_id) order by w.position), '[]') as first
      from (select t.*, t as ticket, row_number() over (order by t.class, t.number) as position from control.ticket t
             where t.group_id = g.group_id and t.state = 'queued' order by t.class, t.number limit 20) w
     cross join lateral control.wait_reason_v2(g, w.credential, w.model, c.now) r) q
 where g.endpoints <> '{}' or s.active + s.quarantined + q.total > 0
 order by g.group_id
