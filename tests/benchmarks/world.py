"""The processes of a benchmark: one provider, one gateway with everything on, the yardsticks, and the load."""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import TypeVar
from urllib.parse import urlsplit

import msgspec

from tests.benchmarks.load import Jobs, Measured, Order
from tests.fakes.gateway_process import KEY, gateway_process
from tests.fakes.simulated import simulated_process

R = TypeVar("R", Measured, Jobs)

#: What is asked of the provider: one piece of text is one event of a stream, and so many events come in one write.
PIECES, BURST = 200, 10
PLAIN = "sim-fast"
STREAMED = f"sim-fast?chunks={PIECES}&burst={BURST}"

#: Nothing is ever refused or queued: what is measured is the cost of asking.
CONFIGURATION = """
[providers.sim]
protocol = "chat_completions"
base_url = "{url}"

[models.plain]
providers = [{{ provider = "sim", model = "{plain}" }}]
price = {{ input = "0.15", output = "0.60" }}

[models.streamed]
providers = [{{ provider = "sim", model = "{streamed}" }}]
price = {{ input = "0.15", output = "0.60" }}

[groups."{group}"]
concurrency = 1000
queue = 1000
"""


class World:
    """Where each target is, and how to put load on it."""

    def __init__(
        self,
        *,
        places: Mapping[str, str],
        watch: Mapping[str, Sequence[int]],
        load: asyncio.subprocess.Process,
    ) -> None:
        #: By name: "gateway" (REST), "gateway gRPC", "bare gRPC", "proxy", "direct".
        self.places = places
        #: Process ids by group: "gateway", "postgres", "bare gRPC", "proxy", "provider".
        self.watch = watch
        self._load = load

    async def measure(
        self, kind: str, place: str, answer: type[R], *, concurrency: int = 1, seconds: float = 1.0, jobs: int = 0,
        path: str = "/v1/chat/completions",
    ) -> R:  # fmt: skip
        streamed = "stream" in kind
        ours = place.startswith("gateway")
        order = Order(
            kind=kind,
            target=self.places[place],
            watch=self.watch,
            concurrency=concurrency,
            seconds=seconds,
            model=("streamed" if streamed else "plain") if ours else (STREAMED if streamed else PLAIN),
            key=KEY,
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
async def opened() -> AsyncIterator[World]:
    """Starts everything; the gateway with an embedded PostgreSQL of its own, fsync on."""
    async with AsyncExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tollbridge-bench-")))
        provider = await stack.enter_async_context(simulated_process())
        url = urlsplit(provider.url)
        toml = CONFIGURATION.format(
            url=provider.url, plain=PLAIN, streamed=STREAMED, group=f"{url.scheme}://{url.hostname}:{url.port}"
        )
        gateway = await stack.enter_async_context(gateway_process(directory, toml))
        proxy, proxy_port = await stack.enter_async_context(_yardstick("proxy", provider.url))
        bare, bare_port = await stack.enter_async_context(_yardstick("grpc", provider.url))
        load = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "tests.benchmarks.load",
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, limit=1 << 20,
        )  # fmt: skip
        stack.push_async_callback(_stop, load)
        postmaster = int((gateway.data_dir / "postgres" / "postmaster.pid").read_text().split("\n", 1)[0])
        yield World(
            places={
                "gateway": gateway.rest_url,
                "gateway gRPC": gateway.grpc_target,
                "bare gRPC": f"127.0.0.1:{bare_port}",
                "proxy": f"http://127.0.0.1:{proxy_port}",
                "direct": provider.url.removesuffix("/v1"),
            },
            watch={
                "gateway": [gateway.pid],
                "postgres": [postmaster],
                "bare gRPC": [bare.pid],
                "proxy": [proxy.pid],
                "provider": [provider.pid],
            },
            load=load,
        )


@asynccontextmanager
async def _yardstick(name: str, url: str) -> AsyncIterator[tuple[asyncio.subprocess.Process, int]]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.benchmarks.yardsticks", name, url, stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    try:
        yield process, json.loads(await asyncio.wait_for(process.stdout.readline(), 20))["port"]
    finally:
        await _stop(process)


async def _stop(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        process.terminate()
    await process.communicate()
