"""
A state that is being changed at one instant: what is copied, who lives, and what keeps a ticket back.

The rules that change it are in the modules beside this one.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Mapping
from datetime import date
from decimal import Decimal
from typing import Generic, TypeVar

from msgspec.structs import replace

from admission.breaker import Breaker, BreakerState
from admission.clock import day_of
from admission.core.floors import CAUSES, last_of
from admission.state import (
    UNTOLD,
    Allowance,
    Attempt,
    AttemptState,
    Change,
    Charge,
    FloorKind,
    Group,
    Spent,
    State,
    Ticket,
    UnknownGroup,
)

K = TypeVar("K")
V = TypeVar("V")


class Draft(Generic[K, V]):
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


class Work:
    """A state that is being changed, at one instant."""

    __slots__ = (
        "allowances",
        "attempts",
        "changes",
        "closed_until",
        "ended",
        "endpoints",
        "fences",
        "floors",
        "groups",
        "limited",
        "now",
        "owners",
        "paces",
        "reclaim_not_before",
        "session_budgets",
        "sessions",
        "spent",
        "tickets",
        "unknown",
        "versions",
        "was",
    )

    def __init__(self, was: State, now: int) -> None:
        self.was = was
        self.now = now
        self.closed_until = was.closed_until
        self.changes = was.changes
        self.reclaim_not_before = was.reclaim_not_before
        self.groups = Draft(was.groups)
        self.allowances = Draft(was.allowances)
        self.floors = Draft(was.floors)
        self.endpoints = Draft(was.endpoints)
        self.versions = Draft(was.versions)
        self.tickets = Draft(was.tickets)
        self.attempts = Draft(was.attempts)
        self.ended = Draft(was.ended)
        self.owners = Draft(was.owners)
        self.fences = Draft(was.fences)
        self.paces = Draft(was.paces)
        self.limited = Draft(was.limited)
        self.spent = Draft(was.spent)
        self.sessions = Draft(was.sessions)
        self.session_budgets = Draft(was.session_budgets)
        self.unknown = Draft(was.unknown)

    def state(self) -> State:
        was = self.was
        return State(
            zone=was.zone,
            ahead=was.ahead,
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
            limited=self.limited.view,
            spent=self.spent.view,
            sessions=self.sessions.view,
            session_budgets=self.session_budgets.view,
            unknown=self.unknown.view,
            closed_until=self.closed_until,
            paces=self.paces.view,
            changes=self.changes,
        )

    def day(self, at: int) -> date:
        """In the declared zone, by the server's clock."""
        return day_of(at - self.was.ahead, self.was.zone)

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

    def put_breaker(self, group: str, breaker: Breaker, cause: str) -> None:
        """Where it has opened, waiters that do not wait for it, or cannot outlive it, are let go."""
        was = self.groups.view[group]
        if breaker is was.breaker:
            return
        self.groups.put(group, replace(was, breaker=breaker))
        if breaker.state is not was.breaker.state:
            self._tell(group, was.breaker.state, breaker, cause)
        until = breaker.cooldown_until
        if breaker.state is BreakerState.OPEN and was.breaker.state is not BreakerState.OPEN and until is not None:
            for ticket in self.waiting(group):
                if not ticket.waits_for_cooldown or ticket.queue_deadline <= until:
                    self.tickets.drop(ticket.ticket_id)

    def _tell(self, group: str, was: BreakerState, breaker: Breaker, cause: str) -> None:
        is_open = breaker.state is BreakerState.OPEN
        change = Change(
            group=group,
            was=was,
            became=breaker.state,
            generation=breaker.generation,
            cause=cause,
            at=self.now,
            until=breaker.cooldown_until if is_open else None,
        )
        self.changes = (*self.changes, change)
        known = self.groups.view[group]
        if breaker.state is BreakerState.CLOSED:
            self.groups.put(group, replace(known, open_since=None))
        elif is_open:
            since = self.now if was is BreakerState.CLOSED else known.open_since
            opened = replace(known, opened_total=known.opened_total + 1, opened_for=cause, open_since=since)
            self.groups.put(group, opened)

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

    # -------------------------------------------------------------- floors

    def floors_of(self, group: str, credential: str, model: str) -> list[tuple[int, FloorKind]]:
        """When those end that are in force for a credential and model, and of what kind they are."""
        view = self.floors.view
        if not view:
            return []
        names = (model, "") if model else ("",)
        found = ((view.get((group, credential, name, kind)), kind) for kind in CAUSES for name in names)
        return [(floor.until, kind) for floor, kind in found if floor is not None and floor.until > self.now]

    def held(self, group: str, floors: Iterable[tuple[int, FloorKind]]) -> tuple[int, str] | None:
        """Until when, and why, what is under these floors gets no slot of a group: by what ends last."""
        breaker = self.groups.view[group].breaker
        until = breaker.cooldown_until if breaker.state is BreakerState.OPEN else None
        cooling = None if until is None else (until, "cooldown")
        floor = last_of(floors)
        if floor is None or cooling is None:
            return floor or cooling
        return floor if floor[0] >= cooling[0] else cooling

    # ------------------------------------------------------------- endings

    def end(self, ticket: Ticket, state: AttemptState, charge: Charge = UNTOLD) -> bool:
        """The single settlement of an attempt, or the one correction of an unknown one. False: it had its end."""
        was = self.attempts.view.get(ticket.ticket_id)
        if was is not None:
            return self.correct(ticket.ticket_id, state, charge)
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
        assert ticket.granted_at is not None
        day = self.day(ticket.granted_at)
        bound = (charge.bound or ticket.reserved or Decimal(0)) if state == "unknown" else Decimal(0)
        if state == "unknown":
            self.unknown.put(ticket.ticket_id, (ticket.key_id, day, ticket.session, bound))
        usd = charge.usd if state == "charged" and charge.usd is not None else Decimal(0)
        self._spend(ticket.key_id, day, ticket.session, usd, bound, charge.tokens)
        debit = (ticket.key_id, ticket.debit_id)
        self.ended.put(debit, max(self.ended.view.get(debit, 0), ticket.attempt))
        return True

    def correct(self, ticket_id: uuid.UUID, state: AttemptState, charge: Charge) -> bool:
        was = self.attempts.view.get(ticket_id)
        if was is None or was.state != "unknown" or state == "unknown":
            return False
        self.attempts.put(ticket_id, replace(was, state=state, corrected=True))
        key_id, day, session, bound = self.unknown.view[ticket_id]
        self.unknown.drop(ticket_id)
        usd = charge.usd if state == "charged" and charge.usd is not None else Decimal(0)
        self._spend(key_id, day, session, usd, -bound, charge.tokens)
        return True

    def _spend(
        self, key_id: uuid.UUID, day: date, session: str | None, usd: Decimal, unknown: Decimal, tokens: int
    ) -> None:
        def more(was: Spent) -> Spent:
            return Spent(usd=was.usd + usd, unknown=was.unknown + unknown, tokens=was.tokens + tokens)

        self.spent.put((key_id, day), more(self.spent.view.get((key_id, day), Spent())))
        if session is not None:
            self.sessions.put((key_id, session), more(self.sessions.view.get((key_id, session), Spent())))

    def lose(self, ticket: Ticket) -> None:
        """Nobody told its end: unknown, unless it had one."""
        if ticket.ticket_id not in self.attempts.view:
            self.end(ticket, "unknown")
