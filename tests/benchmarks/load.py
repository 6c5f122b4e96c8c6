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
import os
import statistics
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urlsplit

import grpc.aio
import msgspec

from protos.tollbridge.v1 import gateway_pb2 as pb
from tests.benchmarks import cpu

_METHOD = "/tollbridge.v1.Gateway/"
_LAST_CHUNK = b"0\r\n\r\n"


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """What to do for a while, and whose CPU to read before and after."""

    kind: str
    target: str
    watch: Mapping[str, Sequence[int]]
    concurrency: int = 1
    seconds: float = 1.0
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
    #: Of a stream: to its first content.
    p50_ms: float = 0.0
    p99_ms: float = 0.0
    #: Characters of text in one answer: the same from every target, or they did not do the same.
    characters: int = 0


#: One worker's way to make one request. Returns when its first content came, on `time.perf_counter`.
Request = Callable[[], Awaitable[float]]


async def _run(order: Order, requests: Sequence[Request], characters: int) -> Measured:
    """Every worker sends one request after the other until the time is over; the last ones are waited for."""
    await asyncio.gather(*(request() for request in requests))
    latencies: list[float] = []
    clock = time.perf_counter
    gc.collect()
    before, began = _cpu(order), clock()
    end = began + order.seconds

    async def work(request: Request) -> None:
        while (sent := clock()) < end:
            latencies.append(await request() - sent)

    await asyncio.gather(*map(work, requests))
    wall, after = clock() - began, _cpu(order)
    latencies.sort()
    return Measured(
        count=len(latencies),
        wall_s=wall,
        cpu_s={name: after[name] - before[name] for name in after},
        p50_ms=statistics.median(latencies) * 1e3,
        p99_ms=latencies[min(len(latencies) - 1, len(latencies) * 99 // 100)] * 1e3,
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


async def http(order: Order) -> Measured:
    """A plain POST."""
    return await _http(order, "POST", msgspec.json.encode(question(order.model)), _text_of_answer)


async def http_stream(order: Order) -> Measured:
    body = {**question(order.model), "stream": True, "stream_options": {"include_usage": True}}
    return await _http(order, "POST", msgspec.json.encode(body), _text_of_events)


async def poll(order: Order) -> Measured:
    return await _http(order, "GET", b"", lambda _: 0)


def _text_of_answer(body: bytes) -> int:
    return len(msgspec.json.decode(body)["choices"][0]["message"]["content"])


def _text_of_events(body: bytes) -> int:
    events = (line[6:] for line in body.split(b"\n") if line.startswith(b"data: {"))
    choices = (choice for event in events for choice in msgspec.json.decode(event)["choices"])
    return sum(len(choice["delta"].get("content") or "") for choice in choices)


async def _http(order: Order, method: str, body: bytes, characters: Callable[[bytes], int]) -> Measured:
    url = urlsplit(order.target)
    head = f"{method} {order.path} HTTP/1.1\r\nhost: {url.netloc}\r\nauthorization: Bearer {order.key}\r\n"
    head += f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    sent = head.encode() + body
    async with contextlib.AsyncExitStack() as stack:
        connections = [await asyncio.open_connection(url.hostname, url.port) for _ in range(order.concurrency)]
        for _, writer in connections:
            stack.callback(writer.close)
        _, whole = await _exchange(*connections[0], sent)
        requests = [_posting(reader, writer, sent) for reader, writer in connections]
        return await _run(order, requests, characters(_unchunked(whole)))


def _posting(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, sent: bytes) -> Request:
    async def one() -> float:
        first, _ = await _exchange(reader, writer, sent)
        return first

    return one


async def _exchange(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, sent: bytes) -> tuple[float, bytes]:
    """One request on a kept connection; when its first content came, and the body as it was framed."""
    writer.write(sent)
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    if not head.startswith(b"http/1.1 200"):
        raise RuntimeError(head.split(b"\r\n", 1)[0].decode())
    at = head.find(b"content-length: ")
    if at >= 0:
        body = await reader.readexactly(int(head[at + 16 : head.index(b"\r\n", at)]))
        return time.perf_counter(), body
    pieces = [await reader.read(65536)]
    first = time.perf_counter()
    # An event ends in an empty line, so content never looks like the last chunk.
    tail = pieces[0][-5:]
    while not tail.endswith(_LAST_CHUNK):
        piece = await reader.read(65536)
        if not piece:
            raise RuntimeError("a stream broke")
        pieces.append(piece)
        tail = (tail + piece)[-5:]
    return first, b"".join(pieces)


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
    "poll": poll,
    "jobs": jobs,
}


def main() -> None:
    gc.disable()
    with asyncio.Runner() as runner:
        for line in sys.stdin.buffer:
            order = msgspec.json.decode(line, type=Order)
            measured = runner.run(_answer(order))
            sys.stdout.buffer.write(msgspec.json.encode(measured) + b"\n")
            sys.stdout.buffer.flush()


async def _answer(order: Order) -> Measured | Jobs:
    return await KINDS[order.kind](order)


if __name__ == "__main__":
    main()
