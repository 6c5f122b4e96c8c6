-- Breakers tell of their changes, and how long calls hold their slots tells how long a wait is.

-- Changes that nobody has written to a log yet. Whoever takes a row has it alone.
create table control.breaker_event (
    event_id bigint generated always as identity primary key,
    group_id text not null,
    was text not null,
    became text not null,
    generation bigint not null,
    cause text not null,
    -- Both by the server's own clock. `until`: the end of the cooldown.
    at timestamptz not null,
    until timestamptz
);

-- "served" and "served_since" are left for statements that are under way while this is applied: nothing reads them.
alter table control.capacity_group
    -- How often it has opened in all, why the last time, and since when it is not closed, by the server's own clock.
    add column opened_total bigint not null default 0,
    add column opened_for text,
    add column open_since timestamptz;

-- Seconds that calls held their slots, of those that ended while others waited, and how many those were. Halved as they
-- add up, so that what is long ago weighs little. Not in the group's row: a settlement does not wait for its lock.
create table control.pace (
    group_id text primary key,
    held double precision not null default 0,
    ended double precision not null default 0
) with (fillfactor = 50);
insert into control.pace (group_id) select g.group_id from control.capacity_group g;
