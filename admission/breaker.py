"""
The breaker of a group as a table: what an outcome, or time, does to it. Pure; the SQL does the same, and is
tested against it.

    state      what is judged                               becomes
    closed     TRANSIENT, SLOW: counted in the window       closed; OPEN at the threshold
    closed     ANSWERED                                     closed; the ramp doubles until it is the limit
    open       the cooldown is over (time)                  HALF_OPEN, no probe yet
    half_open  the probe: ANSWERED, SLOW, or what puts a    CLOSED, with a ramp of 1
               floor
    half_open  the probe: NONE, and it was not dispatched;  half_open, the place goes to the next
               or it is taken back
    half_open  the probe: anything else                     OPEN, for longer
    half_open  the probe is gone without a verdict (time)   OPEN, for longer

Each change raises the generation, and an outcome counts only while the generation of its grant is current. A rate
limit raises a floor instead: floors gate their credential and model in every state and are not part of the breaker.

Times are whole microseconds on the store's clock.
"""

from __future__ import annotations

import enum
import uuid
from typing import Final

import msgspec

from admission.lease import Ending, Verdict

#: The exponent of a cooldown grows no further: past it every cooldown is the longest.
_DOUBLINGS: Final = 20
_OPENINGS: Final = 30


class BreakerState(enum.StrEnum):
    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


class BreakerLimits(msgspec.Struct, frozen=True, kw_only=True):
    concurrency: int
    failure_threshold: int
    failure_window: int
    first_cooldown: int
    longest_cooldown: int


class Breaker(msgspec.Struct, frozen=True, kw_only=True):
    state: BreakerState = BreakerState.CLOSED
    generation: int = 1
    #: The ticket that is the probe of a half-open breaker.
    probe: uuid.UUID | None = None
    #: Openings in a row.
    openings: int = 0
    #: When the cooldown ends, or ended. None while closed.
    cooldown_until: int | None = None
    #: Failures within the window.
    failed_at: tuple[int, ...] = ()
    #: How many of this generation may run at once, after closing; None is no bound.
    ramp: int | None = None


class Step(enum.Enum):
    STAY = enum.auto()
    COUNT = enum.auto()
    WIDEN = enum.auto()
    CLOSE = enum.auto()
    HAND_ON = enum.auto()
    OPEN = enum.auto()


#: What an outcome of the current generation does; in half_open, the probe's. What is not here changes nothing.
TABLE: Final = {
    (BreakerState.CLOSED, Verdict.TRANSIENT): Step.COUNT,
    (BreakerState.CLOSED, Verdict.SLOW): Step.COUNT,
    (BreakerState.CLOSED, Verdict.ANSWERED): Step.WIDEN,
    (BreakerState.HALF_OPEN, Verdict.ANSWERED): Step.CLOSE,
    (BreakerState.HALF_OPEN, Verdict.SLOW): Step.CLOSE,
    (BreakerState.HALF_OPEN, Verdict.RATE_LIMITED): Step.CLOSE,
    (BreakerState.HALF_OPEN, Verdict.LIMITED_FOR_LONG): Step.CLOSE,
    (BreakerState.HALF_OPEN, Verdict.CREDENTIAL_REJECTED): Step.CLOSE,
    (BreakerState.HALF_OPEN, Verdict.QUOTA_EXHAUSTED): Step.CLOSE,
    (BreakerState.HALF_OPEN, Verdict.TRANSIENT): Step.OPEN,
    (BreakerState.HALF_OPEN, Verdict.NONE): Step.OPEN,
}


def judged(breaker: Breaker, limits: BreakerLimits, verdict: Verdict, ending: Ending, now: int) -> Breaker:
    """After an outcome of the current generation; in half_open the caller passes the probe's only."""
    step = TABLE.get((breaker.state, verdict), Step.STAY)
    if step is Step.OPEN and ending is Ending.NOT_DISPATCHED and verdict is Verdict.NONE:
        step = Step.HAND_ON
    match step:
        case Step.STAY:
            return breaker
        case Step.COUNT:
            failed_at = (*(at for at in breaker.failed_at if at >= now - limits.failure_window), now)
            if len(failed_at) >= limits.failure_threshold:
                return opened(breaker, limits, now)
            return msgspec.structs.replace(breaker, failed_at=failed_at)
        case Step.WIDEN:
            if breaker.ramp is None:
                return breaker
            wider = breaker.ramp * 2
            return msgspec.structs.replace(breaker, ramp=wider if wider < limits.concurrency else None)
        case Step.CLOSE:
            return closed(breaker, limits)
        case Step.HAND_ON:
            return handed_on(breaker)
        case Step.OPEN:
            return opened(breaker, limits, now)


def elapsed(breaker: Breaker, limits: BreakerLimits, now: int, *, probe_lives: bool) -> Breaker:
    """After time has passed. `probe_lives`: its ticket is granted or active still."""
    if breaker.state is BreakerState.HALF_OPEN and breaker.probe is not None and not probe_lives:
        return opened(breaker, limits, now)
    if breaker.state is BreakerState.OPEN and breaker.cooldown_until is not None and breaker.cooldown_until <= now:
        return handed_on(breaker)
    return breaker


def opened(breaker: Breaker, limits: BreakerLimits, now: int) -> Breaker:
    return Breaker(
        state=BreakerState.OPEN,
        generation=breaker.generation + 1,
        openings=min(breaker.openings + 1, _OPENINGS),
        cooldown_until=now + cooldown(limits, breaker.openings),
    )


def closed(breaker: Breaker, limits: BreakerLimits) -> Breaker:
    return Breaker(generation=breaker.generation + 1, ramp=1 if limits.concurrency > 1 else None)


def handed_on(breaker: Breaker) -> Breaker:
    """Half-open, and the next that comes is the probe."""
    return msgspec.structs.replace(breaker, state=BreakerState.HALF_OPEN, generation=breaker.generation + 1, probe=None)


def cooldown(limits: BreakerLimits, times: int) -> int:
    """How long, after so many in a row before."""
    doubled: int = limits.first_cooldown << min(times, _DOUBLINGS)
    return min(doubled, limits.longest_cooldown)
