-- The attempts of debits with what the ledger last wrote of each; one that is open has its intent. $1 key, $2 debits.
select a.debit_id, a.ticket_id, a.attempt, a.state, a.group_id, a.granted_at, a.day,
       coalesce(jsonb_strip_nulls(to_jsonb(i) || jsonb_build_object(
           'usd', i.usd::text, 'upper_bound_usd', i.upper_bound_usd::text)), '{}')::text as facts
  from control.attempt a
  left join lateral (
      select * from control.invocation i
       where i.granted_at = a.granted_at and i.ticket_id = a.ticket_id
       order by i.correction desc limit 1) i on true
 where a.key_id = $1 and a.debit_id = any($2::text[])
union all
select t.debit_id, t.ticket_id, t.attempt, 'open', t.group_id, t.granted_at, t.day, t.intent
  from control.ticket t
 where t.key_id = $1 and t.debit_id = any($2::text[]) and t.state in ('active', 'quarantined')
   and (select true from control.attempt a where a.ticket_id = t.ticket_id) is null
 order by debit_id, attempt
