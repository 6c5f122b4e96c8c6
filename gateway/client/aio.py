"""The face for programs with an event loop. `sync.py` is the same without `await`; the logic is in the flows."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Iterator, Mapping
from contextlib import AsyncExitStack, aclosing, asynccontextmanager, closing, contextmanager
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack

import grpc
import grpc.aio
import httpx

from gateway.client import batches as batch_flows
from gateway.client import errors, flow
from gateway.client import jobs as job_flows
from gateway.client.answer import Answer, Gathered, text_of
from gateway.client.batches import Batch, BatchResult, File, Source
from gateway.client.connection import LIMITS, OPTIONS, Address, closed, timeouts
from gateway.client.flow import Emit, Flow, Items, Step
from gateway.client.jobs import CHAT, Job, Line, Receipt, Result
from gateway.client.messages import Asked, Parameters, request_of
from protos.tollbridge.v1 import gateway_pb2 as pb
from protos.tollbridge.v1 import gateway_pb2_grpc

T = TypeVar("T")


class AsyncClient:
    """
    A connection to one gateway. Enter it before use, in the event loop that uses it.

    `grpc` is host:port, `rest` a URL; `credentials` switches gRPC to TLS, `ssl_context` is for https. A part whose
    address is left out cannot be used. `retry_for_s`: after so many seconds nothing is asked again; 0: never.
    """

    def __init__(
        self,
        *,
        api_key: str,
        grpc: str | None = None,
        rest: str | None = None,
        credentials: grpc.ChannelCredentials | None = None,
        ssl_context: ssl.SSLContext | None = None,
        retry_for_s: float = 30.0,
    ) -> None:
        self._address = Address(
            api_key=api_key,
            grpc=grpc,
            rest=rest,
            credentials=credentials,
            ssl_context=ssl_context,
            retry_for_s=retry_for_s,
        )
        self._driver = AsyncDriver(self._address.metadata)
        self._stack = AsyncExitStack()
        self.jobs = AsyncJobs(self._driver, retry_for_s)
        self.batches = AsyncBatches(self._driver, retry_for_s)

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            if self._address.grpc is not None:
                self._driver.use(
                    await stack.enter_async_context(_channel(self._address.grpc, self._address.credentials))
                )
            if self._address.rest is not None:
                http = httpx.AsyncClient(
                    base_url=self._address.rest,
                    headers=self._address.headers,
                    verify=self._address.verify,
                    timeout=timeouts(),
                    limits=LIMITS,
                    trust_env=False,
                )
                self._driver.http = await stack.enter_async_context(http)
            # The first to happen: what still runs then learns that the client is closed.
            stack.callback(self._driver.close)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.__aexit__(kind, error, trace)

    async def complete(
        self, asked: Asked, *, timeout_s: float | None = None, **parameters: Unpack[Parameters]
    ) -> Answer:
        """
        The whole answer. `timeout_s` travels along: the gateway gives up at the same time. Raises `CallFailed`.

        Asked again where nothing was dispatched and waiting helps.
        """
        request = request_of(asked, parameters)
        response = await self._driver.run(flow.complete(request, timeout_s, self._address.retry_for_s))
        return Answer(choices=tuple(response.choices), outcome=response.outcome)

    @asynccontextmanager
    async def stream(
        self, asked: Asked, *, timeout_s: float | None = None, **parameters: Unpack[Parameters]
    ) -> AsyncIterator[AsyncStream]:
        """
        The answer as it comes, asked for at the first read. Leaving early takes the request back.

        An answer that does not complete raises `CallFailed` after whatever came before.
        """
        request = request_of(asked, parameters)
        chunks = self._driver.iterate(flow.stream(request, timeout_s, self._address.retry_for_s))
        async with aclosing(chunks):
            yield AsyncStream(chunks)


class AsyncStream:
    """The chunks of an answer, up to `finished`. Read it in one of three ways, or one after the other."""

    def __init__(self, chunks: AsyncIterator[pb.CompletionChunk]) -> None:
        self._chunks = chunks
        self._gathered = Gathered()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> pb.CompletionChunk:
        chunk = await anext(self._chunks)
        self._gathered.add(chunk)
        return chunk

    async def text(self) -> AsyncIterator[str]:
        """The text of the first choice as it comes."""
        async for chunk in self:
            if text := text_of(chunk):
                yield text

    async def answer(self) -> Answer:
        """The whole answer, what was read before included. Reads what is left."""
        async for _ in self:
            pass
        return self._gathered.answer()


class AsyncJobs:
    """The jobs of one API key. Every method raises `CallFailed`."""

    def __init__(self, driver: AsyncDriver, budget_s: float) -> None:
        self._driver = driver
        self._budget_s = budget_s

    async def submit(self, jobs: Line | Iterable[Line], *, idempotency_key: str | None = None) -> Receipt:
        """
        Hand in jobs, each an object of the OpenAI batch input format, as one submission. A `url` may be left out.

        When it returns they are stored. It is repeated under one idempotency key, made up where none is given, so that
        they are stored once.
        """
        return await self._driver.run(job_flows.submit(jobs, idempotency_key, self._budget_s))

    async def submit_lines(self, lines: bytes, *, idempotency_key: str | None = None) -> Receipt:
        """As `submit`, for a file of JSON lines as it is. A line that is not valid comes back with its own error."""
        return await self._driver.run(job_flows.submit_lines(lines, idempotency_key, self._budget_s))

    async def get(self, job_id: str) -> Job:
        return await self._driver.run(job_flows.get(job_id, self._budget_s))

    async def wait(self, job_id: str, *, timeout_s: float | None = None) -> Job:
        """The job once it has ended. Raises `TimeoutError` when that takes longer than `timeout_s`."""
        return await self._driver.run(job_flows.wait(job_id, timeout_s, self._budget_s))

    def as_completed(self, *submissions: Receipt | str, timeout_s: float | None = None) -> AsyncIterator[Job]:
        """
        Every job of the submissions once it has ended, in the order of their ends, rejected lines included.

        A submission is a receipt or its id. Nothing is held open between two jobs. Raises `TimeoutError`.
        """
        return self._driver.iterate(job_flows.as_completed(submissions, timeout_s, self._budget_s))

    def list(self, **filters: str) -> AsyncIterator[Job]:
        """The jobs that the filters select (`status`, `session_id`, ...), oldest first, without their answers."""
        return self._driver.iterate(job_flows.listed(filters, self._budget_s))

    @asynccontextmanager
    async def results(self, **filters: str) -> AsyncIterator[AsyncIterator[Result]]:
        """The ended jobs that the filters select, with their answers, read as they are taken."""
        async with aclosing(self._driver.iterate(job_flows.results(filters, self._budget_s))) as results:
            yield results

    async def cancel(self, job_id: str) -> Job:
        """Takes it back. A running one ends when its call was taken back; an ended one stays as it is."""
        return await self._driver.run(job_flows.cancel(job_id, self._budget_s))

    async def delete(self, job_id: str) -> None:
        """Deletes an ended job with its content."""
        await self._driver.run(job_flows.delete(job_id, self._budget_s))


class AsyncBatches:
    """The files and batches of one API key. Every method raises `CallFailed`."""

    def __init__(self, driver: AsyncDriver, budget_s: float) -> None:
        self._driver = driver
        self._budget_s = budget_s

    async def submit(
        self,
        source: Source,
        *,
        endpoint: str = CHAT,
        metadata: Mapping[str, str] | None = None,
        webhook_url: str | None = None,
        idempotency_key: str | None = None,
    ) -> Batch:
        """
        Upload a file of JSON lines (its path or its bytes) or the requests themselves, and start a batch of them.

        It is repeated under one idempotency key, made up where none is given, so that there is one batch.
        """
        return await self._driver.run(
            batch_flows.submit(source, endpoint, metadata, webhook_url, idempotency_key, self._budget_s)
        )

    async def upload(
        self, source: Source, *, filename: str | None = None, url: str = CHAT, idempotency_key: str | None = None
    ) -> File:
        """The input of a batch. `url` is that of requests that name none; a path or bytes are taken as they are."""
        return await self._driver.run(batch_flows.upload(source, filename, url, idempotency_key, self._budget_s))

    async def create(
        self,
        input_file_id: str,
        *,
        endpoint: str = CHAT,
        metadata: Mapping[str, str] | None = None,
        webhook_url: str | None = None,
        idempotency_key: str | None = None,
    ) -> Batch:
        """A batch of a file that was uploaded."""
        return await self._driver.run(
            batch_flows.create(input_file_id, endpoint, metadata, webhook_url, idempotency_key, self._budget_s)
        )

    async def get(self, batch_id: str) -> Batch:
        return await self._driver.run(batch_flows.get(batch_id, self._budget_s))

    async def wait(
        self, batch_id: str, *, timeout_s: float | None = None, progress: Callable[[Batch], object] | None = None
    ) -> Batch:
        """
        The batch once it has ended. Raises `TimeoutError` when that takes longer than `timeout_s`.

        `progress` is called with it whenever its status or its counts have changed.
        """
        return await self._driver.run(batch_flows.wait(batch_id, timeout_s, progress, self._budget_s))

    @asynccontextmanager
    async def results(
        self, batch: Batch | str, *, with_requests: bool = False
    ) -> AsyncIterator[AsyncIterator[BatchResult]]:
        """
        What became of each line of a batch that has ended: the answers, then the failures, read as they are taken.

        `with_requests` reads the input beside them and joins by `custom_id`: all in the order of the input, each with
        its line in `request`.
        """
        async with aclosing(self._driver.iterate(batch_flows.results(batch, with_requests, self._budget_s))) as results:
            yield results

    async def cancel(self, batch_id: str) -> Batch:
        """Takes back what has not ended. Raises `Conflict` where all has."""
        return await self._driver.run(batch_flows.cancel(batch_id, self._budget_s))


class AsyncDriver:
    """Runs flows: the one place of this face that waits. Made of connections that somebody else opens and closes."""

    def __init__(self, metadata: tuple[tuple[str, str], ...]) -> None:
        self.http: httpx.AsyncClient | None = None
        self._stub: Any = None
        self._metadata = metadata

    def use(self, channel: grpc.aio.Channel) -> None:
        self._stub = gateway_pb2_grpc.GatewayStub(channel)  # type: ignore[no-untyped-call]

    def close(self) -> None:
        self.http = self._stub = None

    async def run(self, steps: Flow[T]) -> T:
        opened = AsyncExitStack()
        async with opened:
            opened.enter_context(closing(steps))
            try:
                step = next(steps)
                while True:
                    try:
                        given = await self._perform(step, opened)
                    except errors.CallFailed as failed:
                        step = steps.throw(failed)
                    else:
                        step = steps.send(given)
            except StopIteration as end:
                result: T = end.value
                return result

    async def iterate(self, steps: Items[T]) -> AsyncGenerator[T, None]:
        with closing(steps):
            async with AsyncExitStack() as opened:
                try:
                    step = next(steps)
                    while True:
                        if isinstance(step, Emit):
                            yield step.item
                            step = next(steps)
                            continue
                        try:
                            given = await self._perform(step, opened)
                        except errors.CallFailed as failed:
                            step = steps.throw(failed)
                        else:
                            step = steps.send(given)
                except StopIteration:
                    return

    async def _perform(self, step: Step, opened: AsyncExitStack) -> Any:
        match step:
            case flow.Hear(call):
                with _grpc_errors():
                    chunk = await call.read()
                    return None if chunk is grpc.aio.EOF else chunk
            case flow.Read(answer):
                with _http_errors():
                    return await anext(answer.pieces, b"")
            case flow.Ask(request, timeout_s):
                with _grpc_errors():
                    return await self._calls.Complete(request, timeout=timeout_s, metadata=self._metadata)
            case flow.Listen(request, timeout_s):
                call = self._calls.Stream(request, timeout=timeout_s, metadata=self._metadata)
                opened.callback(call.cancel)
                return call
            case flow.Send():
                with _http_errors():
                    return await self._exchanges.request(
                        step.method,
                        step.path,
                        params=step.params,
                        headers=step.headers,
                        timeout=timeouts(step.timeout_s),
                        **flow.body_of(step),
                    )
            case flow.Open():
                with _http_errors():
                    asked = self._exchanges.build_request("GET", step.path, params=step.params)
                    response = await self._exchanges.send(asked, stream=True)
                    opened.push_async_callback(response.aclose)
                    if not response.is_success:
                        await response.aread()
                    return flow.Opened(response, response.aiter_bytes())
            case flow.Pause(seconds):
                await asyncio.sleep(seconds)
                return None

    @property
    def _calls(self) -> Any:
        if self._stub is None:
            raise closed("calls over gRPC")
        return self._stub

    @property
    def _exchanges(self) -> httpx.AsyncClient:
        if self.http is None:
            raise closed("jobs and batches over REST")
        return self.http


def _channel(target: str, credentials: grpc.ChannelCredentials | None) -> grpc.aio.Channel:
    if credentials is None:
        return grpc.aio.insecure_channel(target, options=OPTIONS)
    return grpc.aio.secure_channel(target, credentials, options=OPTIONS)


@contextmanager
def _grpc_errors() -> Iterator[None]:
    try:
        yield
    except grpc.aio.AioRpcError as failed:
        raise errors.from_grpc(failed) from failed
    except asyncio.CancelledError:
        # gRPC says it so, too, of a call whose channel was closed: nobody cancelled this task.
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        raise errors.failure("the client was closed during the call", code="cancelled") from None


@contextmanager
def _http_errors() -> Iterator[None]:
    try:
        yield
    except httpx.RequestError as failed:
        raise errors.from_transport(failed) from failed
