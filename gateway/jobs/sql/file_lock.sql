-- An input that a batch may be made of. Until the transaction ends nobody can take it away.
-- $1: file id, $2: the caller's key, $3 and $4: see content.time_v1.
select file_id
from content.file
where
    file_id = $1 and key_id = $2 and state = 'ready' and purpose = 'batch'
    and expires_at > (select now from content.time_v1($3, $4))
for share
