"""
May this request start now? One answer for each ticket, exact across every process that shares the store.

`admit` waits in the group's queue and returns a lease or a refusal; `valid` is asked again right before dispatch;
`settle` ends the lease. Between them this process proves that it lives: when its heartbeat lapses it starts nothing
more. Without this file each process would count for itself, and a cancelled caller would leave its slot behind.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from contextlib import asynccontextmanager
from typing import Final, TypeVar

import msgspec
import structlog

from admission.combiner import Lane
from admission.contract import AdmissionStore, BreakerEvent, Rejected, StoreUnavailable, TicketRow
from admission.ids import new_id
from admission.lease import (
    Demand,
    Ending,
    Fence,
    Lease,
    Observer,
    Refusal,
    RefusalReason,
    Settled,
    Settlement,
    Verdict,
    Waiting,
)
from admission.settings import AdmissionSettings

log: Final = structlog.get_logger("admission")

R = TypeVar("R")

_REFUSALS: Final = {
    "queue_full": RefusalReason.QUEUE_FULL,
    "deadline_exceeded": RefusalReason.DEADLINE_EXCEEDED,
    "cooldown": RefusalReason.COOLDOWN,
    "duplicate_debit": RefusalReason.DUPLICATE_DEBIT,
    "ended": RefusalReason.DUPLICATE_DEBIT,
    "lapsed": RefusalReason.LAPSED,
    "owner_fence": RefusalReason.FENCED,
    "provider_unavailable": RefusalReason.UNAVAILABLE,
    "key_limit": RefusalReason.KEY_LIMIT,
    "budget_exceeded": RefusalReason.BUDGET_EXCEEDED,
    "budget_reserved": RefusalReason.BUDGET_RESERVED,
    "cost_not_bounded": RefusalReason.NOT_BOUNDED,
    "too_large": RefusalReason.TOO_LARGE,
    "store_closed": RefusalReason.STORE_CLOSED,
}

#: Outcomes that move a breaker or a floor.
_JUDGED: Final = frozenset(Verdict) - {Verdict.ANSWERED, Verdict.NONE}

#: What the store raises for a group that it does not know.
_UNKNOWN_GROUP: Final = "P0002"

#: A snapshot held for longer keeps the dead rows of a hot group in its way: measured, it made one six times slower.
_OLD_SNAPSHOT_S: Final = 10.0

#: Seconds after which a new waiter is looked at for the first time: a burst is looked at once, and a slot that came
#: free in another process while the ticket was on its way is found.
_FIRST_LOOK_S: Final = 0.05

#: Seconds after which an answer is not the usual one: only then does a ticket's patience get a timer of its own.
_PROMPT_S: Final = 0.05

#: Between heartbeats while the store does not answer.
_RETRY_BEAT_S: Final = 0.5

#: Between lines of the log about a store that is away.
_LOST_AGAIN_S: Final = 60.0

#: For the ledger, in place of a record that it refused.
_UNRECORDABLE: Final = b'{"status":"unknown","ended":"unrecordable"}'

#: Shards of each counter: enough that processes rarely meet, few enough that reading them all is one page.
_SHARDS: Final = 16


class _Ticket:
    """A ticket of this process that has neither a lease nor a refusal yet."""

    __slots__ = (
        "acknowledged", "answer", "asked_at", "demand", "group", "lost", "observer", "patience", "patience_s", "seen",
        "unsure", "waits",
    )  # fmt: skip

    def __init__(self, demand: Demand, observer: Observer | None, patience_s: float) -> None:
        self.demand = demand
        #: Where it waits, which the store may know better than the demand.
        self.group = demand.group
        self.observer = observer
        self.asked_at = time.monotonic()
        #: None: it came too late.
        self.answer: asyncio.Future[Lease | Refusal | None] = asyncio.get_running_loop().create_future()
        self.acknowledged = False
        #: A statement with it was lost, and may commit late: it takes a tombstone to give the ticket up.
        self.unsure = False
        self.waits = False
        #: Its incarnation has lapsed: what the store grants it now is given back.
        self.lost = False
        self.seen: Waiting | None = None
        #: Seconds from `asked_at` after which it is given up, and what watches them.
        self.patience_s = patience_s
        self.patience: asyncio.TimerHandle | None = None

    def watch(self) -> None:
        left_s = self.asked_at + self.patience_s - time.monotonic()
        self.patience = asyncio.get_running_loop().call_later(max(left_s, 0), self.give_up)

    def give_up(self) -> None:
        if not self.answer.done():
            self.answer.set_result(None)

    @property
    def leased(self) -> bool:
        """
        The store's grant has been handed on. It is its caller's then, or `admit`'s to give back: an older statement
        with the same ticket, in the lane of a group that it has left, may still be on its way and must not take it.
        """
        answer = self.answer
        return (
            answer.done()
            and not answer.cancelled()
            and answer.exception() is None
            and isinstance(answer.result(), Lease)
        )


class Controller:
    """One per process. Open it with `opened`."""

    def __init__(self, store: AdmissionStore, settings: AdmissionSettings) -> None:
        self._store = store
        self._settings = settings
        #: This process for as long as it lives. It holds no tickets, so a lapse does not end it.
        self.process = new_id()
        #: Who holds this process's tickets: another one after each lapse.
        self.owner = new_id()
        #: Everyone this process has been, for whoever needs to prove that one is dead.
        self.incarnations: list[uuid.UUID] = [self.process, self.owner]
        #: On the monotonic clock: no dispatch after this.
        self._trusted_until = 0.0
        #: On the monotonic clock: since when the store has not answered, and when that was logged last. How often
        #: it has not since then.
        self._lost_since: float | None = None
        self._lost_told = 0.0
        self._lost_often = 0
        #: Those whose incarnation has lapsed, told once another one is registered and the store has let go of them. The
        #: second: the store may have known of it.
        self._lapsed: list[tuple[_Ticket, bool]] = []
        #: Set where a heartbeat is wanted at once.
        self._pulse = asyncio.Event()
        self._tickets: dict[uuid.UUID, _Ticket] = {}
        #: Those that were asked for a moment ago.
        self._unwatched: list[_Ticket] = []
        self._admissions: dict[str, Lane[_Ticket | None, None]] = {}
        self._clean: Lane[Settlement, Settled] = Lane(lambda batch: self._settle(batch, judged=False))
        self._judged: dict[str, Lane[Settlement, Settled]] = {}
        self._decided: Lane[Lease, None] = Lane(self._decide, batch=1)
        self._abandoned: Lane[tuple[uuid.UUID, bool], None] = Lane(self._abandon)
        self._notified: Lane[uuid.UUID, None] = Lane(self._notify)
        self._told_of: Lane[None, None] = Lane(self._take_note)
        self._someone_waits = asyncio.Event()
        #: Something may have happened to them: another process granted one, or the alarm rang.
        self._hint = asyncio.Event()
        self._alarm: asyncio.TimerHandle | None = None
        #: Where the store has endpoints in other groups than the settings have.
        self._moved: dict[str, str] = {}
        #: Settlements acknowledged, by group: one that lands while an acquire is on its way has freed a slot that the
        #: acquire did not see.
        self._freed: Counter[str] = Counter()
        #: Groups that queue at the built-in limit, and have been told so.
        self._told: set[str] = set()

    @property
    def available(self) -> bool:
        """The store has confirmed recently that this process lives: it may dispatch."""
        return time.monotonic() < self._trusted_until

    @property
    def _shard(self) -> int:
        return self.owner.int % _SHARDS

    # ---------------------------------------------------------------- admit

    async def admit(self, demand: Demand, observer: Observer | None = None) -> Lease | Refusal:
        """
        Waits for a slot. Cancelling it gives the ticket back, granted or not.

        A ticket that was lost with a lapse is refused once this process lives again and the store has let go of it, or
        after `retry_s`: another one may be asked for then.

        `observer` hears when the ticket begins to wait and when its position or reason changes.
        """
        if not self.available:
            return Refusal(reason=RefusalReason.STORE_UNAVAILABLE, group=demand.group, retry_after_s=1.0)
        patience = demand.queue_timeout_s
        late = RefusalReason.QUEUE_TIMEOUT
        if demand.caller_deadline_s is not None and demand.caller_deadline_s < patience:
            patience, late = demand.caller_deadline_s, RefusalReason.DEADLINE_EXCEEDED
        ticket = _Ticket(demand, observer, patience)
        ticket.group = self._moved.get(demand.endpoint, demand.group)
        self._tickets[demand.ticket_id] = ticket
        self._lane(ticket.group).entrust(ticket, ticket.answer)
        self._give_up_in_time(ticket)
        answer: Lease | Refusal | None = None
        try:
            answer = await ticket.answer
            if answer is None:
                acknowledged = ticket.acknowledged
                # It is no lack of slots where nobody could be granted one.
                away = self._lost_since is not None or not self.available
                if acknowledged:
                    # The debit may be asked for again at once: its ticket should be gone by then. A store that is away
                    # must not keep the caller.
                    try:
                        async with asyncio.timeout(self._settings.retry_s):
                            await self._abandoned.submit((demand.ticket_id, ticket.unsure))
                    except TimeoutError:
                        away = True
                known = late is RefusalReason.DEADLINE_EXCEEDED or (acknowledged and not away)
                answer = Refusal(
                    reason=late if known else RefusalReason.STORE_UNAVAILABLE,
                    group=ticket.group,
                    retry_after_s=_expected_s(ticket.seen) if known else 1.0,
                    position=ticket.seen.position if ticket.seen else None,
                    used=acknowledged,
                )
        finally:
            if ticket.patience is not None:
                ticket.patience.cancel()
            del self._tickets[demand.ticket_id]
            # Cancelled. Where the store has not acknowledged yet, `_acquire` takes it back when it does.
            if answer is None and ticket.acknowledged:
                self._abandoned.post((demand.ticket_id, ticket.unsure))
        return answer

    def _give_up_in_time(self, ticket: _Ticket) -> None:
        """Most are answered at once: those that are not get a timer each, the others one for all."""
        if ticket.patience_s <= _PROMPT_S:
            ticket.watch()
            return
        if not self._unwatched:
            asyncio.get_running_loop().call_later(_PROMPT_S, self._watch)
        self._unwatched.append(ticket)

    def _watch(self) -> None:
        unwatched, self._unwatched = self._unwatched, []
        for ticket in unwatched:
            if not ticket.answer.done():
                ticket.watch()

    def valid(self, lease: Lease) -> bool:
        """The recheck: this process is still trusted and the attempt's time is not over. Ask right before sending."""
        return time.monotonic() < min(self._trusted_until, lease.hard_deadline)

    async def fenced(self, key_id: uuid.UUID, fence: Fence) -> bool:
        """A newer executor of the run has been seen, by whatever process. Raises `StoreUnavailable`."""
        return await self._store.fenced(key_id, fence)

    def content_seen(self, lease: Lease) -> None:
        """
        The attempt gives valid content. Where it is the probe of a half-open breaker that closes it: nobody waits for
        the end of a long answer. On its way when this returns.
        """
        if lease.probe:
            self._decided.post(lease)

    def settle(self, settlement: Settlement) -> asyncio.Future[Settled]:
        """
        Ends a lease. It is on its way when this returns; awaiting it tells what the store made of it.

        It is tried until the store acknowledges it, for as long as this process lives.
        """
        return self._ending_lane(settlement).submit(settlement)

    def settle_unheard(self, settlement: Settlement) -> None:
        """`settle`, with nobody to tell."""
        self._ending_lane(settlement).post(settlement)

    def _ending_lane(self, settlement: Settlement) -> Lane[Settlement, Settled]:
        if not settlement.lease.judged and settlement.verdict not in _JUDGED:
            return self._clean
        group = settlement.lease.group
        if group not in self._judged:
            self._judged[group] = Lane(lambda batch: self._settle(batch, judged=True))
        return self._judged[group]

    async def advance(self, groups: Collection[str]) -> None:
        """Lets the queues of these groups move on."""
        for group in groups:
            self._lane(group).post(None)

    async def bury(self, owners: Sequence[uuid.UUID]) -> None:
        """
        These incarnations are proven dead: their waiters end, their attempts go to quarantine now.

        Raises `StoreUnavailable`.
        """
        groups = await self._store.bury(owners)
        await asyncio.gather(*(self._lane(group).submit(None) for group in groups))

    # ---------------------------------------------------------------- lanes

    def _lane(self, group: str) -> Lane[_Ticket | None, None]:
        lane = self._admissions.get(group)
        if lane is None:
            lane = self._admissions[group] = Lane(lambda batch: self._acquire(group, batch))
        return lane

    async def _acquire(self, group: str, batch: Sequence[_Ticket | None]) -> list[None]:
        tickets = [ticket for ticket in batch if ticket is not None]
        owner = self.owner
        sent = 0.0
        freed = self._freed[group]

        async def send() -> list[TicketRow]:
            nonlocal sent
            sent = time.monotonic()
            asked = [(ticket.demand, sent - ticket.asked_at) for ticket in tickets]
            try:
                try:
                    return await self._store.acquire(group, owner, asked)
                except Rejected as error:
                    if str(error) != _UNKNOWN_GROUP:
                        raise
                # A database that was put back to before the group was made known, by a standby that lagged.
                log.warning("admission.groups_forgotten", group=group)
                await self._store.configure()
                return await self._store.acquire(group, owner, asked)
            except StoreUnavailable:
                for ticket in tickets:
                    ticket.unsure = True
                raise

        try:
            rows = await self._insist(send, give_up_after_s=self._settings.retry_s)
        except (StoreUnavailable, Rejected) as error:
            if len(tickets) > 1 and isinstance(error, Rejected):
                raise
            for ticket in tickets:
                _answer(ticket, Refusal(reason=RefusalReason.STORE_UNAVAILABLE, group=group, retry_after_s=1.0))
                if not ticket.leased:
                    self._abandoned.post((ticket.demand.ticket_id, True))
            if isinstance(error, Rejected):
                # No traceback: the driver puts the values it was given into its message.
                log.error("admission.ticket_rejected", group=group, sqlstate=str(error))  # noqa: TRY400
            return [None] * len(batch)
        asked = {ticket.demand.ticket_id: ticket for ticket in tickets}
        foreign: set[uuid.UUID] = set()
        queued = False
        for row in rows:
            if row.answer == "next":
                if row.wait_ms is not None:
                    self._wake_in(max(row.wait_ms / 1000, 0.005))
            elif row.answer == "notify":
                if row.owner_id is not None:
                    foreign.add(row.owner_id)
            elif row.answer == "breaker":
                self._told_of.post(None)
            elif row.answer == "moved":
                self._move(asked[row.ticket_id], row)  # type: ignore[index]  # every element has its id
            elif row.ticket_id is not None:
                if (answered := asked.get(row.ticket_id)) is not None:
                    answered.acknowledged = True
                    if row.answer == "lapsed" or (row.answer == "queued" and owner != self.owner):
                        # The statement was on its way when its incarnation lapsed.
                        self._lose(answered, known=row.answer == "queued" or answered.unsure)
                        self._pulse.set()
                        continue
                waiting = self._tickets.get(row.ticket_id)
                if waiting is not None:
                    self._deliver(waiting, row, sent)
                    queued = queued or waiting.waits
                if (
                    answered is not None
                    and not answered.leased
                    and (answered.unsure if row.answer not in ("granted", "queued") else waiting is None)
                ):
                    # Whoever asked has gone away meanwhile, or a lost statement may still come to enqueue it.
                    self._abandoned.post((row.ticket_id, answered.unsure))
        for other in foreign:
            self._notified.post(other)
        if queued:
            self._someone_waits.set()
            if self._freed[group] != freed:
                self._lane(group).post(None)
        return [None] * len(batch)

    def _move(self, ticket: _Ticket, row: TicketRow) -> None:
        """The configuration in force has the endpoint in another group: the question goes there."""
        if row.group_id is None:
            _answer(ticket, Refusal(reason=RefusalReason.STORE_UNAVAILABLE, group=ticket.group, retry_after_s=1.0))
            return
        self._moved[ticket.demand.endpoint] = ticket.group = row.group_id
        self._lane(row.group_id).entrust(ticket, ticket.answer)

    def _deliver(self, ticket: _Ticket, row: TicketRow, sent: float) -> None:
        if ticket.lost:
            return
        demand = ticket.demand
        # By whatever statement: the store has it, and `admit` gives it back where its caller goes away.
        ticket.acknowledged = True
        if row.answer == "granted":
            assert row.generation is not None
            assert row.granted_at is not None
            assert row.day is not None
            assert row.remaining_ms is not None
            ticket.waits = False
            _answer(
                ticket,
                Lease(
                    ticket_id=demand.ticket_id,
                    group=row.group_id or ticket.group,
                    number=row.number or 0,
                    generation=row.generation,
                    probe=bool(row.probe),
                    judged=bool(row.judged),
                    hard_deadline=sent + row.remaining_ms / 1000,
                    granted_at=row.granted_at,
                    day=row.day,
                    queued_s=time.monotonic() - ticket.asked_at,
                ),
            )
        elif row.answer == "queued":
            ticket.group = row.group_id or ticket.group
            if not ticket.waits:
                ticket.waits = True
                self._wake_in(_FIRST_LOOK_S)
            if row.ahead is not None:
                self._tell(ticket, row, row.ahead + 1)
        else:
            ticket.waits = False
            wait_ms = row.expected_ms if row.wait_ms is None else row.wait_ms
            # Of a budget for good no time gives anything back.
            at_least_s = None if row.answer == "budget_exceeded" else 1.0
            _answer(
                ticket,
                Refusal(
                    reason=_REFUSALS[row.answer],
                    group=ticket.group,
                    retry_after_s=at_least_s if wait_ms is None else wait_ms / 1000,
                    cause=row.wait_reason,
                    tokens=demand.tokens if row.answer == "too_large" else None,
                    ends_at=None
                    if row.wait_reason is None or row.wait_ms is None
                    else time.monotonic() + row.wait_ms / 1000,
                    key_limit=row.key_limit,
                ),
            )

    def _tell(self, ticket: _Ticket, row: TicketRow, position: int) -> None:
        """Its place, why it waits and for how long, where that is news."""
        waiting = Waiting(
            group=ticket.group,
            position=position,
            reason=row.wait_reason or "capacity",
            expected_wait_s=None if row.expected_ms is None else row.expected_ms / 1000,
            until_s=None if row.wait_ms is None else row.wait_ms / 1000,
        )
        seen, ticket.seen = ticket.seen, waiting
        if ticket.observer is not None and (
            seen is None or (seen.position, seen.reason) != (waiting.position, waiting.reason)
        ):
            ticket.observer(waiting)
        group = self._settings.groups.get(ticket.group)
        if waiting.reason == "capacity" and group is not None and group.concurrency_is_default:
            if ticket.group not in self._told:
                wanted = f"concurrency = {2 * group.concurrency}  # what the provider really gives"
                log.warning(
                    "admission.queues_at_default_limit",
                    group=ticket.group,
                    concurrency=group.concurrency,
                    hint=f'[groups."{ticket.group}"]\n{wanted}',
                )
            self._told.add(ticket.group)

    async def _settle(self, batch: Sequence[Settlement], *, judged: bool) -> list[Settled]:
        shard = self._shard
        try:
            rows = await self._insist(lambda: self._store.settle(shard, batch, judged=judged), give_up_after_s=None)
        except Rejected as error:
            if len(batch) > 1:
                raise
            # The record cannot be written as it is. The slot must come free, and the attempt must not look unsettled.
            [settlement] = batch
            log.error("admission.record_rejected", ticket=str(settlement.lease.ticket_id), sqlstate=str(error))  # noqa: TRY400
            bare = msgspec.structs.replace(settlement, state="unknown", record=_UNRECORDABLE)
            rows = await self._insist(lambda: self._store.settle(shard, [bare], judged=judged), give_up_after_s=None)
        for row in rows:
            if row.group_id is not None:
                self._freed[row.group_id] += 1
        if any(row.untold for row in rows):
            self._told_of.post(None)
        await self.advance({row.group_id for row in rows if row.group_id and row.waiters})
        return [Settled(applied=row.applied, counters=row.counters) for row in rows]

    async def _decide(self, batch: Sequence[Lease]) -> list[None]:
        for lease in batch:
            with contextlib.suppress(StoreUnavailable):  # its settlement decides it then
                await self._store.decide(lease.group, lease.ticket_id, lease.generation)
                self._told_of.post(None)
                await self.advance([lease.group])
        return [None] * len(batch)

    async def _abandon(self, batch: Sequence[tuple[uuid.UUID, bool]]) -> list[None]:
        # A tombstone costs a row that stays, so only tickets whose acquire was never acknowledged get one.
        for tombstone in (False, True):
            tickets = [ticket for ticket, unknown in batch if unknown is tombstone]
            if tickets:
                abandon = functools.partial(self._store.abandon, self._shard, tickets, tombstone=tombstone)
                await self.advance(await self._insist(abandon, give_up_after_s=None))
        return [None] * len(batch)

    async def _notify(self, batch: Sequence[uuid.UUID]) -> list[None]:
        with contextlib.suppress(StoreUnavailable):  # a hint; the other process rescans anyway
            await self._store.notify(sorted(set(batch)))
        return [None] * len(batch)

    async def _take_note(self, batch: Sequence[None]) -> list[None]:
        """Writes into the log how breakers have changed: what this process gets to hear, no other does."""
        with contextlib.suppress(StoreUnavailable, Rejected):  # the next sweep finds it, here or in another process
            while changes := await self._store.breaker_events():
                for change in changes:
                    _log_breaker(change)
        return [None] * len(batch)

    async def _insist(self, send: Callable[[], Awaitable[R]], *, give_up_after_s: float | None) -> R:
        """
        The same statement with the same ids until it is acknowledged: a lost answer means unknown.

        Raises `StoreUnavailable` once `give_up_after_s` has passed; None never gives up.
        """
        started = time.monotonic()
        delay = 0.05
        while True:
            try:
                return await send()
            except StoreUnavailable:
                if give_up_after_s is not None and time.monotonic() + delay > started + give_up_after_s:
                    self._trusted_until = 0.0
                    self._note_loss()
                    self._pulse.set()
                    raise
                await asyncio.sleep(delay)
                delay = min(delay * 2, 2.0)

    # ---------------------------------------------------------------- tasks

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[Controller]:
        """Registers this process, keeps it alive, and on leaving settles what is left and signs it off."""
        await self._renew(first=True)
        tasks = [
            asyncio.create_task(self._keep_alive(), name="admission heartbeat"),
            asyncio.create_task(self._rescan(), name="admission rescan"),
            asyncio.create_task(self._listen(), name="admission listen"),
            asyncio.create_task(self._sweep(), name="admission sweep"),
        ]
        try:
            yield self
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._settings.statement_s):
                    await asyncio.gather(*(lane.drain() for lane in self._admissions.values()))
                    await asyncio.gather(self._clean.drain(), *(lane.drain() for lane in self._judged.values()))
                    await self._abandoned.drain()
                    await self._decided.drain()
                    await self._told_of.drain()
                    with contextlib.suppress(StoreUnavailable):
                        await self._store.bury([self.owner, self.process])

    async def _renew(self, *, first: bool) -> None:
        sent = time.monotonic()
        lives_s = await self._store.renew(self.owner, self.process, first=first)
        if lives_s is None:
            # Our tickets are another's now. What still runs settles by its ticket; what waited is told.
            self._trusted_until = 0.0
            log.warning("admission.lapsed", owner=str(self.owner))
            self.owner = new_id()
            self.incarnations.append(self.owner)
            for ticket in self._waiting():
                self._lose(ticket, known=True)
            sent = time.monotonic()
            lives_s = await self._store.renew(self.owner, self.process, first=True)
        if lives_s is not None:
            self._trusted_until = sent + lives_s - self._settings.margin_s
            self._tell_lapsed()

    def _lose(self, ticket: _Ticket, *, known: bool) -> None:
        """Its incarnation has lapsed. Whoever waits is told when asking again helps, or in a while."""
        ticket.waits = False
        ticket.lost = True
        self._lapsed.append((ticket, known))
        asyncio.get_running_loop().call_later(self._settings.retry_s, _answer, ticket, _lapsed(ticket, known=known))

    def _tell_lapsed(self) -> None:
        """This process lives, as another incarnation: the old one's places would hold the debits of who asks again."""
        lapsed, self._lapsed = self._lapsed, []
        for ticket, known in lapsed:
            if known:
                given_back = self._abandoned.submit((ticket.demand.ticket_id, ticket.unsure))
                given_back.add_done_callback(functools.partial(_tell_given_back, ticket))
            else:
                _answer(ticket, _lapsed(ticket, known=known))

    async def _keep_alive(self) -> None:
        pause = self._settings.lease_s / 3
        while True:
            self._pulse.clear()
            # A store that is away is asked often: once it is back, nothing should wait for the next beat.
            well = self.available and self._lost_since is None
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause if well else min(pause, _RETRY_BEAT_S)):
                    await self._pulse.wait()
            try:
                await self._renew(first=False)
            except StoreUnavailable:
                self._note_loss()
            else:
                if self._lost_since is not None:
                    log.info("admission.store_found", after_s=round(time.monotonic() - self._lost_since, 1))
                    self._lost_since = None

    def _note_loss(self) -> None:
        """The store does not answer: logged at once, and then each minute until it does."""
        now = time.monotonic()
        self._lost_often += 1
        if self._lost_since is not None and now < self._lost_told + _LOST_AGAIN_S:
            return
        if self._lost_since is None:
            self._lost_since, self._lost_often = now, 1
        for_s = round(now - self._lost_since, 1)
        log.warning("admission.store_lost", available=self.available, for_s=for_s, times=self._lost_often)
        self._lost_told, self._lost_often = now, 0

    def _wake_in(self, seconds: float) -> None:
        """Lets the rescan look then, if it does not look earlier."""
        loop = asyncio.get_running_loop()
        at = loop.time() + seconds
        if self._alarm is None or at < self._alarm.when():
            if self._alarm is not None:
                self._alarm.cancel()
            self._alarm = loop.call_at(at, self._ring)

    def _ring(self) -> None:
        self._alarm = None
        self._hint.set()

    async def _rescan(self) -> None:
        """
        Looks after this process's waiters: at a hint, at the next event that time brings, at the latest each
        `rescan_s`. Without waiters it sleeps.
        """
        while True:
            await self._someone_waits.wait()
            self._wake_in(self._settings.rescan_s)
            await self._hint.wait()
            self._hint.clear()
            if self._alarm is None:
                # Time has passed: let the queues act on it first.
                await asyncio.gather(*(self._lane(group).submit(None) for group in {t.group for t in self._waiting()}))
            asked = {ticket.demand.ticket_id: ticket for ticket in self._waiting()}
            if not asked:
                self._someone_waits.clear()
                continue
            sent = time.monotonic()
            try:
                rows = await self._store.rescan(self.owner, [ticket.demand for ticket in asked.values()])
            except (StoreUnavailable, Rejected):
                continue
            for row in rows:
                ticket = None if row.ticket_id is None else asked.pop(row.ticket_id, None)
                if ticket is not None:
                    # One that was given up meanwhile has been abandoned by whoever gave it up.
                    self._deliver(ticket, row, sent)

    def _waiting(self) -> list[_Ticket]:
        return [t for t in self._tickets.values() if t.waits and not t.answer.done()]

    async def _listen(self) -> None:
        while True:
            try:
                async with self._store.listen(self._hear) as lost:
                    self._hint.set()
                    await lost.wait()
            except StoreUnavailable:
                pass
            await asyncio.sleep(1.0)

    def _hear(self, owner: str) -> None:
        if owner == str(self.owner):
            self._hint.set()

    async def _sweep(self) -> None:
        """Acts on what time alone has changed in groups that have no traffic."""
        while True:
            await asyncio.sleep(self._settings.lease_s / 3)
            try:
                await self.advance(await self._store.overdue())
                await self._told_of.submit(None)
                oldest = await self._store.oldest_snapshot()
            except StoreUnavailable:
                continue
            if oldest is not None and oldest[1] > _OLD_SNAPSHOT_S:
                log.warning("admission.old_snapshot", application=oldest[0], age_s=round(oldest[1], 1))


def _answer(ticket: _Ticket, answer: Lease | Refusal) -> None:
    if not ticket.answer.done():
        ticket.answer.set_result(answer)


def _log_breaker(change: BreakerEvent) -> None:
    told = {"group": change.group, "generation": change.generation, "cause": change.cause, "at": change.at.isoformat()}
    match change.became:
        case "open":
            until = None if change.until is None else change.until.isoformat()
            log.warning("admission.breaker_opened", was=change.was, until=until, **told)
        case "half_open":
            log.info("admission.breaker_probing", **told)
        case _:
            log.info("admission.breaker_closed", was=change.was, **told)


def _lapsed(ticket: _Ticket, *, known: bool) -> Refusal:
    return Refusal(reason=RefusalReason.LAPSED, group=ticket.group, retry_after_s=1.0, used=known)


def _tell_given_back(ticket: _Ticket, given_back: asyncio.Future[None]) -> None:
    if not given_back.cancelled():
        _answer(ticket, _lapsed(ticket, known=True))


def _expected_s(seen: Waiting | None) -> float:
    """When asking again may help, as far as the queue told."""
    if seen is None:
        return 1.0
    return max(1.0, seen.expected_wait_s or seen.until_s or 1.0)


def not_dispatched(lease: Lease, record: bytes) -> Settlement:
    """The settlement of a lease that was not used."""
    return Settlement(lease=lease, ending=Ending.NOT_DISPATCHED, verdict=Verdict.NONE, state="zero", record=record)
