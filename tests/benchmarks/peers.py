"""
The gateway beside other gateways, unmodified, each in an environment of its own: `make bench-peers`.

One provider, one load and one run for all, in turn and on the same core, as in `make bench`. A peer has its usual
configuration for one model behind a key, and no database: it keeps no account of what it does, and shares no limits.
Ours has everything on. What it printed is kept as `results/peers-<date>-<commit>.json`.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import platform
import socket
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path

import httpx
import msgspec
from rich import box
from rich.console import Console
from rich.table import Table

from tests.benchmarks import cores
from tests.benchmarks.figures import Target, cost, foreign, per_s
from tests.benchmarks.load import Measured
from tests.benchmarks.provider import PIECES
from tests.benchmarks.report import keep, origin, shown, table_of_targets
from tests.benchmarks.world import MODEL, ROOT, Place, World, opened, stopped
from tests.stopping import command

ENVIRONMENTS = ROOT / ".venv-peers"
KEY = "sk-bench-peer-0123456789"
#: Seconds that a peer may take to start.
PATIENCE_S = 180.0
LITELLM = "LiteLLM"
LITELLM_CONFIGURATION = """
model_list:
  - model_name: {model}
    litellm_params:
      model: openai/bench-1
      api_base: {url}/v1
      api_key: unused
general_settings:
  master_key: {key}
"""
#: What its documentation tells for production, and nothing fetched from elsewhere at the start.
LITELLM_ENVIRONMENT = {"LITELLM_LOG": "ERROR", "LITELLM_MODE": "PRODUCTION", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
#: By kind of request and concurrency.
SCENARIOS = (("http", 1), ("http", 16), ("http_stream", 1), ("http_stream", 16))


class NotHere(Exception):
    """A peer is not installed or does not start. The message says which, and what to do."""


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """The medians of one gateway in one scenario."""

    kind: str
    concurrency: int
    place: str
    per_s: float
    events_per_s: float | None = None
    p50_ms: float
    p99_ms: float
    cpu_s_per_1000: float
    #: Cores that processes which are none of ours were busy with.
    foreign_cores: float
    #: This one's over ours: of CPU. Ours over this one's: of rate.
    cpu_ratio: float | None = None
    rate_ratio: float | None = None


class Kept(msgspec.Struct, frozen=True, kw_only=True):
    measured_at: str
    commit: str
    uncommitted_changes: bool
    python: str
    cpus: int | None
    cores: cores.Cores | None
    rounds: int
    seconds: float
    versions: Mapping[str, str]
    rows: Sequence[Row]
    targets: Sequence[Target]


def version(environment: Path, package: str) -> str:
    """Raises NotHere."""
    python = environment / "bin" / "python"
    if not python.exists():
        raise NotHere(f"{environment} is not there: make bench-peers sets it up")
    asked = f"import importlib.metadata as m; print(m.version({package!r}))"
    return subprocess.run([python, "-c", asked], capture_output=True, text=True, check=True).stdout.strip()


@asynccontextmanager
async def litellm(directory: Path, provider: str) -> AsyncIterator[Place]:
    """Its proxy, with one worker. Raises NotHere."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        port = bound.getsockname()[1]
    configuration = directory / "litellm.yaml"
    configuration.write_text(LITELLM_CONFIGURATION.format(model=MODEL, url=provider, key=KEY))
    log = directory / "litellm.log"
    with log.open("wb") as said:
        process = await asyncio.create_subprocess_exec(
            ENVIRONMENTS / "litellm" / "bin" / "litellm",
            "--config", configuration, "--host", "127.0.0.1", "--port", str(port), "--telemetry", "False",
            stdout=said, stderr=said, env={**os.environ, **LITELLM_ENVIRONMENT}, cwd=directory,
        )  # fmt: skip
    url = f"http://127.0.0.1:{port}"
    try:
        async with httpx.AsyncClient(
            base_url=url, headers={"authorization": f"Bearer {KEY}"}, trust_env=False
        ) as client:
            if not await _answers(process, client):
                raise NotHere(f"{LITELLM} did not start: {said_at_the_end(log)}")
        yield Place(target=url, pid=process.pid, key=KEY)
    finally:
        await stopped(process)


def said_at_the_end(log: Path) -> str:
    return log.read_text(errors="replace")[-3000:]


async def _answers(process: asyncio.subprocess.Process, client: httpx.AsyncClient) -> bool:
    """Waits until it serves models: False if it does not."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline and process.returncode is None:
        try:
            if (await client.get("/v1/models")).status_code == httpx.codes.OK:
                return True
        except httpx.TransportError:
            pass
        await asyncio.sleep(0.25)
    return False


async def run(rounds: int, seconds: float, *, pin: bool, console: Console) -> tuple[list[Row], list[Target], World]:
    """Raises NotHere."""
    measured: dict[tuple[str, int, str], list[Measured]] = defaultdict(list)
    with console.status("starting") as status:
        async with AsyncExitStack() as stack:
            world = await stack.enter_async_context(opened(pin=pin, yardsticks=False))
            with cores.started_on(world.divided.measured if world.divided else None):
                world.places[LITELLM] = await stack.enter_async_context(
                    litellm(world.directory, world.places["direct"].target)
                )
            places = ("gateway", LITELLM)
            for number in range(-1, rounds):
                for kind, concurrency in SCENARIOS:
                    for place in places if number % 2 else places[::-1]:
                        status.update(f"round {number + 1} of {rounds}: {kind} at {concurrency}, {place}")
                        once = await world.measure(kind, place, Measured, concurrency=concurrency, seconds=seconds)
                        if number >= 0:
                            measured[kind, concurrency, place].append(once)
                    if number >= 0:
                        _same([measured[kind, concurrency, place][-1] for place in places])
    return _rows(measured, places), _targets(measured), world


def _same(answers: Sequence[Measured]) -> None:
    if len({answer.characters for answer in answers}) != 1:
        raise RuntimeError("a peer gave another answer than the gateway: they did not do the same")


def _rows(measured: Mapping[tuple[str, int, str], Sequence[Measured]], places: Sequence[str]) -> list[Row]:
    rows = []
    for kind, concurrency in SCENARIOS:
        ours = measured[kind, concurrency, "gateway"]
        for place in places:
            theirs = measured[kind, concurrency, place]
            rate = statistics.median(map(per_s, theirs))
            row = Row(
                kind=kind,
                concurrency=concurrency,
                place=place,
                per_s=rate,
                events_per_s=rate * PIECES if kind == "http_stream" else None,
                p50_ms=statistics.median(m.p50_ms for m in theirs),
                p99_ms=statistics.median(m.p99_ms for m in theirs),
                cpu_s_per_1000=statistics.median(cost(m, place) for m in theirs),
                foreign_cores=statistics.median(map(foreign, theirs)),
            )
            if place != "gateway":
                row = msgspec.structs.replace(
                    row,
                    cpu_ratio=statistics.median(cpu_ratios(ours, theirs, place)),
                    rate_ratio=statistics.median(rate_ratios(ours, theirs)),
                )
            rows.append(row)
    return rows


def cpu_ratios(ours: Sequence[Measured], theirs: Sequence[Measured], place: str) -> list[float]:
    """How many times ours a peer's CPU is, by round."""
    return [cost(b, place) / cost(a, "gateway") for a, b in zip(ours, theirs, strict=True)]


def rate_ratios(ours: Sequence[Measured], theirs: Sequence[Measured]) -> list[float]:
    """How many times a peer's rate ours is, by round."""
    return [per_s(a) / per_s(b) for a, b in zip(ours, theirs, strict=True)]


def _targets(measured: Mapping[tuple[str, int, str], Sequence[Measured]]) -> list[Target]:
    plain, streamed = ((measured[kind, 16, "gateway"], measured[kind, 16, LITELLM]) for kind in ("http", "http_stream"))
    return [
        Target(name=name, measured=statistics.median(values), low=min(values), high=max(values), at_least=at_least)
        for name, values, at_least in (
            ("plain /v1 at 16: LiteLLM's CPU over ours", cpu_ratios(*plain, LITELLM), 30.0),
            ("streamed /v1 at 16: events a second over LiteLLM's", rate_ratios(*streamed), 50.0),
        )
    ]


def _table(rows: Sequence[Row]) -> Table:
    table = Table(box=box.SIMPLE, header_style="bold", pad_edge=False)
    table.add_column("scenario")
    table.add_column("at", justify="right")
    table.add_column("gateway")
    for name in ("per s", "events/s", "p50 ms", "p99 ms", "CPU s/1000", "its CPU over ours", "our rate over its"):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(
            {"http": "/v1 plain", "http_stream": "/v1 stream"}[row.kind],
            str(row.concurrency),
            "Tollbridge" if row.place == "gateway" else row.place,
            f"{row.per_s:,.1f}",
            shown(row.events_per_s, ",.0f"),
            f"{row.p50_ms:.2f}",
            f"{row.p99_ms:.2f}",
            f"{row.cpu_s_per_1000:.3f}",
            shown(row.cpu_ratio, ".1f"),
            shown(row.rate_ratio, ".1f"),
            style="bold" if row.place == "gateway" else None,
            end_section=row.place != "gateway",
        )
    return table


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="bench-peers", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.0, help="of one gateway in one round; what has begun ends")
    parser.add_argument("--no-pin", action="store_true", help="let the system choose the cores")
    options = parser.parse_args()
    console = Console(width=None if os.isatty(1) else 140)
    of = origin()
    try:
        versions = {LITELLM: version(ENVIRONMENTS / "litellm", "litellm")}
        rows, targets, world = asyncio.run(
            run(options.rounds, options.seconds, pin=not options.no_pin, console=console)
        )
    except NotHere as failed:
        sys.exit(str(failed))
    kept = Kept(
        measured_at=datetime.now(UTC).isoformat(timespec="seconds"),
        commit=of.commit,
        uncommitted_changes=of.uncommitted_changes,
        python=platform.python_version(),
        cpus=os.cpu_count(),
        cores=world.divided,
        rounds=options.rounds,
        seconds=options.seconds,
        versions=versions,
        rows=rows,
        targets=targets,
    )
    console.print(_table(rows))
    console.print(table_of_targets(targets, ()))
    told = [f"{name} {number}" for name, number in versions.items()]
    busy = statistics.median(row.foreign_cores for row in rows)
    console.print(f"{', '.join(told)}; other programs had {busy:.2f} cores", style="dim")
    keep(kept, f"peers-{datetime.now(UTC):%Y-%m-%d}-{kept.commit}", console)


if __name__ == "__main__":
    command(main)
