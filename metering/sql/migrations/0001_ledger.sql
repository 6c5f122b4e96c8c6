-- What every attempt used and cost, and the counters raised with it.

-- One row per settlement of an attempt, and one more for each correction. Rows are never edited. Partitioned by month
-- of grant, so that history is dropped by month; what makes a settlement unique is the attempt row, which is not.
create table control.invocation (
    ticket_id uuid not null,
    -- 0 is the settlement; a correction counts on.
    correction smallint not null,
    granted_at timestamptz not null,
    settled_at timestamptz not null,
    day date not null,
    key_id uuid not null,
    debit_id text not null,
    attempt integer not null,
    request_id text,
    transport text,
    session_id text,
    scope_id text,
    run_id text,
    step_id text,
    skill text,
    skill_version text,
    tool text,
    role text,
    tags jsonb,
    class text,
    group_id text not null,
    requested_model text,
    route_id text,
    provider text,
    upstream_model text,
    protocol text,
    served_model text,
    provider_request_id text,
    is_fallback boolean,
    fallback_index smallint,
    failed_provider text,
    failure_reason text,
    left_out jsonb,
    input_total bigint,
    cache_read bigint,
    cache_write_5m bigint,
    cache_write_1h bigint,
    output_total bigint,
    reasoning bigint,
    state text not null check (state in ('charged', 'zero', 'unknown')),
    usd numeric(22, 12) check (usd >= 0 and usd < 1e9),
    upper_bound_usd numeric(22, 12) check (upper_bound_usd >= 0 and upper_bound_usd < 1e9),
    cost_reason text,
    price_version text,
    status text not null
        check (status in ('success', 'error', 'timeout', 'cancelled', 'not_dispatched', 'unknown')),
    ended text,
    error_class text,
    error_code text,
    http_status smallint,
    created_at timestamptz,
    queued_ms integer,
    first_byte_ms integer,
    total_ms integer,
    primary key (granted_at, ticket_id, correction),
    constraint charged_has_usd check ((state = 'unknown') = (usd is null))
) partition by range (granted_at);

create table control.invocation_default partition of control.invocation default;
create index invocation_key on control.invocation (key_id, granted_at);
create index invocation_debit on control.invocation (debit_id);

-- Sums by what they count. Sharded by process, so that processes do not wait for each other; a reader adds the shards.
create table control.counter (
    kind text not null check (kind in ('total', 'day', 'session', 'key', 'key_day')),
    name text not null,
    shard smallint not null,
    charged_usd numeric(28, 12) not null default 0,
    attempts bigint not null default 0,
    unknown_attempts bigint not null default 0,
    unknown_upper_bound_usd numeric(28, 12) not null default 0,
    -- Unknown attempts for which no bound can be given.
    unbounded_attempts bigint not null default 0,
    input_tokens bigint not null default 0,
    output_tokens bigint not null default 0,
    primary key (kind, name, shard)
) with (fillfactor = 50);

-- One settlement on its way into the ledger.
create type control.ledger_line as (
    ticket_id uuid,
    was text,
    state text,
    granted_at timestamptz,
    day date,
    key_id uuid,
    debit_id text,
    attempt integer,
    group_id text,
    facts jsonb
);
