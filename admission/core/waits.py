"""
How long somebody waits: by how long calls held their slots of late, or until a rate allows it.

A call is taken to hold its slot for as long as calls of its group did, and one in quarantine until its time; after them
the same slots come free again and again. Of calls that take very different times it is an average, and says so little.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from admission.breaker import BreakerState
from admission.clock import SECOND, to_ms
from admission.core.occupancy import Occupancy
from admission.core.work import Work
from admission.state import Allowance, Pace, Ticket

_LONGEST: int = 3600 * SECOND
#: Old calls weigh half after so many.
_MANY = 32
#: Of fewer, and fewer than two for each slot, it is not told: the first that end are the short ones.
_ENOUGH = 16
#: So many of those before a ticket are looked at.
_BEFORE = 100


def keep_pace(w: Work, group_id: str, held: Iterable[int]) -> None:
    """Takes note of how long these held their slots."""
    seconds = [min(max(one, 0), _LONGEST) / SECOND for one in held]
    if not seconds:
        return
    was = w.paces.view.get(group_id, Pace())
    half = 2 if was.ended >= _MANY else 1
    w.paces.put(group_id, Pace(held=was.held / half + sum(seconds), ended=was.ended / half + len(seconds)))


def place_in_ms(w: Work, group_id: str, occupancy: Occupancy) -> int | None:
    """When the first of a full queue goes, which makes room in it. None where that is not known."""
    breaker = occupancy.group.breaker
    found = [_slot_in_ms(w, occupancy, 0)]
    if breaker.state is BreakerState.OPEN and breaker.cooldown_until is not None:
        found.append(to_ms(breaker.cooldown_until - w.now))
    if occupancy.room > 0:
        found.append(_refilled_ms(w, group_id, occupancy))
    return max((ms for ms in found if ms is not None), default=0) or None


def expected_ms(w: Work, ticket: Ticket, occupancy: Occupancy, reason: str, until: int | None) -> int | None:
    """`reason` and `until` as `occupancy.wait_reason` tells them. None where it is not known."""
    before = _before(ticket, occupancy)
    match reason:
        case "rate":
            return _rated_ms(w, ticket, before)
        case "model_capacity":
            own = w.allowances.view[ticket.group, ticket.model]
            assert own.concurrency is not None
            slots = [slot for slot in occupancy.slots if slot.model == ticket.model]
            ahead = sum(other.model == ticket.model for other in before)
            room = own.concurrency - len(slots)
            return _free_in_ms(w, ticket.group, slots, ahead + 1 - room, own.concurrency)
        case "quarantine":
            return _slot_in_ms(w, occupancy, len(before))
        case "store":
            until = w.closed_until
        case _:
            pass
    # A cooldown that is over, and that nobody has acted on yet, ends now.
    found = (_slot_in_ms(w, occupancy, len(before)), None if until is None else max(to_ms(until - w.now), 0))
    return max((ms for ms in found if ms is not None), default=None)


def _before(ticket: Ticket, occupancy: Occupancy) -> list[Ticket]:
    mine = (ticket.klass, ticket.number)
    first = sorted(occupancy.queued, key=lambda other: (other.klass, other.number))
    return [other for other in first if (other.klass, other.number) < mine][:_BEFORE]


def _slot_in_ms(w: Work, occupancy: Occupancy, before: int) -> int | None:
    group = occupancy.group
    limit, headroom, ramp = group.limits.concurrency, group.settings.quarantine_headroom, group.breaker.ramp
    room = min(limit - occupancy.active, limit + headroom - occupancy.active - occupancy.quarantined)
    if ramp is not None:
        room = min(room, ramp - occupancy.ramped)
    slots = occupancy.slots
    if occupancy.quarantined <= headroom:
        slots = [slot for slot in slots if slot.state != "quarantined"]
    return _free_in_ms(w, occupancy.group_id, slots, before + 1 - room, limit)


def _free_in_ms(w: Work, group_id: str, slots: Sequence[Ticket], needed: int, limit: int) -> int | None:
    """When so many of these slots have come free, one after the other."""
    if limit <= 0:
        return None
    if needed <= 0:
        return 0
    pace = w.paces.view.get(group_id)
    hold = None if pace is None or pace.ended < min(2 * limit, _ENOUGH) else pace.held / pace.ended
    ends = []
    for slot in slots:
        if slot.state == "quarantined":
            assert slot.quarantined_until is not None
            ends.append(max((slot.quarantined_until - w.now) / SECOND, 0.0))
        elif hold is None:
            return None
        else:
            assert slot.granted_at is not None
            left = hold - (w.now - slot.granted_at) / SECOND
            # Of one that holds its slot for longer than most nobody knows: soon.
            ends.append(left if left > 0 else hold / (2 * limit))
    if not ends:
        return None
    many = max(limit, len(ends))
    rounds, nth = divmod(needed - 1, many)
    if rounds and hold is None:
        return None
    return round((sorted(ends)[min(nth, len(ends) - 1)] + rounds * (hold or 0.0)) * 1000)


def _rated_ms(w: Work, ticket: Ticket, before: Sequence[Ticket]) -> int:
    """When requests and tokens per minute suffice for it, after those before it."""
    waits = [0.0]
    for name, allowance in w.allowances_of(ticket.group, ticket.model):
        ahead = [other for other in before if name in ("", other.model)]
        waits.append(_refill_ms(allowance, len(ahead) + 1, sum(other.tokens for other in ahead) + ticket.tokens))
    return round(max(waits))


def _refilled_ms(w: Work, group_id: str, occupancy: Occupancy) -> int | None:
    """When the first that waits for an allowance has enough of it."""
    waits = []
    queued = sorted(occupancy.queued, key=lambda ticket: (ticket.klass, ticket.number))
    for (of, model), allowance in w.allowances.view.items():
        head = next((ticket for ticket in queued if model in ("", ticket.model)), None)
        if of == group_id and head is not None:
            waits.append(_refill_ms(allowance.at(w.now), 1, head.tokens))
    return round(min((wait for wait in waits if wait > 0), default=0.0)) or None


def _refill_ms(allowance: Allowance, requests: int, tokens: int) -> float:
    waits = [0.0]
    if allowance.requests_per_minute is not None:
        waits.append((requests - allowance.requests_left) * 60_000 / allowance.requests_per_minute)
    if allowance.tokens_per_minute is not None:
        waits.append((tokens - allowance.tokens_left) * 60_000 / allowance.tokens_per_minute)
    return max(waits)
