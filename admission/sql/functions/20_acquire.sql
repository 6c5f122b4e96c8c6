-- acquire_v1: enqueue these tickets in one group, then grant in ticket order what fits. One short transaction.
--
-- Arrays run in parallel, one element a ticket; all may be empty, which only advances the queue. Lock and count are
-- separate statements: a single statement would take its snapshot before it has waited for the lock, and over-admit.
--
-- Answers a row for each element and for each ticket of this owner that was granted here:
--   granted | queued | queue_full | deadline_exceeded | cooldown | duplicate_debit | ended | lapsed
-- and the rows "notify" (another owner's ticket was granted: tell it after the commit) and "next" (milliseconds until
-- the next event that time alone brings about).

create or replace function control.acquire_v1(
    p_group text, p_owner uuid, p_grant_ttl_ms integer, p_zone text,
    p_ticket uuid[], p_class smallint[], p_model text[], p_key uuid[], p_debit text[], p_attempt integer[],
    p_execution_ms bigint[], p_isolation_ms bigint[], p_queue_ms bigint[], p_caller_ms bigint[],
    p_waits_for_cooldown boolean[], p_intent jsonb[]
) returns table (
    ticket_id uuid, answer text, owner_id uuid, generation bigint, probe boolean, granted_at timestamptz, day date,
    remaining_ms bigint, ahead integer, wait_reason text, wait_ms bigint
)
language plpgsql as $$
#variable_conflict use_column
declare
    g control.capacity_group;
    v_now timestamptz;
    v_occupied integer;
    v_batch_occupied integer;
    v_queued integer;
    v_batch_queued integer;
    v_free integer;
    v_at_once integer;
    v_answers jsonb := '{}';
    v_accepted integer;
    v_interactive integer;
    v_batch integer;
    v_granted uuid[];
    v_is_probe boolean;
    v_due boolean;
    v_fresh uuid[];
begin
    if current_setting('transaction_isolation') <> 'read committed' then
        raise exception 'admission needs read committed' using errcode = 'invalid_transaction_state';
    end if;
    select * into g from control.capacity_group where group_id = p_group for update;
    if not found then
        raise exception 'no such capacity group' using errcode = 'no_data_found';
    end if;
    v_now := clock_timestamp();
    v_fresh := array(select o.owner_id from control.owner o where o.expires_at > v_now);
    -- One look at the slots counts them and tells whether time has changed anything.
    select count(*), count(*) filter (where t.class = 1),
           bool_or(least(t.hard_deadline, t.quarantined_until, t.grant_expires_at) <= v_now
                   or t.owner_id <> all (v_fresh))
      into v_occupied, v_batch_occupied, v_due
      from control.ticket t where t.group_id = p_group and t.state <> 'queued';
    if v_due or g.breaker <> 'closed' or control.queue_is_due_v1(p_group, v_fresh, v_now) then
        perform control.reconcile_v1(p_group, v_now);
        select * into g from control.capacity_group where group_id = p_group;
        select count(*), count(*) filter (where t.class = 1) into v_occupied, v_batch_occupied
          from control.ticket t where t.group_id = p_group and t.state <> 'queued';
    end if;
    v_free := greatest(0, g.concurrency - v_occupied);
    if g.breaker = 'open' or (g.breaker = 'half_open' and g.probe is not null) then
        v_free := 0;
    elsif g.breaker = 'half_open' then
        v_free := least(v_free, 1);
    end if;

    if cardinality(p_ticket) > 0 then
        select count(*), count(*) filter (where q.class = 1) into v_queued, v_batch_queued
          from (select t.class from control.ticket t where t.group_id = p_group and t.state = 'queued'
                 limit g.queue_bound + 1) q;
        -- What is granted at once takes no place in the queue.
        v_at_once := greatest(0, v_free - v_queued);

        with element as (
            select e.*, row_number() over (order by e.n) as ord
              from unnest(p_ticket, p_class, p_model, p_key, p_debit, p_attempt, p_execution_ms, p_isolation_ms,
                          p_queue_ms, p_caller_ms, p_waits_for_cooldown, p_intent)
                   with ordinality as e (ticket_id, class, model, key_id, debit_id, attempt, execution_ms,
                                         isolation_ms, queue_ms, caller_ms, waits_for_cooldown, intent, n)
        ), judged as (
            select e.*,
                   case
                   when exists (select from control.ticket t
                                 where t.ticket_id = e.ticket_id and t.owner_id = p_owner) then 'replay'
                   when exists (select from control.attempt a where a.ticket_id = e.ticket_id) then 'ended'
                   when p_owner <> all (v_fresh) then 'lapsed'
                   when exists (select from control.attempt a
                                 where a.key_id = e.key_id and a.debit_id = e.debit_id and a.attempt >= e.attempt)
                     or exists (select from control.ticket t
                                 where t.key_id = e.key_id and t.debit_id = e.debit_id and t.state <> 'quarantined')
                     or exists (select from element f
                                 where f.key_id = e.key_id and f.debit_id = e.debit_id and f.ord < e.ord)
                     then 'duplicate_debit'
                   when e.caller_ms is not null and e.caller_ms <= 0 then 'deadline_exceeded'
                   when (g.breaker = 'open' or (g.breaker = 'half_open' and g.probe is not null))
                    and (not e.waits_for_cooldown
                         or g.cooldown_until > v_now + least(e.queue_ms, coalesce(e.caller_ms, e.queue_ms))
                                                       * interval '1 ms') then 'cooldown'
                   else 'new' end as verdict
              from element e
        ), ranked as (
            select j.*, row_number() over (partition by j.verdict order by j.ord) as rank,
                   row_number() over (partition by j.verdict, j.class order by j.ord) as class_rank
              from judged j
        ), fitting as (
            -- Batch takes at most half of the queue: a large submission must not turn interactive callers away.
            select r.* from ranked r
             where r.verdict = 'new' and r.rank <= greatest(0, g.queue_bound - v_queued) + v_at_once
               and (r.class = 0
                    or r.class_rank <= greatest(0, (g.queue_bound + 1) / 2 - v_batch_queued) + v_at_once)
        ), inserted as (
            insert into control.ticket (ticket_id, group_id, number, class, model, owner_id, key_id, debit_id, attempt,
                                        state, waits_for_cooldown, execution_limit, isolation, queued_at,
                                        queue_deadline, caller_deadline, intent)
            select r.ticket_id, p_group, g.next_number + r.rank - 1, r.class, r.model, p_owner, r.key_id, r.debit_id,
                   r.attempt, 'queued', r.waits_for_cooldown, r.execution_ms * interval '1 ms',
                   r.isolation_ms * interval '1 ms', v_now,
                   v_now + least(r.queue_ms, coalesce(r.caller_ms, r.queue_ms)) * interval '1 ms',
                   v_now + r.caller_ms * interval '1 ms', r.intent
              from fitting r
            on conflict do nothing
            returning ticket_id
        )
        select jsonb_object_agg(r.ticket_id,
                   case when r.verdict <> 'new' then r.verdict
                        when f.ticket_id is null then 'queue_full'
                        when i.ticket_id is null then 'duplicate_debit'
                        else 'queued' end),
               count(*) filter (where i.ticket_id is not null)
          into v_answers, v_accepted
          from ranked r left join fitting f using (ticket_id) left join inserted i using (ticket_id);
        if v_accepted > 0 then
            update control.capacity_group set next_number = next_number + cardinality(p_ticket)
             where group_id = p_group;
        end if;
    end if;

    if v_free > 0 then
        -- Interactive first; while both wait, every tenth grant is batch, and batch never takes the last slot.
        with waiting as (
            (select q.ticket_id, q.class, row_number() over (order by q.number) as r
               from control.ticket q
              where q.group_id = p_group and q.state = 'queued' and q.class = 0
                and q.owner_id = any (v_fresh)
              order by q.number limit v_free)
            union all
            (select q.ticket_id, q.class, row_number() over (order by q.number)
               from control.ticket q
              where q.group_id = p_group and q.state = 'queued' and q.class = 1
                and q.owner_id = any (v_fresh)
              order by q.number
              limit least(v_free, greatest(0, (case when g.concurrency > 1 then g.concurrency - 1 else 1 end)
                                              - v_batch_occupied)))
        ), chosen as (
            select w.ticket_id, w.class from waiting w
             order by case when w.class = 0 then w.r::numeric else 9 * w.r - g.batch_credit + 0.5 end
             limit v_free
        ), locked as (
            -- One that is being taken back right now is passed over: waiting for it could be a deadlock.
            select t.ticket_id from control.ticket t join chosen c on c.ticket_id = t.ticket_id
             where t.state = 'queued' for update of t skip locked
        ), granted as (
            update control.ticket t
               set state = case when t.owner_id = p_owner then 'active' else 'granted' end,
                   generation = g.generation, granted_at = v_now,
                   grant_expires_at = case when t.owner_id <> p_owner then v_now + p_grant_ttl_ms * interval '1 ms' end,
                   hard_deadline = case when t.owner_id = p_owner
                       then least(v_now + t.execution_limit, t.caller_deadline + t.isolation) end
              from locked l where t.ticket_id = l.ticket_id
            returning t.*
        ), opened as (
            insert into control.attempt (ticket_id, key_id, debit_id, attempt, group_id, owner_id, granted_at, day,
                                         state, intent)
            select r.ticket_id, r.key_id, r.debit_id, r.attempt, r.group_id, r.owner_id, v_now,
                   (v_now at time zone p_zone)::date, 'open', r.intent
              from granted r where r.owner_id = p_owner
            on conflict do nothing
        )
        select array_agg(r.ticket_id), count(*) filter (where r.class = 0), count(*) filter (where r.class = 1)
          into v_granted, v_interactive, v_batch
          from granted r;
        if v_granted is not null then
            v_is_probe := g.breaker = 'half_open';
            if v_is_probe then
                update control.capacity_group set probe = v_granted[1] where group_id = p_group;
            end if;
            if g.batch_credit > 0 or v_batch > 0 or exists (
                select from control.ticket q where q.group_id = p_group and q.state = 'queued' and q.class = 1) then
                update control.capacity_group
                   set batch_credit = greatest(0, least(9, batch_credit + v_interactive - 9 * v_batch))
                 where group_id = p_group;
            end if;
        end if;
    end if;

    -- This owner's grants, and another owner's to be told.
    return query
        select t.ticket_id, case when t.owner_id = p_owner then 'granted' else 'notify' end, t.owner_id, t.generation,
               coalesce(v_is_probe, false), t.granted_at, (t.granted_at at time zone p_zone)::date,
               (extract(epoch from t.hard_deadline - v_now) * 1000)::bigint, null::integer, null::text, null::bigint
          from control.ticket t where t.ticket_id = any (v_granted);
    -- The elements that were not granted just now.
    return query
        select e.ticket_id,
               case when v_answers ->> e.ticket_id::text <> 'replay' then v_answers ->> e.ticket_id::text
                    when t.state = 'active' then 'granted' when t.state = 'quarantined' then 'ended'
                    else 'queued' end,
               t.owner_id, t.generation, coalesce(t.ticket_id = g.probe, false), t.granted_at,
               (t.granted_at at time zone p_zone)::date,
               (extract(epoch from t.hard_deadline - v_now) * 1000)::bigint,
               case when t.state = 'queued' then control.ahead_v1(p_group, t.class, t.number) end,
               case when t.state = 'queued' then control.wait_reason_v1(p_group) end,
               case when v_answers ->> e.ticket_id::text = 'cooldown' or g.breaker = 'open'
                    then (extract(epoch from greatest(g.cooldown_until - v_now, interval '100 ms')) * 1000)::bigint end
          from unnest(p_ticket) as e (ticket_id)
          left join control.ticket t on t.ticket_id = e.ticket_id
         where v_granted is null or e.ticket_id <> all (v_granted);
    return query
        select null::uuid, 'next', null::uuid, null::bigint, null::boolean, null::timestamptz, null::date, null::bigint,
               null::integer, null::text,
               (extract(epoch from least(
                    (select min(coalesce(t.quarantined_until, t.grant_expires_at)) from control.ticket t
                      where t.group_id = p_group and t.state in ('granted', 'quarantined')),
                    case when g.breaker = 'open' then g.cooldown_until end) - v_now) * 1000)::bigint
         where exists (select from control.ticket t where t.group_id = p_group and t.state = 'queued');
end $$;

-- How many tickets are before this one in its group's queue, at most 100.
create or replace function control.ahead_v1(p_group text, p_class smallint, p_number bigint) returns integer
language sql stable as $$
    select count(*)::integer from (
        select from control.ticket q
         where q.group_id = p_group and q.state = 'queued' and (q.class, q.number) < (p_class, p_number)
         limit 100) before
$$;

-- Why a group's queue does not move: "cooldown", "quarantine" (without it there would be a free slot) or "capacity".
create or replace function control.wait_reason_v1(p_group text) returns text
language sql stable as $$
    select case when g.breaker <> 'closed' then 'cooldown'
                when s.active < g.concurrency and s.quarantined > 0 then 'quarantine'
                else 'capacity' end
      from control.capacity_group g,
           (select count(*) filter (where t.state <> 'quarantined') as active,
                   count(*) filter (where t.state = 'quarantined') as quarantined
              from control.ticket t where t.group_id = p_group and t.state <> 'queued') s
     where g.group_id = p_group
$$;
