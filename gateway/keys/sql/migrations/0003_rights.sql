-- What a key may use, what is said on each of its calls, and a second secret while the first is being replaced.
alter table control.api_key
    add column description text not null default '',
    -- Null: any. Providers by id, models by pattern.
    add column models text[],
    add column providers text[],
    -- Limits by name: only those that are set.
    add column limits jsonb not null default '{}',
    add column previous_digest bytea,
    add column previous_until timestamptz,
    add column changed_at timestamptz,
    add constraint api_key_lists_name_something check (cardinality(models) > 0 and cardinality(providers) > 0),
    add constraint api_key_previous_is_sha256 check (octet_length(previous_digest) = 32),
    add constraint api_key_previous_ends check ((previous_digest is null) = (previous_until is null)),
    add constraint api_key_previous_unique unique (previous_digest);
