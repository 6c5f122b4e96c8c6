-- What most calls do: a slot is free, nobody waits for it and nothing is special; an attempt has ended, and nothing is to
-- be learnt of it. Small statements, each of few parts, because setting up its plan costs more than what a statement reads.
-- They run on connections that have been told how to plan (admission/store.py).

-- acquire_v3: as acquire_v2, whose answers it gives, with its elements as JSON; their fields are listed below. A field that
-- is not there is null.
--
-- Where all of these elements are granted as they come, the answer is the one row "all": the `number` of each whose place
-- is not lower, and the rest each has of its own is what was asked for.
create or replace function control.acquire_v3(
    p_group text, p_owner uuid, p_grant_ttl_ms integer, p_hold_ms bigint, p_zone text, p_demands json,
    p_clock timestamptz, p_steps bigint, p_elapsed_ms bigint, p_forward_ms bigint
) returns table (
    ticket_id uuid, answer text, owner_id uuid, group_id text, number bigint, generation bigint, probe boolean,
    judged boolean, granted_at timestamptz, day date, remaining_ms bigint, ahead integer, wait_reason text,
    wait_ms bigint, expected_ms bigint, key_limit text
)
language plpgsql as $$
#variable_conflict use_column
declare
    n constant integer := json_array_length(p_demands);
    -- Before the wait for the lock.
    v_entered constant timestamptz := clock_timestamp();
    v_usual boolean := false;
    v_limit integer;
    v_headroom integer;
    v_endpoints text[];
    v_generation bigint;
    v_last bigint;
    v_now timestamptz;
    v_ahead interval;
    v_day date;
    v_fresh uuid[];
    v_known boolean;
    v_waits boolean;
    v_limited boolean;
    -- There is room for all of these even if each is of the class batch, whose turn is then over.
    v_batch boolean;
    v_found integer;
    v_waited interval;
begin
    if n > 0 then
        select c.concurrency, c.quarantine_headroom, c.endpoints, c.generation, c.next_number - 1,
               c.breaker = 'closed' and c.ramp is null, c.batch_credit = 0
          into v_limit, v_headroom, v_endpoints, v_generation, v_last, v_usual, v_batch
          from control.capacity_group c where c.group_id = p_group for update;
    end if;
    if v_usual then
        select x.raw + s.ahead, s.ahead, (x.raw at time zone p_zone)::date,
               array(select w.owner_id from control.owner w where w.expires_at > x.raw + s.ahead),
               s.steps = p_steps
                   and s.timeline = left(pg_walfile_name(pg_current_wal_insert_lsn()), 8)
                   and coalesce(s.closed_until <= x.raw + s.ahead, true)
                   and not control.is_off_v1(
                       control.off_by_v1(x.raw, s.ahead, p_clock, p_elapsed_ms, p_forward_ms, v_entered), p_forward_ms)
                   and current_setting('transaction_isolation') = 'read committed'
          into v_now, v_ahead, v_day, v_fresh, v_known
          from control.store s, (select clock_timestamp() as raw offset 0) x;
        select v_known and p_owner = any (v_fresh)
                   and n <= least(v_limit, v_limit + v_headroom - count(*) filter (where t.state = 'quarantined'))
                            - count(*) filter (where t.state <> 'quarantined')
                   and not coalesce(bool_or(coalesce(t.quarantined_until, t.grant_expires_at, t.hard_deadline) <= v_now
                                            or (t.state <> 'quarantined' and t.owner_id <> all (v_fresh))), false)
                   and not exists (select from control.floor f where f.group_id = p_group and f.until > v_now),
               exists (select from control.ticket q where q.group_id = p_group and q.state = 'queued'),
               exists (select from control.allowance a where a.group_id = p_group),
               v_batch and n <= greatest(v_limit - 1, 1) - count(*) filter (where t.class = 1)
          into v_usual, v_waits, v_limited, v_batch
          from control.ticket t where t.group_id = p_group and t.state <> 'queued';
        if v_usual and v_waits then
            v_usual := not control.may_move_v1(p_group)
                and not exists (select from control.ticket t
                                 where t.group_id = p_group and t.state = 'queued'
                                   and t.queue_deadline > '-infinity' and t.queue_deadline < v_now - interval '2 s');
        end if;
        if v_usual and v_limited then
            v_usual := not exists (select from control.allowance a
                                    where a.group_id = p_group
                                      and (a.model = '' or a.model in (select e.value ->> 'model'
                                                                         from json_array_elements(p_demands) e)));
        end if;
    end if;
    if v_usual then
        insert into control.ticket (ticket_id, group_id, endpoint, number, class, model, credential, owner_id, key_id,
                                    debit_id, attempt, tokens, state, waits_for_cooldown, execution_limit, isolation,
                                    queued_at, queue_deadline, caller_deadline, intent, session_id, reserved_usd,
                                    generation, granted_at, day, hard_deadline)
        select e.ticket_id, p_group, e.endpoint, least(e.place, v_last), e.class, e.model, e.credential,
               p_owner, e.key_id, e.debit_id, e.attempt, e.tokens, 'active', e.waits, e.execution_ms * interval '1 ms',
               e.isolation_ms * interval '1 ms', v_now, v_now, v_now + e.caller_ms * interval '1 ms', e.intent,
               e.session, e.bound, v_generation, v_now - v_ahead, v_day,
               v_now + least(e.execution_ms, e.caller_ms + e.isolation_ms) * interval '1 ms'
          from json_to_recordset(p_demands) as e (
                   ticket_id uuid, endpoint text, place bigint, class smallint, model text, credential text, key_id uuid,
                   debit_id text, attempt integer, tokens bigint, waits boolean, execution_ms bigint,
                   isolation_ms bigint, caller_ms bigint, intent text, session text, bound numeric, reserved numeric,
                   fence bigint)
         where (e.class = 0 or v_batch) and e.endpoint = any (v_endpoints) and coalesce(e.caller_ms > 0, true)
           and e.fence is null and e.reserved is null
           and (e.session is null
                or (select 1 from control.session_budget b
                     where b.key_id = e.key_id and b.session_id = e.session) is null)
           -- Looked up one by one, never by a join or exists(): planned while the table is small, these would read all
           -- of it for ever.
           and (select 1 from control.attempt a where a.ticket_id = e.ticket_id) is null
           and (select 1 from control.attempt a
                 where a.key_id = e.key_id and a.debit_id = e.debit_id and a.attempt >= e.attempt limit 1) is null
           and (select 1 from control.ticket q
                 where q.key_id = e.key_id and q.debit_id = e.debit_id and q.state = 'quarantined' limit 1) is null
           -- Looked at, and not only run into: where it is just being settled, the insert would wait for that and find its
           -- place free, and the end is not in what this statement sees.
           and (select 1 from control.ticket q
                 where q.key_id = e.key_id and q.debit_id = e.debit_id and q.state <> 'quarantined') is null
        on conflict do nothing;
        get diagnostics v_found = row_count;
        if v_found = n then
            answer := 'all';
            owner_id := p_owner;
            group_id := p_group;
            number := v_last;
            generation := v_generation;
            probe := false;
            judged := false;
            granted_at := v_now - v_ahead;
            day := v_day;
            return next;
            return;
        end if;
        -- One of them is special, or a replay, or its debit has just got a ticket elsewhere: each is looked at for itself,
        -- in their order, as if nothing had been written. Only what was written here was queued at this time.
        if v_found > 0 then
            delete from control.ticket t
             where t.ticket_id = any (array(select (e.value ->> 'ticket_id')::uuid from json_array_elements(p_demands) e))
               and t.owner_id = p_owner and t.queued_at = v_now;
        end if;
    end if;

    -- The wait for the lock was here.
    v_waited := clock_timestamp() - v_entered;
    return query
        select a.*
          from (select array_agg(e.ticket_id) as ticket_id, array_agg(e.endpoint) as endpoint, array_agg(e.class) as class,
                       array_agg(e.model) as model, array_agg(e.credential) as credential, array_agg(e.key_id) as key_id,
                       array_agg(e.debit_id) as debit_id, array_agg(e.attempt) as attempt, array_agg(e.tokens) as tokens,
                       array_agg(e.place) as place, array_agg(e.execution_ms) as execution_ms,
                       array_agg(e.isolation_ms) as isolation_ms, array_agg(e.queue_ms) as queue_ms,
                       array_agg(e.caller_ms) as caller_ms, array_agg(e.waits) as waits, array_agg(e.intent) as intent,
                       array_agg(e.scope) as scope, array_agg(e.run) as run, array_agg(e.fence) as fence,
                       array_agg(e.reserved) as reserved, array_agg(e.session) as session, array_agg(e.bound) as bound
                  from json_to_recordset(p_demands) as e (
                           ticket_id uuid, endpoint text, class smallint, model text, credential text, key_id uuid,
                           debit_id text, attempt integer, tokens bigint, place bigint, execution_ms bigint,
                           isolation_ms bigint, queue_ms bigint, caller_ms bigint, waits boolean, intent text,
                           scope text, run text, fence bigint, reserved numeric, session text, bound numeric)) d
         cross join lateral control.acquire_v2(
            p_group, p_owner, p_grant_ttl_ms, p_hold_ms, p_zone, coalesce(d.ticket_id, '{}'), d.endpoint, d.class, d.model,
            d.credential, d.key_id, d.debit_id, d.attempt, d.tokens, d.place, d.execution_ms, d.isolation_ms, d.queue_ms,
            d.caller_ms, d.waits, d.intent, d.scope, d.run, d.fence, p_clock, p_steps,
            p_elapsed_ms + case when v_waited > interval '0' and not control.is_off_v1(v_waited, p_forward_ms)
                                then (extract(epoch from v_waited) * 1000)::bigint else 0 end,
            p_forward_ms, d.reserved, d.session, d.bound) a;
end $$;

-- settle_clean_v1: as settle_v2, of attempts that have ended, each for certain, and whose outcomes move nothing: no breaker,
-- no floor, no allowance. It takes no group's lock: removing a row only lowers a count.
create or replace function control.settle_clean_v1(p_shard smallint, p_ticket uuid[], p_state text[], p_record text[])
returns table (ticket_id uuid, applied boolean, counters text, group_id text, waiters boolean)
language plpgsql as $$
#variable_conflict use_column
declare
    v_lines control.ledger_line[];
    -- Whose slots came free, and where. An attempt that had an end before keeps the group that it was of then.
    v_freed uuid[];
    v_groups text[];
    v_usual boolean;
    v_waiting text[] := '{}';
begin
    with freed as (
        -- By an index, keys are looked up in its order: so several rows are locked by id, as everywhere.
        delete from control.ticket t where t.ticket_id = any (p_ticket) and t.state in ('active', 'quarantined')
        returning t.ticket_id, t.group_id, t.key_id, t.debit_id, t.attempt, t.owner_id, t.granted_at, t.day, t.intent,
                  p_state[array_position(p_ticket, t.ticket_id)] as state,
                  p_record[array_position(p_ticket, t.ticket_id)] as record
    ), opened as (
        insert into control.attempt (ticket_id, key_id, debit_id, attempt, group_id, owner_id, granted_at, day, state,
                                     settled_at)
        select t.ticket_id, t.key_id, t.debit_id, t.attempt, t.group_id, t.owner_id, t.granted_at, t.day, t.state,
               clock_timestamp()
          from freed t
        on conflict do nothing
        returning attempt.ticket_id
    )
    select array_agg(row(t.ticket_id, 'open', t.state, t.granted_at, t.day, t.key_id, t.debit_id, t.attempt,
                         t.group_id, t.intent::jsonb || t.record::jsonb)::control.ledger_line)
               filter (where t.ticket_id in (select o.ticket_id from opened o)),
           array_agg(t.ticket_id), array_agg(t.group_id)
      into v_lines, v_freed, v_groups
      from freed t;
    v_usual := cardinality(v_lines) is not distinct from cardinality(p_ticket);
    if not v_usual then
        v_lines := v_lines || control.correct_v2(
            array(select u from unnest(p_ticket) u where not exists (select from unnest(v_lines) l where l.ticket_id = u)),
            p_ticket, p_state, p_record);
        v_groups := array(
            select coalesce(v_groups[array_position(v_freed, e.ticket_id)],
                            (select a.group_id from control.attempt a where a.ticket_id = e.ticket_id))
              from unnest(p_ticket) with ordinality as e (ticket_id, n) order by e.n);
        v_freed := p_ticket;
    end if;
    for i in 1 .. cardinality(v_groups) loop
        if array_position(v_groups, v_groups[i]) = i and control.may_move_v1(v_groups[i]) then
            v_waiting := v_waiting || v_groups[i];
            perform control.paced_v1(v_groups[i], v_lines);
        end if;
    end loop;
    if v_usual then
        return query
            select r.ticket_id, true, r.counters::text, v_groups[array_position(v_freed, r.ticket_id)],
                   v_groups[array_position(v_freed, r.ticket_id)] = any (v_waiting)
              from control.record_v2(p_shard, v_lines) r;
    else
        return query
            select e.ticket_id, r.ticket_id is not null, r.counters::text, e.group_id,
                   coalesce(e.group_id = any (v_waiting), false)
              from unnest(v_freed, v_groups) as e (ticket_id, group_id)
              left join control.record_v2(p_shard, v_lines) r on r.ticket_id = e.ticket_id;
    end if;
end $$;
