-- A file whose lines are about to come.
-- $1: file id, $2: key, $3: seconds until it is given up, should nothing be heard of it any more,
-- $4 and $5: see content.time_v1.
insert into content.file (file_id, key_id, filename, purpose, state, created_at, expires_at)
select $1, $2, '', 'batch', 'uploading', clock.wall, clock.now + make_interval(secs => $3::float8)
from content.time_v1($4, $5) as clock
