-- What was asked and answered, where an operator keeps it. Nothing here refers to another schema: `content` may live in a
-- database of its own.
create schema if not exists content;

create table content.capture (
    request_id text primary key,
    key_id uuid not null,
    debit_id text not null,
    transport text not null,
    model text not null,
    session_id text,
    captured_at timestamptz not null default clock_timestamp(),
    -- "complete", a code of ours, or "cancelled".
    ended text not null,
    -- JSON, redacted. Null where it was larger than is kept, or there was none. The bytes are those before.
    request text,
    request_bytes bigint not null,
    answer text,
    answer_bytes bigint not null,
    expires_at timestamptz not null
);

create index capture_retention on content.capture (expires_at);
