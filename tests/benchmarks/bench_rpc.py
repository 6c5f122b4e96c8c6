"""
What the gRPC edge costs of its own: this server, with a line that answers at once, beside a bare grpc.aio server that
sends the same messages ready-made.

    python tests/benchmarks/bench_rpc.py [--rounds N] [--seconds S] [--concurrency N] [--deltas N]

Each server is a process of its own, so its CPU time is only its own. The two take turns in short rounds; told are the
medians of CPU per call, and of the rounds' differences and ratios. What differs is the key's check, the codec, the
trailing metadata, progress and bounded writes. Seconds on the wall would say more about the neighbours.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import multiprocessing
import os
import statistics
import sys
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import grpc.aio
from typing_extensions import override

sys.path.insert(0, str(Path(__file__).parents[2]))

from adapters.chat import TextDelta
from gateway.answer import SILENT, Item, Observer
from gateway.call import Call, Caller, Completion, Scope
from gateway.errors import Unauthenticated
from gateway.rpc import codec
from gateway.rpc.server import RpcSettings, open_server
from protos.tollbridge.v1 import gateway_pb2 as pb
from protos.tollbridge.v1 import gateway_pb2_grpc
from tests.fakes.line import COMPLETION, ENDED, ROUTE
from tests.stopping import command

TEXT = "word " * 4
QUESTION = pb.CompletionRequest(
    model="gpt-4o",
    messages=[pb.Message(role="system", text="Be brief."), pb.Message(role="user", text="Hello? " * 40)],
    temperature=0.5,
    session_id="s1",
)


class Bare(gateway_pb2_grpc.GatewayServicer):
    """The floor: nothing is decoded or decided, and the messages are ready-made."""

    def __init__(self, deltas: int) -> None:
        self._answer = codec.encode_completion(COMPLETION)
        self._chunks = [
            codec.encode_started(ROUTE, 1),
            *[codec.encode_deltas((TextDelta(TEXT),)) for _ in range(deltas)],
            codec.encode_ended(ENDED),
        ]

    @override
    async def Complete(self, request: pb.CompletionRequest, context: Any) -> pb.CompletionResponse:
        return self._answer

    @override
    async def Stream(self, request: pb.CompletionRequest, context: Any) -> None:
        for chunk in self._chunks:
            await context.write(chunk)


class Ready:
    """The line that has every answer already."""

    def __init__(self, deltas: int) -> None:
        self._items: Sequence[Item] = [*[(TextDelta(TEXT),)] * deltas, ENDED]

    async def complete(self, call: Call, observer: Observer = SILENT) -> Completion:
        return COMPLETION

    @asynccontextmanager
    async def stream(self, call: Call, observer: Observer = SILENT) -> AsyncIterator[AsyncIterator[Item]]:
        observer.started(ROUTE, 1)
        yield self._each()

    async def _each(self) -> AsyncIterator[Item]:
        for item in self._items:
            yield item


class OneKey:
    """Knows the digest of "good", as the gateway knows those of its keys."""

    def __init__(self) -> None:
        caller = Caller(key_id=uuid.UUID(int=7), name="good", scopes=frozenset({Scope.CHAT}))
        self._callers = {hashlib.sha256(b"good").digest(): caller}

    async def authenticate(self, token: str | None) -> Caller:
        caller = self._callers.get(hashlib.sha256((token or "").encode()).digest())
        if caller is None:
            raise Unauthenticated
        return caller


@asynccontextmanager
async def bare(deltas: int) -> AsyncIterator[int]:
    server = grpc.aio.server()
    gateway_pb2_grpc.add_GatewayServicer_to_server(Bare(deltas), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield port
    await server.stop(0)


@asynccontextmanager
async def ours(deltas: int) -> AsyncIterator[int]:
    settings = RpcSettings(port=0, drain_s=0.0)
    async with open_server(settings, line=Ready(deltas), authenticator=OneKey()) as server:
        yield server.port


SERVERS = {"bare": bare, "ours": ours}


async def serve(name: str, deltas: int, pipe: Connection) -> None:
    async with SERVERS[name](deltas) as port:
        pipe.send(port)
        loop = asyncio.get_running_loop()
        while await loop.run_in_executor(None, pipe.recv):
            times = os.times()
            pipe.send(times.user + times.system)


def run(name: str, deltas: int, pipe: Connection) -> None:
    asyncio.run(serve(name, deltas, pipe))


class Served:
    """One of the two, in its process."""

    def __init__(self, name: str, options: argparse.Namespace) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, there = context.Pipe()
        self._process: BaseProcess = context.Process(target=run, args=(name, options.deltas, there))
        self._process.start()
        self._target = f"127.0.0.1:{self._pipe.recv()}"

    def measure(self, method: str, options: argparse.Namespace) -> float:
        """CPU microseconds of the server a call."""
        before = self._cpu()
        calls = asyncio.run(load(self._target, method, options.concurrency, options.seconds))
        return (self._cpu() - before) / calls * 1e6

    def _cpu(self) -> float:
        self._pipe.send(True)
        spent: float = self._pipe.recv()
        return spent

    def stop(self) -> None:
        self._pipe.send(False)
        self._process.join()


async def load(target: str, method: str, concurrency: int, seconds: float) -> int:
    """How many calls were made."""
    async with grpc.aio.insecure_channel(target, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
        kind = channel.unary_unary if method == "Complete" else channel.unary_stream
        call: Any = kind(f"/tollbridge.v1.Gateway/{method}")
        request, metadata = QUESTION.SerializeToString(), (("authorization", "Bearer good"),)
        until = time.perf_counter() + seconds

        async def one_after_another() -> int:
            made = 0
            while time.perf_counter() < until:
                made += 1
                if method == "Complete":
                    await call(request, metadata=metadata)
                else:
                    async for _chunk in call(request, metadata=metadata):
                        pass
            return made

        return sum(await asyncio.gather(*(one_after_another() for _ in range(concurrency))))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=0.7)
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--deltas", type=int, default=50)
    options = parser.parse_args()
    served = {name: Served(name, options) for name in SERVERS}
    try:
        for method in ("Complete", "Stream"):
            costs: dict[str, list[float]] = {name: [] for name in served}
            for turn in range(-1, options.rounds):
                for name in served if turn % 2 else reversed(served):
                    cost = served[name].measure(method, options)
                    if turn >= 0:
                        costs[name].append(cost)
            pairs = list(zip(costs["bare"], costs["ours"], strict=True))
            floor = statistics.median(costs["bare"])
            own = statistics.median(here - there for there, here in pairs)
            ratio = statistics.median(here / there for there, here in pairs)
            sys.stdout.write(f"{method:9} bare {floor:5.0f} us CPU/call, ours {own:+5.0f} us, ratio {ratio:.2f}\n")
    finally:
        for server in served.values():
            server.stop()


if __name__ == "__main__":
    command(main)
