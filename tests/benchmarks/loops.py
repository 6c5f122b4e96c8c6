"""
Which event loop a process of the benchmarks runs on.

What the gateway is held against runs on the loop that makes it fastest, or the ratio would flatter the gateway; what
only makes load runs on the leanest that is there.
"""

from __future__ import annotations

import asyncio
import importlib.util
import selectors
import signal
from collections.abc import Callable, Coroutine
from typing import Any

#: Those that can be had here, the leanest last.
LOOPS = ("asyncio", "uvloop") if importlib.util.find_spec("uvloop") else ("asyncio",)
LEANEST = LOOPS[-1]


def factory(name: str) -> Callable[[], asyncio.AbstractEventLoop]:
    if name == "uvloop":
        # Not there on every system.
        import uvloop

        return uvloop.new_event_loop
    if name == "precise":
        # Wakes when it is time. Those over epoll and libuv count milliseconds.
        return lambda: asyncio.SelectorEventLoop(selectors.SelectSelector())
    return asyncio.new_event_loop


def run(main: Coroutine[Any, Any, None], name: str = LEANEST) -> None:
    with asyncio.Runner(loop_factory=factory(name)) as runner:
        runner.run(main)


async def until_told() -> None:
    """Until SIGTERM or SIGINT."""
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    await stop.wait()
