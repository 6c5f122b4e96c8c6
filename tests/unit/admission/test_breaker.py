"""The breaker's table, cell by cell."""

from __future__ import annotations

import uuid

import msgspec
import pytest

from admission.breaker import Breaker, BreakerLimits, BreakerState, closed, cooldown, elapsed, judged, opened
from admission.lease import Ending, Verdict

SECOND = 1_000_000
LIMITS = BreakerLimits(
    concurrency=8,
    failure_threshold=3,
    failure_window=30 * SECOND,
    first_cooldown=10 * SECOND,
    longest_cooldown=300 * SECOND,
)
NOW = 1_000 * SECOND
PROBE = uuid.UUID(int=7)
#: What puts a floor; the endpoint works.
FLOORS = (Verdict.RATE_LIMITED, Verdict.LIMITED_FOR_LONG, Verdict.CREDENTIAL_REJECTED, Verdict.QUOTA_EXHAUSTED)
HALF_OPEN = Breaker(state=BreakerState.HALF_OPEN, generation=5, probe=PROBE, openings=2, cooldown_until=NOW - SECOND)


def after(breaker: Breaker, verdict: Verdict, ending: Ending = Ending.CONFIRMED, now: int = NOW) -> Breaker:
    return judged(breaker, LIMITS, verdict, ending, now)


def failing(*seconds: int, breaker: Breaker | None = None) -> Breaker:
    breaker = breaker or Breaker()
    for second in seconds:
        breaker = after(breaker, Verdict.TRANSIENT, now=NOW + second * SECOND)
    return breaker


def test_a_closed_breaker_opens_at_the_threshold():
    assert failing(0, 1).state is BreakerState.CLOSED
    opened_at = failing(0, 1, 2)
    assert opened_at.state is BreakerState.OPEN
    assert opened_at.generation == 2
    assert opened_at.cooldown_until == NOW + 12 * SECOND


def test_only_failures_within_the_window_count():
    assert failing(0, 1, 32).failed_at == (NOW + 32 * SECOND,)
    assert failing(0, 20, 30).state is BreakerState.OPEN


def test_a_slow_answer_counts_as_a_failure_of_a_closed_breaker():
    breaker = failing(0, 1)
    assert after(breaker, Verdict.SLOW).state is BreakerState.OPEN


@pytest.mark.parametrize("verdict", [Verdict.ANSWERED, *FLOORS, Verdict.NONE])
def test_other_outcomes_change_nothing_about_a_closed_breaker(verdict: Verdict):
    breaker = failing(0, 1)
    assert after(breaker, verdict) == breaker


@pytest.mark.parametrize("verdict", list(Verdict))
def test_no_outcome_moves_an_open_breaker(verdict: Verdict):
    breaker = failing(0, 1, 2)
    assert after(breaker, verdict) == breaker


@pytest.mark.parametrize("verdict", [Verdict.ANSWERED, Verdict.SLOW, *FLOORS])
def test_a_probe_with_a_complete_answer_closes_and_forgets(verdict: Verdict):
    assert after(HALF_OPEN, verdict) == Breaker(generation=6, ramp=1)


@pytest.mark.parametrize("ending", list(Ending))
def test_a_probe_that_fails_opens_for_longer(ending: Ending):
    reopened = after(HALF_OPEN, Verdict.TRANSIENT, ending)
    assert reopened.state is BreakerState.OPEN
    assert (reopened.generation, reopened.openings, reopened.probe) == (6, 3, None)
    assert reopened.cooldown_until == NOW + 40 * SECOND


@pytest.mark.parametrize("ending", [Ending.CONFIRMED, Ending.UNCERTAIN])
def test_a_probe_that_ends_without_a_verdict_opens(ending: Ending):
    assert after(HALF_OPEN, Verdict.NONE, ending).state is BreakerState.OPEN


def test_a_probe_that_was_taken_back_before_dispatch_hands_its_place_on():
    passed_on = after(HALF_OPEN, Verdict.NONE, Ending.NOT_DISPATCHED)
    assert passed_on == msgspec.structs.replace(HALF_OPEN, generation=6, probe=None)


def test_an_open_breaker_is_half_open_once_its_cooldown_is_over():
    breaker = opened(Breaker(), LIMITS, NOW)
    almost = NOW + 10 * SECOND - 1
    assert elapsed(breaker, LIMITS, almost, probe_lives=False) == breaker
    half_open = elapsed(breaker, LIMITS, NOW + 10 * SECOND, probe_lives=False)
    assert (half_open.state, half_open.generation, half_open.probe) == (BreakerState.HALF_OPEN, 3, None)


def test_a_probe_that_is_gone_without_a_verdict_opens():
    assert elapsed(HALF_OPEN, LIMITS, NOW, probe_lives=True) == HALF_OPEN
    assert elapsed(HALF_OPEN, LIMITS, NOW, probe_lives=False).state is BreakerState.OPEN


def test_time_does_nothing_to_a_closed_breaker_and_one_that_waits_for_its_probe():
    for breaker in (Breaker(), msgspec.structs.replace(HALF_OPEN, probe=None)):
        assert elapsed(breaker, LIMITS, NOW + 10**12, probe_lives=False) == breaker


def test_cooldowns_double_up_to_the_longest():
    assert [cooldown(LIMITS, times) // SECOND for times in (0, 1, 2, 4, 5, 30)] == [10, 20, 40, 160, 300, 300]


def test_openings_in_a_row_are_counted_up_to_thirty():
    breaker = Breaker()
    for _ in range(40):
        breaker = opened(breaker, LIMITS, NOW)
    assert breaker.openings == 30


def test_the_ramp_doubles_with_each_good_answer_until_it_is_the_limit():
    breaker = closed(HALF_OPEN, LIMITS)
    ramps = [breaker.ramp]
    for _ in range(4):
        breaker = after(breaker, Verdict.ANSWERED)
        ramps.append(breaker.ramp)
    assert ramps == [1, 2, 4, None, None]


def test_with_one_slot_there_is_nothing_to_ramp():
    assert closed(HALF_OPEN, msgspec.structs.replace(LIMITS, concurrency=1)).ramp is None


def test_opening_ends_the_ramp_and_the_failures():
    breaker = failing(0, 1, 2, breaker=closed(HALF_OPEN, LIMITS))
    assert (breaker.state, breaker.ramp, breaker.failed_at) == (BreakerState.OPEN, None, ())
