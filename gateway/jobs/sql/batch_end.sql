-- A batch is over. It ends once: no row is returned where its status is not that which it was looked at in.
-- $1: batch id, $2: status, $3: completed, $4: failed, $5: usage, $6: output file, $7: error file, $8: faults of lines,
-- $9: retention in seconds, $10 and $11: see content.time_v1, $12: the status it leaves.
update content.batch
set status = $2, completed = $3, failed = $4, usage = $5, output_file_id = $6, error_file_id = $7, errors = $8,
    ended_at = clock.wall, expires_at = clock.now + make_interval(secs => $9::float8)
from content.time_v1($10, $11) as clock
where batch_id = $1 and status = $12
returning batch_id
