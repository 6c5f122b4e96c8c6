"""The face for programs without an event loop. `aio.py` is the same with `await`; the logic is in the flows."""

from __future__ import annotations

import ssl
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack

import grpc
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


class Client:
    """
    A connection to one gateway. Enter it before use; it may be shared by threads.

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
        self._driver = Driver(self._address.metadata)
        self._stack = ExitStack()
        self.jobs = Jobs(self._driver, retry_for_s)
        self.batches = Batches(self._driver, retry_for_s)

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            if self._address.grpc is not None:
                self._driver.use(stack.enter_context(_channel(self._address.grpc, self._address.credentials)))
            if self._address.rest is not None:
                http = httpx.Client(
                    base_url=self._address.rest,
                    headers=self._address.headers,
                    verify=self._address.verify,
                    timeout=timeouts(),
                    limits=LIMITS,
                    trust_env=False,
                )
                self._driver.http = stack.enter_context(http)
            # The first to happen: what still runs then learns that the client is closed.
            stack.callback(self._driver.close)
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.__exit__(kind, error, trace)

    def complete(self, asked: Asked, *, timeout_s: float | None = None, **parameters: Unpack[Parameters]) -> Answer:
        """
        The whole answer. `timeout_s` travels along: the gateway gives up at the same time. Raises `CallFailed`.

        Asked again where nothing was dispatched and waiting helps.
        """
        request = request_of(asked, parameters)
        response = self._driver.run(flow.complete(request, timeout_s, self._address.retry_for_s))
        return Answer(choices=tuple(response.choices), outcome=response.outcome)

    @contextmanager
    def stream(
        self, asked: Asked, *, timeout_s: float | None = None, **parameters: Unpack[Parameters]
    ) -> Iterator[Stream]:
        """
        The answer as it comes, asked for at the first read. Leaving early takes the request back.

        An answer that does not complete raises `CallFailed` after whatever came before.
        """
        request = request_of(asked, parameters)
        chunks = self._driver.iterate(flow.stream(request, timeout_s, self._address.retry_for_s))
        with closing(chunks):
            yield Stream(chunks)


class Stream:
    """The chunks of an answer, up to `finished`. Read it in one of three ways, or one after the other."""

    def __init__(self, chunks: Iterator[pb.CompletionChunk]) -> None:
        self._chunks = chunks
        self._gathered = Gathered()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> pb.CompletionChunk:
        chunk = next(self._chunks)
        self._gathered.add(chunk)
        return chunk

    def text(self) -> Iterator[str]:
        """The text of the first choice as it comes."""
        for chunk in self:
            if text := text_of(chunk):
                yield text

    def answer(self) -> Answer:
        """The whole answer, what was read before included. Reads what is left."""
        for _ in self:
            pass
        return self._gathered.answer()


class Jobs:
    """The jobs of one API key. Every method raises `CallFailed`."""

    def __init__(self, driver: Driver, budget_s: float) -> None:
        self._driver = driver
        self._budget_s = budget_s

    def submit(self, jobs: Line | Iterable[Line], *, idempotency_key: str | None = None) -> Receipt:
        """
        Hand in jobs, each an object of the OpenAI batch input format, as one submission. A `url` may be left out.

        When it returns they are stored. It is repeated under one idempotency key, made up where none is given, so that
        they are stored once.
        """
        return self._driver.run(job_flows.submit(jobs, idempotency_key, self._budget_s))

    def submit_lines(self, lines: bytes, *, idempotency_key: str | None = None) -> Receipt:
        """As `submit`, for a file of JSON lines as it is. A line that is not valid comes back with its own error."""
        return self._driver.run(job_flows.submit_lines(lines, idempotency_key, self._budget_s))

    def get(self, job_id: str) -> Job:
        return self._driver.run(job_flows.get(job_id, self._budget_s))

    def wait(self, job_id: str, *, timeout_s: float | None = None) -> Job:
        """The job once it has ended. Raises `TimeoutError` when that takes longer than `timeout_s`."""
        return self._driver.run(job_flows.wait(job_id, timeout_s, self._budget_s))

    def as_completed(self, *submissions: Receipt | str, timeout_s: float | None = None) -> Iterator[Job]:
        """
        Every job of the submissions once it has ended, in the order of their ends, rejected lines included.

        A submission is a receipt or its id. Nothing is held open between two jobs. Raises `TimeoutError`.
        """
        return self._driver.iterate(job_flows.as_completed(submissions, timeout_s, self._budget_s))

    def list(self, **filters: str) -> Iterator[Job]:
        """The jobs that the filters select (`status`, `session_id`, ...), oldest first, without their answers."""
        return self._driver.iterate(job_flows.listed(filters, self._budget_s))

    @contextmanager
    def results(self, **filters: str) -> Iterator[Iterator[Result]]:
        """The ended jobs that the filters select, with their answers, read as they are taken."""
        with closing(self._driver.iterate(job_flows.results(filters, self._budget_s))) as results:
            yield results

    def cancel(self, job_id: str) -> Job:
        """Takes it back. A running one ends when its call was taken back; an ended one stays as it is."""
        return self._driver.run(job_flows.cancel(job_id, self._budget_s))

    def delete(self, job_id: str) -> None:
        """Deletes an ended job with its content."""
        self._driver.run(job_flows.delete(job_id, self._budget_s))


class Batches:
    """The files and batches of one API key. Every method raises `CallFailed`."""

    def __init__(self, driver: Driver, budget_s: float) -> None:
        self._driver = driver
        self._budget_s = budget_s

    def submit(
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
        return self._driver.run(
            batch_flows.submit(source, endpoint, metadata, webhook_url, idempotency_key, self._budget_s)
        )

    def upload(
        self, source: Source, *, filename: str | None = None, url: str = CHAT, idempotency_key: str | None = None
    ) -> File:
        """The input of a batch. `url` is that of requests that name none; a path or bytes are taken as they are."""
        return self._driver.run(batch_flows.upload(source, filename, url, idempotency_key, self._budget_s))

    def create(
        self,
        input_file_id: str,
        *,
        endpoint: str = CHAT,
        metadata: Mapping[str, str] | None = None,
        webhook_url: str | None = None,
        idempotency_key: str | None = None,
    ) -> Batch:
        """A batch of a file that was uploaded."""
        return self._driver.run(
            batch_flows.create(input_file_id, endpoint, metadata, webhook_url, idempotency_key, self._budget_s)
        )

    def get(self, batch_id: str) -> Batch:
        return self._driver.run(batch_flows.get(batch_id, self._budget_s))

    def wait(
        self, batch_id: str, *, timeout_s: float | None = None, progress: Callable[[Batch], object] | None = None
    ) -> Batch:
        """
        The batch once it has ended. Raises `TimeoutError` when that takes longer than `timeout_s`.

        `progress` is called with it whenever its status or its counts have changed.
        """
        return self._driver.run(batch_flows.wait(batch_id, timeout_s, progress, self._budget_s))

    @contextmanager
    def results(self, batch: Batch | str, *, with_requests: bool = False) -> Iterator[Iterator[BatchResult]]:
        """
        What became of each line of a batch that has ended: the answers, then the failures, read as they are taken.

        `with_requests` reads the input beside them and joins by `custom_id`: all in the order of the input, each with
        its line in `request`.
        """
        with closing(self._driver.iterate(batch_flows.results(batch, with_requests, self._budget_s))) as results:
            yield results

    def cancel(self, batch_id: str) -> Batch:
        """Takes back what has not ended. Raises `Conflict` where all has."""
        return self._driver.run(batch_flows.cancel(batch_id, self._budget_s))


class Driver:
    """Runs flows: the one place of this face that waits. Made of connections that somebody else opens and closes."""

    def __init__(self, metadata: tuple[tuple[str, str], ...]) -> None:
        self.http: httpx.Client | None = None
        self._stub: Any = None
        self._metadata = metadata

    def use(self, channel: grpc.Channel) -> None:
        self._stub = gateway_pb2_grpc.GatewayStub(channel)  # type: ignore[no-untyped-call]

    def close(self) -> None:
        self.http = self._stub = None

    def run(self, steps: Flow[T]) -> T:
        with closing(steps), ExitStack() as opened:
            try:
                step = next(steps)
                while True:
                    try:
                        given = self._perform(step, opened)
                    except errors.CallFailed as failed:
                        step = steps.throw(failed)
                    else:
                        step = steps.send(given)
            except StopIteration as end:
                result: T = end.value
                return result

    def iterate(self, steps: Items[T]) -> Generator[T, None, None]:
        with closing(steps), ExitStack() as opened:
            try:
                step = next(steps)
                while True:
                    if isinstance(step, Emit):
                        yield step.item
                        step = next(steps)
                        continue
                    try:
                        given = self._perform(step, opened)
                    except errors.CallFailed as failed:
                        step = steps.throw(failed)
                    else:
                        step = steps.send(given)
            except StopIteration:
                return

    def _perform(self, step: Step, opened: ExitStack) -> Any:
        match step:
            case flow.Hear(call):
                with _grpc_errors():
                    return next(call, None)
            case flow.Read(answer):
                with _http_errors():
                    return next(answer.pieces, b"")
            case flow.Ask(request, timeout_s):
                with _grpc_errors():
                    return self._calls.Complete(request, timeout=timeout_s, metadata=self._metadata)
            case flow.Listen(request, timeout_s):
                call = self._calls.Stream(request, timeout=timeout_s, metadata=self._metadata)
                opened.callback(call.cancel)
                return call
            case flow.Send():
                with _http_errors():
                    return self._exchanges.request(
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
                    response = self._exchanges.send(asked, stream=True)
                    opened.callback(response.close)
                    if not response.is_success:
                        response.read()
                    return flow.Opened(response, response.iter_bytes())
            case flow.Pause(seconds):
                if seconds:
                    time.sleep(seconds)
                return None

    @property
    def _calls(self) -> Any:
        if self._stub is None:
            raise closed("calls over gRPC")
        return self._stub

    @property
    def _exchanges(self) -> httpx.Client:
        if self.http is None:
            raise closed("jobs and batches over REST")
        return self.http


def _channel(target: str, credentials: grpc.ChannelCredentials | None) -> grpc.Channel:
    if credentials is None:
        return grpc.insecure_channel(target, options=OPTIONS)
    return grpc.secure_channel(target, credentials, options=OPTIONS)


@contextmanager
def _grpc_errors() -> Iterator[None]:
    try:
        yield
    except grpc.RpcError as failed:
        raise errors.from_grpc(failed) from failed


@contextmanager
def _http_errors() -> Iterator[None]:
    try:
        yield
    except httpx.RequestError as failed:
        raise errors.from_transport(failed) from failed
