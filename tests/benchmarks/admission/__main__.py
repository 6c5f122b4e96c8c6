"""
How fast admission is beside the least that could be asked of PostgreSQL: `make bench-admission`.

A pair is an admission with its settlement, the ledger's row and counters included. Every client holds one slot at a
time and asks for the next when it has settled. In each round every case runs beside a bare `UPDATE ... RETURNING` by as
many processes and clients, each client on a connection of its own, of one row or of one for each group; a figure is the
median of the rounds, a ratio the median of their ratios. At the end the ledger is compared with what the clients saw.

    make bench-admission                                        all of it, under 4 minutes; keeps the numbers
    make bench-admission ARGS=--quick                           a first look
    make bench-admission ARGS="--case hot --processes 4 --clients 16 --rounds 3"
    make bench-admission ARGS="--case hot --processes 1 --clients 1 --profile"
    make bench-admission ARGS=--count                           the commits and statements of an uncontended pair only
    make bench-admission ARGS=--bloat                           sizes and dead rows over a million admissions
"""

from __future__ import annotations

import argparse
import asyncio
import os
import platform
import statistics
import subprocess
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

import msgspec
from rich import box
from rich.console import Console
from rich.table import Table

from tests.benchmarks.admission import bloat
from tests.benchmarks.admission.cases import (
    CASES,
    FULL,
    KINDS,
    QUICK,
    TARGET,
    WAITING,
    Bare,
    Case,
    Goal,
    Plan,
    Row,
    goals,
    row,
)  # fmt: skip
from tests.benchmarks.admission.worker import Order, only_warnings
from tests.benchmarks.admission.world import NotMeasurable, Round, World, opened
from tests.stopping import command

#: Cores. With more taken by others, the absolute figures are not this machine's.
BUSY = 0.2
#: The measured seconds of a case with a single client are cut into so many, in turn with the yardstick's.
ALONE_PARTS = 3
RESULTS = Path(__file__).parents[1] / "results"


class Bench:
    """Collects the rounds of everything."""

    def __init__(self, world: World, plan: Plan, console: Console) -> None:
        self._world = world
        self._plan = plan
        self._console = console
        #: Of a case with the bare rounds that were run beside it.
        self._rounds: dict[Case, tuple[list[Round], list[Round]]] = defaultdict(lambda: ([], []))
        self._failed: dict[Case, str] = {}

    async def run(self, cases: Sequence[Case]) -> None:
        short = [case for case in cases if case.kind != "queued"]
        queued = [case for case in cases if case.kind == "queued"]
        # Python and the connections of the yardstick are up before anything is measured.
        for bare in {case.bare for case in cases}:
            await self._world.run(Order(rows=bare.rows, clients=bare.clients, count=1), bare.processes)
        await self._all_rounds(short, "")
        if queued:
            try:
                async with self._world.hold_queue(WAITING):
                    await self._all_rounds(queued, f" with {WAITING:,} waiting")
            except NotMeasurable as reason:
                self._failed.update(dict.fromkeys(queued, str(reason)))

    async def _all_rounds(self, cases: Sequence[Case], where: str) -> None:
        for number in range(self._plan.rounds if cases else 0):
            bares: dict[Bare, Round] = {}
            # The order turns round, so that no case is always the one after the noisy one.
            for case in cases if number % 2 == 0 else cases[::-1]:
                # One client's latency follows the disk's mood: it is held against its yardstick more often.
                parts = ALONE_PARTS if case.processes * case.clients == 1 else 1
                for _ in range(parts):
                    if parts > 1 or case.bare not in bares:
                        bares[case.bare] = await self._one((), case.bare, parts)
                    self._rounds[case][0].append(await self._one(case.groups, case.bare, parts))
                    self._rounds[case][1].append(bares[case.bare])
            self._console.print(f"round {number + 1} of {self._plan.rounds}{where}", style="dim")

    async def _one(self, groups: Sequence[str], bare: Bare, parts: int) -> Round:
        order = Order(
            groups=groups,
            rows=bare.rows,
            clients=bare.clients,
            warmup_s=self._plan.warmup_s,
            seconds=self._plan.seconds / parts,
        )
        return await self._world.run(order, bare.processes)

    def rows(self, cases: Sequence[Case]) -> list[Row]:
        return [
            Row(
                case=case.words,
                kind=case.kind,
                processes=case.processes,
                clients=case.clients,
                failed=self._failed[case],
            )
            if case in self._failed
            else row(case, *self._rounds[case])
            for case in cases
        ]


# ------------------------------------------------------------------ showing it


def _table(rows: Sequence[Row]) -> Table:
    table = Table(box=box.SIMPLE, header_style="bold", pad_edge=False)
    table.add_column("case")
    for name in (
        "at", "pairs/s", "UPDATEs/s", "ratio", "admit ms", "settle ms", "pair ms", "UPDATE ms", "p50 x", "tx", "WAL B",
        "PG s", "client s", "UPDATE PG s",
    ):  # fmt: skip
        table.add_column(name, justify="right", no_wrap=True)
    kind = None
    for r in rows:
        if kind is not None and r.kind != kind:
            table.add_section()
        kind = r.kind
        at = f"{r.processes} x {r.clients}"
        if r.failed is not None:
            table.add_row(r.case, at, "not measured", style="red")
            continue
        table.add_row(
            r.case,
            at,
            _shown(r.pairs_per_s, ",.0f"),
            _shown(r.bare_per_s, ",.0f"),
            _shown(r.rate_ratio, ".2f"),
            _both(r.admit_p50_ms, r.admit_p99_ms),
            _both(r.settle_p50_ms, r.settle_p99_ms),
            _both(r.pair_p50_ms, r.pair_p99_ms),
            _both(r.bare_p50_ms, r.bare_p99_ms),
            _shown(r.p50_ratio, ".2f"),
            _shown(r.transactions, ".2f"),
            _shown(r.wal_bytes, ",.0f"),
            _shown(r.postgres_s, ".3f"),
            _shown(r.clients_s, ".3f"),
            _shown(r.bare_postgres_s, ".3f"),
        )
    return table


def _shown(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def _both(p50: float | None, p99: float | None) -> str:
    return f"{_shown(p50, '.3g')} / {_shown(p99, '.3g')}"


_LEGEND = (
    "at: processes x clients of each. ms: p50 / p99. p50 x: a pair's over an UPDATE's. tx, WAL B: transactions that "
    "wrote and bytes of WAL for each pair. PG s, client s: CPU seconds per 1,000 pairs, of PostgreSQL and of the "
    "processes that hold the controllers; UPDATE PG s: of PostgreSQL per 1,000 bare UPDATEs."
)


def _show_goals(found: Sequence[Goal], console: Console) -> None:
    for goal in found:
        word = {None: "[yellow]not measured[/]", True: "[green]met[/]", False: "[red]not met[/]"}[goal.met]
        sign = ">=" if goal.at_least else "<="
        console.print(f"{_shown(goal.figure, ',.2f'):>10}  {sign} {goal.bound:,g}  {goal.words}: {word}")


def _git(*words: str) -> str:
    found = subprocess.run(["git", *words], capture_output=True, text=True, check=False, cwd=RESULTS.parent)
    return found.stdout.strip()


def keep(name: str, content: Mapping[str, object], console: Console) -> None:
    commit = _git("rev-parse", "--short", "HEAD") or "unknown"
    now = datetime.now(UTC)
    path = RESULTS / f"{name}-{now:%Y-%m-%d}-{commit}.json"
    head = {
        "measured_at": now.isoformat(timespec="seconds"),
        "commit": commit,
        "uncommitted_changes": bool(_git("status", "--porcelain", "--untracked-files=no")),
        "python": platform.python_version(),
        "cpus": os.cpu_count(),
    }
    path.write_bytes(msgspec.json.format(msgspec.json.encode(_rounded({**head, **content})), indent=1) + b"\n")
    console.print(f"kept as {path.relative_to(RESULTS.parents[2])}")


def _rounded(value: object) -> object:
    if isinstance(value, float):
        return float(f"{value:.4g}")
    if isinstance(value, Mapping):
        return {name: _rounded(inner) for name, inner in value.items() if inner is not None}
    return [_rounded(inner) for inner in value] if isinstance(value, list | tuple) else value


# ------------------------------------------------------------------ running it


async def _bench(plan: Plan, cases: Sequence[Case], options: argparse.Namespace, console: Console) -> bool:
    """False where something was not measured."""
    async with opened() as world:
        bench = Bench(world, plan, console)
        counted = await world.counted(plan.counted) if options.count or not options.case else None
        await world.start_workers(max(case.processes for case in cases) if cases else 1)
        if options.profile:
            async with world.profiled():
                await bench.run(cases)
                await _show_profile(world, bench.rows(cases), console)
        else:
            await bench.run(cases)
        await world.audit()
        rows = bench.rows(cases)
        found = goals(rows, counted)
        if rows:
            console.print(_table(rows))
            console.print(_LEGEND, style="dim")
        _show_goals([goal for goal in found if goal.figure is not None or not options.chosen], console)
        if options.count and counted is not None:
            for query, calls in sorted(counted.statements.items(), key=lambda part: -part[1]):
                console.print(f"{calls:10.3f}  {' '.join(query.split())[:150]}", highlight=False, markup=False)
        failed = {r.failed for r in rows if r.failed is not None}
        for reason in failed:
            console.print(f"not measured: {reason}", style="red")
        console.print(
            f"the ledger has each of the {world.pairs:,} pairs once; fsync takes {world.fsync_us:,.0f} us here "
            f"({world.filesystem})",
            style="dim",
        )
        if rows:
            foreign = statistics.median(r.foreign_cores or 0.0 for r in rows)
            if foreign < BUSY:
                console.print(f"{foreign:.2f} cores were busy with other programs", style="dim")
            else:
                console.print(
                    f"{foreign:.2f} cores were busy with other programs: met and not met say little", style="yellow"
                )
        if options.profile:
            console.print("profiling slows what it counts: these are not the figures to quote", style="yellow")
        if not options.chosen and not options.quick:
            content = {
                "plan": msgspec.to_builtins(plan),
                "fsync_us": world.fsync_us,
                "filesystem": world.filesystem,
                "rows": [msgspec.to_builtins(r) for r in rows],
                "counted": msgspec.to_builtins(counted),
                "goals": [{**msgspec.to_builtins(goal), "met": goal.met} for goal in found],
            }
            keep("admission", content, console)
        return not failed


async def _show_profile(world: World, rows: Sequence[Row], console: Console) -> None:
    measured = sum(sum(r.rounds) for r in rows)
    console.print(f"the statements that took longest, warm-up included ({measured:,.0f} pairs a second measured)")
    for r in await world.dearest(25):
        each = r["total_ms"] / max(r["calls"], 1) * 1000
        console.print(
            f"{r['total_ms']:9,.0f} ms {r['calls']:9,} calls {each:9,.1f} us {r['rows']:9,} rows "
            f"{r['blocks'] / max(r['calls'], 1):7,.1f} blocks  {'sent ' if r['toplevel'] else 'inner'}  {r['query']}",
            highlight=False,
            markup=False,
        )


async def _bloat(plan: Plan, case: Case, options: argparse.Namespace, console: Console) -> bool:
    """False where a table grew that should not."""
    async with opened() as world:
        found = await bloat.run(world, case, options.bloat or plan.bloat, console)
        await world.audit()
    if not options.quick:
        keep("admission-bloat", {"case": msgspec.to_builtins(case), **msgspec.to_builtins(found)}, console)
    return found.short or not found.grown


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="bench-admission", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="a first look in under 40 s; keeps no numbers")
    parser.add_argument("--case", choices=KINDS, action="append", help="only this; may be repeated")
    parser.add_argument("--processes", type=int, help="of the chosen cases")
    parser.add_argument("--clients", type=int, help="in each process of the chosen cases")
    parser.add_argument("--rounds", type=int, help="instead of the usual ones")
    parser.add_argument("--seconds", type=float, help="of each case in a round, instead of the usual ones")
    parser.add_argument("--count", action="store_true", help="the commits and statements of an uncontended pair")
    parser.add_argument("--profile", action="store_true", help="the dearest statements, those inside functions too")
    parser.add_argument("--bloat", type=int, nargs="?", const=0, metavar="N", help="sizes over N admissions")
    options = parser.parse_args()
    only_warnings()
    plan = QUICK if options.quick else FULL
    if options.rounds:
        plan = msgspec.structs.replace(plan, rounds=options.rounds)
    if options.seconds:
        plan = msgspec.structs.replace(plan, seconds=options.seconds)
    options.chosen = bool(options.case or options.processes or options.clients or options.count or options.profile)
    console = Console(width=None if os.isatty(1) else 180)
    began = time.monotonic()
    if options.bloat is not None:
        case = Case(
            kind=(options.case or ["hot"])[0],
            processes=options.processes or TARGET.processes,
            clients=options.clients or TARGET.clients,
        )
        complete = asyncio.run(_bloat(plan, case, options, console))
    else:
        complete = asyncio.run(_bench(plan, _chosen(options), options, console))
    console.print(f"{time.monotonic() - began:.0f} s", style="dim")
    raise SystemExit(0 if complete else 1)


def _chosen(options: argparse.Namespace) -> list[Case]:
    if not options.chosen:
        return CASES
    if options.count and not options.case:
        return []
    if options.processes or options.clients:
        return [
            Case(kind=kind, processes=options.processes or 4, clients=options.clients or 16)
            for kind in options.case or ["hot"]
        ]
    return [case for case in CASES if options.case is None or case.kind in options.case]


if __name__ == "__main__":
    command(main)
