-- Confirm grants and read positions. $1 owner, then one array a column: tickets, groups, credentials, models, keys,
-- scopes, runs, fences; and what is known of the time.
select ticket_id, answer, owner_id, group_id, number, generation, probe, judged, granted_at, day, remaining_ms, ahead,
       wait_reason, wait_ms, expected_ms
  from control.rescan_v2($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13)
