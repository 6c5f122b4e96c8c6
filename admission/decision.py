"""
What admission decides, as a pure function: `decide(state, event, now)` answers the state after the event.

The SQL functions do the same under a row lock. This is their oracle, the heart of the memory store, and what the
simulation drives; one differential test runs the same events through both. Nothing here waits, reads a clock or
touches what it was given: a state that was passed in stays as it was.

Times and durations are whole microseconds on the store's clock, which is the UNIX time.
"""

from __future__ import annotations

import uuid
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, date, datetime, timedelta
from typing import Any, Final, Generic, TypeVar
from zoneinfo import ZoneInfo

import msgspec
from msgspec.structs import replace

from admission.breaker import Breaker, BreakerLimits, BreakerState, closed, cooldown, elapsed, handed_on, judged
from admission.contract import SettledRow, TicketRow
from admission.lease import Class, Demand, Ending, Fence, Settlement, Verdict, Waiting
from admission.settings import GroupSettings
from admission.state import MILLISECOND, microseconds
from admission.state import SECOND as SECOND
from admission.state import Abandon as Abandon
from admission.state import Acquire as Acquire
from admission.state import Allowance as Allowance
from admission.state import Answers as Answers
from admission.state import Attempt as Attempt
from admission.state import AttemptState as AttemptState
from admission.state import Bury as Bury
from admission.state import Close as Close
from admission.state import Configure as Configure
from admission.state import Decide as Decide
from admission.state import Element as Element
from admission.state import Event as Event
from admission.state import Floor as Floor
from admission.state import FloorKind as FloorKind
from admission.state import Group as Group
from admission.state import Outcome as Outcome
from admission.state import Overdue as Overdue
from admission.state import Renew as Renew
from admission.state import Rescan as Rescan
from admission.state import Reset as Reset
from admission.state import Settle as Settle
from admission.state import State as State
from admission.state import Ticket as Ticket
from admission.state import TicketState as TicketState
from admission.state import element as element
from admission.state import initial as initial

#: Interactive grants in a row, made while batch waited, after which batch has a turn.
BATCH_CREDIT: Final = 9
#: How long a waiter is left to its owner, who should end it at its deadline.
_OVERDUE: Final = 2 * SECOND
#: A position is exact up to this.
_AHEAD: Final = 100
_STRIKES: Final = 20
#: Operators see so many of who waits.
_SHOWN: Final = 20
_DAY: Final = 86_400 * SECOND
_SHORTEST_WAIT_MS: Final = 100
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
#: The verdicts that put a floor.
_FLOORS: Final[Mapping[Verdict, FloorKind]] = {
    Verdict.RATE_LIMITED: "rate_limit",
    Verdict.LIMITED_FOR_LONG: "long_rate_limit",
    Verdict.CREDENTIAL_REJECTED: "credential_rejected",
    Verdict.QUOTA_EXHAUSTED: "quota_exhausted",
}
#: What each is told as: a rate limit is one however long it is.
_CAUSES: Final[Mapping[FloorKind, str]] = {
    "rate_limit": "rate_limited",
    "long_rate_limit": "rate_limited",
    "credential_rejected": "credential_rejected",
    "quota_exhausted": "quota_exhausted",
}

K = TypeVar("K")
V = TypeVar("V")


class UnknownGroup(LookupError):
    """No configuration has named this group."""


_NOTHING: Final = Answers()


def decide(state: State, event: Event, now: int) -> tuple[State, Answers]:
    """
    The state after the event, and what is answered. Pure.

    Raises `UnknownGroup`.
    """
    work = _Work(state, now)
    answers = _apply(work, event)
    return work.state(), answers


def _apply(work: _Work, event: Event) -> Answers:
    match event:
        case Acquire():
            return _acquire(work, event)
        case Rescan():
            return _rescan(work, event)
        case Settle():
            return _settle(work, event)
        case Decide():
            return _decide(work, event)
        case Abandon():
            return _abandon(work, event)
        case Renew():
            return _renew(work, event)
        case Bury():
            return _bury(work, event)
        case Overdue():
            return _overdue(work)
        case Configure():
            return _configure(work, event)
        case Reset():
            return _reset(work, event)
        case Close():
            return _close(work, event)


class _Draft(Generic[K, V]):
    """A mapping that is copied at its first change."""

    __slots__ = ("_own", "view")

    def __init__(self, view: Mapping[K, V]) -> None:
        self.view = view
        self._own: dict[K, V] | None = None

    def put(self, key: K, value: V) -> None:
        if self._own is None:
            self.view = self._own = dict(self.view)
        self._own[key] = value

    def drop(self, key: K) -> None:
        if self._own is None:
            self.view = self._own = dict(self.view)
        del self._own[key]


class _Work:
    """A state that is being changed, at one instant."""

    __slots__ = (
        "allowances",
        "attempts",
        "closed_until",
        "ended",
        "endpoints",
        "fences",
        "floors",
        "groups",
        "now",
        "owners",
        "reclaim_not_before",
        "tickets",
        "versions",
        "was",
    )

    def __init__(self, was: State, now: int) -> None:
        self.was = was
        self.now = now
        self.closed_until = was.closed_until
        self.reclaim_not_before = was.reclaim_not_before
        self.groups = _Draft(was.groups)
        self.allowances = _Draft(was.allowances)
        self.floors = _Draft(was.floors)
        self.endpoints = _Draft(was.endpoints)
        self.versions = _Draft(was.versions)
        self.tickets = _Draft(was.tickets)
        self.attempts = _Draft(was.attempts)
        self.ended = _Draft(was.ended)
        self.owners = _Draft(was.owners)
        self.fences = _Draft(was.fences)

    def state(self) -> State:
        was = self.was
        return State(
            zone=was.zone,
            unconfirmed_grant=was.unconfirmed_grant,
            unavailable=was.unavailable,
            groups=self.groups.view,
            allowances=self.allowances.view,
            floors=self.floors.view,
            endpoints=self.endpoints.view,
            versions=self.versions.view,
            tickets=self.tickets.view,
            attempts=self.attempts.view,
            ended=self.ended.view,
            owners=self.owners.view,
            reclaim_not_before=self.reclaim_not_before,
            fences=self.fences.view,
            closed_until=self.closed_until,
        )

    # -------------------------------------------------------------- owners

    def fresh(self, owner: uuid.UUID) -> bool:
        return self.owners.view.get(owner, 0) > self.now

    def dead(self, owner: uuid.UUID) -> bool:
        """Lapsed, and not merely unheard because the store itself was away."""
        return not self.fresh(owner) and self.reclaim_not_before <= self.now

    # -------------------------------------------------------------- groups

    def group(self, group: str) -> Group:
        found = self.groups.view.get(group)
        if found is None:
            raise UnknownGroup(group)
        return found

    def put_breaker(self, group: str, breaker: Breaker) -> None:
        """Where it has opened, waiters that do not wait for it, or cannot outlive it, are let go."""
        was = self.groups.view[group]
        if breaker is was.breaker:
            return
        self.groups.put(group, replace(was, breaker=breaker))
        until = breaker.cooldown_until
        if breaker.state is BreakerState.OPEN and was.breaker.state is not BreakerState.OPEN and until is not None:
            for ticket in self.waiting(group):
                if not ticket.waits_for_cooldown or ticket.queue_deadline <= until:
                    self.tickets.drop(ticket.ticket_id)

    def waiting(self, group: str) -> list[Ticket]:
        return [t for t in self.tickets.view.values() if t.state == "queued" and t.group == group]

    def allowances_of(self, group: str, model: str) -> list[tuple[str, Allowance]]:
        """Of the model, then of the group; filled up to now."""
        names = (model, "") if model else ("",)
        return [(n, a.at(self.now)) for n in names if (a := self.allowances.view.get((group, n))) is not None]

    def give_back(self, group: str, model: str, requests: int, tokens: int) -> None:
        if requests or tokens:
            for name, allowance in self.allowances_of(group, model):
                if allowance.rated:
                    self.allowances.put((group, name), allowance.with_back(requests, tokens))

    def told_left(self, ticket: Ticket, outcome: Outcome) -> None:
        """
        Lowers what is left to what the provider said. It need not have counted what was granted after this ticket, of
        which no more than a minute's worth can weigh.
        """
        settlement = outcome.settlement
        left = (settlement.requests_left, settlement.tokens_left)
        if left == (None, None):
            return
        assert ticket.granted_at is not None
        granted_at = max(ticket.granted_at, self.now - 60 * SECOND)
        since = [
            t
            for t in self.tickets.view.values()
            if t.group == ticket.group
            and t.ticket_id != ticket.ticket_id
            and t.state != "queued"
            and t.granted_at is not None
            and t.granted_at >= granted_at
        ]
        for name, allowance in self.allowances_of(ticket.group, ticket.model):
            if allowance.rated and (name or settlement.account_wide):
                counted = [t for t in since if not name or t.model == name]
                told = allowance.told(left, outcome.told_ms * MILLISECOND, counted)
                self.allowances.put((ticket.group, name), told)

    # -------------------------------------------------------------- floors

    def floors_of(self, group: str, credential: str, model: str) -> list[tuple[int, FloorKind]]:
        """When those end that are in force for a credential and model, and of what kind they are."""
        view = self.floors.view
        if not view:
            return []
        names = (model, "") if model else ("",)
        found = ((view.get((group, credential, name, kind)), kind) for kind in _CAUSES for name in names)
        return [(floor.until, kind) for floor, kind in found if floor is not None and floor.until > self.now]

    def held(self, group: str, floors: Iterable[tuple[int, FloorKind]]) -> tuple[int, str] | None:
        """Until when, and why, what is under these floors gets no slot of a group: by what ends last."""
        breaker = self.groups.view[group].breaker
        until = breaker.cooldown_until if breaker.state is BreakerState.OPEN else None
        cooling = None if until is None else (until, "cooldown")
        floor = _last(floors)
        if floor is None or cooling is None:
            return floor or cooling
        return floor if floor[0] >= cooling[0] else cooling

    def raise_floor(self, group: str, credential: str, model: str, kind: FloorKind, after: int | None) -> None:
        """It may be raised and is never lowered. Without a time it grows with each one in a row."""
        key = (group, credential, model, kind)
        was = self.floors.view.get(key)
        strikes = 0 if was is None else was.strikes
        if after is None:
            in_a_row = was is not None and self.now <= was.until + (was.until - was.since)
            strikes = min(strikes + 1, _STRIKES) if in_a_row else 0
            after = cooldown(self.group(group).limits, strikes)
        until = max(self.now + after, 0 if was is None else was.until)
        self.floors.put(key, Floor(since=self.now, until=until, strikes=strikes))
        for ticket in self.waiting(group):
            if ticket.credential != credential or model not in ("", ticket.model):
                continue
            if kind != "rate_limit" or not ticket.waits_for_cooldown or ticket.queue_deadline <= until:
                self.tickets.drop(ticket.ticket_id)

    # ------------------------------------------------------------- endings

    def end(self, ticket: Ticket, state: AttemptState) -> bool:
        """The single settlement of an attempt, or the one correction of an unknown one. False: it had its end."""
        was = self.attempts.view.get(ticket.ticket_id)
        if was is not None:
            return self.correct(ticket.ticket_id, state)
        self.attempts.put(
            ticket.ticket_id,
            Attempt(
                state=state,
                key_id=ticket.key_id,
                debit_id=ticket.debit_id,
                attempt=ticket.attempt,
                group=ticket.group,
                owner=ticket.owner,
                granted_at=ticket.granted_at,
            ),
        )
        debit = (ticket.key_id, ticket.debit_id)
        self.ended.put(debit, max(self.ended.view.get(debit, 0), ticket.attempt))
        return True

    def correct(self, ticket_id: uuid.UUID, state: AttemptState) -> bool:
        was = self.attempts.view.get(ticket_id)
        if was is None or was.state != "unknown" or state == "unknown":
            return False
        self.attempts.put(ticket_id, replace(was, state=state, corrected=True))
        return True

    def lose(self, ticket: Ticket) -> None:
        """Nobody told its end: unknown, unless it had one."""
        if ticket.ticket_id not in self.attempts.view:
            self.end(ticket, "unknown")

    # ----------------------------------------------------------- reconcile

    def reconcile(self, group: str) -> None:
        """Brings a group up to now."""
        now = self.now
        for ticket in [t for t in self.tickets.view.values() if t.group == group]:
            match ticket.state:
                case "queued":
                    if ticket.queue_deadline + _OVERDUE < now:
                        self.tickets.drop(ticket.ticket_id)
                case "granted":
                    assert ticket.grant_expires_at is not None
                    expired = ticket.grant_expires_at <= now
                    if self.dead(ticket.owner) or (expired and ticket.queue_deadline + _OVERDUE < now):
                        self.tickets.drop(ticket.ticket_id)
                    elif expired:
                        self.tickets.put(ticket.ticket_id, _back_in_queue(ticket))
                case "active":
                    self._reconcile_active(ticket)
                case "quarantined":
                    self._reconcile_quarantined(ticket)
        found = self.groups.view[group]
        if found.breaker.state is not BreakerState.CLOSED:
            probe = None if found.breaker.probe is None else self.tickets.view.get(found.breaker.probe)
            lives = probe is not None and probe.state in ("granted", "active")
            self.put_breaker(group, elapsed(found.breaker, found.limits, now, probe_lives=lives))

    def _reconcile_active(self, ticket: Ticket) -> None:
        assert ticket.hard_deadline is not None
        dead = self.dead(ticket.owner)
        if not dead and ticket.hard_deadline > self.now:
            return
        # A passed deadline has the full window from now: a clock that leapt must not free what still runs.
        until = max(ticket.hard_deadline, self.now) + ticket.isolation
        held = replace(ticket, state="quarantined", quarantined_until=until)
        self.tickets.put(ticket.ticket_id, held)
        if dead:
            self.lose(held)
        self._reconcile_quarantined(held)

    def _reconcile_quarantined(self, ticket: Ticket) -> None:
        assert ticket.quarantined_until is not None
        if ticket.quarantined_until <= self.now:
            self.tickets.drop(ticket.ticket_id)
            self.lose(ticket)


# ------------------------------------------------------------------ acquire


class _Occupancy:
    """Who occupies and who waits for a group, counted."""

    __slots__ = ("active", "batch", "group", "models", "quarantined", "quarantined_until", "queued", "ramped")

    def __init__(self, w: _Work, group_id: str) -> None:
        self.group = w.groups.view[group_id]
        generation = self.group.breaker.generation
        #: Granted ones are counted as active.
        self.active = 0
        self.quarantined = 0
        #: When the first of them comes free.
        self.quarantined_until: int | None = None
        self.batch = 0
        #: Of the current generation, quarantined ones aside.
        self.ramped = 0
        self.models: dict[str, int] = {}
        self.queued: list[Ticket] = []
        for ticket in w.tickets.view.values():
            if ticket.group != group_id:
                continue
            if ticket.state == "queued":
                self.queued.append(ticket)
                continue
            self.models[ticket.model] = self.models.get(ticket.model, 0) + 1
            self.batch += ticket.klass is Class.BATCH
            if ticket.state == "quarantined":
                self.quarantined += 1
                if ticket.quarantined_until is not None:
                    self.quarantined_until = min(
                        self.quarantined_until or ticket.quarantined_until, ticket.quarantined_until
                    )
            else:
                self.active += 1
                self.ramped += ticket.generation == generation

    @property
    def room(self) -> int:
        """By the limit and the headroom alone."""
        limit = self.group.limits.concurrency
        headroom = self.group.settings.quarantine_headroom
        return max(0, min(limit - self.active, limit + headroom - self.active - self.quarantined))

    @property
    def grants(self) -> int:
        """How many may be granted now."""
        breaker = self.group.breaker
        room = self.room
        if breaker.state is BreakerState.OPEN or (
            breaker.state is BreakerState.HALF_OPEN and breaker.probe is not None
        ):
            return 0
        if breaker.state is BreakerState.HALF_OPEN:
            return min(room, 1)
        if breaker.ramp is not None:
            return max(0, min(room, breaker.ramp - self.ramped))
        return room

    @property
    def batch_room(self) -> int:
        limit = self.group.limits.concurrency
        return max(0, (limit - 1 if limit > 1 else 1) - self.batch)

    def ahead(self, ticket: Ticket) -> int:
        mine = (ticket.klass, *ticket.place)
        return min(_AHEAD, sum((t.klass, *t.place) < mine for t in self.queued))


def _acquire(w: _Work, event: Acquire) -> Answers:
    w.group(event.group)
    w.reconcile(event.group)
    refusals, new = _judge_elements(w, event)
    chosen, stops = _choose(w, event, new)
    _enqueue(w, event, new, {ticket.ticket_id for ticket in chosen}, refusals)
    chosen = _granted_at_once(w, event.group, chosen)
    after = _Occupancy(w, event.group)
    rows = [_chosen_row(w, event.owner, ticket) for ticket in chosen]
    told = {ticket.ticket_id for ticket in chosen if ticket.owner == event.owner}
    for asked in event.elements:
        ticket_id = asked.demand.ticket_id
        if ticket_id not in told:
            told.add(ticket_id)
            rows.append(refusals.get(ticket_id) or _replayed_row(w, asked.demand, after, looked=False))
    if after.queued:
        rows.append(TicketRow(None, "next", wait_ms=_next_event_ms(w, event.group, stops)))
    return Answers(tickets=tuple(rows))


def _judge_elements(w: _Work, event: Acquire) -> tuple[dict[uuid.UUID, TicketRow], list[Ticket]]:
    """The refusals, and tickets for those that are none. A replay is in neither."""
    refusals: dict[uuid.UUID, TicketRow] = {}
    new: list[Ticket] = []
    if not event.elements:
        return refusals, new
    _raise_fences(w, event.elements)
    rest: list[Element] = []
    seen: set[uuid.UUID] = set()
    debits: set[tuple[uuid.UUID, str]] = set()
    repeated: set[uuid.UUID] = set()
    for asked in event.elements:
        demand = asked.demand
        ticket_id = demand.ticket_id
        if ticket_id in seen:
            continue
        seen.add(ticket_id)
        debit = (demand.key_id, demand.debit_id)
        if debit in debits:
            repeated.add(ticket_id)
        debits.add(debit)
        there = w.tickets.view.get(ticket_id)
        if there is not None:
            if there.owner != event.owner:
                refusals[ticket_id] = TicketRow(ticket_id, "duplicate_debit")
        elif ticket_id in w.attempts.view:
            refusals[ticket_id] = TicketRow(ticket_id, "ended")
        elif (group_id := w.endpoints.view.get(demand.endpoint or demand.group, event.group)) != event.group:
            refusals[ticket_id] = TicketRow(ticket_id, "moved", group_id=group_id)
        elif not w.fresh(event.owner):
            refusals[ticket_id] = TicketRow(ticket_id, "lapsed")
        else:
            rest.append(asked)

    live: set[tuple[uuid.UUID, str]] = set()
    highest: dict[tuple[uuid.UUID, str], int] = {}
    for ticket in w.tickets.view.values():
        debit = (ticket.key_id, ticket.debit_id)
        if debit in debits:
            highest[debit] = max(highest.get(debit, 0), ticket.attempt)
            if ticket.state != "quarantined":
                live.add(debit)

    first = w.group(event.group).next_number
    for asked in rest:
        demand = asked.demand
        debit = (demand.key_id, demand.debit_id)
        last = max(highest.get(debit, 0), w.ended.view.get(debit, 0))
        duplicate = demand.ticket_id in repeated or debit in live or last >= demand.attempt
        refusal = _refusal(w, event.group, asked, duplicate=duplicate)
        if refusal is not None:
            refusals[demand.ticket_id] = refusal
        else:
            new.append(_ticket(w, event, asked, _number(demand, first, len(new))))
    return refusals, new


def _number(demand: Demand, next_number: int, nth: int) -> int:
    """A retry keeps its place, which is always before the next number."""
    if demand.place is not None and demand.place < next_number:
        return demand.place
    return next_number + nth


def _raise_fences(w: _Work, elements: Sequence[Element]) -> None:
    """The newest executor of each run is known from here on, and the waiters of its predecessors are gone."""
    raised: set[tuple[uuid.UUID, str, str]] = set()
    for asked in elements:
        fence = asked.demand.fence
        if fence is not None:
            run = (asked.demand.key_id, fence.scope_id, fence.run_id)
            newest = w.fences.view.get(run)
            if newest is None or fence.number > newest:
                w.fences.put(run, fence.number)
                raised.add(run)
    if raised:
        for ticket in list(w.tickets.view.values()):
            if ticket.state == "queued" and ticket.fence is not None:
                run = (ticket.key_id, ticket.fence[0], ticket.fence[1])
                if run in raised and ticket.fence[2] < w.fences.view[run]:
                    w.tickets.drop(ticket.ticket_id)


def _is_fenced(fences: Mapping[tuple[uuid.UUID, str, str], int], key_id: uuid.UUID, fence: Fence) -> bool:
    return fence.number < fences.get((key_id, fence.scope_id, fence.run_id), fence.number)


def _refusal(w: _Work, group_id: str, asked: Element, *, duplicate: bool) -> TicketRow | None:
    """Why an element can be neither granted nor queued; None where it can."""
    demand = asked.demand
    ticket_id = demand.ticket_id
    if demand.fence is not None and _is_fenced(w.fences.view, demand.key_id, demand.fence):
        return TicketRow(ticket_id, "owner_fence")
    if duplicate:
        return TicketRow(ticket_id, "duplicate_debit")
    if asked.caller_ms is not None and asked.caller_ms <= 0:
        return TicketRow(ticket_id, "deadline_exceeded")
    breaker = w.groups.view[group_id].breaker
    floors = w.floors_of(group_id, demand.credential, demand.model)
    held = w.held(group_id, floors)
    if _out_of_patience(floors):
        return _held_back_row(w, ticket_id, floors, held)
    for _, allowance in w.allowances_of(group_id, demand.model):
        if allowance.tokens_per_minute is not None and demand.tokens > allowance.tokens_per_minute:
            return TicketRow(ticket_id, "too_large")
    if w.closed_until > w.now:
        return TicketRow(ticket_id, "store_closed", wait_ms=_wait_ms(w, w.closed_until, at_least=0))
    if held is None and (breaker.state is not BreakerState.HALF_OPEN or breaker.probe is None):
        return None
    if demand.waits_for_cooldown and (held is None or held[0] <= _queue_deadline(w, asked)):
        return None
    return _held_back_row(w, ticket_id, floors, held or (None, "cooldown"))


def _held_back_row(
    w: _Work,
    ticket_id: uuid.UUID,
    floors: Sequence[tuple[int, FloorKind]],
    held: tuple[int | None, str] | None,
) -> TicketRow:
    until, cause = held or (None, None)
    wait_ms = None if until is None else _wait_ms(w, until)
    out = _last(_out_of_patience(floors))
    if out is not None:
        return TicketRow(ticket_id, "provider_unavailable", wait_reason=out[1], wait_ms=wait_ms)
    return TicketRow(ticket_id, "cooldown", wait_reason=cause, wait_ms=wait_ms)


def _out_of_patience(floors: Iterable[tuple[int, FloorKind]]) -> list[tuple[int, FloorKind]]:
    """Those for whose end nobody waits."""
    return [floor for floor in floors if floor[1] != "rate_limit"]


def _last(floors: Iterable[tuple[int, FloorKind]]) -> tuple[int, str] | None:
    """The end of the one that ends last, and what it is told as."""
    last = min(floors, key=lambda floor: (-floor[0], floor[1]), default=None)
    return None if last is None else (last[0], _CAUSES[last[1]])


def _queue_deadline(w: _Work, asked: Element) -> int:
    patience = asked.queue_ms if asked.caller_ms is None else min(asked.queue_ms, asked.caller_ms)
    return w.now + patience * MILLISECOND


def _ticket(w: _Work, event: Acquire, asked: Element, number: int) -> Ticket:
    demand = asked.demand
    fence = demand.fence
    return Ticket(
        ticket_id=demand.ticket_id,
        group=event.group,
        number=number,
        klass=demand.klass,
        model=demand.model,
        endpoint=demand.endpoint or demand.group,
        credential=demand.credential,
        tokens=demand.tokens,
        owner=event.owner,
        key_id=demand.key_id,
        debit_id=demand.debit_id,
        attempt=demand.attempt,
        state="queued",
        waits_for_cooldown=demand.waits_for_cooldown,
        execution_limit=microseconds(demand.execution_limit_s),
        isolation=microseconds(demand.isolation_s),
        queued_at=w.now,
        queue_deadline=_queue_deadline(w, asked),
        caller_deadline=None if asked.caller_ms is None else w.now + asked.caller_ms * MILLISECOND,
        fence=None if fence is None else (fence.scope_id, fence.run_id, fence.number),
    )


class _Round:
    """One round of grants in a group."""

    def __init__(self, w: _Work, group_id: str, occupancy: _Occupancy, candidates: Iterable[Ticket]) -> None:
        self._w = w
        self._group_id = group_id
        self._occupancy = occupancy
        self._allowances: dict[str, Allowance | None] = {}
        self._blocked: set[str] = set()
        #: How long until each candidate fits that an allowance stopped.
        self.stops: list[int] = []
        ordered = sorted((t for t in candidates if w.fresh(t.owner)), key=_place)
        self._waiting = {
            klass: deque(ticket for ticket in ordered if ticket.klass is klass)
            for klass in (Class.INTERACTIVE, Class.BATCH)
        }

    def run(self) -> list[Ticket]:
        """The tickets it chooses, in order. Takes what they use from the allowances."""
        group = self._occupancy.group
        room = self._occupancy.grants
        batch_room = self._occupancy.batch_room
        credit = group.batch_credit
        chosen: list[Ticket] = []
        while len(chosen) < room:
            interactive = self._first(Class.INTERACTIVE)
            # Looked at even where it cannot be picked: what it lacks blocks its model.
            batch = self._first(Class.BATCH)
            if batch_room == 0:
                batch = None
            picked = batch if batch is not None and (interactive is None or credit >= BATCH_CREDIT) else interactive
            if picked is None:
                break
            whole = self._allowance("")
            if whole is not None and whole.lacks(picked.tokens):
                self.stops.append(whole.fits_in(picked.tokens))
                break
            if picked is batch:
                credit = 0
                batch_room -= 1
            elif batch is not None:
                credit = min(BATCH_CREDIT, credit + 1)
            self._waiting[picked.klass].popleft()
            self._take(picked)
            chosen.append(picked)
        if credit != group.batch_credit:
            self._w.groups.put(self._group_id, replace(self._w.groups.view[self._group_id], batch_credit=credit))
        return chosen

    def _first(self, klass: Class) -> Ticket | None:
        """The first that could be granted. Those before it cannot be in this round, and are not looked at again."""
        waiting = self._waiting[klass]
        while waiting and not self._eligible(waiting[0]):
            waiting.popleft()
        return waiting[0] if waiting else None

    def _eligible(self, ticket: Ticket) -> bool:
        if ticket.model in self._blocked:
            return False
        if self._w.floors_of(self._group_id, ticket.credential, ticket.model):
            return False
        own = self._allowance(ticket.model) if ticket.model else None
        if own is None:
            return True
        if own.concurrency is not None and self._occupancy.models.get(ticket.model, 0) >= own.concurrency:
            return False
        if own.lacks(ticket.tokens):
            self._blocked.add(ticket.model)
            self.stops.append(own.fits_in(ticket.tokens))
            return False
        return True

    def _allowance(self, model: str) -> Allowance | None:
        if model not in self._allowances:
            found = self._w.allowances.view.get((self._group_id, model))
            self._allowances[model] = None if found is None else found.at(self._w.now)
        return self._allowances[model]

    def _take(self, ticket: Ticket) -> None:
        models = self._occupancy.models
        models[ticket.model] = models.get(ticket.model, 0) + 1
        for name in {ticket.model, ""}:
            allowance = self._allowance(name)
            if allowance is not None and allowance.rated:
                self._allowances[name] = less = allowance.with_back(-1, -ticket.tokens)
                self._w.allowances.put((self._group_id, name), less)


def _place(ticket: Ticket) -> tuple[int, int]:
    return ticket.place


def _choose(w: _Work, event: Acquire, new: list[Ticket]) -> tuple[list[Ticket], list[int]]:
    """Grants what fits. Answers the tickets as they are granted, and how long until each that a rate stopped fits."""
    occupancy = _Occupancy(w, event.group)
    if w.closed_until > w.now or not (occupancy.queued or new) or occupancy.grants == 0:
        return [], []
    in_time = (ticket for ticket in occupancy.queued if ticket.queue_deadline > w.now)
    turn = _Round(w, event.group, occupancy, [*in_time, *new])
    granted = []
    for ticket in turn.run():
        own = ticket.owner == event.owner
        given = replace(
            ticket,
            state="active" if own else "granted",
            generation=occupancy.group.breaker.generation,
            granted_at=w.now,
            grant_expires_at=None if own else w.now + w.was.unconfirmed_grant,
            hard_deadline=_hard_deadline(w, ticket) if own else None,
        )
        w.tickets.put(ticket.ticket_id, given)
        granted.append(given)
    if granted and occupancy.group.breaker.state is BreakerState.HALF_OPEN:
        group = w.groups.view[event.group]
        w.groups.put(event.group, replace(group, breaker=replace(group.breaker, probe=granted[0].ticket_id)))
    return granted, turn.stops


def _hard_deadline(w: _Work, ticket: Ticket) -> int:
    latest = w.now + ticket.execution_limit
    return latest if ticket.caller_deadline is None else min(latest, ticket.caller_deadline + ticket.isolation)


def _enqueue(
    w: _Work, event: Acquire, new: Sequence[Ticket], granted: set[uuid.UUID], refusals: dict[uuid.UUID, TicketRow]
) -> None:
    """Queues those that were not granted and for which there is room."""
    group = w.groups.view[event.group]
    bound = group.settings.queue
    queued = w.waiting(event.group)
    waiting = len(queued)
    batch = sum(ticket.klass is Class.BATCH for ticket in queued)
    enqueued = 0
    for ticket in new:
        if ticket.ticket_id in granted:
            continue
        if ticket.number < group.next_number:  # it keeps the place of an earlier attempt
            room = waiting < bound + group.limits.concurrency
        else:
            # Batch takes at most half of the queue: a large submission must not turn interactive callers away.
            room = waiting < bound and (ticket.klass is not Class.BATCH or batch < (bound + 1) // 2)
        if not room:
            refusals[ticket.ticket_id] = TicketRow(ticket.ticket_id, "queue_full")
            continue
        w.tickets.put(ticket.ticket_id, ticket)
        waiting += 1
        batch += ticket.klass is Class.BATCH
        enqueued += 1
    if enqueued:
        w.groups.put(event.group, replace(group, next_number=group.next_number + len(new)))


def _granted_at_once(w: _Work, group_id: str, chosen: list[Ticket]) -> list[Ticket]:
    """Those that never waited come before whoever comes next, without using up a number."""
    first = w.groups.view[group_id].next_number
    placed = [replace(ticket, number=min(ticket.number, first - 1)) for ticket in chosen]
    for ticket in placed:
        w.tickets.put(ticket.ticket_id, ticket)
    return placed


# ------------------------------------------------------------------ rows


def _chosen_row(w: _Work, owner: uuid.UUID, ticket: Ticket) -> TicketRow:
    if ticket.owner == owner:
        return _granted_row(w, ticket)
    return TicketRow(
        ticket.ticket_id,
        "notify",
        owner_id=ticket.owner,
        group_id=ticket.group,
        number=ticket.number,
        generation=ticket.generation,
        probe=_is_probe(w, ticket),
        judged=_is_judged(w, ticket),
    )


def _granted_row(w: _Work, ticket: Ticket) -> TicketRow:
    assert ticket.granted_at is not None
    assert ticket.hard_deadline is not None
    granted_at = moment(ticket.granted_at)
    return TicketRow(
        ticket.ticket_id,
        "granted",
        owner_id=ticket.owner,
        group_id=ticket.group,
        number=ticket.number,
        generation=ticket.generation,
        probe=_is_probe(w, ticket),
        judged=_is_judged(w, ticket),
        granted_at=granted_at,
        day=day_of(ticket.granted_at, w.was.zone),
        remaining_ms=_to_ms(ticket.hard_deadline - w.now),
    )


def _is_probe(w: _Work, ticket: Ticket) -> bool:
    return w.groups.view[ticket.group].breaker.probe == ticket.ticket_id


def _is_judged(w: _Work, ticket: Ticket) -> bool:
    return (
        _is_probe(w, ticket)
        or w.groups.view[ticket.group].breaker.ramp is not None
        or any((ticket.group, model) in w.allowances.view for model in (ticket.model, ""))
    )


def _replayed_row(w: _Work, demand: Demand, occupancy: _Occupancy, *, looked: bool = True) -> TicketRow:
    """By the state of its ticket. `looked`: for its position, too."""
    ticket = w.tickets.view[demand.ticket_id]
    match ticket.state:
        case "active":
            return _granted_row(w, ticket)
        case "quarantined":
            return TicketRow(ticket.ticket_id, "ended")
        case "queued" | "granted":
            reason, until = _wait_reason(w, ticket, occupancy)
            if reason == "quarantine" and not looked:
                until = None
            return TicketRow(
                ticket.ticket_id,
                "queued",
                owner_id=ticket.owner,
                group_id=ticket.group,
                number=ticket.number,
                ahead=occupancy.ahead(ticket) if looked else None,
                wait_reason=reason,
                wait_ms=None if until is None else _wait_ms(w, until, at_least=0),
            )


def _missing_row(w: _Work, demand: Demand) -> TicketRow:
    if demand.fence is not None and _is_fenced(w.fences.view, demand.key_id, demand.fence):
        return TicketRow(demand.ticket_id, "owner_fence")
    floors = w.floors_of(demand.group, demand.credential, demand.model)
    held = w.held(demand.group, floors) if demand.group in w.groups.view else _last(floors)
    return _held_back_row(w, demand.ticket_id, floors, held)


def _wait_reason(w: _Work, ticket: Ticket, occupancy: _Occupancy) -> tuple[str, int | None]:
    """Why it waits, and when a cooldown, a floor or the first quarantine ends."""
    held = w.held(ticket.group, w.floors_of(ticket.group, ticket.credential, ticket.model))
    reason = _reason(w, ticket, occupancy, None if held is None else held[1])
    if reason == "quarantine":
        return reason, occupancy.quarantined_until
    return reason, None if held is None else held[0]


def _reason(w: _Work, ticket: Ticket, occupancy: _Occupancy, held: str | None) -> str:
    breaker = occupancy.group.breaker
    room = occupancy.room
    allowances = w.allowances_of(ticket.group, ticket.model)
    if w.closed_until > w.now:
        return "store"
    if held is not None:
        return held
    if breaker.state is not BreakerState.CLOSED or (breaker.ramp is not None and room > 0):
        return "cooldown"
    if room == 0 and breaker.ramp is None and occupancy.active < occupancy.group.limits.concurrency:
        return "quarantine"
    if room > 0:
        used = occupancy.models.get(ticket.model, 0)
        if any(name and a.concurrency is not None and used >= a.concurrency for name, a in allowances):
            return "model_capacity"
        if any(allowance.rated for _, allowance in allowances):
            return "rate"
    return "capacity"


def _next_event_ms(w: _Work, group_id: str, stops: Sequence[int]) -> int | None:
    """Until the next event that time alone brings about in a group."""
    events = [w.now + stop for stop in stops]
    for ticket in w.tickets.view.values():
        if ticket.group == group_id:
            if ticket.state == "granted" and ticket.grant_expires_at is not None:
                events.append(ticket.grant_expires_at)
            elif ticket.state == "quarantined" and ticket.quarantined_until is not None:
                events.append(ticket.quarantined_until)
    breaker = w.groups.view[group_id].breaker
    if breaker.state is BreakerState.OPEN and breaker.cooldown_until is not None:
        events.append(breaker.cooldown_until)
    events.extend(f.until for key, f in w.floors.view.items() if key[0] == group_id and f.until > w.now)
    if w.closed_until > w.now:
        events.append(w.closed_until)
    return _wait_ms(w, min(events), at_least=0) if events else None


# ------------------------------------------------------------------ rescan


def _rescan(w: _Work, event: Rescan) -> Answers:
    if w.fresh(event.owner):
        for demand in event.demands:
            ticket = w.tickets.view.get(demand.ticket_id)
            if ticket is None or ticket.owner != event.owner or ticket.state != "granted":
                continue
            assert ticket.grant_expires_at is not None
            if ticket.grant_expires_at > w.now:
                w.tickets.put(ticket.ticket_id, _confirmed(w, ticket))
    occupancies: dict[str, _Occupancy] = {}
    rows = []
    for demand in event.demands:
        ticket = w.tickets.view.get(demand.ticket_id)
        if ticket is None or ticket.owner != event.owner:
            rows.append(_missing_row(w, demand))
            continue
        if ticket.group not in occupancies:
            occupancies[ticket.group] = _Occupancy(w, ticket.group)
        rows.append(_replayed_row(w, demand, occupancies[ticket.group]))
    return Answers(tickets=tuple(rows))


def _confirmed(w: _Work, ticket: Ticket) -> Ticket:
    """A grant from before its breaker opened, or with a floor put under its model since, goes back to its place."""
    if ticket.generation != w.groups.view[ticket.group].breaker.generation or w.floors_of(
        ticket.group, ticket.credential, ticket.model
    ):
        return _back_in_queue(ticket)
    return replace(ticket, state="active", grant_expires_at=None, hard_deadline=_hard_deadline(w, ticket))


def _back_in_queue(ticket: Ticket) -> Ticket:
    return replace(ticket, state="queued", generation=None, granted_at=None, grant_expires_at=None)


# ------------------------------------------------------------------ settle


def _settle(w: _Work, event: Settle) -> Answers:
    found: list[Ticket | None] = []
    applied: list[bool] = []
    for outcome in event.elements:
        settlement = outcome.settlement
        ticket = w.tickets.view.get(settlement.lease.ticket_id)
        if ticket is not None and ticket.state not in ("active", "quarantined"):
            ticket = None
        found.append(ticket)
        state = _attempt_state(settlement)
        if ticket is None:
            applied.append(w.correct(settlement.lease.ticket_id, state))
            continue
        if settlement.ending is Ending.UNCERTAIN:
            assert ticket.hard_deadline is not None
            # A window that began anew when the clock leapt is not cut short.
            until = max(ticket.quarantined_until or 0, ticket.hard_deadline + ticket.isolation)
            if settlement.cancel_confirms_after_s is not None:
                until = min(until, w.now + microseconds(settlement.cancel_confirms_after_s))
            w.tickets.put(ticket.ticket_id, replace(ticket, state="quarantined", quarantined_until=until))
        else:
            w.tickets.drop(ticket.ticket_id)
        applied.append(w.end(ticket, state))
    if event.judged:
        for outcome, ticket, new in zip(event.elements, found, applied, strict=True):
            # A replay must not count a failure twice.
            if ticket is not None and new:
                _judge(w, ticket, outcome)
    rows = []
    for outcome, ticket, new in zip(event.elements, found, applied, strict=True):
        ticket_id = outcome.settlement.lease.ticket_id
        attempt = w.attempts.view.get(ticket_id)
        group_id = ticket.group if ticket is not None else None if attempt is None else attempt.group
        waiters = group_id is not None and _may_move(w, group_id)
        rows.append(SettledRow(ticket_id, applied=new, counters=None, group_id=group_id, waiters=waiters))
    return Answers(settled=tuple(rows))


def _may_move(w: _Work, group_id: str) -> bool:
    """Somebody waits whose model is not full, and whom no floor keeps back."""
    counted = _Occupancy(w, group_id)
    for ticket in counted.queued:
        limits = w.allowances.view.get((group_id, ticket.model)) if ticket.model else None
        full = (
            limits is not None
            and limits.concurrency is not None
            and counted.models.get(ticket.model, 0) >= limits.concurrency
        )
        if not full and not w.floors_of(group_id, ticket.credential, ticket.model):
            return True
    return False


def _attempt_state(settlement: Settlement) -> AttemptState:
    match settlement.state:
        case "charged" | "zero" | "unknown" as state:
            return state
        case other:
            raise ValueError(f"no such end of an attempt: {other}")


def _judge(w: _Work, ticket: Ticket, outcome: Outcome) -> None:
    """What an outcome says about its group: allowances, floors, breaker."""
    settlement = outcome.settlement
    verdict, ending = settlement.verdict, settlement.ending
    if ending is Ending.NOT_DISPATCHED:
        w.give_back(ticket.group, ticket.model, 1, ticket.tokens)
    elif settlement.used_tokens is not None:
        w.give_back(ticket.group, ticket.model, 0, ticket.tokens - settlement.used_tokens)
    w.told_left(ticket, outcome)
    after = None if outcome.retry_after_ms is None else outcome.retry_after_ms * MILLISECOND
    model = "" if settlement.account_wide else ticket.model
    kind = _FLOORS.get(verdict)
    if kind is not None:
        after = w.was.unavailable if after is None and kind != "rate_limit" else after
        w.raise_floor(ticket.group, ticket.credential, model, kind, after)
    group = w.groups.view[ticket.group]
    breaker = group.breaker
    if not settlement.lease.generation == ticket.generation == breaker.generation:
        return
    if breaker.state is BreakerState.HALF_OPEN and breaker.probe != ticket.ticket_id:
        return
    w.put_breaker(ticket.group, judged(breaker, group.limits, verdict, ending, w.now))


def _decide(w: _Work, event: Decide) -> Answers:
    group = w.groups.view.get(event.group)
    if group is not None:
        breaker = group.breaker
        if breaker.state is BreakerState.HALF_OPEN and (breaker.probe, breaker.generation) == (
            event.ticket,
            event.generation,
        ):
            w.put_breaker(event.group, closed(breaker, group.limits))
    return _NOTHING


def _abandon(w: _Work, event: Abandon) -> Answers:
    groups: dict[str, None] = {}
    for ticket_id in event.tickets:
        ticket = w.tickets.view.get(ticket_id)
        if ticket is not None and ticket.state == "quarantined":
            continue
        if ticket is not None:
            w.tickets.drop(ticket_id)
            if ticket.state != "queued":
                groups[ticket.group] = None
                w.give_back(ticket.group, ticket.model, 1, ticket.tokens)
                breaker = w.groups.view[ticket.group].breaker
                if breaker.state is BreakerState.HALF_OPEN and breaker.probe == ticket_id:
                    w.put_breaker(ticket.group, handed_on(breaker))
            if ticket.state == "active":
                w.end(ticket, "zero")
        if event.tombstone and ticket_id not in w.attempts.view:
            w.attempts.put(ticket_id, Attempt(state="zero"))
    return Answers(groups=tuple(sorted(groups)))


# ------------------------------------------------------------------ owners


def _renew(w: _Work, event: Renew) -> Answers:
    expires = w.now + event.ttl_ms * MILLISECOND
    lives: int | None = None
    if event.first:
        owners = w.owners.view
        if owners and not any(until > w.now for until in owners.values()) and w.reclaim_not_before < w.now:
            # Nobody was heard of: it may have been the store that was away.
            held = {ticket.owner for ticket in w.tickets.view.values()}
            if any(owner in owners for owner in held):
                w.reclaim_not_before = expires
        if event.owner not in w.owners.view:
            w.owners.put(event.owner, expires)
        lives = w.owners.view[event.owner]
    elif w.fresh(event.owner):
        w.owners.put(event.owner, expires)
        lives = expires
    w.owners.put(event.process, expires)
    return Answers(lives_ms=None if lives is None else _to_ms(lives - w.now))


def _bury(w: _Work, event: Bury) -> Answers:
    buried = set(event.owners)
    for owner in buried:
        if owner in w.owners.view:
            w.owners.drop(owner)
    for ticket in list(w.tickets.view.values()):
        if ticket.owner in buried and ticket.state == "queued":
            w.tickets.drop(ticket.ticket_id)
    if buried and not any(
        ticket.owner in w.owners.view and not w.fresh(ticket.owner) for ticket in w.tickets.view.values()
    ):
        w.reclaim_not_before = w.now
    return Answers(groups=_groups_of(t for t in w.tickets.view.values() if t.owner in buried))


def _groups_of(tickets: Iterable[Ticket]) -> tuple[str, ...]:
    return tuple(sorted({ticket.group for ticket in tickets}))


def _overdue(w: _Work) -> Answers:
    held = {ticket.owner for ticket in w.tickets.view.values()}
    for owner, until in list(w.owners.view.items()):
        if until < w.now - _DAY and owner not in held:
            w.owners.drop(owner)
    for key, floor in list(w.floors.view.items()):
        if floor.until < w.now - _DAY:
            w.floors.drop(key)
    for ticket in list(w.tickets.view.values()):
        if ticket.state == "queued" and w.dead(ticket.owner):
            w.tickets.drop(ticket.ticket_id)
    due = {ticket.group for ticket in w.tickets.view.values() if _is_due(w, ticket)}
    due |= {
        group_id
        for group_id, group in w.groups.view.items()
        if group.breaker.state is BreakerState.OPEN
        and group.breaker.cooldown_until is not None
        and group.breaker.cooldown_until <= w.now
    }
    return Answers(groups=tuple(sorted(due)))


def _is_due(w: _Work, ticket: Ticket) -> bool:
    if ticket.state == "queued":
        return ticket.queue_deadline + _OVERDUE < w.now
    ends = (ticket.grant_expires_at, ticket.hard_deadline, ticket.quarantined_until)
    return w.dead(ticket.owner) or any(end is not None and end <= w.now for end in ends)


def _close(w: _Work, event: Close) -> Answers:
    w.closed_until = max(w.closed_until, w.now + event.for_ms * MILLISECOND)
    return _NOTHING


def _reset(w: _Work, event: Reset) -> Answers:
    group = w.groups.view.get(event.group)
    if group is None:
        return _NOTHING
    w.put_breaker(event.group, Breaker(generation=group.breaker.generation + 1))
    for key in [key for key in w.floors.view if key[0] == event.group]:
        w.floors.drop(key)
    return Answers(groups=(event.group,))


# ------------------------------------------------------------------ configuration


def _configure(w: _Work, event: Configure) -> Answers:
    seen: dict[str, int] = {}
    for group_id in sorted(event.groups):
        given = event.groups[group_id]
        # Whether a limit is the built-in one, and which endpoints there are, is no limit.
        bare = replace(given, concurrency_is_default=False, endpoints=())
        version = seen[f"group {group_id}"] = _seen(w, f"group {group_id}", (event.revision, bare))
        known = w.groups.view.get(group_id)
        if known is None:
            w.groups.put(group_id, Group(settings=given, version=version, limits=limits_of(given)))
        elif known.version < version:
            w.groups.put(group_id, replace(known, settings=given, version=version, limits=limits_of(given)))
        else:
            continue
        _configure_allowances(w, group_id, given)
    endpoints = {e: group_id for group_id, given in event.groups.items() for e in given.endpoints or (group_id,)}
    for endpoint in sorted(endpoints):
        subject = f"endpoint {endpoint}"
        version = seen[subject] = _seen(w, subject, (event.revision, endpoints[endpoint]))
        if version == _newest(w, subject):
            _move(w, endpoint, endpoints[endpoint])
    other = {subject.split(" ", 1)[1] for subject, version in seen.items() if _newest(w, subject) > version}
    return Answers(groups=tuple(sorted(other)))


def _seen(w: _Work, subject: str, given: object) -> int:
    """The version of these settings: what was first seen last is in force."""
    key = (subject, msgspec.json.encode(given, order="deterministic"))
    if key not in w.versions.view:
        w.versions.put(key, len(w.versions.view) + 1)
    return w.versions.view[key]


def _newest(w: _Work, subject: str) -> int:
    return max(version for (of, _), version in w.versions.view.items() if of == subject)


def limits_of(given: GroupSettings) -> BreakerLimits:
    return BreakerLimits(
        concurrency=given.concurrency,
        failure_threshold=given.failure_threshold,
        failure_window=microseconds(given.failure_window_s),
        first_cooldown=microseconds(given.first_cooldown_s),
        longest_cooldown=microseconds(given.longest_cooldown_s),
    )


def _configure_allowances(w: _Work, group_id: str, given: GroupSettings) -> None:
    """New buckets are full; one that is there already keeps what it holds, up to its new size."""
    wanted = given.allowances
    for key in [key for key in w.allowances.view if key[0] == group_id and key[1] not in wanted]:
        w.allowances.drop(key)
    for model, limits in wanted.items():
        known = w.allowances.view.get((group_id, model), Allowance()).at(w.now)
        bucket = Allowance(
            concurrency=limits.concurrency,
            requests_per_minute=limits.requests_per_minute,
            tokens_per_minute=limits.tokens_per_minute,
            requests_left=_size(limits.requests_per_minute, known.requests_per_minute, known.requests_left),
            tokens_left=_size(limits.tokens_per_minute, known.tokens_per_minute, known.tokens_left),
            filled_at=w.now,
        )
        w.allowances.put((group_id, model), bucket)


def _size(per_minute: int | None, was: int | None, left: float) -> float:
    if per_minute is None:
        return 0.0
    return float(per_minute) if was is None else min(float(per_minute), left)


def _move(w: _Work, endpoint: str, group_id: str) -> None:
    """The endpoint is of this group from now on, and so are its live tickets and what was said of its credentials."""
    left = w.endpoints.view.get(endpoint)
    if left == group_id:
        return
    w.endpoints.put(endpoint, group_id)
    if left is None:
        return
    group, old = w.groups.view[group_id], w.groups.view[left]
    w.groups.put(group_id, replace(group, next_number=max(group.next_number, old.next_number)))
    for ticket in list(w.tickets.view.values()):
        if ticket.endpoint == endpoint and ticket.group == left:
            # A generation of the other group's breaker means nothing here.
            generation = None if ticket.generation is None else 0
            w.tickets.put(ticket.ticket_id, replace(ticket, group=group_id, generation=generation))
    # A group that nothing belongs to any more keeps nothing back: what comes to it later brings its floors along.
    deserted = left not in w.endpoints.view.values()
    for key, floor in list(w.floors.view.items()):
        if key[0] == left:
            there = w.floors.view.get((group_id, *key[1:]))
            until = floor.until if there is None else max(there.until, floor.until)
            w.floors.put((group_id, *key[1:]), replace(there or floor, until=until))
            if deserted:
                w.floors.drop(key)


# ------------------------------------------------------------------ what is only read


def fenced(state: State, key_id: uuid.UUID, fence: Fence) -> bool:
    """A newer executor of the run has been seen."""
    return _is_fenced(state.fences, key_id, fence)


def dead(state: State, now: int, owners: Iterable[uuid.UUID]) -> set[uuid.UUID]:
    """Which of these have lapsed or were buried, and are not merely unheard."""
    work = _Work(state, now)
    return {owner for owner in owners if work.dead(owner)}


def waits(state: State, now: int, debits: Iterable[str]) -> dict[str, Waiting]:
    """Why these debits wait, where they do."""
    work = _Work(state, now)
    wanted = set(debits)
    found = {}
    for ticket in state.tickets.values():
        if ticket.state == "queued" and ticket.debit_id in wanted:
            counted = _Occupancy(work, ticket.group)
            reason, until = _wait_reason(work, ticket, counted)
            found[ticket.debit_id] = Waiting(
                group=ticket.group,
                position=counted.ahead(ticket) + 1,
                reason=reason,
                until_s=None if until is None else _to_ms(until - now) / 1000,
            )
    return found


def occupancy(state: State, now: int) -> list[dict[str, Any]]:
    """Every group with its slots and its queue, for operators."""
    work = _Work(state, now)
    found = []
    for group_id in sorted(state.groups):
        group = state.groups[group_id]
        slots = [
            {
                "ticket_id": str(ticket.ticket_id),
                "state": ticket.state,
                "model": ticket.model,
                "attempt": ticket.attempt,
                "debit_id": ticket.debit_id,
                "owner": str(ticket.owner),
            }
            for ticket in sorted(state.tickets.values(), key=_place)
            if ticket.group == group_id
            and ticket.state != "queued"
            and (ticket.quarantined_until is None or ticket.quarantined_until > now)
        ]
        held = sum(slot["state"] == "quarantined" for slot in slots)
        until = group.breaker.cooldown_until
        is_open = group.breaker.state is BreakerState.OPEN and until is not None and until > now
        found.append(
            {
                "group": group_id,
                "concurrency": group.limits.concurrency,
                "queue_bound": group.settings.queue,
                "breaker": "half_open"
                if group.breaker.state is BreakerState.OPEN and not is_open
                else group.breaker.state.value,
                "generation": group.breaker.generation,
                "cooldown_s": (until - now) / SECOND if is_open and until is not None else None,
                "active": len(slots) - held,
                "quarantined": held,
                "queued": len(work.waiting(group_id)),
                "slots": slots,
                "floors": [
                    {
                        "credential": credential,
                        "model": model or None,
                        "cause": _CAUSES[kind],
                        "remaining_s": (floor.until - now) / SECOND,
                    }
                    for (of, credential, model, kind), floor in sorted(
                        state.floors.items(), key=lambda entry: entry[1].until
                    )
                    if of == group_id and floor.until > now
                ],
                "waiting": _queue(work, group_id),
            }
        )
    return found


def _queue(w: _Work, group_id: str) -> list[dict[str, Any]]:
    """The first of a group's queue."""
    counted = _Occupancy(w, group_id)
    first = sorted(counted.queued, key=lambda ticket: (ticket.klass, *ticket.place))[:_SHOWN]
    return [
        {
            "position": position,
            "class": ticket.klass.name.lower(),
            "model": ticket.model,
            "reason": _wait_reason(w, ticket, counted)[0],
            "key_id": str(ticket.key_id),
            "debit_id": ticket.debit_id,
        }
        for position, ticket in enumerate(first, start=1)
    ]


# ------------------------------------------------------------------ time


def moment(at: int) -> datetime:
    return _EPOCH + timedelta(microseconds=at)


def day_of(at: int, zone: str) -> date:
    return moment(at).astimezone(ZoneInfo(zone)).date()


def _to_ms(duration: int) -> int:
    """To the nearest."""
    return (duration + MILLISECOND // 2) // MILLISECOND


def _wait_ms(w: _Work, until: int, *, at_least: int = _SHORTEST_WAIT_MS) -> int:
    return max(_to_ms(until - w.now), at_least)
