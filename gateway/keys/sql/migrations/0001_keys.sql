-- API keys. The secret itself is nowhere: `digest` is its SHA-256, which says nothing of 32 random bytes.
create schema if not exists control;

create table control.api_key (
    key_id uuid primary key,
    name text not null,
    digest bytea not null,
    scopes text[] not null,
    tags jsonb not null default '{}',
    created_at timestamptz not null default clock_timestamp(),
    expires_at timestamptz,
    revoked_at timestamptz,
    constraint api_key_name_length check (length(name) between 1 and 128),
    constraint api_key_digest_is_sha256 check (octet_length(digest) = 32),
    constraint api_key_has_scopes check (cardinality(scopes) > 0),
    constraint api_key_digest_unique unique (digest)
);

-- A name may be used again once its key is revoked.
create unique index api_key_active_name on control.api_key (name) where revoked_at is null;

-- One row that changes with every change of a key, whoever makes it: every process asks for it each second, and reads
-- the keys when it differs. A time stamp would not do: a change that commits late can carry an earlier one.
create table control.api_key_version (
    only_row boolean primary key default true,
    version bigint not null,
    constraint api_key_version_one_row check (only_row)
);
insert into control.api_key_version (version) values (1);

create function control.api_key_changed() returns trigger language plpgsql as $$
begin
    update control.api_key_version set version = version + 1;
    return null;
end
$$;

create trigger api_key_changed
    after insert or update or delete or truncate on control.api_key
    for each statement execute function control.api_key_changed();
