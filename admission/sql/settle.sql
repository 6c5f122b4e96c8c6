-- End attempts. $1 the group whose breaker may move, or null; $2 the counters' shard; then one array a column.
select ticket_id, applied, counters, group_id, waiters
  from control.settle_v1($1, $2, $3, $4, $5, $6, $7, $8, $9, $10::jsonb[])
