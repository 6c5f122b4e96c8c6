"""
What happens to a settlement that the store does not take.

The store is asked for as long as this process lives. What it has not acknowledged in time goes into a journal on this
host's disk, so that a process that dies first loses no charge: whoever lives or starts next on the same data directory
replays it, once. Without this every answer given while the database is away would be of unknown cost after a `kill -9`.
"""

from __future__ import annotations

import asyncio
import base64
import enum
import functools
import time
import uuid
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, date, datetime
from typing import Final

import msgspec
import structlog

from admission.contract import Rejected as StoreRejected
from admission.controller import Controller
from admission.lease import Ending, Lease, Settled, Settlement, Verdict
from gateway.database import StoreUnavailable, store_errors
from metering.journal import STALL_S, Adopted, Entry, Journal, JournalUnavailable

log: Final = structlog.get_logger("gateway")

#: Between looks for journals of dead processes, and at this process's own.
_WATCH_S: Final = 1.0
#: A loop that counts in milliseconds rings up to one too early, and would be asked to ring again until it has passed.
_TICK_S: Final = 0.001
#: Settlements that are replayed together.
_BATCH: Final = 128


class Kept(msgspec.Struct, frozen=True, kw_only=True):
    """A settlement as the journal has it. What is added here needs a default: an older process's file is read, too."""

    ticket_id: uuid.UUID
    group: str
    generation: int
    granted_at: datetime
    day: date
    ending: Ending
    state: str
    #: For the ledger, as it is.
    record: msgspec.Raw
    kept_at: datetime
    cancel_confirms_after_s: float | None = None


def keep(settlement: Settlement) -> bytes:
    lease = settlement.lease
    return msgspec.json.encode(
        Kept(
            ticket_id=lease.ticket_id,
            group=lease.group,
            generation=lease.generation,
            granted_at=lease.granted_at,
            day=lease.day,
            ending=settlement.ending,
            state=settlement.state,
            record=msgspec.Raw(settlement.record),
            kept_at=datetime.now(UTC),
            cancel_confirms_after_s=settlement.cancel_confirms_after_s,
        )
    )


def restore(kept: Kept) -> Settlement:
    """The same accounting, without a word to the breaker: what it says of the group is over."""
    return Settlement(
        lease=Lease(
            ticket_id=kept.ticket_id,
            group=kept.group,
            generation=kept.generation,
            probe=False,
            hard_deadline=time.monotonic(),
            granted_at=kept.granted_at,
            day=kept.day,
            queued_s=0.0,
        ),
        ending=kept.ending,
        verdict=Verdict.NONE,
        state=kept.state,
        record=bytes(kept.record),
        cancel_confirms_after_s=kept.cancel_confirms_after_s,
    )


class Unacknowledged(enum.Enum):
    """What is known of a settlement that the store has not acknowledged in time."""

    #: It is on its way, and on the disk: it will be settled.
    PENDING = "pending"
    #: It may be lost if this process ends.
    UNKNOWN = "unknown"


class _Underway:
    """A settlement that the store has not acknowledged."""

    __slots__ = ("entry", "heard", "late_at", "settlement", "store")

    def __init__(self, settlement: Settlement, store: asyncio.Future[Settled], late_at: float) -> None:
        self.settlement = settlement
        self.store = store
        #: By the event loop's clock: when the store has had its time.
        self.late_at = late_at
        #: Done once the store has said something, or has had its time.
        self.heard: asyncio.Future[None] = store.get_loop().create_future()
        self.entry: Entry | None = None

    def tell(self) -> None:
        if not self.heard.done():
            self.heard.set_result(None)


class Settling:
    """Settles, all of one process. Open it with `opened`, inside the journal and the controller."""

    def __init__(self, controller: Controller, patience_s: float, journal: Journal | None = None) -> None:
        """
        `patience_s`: how long the store is waited for. Without a journal what it does not take meanwhile is only kept
        in memory.
        """
        self._controller = controller
        self._patience_s = patience_s
        self._journal = journal
        #: Those that may become late, in the order in which they do, some of them ended; and the timer for all of them.
        self._in_time: deque[_Underway] = deque()
        self._alarm: asyncio.TimerHandle | None = None
        self._overdue: set[_Underway] = set()
        self._parking: set[asyncio.Task[None]] = set()

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[Settling]:
        """On leaving, what the store has not acknowledged is on the disk."""
        try:
            yield self
        finally:
            left = self._outstanding()
            for underway in left:
                self._keep(underway)
            written = [underway.entry.written for underway in left if underway.entry is not None]
            if waiting := [*written, *self._parking]:
                await asyncio.wait(waiting, timeout=STALL_S)

    @property
    def fault(self) -> str | None:
        """Why a settlement that the store does not take might be lost: nothing may be dispatched while this is so."""
        return None if self._journal is None else self._journal.fault

    @property
    def outstanding(self) -> int:
        """How many the store has not acknowledged."""
        return len(self._outstanding())

    def _outstanding(self) -> list[_Underway]:
        return [*self._overdue, *(underway for underway in self._in_time if not underway.store.done())]

    async def settle(self, settlement: Settlement) -> Settled | Unacknowledged:
        """Ends an attempt. It is on its way even if this is cancelled."""
        underway = self._begin(settlement)
        await underway.heard
        store, entry = underway.store, underway.entry
        if entry is not None and not store.done():
            await asyncio.wait((store, entry.written), timeout=STALL_S, return_when=asyncio.FIRST_COMPLETED)
        if store.done() and not store.cancelled() and store.exception() is None:
            return store.result()
        if self._journal is None and not store.done():
            return Unacknowledged.PENDING
        kept = entry is not None and entry.written.done() and entry.written.exception() is None
        return Unacknowledged.PENDING if kept else Unacknowledged.UNKNOWN

    def settle_unheard(self, settlement: Settlement) -> None:
        """`settle`, with nobody to tell."""
        self._begin(settlement)

    def _begin(self, settlement: Settlement) -> _Underway:
        store = self._controller.settle(settlement)
        underway = _Underway(settlement, store, store.get_loop().time() + self._patience_s)
        store.add_done_callback(functools.partial(self._ended, underway))
        if self._overdue:
            # The store is away: what ends now need not wait to find that out.
            self._keep(underway)
        self._in_time.append(underway)
        if self._alarm is None:
            self._alarm = store.get_loop().call_at(underway.late_at, self._look)
        return underway

    def _look(self) -> None:
        """Some have had their time: what the store has not taken of them is late."""
        self._alarm = None
        loop = asyncio.get_running_loop()
        now = loop.time() + _TICK_S
        while self._in_time and self._in_time[0].late_at <= now:
            self._late(self._in_time.popleft())
        if self._in_time:
            self._alarm = loop.call_at(self._in_time[0].late_at, self._look)

    def _late(self, underway: _Underway) -> None:
        if not underway.store.done():
            self._overdue.add(underway)
            self._keep(underway)
            underway.tell()

    def _keep(self, underway: _Underway) -> None:
        if underway.entry is None and self._journal is not None:
            underway.entry = self._journal.append(keep(underway.settlement))

    def _ended(self, underway: _Underway, store: asyncio.Future[Settled]) -> None:
        self._overdue.discard(underway)
        # What has ended is not kept until it would have been late.
        while self._in_time and self._in_time[0].store.done():
            self._in_time.popleft()
        underway.tell()
        if store.cancelled():
            return  # the process ends; what is in the journal stays there
        match store.exception():
            case None:
                if underway.entry is not None and self._journal is not None:
                    self._journal.acknowledge(underway.entry)
            case StoreRejected() as error:
                parking = asyncio.create_task(self._park(underway, str(error)), name="parking")
                self._parking.add(parking)
                parking.add_done_callback(self._parking.discard)
            case error:
                # Kept for whoever comes after this process: asking the same store again would end the same way.
                self._keep(underway)
                log.error("gateway.settlement_fault", ticket=str(underway.settlement.lease.ticket_id), exc_info=error)

    async def _park(self, underway: _Underway, sqlstate: str) -> None:
        ticket = str(underway.settlement.lease.ticket_id)
        log.error("gateway.journal_parked", ticket=ticket, reason="rejected", sqlstate=sqlstate)
        if self._journal is None:
            return
        try:
            await self._journal.park([_parked(keep(underway.settlement), reason="rejected", recorded=None)])
        except JournalUnavailable:
            self._keep(underway)
        else:
            if underway.entry is not None:
                self._journal.acknowledge(underway.entry)

    async def report(self) -> None:
        """For ever: the log says when the journal cannot be written, and when it can again."""
        said: str | None = None
        while True:
            fault = self.fault
            if (fault is None) is not (said is None):
                if fault is not None:
                    log.error("gateway.journal_failed", reason=fault)
                else:
                    log.info("gateway.journal_writable")
            said = fault
            await asyncio.sleep(_WATCH_S)


class Replay:
    """Makes good what dead processes of this host had left to settle."""

    def __init__(
        self,
        journal: Journal,
        controller: Controller,
        recorded: Callable[[Sequence[uuid.UUID]], Awaitable[Mapping[uuid.UUID, str]]],
    ) -> None:
        """`recorded` tells the states of attempts, and raises asyncpg's errors."""
        self._journal = journal
        self._controller = controller
        self._recorded = recorded
        #: Set after the first look.
        self.looked = asyncio.Event()

    async def watch(self) -> None:
        """For ever."""
        while True:
            if self._controller.available:
                try:
                    await self.once()
                except JournalUnavailable as error:
                    log.warning("gateway.adoption_postponed", reason=str(error))
            self.looked.set()
            await asyncio.sleep(_WATCH_S)

    async def once(self) -> None:
        """Takes up every journal of a dead process. Raises `JournalUnavailable`."""
        seen: set[str] = set()
        while (adopted := await self._journal.adopt(seen)) is not None:
            seen.add(adopted.name)
            try:
                await self._replay(adopted)
            finally:
                await adopted.close()

    async def _replay(self, adopted: Adopted) -> None:
        numbers = list(adopted.pending)
        replayed = repeated = parked = 0
        for start in range(0, len(numbers), _BATCH):
            batch = await self._batch(adopted, numbers[start : start + _BATCH])
            replayed += batch[0]
            repeated += batch[1]
            parked += batch[2]
        log.warning(
            "gateway.journal_replayed",
            replayed=replayed,
            repeated=repeated,
            parked=parked,
            left=len(adopted.pending),
            torn=adopted.torn,
        )

    async def _batch(self, adopted: Adopted, numbers: Sequence[int]) -> tuple[int, int, int]:
        """How many were applied, had been applied before, and were refused."""
        refused: dict[int, tuple[str, str | None]] = {}
        asked: dict[int, Settlement] = {}
        for number in numbers:
            try:
                asked[number] = restore(msgspec.json.decode(adopted.pending[number], type=Kept))
            except msgspec.DecodeError:
                refused[number] = ("unreadable", None)
        answers = await asyncio.gather(
            *(self._controller.settle(settlement) for settlement in asked.values()), return_exceptions=True
        )
        applied: list[int] = []
        before: list[int] = []
        for number, answer in zip(asked, answers, strict=True):
            match answer:
                case Settled(applied=True):
                    applied.append(number)
                case Settled():
                    before.append(number)
                case StoreRejected():
                    refused[number] = ("rejected", str(answer))
                case _:
                    # It stays in the journal, and is tried again with the next look.
                    log.error("gateway.settlement_fault", ticket=_ticket(asked[number]), exc_info=answer)
        states = await self._states([asked[number].lease.ticket_id for number in before])
        repeated: list[int] = []
        for number in before:
            found = states.get(asked[number].lease.ticket_id)
            if found == asked[number].state:
                repeated.append(number)
            else:
                refused[number] = ("absent" if found is None else "settled_otherwise", found)
        await adopted.acknowledge([*applied, *repeated])
        if refused:
            await self._put_aside(adopted, refused)
        return len(applied), len(repeated), len(refused)

    async def _states(self, tickets: Sequence[uuid.UUID]) -> Mapping[uuid.UUID, str]:
        while tickets:
            try:
                with store_errors():
                    return await self._recorded(tickets)
            except StoreUnavailable:
                await asyncio.sleep(_WATCH_S)
        return {}

    async def _put_aside(self, adopted: Adopted, refused: Mapping[int, tuple[str, str | None]]) -> None:
        lines = [
            _parked(adopted.pending[number], reason=reason, recorded=recorded)
            for number, (reason, recorded) in refused.items()
        ]
        try:
            await self._journal.park(lines)
        except JournalUnavailable as error:
            log.warning("gateway.adoption_postponed", reason=str(error))
            return
        for number, (reason, recorded) in refused.items():
            ticket = _ticket_of(adopted.pending[number])
            log.error("gateway.journal_parked", ticket=ticket, reason=reason, recorded=recorded)
        await adopted.acknowledge(list(refused))


def _ticket(settlement: Settlement) -> str:
    return str(settlement.lease.ticket_id)


def _ticket_of(record: bytes) -> str | None:
    try:
        return str(msgspec.json.decode(record, type=Kept).ticket_id)
    except msgspec.DecodeError:
        return None


def _parked(record: bytes, *, reason: str, recorded: str | None) -> bytes:
    """A line for people: what was to be settled, and what stood against it."""
    try:
        settlement: object = msgspec.json.decode(record)
    except msgspec.DecodeError:
        settlement = base64.b64encode(record).decode()
    return msgspec.json.encode(
        {"parked_at": datetime.now(UTC), "reason": reason, "recorded": recorded, "settlement": settlement}
    )
