-- The states of these attempts. One that was never granted is not among them. $1 tickets.
select a.ticket_id, a.state from control.attempt a where a.ticket_id = any ($1::uuid[])
