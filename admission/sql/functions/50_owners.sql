-- renew_v2: registers an owner or its heartbeat. Answers the milliseconds it now lives, or null where it had lapsed:
-- a lapsed incarnation stays dead, and its process must begin again as another. The process itself, which holds no
-- ticket, is heard of with every heartbeat and may come back.
--
-- It also keeps the store's time, and answers it: the process sends it with the time since, by its own steady clock, with
-- whatever it asks until the next heartbeat.

create or replace function control.renew_v2(
    p_owner uuid, p_process uuid, p_ttl_ms integer, p_first boolean, p_host text, p_pid integer, p_hold_ms bigint,
    p_clock timestamptz, p_steps bigint, p_elapsed_ms bigint, p_forward_ms bigint
)
returns table (lives_ms bigint, clock timestamptz, steps bigint)
language plpgsql as $$
#variable_conflict use_column
declare
    -- Before the wait for locks.
    v_entered constant timestamptz := clock_timestamp();
    v_now timestamptz;
    v_expires timestamptz;
    v_system text;
begin
    perform control.close_store_v1(p_hold_ms);
    if p_first then
        v_system := (select c.system_identifier::text from pg_control_system() c);
        update control.store s
           set system_identifier = v_system,
               closed_until = case when s.system_identifier is null then s.closed_until
                                   else clock_timestamp() + s.ahead + p_hold_ms * interval '1 ms' end
         where s.system_identifier is distinct from v_system;
    end if;
    v_now := control.keep_time_v2(p_clock, p_steps, p_elapsed_ms, p_forward_ms, v_entered);
    -- No longer than that: said by a clock that had leapt and was made up for since, it would be for as long as the leap.
    update control.reclaim set not_before = v_now + p_ttl_ms * interval '1 ms'
     where not_before > v_now + p_ttl_ms * interval '1 ms';
    if p_first then
        -- Nobody was heard of: it may have been the store that was away, so nobody is declared dead for one TTL more.
        if not exists (select from control.owner o where o.expires_at > v_now)
           and exists (select from control.owner) then
            update control.reclaim set not_before = v_now + p_ttl_ms * interval '1 ms'
             where not_before < v_now and exists (
                select from control.ticket t join control.owner o on o.owner_id = t.owner_id and o.expires_at <= v_now);
        end if;
        insert into control.owner (owner_id, expires_at, host, pid)
        values (p_owner, v_now + p_ttl_ms * interval '1 ms', p_host, p_pid)
        on conflict (owner_id) do nothing;
        select o.expires_at into v_expires from control.owner o where o.owner_id = p_owner;
    else
        update control.owner o set expires_at = v_now + p_ttl_ms * interval '1 ms'
         where o.owner_id = p_owner and o.expires_at > v_now
        returning o.expires_at into v_expires;
    end if;
    insert into control.owner as o (owner_id, expires_at, host, pid)
    values (p_process, v_now + p_ttl_ms * interval '1 ms', p_host, p_pid)
    on conflict (owner_id) do update set expires_at = excluded.expires_at;
    -- The time it is now, unless the clock was set since: that would be believed.
    return query select (extract(epoch from v_expires - t.told) * 1000)::bigint, t.told, t.steps
                   from (select case when control.is_off_v1(c.now - v_now, p_forward_ms) then v_now else c.now end as told,
                                c.steps
                           from (select clock_timestamp() + s.ahead as now, s.steps from control.store s offset 0) c
                         offset 0) t;
end $$;

-- Declares owners dead that are proven to be: their process is gone. Their groups are answered, to be advanced.
drop function if exists control.bury_v2(uuid[]);

create or replace function control.bury_v2(
    p_owner uuid[], p_clock timestamptz default null, p_steps bigint default 0, p_elapsed_ms bigint default 0,
    p_forward_ms bigint default 0
) returns table (group_id text)
language plpgsql as $$
#variable_conflict use_column
declare
    v_now constant timestamptz := control.keep_time_v2(p_clock, p_steps, p_elapsed_ms, p_forward_ms, null);
begin
    delete from control.owner o where o.owner_id = any (p_owner);
    delete from control.ticket t where t.owner_id = any (p_owner) and t.state = 'queued';
    update control.reclaim set not_before = v_now where cardinality(p_owner) > 0 and not exists (
        select from control.ticket t join control.owner o on o.owner_id = t.owner_id where o.expires_at <= v_now);
    return query select distinct t.group_id from control.ticket t where t.owner_id = any (p_owner);
end $$;

-- The groups in which time alone has changed something that nobody has acted on. What is long over is forgotten.
drop function if exists control.overdue_v2();

create or replace function control.overdue_v2(
    p_clock timestamptz default null, p_steps bigint default 0, p_elapsed_ms bigint default 0,
    p_forward_ms bigint default 0
) returns table (group_id text)
language plpgsql as $$
#variable_conflict use_column
declare
    v_now constant timestamptz := control.keep_time_v2(p_clock, p_steps, p_elapsed_ms, p_forward_ms, null);
    -- No index is asked for what may change from row to row.
    v_forgotten timestamptz := clock_timestamp() - interval '30 days';
begin
    delete from control.owner o
     where o.expires_at < v_now - interval '1 day'
       and not exists (select from control.ticket t where t.owner_id = o.owner_id);
    delete from control.floor f where f.until < v_now - interval '1 day';
    delete from control.fence f where f.seen_at < v_forgotten;
    delete from control.ticket t where t.ticket_id = any (array(
        select q.ticket_id from control.ticket q
         where q.state = 'queued' and q.owner_id not in (select o.owner_id from control.owner o where o.expires_at > v_now)
           and control.owner_is_dead_v1(q.owner_id, v_now)
         limit 1000 for update skip locked));
    return query
        select distinct t.group_id from control.ticket t
         where t.state <> 'queued'
           and (t.quarantined_until <= v_now or t.hard_deadline <= v_now or t.grant_expires_at <= v_now
                or control.owner_is_dead_v1(t.owner_id, v_now))
        union
        -- Of an owner that lives and has forgotten it.
        select distinct t.group_id from control.ticket t
         where t.state = 'queued' and t.queue_deadline > '-infinity' and t.queue_deadline < v_now - interval '2 s'
        union
        select g.group_id from control.capacity_group g where g.breaker = 'open' and g.cooldown_until <= v_now;
end $$;
