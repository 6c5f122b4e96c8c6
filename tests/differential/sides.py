"""
The two sides of the differential test: PostgreSQL's functions, and the pure core.

PostgreSQL's clock is a row here: a `clock_timestamp` that comes first in the search path answers it. So both sides
decide at the same microsecond, and a deadline can be met exactly, a microsecond early or late, without any sleep.
The store's own offset is set as well, so that a function that forgets it is found.
"""

from __future__ import annotations

import math
import uuid
from collections.abc import Iterator, Sequence
from datetime import date
from typing import Any, Final

import asyncpg
import msgspec
from msgspec.structs import asdict, replace

from admission.breaker import Breaker
from admission.clock import SECOND, day_of
from admission.contract import SettledRow, TicketRow
from admission.core.groups import limits_of
from admission.settings import GroupSettings
from admission.state import (
    Allowance,
    Answers,
    Attempt,
    AttemptState,
    Change,
    Floor,
    FloorKind,
    Group,
    LimitedKey,
    Pace,
    SessionBudget,
    Spent,
    State,
    Ticket,
)

CLOCK: Final = """
create schema virtual;
create table virtual.clock (now timestamptz not null);
insert into virtual.clock values (pg_catalog.clock_timestamp());
create function virtual.clock_timestamp() returns timestamptz language sql volatile
    as $$ select c.now from virtual.clock c $$;
create function virtual.us(timestamptz) returns bigint language sql immutable
    as $$ select (extract(epoch from $1) * 1000000)::bigint $$;
create function virtual.us(interval) returns bigint language sql immutable
    as $$ select (extract(epoch from $1) * 1000000)::bigint $$;
do $$ begin
    execute format('alter database %I set search_path = virtual, pg_catalog, public', current_database());
end $$;
"""

#: A store that nobody has used.
EMPTY: Final = """
delete from control.ticket; delete from control.attempt; delete from control.capacity_group;
delete from control.allowance; delete from control.floor; delete from control.endpoint; delete from control.fence;
delete from control.owner; delete from control.configuration; delete from control.invocation;
delete from control.counter; delete from control.breaker_event; delete from control.pace; delete from control.key_limit;
delete from control.session_budget;
update control.reclaim set not_before = 'epoch';
"""

#: Everything that is decided upon, at one instant.
SNAPSHOT: Final = """
select json_build_object(
    'tickets', (select coalesce(json_agg(json_build_object(
        'ticket_id', t.ticket_id, 'group', t.group_id, 'number', t.number, 'klass', t.class, 'model', t.model,
        'endpoint', t.endpoint, 'credential', t.credential, 'tokens', t.tokens, 'owner', t.owner_id,
        'reserved', t.reserved_usd::text, 'session', t.session_id,
        'key_id', t.key_id, 'debit_id', t.debit_id, 'attempt', t.attempt, 'state', t.state,
        'waits_for_cooldown', t.waits_for_cooldown, 'execution_limit', us(t.execution_limit),
        'isolation', us(t.isolation), 'queued_at', us(t.queued_at), 'queue_deadline', us(t.queue_deadline),
        'caller_deadline', us(t.caller_deadline),
        'fence', case when t.fence is not null then json_build_array(t.scope_id, t.run_id, t.fence) end,
        'generation', t.generation, 'granted_at', us(t.granted_at + s.ahead),
        'grant_expires_at', us(t.grant_expires_at), 'hard_deadline', us(t.hard_deadline),
        'quarantined_until', us(t.quarantined_until))), '[]') from control.ticket t),
    'attempts', (select coalesce(json_agg(json_build_object(
        'ticket_id', a.ticket_id, 'state', a.state, 'key_id', a.key_id, 'debit_id', a.debit_id, 'attempt', a.attempt,
        'group', a.group_id, 'owner', a.owner_id,
        'granted_at', case when a.key_id is not null then us(a.granted_at + s.ahead) end)), '[]')
        from control.attempt a),
    'groups', (select coalesce(json_agg(json_build_object(
        'group', g.group_id, 'concurrency', g.concurrency, 'headroom', g.quarantine_headroom, 'queue', g.queue_bound,
        'failure_threshold', g.failure_threshold, 'failure_window', us(g.failure_window),
        'first_cooldown', us(g.first_cooldown), 'longest_cooldown', us(g.longest_cooldown),
        'next_number', g.next_number, 'batch_credit', g.batch_credit, 'breaker', json_build_object(
            'state', g.breaker, 'generation', g.generation, 'probe', g.probe, 'openings', g.openings,
            'cooldown_until', us(g.cooldown_until), 'failed_at', array(select us(f) from unnest(g.failed_at) f),
            'ramp', g.ramp), 'opened_total', g.opened_total, 'opened_for', g.opened_for,
        'open_since', us(g.open_since + s.ahead), 'endpoints', g.endpoints)), '[]') from control.capacity_group g),
    'allowances', (select coalesce(json_agg(json_build_object(
        'group', a.group_id, 'model', a.model, 'allowance', json_build_object(
            'concurrency', a.concurrency, 'requests_per_minute', a.requests_per_minute,
            'tokens_per_minute', a.tokens_per_minute, 'requests_left', a.requests_left, 'tokens_left', a.tokens_left,
            'filled_at', us(a.filled_at)))), '[]') from control.allowance a),
    'floors', (select coalesce(json_agg(json_build_object(
        'group', f.group_id, 'credential', f.credential, 'model', f.model, 'kind', f.kind,
        'floor', json_build_object('since', us(f.since), 'until', us(f.until), 'strikes', f.strikes))), '[]')
        from control.floor f),
    'paces', (select coalesce(json_object_agg(p.group_id, json_build_object('held', p.held, 'ended', p.ended)), '{}')
        from control.pace p where p.ended > 0),
    'changes', (select coalesce(json_agg(json_build_object(
        'group', e.group_id, 'was', e.was, 'became', e.became, 'generation', e.generation, 'cause', e.cause,
        'at', us(e.at + s.ahead), 'until', us(e.until + s.ahead)) order by e.event_id), '[]')
        from control.breaker_event e),
    'endpoints', (select coalesce(json_object_agg(e.endpoint, e.group_id), '{}') from control.endpoint e),
    'owners', (select coalesce(json_object_agg(o.owner_id, us(o.expires_at)), '{}') from control.owner o),
    'fences', (select coalesce(json_agg(json_build_array(f.key_id, f.scope_id, f.run_id, f.number)), '[]')
        from control.fence f),
    'limited', (select coalesce(json_object_agg(k.key_id, json_build_object(
        'limits', json_build_object(
            'concurrency', k.concurrency, 'requests_per_minute', k.requests_per_minute,
            'tokens_per_minute', k.tokens_per_minute, 'budget_day_usd', k.budget_day_usd::text,
            'budget_month_usd', k.budget_month_usd::text, 'budget_total_usd', k.budget_total_usd::text,
            'budget_session_usd', k.budget_session_usd::text),
        'bucket', json_build_object(
            'requests_left', k.requests_left, 'tokens_left', k.tokens_left, 'tokens_seen', k.tokens_seen,
            'filled_at', us(k.filled_at)))), '{}') from control.key_limit k),
    'spent', (select coalesce(json_agg(json_build_object(
        'of', split_part(c.name, '/', 1), 'day', split_part(c.name, '/', 2), 'spent', json_build_object(
            'usd', c.usd::text, 'unknown', c.unknown::text, 'tokens', c.tokens))), '[]')
        from (select k.name, sum(k.charged_usd) as usd, sum(k.unknown_upper_bound_usd) as unknown,
                     sum(k.input_tokens + k.output_tokens) as tokens
                from control.counter k where k.kind = 'key_day' group by k.name) c),
    'sessions', (select coalesce(json_agg(json_build_object(
        'of', split_part(c.name, '/', 1), 'name', split_part(c.name, '/', 2), 'spent', json_build_object(
            'usd', c.usd::text, 'unknown', c.unknown::text, 'tokens', c.tokens))), '[]')
        from (select k.name, sum(k.charged_usd) as usd, sum(k.unknown_upper_bound_usd) as unknown,
                     sum(k.input_tokens + k.output_tokens) as tokens
                from control.counter k where k.kind = 'session' group by k.name) c),
    'budgets', (select coalesce(json_agg(json_build_object(
        'of', b.key_id, 'name', b.session_id, 'budget', json_build_object(
            'own', b.own_usd::text, 'given', b.set_usd::text))), '[]') from control.session_budget b),
    'not_before', (select us(r.not_before) from control.reclaim r),
    'closed_until', coalesce(us(s.closed_until), 0))::text
  from control.store s
"""

#: What is wrong with the ledger, one row a thing.
LEDGER: Final = """
select 'an attempt without its one settlement: ' || a.ticket_id from control.attempt a
 where a.key_id is not null
   and 1 <> (select count(*) from control.invocation i where i.ticket_id = a.ticket_id and i.correction = 0)
union all
select 'a settlement without its attempt: ' || i.ticket_id from control.invocation i
 where not exists (select from control.attempt a where a.ticket_id = i.ticket_id and a.key_id is not null)
union all
select 'the last entry is another than the attempt: ' || a.ticket_id from control.attempt a
 where a.key_id is not null
   and a.state <> (select i.state from control.invocation i where i.ticket_id = a.ticket_id
                    order by i.correction desc limit 1)
union all
select 'corrected more than once: ' || i.ticket_id from control.invocation i where i.correction > 1
union all
select format('the counters say %s, the entries %s', c.sums, i.sums)
  from (select row(coalesce(sum(k.charged_usd), 0)::numeric(30, 12), coalesce(sum(k.attempts), 0)::bigint,
                   coalesce(sum(k.unknown_attempts), 0)::bigint) as sums
          from control.counter k where k.kind = 'total') c,
       (select row(coalesce(sum(l.usd), 0)::numeric(30, 12), count(*) filter (where l.correction = 0),
                   (select count(*) from control.attempt a where a.key_id is not null and a.state = 'unknown')) as sums
          from control.invocation l) i
 where c.sums <> i.sums
"""


class _Group(msgspec.Struct):
    group: str
    concurrency: int
    headroom: int
    queue: int
    failure_threshold: int
    failure_window: int
    first_cooldown: int
    longest_cooldown: int
    next_number: int
    batch_credit: int
    breaker: Breaker
    opened_total: int
    opened_for: str | None
    open_since: int | None
    endpoints: list[str]


class _Allowance(msgspec.Struct):
    group: str
    model: str
    allowance: Allowance


class _Floor(msgspec.Struct):
    group: str
    credential: str
    model: str
    kind: FloorKind
    floor: Floor


class _Attempt(msgspec.Struct):
    ticket_id: uuid.UUID
    state: AttemptState
    key_id: uuid.UUID | None
    debit_id: str | None
    attempt: int | None
    group: str | None
    owner: uuid.UUID | None
    granted_at: int | None


class _Spent(msgspec.Struct):
    of: uuid.UUID
    day: date
    spent: Spent


class _Session(msgspec.Struct):
    of: uuid.UUID
    name: str
    spent: Spent


class _Budget(msgspec.Struct):
    of: uuid.UUID
    name: str
    budget: SessionBudget


class Snapshot(msgspec.Struct):
    tickets: list[Ticket]
    attempts: list[_Attempt]
    groups: list[_Group]
    allowances: list[_Allowance]
    floors: list[_Floor]
    changes: list[Change]
    paces: dict[str, Pace]
    endpoints: dict[str, str]
    owners: dict[uuid.UUID, int]
    fences: list[tuple[uuid.UUID, str, str, int]]
    limited: dict[uuid.UUID, LimitedKey]
    spent: list[_Spent]
    sessions: list[_Session]
    budgets: list[_Budget]
    not_before: int
    closed_until: int


_DECODER: Final = msgspec.json.Decoder(Snapshot)


async def look(connection: asyncpg.Connection, before: State) -> State:
    """The store's state, in the words of the core. What did not change since `before` is the same object."""
    found = _DECODER.decode(await connection.fetchval(SNAPSHOT))
    tickets = {t.ticket_id: _same(before.tickets.get(t.ticket_id), t) for t in found.tickets}
    attempts = {}
    ended: dict[tuple[uuid.UUID, str], int] = {}
    for row in found.attempts:
        was = before.attempts.get(row.ticket_id)
        fields = asdict(row)
        del fields["ticket_id"]
        corrected = was is not None and (was.corrected or (was.state == "unknown" and row.state != "unknown"))
        attempts[row.ticket_id] = _same(was, Attempt(**fields, corrected=corrected))
        if row.key_id is not None and row.debit_id is not None and row.attempt is not None:
            debit = (row.key_id, row.debit_id)
            ended[debit] = max(ended.get(debit, 0), row.attempt)
    groups = {}
    for g in found.groups:
        settings = GroupSettings(
            concurrency=g.concurrency,
            queue=g.queue,
            failure_threshold=g.failure_threshold,
            failure_window_s=g.failure_window / SECOND,
            first_cooldown_s=g.first_cooldown / SECOND,
            longest_cooldown_s=g.longest_cooldown / SECOND,
            quarantine_headroom=g.headroom,
        )
        groups[g.group] = Group(
            settings=settings,
            version=0,
            limits=limits_of(settings),
            breaker=g.breaker,
            next_number=g.next_number,
            batch_credit=g.batch_credit,
            opened_total=g.opened_total,
            opened_for=g.opened_for,
            open_since=g.open_since,
        )
    listed = {endpoint: g.group for g in found.groups for endpoint in g.endpoints}
    if listed != found.endpoints:
        raise Difference([f"the groups list the endpoints {listed}, the endpoints say {found.endpoints}"])
    return replace(
        before,
        groups=groups,
        allowances={(a.group, a.model): a.allowance for a in found.allowances},
        floors={(f.group, f.credential, f.model, f.kind): f.floor for f in found.floors},
        endpoints=found.endpoints,
        tickets=before.tickets if tickets == before.tickets else tickets,
        attempts=before.attempts if attempts == before.attempts else attempts,
        ended=ended,
        owners=found.owners,
        reclaim_not_before=found.not_before,
        fences={(key, scope, run): number for key, scope, run, number in found.fences},
        limited=found.limited,
        spent={(row.of, row.day): row.spent for row in found.spent},
        sessions={(row.of, row.name): row.spent for row in found.sessions},
        session_budgets={(row.of, row.name): row.budget for row in found.budgets},
        closed_until=found.closed_until,
        changes=tuple(found.changes),
        paces=found.paces,
    )


def _same(was: Any, now: Any) -> Any:
    return was if was == now else now


# ------------------------------------------------------------------ what differs


class Difference(AssertionError):
    """The two sides do not agree."""

    def __init__(self, what: list[str]) -> None:
        super().__init__("\n".join(what))
        self.what = what


def differences(core: State, sql: State, now: int) -> list[str]:
    """One line each."""
    found: list[str] = []
    found += _differ("ticket", _each(core.tickets, _ticket), _each(sql.tickets, _ticket))
    found += _differ(
        "attempt",
        {key: asdict(replace(attempt, corrected=False)) for key, attempt in core.attempts.items()},
        {key: asdict(replace(attempt, corrected=False)) for key, attempt in sql.attempts.items()},
    )
    found += _differ("group", _each(core.groups, _group), _each(sql.groups, _group))
    found += _differ("pace", _each(core.paces, asdict), _each(sql.paces, asdict))
    found += _differ("floor", _each(core.floors, asdict), _each(sql.floors, asdict))
    found += _differ("allowance", _each(core.allowances, _allowance, now), _each(sql.allowances, _allowance, now))
    found += _differ("key", _each(core.limited, _limited), _each(sql.limited, _limited))
    for name in ("endpoints", "spent", "sessions", "session_budgets", "owners", "fences", "ended"):
        found += _differ(name, getattr(core, name), getattr(sql, name))
    for name in ("reclaim_not_before", "closed_until", "changes"):
        if getattr(core, name) != getattr(sql, name):
            found.append(f"{name}: core {getattr(core, name)}, sql {getattr(sql, name)}")
    return found


def _each(values: Any, facts: Any, now: int | None = None) -> dict[Any, Any]:
    return {key: facts(value if now is None else value.at(now)) for key, value in values.items()}


def _ticket(ticket: Ticket) -> dict[str, Any]:
    facts = asdict(ticket)
    if ticket.state in ("active", "quarantined"):
        # Nobody asks any more; the two keep different leftovers.
        facts["queue_deadline"] = facts["queued_at"] = None
    return facts


def _group(group: Group) -> dict[str, Any]:
    settings = group.settings
    return {
        "queue": settings.queue,
        "headroom": settings.quarantine_headroom,
        "limits": group.limits,
        "next_number": group.next_number,
        "batch_credit": group.batch_credit,
        "opened_total": group.opened_total,
        "opened_for": group.opened_for,
        "open_since": group.open_since,
        **asdict(group.breaker),
        "failed_at": tuple(group.breaker.failed_at),
    }


def _allowance(allowance: Allowance) -> dict[str, Any]:
    return {
        **asdict(allowance),
        "filled_at": None,
        "requests_left": None if allowance.requests_per_minute is None else allowance.requests_left,
        "tokens_left": None if allowance.tokens_per_minute is None else allowance.tokens_left,
    }


def _limited(limited: LimitedKey) -> dict[str, Any]:
    return {"limits": limited.limits, **asdict(limited.bucket)}


def _differ(kind: str, core: Any, sql: Any) -> Iterator[str]:
    for key in sorted(core.keys() | sql.keys(), key=str):
        ours, theirs = core.get(key), sql.get(key)
        if ours is None or theirs is None:
            if ours != theirs:
                yield f"{kind} {key}: core {_short(ours)}, sql {_short(theirs)}"
        elif isinstance(ours, dict):
            for field, value in ours.items():
                if not _close(value, theirs.get(field)):
                    yield f"{kind} {key}: {field}: core {value!r}, sql {theirs.get(field)!r}"
        elif ours != theirs:
            yield f"{kind} {key}: core {ours!r}, sql {theirs!r}"


def _short(value: Any) -> str:
    if isinstance(value, dict) and "state" in value:
        return str(value["state"])
    return repr(value)


def _close(ours: Any, theirs: Any) -> bool:
    if isinstance(ours, float) and isinstance(theirs, float):
        return math.isclose(ours, theirs, rel_tol=1e-9, abs_tol=1e-6)
    return bool(ours == theirs)


# ------------------------------------------------------------------ answers

#: What each answer tells; the rest of its row means nothing.
_TOLD: Final = {
    "granted": (
        "owner_id",
        "group_id",
        "number",
        "generation",
        "probe",
        "judged",
        "granted_at",
        "remaining_ms",
    ),
    "notify": ("owner_id", "group_id", "number", "generation", "probe", "judged"),
    "queued": ("group_id", "ahead", "wait_reason", "wait_ms", "expected_ms"),
    "queue_full": ("expected_ms",),
    "moved": ("group_id",),
    "owner_fence": (),
    "next": (),
    "breaker": (),
    "cooldown": ("wait_reason", "wait_ms"),
    "provider_unavailable": ("wait_reason", "wait_ms"),
    **dict.fromkeys(
        ("too_large", "key_limit", "budget_exceeded", "budget_reserved", "cost_not_bounded"), ("wait_ms", "key_limit")
    ),
}


def tickets_differ(core: Sequence[TicketRow], sql: Sequence[TicketRow], ahead: int, zone: str) -> list[str]:
    """What is answered of tickets. The order of rows means nothing."""
    ours, theirs = _facts(core, 0, zone), _facts(sql, ahead, zone)
    if "next" not in ours:
        # PostgreSQL also tells the next event where the last waiter was granted.
        theirs.pop("next", None)
    if all(facts["answer"] == "granted" for facts in theirs.values()):
        # And where all that was asked was granted at once, it does not look for those who wait for something else.
        ours.pop("next", None)
    return list(_differ("answer", ours, theirs))


def _facts(rows: Any, ahead: int, zone: str) -> dict[Any, Any]:
    found: dict[Any, Any] = {}
    for row in rows:
        # One that another owner asked for and that is granted here is told to both.
        key = row.answer if row.ticket_id is None else f"{row.ticket_id}{' notify' if row.answer == 'notify' else ''}"
        facts: dict[str, Any] = {"answer": row.answer}
        for field in _TOLD.get(row.answer, ("wait_ms",)):
            value = getattr(row, field)
            if field == "granted_at":
                value = SECOND * int(value.timestamp()) + value.microsecond
                if row.day != day_of(value, zone):
                    raise Difference([f"{key} was granted at {row.granted_at}, on {row.day}?"])
                value += ahead
            if field.endswith("_ms") and value is not None:
                value = Milliseconds(value)
            facts[field] = value
        if key in found:
            raise Difference([f"two rows for {key}: {found[key]}, {facts}"])
        found[key] = facts
    return found


class Milliseconds(int):
    """Equal where they differ by rounding alone."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, int) and abs(int(self) - int(other)) <= 1

    def __hash__(self) -> int:
        return 0


def adopt(core: State, sql: State, answers: Answers, batch: int) -> tuple[State, Answers]:
    """
    With the numbers that PostgreSQL gave the tickets it granted at once. Elements that are refused leave gaps in them
    where the usual way was tried first; their order is the same, and nobody is numbered by them.
    """
    tickets = dict(core.tickets)
    rows = list(answers.tickets)
    for place, row in enumerate(rows):
        ours = None if row.ticket_id is None else core.tickets.get(row.ticket_id)
        theirs = None if row.ticket_id is None else sql.tickets.get(row.ticket_id)
        if ours is None or theirs is None or (ours.state, theirs.state) != ("active", "active"):
            continue
        if ours.granted_at == ours.queued_at and ours.number < theirs.number < ours.number + batch:
            tickets[ours.ticket_id] = replace(ours, number=theirs.number)
            rows[place] = replace(row, number=theirs.number)
    if tickets == core.tickets:
        return core, answers
    return replace(core, tickets=tickets), replace(answers, tickets=tuple(rows))


def before(state: State, ticket_id: uuid.UUID) -> int:
    """How many wait before it. Of one number nobody is before the other."""
    mine = state.tickets[ticket_id]
    return min(
        100,
        sum(
            t.state == "queued" and t.group == mine.group and (t.klass, t.number) < (mine.klass, mine.number)
            for t in state.tickets.values()
        ),
    )


def settled_differ(core: Sequence[SettledRow], sql: Sequence[SettledRow]) -> list[str]:
    if [row.ticket_id for row in core] != [row.ticket_id for row in sql]:
        return [f"settled: core {core}, sql {sql}"]
    return [
        f"settled {ours.ticket_id}: {field}: core {getattr(ours, field)}, sql {getattr(theirs, field)}"
        for ours, theirs in zip(core, sql, strict=True)
        for field in ("applied", "group_id", "waiters", "untold")
        if getattr(ours, field) != getattr(theirs, field)
    ]
