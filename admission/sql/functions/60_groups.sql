-- configure_v1: makes the groups of a configuration known. The newest configuration first seen is in force; a process
-- that starts with an older one adds only the groups that do not exist yet. Answers whether this one is in force.

create or replace function control.configure_v1(
    p_hash text, p_group text[], p_concurrency integer[], p_queue_bound integer[], p_failure_threshold integer[],
    p_failure_window_ms bigint[], p_first_cooldown_ms bigint[], p_longest_cooldown_ms bigint[]
) returns boolean
language plpgsql as $$
declare
    v_version bigint;
    v_newest bigint;
begin
    perform pg_advisory_xact_lock(hashtext('tollbridge.configure'));
    insert into control.configuration (hash) values (p_hash) on conflict (hash) do nothing;
    select version into v_version from control.configuration where hash = p_hash;
    select max(version) into v_newest from control.configuration;
    insert into control.capacity_group as c
        (group_id, configuration_version, concurrency, queue_bound, failure_threshold, failure_window, first_cooldown,
         longest_cooldown)
    select u.group_id, v_version, u.concurrency, u.queue_bound, u.threshold, u.window_ms * interval '1 ms',
           u.first_ms * interval '1 ms', u.longest_ms * interval '1 ms'
      from unnest(p_group, p_concurrency, p_queue_bound, p_failure_threshold, p_failure_window_ms,
                  p_first_cooldown_ms, p_longest_cooldown_ms)
           as u (group_id, concurrency, queue_bound, threshold, window_ms, first_ms, longest_ms)
     order by u.group_id
    on conflict (group_id) do update
       set configuration_version = excluded.configuration_version, concurrency = excluded.concurrency,
           queue_bound = excluded.queue_bound, failure_threshold = excluded.failure_threshold,
           failure_window = excluded.failure_window, first_cooldown = excluded.first_cooldown,
           longest_cooldown = excluded.longest_cooldown
     where v_version = v_newest and c.configuration_version < v_version;
    return v_version = v_newest;
end $$;
