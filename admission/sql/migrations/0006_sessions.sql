-- Budgets of sessions. A session belongs to its key: its name is the key's and its own.

alter table control.key_limit add column budget_session_usd numeric check (budget_session_usd >= 0);

-- Of a ticket with a session, reserved_usd is there whether its key has limits or not.
alter table control.ticket add column session_id text;
-- All of one session have one key in the index: as for ticket_slots.
create index ticket_session on control.ticket (key_id, session_id)
    with (deduplicate_items = off) where session_id is not null;

-- What was said of one session. Only for those of which something was said.
create table control.session_budget (
    key_id uuid not null,
    session_id text not null,
    -- By its key itself: it can only lower what the session may cost.
    own_usd numeric check (own_usd >= 0),
    -- By an administrator, in place of its key's budget_session_usd.
    set_usd numeric check (set_usd >= 0),
    primary key (key_id, session_id)
) with (fillfactor = 50);
