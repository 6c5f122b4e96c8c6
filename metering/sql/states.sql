-- The states of these attempts. One that was never granted is not among them. $1 tickets.
select a.ticket_id, a.state from control.attempt a where a.ticket_id = any ($1::uuid[])
union all
select t.ticket_id, 'open' from control.ticket t
 where t.ticket_id = any ($1::uuid[]) and t.state in ('active', 'quarantined')
   and (select true from control.attempt a where a.ticket_id = t.ticket_id) is null
