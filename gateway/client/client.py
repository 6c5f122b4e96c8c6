"""The client: it keeps the connections to one gateway and turns its errors into `CallFailed`."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from types import TracebackType
from typing import Any, Final, Self

import grpc
import grpc.aio
import httpx

from gateway.client import errors
from gateway.client.jobs import Jobs
from protos.tollbridge.v1 import gateway_pb2 as pb
from protos.tollbridge.v1 import gateway_pb2_grpc

#: An answer may be longer than the 4 MiB that gRPC takes by default.
MAX_RECEIVE_BYTES: Final = 64 * 1024 * 1024
#: `?wait=` holds an answer back for up to a minute; this is beyond it.
HTTP_TIMEOUT_S: Final = 90.0


class GatewayClient:
    """
    A connection to one gateway. Enter it before use.

    `grpc` is host:port, `rest` a URL; `credentials` switches gRPC to TLS. A part whose address is left out cannot be
    used.
    """

    def __init__(
        self,
        *,
        api_key: str,
        grpc: str | None = None,
        rest: str | None = None,
        credentials: grpc.ChannelCredentials | None = None,
    ) -> None:
        self._target = grpc
        self._rest = rest
        self._credentials = credentials
        self._authorization = f"Bearer {api_key}"
        self._stack = AsyncExitStack()
        self._stub: Any = None
        self._jobs: Jobs | None = None

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            if self._target is not None:
                channel = await stack.enter_async_context(_channel(self._target, self._credentials))
                self._stub = gateway_pb2_grpc.GatewayStub(channel)  # type: ignore[no-untyped-call]
            if self._rest is not None:
                headers = {"authorization": self._authorization}
                http = httpx.AsyncClient(base_url=self._rest, headers=headers, timeout=HTTP_TIMEOUT_S, trust_env=False)
                self._jobs = Jobs(await stack.enter_async_context(http))
            self._stack = stack.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.__aexit__(kind, error, trace)

    @property
    def jobs(self) -> Jobs:
        assert self._jobs is not None, "the client has no `rest` address, or was not entered"
        return self._jobs

    async def complete(self, request: pb.CompletionRequest, *, timeout_s: float | None = None) -> pb.CompletionResponse:
        """
        The whole answer. `timeout_s` travels along: the gateway gives up at the same time. Raises `CallFailed`.

        Cancelling it takes the request back.
        """
        try:
            response: pb.CompletionResponse = await self._calls.Complete(
                request, timeout=timeout_s, metadata=self._metadata
            )
        except grpc.aio.AioRpcError as failed:
            raise errors.from_grpc(failed) from failed
        return response

    @asynccontextmanager
    async def stream(
        self, request: pb.CompletionRequest, *, timeout_s: float | None = None
    ) -> AsyncIterator[AsyncIterator[pb.CompletionChunk]]:
        """
        The answer as it comes; its last chunk is `finished`. Leaving early takes the request back.

        An answer that does not complete raises `CallFailed` after whatever came before, a `failed` chunk included.
        """
        call = self._calls.Stream(request, timeout=timeout_s, metadata=self._metadata)
        try:
            async with aclosing(_chunks(call)) as chunks:
                yield chunks
        finally:
            call.cancel()

    @property
    def _calls(self) -> Any:
        assert self._stub is not None, "the client has no `grpc` address, or was not entered"
        return self._stub

    @property
    def _metadata(self) -> tuple[tuple[str, str], ...]:
        return (("authorization", self._authorization),)


def _channel(target: str, credentials: grpc.ChannelCredentials | None) -> grpc.aio.Channel:
    options = [("grpc.max_receive_message_length", MAX_RECEIVE_BYTES)]
    if credentials is None:
        return grpc.aio.insecure_channel(target, options=options)
    return grpc.aio.secure_channel(target, credentials, options=options)


async def _chunks(call: Any) -> AsyncGenerator[pb.CompletionChunk, None]:
    finished = False
    try:
        async for chunk in call:
            finished = chunk.HasField("finished")
            yield chunk
    except grpc.aio.AioRpcError as failed:
        raise errors.from_grpc(failed) from failed
    if not finished:
        raise errors.CallFailed("the stream ended without `finished`", code="upstream_broken", status="OK")
