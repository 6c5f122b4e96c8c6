"""
The processes of a benchmark: one provider, one gateway with everything on, the yardsticks, and the load.

What is measured runs on a core of its own, in turn; the load, the provider and PostgreSQL on the others. PostgreSQL is
there because its CPU is told apart from the gateway's, as its own figure; on the gateway's core the two would share
what the proxy has for itself, and the rates could not be compared.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import TypeVar

import msgspec
import psutil

from tests.benchmarks import cores
from tests.benchmarks.load import Jobs, Measured, Order
from tests.benchmarks.loops import LEANEST, LOOPS
from tests.fakes.gateway_process import KEY, gateway_process

R = TypeVar("R", Measured, Jobs)

#: The instruments are this checkout's. The gateway is the working directory's, so that two can be compared.
ROOT = Path(__file__).parents[2]
#: The model's name, of the gateway and of the provider.
MODEL = "bench"

#: Nothing is ever refused or queued: what is measured is the cost of asking.
CONFIGURATION = """
[providers.static]
protocol = "chat_completions"
base_url = "{url}/v1"

[models.bench]
providers = [{{ provider = "static", model = "bench-1" }}]
price = {{ input = "0.15", output = "0.60" }}

[groups."{url}"]
concurrency = 1000
queue = 1000
"""

#: Programs of ours that stand where the gateway does, and what each is called in `yardsticks`.
YARDSTICKS = {"proxy": "proxy", "bare gRPC": "grpc"}
#: Whose processes a place is, where it is not called like them.
GROUPS = {"gateway gRPC": "gateway", "direct": "provider"}


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """Where requests can be sent."""

    target: str
    pid: int
    #: How it calls the model, and with which key.
    model: str = MODEL
    key: str = KEY


class World:
    """Where each target is, and how to put load on it."""

    def __init__(
        self,
        *,
        places: dict[str, Place],
        postmaster: int,
        load: asyncio.subprocess.Process,
        directory: Path,
        data_dir: Path,
        divided: cores.Cores | None,
    ) -> None:
        #: "gateway" (REST), "gateway gRPC", "direct", and each yardstick with its loop: "proxy on uvloop". Others may
        #: be added.
        self.places = places
        #: The loop of a yardstick that a kind of request is sent to.
        self.loops: dict[tuple[str, str], str] = {}
        self.watch: Mapping[str, Sequence[int]] = {
            "gateway": [places["gateway"].pid],
            "postgres": [postmaster],
            "provider": [places["direct"].pid],
        }
        #: For files that go with the world.
        self.directory = directory
        self.data_dir = data_dir
        self.divided = divided
        self._load = load

    def resident_mb(self) -> float:
        """Of the gateway's process and its children."""
        root = psutil.Process(self.places["gateway"].pid)
        return sum(process.memory_info().rss for process in (root, *root.children(recursive=True))) / 2**20

    def place(self, kind: str, place: str, loop: str | None = None) -> Place:
        """Where such requests go: to a yardstick on the loop that was chosen for them, or on this one."""
        if place in YARDSTICKS:
            return self.places[f"{place} on {loop or self.loops.get((place, kind), LEANEST)}"]
        return self.places[place]

    async def measure(
        self,
        kind: str,
        place: str,
        answer: type[R],
        *,
        concurrency: int = 1,
        seconds: float = 1.0,
        rate: float = 0.0,
        jobs: int = 0,
        path: str = "/v1/chat/completions",
        loop: str | None = None,
    ) -> R:
        """`loop` is that of a yardstick, if not the one in `loops`. Raises RuntimeError if the load ends."""
        there = self.place(kind, place, loop)
        order = Order(
            kind=kind,
            target=there.target,
            watch={GROUPS.get(place, place): [there.pid], **self.watch},
            concurrency=concurrency,
            seconds=seconds,
            rate=rate,
            model=there.model,
            key=there.key,
            path=path,
            jobs=jobs,
        )
        assert self._load.stdin is not None
        assert self._load.stdout is not None
        self._load.stdin.write(msgspec.json.encode(order) + b"\n")
        line = await self._load.stdout.readline()
        if not line:
            raise RuntimeError(f"the load ended at {kind} on {place}; what it said is above")
        return msgspec.json.decode(line, type=answer)


@asynccontextmanager
async def opened(*, pin: bool = True, yardsticks: bool = True) -> AsyncIterator[World]:
    """Starts everything; the gateway with an embedded PostgreSQL of its own, fsync on."""
    divided = cores.divided(pin=pin)
    measured, others = (divided.measured, divided.others) if divided else (None, None)
    async with AsyncExitStack() as stack:
        stack.enter_context(cores.started_on(others))
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tollbridge-bench-")))
        pid, port = await stack.enter_async_context(started("tests.benchmarks.provider"))
        url = f"http://127.0.0.1:{port}"
        places = {"direct": Place(target=url, pid=pid)}
        load = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "tests.benchmarks.load", cwd=ROOT,
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, limit=1 << 20,
        )  # fmt: skip
        stack.push_async_callback(stopped, load)
        with cores.started_on(measured):
            gateway = await stack.enter_async_context(gateway_process(directory, CONFIGURATION.format(url=url)))
            places["gateway"] = Place(target=gateway.rest_url, pid=gateway.pid)
            places["gateway gRPC"] = Place(target=gateway.grpc_target, pid=gateway.pid)
            for name, module in YARDSTICKS.items() if yardsticks else ():
                for loop in LOOPS:
                    pid, port = await stack.enter_async_context(
                        started("tests.benchmarks.yardsticks", module, loop, f"{url}/v1")
                    )
                    scheme = "" if module == "grpc" else "http://"
                    places[f"{name} on {loop}"] = Place(target=f"{scheme}127.0.0.1:{port}", pid=pid)
        postmaster = int((gateway.data_dir / "postgres" / "postmaster.pid").read_text().split("\n", 1)[0])
        if others is not None:
            cores.move(postmaster, others)
        yield World(
            places=places,
            postmaster=postmaster,
            load=load,
            directory=directory,
            data_dir=gateway.data_dir,
            divided=divided,
        )


@asynccontextmanager
async def started(module: str, *arguments: str) -> AsyncIterator[tuple[int, int]]:
    """A process that prints a line of JSON with its port when it is ready: its id and the port."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", module, *arguments, cwd=ROOT, stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    try:
        yield process.pid, json.loads(await asyncio.wait_for(process.stdout.readline(), 60))["port"]
    finally:
        await stopped(process)


async def stopped(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        process.terminate()
    await process.communicate()
