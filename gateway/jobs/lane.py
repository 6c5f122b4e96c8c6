"""
One statement for everything that is pending.

Each job writes three or four times in its life. One round trip and one commit for each would make the database, not
the provider, the speed of jobs. Writers of one kind therefore share a lane: while a statement is in flight, what
arrives is gathered and goes out together as the next one. Nothing waits for company: an idle lane sends at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, TypeVar

import asyncpg
import structlog

from gateway.database import StoreUnavailable

T = TypeVar("T")
R = TypeVar("R")

log = structlog.get_logger(__name__)

#: Seconds before a statement is sent again after the store was away: the first time, and at most.
_RETRY_S, _RETRY_LONGEST_S = 0.05, 1.0


class Lane(Generic[T, R]):
    """
    `send` takes some items and returns one result for each, in their order.

    It must bear repetition: after a lost acknowledgement the same items are sent again, until `patience_s` is over.
    """

    def __init__(self, send: Callable[[Sequence[T]], Awaitable[Sequence[R]]], *, most: int, patience_s: float) -> None:
        self._send = send
        self._most = most
        self._patience_s = patience_s
        self._pending: list[tuple[T, asyncio.Future[R]]] = []
        self._sender: asyncio.Task[None] | None = None

    async def put(self, item: T) -> R:
        """
        The result for this item, once it is committed. Raises StoreUnavailable when the store stays away: whether
        the item was written is then unknown. Cancelling it does not take the item back.
        """
        future: asyncio.Future[R] = asyncio.get_running_loop().create_future()
        self._pending.append((item, future))
        if self._sender is None:
            self._sender = asyncio.create_task(self._drain())
        return await future

    async def flush(self) -> None:
        """Returns when everything that was put has been answered."""
        if self._sender is not None:
            await asyncio.wait([self._sender])

    async def _drain(self) -> None:
        batch: list[tuple[T, asyncio.Future[R]]] = []
        try:
            while self._pending:
                batch, self._pending = self._pending[: self._most], self._pending[self._most :]
                await self._deliver(batch)
        finally:
            self._sender = None
            for _, future in (*batch, *self._pending):
                if not future.done():
                    future.cancel()
            self._pending.clear()

    async def _deliver(self, batch: list[tuple[T, asyncio.Future[R]]]) -> None:
        try:
            results = await self._persist([item for item, _ in batch])
        except StoreUnavailable as error:
            for _, future in batch:
                _settle(future, error)
        except (asyncpg.PostgresError, asyncpg.InterfaceError, ValueError) as error:
            # A fault of some item, certain to have written nothing: find it, so that its neighbours do not suffer.
            if len(batch) == 1:
                log.exception("jobs.write_refused")
                _settle(batch[0][1], error)
                return
            middle = len(batch) // 2
            await self._deliver(batch[:middle])
            await self._deliver(batch[middle:])
        else:
            for (_, future), result in zip(batch, results, strict=True):
                if not future.done():
                    future.set_result(result)

    async def _persist(self, items: Sequence[T]) -> Sequence[R]:
        loop = asyncio.get_running_loop()
        give_up = loop.time() + self._patience_s
        pause = _RETRY_S
        while True:
            try:
                return await self._send(items)
            except StoreUnavailable:
                if loop.time() + pause >= give_up:
                    raise
                await asyncio.sleep(pause)
                pause = min(pause * 2, _RETRY_LONGEST_S)


def _settle(future: asyncio.Future[R], error: Exception) -> None:
    if not future.done():
        future.set_exception(error)
