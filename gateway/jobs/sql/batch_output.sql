-- An output of a batch that is over: its jobs that succeeded, or the others. It does not outlive the first of them.
-- $1: file id, $2: key, $3: filename, $4: bytes, $5: batch, $6: those that did not succeed, $7: when the first of them
-- goes, $8: seconds after which it goes anyhow (null: none), $9 and $10: see content.time_v1.
insert into content.file (
    file_id, key_id, filename, purpose, state, bytes, batch_id, failures, created_at, expires_at
)
select
    $1, $2, $3, 'batch_output', 'ready', $4, $5, $6, clock.wall,
    least($7::timestamptz, clock.now + make_interval(secs => $8::float8))
from content.time_v1($9, $10) as clock
