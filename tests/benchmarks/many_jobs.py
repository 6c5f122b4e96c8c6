"""
Many jobs, from their submission to the last line of their results.

`python -m tests.benchmarks.many_jobs --jobs 1000000`. A provider, a PostgreSQL and a gateway of its own, in processes
of their own; this one submits and collects. The jobs go in as NDJSON, as many at a time as a submission may have, and
are run meanwhile; then the results of each submission are read as a stream, every line is counted, and the names are
held against those that were submitted. What the gateway and the largest backend of PostgreSQL hold in memory is read
all the while, and told by phase. A million jobs take about 5 GiB of the directory for temporary files (`TMPDIR` chooses
another disk).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from urllib.parse import urlsplit

import aiohttp
import msgspec
import psutil
from rich import box
from rich.console import Console
from rich.table import Table

from tests.benchmarks import cpu
from tests.benchmarks.load import question
from tests.fakes.gateway_process import KEY, gateway_process
from tests.fakes.simulated import simulated_process
from tests.progress import Progress
from tests.stopping import command

CONFIGURATION = """
[providers.sim]
protocol = "chat_completions"
base_url = "{url}"

[models.plain]
providers = [{{ provider = "sim", model = "sim-fast" }}]
price = {{ input = "0.15", output = "0.60" }}

[groups."{group}"]
concurrency = 1000
queue = 1000
"""
#: Lines of a submission: what the gateway takes at most.
SUBMISSION = 50_000
#: Lines of one write of a body.
_LINES_A_WRITE = 500
_SAMPLE_S = 0.5
#: Between looks at whether jobs are left.
_LOOK_S = 1.0
_MIB = 1024 * 1024


class Phase(msgspec.Struct, kw_only=True):
    """What went by, and what was held meanwhile."""

    name: str
    count: int = 0
    wall_s: float = 0.0
    gateway_s: float = 0.0
    postgres_s: float = 0.0
    #: Resident bytes at each reading: of the gateway, and of the largest backend less what is shared.
    gateway: list[int] = msgspec.field(default_factory=list)
    postgres: list[int] = msgspec.field(default_factory=list)


class Watched:
    """The processes under test, and how to read what they hold."""

    def __init__(self, gateway: int, postmaster: int) -> None:
        self.groups = {"gateway": [gateway], "postgres": [postmaster]}
        self._gateway = psutil.Process(gateway)
        self._postmaster = psutil.Process(postmaster)

    def read(self, phase: Phase) -> None:
        phase.gateway.append(self._gateway.memory_info().rss)
        backends = []
        for process in self._postmaster.children():
            with contextlib.suppress(psutil.NoSuchProcess):
                memory = process.memory_info()
                backends.append(memory.rss - getattr(memory, "shared", 0))
        phase.postgres.append(max(backends, default=0))

    @contextlib.asynccontextmanager
    async def during(self, name: str, count: int) -> AsyncIterator[Phase]:
        phase = Phase(name=name, count=count)
        sampling = asyncio.create_task(self._sample(phase))
        before, began = cpu.snapshot(self.groups), time.monotonic()
        try:
            yield phase
        finally:
            phase.wall_s = time.monotonic() - began
            after = cpu.snapshot(self.groups)
            phase.gateway_s = after["gateway"] - before["gateway"]
            phase.postgres_s = after["postgres"] - before["postgres"]
            sampling.cancel()
            await asyncio.gather(sampling, return_exceptions=True)
            self.read(phase)

    def told(self, what: str) -> str:
        return f"{what}; the gateway holds {self._gateway.memory_info().rss / _MIB:.0f} MiB"

    async def _sample(self, phase: Phase) -> None:
        while True:
            self.read(phase)
            await asyncio.sleep(_SAMPLE_S)


async def submit(session: aiohttp.ClientSession, first: int, count: int) -> str:
    """Jobs with these numbers for names; the id of their submission."""
    asked = msgspec.json.encode(question("plain"))

    async def body() -> AsyncIterator[bytes]:
        for start in range(first, first + count, _LINES_A_WRITE):
            numbers = range(start, min(start + _LINES_A_WRITE, first + count))
            yield b"".join(
                b'{"custom_id":"n%d","method":"POST","url":"/v1/chat/completions","body":%b}\n' % (number, asked)
                for number in numbers
            )

    headers = {"content-type": "application/x-ndjson"}
    async with session.post("/v1/jobs", data=body(), headers=headers) as answer:
        receipt = msgspec.json.decode(await answer.read())
    if answer.status != 202 or receipt["accepted"] != count:
        raise RuntimeError(receipt.get("error") or receipt["errors"][:3])
    submission_id: str = receipt["submission_id"]
    return submission_id


async def some_are_left(session: aiohttp.ClientSession, submission_id: str) -> bool:
    for status in ("queued", "running"):
        query = {"submission_id": submission_id, "status": status, "limit": "1"}
        async with session.get("/v1/jobs", params=query) as answer:
            if msgspec.json.decode(await answer.read())["data"]:
                return True
    return False


class _Line(msgspec.Struct):
    """What is looked at of a line of results."""

    custom_id: str
    status: str


async def collect(session: aiohttp.ClientSession, submission_id: str, seen: bytearray) -> int:
    """Lines of its results; `seen` is marked by their names. The bytes that they took."""
    decoder = msgspec.json.Decoder(_Line)
    size = 0
    async with session.get("/v1/jobs/results", params={"submission_id": submission_id}) as answer:
        answer.raise_for_status()
        async for text in answer.content:
            line = decoder.decode(text)
            if line.status != "succeeded":
                raise RuntimeError(f"a job ended as {line.status}: {text[:300]!r}")
            number = int(line.custom_id[1:])
            if seen[number]:
                raise RuntimeError(f"{line.custom_id} came twice")
            seen[number] = 1
            size += len(text)
    return size


async def run(jobs: int, console: Console) -> list[Phase]:
    progress = Progress(jobs)
    async with AsyncExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tollbridge-jobs-")))
        provider = await stack.enter_async_context(simulated_process())
        url = urlsplit(provider.url)
        toml = CONFIGURATION.format(url=provider.url, group=f"{url.scheme}://{url.hostname}:{url.port}")
        gateway = await stack.enter_async_context(gateway_process(directory, toml))
        postmaster = int((gateway.data_dir / "postgres" / "postmaster.pid").read_text().split("\n", 1)[0])
        watched = Watched(gateway.pid, postmaster)
        session = await stack.enter_async_context(
            aiohttp.ClientSession(
                gateway.rest_url,
                headers={"authorization": f"Bearer {KEY}"},
                timeout=aiohttp.ClientTimeout(total=None),
                read_bufsize=_MIB,
            )
        )
        submissions: list[str] = []
        async with watched.during("run, from the first submission on", jobs) as whole:
            async with watched.during("submitted, while others run", jobs) as phase:
                for first in range(0, jobs, SUBMISSION):
                    count = min(SUBMISSION, jobs - first)
                    submissions.append(await submit(session, first, count))
                    progress.tell(first + count, watched.told("submitted"))
            for number, submission_id in enumerate(submissions, 1):
                while await some_are_left(session, submission_id):
                    await asyncio.sleep(_LOOK_S)
                    progress.tell((number - 1) * SUBMISSION, watched.told("run"))
        seen = bytearray(jobs)
        size = 0
        async with watched.during("collected", jobs) as collected:
            for number, submission_id in enumerate(submissions, 1):
                size += await collect(session, submission_id, seen)
                progress.tell(min(number * SUBMISSION, jobs), watched.told("collected"))
        if sum(seen) != jobs:
            raise RuntimeError(f"{jobs - sum(seen)} jobs have no result")
        console.print(f"{jobs:,} jobs, each with one result; {size / _MIB:,.0f} MiB of results", style="dim")
    return [phase, whole, collected]


def table(phases: Sequence[Phase]) -> Table:
    shown = Table(box=box.SIMPLE, header_style="bold", pad_edge=False)
    shown.add_column("jobs")
    for name in ("per s", "CPU ms", "PG ms", "gateway MiB: first", "median", "last", "most", "backend MiB: most"):
        shown.add_column(name, justify="right")
    for phase in phases:
        readings = sorted(phase.gateway)
        mib = [phase.gateway[0], readings[len(readings) // 2], phase.gateway[-1], readings[-1], max(phase.postgres)]
        shown.add_row(
            phase.name,
            f"{phase.count / phase.wall_s:,.0f}",
            f"{phase.gateway_s / phase.count * 1e3:.3f}",
            f"{phase.postgres_s / phase.count * 1e3:.3f}",
            *(f"{held / _MIB:.0f}" for held in mib),
        )
    return shown


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="many_jobs", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--jobs", type=int, default=1_000_000)
    options = parser.parse_args()
    console = Console(width=140)
    console.print(table(asyncio.run(run(options.jobs, console))))


if __name__ == "__main__":
    command(main)
