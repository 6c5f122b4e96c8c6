-- What is counted by key and day, beside the sums that there were: routes, runs, steps and tags. And what else an
-- attempt's row tells.

alter table control.counter drop constraint counter_kind_check;
alter table control.counter add constraint counter_kind_check check (kind in (
    'total', 'day', 'session', 'key', 'key_day', 'route_day', 'run_day', 'step_day', 'tag_day'));
-- What the name of the counter stands for, where that is more than one word: of `route_day` the provider, the requested
-- model and the provider's model; of `step_day` the run and the step; of `tag_day` its name and value. A counter's own
-- name never changes, so these do not either.
alter table control.counter
    add column day date,
    add column key_id uuid,
    add column names text[];
create index counter_day on control.counter (kind, day, key_id) where day is not null;

-- What was used up to now is counted so, too: the log has all of it.
insert into control.counter (kind, name, shard, day, key_id, names, charged_usd, attempts, unknown_attempts,
                             unknown_upper_bound_usd, unbounded_attempts, input_tokens, output_tokens)
select n.kind, i.key_id || '/' || i.day || n.names::text, 0, i.day, i.key_id, n.names,
       coalesce(sum(i.usd), 0), count(*), count(*) filter (where i.state = 'unknown'),
       coalesce(sum(i.upper_bound_usd), 0), count(*) filter (where i.state = 'unknown' and i.upper_bound_usd is null),
       coalesce(sum(i.input_total), 0), coalesce(sum(i.output_total), 0)
  from (select distinct on (o.granted_at, o.ticket_id) o.*
          from control.invocation o order by o.granted_at, o.ticket_id, o.correction desc) i
 cross join lateral (
    values ('route_day', array[coalesce(i.provider, ''), coalesce(i.requested_model, ''),
                               coalesce(i.upstream_model, '')]),
           ('run_day', case when i.run_id is not null then array[i.run_id] end),
           ('step_day', case when i.step_id is not null then array[coalesce(i.run_id, ''), i.step_id] end)
    union all
    select 'tag_day', array[t.key, t.value] from jsonb_each_text(i.tags) t) as n (kind, names)
 where n.names is not null
 group by n.kind, i.key_id, i.day, n.names;

alter table control.invocation
    -- The part of `queued_ms` in which nobody was let through: a breaker was open, or a provider had asked for time.
    add column cooldown_ms integer,
    -- How many attempts of its request came before it at the same route.
    add column retries smallint,
    -- The tier of service the provider says it served.
    add column service_tier text,
    -- Our own figure, where the provider's won.
    add column list_usd numeric(22, 12) check (list_usd >= 0 and list_usd < 1e9),
    -- What was odd in what the provider reported.
    add column flags jsonb,
    -- Of a correction by a person: which key, why, and what proves it.
    add column resolved_by uuid,
    add column note text,
    add column evidence text;
create index invocation_request on control.invocation (request_id);
create index invocation_session on control.invocation (session_id, granted_at) where session_id is not null;
create index invocation_run on control.invocation (run_id, granted_at) where run_id is not null;
create index invocation_failed on control.invocation (granted_at) where status <> 'success';
