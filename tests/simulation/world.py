"""
One schedule: a few processes with the real controller over one memory store, clients that press stop, a provider with
a ledger of its own, and everything that goes wrong. All of it follows from the seed.

Time is virtual. The controller and its lanes read `time.monotonic`, and it makes its own ids; both are replaced here,
in their modules only, by the loop's clock and the seed, which is what makes a schedule repeatable.
"""

from __future__ import annotations

import asyncio
import contextvars
import random
import types
import uuid
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from decimal import Decimal
from typing import Any, Literal

import msgspec

from admission import combiner, controller
from admission.contract import StoreUnavailable
from admission.controller import Controller, not_dispatched
from admission.lease import Class, Demand, Ending, Fence, Lease, Refusal, Settlement, Verdict
from admission.memory import Fault, MemoryDatabase, MemoryStore
from admission.settings import AdmissionSettings, GroupSettings, KeyLimits, ModelLimits
from admission.state import Answers, Close, Configure, Event, LimitKey, LimitSession, State
from tests.simulation.invariants import Violation, Watch
from tests.simulation.virtual import PROCESS, VirtualLoop

GROUP = "g"
#: A group of its own, until an operator merges it into the other.
SMALL = "h"
KEY = uuid.UUID(int=1)
#: The highest limit that is ever in force.
_MOST = 4
#: Virtual seconds with faults.
CHAOS_S = 10.0
#: Virtual seconds within which everything has ended once the faults have.
DRAINED_WITHIN_S = 30.0

#: Each of these must happen at least once in a run of many schedules: a fault that never strikes proves nothing.
SOMETIMES = (
    "fault lost before",
    "fault lost after",
    "fault late",
    "fault outage",
    "fault hint lost",
    "fault listen lost",
    "fault stopped past its lease",
    "fault killed",
    "fault clock forward",
    "fault clock back",
    "fault limit lowered",
    "fault group merged or split",
    "answer moved",
    "fault store put back",
    "fault session's budget changed",
    "answer granted",
    "answer notify",
    "answer queued",
    "answer queue_full",
    "answer cooldown",
    "answer duplicate_debit",
    "answer ended",
    "answer lapsed",
    "answer owner_fence",
    "answer deadline_exceeded",
    "answer provider_unavailable",
    "answer too_large",
    "answer store_closed",
    "answer budget_exceeded",
    "answer budget_reserved",
    "answer cost_not_bounded",
    "begun in a session with a budget",
    "queued becomes granted",
    "queued becomes active",
    "granted becomes active",
    "granted becomes queued",
    "active becomes quarantined",
    "granted is gone",
    "quarantined is gone",
    "breaker closed becomes open",
    "breaker open becomes half_open",
    "breaker half_open becomes closed",
    "breaker half_open becomes open",
    "settled as charged",
    "settled as zero",
    "settled as unknown",
    "corrected",
    "tombstone",
    "over a lowered limit",
    "over the bound by place",
    "log admission.breaker_opened",
    "log admission.breaker_probing",
    "log admission.breaker_closed",
    "lease probe",
    "lease of another's grant",
    "lease not valid any more",
    "cancelled while it waits",
    "refusal queue_full",
    "refusal queue_timeout",
    "refusal deadline_exceeded",
    "refusal cooldown",
    "refusal control_store_unavailable",
    "refusal control_store_closed",
    "refusal duplicate_debit",
    "refusal owner_fence",
    "refusal provider_unavailable",
    "refusal too_large",
    "refusal lapsed",
)


class Outcome(msgspec.Struct, frozen=True):
    """What one schedule came to."""

    seed: int
    steps: int
    seen: Counter[str]
    virtual_s: float


class _Log:
    """The controller's log: counted, and an error is a violation."""

    def __init__(self, seen: Counter[str]) -> None:
        self._seen = seen
        self.errors: list[str] = []

    def info(self, event: str, **_: object) -> None:
        self._seen[f"log {event}"] += 1

    warning = info

    def error(self, event: str, **facts: object) -> None:
        self.errors.append(f"{event} {facts}")


class _Provider:
    """Knows what really runs, and until when."""

    def __init__(self, loop: VirtualLoop) -> None:
        self._loop = loop
        self._until: dict[uuid.UUID, float] = {}
        #: Dispatched while a clock or the store betrayed them: their slots are no longer accounted for.
        self._exempt: set[uuid.UUID] = set()
        self.dispatched: set[uuid.UUID] = set()

    def begin(self, ticket: uuid.UUID, seconds: float) -> None:
        self.dispatched.add(ticket)
        self._until[ticket] = self._loop.time() + seconds

    def end_within(self, ticket: uuid.UUID, seconds: float) -> None:
        self._until[ticket] = min(self._until[ticket], self._loop.time() + seconds)

    def running(self) -> int:
        now = self._loop.time()
        return sum(until > now and ticket not in self._exempt for ticket, until in self._until.items())

    def works_on(self, ticket: uuid.UUID) -> bool:
        # The store counts in milliseconds.
        return ticket not in self._exempt and self._until.get(ticket, 0.0) > self._loop.time() + 0.002

    def left_s(self, ticket: uuid.UUID) -> float:
        return max(self._until[ticket] - self._loop.time(), 0.0) + 0.003

    def exempt(self, tickets: Iterable[uuid.UUID]) -> None:
        self._exempt.update(tickets)


class World:
    def __init__(self, seed: int) -> None:
        self.random = rng = random.Random(seed)
        self.loop = VirtualLoop()  # type: ignore[abstract]  # what it leaves out, nobody calls
        self.wall = 1_800_000_000.0
        self.limit = rng.randint(1, _MOST)
        self.settings = AdmissionSettings(
            groups={
                GROUP: GroupSettings(
                    concurrency=self.limit,
                    queue=rng.randint(1, 8),
                    failure_threshold=rng.randint(1, 3),
                    failure_window_s=4.0,
                    first_cooldown_s=0.5,
                    longest_cooldown_s=2.0,
                    quarantine_headroom=rng.choice((0, 0, 0, 1, 2)),
                    tokens_per_minute=rng.choice((None, None, 2000)),
                    models={"small": ModelLimits(concurrency=1, requests_per_minute=rng.choice((None, 60)))},
                ),
                SMALL: GroupSettings(concurrency=1, queue=2, failure_threshold=2, first_cooldown_s=0.5),
            },
            lease_s=3.0,
            margin_s=0.5,
            unconfirmed_grant_s=rng.choice((0.2, 0.6)),
            rescan_s=rng.choice((0.3, 2.0)),
            statement_s=1.0,
            retry_s=1.0,
            unavailable_s=0.8,
            longest_hold_s=5.0,
        )
        self.small = self.settings.groups[SMALL]
        self.provider = _Provider(self.loop)
        self.watch = Watch(self.provider.works_on, self.settings.unconfirmed_grant_s)
        self.seen = self.watch.seen
        self.database = MemoryDatabase(self.settings, lambda: self.wall + self.loop.time())
        self.database.applied = self._applied
        self.database.fault = self._fault
        self.log = _Log(self.seen)
        self.processes = 0
        self.controllers: dict[int, Controller] = {}
        self.chaotic = True
        self.outage_until = 0.0
        self.trouble = rng.choice((0.0, 0.02, 0.1))
        self.fences: Counter[str] = Counter()
        self.debits = 0
        #: What clients were told was settled, and what they still settle.
        self.told: dict[uuid.UUID, str] = {}
        self.forgotten: set[uuid.UUID] = set()
        self.earlier: State | None = None
        self.earlier_costs: dict[uuid.UUID, Decimal] = {}
        #: The key has a budget for each of its sessions, and is known to.
        self.key_limited = rng.random() < 0.3

    def _applied(self, before: State, event: Event, after: State, answers: Answers, now: int) -> None:
        try:
            self.watch(before, event, after, answers, now)
        except Violation as violation:
            self.loop.failure = violation
            raise

    # ---------------------------------------------------------------- the schedule

    async def schedule(self) -> None:
        rng = self.random
        if self.key_limited:
            self.database.apply(LimitKey(KEY, KeyLimits(budget_session_usd=Decimal(4))))
        for _ in range(rng.randint(2, 4)):
            self._start()
        chaos = self.loop.create_task(self._chaos())
        await asyncio.sleep(CHAOS_S)
        chaos.cancel()
        self.chaotic = False
        for process in range(1, self.processes + 1):
            self.loop.continue_process(process)
        if not any(self.loop.lives(process) for process in range(1, self.processes + 1)):
            self._start()
        ended = self.loop.time()
        while not self._drained():
            if self.loop.time() > ended + DRAINED_WITHIN_S:
                left = [(t.state, t.number) for t in self.database.state.tickets.values()]
                raise Violation(f"not drained within {DRAINED_WITHIN_S} s: {left}")
            await asyncio.sleep(0.5)
        self._audit()

    def _drained(self) -> bool:
        lives = [c for process, c in self.controllers.items() if self.loop.lives(process)]
        return not self.database.state.tickets and not any(c._tickets for c in lives)

    def _audit(self) -> None:
        """Everything has ended: what was dispatched is settled once, and as its process was told."""
        state = self.database.state
        for ticket in self.provider.dispatched - self.forgotten:
            if ticket not in state.attempts:
                raise Violation("lost settlement: an attempt was dispatched and never settled")
        for ticket, told in self.told.items():
            # An unknown one may have been corrected by a process that died before it heard of it.
            if ticket not in self.forgotten and told not in ("unknown", state.attempts[ticket].state):
                raise Violation(f"lost settlement: told {told}, kept {state.attempts[ticket].state}")
        if self.log.errors or self.loop.errors:
            raise Violation(f"faults: {self.log.errors} {self.loop.errors}")

    # ---------------------------------------------------------------- faults

    def _fault(self, name: str) -> Fault:
        rng = self.random
        if not self.chaotic:
            return Fault(there_s=0.001, back_s=0.001)
        if self.loop.time() < self.outage_until:
            return Fault(there_s=0.01, lost="after" if rng.random() < 0.3 else "before")
        there, back = rng.uniform(0, 0.01), rng.uniform(0, 0.01)
        if rng.random() >= self.trouble:
            return Fault(there_s=there, back_s=back)
        if name == "notify":
            self.seen["fault hint lost"] += 1
            return Fault(lost="before")
        lost: Literal["before", "after", "late"] | None = rng.choice(("before", "after", "late", None))
        if lost is None:
            return Fault(there_s=rng.uniform(0, 0.5), back_s=rng.uniform(0, 0.5))
        self.seen["fault late" if lost == "late" else f"fault lost {lost}"] += 1
        return Fault(there_s=there, back_s=rng.uniform(0, 0.5), lost=lost, late_s=rng.uniform(0, 2.0))

    async def _chaos(self) -> None:
        rng = self.random
        faults = (
            self._outage,
            self._stop,
            self._stop,
            self._kill,
            self._clock,
            self._limit,
            self._merge,
            self._listen_lost,
            self._put_back,
            self._budget,
        )
        while True:
            await asyncio.sleep(rng.expovariate(0.6))
            if rng.random() < 0.3:
                self.earlier, self.earlier_costs = self.database.state, dict(self.watch.costs)
            rng.choice(faults)()

    def _outage(self) -> None:
        self.seen["fault outage"] += 1
        self.outage_until = self.loop.time() + self.random.uniform(0.1, 4.0)

    def _living(self) -> list[int]:
        return [p for p in range(1, self.processes + 1) if self.loop.lives(p)]

    def _stop(self) -> None:
        process = self.random.choice(self._living())
        seconds = self.random.uniform(0.1, 6.0)
        self.seen["fault stopped past its lease"] += seconds > self.settings.lease_s
        self.loop.stop_process(process)
        self.loop.call_later(seconds, self.loop.continue_process, process)

    def _kill(self) -> None:
        process = self.random.choice(self._living())
        self.seen["fault killed"] += 1
        self.loop.kill_process(process)
        self.loop.call_later(self.random.uniform(0.1, 1.0), self._start, process)

    def _clock(self) -> None:
        step = self.random.choice((-3600.0, -2.0, 1.5, 5.0, 3600.0))
        self.wall += step
        if step > 0:
            self.seen["fault clock forward"] += 1
            # What was granted before may run for longer than the store's clock says.
            self.provider.exempt(self.database.state.tickets)
        else:
            self.seen["fault clock back"] += 1

    def _limit(self) -> None:
        lower = self.random.randint(1, _MOST)
        self.seen["fault limit lowered"] += lower < self.limit
        self.limit = lower
        groups = self.settings.groups
        self._configure({**groups, GROUP: msgspec.structs.replace(groups[GROUP], concurrency=lower)})

    def _merge(self) -> None:
        """The small group's endpoint goes to the other group, or back."""
        self.seen["fault group merged or split"] += 1
        endpoints = () if self.settings.groups[GROUP].endpoints else (GROUP, SMALL)
        given = msgspec.structs.replace(self.settings.groups[GROUP], endpoints=endpoints)
        self._configure({GROUP: given} if endpoints else {GROUP: given, SMALL: self.small})

    def _configure(self, groups: Mapping[str, GroupSettings]) -> None:
        self.settings = msgspec.structs.replace(self.settings, groups=groups, revision=self.settings.revision + 1)
        self.database.apply(Configure(self.settings.groups, self.settings.revision))

    def _listen_lost(self) -> None:
        self.seen["fault listen lost"] += 1
        self.database.lose_listeners()

    def _put_back(self) -> None:
        """A standby that lagged takes over: what it has forgotten may still run, so nothing is granted meanwhile."""
        if self.earlier is None:
            return
        self.seen["fault store put back"] += 1
        now = self.database.state
        self.forgotten.update(now.tickets, now.attempts, self.earlier.tickets)
        self.database.state = self.earlier
        self.earlier = None
        self.provider.exempt(self.forgotten)
        self.watch.settlements.clear()
        self.watch.costs = self.earlier_costs
        self.database.apply(Close(round(self.settings.longest_hold_s * 1000)))

    def _budget(self) -> None:
        rng = self.random
        self.seen["fault session's budget changed"] += 1
        usd = rng.choice((None, Decimal(0), Decimal("1.5"), Decimal(3), Decimal(6)))
        session = rng.choice("st")
        self.database.apply(LimitSession(key_id=KEY, session_id=session, usd=usd, own=rng.random() < 0.5, raises=True))

    # ---------------------------------------------------------------- processes

    def _start(self, instead_of: int | None = None) -> None:
        if not self.chaotic and instead_of is not None:
            return
        self.processes += 1
        context = contextvars.copy_context()
        context.run(PROCESS.set, self.processes)
        self.loop.create_task(self._process(self.processes, instead_of), context=context)

    async def _process(self, process: int, instead_of: int | None) -> None:
        store = MemoryStore(self.settings, database=self.database)
        while True:
            try:
                await store.configure()
                async with Controller(store, self.settings).opened() as one:
                    self.controllers[process] = one
                    predecessor = None if instead_of is None else self.controllers.get(instead_of)
                    if predecessor is not None and self.random.random() < 0.7:
                        await one.bury(predecessor.incarnations)
                    clients = [self.loop.create_task(self._client(one)) for _ in range(self.random.randint(1, 5))]
                    await asyncio.gather(*clients)
                    await asyncio.sleep(1e6)
            except StoreUnavailable:
                await asyncio.sleep(0.3)

    async def _client(self, one: Controller) -> None:
        rng = self.random
        again: Demand | None = None
        while self.chaotic:
            await asyncio.sleep(rng.expovariate(2.0))
            demand = self._demand() if again is None else again
            again = None
            admitting = asyncio.create_task(one.admit(demand, lambda _: None))
            if rng.random() < 0.1:
                self.loop.call_later(rng.uniform(0, 2), admitting.cancel, context=contextvars.copy_context())
            try:
                answer = await admitting
            except asyncio.CancelledError:
                self.seen["cancelled while it waits"] += 1
                continue
            if isinstance(answer, Refusal):
                self.seen[f"refusal {answer.reason}"] += 1
                if rng.random() < 0.2:
                    again = msgspec.structs.replace(demand, ticket_id=self._id(), attempt=demand.attempt + answer.used)
            else:
                again = await self._use(one, demand, answer)

    def _id(self) -> uuid.UUID:
        return uuid.UUID(int=self.random.getrandbits(128))

    def _demand(self) -> Demand:
        rng = self.random
        self.debits += 1
        fence = None
        if rng.random() < 0.15:
            run = rng.choice("ab")
            number = self.fences[run] + rng.randint(-2, 1)
            self.fences[run] = max(self.fences[run], number)
            fence = Fence(scope_id="s", run_id=run, number=number)
        session = rng.choice((None, "s", "t"))
        most = None if session is None else rng.choice((Decimal("0.5"), Decimal("0.5"), Decimal("0.2"), None))
        return Demand(
            ticket_id=self._id(),
            group=(group := GROUP if rng.random() < 0.85 else SMALL),
            endpoint=group,
            model=rng.choice(("m", "m", "n", "small")),
            credential=rng.choice("cccd"),
            tokens=rng.choice((0, 10, 100, 100, 5000) if rng.random() < 0.2 else (0, 50)),
            reserved_usd=(most or Decimal(0)) if self.key_limited else None,
            session_id=session,
            most_usd=most,
            fence=fence,
            klass=rng.choice((Class.INTERACTIVE, Class.INTERACTIVE, Class.BATCH)),
            key_id=KEY,
            debit_id=str(self.debits if rng.random() < 0.9 else rng.randint(1, self.debits)),
            attempt=1,
            execution_limit_s=rng.uniform(0.5, 3.0),
            isolation_s=1.0,
            queue_timeout_s=rng.uniform(0.2, 5.0),
            caller_deadline_s=rng.choice((None, None, None, rng.uniform(0.0, 3.0))),
            waits_for_cooldown=rng.random() < 0.6,
        )

    async def _use(self, one: Controller, demand: Demand, lease: Lease) -> Demand | None:
        """An attempt, and how it ends. Answers the demand that its client tries next."""
        rng = self.random
        self.seen["lease probe"] += lease.probe
        ticket = self.database.state.tickets.get(lease.ticket_id)
        self.seen["lease of another's grant"] += ticket is not None and lease.queued_s > 0.5
        await asyncio.sleep(rng.choice((0.0, 0.0, 0.0, 0.3)))
        if not one.valid(lease):
            self.seen["lease not valid any more"] += 1
            await self._settle(one, not_dispatched(lease, b"{}"))
            return None
        if rng.random() < 0.05:
            await self._settle(one, not_dispatched(lease, b"{}"))
            return None
        left = max(lease.hard_deadline - self.loop.time(), 0.0)
        works_s = min(rng.expovariate(1.5), left + demand.isolation_s)
        self._dispatch(lease, works_s)
        patience = min(left, works_s + 0.001 if rng.random() < 0.75 else rng.uniform(0, works_s))
        await asyncio.sleep(patience / 2)
        if rng.random() < 0.5:
            one.content_seen(lease)
        await asyncio.sleep(patience / 2)
        again = None
        if self.provider.works_on(lease.ticket_id):
            settlement = self._uncertain(demand, lease)
        else:
            settlement = self._ended(demand, lease)
            if settlement.verdict in (Verdict.TRANSIENT, Verdict.RATE_LIMITED):
                again = msgspec.structs.replace(
                    demand, ticket_id=self._id(), attempt=demand.attempt + 1, place=lease.number
                )
        if rng.random() < 0.1:
            one.settle_unheard(settlement)
        elif rng.random() < 0.1:
            one.settle_unheard(settlement)
            await self._settle(one, settlement)
        else:
            await self._settle(one, settlement)
        if settlement.ending is Ending.UNCERTAIN and rng.random() < 0.3:
            await asyncio.sleep(self.provider.left_s(lease.ticket_id))
            await self._settle(one, self._ended(demand, lease))
        return again

    def _dispatch(self, lease: Lease, works_s: float) -> None:
        slot = self.database.state.tickets.get(lease.ticket_id)
        self.provider.begin(lease.ticket_id, works_s)
        if not self.provider.works_on(lease.ticket_id):
            return
        if slot is None or slot.state not in ("active", "quarantined"):
            self.loop.failure = Violation("over-admission: dispatched without a slot")
        if (running := self.provider.running()) > self._most_running():
            self.loop.failure = Violation(f"over-admission: the provider works on {running}")

    def _most_running(self) -> int:
        """In both groups. After a split the small one's endpoint has what it was granted in the larger group."""
        larger = _MOST + self.settings.groups[GROUP].quarantine_headroom
        split = self.seen["fault group merged or split"] > 1
        return larger + (larger if split else self.small.concurrency)

    async def _settle(self, one: Controller, settlement: Settlement) -> None:
        settled = await one.settle(settlement)
        if settled.applied:
            self.told[settlement.lease.ticket_id] = settlement.state

    def _uncertain(self, demand: Demand, lease: Lease) -> Settlement:
        rng = self.random
        confirms = rng.choice((None, 0.2))
        if confirms is not None:
            self.provider.end_within(lease.ticket_id, confirms)
        del demand
        return Settlement(
            lease=lease,
            ending=Ending.UNCERTAIN,
            verdict=rng.choice((Verdict.NONE, Verdict.TRANSIENT)),
            cancel_confirms_after_s=confirms,
            state="unknown",
            record=b"{}",
        )

    def _ended(self, demand: Demand, lease: Lease) -> Settlement:
        rng = self.random
        usd = (demand.most_usd or Decimal(0)) * rng.randint(0, 4) / 4
        verdict = rng.choice(
            (
                Verdict.ANSWERED,
                Verdict.ANSWERED,
                Verdict.ANSWERED,
                Verdict.TRANSIENT,
                Verdict.TRANSIENT,
                Verdict.SLOW,
                Verdict.RATE_LIMITED,
                Verdict.CREDENTIAL_REJECTED if rng.random() < 0.3 else Verdict.ANSWERED,
                Verdict.NONE,
            )
        )
        return Settlement(
            lease=lease,
            ending=Ending.CONFIRMED,
            verdict=verdict,
            retry_after_s=rng.choice((None, rng.uniform(0.0, 1.0))),
            received_at=self.loop.time(),
            account_wide=rng.random() < 0.3,
            used_tokens=rng.choice((None, 10, 200)),
            state=rng.choice(("charged", "zero")),
            record=msgspec.json.encode({"usd": usd}),
        )


@contextmanager
def _in_place_of_clock_and_chance(world: World) -> Iterator[None]:
    clock = types.SimpleNamespace(monotonic=world.loop.time)
    replaced: list[tuple[Any, str, Any]] = [
        (controller, "time", clock),
        (combiner, "time", clock),
        (controller, "new_id", world._id),
        (controller, "log", world.log),
        (combiner, "log", world.log),
    ]
    before = [(module, name, getattr(module, name)) for module, name, _ in replaced]
    for module, name, value in replaced:
        setattr(module, name, value)
    try:
        yield
    finally:
        for module, name, value in before:
            setattr(module, name, value)


def run(seed: int) -> Outcome:
    """Raises whatever is wrong, with the seed in its message."""
    world = World(seed)
    with _in_place_of_clock_and_chance(world):
        try:
            world.loop.run(world.schedule())
        except Exception as error:
            after_s = world.loop.time() - 1000
            error.add_note(f"seed={seed} after {after_s:.3f} s; replay: python -m tests.simulation --seed {seed}")
            raise
    return Outcome(seed, world.watch.steps, world.seen, world.loop.time() - 1000)
