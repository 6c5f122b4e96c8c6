"""
Where the gateway's CPU goes: `make profile ARGS="--kind http --concurrency 16 --seconds 10"`.

It starts what `make bench` starts, loads the gateway once without a profiler, for what a request costs, and once with
py-spy, for the shares. The profiler stops the process for each sample: rates under it say nothing. Time in C belongs to
the Python function that called it; threads that run no Python (gRPC's) are told as one figure.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
import psutil
from rich import box
from rich.console import Console
from rich.table import Table

from tests.benchmarks.load import Jobs, Measured
from tests.benchmarks.stacks import ALIKE, Part, Stacks, package
from tests.benchmarks.world import ROOT, YARDSTICKS, World, opened
from tests.stopping import command

#: By kind of request, where it is sent if nothing else is said.
PLACES = {
    "http": "gateway",
    "http_stream": "gateway",
    "jobs": "gateway",
    "complete": "gateway gRPC",
    "stream": "gateway gRPC",
}
#: Jobs of the first submission, from which the second one's size is reckoned.
FIRST_JOBS = 300
MAY_NOT = """
py-spy may not look into the process. It needs the right to trace it: run this as root, or in a container with the
capability SYS_PTRACE, or on Linux let a user trace all of one's own processes: sysctl kernel.yama.ptrace_scope=0."""


class NotRecorded(Exception):
    """py-spy failed; the message is what it said."""


class Costs(msgspec.Struct, frozen=True, kw_only=True):
    """Of one request without a profiler, in microseconds of CPU."""

    per_s: float
    main_us: float
    #: All other threads of the process, and its children.
    others_us: float
    postgres_us: float


async def load(world: World, options: argparse.Namespace, seconds: float, jobs: int) -> Measured:
    if options.kind == "jobs":
        return (await world.measure("jobs", options.place, Jobs, jobs=jobs)).run
    return await world.measure(options.kind, options.place, Measured, concurrency=options.concurrency, seconds=seconds)


async def costs(world: World, options: argparse.Namespace, pid: int) -> tuple[Costs, int]:
    """And how many jobs are run in so many seconds."""
    group = "gateway" if options.place.startswith("gateway") else options.place
    warm = await load(world, options, 1.0, FIRST_JOBS)
    jobs = max(round(warm.count / warm.wall_s * options.seconds), 1)
    before = _main_s(pid)
    measured = await load(world, options, options.seconds, jobs)
    main_s = _main_s(pid) - before
    each = 1e6 / measured.count
    return Costs(
        per_s=measured.count / measured.wall_s,
        main_us=main_s * each,
        others_us=max(measured.cpu_s[group] - main_s, 0.0) * each,
        postgres_us=measured.cpu_s["postgres"] * each,
    ), jobs


def _main_s(pid: int) -> float:
    """CPU seconds of a process's first thread so far."""
    return next(thread.user_time + thread.system_time for thread in psutil.Process(pid).threads() if thread.id == pid)


async def record(pid: int, *, seconds: float, rate: int, to: Path) -> asyncio.subprocess.Process:
    """Raises NotRecorded if py-spy is not here."""
    program = Path(sys.executable).parent / "py-spy"
    if not program.exists():
        raise NotRecorded(f"there is no {program}: make {ROOT.name}'s environment again with `make test`")
    return await asyncio.create_subprocess_exec(
        program, "record", "--pid", str(pid), "--duration", str(max(round(seconds), 1)), "--rate", str(rate),
        "--format", "speedscope", "--output", to,
        stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip


async def profiled(options: argparse.Namespace, console: Console) -> tuple[Costs, Stacks]:
    """Raises NotRecorded."""
    with console.status("starting") as status:
        async with opened(pin=not options.no_pin, yardsticks=options.place in YARDSTICKS) as world:
            pid = world.place(options.kind, options.place).pid
            status.update("what a request costs, without a profiler")
            known, jobs = await costs(world, options, pid)
            status.update(f"recording {options.seconds:.0f} s")
            profiler = await record(pid, seconds=options.seconds, rate=options.rate, to=options.out)
            loading = asyncio.create_task(load(world, options, options.seconds + 1, jobs))
            _, said = await profiler.communicate()
            await loading
    if profiler.returncode:
        told = said.decode(errors="replace").strip()
        raise NotRecorded(told + (MAY_NOT if "ermi" in told or "ptrace" in told else ""))
    return known, Stacks.of_speedscope(options.out.read_bytes(), thread="MainThread", root=Path.cwd())


def main() -> None:
    parser = argparse.ArgumentParser(prog="profile", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--kind", choices=PLACES, default="http", help="what is sent: %(choices)s")
    parser.add_argument("--place", choices=["gateway", "gateway gRPC", *YARDSTICKS], help="whom to look into")
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--rate", type=int, default=300, help="samples a second")
    parser.add_argument("--least", type=float, default=1.0, help="the smallest part that is shown, in per cent")
    parser.add_argument("--functions", action="store_true", help="a tree of functions instead of modules")
    parser.add_argument("--no-pin", action="store_true", help="let the system choose the cores")
    parser.add_argument("--out", type=Path, help="where the flame graph goes")
    options = parser.parse_args()
    options.place = options.place or PLACES[options.kind]
    name = f"tollbridge-profile-{options.kind}-{options.concurrency}-{time.strftime('%Y%m%d-%H%M%S')}.speedscope.json"
    options.out = options.out or Path(tempfile.gettempdir()) / name
    console = Console(width=None if os.isatty(1) else 140)
    try:
        known, stacks = asyncio.run(profiled(options, console))
    except NotRecorded as failed:
        sys.exit(f"nothing was recorded: {failed}")
    least = options.least / 100
    console.print(
        f"{options.kind} at {options.concurrency} on {options.place}: {known.per_s:,.0f} a second; of a request, CPU "
        f"{known.main_us:,.0f} us in Python's main thread, {known.others_us:,.0f} us in other threads, "
        f"{known.postgres_us:,.0f} us of PostgreSQL"
    )
    console.print(_parts("package", stacks.parts(lambda frame: package(frame.module)), known, least))
    console.print(_parts("module", stacks.parts(lambda frame: frame.module), known, least))
    console.print(_parts("function", stacks.parts(lambda frame: frame.name), known, least))
    console.print("  per cent      us   who called whom", style="bold")
    for branch in stacks.tree(
        (lambda frame: frame.name) if options.functions else (lambda frame: frame.module), least=least
    ):
        console.print(
            f"{branch.cumulative:10.1%} {branch.cumulative * known.main_us:7.0f}   {'  ' * branch.depth}{branch.name}",
            highlight=False, markup=False, no_wrap=True, overflow="ellipsis",
        )  # fmt: skip
    console.print(f"{len(stacks)} samples; a flame graph for speedscope: {options.out}", highlight=False)


def _parts(what: str, parts: Sequence[Part], known: Costs, least: float) -> Table:
    """Those that are worth a line: by what they do themselves, and packages also by what they have done."""
    table = Table(box=box.SIMPLE, header_style="bold", pad_edge=False)
    table.add_column(what)
    for column in ("self %", "self us", "cumulative %", "cumulative us"):
        table.add_column(column, justify="right")
    for part in parts:
        if part.own >= least or (what == "package" and least <= part.cumulative < ALIKE):
            table.add_row(
                part.name,
                f"{part.own:.1%}",
                f"{part.own * known.main_us:.0f}",
                f"{part.cumulative:.1%}",
                f"{part.cumulative * known.main_us:.0f}",
            )
    return table


if __name__ == "__main__":
    command(main)
