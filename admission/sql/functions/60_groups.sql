-- configure_v2: makes groups, their limits and their endpoints known. What was first seen last is in force for a group,
-- whatever process starts with which; going back to earlier settings takes another revision. Live tickets move along with
-- their endpoint. Answers the groups and endpoints for which something else is in force.
--
-- p_groups: [{"group", "concurrency", "quarantine_headroom", "queue", "failure_threshold", "failure_window_ms",
-- "first_cooldown_ms", "longest_cooldown_ms", "models": [{"model", "concurrency", "requests_per_minute",
-- "tokens_per_minute"}]}], where the model "" is the group as a whole. p_endpoints: {endpoint: group}.

create or replace function control.configure_v2(p_revision integer, p_groups jsonb, p_endpoints jsonb)
returns table (name text)
language plpgsql as $$
#variable_conflict use_column
declare
    r record;
    v_version bigint;
    v_now timestamptz;
begin
    perform pg_advisory_xact_lock(hashtext('tollbridge.configure'));
    v_now := control.now_v1();
    for r in select u ->> 'group' as group_id, u as given from jsonb_array_elements(p_groups) u order by u ->> 'group'
    loop
        v_version := control.seen_v1(r.group_id, md5(p_revision || r.given::text));
        insert into control.capacity_group as c
            (group_id, configuration_version, concurrency, quarantine_headroom, queue_bound, failure_threshold,
             failure_window, first_cooldown, longest_cooldown)
        select r.group_id, v_version, l.concurrency, l.quarantine_headroom, l.queue, l.failure_threshold,
               l.failure_window_ms * interval '1 ms', l.first_cooldown_ms * interval '1 ms',
               l.longest_cooldown_ms * interval '1 ms'
          from jsonb_to_record(r.given) as l (
               concurrency integer, quarantine_headroom integer, queue integer, failure_threshold integer,
               failure_window_ms bigint, first_cooldown_ms bigint, longest_cooldown_ms bigint)
        on conflict (group_id) do update
           set configuration_version = excluded.configuration_version, concurrency = excluded.concurrency,
               quarantine_headroom = excluded.quarantine_headroom, queue_bound = excluded.queue_bound,
               failure_threshold = excluded.failure_threshold, failure_window = excluded.failure_window,
               first_cooldown = excluded.first_cooldown, longest_cooldown = excluded.longest_cooldown
         where c.configuration_version < excluded.configuration_version;
        if not found then
            continue;
        end if;
        insert into control.pace (group_id) values (r.group_id) on conflict do nothing;
        delete from control.allowance a
         where a.group_id = r.group_id
           and a.model not in (select m ->> 'model' from jsonb_array_elements(r.given -> 'models') m);
        -- A bucket that is new begins full; one whose size changes keeps its level.
        insert into control.allowance as a
            (group_id, model, concurrency, requests_per_minute, tokens_per_minute, requests_left, tokens_left, filled_at)
        select r.group_id, m.model, m.concurrency, m.requests_per_minute, m.tokens_per_minute,
               coalesce(m.requests_per_minute, 0), coalesce(m.tokens_per_minute, 0), v_now
          from jsonb_to_recordset(r.given -> 'models') as m (
               model text, concurrency integer, requests_per_minute integer, tokens_per_minute bigint)
         order by m.model
        on conflict (group_id, model) do update
           set concurrency = excluded.concurrency, requests_per_minute = excluded.requests_per_minute,
               tokens_per_minute = excluded.tokens_per_minute,
               requests_left = case when a.requests_per_minute is null then excluded.requests_left
                   else least(control.filled_v1(a.requests_left, a.requests_per_minute, a.filled_at, v_now),
                              excluded.requests_left) end,
               tokens_left = case when a.tokens_per_minute is null then excluded.tokens_left
                   else least(control.filled_v1(a.tokens_left, a.tokens_per_minute, a.filled_at, v_now),
                              excluded.tokens_left) end,
               -- Up to now it has filled at the rate it had.
               filled_at = greatest(a.filled_at, excluded.filled_at);
    end loop;

    for r in select e.key as endpoint, e.value as group_id from jsonb_each_text(p_endpoints) e order by e.key
    loop
        v_version := control.seen_v1('endpoint ' || r.endpoint, md5(p_revision || r.group_id));
        perform control.move_endpoint_v1(r.endpoint, r.group_id, v_version);
    end loop;

    return query
        select k.name
          from (select u ->> 'group' as name, u ->> 'group' as subject, md5(p_revision || u::text) as hash
                  from jsonb_array_elements(p_groups) u
                union all
                select e.key, 'endpoint ' || e.key, md5(p_revision || e.value) from jsonb_each_text(p_endpoints) e) k
          join control.configuration mine on mine.group_id = k.subject and mine.hash = k.hash
         where exists (select from control.configuration newer
                        where newer.group_id = k.subject and newer.version > mine.version)
         group by k.name
         order by k.name;
end $$;

-- The version of these settings: the one they were first seen with.
create or replace function control.seen_v1(p_subject text, p_hash text) returns bigint
language plpgsql as $$
declare
    v_version bigint;
begin
    insert into control.configuration (group_id, hash) values (p_subject, p_hash) on conflict do nothing;
    select c.version into v_version from control.configuration c where c.group_id = p_subject and c.hash = p_hash;
    return v_version;
end $$;

-- An endpoint belongs to this group from here on, and its tickets with it. Both groups are locked meanwhile.
create or replace function control.move_endpoint_v1(p_endpoint text, p_group text, p_version bigint) returns void
language plpgsql as $$
declare
    v_from text;
begin
    insert into control.endpoint as e (endpoint, group_id, configuration_version)
    values (p_endpoint, p_group, p_version)
    on conflict do nothing;
    if found then
        update control.capacity_group c set endpoints = array_append(c.endpoints, p_endpoint) where c.group_id = p_group;
        return;
    end if;
    select e.group_id into v_from from control.endpoint e where e.endpoint = p_endpoint and e.configuration_version < p_version;
    if v_from is null then
        return;
    end if;
    update control.endpoint e set group_id = p_group, configuration_version = p_version where e.endpoint = p_endpoint;
    if v_from = p_group then
        return;
    end if;
    perform from control.capacity_group c where c.group_id in (v_from, p_group) order by c.group_id for update;
    update control.capacity_group c set endpoints = array_remove(c.endpoints, p_endpoint) where c.group_id = v_from;
    update control.capacity_group c
       set endpoints = array_append(c.endpoints, p_endpoint),
           next_number = greatest(c.next_number, (select f.next_number from control.capacity_group f where f.group_id = v_from)),
           waiting_counted_at = '-infinity',
           waiting = c.waiting + (select count(*) from control.ticket t
                                   where t.group_id = v_from and t.endpoint = p_endpoint
                                     and t.state in ('queued', 'granted')),
           waiting_batch = c.waiting_batch + (select count(*) from control.ticket t
                                               where t.group_id = v_from and t.endpoint = p_endpoint
                                                 and t.state in ('queued', 'granted') and t.class = 1)
     where c.group_id = p_group;
    perform from control.ticket t where t.group_id = v_from and t.endpoint = p_endpoint order by t.ticket_id for update;
    -- A generation of the other group's breaker means nothing here.
    update control.ticket t set group_id = p_group, generation = case when t.generation is not null then 0 end
     where t.group_id = v_from and t.endpoint = p_endpoint;
    insert into control.floor (group_id, credential, model, kind, since, until, strikes)
    select p_group, f.credential, f.model, f.kind, f.since, f.until, f.strikes from control.floor f where f.group_id = v_from
    on conflict (group_id, credential, model, kind) do update set until = greatest(floor.until, excluded.until);
    -- A group that nothing belongs to any more keeps nothing back: what comes to it later brings its floors along.
    delete from control.floor f
     where f.group_id = v_from
       and exists (select from control.capacity_group c where c.group_id = v_from and c.endpoints = '{}');
end $$;

-- An operator says that all is well again: the breaker closes, floors are gone.
create or replace function control.reset_v1(p_group text) returns boolean
language plpgsql as $$
declare
    v_was text;
begin
    select c.breaker into v_was from control.capacity_group c where c.group_id = p_group for update;
    if not found then
        return false;
    end if;
    update control.capacity_group c
       set breaker = 'closed', generation = c.generation + 1, probe = null, openings = 0, failed_at = '{}',
           cooldown_until = null, ramp = null, open_since = null
     where c.group_id = p_group;
    if v_was <> 'closed' then
        perform control.tell_breaker_v1(p_group, v_was, 'reset', control.now_v1());
    end if;
    delete from control.floor f where f.group_id = p_group;
    return true;
end $$;
