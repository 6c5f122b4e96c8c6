-- Take tickets back. $1 tickets, $2 the counters' shard, $3 whether to leave a tombstone.
select group_id from control.abandon_v2($1, $2, $3)
