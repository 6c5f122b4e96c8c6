-- What a key may use. Only for keys that have limits.

create table control.key_limit (
    key_id uuid primary key,
    concurrency integer check (concurrency > 0),
    requests_per_minute integer check (requests_per_minute > 0),
    tokens_per_minute bigint check (tokens_per_minute > 0),
    budget_day_usd numeric check (budget_day_usd >= 0),
    budget_month_usd numeric check (budget_month_usd >= 0),
    budget_total_usd numeric check (budget_total_usd >= 0),
    -- Buckets, as those of control.allowance.
    requests_left double precision not null,
    tokens_left double precision not null,
    -- The key's tokens in the ledger when tokens_left was reckoned.
    tokens_seen bigint not null,
    filled_at timestamptz not null
) with (fillfactor = 50);

-- The most that the attempt can cost, from its enqueueing until the ledger has its cost or its bound. Null where its key
-- had no limits.
alter table control.ticket add column reserved_usd numeric check (reserved_usd >= 0);
