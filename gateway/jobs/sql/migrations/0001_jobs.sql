-- Requests accepted now and answered later, with their content. Nothing here refers to another schema: `content` may
-- live in a database of its own.

create schema if not exists content;

create table content.job (
    job_id uuid primary key,
    key_id uuid not null,
    -- The jobs of one submission have the ids that follow it, in line order.
    submission_id uuid not null,
    line integer not null check (line > 0),
    custom_id text,
    url text,
    model text,
    session_id text,
    klass smallint not null check (klass in (0, 1)),
    -- The request as submitted: JSON text. Null on a line that was refused.
    body text,
    options text not null,
    status text not null check (status in ('queued', 'running', 'succeeded', 'failed', 'cancelled', 'expired')),
    created_at timestamptz not null,
    not_before timestamptz not null,
    deadline_at timestamptz not null,
    -- How often it may run to an end that another run could better.
    attempts_allowed integer not null check (attempts_allowed > 0),
    runs integer not null default 0,
    -- Grows with each claim and never shrinks: together with the owner it names one claim for ever.
    claims integer not null default 0,
    -- The claims that were given back in order. The others, the last aside, died with their process.
    returned integer not null default 0,
    owner uuid,
    claimed_at timestamptz,
    -- The attempt about to be sent under the current claim; null: nothing was sent under it.
    intent_attempt integer,
    -- The highest attempt number ever made.
    attempts integer not null default 0,
    wait_reason text,
    result text,
    result_status smallint,
    result_attempt integer,
    outcome text,
    error_code text,
    error_message text,
    error_param text,
    cancel_requested boolean not null default false,
    ended_at timestamptz,
    expires_at timestamptz,
    constraint queued_has_model check (status <> 'queued' or model is not null),
    constraint running_has_owner check (status <> 'running' or (owner is not null and claimed_at is not null)),
    constraint ended_has_times
        check ((status in ('queued', 'running')) = (ended_at is null) and (ended_at is null) = (expires_at is null)),
    constraint success_has_result check (status <> 'succeeded' or result is not null),
    constraint fault_has_code check ((status in ('failed', 'cancelled', 'expired')) = (error_code is not null))
) with (fillfactor = 70, autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 2000);

-- The claim reads only the heads of each model's queue.
create index job_claim on content.job (model, klass, not_before, job_id) where status = 'queued';
create index job_overdue on content.job (deadline_at) where status = 'queued';
create index job_owner on content.job (owner) where status = 'running';
create index job_list on content.job (key_id, job_id);
create index job_status on content.job (key_id, status, job_id);
create index job_session on content.job (key_id, session_id, job_id) where session_id is not null;
create index job_custom on content.job (key_id, custom_id, job_id) where custom_id is not null;
create index job_retention on content.job (expires_at) where expires_at is not null;

-- What an Idempotency-Key stands for. Outlives the jobs.
create table content.submission (
    submission_id uuid primary key,
    key_id uuid not null,
    idempotency_key text not null,
    body_digest bytea not null,
    -- The answer as it was given: JSON text.
    answer text not null,
    created_at timestamptz not null,
    expires_at timestamptz not null,
    unique (key_id, idempotency_key)
);

create index submission_retention on content.submission (expires_at);
