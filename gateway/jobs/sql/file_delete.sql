-- Take a file away, unless a batch still reads it. Its lines go after it.
-- $1: file id, $2: the caller's key, $3 and $4: see content.time_v1.
update content.file as file
set state = 'deleted', expires_at = least(expires_at, clock.now)
from content.time_v1($3, $4) as clock
where
    file_id = $1 and key_id = $2 and state = 'ready'
    and not exists (
        select from content.batch
        where input_file_id = file.file_id and status in ('validating', 'in_progress', 'finalizing', 'cancelling')
    )
returning file_id, batch_id, failures
