-- Brings a group up to the store's clock. The caller holds the group's row lock and passes the time read after it.
-- Handles at most 100 tickets of each kind, and skips those another transaction is settling right now.

create or replace function control.reconcile_v2(p_group text, p_now timestamptz) returns void
language plpgsql as $$
declare
    g control.capacity_group;
    v_lost control.ticket[];
    v_over control.ticket[];
begin
    -- Grants their owner did not confirm: back into the queue at their number, or gone with their owner.
    delete from control.ticket t
     where t.ticket_id = any (array(
        select q.ticket_id from control.ticket q
         where q.group_id = p_group and q.state = 'granted' and control.owner_is_dead_v1(q.owner_id, p_now)
         limit 100 for update skip locked));
    update control.ticket t set state = 'queued', granted_at = null, grant_expires_at = null, generation = null, day = null
     where t.ticket_id = any (array(
        select q.ticket_id from control.ticket q
         where q.group_id = p_group and q.state = 'granted' and q.grant_expires_at <= p_now
         limit 100 for update skip locked));

    -- Waiters whose time is over. Their owner ends them itself; this is for owners that do not. After the grants, or one
    -- that nobody confirms would be granted again for ever.
    delete from control.ticket t
     where t.ticket_id = any (array(
        select q.ticket_id from control.ticket q
         where q.group_id = p_group and q.state = 'queued' and q.queue_deadline > '-infinity'
           and q.queue_deadline < p_now - interval '2 s'
         order by q.queue_deadline limit 100 for update skip locked));

    -- Attempts that outlived their hard deadline or their owner: the slot goes to quarantine with its full window, which
    -- begins now where it was the deadline that passed: a clock that leapt must not free what still runs.
    with lost as (
        select q.ticket_id, control.owner_is_dead_v1(q.owner_id, p_now) as dead
          from control.ticket q
         where q.group_id = p_group and q.state = 'active'
           and (q.hard_deadline <= p_now or control.owner_is_dead_v1(q.owner_id, p_now))
         limit 100 for update skip locked
    ), moved as (
        update control.ticket t
           set state = 'quarantined', quarantined_until = greatest(t.hard_deadline, p_now) + t.isolation,
               -- Of one that ends here the ledger has the bound from now on.
               reserved_usd = case when not lost.dead then t.reserved_usd end
          from lost where t.ticket_id = lost.ticket_id and t.hard_deadline <= p_now
        returning t as ticket, lost.dead
    ), orphaned as (
        update control.ticket t
           set state = 'quarantined', quarantined_until = t.hard_deadline + t.isolation, reserved_usd = null
          from lost where t.ticket_id = lost.ticket_id and t.hard_deadline > p_now
        returning t as ticket
    )
    select array_agg(e.ticket order by (e.ticket).ticket_id) into v_lost
      from (select m.ticket from moved m where m.dead union all select o.ticket from orphaned o) e;

    -- Quarantine that has passed frees the slot. It says nothing about what was executed or what it cost.
    with gone as (
        delete from control.ticket t
         where t.ticket_id = any (array(
            select q.ticket_id from control.ticket q
             -- Said like this it is a question about the group's slots, and not about all that is in quarantine.
             where q.group_id = p_group and q.state not in ('queued', 'granted', 'active') and q.quarantined_until <= p_now
             limit 100 for update skip locked))
        returning t as ticket
    )
    -- One with no window at all has just been lost, and ends once.
    select array_agg(o.ticket order by (o.ticket).ticket_id) into v_over from gone o
     where not exists (select from unnest(v_lost) l where l.ticket_id = (o.ticket).ticket_id);

    if v_lost is not null or v_over is not null then
        perform control.end_attempts_v2(0::smallint, v_lost || v_over, 'unknown',
                                        '{"status":"unknown","ended":"lost","cost_reason":"lost"}');
    end if;

    select * into g from control.capacity_group c where c.group_id = p_group;
    -- A probe that is gone without a verdict reopens the breaker.
    if g.breaker = 'half_open' and g.probe is not null
       and not exists (select from control.ticket t
                        where t.ticket_id = g.probe and t.state in ('granted', 'active')) then
        perform control.open_breaker_v2(p_group, p_now, 'probe_lost');
    elsif g.breaker = 'open' and g.cooldown_until <= p_now then
        update control.capacity_group c
           set breaker = 'half_open', generation = c.generation + 1, probe = null
         where c.group_id = p_group;
        perform control.tell_breaker_v1(p_group, 'open', 'cooldown_over', p_now);
    end if;
end $$;

-- The breaker of this group has changed from what it was: somebody is to write it into a log. With the change itself, so
-- that neither is there without the other.
create or replace function control.tell_breaker_v1(p_group text, p_was text, p_cause text, p_now timestamptz)
returns void
language sql as $$
    insert into control.breaker_event (group_id, was, became, generation, cause, at, until)
    select c.group_id, p_was, c.breaker, c.generation, p_cause, p_now - s.ahead,
           case when c.breaker = 'open' then c.cooldown_until - s.ahead end
      from control.capacity_group c, control.store s
     where c.group_id = p_group
$$;

-- The changes that nobody has taken yet, in their order, at most a hundred. Each is answered once.
create or replace function control.take_breaker_events_v1() returns setof control.breaker_event
language sql
set enable_sort = off set enable_incremental_sort = off set enable_bitmapscan = off
as $$
    with taken as (
        delete from control.breaker_event e
         where e.event_id = any (array(
            select q.event_id from control.breaker_event q order by q.event_id limit 100 for update skip locked))
        returning e.*
    )
    select * from taken t order by t.event_id
$$;

-- Opens a group's breaker, longer each time in a row. Waiters that would rather go elsewhere are let go, and those that
-- cannot outlive the cooldown.
drop function if exists control.open_breaker_v2(text, timestamptz);

create or replace function control.open_breaker_v2(p_group text, p_now timestamptz, p_cause text default 'transient')
returns void
language plpgsql as $$
declare
    v_was text;
    v_until timestamptz;
begin
    update control.capacity_group c
       set breaker = 'open', generation = c.generation + 1, probe = null, failed_at = '{}', ramp = null,
           openings = least(c.openings + 1, 30),
           cooldown_until = p_now + least(c.first_cooldown * power(2, least(c.openings, 20)), c.longest_cooldown),
           opened_total = c.opened_total + 1, opened_for = p_cause,
           open_since = case when w.breaker = 'closed' then p_now - s.ahead else c.open_since end
      from control.capacity_group w, control.store s
     where c.group_id = p_group and w.group_id = p_group
    returning w.breaker, c.cooldown_until into v_was, v_until;
    perform control.tell_breaker_v1(p_group, v_was, p_cause, p_now);
    perform control.let_go_v1(p_group, null, '', true, v_until);
end $$;

-- Ends the waiters of a group, or of one credential or model of it, that do not wait until then: all of them, or where
-- p_may_wait those that would rather go elsewhere and those that cannot wait for so long. Of each queue the first
-- thousand are looked at, however many there are, since the group is locked meanwhile.
create or replace function control.let_go_v1(
    p_group text, p_credential text, p_model text, p_may_wait boolean, p_until timestamptz
) returns void
language sql
set enable_sort = off set enable_incremental_sort = off set enable_bitmapscan = off
as $$
    delete from control.ticket t where t.ticket_id = any (array(
        select q.ticket_id from control.ticket q
         -- Said like this no index of those who wait can answer it, but only that of all tickets.
         where q.state not in ('granted', 'active', 'quarantined') and q.ticket_id = any (array(
            select h.ticket_id
              from control.lanes_v1(p_group) l cross join lateral (
                select w.ticket_id, w.waits_for_cooldown, w.queue_deadline from control.ticket w
                 where w.group_id = p_group and w.state = 'queued'
                   and (w.class, w.credential, w.model) >= (l.class, l.credential, l.model)
                   and (w.class, w.credential, w.model) <= (l.class, l.credential, l.model)
                 order by w.class, w.credential, w.model, w.number limit 1000) h
             where (p_credential is null or l.credential = p_credential) and (p_model = '' or l.model = p_model)
               and (not p_may_wait or not h.waits_for_cooldown or h.queue_deadline <= p_until)))
         for update skip locked))
$$;

-- Puts a floor under a credential's model, or (model '') under all of them: nothing is granted before then. It may be
-- raised and is never lowered. Without a time from the provider it grows with each rate limit in a row.
create or replace function control.raise_floor_v1(
    p_group text, p_credential text, p_model text, p_kind text, p_after interval, p_now timestamptz
) returns void
language plpgsql as $$
declare
    g control.capacity_group;
    f control.floor;
    v_strikes integer := 0;
    v_until timestamptz;
begin
    select * into g from control.capacity_group c where c.group_id = p_group;
    select * into f from control.floor o
     where o.group_id = p_group and o.credential = p_credential and o.model = p_model and o.kind = p_kind;
    if p_after is null then
        if f.group_id is not null and p_now <= f.until + (f.until - f.since) then
            v_strikes := least(f.strikes + 1, 20);
        end if;
        v_until := p_now + least(g.first_cooldown * power(2, v_strikes), g.longest_cooldown);
    else
        v_strikes := coalesce(f.strikes, 0);
        v_until := p_now + p_after;
    end if;
    v_until := greatest(v_until, f.until);
    insert into control.floor as o (group_id, credential, model, kind, since, until, strikes)
    values (p_group, p_credential, p_model, p_kind, p_now, v_until, v_strikes)
    on conflict (group_id, credential, model, kind) do update
       set since = excluded.since, until = excluded.until, strikes = excluded.strikes;
    perform control.let_go_v1(p_group, p_credential, p_model, p_kind = 'rate_limit', v_until);
end $$;
