-- Brings a group up to the database clock. The caller holds the group's row lock and passes the time read after it.
-- Handles at most 100 tickets of each kind, and skips those another transaction is settling right now.

-- The owners among these that are dead: lapsed, and not merely unheard because the store itself was away.
create or replace function control.owner_is_fresh_v1(p_owner uuid, p_now timestamptz) returns boolean
language sql stable as $$
    select exists (select from control.owner o where o.owner_id = p_owner and o.expires_at > p_now)
$$;

create or replace function control.owner_is_dead_v1(p_owner uuid, p_now timestamptz) returns boolean
language sql stable as $$
    select not exists (select from control.owner o where o.owner_id = p_owner and o.expires_at > p_now)
       and exists (select from control.reclaim r where r.not_before <= p_now)
$$;

create or replace function control.reconcile_v1(p_group text, p_now timestamptz) returns void
language plpgsql as $$
declare
    v_lost uuid[];
    v_over uuid[];
    v_group control.capacity_group;
begin
    -- Waiters whose time is over (their owner ends them itself; this is for owners that do not), or whose owner died.
    delete from control.ticket t
     where t.ticket_id in (
        select q.ticket_id from control.ticket q
         where q.ticket_id in (
            select h.ticket_id from control.ticket h
             where h.group_id = p_group and h.state = 'queued' order by h.class, h.number limit 100)
           and (q.queue_deadline + interval '2 s' < p_now or control.owner_is_dead_v1(q.owner_id, p_now))
         for update skip locked);

    -- Grants their owner did not confirm: back into the queue at their number, or gone with their owner.
    delete from control.ticket t
     where t.ticket_id in (
        select q.ticket_id from control.ticket q
         where q.group_id = p_group and q.state = 'granted' and control.owner_is_dead_v1(q.owner_id, p_now)
         limit 100 for update skip locked);
    update control.ticket t set state = 'queued', granted_at = null, grant_expires_at = null, generation = null
     where t.ticket_id in (
        select q.ticket_id from control.ticket q
         where q.group_id = p_group and q.state = 'granted' and q.grant_expires_at <= p_now
         limit 100 for update skip locked);

    -- Attempts that outlived their hard deadline or their owner: the slot goes to quarantine with its full window.
    with lost as (
        select q.ticket_id, control.owner_is_dead_v1(q.owner_id, p_now) as dead
          from control.ticket q
         where q.group_id = p_group and q.state = 'active'
           and (q.hard_deadline <= p_now or control.owner_is_dead_v1(q.owner_id, p_now))
         limit 100 for update skip locked
    ), moved as (
        update control.ticket t set state = 'quarantined', quarantined_until = t.hard_deadline + t.isolation
          from lost where t.ticket_id = lost.ticket_id
        returning t.ticket_id, lost.dead
    )
    select array_agg(ticket_id) filter (where dead) into v_lost from moved;

    -- Quarantine that has passed frees the slot. It says nothing about what was executed or what it cost.
    with gone as (
        delete from control.ticket t
         where t.ticket_id in (
            select q.ticket_id from control.ticket q
             where q.group_id = p_group and q.state = 'quarantined' and q.quarantined_until <= p_now
             limit 100 for update skip locked)
        returning t.ticket_id
    )
    select array_agg(ticket_id) into v_over from gone;

    if v_lost is not null or v_over is not null then
        perform control.settle_attempts_v1(array_agg(a.ticket_id order by a.ticket_id),
                                           array_agg('unknown'::text), array_agg('{"status":"unknown","ended":"lost","cost_reason":"lost"}'::jsonb))
           from control.attempt a
          where a.ticket_id = any (coalesce(v_lost, '{}') || coalesce(v_over, '{}')) and a.state = 'open';
    end if;

    select * into v_group from control.capacity_group where group_id = p_group;
    -- A probe that is gone without a verdict reopens the breaker.
    if v_group.breaker = 'half_open' and v_group.probe is not null
       and not exists (select from control.ticket t
                        where t.ticket_id = v_group.probe and t.state in ('granted', 'active')) then
        perform control.open_breaker_v1(p_group, null, p_now);
    elsif v_group.breaker = 'open' and v_group.cooldown_until <= p_now then
        update control.capacity_group
           set breaker = 'half_open', generation = generation + 1, probe = null
         where group_id = p_group;
    end if;
end $$;

-- Is anybody at the head of the queue overdue, or of an owner that is not heard of?
create or replace function control.queue_is_due_v1(p_group text, p_fresh uuid[], p_now timestamptz) returns boolean
language sql stable as $$
    select exists (
        select from (select h.queue_deadline, h.owner_id from control.ticket h
                      where h.group_id = p_group and h.state = 'queued' order by h.class, h.number limit 100) q
         where q.queue_deadline + interval '2 s' < p_now or q.owner_id <> all (p_fresh))
$$;

-- Opens a group's breaker: for as long as the provider asks, else longer each time in a row. Waiters that would rather
-- go elsewhere are let go, and those that cannot outlive the cooldown.
create or replace function control.open_breaker_v1(p_group text, p_retry_after interval, p_now timestamptz) returns void
language plpgsql as $$
declare
    v_until timestamptz;
begin
    update control.capacity_group
       set breaker = 'open', generation = generation + 1, probe = null, failures = 0, failures_since = null,
           openings = least(openings + (p_retry_after is null)::integer, 30),
           cooldown_until = p_now + coalesce(
               p_retry_after, least(first_cooldown * power(2, least(openings, 20)), longest_cooldown))
     where group_id = p_group
    returning cooldown_until into v_until;
    delete from control.ticket t where t.ticket_id in (
        select q.ticket_id from control.ticket q
         where q.group_id = p_group and q.state = 'queued'
           and (not q.waits_for_cooldown or q.queue_deadline <= v_until)
         limit 1000 for update skip locked);
end $$;
