-- {rows} rows of the invocation log over three months up to now, as a company's programs leave them: 20 keys of which
-- one has most, sessions of 200 attempts, runs of 40, requests of one attempt or two, 3 % that failed, a few corrected.
create or replace function pg_temp.id(kind integer, number bigint) returns uuid language sql immutable as
$$ select (lpad(to_hex(kind), 8, '0') || '-0000-7000-8000-' || lpad(to_hex(number), 12, '0'))::uuid $$;

do $$
declare
    m date;
begin
    for m in select (date_trunc('month', now() at time zone 'UTC') - n * interval '1 month')::date
               from generate_series(-1, 3) n
    loop
        if to_regclass(format('control.invocation_%s', to_char(m, 'YYYY_MM'))) is null then
            execute format('create table control.%I partition of control.invocation for values from (%L) to (%L)',
                           'invocation_' || to_char(m, 'YYYY_MM'), m::timestamp at time zone 'UTC',
                           (m + interval '1 month') at time zone 'UTC');
        end if;
    end loop;
end $$;

insert into control.api_key (key_id, name, digest, scopes)
select pg_temp.id(4, n), 'k' || n, sha256(n::text::bytea), '{{chat}}' from generate_series(0, 19) n
on conflict do nothing;

insert into control.invocation (
    ticket_id, correction, granted_at, settled_at, day, key_id, debit_id, attempt, group_id, state, request_id,
    transport, session_id, scope_id, run_id, step_id, skill, tool, role, tags, class, requested_model, route_id,
    provider, upstream_model, protocol, served_model, is_fallback, fallback_index, input_total, cache_read,
    output_total, usd, upper_bound_usd, status, ended, error_class, error_code, created_at, queued_ms, first_byte_ms,
    total_ms, retries)
select pg_temp.id(3, n), c.correction, g.at, g.at + interval '2 s', g.at::date, pg_temp.id(4, (n % 97) % 20),
       'd' || n, 1, 'https://api.example:443', s.state, 'r' || n / 2, (array['rest', 'grpc', 'job'])[1 + (n % 3)::int],
       's' || n / 200, 'scope', 'run' || n / 40, 'step' || n % 10, 'skill' || n % 7, 'tool' || n % 5, 'planner',
       jsonb_build_object('team', 't' || n % 11, 'env', case when n % 500000 = 3 then 'rare' else 'prod' end),
       'interactive', 'model' || n % 6, md5((n % 12)::text), 'provider' || n % 4, 'upstream' || n % 12,
       'chat_completions', 'upstream' || n % 12, n % 40 = 0, (n % 40 = 0)::int, 500 + n % 4000, n % 300, 50 + n % 900,
       case s.state when 'charged' then (1 + n % 1000) * 0.00001 when 'zero' then 0 end,
       case s.state when 'unknown' then 0.02 end, s.status,
       case s.status when 'success' then 'complete' when 'error' then 'error' else 'broken' end,
       case when s.status <> 'success' then 'transient' end, case when s.status = 'error' then 'overloaded' end,
       g.at, (n * 7919) % 900, 100 + (n * 104729) % 4000, 400 + (n * 1299709) % 30000, (n % 50 = 0)::int
  from generate_series(0, {rows}::bigint - 1) n,
       lateral (select now() - ({rows} - n) * (interval '90 days' / {rows}) as at) g,
       -- An unknown one of three is corrected.
       generate_series(0, (n % 300 = 107)::int) c (correction),
       lateral (select case when n % 100 = 7 and c.correction = 0 then 'unknown' when n % 50 = 3 then 'zero'
                            else 'charged' end as state,
                       case when n % 100 = 7 and c.correction = 0 then 'unknown' when n % 50 = 3 then 'error'
                            else 'success' end as status) s;

insert into control.attempt (ticket_id, key_id, debit_id, attempt, group_id, granted_at, day, state, settled_at)
select ticket_id, key_id, debit_id, 1, group_id, granted_at, day, state, settled_at from control.invocation
 where correction = 0;
