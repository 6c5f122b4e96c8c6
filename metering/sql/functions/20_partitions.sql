-- The months of the ledger: they are made ahead, and dropped whole when they are old enough.
--
-- A lock on the whole ledger holds up every settlement. So it is the last that is taken, by who has all the others and
-- all its work done, and it is waited for no longer than a settlement may be late: who does not get it in that time
-- fails with lock_not_available, has changed nothing, and tries again later.

-- The partitions of this month and the two after it. Rows that came before their partition was there lie in the default
-- one; they are moved where they are few. A month of which it has many stays there: to move those takes long, and
-- meanwhile nobody could settle.
create or replace function control.partition_invocations_v1() returns void
language plpgsql
set lock_timeout = '20ms'
as $$
declare
    v_month date;
    v_name text;
    v_from timestamptz;
    v_to timestamptz;
begin
    if not pg_try_advisory_xact_lock(hashtext('tollbridge.partition')) then
        return;  -- another one is about it
    end if;
    for v_month in select (date_trunc('month', clock_timestamp() at time zone 'UTC') + n * interval '1 month')::date
                     from generate_series(0, 2) n
    loop
        v_name := 'invocation_' || to_char(v_month, 'YYYY_MM');
        v_from := v_month::timestamp at time zone 'UTC';
        v_to := (v_month + interval '1 month') at time zone 'UTC';
        continue when to_regclass('control.' || v_name) is not null or to_regclass('control.' || v_name || '_kept') is not null
            or (select count(*) from (select from control.invocation_default i
                                       where i.granted_at >= v_from and i.granted_at < v_to limit 1001) few) > 1000;
        execute format('create table control.%I (like control.invocation including all, '
                       'constraint of_its_month check (granted_at >= %L and granted_at < %L))', v_name, v_from, v_to);
        lock table only control.invocation_default in access exclusive mode;
        lock table only control.invocation in share update exclusive mode;
        execute format('with moved as (delete from control.invocation_default i where i.granted_at >= %L and i.granted_at < %L '
                       'returning i.*) insert into control.%I select * from moved', v_from, v_to, v_name);
        execute format('alter table control.invocation attach partition control.%I for values from (%L) to (%L)',
                       v_name, v_from, v_to);
        execute format('alter table control.%I drop constraint of_its_month', v_name);
    end loop;
end $$;

-- Drops the oldest month that lies wholly before the last p_keep_days days, if there is one. What is known of attempts
-- whose cost is still unknown stays, as the month's partition under another name: a late correction is laid over it. That
-- one goes when none of its attempts is unknown any more.
--
-- p_host is the time of who asks. Where the database's is another by more than a day nothing is dropped: one of the two
-- is wrong. Neither is a month of which a ticket is younger than the days that are kept by the time of the process that
-- made it: its rows were written while the clock of the database was behind.
--
-- Answers `nothing`, `clock`, `busy`, `young`, or `dropped` with the month, about how many rows it had, and how many stay.
create or replace function control.drop_invocations_v1(
    p_keep_days integer, p_host timestamptz, out answer text, out month date, out had bigint, out kept bigint
)
language plpgsql
set lock_timeout = '20ms'
as $$
declare
    v_cut timestamptz;
    v_leaf text;
    v_kept text;
    v_from timestamptz;
    v_to timestamptz;
    v_young boolean;
begin
    if not pg_try_advisory_xact_lock(hashtext('tollbridge.retention')) then
        answer := 'busy';
        return;
    end if;
    if abs(extract(epoch from clock_timestamp() - p_host)) > 86400 then
        answer := 'clock';
        return;
    end if;
    v_cut := date_trunc('month', (clock_timestamp() - p_keep_days * interval '1 day') at time zone 'UTC') at time zone 'UTC';
    answer := 'nothing';
    for v_leaf, month, had in
        select c.relname, to_date(substr(c.relname, 12, 7), 'YYYY_MM'), greatest(c.reltuples, 0)::bigint
          from pg_inherits h join pg_class c on c.oid = h.inhrelid
         where h.inhparent = 'control.invocation'::regclass and c.relname ~ '^invocation_\d{4}_\d{2}(_kept)?$'
         order by c.relname
    loop
        v_from := month::timestamp at time zone 'UTC';
        v_to := (month + interval '1 month') at time zone 'UTC';
        exit when v_to > v_cut;
        -- What was kept of a month before.
        continue when v_leaf like '%\_kept'
            and exists (select from control.attempt a
                         where a.state = 'unknown' and a.granted_at >= v_from and a.granted_at < v_to);
        execute format('select exists (select from control.%I i where i.ticket_id > %L::uuid and not i.ticket_id > %L::uuid)',
                       v_leaf, control.ticket_of_v1(v_cut), control.ticket_of_v1(p_host + interval '1 day'))
           into v_young;
        if v_young then
            answer := 'young';
            continue;
        end if;
        answer := 'dropped';
        exit;
    end loop;
    if answer <> 'dropped' then
        month := null;
        had := null;
        return;
    end if;

    v_kept := 'invocation_' || to_char(month, 'YYYY_MM') || '_kept';
    if v_leaf <> v_kept then
        execute format('create table control.%I (like control.invocation including all, '
                       'constraint of_its_month check (granted_at >= %L and granted_at < %L))', v_kept, v_from, v_to);
        execute format('insert into control.%I select i.* from control.attempt a cross join lateral '
                       '(select * from control.%I i where i.granted_at = a.granted_at and i.ticket_id = a.ticket_id offset 0) i '
                       'where a.state = ''unknown'' and a.granted_at >= %L and a.granted_at < %L',
                       v_kept, v_leaf, v_from, v_to);
    end if;
    -- From here on nobody corrects an attempt of this month; what has changed meanwhile is made up for.
    execute format('lock table only control.%I in access exclusive mode', v_leaf);
    if v_leaf = v_kept then
        if exists (select from control.attempt a
                    where a.state = 'unknown' and a.granted_at >= v_from and a.granted_at < v_to) then
            answer := 'nothing';
            return;
        end if;
        kept := 0;
    else
        execute format('delete from control.%I k where not exists (select from control.attempt a '
                       'where a.state = ''unknown'' and a.granted_at = k.granted_at and a.ticket_id = k.ticket_id)', v_kept);
        execute format('insert into control.%I select i.* from control.attempt a cross join lateral '
                       '(select * from control.%I i where i.granted_at = a.granted_at and i.ticket_id = a.ticket_id offset 0) i '
                       'where a.state = ''unknown'' and a.granted_at >= %L and a.granted_at < %L on conflict do nothing',
                       v_kept, v_leaf, v_from, v_to);
        execute format('select count(*) from control.%I', v_kept) into kept;
    end if;
    lock table only control.invocation_default in access exclusive mode;
    lock table only control.invocation in access exclusive mode;
    execute format('alter table control.invocation detach partition control.%I', v_leaf);
    if kept > 0 then
        execute format('alter table control.invocation attach partition control.%I for values from (%L) to (%L)',
                       v_kept, v_from, v_to);
        execute format('alter table control.%I drop constraint of_its_month', v_kept);
    elsif v_leaf <> v_kept then
        execute format('drop table control.%I', v_kept);
    end if;
    execute format('drop table control.%I', v_leaf);
    -- The days of a zone to the east of UTC begin before its months.
    insert into control.forgotten as f (what, before) values ('log', (v_to at time zone 'UTC')::date + 1)
    on conflict (what) do update set before = greatest(f.before, excluded.before);
end $$;

-- The first ticket of this moment, as `new_id` makes them: 48 bits of milliseconds come first.
create or replace function control.ticket_of_v1(p_at timestamptz) returns uuid
language sql immutable as $$
    select (lpad(to_hex((extract(epoch from p_at) * 1000)::bigint), 12, '0') || '7' || repeat('0', 19))::uuid
$$;

-- Deletes attempts that were settled long ago and whose month is dropped, among the p_most after ticket p_after. Answers
-- where the next look begins, or null where the rest is younger.
--
-- Until then the row refuses a second settlement, and the debit's id a second dispatch. After it a settlement finds neither
-- ticket nor attempt and changes nothing.
create or replace function control.forget_attempts_v1(
    p_keep_days integer, p_after uuid, p_most integer, out deleted bigint, out next uuid
)
language plpgsql
set enable_seqscan = off set enable_hashjoin = off set enable_mergejoin = off
as $$
declare
    v_cut timestamptz;
    v_last uuid;
    v_looked bigint;
begin
    v_cut := date_trunc('month', (clock_timestamp() - p_keep_days * interval '1 day') at time zone 'UTC') at time zone 'UTC';
    with looked as materialized (
        select a.ticket_id, a.granted_at from control.attempt a where a.ticket_id > p_after order by a.ticket_id limit p_most
    ), gone as (
        delete from control.attempt a using looked l
         where a.ticket_id = l.ticket_id and a.state <> 'unknown' and a.granted_at < v_cut
           and a.settled_at < clock_timestamp() - interval '90 days'
           and (select 1 from control.ticket t where t.ticket_id = a.ticket_id) is null
           and (select 1 from control.invocation i where i.granted_at = l.granted_at and i.ticket_id = l.ticket_id limit 1) is null
        returning a.ticket_id
    )
    select (select count(*) from gone), (select count(*) from looked),
           (select l.ticket_id from looked l order by l.ticket_id desc limit 1)
      into deleted, v_looked, v_last;
    if v_looked = p_most and v_last < control.ticket_of_v1(v_cut) then
        next := v_last;
    end if;
end $$;

-- Deletes sums by run, step and tag of days of which no attempt can be in the months that are kept, whichever zone the days
-- are of: p_most names of one kind and day. Those that count an attempt whose cost is unknown stay. Answers the day to go on
-- with, or null where there is none.
create or replace function control.forget_counters_v1(
    p_keep_days integer, p_kind text, p_day date, p_most integer, out deleted bigint, out next date
)
language plpgsql
set enable_seqscan = off
as $$
declare
    v_before date;
    v_names bigint;
begin
    if p_kind not in ('run_day', 'step_day', 'tag_day') then
        raise exception 'sums of kind % are never deleted', p_kind using errcode = 'invalid_parameter_value';
    end if;
    v_before := (date_trunc('month', (clock_timestamp() - p_keep_days * interval '1 day') at time zone 'UTC')
                 - interval '1 day')::date;
    with old as materialized (
        select c.name from control.counter c
         where c.kind = p_kind and c.day = p_day and c.day < v_before
         group by c.name having sum(c.unknown_attempts) = 0 limit p_most
    ), gone as (
        delete from control.counter c using old o where c.kind = p_kind and c.name = o.name
        returning c.name
    )
    select (select count(*) from gone), (select count(*) from old) into deleted, v_names;
    if deleted > 0 then
        insert into control.forgotten as f (what, before) values (p_kind, v_before)
        on conflict (what) do update set before = greatest(f.before, excluded.before);
    end if;
    next := case when v_names = p_most then p_day
                 else (select min(c.day) from control.counter c
                        where c.kind = p_kind and c.day > p_day and c.day < v_before) end;
end $$;
