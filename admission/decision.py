"""
What admission decides, as a pure function: `decide(state, event, now)` answers the state after the event.

The SQL functions do the same under a row lock. This is their oracle, the heart of the memory store, and what the
simulation drives; one differential test runs the same events through both. Nothing here waits, reads a clock or
touches what it was given: a state that was passed in stays as it was.

Times and durations are whole microseconds on the store's clock, which is the UNIX time.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable
from typing import Any, Final

from admission.breaker import BreakerState
from admission.clock import SECOND, moment, to_ms
from admission.core.acquire import acquire
from admission.core.confirm import rescan
from admission.core.fences import is_fenced
from admission.core.floors import CAUSES
from admission.core.groups import close, configure, reset
from admission.core.judge import first_content
from admission.core.keys import limit_key, limit_session
from admission.core.occupancy import Occupancy, wait_reason
from admission.core.owners import bury, overdue, renew, take
from admission.core.settle import abandon, settle
from admission.core.waits import expected_ms
from admission.core.work import Work
from admission.lease import Fence, Waiting
from admission.state import (
    Abandon,
    Acquire,
    Answers,
    Bury,
    Close,
    Configure,
    Decide,
    Event,
    LimitKey,
    LimitSession,
    Overdue,
    Renew,
    Rescan,
    Reset,
    Settle,
    State,
    Take,
)

#: Operators see so many of who waits.
_SHOWN: Final = 20


def decide(state: State, event: Event, now: int) -> tuple[State, Answers]:
    """
    The state after the event, and what is answered. Pure.

    Raises `UnknownGroup`.
    """
    work = Work(state, now)
    answers = _apply(work, event)
    return work.state(), answers


def _apply(work: Work, event: Event) -> Answers:
    match event:
        case Acquire():
            return acquire(work, event)
        case Rescan():
            return rescan(work, event)
        case Settle():
            return settle(work, event)
        case Decide():
            return first_content(work, event)
        case Abandon():
            return abandon(work, event)
        case Renew():
            return renew(work, event)
        case Bury():
            return bury(work, event)
        case Overdue():
            return overdue(work)
        case Take():
            return take(work)
        case Configure():
            return configure(work, event)
        case Reset():
            return reset(work, event)
        case LimitKey():
            return limit_key(work, event)
        case LimitSession():
            return limit_session(work, event)
        case Close():
            return close(work, event)


# ------------------------------------------------------------------ what is only read


def fenced(state: State, key_id: uuid.UUID, fence: Fence) -> bool:
    """A newer executor of the run has been seen."""
    return is_fenced(state.fences, key_id, fence)


def dead(state: State, now: int, owners: Iterable[uuid.UUID]) -> set[uuid.UUID]:
    """Which of these have lapsed or were buried, and are not merely unheard."""
    work = Work(state, now)
    return {owner for owner in owners if work.dead(owner)}


def waits(state: State, now: int, debits: Iterable[str]) -> dict[str, Waiting]:
    """Why these debits wait, where they do."""
    work = Work(state, now)
    wanted = set(debits)
    found = {}
    for ticket in state.tickets.values():
        if ticket.state == "queued" and ticket.debit_id in wanted:
            counted = Occupancy(work, ticket.group)
            reason, until = wait_reason(work, ticket, counted)
            expected = expected_ms(work, ticket, counted, reason, until)
            found[ticket.debit_id] = Waiting(
                group=ticket.group,
                position=counted.ahead(ticket) + 1,
                reason=reason,
                expected_wait_s=None if expected is None else expected / 1000,
                until_s=None if until is None else to_ms(until - now) / 1000,
            )
    return found


def occupancy(state: State, now: int) -> list[dict[str, Any]]:
    """Every group with its slots and its queue, for operators."""
    work = Work(state, now)
    found = []
    for group_id in sorted(state.groups):
        group = state.groups[group_id]
        slots = [
            {
                "ticket_id": str(ticket.ticket_id),
                "state": ticket.state,
                "model": ticket.model,
                "attempt": ticket.attempt,
                "debit_id": ticket.debit_id,
                "owner": str(ticket.owner),
            }
            for ticket in sorted(state.tickets.values(), key=lambda ticket: ticket.place)
            if ticket.group == group_id
            and ticket.state != "queued"
            and (ticket.quarantined_until is None or ticket.quarantined_until > now)
        ]
        held = sum(slot["state"] == "quarantined" for slot in slots)
        until = group.breaker.cooldown_until
        is_open = group.breaker.state is BreakerState.OPEN and until is not None and until > now
        found.append(
            {
                "group": group_id,
                "concurrency": group.limits.concurrency,
                "queue_bound": group.settings.queue,
                "breaker": "half_open"
                if group.breaker.state is BreakerState.OPEN and not is_open
                else group.breaker.state.value,
                "generation": group.breaker.generation,
                "openings": group.opened_total,
                "opened_for": group.opened_for,
                "open_since": None if group.open_since is None else moment(group.open_since).isoformat(),
                "cooldown_s": (until - now) / SECOND if is_open and until is not None else None,
                "active": len(slots) - held,
                "quarantined": held,
                "queued": len(work.waiting(group_id)),
                "slots": slots,
                "floors": [
                    {
                        "credential": credential,
                        "model": model or None,
                        "cause": CAUSES[kind],
                        "remaining_s": (floor.until - now) / SECOND,
                    }
                    for (of, credential, model, kind), floor in sorted(
                        state.floors.items(), key=lambda entry: entry[1].until
                    )
                    if of == group_id and floor.until > now
                ],
                "waiting": _queue(work, group_id),
            }
        )
    return found


def _queue(w: Work, group_id: str) -> list[dict[str, Any]]:
    """The first of a group's queue."""
    counted = Occupancy(w, group_id)
    first = sorted(counted.queued, key=lambda ticket: (ticket.klass, *ticket.place))[:_SHOWN]
    return [
        {
            "position": position,
            "class": ticket.klass.name.lower(),
            "model": ticket.model,
            "reason": wait_reason(w, ticket, counted)[0],
            "key_id": str(ticket.key_id),
            "debit_id": ticket.debit_id,
        }
        for position, ticket in enumerate(first, start=1)
    ]
