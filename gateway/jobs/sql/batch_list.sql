-- A page of one key's batches, the newest first.
-- $1: key, $2: before this id, $3: page size, $4: of this endpoint alone (null: any).
select
    batch_id, key_id, last_job_id, input_file_id, endpoint, completion_window, metadata, status, errors, total,
    completed, failed, usage, output_file_id, error_file_id, created_at, deadline_at, in_progress_at, finalizing_at,
    cancelling_at, ended_at, (select ahead from control.store) as ahead
from content.batch
where key_id = $1 and batch_id < $2 and ($4::text is null or endpoint = $4)
order by batch_id desc
limit $3::int
