"""
What is done again and again for as long as the process lives. A fault in one round does not end the rest: without its
rounds a process would look well and do nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import structlog

from gateway.database import StoreUnavailable

log = structlog.get_logger(__name__)

#: Seconds before the next round after one that failed.
AFTER_FAULT_S = 1.0


async def rounds(name: str, step: Callable[[], Awaitable[float]]) -> None:
    """A step for ever, each after the pause in seconds that the last one asked for. A fault is told."""
    while True:
        try:
            pause = await step()
        except StoreUnavailable:
            pause = AFTER_FAULT_S
        except Exception:
            log.exception("jobs.loop_fault", loop=name)
            pause = AFTER_FAULT_S
        if pause > 0:
            await asyncio.sleep(pause)
