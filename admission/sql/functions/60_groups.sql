-- configure_v1: makes groups and their limits known. The newest limits first seen are in force for a group, whatever
-- process starts with which; going back to earlier ones takes another revision. Answers the groups whose limits in
-- force are not these.

create or replace function control.configure_v1(
    p_revision integer, p_group text[], p_concurrency integer[], p_queue_bound integer[],
    p_failure_threshold integer[], p_failure_window_ms bigint[], p_first_cooldown_ms bigint[],
    p_longest_cooldown_ms bigint[]
) returns table (group_id text)
language plpgsql as $$
#variable_conflict use_column
begin
    perform pg_advisory_xact_lock(hashtext('tollbridge.configure'));
    insert into control.configuration (group_id, hash)
    select u.group_id, control.limits_hash_v1(p_revision, u.concurrency, u.queue_bound, u.threshold, u.window_ms,
                                              u.first_ms, u.longest_ms)
      from unnest(p_group, p_concurrency, p_queue_bound, p_failure_threshold, p_failure_window_ms,
                  p_first_cooldown_ms, p_longest_cooldown_ms)
           as u (group_id, concurrency, queue_bound, threshold, window_ms, first_ms, longest_ms)
     order by u.group_id
    on conflict do nothing;

    insert into control.capacity_group as c
        (group_id, configuration_version, concurrency, queue_bound, failure_threshold, failure_window, first_cooldown,
         longest_cooldown)
    select u.group_id, k.version, u.concurrency, u.queue_bound, u.threshold, u.window_ms * interval '1 ms',
           u.first_ms * interval '1 ms', u.longest_ms * interval '1 ms'
      from unnest(p_group, p_concurrency, p_queue_bound, p_failure_threshold, p_failure_window_ms,
                  p_first_cooldown_ms, p_longest_cooldown_ms)
           as u (group_id, concurrency, queue_bound, threshold, window_ms, first_ms, longest_ms)
      join control.configuration k
        on k.group_id = u.group_id
       and k.hash = control.limits_hash_v1(p_revision, u.concurrency, u.queue_bound, u.threshold, u.window_ms,
                                           u.first_ms, u.longest_ms)
     order by u.group_id
    on conflict (group_id) do update
       set configuration_version = excluded.configuration_version, concurrency = excluded.concurrency,
           queue_bound = excluded.queue_bound, failure_threshold = excluded.failure_threshold,
           failure_window = excluded.failure_window, first_cooldown = excluded.first_cooldown,
           longest_cooldown = excluded.longest_cooldown
     where c.configuration_version < excluded.configuration_version;

    return query
        select u.group_id
          from unnest(p_group, p_concurrency, p_queue_bound) as u (group_id, concurrency, queue_bound)
          join control.capacity_group c on c.group_id = u.group_id
         where (c.concurrency, c.queue_bound) <> (u.concurrency, u.queue_bound)
         order by u.group_id;
end $$;

create or replace function control.limits_hash_v1(
    p_revision integer, p_concurrency integer, p_queue_bound integer, p_threshold integer, p_window_ms bigint,
    p_first_ms bigint, p_longest_ms bigint
) returns text
language sql immutable as $$
    select md5(concat_ws('/', p_revision, p_concurrency, p_queue_bound, p_threshold, p_window_ms, p_first_ms,
                         p_longest_ms))
$$;
