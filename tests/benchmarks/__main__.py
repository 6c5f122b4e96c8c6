"""
What the gateway costs, everything on, beside programs that do nothing: `make bench`, or `make bench ARGS=--quick`.

Every round runs every side of a scenario, so that a noisy neighbour disturbs both sides of a ratio; a figure is the
median of the rounds, and a ratio the median of the rounds' ratios. CPU seconds per 1,000 requests is the figure to
compare. The tables go to the terminal, and the numbers of a full run to `results/<date>-<commit>.json`.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import platform
import statistics
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path

import msgspec
from rich import box
from rich.console import Console
from rich.status import Status
from rich.table import Table

from gateway import database, embedded
from tests.benchmarks import cores, cpu
from tests.benchmarks.admission import worker
from tests.benchmarks.admission import world as admission
from tests.benchmarks.figures import (
    PACED,
    PLAIN,
    POLL,
    RUN,
    SCENARIOS,
    SUBMIT,
    Admission,
    Figure,
    Results,
    Row,
    Scenario,
    Side,
    Target,
    cost,
    per_s,
)
from tests.benchmarks.load import Jobs, Measured
from tests.benchmarks.loops import LOOPS
from tests.benchmarks.provider import BURST, PIECES
from tests.benchmarks.report import Origin, keep, markdown_of_targets, origin, shown, table_of_targets
from tests.benchmarks.world import YARDSTICKS, World, opened
from tests.stopping import command

#: Above this share of one core the load's rates are its own.
SATURATED = 0.9


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """How much is run."""

    rounds: int
    #: Of one side in one round, and with requests at a fixed rate, whose 99th percentile needs more of them.
    seconds: float
    paced_s: float
    warmup_s: float
    #: Turns of each loop of each yardstick, before the rounds.
    choosing: int
    jobs: int


FULL = Plan(rounds=5, seconds=1.0, paced_s=2.0, warmup_s=0.3, choosing=3, jobs=2000)
QUICK = Plan(rounds=2, seconds=0.25, paced_s=0.5, warmup_s=0.1, choosing=1, jobs=500)


class Kept(msgspec.Struct, frozen=True, kw_only=True):
    """One full run, as its file has it."""

    measured_at: str
    commit: str
    uncommitted_changes: bool
    python: str
    cpus: int | None
    #: Cores by whose they were; None if nothing was pinned.
    cores: cores.Cores | None
    plan: Plan
    #: Of each yardstick and kind of request.
    loops: Mapping[str, str]
    deltas_per_stream: int
    rows: Sequence[Row]
    targets: Sequence[Target]
    others: Sequence[Figure]


class Bench:
    """Collects the rounds of everything."""

    def __init__(self, world: World, slots: admission.World, plan: Plan, console: Console, status: Status) -> None:
        self._world = world
        self._slots = slots
        self._plan = plan
        self._console = console
        self._status = status
        self.results = Results()
        #: Of one answer, by whether it was streamed.
        self._characters: dict[bool, int] = {}
        self._job_path = ""
        #: Plain calls a second at 64, of this round.
        self._saturation = 0.0

    async def run(self) -> None:
        began = time.monotonic()
        await self._choose_loops()
        for number in range(-1, self._plan.rounds):
            warming = number < 0
            what = "warming up" if warming else f"round {number + 1} of {self._plan.rounds}"
            self._status.update(f"{what}: jobs")
            await self._jobs(warming=warming)
            for scenario in SCENARIOS:
                self._status.update(f"{what}: {scenario.name} at {scenario.concurrency}")
                # The order turns round, so that nobody is always the one after the noisy one.
                for side in scenario.sides if number % 2 else scenario.sides[::-1]:
                    await self._one(scenario, side, warming=warming)
            self._status.update(f"{what}: a slot and its settlement")
            await self._admission(warming=warming)
            self._console.print(f"{what}: {time.monotonic() - began:.0f} s", style="dim")
        self.results.resident_mb = self._world.resident_mb()

    async def _choose_loops(self) -> None:
        """Each yardstick gets, for each kind of request, the loop on which it costs least."""
        kinds = {(side.place, side.kind) for scenario in SCENARIOS for side in scenario.sides}
        for place, kind in sorted(kinds):
            if place not in YARDSTICKS or kind == "http_paced":
                continue
            self._status.update(f"which event loop is the fastest for {place}, {kind}")
            costs: dict[str, list[float]] = {loop: [] for loop in LOOPS}
            # The first turn warms up.
            for turn in range(self._plan.choosing + 1):
                for loop in LOOPS if turn % 2 else LOOPS[::-1]:
                    measured = await self._world.measure(
                        kind, place, Measured, concurrency=16, seconds=self._plan.warmup_s, loop=loop
                    )
                    if turn:
                        costs[loop].append(cost(measured, place))
            self._world.loops[place, kind] = min(LOOPS, key=lambda loop: statistics.median(costs[loop]))
        self._world.loops["proxy", "http_paced"] = self._world.loops["proxy", "http"]

    async def _one(self, scenario: Scenario, side: Side, *, warming: bool) -> None:
        seconds = self._plan.seconds if scenario.share is None else self._plan.paced_s
        measured = await self._world.measure(
            side.kind,
            side.place,
            Measured,
            concurrency=scenario.concurrency,
            seconds=self._plan.warmup_s if warming else seconds,
            rate=self._saturation * (scenario.share or 0.0),
            path=self._job_path if scenario.name == POLL else "/v1/chat/completions",
        )
        if (scenario.name, scenario.concurrency, side.place) == (PLAIN, 64, "gateway"):
            self._saturation = per_s(measured)
        if warming:
            return
        if scenario.name not in {POLL, PACED}:
            streamed = "stream" in side.kind
            if self._characters.setdefault(streamed, measured.characters) != measured.characters:
                raise RuntimeError(f"{side.place} gave another answer than the others: {scenario.name}")
        self.results.add(scenario.name, scenario.concurrency, side.place, measured)

    async def _jobs(self, *, warming: bool) -> None:
        count = self._plan.jobs // 10 if warming else self._plan.jobs
        done = await self._world.measure("jobs", "gateway", Jobs, jobs=count)
        self._job_path = f"/v1/jobs/{done.job_id}"
        if not warming:
            self.results.add(SUBMIT, 1, "gateway", done.submitted)
            self.results.add(RUN, 1, "gateway", done.run)

    async def _admission(self, *, warming: bool) -> None:
        order = worker.Order(
            groups=[admission.HOT], clients=1, seconds=self._plan.warmup_s if warming else self._plan.seconds
        )
        done = await self._slots.run(order, 1)
        if not warming:
            self.results.admissions.append(
                Admission(
                    admit_ms=statistics.median(done.admit_us) / 1e3, pair_ms=statistics.median(done.pair_us) / 1e3
                )
            )


@asynccontextmanager
async def _slots(world: World) -> AsyncIterator[admission.World]:
    """A controller in a process of its own, on the gateway's core, in another database of the gateway's server."""
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(embedded.running(world.data_dir))
        observer = await stack.enter_async_context(database.open_connection(server.url, name="observer", wait_s=20))
        slots = await admission.beside(observer, server.url, "slots", postmaster=world.watch["postgres"][0])
        stack.push_async_callback(slots.stop_workers)
        with cores.started_on(world.divided.measured if world.divided else None):
            await slots.start_workers(1)
        yield slots


async def bench(plan: Plan, console: Console, *, pin: bool) -> tuple[Bench, World]:
    with console.status("starting") as status:
        async with opened(pin=pin) as world, _slots(world) as slots:
            measured = Bench(world, slots, plan, console, status)
            await measured.run()
            return measured, world


# ------------------------------------------------------------------ showing it


def table_of(rows: Sequence[Row]) -> Table:
    table = Table(box=box.SIMPLE, header_style="bold", pad_edge=False)
    table.add_column("scenario")
    table.add_column("at", justify="right")
    table.add_column("place")
    for name in (
        "per s",
        "deltas/s",
        "p50 ms",
        "p99 ms",
        "CPU s/1000",
        "PG s/1000",
        "CPU x",
        "rate x",
        "+p50 ms",
        "load",
    ):
        table.add_column(name, justify="right")
    seen: tuple[str, int] | None = None
    for row in rows:
        here = (row.scenario, row.concurrency)
        if seen is not None and here != seen:
            table.add_section()
        table.add_row(
            row.scenario if here != seen else "",
            str(row.concurrency) if here != seen else "",
            row.place,
            f"{row.per_s:,.0f}",
            shown(row.deltas_per_s, ",.0f"),
            shown(row.p50_ms, ".2f"),
            shown(row.p99_ms, ".2f"),
            f"{row.cpu_s_per_1000:.3f}",
            shown(row.postgres_s_per_1000, ".3f"),
            shown(row.cpu_ratio, ".2f"),
            shown(row.rate_ratio, ".2f"),
            shown(row.added_p50_ms, "+.2f"),
            f"{row.load_cores:.2f}" + ("!" if row.load_cores > SATURATED else ""),
            style="bold" if row.place.startswith("gateway") else None,
        )
        seen = here
    return table


def show(run: Kept, console: Console) -> None:
    console.print(table_of(run.rows))
    console.print(
        f"A stream has {run.deltas_per_stream} deltas, {BURST} in each write of the provider; its latency is to the "
        "first one. CPU x, rate x and +p50 are the gateway's against that line's. `load`: cores that the load was busy "
        "with; with ! it was the bottleneck and the rates are its own.",
        style="dim",
    )
    console.print(table_of_targets(run.targets, run.others))
    console.print("event loops: " + ", ".join(f"{what} on {loop}" for what, loop in run.loops.items()), style="dim")
    where = "nothing was pinned to a core"
    if run.cores is not None:
        where = f"what was measured ran on core {_list(run.cores.measured)}, all else on {_list(run.cores.others)}"
    console.print(where, style="dim")


def _list(numbers: frozenset[int]) -> str:
    return ", ".join(map(str, sorted(numbers)))


def _kept(of: Origin, plan: Plan, measured: Bench, world: World) -> Kept:
    return Kept(
        measured_at=datetime.now(UTC).isoformat(timespec="seconds"),
        commit=of.commit,
        uncommitted_changes=of.uncommitted_changes,
        python=platform.python_version(),
        cpus=os.cpu_count(),
        cores=world.divided,
        plan=plan,
        loops={f"{place} ({kind})": loop for (place, kind), loop in world.loops.items()},
        deltas_per_stream=PIECES,
        rows=list(measured.results.rows()),
        targets=list(measured.results.targets()),
        others=list(measured.results.others()),
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a first look in less than a minute; keeps no numbers")
    parser.add_argument("--rounds", type=int, help="instead of the usual ones")
    parser.add_argument("--no-pin", action="store_true", help="let the system choose the cores")
    parser.add_argument("--show", type=Path, metavar="FILE", help="the tables of a run that was kept, in Markdown too")
    options = parser.parse_args()
    console = Console(width=None if os.isatty(1) else 140)
    if options.show:
        try:
            run = msgspec.json.decode(options.show.read_bytes(), type=Kept)
        except (OSError, msgspec.MsgspecError) as error:
            parser.error(f"{options.show} is not a run that can be shown: {error}")
        show(run, console)
        console.print(markdown_of_targets(run.targets, run.others), soft_wrap=True, markup=False, highlight=False)
        return
    worker.only_warnings()
    plan = QUICK if options.quick else FULL
    if options.rounds:
        plan = msgspec.structs.replace(plan, rounds=options.rounds)
    of, began = origin(), time.monotonic()
    busy, every = cpu.machine()
    measured, world = asyncio.run(bench(plan, console, pin=not options.no_pin))
    busy_after, every_after = cpu.machine()
    run = _kept(of, plan, measured, world)
    show(run, console)
    foreign = statistics.median(row.foreign_cores for row in run.rows)
    share = (busy_after - busy) / max(every_after - every, 1e-9)
    console.print(
        f"{time.monotonic() - began:.0f} s, {plan.rounds} rounds; the machine was {share:.0%} busy, "
        f"{foreign:.2f} cores of it with other programs",
        style="dim",
    )
    if not options.quick:
        keep(run, f"{datetime.now(UTC):%Y-%m-%d}-{run.commit}", console)


if __name__ == "__main__":
    command(main)
