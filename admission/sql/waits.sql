-- Why these debits wait. $1 debits.
select t.debit_id, t.group_id, control.wait_reason_v1(t.group_id) as reason,
       control.ahead_v1(t.group_id, t.class, t.number) as ahead
  from control.ticket t
 where t.state = 'queued' and t.debit_id = any ($1)
