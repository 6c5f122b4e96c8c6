-- The groups in which time alone has changed something. What is known of the time.
select group_id from control.overdue_v2($1, $2, $3, $4)
