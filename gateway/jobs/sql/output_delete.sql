-- Delete some of the jobs that an output is made from.
-- $1: key, $2: after this id, $3: up to this id, $4: those that did not succeed, $5: how many at most.
delete from content.job
where job_id in (
    select job_id
    from content.job
    where
        key_id = $1 and job_id > $2 and job_id <= $3
        and status = any (
            case when $4::boolean then array['failed', 'cancelled', 'expired'] else array['succeeded'] end
        )
    limit $5::int
    for update skip locked
)
returning job_id
