"""Who occupies and who waits for a group: how much room that leaves, and why somebody waits."""

from __future__ import annotations

from typing import Final

from admission.breaker import BreakerState
from admission.core.work import Work
from admission.lease import Class
from admission.state import Ticket

#: A position is exact up to this.
_AHEAD: Final = 100


class Occupancy:
    """Who occupies and who waits for a group, counted."""

    __slots__ = (
        "active",
        "batch",
        "group",
        "group_id",
        "models",
        "quarantined",
        "quarantined_until",
        "queued",
        "ramped",
        "slots",
    )

    def __init__(self, w: Work, group_id: str) -> None:
        self.group_id = group_id
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
        #: All that occupy one, granted and quarantined ones too.
        self.slots: list[Ticket] = []
        for ticket in w.tickets.view.values():
            if ticket.group != group_id:
                continue
            if ticket.state == "queued":
                self.queued.append(ticket)
                continue
            self.slots.append(ticket)
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


def wait_reason(w: Work, ticket: Ticket, occupancy: Occupancy) -> tuple[str, int | None]:
    """Why it waits, and when a cooldown, a floor or the first quarantine ends."""
    held = w.held(ticket.group, w.floors_of(ticket.group, ticket.credential, ticket.model))
    reason = _reason(w, ticket, occupancy, None if held is None else held[1])
    if reason == "quarantine":
        return reason, occupancy.quarantined_until
    return reason, None if held is None else held[0]


def _reason(w: Work, ticket: Ticket, occupancy: Occupancy, held: str | None) -> str:
    breaker = occupancy.group.breaker
    room = occupancy.room
    allowances = w.allowances_of(ticket.group, ticket.model)
    if w.closed_until > w.now:
        return "store"
    if held is not None:
        return held
    if breaker.state is not BreakerState.CLOSED or (breaker.ramp is not None and room > 0):
        return "cooldown"
    own = w.allowances.view.get((ticket.group, ticket.model)) if ticket.model else None
    if 0 in (occupancy.group.limits.concurrency, None if own is None else own.concurrency):
        return "stopped"
    if room == 0 and breaker.ramp is None and occupancy.active < occupancy.group.limits.concurrency:
        return "quarantine"
    if room > 0:
        used = occupancy.models.get(ticket.model, 0)
        if any(name and a.concurrency is not None and used >= a.concurrency for name, a in allowances):
            return "model_capacity"
        if any(allowance.rated for _, allowance in allowances):
            return "rate"
    return "capacity"


def may_move(w: Work, group_id: str) -> bool:
    """Somebody waits whose model is not full, and whom no floor keeps back."""
    counted = Occupancy(w, group_id)
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
