-- Of the jobs of a batch that did not succeed: how many were taken back, and how many came too late.
-- $1: key, $2: the batch, $3: no job of it has a higher id.
select
    (
        select count(*) from content.job
        where key_id = $1 and status = 'cancelled' and job_id > $2 and job_id <= $3
    )::int as cancelled,
    (
        select count(*) from content.job
        where key_id = $1 and status = 'expired' and job_id > $2 and job_id <= $3
    )::int as expired
