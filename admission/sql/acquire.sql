-- Enqueue and grant in one group. $1 group, $2 owner, $3 unconfirmed grant ms, $4 the longest hold in ms, $5 zone, $6 what
-- is asked for, as JSON, and what is known of the time: the store's as it was last told, by how many steps, the ms since,
-- and how many it may seem to be ahead.
select ticket_id, answer, owner_id, group_id, number, generation, probe, judged, granted_at, day, remaining_ms, ahead,
       wait_reason, wait_ms, expected_ms, key_limit
  from control.acquire_v3($1, $2, $3, $4, $5, $6, $7, $8, $9, $10)
