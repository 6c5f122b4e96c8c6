"""
Admission without a database, for tests and simulations: `decide` behind the contract of a store.

One `MemoryDatabase` is what a PostgreSQL server is: several stores, each of another process, share it. Faults are
injected where a real connection breaks: before the commit, after it, or so that it commits late, after the caller has
given up. Never use it to serve: it forgets everything with its process.
"""

from __future__ import annotations

import asyncio
import contextvars
import time
import uuid
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from decimal import Decimal
from typing import Any, Final, Literal

import msgspec

from admission import decision
from admission.clock import SECOND, moment
from admission.contract import BreakerEvent, Rejected, SettledRow, StoreUnavailable, TicketRow
from admission.lease import Demand, Fence, Settlement, Verdict, Waiting
from admission.settings import AdmissionSettings
from admission.state import (
    Abandon,
    Acquire,
    Answers,
    Bury,
    Charge,
    Configure,
    Decide,
    Event,
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


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """What happens to one statement. The default is nothing."""

    #: How long it takes to arrive, and its answer to come back, in seconds.
    there_s: float = 0.0
    back_s: float = 0.0
    #: The caller hears that the store is unavailable, and the statement was not applied ("before"), was applied
    #: ("after"), or will be applied in `late_s` seconds ("late").
    lost: Literal["before", "after", "late"] | None = None
    late_s: float = 0.0


_NO_FAULT: Final = Fault()


class _Record(msgspec.Struct, frozen=True):
    usd: Decimal | None = None
    upper_bound_usd: Decimal | None = None
    input_total: int = 0
    output_total: int = 0


def charge_of(record: bytes) -> Charge:
    """What the ledger takes from a record, where there is no ledger."""
    told = msgspec.json.decode(record, type=_Record)
    return Charge(usd=told.usd, bound=told.upper_bound_usd, tokens=told.input_total + told.output_total)


class MemoryDatabase:
    """What the processes share. One instant, one event: it is applied whole or not at all."""

    def __init__(self, settings: AdmissionSettings, now: Callable[[], float] = time.time) -> None:
        """`now`: the server's clock, in UNIX seconds. It may step."""
        self.state: State = initial(settings)
        #: Asked before each statement, with its name: "acquire", "settle", ...
        self.fault: Callable[[str], Fault] = lambda _: _NO_FAULT
        #: Told of each event that was applied: the state before, the event, the state after, the answers, and when.
        self.applied: Callable[[State, Event, State, Answers, int], None] | None = None
        #: What was recorded of each attempt: its end, and its correction.
        self.records: dict[uuid.UUID, list[bytes]] = {}
        self._clock = now
        self._ahead = 0
        self._last = 0
        self._listeners: dict[Callable[[str], None], tuple[contextvars.Context, asyncio.Event]] = {}

    def now(self) -> int:
        """The store's time in microseconds: a step back of the clock is made up for."""
        now = round(self._clock() * SECOND) + self._ahead
        if now < self._last:
            self._ahead += self._last - now
            now = self._last
        self._last = now
        return now

    def apply(self, event: Event) -> Answers:
        """Raises `Rejected`."""
        now = self.now()
        before = self.state
        try:
            self.state, answers = decision.decide(before, event, now)
        except UnknownGroup as error:
            raise Rejected("P0002") from error
        if isinstance(event, Settle):
            for outcome, row in zip(event.elements, answers.settled, strict=True):
                if row.applied:
                    self.records.setdefault(row.ticket_id, []).append(outcome.settlement.record)
        if self.applied is not None:
            self.applied(before, event, self.state, answers, now)
        return answers

    def notify(self, owners: Sequence[uuid.UUID]) -> None:
        loop = asyncio.get_running_loop()
        for hear, (context, _) in self._listeners.items():
            for owner in owners:
                loop.call_soon(hear, str(owner), context=context)

    def listen(self, hear: Callable[[str], None]) -> asyncio.Event:
        lost = asyncio.Event()
        self._listeners[hear] = (contextvars.copy_context(), lost)
        return lost

    def lose_listeners(self) -> None:
        """Every connection that listens is cut."""
        listeners, self._listeners = self._listeners, {}
        for _, lost in listeners.values():
            lost.set()

    def unlisten(self, hear: Callable[[str], None]) -> None:
        self._listeners.pop(hear, None)


class MemoryStore:
    """One process's way to the database."""

    def __init__(
        self,
        settings: AdmissionSettings,
        now: Callable[[], float] = time.time,
        *,
        database: MemoryDatabase | None = None,
    ) -> None:
        """Without a database it has one of its own, by the clock `now`."""
        self.database = MemoryDatabase(settings, now) if database is None else database
        self._settings = settings

    async def _send(self, name: str, event: Event) -> Answers:
        await self._arrive(name, fault := self.database.fault(name), event)
        answers = self.database.apply(event)
        await self._return(fault)
        return answers

    async def _arrive(self, name: str, fault: Fault, event: Event | None) -> None:
        await asyncio.sleep(fault.there_s)
        if fault.lost == "before":
            raise StoreUnavailable(name)
        if fault.lost == "late":
            if event is not None:
                # The connection is gone and the statement is not: nobody waits for it any more, whoever lives.
                asyncio.get_running_loop().call_later(
                    fault.late_s, self._apply_late, event, context=contextvars.Context()
                )
            raise StoreUnavailable(name)

    def _apply_late(self, event: Event) -> None:
        self.database.apply(event)

    async def _return(self, fault: Fault) -> None:
        await asyncio.sleep(fault.back_s)
        if fault.lost == "after":
            raise StoreUnavailable

    # ---------------------------------------------------------------- the contract

    async def configure(self) -> list[str]:
        answers = await self._send("configure", Configure(self._settings.groups, self._settings.revision))
        return list(answers.groups)

    async def acquire(self, group: str, owner: uuid.UUID, demands: Sequence[tuple[Demand, float]]) -> list[TicketRow]:
        elements = tuple(element(demand, waited) for demand, waited in demands)
        return list((await self._send("acquire", Acquire(group, owner, elements))).tickets)

    async def rescan(self, owner: uuid.UUID, demands: Sequence[Demand]) -> list[TicketRow]:
        return list((await self._send("rescan", Rescan(owner, tuple(demands)))).tickets)

    async def settle(self, shard: int, settlements: Sequence[Settlement], *, judged: bool) -> list[SettledRow]:
        del shard  # there are no counters
        outcomes = tuple(self._outcome(settlement) for settlement in settlements)
        return list((await self._send("settle", Settle(outcomes, judged))).settled)

    def _outcome(self, settlement: Settlement) -> Outcome:
        """Its times as they are now. A rate limit for longer than anybody should wait leaves the route out."""
        now = asyncio.get_running_loop().time()
        told_ms = 0 if settlement.told_at is None else round(max(now - settlement.told_at, 0.0) * 1000)
        asked = settlement.retry_after_s
        charge = charge_of(settlement.record)
        if asked is None:
            return Outcome(settlement, None, told_ms, charge)
        longest = self._settings.longest_retry_after_s
        if settlement.verdict is Verdict.RATE_LIMITED and asked > longest:
            settlement = msgspec.structs.replace(settlement, verdict=Verdict.LIMITED_FOR_LONG)
        received_at = settlement.received_at
        since = 0.0 if received_at is None else now - received_at
        return Outcome(settlement, round(min(max(asked - since, 0.0), longest) * 1000), told_ms, charge)

    async def decide(self, group: str, ticket: uuid.UUID, generation: int) -> None:
        await self._send("decide", Decide(group, ticket, generation))

    async def abandon(self, shard: int, tickets: Sequence[uuid.UUID], *, tombstone: bool) -> list[str]:
        del shard
        return list((await self._send("abandon", Abandon(tuple(tickets), tombstone))).groups)

    async def renew(self, owner: uuid.UUID, process: uuid.UUID, *, first: bool) -> float | None:
        ttl_ms = round(self._settings.lease_s * 1000)
        answers = await self._send("renew", Renew(owner, process, ttl_ms, first))
        return None if answers.lives_ms is None else answers.lives_ms / 1000

    async def bury(self, owners: Sequence[uuid.UUID]) -> list[str]:
        return list((await self._send("bury", Bury(tuple(owners)))).groups)

    async def overdue(self) -> list[str]:
        return list((await self._send("overdue", Overdue())).groups)

    async def breaker_events(self) -> list[BreakerEvent]:
        return [
            BreakerEvent(
                group=change.group,
                was=change.was.value,
                became=change.became.value,
                generation=change.generation,
                cause=change.cause,
                at=moment(change.at),
                until=None if change.until is None else moment(change.until),
            )
            for change in (await self._send("breaker_events", Take())).changes
        ]

    async def reset(self, group: str) -> bool:
        return (await self._send("reset", Reset(group))).groups != ()

    async def _read(self, name: str) -> tuple[State, int]:
        fault = self.database.fault(name)
        await self._arrive(name, fault, None)
        found = self.database.state, self.database.now()
        await self._return(fault)
        return found

    async def dead(self, owners: Sequence[uuid.UUID]) -> set[uuid.UUID]:
        return decision.dead(*await self._read("dead"), owners)

    async def oldest_snapshot(self) -> tuple[str, float] | None:
        """Memory has no snapshots."""
        return None

    async def fenced(self, key_id: uuid.UUID, fence: Fence) -> bool:
        state, _ = await self._read("fenced")
        return decision.fenced(state, key_id, fence)

    async def groups(self) -> list[dict[str, Any]]:
        return decision.occupancy(*await self._read("groups"))

    async def waits(self, debits: Sequence[str]) -> Mapping[str, Waiting]:
        return decision.waits(*await self._read("waits"), debits)

    async def notify(self, owners: Sequence[uuid.UUID]) -> None:
        fault = self.database.fault("notify")
        await self._arrive("notify", fault, None)
        self.database.notify(owners)
        await self._return(fault)

    @asynccontextmanager
    async def listen(self, hear: Callable[[str], None]) -> AsyncIterator[asyncio.Event]:
        await self._arrive("listen", self.database.fault("listen"), None)
        lost = self.database.listen(hear)
        try:
            yield lost
        finally:
            self.database.unlisten(hear)

    async def close(self) -> None:
        """There is nothing to close."""
