-- Take queued jobs that are due, interactive ones first. Nobody else can take them: rows that another claim holds are
-- skipped, and only a queued row is taken.
-- $1: this process's incarnation, $2: how many at most.
with clock as materialized (select clock_timestamp() as now),
interactive as materialized (
    select job_id
    from content.job
    where status = 'queued' and klass = 0 and not_before <= (select now from clock)
    order by not_before, job_id
    limit $2::int
    for update skip locked
),
batch as materialized (
    select job_id
    from content.job
    where status = 'queued' and klass = 1 and not_before <= (select now from clock)
    order by not_before, job_id
    limit $2::int - (select count(*) from interactive)
    for update skip locked
)
update content.job as job
set status = 'running', owner = $1, claims = job.claims + 1, claimed_at = clock.now, intent_attempt = null,
    wait_reason = null
from clock, (select job_id from interactive union all select job_id from batch) as picked
where job.job_id = picked.job_id
returning
    job.job_id, job.key_id, job.model, job.body, job.options, job.claims, job.returned, job.runs,
    job.attempts_allowed, job.attempts, job.outcome,
    extract(epoch from job.deadline_at - clock.now)::float8 as remaining_s
