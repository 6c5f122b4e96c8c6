"""Acquire: the group is brought up to now, demands are judged, what fits is granted, the rest is queued."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Final

from msgspec.structs import replace

from admission.breaker import BreakerState
from admission.contract import TicketRow
from admission.core.demands import sift
from admission.core.grants import choose
from admission.core.keys import use
from admission.core.occupancy import Occupancy
from admission.core.reconcile import reconcile
from admission.core.rows import chosen_row, ms_until, replayed_row
from admission.core.waits import place_in_ms
from admission.core.work import Work
from admission.lease import Class
from admission.state import Acquire, Answers, Ticket

_FULL: Final = "queue_full"


def acquire(w: Work, event: Acquire) -> Answers:
    w.group(event.group)
    reconcile(w, event.group)
    refusals, new = sift(w, event)
    chosen, stops = choose(w, event, new)
    _enqueue(w, event, new, {ticket.ticket_id for ticket in chosen}, refusals)
    chosen = _granted_at_once(w, event.group, chosen)
    demands = {asked.demand.ticket_id: asked.demand for asked in event.elements}
    use(w, (demands[ticket.ticket_id] for ticket in new if ticket.ticket_id in w.tickets.view))
    after = Occupancy(w, event.group)
    full = [ticket_id for ticket_id, row in refusals.items() if row.answer == _FULL]
    if full:
        place_in = place_in_ms(w, event.group, after)
        refusals |= {ticket_id: TicketRow(ticket_id, _FULL, expected_ms=place_in) for ticket_id in full}
    rows = [chosen_row(w, event.owner, ticket) for ticket in chosen]
    told = {ticket.ticket_id for ticket in chosen if ticket.owner == event.owner}
    for asked in event.elements:
        ticket_id = asked.demand.ticket_id
        if ticket_id not in told:
            told.add(ticket_id)
            rows.append(refusals.get(ticket_id) or replayed_row(w, asked.demand, after, looked=False))
    if w.changes != w.was.changes:
        rows.append(TicketRow(None, "breaker"))
    if after.queued:
        rows.append(TicketRow(None, "next", wait_ms=_next_event_ms(w, event.group, stops)))
    return Answers(tickets=tuple(rows))


def _enqueue(
    w: Work, event: Acquire, new: Sequence[Ticket], granted: set[uuid.UUID], refusals: dict[uuid.UUID, TicketRow]
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
            refusals[ticket.ticket_id] = TicketRow(ticket.ticket_id, _FULL)
            continue
        w.tickets.put(ticket.ticket_id, ticket)
        waiting += 1
        batch += ticket.klass is Class.BATCH
        enqueued += 1
    if enqueued:
        w.groups.put(event.group, replace(group, next_number=group.next_number + len(new)))


def _granted_at_once(w: Work, group_id: str, chosen: list[Ticket]) -> list[Ticket]:
    """Those that never waited come before whoever comes next, without using up a number."""
    first = w.groups.view[group_id].next_number
    placed = [replace(ticket, number=min(ticket.number, first - 1)) for ticket in chosen]
    for ticket in placed:
        w.tickets.put(ticket.ticket_id, ticket)
    return placed


def _next_event_ms(w: Work, group_id: str, stops: Sequence[int]) -> int | None:
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
    return ms_until(w, min(events), at_least=0) if events else None
