-- jobs_v1: these jobs, each of the key beside it. A foreign one is as absent as one that never was.
create or replace function content.jobs_v1(p_jobs uuid[], p_keys uuid[]) returns setof content.job
language plpgsql stable
-- For a few rows PostgreSQL would plan anew each time, which costs more than to read them.
set plan_cache_mode = force_generic_plan
set enable_seqscan = off set enable_bitmapscan = off set enable_hashjoin = off set enable_mergejoin = off set jit = off
as $$
begin
    return query
    select job.*
    from unnest(p_jobs, p_keys) as asked (job_id, key_id)
    join content.job as job on job.job_id = asked.job_id and job.key_id = asked.key_id;
end
$$;
