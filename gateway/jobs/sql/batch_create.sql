-- Accept a batch. Repeating it with the same id changes nothing.
-- $1: batch id, $2: key, $3: no job of it has a higher id, $4: input file, $5: endpoint, $6: completion window,
-- $7: the window in seconds, $8: metadata, $9: seconds that outputs are kept, $10 and $11: see content.time_v1,
-- $12: who is told of its end.
insert into content.batch (
    batch_id, key_id, last_job_id, input_file_id, endpoint, completion_window, metadata, output_retention_s, status,
    created_at, deadline_at, webhook_url
)
select $1, $2, $3, $4, $5, $6, $8, $9, 'validating', clock.wall, clock.now + make_interval(secs => $7::float8), $12
from content.time_v1($10, $11) as clock
on conflict (batch_id) do nothing
