-- get(key_id, session_id) -> row: what a session of this key has used, what its attempts at work can still cost, and its
-- budgets. Of attempts at work those have no bound whose intent has none. At most a hundred of them are listed.
with sums as (
    select coalesce(sum(c.charged_usd), 0) as charged_usd, coalesce(sum(c.attempts), 0)::bigint as attempts,
           coalesce(sum(c.unknown_attempts), 0)::bigint as unknown_attempts,
           coalesce(sum(c.unknown_upper_bound_usd), 0) as unknown_upper_bound_usd,
           coalesce(sum(c.unbounded_attempts), 0)::bigint as unbounded_attempts,
           coalesce(sum(c.input_tokens), 0)::bigint as input_tokens,
           coalesce(sum(c.output_tokens), 0)::bigint as output_tokens
      from control.counter c where c.kind = 'session' and c.name = $1::uuid || '/' || $2::text
), live as materialized (
    select t.ticket_id, t.debit_id, t.attempt, t.state, t.group_id, t.model, t.reserved_usd, t.queued_at, t.granted_at,
           t.state <> 'quarantined' and t.intent::jsonb ->> 'upper_bound_usd' is null as unbounded
      from control.ticket t where t.key_id = $1::uuid and t.session_id = $2::text
), work as (
    select count(*) as live_attempts, coalesce(sum(l.reserved_usd), 0) as reserved_usd,
           count(*) filter (where l.unbounded) as unbounded_reserved, max(l.granted_at) as last_at,
           min(l.granted_at) as first_at
      from live l
)
select s.*, w.live_attempts, w.reserved_usd, w.unbounded_reserved,
       least((select i.granted_at from control.invocation i where i.session_id = $2::text and i.key_id = $1::uuid
               order by i.granted_at limit 1), w.first_at) as first_attempt_at,
       greatest((select i.granted_at from control.invocation i where i.session_id = $2::text and i.key_id = $1::uuid
                  order by i.granted_at desc limit 1), w.last_at) as last_attempt_at,
       (select b.own_usd from control.session_budget b where b.key_id = $1::uuid and b.session_id = $2::text) as own_usd,
       (select b.set_usd from control.session_budget b where b.key_id = $1::uuid and b.session_id = $2::text) as set_usd,
       (select k.budget_session_usd from control.key_limit k where k.key_id = $1::uuid) as key_usd,
       (select coalesce(jsonb_agg(to_jsonb(f) - 'unbounded'), '[]')::text
          from (select l.* from live l order by l.queued_at, l.ticket_id limit 100) f) as live
  from sums s, work w
