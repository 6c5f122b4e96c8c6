-- claim_v1: takes queued jobs that are due, interactive ones first, the models in turn: a large submission for one model
-- does not stand before the others. Nobody else can take them: rows that another claim holds are skipped, and only a queued
-- row is taken. Reads the heads of each model's queue, whatever its length.
create or replace function content.claim_v1(
    p_owner uuid, p_most integer, p_held_models text[], p_held_keys uuid[], p_known timestamptz, p_steps bigint
) returns table (
    job_id uuid, key_id uuid, url text, model text, body text, file_line bytea, options text, claims integer,
    returned integer, runs integer, attempts_allowed integer, attempts integer, outcome text, remaining_s float8,
    background boolean
)
language plpgsql
-- To plan this costs more than to do it. What the plan reads must not depend on how full the table was when it was made.
set plan_cache_mode = force_generic_plan
set enable_sort = off set enable_incremental_sort = off set enable_bitmapscan = off set enable_seqscan = off
set enable_hashjoin = off set enable_mergejoin = off set jit = off
as $$
#variable_conflict use_column
declare
    v_now timestamptz;
    v_wall timestamptz;
begin
    -- A claim need not outlive the server: nothing is done under it before an intent, whose commit takes it along, and where
    -- it was lost the intent finds that it was.
    perform set_config('synchronous_commit', 'off', true);
    select clock.now, clock.wall into v_now, v_wall from content.time_v1(p_known, p_steps) as clock;
    return query
    with recursive model as (
        (select j.model from content.job j where j.status = 'queued' order by j.model limit 1)
        union all
        select (
            select j.model from content.job j where j.status = 'queued' and j.model > m.model order by j.model limit 1
        )
        from model m
        where m.model is not null
    ),
    head as materialized (
        select h.job_id, h.klass, h.place
        from model m
        cross join (values (0::smallint), (1::smallint)) as k (klass)
        cross join lateral (
            select j.job_id, j.klass, row_number() over (order by j.not_before, j.job_id) as place
            from content.job j
            where
                j.status = 'queued' and j.model = m.model and j.klass = k.klass and j.not_before <= v_now
                and j.key_id <> all (p_held_keys)
            order by j.not_before, j.job_id
            -- More than are wanted: another process may be taking the first ones.
            limit 2 * p_most
        ) as h
        where m.model is not null and m.model <> all (p_held_models)
    ),
    wanted as materialized (
        select array(select head.job_id from head order by head.klass, head.place, head.job_id limit 2 * p_most) as ids
    ),
    picked as materialized (
        select job.job_id
        from content.job as job
        where job.job_id = any ((select ids from wanted)::uuid[]) and job.status = 'queued'
        order by array_position((select ids from wanted), job.job_id)
        limit p_most
        for update of job skip locked
    )
    update content.job as job
    set status = 'running', owner = p_owner, claims = job.claims + 1, claimed_at = v_wall, intent_attempt = null,
        wait_reason = null, wait_groups = null
    from picked
    where job.job_id = picked.job_id
    returning
        job.job_id, job.key_id, job.url, job.model, job.body,
        (select text from content.file_line where file_id = job.file_id and file_line.line = job.line),
        job.options, job.claims, job.returned, job.runs, job.attempts_allowed, job.attempts, job.outcome,
        extract(epoch from job.deadline_at - v_now)::float8, job.response_head is not null;
end
$$;
