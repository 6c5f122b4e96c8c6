-- A floor says why it is there.

drop function if exists control.floor_until_v1(text, text, text, text, timestamptz);

-- "unavailable" is one that an earlier version has put.
alter table control.floor
    drop constraint floor_kind_check,
    add constraint floor_kind_check check (
        kind in ('rate_limit', 'long_rate_limit', 'credential_rejected', 'quota_exhausted', 'unavailable'));
