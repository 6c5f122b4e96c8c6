-- Why these debits wait. $1 debits.
select t.debit_id, t.group_id, w.reason, control.ahead_v2(t.group_id, t.class, t.number) as ahead,
       (extract(epoch from w.until - control.now_v1()) * 1000)::bigint as until_ms,
       control.expected_ms_v2(g, t, w.reason, w.until, control.ahead_v2(t.group_id, t.class, t.number),
                              control.now_v1()) as expected_ms
  from control.waiting_v1($1) t
  join control.capacity_group g on g.group_id = t.group_id
  cross join lateral control.wait_reason_v2(g, t.credential, t.model, control.now_v1()) w
