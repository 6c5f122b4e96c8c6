"""
Schedules of everything that admission can be asked, played to both sides.

A step is a kind and a number; what it asks exactly is drawn, from that number, out of what is there when its turn
comes. So any part of a schedule is a schedule, and one that fails is made shorter by leaving steps out.
"""

from __future__ import annotations

import asyncio
import random
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any, Final, TypeVar

import asyncpg
import msgspec
from msgspec.structs import asdict, replace

from admission import decision
from admission.breaker import BreakerState, cooldown
from admission.clock import SECOND
from admission.contract import Rejected, SettledRow, TicketRow
from admission.lease import Class, Demand, Ending, Fence, Lease, Settlement, Verdict
from admission.memory import charge_of
from admission.settings import AdmissionSettings, GroupSettings, KeyLimits, ModelLimits
from admission.state import (
    Abandon,
    Acquire,
    Answers,
    Bury,
    Close,
    Configure,
    Decide,
    Element,
    Event,
    LimitKey,
    LimitSession,
    Outcome,
    Overdue,
    Renew,
    Rescan,
    Reset,
    Settle,
    State,
    Take,
    UnknownGroup,
    element,
    initial,
)
from admission.store import Store
from gateway import database
from tests.differential import sides
from tests.differential.sides import Difference
from tests.simulation.invariants import Violation, Watch

PROCESSES: Final = 3
KEYS: Final = (uuid.UUID(int=1), uuid.UUID(int=2))
SESSIONS: Final = ("s", "t")
GROUPS: Final = ("a", "b")
MODELS: Final = ("m1", "m2", "m3")
CREDENTIALS: Final = ("c1", "c2")
#: No round number: with those, buckets would hold a whole request to the last bit of a float.
LEASE_S: Final = 19.7
LONGEST_RETRY_S: Final = 1000.0
#: Shortly before midnight, in the zone that is asked for, on the night the clocks change.
BEGIN: Final = int(datetime(2026, 3, 28, 22, 58, tzinfo=UTC).timestamp()) * SECOND
ZONE: Final = "Europe/Berlin"
#: How far the store's time is before its server's clock.
OFFSETS: Final = (0, 7_200_500_000)

T = TypeVar("T")

#: How often each kind of step comes.
WEIGHTS: Final = {
    "acquire": 30,
    "advance": 8,
    "rescan": 8,
    "settle": 20,
    "decide": 3,
    "abandon": 4,
    "renew": 5,
    "bury": 1,
    "overdue": 2,
    "configure": 2,
    "take": 2,
    "reset": 0.5,
    "limit": 3,
    "session": 3,
    "close": 0.5,
    "time": 14,
    "look": 2,
}


#: Each must happen now and then: what never happens is not compared.
SOMETIMES: Final = (
    *(
        f"answer {answer}"
        for answer in (
            "granted",
            "queued",
            "notify",
            "next",
            "ended",
            "duplicate_debit",
            "lapsed",
            "owner_fence",
            "deadline_exceeded",
            "provider_unavailable",
            "too_large",
            "cooldown",
            "queue_full",
            "key_limit",
            "budget_exceeded",
            "budget_reserved",
            "cost_not_bounded",
            "store_closed",
            "moved",
        )
    ),
    *(
        f"waits for {reason}"
        for reason in (
            "capacity",
            "model_capacity",
            "rate",
            "cooldown",
            "rate_limited",
            "quarantine",
            "stopped",
            "store",
        )
    ),
    *(
        f"told how long it waits for {reason}"
        for reason in ("capacity", "model_capacity", "rate", "cooldown", "rate_limited", "quarantine", "store")
    ),
    "told when the queue has room",
    *(f"refused for {cause}" for cause in ("cooldown", "rate_limited", "credential_rejected", "quota_exhausted")),
    "breaker closed becomes open",
    "breaker open becomes half_open",
    "breaker half_open becomes closed",
    "breaker half_open becomes open",
    "a probe",
    "a probe's place was handed on",
    *(f"told that a breaker open: {cause}" for cause in ("transient", "slow", "probe_undecided", "probe_lost")),
    "told that a breaker half_open: cooldown_over",
    *(f"told that a breaker closed: {cause}" for cause in ("answered", "first_content", "rate_limited", "reset")),
    "a ramp widened",
    "batch had its turn",
    "a floor of rate_limit",
    "a floor of long_rate_limit",
    "a floor of credential_rejected",
    "a floor of quota_exhausted",
    "a floor under the account",
    "a second strike",
    *(
        f"{was} becomes {now}"
        for was, now in (
            ("queued", "granted"),
            ("queued", "active"),
            ("granted", "active"),
            ("granted", "queued"),
            ("active", "quarantined"),
        )
    ),
    *(f"{state} is gone" for state in ("queued", "granted", "active", "quarantined")),
    *(f"settled as {state}" for state in ("charged", "zero", "unknown")),
    *(f"refused for {name}" for name in KeyLimits.__struct_fields__),
    "refused for all are quarantined",
    "refused for a session's budget of a key without limits",
    "a session's budget may not be raised",
    "corrected",
    "tombstone",
    "settled once more",
    *(f"{ending} and {verdict}" for ending in Ending for verdict in Verdict),
    "lapsed and began again",
    "other settings are in force",
    "over a lowered limit",
    "over the bound by place",
    "rejected",
    "to the microsecond",
    *(f"step {kind}" for kind in WEIGHTS),
)


class Step(msgspec.Struct, frozen=True):
    kind: str
    #: What it asks is drawn from this.
    salt: int


def steps(seed: int, many: int) -> list[Step]:
    rng = random.Random(seed)
    kinds = rng.choices(list(WEIGHTS), list(WEIGHTS.values()), k=many)
    return [Step("begin", rng.getrandbits(32)), *(Step(kind, rng.getrandbits(32)) for kind in kinds)]


class Failure(AssertionError):
    """What is wrong, and all that was asked before."""

    def __init__(self, what: str, trail: Sequence[str]) -> None:
        super().__init__("\n".join([what, *(f"    {line}" for line in trail)]))
        self.what = what


class Both:
    """The two sides, asked the same."""

    def __init__(self, connection: asyncpg.Connection, stores: Sequence[Store]) -> None:
        """Each process has a store of its own. The connection moves the clock, and looks."""
        self._connection = connection
        self._stores = list(stores)
        self.seen: Counter[str] = Counter()
        self.trail: list[str] = []
        self.now = BEGIN
        self.ahead = 0
        self.core = State()
        self.sql = State()
        self.settings = AdmissionSettings(groups={})
        self._watch = Watch(lambda _: False, AdmissionSettings(groups={}).unconfirmed_grant_s)

    async def begin(self, settings: AdmissionSettings, ahead: int) -> None:
        self.seen = Counter()
        self.trail = []
        self.now = BEGIN
        self.ahead = ahead
        self.settings = settings
        self.core = self.sql = replace(initial(settings), ahead=ahead)
        self._watch = Watch(lambda _: False, AdmissionSettings(groups={}).unconfirmed_grant_s)
        self._watch.seen = self.seen
        async with self._connection.transaction():
            await self._connection.execute(sides.EMPTY)
            await self._connection.execute(
                "update control.store set ahead = $1 * interval '1 us', steps = 0, closed_until = null", ahead
            )
        await self.tick(0)

    async def tick(self, microseconds: int) -> None:
        self.now += microseconds
        await self._connection.execute(
            "update virtual.clock set now = 'epoch'::timestamptz + ($1::bigint - $2::bigint) * interval '1 us'",
            self.now,
            self.ahead,
        )

    async def ask(self, event: Event, send: Callable[[Store], Awaitable[T]], process: int = 0) -> tuple[Answers, T]:
        """
        Asks both, and compares what they hold afterwards.

        Raises `Difference`, `Violation`.
        """
        self.trail.append(f"{(self.now - BEGIN) / SECOND:.6f} {_told(event)}")
        store = self._stores[process]
        # It keeps the server's clock beside this machine's, of which only one runs.
        store._told_time = None
        store._settings = self.settings
        before_core, before_sql = self.core, self.sql
        try:
            self.core, answers = decision.decide(before_core, event, self.now)
        except UnknownGroup:
            try:
                await send(store)
            except Rejected:
                self.seen["rejected"] += 1
                raise UnknownGroup from None
            raise Difference(["the core knows no such group, PostgreSQL does"]) from None
        answered = await send(store)
        self.trail.append(f"    -> {_told(answered)}")
        self.sql = await sides.look(self._connection, before_sql)
        if isinstance(event, Acquire):
            self.core, answers = sides.adopt(self.core, self.sql, answers, len(event.elements))
        if differ := sides.differences(self.core, self.sql, self.now):
            raise Difference(differ)
        self._watch(before_sql, event, self.sql, answers, self.now)
        self._saw(before_sql)
        return answers, answered

    def _saw(self, before: State) -> None:
        for name, group in self.sql.groups.items():
            was = before.groups.get(name)
            if was is None:
                continue
            self.seen["batch had its turn"] += was.batch_credit > group.batch_credit
            handed_on = was.breaker.probe is not None and group.breaker.probe is None
            self.seen["a probe's place was handed on"] += (
                handed_on and (was.breaker.state, group.breaker.state) == (BreakerState.HALF_OPEN,) * 2
            )
            closed = (was.breaker.state, group.breaker.state) == (BreakerState.CLOSED,) * 2
            self.seen["a ramp widened"] += closed and was.breaker.ramp not in (None, group.breaker.ramp)

    async def credit(self, credit: int) -> None:
        """So many interactive grants were made while batch waited: its turn is near."""
        await self._connection.execute("update control.capacity_group set batch_credit = $1", credit)
        groups = {name: replace(group, batch_credit=credit) for name, group in self.core.groups.items()}
        self.core = replace(self.core, groups=groups)
        self.sql = await sides.look(self._connection, self.sql)

    async def ledger(self) -> None:
        if wrong := await self._connection.fetch(sides.LEDGER):
            raise Violation("\n".join(row[0] for row in wrong))

    async def limit(self, key_id: uuid.UUID, limits: KeyLimits) -> None:
        """What a key's change does."""
        given = {name: value for name, value in asdict(limits).items() if value is not None}
        text = msgspec.json.encode(given).decode()
        await self._connection.execute("select control.limit_key_v1($1, $2::text::jsonb)", key_id, text)

    async def limit_session(self, event: LimitSession) -> Decimal | None:
        """What the session may cost at most, where it is refused."""
        most: Decimal | None = await self._connection.fetchval(
            "select control.budget_session_v1($1, $2, $3, $4, $5)",
            event.key_id,
            event.session_id,
            event.usd,
            event.own,
            event.raises,
        )
        return most

    async def closed(self, milliseconds: int) -> None:
        """What a changed timeline does."""
        await self._connection.execute(
            "update control.store set closed_until = greatest(coalesce(closed_until, 'epoch'), "
            "control.now_v1() + $1 * interval '1 ms')",
            milliseconds,
        )


def _told(what: Any) -> str:
    """Short: nothing that is as it always is."""
    if isinstance(what, msgspec.Struct):
        names = what.__struct_fields__
        defaults = (msgspec.NODEFAULT,) * (len(names) - len(what.__struct_defaults__)) + what.__struct_defaults__
        fields = (
            f"{name}={_told(value)}"
            for name, default in zip(names, defaults, strict=True)
            if (value := getattr(what, name)) != default and name not in _UNTOLD
        )
        return f"{type(what).__name__}({', '.join(fields)})"
    if isinstance(what, list | tuple):
        return f"[{', '.join(map(_told, what))}]"
    if isinstance(what, dict):
        return f"{{{', '.join(f'{_told(key)}: {_told(value)}' for key, value in what.items())}}}"
    if isinstance(what, uuid.UUID):
        return what.hex[:8]
    if isinstance(what, datetime):
        return f"{what:%H:%M:%S.%f}"
    return str(what)


_UNTOLD: Final = (
    "execution_limit_s",
    "intent",
    "record",
    "queued_s",
    "hard_deadline",
    "key_id",
    "day",
    "granted_at",
    "expected_ms",
)


class Play:
    """One schedule."""

    def __init__(self, both: Both) -> None:
        self.both = both
        self.demands: list[Demand] = []
        #: Tickets whose asker took their key for one without limits.
        self.unlimited: set[uuid.UUID] = set()
        self.owner_of: dict[uuid.UUID, uuid.UUID] = {}
        self.numbers: dict[uuid.UUID, int] = {}
        self.leases: dict[uuid.UUID, Lease] = {}
        self.owners: list[uuid.UUID] = []
        self.buried: list[uuid.UUID] = []
        self.processes: list[uuid.UUID] = []
        self.configured: list[tuple[AdmissionSettings, bool]] = []
        self.limited = False
        self.keys_limited = False

    async def step(self, step: Step) -> None:
        rng = random.Random(step.salt)
        await getattr(self, f"_{step.kind}")(rng)
        self.both.seen[f"step {step.kind}"] += 1

    # ---------------------------------------------------------------- processes and time

    async def _begin(self, rng: random.Random) -> None:
        self.limited = rng.random() < 0.5
        self.keys_limited = rng.random() < 0.6
        settings = AdmissionSettings(
            groups=self._groups(rng),
            lease_s=LEASE_S,
            zone=ZONE,
            longest_retry_after_s=LONGEST_RETRY_S,
            unavailable_s=30.0,
            statement_s=60.0,
            connections=1,
        )
        await self.both.begin(settings, rng.choice(OFFSETS))
        await self._configured(settings)
        if rng.random() < 0.3:
            await self.both.credit(8)
        self.processes = [_id(rng) for _ in range(PROCESSES)]
        self.owners = [_id(rng) for _ in range(PROCESSES)]
        for process in range(PROCESSES):
            await self._renewed(process, first=True)
        if self.keys_limited:
            await self._limit(rng)

    async def _renew(self, rng: random.Random) -> None:
        for process in rng.sample(range(PROCESSES), rng.choice((1, 1, 2, 3, 3))):
            if await self._renewed(process, first=rng.random() < 0.1) is None:
                self.both.seen["lapsed and began again"] += 1
                self.owners[process] = _id(rng)
                await self._renewed(process, first=True)

    async def _renewed(self, process: int, *, first: bool) -> float | None:
        owner, self_id = self.owners[process], self.processes[process]
        event = Renew(owner, self_id, round(LEASE_S * 1000), first)
        answers, lives_s = await self.both.ask(event, lambda s: s.renew(owner, self_id, first=first), process)
        ours = None if answers.lives_ms is None else answers.lives_ms / 1000
        if ours != lives_s:
            raise Difference([f"lives: core {ours}, sql {lives_s}"])
        return lives_s

    async def _bury(self, rng: random.Random) -> None:
        process = rng.randrange(PROCESSES)
        dead = [self.owners[process]]
        if rng.random() < 0.3:
            dead.append(_id(rng))
        if rng.random() < 0.3:
            dead.append(self.processes[process])
        await self._groups_of(Bury(tuple(dead)), lambda s: s.bury(dead))
        self.owners[process] = _id(rng)
        if rng.random() < 0.8:
            await self._renewed(process, first=True)

    async def _overdue(self, rng: random.Random) -> None:
        found = await self._groups_of(Overdue(), lambda s: s.overdue())
        if rng.random() < 0.8:
            for group in found:
                await self._asked(rng.randrange(PROCESSES), group, [])

    async def _time(self, rng: random.Random) -> None:
        both = self.both
        if rng.random() < 0.45 and (moments := _moments(both.core, both.now)):
            both.seen["to the microsecond"] += 1
            by = rng.choice(moments[:5]) - both.now + rng.choice((-1, 0, 0, 1))
        else:
            by = round(rng.choice((0.01, 0.37, 0.37, 1.37, 1.37, 3.37, 8.37, 21.37, 61.37)) * SECOND)
        alive = [owner for owner in self.owners if both.core.owners.get(owner, 0) > both.now]
        await both.tick(max(by, 0))
        granted = [t for t in both.core.tickets.values() if t.state == "granted" and t.owner in self.owners]
        if granted and rng.random() < 0.4:
            await self._rescanned(rng, self.owners.index(rng.choice(granted).owner))
        elif rng.random() < 0.15:
            await self._settle(rng)
        if alive and by > LEASE_S * SECOND and rng.random() < 0.5:
            await self._renew(rng)

    async def _close(self, rng: random.Random) -> None:
        milliseconds = rng.choice((500, 2000, 4370))

        async def send(_: Store) -> None:
            await self.both.closed(milliseconds)

        await self.both.ask(Close(milliseconds), send)

    # ---------------------------------------------------------------- configuration

    def _groups(self, rng: random.Random) -> dict[str, GroupSettings]:
        split = rng.choice(((("a1", "a2"), ("b1",)),) * 3 + ((("a1",), ("a2", "b1")), (("a1", "a2", "b1"), ())))
        return {name: self._group(rng, endpoints) for name, endpoints in zip(GROUPS, split, strict=True)}

    def _group(self, rng: random.Random, endpoints: tuple[str, ...]) -> GroupSettings:
        models = {}
        rates: dict[str, Any] = {}
        if self.limited:
            for model in MODELS:
                if rng.random() < 0.6:
                    models[model] = ModelLimits(
                        concurrency=rng.choice((None, 0, 1, 1, 2)),
                        requests_per_minute=rng.choice((None, None, 1, 2, 6)),
                        tokens_per_minute=rng.choice((None, None, 20, 400)),
                    )
            rates = {
                "requests_per_minute": rng.choice((None, None, 3, 12)),
                "tokens_per_minute": rng.choice((None, None, 40, 900)),
            }
        return GroupSettings(
            concurrency=rng.choice((1, 1, 2, 3, 4)),
            queue=rng.choice((0, 1, 3, 6, 20)),
            failure_threshold=rng.choice((1, 1, 2, 3)),
            failure_window_s=10.0,
            first_cooldown_s=2.0,
            longest_cooldown_s=16.0,
            quarantine_headroom=rng.choice((0, 0, 0, 1, 2)),
            models=models,
            endpoints=endpoints,
            **rates,
        )

    async def _configure(self, rng: random.Random) -> None:
        if rng.random() < 0.2:
            # An old process comes back.
            await self._configured(rng.choice(self.configured)[0])
            return
        self.limited = self.limited or rng.random() < 0.3
        groups = dict(self.both.settings.groups)
        if rng.random() < 0.5:
            groups = self._groups(rng)
        else:
            name = rng.choice(GROUPS)
            groups[name] = self._group(rng, groups[name].endpoints)
        revision = self.both.settings.revision + (rng.random() < 0.2)
        await self._configured(replace(self.both.settings, groups=groups, revision=revision))

    async def _configured(self, settings: AdmissionSettings) -> None:
        self.both.settings = settings
        self.configured.append((settings, self.limited))
        found = await self._groups_of(Configure(settings.groups, settings.revision), lambda s: s.configure())
        self.both.seen["other settings are in force"] += bool(found)

    async def _limit(self, rng: random.Random) -> None:
        if not self.keys_limited:
            return
        key_id = rng.choice(KEYS)
        limits = KeyLimits()
        if rng.random() < 0.85:
            limits = KeyLimits(
                concurrency=rng.choice((None, None, 1, 2, 4)),
                requests_per_minute=rng.choice((None, None, 1, 3, 12)),
                tokens_per_minute=rng.choice((None, None, 20, 150)),
                budget_day_usd=rng.choice((None, None, Decimal(0), Decimal("0.75"), Decimal(2))),
                budget_month_usd=rng.choice((None, None, Decimal("1.25"), Decimal(3))),
                budget_total_usd=rng.choice((None, None, Decimal("1.5"), Decimal(4))),
                budget_session_usd=rng.choice((None, None, Decimal("0.75"), Decimal("1.5"))),
            )

        async def send(_: Store) -> None:
            await self.both.limit(key_id, limits)

        await self.both.ask(LimitKey(key_id, limits), send)

    async def _session(self, rng: random.Random) -> None:
        if not self.keys_limited:
            return
        event = LimitSession(
            key_id=rng.choice(KEYS),
            session_id=rng.choice(SESSIONS),
            usd=rng.choice((None, Decimal(0), Decimal("0.75"), Decimal("1.25"), Decimal(3))),
            own=rng.random() < 0.5,
            raises=rng.random() < 0.7,
        )
        answers, most = await self.both.ask(event, lambda _: self.both.limit_session(event))
        if answers.most_usd != most:
            raise Difference([f"a budget of a session: core {answers.most_usd}, sql {most}"])
        self.both.seen["a session's budget may not be raised"] += most is not None

    async def _reset(self, rng: random.Random) -> None:
        group = rng.choice((*GROUPS, "nowhere"))
        answers, found = await self.both.ask(Reset(group), lambda s: s.reset(group))
        if (answers.groups != ()) != found:
            raise Difference([f"reset: core {answers.groups}, sql {found}"])

    # ---------------------------------------------------------------- acquire

    def _demand(self, rng: random.Random, owner: uuid.UUID, group: str) -> Demand:
        core = self.both.core
        # The same ticket is asked for in the same group again, unless it has moved.
        asked = [d for d in self.demands if d.group == group]
        mine = [d for d in asked if self.owner_of[d.ticket_id] == owner]
        kind = rng.random()
        if kind < 0.12 and mine:
            return rng.choice(mine[-8:])
        if kind < 0.15 and asked:
            return rng.choice(asked[-8:])
        endpoints = sorted(e for e, of in core.endpoints.items() if of == group)
        if rng.random() < 0.05 or not endpoints:
            endpoints = sorted(core.endpoints)
        reserved = rng.choice((Decimal("0.5"), Decimal("0.5"), Decimal(0), None)) if self.keys_limited else None
        session = rng.choice((None, *SESSIONS))
        most = None
        if session is not None and rng.random() < 0.9:
            most = Decimal("0.5") if reserved is None else reserved
        facts = {"session_id": session, "upper_bound_usd": most if reserved is None else reserved}
        demand = Demand(
            ticket_id=_id(rng),
            group=group,
            endpoint=rng.choice(endpoints),
            model=rng.choice(MODELS),
            credential=rng.choice(CREDENTIALS),
            tokens=rng.choice((0, 7, 15, 15, 100, 1000)),
            reserved_usd=reserved,
            session_id=session,
            most_usd=most,
            place=rng.randint(1, 12) if rng.random() < 0.06 else None,
            fence=Fence(scope_id=rng.choice(("", "s")), run_id="r", number=rng.randint(1, 4))
            if rng.random() < 0.15
            else None,
            klass=rng.choice((Class.INTERACTIVE, Class.INTERACTIVE, Class.BATCH)),
            key_id=rng.choice(KEYS),
            debit_id=f"d{rng.getrandbits(40)}",
            attempt=1,
            execution_limit_s=rng.choice((1.0, 5.0, 59.3, 59.3)),
            isolation_s=rng.choice((0.0, 1.0, 5.0)),
            queue_timeout_s=rng.choice((0.0, 1.0, 5.0, 29.3, 59.3, 59.3)),
            caller_deadline_s=rng.choice((0.0, -1.0, 2.0, 20.0)) if rng.random() < 0.2 else None,
            waits_for_cooldown=rng.random() < 0.5,
            # What the ledger takes for the bound of an attempt whose end nobody tells.
            intent=msgspec.json.encode({name: fact for name, fact in facts.items() if fact is not None}),
        )
        if kind < 0.32 and self.demands:
            # Again for a debit: a retry that keeps its place, or one that should not be.
            earlier = rng.choice(self.demands[-12:])
            last = core.ended.get((earlier.key_id, earlier.debit_id), earlier.attempt)
            demand = replace(
                demand,
                key_id=earlier.key_id,
                debit_id=earlier.debit_id,
                attempt=max(1, last + rng.choice((1, 1, 1, 1, 0, 2))),
                place=self.numbers.get(earlier.ticket_id) if rng.random() < 0.8 else None,
            )
        return demand

    async def _acquire(self, rng: random.Random) -> None:
        process = rng.randrange(PROCESSES)
        await self._lives(rng, process)
        group = rng.choice(("a", "a", "b")) if rng.random() < 0.99 else "nowhere"
        demands: dict[uuid.UUID, Demand] = {}
        for _ in range(rng.choice((1, 1, 1, 2, 3, 4, 6))):
            demand = self._demand(rng, self.owners[process], group)
            demands[demand.ticket_id] = demand
        if len(demands) > 1 and rng.random() < 0.15:
            # Two of one debit in one batch.
            first, *_, last = demands.values()
            if last not in self.demands:
                demands[last.ticket_id] = replace(last, key_id=first.key_id, debit_id=first.debit_id)
        await self._asked(process, group, list(demands.values()), rng.choice((0.0, 0.0, 0.0, 0.4)))

    async def _advance(self, rng: random.Random) -> None:
        process = rng.randrange(PROCESSES)
        await self._lives(rng, process)
        await self._asked(process, rng.choice(GROUPS), [])

    async def _lives(self, rng: random.Random, process: int) -> None:
        """A process that has lapsed mostly knows it, and has begun again."""
        if self.both.core.owners.get(self.owners[process], 0) <= self.both.now and rng.random() < 0.9:
            self.owners[process] = _id(rng)
            await self._renewed(process, first=True)

    async def _asked(self, process: int, group: str, demands: list[Demand], waited_s: float = 0.0) -> None:
        owner = self.owners[process]
        elements: tuple[Element, ...] = tuple(element(demand, waited_s) for demand in demands)
        for demand in demands:
            if demand.ticket_id not in self.owner_of:
                self.owner_of[demand.ticket_id] = owner
                self.demands.append(demand)
                if demand.reserved_usd is None:
                    self.unlimited.add(demand.ticket_id)
        sent = [(demand, waited_s) for demand in demands]
        try:
            answers, rows = await self.both.ask(
                Acquire(group, owner, elements), lambda s: s.acquire(group, owner, sent), process
            )
        except UnknownGroup:
            return
        self._answered(answers, rows, group)

    async def _rescan(self, rng: random.Random) -> None:
        await self._rescanned(rng, rng.randrange(PROCESSES))

    async def _rescanned(self, rng: random.Random, process: int) -> None:
        owner = self.owners[process]
        core = self.both.core
        wanted = [
            d
            for d in self.demands
            if (t := core.tickets.get(d.ticket_id)) is not None
            and t.owner == owner
            and (t.state in ("queued", "granted") or rng.random() < 0.1)
            and rng.random() < 0.9
        ]
        if self.demands and rng.random() < 0.4:
            wanted += [d for d in rng.sample(self.demands, min(2, len(self.demands))) if d not in wanted]
        if not wanted:
            return
        answers, rows = await self.both.ask(Rescan(owner, tuple(wanted)), lambda s: s.rescan(owner, wanted), process)
        self._answered(answers, rows)

    def _answered(self, answers: Answers, rows: list[TicketRow], group: str | None = None) -> None:
        """`group`: the one that was asked."""
        core = self.both.core
        ours = [
            row if row.ahead is None or row.ticket_id is None else replace(row, ahead=sides.before(core, row.ticket_id))
            for row in answers.tickets
        ]
        # Of a replay whose ticket has moved meanwhile, the group that was asked knows no more than where it is.
        away = {t.ticket_id for t in core.tickets.values() if group is not None and t.group != group}
        ours, rows = (
            [
                TicketRow(row.ticket_id, row.answer, group_id=row.group_id)
                if row.ticket_id in away and row.answer == "queued"
                else row
                for row in side
            ]
            for side in (ours, rows)
        )
        if differ := sides.tickets_differ(ours, rows, self.both.ahead, ZONE):
            raise Difference(differ)
        for row in rows:
            if row.wait_reason is not None and row.answer == "queued":
                self.both.seen[f"waits for {row.wait_reason}"] += 1
                self.both.seen[f"told how long it waits for {row.wait_reason}"] += row.expected_ms is not None
            self.both.seen["told when the queue has room"] += row.answer == "queue_full" and row.expected_ms is not None
            if row.key_limit is not None:
                self.both.seen[f"refused for {row.key_limit.name}"] += 1
                self.both.seen["refused for a session's budget of a key without limits"] += (
                    row.key_limit.name == "budget_session_usd" and row.ticket_id in self.unlimited
                )
                self.both.seen["refused for all are quarantined"] += (
                    row.key_limit.name == "concurrency" and row.wait_ms is not None
                )
            if row.answer in ("cooldown", "provider_unavailable"):
                self.both.seen[f"refused for {row.wait_reason}"] += 1
            if row.ticket_id is None or row.answer != "granted":
                continue
            self.both.seen["a probe"] += bool(row.probe)
            assert row.group_id is not None
            assert row.generation is not None
            assert row.granted_at is not None
            assert row.day is not None
            self.numbers[row.ticket_id] = row.number or 0
            self.leases[row.ticket_id] = Lease(
                ticket_id=row.ticket_id,
                group=row.group_id,
                number=row.number or 0,
                generation=row.generation,
                probe=bool(row.probe),
                judged=bool(row.judged),
                hard_deadline=0.0,
                granted_at=row.granted_at,
                day=row.day,
                queued_s=0.0,
            )

    # ---------------------------------------------------------------- endings

    def _lease(self, rng: random.Random) -> Lease | None:
        """Mostly one that is not over."""
        tickets = self.both.core.tickets
        live = [lease for ticket_id, lease in self.leases.items() if ticket_id in tickets]
        if live and rng.random() < 0.85:
            return rng.choice(live)
        every = list(self.leases.values())
        return rng.choice(every[-12:]) if every else None

    def _settlement(self, rng: random.Random) -> Settlement | None:
        lease = self._lease(rng)
        if lease is None:
            return None
        ending = rng.choices(list(Ending), (6, 1, 3))[0]
        verdicts = {
            Ending.CONFIRMED: (5, 4, 2, 1, 1, 1, 1),
            Ending.NOT_DISPATCHED: (0, 1, 0, 0, 0, 0, 5),
            Ending.UNCERTAIN: (1, 4, 0, 0, 0, 0, 4),
        }[ending]
        verdict = rng.choices(
            (
                Verdict.ANSWERED,
                Verdict.TRANSIENT,
                Verdict.RATE_LIMITED,
                Verdict.SLOW,
                Verdict.CREDENTIAL_REJECTED,
                Verdict.QUOTA_EXHAUSTED,
                Verdict.NONE,
            ),
            verdicts,
        )[0]
        if rng.random() < 0.08:
            verdict = rng.choice(list(Verdict))
        account_wide = rng.random() < 0.3
        after = rng.choice((None, None, 0.0, 2.0, 7.0, 2000.0))
        floors = [key for key in self.both.core.floors if key[3] == "rate_limit"]
        if floors and rng.random() < 0.5:
            # Once more, for the one who was refused before.
            refused = rng.choice(floors)
            again = [
                self.leases[t.ticket_id]
                for t in self.both.core.tickets.values()
                if (t.group, t.credential) == refused[:2] and refused[2] in ("", t.model) and t.ticket_id in self.leases
            ]
            if again:
                lease, verdict, account_wide = rng.choice(again), Verdict.RATE_LIMITED, refused[2] == ""
                after = rng.choice((None, None, 0.0, 1.0))
        state = {Ending.CONFIRMED: "charged", Ending.NOT_DISPATCHED: "zero", Ending.UNCERTAIN: "unknown"}[ending]
        if rng.random() < 0.15:
            state = rng.choice(("charged", "zero", "unknown"))
        record = {
            "charged": b'{"usd":"0.25","status":"success","input_total":3}',
            "zero": b'{"status":"error"}',
            "unknown": rng.choice((b'{"status":"unknown"}', b'{"status":"unknown","upper_bound_usd":"0.40"}')),
        }[state]
        floored = verdict in (
            Verdict.RATE_LIMITED,
            Verdict.LIMITED_FOR_LONG,
            Verdict.CREDENTIAL_REJECTED,
            Verdict.QUOTA_EXHAUSTED,
        )
        return Settlement(
            lease=lease,
            ending=ending,
            verdict=verdict,
            retry_after_s=after if floored else None,
            account_wide=account_wide,
            used_tokens=rng.choice((None, 0, 15, 300)),
            requests_left=rng.choice((None, None, None, 0, 2, 5000)),
            tokens_left=rng.choice((None, None, None, 0, 150, 10**9)),
            cancel_confirms_after_s=rng.choice((None, 0.0, 1.0, 30.0)) if ending is Ending.UNCERTAIN else None,
            state=state,
            record=record,
        )

    async def _settle(self, rng: random.Random) -> None:
        wanted = [s for s in (self._settlement(rng) for _ in range(rng.choice((1, 1, 1, 2, 3)))) if s is not None]
        if not wanted:
            return
        if rng.random() < 0.05:
            wanted.append(rng.choice(wanted))
        if len({s.lease.ticket_id for s in wanted}) < len(wanted):
            # Those that come again go in a second statement, and what is left is weighed by who occupies just then. In
            # that order: a bucket that is full takes nothing, so what is put into it first counts.
            first = {s.lease.ticket_id: n for n, s in reversed(list(enumerate(wanted)))}
            wanted = [
                replace(s, requests_left=None, tokens_left=None)
                for _, _, s in sorted(
                    ((first[s.lease.ticket_id] != n, n, s) for n, s in enumerate(wanted)), key=lambda entry: entry[:2]
                )
            ]
        judged = any(s.lease.judged or s.verdict not in (Verdict.ANSWERED, Verdict.NONE) for s in wanted)
        if rng.random() < 0.1:
            judged = not judged
        outcomes = tuple(_outcome(settlement) for settlement in wanted)
        process = rng.randrange(PROCESSES)
        before = self.both.core
        answers, rows = await self.both.ask(
            Settle(outcomes, judged), lambda s: s.settle(process, wanted, judged=judged), process
        )
        if len({s.lease.ticket_id for s in wanted}) < len(wanted):
            # Who waits is looked at in between as well.
            rows = [
                replace(theirs, waiters=ours.waiters, untold=ours.untold)
                for ours, theirs in zip(answers.settled, rows, strict=True)
            ]
        if differ := sides.settled_differ(answers.settled, rows):
            raise Difference(differ)
        self._saw_settled(before, wanted, rows)

    def _saw_settled(self, before: State, wanted: list[Settlement], rows: list[SettledRow]) -> None:
        seen = self.both.seen
        for settlement, row in zip(wanted, rows, strict=True):
            seen[f"{settlement.ending} and {settlement.verdict}"] += row.applied
            seen["settled once more"] += not row.applied
        for key, floor in self.both.core.floors.items():
            if before.floors.get(key) != floor:
                seen[f"a floor of {key[3]}"] += 1
                seen["a floor under the account"] += key[2] == ""
                seen["a second strike"] += floor.strikes > 0

    async def _take(self, rng: random.Random) -> None:
        del rng
        answers, taken = await self.both.ask(Take(), lambda s: s.breaker_events())
        ours = [(c.group, c.was, c.became, c.generation, c.cause) for c in answers.changes]
        theirs = [(e.group, e.was, e.became, e.generation, e.cause) for e in taken]
        if ours != theirs:
            raise Difference([f"breaker events: core {ours}, sql {theirs}"])
        for event in taken:
            self.both.seen[f"told that a breaker {event.became}: {event.cause}"] += 1

    async def _decide(self, rng: random.Random) -> None:
        probes = [g.breaker.probe for g in self.both.core.groups.values() if g.breaker.probe is not None]
        lease = self.leases.get(rng.choice(probes)) if probes and rng.random() < 0.9 else self._lease(rng)
        if lease is None:
            return
        group, ticket, generation = lease.group, lease.ticket_id, lease.generation
        await self.both.ask(Decide(group, ticket, generation), lambda s: s.decide(group, ticket, generation))

    async def _abandon(self, rng: random.Random) -> None:
        live = list(self.both.core.tickets)
        wanted = rng.sample(live, min(len(live), rng.choice((1, 1, 2, 3))))
        probes = [g.breaker.probe for g in self.both.core.groups.values() if g.breaker.probe is not None]
        if probes and rng.random() < 0.3:
            wanted = [probes[0]]
        if rng.random() < 0.2 and self.demands:
            wanted.append(rng.choice(self.demands[-8:]).ticket_id)
        if rng.random() < 0.1:
            wanted.append(_id(rng))
        wanted = list(dict.fromkeys(wanted))
        tombstone = rng.random() < 0.4
        await self._groups_of(Abandon(tuple(wanted), tombstone), lambda s: s.abandon(0, wanted, tombstone=tombstone))

    async def _groups_of(self, event: Event, send: Callable[[Store], Awaitable[list[str]]]) -> list[str]:
        answers, groups = await self.both.ask(event, send)
        if sorted(answers.groups) != sorted(groups):
            raise Difference([f"groups: core {sorted(answers.groups)}, sql {sorted(groups)}"])
        return sorted(groups)

    # ---------------------------------------------------------------- what is only read

    async def _look(self, rng: random.Random) -> None:
        both = self.both
        store = both._stores[rng.randrange(PROCESSES)]
        asked = [*self.owners, *self.processes, _id(rng), *(t.owner for t in both.core.tickets.values())]
        # As with what is asked: it keeps the server's clock beside this machine's.
        store._told_time = None
        ours, theirs = decision.dead(both.core, both.now, asked), await store.dead(asked)
        if ours != theirs:
            raise Difference([f"dead: core {ours}, sql {theirs}"])
        debits = [demand.debit_id for demand in self.demands[-20:]]
        waits, found = decision.waits(both.core, both.now, debits), await store.waits(debits)
        places = {t.debit_id: sides.before(both.core, t.ticket_id) + 1 for t in both.core.tickets.values()}
        waits = {debit: replace(waiting, position=places[debit]) for debit, waiting in waits.items()}
        told = [
            {
                debit: (w.group, w.position, w.reason, _milliseconds(w.until_s), _milliseconds(w.expected_wait_s))
                for debit, w in side.items()
            }
            for side in (waits, found)
        ]
        if told[0] != told[1]:
            raise Difference([f"waits: core {told[0]}, sql {told[1]}"])
        fence = Fence(scope_id=rng.choice(("", "s")), run_id="r", number=rng.randint(1, 4))
        key = rng.choice(KEYS)
        if decision.fenced(both.core, key, fence) != await store.fenced(key, fence):
            raise Difference([f"fenced: {key} {fence}"])
        counted = [
            [
                (g["group"], g["breaker"], g["generation"], g["active"], g["quarantined"], g["queued"])
                for g in side
                if g["active"] + g["quarantined"] + g["queued"] > 0
            ]
            for side in (decision.occupancy(both.core, both.now), await store.groups())
        ]
        if counted[0] != counted[1]:
            raise Difference([f"occupancy: core {counted[0]}, sql {counted[1]}"])


def _milliseconds(seconds: float | None) -> sides.Milliseconds | None:
    """A cooldown that is over, and that nobody has acted on yet, ends now."""
    return None if seconds is None else sides.Milliseconds(max(round(seconds * 1000), 0))


def _id(rng: random.Random) -> uuid.UUID:
    return uuid.UUID(int=rng.getrandbits(128))


def _outcome(settlement: Settlement) -> Outcome:
    """As a store sends it."""
    asked = settlement.retry_after_s
    charge = charge_of(settlement.record)
    if asked is None:
        return Outcome(settlement, charge=charge)
    if settlement.verdict is Verdict.RATE_LIMITED and asked > LONGEST_RETRY_S:
        settlement = replace(settlement, verdict=Verdict.LIMITED_FOR_LONG)
    return Outcome(settlement, round(min(asked, LONGEST_RETRY_S) * 1000), charge=charge)


def _moments(state: State, now: int) -> list[int]:
    """When time alone will bring something about, in order."""
    found: set[int] = {state.closed_until, state.reclaim_not_before, *state.owners.values()}
    for ticket in state.tickets.values():
        if ticket.state == "queued":
            found.add(ticket.queue_deadline)
            found.add(ticket.queue_deadline + 2 * SECOND)
            group = state.groups[ticket.group]
            # A breaker that opens then stays open until that deadline.
            found.add(ticket.queue_deadline - cooldown(group.limits, group.breaker.openings))
        found |= {t for t in (ticket.grant_expires_at, ticket.hard_deadline, ticket.quarantined_until) if t is not None}
    for floor in state.floors.values():
        found |= {floor.until, 2 * floor.until - floor.since}
    for group in state.groups.values():
        if group.breaker.cooldown_until is not None:
            found.add(group.breaker.cooldown_until)
        found |= {at + group.limits.failure_window for at in group.breaker.failed_at}
    return sorted(at for at in found if at > now)


# ------------------------------------------------------------------ playing


@asynccontextmanager
async def opened(url: str) -> AsyncIterator[Both]:
    """Over a database that has nothing in it, or the migrations and no more. It is of no other use afterwards."""
    await database.migrate(url)
    connection = await asyncpg.connect(url)
    try:
        await connection.execute(sides.CLOCK)
    finally:
        await connection.close()
    # From here on, every connection has the other clock.
    given = AdmissionSettings(groups={}, connections=1)
    stores = [Store(url, given) for _ in range(PROCESSES)]
    connection = await asyncpg.connect(url)
    try:
        yield Both(connection, stores)
    finally:
        for store in stores:
            await store.close()
        await connection.close()


async def play(both: Both, schedule: Sequence[Step]) -> Counter[str]:
    """
    Plays it. Answers what was seen, and how often.

    Raises `Failure`.
    """
    played = Play(both)
    last: Step | None = None
    try:
        for last in schedule:
            await played.step(last)
        await both.ledger()
    except (Difference, Violation) as error:
        raise Failure(str(error), both.trail) from error
    except Rejected as error:
        raise Failure(f"PostgreSQL refused {last}: {error}", both.trail) from error
    return both.seen


async def shortest(both: Both, schedule: Sequence[Step], within_s: float = 20.0) -> Failure | None:
    """The failure of as few of its steps as still fail. None: it does not fail any more."""
    kept = list(schedule)
    failure = await _failure(both, kept)
    give_up = asyncio.get_running_loop().time() + within_s
    size = len(kept) // 2
    while failure is not None and size > 0:
        at = 1
        while at < len(kept) and asyncio.get_running_loop().time() < give_up:
            less = kept[:at] + kept[at + size :]
            if (fails := await _failure(both, less)) is not None:
                kept, failure = less, fails
            else:
                at += size
        size //= 2
    return failure


async def _failure(both: Both, schedule: Sequence[Step]) -> Failure | None:
    try:
        await play(both, schedule)
    except Failure as failure:
        return failure
    return None
