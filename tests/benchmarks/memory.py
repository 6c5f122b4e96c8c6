"""
What a worker holds in memory: idle, over many requests, over streams that their callers leave, with many streams open.

`python -m tests.benchmarks.memory [--quick] [--case NAME ...]`. A provider, a PostgreSQL and a gateway of its own, in
processes of their own; this one is the load. At full size: 100,000 plain calls, 20,000 streams left by their callers
over REST and as many over gRPC, then 2,000 streams that stand still with 200 that run beside them. A slope is what the
resident memory of the gateway grows by in 10,000 requests, over the second half of them: the first half fills caches
and the allocator's free lists. The provider's own ledger must say that each call came and that each left one was left.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import statistics
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import grpc.aio
import msgspec
import psutil

from gateway import database, logs
from gateway.embedded import EmbeddedPostgres
from protos.tollbridge.v1 import gateway_pb2 as pb
from tests.benchmarks import cpu
from tests.fakes.gateway_process import KEY, METADATA, GatewayProcess, gateway_process
from tests.fakes.simulated import SimulatedProvider, simulated_process
from tests.progress import Progress
from tests.stopping import command

#: `still` sends two pieces and then nothing, for longer than a run takes. Closing a connection ends the work at once,
#: so that 20,000 streams that were left do not need so many slots.
CONFIGURATION = """
[providers.sim]
protocol = "chat_completions"
base_url = "{url}"
cancel_confirms_after_s = 0.01
gap_s = 3600
execution_limit_s = 7200

[models.plain]
providers = [{{ provider = "sim", model = "sim-fast" }}]
price = {{ input = "0.15", output = "0.60" }}

[models.streamed]
providers = [{{ provider = "sim", model = "sim-fast?chunks=200&burst=10" }}]
price = {{ input = "0.15", output = "0.60" }}

[models.still]
providers = [{{ provider = "sim", model = "sim-fast?chunks=20&hang=mid&hang_after=2&hang_for=3600" }}]
price = {{ input = "0.15", output = "0.60" }}

[groups."{group}"]
concurrency = 10000
queue = 1000
"""
#: Requests at a time; streams on one connection of gRPC.
CONCURRENCY, STREAMS_A_CHANNEL = 32, 200
#: How often memory is read in one case.
READINGS = 40
_STREAM = "/tollbridge.v1.Gateway/Stream"


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """How much is run."""

    plain: int
    left: int
    still: int
    active: int
    active_s: float
    idle_s: float


FULL = Plan(plain=100_000, left=20_000, still=2000, active=200, active_s=30.0, idle_s=30.0)
QUICK = Plan(plain=4000, left=800, still=100, active=20, active_s=3.0, idle_s=5.0)


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the table: megabytes of resident memory, of the gateway."""

    case: str
    count: int
    before: float
    after: float
    peak: float
    #: MB for each 10,000 requests.
    slope: float | None = None
    said: str = ""


class World:
    """One gateway, its provider, and the connections of the load."""

    def __init__(self, gateway: GatewayProcess, provider: SimulatedProvider, postgres: int) -> None:
        self.gateway = gateway
        self.provider = provider
        self.postgres = postgres
        self._process = psutil.Process(gateway.pid)
        url = urlsplit(gateway.rest_url)
        self._host, self._port = url.hostname, url.port

    @property
    def resident(self) -> float:
        return self._process.memory_info().rss / 1e6

    def _request(self, model: str, *, stream: bool) -> bytes:
        body = msgspec.json.encode(
            {"model": model, "stream": stream, "messages": [{"role": "user", "content": "What is a bridge? " * 16}]}
        )
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: gateway\r\nauthorization: Bearer {KEY}\r\n"
        return f"{head}content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body

    async def plain(self, count: int) -> None:
        """So many, on a connection that is kept."""
        sent = self._request("plain", stream=False)
        reader, writer = await asyncio.open_connection(self._host, self._port)
        for _ in range(count):
            writer.write(sent)
            head = (await reader.readuntil(b"\r\n\r\n")).lower()
            if not head.startswith(b"http/1.1 200"):
                raise RuntimeError(head.decode())
            at = head.index(b"content-length: ") + 16
            await reader.readexactly(int(head[at : head.index(b"\r\n", at)]))
        writer.close()

    @asynccontextmanager
    async def rest_stream(self, model: str) -> AsyncIterator[asyncio.StreamReader]:
        """Its first content has come. Leaving cuts the connection."""
        reader, writer = await asyncio.open_connection(self._host, self._port)
        try:
            writer.write(self._request(model, stream=True))
            head = await reader.readuntil(b"\r\n\r\n")
            if not head.lower().startswith(b"http/1.1 200"):
                raise RuntimeError(head.decode())
            await reader.readuntil(b'"content"')
            yield reader
        finally:
            writer.transport.abort()

    @asynccontextmanager
    async def grpc_stream(self, channel: grpc.aio.Channel, model: str) -> AsyncIterator[Any]:
        """Its first content has come. Leaving cancels it."""
        open_stream: Any = channel.unary_stream(_STREAM)
        request = pb.CompletionRequest(model=model, messages=[pb.Message(role="user", text="What is a bridge? " * 16)])
        call = open_stream(request.SerializeToString(), metadata=METADATA)
        try:
            while not pb.CompletionChunk.FromString(await call.read()).HasField("delta"):
                pass
            yield call
        finally:
            call.cancel()

    async def rest_left(self, count: int) -> None:
        for _ in range(count):
            async with self.rest_stream("still"):
                pass

    async def grpc_left(self, count: int) -> None:
        async with grpc.aio.insecure_channel(
            self.gateway.grpc_target, options=[("grpc.use_local_subchannel_pool", 1)]
        ) as channel:
            for _ in range(count):
                async with self.grpc_stream(channel, "still"):
                    pass


@asynccontextmanager
async def opened() -> AsyncIterator[World]:
    async with AsyncExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tollbridge-memory-")))
        server = stack.enter_context(EmbeddedPostgres.start(directory))
        await database.migrate(server.url, wait_s=10)
        postgres = int((directory / "postgres" / "postmaster.pid").read_text().split("\n", 1)[0])
        provider = await stack.enter_async_context(simulated_process())
        url = urlsplit(provider.url)
        toml = CONFIGURATION.format(url=provider.url, group=f"{url.scheme}://{url.hostname}:{url.port}")
        gateway = await stack.enter_async_context(gateway_process(directory, toml, TOLLBRIDGE_DATABASE_URL=server.url))
        yield World(gateway, provider, postgres)


async def idle(world: World, plan: Plan) -> Row:
    groups = {"gateway": [world.gateway.pid], "postgres": [world.postgres]}
    await asyncio.sleep(2)
    before, memory = cpu.snapshot(groups), world.resident
    await asyncio.sleep(plan.idle_s)
    after = cpu.snapshot(groups)
    burnt = ", ".join(f"{name} {100 * (after[name] - before[name]) / plan.idle_s:.2f} %" for name in groups)
    return Row(
        case="idle", count=0, before=memory, after=world.resident, peak=world.resident, said=f"of a core: {burnt}"
    )


async def over(world: World, case: str, count: int, work: Callable[[int], Awaitable[None]], *, left: bool) -> Row:
    """`count` requests in READINGS equal steps, with a reading of the memory after each."""
    progress = Progress(count)
    await world.provider.reset()
    before, each = world.resident, count // READINGS // CONCURRENCY or 1
    done, readings = 0, [(0, before)]
    while done < count:
        await asyncio.gather(*(work(each) for _ in range(CONCURRENCY)))
        done += each * CONCURRENCY
        readings.append((done, world.resident))
        progress.tell(done, f"{case}: {world.resident:.1f} MB", always=done >= count)
    ledger = await world.provider.until()
    # A stream that stood still and is not active any more was left: it would have waited for an hour.
    if ledger["dispatches"] != done or ledger["ended"] != {"hung" if left else "complete": done}:
        raise RuntimeError(f"{case}: of {done} calls the provider saw {ledger['dispatches']}: {ledger['ended']}")
    return Row(
        case=case,
        count=done,
        before=before,
        after=world.resident,
        peak=max(memory for _, memory in readings),
        slope=10_000 * statistics.linear_regression(*zip(*readings[len(readings) // 2 :], strict=True)).slope,
    )


async def held(world: World, plan: Plan) -> Row:
    """Streams that stand still, half of either transport; then some that run beside them."""
    half = plan.still // 2
    before = world.resident
    readings: list[float] = []
    async with AsyncExitStack() as stack:
        channels = [
            await stack.enter_async_context(
                grpc.aio.insecure_channel(world.gateway.grpc_target, options=[("grpc.use_local_subchannel_pool", 1)])
            )
            for _ in range(half // STREAMS_A_CHANNEL + 1)
        ]
        for start in range(0, half, CONCURRENCY):
            numbers = range(start, min(start + CONCURRENCY, half))
            await _entered(stack, [world.rest_stream("still") for _ in numbers])
            await _entered(stack, [world.grpc_stream(channels[n % len(channels)], "still") for n in numbers])
        idle = world.resident
        end = asyncio.get_running_loop().time() + plan.active_s
        events = 0

        async def run_rest() -> None:
            nonlocal events
            while asyncio.get_running_loop().time() < end:
                async with world.rest_stream("streamed") as reader:
                    rest = await reader.readuntil(b"data: [DONE]")
                    events += rest.count(b"data: ")

        async def run_grpc(number: int) -> None:
            nonlocal events
            while asyncio.get_running_loop().time() < end:
                async with world.grpc_stream(channels[number % len(channels)], "streamed") as call:
                    while (message := await call.read()) is not grpc.aio.EOF:
                        events += len(pb.CompletionChunk.FromString(message).delta.pieces)

        async def read() -> None:
            while True:
                readings.append(world.resident)
                await asyncio.sleep(0.2)

        reading = asyncio.create_task(read())
        async with asyncio.TaskGroup() as group:
            for number in range(plan.active // 2):
                group.create_task(run_rest())
                group.create_task(run_grpc(number))
        reading.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await reading
        ledger = await world.provider.ledger()
        if ledger["active"] != 2 * half:
            raise RuntimeError(f"of {2 * half} streams the provider still has {ledger['active']}")
    await world.provider.until()
    await asyncio.sleep(1)
    each = 1000 * (idle - before) / (2 * half)
    return Row(
        case=f"{2 * half:,} streams that stand still, {plan.active} that run",
        count=2 * half,
        before=before,
        after=world.resident,
        peak=max(readings),
        said=f"{each:.0f} kB for each that stands still; with them alone {idle:.0f} MB; {events:,} pieces came",
    )


async def _entered(stack: AsyncExitStack, streams: Sequence[Any]) -> None:
    """All at once; each is left with the stack."""

    async def enter(stream: Any) -> None:
        await stream.__aenter__()
        stack.push_async_exit(stream)

    await asyncio.gather(*map(enter, streams))


CASES: dict[str, Callable[[World, Plan], Awaitable[Row]]] = {
    "idle": idle,
    "plain": lambda world, plan: over(world, "plain calls", plan.plain, world.plain, left=False),
    "rest": lambda world, plan: over(world, "REST streams left", plan.left, world.rest_left, left=True),
    "grpc": lambda world, plan: over(world, "gRPC streams left", plan.left, world.grpc_left, left=True),
    "held": held,
}


async def measured(cases: Sequence[str], plan: Plan) -> list[Row]:
    async with opened() as world:
        return [await CASES[case](world, plan) for case in cases]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--case", action="append", choices=tuple(CASES))
    given = parser.parse_args()
    logs.configure(level="warning")
    rows = asyncio.run(measured(given.case or tuple(CASES), QUICK if given.quick else FULL))
    out = sys.stdout.write
    out(f"{'MB resident':52}{'requests':>9}{'before':>8}{'after':>8}{'peak':>8}{'per 10,000':>12}\n")
    for row in rows:
        slope = "" if row.slope is None else f"{row.slope:+.2f}"
        out(f"{row.case:52}{row.count:9,}{row.before:8.1f}{row.after:8.1f}{row.peak:8.1f}{slope:>12}  {row.said}\n")


if __name__ == "__main__":
    command(main)
