-- End attempts that have ended for certain, and whose outcomes move nothing. $1 the counters' shard, then one array a
-- column: tickets, states, records.
select ticket_id, applied, counters, group_id, waiters from control.settle_clean_v1($1, $2, $3, $4)
