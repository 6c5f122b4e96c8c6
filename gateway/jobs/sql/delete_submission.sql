-- Delete some of the ended jobs of a submission and their content.
-- $1: the caller's key, $2: after this id, $3: up to this id, $4: how many at most.
delete from content.job
where job_id in (
    select job_id
    from content.job
    where
        key_id = $1 and job_id > $2 and job_id <= $3
        and status in ('succeeded', 'failed', 'cancelled', 'expired')
    limit $4::int
    for update skip locked
)
returning job_id
