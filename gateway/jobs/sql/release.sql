-- Jobs that were told to come back later, and wait for a capacity group, are due: an operator has reset it.
-- $1: the group, $2: how many at most, $3 and $4: see content.time_v1.
with clock as materialized (select now from content.time_v1($3, $4))
update content.job as job
set not_before = clock.now, wait_reason = null, wait_groups = null
from clock
where job.status = 'queued' and job.job_id = any (array(
    select waits.job_id
    from content.job as waits
    where
        waits.status = 'queued' and waits.wait_groups is not null and waits.not_before > (select now from clock)
        and $1::text = any (waits.wait_groups)
    order by waits.not_before
    limit $2::int
    for update))
returning job.job_id
