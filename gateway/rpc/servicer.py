"""
The two calls of `tollbridge.v1.Gateway`, each a thin layer around the line.

A stream is written with `context.write` from the call's own task. As an async generator it would be closed from
another task when its client goes away, and the line's cleanup (settling what was dispatched) would run outside the task
that opened it. Every write is bounded in time: a client that stops reading would otherwise hold a provider's slot for
as long as it liked.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from typing import Protocol, TypeAlias, TypeVar

import grpc.aio
import structlog
from typing_extensions import override

from admission.ids import new_id
from admission.lease import Waiting
from gateway.answer import Ended, Line, Silent
from gateway.call import Call, Caller, Scope
from gateway.errors import (
    Cancelled,
    GatewayError,
    Internal,
    InvalidRequest,
    PermissionDenied,
    ShuttingDown,
    Unauthenticated,
)
from gateway.outcome import Outcome, RouteReport
from gateway.rpc import codec, status
from gateway.stopping import Stopping
from protos.tollbridge.v1 import gateway_pb2 as pb
from protos.tollbridge.v1 import gateway_pb2_grpc

log = structlog.get_logger()

_Response = TypeVar("_Response")
Context: TypeAlias = grpc.aio.ServicerContext[pb.CompletionRequest, _Response]


class Authenticator(Protocol):
    """Knows the API keys."""

    async def authenticate(self, token: str | None) -> Caller:
        """Who the bearer of the token is. Raises `gateway.errors.Unauthenticated`; None is no token at all."""
        ...


class GatewayServicer(gateway_pb2_grpc.GatewayServicer):
    """`tollbridge.v1.Gateway` over a line. `idle_consumer_s` bounds each write of a stream."""

    def __init__(self, *, line: Line, authenticator: Authenticator, idle_consumer_s: float, stopping: Stopping) -> None:
        self._stopping = stopping
        self._at_work: set[asyncio.Task[object]] = set()
        self._line = line
        self._authenticator = authenticator
        self._idle_consumer_s = idle_consumer_s

    @override
    async def Complete(
        self, request: pb.CompletionRequest | codec.Undecodable, context: Context[pb.CompletionResponse]
    ) -> pb.CompletionResponse:
        request_id = new_id().hex
        task = self._begun()
        try:
            call = await self._call(request_id, request, context)
            completion = await self._line.complete(call)
            response = codec.encode_completion(completion)
            context.set_trailing_metadata(status.attribution(request_id, completion.outcome))
        except GatewayError as error:
            failure = error
        except asyncio.CancelledError:
            if not self._stopping.caught():
                raise
            failure = _stopped()
        except Exception as fault:  # noqa: BLE001 - gRPC would tell the caller the text of a foreign exception
            failure = _internal(request_id, fault)
        else:
            return response
        finally:
            self._at_work.discard(task)
        return await context.abort(*status.render(failure, request_id))

    @override
    async def Stream(
        self, request: pb.CompletionRequest | codec.Undecodable, context: Context[pb.CompletionChunk]
    ) -> None:
        request_id = new_id().hex
        writer = _Writer(context.write, self._idle_consumer_s)
        task = self._begun()
        try:
            failure = await self._answer(request_id, request, context, writer)
        except asyncio.CancelledError:
            if writer.stuck:
                failure = Cancelled(f"the client read nothing for {self._idle_consumer_s:g} s")
            elif self._stopping.caught():
                failure = _stopped()
            else:
                raise
        finally:
            self._at_work.discard(task)
            writer.close()
        if failure is not None:
            await context.abort(*status.render(failure, request_id))

    def end(self) -> int:
        """The process stops: whoever waits for an answer is told so. How many that are."""
        self._stopping.end(self._at_work)
        return len(self._at_work)

    def _begun(self) -> asyncio.Task[object]:
        """The task of this call, which may be ended until it has its end."""
        task = asyncio.current_task()
        assert task is not None
        self._at_work.add(task)
        return task

    async def _answer(
        self,
        request_id: str,
        request: pb.CompletionRequest | codec.Undecodable,
        context: Context[pb.CompletionChunk],
        writer: _Writer,
    ) -> GatewayError | None:
        try:
            call = await self._call(request_id, request, context)
            outcome = await self._relay(call, writer)
            context.set_trailing_metadata(status.attribution(request_id, outcome))
        except GatewayError as error:
            failure = error
        except Exception as fault:  # noqa: BLE001 - gRPC would tell the caller the text of a foreign exception
            failure = _internal(request_id, fault)
        else:
            return None
        if writer.written and not writer.holds:
            await writer.write(codec.encode_failed(failure, status.outcome_of(failure)))
        return failure

    async def _call(
        self, request_id: str, request: pb.CompletionRequest | codec.Undecodable, context: Context[_Response]
    ) -> Call:
        try:
            metadata = context.invocation_metadata() or ()
            caller = await self._authenticator.authenticate(_bearer(metadata))
            if Scope.CHAT not in caller.scopes:
                raise PermissionDenied(f"this API key does not have the scope `{Scope.CHAT}`")
            if isinstance(request, codec.Undecodable):
                raise InvalidRequest("the message is not a tollbridge.v1.CompletionRequest")
            asked = codec.decode_request(request)
            options = codec.in_session(asked.options, metadata)
        except GatewayError as error:
            # The line never hears of it, so its one line a request does not tell.
            log.info("gateway.request_refused", request_id=request_id, code=error.code.value, method="grpc")
            raise
        remaining: float | None = context.time_remaining()
        return Call(
            request_id=request_id,
            caller=caller,
            model=asked.model,
            chat=asked.chat,
            options=options,
            deadline=None if remaining is None else asyncio.get_running_loop().time() + remaining,
            transport="grpc",
        )

    async def _relay(self, call: Call, writer: _Writer) -> Outcome:
        progress = _Progress()
        telling = asyncio.create_task(progress.tell(writer))
        try:
            async with self._line.stream(call, progress) as items:
                # The writer has one user at a time: from here on it is this task.
                await progress.finish(telling)
                async for item in items:
                    if isinstance(item, Ended):
                        await writer.write(codec.encode_ended(item))
                        return item.outcome
                    if item:
                        await writer.write(codec.encode_deltas(item))
        except Exception:
            await progress.finish(telling)
            raise
        finally:
            telling.cancel()
        raise Internal("the answer stopped without saying how it ended")


class _Writer:
    """
    Writes chunks for one stream. A write that takes longer than `idle_s` cancels the task that made the writer.

    One timer watches all writes: one for each would cost more than the write.
    """

    def __init__(self, write: Callable[[pb.CompletionChunk], Awaitable[None]], idle_s: float) -> None:
        owner = asyncio.current_task()
        assert owner is not None
        self._owner = owner
        self._write = write
        self._idle_s = idle_s
        self._now = asyncio.get_running_loop().time
        self._writing_since: float | None = None
        self._timer = asyncio.get_running_loop().call_later(idle_s, self._watch)
        self.written = False
        #: A write did not get through in time. gRPC still holds it, so nothing but the status can follow.
        self.stuck = False

    def close(self) -> None:
        self._timer.cancel()

    @property
    def holds(self) -> bool:
        """A write was given up. gRPC may still hold it, so nothing but the status can follow."""
        return self._writing_since is not None

    async def write(self, chunk: pb.CompletionChunk) -> None:
        self._writing_since = self._now()
        try:
            await self._write(chunk)
        except grpc.aio.InternalError as gone:
            # What gRPC raises when the call ended during a write; its own cancellation may come later or not at all.
            raise asyncio.CancelledError from gone
        self._writing_since = None
        self.written = True

    def _watch(self) -> None:
        now, since = self._now(), self._writing_since
        if since is not None and now - since >= self._idle_s:
            self.stuck = True
            self._owner.cancel()
            return
        remaining = self._idle_s if since is None else since + self._idle_s - now
        self._timer = asyncio.get_running_loop().call_later(remaining, self._watch)


class _Progress(Silent):
    """
    What happens before the first content, on its way to the client.

    The line reports from wherever it is and cannot wait; so reports are kept here until they are written, and a place
    in the queue that nobody was told of yet is replaced by the newer one.
    """

    def __init__(self) -> None:
        self._unsent: deque[pb.CompletionChunk] = deque()
        self._news = asyncio.Event()
        self._finished = False

    @override
    def queued(self, waiting: Waiting) -> None:
        if self._unsent and self._unsent[-1].HasField("queued"):
            self._unsent.pop()
        self._put(codec.encode_queued(waiting))

    @override
    def started(self, route: RouteReport, attempt: int) -> None:
        self._put(codec.encode_started(route, attempt))

    def _put(self, chunk: pb.CompletionChunk) -> None:
        self._unsent.append(chunk)
        self._news.set()

    async def tell(self, writer: _Writer) -> None:
        """Write what is reported until `finish`."""
        while True:
            await self._news.wait()
            self._news.clear()
            while self._unsent:
                await writer.write(self._unsent.popleft())
            if self._finished:
                return

    async def finish(self, telling: asyncio.Task[None]) -> None:
        """Returns when everything reported so far is written."""
        self._finished = True
        self._news.set()
        if not telling.cancelled():
            await telling


def _bearer(metadata: Iterable[tuple[str, str | bytes]]) -> str | None:
    """The API key of a call; None where it has none. Two of them are as good as none."""
    given = [value for name, value in metadata if name == "authorization"]
    if not given:
        return None
    scheme, _, token = given[0].partition(" ") if isinstance(given[0], str) else ("", "", "")
    if len(given) > 1 or scheme.lower() != "bearer" or not token.strip():
        raise Unauthenticated
    return token.strip()


def _stopped() -> ShuttingDown:
    """Of a call that has not come to the line, which tells of itself."""
    return ShuttingDown("this process is stopping: nothing was sent, send it again", retry_after_s=1.0)


def _internal(request_id: str, fault: Exception) -> Internal:
    log.error("gateway.internal_error", request_id=request_id, transport="grpc", exc_info=fault)
    return Internal("a fault of the gateway's own; its log has the request id")
