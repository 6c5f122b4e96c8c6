-- acquire_v2: judge these tickets, grant in ticket order what fits, enqueue the rest. One short transaction.
--
-- Arrays run in parallel, one element a ticket; all may be empty, which only advances the queue. `p_reserved` is null where
-- the ticket's key has no limits: then they are not looked for, which is told of none by an empty array. So it is with
-- `p_session`; with a session, `p_bound` is the most that the attempt can cost, null where nobody knows. Lock and count are
-- separate statements: a single statement would take its snapshot before it has waited for the lock, and over-admit.
--
-- Answers a row for each element and for each ticket of this owner that was granted here:
--   granted | queued
--   ended | duplicate_debit | lapsed | owner_fence | deadline_exceeded | provider_unavailable | too_large | cooldown |
--   queue_full | store_closed | key_limit | budget_exceeded | budget_reserved | cost_not_bounded (`key_limit` says which of
--   its key's limits) | moved (its endpoint belongs to the group that is answered)
-- And the rows "notify" (another owner's ticket was granted: tell it after the commit), "next" (milliseconds until the
-- next event that time alone brings about), "time" (as it is by the steps in `number`: what the asker knew is stale) and
-- "breaker" (it has changed, and somebody is to take note of it).

drop function if exists control.acquire_v2(
    text, uuid, integer, bigint, text, uuid[], text[], smallint[], text[], text[], uuid[], text[], integer[], bigint[],
    bigint[], bigint[], bigint[], bigint[], bigint[], boolean[], text[], text[], text[], bigint[], timestamptz, bigint,
    bigint, bigint, numeric[]);

create or replace function control.acquire_v2(
    p_group text, p_owner uuid, p_grant_ttl_ms integer, p_hold_ms bigint, p_zone text,
    p_ticket uuid[], p_endpoint text[], p_class smallint[], p_model text[], p_credential text[], p_key uuid[],
    p_debit text[], p_attempt integer[], p_tokens bigint[], p_place bigint[], p_execution_ms bigint[],
    p_isolation_ms bigint[], p_queue_ms bigint[], p_caller_ms bigint[], p_waits boolean[], p_intent text[],
    p_scope text[], p_run text[], p_fence bigint[], p_clock timestamptz, p_steps bigint, p_elapsed_ms bigint, p_forward_ms bigint,
    p_reserved numeric[] default '{}', p_session text[] default '{}', p_bound numeric[] default '{}'
) returns table (
    ticket_id uuid, answer text, owner_id uuid, group_id text, number bigint, generation bigint, probe boolean,
    judged boolean, granted_at timestamptz, day date, remaining_ms bigint, ahead integer, wait_reason text,
    wait_ms bigint, expected_ms bigint, key_limit text
)
language plpgsql
-- What its plans read must not depend on how full the tables were when they were made: in the order of an index, and by
-- an index alone.
set enable_sort = off set enable_incremental_sort = off set enable_bitmapscan = off
as $$
#variable_conflict use_column
declare
    g control.capacity_group;
    was control.capacity_group;
    n constant integer := cardinality(p_ticket);
    -- Before the wait for the lock.
    v_entered constant timestamptz := clock_timestamp();
    v_off boolean;
    v_stale boolean;
    v_now timestamptz;
    v_ahead interval;
    v_day date;
    v_closed boolean;
    v_other_timeline boolean;
    v_fresh uuid[];
    v_active integer;
    v_quarantined integer;
    v_batch integer;
    v_ramped integer;
    v_due boolean;
    v_waits boolean;
    v_floors boolean;
    v_limited boolean;
    v_gate text;
    v_room integer;
    v_batch_room integer;
    v_free integer;
    v_verdict text[] := '{}';
    v_wait bigint[] := '{}';
    v_cause text[] := '{}';
    v_key_limit text[] := '{}';
    held record;
    v_state text[];
    v_number bigint[];
    v_next bigint;
    v_new integer := 0;
    v_new_batch integer := 0;
    v_enqueued integer := 0;
    v_place boolean;
    v_budgeted boolean := false;
    v_counted boolean := false;
    -- Granted to others and not confirmed: they may come back into the queue.
    v_back integer;
    v_back_batch integer;
    -- Allowances: "" is the group's own.
    a_model text[] := '{}';
    a_room integer[];
    a_requests double precision[];
    a_tokens double precision[];
    m integer;
    m0 integer;
    -- Candidates of each class in order: a ticket that waits, or the place of an element.
    i_ticket uuid[]; i_n integer[]; i_model text[]; i_tokens bigint[];
    b_ticket uuid[]; b_n integer[]; b_model text[]; b_tokens bigint[];
    i integer;
    b integer;
    v_blocked text[] := '{}';
    v_take_batch boolean;
    v_credit integer;
    v_model text;
    v_need bigint;
    v_chosen uuid[] := '{}';
    v_rows control.ticket[] := '{}';
    v_found integer;
    v_place_in bigint;
    v_leapt boolean;
begin
    if current_setting('transaction_isolation') <> 'read committed' then
        raise exception 'admission needs read committed' using errcode = 'invalid_transaction_state';
    end if;
    select * into g from control.capacity_group c where c.group_id = p_group for update;
    if not found then
        raise exception 'no such capacity group' using errcode = 'no_data_found';
    end if;
    -- One look, at the time, the slots and what is known of these tickets: a statement costs more than what it reads.
    select c.now, c.ahead, c.closed, c.other_timeline, c.day,
           c.steps = p_steps
               and control.is_off_v1(control.off_by_v1(c.raw, c.ahead, p_clock, p_elapsed_ms, p_forward_ms, v_entered),
                                     p_forward_ms),
           c.steps <> p_steps, o.fresh, t.active, t.quarantined, t.batch, t.ramped, t.due,
           exists (select from control.ticket q where q.group_id = p_group and q.state = 'queued'),
           exists (select from control.floor f where f.group_id = p_group and f.until > c.now),
           exists (select from control.allowance a where a.group_id = p_group)
      into v_now, v_ahead, v_closed, v_other_timeline, v_day, v_off, v_stale, v_fresh, v_active, v_quarantined, v_batch, v_ramped, v_due,
           v_waits, v_floors, v_limited
      from (select x.raw + s.ahead as now, x.raw, s.ahead, s.steps, coalesce(s.closed_until > x.raw + s.ahead, false) as closed,
                   s.timeline <> left(pg_walfile_name(pg_current_wal_insert_lsn()), 8) as other_timeline,
                   (x.raw at time zone p_zone)::date as day
              from control.store s, (select clock_timestamp() as raw offset 0) x offset 0) c
     cross join lateral (
        select array(select w.owner_id from control.owner w where w.expires_at > c.now) as fresh offset 0) o
     cross join lateral (
        select count(*) filter (where t.state <> 'quarantined') as active,
               count(*) filter (where t.state = 'quarantined') as quarantined,
               count(*) filter (where t.class = 1) as batch,
               count(*) filter (where t.state <> 'quarantined' and t.generation = g.generation) as ramped,
               coalesce(bool_or(coalesce(t.quarantined_until, t.grant_expires_at, t.hard_deadline) <= c.now
                                or (t.state <> 'quarantined' and t.owner_id <> all (o.fresh))), false) as due
          from control.ticket t where t.group_id = p_group and t.state <> 'queued') t;
    if v_off then
        perform control.keep_time_v2(p_clock, p_steps, p_elapsed_ms, p_forward_ms, v_entered);
        return query select * from control.acquire_v2(
            p_group, p_owner, p_grant_ttl_ms, p_hold_ms, p_zone, p_ticket, p_endpoint, p_class, p_model, p_credential, p_key,
            p_debit, p_attempt, p_tokens, p_place, p_execution_ms, p_isolation_ms, p_queue_ms, p_caller_ms, p_waits,
            p_intent, p_scope, p_run, p_fence, p_clock, p_steps, p_elapsed_ms, p_forward_ms, p_reserved, p_session,
            p_bound);
        return;
    end if;
    if v_stale then
        -- Another process has made up for a step since: what this one knows of the time is no use any more.
        return query select null::uuid, 'time', null::uuid, p_group, s.steps, null::bigint, null::boolean, null::boolean,
                            clock_timestamp() + s.ahead, null::date, null::bigint, null::integer, null::text,
                            null::bigint, null::bigint, null::text
                       from control.store s;
    end if;
    if v_other_timeline then
        v_closed := true;
        perform control.close_store_v1(p_hold_ms);
    end if;

    if cardinality(p_session) > 0 then
        v_budgeted := exists (
            select from unnest(p_key, p_session) as e (key_id, session)
             where (select 1 from control.session_budget b
                     where b.key_id = e.key_id and b.session_id = e.session) is not null);
    end if;

    if v_due or g.breaker <> 'closed'
       or (v_waits and (select 1 from control.ticket t
                         where t.group_id = p_group and t.state = 'queued' and t.queue_deadline > '-infinity'
                           and t.queue_deadline < v_now - interval '2 s'
                         order by t.queue_deadline limit 1) is not null) then
        was := g;
        perform control.reconcile_v2(p_group, v_now);
        select * into g from control.capacity_group c where c.group_id = p_group;
        if g.generation <> was.generation then
            return query select null::uuid, 'breaker', null::uuid, p_group, null::bigint, null::bigint, null::boolean,
                                null::boolean, null::timestamptz, null::date, null::bigint, null::integer, null::text,
                                null::bigint, null::bigint, null::text;
        end if;
        select count(*) filter (where t.state <> 'quarantined'), count(*) filter (where t.state = 'quarantined'),
               count(*) filter (where t.class = 1),
               count(*) filter (where t.state <> 'quarantined' and t.generation = g.generation)
          into v_active, v_quarantined, v_batch, v_ramped
          from control.ticket t where t.group_id = p_group and t.state <> 'queued';
        v_waits := exists (select from control.ticket t where t.group_id = p_group and t.state = 'queued');
    end if;
    was := g;
    if v_limited then
        select array_agg(a.model), array_agg(a.concurrency - (
                   select count(*) from control.ticket t
                    where t.group_id = p_group and t.state <> 'queued' and t.model = a.model and a.model <> '')::integer),
               array_agg(control.filled_v1(a.requests_left, a.requests_per_minute, a.filled_at, v_now)),
               array_agg(control.filled_v1(a.tokens_left, a.tokens_per_minute, a.filled_at, v_now)),
               bool_or(a.filled_at > v_now + interval '1 s')
          into a_model, a_room, a_requests, a_tokens, v_leapt
          from control.allowance a where a.group_id = p_group;
        if v_leapt then
            -- Filled at a time that is yet to come, by a clock that had leapt and was made up for since: it would stay empty.
            update control.allowance a set filled_at = v_now
             where a.group_id = p_group and a.filled_at > v_now + interval '1 s';
        end if;
        m0 := array_position(a_model, '');
    end if;

    v_gate := case when v_closed then 'closed'
                   when g.breaker = 'open' or (g.breaker = 'half_open' and g.probe is not null) then 'cooldown' end;
    v_room := greatest(0, least(g.concurrency - v_active,
                                g.concurrency + g.quarantine_headroom - v_active - v_quarantined));
    if v_gate is not null then
        v_room := 0;
    elsif g.breaker = 'half_open' then
        v_room := least(v_room, 1);
    elsif g.ramp is not null then
        v_room := greatest(0, least(v_room, g.ramp - v_ramped));
    end if;
    v_free := v_room;
    v_batch_room := greatest(0, case when g.concurrency > 1 then g.concurrency - 1 else 1 end - v_batch);

    -- ------------------------------------------------------------ what is to be made of each element
    if n > 0 then
        if num_nonnulls(variadic p_fence) > 0 then
            -- In one order, whatever group asks: unsorted they could deadlock.
            perform control.raise_fence_v1(f.key_id, f.scope, f.run, f.number)
               from (select e.key_id, e.scope, e.run, max(e.number) as number
                       from unnest(p_key, p_scope, p_run, p_fence) as e (key_id, scope, run, number)
                      where e.number is not null
                      group by e.key_id, e.scope, e.run order by e.key_id, e.scope, e.run) f;
        end if;
        select array_agg(j.verdict order by j.n),
               array_agg(case when j.until is not null then
                   (extract(epoch from greatest(j.until - v_now, interval '100 ms')) * 1000)::bigint end order by j.n),
               array_agg(j.cause order by j.n),
               count(*) filter (where j.verdict = 'new'), count(*) filter (where j.verdict = 'new' and j.class = 1)
          into v_verdict, v_wait, v_cause, v_new, v_new_batch
          from (
            select e.n, e.class, e.until,
                   case when (e.out).kind is not null then control.floor_cause_v1((e.out).kind)
                        when (e.floor).until = e.until then control.floor_cause_v1((e.floor).kind)
                        else 'cooldown' end as cause,
                   case
                   when (e.live).ticket_id is not null then case when (e.live).owner_id <> p_owner then 'duplicate_debit'
                                                                  when (e.live).state = 'active' then 'granted'
                                                                  when (e.live).state = 'quarantined' then 'ended'
                                                                  else 'queued' end
                   when (select 1 from control.attempt a where a.ticket_id = e.ticket_id) is not null then 'ended'
                   when e.endpoint <> all (g.endpoints) then 'moved'
                   when p_owner <> all (v_fresh) then 'lapsed'
                   when e.fence < (select f.number from control.fence f
                                    where f.key_id = e.key_id and f.scope_id = e.scope and f.run_id = e.run)
                     then 'owner_fence'
                   when (select 1 from control.attempt a
                          where a.key_id = e.key_id and a.debit_id = e.debit_id and a.attempt >= e.attempt
                          limit 1) is not null
                     or (select 1 from control.ticket t
                          where t.key_id = e.key_id and t.debit_id = e.debit_id and t.state <> 'quarantined') is not null
                     or (select 1 from control.ticket t
                          where t.key_id = e.key_id and t.debit_id = e.debit_id and t.state = 'quarantined'
                            and t.attempt >= e.attempt limit 1) is not null
                     or (n > 1 and exists (select from unnest(p_key, p_debit) with ordinality as f (key_id, debit_id, n)
                                            where f.key_id = e.key_id and f.debit_id = e.debit_id and f.n < e.n))
                     then 'duplicate_debit'
                   when e.caller_ms <= 0 then 'deadline_exceeded'
                   when (e.out).kind is not null then 'provider_unavailable'
                   when v_limited and exists (select from control.allowance a
                                               where a.group_id = p_group and a.model in ('', e.model)
                                                 and a.tokens_per_minute < e.tokens) then 'too_large'
                   when v_closed then 'store_closed'
                   when (v_gate = 'cooldown' or e.until is not null)
                    and (not e.waits
                         or e.until > v_now + least(e.queue_ms, coalesce(e.caller_ms, e.queue_ms)) * interval '1 ms')
                     then 'cooldown'
                   else 'new' end as verdict
              from (
                select u.*, f.floor, f.out,
                       (select t from control.ticket t where t.ticket_id = u.ticket_id) as live,
                       greatest((f.floor).until, case when g.breaker = 'open' then g.cooldown_until end) as until
                  from unnest(p_ticket, p_endpoint, p_class, p_model, p_credential, p_key, p_debit, p_attempt, p_tokens,
                              p_queue_ms, p_caller_ms, p_waits, p_scope, p_run, p_fence)
                       with ordinality as u (ticket_id, endpoint, class, model, credential, key_id, debit_id, attempt,
                                             tokens, queue_ms, caller_ms, waits, scope, run, fence, n)
                 cross join lateral (
                    select case when v_floors then control.last_floor_v1(p_group, u.credential, u.model, v_now, false)
                                end as floor,
                           case when v_floors then control.last_floor_v1(p_group, u.credential, u.model, v_now, true)
                                end as out offset 0) f
              ) e
          ) j;
        if num_nonnulls(variadic p_reserved) > 0 or v_budgeted then
            v_key_limit := array_fill(null::text, array[n]);
            for held in select * from control.hold_to_limits_v2(
                p_key, p_debit, p_attempt, p_tokens, p_reserved, p_session, p_bound, v_verdict, p_zone, v_now, v_ahead)
            loop
                v_verdict[held.n] := held.verdict;
                v_wait[held.n] := held.wait_ms;
                v_key_limit[held.n] := held.key_limit;
                v_new := v_new - 1;
                v_new_batch := v_new_batch - p_class[held.n];
            end loop;
        end if;
        v_state := array_fill(null::text, array[n]);
        v_number := array_fill(null::bigint, array[n]);
        v_next := g.next_number;
        for i in 1 .. n loop
            if v_verdict[i] = 'new' then
                v_number[i] := case when p_place[i] < g.next_number then p_place[i] else v_next end;
                v_next := v_next + 1;
            end if;
        end loop;
    end if;

    -- ------------------------------------------------------------ who gets a slot
    if not v_waits and not v_floors and not v_limited and v_new <= v_room and v_new_batch <= v_batch_room then
        for i in 1 .. n loop
            if v_verdict[i] = 'new' then
                v_state[i] := 'active';
            end if;
        end loop;
        v_room := v_room - v_new;
        if v_new_batch > 0 then
            g.batch_credit := 0;
        end if;
    elsif v_room > 0 then
        with candidate as (
            select q.ticket_id, null::integer as n, q.class, q.number, q.model, q.tokens, q.credential
              from control.lanes_v1(p_group) l cross join lateral (
                select t.ticket_id, t.class, t.number, t.model, t.tokens, t.credential from control.ticket t
                 -- A lane as a range: in the order of its own index only. As three equal columns it could be read in the
                 -- order of the whole queue.
                 where t.group_id = p_group and t.state = 'queued'
                   and (t.class, t.credential, t.model) >= (l.class, l.credential, l.model)
                   and (t.class, t.credential, t.model) <= (l.class, l.credential, l.model)
                   and t.owner_id = any (v_fresh) and t.queue_deadline > v_now
                 order by t.class, t.credential, t.model, t.number limit v_room) q
             where not v_limited or coalesce(a_room[array_position(a_model, l.model)], 1) > 0
            union all
            select e.ticket_id, e.n::integer, e.class, v_number[e.n], e.model, e.tokens, e.credential
              from unnest(p_ticket, p_class, p_model, p_tokens, p_credential)
                   with ordinality as e (ticket_id, class, model, tokens, credential, n)
             where v_verdict[e.n] = 'new'
        ), open_ones as (
            select c.* from candidate c
             where not v_floors
                or control.floor_until_v2(p_group, c.credential, c.model, v_now) is null
        )
        select array_agg(c.ticket_id order by c.number, c.ticket_id) filter (where c.class = 0),
               array_agg(c.n order by c.number, c.ticket_id) filter (where c.class = 0),
               array_agg(c.model order by c.number, c.ticket_id) filter (where c.class = 0),
               array_agg(c.tokens order by c.number, c.ticket_id) filter (where c.class = 0),
               array_agg(c.ticket_id order by c.number, c.ticket_id) filter (where c.class = 1),
               array_agg(c.n order by c.number, c.ticket_id) filter (where c.class = 1),
               array_agg(c.model order by c.number, c.ticket_id) filter (where c.class = 1),
               array_agg(c.tokens order by c.number, c.ticket_id) filter (where c.class = 1)
          into i_ticket, i_n, i_model, i_tokens, b_ticket, b_n, b_model, b_tokens
          from open_ones c;
        i := 1;
        b := 1;
        while v_room > 0 loop
            -- The first of each class that may go; a model that is full or used up is passed over for this round.
            while i_ticket[i] is not null and v_limited loop
                m := array_position(a_model, i_model[i]);
                if m is not null and (a_room[m] <= 0 or a_requests[m] < 1 or a_tokens[m] < i_tokens[i]) then
                    v_blocked := v_blocked || i_model[i];
                end if;
                exit when i_model[i] <> all (v_blocked);
                i := i + 1;
            end loop;
            while b_ticket[b] is not null and v_limited loop
                m := array_position(a_model, b_model[b]);
                if m is not null and (a_room[m] <= 0 or a_requests[m] < 1 or a_tokens[m] < b_tokens[b]) then
                    v_blocked := v_blocked || b_model[b];
                end if;
                exit when b_model[b] <> all (v_blocked);
                b := b + 1;
            end loop;
            v_credit := g.batch_credit;
            if i_ticket[i] is not null and b_ticket[b] is not null and v_batch_room > 0 then
                v_take_batch := v_credit >= 9;
                v_credit := case when v_take_batch then 0 else v_credit + 1 end;
            elsif i_ticket[i] is not null then
                v_take_batch := false;
            elsif b_ticket[b] is not null and v_batch_room > 0 then
                v_take_batch := true;
                v_credit := 0;
            else
                exit;
            end if;
            v_model := case when v_take_batch then b_model[b] else i_model[i] end;
            v_need := case when v_take_batch then b_tokens[b] else i_tokens[i] end;
            -- The group's own allowance is used in order: what does not fit waits, and all behind it.
            if m0 is not null and (a_requests[m0] < 1 or a_tokens[m0] < v_need) then
                exit;
            end if;
            if v_limited then
                foreach m in array array[m0, array_position(a_model, v_model)] loop
                    if m is not null then
                        a_room[m] := a_room[m] - 1;
                        a_requests[m] := a_requests[m] - 1;
                        a_tokens[m] := a_tokens[m] - v_need;
                    end if;
                end loop;
            end if;
            if v_take_batch then
                if b_n[b] is null then v_chosen := v_chosen || b_ticket[b]; else v_state[b_n[b]] := 'active'; end if;
                v_batch_room := v_batch_room - 1;
                b := b + 1;
            else
                if i_n[i] is null then v_chosen := v_chosen || i_ticket[i]; else v_state[i_n[i]] := 'active'; end if;
                i := i + 1;
            end if;
            v_room := v_room - 1;
            g.batch_credit := v_credit;
        end loop;
    end if;

    if cardinality(v_chosen) > 0 then
        with locked as (
            -- One that is being taken back right now is passed over: waiting for it could be a deadlock.
            select t.ticket_id from control.ticket t
             where t.ticket_id = any (v_chosen) and t.state = 'queued'
             order by t.ticket_id for update of t skip locked
        ), granted as (
            update control.ticket t
               set state = case when t.owner_id = p_owner then 'active' else 'granted' end,
                   generation = g.generation, granted_at = v_now - v_ahead, day = v_day,
                   grant_expires_at = case when t.owner_id <> p_owner then v_now + p_grant_ttl_ms * interval '1 ms' end,
                   hard_deadline = case when t.owner_id = p_owner
                       then least(v_now + t.execution_limit, t.caller_deadline + t.isolation) end
              from locked l where t.ticket_id = l.ticket_id
            returning t as ticket
        )
        select array_agg(r.ticket) into v_rows from granted r;
        -- Others' grants stay counted until the next count: one that nobody confirms comes back.
        g.waiting := greatest(0, g.waiting - (select count(*) from unnest(v_rows) t where t.owner_id = p_owner));
        g.waiting_batch := greatest(0, g.waiting_batch - (select count(*) from unnest(v_rows) t
                                                           where t.owner_id = p_owner and t.class = 1));
    end if;

    -- ------------------------------------------------------------ who may wait
    for i in 1 .. n loop
        if v_verdict[i] = 'new' and v_state[i] is null then
            v_place := coalesce(p_place[i] < was.next_number, false);
            if (g.waiting >= g.queue_bound or (p_class[i] = 1 and g.waiting_batch >= (g.queue_bound + 1) / 2))
               and not v_counted
               -- A long queue is counted once a second.
               and (g.queue_bound <= 1000 or g.waiting_counted_at < v_now - interval '1 s') then
                select count(*), count(*) filter (where q.class = 1) into g.waiting, g.waiting_batch
                  from (select t.class from control.ticket t where t.group_id = p_group and t.state = 'queued'
                         limit g.queue_bound + g.concurrency + 1) q;
                g.waiting := g.waiting + v_enqueued;
                g.waiting_batch := g.waiting_batch + (select count(*) from unnest(v_state, p_class) as s (state, class)
                                                       where s.state = 'queued' and s.class = 1);
                v_counted := true;
                select count(*), count(*) filter (where t.class = 1) into v_back, v_back_batch
                  from control.ticket t where t.group_id = p_group and t.state = 'granted';
                if g.queue_bound > 1000 then
                    g.waiting_counted_at := v_now;
                end if;
            end if;
            if (v_place and g.waiting < g.queue_bound + g.concurrency)
               or (g.waiting < g.queue_bound and (p_class[i] = 0 or g.waiting_batch < (g.queue_bound + 1) / 2)) then
                v_state[i] := 'queued';
                v_enqueued := v_enqueued + 1;
                g.waiting := g.waiting + 1;
                g.waiting_batch := g.waiting_batch + p_class[i];
            else
                v_verdict[i] := 'queue_full';
            end if;
        end if;
    end loop;
    if v_counted then
        g.waiting := g.waiting + v_back;
        g.waiting_batch := g.waiting_batch + v_back_batch;
    end if;
    if v_enqueued > 0 then
        g.next_number := v_next;
    else
        -- Granted at once, all of them: before whoever comes, without using up a number. A retry keeps that place.
        for i in 1 .. n loop
            if v_state[i] = 'active' and v_number[i] >= g.next_number then
                v_number[i] := g.next_number - 1;
            end if;
        end loop;
    end if;

    if v_new > 0 then
        insert into control.ticket (ticket_id, group_id, endpoint, number, class, model, credential, owner_id, key_id,
                                    debit_id, attempt, tokens, state, waits_for_cooldown, execution_limit, isolation,
                                    queued_at, queue_deadline, caller_deadline, intent, scope_id, run_id, fence,
                                    session_id, reserved_usd, generation, granted_at, day, hard_deadline)
        select e.ticket_id, p_group, e.endpoint, e.number, e.class, e.model, e.credential, p_owner, e.key_id,
               e.debit_id, e.attempt, e.tokens, e.state, e.waits, e.execution_ms * interval '1 ms',
               e.isolation_ms * interval '1 ms', v_now,
               v_now + least(e.queue_ms, coalesce(e.caller_ms, e.queue_ms)) * interval '1 ms',
               v_now + e.caller_ms * interval '1 ms', e.intent, e.scope, e.run, e.fence,
               e.session, coalesce(e.reserved, e.bound),
               case e.state when 'active' then g.generation end,
               case e.state when 'active' then v_now - v_ahead end,
               case e.state when 'active' then v_day end,
               case e.state when 'active'
                    then v_now + least(e.execution_ms, e.caller_ms + e.isolation_ms) * interval '1 ms' end
          from unnest(p_ticket, p_endpoint, v_number, p_class, p_model, p_credential, p_key, p_debit, p_attempt,
                      p_tokens, v_state, p_waits, p_execution_ms, p_isolation_ms, p_queue_ms, p_caller_ms, p_intent,
                      p_scope, p_run, p_fence, p_reserved, p_session, p_bound)
               as e (ticket_id, endpoint, number, class, model, credential, key_id, debit_id, attempt, tokens, state,
                     waits, execution_ms, isolation_ms, queue_ms, caller_ms, intent, scope, run, fence, reserved, session,
                     bound)
         where e.state is not null
        on conflict do nothing;
        get diagnostics v_found = row_count;
        if v_found < (select count(*) from unnest(v_state) s where s is not null) then
            -- The debit got a ticket in another group at the same moment.
            for i in 1 .. n loop
                if v_state[i] is not null and not exists (
                    select from control.ticket t where t.ticket_id = p_ticket[i] and t.owner_id = p_owner) then
                    v_verdict[i] := 'duplicate_debit';
                    v_state[i] := null;
                end if;
            end loop;
        end if;
        if num_nonnulls(variadic p_reserved) > 0 then
            perform control.use_keys_v1(p_key, p_attempt, p_reserved, v_state, v_now);
        end if;
    end if;

    if v_limited then
        update control.allowance a
           set requests_left = coalesce(control.filled_v1(a.requests_left, a.requests_per_minute, a.filled_at, v_now)
                                        - k.requests, 0),
               tokens_left = coalesce(control.filled_v1(a.tokens_left, a.tokens_per_minute, a.filled_at, v_now)
                                      - k.tokens, 0),
               filled_at = v_now
          from (select x.model, count(*) as requests, sum(t.tokens) as tokens
                  from (select r.model, r.tokens from unnest(v_rows) r
                        union all
                        select e.model, e.tokens from unnest(p_model, p_tokens, v_state) as e (model, tokens, state)
                         where e.state = 'active') t
                  cross join lateral (values (''), (t.model)) as x (model)
                 group by x.model) k
         where a.group_id = p_group and a.model = k.model;
    end if;

    if g.breaker = 'half_open' and g.probe is null then
        g.probe := coalesce((v_rows[1]).ticket_id,
                            (select u.t from unnest(p_ticket, v_state) as u (t, s) where u.s = 'active'));
    end if;
    if g is distinct from was then
        update control.capacity_group c
           set next_number = g.next_number, batch_credit = g.batch_credit, probe = g.probe, waiting = g.waiting,
               waiting_batch = g.waiting_batch, waiting_counted_at = g.waiting_counted_at
         where c.group_id = p_group;
    end if;

    -- ------------------------------------------------------------ the answers
    -- From here on v_free is what is left of the slots, whatever the breaker says.
    v_active := v_active + v_free - v_room;
    v_free := least(g.concurrency - v_active, g.concurrency + g.quarantine_headroom - v_active - v_quarantined);
    if 'queue_full' = any (v_verdict) then
        -- There is a place in the queue when the first of it goes.
        v_place_in := nullif(greatest(
            control.expected_ms_v1(g, 0, v_now),
            case when g.breaker = 'open' then (extract(epoch from g.cooldown_until - v_now) * 1000)::bigint end,
            case when v_limited and v_free > 0
                 then (extract(epoch from control.refilled_at_v1(p_group, v_now) - v_now) * 1000)::bigint end), 0);
    end if;
    if cardinality(v_rows) > 0 then
        return query
            select t.ticket_id, case when t.owner_id = p_owner then 'granted' else 'notify' end, t.owner_id, t.group_id,
                   t.number, t.generation, coalesce(t.ticket_id = g.probe, false),
                   a_model && array['', t.model] or g.ramp is not null or coalesce(t.ticket_id = g.probe, false), t.granted_at, t.day,
                   (extract(epoch from t.hard_deadline - v_now) * 1000)::bigint, null::integer, null::text,
                   null::bigint, null::bigint, null::text
              from unnest(v_rows) t;
    end if;
    if n > 0 then
        return query
            select e.ticket_id,
                   case when e.state = 'active' then 'granted' else coalesce(e.state, e.verdict) end,
                   p_owner,
                   case when e.verdict = 'moved'
                        then (select o.group_id from control.endpoint o where o.endpoint = e.endpoint)
                        else coalesce(t.group_id, p_group) end,
                   coalesce(e.number, t.number), coalesce(t.generation, g.generation),
                   -- A replay's ticket may have moved to another group: that one says so.
                   case when t.group_id <> p_group
                        then (select coalesce(o.probe = t.ticket_id, false) from control.capacity_group o
                               where o.group_id = t.group_id)
                        else coalesce(e.ticket_id = g.probe, false) end,
                   case when t.group_id <> p_group
                        then (select o.ramp is not null or coalesce(o.probe = t.ticket_id, false) or exists (
                                         select from control.allowance a
                                          where a.group_id = o.group_id and a.model in ('', t.model))
                                from control.capacity_group o where o.group_id = t.group_id)
                        else a_model && array['', e.model] or g.ramp is not null
                             or coalesce(e.ticket_id = g.probe, false) end,
                   coalesce(t.granted_at, v_now - v_ahead), coalesce(t.day, v_day),
                   case when t.ticket_id is not null then (extract(epoch from t.hard_deadline - v_now) * 1000)::bigint
                        else least(e.execution_ms, e.caller_ms + e.isolation_ms) end,
                   null::integer,
                   case when e.state = 'queued' or e.verdict = 'queued' then
                        case when v_closed then 'store'
                             when (f.floor).until >= case when g.breaker = 'open' then g.cooldown_until
                                                          else (f.floor).until end
                                  then control.floor_cause_v1((f.floor).kind)
                             when g.breaker <> 'closed' or (g.ramp is not null and v_free > 0) then 'cooldown'
                             when g.concurrency = 0
                                  or (v_limited and (select a.concurrency from control.allowance a
                                                      where a.group_id = p_group and a.model = e.model) = 0)
                                  then 'stopped'
                             when v_free <= 0 and v_quarantined > 0 and g.ramp is null and g.concurrency > v_active
                                  then 'quarantine'
                             when v_free > 0 and a_room[array_position(a_model, e.model)] <= 0 then 'model_capacity'
                             when v_free > 0 and num_nonnulls(
                                      a_requests[array_position(a_model, e.model)], a_requests[m0],
                                      a_tokens[array_position(a_model, e.model)], a_tokens[m0]) > 0 then 'rate'
                             else 'capacity' end
                        when e.verdict in ('cooldown', 'provider_unavailable') then e.cause end,
                   case when e.verdict in ('cooldown', 'provider_unavailable', 'key_limit', 'budget_exceeded',
                                           'budget_reserved') then e.wait
                        when e.verdict = 'store_closed'
                        then (select (extract(epoch from s.closed_until - v_now) * 1000)::bigint from control.store s)
                        when e.state = 'queued' or e.verdict = 'queued' then
                            (extract(epoch from greatest(
                                case when g.breaker = 'open' then g.cooldown_until end,
                                (f.floor).until) - v_now) * 1000)::bigint end,
                   case when e.verdict = 'queue_full' then v_place_in end,
                   e.key_limit
              from unnest(p_ticket, p_endpoint, p_model, p_credential, p_tokens, p_execution_ms, p_isolation_ms,
                          p_caller_ms, v_verdict, v_state, v_number, v_wait, v_cause, v_key_limit)
                   as e (ticket_id, endpoint, model, credential, tokens, execution_ms, isolation_ms, caller_ms, verdict,
                         state, number, wait, cause, key_limit)
             cross join lateral (
                select case when v_floors and (e.state = 'queued' or e.verdict = 'queued')
                            then control.last_floor_v1(p_group, e.credential, e.model, v_now, false) end as floor
                offset 0) f
              -- Only a replay's own row has not just been written by this statement.
              left join control.ticket t on e.verdict in ('granted', 'queued') and t.ticket_id = e.ticket_id
             -- A replay that was granted here has its answer.
             where not exists (select from unnest(v_rows) r where r.ticket_id = e.ticket_id and r.owner_id = p_owner);
    end if;
    if v_waits or v_enqueued > 0 then
        return query
            select null::uuid, 'next', null::uuid, p_group, null::bigint, null::bigint, null::boolean, null::boolean,
                   null::timestamptz, null::date, null::bigint, null::integer, null::text,
                   (extract(epoch from least(
                        (select min(coalesce(t.quarantined_until, t.grant_expires_at)) from control.ticket t
                          where t.group_id = p_group and t.state in ('granted', 'quarantined')),
                        (select min(f.until) from control.floor f where f.group_id = p_group and f.until > v_now),
                        case when v_limited then control.refilled_at_v1(p_group, v_now) end,
                        case when g.breaker = 'open' then g.cooldown_until end) - v_now) * 1000)::bigint,
                   null::bigint, null::text;
    end if;
end $$;

-- When the first that waits for an allowance has enough of it.
create or replace function control.refilled_at_v1(p_group text, p_now timestamptz) returns timestamptz
language sql stable as $$
    select p_now + min(w.seconds) * interval '1 s'
      from control.allowance a
     cross join lateral (
        select h.tokens
          from control.lanes_v1(p_group) l cross join lateral (
            select t.class, t.number, t.tokens from control.ticket t
             where t.group_id = p_group and t.state = 'queued'
               and (t.class, t.credential, t.model) >= (l.class, l.credential, l.model)
               and (t.class, t.credential, t.model) <= (l.class, l.credential, l.model)
             order by t.class, t.credential, t.model, t.number limit 1) h
         where a.model in ('', l.model)
         order by h.class, h.number limit 1) head
     cross join lateral (
        select greatest(
            (1 - control.filled_v1(a.requests_left, a.requests_per_minute, a.filled_at, p_now))
                * 60 / a.requests_per_minute,
            (head.tokens - control.filled_v1(a.tokens_left, a.tokens_per_minute, a.filled_at, p_now))
                * 60 / a.tokens_per_minute) as seconds) w
     where a.group_id = p_group and w.seconds > 0
$$;

-- The newest executor of a run is known from here on; tickets of older ones that still wait are let go.
create or replace function control.raise_fence_v1(p_key uuid, p_scope text, p_run text, p_number bigint) returns void
language plpgsql as $$
begin
    insert into control.fence as f (key_id, scope_id, run_id, number, seen_at)
    values (p_key, p_scope, p_run, p_number, clock_timestamp())
    on conflict (key_id, scope_id, run_id) do update set number = excluded.number, seen_at = excluded.seen_at
     where f.number < excluded.number;
    if found then
        delete from control.ticket t where t.ticket_id = any (array(
            select q.ticket_id from control.ticket q
             where q.key_id = p_key and q.scope_id = p_scope and q.run_id = p_run and q.fence < p_number
               and q.state = 'queued'
             limit 1000 for update skip locked));
    end if;
end $$;

-- The store is another than it was: what it has forgotten may still run, so nothing is granted for as long as that can.
create or replace function control.close_store_v1(p_hold_ms bigint) returns void
language sql as $$
    update control.store s
       set timeline = left(pg_walfile_name(pg_current_wal_insert_lsn()), 8),
           closed_until = clock_timestamp() + s.ahead + p_hold_ms * interval '1 ms'
     where s.timeline <> left(pg_walfile_name(pg_current_wal_insert_lsn()), 8)
$$;
