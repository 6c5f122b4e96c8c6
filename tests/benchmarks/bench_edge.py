"""
What the REST edge costs: everything between the socket and the line, without the line and without the codec.

    python tests/benchmarks/bench_edge.py [--rounds N] [--seconds S] [--concurrency N] [--beside CHECKOUT]

The server has a process of its own, so has the load; the line answers at once, and bodies are neither parsed nor
rendered. Beside it stands a bare aiohttp server that reads the same bodies and answers the same bytes, and with
`--beside` the edge of another checkout. All take turns, so that noise meets all of them. CPU per request is the figure;
the ratios are medians of those of each round.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import sys
import tempfile
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

# The checkout whose server this process is.
sys.path.insert(0, sys.argv[2] if sys.argv[1:2] == ["serve"] else str(Path(__file__).parents[2]))

import msgspec
import structlog
from aiohttp import web

from adapters.chat import ChatRequest, ChatResponse, Choice, Native, StopReason, TextDelta
from gateway import logs
from gateway.answer import SILENT, Ended, Item, Observer
from gateway.call import Call, Caller, Completion, Scope
from gateway.keys import Keys, KeysSettings, _digest, _Entry
from gateway.keys.rights import NO_LIMITS, Rights
from gateway.rest.apis import CHAT_COMPLETIONS, Envelope
from gateway.rest.app import RestSettings, serve
from gateway.rest.chat import Chat
from gateway.rest.endpoint import Endpoint
from gateway.rest.streams import StreamSettings
from gateway.runtime import settle_memory
from tests.benchmarks import loops
from tests.benchmarks.load import Measured, Order
from tests.benchmarks.provider import FIRST
from tests.fakes.line import ENDS, ROUTE, not_here, outcome
from tests.stopping import command

HERE = str(Path(__file__).parents[2])
KEY = "tb_0123456789_" + "k" * 43
#: Writes of a stream, and how long each is: ten events of a provider that sends them ten at a time.
WRITES, EVENT = (
    20,
    f'data: {{"id":"x","choices":[{{"index":0,"delta":{{"content":"{FIRST} "}},"finish_reason":null}}]}}\n\n',
)
BURST = (EVENT * 10).encode()
LAST = b"data: [DONE]\n\n"
ANSWER = msgspec.json.encode({"choices": [{"message": {"content": "A toll for each. " * 8}}]})

log = structlog.get_logger("gateway")


class Answers:
    """A line that answers at once, and logs as `gateway.failover` does."""

    def __init__(self) -> None:
        choice = Choice(index=0, text="", stop_reason=StopReason.STOP, native_stop_reason="stop")
        self._completion = Completion(
            response=ChatResponse(choices=(choice,), response_id="x", served_model="gpt-4o"), outcome=outcome()
        )
        self._ended = Ended(ends=ENDS, outcome=outcome(), native=LAST)

    async def complete(self, call: Call, observer: Observer = SILENT) -> Completion:
        self._log(call)
        return self._completion

    @asynccontextmanager
    async def stream(self, call: Call, observer: Observer = SILENT) -> AsyncIterator[AsyncIterator[Item]]:
        observer.started(ROUTE, 1)
        async with contextlib.aclosing(self._items()) as items:
            yield items
        self._log(call)

    async def _items(self) -> AsyncGenerator[Item, None]:
        item: Any = (TextDelta("word "), Native(raw=BURST))
        for _ in range(WRITES):
            await asyncio.sleep(0)
            yield item
        yield self._ended

    def _log(self, call: Call) -> None:
        log.info(
            "gateway.request_ended",
            request_id=call.request_id,
            debit_id=call.request_id,
            key_id=str(call.caller.key_id),
            session_id=call.options.session_id,
            transport=call.transport,
            model=call.model,
            ended="complete",
            code=None,
            error_class=None,
            error_code=None,
            provider="openai",
            route_id="r1",
            attempts=1,
            input_tokens=12,
            output_tokens=40,
            cost_state="charged",
            cost_usd="0.000125",
            settlement="settled",
            queued_ms=0,
            first_byte_ms=12,
            duration_ms=14,
        )


class Codec:
    """Chat Completions without its bodies: they are the codec's, and measured there."""

    def __init__(self) -> None:
        self._chats = {
            streamed: CHAT_COMPLETIONS.protocol.parse_request(
                msgspec.json.encode(
                    {"model": "gpt-4o", "stream": streamed, "messages": [{"role": "user", "content": "Hello?"}]}
                )
            )
            for streamed in (False, True)
        }
        self._envelopes = {streamed: CHAT_COMPLETIONS.envelope(chat) for streamed, chat in self._chats.items()}

    def parse_request(self, body: bytes) -> ChatRequest:
        return self._chats[b'"streamed"' in body[:40]]

    def render_response(self, response: ChatResponse) -> bytes:
        return ANSWER

    def envelope(self, chat: ChatRequest) -> Envelope:
        return self._envelopes[chat is self._chats[True]]

    def __getattr__(self, name: str) -> Any:
        return getattr(CHAT_COMPLETIONS.protocol, name)


def keys() -> Keys:
    """The real ones, with one key, and no database to ask for others."""
    found = Keys(None, KeysSettings(stale_after_s=1e9), time.monotonic)  # type: ignore[arg-type]
    scopes = frozenset(Scope)
    digest = _digest(KEY)
    entry = _Entry(
        digest=digest,
        caller=Caller(key_id=uuid.UUID(int=7), name="bench", scopes=scopes),
        rights=Rights(scopes=scopes, models=None, providers=None, limits=NO_LIMITS, expires_at=None),
        expires_at=None,
        holdable=True,
    )
    found._by_digest, found._usable_ids, found._asked_at = {digest: entry}, {uuid.UUID(int=7): entry}, time.monotonic()
    return found


@asynccontextmanager
async def edge() -> AsyncIterator[int]:
    codec = Codec()
    api: Any = msgspec.structs.replace(CHAT_COMPLETIONS, protocol=codec, envelope=codec.envelope)
    chat = Chat(Answers(), StreamSettings(), not_here)
    endpoint = Endpoint(
        method="POST", path="/v1/chat/completions", access=Scope.CHAT, handler=partial(chat.answer, api), apis=(api,)
    )
    async with serve(RestSettings(port=0, drain_s=0.0), [endpoint], keys()) as server:
        yield server.port


@asynccontextmanager
async def bare() -> AsyncIterator[int]:
    """The same bytes without anything else."""

    async def answer(request: web.BaseRequest) -> web.StreamResponse:
        if b'"streamed"' not in (await request.read())[:40]:
            return web.Response(body=ANSWER, content_type="application/json")
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        for _ in range(WRITES):
            await asyncio.sleep(0)
            await response.write(BURST)
        await response.write(LAST)
        return response

    server = web.Server(answer, access_log=None)
    listening = await asyncio.get_running_loop().create_server(server, "127.0.0.1", 0, backlog=1024)
    yield listening.sockets[0].getsockname()[1]
    listening.close()
    await server.shutdown(1.0)


async def serving(name: str) -> None:
    async with {"edge": edge, "bare": bare}[name]() as port:
        settle_memory()
        logs.announce("gateway.ready", port=port)
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)


@asynccontextmanager
async def server(name: str, checkout: str, stderr: Path) -> AsyncIterator[tuple[int, int]]:
    """Its process id and its port."""
    with stderr.open("ab") as file:
        process = await asyncio.create_subprocess_exec(
            sys.executable, __file__, "serve", checkout, name,
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=file, cwd=checkout,
        )  # fmt: skip
    assert process.stdout is not None
    try:
        line = await process.stdout.readline()
        if not line:
            raise RuntimeError(f"the server {name} of {checkout} did not start")
        yield process.pid, json.loads(line)["port"]
    finally:
        if process.stdin is not None:
            process.stdin.close()
        await process.wait()


async def measure(options: argparse.Namespace) -> None:
    sides = {"bare": ("bare", HERE), "edge": ("edge", HERE)}
    if options.beside:
        sides["beside"] = ("edge", options.beside)
    async with AsyncExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tollbridge-bench-")))
        running = {
            side: await stack.enter_async_context(server(name, checkout, directory / f"{side}.log"))
            for side, (name, checkout) in sides.items()
        }
        load = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "tests.benchmarks.load",
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, limit=1 << 20, cwd=HERE,
        )  # fmt: skip
        assert load.stdin is not None
        assert load.stdout is not None
        for kind, model in (("http", "plain"), ("http_stream", "streamed")):
            if kind not in options.kinds:
                continue
            costs: dict[str, list[float]] = {side: [] for side in sides}
            rates: dict[str, list[float]] = {side: [] for side in sides}
            for number in range(options.rounds + 1):
                for side in list(sides) if number % 2 else list(sides)[::-1]:
                    pid, port = running[side]
                    order = Order(
                        kind=kind, target=f"http://127.0.0.1:{port}", watch={"server": [pid]}, model=model, key=KEY,
                        concurrency=options.concurrency, seconds=options.seconds,
                    )  # fmt: skip
                    load.stdin.write(msgspec.json.encode(order) + b"\n")
                    measured = msgspec.json.decode(await load.stdout.readline(), type=Measured)
                    if number:
                        costs[side].append(measured.cpu_s["server"] / measured.count * 1e6)
                        rates[side].append(measured.count / measured.wall_s)
            for side in sides:
                ratio = statistics.median(a / b for a, b in zip(costs[side], costs["bare"], strict=True))
                more = statistics.median(a - b for a, b in zip(costs[side], costs["bare"], strict=True))
                sys.stdout.write(
                    f"{kind:12} {side:6} {statistics.median(costs[side]):7.1f} us CPU, {more:+7.1f} over bare, "
                    f"ratio {ratio:.2f}; {statistics.median(rates[side]):6.0f}/s\n"
                )
            if options.beside:
                ratio = statistics.median(a / b for a, b in zip(costs["edge"], costs["beside"], strict=True))
                sys.stdout.write(f"{kind:12} edge over that of {options.beside}: {ratio:.3f}\n")
        load.stdin.close()
        await load.wait()


def main() -> None:
    if sys.argv[1:2] == ["serve"]:
        logs.configure()
        loops.run(serving(sys.argv[3]))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--beside", type=os.path.abspath, help="another checkout, whose edge is measured, too")
    parser.add_argument("--kinds", nargs="+", default=["http", "http_stream"], choices=["http", "http_stream"])
    asyncio.run(measure(parser.parse_args()))


if __name__ == "__main__":
    command(main)
