-- End attempts. $1 whether they are judged, $2 the counters' shard, then one array a column, and for how many ms an
-- unavailable credential is left out; and what is known of the time.
select ticket_id, applied, counters, group_id, waiters
  from control.settle_v2($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15,
                         $16, $17, $18, $19, $20)
