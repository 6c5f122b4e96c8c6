"""
How long somebody waits: by how long calls held their slots of late, or until a rate allows it.

A call is taken to hold its slot for as long as calls of its group did, and one in quarantine until its time; each slot
that has come free does so again and again. Of calls that take very different times it is an average, and says
so little.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from admission.breaker import BreakerState
from admission.clock import SECOND, to_ms
from admission.core.occupancy import Occupancy
from admission.core.work import Work
from admission.lease import Class
from admission.state import Allowance, Pace, Ticket

_LONGEST: int = 3600 * SECOND
#: So many calls weigh, two for each slot, but not fewer and not more than these.
_FEWEST = 4
_MANY = 32
#: A call that holds its slot for longer than others weighs as this many of them at most.
_AT_MOST = 4
#: Of fewer, and fewer than two for each slot, it is not told: the first that end are the short ones.
_ENOUGH = 16
#: So many of those before a ticket are looked at.
_BEFORE = 100


def keep_pace(w: Work, group_id: str, held: Iterable[int]) -> None:
    """Takes note of how long these held their slots. Older ones weigh less."""
    seconds = [min(max(one, 0), _LONGEST) / SECOND for one in held]
    if not seconds:
        return
    was = w.paces.view.get(group_id, Pace())
    many = min(max(2 * w.groups.view[group_id].limits.concurrency, _FEWEST), _MANY)
    kept = min(max(many - len(seconds), 0) / was.ended, 1.0) if was.ended > 0 else 0.0
    w.paces.put(group_id, Pace(held=was.held * kept + sum(seconds), ended=was.ended * kept + len(seconds)))


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
    if reason == "stopped":
        return None
    batch = _batch_in_ms(w, ticket, occupancy)
    found = _reason_in_ms(w, ticket, occupancy, reason, until)
    if batch is None and found == 0:
        return None
    return found if not batch else max(batch, found or 0)


def _reason_in_ms(w: Work, ticket: Ticket, occupancy: Occupancy, reason: str, until: int | None) -> int | None:
    before = _before(ticket, occupancy)
    match reason:
        case "rate":
            return _rated_ms(w, ticket, before)
        case "model_capacity":
            own = w.allowances.view[ticket.group, ticket.model]
            assert own.concurrency is not None
            slots = [slot for slot in occupancy.slots if slot.model == ticket.model]
            ahead = sum(other.model == ticket.model for other in before)
            return _free_in_ms(w, ticket.group, slots, ahead, own.concurrency)
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
    ramps = None if ramp is None else ramp - occupancy.ramped
    return _free_in_ms(w, occupancy.group_id, occupancy.slots, before, limit, headroom=headroom, ramps=ramps)


def _batch_in_ms(w: Work, ticket: Ticket, occupancy: Occupancy) -> int | None:
    """When batch, which never gets the last slot, has one after the batch before it. 0 for others."""
    limit = occupancy.group.limits.concurrency
    if ticket.klass is not Class.BATCH or limit <= 1:
        return 0
    slots = [slot for slot in occupancy.slots if slot.klass is Class.BATCH]
    before = sum(other.klass is Class.BATCH and other.number < ticket.number for other in occupancy.queued)
    return _free_in_ms(w, ticket.group, slots, min(before, _BEFORE), limit - 1)


def _free_in_ms(
    w: Work,
    group_id: str,
    slots: Sequence[Ticket],
    before: int,
    limit: int,
    *,
    headroom: int = 0,
    ramps: int | None = None,
) -> int | None:
    """
    When a slot comes free for who has so many before it.

    Each comes free at its end and then after every hold. It is the first, second, ... of all these times.
    """
    if limit <= 0:
        return None
    active = [_age_s(w, slot) for slot in slots if slot.state != "quarantined"]
    out = sorted(_out_s(w, slot) for slot in slots if slot.state == "quarantined")
    # The last of them are the headroom.
    out = out[: max(len(out) - headroom, 0)]
    room = limit - len(active) - len(out)
    if ramps is not None:
        room = min(room, ramps)
    nth = before + 1
    if nth <= room:
        return 0
    hold = _hold_s(w, group_id, limit, active)
    if hold is None and (active or nth > 1):
        return None
    # Of one that holds its slot for longer than most nobody knows: soon.
    ends = [hold - age if hold > age else hold / (2 * limit) for age in active] if hold is not None else []
    # Where a limit was lowered, the first to come free are not given again.
    firsts = [0.0] * max(room, 0) + sorted(ends + out)[max(-room, 0) :][:nth]
    frees = (first + r * (hold or 0.0) for i, first in enumerate(firsts, start=1) for r in range(nth // i))
    return round(sorted(frees)[nth - 1] * 1000)


def _age_s(w: Work, slot: Ticket) -> float:
    assert slot.granted_at is not None
    return (w.now - slot.granted_at) / SECOND


def _out_s(w: Work, slot: Ticket) -> float:
    assert slot.quarantined_until is not None
    return max((slot.quarantined_until - w.now) / SECOND, 0.0)


def _hold_s(w: Work, group_id: str, limit: int, ages: Sequence[float]) -> float | None:
    """How long calls hold their slots, of which those count as well that hold theirs for longer by now."""
    pace = w.paces.view.get(group_id)
    if pace is None or pace.ended < min(2 * limit, _ENOUGH):
        return None
    hold = pace.held / pace.ended
    longer = [min(age, _AT_MOST * hold) for age in ages if age > hold]
    return (pace.held + sum(longer)) / (pace.ended + len(longer))


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
