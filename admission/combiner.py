"""
Combining: what arrives while a statement is in flight goes out together as the next one.

Under load one round trip and one commit then serve many requests; without load nothing waits, since an idle lane sends
as soon as the loop has nothing else to do. Only the lane awaits the database, callers await futures, so a cancelled
caller never breaks a statement off.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final, Generic, TypeAlias, TypeVar

import structlog

from admission.contract import Rejected

log: Final = structlog.get_logger("admission")

E = TypeVar("E")
R = TypeVar("R")

#: An element, who is told, and whether of its result too or of a failure only.
_Pending: TypeAlias = tuple[E, asyncio.Future[Any], bool]

#: Elements in one statement. Past this the database does not get faster, and one slow batch delays the rest.
BATCH = 128

#: Turns of the loop before a statement goes out: the fewest, and the most while the loop has something else to do.
#: Requests of one moment are read, and answers of one statement handed on, one after the other; those of gRPC come one
#: in a turn. With these turns they meet in one statement. Beside two turns always, at 16 requests at once, the others
#: spare a fifth of PostgreSQL's CPU and a tenth of the process's, over gRPC a fifteenth; more than these spare no more.
_FEWEST_TURNS: Final = 2
_MOST_TURNS: Final = 16
#: Seconds. A turn that took less had nothing else in it.
_IDLE_TURN_S: Final = 30e-6


class Lane(Generic[E, R]):
    """
    One statement in flight at a time.

    `send` answers a result for each element, in order, or raises `Rejected`; other exceptions fail the whole batch. A
    rejected batch is bisected, so that one bad element cannot fail its neighbours.
    """

    def __init__(self, send: Callable[[Sequence[E]], Awaitable[Sequence[R]]], *, batch: int = BATCH) -> None:
        self._send = send
        self._batch = batch
        self._pending: deque[_Pending[E]] = deque()
        self._task: asyncio.Task[None] | None = None

    def submit(self, element: E) -> asyncio.Future[R]:
        """Sends the element with the next statement. The future always ends; it may be dropped or cancelled."""
        future: asyncio.Future[R] = asyncio.get_running_loop().create_future()
        self._put((element, future, True))
        return future

    def entrust(self, element: E, answer: asyncio.Future[Any]) -> None:
        """Sends the element with the next statement. `send` gives the answer itself; only a failure is told here."""
        self._put((element, answer, False))

    def post(self, element: E) -> None:
        """Sends the element with the next statement, with nobody to tell but the log."""
        self.submit(element).add_done_callback(_told)

    def _put(self, pending: _Pending[E]) -> None:
        self._pending.append(pending)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run())

    async def drain(self) -> None:
        """Waits until nothing is pending or in flight."""
        while self._task is not None and not self._task.done():
            await asyncio.wait((self._task,))

    async def _run(self) -> None:
        while self._pending:
            await _gathered()
            batch = [self._pending.popleft() for _ in range(min(len(self._pending), self._batch))]
            await self._deliver(batch)

    async def _deliver(self, batch: list[_Pending[E]]) -> None:
        try:
            results = await self._send([element for element, _, _ in batch])
        except Rejected as rejected:
            if len(batch) > 1:
                middle = len(batch) // 2
                await self._deliver(batch[:middle])
                await self._deliver(batch[middle:])
                return
            _fail(batch, rejected)
        except BaseException as error:  # every caller hears of it; a cancellation goes on
            _fail(batch, error)
            if not isinstance(error, Exception):
                raise
        else:
            for (_, future, heard), result in zip(batch, results, strict=True):
                if heard and not future.done():
                    future.set_result(result)


async def _gathered() -> None:
    """Until the loop has nothing else to do, or has turned often enough."""
    for turn in range(1, _MOST_TURNS + 1):
        began = time.monotonic()
        await asyncio.sleep(0)
        if turn >= _FEWEST_TURNS and time.monotonic() - began < _IDLE_TURN_S:
            return


def _told(future: asyncio.Future[R]) -> None:
    """A fault that no caller hears of must not vanish."""
    if not future.cancelled() and (error := future.exception()) is not None:
        log.error("admission.unheard_fault", exc_info=error)


def _fail(batch: list[_Pending[E]], error: BaseException) -> None:
    for _, future, heard in batch:
        if not future.done():
            if isinstance(error, asyncio.CancelledError):
                if heard:
                    future.cancel()
            else:
                future.set_exception(error)
                # A dropped future must not be reported as never retrieved.
                future.exception()
