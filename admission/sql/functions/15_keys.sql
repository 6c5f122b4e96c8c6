-- Limits of keys: what is in the gateway of a key at once, its requests and tokens per minute, its budgets and those of
-- its sessions.
--
-- They are looked at when a ticket is enqueued, under the lock of the key's row, which comes after that of the group, and
-- after that under those of its sessions of which a budget was said. So two groups cannot pass one budget together. What a
-- key or a session has used is read by a later statement: one that also locks would have taken its snapshot before it
-- waited. A settlement takes no such lock: in one commit it takes away the ticket, with what it had reserved, and raises
-- the counter by what it cost.

-- What is known of a key: of what it has in the gateway, and of its money in the day, the month and altogether. `others`
-- are its debits at work that are not among p_debits, `mine` those that are. A reservation counts for a day and a month
-- unless the attempt was granted in an earlier one, to which its charge will belong.
create or replace function control.use_of_key_v1(p_key uuid, p_debits text[], p_day date) returns table (
    others integer, mine text[], first_out timestamptz, tokens_told bigint, tokens_live bigint,
    day_spent numeric, day_unknown numeric, day_reserved numeric, month_spent numeric, month_unknown numeric,
    month_reserved numeric, total_spent numeric, total_unknown numeric, total_reserved numeric, month date
)
language plpgsql stable
-- What its plans read must not depend on how full the tables were when they were made.
set enable_seqscan = off set enable_bitmapscan = off
as $$
#variable_conflict use_column
declare
    v_month constant date := date_trunc('month', p_day)::date;
begin
    return query
    with live as materialized (
        -- As two questions, each has an index.
        select t.debit_id, t.reserved_usd, t.tokens, coalesce(t.day, p_day) as day, null::timestamptz as out
          from control.ticket t where t.key_id = p_key and t.state <> 'quarantined'
        union all
        select t.debit_id, t.reserved_usd, t.tokens, coalesce(t.day, p_day), t.quarantined_until
          from control.ticket t where t.key_id = p_key and t.state = 'quarantined'
    ), kept as (
        select count(distinct l.debit_id) filter (where l.debit_id <> all (p_debits)) as others,
               coalesce(array_agg(distinct l.debit_id) filter (where l.debit_id = any (p_debits)), '{}') as mine,
               case when count(l.out) = count(*) then min(l.out) end as first_out,
               coalesce(sum(l.tokens) filter (where l.reserved_usd is not null), 0)::bigint as tokens,
               coalesce(sum(l.reserved_usd) filter (where l.day >= p_day), 0) as of_day,
               coalesce(sum(l.reserved_usd) filter (where l.day >= v_month), 0) as of_month,
               coalesce(sum(l.reserved_usd), 0) as of_all
          from live l
    ), days as (
        select coalesce(sum(c.charged_usd) filter (where c.name = p_key || '/' || p_day), 0) as of_day,
               coalesce(sum(c.unknown_upper_bound_usd) filter (where c.name = p_key || '/' || p_day), 0) as unknown_of_day,
               coalesce(sum(c.charged_usd), 0) as of_month,
               coalesce(sum(c.unknown_upper_bound_usd), 0) as unknown_of_month
          from control.counter c
         where c.kind = 'key_day'
           -- Each day for itself: how names are ordered is the database's to say.
           and c.name = any (array(select p_key || '/' || v_month + n
                                     from generate_series(0, (v_month + interval '1 month')::date - v_month - 1) n))
    ), altogether as (
        select coalesce(sum(c.charged_usd), 0) as spent, coalesce(sum(c.unknown_upper_bound_usd), 0) as unknown,
               coalesce(sum(c.input_tokens + c.output_tokens), 0)::bigint as tokens
          from control.counter c where c.kind = 'key' and c.name = p_key::text
    )
    select k.others::integer, k.mine, k.first_out, a.tokens, k.tokens, d.of_day, d.unknown_of_day, k.of_day, d.of_month,
           d.unknown_of_month, k.of_month, a.spent, a.unknown, k.of_all, v_month
      from kept k, days d, altogether a;
end $$;

-- The money of a session: what it was charged, the bounds of its attempts whose cost is unknown, and what its attempts at
-- work have reserved.
create or replace function control.use_of_session_v1(p_key uuid, p_session text)
returns table (spent numeric, unknown numeric, reserved numeric)
language plpgsql stable
set enable_seqscan = off set enable_bitmapscan = off
as $$
begin
    return query
    select c.spent, c.unknown, t.reserved
      from (select coalesce(sum(o.charged_usd), 0) as spent, coalesce(sum(o.unknown_upper_bound_usd), 0) as unknown
              from control.counter o where o.kind = 'session' and o.name = p_key || '/' || p_session) c,
           (select coalesce(sum(q.reserved_usd), 0) as reserved
              from control.ticket q where q.key_id = p_key and q.session_id = p_session) t;
end $$;

-- Which of these elements their keys have no room for, in order: those of one key as if each that has room were enqueued.
-- Only those with the verdict "new" are looked at. Locks the rows of their keys, sorted, and then those of the budgets of
-- their sessions, sorted. `p_bound` is what an element of a session costs at most; null where nobody knows.
--
-- Answers "too_large", "budget_exceeded", "key_limit", "cost_not_bounded", or "budget_reserved" where all that is in the way
-- is what attempts at work may cost, and with each in `key_limit` the limit: {"name", "most"} and of a budget "spent",
-- "unknown", "reserved" and "wanted", in USD. `wait_ms` is null where it is not known, or no time helps.
drop function if exists control.hold_to_limits_v1(
    uuid[], text[], integer[], bigint[], numeric[], text[], text, timestamptz, interval);

create or replace function control.hold_to_limits_v2(
    p_key uuid[], p_debit text[], p_attempt integer[], p_tokens bigint[], p_reserved numeric[], p_session text[],
    p_bound numeric[], p_verdict text[], p_zone text, p_now timestamptz, p_ahead interval
) returns table (n integer, verdict text, wait_ms bigint, key_limit text)
language plpgsql as $$
#variable_conflict use_column
declare
    k control.key_limit;
    v_limits control.key_limit[];
    s record;
    c control.session_budget;
    u record;
    b record;
    v_day constant date := ((p_now - p_ahead) at time zone p_zone)::date;
    v_key uuid;
    v_keys uuid[];
    v_debits text[];
    v_requests double precision;
    v_tokens double precision;
    v_reserved numeric;
    v_wanted numeric;
    v_most numeric;
    v_held boolean;
    -- Sessions that may have a budget, in the order of their locks.
    s_key uuid[] := '{}';
    s_name text[] := '{}';
    s_own numeric[] := '{}';
    s_set numeric[] := '{}';
    s_spent numeric[] := '{}';
    s_unknown numeric[] := '{}';
    s_reserved numeric[] := '{}';
    m integer;
begin
    v_limits := array(select c from control.key_limit c
                       where c.key_id = any (array(select e.key_id from unnest(p_key, p_reserved, p_verdict)
                                                                        as e (key_id, reserved, verdict)
                                                    where e.reserved is not null and e.verdict = 'new'))
                       order by c.key_id for update);
    if cardinality(p_session) > 0 then
        for s in select distinct e.key_id, e.session
                   from unnest(p_key, p_session, p_verdict) as e (key_id, session, verdict)
                  where e.session is not null and e.verdict = 'new' order by e.key_id, e.session loop
            select * into c from control.session_budget o
             where o.key_id = s.key_id and o.session_id = s.session for update;
            if num_nonnulls(c.own_usd, c.set_usd, (select l.budget_session_usd from unnest(v_limits) l
                                                    where l.key_id = s.key_id)) > 0 then
                s_key := s_key || s.key_id;
                s_name := s_name || s.session;
                s_own := s_own || c.own_usd;
                s_set := s_set || c.set_usd;
            end if;
        end loop;
        for i in 1 .. cardinality(s_key) loop
            select * into u from control.use_of_session_v1(s_key[i], s_name[i]);
            s_spent[i] := u.spent;
            s_unknown[i] := u.unknown;
            s_reserved[i] := u.reserved;
        end loop;
    end if;
    v_keys := array(select distinct x.key_id from (select l.key_id from unnest(v_limits) l
                                                   union all select unnest(s_key)) x (key_id) order by x.key_id);
    foreach v_key in array v_keys loop
        k := (select l from unnest(v_limits) l where l.key_id = v_key);
        v_debits := array(select e.debit_id from unnest(p_key, p_debit) as e (key_id, debit_id) where e.key_id = v_key);
        -- All null where the key has no limits.
        select * into u from control.use_of_key_v1(v_key, v_debits, v_day) where k.key_id is not null;
        v_debits := u.mine;
        v_requests := control.filled_v1(k.requests_left, k.requests_per_minute, k.filled_at, p_now);
        v_tokens := control.filled_v1(k.tokens_left - (u.tokens_told - k.tokens_seen), k.tokens_per_minute, k.filled_at, p_now)
                  - u.tokens_live;
        v_reserved := 0;
        for i in 1 .. cardinality(p_key) loop
            continue when p_key[i] <> v_key or p_verdict[i] <> 'new';
            -- Null: the asker takes its key for one without limits. Its session may have a budget all the same.
            v_held := p_reserved[i] is not null;
            m := null;
            if cardinality(s_key) > 0 then
                m := (select x.m from unnest(s_key, s_name) with ordinality as x (key_id, name, m)
                       where x.key_id = v_key and x.name = p_session[i]);
            end if;
            -- What an administrator has set is in place of the key's limit; what the key has said can only lower it.
            v_most := least(s_own[m], coalesce(s_set[m], case when v_held then k.budget_session_usd end));
            if v_most is null then
                m := null;
            end if;
            continue when not v_held and m is null;
            n := i;
            verdict := null;
            wait_ms := null;
            v_wanted := coalesce(p_reserved[i], p_bound[i]);
            -- The longest period is told first: what is over there is over for longest.
            select x.*, x.spent + x.unknown + v_wanted > x.most as beyond into b
              from (values (1, 'budget_total_usd', k.budget_total_usd, u.total_spent, u.total_unknown,
                            u.total_reserved + v_reserved, null::timestamp),
                           (2, 'budget_session_usd', v_most, s_spent[m], s_unknown[m], s_reserved[m], null),
                           (3, 'budget_month_usd', k.budget_month_usd, u.month_spent, u.month_unknown,
                            u.month_reserved + v_reserved, u.month + interval '1 month'),
                           (4, 'budget_day_usd', k.budget_day_usd, u.day_spent, u.day_unknown,
                            u.day_reserved + v_reserved, v_day + interval '1 day'))
                   as x (place, name, most, spent, unknown, reserved, ends)
             where v_wanted > 0 and x.spent + x.unknown + x.reserved + v_wanted > x.most
               and (v_held or x.place = 2)
             order by beyond desc, x.place
             limit 1;
            if v_held and p_tokens[i] > k.tokens_per_minute then
                verdict := 'too_large';
                key_limit := json_build_object('name', 'tokens_per_minute', 'most', k.tokens_per_minute::text);
            elsif m is not null and p_bound[i] is null then
                verdict := 'cost_not_bounded';
                key_limit := json_build_object('name', 'budget_session_usd', 'most', v_most::text);
            elsif b.beyond then
                verdict := 'budget_exceeded';
                wait_ms := (extract(epoch from (b.ends at time zone p_zone) - (p_now - p_ahead)) * 1000)::bigint;
            elsif v_held and u.others + cardinality(array_remove(v_debits, p_debit[i])) >= k.concurrency then
                verdict := 'key_limit';
                key_limit := json_build_object('name', 'concurrency', 'most', k.concurrency::text);
                -- Of all of them nobody works any more: this is when the first is let go of.
                wait_ms := case when u.first_out is not null then
                    (extract(epoch from greatest(u.first_out - p_now, interval '100 ms')) * 1000)::bigint end;
            elsif v_held and p_attempt[i] = 1 and v_requests < 1 then
                verdict := 'key_limit';
                key_limit := json_build_object('name', 'requests_per_minute', 'most', k.requests_per_minute::text);
                wait_ms := greatest(ceil((1 - v_requests) * 60000 / k.requests_per_minute), 1)::bigint;
            elsif v_held and v_tokens < p_tokens[i] then
                verdict := 'key_limit';
                key_limit := json_build_object('name', 'tokens_per_minute', 'most', k.tokens_per_minute::text);
                wait_ms := greatest(ceil((p_tokens[i] - v_tokens) * 60000 / k.tokens_per_minute), 1)::bigint;
            elsif b.name is not null then
                verdict := 'budget_reserved';
            end if;
            if verdict in ('budget_exceeded', 'budget_reserved') then
                key_limit := json_build_object(
                    'name', b.name, 'most', b.most::text, 'spent', b.spent::text, 'unknown', b.unknown::text,
                    'reserved', b.reserved::text, 'wanted', v_wanted::text);
            end if;
            if verdict is not null then
                return next;
                continue;
            end if;
            if m is not null then
                s_reserved[m] := s_reserved[m] + v_wanted;
            end if;
            continue when not v_held;
            u.first_out := null;
            v_reserved := v_reserved + v_wanted;
            v_requests := v_requests - (p_attempt[i] = 1)::integer;
            v_tokens := v_tokens - p_tokens[i];
            if p_debit[i] <> all (v_debits) then
                v_debits := v_debits || p_debit[i];
            end if;
        end loop;
    end loop;
end $$;

-- These were enqueued or granted, where their state says so: the buckets of their keys are brought up to now. A request is
-- taken from its bucket once, at its first attempt. Tokens are not: those of attempts at work are subtracted from what a
-- bucket has, and those of the others are what the ledger was told since the last look.
create or replace function control.use_keys_v1(
    p_key uuid[], p_attempt integer[], p_reserved numeric[], p_state text[], p_now timestamptz
) returns void
language sql
set enable_seqscan = off
as $$
    update control.key_limit k
       set (requests_left, tokens_left, tokens_seen, filled_at) = (
            select coalesce(control.filled_v1(k.requests_left, k.requests_per_minute, k.filled_at, p_now) - e.requests, 0),
                   coalesce(control.filled_v1(k.tokens_left - (c.tokens - k.tokens_seen), k.tokens_per_minute, k.filled_at,
                                              p_now), 0),
                   c.tokens, greatest(k.filled_at, p_now)
              from (select coalesce(sum(o.input_tokens + o.output_tokens), 0) as tokens from control.counter o
                     where o.kind = 'key' and o.name = k.key_id::text) c)
      from (select x.key_id, count(*) filter (where x.attempt = 1) as requests
              from unnest(p_key, p_attempt, p_reserved, p_state) as x (key_id, attempt, reserved, state)
             where x.reserved is not null and x.state is not null
             group by x.key_id) e
     where k.key_id = e.key_id and num_nonnulls(k.requests_per_minute, k.tokens_per_minute) > 0
$$;

-- The limits of a key from here on, by name; '{}': it has none. A bucket that is new begins full; one whose size changes
-- keeps its level.
create or replace function control.limit_key_v1(p_key uuid, p_limits jsonb) returns void
language plpgsql as $$
declare
    v_now timestamptz;
    v_told bigint;
begin
    if p_limits = '{}' then
        delete from control.key_limit k where k.key_id = p_key;
        return;
    end if;
    perform from control.key_limit k where k.key_id = p_key for update;
    v_now := control.now_v1();
    v_told := (select coalesce(sum(c.input_tokens + c.output_tokens), 0) from control.counter c
                where c.kind = 'key' and c.name = p_key::text);
    insert into control.key_limit as k (key_id, concurrency, requests_per_minute, tokens_per_minute, budget_day_usd,
                                        budget_month_usd, budget_total_usd, budget_session_usd, requests_left,
                                        tokens_left, tokens_seen, filled_at)
    select p_key, l.concurrency, l.requests_per_minute, l.tokens_per_minute, l.budget_day_usd, l.budget_month_usd,
           l.budget_total_usd, l.budget_session_usd, coalesce(l.requests_per_minute, 0), coalesce(l.tokens_per_minute, 0), v_told, v_now
      from jsonb_to_record(p_limits) as l (
           concurrency integer, requests_per_minute integer, tokens_per_minute bigint, budget_day_usd numeric,
           budget_month_usd numeric, budget_total_usd numeric, budget_session_usd numeric)
    on conflict (key_id) do update
       set concurrency = excluded.concurrency, requests_per_minute = excluded.requests_per_minute,
           tokens_per_minute = excluded.tokens_per_minute, budget_day_usd = excluded.budget_day_usd,
           budget_month_usd = excluded.budget_month_usd, budget_total_usd = excluded.budget_total_usd,
           budget_session_usd = excluded.budget_session_usd,
           requests_left = coalesce(least(excluded.requests_left, control.filled_v1(
               k.requests_left, k.requests_per_minute, k.filled_at, v_now)), 0),
           tokens_left = coalesce(least(excluded.tokens_left, control.filled_v1(
               k.tokens_left - (v_told - k.tokens_seen), k.tokens_per_minute, k.filled_at, v_now)), 0),
           tokens_seen = excluded.tokens_seen, filled_at = greatest(k.filled_at, excluded.filled_at);
end $$;

-- What one session of a key may cost from here on; null: what was said is taken back. `p_own`: its key says so, and can
-- only lower it. Another may raise it where `p_raises`. Answers what it may cost at most where this is refused.
create or replace function control.budget_session_v1(
    p_key uuid, p_session text, p_usd numeric, p_own boolean, p_raises boolean
) returns numeric
language plpgsql as $$
declare
    b control.session_budget;
    v_most numeric;
begin
    select * into b from control.session_budget s where s.key_id = p_key and s.session_id = p_session for update;
    v_most := coalesce(b.set_usd, (select k.budget_session_usd from control.key_limit k where k.key_id = p_key));
    if p_usd > v_most and (p_own or not p_raises)
       or p_usd is null and b.set_usd is not null and not (p_own or p_raises) then
        return v_most;
    end if;
    insert into control.session_budget as s (key_id, session_id, own_usd, set_usd)
    values (p_key, p_session, case when p_own then p_usd end, case when not p_own then p_usd end)
    on conflict (key_id, session_id) do update
       set own_usd = case when p_own then p_usd else s.own_usd end,
           set_usd = case when p_own then s.set_usd else p_usd end;
    delete from control.session_budget s
     where s.key_id = p_key and s.session_id = p_session and num_nonnulls(s.own_usd, s.set_usd) = 0;
    return null;
end $$;
