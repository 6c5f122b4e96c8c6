-- What is known of these attempts, in order. Each is asked for by its ticket, or by key, debit and number. $1 tickets,
-- $2 keys, $3 debits, $4 numbers.
select e.n, coalesce(a.ticket_id, t.ticket_id) as ticket_id,
       coalesce(a.state, case when t.ticket_id is not null then 'open' end) as state, i.usd::text as usd, i.correction
  from unnest($1::uuid[], $2::uuid[], $3::text[], $4::integer[]) with ordinality
       as e (ticket_id, key_id, debit_id, attempt, n)
  left join lateral (
      select o.ticket_id, o.state, o.granted_at from control.attempt o
       where o.ticket_id = e.ticket_id and o.key_id is not null
      union all
      select o.ticket_id, o.state, o.granted_at from control.attempt o
       where e.ticket_id is null and o.key_id = e.key_id and o.debit_id = e.debit_id and o.attempt = e.attempt
       limit 1) a on true
  left join lateral (
      select o.ticket_id from control.ticket o
       where o.ticket_id = e.ticket_id and o.state in ('active', 'quarantined')
      union all
      select o.ticket_id from control.ticket o
       where e.ticket_id is null and o.key_id = e.key_id and o.debit_id = e.debit_id and o.attempt = e.attempt
         and o.state in ('active', 'quarantined')
       limit 1) t on true
  left join lateral (
      select o.usd, o.correction from control.invocation o
       where o.granted_at = a.granted_at and o.ticket_id = a.ticket_id
       order by o.correction desc limit 1) i on true
 order by e.n
