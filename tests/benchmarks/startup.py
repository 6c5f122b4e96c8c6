"""
How long a gateway takes from its process to its `gateway.ready`, with a given database that is migrated already.

`python -m tests.benchmarks.startup [--starts 9] [--workers 2]`. Two configurations in turn: one whose models have their
prices in the file, and one that needs the published price list. Wall time is
that of the machine and its neighbours; the CPU until ready, of the process and its children, says what the start itself
costs. The memory is that of one worker, idle, half a second after it was ready.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

import msgspec
import psutil

from gateway import database, logs
from gateway.embedded import EmbeddedPostgres
from tests.benchmarks import cpu
from tests.fakes.gateway_process import gateway_process
from tests.progress import Progress
from tests.stopping import command

PRICED = """
[providers.sim]
protocol = "chat_completions"
base_url = "http://127.0.0.1:9/v1"

[models.plain]
providers = [{ provider = "sim", model = "sim-fast" }]
price = { input = "0.15", output = "0.60" }
"""
UNPRICED = """
[providers.sim]
protocol = "chat_completions"
base_url = "https://api.openai.com/v1"

[models.gpt]
providers = [{ provider = "sim", model = "gpt-4o" }]
"""
CONFIGURATIONS: Mapping[str, str] = {
    "prices in the file": PRICED,
    "the published prices": UNPRICED,
}
#: For what a start puts off until it has served its first second.
_SETTLE_S = 0.5


class Start(msgspec.Struct, frozen=True, kw_only=True):
    """One start, until `gateway.ready` was read."""

    wall_s: float
    cpu_s: float
    #: Of one worker.
    idle_mb: float


async def one(directory: Path, toml: str, url: str, workers: int) -> Start:
    began = time.perf_counter()
    arguments = ("--workers", str(workers)) if workers > 1 else ()
    async with gateway_process(directory, toml, arguments=arguments, TOLLBRIDGE_DATABASE_URL=url) as gateway:
        wall, spent = time.perf_counter() - began, cpu.spent([gateway.pid])
        await asyncio.sleep(_SETTLE_S)
        process = psutil.Process(gateway.pid)
        served_by = process.children() if workers > 1 else [process]
        return Start(wall_s=wall, cpu_s=spent, idle_mb=max(one.memory_info().rss for one in served_by) / 1e6)


async def measured(url: str, directory: Path, starts: int, workers: int) -> Mapping[str, list[Start]]:
    """One start of each that is not counted, which fills the caches; then all in turn."""
    found: dict[str, list[Start]] = defaultdict(list)
    progress = Progress(starts)
    for number in range(-1, starts):
        for name, toml in CONFIGURATIONS.items():
            start = await one(directory, toml, url, workers)
            if number >= 0:
                found[name].append(start)
        if number >= 0:
            progress.tell(number + 1, always=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--starts", type=int, default=9)
    parser.add_argument("--workers", type=int, default=1)
    given = parser.parse_args()
    logs.configure(level="warning")
    with (
        tempfile.TemporaryDirectory(prefix="tollbridge-startup-") as name,
        EmbeddedPostgres.start(Path(name)) as server,
    ):
        asyncio.run(database.migrate(server.url, wait_s=10))
        found = asyncio.run(measured(server.url, Path(name), given.starts, given.workers))
    print(f"{given.starts} starts, {given.workers} worker(s): median (fastest)")  # noqa: T201
    for what, starts in found.items():
        wall, spent = [start.wall_s for start in starts], [start.cpu_s for start in starts]
        took = f"ready after {statistics.median(wall):5.2f} s ({min(wall):.2f})"
        cost = f"CPU {statistics.median(spent):5.2f} s ({min(spent):.2f})"
        held = f"idle {statistics.median(start.idle_mb for start in starts):6.1f} MB"
        print(f"  {what:22} {took}   {cost}   {held}")  # noqa: T201


if __name__ == "__main__":
    command(main)
