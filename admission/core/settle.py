"""How tickets end: settled by their outcome, or taken back."""

from __future__ import annotations

from msgspec.structs import replace

from admission.breaker import BreakerState, handed_on
from admission.clock import microseconds
from admission.contract import SettledRow
from admission.core.judge import judge
from admission.core.occupancy import may_move
from admission.core.waits import keep_pace
from admission.core.work import Work
from admission.lease import Ending, Settlement
from admission.state import Abandon, Answers, Attempt, AttemptState, Settle, Ticket


def settle(w: Work, event: Settle) -> Answers:
    found: list[Ticket | None] = []
    applied: list[bool] = []
    held: dict[str, list[int]] = {}
    for outcome in event.elements:
        settlement = outcome.settlement
        ticket = w.tickets.view.get(settlement.lease.ticket_id)
        if ticket is not None and ticket.state not in ("active", "quarantined"):
            ticket = None
        found.append(ticket)
        state = _attempt_state(settlement)
        if ticket is None:
            applied.append(w.correct(settlement.lease.ticket_id, state, outcome.charge))
            continue
        if settlement.ending is Ending.UNCERTAIN:
            assert ticket.hard_deadline is not None
            # A window that began anew when the clock leapt is not cut short.
            until = max(ticket.quarantined_until or 0, ticket.hard_deadline + ticket.isolation)
            if settlement.cancel_confirms_after_s is not None:
                until = min(until, w.now + microseconds(settlement.cancel_confirms_after_s))
            waits = replace(ticket, state="quarantined", quarantined_until=until, reserved=None)
            w.tickets.put(ticket.ticket_id, waits)
        else:
            w.tickets.drop(ticket.ticket_id)
            if ticket.ticket_id not in w.attempts.view:
                assert ticket.granted_at is not None
                held.setdefault(ticket.group, []).append(w.now - ticket.granted_at)
        applied.append(w.end(ticket, state, outcome.charge))
    if event.judged:
        for outcome, ticket, new in zip(event.elements, found, applied, strict=True):
            # A replay must not count a failure twice.
            if ticket is not None and new:
                judge(w, ticket, outcome)
    for of, ended in held.items():
        if may_move(w, of):
            keep_pace(w, of, ended)
    rows: list[SettledRow] = []
    for outcome, ticket, new in zip(event.elements, found, applied, strict=True):
        ticket_id = outcome.settlement.lease.ticket_id
        attempt = w.attempts.view.get(ticket_id)
        group_id = ticket.group if ticket is not None else None if attempt is None else attempt.group
        waiters = group_id is not None and may_move(w, group_id)
        untold = event.judged and any(applied) and bool(w.changes) and not rows
        rows.append(
            SettledRow(ticket_id, applied=new, counters=None, group_id=group_id, waiters=waiters, untold=untold)
        )
    return Answers(settled=tuple(rows))


def _attempt_state(settlement: Settlement) -> AttemptState:
    match settlement.state:
        case "charged" | "zero" | "unknown" as state:
            return state
        case other:
            raise ValueError(f"no such end of an attempt: {other}")


def abandon(w: Work, event: Abandon) -> Answers:
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
                    w.put_breaker(ticket.group, handed_on(breaker), "abandoned")
            if ticket.state == "active":
                w.end(ticket, "zero")
        if event.tombstone and ticket_id not in w.attempts.view:
            w.attempts.put(ticket_id, Attempt(state="zero"))
    return Answers(groups=tuple(sorted(groups)))
