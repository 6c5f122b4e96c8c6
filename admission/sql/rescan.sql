-- Confirm grants and read positions. $1 owner, $2 zone, $3 the tickets that wait, $4 their groups.
select ticket_id, answer, owner_id, generation, probe, granted_at, day, remaining_ms, ahead, wait_reason, wait_ms
  from control.rescan_v1($1, $2, $3, $4)
