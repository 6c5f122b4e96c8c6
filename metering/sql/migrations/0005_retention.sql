-- The attempts whose cost is not known yet: few, and what the ledger says of them must outlive its month.

create index attempt_unknown on control.attempt (granted_at) where state = 'unknown';

-- What was dropped, so that an answer can say that it has not all: days before `before` are not whole any more, in the
-- `log` or in the counters of a kind.
create table control.forgotten (
    what text primary key check (what in ('log', 'run_day', 'step_day', 'tag_day')),
    before date not null
);
