"""Whose time passes."""

from __future__ import annotations

import asyncio

import pytest
import uvloop
from typing_extensions import override

from adapters.errors import Broken
from adapters.http.clock import Clock
from tests.fakes.polling import until


def clock(deadline_s: float, budget_s: float | None = None, code: str = "first_byte_timeout") -> Clock:
    return Clock(asyncio.get_running_loop().time() + deadline_s, budget_s, code)


async def waits(running: Clock, for_s: float | None = None) -> str | None:
    """The code of what ran out."""
    waiter = asyncio.get_running_loop().create_future()
    arrives = None if for_s is None else asyncio.get_running_loop().call_later(for_s, waiter.set_result, None)
    try:
        await running.wait(waiter)
    except Broken as error:
        if arrives is not None:
            arrives.cancel()
        return error.code
    return None


@pytest.mark.parametrize(
    ("deadline_s", "budget_s", "code"),
    [(0.05, None, "deadline"), (0.05, 60, "deadline"), (60, 0.05, "first_byte_timeout"), (-1, 60, "deadline")],
)
async def test_what_runs_out_first_ends_the_wait(deadline_s, budget_s, code):
    running = clock(deadline_s, budget_s)
    assert await waits(running) == code
    running.stop()


async def test_a_budget_is_spent_by_waiting_and_by_nothing_else():
    running = clock(60, 30)
    start = running.now()
    assert await waits(running, 0.05) is None
    waited = running.now() - start
    await asyncio.sleep(0.1)
    left, code = running.until(0.0)
    assert code == "first_byte_timeout"
    assert 30 - waited <= left < 30 - 0.04
    assert await waits(running, 0.0) is None
    running.spend(30)
    assert await waits(running, 0.0) == "first_byte_timeout"
    running.stop()


async def test_one_timer_serves_waits_that_end_later_and_sooner():
    running = clock(60, 30)
    for _ in range(3):
        assert await waits(running, 0.0) is None
        first = running._alarm
        running.restart(40, "gap_timeout")
        assert await waits(running, 0.0) is None
        assert running._alarm is first, "a timer that rings too early is left as it is"
    running.restart(0.1, "gap_timeout")
    assert await waits(running, 0.0) is None
    assert running._alarm is not first
    # It rings within this wait, which is longer now.
    running.restart(0.4, "gap_timeout")
    assert await waits(running, 0.2) is None
    running.restart(0.05, "gap_timeout")
    assert await waits(running) == "gap_timeout"
    running.stop()
    assert running._alarm is None


async def test_a_timer_that_rings_while_nobody_waits_ends_nothing():
    running = clock(60, 0.05)
    assert await waits(running, 0.0) is None
    running.restart(60, "gap_timeout")
    await until(lambda: running._alarm is None)
    assert await waits(running, 0.0) is None
    running.stop()


async def test_what_has_arrived_by_the_end_is_not_late():
    running = clock(60, 0.01)
    waiter = asyncio.get_running_loop().create_future()

    def both() -> None:
        # Two turns on, as the sockets of a loop that looks at its timers first.
        asyncio.get_running_loop().call_soon(waiter.set_result, None)

    asyncio.get_running_loop().call_at(running.until(running.now())[0], both)
    await running.wait(waiter)
    running.stop()


class Counted(Clock):
    """Counts how often its timer is set."""

    times = 0

    @override
    def _ring_at(self, when: float) -> None:
        self.times += 1
        super()._ring_at(when)


def test_a_loop_that_counts_in_milliseconds_does_not_ring_again_and_again():
    async def times_set(end_s: float) -> int:
        running = Counted(asyncio.get_running_loop().time() + end_s)
        assert await waits(running) == "deadline"
        return running.times

    # Whatever part of a millisecond the end falls on: some of these were set dozens of times.
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        assert max(runner.run(times_set(0.02 + part / 10_000)) for part in range(10)) <= 3
