"""What is asked for, before anything is granted: each demand is refused, or is a replay, or becomes a ticket."""

from __future__ import annotations

import uuid
from decimal import Decimal

from admission.breaker import BreakerState
from admission.clock import MILLISECOND, microseconds
from admission.contract import TicketRow
from admission.core.fences import is_fenced, raise_fences
from admission.core.floors import out_of_patience
from admission.core.keys import Rooms
from admission.core.rows import held_back_row, ms_until
from admission.core.work import Work
from admission.lease import Demand
from admission.state import Acquire, Element, Ticket


def sift(w: Work, event: Acquire) -> tuple[dict[uuid.UUID, TicketRow], list[Ticket]]:
    """The refusals, and tickets for those that are none. A replay is in neither."""
    refusals: dict[uuid.UUID, TicketRow] = {}
    new: list[Ticket] = []
    if not event.elements:
        return refusals, new
    raise_fences(w, event.elements)
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
    rooms = Rooms(w)
    for asked in rest:
        demand = asked.demand
        debit = (demand.key_id, demand.debit_id)
        last = max(highest.get(debit, 0), w.ended.view.get(debit, 0))
        duplicate = demand.ticket_id in repeated or debit in live or last >= demand.attempt
        refusal = _refusal(w, event.group, asked, duplicate=duplicate) or rooms.refusal(demand)
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


def _refusal(w: Work, group_id: str, asked: Element, *, duplicate: bool) -> TicketRow | None:
    """Why an element can be neither granted nor queued; None where it can."""
    demand = asked.demand
    ticket_id = demand.ticket_id
    if demand.fence is not None and is_fenced(w.fences.view, demand.key_id, demand.fence):
        return TicketRow(ticket_id, "owner_fence")
    if duplicate:
        return TicketRow(ticket_id, "duplicate_debit")
    if asked.caller_ms is not None and asked.caller_ms <= 0:
        return TicketRow(ticket_id, "deadline_exceeded")
    breaker = w.groups.view[group_id].breaker
    floors = w.floors_of(group_id, demand.credential, demand.model)
    held = w.held(group_id, floors)
    if out_of_patience(floors):
        return held_back_row(w, ticket_id, floors, held)
    for _, allowance in w.allowances_of(group_id, demand.model):
        if allowance.tokens_per_minute is not None and demand.tokens > allowance.tokens_per_minute:
            return TicketRow(ticket_id, "too_large")
    if w.closed_until > w.now:
        return TicketRow(ticket_id, "store_closed", wait_ms=ms_until(w, w.closed_until, at_least=0))
    if held is None and (breaker.state is not BreakerState.HALF_OPEN or breaker.probe is None):
        return None
    if demand.waits_for_cooldown and (held is None or held[0] <= _queue_deadline(w, asked)):
        return None
    return held_back_row(w, ticket_id, floors, held or (None, "cooldown"))


def _queue_deadline(w: Work, asked: Element) -> int:
    patience = asked.queue_ms if asked.caller_ms is None else min(asked.queue_ms, asked.caller_ms)
    return w.now + patience * MILLISECOND


def _reserved(demand: Demand) -> Decimal | None:
    if demand.reserved_usd is not None or demand.session_id is None:
        return demand.reserved_usd
    return demand.most_usd


def _ticket(w: Work, event: Acquire, asked: Element, number: int) -> Ticket:
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
        reserved=_reserved(demand),
        session=demand.session_id,
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
