-- steps_v1: whatever the runs of one process have come to since it last said so: attempts that are about to be sent,
-- answers that came, jobs that have ended, and jobs that go back to the queue. Each acts only for the claim that holds its
-- job, and a row tells that it did. In this order, since one job may be in several: an answer before the end that needs it.
create or replace function content.steps_v1(
    p_owner uuid, p_retention_s float8, p_known timestamptz, p_steps bigint,
    -- Attempts.
    p_intent_job uuid[], p_intent_claims integer[], p_intent_attempt integer[],
    -- Answers: their bodies, and their status.
    p_answer_job uuid[], p_answer_claims integer[], p_answer_attempt integer[], p_answer_body text[],
    p_answer_status smallint[],
    -- Ends; with an answer, where it could not be stored before.
    p_end_job uuid[], p_end_claims integer[], p_end_status text[], p_end_code text[], p_end_message text[],
    p_end_param text[], p_end_outcome text[], p_end_attempts integer[], p_end_body text[], p_end_body_status smallint[],
    -- Jobs that go back: seconds until each is due again (0: it keeps its place), whether it was given back in order (1)
    -- or lost with its process (0), whether the run counts, why it waits, and for which capacity groups, a JSON array.
    p_back_job uuid[], p_back_claims integer[], p_back_delay_s float8[], p_back_in_order integer[],
    p_back_counts integer[], p_back_reason text[], p_back_outcome text[], p_back_attempts integer[], p_back_groups text[]
) returns table (step text, job_id uuid, claims integer, said text)
language plpgsql
set plan_cache_mode = force_generic_plan
set enable_seqscan = off set enable_bitmapscan = off set enable_hashjoin = off set enable_mergejoin = off set jit = off
as $$
#variable_conflict use_column
declare
    v_now timestamptz;
    v_wall timestamptz;
begin
    if cardinality(p_intent_job) > 0 then
        -- Without a row the attempt must not be sent; nor where its caller has taken the job back.
        return query
        update content.job as job
        set intent_attempt = said.attempt, attempts = greatest(job.attempts, said.attempt)
        from unnest(p_intent_job, p_intent_claims, p_intent_attempt) as said (job_id, claims, attempt)
        where job.job_id = said.job_id and job.status = 'running' and job.owner = p_owner and job.claims = said.claims
        returning 'intent', job.job_id, job.claims, case when job.cancel_requested then 'cancelled' else 'running' end;
    end if;
    if cardinality(p_answer_job) > 0 then
        -- Step one of a job's end: keep the answer, before it is settled.
        return query
        update content.job as job
        set result = said.body, result_status = said.status, result_attempt = said.attempt
        from unnest(p_answer_job, p_answer_claims, p_answer_attempt, p_answer_body, p_answer_status)
            as said (job_id, claims, attempt, body, status)
        where job.job_id = said.job_id and job.status = 'running' and job.owner = p_owner and job.claims = said.claims
        returning 'answer', job.job_id, job.claims, job.status;
    end if;
    if cardinality(p_end_job) = 0 and cardinality(p_back_job) = 0 then
        return;
    end if;
    select clock.now, clock.wall into v_now, v_wall from content.time_v1(p_known, p_steps) as clock;
    if cardinality(p_end_job) > 0 then
        -- Step three of it: the one terminal transition. A second one finds no running row.
        return query
        update content.job as job
        set status = said.status, error_code = said.code, error_message = said.message, error_param = said.param,
            outcome = coalesce(said.outcome, job.outcome), attempts = greatest(job.attempts, said.attempts),
            result = case when said.status = 'succeeded' then coalesce(said.body, job.result) end,
            result_status = case when said.status = 'succeeded' then coalesce(said.body_status, job.result_status) end,
            wait_reason = null, ended_at = v_wall, expires_at = v_now + make_interval(secs => p_retention_s)
        from
            unnest(
                p_end_job, p_end_claims, p_end_status, p_end_code, p_end_message, p_end_param, p_end_outcome,
                p_end_attempts, p_end_body, p_end_body_status
            ) as said (job_id, claims, status, code, message, param, outcome, attempts, body, body_status)
        where job.job_id = said.job_id and job.status = 'running' and job.owner = p_owner and job.claims = said.claims
        returning 'end', job.job_id, job.claims, job.status;
    end if;
    if cardinality(p_back_job) > 0 then
        -- One whose caller took it back in the meantime ends as cancelled instead.
        return query
        update content.job as job
        set status = case when job.cancel_requested then 'cancelled' else 'queued' end,
            owner = null,
            not_before = case
                when said.delay_s > 0 then v_now + make_interval(secs => said.delay_s) else job.not_before
            end,
            returned = job.returned + said.in_order, runs = job.runs + said.counts, intent_attempt = null,
            wait_reason = said.reason,
            wait_groups = nullif(array(select jsonb_array_elements_text(said.groups::jsonb)), '{}'),
            outcome = coalesce(said.outcome, job.outcome), attempts = greatest(job.attempts, said.attempts),
            error_code = case when job.cancel_requested then 'cancelled' end,
            error_message = case when job.cancel_requested then 'the caller took the job back' end,
            ended_at = case when job.cancel_requested then v_wall end,
            expires_at = case when job.cancel_requested then v_now + make_interval(secs => p_retention_s) end
        from
            unnest(
                p_back_job, p_back_claims, p_back_delay_s, p_back_in_order, p_back_counts, p_back_reason,
                p_back_outcome, p_back_attempts, p_back_groups
            ) as said (job_id, claims, delay_s, in_order, counts, reason, outcome, attempts, groups)
        where job.job_id = said.job_id and job.status = 'running' and job.owner = p_owner and job.claims = said.claims
        returning 'back', job.job_id, job.claims, job.status;
    end if;
end
$$;
