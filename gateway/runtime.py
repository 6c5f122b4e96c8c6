"""
What a process that serves asks of the interpreter: a faster event loop, and a garbage collector that looks seldom.

Both are a tax on every request that does not show in any profile of ours: the loop in each wake-up and write, the
collector in walking, again and again, over what has been there since the start. docs/adr/0027 has what was measured
and what was rejected.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable

try:
    import uvloop
except ImportError:
    # There is none for Windows, and no wheel for every platform. All that is lost is speed.
    _FASTER: Callable[[], asyncio.AbstractEventLoop] | None = None
else:
    _FASTER = uvloop.new_event_loop

#: New objects that can hold others, less the freed ones, before the collector looks at the new ones. Python's own 700
#: (2,000 since 3.13) are there when a dozen requests wait for their answers, and these are looked at for nothing: 3 %
#: of the CPU of plain calls at concurrency 16, 8 % at 64, and less than a tenth of a percent with this. Calls of ours
#: leave nothing to collect, one of gRPC six objects, about a kilobyte: so some 4 MB wait at most. A larger number
#: gains no more. After 20 rounds those that have survived one are looked at, too; after 100 of these, all that is not
#: frozen.
THRESHOLD = (20_000, 20, 100)


def name() -> str:
    """Which loop a process that serves runs on, as the log says it."""
    return "asyncio" if _FASTER is None else "uvloop"


def runner(*, serving: bool) -> asyncio.Runner:
    """
    For the one call that a process is there for. Without `serving`, for a parent that starts workers: it has hardly
    anything to do, and uvloop cannot start a process in a group of its own.
    """
    return asyncio.Runner(loop_factory=_FASTER if serving else None)


def settle_memory() -> None:
    """Once, when everything has been opened: no later round of the collector walks over what is there now."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*THRESHOLD)
