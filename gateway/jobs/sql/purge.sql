-- Delete jobs past their retention, a few at a time.
-- $1: how many at most.
delete from content.job
where job_id in (
    select job_id
    from content.job
    where expires_at <= (select clock_timestamp())
    order by expires_at
    limit $1::int
    for update skip locked
)
returning job_id
