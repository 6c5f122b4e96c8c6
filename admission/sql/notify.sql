-- A hint to these owners. $1 channel, $2 owners. Not worth a write to the disk, under a lock that all who notify share.
select pg_notify($1, o::text)
  from unnest($2::uuid[]) o, (select set_config('synchronous_commit', 'off', true) offset 0) as for_this_transaction
