-- The terms that the statements share: time, who lives, what a bucket holds, what keeps a ticket back.

-- The store's time. Statements of the hot path read the row themselves.
create or replace function control.now_v1() returns timestamptz
language sql volatile as $$ select clock_timestamp() + s.ahead from control.store s $$;

create or replace function control.is_off_v1(p_by interval, p_forward_ms bigint) returns boolean
language sql immutable as $$
    select coalesce(p_by < interval '-1 s' or p_by > p_forward_ms * interval '1 ms', false)
$$;

-- How far the store's time is from what a process knows. A wait that is longer than a lock may take was none: the clock
-- was set meanwhile.
create or replace function control.off_by_v1(
    p_raw timestamptz, p_ahead interval, p_clock timestamptz, p_elapsed_ms bigint, p_forward_ms bigint,
    p_entered timestamptz
) returns interval
language sql immutable as $$
    select p_raw - p_clock + p_ahead - p_elapsed_ms * interval '1 ms'
         - case when p_raw > p_entered and not control.is_off_v1(p_raw - p_entered, p_forward_ms)
                then p_raw - p_entered else interval '0' end
$$;

drop function if exists control.keep_time_v1(timestamptz, bigint, bigint, bigint, timestamptz);

-- The store's time, held against what a process knows: what it was told last, and how long ago that was by its own
-- steady clock. Where the server's clock was set meanwhile, the offset takes the step up, so that time neither returns,
-- nor stands still, nor leaps. Only who has been told of all steps so far is believed: another would undo them. A message
-- that was long on its way looks like a step forward, so only one of more than p_forward_ms is believed; less than that
-- isolation has to cover.
--
-- The time that is answered is the one that was held against it, and is to be used as it is: the clock may be set between
-- any two looks at it. p_entered, from before a wait for locks, tells how long that was.
create or replace function control.keep_time_v2(
    p_clock timestamptz, p_steps bigint, p_elapsed_ms bigint, p_forward_ms bigint, p_entered timestamptz
) returns timestamptz
language plpgsql as $$
declare
    v_now timestamptz;
    v_steps bigint;
    v_by interval;
begin
    loop
        select c.raw + c.ahead, c.steps,
               control.off_by_v1(c.raw, c.ahead, p_clock, p_elapsed_ms, p_forward_ms, p_entered)
          into v_now, v_steps, v_by
          from (select x.raw, s.ahead, s.steps
                  from control.store s, (select clock_timestamp() as raw offset 0) x offset 0) c;
        if v_steps <> p_steps or not control.is_off_v1(v_by, p_forward_ms) then
            return v_now;
        end if;
        update control.store s set ahead = s.ahead - v_by, steps = s.steps + 1 where s.steps = v_steps;
    end loop;
end $$;

create or replace function control.owner_is_fresh_v1(p_owner uuid, p_now timestamptz) returns boolean
language sql stable as $$
    select exists (select from control.owner o where o.owner_id = p_owner and o.expires_at > p_now)
$$;

-- Lapsed, and not merely unheard because the store itself was away.
create or replace function control.owner_is_dead_v1(p_owner uuid, p_now timestamptz) returns boolean
language sql stable as $$
    select not exists (select from control.owner o where o.owner_id = p_owner and o.expires_at > p_now)
       and exists (select from control.reclaim r where r.not_before <= p_now)
$$;

-- What a bucket holds now; null where there is no limit.
create or replace function control.filled_v1(
    p_left double precision, p_per_minute double precision, p_filled_at timestamptz, p_now timestamptz
) returns double precision
language sql immutable as $$
    select case when p_per_minute is not null then least(
        p_per_minute,
        p_left + p_per_minute * greatest(extract(epoch from p_now - p_filled_at)::double precision, 0) / 60) end
$$;

-- Until when a floor keeps this credential's model back; null where none does.
create or replace function control.floor_until_v2(p_group text, p_credential text, p_model text, p_now timestamptz)
returns timestamptz
language sql stable as $$
    select max(f.until) from control.floor f
     where f.group_id = p_group and f.credential = p_credential and f.model in ('', p_model) and f.until > p_now
$$;

-- The floor that keeps it back for longest: of any kind, or of those for whose end nobody waits.
create or replace function control.last_floor_v1(
    p_group text, p_credential text, p_model text, p_now timestamptz, p_nobody_waits boolean
) returns control.floor
language sql stable as $$
    select f from control.floor f
     where f.group_id = p_group and f.credential = p_credential and f.model in ('', p_model) and f.until > p_now
       and (f.kind <> 'rate_limit' or not p_nobody_waits)
     order by f.until desc, f.kind limit 1
$$;

-- What a floor of this kind is told as: a rate limit is one however long it is. Of an "unavailable" one nobody knows: a
-- process of an earlier version has put it.
create or replace function control.floor_cause_v1(p_kind text) returns text
language sql immutable as $$
    select case when p_kind in ('rate_limit', 'long_rate_limit') then 'rate_limited'
                when p_kind = 'unavailable' then 'provider_unavailable' else p_kind end
$$;

drop function if exists control.slot_in_ms_v1(text, text, integer, integer, integer, integer, bigint, timestamptz);

-- In how many milliseconds there is a slot for who has so many before it, among the slots of a group, or of one model or
-- class of it. Null where that is not known.
--
-- A call is taken to hold its slot for as long as calls of the group did of late, where those that hold theirs for longer
-- by now count as well; one in quarantine until its time. Each slot comes free at its end and then after every hold: it is
-- the first, second, ... of all these times, and the one with i - 1 slots and r rounds before it is none of the first k
-- unless i * (r + 1) <= k. Of the slots that are free now each begins at once; of those in quarantine the last ones are
-- the headroom, and where a limit was lowered the first to come free are not given again.
create or replace function control.slot_in_ms_v2(
    p_group text, p_model text, p_class smallint, p_before integer, p_slots integer, p_headroom integer, p_ramp integer,
    p_generation bigint, p_now timestamptz
) returns bigint
language sql stable as $$
    with slot as materialized (
        select t.state = 'quarantined' as quarantined, t.generation = p_generation as ramps,
               greatest(extract(epoch from t.quarantined_until - p_now)::double precision, 0) as out_s,
               extract(epoch from p_now - s.ahead - t.granted_at)::double precision as age_s
          from control.store s
          join control.ticket t on t.group_id = p_group and t.state <> 'queued'
           and (p_model is null or t.model = p_model) and (p_class is null or t.class = p_class)
    ), told as materialized (
        select (p.held + l.age_s) / (p.ended + l.many) as hold
          from control.pace p cross join lateral (
            select count(*) as many, coalesce(sum(least(k.age_s, 4 * (p.held / p.ended))), 0) as age_s
              from slot k where not k.quarantined and k.age_s > p.held / p.ended) l
         -- The first that end are the short ones.
         where p.group_id = p_group and p.ended >= least(2 * p_slots, 16)
    ), counted as (
        select p_before + 1 as k, o.hold, greatest(o.room, 0) as free, greatest(-o.room, 0) as less,
               case when o.hold is not null or o.active = 0
                    then o.ends || o.out[1 : o.quarantined - p_headroom] end as ends
          from (
            select x.*, least(p_slots - x.active - greatest(x.quarantined - p_headroom, 0), p_ramp - x.ramped) as room
              from (
                select (select d.hold from told d) as hold,
                       (count(*) filter (where not k.quarantined))::integer as active,
                       (count(*) filter (where k.quarantined))::integer as quarantined,
                       (count(*) filter (where not k.quarantined and k.ramps))::integer as ramped,
                       coalesce(array_agg(case when h.hold > k.age_s then h.hold - k.age_s
                                               -- Of one that holds its slot for longer than most nobody knows: soon.
                                               else h.hold / (2 * p_slots) end) filter (where not k.quarantined),
                                '{}') as ends,
                       coalesce(array_agg(k.out_s order by k.out_s) filter (where k.quarantined), '{}') as out
                  from slot k left join told h on true) x) o
    )
    select case when c.k <= c.free then 0
                -- How long those before it stay, nobody knows.
                when c.hold is null and c.k > 1 then null
                else ((
                    select y.first_s + r * coalesce(c.hold, 0)
                      from (select 0::double precision as first_s, i from generate_series(1, c.free) i
                            union all
                            select e.left_s, c.free + row_number() over (order by e.left_s)
                              from (select u.left_s from unnest(c.ends) as u (left_s)
                                     order by u.left_s offset c.less limit c.k) e) y
                     cross join lateral generate_series(0, c.k / y.i - 1) r
                     order by 1 offset c.k - 1 limit 1) * 1000)::bigint end
      from counted c
     where p_slots > 0
$$;

-- How long the first of a group's queue waits, or who has so many before it: see slot_in_ms_v2.
create or replace function control.expected_ms_v1(g control.capacity_group, p_before integer, p_now timestamptz)
returns bigint
language sql stable as $$
    select control.slot_in_ms_v2(
               g.group_id, null, null, p_before, g.concurrency, g.quarantine_headroom, g.ramp, g.generation, p_now)
$$;

-- Who is before this ticket in the queue, at most a hundred.
create or replace function control.before_v1(t control.ticket) returns table (model text, tokens bigint)
language sql stable
set enable_sort = off set enable_incremental_sort = off set enable_bitmapscan = off
as $$
    select q.model, q.tokens from control.ticket q
     where q.group_id = t.group_id and q.state = 'queued' and (q.class, q.number) < (t.class, t.number)
     order by q.class, q.number limit 100
$$;

-- When requests and tokens per minute suffice for this ticket, after those before it.
create or replace function control.refilled_in_ms_v1(t control.ticket, p_now timestamptz) returns bigint
language sql stable as $$
    select (max(greatest(
               (b.requests + 1 - control.filled_v1(a.requests_left, a.requests_per_minute, a.filled_at, p_now))
                   * 60000 / a.requests_per_minute,
               (b.tokens + t.tokens - control.filled_v1(a.tokens_left, a.tokens_per_minute, a.filled_at, p_now))
                   * 60000 / a.tokens_per_minute,
               0)))::bigint
      from control.allowance a
     cross join lateral (
        select count(*) as requests, coalesce(sum(w.tokens), 0)::double precision as tokens
          from control.before_v1(t) w where a.model in ('', w.model)) b
     where a.group_id = t.group_id and a.model in ('', t.model)
$$;

-- When batch, which never gets the last slot of a group, has one for this ticket after the batch before it. Null where
-- that is not known, 0 for what is not batch.
create or replace function control.batch_in_ms_v1(g control.capacity_group, t control.ticket, p_now timestamptz)
returns bigint
language sql stable as $$
    select case when t.class = 0 or g.concurrency <= 1 then 0 else control.slot_in_ms_v2(
               g.group_id, null, 1::smallint,
               (select count(*)::integer from (
                   select from control.ticket q
                    where q.group_id = g.group_id and q.state = 'queued' and q.class = 1 and q.number < t.number
                    order by q.class, q.number limit 100) before),
               g.concurrency - 1, 0, null, null, p_now) end
$$;

-- How long a ticket waits that waits for this reason, until then at least (see wait_reason_v2), with so many before it.
create or replace function control.expected_ms_v2(
    g control.capacity_group, t control.ticket, p_reason text, p_until timestamptz, p_before integer, p_now timestamptz
) returns bigint
language sql stable as $$
    select greatest(nullif(b.ms, 0), case when b.ms is not null then r.ms else nullif(r.ms, 0) end)
      from (select control.batch_in_ms_v1(g, t, p_now) as ms offset 0) b, (
        select case p_reason
            when 'rate' then control.refilled_in_ms_v1(t, p_now)
            when 'model_capacity' then (
                select control.slot_in_ms_v2(
                           g.group_id, t.model, null,
                           (select count(*)::integer from control.before_v1(t) b where b.model = t.model),
                           a.concurrency, 0, null, null, p_now)
                  from control.allowance a where a.group_id = g.group_id and a.model = t.model)
            when 'quarantine' then control.expected_ms_v1(g, p_before, p_now)
            when 'store' then greatest(
                control.expected_ms_v1(g, p_before, p_now),
                (select (extract(epoch from s.closed_until - p_now) * 1000)::bigint from control.store s))
            else greatest(
                control.expected_ms_v1(g, p_before, p_now),
                (extract(epoch from p_until - p_now) * 1000)::bigint) end as ms
        offset 0) r
     where p_reason <> 'stopped'
$$;

-- Takes note of how long these held their slots: of as many as two for each slot, at least 4 and at most 32, the older
-- weigh less. Not of all: who comes while another writes leaves it.
create or replace function control.paced_v1(p_group text, p_lines control.ledger_line[]) returns void
language sql as $$
    update control.pace p
       set held = p.held * l.kept + l.held, ended = p.ended * l.kept + l.ended
      from (select o.held, o.ended, q.group_id,
                   case when q.ended > 0 then least(greatest(m.many - o.ended, 0) / q.ended, 1) else 0 end as kept
              from control.pace q
             cross join lateral (
                select least(greatest(2 * g.concurrency, 4), 32)::double precision as many
                  from control.capacity_group g where g.group_id = p_group) m
             cross join (
                select sum(least(greatest(extract(epoch from clock_timestamp() - u.granted_at), 0), 3600))::double precision
                           as held, count(*) as ended
                  from unnest(p_lines) u where u.group_id = p_group and u.was = 'open') o
             where q.group_id = p_group and o.ended > 0
               for update of q skip locked) l
     where p.group_id = l.group_id
$$;

-- How many tickets are before this one in its group's queue, at most 100.
create or replace function control.ahead_v2(p_group text, p_class smallint, p_number bigint) returns integer
language sql stable
set enable_sort = off set enable_incremental_sort = off set enable_bitmapscan = off
as $$
    select count(*)::integer from (
        select from control.ticket q
         where q.group_id = p_group and q.state = 'queued' and (q.class, q.number) < (p_class, p_number)
         order by q.class, q.number limit 100) before
$$;

-- Puts requests and tokens back into the buckets of a model and its group; negative ones are taken out.
create or replace function control.give_back_v1(
    p_group text, p_model text, p_requests integer, p_tokens bigint, p_now timestamptz
) returns void
language sql as $$
    update control.allowance a
       set requests_left = coalesce(least(a.requests_per_minute, p_requests + control.filled_v1(
               a.requests_left, a.requests_per_minute, a.filled_at, p_now)), 0),
           tokens_left = coalesce(least(a.tokens_per_minute, coalesce(p_tokens, 0) + control.filled_v1(
               a.tokens_left, a.tokens_per_minute, a.filled_at, p_now)), 0),
           filled_at = greatest(a.filled_at, p_now)
     where a.group_id = p_group and a.model in ('', p_model)
       and (p_requests <> 0 or coalesce(p_tokens, 0) <> 0)
$$;

-- Lowers what is left for a model, and with p_whole for its group, to what the provider said was left at p_told_at: filled
-- since then, and less what was granted after this ticket, which the provider need not have counted. Of that no more than
-- a minute's worth can weigh. Never raises anything.
create or replace function control.told_left_v1(
    p_ticket control.ticket, p_whole boolean, p_requests bigint, p_tokens bigint, p_told_at timestamptz,
    p_now timestamptz
) returns void
language sql as $$
    update control.allowance a
       set (requests_left, tokens_left, filled_at) = (
            select coalesce(least(
                       control.filled_v1(a.requests_left, a.requests_per_minute, a.filled_at, p_now),
                       case when p_requests is not null then greatest(0, -count(t.ticket_id) +
                           control.filled_v1(p_requests, a.requests_per_minute, p_told_at, p_now)) end), 0),
                   coalesce(least(
                       control.filled_v1(a.tokens_left, a.tokens_per_minute, a.filled_at, p_now),
                       case when p_tokens is not null then greatest(0, -coalesce(sum(t.tokens), 0) +
                           control.filled_v1(p_tokens, a.tokens_per_minute, p_told_at, p_now)) end), 0),
                   greatest(a.filled_at, p_now)
              from control.store s
              left join control.ticket t
                on t.group_id = (p_ticket).group_id and t.state <> 'queued' and (a.model = '' or t.model = a.model)
               and t.ticket_id <> (p_ticket).ticket_id
               and t.granted_at >= greatest((p_ticket).granted_at, p_now - s.ahead - interval '1 minute'))
     where a.group_id = (p_ticket).group_id
       and (a.model = (p_ticket).model and a.model <> '' or p_whole and a.model = '')
$$;

-- The queues of a group: one for each class, credential and model that somebody waits for. Steps from one to the next in
-- the index, so it costs as much as there are of them, however long they are.
create or replace function control.lanes_v1(p_group text) returns table (class smallint, credential text, model text)
language sql stable as $$
    with recursive lane as (
        (select t.class, t.credential, t.model from control.ticket t
          where t.group_id = p_group and t.state = 'queued'
          order by t.class, t.credential, t.model limit 1)
        union all
        select s.class, s.credential, s.model
          from lane l cross join lateral (
            select t.class, t.credential, t.model from control.ticket t
             where t.group_id = p_group and t.state = 'queued'
               and (t.class, t.credential, t.model) > (l.class, l.credential, l.model)
             order by t.class, t.credential, t.model limit 1) s
    )
    select l.class, l.credential, l.model from lane l
$$;

-- Does anybody wait for a slot that may have come free: one whose model is not full, and that no floor keeps back?
create or replace function control.may_move_v1(p_group text) returns boolean
language plpgsql stable as $$
declare
    v_now timestamptz;
    v_floors boolean;
    v_full text[];
begin
    if (select 1 from control.ticket t where t.group_id = p_group and t.state = 'queued'
         order by t.class, t.number limit 1) is null then
        return false;
    end if;
    v_now := control.now_v1();
    v_floors := exists (select from control.floor f where f.group_id = p_group and f.until > v_now);
    v_full := array(select a.model from control.allowance a
                     where a.group_id = p_group and a.model <> '' and a.concurrency is not null
                       and a.concurrency <= (select count(*) from control.ticket t
                                              where t.group_id = p_group and t.state <> 'queued' and t.model = a.model));
    if not v_floors and cardinality(v_full) = 0 then
        return true;
    end if;
    return exists (
        select from control.lanes_v1(p_group) w
         where w.model <> all (v_full)
           and (not v_floors or control.floor_until_v2(p_group, w.credential, w.model, v_now) is null));
end $$;
