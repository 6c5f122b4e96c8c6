-- What an idempotency key of a call stands for. Nothing here refers to another schema: `content` may live in a database
-- of its own, and an answer is content.
create schema if not exists content;

create table content.idempotent_call (
    key_id uuid not null,
    idempotency_key text not null,
    -- SHA-256 of what was asked for.
    digest bytea not null check (octet_length(digest) = 32),
    -- The request that has the key now: nobody else writes to the row.
    request_id text not null,
    debit_id text not null,
    owner uuid not null,
    -- `waiting`: nothing was sent. `sent`: it may have been. `left`: the same, and nobody is there for its end. `ended`.
    state text not null check (state in ('waiting', 'sent', 'left', 'ended')),
    answer bytea,
    expires_at timestamptz not null,
    primary key (key_id, idempotency_key),
    constraint ended_has_answer check ((state = 'ended') = (answer is not null))
) with (fillfactor = 80);

create index idempotent_call_retention on content.idempotent_call (expires_at);
