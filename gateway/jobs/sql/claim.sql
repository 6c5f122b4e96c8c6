-- Take queued jobs that are due, interactive ones first, the models in turn: a large submission for one model does not
-- stand before the others. Nobody else can take them: rows that another claim holds are skipped, and only a queued row
-- is taken. Reads the heads of each model's queue, whatever its length.
-- $1: this process's incarnation, $2: how many at most, $3: models that are not to be taken from,
-- $4 and $5: see content.time_v1, $6: keys whose jobs are not to be taken.
with recursive clock as materialized (select now, wall from content.time_v1($4, $5)),
model as (
    (select model from content.job where status = 'queued' order by model limit 1)
    union all
    select (select j.model from content.job j where j.status = 'queued' and j.model > m.model order by j.model limit 1)
    from model m
    where m.model is not null
),
head as materialized (
    select h.job_id, h.klass, h.place
    from model m
    cross join (values (0::smallint), (1::smallint)) as k (klass)
    cross join lateral (
        select job_id, klass, row_number() over (order by not_before, job_id) as place
        from content.job
        where status = 'queued' and model = m.model and klass = k.klass and key_id <> all ($6::uuid[]) and not_before <= (select now from clock)
        order by not_before, job_id
        -- More than are wanted: another process may be taking the first ones.
        limit 2 * $2::int
    ) as h
    where m.model is not null and m.model <> all ($3::text[])
),
wanted as materialized (
    select array(select job_id from head order by klass, place, job_id limit 2 * $2::int) as ids
),
picked as materialized (
    select job.job_id
    from content.job as job
    where job.job_id = any ((select ids from wanted)::uuid[]) and job.status = 'queued'
    order by array_position((select ids from wanted), job.job_id)
    limit $2::int
    for update of job skip locked
)
update content.job as job
set status = 'running', owner = $1, claims = job.claims + 1, claimed_at = clock.wall, intent_attempt = null,
    wait_reason = null, wait_groups = null
from clock, picked
where job.job_id = picked.job_id
returning
    job.job_id, job.key_id, job.url, job.model, job.body,
    (select text from content.file_line where file_id = job.file_id and file_line.line = job.line) as file_line,
    job.options, job.claims, job.returned, job.runs, job.attempts_allowed, job.attempts, job.outcome,
    extract(epoch from job.deadline_at - clock.now)::float8 as remaining_s, job.response_head is not null as background
