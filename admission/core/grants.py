"""Who is granted the slots that are free, and in what order."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Final

from msgspec.structs import replace

from admission.breaker import BreakerState
from admission.core.occupancy import Occupancy
from admission.core.work import Work
from admission.lease import Class
from admission.state import Acquire, Allowance, Ticket

#: Interactive grants in a row, made while batch waited, after which batch has a turn.
BATCH_CREDIT: Final = 9


class Round:
    """One round of grants in a group."""

    def __init__(self, w: Work, group_id: str, occupancy: Occupancy, candidates: Iterable[Ticket]) -> None:
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


def choose(w: Work, event: Acquire, new: list[Ticket]) -> tuple[list[Ticket], list[int]]:
    """Grants what fits. Answers the tickets as they are granted, and how long until each that a rate stopped fits."""
    occupancy = Occupancy(w, event.group)
    if w.closed_until > w.now or not (occupancy.queued or new) or occupancy.grants == 0:
        return [], []
    in_time = (ticket for ticket in occupancy.queued if ticket.queue_deadline > w.now)
    turn = Round(w, event.group, occupancy, [*in_time, *new])
    granted = []
    for ticket in turn.run():
        own = ticket.owner == event.owner
        given = replace(
            ticket,
            state="active" if own else "granted",
            generation=occupancy.group.breaker.generation,
            granted_at=w.now,
            grant_expires_at=None if own else w.now + w.was.unconfirmed_grant,
            hard_deadline=hard_deadline(w, ticket) if own else None,
        )
        w.tickets.put(ticket.ticket_id, given)
        granted.append(given)
    if granted and occupancy.group.breaker.state is BreakerState.HALF_OPEN:
        group = w.groups.view[event.group]
        w.groups.put(event.group, replace(group, breaker=replace(group.breaker, probe=granted[0].ticket_id)))
    return granted, turn.stops


def hard_deadline(w: Work, ticket: Ticket) -> int:
    latest = w.now + ticket.execution_limit
    return latest if ticket.caller_deadline is None else min(latest, ticket.caller_deadline + ticket.isolation)
