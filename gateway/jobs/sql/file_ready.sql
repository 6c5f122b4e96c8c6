-- All lines of a file are there: from now on its caller sees it. No row is returned when it was given up meanwhile.
-- $1: file id, $2: filename, $3: bytes, $4: seconds that it is kept, $5 and $6: see content.time_v1.
update content.file
set state = 'ready', filename = $2, bytes = $3, expires_at = clock.now + make_interval(secs => $4::float8)
from content.time_v1($5, $6) as clock
where file_id = $1 and state in ('uploading', 'ready')
returning file_id
