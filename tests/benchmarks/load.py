"""
The load, in a process of its own: reads one order a line, answers one measurement a line.

It must cost less than what it measures. So it writes ready-made bytes, decodes no more than one answer of a run, and
says how busy it was: above nine tenths of a core its rates are its own and not the server's.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import math
import os
import signal
import sys
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, cast
from urllib.parse import urlsplit

import grpc.aio
import msgspec
from typing_extensions import override

from protos.tollbridge.v1 import gateway_pb2 as pb
from tests.benchmarks import cpu
from tests.benchmarks.loops import LEANEST, factory
from tests.benchmarks.provider import FIRST

_METHOD = "/tollbridge.v1.Gateway/"
_LAST_CHUNK = b"0\r\n\r\n"
_FIRST = FIRST.encode()


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """What to do for a while, and whose CPU to read before and after."""

    kind: str
    target: str
    watch: Mapping[str, Sequence[int]]
    concurrency: int = 1
    seconds: float = 1.0
    #: Requests a second of `http_paced`.
    rate: float = 0.0
    model: str = ""
    key: str = ""
    path: str = "/v1/chat/completions"
    #: Jobs of a submission.
    jobs: int = 0


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """One run of one order."""

    #: Requests, jobs or lines.
    count: int
    wall_s: float
    #: CPU seconds by group, of the load itself as `load`, and of the whole machine as `machine`.
    cpu_s: Mapping[str, float]
    #: Of a stream: to its first content. Of `http_paced`: from when the request was due.
    p50_ms: float = 0.0
    p99_ms: float = 0.0
    #: Characters of text in one answer: the same from every target, or they did not do the same.
    characters: int = 0


#: One worker's way to make one request. Its result is when the first content came, on `time.perf_counter`.
Request = Callable[[], Awaitable[float]]


async def _run(order: Order, requests: Sequence[Request], characters: int) -> Measured:
    """Every worker sends one request after the other, one at least, until the time is over; all are waited for."""
    await asyncio.gather(*(request() for request in requests))
    latencies: list[float] = []
    clock = time.perf_counter
    gc.collect()
    before, began = _cpu(order), clock()
    end = began + order.seconds

    async def work(request: Request) -> None:
        while True:
            sent = clock()
            latencies.append(await request() - sent)
            if clock() >= end:
                return

    await asyncio.gather(*map(work, requests))
    return _measured(latencies, clock() - began, before, _cpu(order), characters)


async def _run_paced(order: Order, requests: Sequence[Request]) -> Measured:
    """
    One request after the other at its time, evenly spaced, over whichever worker is idle.

    A latency counts from the time at which its request was due: one that had to wait, because all workers were busy or
    the load was late, has waited. To begin its clock when it was sent would leave out just what a stall does.
    """
    latencies: list[float] = []
    idle = list(requests)
    overdue: deque[float] = deque()
    sending: set[asyncio.Task[None]] = set()
    clock = time.perf_counter

    async def work(request: Request, due: float) -> None:
        latencies.append(await request() - due)
        while overdue:
            due = overdue.popleft()
            latencies.append(await request() - due)
        idle.append(request)

    gc.collect()
    before, began = _cpu(order), clock()
    for due in schedule(began, rate=order.rate, seconds=order.seconds):
        if (ahead := due - clock()) > 0:
            await asyncio.sleep(ahead)
        if idle:
            sending.add(asyncio.create_task(work(idle.pop(), due)))
        else:
            overdue.append(due)
        for task in [task for task in sending if task.done()]:
            sending.remove(task)
            task.result()
    await asyncio.gather(*sending)
    return _measured(latencies, clock() - began, before, _cpu(order), 0)


def schedule(began: float, *, rate: float, seconds: float) -> Iterator[float]:
    """When each request is due, in seconds on the clock of `began`."""
    return (began + number / rate for number in range(max(round(rate * seconds), 1)))


def percentile(ordered: Sequence[float], share: float) -> float:
    """By nearest rank: the least of the values that so large a share of them does not pass."""
    return ordered[max(math.ceil(share * len(ordered)), 1) - 1]


def _measured(
    latencies: list[float], wall_s: float, before: Mapping[str, float], after: Mapping[str, float], characters: int
) -> Measured:
    latencies.sort()
    return Measured(
        count=len(latencies),
        wall_s=wall_s,
        cpu_s={name: after[name] - before[name] for name in after},
        p50_ms=percentile(latencies, 0.50) * 1e3,
        p99_ms=percentile(latencies, 0.99) * 1e3,
        characters=characters,
    )


def _cpu(order: Order) -> dict[str, float]:
    busy, _ = cpu.machine()
    return {**cpu.snapshot(order.watch), "load": cpu.spent([os.getpid()]), "machine": busy}


def question(model: str) -> dict[str, Any]:
    return {
        "model": model,
        "messages": [
            {"role": "system", "content": "Be brief and exact."},
            {"role": "user", "content": "What does a toll bridge have in common with an API gateway? " * 8},
        ],
    }


# ------------------------------------------------------------------ gRPC


@asynccontextmanager
async def _channel(target: str) -> AsyncIterator[grpc.aio.Channel]:
    async with grpc.aio.insecure_channel(target, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
        yield channel


def _request(order: Order) -> bytes:
    asked = question(order.model)
    return pb.CompletionRequest(
        model=order.model, messages=[pb.Message(role=m["role"], text=m["content"]) for m in asked["messages"]]
    ).SerializeToString()


async def complete(order: Order) -> Measured:
    async with _channel(order.target) as channel:
        call: Any = channel.unary_unary(_METHOD + "Complete")
        request, metadata = _request(order), (("authorization", f"Bearer {order.key}"),)

        async def one() -> float:
            await call(request, metadata=metadata)
            return time.perf_counter()

        response = pb.CompletionResponse.FromString(await call(request, metadata=metadata))
        return await _run(order, [one] * order.concurrency, len(response.choices[0].text))


async def stream(order: Order) -> Measured:
    async with _channel(order.target) as channel:
        call: Any = channel.unary_stream(_METHOD + "Stream")
        request, metadata = _request(order), (("authorization", f"Bearer {order.key}"),)

        async def one() -> float:
            first = 0.0
            message = b""
            async for message in call(request, metadata=metadata):
                if not first and pb.CompletionChunk.FromString(message).HasField("delta"):
                    first = time.perf_counter()
            if not first or not pb.CompletionChunk.FromString(message).HasField("finished"):
                raise RuntimeError("a stream did not complete")
            return first

        characters = 0
        async for message in call(request, metadata=metadata):
            characters += sum(len(piece.text) for piece in pb.CompletionChunk.FromString(message).delta.pieces)
        return await _run(order, [one] * order.concurrency, characters)


# ------------------------------------------------------------------ HTTP


class _Connection(asyncio.Protocol):
    """One kept connection, one request at a time. Reads no more of an answer than where its content and its end are."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._answered: asyncio.Future[float] = self._loop.create_future()
        self._answered.set_result(0.0)
        self._sent = b""
        self._begin()

    def _begin(self) -> None:
        self._head = b""
        self._in_head = True
        #: Of the body, still to come. None: it has chunks, and ends with an empty one.
        self._left: int | None = None
        self._pieces: list[bytes] = []
        self._tail = b""
        self._first = 0.0

    @override
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def ask(self, sent: bytes) -> asyncio.Future[float]:
        """When its first content came, or of a whole answer its end, on `time.perf_counter`."""
        self._begin()
        self._answered = self._loop.create_future()
        self._transport.write(sent)
        return self._answered

    def body(self) -> bytes:
        """Of the last answer."""
        return _unchunked(b"".join(self._pieces)) if self._left is None else b"".join(self._pieces)

    def close(self) -> None:
        self._transport.close()

    @override
    def data_received(self, data: bytes) -> None:
        if self._in_head:
            self._head += data
            end = self._head.find(b"\r\n\r\n")
            if end < 0:
                return
            head, data = self._head[:end].lower(), self._head[end + 4 :]
            self._in_head = False
            if not head.startswith(b"http/1.1 200"):
                self._fail(self._head.decode(errors="replace"))
                return
            if (at := head.find(b"\r\ncontent-length:")) >= 0:
                self._left = int(head[at + 17 :].split(b"\r\n", 1)[0])
        if not data:
            return
        self._pieces.append(data)
        if self._left is not None:
            self._left -= len(data)
            if self._left <= 0:
                self._end(time.perf_counter())
            return
        # A word may come in two reads; and an event ends in an empty line, so content never looks like the last chunk.
        self._tail += data
        if not self._first and _FIRST in self._tail:
            self._first = time.perf_counter()
        self._tail = self._tail[-64:]
        if self._tail.endswith(_LAST_CHUNK):
            if not self._first or b"[DONE]" not in self._tail:
                self._fail("a stream did not complete")
                return
            self._end(self._first)

    @override
    def connection_lost(self, exc: Exception | None) -> None:
        self._fail(f"the server has closed the connection: {exc}")

    def _end(self, moment: float) -> None:
        if not self._answered.done():
            self._answered.set_result(moment)

    def _fail(self, why: str) -> None:
        if not self._answered.done():
            self._answered.set_exception(RuntimeError(why))


@asynccontextmanager
async def _connected(order: Order) -> AsyncIterator[list[_Connection]]:
    url = urlsplit(order.target)
    loop = asyncio.get_running_loop()
    assert url.hostname is not None
    assert url.port is not None
    async with contextlib.AsyncExitStack() as stack:
        connections = []
        for _ in range(order.concurrency):
            _, connection = await loop.create_connection(_Connection, url.hostname, url.port)
            stack.callback(connection.close)
            connections.append(connection)
        yield connections


async def http(order: Order) -> Measured:
    """A plain POST."""
    return await _http(order, _sent(order, "POST", question(order.model)), _text_of_answer)


async def http_stream(order: Order) -> Measured:
    asked = {**question(order.model), "stream": True, "stream_options": {"include_usage": True}}
    return await _http(order, _sent(order, "POST", asked), _text_of_events)


async def poll(order: Order) -> Measured:
    return await _http(order, _sent(order, "GET", None), lambda _: 0)


async def http_paced(order: Order) -> Measured:
    """Plain POSTs, so many a second whatever the answers do, over at most `concurrency` connections."""
    sent = _sent(order, "POST", question(order.model))
    async with _connected(order) as connections:
        for connection in connections:
            await connection.ask(sent)
        return await _run_paced(order, [partial(connection.ask, sent) for connection in connections])


def _sent(order: Order, method: str, said: object) -> bytes:
    body = b"" if said is None else msgspec.json.encode(said)
    head = f"{method} {order.path} HTTP/1.1\r\nhost: {urlsplit(order.target).netloc}\r\n"
    head += f"authorization: Bearer {order.key}\r\n"
    head += f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    return head.encode() + body


async def _http(order: Order, sent: bytes, characters: Callable[[bytes], int]) -> Measured:
    async with _connected(order) as connections:
        await connections[0].ask(sent)
        requests = [partial(connection.ask, sent) for connection in connections]
        return await _run(order, requests, characters(connections[0].body()))


def _text_of_answer(body: bytes) -> int:
    return len(msgspec.json.decode(body)["choices"][0]["message"]["content"])


def _text_of_events(body: bytes) -> int:
    events = (line[6:] for line in body.split(b"\n") if line.startswith(b"data: {"))
    choices = (choice for event in events for choice in msgspec.json.decode(event)["choices"])
    return sum(len(choice["delta"].get("content") or "") for choice in choices)


def _unchunked(body: bytes) -> bytes:
    if not body.endswith(_LAST_CHUNK):
        return body
    whole = b""
    while body:
        size, _, rest = body.partition(b"\r\n")
        whole, body = whole + rest[: int(size, 16)], rest[int(size, 16) + 2 :]
    return whole


# ------------------------------------------------------------------ jobs


class Jobs(msgspec.Struct, frozen=True, kw_only=True):
    """A submission: how it was taken in, and how it was run."""

    submitted: Measured
    run: Measured
    #: One that has ended.
    job_id: str


async def jobs(order: Order) -> Jobs:
    lines = [
        {"custom_id": f"n{number}", "method": "POST", "url": "/v1/chat/completions", "body": question(order.model)}
        for number in range(order.jobs)
    ]
    body = b"\n".join(map(msgspec.json.encode, lines))
    url = urlsplit(order.target)
    reader, writer = await asyncio.open_connection(url.hostname, url.port, limit=1 << 20)
    head = f"host: {url.netloc}\r\nauthorization: Bearer {order.key}\r\n"

    async def ask(method: str, path: str, content: bytes = b"", kind: str = "application/json") -> Any:
        writer.write(
            f"{method} {path} HTTP/1.1\r\n{head}content-type: {kind}\r\ncontent-length: {len(content)}\r\n\r\n".encode()
        )
        writer.write(content)
        answer = (await reader.readuntil(b"\r\n\r\n")).lower()
        at = answer.index(b"content-length: ") + 16
        said = msgspec.json.decode(await reader.readexactly(int(answer[at : answer.index(b"\r\n", at)])))
        if not answer.startswith((b"http/1.1 200", b"http/1.1 202")):
            raise RuntimeError(said)
        return said

    marks = [(time.perf_counter(), _cpu(order))]
    receipt = await ask("POST", "/v1/jobs", body, "application/x-ndjson")
    marks.append((time.perf_counter(), _cpu(order)))
    mine = f"/v1/jobs?submission_id={receipt['submission_id']}&limit=1&status="
    last = receipt["jobs"][-1]["id"]
    while (await ask("GET", f"/v1/jobs/{last}?wait=30"))["status"] in {"queued", "running"}:
        pass
    for status in ("queued", "running"):
        while (await ask("GET", mine + status))["data"]:  # noqa: ASYNC110  it is another process
            await asyncio.sleep(0.01)
    marks.append((time.perf_counter(), _cpu(order)))
    if (failed := await ask("GET", mine + "failed"))["data"]:
        raise RuntimeError(failed["data"][0]["error"])
    writer.close()
    submitted, run = (
        Measured(count=order.jobs, wall_s=then - now, cpu_s={name: after[name] - before[name] for name in after})
        for (now, before), (then, after) in itertools.pairwise(marks)
    )
    return Jobs(submitted=submitted, run=run, job_id=last)


KINDS: Mapping[str, Callable[[Order], Awaitable[Measured | Jobs]]] = {
    "complete": complete,
    "stream": stream,
    "http": http,
    "http_stream": http_stream,
    "http_paced": http_paced,
    "poll": poll,
    "jobs": jobs,
}


def main() -> None:
    # Ctrl-C reaches all that is started; whoever has started this one ends it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    gc.disable()
    with (
        asyncio.Runner(loop_factory=factory(LEANEST)) as usual,
        asyncio.Runner(loop_factory=factory("precise")) as precise,
    ):
        for line in sys.stdin.buffer:
            order = msgspec.json.decode(line, type=Order)
            measured = (precise if order.kind == "http_paced" else usual).run(_answer(order))
            sys.stdout.buffer.write(msgspec.json.encode(measured) + b"\n")
            sys.stdout.buffer.flush()


async def _answer(order: Order) -> Measured | Jobs:
    return await KINDS[order.kind](order)


if __name__ == "__main__":
    main()
