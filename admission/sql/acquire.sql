-- Enqueue and grant in one group. $1 group, $2 owner, $3 unconfirmed grant ms, $4 zone, then one array a column.
select ticket_id, answer, owner_id, generation, probe, granted_at, day, remaining_ms, ahead, wait_reason, wait_ms
  from control.acquire_v1($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15, $16::jsonb[])
