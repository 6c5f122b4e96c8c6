-- settle_v2: the single final accounting of these attempts, in one transaction: the slot, the attempt row, the ledger.
--
-- Clean ones take no group lock: removing a row only lowers a count. Judged ones take the locks of their tickets' groups
-- first, and the outcomes move breakers, floors and allowances. A replay changes nothing and says applied = false. A row
-- without a ticket says that breakers have changed and nobody has taken note of it yet.

create or replace function control.settle_v2(
    p_judged boolean, p_shard smallint,
    p_ticket uuid[], p_ending text[], p_verdict text[], p_generation bigint[], p_retry_after_ms bigint[],
    p_account_wide boolean[], p_used bigint[], p_requests_left bigint[], p_tokens_left bigint[], p_told_ms bigint[],
    p_quarantine_ms bigint[], p_state text[], p_record text[], p_unavailable_ms bigint, p_clock timestamptz, p_steps bigint,
    p_elapsed_ms bigint, p_forward_ms bigint
) returns table (ticket_id uuid, applied boolean, counters text, group_id text, waiters boolean)
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
    v_tickets control.ticket[];
    v_lines control.ledger_line[];
    v_rest uuid[];
    v_groups text[] := '{}';
    v_waiting text[] := '{}';
begin
    if p_judged then
        perform from control.capacity_group c
          where c.group_id in (select t.group_id from control.ticket t where t.ticket_id = any (p_ticket))
          order by c.group_id for update;
    end if;
    if cardinality(p_ticket) > 1 then
        perform from control.ticket t where t.ticket_id = any (p_ticket) order by t.ticket_id for update;
    end if;

    v_now := control.keep_time_v2(p_clock, p_steps, p_elapsed_ms, p_forward_ms, v_entered);
    with element as (
        select * from unnest(p_ticket, p_ending, p_quarantine_ms) as e (ticket_id, ending, quarantine_ms)
    ), freed as (
        delete from control.ticket t using element e
         where t.ticket_id = e.ticket_id and e.ending <> 'uncertain' and t.state in ('active', 'quarantined')
        returning t as ticket
    ), held as (
        update control.ticket t
           set state = 'quarantined',
               -- From here on the ledger has its bound.
               reserved_usd = null,
               -- A window that began anew when the clock leapt is not cut short.
               quarantined_until = least(greatest(t.quarantined_until, t.hard_deadline + t.isolation),
                                         v_now + e.quarantine_ms * interval '1 ms')
          from element e
         where t.ticket_id = e.ticket_id and e.ending = 'uncertain' and t.state in ('active', 'quarantined')
        returning t as ticket
    )
    select array_agg(o.ticket) into v_tickets
      from (select f.ticket from freed f union all select h.ticket from held h) o;

    with opened as (
        insert into control.attempt (ticket_id, key_id, debit_id, attempt, group_id, owner_id, granted_at, day, state,
                                     settled_at)
        select t.ticket_id, t.key_id, t.debit_id, t.attempt, t.group_id, t.owner_id, t.granted_at, t.day, e.state,
               clock_timestamp()
          from unnest(v_tickets) t
          join unnest(p_ticket, p_state) as e (ticket_id, state) on e.ticket_id = t.ticket_id
        on conflict do nothing
        returning attempt.ticket_id
    )
    select array_agg(row(t.ticket_id, 'open', e.state, t.granted_at, t.day, t.key_id, t.debit_id, t.attempt,
                         t.group_id, t.intent::jsonb || e.record::jsonb)::control.ledger_line)
      into v_lines
      from unnest(v_tickets) t
      join unnest(p_ticket, p_state, p_record) as e (ticket_id, state, record) on e.ticket_id = t.ticket_id
      join opened o on o.ticket_id = t.ticket_id;

    if coalesce(cardinality(v_lines), 0) < cardinality(p_ticket) then
        v_rest := array(select u from unnest(p_ticket) u
                         where not exists (select from unnest(v_lines) l where l.ticket_id = u));
        v_lines := v_lines || control.correct_v2(v_rest, p_ticket, p_state, p_record);
    end if;

    if p_judged and v_lines is not null then
        -- Only what was applied: a replay must not count a failure twice.
        perform control.judge_v2(
            array(select t from unnest(v_tickets) t join unnest(v_lines) l on l.ticket_id = t.ticket_id),
            p_ticket, p_ending, p_verdict, p_generation, p_retry_after_ms, p_account_wide, p_used, p_requests_left,
            p_tokens_left, p_told_ms, v_now, p_unavailable_ms);
        if exists (select from control.breaker_event) then
            return query select null::uuid, false, null::text, null::text, false;
        end if;
    end if;

    v_groups := array(
        select coalesce(t.group_id, (select a.group_id from control.attempt a where a.ticket_id = e.ticket_id))
          from unnest(p_ticket) with ordinality as e (ticket_id, n)
          left join unnest(v_tickets) t on t.ticket_id = e.ticket_id
         order by e.n);
    v_waiting := array(select d.group_id from (select distinct u as group_id from unnest(v_groups) u) d
                        where control.may_move_v1(d.group_id));
    if cardinality(v_waiting) > 0 then
        perform control.paced_v1(
                    w, array(select l from unnest(v_lines) l
                               join unnest(p_ticket, p_ending) as e (ticket_id, ending) on e.ticket_id = l.ticket_id
                              where e.ending <> 'uncertain'))
           from unnest(v_waiting) w;
    end if;
    return query
        select e.ticket_id, r.ticket_id is not null, r.counters::text, e.group_id,
               coalesce(e.group_id = any (v_waiting), false)
          from unnest(p_ticket, v_groups) as e (ticket_id, group_id)
          left join control.record_v2(p_shard, v_lines) r on r.ticket_id = e.ticket_id;
end $$;

-- The guarded transition of attempts whose ticket is gone, or that were settled as unknown before: unknown -> charged or
-- zero, once, on the original day. Answers the lines for the ledger.
create or replace function control.correct_v2(p_these uuid[], p_ticket uuid[], p_state text[], p_record text[])
returns control.ledger_line[]
language sql as $$
    with element as (
        select e.* from unnest(p_ticket, p_state, p_record) as e (ticket_id, state, record)
         where e.ticket_id = any (p_these) and e.state in ('charged', 'zero')
    ), locked as (
        select a.ticket_id from control.attempt a
         where a.ticket_id = any (p_these) and a.state = 'unknown' order by a.ticket_id for update
    ), moved as (
        update control.attempt a set state = e.state, settled_at = clock_timestamp()
          from element e join locked l on l.ticket_id = e.ticket_id
         where a.ticket_id = e.ticket_id and a.state = 'unknown'
        returning a.*, e.record
    )
    select array_agg(row(m.ticket_id, 'unknown', m.state, m.granted_at, m.day, m.key_id, m.debit_id, m.attempt,
                         m.group_id, m.record::jsonb)::control.ledger_line order by m.ticket_id)
      from moved m
$$;

-- Ends attempts of tickets just taken, all in one way. Those that have an end already keep it.
create or replace function control.end_attempts_v2(
    p_shard smallint, p_tickets control.ticket[], p_state text, p_record text
) returns void
language plpgsql as $$
declare
    v_lines control.ledger_line[];
begin
    with opened as (
        insert into control.attempt (ticket_id, key_id, debit_id, attempt, group_id, owner_id, granted_at, day, state,
                                     settled_at)
        select t.ticket_id, t.key_id, t.debit_id, t.attempt, t.group_id, t.owner_id, t.granted_at, t.day, p_state,
               clock_timestamp()
          from unnest(p_tickets) t
        on conflict do nothing
        returning attempt.ticket_id
    )
    select array_agg(row(t.ticket_id, 'open', p_state, t.granted_at, t.day, t.key_id, t.debit_id, t.attempt,
                         t.group_id, t.intent::jsonb || p_record::jsonb)::control.ledger_line)
      into v_lines
      from unnest(p_tickets) t join opened o on o.ticket_id = t.ticket_id;
    if v_lines is not null then
        perform control.record_v2(p_shard, v_lines);
    end if;
end $$;

-- What these outcomes say about their groups, in order: allowances, floors, breakers. An outcome moves a breaker only
-- while its generation is current; a rate limit raises its floor whatever the generation.
create or replace function control.judge_v2(
    p_tickets control.ticket[], p_ticket uuid[], p_ending text[], p_verdict text[], p_generation bigint[],
    p_retry_after_ms bigint[], p_account_wide boolean[], p_used bigint[], p_requests_left bigint[],
    p_tokens_left bigint[], p_told_ms bigint[], p_now timestamptz, p_unavailable_ms bigint
) returns void
language plpgsql as $$
declare
    g control.capacity_group;
    e record;
    v_retry interval;
    v_floor text;
begin
    for e in
        select u.*, t.generation as granted_in, t.group_id, t.credential, t.model, t.tokens, t as ticket
          from unnest(p_ticket, p_ending, p_verdict, p_generation, p_retry_after_ms, p_account_wide, p_used,
                      p_requests_left, p_tokens_left, p_told_ms)
               with ordinality as u (ticket_id, ending, verdict, generation, retry_after_ms, account_wide, used,
                                     requests_left, tokens_left, told_ms, n)
          join unnest(p_tickets) t on t.ticket_id = u.ticket_id
         order by u.n
    loop
        v_retry := e.retry_after_ms * interval '1 ms';
        perform control.give_back_v1(
            e.group_id, e.model, (e.ending = 'not_dispatched')::integer,
            case when e.ending = 'not_dispatched' then e.tokens else e.tokens - e.used end, p_now);
        if e.requests_left is not null or e.tokens_left is not null then
            perform control.told_left_v1(e.ticket, e.account_wide, e.requests_left, e.tokens_left,
                                         p_now - e.told_ms * interval '1 ms', p_now);
        end if;
        v_floor := case e.verdict when 'rate_limited' then 'rate_limit' when 'limited_for_long' then 'long_rate_limit'
                                  -- The last is what an earlier version says of either of the two before.
                                  when 'credential_rejected' then e.verdict when 'quota_exhausted' then e.verdict
                                  when 'unavailable' then e.verdict end;
        if v_floor is not null then
            perform control.raise_floor_v1(
                e.group_id, e.credential, case when e.account_wide then '' else e.model end, v_floor,
                coalesce(v_retry, case when v_floor <> 'rate_limit' then p_unavailable_ms * interval '1 ms' end), p_now);
        end if;

        select * into g from control.capacity_group c where c.group_id = e.group_id;
        -- The ticket's own, too: one whose endpoint has moved here since has none of this group's.
        if e.generation is distinct from g.generation or e.granted_in is distinct from g.generation then
            continue;
        elsif g.breaker = 'closed' then
            if e.verdict in ('transient', 'slow') then
                g.failed_at := array(select f from unnest(g.failed_at) f where f >= p_now - g.failure_window) || p_now;
                if cardinality(g.failed_at) >= g.failure_threshold then
                    perform control.open_breaker_v2(e.group_id, p_now, e.verdict);
                else
                    update control.capacity_group c set failed_at = g.failed_at where c.group_id = e.group_id;
                end if;
            elsif e.verdict = 'answered' and g.ramp is not null then
                update control.capacity_group c
                   set ramp = case when c.ramp * 2 < c.concurrency then c.ramp * 2 end
                 where c.group_id = e.group_id;
            end if;
        elsif g.breaker = 'half_open' and g.probe = e.ticket_id then
            if e.verdict in ('answered', 'slow') or v_floor is not null then
                perform control.close_breaker_v1(e.group_id, e.verdict, p_now);
            elsif e.ending = 'not_dispatched' and e.verdict = 'none' then
                -- Taken back before dispatch: the place goes to the next.
                update control.capacity_group c set generation = c.generation + 1, probe = null
                 where c.group_id = e.group_id;
            else
                perform control.open_breaker_v2(
                    e.group_id, p_now, case when e.verdict = 'none' then 'probe_undecided' else e.verdict end);
            end if;
        end if;
    end loop;
end $$;

drop function if exists control.close_breaker_v1(text);

create or replace function control.close_breaker_v1(
    p_group text, p_cause text default 'answered', p_now timestamptz default control.now_v1()
) returns void
language sql as $$
    update control.capacity_group c
       set breaker = 'closed', generation = c.generation + 1, probe = null, openings = 0, failed_at = '{}',
           cooldown_until = null, ramp = case when c.concurrency > 1 then 1 end, open_since = null
     where c.group_id = p_group;
    select control.tell_breaker_v1(p_group, 'half_open', p_cause, p_now);
$$;

-- A probe has given its first valid content: that decides it, whenever it ends.
create or replace function control.decide_v2(p_group text, p_ticket uuid, p_generation bigint) returns void
language plpgsql as $$
declare
    g control.capacity_group;
begin
    select * into g from control.capacity_group c where c.group_id = p_group for update;
    if g.breaker = 'half_open' and g.probe = p_ticket and g.generation = p_generation then
        perform control.close_breaker_v1(p_group, 'first_content');
    end if;
end $$;

-- Takes tickets back: waiters leave, a grant that nobody will use is settled as zero. For a ticket whose acquire was
-- never acknowledged a tombstone is left, so that a late commit cannot revive it.
drop function if exists control.abandon_v2(uuid[], smallint, boolean);

create or replace function control.abandon_v2(
    p_ticket uuid[], p_shard smallint, p_tombstone boolean, p_clock timestamptz default null, p_steps bigint default 0,
    p_elapsed_ms bigint default 0, p_forward_ms bigint default 0
) returns table (group_id text)
language plpgsql
set enable_sort = off set enable_incremental_sort = off set enable_bitmapscan = off
as $$
#variable_conflict use_column
declare
    -- Before the wait for locks.
    v_entered constant timestamptz := clock_timestamp();
    v_now timestamptz;
    v_gone control.ticket[];
begin
    -- The place of a probe that is taken back before its dispatch goes to the next. A statement whose answer was lost may
    -- be at work yet, in any group: it has to end, or to wait and see the tombstone.
    perform from control.capacity_group c where p_tombstone or c.probe = any (p_ticket) order by c.group_id for update;
    perform from control.ticket t where t.ticket_id = any (p_ticket) order by t.ticket_id for update;
    if p_tombstone then
        insert into control.attempt (ticket_id, granted_at, day, state, settled_at)
        select u, clock_timestamp(), current_date, 'zero', clock_timestamp()
          from unnest(p_ticket) u
         where (select 1 from control.ticket t where t.ticket_id = u and t.state in ('active', 'quarantined')) is null
        on conflict do nothing;
    end if;
    with gone as (
        delete from control.ticket t where t.ticket_id = any (p_ticket) and t.state <> 'quarantined'
        returning t as ticket
    )
    select array_agg(g.ticket) into v_gone from gone g;
    perform control.end_attempts_v2(
        p_shard, array(select t from unnest(v_gone) t where t.state = 'active'), 'zero',
        '{"status":"not_dispatched","ended":"not_dispatched","cost_reason":"abandoned"}');
    if exists (select from unnest(v_gone) t
                where t.state <> 'queued' and exists (select from control.allowance a where a.group_id = t.group_id)) then
        v_now := control.keep_time_v2(p_clock, p_steps, p_elapsed_ms, p_forward_ms, v_entered);
        perform control.give_back_v1(t.group_id, t.model, count(*)::integer, sum(t.tokens)::bigint, v_now)
           from unnest(v_gone) t where t.state <> 'queued'
          group by t.group_id, t.model order by t.group_id, t.model;
    end if;
    update control.capacity_group c set generation = c.generation + 1, probe = null
     where c.breaker = 'half_open' and c.probe in (select t.ticket_id from unnest(v_gone) t);
    return query select distinct t.group_id from unnest(v_gone) t where t.state <> 'queued';
end $$;
