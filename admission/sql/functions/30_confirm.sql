-- rescan_v1: what became of this owner's waiting tickets. Confirms the grants that other processes made, without the
-- group lock, and reads the positions of the others. A ticket that is not there any more was let go when its group's
-- breaker opened.

create or replace function control.rescan_v1(
    p_owner uuid, p_zone text, p_ticket uuid[], p_group text[]
) returns table (
    ticket_id uuid, answer text, owner_id uuid, generation bigint, probe boolean, granted_at timestamptz, day date,
    remaining_ms bigint, ahead integer, wait_reason text, wait_ms bigint
)
language plpgsql as $$
#variable_conflict use_column
declare
    v_now timestamptz := clock_timestamp();
begin
    if control.owner_is_fresh_v1(p_owner, v_now) then
        with mine as (
            select t.ticket_id from control.ticket t
             where t.ticket_id = any (p_ticket) and t.owner_id = p_owner and t.state = 'granted'
             order by t.ticket_id for update
        ), confirmed as (
            update control.ticket t
               set state = 'active', grant_expires_at = null,
                   hard_deadline = least(clock_timestamp() + t.execution_limit, t.caller_deadline + t.isolation)
              from mine
             where t.ticket_id = mine.ticket_id and t.state = 'granted' and t.grant_expires_at > clock_timestamp()
            returning t.*
        )
        insert into control.attempt (ticket_id, key_id, debit_id, attempt, group_id, owner_id, granted_at, day, state,
                                     intent)
        select c.ticket_id, c.key_id, c.debit_id, c.attempt, c.group_id, c.owner_id, c.granted_at,
               (c.granted_at at time zone p_zone)::date, 'open', c.intent
          from confirmed c
        on conflict do nothing;
    end if;
    return query
        select t.ticket_id, case when t.state = 'active' then 'granted' else 'queued' end, t.owner_id, t.generation,
               exists (select from control.capacity_group g where g.group_id = t.group_id and g.probe = t.ticket_id),
               t.granted_at, (t.granted_at at time zone p_zone)::date,
               (extract(epoch from t.hard_deadline - clock_timestamp()) * 1000)::bigint,
               control.ahead_v1(t.group_id, t.class, t.number), control.wait_reason_v1(t.group_id),
               (select (extract(epoch from g.cooldown_until - clock_timestamp()) * 1000)::bigint
                  from control.capacity_group g where g.group_id = t.group_id and g.breaker = 'open')
          from control.ticket t
         where t.ticket_id = any (p_ticket) and t.owner_id = p_owner and t.state <> 'quarantined';
    return query
        select e.ticket_id, 'cooldown', p_owner, null::bigint, null::boolean, null::timestamptz, null::date,
               null::bigint, null::integer, null::text,
               (select (extract(epoch from g.cooldown_until - clock_timestamp()) * 1000)::bigint
                  from control.capacity_group g where g.group_id = e.group_id and g.breaker = 'open')
          from unnest(p_ticket, p_group) as e (ticket_id, group_id)
         where not exists (select from control.ticket t where t.ticket_id = e.ticket_id);
end $$;
