-- A page of one key's files, the oldest first.
-- $1: key, $2: after this id, $3: purpose (null: any), $4: page size, $5 and $6: see content.time_v1.
select
    file_id, filename, purpose, bytes, batch_id, failures, created_at, expires_at,
    (select ahead from control.store) as ahead
from content.file
where
    key_id = $1 and file_id > $2 and state = 'ready' and ($3::text is null or purpose = $3)
    and expires_at > (select now from content.time_v1($5, $6))
order by file_id
limit $4::int
