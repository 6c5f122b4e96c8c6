"""
What a call to a provider costs in CPU before anything is made of its answer: aiohttp's client beside ours.

One process calls a server of raw bytes that says the same to everybody; all take turns, and a figure is the median of
the rounds. Run: `python -m tests.benchmarks.bench_client [uvloop]`. Beside the two stand a bare protocol, which writes
and is woken by whatever arrives, so what the loop and the sockets cost, and the calls of `Upstream`, which make
something of the answer; what the parser takes of that is told alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import cast

import aiohttp
import uvloop

from adapters.chat import ChatRequest, Message, Role, Text
from adapters.client import Upstream
from adapters.contract import Endpoint, UpstreamCall
from adapters.http.clock import Clock
from adapters.http.pool import Pool
from adapters.http.request import head
from adapters.protocols import PROTOCOLS
from tests.stopping import command

ROUNDS = 9
CALLS = 300
#: At once, so that the loop has something to do whenever it looks.
STREAMS = 16
#: Pieces of one stream, each of them one read of a client that keeps up, and the events in each.
READS, EVENTS, PAUSE_S = 100, 10, 0.004

FIELDS = (
    ("content-type", "application/json"),
    ("authorization", "Bearer a-key-that-is-about-as-long-as-a-key-is-nowadays"),
    ("accept", "application/json"),
)
BODY = json.dumps({"model": "m", "messages": [{"role": "user", "content": "hi " * 60}]}).encode()
#: About what a large provider says around an answer.
HEAD = b"HTTP/1.1 200 OK\r\n" + b"".join(
    b"%b: %b\r\n" % (name, value)
    for name, value in {
        b"date": b"Mon, 01 Dec 2025 09:00:00 GMT",
        b"x-request-id": b"req_0123456789abcdef0123456789abcdef",
        b"openai-processing-ms": b"312",
        b"openai-version": b"2020-10-01",
        b"x-ratelimit-limit-requests": b"10000",
        b"x-ratelimit-remaining-requests": b"9999",
        b"x-ratelimit-reset-requests": b"6ms",
        b"x-ratelimit-limit-tokens": b"30000000",
        b"x-ratelimit-remaining-tokens": b"29999976",
        b"x-ratelimit-reset-tokens": b"0s",
        b"strict-transport-security": b"max-age=31536000; includeSubDomains; preload",
        b"x-content-type-options": b"nosniff",
        b"server": b"cloudflare",
        b"cf-ray": b"9a0000000000abcd-FRA",
    }.items()
)
SAID = json.dumps(
    {
        "id": "chatcmpl-1",
        "model": "m-1",
        "choices": [{"index": 0, "message": {"role": "assistant", "content": "hello " * 40}, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 62, "completion_tokens": 41},
    }
).encode()
ANSWER = HEAD + b"content-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (len(SAID), SAID)
EVENT = b'data: {"id":"chatcmpl-1","model":"m-1","choices":[{"index":0,"delta":{"content":" word"}}]}\n\n'
LAST = b'data: {"id":"chatcmpl-1","choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}\n\ndata: [DONE]\n\n'
BEGIN = HEAD + b"content-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


async def serve() -> None:
    """A stream is sent piece by piece, each as one read of the client."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                request = await reader.readuntil(b"\r\n\r\n")
                length = request.lower().split(b"content-length: ")[1].split(b"\r\n")[0]
                body = await reader.readexactly(int(length))
                if b"/stream" not in request and b'"stream":true' not in body:
                    writer.write(ANSWER)
                    continue
                writer.write(BEGIN)
                for _ in range(READS):
                    writer.write(chunk(EVENT) * EVENTS)
                    await writer.drain()
                    await asyncio.sleep(PAUSE_S)
                writer.write(chunk(LAST) + b"0\r\n\r\n")
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    sys.stdout.write(f"{server.sockets[0].getsockname()[1]}\n")
    sys.stdout.flush()
    async with server:
        await server.serve_forever()


@contextlib.contextmanager
def serving() -> Iterator[int]:
    command = [sys.executable, "-m", "tests.benchmarks.bench_client", "--serve"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield int(process.stdout.readline())
        finally:
            process.terminate()


class Bare(asyncio.Protocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    async def call(self, path: bytes, end: bytes) -> int:
        self._waiter = asyncio.get_running_loop().create_future()
        self._transport.write(b"POST %b HTTP/1.1\r\ncontent-length: %d\r\n\r\n%b" % (path, len(BODY), BODY))
        reads = 1
        while not (await self._waiter).endswith(end):
            self._waiter = asyncio.get_running_loop().create_future()
            reads += 1
        return reads

    def data_received(self, data: bytes) -> None:
        if not self._waiter.done():
            self._waiter.set_result(data)


class Clients:
    """Each way of making the two calls. All read to the end, and a stream says how often it was read."""

    def __init__(self, port: int, session: aiohttp.ClientSession, pool: Pool, upstream: Upstream) -> None:
        self._base = f"http://127.0.0.1:{port}/v1"
        self._port = port
        self._bare: list[Bare] = []
        self._session = session
        self._pool = pool
        self._upstream = upstream
        self._heads = {path: head("POST", self._base, path, FIELDS) for path in ("/chat/completions", "/stream")}
        self._endpoint = Endpoint(
            provider="p", protocol="chat_completions", base_url=self._base, headers=dict(FIELDS[1:2])
        )

    async def bare_plain(self) -> int:
        return await self._by_bare(b"/v1/chat/completions", SAID[-9:])

    async def bare_stream(self) -> int:
        return await self._by_bare(b"/v1/stream", b"\r\n0\r\n\r\n")

    async def _by_bare(self, path: bytes, end: bytes) -> int:
        loop = asyncio.get_running_loop()
        free = self._bare.pop() if self._bare else (await loop.create_connection(Bare, "127.0.0.1", self._port))[1]
        reads = await free.call(path, end)
        self._bare.append(free)
        return reads

    async def aiohttp_plain(self) -> int:
        async with self._session.post(self._base + "/chat/completions", data=BODY, headers=dict(FIELDS)) as answer:
            assert await answer.read() == SAID
        return 1

    async def aiohttp_stream(self) -> int:
        reads = 0
        async with self._session.post(self._base + "/stream", data=BODY, headers=dict(FIELDS)) as answer:
            while await answer.content.readany():
                reads += 1
        return reads

    async def ours_plain(self) -> int:
        async for data in self._ours("/chat/completions"):
            assert data == SAID
        return 1

    async def ours_stream(self) -> int:
        return len([data async for data in self._ours("/stream")])

    async def _ours(self, path: str) -> AsyncIterator[bytes]:
        origin, start = self._heads[path]
        clock = Clock(asyncio.get_running_loop().time() + 600, 5.0, "first_byte_timeout")
        connection = self._pool.free(origin) or await self._pool.connect(origin, clock, 5.0)
        connection.keep_alive_s = 4.0
        answer = connection.send(start, BODY, clock)
        await answer.head()
        try:
            while data := await answer.read():
                yield data
        finally:
            answer.close()

    def _call(self) -> UpstreamCall:
        return UpstreamCall(
            endpoint=self._endpoint,
            model="m",
            request=ChatRequest(messages=(Message(role=Role.USER, content=(Text(text="hi " * 60),)),)),
            deadline=asyncio.get_running_loop().time() + 600,
        )

    async def upstream_plain(self) -> int:
        assert (await self._upstream.complete(self._call())).choices
        return 1

    async def upstream_stream(self) -> int:
        async with self._upstream.stream(self._call()) as batches:
            return len([batch async for batch in batches])

    async def parser_stream(self) -> int:
        parser = PROTOCOLS["chat_completions"].new_parser(self._endpoint, {})
        for _ in range(READS):
            parser.feed(EVENT * EVENTS)
        return READS


async def spent(run: Callable[[], Awaitable[int]], times: int, *, at_once: bool) -> tuple[float, float]:
    """Microseconds of CPU of this process for each call or piece of a stream; how many reads it took for each."""
    start, reads = time.process_time(), 0
    if at_once:
        reads = sum(await asyncio.gather(*(run() for _ in range(times))))
        times *= READS
    else:
        for _ in range(times):
            reads += await run()
    return (time.process_time() - start) / times * 1e6, reads / times


async def measure(port: int) -> None:
    async with contextlib.AsyncExitStack() as stack:
        session = await stack.enter_async_context(aiohttp.ClientSession(cookie_jar=aiohttp.DummyCookieJar()))
        pool = Pool()
        stack.push_async_callback(pool.close)
        clients = Clients(port, session, pool, await stack.enter_async_context(Upstream()))
        plain = (clients.aiohttp_plain, clients.bare_plain, clients.ours_plain, clients.upstream_plain)
        streamed = (
            clients.aiohttp_stream,
            clients.bare_stream,
            clients.ours_stream,
            clients.upstream_stream,
            clients.parser_stream,
        )
        for name, times, runs in (("plain call", CALLS, plain), ("10 events", STREAMS, streamed)):
            rounds: list[list[tuple[float, float]]] = [[] for _ in runs]
            for number in range(-1, ROUNDS):
                for run, figures in zip(runs, rounds, strict=True):
                    figure = await spent(run, times, at_once=runs is streamed)
                    if number >= 0:
                        figures.append(figure)
            for run, figures in zip(runs, rounds, strict=True):
                cost, reads = (statistics.median(column) for column in zip(*figures, strict=True))
                ratio = statistics.median(a[0] / b[0] for a, b in zip(figures, rounds[0], strict=True))
                print(  # noqa: T201
                    f"{name:12} {run.__name__:16} {cost:8.1f} us in {reads:4.2f} reads  {ratio:5.2f} of aiohttp's"
                )


def main() -> None:
    if sys.argv[1:] == ["--serve"]:
        with contextlib.suppress(KeyboardInterrupt):
            asyncio.run(serve())
        return
    factory = {"uvloop": uvloop.new_event_loop}.get(sys.argv[-1])
    with serving() as port, asyncio.Runner(loop_factory=factory) as runner:
        runner.run(measure(port))


if __name__ == "__main__":
    command(main)
