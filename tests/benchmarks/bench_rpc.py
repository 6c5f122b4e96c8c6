"""
What the gRPC transport costs beside a bare grpc.aio server that sends the same messages.

    python tests/benchmarks/bench_rpc.py [--calls N] [--concurrency N] [--deltas N]

Server and load are processes of their own, so the server's CPU time is only its own. The line answers at once: what is
measured is authentication, codec, progress and writes. CPU per call is the figure to compare; calls a second depend on
what else the machine does.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import os
import sys
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import grpc.aio
from typing_extensions import override

sys.path.insert(0, str(Path(__file__).parents[2]))

from adapters.chat import TextDelta
from gateway.answer import Item, Observer
from gateway.call import Call
from gateway.rpc import codec
from gateway.rpc.server import RpcSettings, open_server
from protos.tollbridge.v1 import gateway_pb2 as pb
from protos.tollbridge.v1 import gateway_pb2_grpc
from tests.fakes.line import COMPLETION, ENDED, ROUTE, FakeKeys, FakeLine

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


@asynccontextmanager
async def bare(deltas: int):
    server = grpc.aio.server()
    gateway_pb2_grpc.add_GatewayServicer_to_server(Bare(deltas), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield port
    await server.stop(0)


@asynccontextmanager
async def ours(deltas: int):
    async def content() -> AsyncGenerator[Item, None]:
        for _ in range(deltas):
            yield (TextDelta(TEXT),)
        yield ENDED

    async def start(call: Call, observer: Observer) -> None:
        observer.started(ROUTE, 1)

    line = FakeLine(before=start, items=content)
    async with open_server(RpcSettings(port=0, drain_s=0.0), line=line, authenticator=FakeKeys()) as server:
        yield server.port


async def serve(name: str, deltas: int, pipe: Connection) -> None:
    async with {"bare": bare, "ours": ours}[name](deltas) as port:
        pipe.send(port)
        loop = asyncio.get_running_loop()
        while await loop.run_in_executor(None, pipe.recv):
            times = os.times()
            pipe.send(times.user + times.system)


def run(name: str, deltas: int, pipe: Connection) -> None:
    asyncio.run(serve(name, deltas, pipe))


async def load(port: int, method: str, calls: int, concurrency: int) -> None:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        stub: Any = gateway_pb2_grpc.GatewayStub(channel)
        left = iter(range(calls))

        async def one_after_another() -> None:
            for _ in left:
                call = getattr(stub, method)(QUESTION, metadata=(("authorization", "Bearer good"),))
                if method == "Complete":
                    await call
                else:
                    async for _chunk in call:
                        pass

        await asyncio.gather(*(one_after_another() for _ in range(concurrency)))


def measure(name: str, method: str, options: argparse.Namespace) -> tuple[float, float]:
    """Calls a second, and the server's CPU microseconds a call."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=run, args=(name, options.deltas, there))
    process.start()
    port = here.recv()

    def cpu() -> float:
        here.send(True)
        spent: float = here.recv()
        return spent

    asyncio.run(load(port, method, options.calls // 10, options.concurrency))
    before, began = cpu(), time.perf_counter()
    asyncio.run(load(port, method, options.calls, options.concurrency))
    took, spent = time.perf_counter() - began, cpu() - before
    here.send(False)
    process.join()
    return options.calls / took, spent / options.calls * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=2000)
    parser.add_argument("--concurrency", type=int, default=32)
    parser.add_argument("--deltas", type=int, default=50)
    options = parser.parse_args()
    for method in ("Complete", "Stream"):
        rates, costs = {}, {}
        for name in ("bare", "ours"):
            rates[name], costs[name] = measure(name, method, options)
            sys.stdout.write(f"{method:9} {name:5} {rates[name]:8.0f} calls/s {costs[name]:8.0f} us CPU/call\n")
        ratio = costs["ours"] / costs["bare"]
        sys.stdout.write(f"{method:9} CPU ratio {ratio:.2f}, rate ratio {rates['ours'] / rates['bare']:.2f}\n")


if __name__ == "__main__":
    main()
