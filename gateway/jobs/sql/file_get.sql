-- One file of one key. A foreign one, and one past its retention, is as absent as one that never was.
-- $1: file id, $2: the caller's key, $3 and $4: see content.time_v1.
select
    file_id, filename, purpose, bytes, batch_id, failures, created_at, expires_at,
    (select ahead from control.store) as ahead
from content.file
where file_id = $1 and key_id = $2 and state = 'ready' and expires_at > (select now from content.time_v1($3, $4))
