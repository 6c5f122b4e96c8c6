-- rescan_v2: what became of this owner's waiting tickets. Confirms the grants that other processes made, without the
-- group lock, and reads the positions of the others. A grant from before its breaker opened, or with a floor under its
-- model since, goes back to its place in the queue: open means that nothing is sent. A ticket that is not there any more
-- was let go, here or before: a newer executor of its run came, or its breaker opened, or a floor was put under its model.

create or replace function control.rescan_v2(
    p_owner uuid, p_ticket uuid[], p_group text[], p_credential text[], p_model text[], p_key uuid[], p_scope text[],
    p_run text[], p_fence bigint[], p_clock timestamptz, p_steps bigint, p_elapsed_ms bigint, p_forward_ms bigint
) returns table (
    ticket_id uuid, answer text, owner_id uuid, group_id text, number bigint, generation bigint, probe boolean,
    judged boolean, granted_at timestamptz, day date, remaining_ms bigint, ahead integer, wait_reason text,
    wait_ms bigint, expected_ms bigint
)
language plpgsql
-- What its plans read must not depend on how full the tables were when they were made: in the order of an index, and by
-- an index alone.
set enable_sort = off set enable_incremental_sort = off set enable_bitmapscan = off
as $$
#variable_conflict use_column
declare
    -- Before the wait for locks.
    v_entered constant timestamptz := clock_timestamp();
    v_now timestamptz;
begin
    v_now := control.keep_time_v2(p_clock, p_steps, p_elapsed_ms, p_forward_ms, v_entered);
    -- "Is not distinct from" no index can answer: that of an owner would bring all the tickets it has.
    if control.owner_is_fresh_v1(p_owner, v_now) then
        perform from control.ticket t
          where t.ticket_id = any (p_ticket) and t.owner_id is not distinct from p_owner and t.state = 'granted'
          order by t.ticket_id for update;
        if found then
            v_now := control.keep_time_v2(p_clock, p_steps, p_elapsed_ms, p_forward_ms, v_entered);
            update control.ticket t
               set state = 'active', grant_expires_at = null,
                   hard_deadline = least(v_now + t.execution_limit, t.caller_deadline + t.isolation)
              from control.capacity_group g
             where t.ticket_id = any (p_ticket) and t.owner_id is not distinct from p_owner and t.state = 'granted'
               and t.grant_expires_at > v_now and g.group_id = t.group_id and g.generation = t.generation
               and control.floor_until_v2(t.group_id, t.credential, t.model, v_now) is null;
            update control.ticket t
               set state = 'queued', granted_at = null, grant_expires_at = null, generation = null, day = null
             where t.ticket_id = any (p_ticket) and t.owner_id is not distinct from p_owner and t.state = 'granted'
               and t.grant_expires_at > v_now;
        end if;
    end if;
    -- Who would not wait for as long as this lasts, and is in the queue all the same: it was beyond those whom let_go_v1
    -- looks at, or came back after it. Each owner ends its own, so it costs no more than who asks.
    if exists (select from control.capacity_group g where g.breaker = 'open' and g.cooldown_until > v_now)
       or exists (select from control.floor f where f.until > v_now) then
        delete from control.ticket d where d.ticket_id = any (array(
            select t.ticket_id from control.ticket t
             where t.ticket_id = any (p_ticket) and t.owner_id is not distinct from p_owner and t.state = 'queued'
               and (exists (select from control.capacity_group g
                             where g.group_id = t.group_id and g.breaker = 'open' and g.cooldown_until > v_now
                               and (not t.waits_for_cooldown or t.queue_deadline < g.cooldown_until))
                    or exists (select from control.floor f
                                where f.group_id = t.group_id and f.credential = t.credential
                                  and f.model in ('', t.model) and f.until > v_now
                                  and (f.kind <> 'rate_limit' or not t.waits_for_cooldown or t.queue_deadline < f.until)))
             order by t.ticket_id for update skip locked));
    end if;
    return query
        select t.ticket_id,
               case t.state when 'active' then 'granted' when 'quarantined' then 'ended' else 'queued' end, t.owner_id, t.group_id,
               t.number, t.generation, coalesce(g.probe = t.ticket_id, false),
               g.ramp is not null or coalesce(g.probe = t.ticket_id, false)
                   or exists (select from control.allowance a where a.group_id = t.group_id and a.model in ('', t.model)),
               t.granted_at, t.day, (extract(epoch from t.hard_deadline - v_now) * 1000)::bigint,
               a.ahead, w.reason, (extract(epoch from w.until - v_now) * 1000)::bigint,
               case when w.reason is not null
                    then control.expected_ms_v2(g, t, w.reason, w.until, a.ahead, v_now) end
          from control.ticket t
          join control.capacity_group g on g.group_id = t.group_id
          left join lateral (select control.ahead_v2(t.group_id, t.class, t.number) as ahead
                              where t.state in ('queued', 'granted')) a on true
          left join lateral (select r.* from control.wait_reason_v2(g, t.credential, t.model, v_now) r
                              where t.state in ('queued', 'granted')) w on true
         where t.ticket_id = any (p_ticket) and t.owner_id is not distinct from p_owner;
    return query
        select e.ticket_id,
               case when e.fence < (select f.number from control.fence f
                                     where f.key_id = e.key_id and f.scope_id = e.scope and f.run_id = e.run)
                    then 'owner_fence' when (h.out).kind is not null then 'provider_unavailable' else 'cooldown' end,
               p_owner, e.group_id, null::bigint, null::bigint, null::boolean, null::boolean, null::timestamptz,
               null::date, null::bigint, null::integer,
               case when (h.out).kind is not null then control.floor_cause_v1((h.out).kind)
                    when (h.floor).until >= coalesce(h.cooling, (h.floor).until)
                         then control.floor_cause_v1((h.floor).kind)
                    when h.cooling is not null then 'cooldown' end,
               (select (extract(epoch from greatest(u.until - v_now, interval '100 ms')) * 1000)::bigint
                  from (select greatest((h.floor).until, h.cooling) as until) u
                 where u.until is not null),
               null::bigint
          from unnest(p_ticket, p_group, p_credential, p_model, p_key, p_scope, p_run, p_fence)
               as e (ticket_id, group_id, credential, model, key_id, scope, run, fence)
         cross join lateral (
            select control.last_floor_v1(e.group_id, e.credential, e.model, v_now, false) as floor,
                   control.last_floor_v1(e.group_id, e.credential, e.model, v_now, true) as out,
                   (select g.cooldown_until from control.capacity_group g
                     where g.group_id = e.group_id and g.breaker = 'open') as cooling
            offset 0) h
         where (select 1 from control.ticket t
                 where t.ticket_id = e.ticket_id and t.owner_id is not distinct from p_owner) is null;
end $$;

-- The tickets of these debits that wait. In the order of the one index that knows debits.
create or replace function control.waiting_v1(p_debits text[]) returns setof control.ticket
language sql stable
set enable_sort = off set enable_incremental_sort = off set enable_bitmapscan = off
as $$
    select * from control.ticket t where t.state = 'queued' and t.debit_id = any (p_debits) order by t.debit_id
$$;

-- Why a ticket waits: "store", what its floor is told as or "cooldown" (whichever ends last, and until when; the ramp
-- after one, too), "stopped" (the limit of its group or model is 0), "quarantine" (without it there would be a free slot; until the first comes out of it),
-- "model_capacity", "rate" (its own, or of one before it) or "capacity".
create or replace function control.wait_reason_v2(
    g control.capacity_group, p_credential text, p_model text, p_now timestamptz
) returns table (reason text, until timestamptz)
language sql stable as $$
    select r.reason, case when r.reason = 'quarantine' then greatest(s.first_out, p_now)
                          else greatest(case when g.breaker = 'open' then greatest(g.cooldown_until, p_now) end, (f.floor).until) end
      from control.store c,
           (select control.last_floor_v1(g.group_id, p_credential, p_model, p_now, false) as floor offset 0) f,
           (select x.*, least(g.concurrency - x.active,
                              g.concurrency + g.quarantine_headroom - x.active - x.quarantined) as free
              from (select count(*) filter (where t.state <> 'quarantined') as active,
                           count(*) filter (where t.state = 'quarantined') as quarantined,
                           count(*) filter (where t.model = p_model) as of_model,
                           min(t.quarantined_until) as first_out
                      from control.ticket t where t.group_id = g.group_id and t.state <> 'queued') x) s,
           (select min(l.concurrency) filter (where l.model = p_model) as concurrency,
                   coalesce(bool_or(num_nonnulls(l.requests_per_minute, l.tokens_per_minute) > 0), false) as rated
              from control.allowance l where l.group_id = g.group_id and l.model in ('', p_model)) a,
           lateral (
            select case when c.closed_until > p_now then 'store'
                        when (f.floor).until >= case when g.breaker = 'open' then g.cooldown_until
                                                     else (f.floor).until end
                             then control.floor_cause_v1((f.floor).kind)
                        when g.breaker <> 'closed' or (g.ramp is not null and s.free > 0) then 'cooldown'
                        when 0 in (g.concurrency, a.concurrency) then 'stopped'
                        when s.free <= 0 and s.quarantined > 0 and g.ramp is null and g.concurrency > s.active
                             then 'quarantine'
                        when s.free > 0 and s.of_model >= a.concurrency then 'model_capacity'
                        when s.free > 0 and a.rated then 'rate'
                        else 'capacity' end as reason) r
$$;
