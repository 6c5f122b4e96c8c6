"""Brings a group up to now: deadlines that have passed, owners that are dead, quarantine that is over, the breaker."""

from __future__ import annotations

from typing import Final

from msgspec.structs import replace

from admission.breaker import BreakerState, elapsed
from admission.clock import SECOND
from admission.core.work import Work
from admission.state import Ticket

#: How long a waiter is left to its owner, who should end it at its deadline.
OVERDUE: Final = 2 * SECOND


def reconcile(w: Work, group: str) -> None:
    """Brings a group up to now."""
    now = w.now
    for ticket in [t for t in w.tickets.view.values() if t.group == group]:
        match ticket.state:
            case "queued":
                if ticket.queue_deadline + OVERDUE < now:
                    w.tickets.drop(ticket.ticket_id)
            case "granted":
                assert ticket.grant_expires_at is not None
                expired = ticket.grant_expires_at <= now
                if w.dead(ticket.owner) or (expired and ticket.queue_deadline + OVERDUE < now):
                    w.tickets.drop(ticket.ticket_id)
                elif expired:
                    w.tickets.put(ticket.ticket_id, back_in_queue(ticket))
            case "active":
                _reconcile_active(w, ticket)
            case "quarantined":
                _reconcile_quarantined(w, ticket)
    found = w.groups.view[group]
    if found.breaker.state is not BreakerState.CLOSED:
        probe = None if found.breaker.probe is None else w.tickets.view.get(found.breaker.probe)
        lives = probe is not None and probe.state in ("granted", "active")
        cause = "cooldown_over" if found.breaker.state is BreakerState.OPEN else "probe_lost"
        w.put_breaker(group, elapsed(found.breaker, found.limits, now, probe_lives=lives), cause)


def _reconcile_active(w: Work, ticket: Ticket) -> None:
    assert ticket.hard_deadline is not None
    dead = w.dead(ticket.owner)
    if not dead and ticket.hard_deadline > w.now:
        return
    # A passed deadline has the full window from now: a clock that leapt must not free what still runs.
    until = max(ticket.hard_deadline, w.now) + ticket.isolation
    held = replace(ticket, state="quarantined", quarantined_until=until)
    if dead:
        w.lose(held)
        held = replace(held, reserved=None)
    w.tickets.put(ticket.ticket_id, held)
    _reconcile_quarantined(w, held)


def _reconcile_quarantined(w: Work, ticket: Ticket) -> None:
    assert ticket.quarantined_until is not None
    if ticket.quarantined_until <= w.now:
        w.tickets.drop(ticket.ticket_id)
        w.lose(ticket)


def back_in_queue(ticket: Ticket) -> Ticket:
    return replace(ticket, state="queued", generation=None, granted_at=None, grant_expires_at=None)
