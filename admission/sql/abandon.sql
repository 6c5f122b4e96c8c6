-- Take tickets back. $1 tickets, $2 the counters' shard, $3 whether to leave a tombstone; and what is known of the time.
select group_id from control.abandon_v2($1, $2, $3, $4, $5, $6, $7)
