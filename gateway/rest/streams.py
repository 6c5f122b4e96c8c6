"""
An answer as server-sent events, from before its first content to its end.

A status that has been sent cannot be taken back: so a stream says nothing until its first content, and an error that
comes before it has a status of its own. But a connection on which nothing comes for long is closed by somebody on the
way. After a while the head is sent all the same, and then comments, until there is something to say.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Final

import msgspec
import structlog

from gateway.rest.answers import Pieces
from gateway.rest.apis import Api
from gateway.rest.endpoint import Exchange, answer_headers

log: Final = structlog.get_logger("gateway")


class StreamSettings(msgspec.Struct, frozen=True, kw_only=True):
    #: Seconds for which a stream without content keeps its status open. Most refusals come within: one provider's clock
    #: for the first byte (5 s) and the start of the next one. And it is well below the 25 to 60 s after which the usual
    #: load balancers and hosts give up a connection on which nothing came.
    commit_after_s: float = 10.0
    #: Seconds between two comments after that.
    keepalive_s: float = 15.0
    #: Seconds that one write may wait for the caller to read. Then the connection is cut: it holds a provider's slot.
    idle_reader_s: float = 60.0


class EventStream:
    """One answer. Made when the request is in hand; to be closed, whatever happens."""

    def __init__(self, exchange: Exchange, api: Api, settings: StreamSettings, waiting: Callable[[], str]) -> None:
        """`waiting` says in a line what is waited for, for the comments."""
        self._exchange = exchange
        self._api = api
        self._settings = settings
        self._waiting = waiting
        self._loop = asyncio.get_running_loop()
        self._response: Pieces | None = None
        self._begun = asyncio.Event()
        self._commenting: asyncio.Task[None] | None = None
        self._writing_since: float | None = None
        now = self._loop.time()
        self._commit_at = now + settings.commit_after_s
        self._timer = self._loop.call_at(min(self._commit_at, now + settings.idle_reader_s), self._look)

    @property
    def committed(self) -> bool:
        """The status has been sent, or is being sent."""
        return self._response is not None

    @property
    def response(self) -> Pieces:
        assert self._response is not None
        return self._response

    async def begin(self, headers: Iterable[tuple[str, str]]) -> None:
        """There is content. `headers` are lost where the head has gone already."""
        self._begun.set()
        if self._commenting is not None:
            # It may be in the midst of a write.
            await self._commenting
        if self._response is None:
            await self._prepare(headers)

    async def write(self, data: bytes) -> None:
        """Returns when the caller has read enough of it. Raises ConnectionError."""
        if self.put(data):
            await self.drain()

    def put(self, data: bytes) -> bool:
        """As `write`, without waiting: whether there is something to wait for, which `drain` does."""
        return self.response.put(data)

    async def drain(self) -> None:
        self._writing_since = self._loop.time()
        await self.response.drain()
        self._writing_since = None

    def end_with(self, data: bytes) -> None:
        """The last piece: it goes out with the end of the answer."""
        self.response.hold(data)

    async def break_off(self) -> None:
        """What was written is sent, and then the connection ends without the end of the body: it is not whole."""
        await self.response.break_off()

    async def close(self) -> None:
        self._timer.cancel()
        if self._commenting is not None and not self._commenting.done():
            self._commenting.cancel()
            await asyncio.wait([self._commenting])

    # ---------------------------------------------------------------- within

    async def _comment(self) -> None:
        await self._prepare(())
        while not self._begun.is_set():
            await self.write(f": {self._waiting()}\n\n".encode())
            try:
                async with asyncio.timeout(self._settings.keepalive_s):
                    await self._begun.wait()
            except TimeoutError:
                continue

    async def _prepare(self, headers: Iterable[tuple[str, str]]) -> None:
        every = answer_headers(self._exchange.request_id, self._api, content_type="text/event-stream")
        every["Cache-Control"] = "no-cache"
        # Some proxies would collect the events otherwise.
        every["X-Accel-Buffering"] = "no"
        every.update(headers)
        self._response = Pieces(every)
        await self._response.prepare(self._exchange.request)

    def _look(self) -> None:
        """One timer for the first comment and for all writes: one for each would cost more than the write."""
        now, since, idle_s = self._loop.time(), self._writing_since, self._settings.idle_reader_s
        if since is not None and now - since >= idle_s:
            log.info("gateway.idle_reader_cut", request_id=self._exchange.request_id, idle_s=idle_s)
            transport = self._exchange.request.transport
            if transport is not None:
                transport.abort()
            return
        again = (now if since is None else since) + idle_s
        if self._commenting is None and not self._begun.is_set():
            if now < self._commit_at:
                again = min(again, self._commit_at)
            else:
                self._commenting = asyncio.create_task(self._comment(), name="keepalive")
                self._commenting.add_done_callback(_heard)
        self._timer = self._loop.call_at(again, self._look)


def _heard(task: asyncio.Task[None]) -> None:
    """A caller who went away ends the request by itself; that a comment did not reach it is no news."""
    if not task.cancelled():
        task.exception()
