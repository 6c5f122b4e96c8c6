-- All that was written of one attempt: its settlement, then its corrections. $1 the ticket, $2 its key, or null for any.
select i.*
  from control.attempt a
 cross join lateral (
    select * from control.invocation i where i.granted_at = a.granted_at and i.ticket_id = a.ticket_id) i
 where a.ticket_id = $1 and ($2::uuid is null or a.key_id = $2)
 order by i.correction
