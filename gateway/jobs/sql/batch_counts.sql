-- How many jobs of a batch have succeeded, and how many have ended otherwise.
-- $1: key, $2: the batch, $3: no job of it has a higher id.
select
    (
        select count(*) from content.job
        where key_id = $1 and status = 'succeeded' and job_id > $2 and job_id <= $3
    )::int as completed,
    (
        select count(*) from content.job
        where key_id = $1 and status in ('failed', 'cancelled', 'expired') and job_id > $2 and job_id <= $3
    )::int as failed
