"""What is told of a ticket: granted, queued, ended, or held back and until when."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Final

from admission.clock import day_of, moment, to_ms
from admission.contract import TicketRow
from admission.core.fences import is_fenced
from admission.core.floors import last_of, out_of_patience
from admission.core.occupancy import Occupancy, wait_reason
from admission.core.waits import expected_ms
from admission.core.work import Work
from admission.lease import Demand
from admission.state import FloorKind, Ticket

_SHORTEST_WAIT_MS: Final = 100


def chosen_row(w: Work, owner: uuid.UUID, ticket: Ticket) -> TicketRow:
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


def _granted_row(w: Work, ticket: Ticket) -> TicketRow:
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
        remaining_ms=to_ms(ticket.hard_deadline - w.now),
    )


def _is_probe(w: Work, ticket: Ticket) -> bool:
    return w.groups.view[ticket.group].breaker.probe == ticket.ticket_id


def _is_judged(w: Work, ticket: Ticket) -> bool:
    return (
        _is_probe(w, ticket)
        or w.groups.view[ticket.group].breaker.ramp is not None
        or any((ticket.group, model) in w.allowances.view for model in (ticket.model, ""))
    )


def replayed_row(w: Work, demand: Demand, occupancy: Occupancy, *, looked: bool = True) -> TicketRow:
    """By the state of its ticket. `looked`: for its position, too."""
    ticket = w.tickets.view[demand.ticket_id]
    match ticket.state:
        case "active":
            return _granted_row(w, ticket)
        case "quarantined":
            return TicketRow(ticket.ticket_id, "ended")
        case "queued" | "granted":
            reason, until = wait_reason(w, ticket, occupancy)
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
                wait_ms=None if until is None else ms_until(w, until, at_least=0),
                expected_ms=expected_ms(w, ticket, occupancy, reason, until) if looked else None,
            )


def missing_row(w: Work, demand: Demand) -> TicketRow:
    if demand.fence is not None and is_fenced(w.fences.view, demand.key_id, demand.fence):
        return TicketRow(demand.ticket_id, "owner_fence")
    floors = w.floors_of(demand.group, demand.credential, demand.model)
    held = w.held(demand.group, floors) if demand.group in w.groups.view else last_of(floors)
    return held_back_row(w, demand.ticket_id, floors, held)


def held_back_row(
    w: Work,
    ticket_id: uuid.UUID,
    floors: Sequence[tuple[int, FloorKind]],
    held: tuple[int | None, str] | None,
) -> TicketRow:
    until, cause = held or (None, None)
    wait_ms = None if until is None else ms_until(w, until)
    out = last_of(out_of_patience(floors))
    if out is not None:
        return TicketRow(ticket_id, "provider_unavailable", wait_reason=out[1], wait_ms=wait_ms)
    return TicketRow(ticket_id, "cooldown", wait_reason=cause, wait_ms=wait_ms)


def ms_until(w: Work, until: int, *, at_least: int = _SHORTEST_WAIT_MS) -> int:
    return max(to_ms(until - w.now), at_least)
