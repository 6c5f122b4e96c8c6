"""Rescan: an owner confirms what others granted to it, and hears of the rest."""

from __future__ import annotations

from msgspec.structs import replace

from admission.breaker import BreakerState
from admission.core.grants import hard_deadline
from admission.core.occupancy import Occupancy
from admission.core.reconcile import back_in_queue
from admission.core.rows import missing_row, replayed_row
from admission.core.work import Work
from admission.state import Answers, Rescan, Ticket


def rescan(w: Work, event: Rescan) -> Answers:
    if w.fresh(event.owner):
        for demand in event.demands:
            ticket = w.tickets.view.get(demand.ticket_id)
            if ticket is None or ticket.owner != event.owner or ticket.state != "granted":
                continue
            assert ticket.grant_expires_at is not None
            if ticket.grant_expires_at > w.now:
                w.tickets.put(ticket.ticket_id, _confirmed(w, ticket))
    for demand in event.demands:
        ticket = w.tickets.view.get(demand.ticket_id)
        if (
            ticket is not None
            and ticket.owner == event.owner
            and ticket.state == "queued"
            and _lasts_too_long(w, ticket)
        ):
            w.tickets.drop(ticket.ticket_id)
    occupancies: dict[str, Occupancy] = {}
    rows = []
    for demand in event.demands:
        ticket = w.tickets.view.get(demand.ticket_id)
        if ticket is None or ticket.owner != event.owner:
            rows.append(missing_row(w, demand))
            continue
        if ticket.group not in occupancies:
            occupancies[ticket.group] = Occupancy(w, ticket.group)
        rows.append(replayed_row(w, demand, occupancies[ticket.group]))
    return Answers(tickets=tuple(rows))


def _lasts_too_long(w: Work, ticket: Ticket) -> bool:
    """It would not wait for the end of a cooldown or a floor. Such a ticket is here because it came back after it."""
    breaker = w.groups.view[ticket.group].breaker
    until = breaker.cooldown_until
    is_open = breaker.state is BreakerState.OPEN and until is not None and until > w.now
    holds = [(until, True)] if is_open and until is not None else []
    holds += [
        (until, kind == "rate_limit") for until, kind in w.floors_of(ticket.group, ticket.credential, ticket.model)
    ]
    return any(
        not may_wait or not ticket.waits_for_cooldown or ticket.queue_deadline < until for until, may_wait in holds
    )


def _confirmed(w: Work, ticket: Ticket) -> Ticket:
    """A grant from before its breaker opened, or with a floor put under its model since, goes back to its place."""
    if ticket.generation != w.groups.view[ticket.group].breaker.generation or w.floors_of(
        ticket.group, ticket.credential, ticket.model
    ):
        return back_in_queue(ticket)
    return replace(ticket, state="active", grant_expires_at=None, hard_deadline=hard_deadline(w, ticket))
