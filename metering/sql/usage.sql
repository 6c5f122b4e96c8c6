-- The counters' sums, and what attempts at work can still cost, in one snapshot. $1 session or null, $2 day or null for
-- today, $3 key or null for all, $4 the declared zone, $5 the key the session belongs to.
with asked as (
    select coalesce($2::date, (clock_timestamp() at time zone $4)::date) as day
), wanted as (
    select 'session' as answer, 'session' as kind, $5::uuid || '/' || $1::text as name, null::date as day
     where $1::text is not null
    union all
    select 'day', case when $3::uuid is null then 'day' else 'key_day' end, coalesce($3::uuid || '/', '') || a.day, a.day
      from asked a
    union all
    select 'total', case when $3::uuid is null then 'total' else 'key' end, coalesce($3::uuid::text, ''), null
), at_work as materialized (
    select t.key_id, t.day, i.intent ->> 'session_id' as session_id, (i.intent ->> 'upper_bound_usd')::numeric as bound_usd
      from control.ticket t cross join lateral (select t.intent::jsonb as intent) i
     where t.state <> 'queued' and t.state in ('active', 'quarantined')
       and (select true from control.attempt a where a.ticket_id = t.ticket_id) is null
)
select w.answer as kind, w.day, c.*, r.*
  from wanted w
 cross join lateral (
    select coalesce(sum(c.charged_usd), 0) as charged_usd,
           coalesce(sum(c.attempts), 0)::bigint as attempts,
           coalesce(sum(c.unknown_attempts), 0)::bigint as unknown_attempts,
           coalesce(sum(c.unknown_upper_bound_usd), 0) as unknown_upper_bound_usd,
           coalesce(sum(c.unbounded_attempts), 0)::bigint as unbounded_attempts,
           coalesce(sum(c.input_tokens), 0)::bigint as input_tokens,
           coalesce(sum(c.output_tokens), 0)::bigint as output_tokens
      from control.counter c where c.kind = w.kind and c.name = w.name) c
 cross join lateral (
    select count(*) as reserved_attempts, coalesce(sum(t.bound_usd), 0) as reserved_usd,
           count(*) filter (where t.bound_usd is null) as unbounded_reserved
      from at_work t
     where case w.answer when 'session' then t.key_id = $5 and t.session_id = $1
                         when 'day' then t.day = w.day and ($3 is null or t.key_id = $3)
                         else $3 is null or t.key_id = $3 end) r
