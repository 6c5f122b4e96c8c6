"""
One statement for everything that is pending: `admission.combiner`, for the writes of jobs.

Each job writes three or four times in its life. One round trip and one commit for each would make the database, not
the provider, the speed of jobs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

import asyncpg
import structlog

from admission.combiner import Lane
from admission.contract import Rejected
from gateway.database import StoreUnavailable

T = TypeVar("T")
R = TypeVar("R")

log = structlog.get_logger(__name__)

#: Seconds before a statement is sent again after the store was away: the first time, and at most.
_RETRY_S, _RETRY_LONGEST_S = 0.05, 1.0


def lane(send: Callable[[Sequence[T]], Awaitable[Sequence[R]]], *, most: int, patience_s: float) -> Lane[T, R]:
    """
    A lane over `send`, which takes some items and returns one result for each, in their order.

    It must bear repetition: after a lost acknowledgement the same items are sent again, until `patience_s` is over.
    An item's future then raises StoreUnavailable: whether it was written is unknown. It raises `Rejected` where the
    item itself was refused, definitely.
    """

    async def persist(items: Sequence[T]) -> Sequence[R]:
        loop = asyncio.get_running_loop()
        give_up = loop.time() + patience_s
        pause = _RETRY_S
        while True:
            try:
                return await send(items)
            except StoreUnavailable:
                if loop.time() + pause >= give_up:
                    raise
                await asyncio.sleep(pause)
                pause = min(pause * 2, _RETRY_LONGEST_S)
            except (asyncpg.PostgresError, asyncpg.InterfaceError, ValueError) as error:
                if len(items) == 1:
                    log.exception("jobs.write_refused")
                raise Rejected(type(error).__name__) from error

    return Lane(persist, batch=most)
