-- The groups in which time alone has changed something.
select group_id from control.overdue_v2()
