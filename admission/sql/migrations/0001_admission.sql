-- Who occupies and who waits for each capacity group.

create schema if not exists control;

-- Every set of limits that a group was ever started with. The newest first seen is in force; processes with an older one
-- take the limits that are stored.
create table control.configuration (
    version bigint generated always as identity primary key,
    group_id text not null,
    hash text not null,
    first_seen timestamptz not null default clock_timestamp(),
    unique (group_id, hash)
);

create table control.capacity_group (
    group_id text primary key,
    configuration_version bigint not null,
    concurrency integer not null check (concurrency >= 0),
    queue_bound integer not null check (queue_bound >= 0),
    -- Tickets are numbered under this row's lock: sequence values invert against commit order.
    next_number bigint not null default 1,
    -- Interactive grants made while batch waited, since the last batch grant.
    batch_credit integer not null default 0,
    -- The breaker: ARCHITECTURE.md has its states and what moves it.
    breaker text not null default 'closed' check (breaker in ('closed', 'open', 'half_open')),
    generation bigint not null default 1,
    probe uuid,
    openings integer not null default 0,
    cooldown_until timestamptz,
    failures integer not null default 0,
    failures_since timestamptz,
    failure_threshold integer not null check (failure_threshold > 0),
    failure_window interval not null,
    first_cooldown interval not null,
    longest_cooldown interval not null
) with (fillfactor = 50);

-- One row per process incarnation, kept alive by its heartbeat.
create table control.owner (
    owner_id uuid primary key,
    started_at timestamptz not null default clock_timestamp(),
    expires_at timestamptz not null,
    host text not null,
    pid integer not null
) with (fillfactor = 50);

-- When the store itself was away, every heartbeat is stale: nobody is declared dead before this time.
create table control.reclaim (
    singleton boolean primary key default true check (singleton),
    not_before timestamptz not null
);
insert into control.reclaim (not_before) values (clock_timestamp());

-- Live tickets only: queued, or occupying a slot. Occupancy is a count of these rows, never a counter.
create table control.ticket (
    ticket_id uuid primary key,
    group_id text not null references control.capacity_group,
    number bigint not null,
    class smallint not null,
    model text not null,
    owner_id uuid not null,
    key_id uuid not null,
    debit_id text not null,
    attempt integer not null,
    -- granted: by another process's transaction, not yet confirmed by its owner.
    state text not null check (state in ('queued', 'granted', 'active', 'quarantined')),
    waits_for_cooldown boolean not null,
    execution_limit interval not null,
    isolation interval not null,
    queued_at timestamptz not null,
    queue_deadline timestamptz not null,
    caller_deadline timestamptz,
    intent jsonb not null,
    generation bigint,
    granted_at timestamptz,
    grant_expires_at timestamptz,
    hard_deadline timestamptz,
    quarantined_until timestamptz,
    constraint occupying_has_grant check (state = 'queued' or granted_at is not null),
    constraint active_has_deadline check (state not in ('active', 'quarantined') or hard_deadline is not null),
    constraint quarantine_ends check (state <> 'quarantined' or quarantined_until is not null)
) with (fillfactor = 70, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 2000);

create index ticket_queue on control.ticket (group_id, class, number) where state = 'queued';
create index ticket_slots on control.ticket (group_id) where state <> 'queued';
create index ticket_waiting_debit on control.ticket (debit_id) where state = 'queued';
create index ticket_owner on control.ticket (owner_id);
-- One debit never has two live tickets, its own quarantined attempts aside.
create unique index ticket_debit on control.ticket (key_id, debit_id) where state <> 'quarantined';

-- One row per attempt that was granted, for ever the guard of its single settlement.
create table control.attempt (
    ticket_id uuid primary key,
    -- Null in a tombstone: a ticket given up before its acquire was acknowledged.
    key_id uuid,
    debit_id text,
    attempt integer,
    group_id text,
    owner_id uuid,
    granted_at timestamptz not null,
    day date not null,
    state text not null check (state in ('open', 'charged', 'zero', 'unknown')),
    intent jsonb not null,
    settled_at timestamptz,
    unique (key_id, debit_id, attempt)
) with (fillfactor = 80);

create index attempt_open on control.attempt (owner_id) where state = 'open';
