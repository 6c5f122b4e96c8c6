-- Every group with its slots and its queue, for operators. Slots whose quarantine has passed are free.
select json_build_object(
    'group', g.group_id, 'concurrency', g.concurrency, 'queue_bound', g.queue_bound,
    'breaker', case when g.breaker = 'open' and g.cooldown_until <= clock_timestamp() then 'half_open' else g.breaker end, 'generation', g.generation,
    'cooldown_s', case when g.breaker = 'open'
        then greatest(0, round(extract(epoch from g.cooldown_until - clock_timestamp())::numeric, 3)) end,
    'active', count(t.ticket_id) filter (where t.state in ('granted', 'active')),
    'quarantined', count(t.ticket_id) filter (where t.state = 'quarantined'),
    'queued', (select count(*) from control.ticket q where q.group_id = g.group_id and q.state = 'queued'),
    'slots', coalesce(json_agg(json_build_object(
        'ticket_id', t.ticket_id, 'state', t.state, 'model', t.model, 'attempt', t.attempt, 'debit_id', t.debit_id,
        'owner', t.owner_id, 'host', o.host, 'pid', o.pid, 'since', t.granted_at,
        'hard_deadline', t.hard_deadline, 'quarantined_until', t.quarantined_until) order by t.number)
        filter (where t.ticket_id is not null), '[]')) as occupancy
  from control.capacity_group g
  left join control.ticket t on t.group_id = g.group_id and t.state <> 'queued'
        and (t.quarantined_until is null or t.quarantined_until > clock_timestamp())
  left join control.owner o on o.owner_id = t.owner_id
 group by g.group_id
 order by g.group_id
