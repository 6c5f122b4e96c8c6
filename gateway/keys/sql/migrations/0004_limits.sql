-- Limits are held by admission, under the lock of a row of its own for each key that has them. Whoever writes a key's
-- limits has written that row, in the same transaction.

create function control.api_key_limited() returns trigger language plpgsql as $$
begin
    perform control.limit_key_v1(new.key_id, new.limits);
    return null;
end
$$;

create trigger api_key_limited
    after insert on control.api_key
    for each row when (new.limits <> '{}') execute function control.api_key_limited();

create trigger api_key_limits_changed
    after update of limits on control.api_key
    for each row when (new.limits is distinct from old.limits) execute function control.api_key_limited();

-- Set by hand, since no version could set them.
insert into control.key_limit (key_id, concurrency, requests_per_minute, tokens_per_minute, budget_day_usd,
                               budget_month_usd, budget_total_usd, requests_left, tokens_left, tokens_seen, filled_at)
select k.key_id, l.concurrency, l.requests_per_minute, l.tokens_per_minute, l.budget_day_usd, l.budget_month_usd,
       l.budget_total_usd, coalesce(l.requests_per_minute, 0), coalesce(l.tokens_per_minute, 0),
       (select coalesce(sum(c.input_tokens + c.output_tokens), 0) from control.counter c
         where c.kind = 'key' and c.name = k.key_id::text),
       (select clock_timestamp() + s.ahead from control.store s)
  from control.api_key k,
       jsonb_to_record(k.limits) as l (
           concurrency integer, requests_per_minute integer, tokens_per_minute bigint, budget_day_usd numeric,
           budget_month_usd numeric, budget_total_usd numeric)
 where k.limits <> '{}';
