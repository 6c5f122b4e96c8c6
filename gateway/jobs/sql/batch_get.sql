-- One batch of one key. A foreign one is as absent as one that never was.
-- $1: batch id, $2: the caller's key.
select
    batch_id, key_id, last_job_id, input_file_id, endpoint, completion_window, metadata, status, errors, total,
    completed, failed, usage, output_file_id, error_file_id, created_at, deadline_at, in_progress_at, finalizing_at,
    cancelling_at, ended_at, (select ahead from control.store) as ahead
from content.batch
where batch_id = $1 and key_id = $2
