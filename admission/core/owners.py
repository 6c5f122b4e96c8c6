"""Who lives, and what becomes due by time alone."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from admission.breaker import BreakerState
from admission.clock import MILLISECOND, SECOND, to_ms
from admission.core.reconcile import OVERDUE
from admission.core.work import Work
from admission.state import Answers, Bury, Renew, Ticket

_DAY: Final = 86_400 * SECOND
#: So many changes of breakers are taken note of at once.
_TAKEN: Final = 100


def renew(w: Work, event: Renew) -> Answers:
    expires = w.now + event.ttl_ms * MILLISECOND
    lives: int | None = None
    w.reclaim_not_before = min(w.reclaim_not_before, expires)
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
    return Answers(lives_ms=None if lives is None else to_ms(lives - w.now))


def bury(w: Work, event: Bury) -> Answers:
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


def overdue(w: Work) -> Answers:
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


def take(w: Work) -> Answers:
    taken, w.changes = w.changes[:_TAKEN], w.changes[_TAKEN:]
    return Answers(changes=taken)


def _is_due(w: Work, ticket: Ticket) -> bool:
    if ticket.state == "queued":
        return ticket.queue_deadline + OVERDUE < w.now
    ends = (ticket.grant_expires_at, ticket.hard_deadline, ticket.quarantined_until)
    return w.dead(ticket.owner) or any(end is not None and end <= w.now for end in ends)
