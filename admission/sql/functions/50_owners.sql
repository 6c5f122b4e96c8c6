-- renew_v1: registers an owner or its heartbeat. Answers the milliseconds it now lives, or null where it had lapsed:
-- a lapsed incarnation stays dead, and its process must begin again as another. The process itself, which holds no
-- ticket, is heard of with every heartbeat and may come back.

create or replace function control.renew_v1(
    p_owner uuid, p_process uuid, p_ttl_ms integer, p_first boolean, p_host text, p_pid integer
)
returns bigint
language plpgsql as $$
declare
    v_now timestamptz := clock_timestamp();
    v_expires timestamptz;
begin
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
    return (extract(epoch from v_expires - clock_timestamp()) * 1000)::bigint;
end $$;

-- Declares owners dead that are proven to be: their process is gone. Their groups are answered, to be advanced.
create or replace function control.bury_v1(p_owner uuid[]) returns table (group_id text)
language plpgsql as $$
#variable_conflict use_column
begin
    delete from control.owner o where o.owner_id = any (p_owner);
    delete from control.ticket t where t.owner_id = any (p_owner) and t.state = 'queued';
    update control.reclaim set not_before = clock_timestamp() where cardinality(p_owner) > 0 and not exists (
        select from control.ticket t join control.owner o on o.owner_id = t.owner_id
         where o.expires_at <= clock_timestamp());
    return query select distinct t.group_id from control.ticket t where t.owner_id = any (p_owner);
end $$;

-- The groups in which time alone has changed something that nobody has acted on. Owners long gone are forgotten.
create or replace function control.overdue_v1() returns table (group_id text)
language plpgsql as $$
#variable_conflict use_column
declare
    v_now timestamptz := clock_timestamp();
begin
    delete from control.owner o
     where o.expires_at < v_now - interval '1 day'
       and not exists (select from control.ticket t where t.owner_id = o.owner_id);
    delete from control.ticket t where t.ticket_id in (
        select q.ticket_id from control.ticket q
         where q.state = 'queued' and q.owner_id not in (select o.owner_id from control.owner o where o.expires_at > v_now)
           and control.owner_is_dead_v1(q.owner_id, v_now)
         limit 1000 for update skip locked);
    return query
        select distinct t.group_id from control.ticket t
         where t.state <> 'queued'
           and (t.quarantined_until <= v_now or t.hard_deadline <= v_now or t.grant_expires_at <= v_now
                or control.owner_is_dead_v1(t.owner_id, v_now));
end $$;
