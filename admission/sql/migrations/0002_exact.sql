-- Floors, allowances, fences, groups of several endpoints, a clock that never returns. An attempt is open while its
-- ticket lives; its row is written once, with its end.

do $$
declare
    f regprocedure;
begin
    -- What has a new version or a new table under it. None is there when the database is new.
    for f in select p.oid::regprocedure from pg_proc p
              where p.pronamespace = 'control'::regnamespace
                and p.proname in ('acquire_v1', 'rescan_v1', 'settle_v1', 'settle_attempts_v1', 'judge_v1', 'decide_v1',
                                  'abandon_v1', 'renew_v1', 'bury_v1', 'overdue_v1', 'configure_v1', 'limits_hash_v1',
                                  'reconcile_v1', 'open_breaker_v1', 'queue_is_due_v1', 'ahead_v1', 'wait_reason_v1')
    loop
        execute format('drop function %s', f);
    end loop;
end $$;

-- What is known of the store itself, in one row that only heartbeats and a changed timeline write.
create table control.store (
    singleton boolean primary key default true check (singleton),
    -- Added to the server's clock, so that a step of it brings nothing back, freezes nothing and ends nothing early.
    ahead interval not null default '0',
    -- How many steps were made up for.
    steps bigint not null default 0,
    timeline text not null,
    system_identifier text,
    -- Another timeline may have forgotten grants: nothing is granted before what they held has ended.
    closed_until timestamptz
);
insert into control.store (timeline) values (left(pg_walfile_name(pg_current_wal_insert_lsn()), 8));

-- Which group an endpoint belongs to. The newest first seen is in force.
create table control.endpoint (
    endpoint text primary key,
    group_id text not null,
    configuration_version bigint not null
);

alter table control.capacity_group
    add column endpoints text[] not null default '{}',
    add column quarantine_headroom integer not null default 0 check (quarantine_headroom >= 0),
    -- Upper bounds of the rows that wait: raised and lowered under the lock, and counted anew before anybody is turned
    -- away. Occupancy is never taken from a counter.
    add column waiting integer not null default 0,
    add column waiting_batch integer not null default 0,
    add column waiting_counted_at timestamptz not null default '-infinity',
    -- When transient failures happened, within the window.
    add column failed_at timestamptz[] not null default '{}',
    -- After the breaker has closed: how many may run at once, doubled with each good answer. Null: as many as the limit.
    add column ramp integer,
    -- Grants out of the queue, for the expected wait: halved as they age.
    add column served real not null default 0,
    add column served_since timestamptz not null default clock_timestamp(),
    drop column failures,
    drop column failures_since;
update control.capacity_group set endpoints = array[group_id];
insert into control.endpoint select group_id, group_id, configuration_version from control.capacity_group;

-- Limits beside the concurrency of the group, of one model or (model '') of the whole group. Rates are buckets that
-- hold a minute's worth and fill continuously.
create table control.allowance (
    group_id text not null,
    model text not null,
    concurrency integer check (concurrency >= 0),
    requests_per_minute integer check (requests_per_minute > 0),
    tokens_per_minute bigint check (tokens_per_minute > 0),
    requests_left double precision not null default 0,
    tokens_left double precision not null default 0,
    filled_at timestamptz not null,
    primary key (group_id, model)
) with (fillfactor = 50);

-- What a provider has said of a credential and (model '' for all) a model: not before then.
create table control.floor (
    group_id text not null,
    credential text not null,
    model text not null,
    kind text not null check (kind in ('rate_limit', 'unavailable')),
    since timestamptz not null,
    until timestamptz not null,
    -- Rate limits in a row that did not say for how long.
    strikes integer not null default 0,
    primary key (group_id, credential, model, kind)
) with (fillfactor = 50);

-- The newest executor seen of each run.
create table control.fence (
    key_id uuid not null,
    scope_id text not null,
    run_id text not null,
    number bigint not null,
    seen_at timestamptz not null,
    primary key (key_id, scope_id, run_id)
);
create index fence_seen on control.fence (seen_at);

-- Checked by what writes it; a lookup in the group's row for each ticket costs more than it guards.
alter table control.ticket drop constraint ticket_group_id_fkey;
alter table control.ticket
    add column endpoint text not null default '',
    add column credential text not null default '',
    add column tokens bigint not null default 0 check (tokens >= 0),
    add column day date,
    add column scope_id text,
    add column run_id text,
    add column fence bigint,
    alter column intent type text using intent::text;
update control.ticket t set endpoint = t.group_id, day = (select a.day from control.attempt a where a.ticket_id = t.ticket_id);
-- All slots of a group have one key in the index. Merged into one entry the dead among them could not be marked as dead,
-- and each count would visit all of them again.
drop index control.ticket_slots;
create index ticket_slots on control.ticket (group_id) with (deduplicate_items = off) where state <> 'queued';
create index ticket_heads on control.ticket (group_id, class, credential, model, number)
    with (deduplicate_items = off) where state = 'queued';
-- Only for the question it answers. Small and never read in order, it would look cheap to a planner that wants any row
-- that waits in a group, and each such question would read all that wait. A query that means it says `> '-infinity'`.
create index ticket_overdue on control.ticket (group_id, queue_deadline)
    where state = 'queued' and queue_deadline > '-infinity';
create index ticket_quarantined_debit on control.ticket (key_id, debit_id) where state = 'quarantined';
create index ticket_run on control.ticket (key_id, scope_id, run_id) where fence is not null;

delete from control.attempt a
 where a.state = 'open' and exists (select from control.ticket t where t.ticket_id = a.ticket_id);
update control.attempt set state = 'unknown' where state = 'open';
drop index control.attempt_open;
alter table control.attempt
    drop constraint attempt_state_check,
    add constraint attempt_state_check check (state in ('charged', 'zero', 'unknown')),
    drop column intent;
