-- The attempts of a debit with what the ledger last wrote of each. $1 key, $2 debit.
select a.ticket_id, a.attempt, a.state, a.group_id, a.granted_at, a.day,
       (a.intent || coalesce(jsonb_strip_nulls(to_jsonb(i) || jsonb_build_object(
           'usd', i.usd::text, 'upper_bound_usd', i.upper_bound_usd::text)), '{}'))::text as facts
  from control.attempt a
  left join lateral (
      select * from control.invocation i
       where i.granted_at = a.granted_at and i.ticket_id = a.ticket_id
       order by i.correction desc limit 1) i on true
 where a.key_id = $1 and a.debit_id = $2
 order by a.attempt
