-- The counters' sums. $1 session or null, $2 day or null for today, $3 key or null for all, $4 the declared zone,
-- $5 the key the session belongs to.
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
)
select w.answer as kind, w.day,
       coalesce(sum(c.charged_usd), 0) as charged_usd,
       coalesce(sum(c.attempts), 0)::bigint as attempts,
       coalesce(sum(c.unknown_attempts), 0)::bigint as unknown_attempts,
       coalesce(sum(c.unknown_upper_bound_usd), 0) as unknown_upper_bound_usd,
       coalesce(sum(c.unbounded_attempts), 0)::bigint as unbounded_attempts,
       coalesce(sum(c.input_tokens), 0)::bigint as input_tokens,
       coalesce(sum(c.output_tokens), 0)::bigint as output_tokens
  from wanted w
  left join control.counter c on c.kind = w.kind and c.name = w.name
 group by w.answer, w.day
