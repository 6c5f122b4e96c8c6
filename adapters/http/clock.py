"""
Whose time passes: a call has a deadline, whatever happens, and a budget of seconds that is spent only while its
provider is awaited, never while a slow caller reads.

A stream waits for its provider thousands of times, each time with a later end. So one timer serves a whole call: it is
set anew only where it would ring too late, and where it rings too early it is set to the end that holds by then.
"""

from __future__ import annotations

import asyncio

from adapters.errors import Broken

_RAN_OUT = {
    "deadline": "the deadline passed before the answer was complete",
    "first_byte_timeout": "no content came in time",
    "gap_timeout": "the answer paused for too long",
}

#: A loop that counts in milliseconds rings up to one too early, and would be asked to ring again until it has passed.
_TICK_S = 0.001


class Clock:
    """Of one call. Times are the event loop's. To be stopped when the call is over."""

    __slots__ = ("_alarm", "_code", "_deadline", "_left", "_loop", "_out", "_rings_at", "_until", "_waiter")

    def __init__(self, deadline: float, budget_s: float | None = None, code: str = "deadline") -> None:
        self._loop = asyncio.get_running_loop()
        self._deadline = deadline
        self._left = budget_s
        self._code = code
        self._alarm: asyncio.TimerHandle | None = None
        self._rings_at = 0.0
        #: The wait that is under way, when it has been long enough, and what has run out then.
        self._waiter: asyncio.Future[None] | None = None
        self._until = 0.0
        self._out = ""

    def restart(self, budget_s: float, code: str) -> None:
        """From here on this budget, under this code."""
        self._left = budget_s
        self._code = code

    def now(self) -> float:
        return self._loop.time()

    def until(self, now: float) -> tuple[float, str]:
        """When the first of the clocks runs out, if it runs from now on, and which it is."""
        left = self._left
        if left is not None and now + left < self._deadline:
            return now + left, self._code
        return self._deadline, "deadline"

    def spend(self, seconds: float) -> None:
        """The provider was awaited elsewhere."""
        if self._left is not None:
            self._left -= seconds

    async def wait(self, waiter: asyncio.Future[None]) -> None:
        """
        For the provider. Raises `Broken` with the code of the clock that ran out, also before anything is awaited.

        What has arrived by the end is not late, though this process looked elsewhere: the pause was ours.
        """
        start = self._loop.time()
        until, code = self.until(start)
        if start >= until:
            raise _ran_out(code)
        if self._alarm is None or self._rings_at > until:
            self._ring_at(until)
        self._until, self._out, self._waiter = until, code, waiter
        try:
            await waiter
        finally:
            self._waiter = None
            if self._left is not None:
                self._left -= self._loop.time() - start

    def stop(self) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None

    def _ring_at(self, when: float) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
        self._alarm = self._loop.call_at(when, self._rings)
        self._rings_at = when

    def _rings(self) -> None:
        self._alarm = None
        waiter = self._waiter
        if waiter is None:
            return
        if self._loop.time() + _TICK_S < self._until:
            self._ring_at(self._until)
            return
        # There are loops that look at their timers before their sockets: two turns on, both have been looked at.
        self._loop.call_soon(self._loop.call_soon, self._runs_out, waiter)

    def _runs_out(self, waiter: asyncio.Future[None]) -> None:
        if not waiter.done():
            waiter.set_exception(_ran_out(self._out))


def _ran_out(code: str) -> Broken:
    return Broken(_RAN_OUT[code], code=code)
