-- settle_v1: the single final accounting of these attempts, in one transaction: the slot, the attempt row, the ledger.
--
-- Without a group it takes no group lock: removing a row only lowers a count. With a group it takes the lock first and
-- lets the outcomes move that group's breaker. A replay changes nothing and says applied = false.

create or replace function control.settle_v1(
    p_group text, p_shard smallint,
    p_ticket uuid[], p_ending text[], p_verdict text[], p_generation bigint[], p_retry_after_ms bigint[],
    p_quarantine_ms bigint[], p_state text[], p_record jsonb[]
) returns table (ticket_id uuid, applied boolean, counters jsonb, group_id text, waiters boolean)
language plpgsql as $$
#variable_conflict use_column
declare
    v_now timestamptz;
begin
    if p_group is not null then
        perform from control.capacity_group c where c.group_id = p_group for update;
    end if;
    v_now := clock_timestamp();

    perform from control.ticket t where t.ticket_id = any (p_ticket) order by t.ticket_id for update;
    delete from control.ticket t
     using unnest(p_ticket, p_ending) as e (ticket_id, ending)
     where t.ticket_id = e.ticket_id and e.ending <> 'uncertain';
    update control.ticket t
       set state = 'quarantined',
           quarantined_until = least(t.hard_deadline + t.isolation, v_now + e.quarantine_ms * interval '1 ms')
      from unnest(p_ticket, p_ending, p_quarantine_ms) as e (ticket_id, ending, quarantine_ms)
     where t.ticket_id = e.ticket_id and e.ending = 'uncertain' and t.state in ('active', 'quarantined');

    if p_group is not null then
        perform control.judge_v1(p_group, p_ticket, p_ending, p_verdict, p_generation, p_retry_after_ms, v_now);
    end if;

    return query
        select e.ticket_id, s.ticket_id is not null, s.counters, a.group_id,
               exists (select from control.ticket q where q.group_id = a.group_id and q.state = 'queued')
          from unnest(p_ticket) as e (ticket_id)
          left join control.settle_attempts_v1(p_ticket, p_state, p_record, p_shard) s on s.ticket_id = e.ticket_id
          left join control.attempt a on a.ticket_id = e.ticket_id;
end $$;

-- The guarded transition of attempt rows, and the ledger with it: open -> charged | zero | unknown, and
-- unknown -> charged | zero once, as a correction on the original day. Answers those it moved.
create or replace function control.settle_attempts_v1(
    p_ticket uuid[], p_state text[], p_record jsonb[], p_shard smallint default 0
) returns table (ticket_id uuid, counters jsonb)
language plpgsql as $$
#variable_conflict use_column
declare
    v_ticket uuid[];
    v_was text[];
    v_state text[];
    v_record jsonb[];
begin
    with element as (
        select e.* from unnest(p_ticket, p_state, p_record) as e (ticket_id, state, record)
    ), locked as (
        select a.ticket_id, a.state as was from control.attempt a
         where a.ticket_id = any (p_ticket) order by a.ticket_id for update
    ), moved as (
        update control.attempt a set state = e.state, settled_at = clock_timestamp()
          from element e join locked l on l.ticket_id = e.ticket_id
         where a.ticket_id = e.ticket_id
           and (l.was = 'open' or (l.was = 'unknown' and e.state in ('charged', 'zero')))
        returning a.ticket_id, l.was, e.state, e.record
    )
    select array_agg(m.ticket_id order by m.ticket_id), array_agg(m.was order by m.ticket_id),
           array_agg(m.state order by m.ticket_id), array_agg(m.record order by m.ticket_id)
      into v_ticket, v_was, v_state, v_record
      from moved m;
    if v_ticket is not null then
        return query select r.ticket_id, r.counters
                       from control.record_v1(p_shard, v_ticket, v_was, v_state, v_record) r;
    end if;
end $$;

-- What these outcomes say about the group, in order. A result acts only while its generation is current; a valid
-- Retry-After of an older one may raise the cooldown of an open breaker and never lowers it.
create or replace function control.judge_v1(
    p_group text, p_ticket uuid[], p_ending text[], p_verdict text[], p_generation bigint[],
    p_retry_after_ms bigint[], p_now timestamptz
) returns void
language plpgsql as $$
declare
    g control.capacity_group;
    e record;
    v_retry interval;
begin
    for e in
        select u.* from unnest(p_ticket, p_ending, p_verdict, p_generation, p_retry_after_ms)
               with ordinality as u (ticket_id, ending, verdict, generation, retry_after_ms, n) order by u.n
    loop
        select * into g from control.capacity_group c where c.group_id = p_group;
        v_retry := e.retry_after_ms * interval '1 ms';
        if e.generation is distinct from g.generation then
            if e.verdict = 'rate_limited' and g.breaker = 'open' and v_retry is not null then
                update control.capacity_group c set cooldown_until = greatest(c.cooldown_until, p_now + v_retry)
                 where c.group_id = p_group;
            end if;
        elsif g.breaker = 'closed' then
            if e.verdict = 'rate_limited' then
                perform control.open_breaker_v1(p_group, coalesce(v_retry, g.first_cooldown), p_now);
            elsif e.verdict = 'transient' then
                if g.failures_since is null or g.failures_since + g.failure_window < p_now then
                    update control.capacity_group c set failures = 1, failures_since = p_now
                     where c.group_id = p_group;
                    g.failures := 0;
                else
                    update control.capacity_group c set failures = c.failures + 1 where c.group_id = p_group;
                end if;
                if g.failures + 1 >= g.failure_threshold then
                    perform control.open_breaker_v1(p_group, null, p_now);
                end if;
            end if;
        elsif g.breaker = 'half_open' and g.probe = e.ticket_id then
            if e.verdict = 'answered' then
                update control.capacity_group c
                   set breaker = 'closed', generation = c.generation + 1, probe = null, openings = 0,
                       failures = 0, failures_since = null, cooldown_until = null
                 where c.group_id = p_group;
            elsif e.ending = 'not_dispatched' and e.verdict = 'none' then
                -- Taken back before dispatch: the place goes to the next.
                update control.capacity_group c set generation = c.generation + 1, probe = null
                 where c.group_id = p_group;
            else
                perform control.open_breaker_v1(p_group, v_retry, p_now);
            end if;
        end if;
    end loop;
end $$;

-- A probe has given its first valid content: that decides it, whenever it ends.
create or replace function control.decide_v1(p_group text, p_ticket uuid, p_generation bigint) returns void
language plpgsql as $$
begin
    perform from control.capacity_group c where c.group_id = p_group for update;
    perform control.judge_v1(p_group, array[p_ticket], array['confirmed'], array['answered'], array[p_generation],
                             array[null::bigint], clock_timestamp());
end $$;

-- Takes tickets back: waiters leave, a grant that nobody will use is settled as zero. For a ticket whose acquire was
-- never acknowledged a tombstone is left, so that a late commit cannot revive it.
create or replace function control.abandon_v1(p_ticket uuid[], p_shard smallint, p_tombstone boolean)
returns table (group_id text)
language plpgsql as $$
#variable_conflict use_column
declare
    v_granted uuid[];
begin
    perform from control.ticket t where t.ticket_id = any (p_ticket) order by t.ticket_id for update;
    if p_tombstone then
        insert into control.attempt (ticket_id, granted_at, day, state, intent, settled_at)
        select u, clock_timestamp(), current_date, 'zero', '{}', clock_timestamp() from unnest(p_ticket) u
        on conflict do nothing;
    end if;
    return query
        with gone as (
            delete from control.ticket t where t.ticket_id = any (p_ticket) and t.state <> 'quarantined'
            returning t.ticket_id, t.group_id, t.state
        )
        select distinct g.group_id from gone g where g.state <> 'queued';
    perform from control.settle_attempts_v1(
        p_ticket, array_fill('zero'::text, array[cardinality(p_ticket)]),
        array_fill('{"status":"not_dispatched","ended":"not_dispatched","cost_reason":"abandoned"}'::jsonb,
                   array[cardinality(p_ticket)]), p_shard);
end $$;
