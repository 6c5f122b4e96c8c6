"""
All fault scenarios, several rounds each: `python -m tests.faults [--seed N] [--rounds N] [--only NAME] [--requests N]`.

Prints a table and exits with 1 where something did not hold, or where a fault that a scenario is about never happened.
A round's seed is the first seed plus its number; it fixes what is done, not how real processes interleave, so a
failure may need a few rounds of its seed to come again. The clock scenarios need libfaketime, the one with a pooler
PgBouncer. Those with a full disk need root on Linux; where they cannot be run it says so, and counts them.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import functools
import math
import os
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import asyncpg
import msgspec
import structlog
from rich import box
from rich.console import Console
from rich.table import Table

from gateway.database import DatabaseError
from tests.faults.audit import Kind
from tests.faults.disk import NoSmallDisk, require_small_disk
from tests.faults.pooler import PoolerMissing, pgbouncer
from tests.faults.scenarios import REQUESTS, SCENARIOS, Scenario, run
from tests.faults.server import FaketimeMissing, faketime_library
from tests.faults.world import Report, Violated
from tests.progress import Progress
from tests.stopping import command

#: What a round may fail with besides a violation: something did not happen, or not in time.
_FAILURES = (
    AssertionError,
    OSError,
    TimeoutError,
    subprocess.SubprocessError,
    asyncpg.PostgresError,
    asyncpg.InterfaceError,
    DatabaseError,
)
console = Console(width=None if sys.stdout.isatty() else 200, highlight=False)


@dataclasses.dataclass
class Row:
    """What the rounds of one scenario came to."""

    chosen: Scenario
    reports: list[Report] = dataclasses.field(default_factory=list)
    #: Seed, and what is wrong.
    failures: list[tuple[int, str]] = dataclasses.field(default_factory=list)

    def count(self, kind: Kind) -> int:
        return sum(violation.kind is kind for report in self.reports for violation in report.violations)

    @property
    def faults(self) -> Counter[str]:
        return sum((report.faults for report in self.reports), Counter())

    @property
    def missing(self) -> list[str]:
        return [fault for fault in self.chosen.faults if not self.faults[fault]]


def played(chosen: Scenario, seed: int, row: Row, requests: int, tell: Callable[[str], None]) -> None:
    report = Report(scenario=chosen.name, seed=seed)
    row.reports.append(report)
    try:
        asyncio.run(run(chosen, seed, requests=requests, report=report, tell=tell))
    except Violated as violated:
        row.failures.append((seed, str(violated)))
        console.print(f"{violated}", style="red", markup=False, soft_wrap=True)
    except _FAILURES as failed:
        notes = "\n".join(getattr(failed, "__notes__", []))
        said = f"{type(failed).__name__}: {failed}\n{notes}"
        row.failures.append((seed, said))
        console.print(said, style="red", markup=False, soft_wrap=True)


def tell(progress: Progress, done: int, name: str, said: str) -> None:
    progress.tell(done, f"{name}: {said}")


def p99(values: Sequence[float]) -> str:
    if not values:
        return "-"
    return f"{sorted(values)[math.ceil(len(values) * 0.99) - 1]:.2f} s"


def table(rows: Sequence[Row]) -> Table:
    made = Table(box=box.SIMPLE, pad_edge=False)
    made.add_column("scenario")
    for name in (
        "rounds", "kills", "requests", "dispatches", "attempts", "snapshots", "peak",
        "over-adm.", "double", "lost", "other", "charged", "zero", "unknown", "serves p99", "rests p99",
    ):  # fmt: skip
        made.add_column(name, justify="right")
    for row in rows:
        reports = row.reports
        named = (Kind.OVER_ADMISSION, Kind.DOUBLE, Kind.LOST)
        others = sum(violation.kind not in named for report in reports for violation in report.violations)
        made.add_row(
            row.chosen.name,
            f"{len(reports)}",
            f"{sum(report.kills for report in reports)}",
            f"{sum(report.requests for report in reports)}",
            f"{sum(report.dispatches for report in reports)}",
            f"{sum(report.attempts for report in reports)}",
            f"{sum(report.snapshots for report in reports)}",
            f"{max(report.peak for report in reports)}",
            *(f"{row.count(kind)}" for kind in named),
            f"{others}",
            f"{sum(report.charged for report in reports)}",
            f"{sum(report.zero for report in reports)}",
            f"{sum(report.unknown for report in reports)}",
            p99([value for report in reports for value in report.recoveries]),
            p99([report.rested_s for report in reports if report.rested_s]),
        )
    return made


def without_small_disk(chosen: Sequence[Scenario]) -> list[str]:
    """The scenarios that cannot be run on this machine, each with the reason. Not to be kept from anybody."""
    try:
        require_small_disk()
    except NoSmallDisk as error:
        return [f"{one.name}: {error}" for one in chosen if one.small is not None]
    return []


def figures(rows: Sequence[Row], skipped: Sequence[str]) -> dict[str, object]:
    """The sums, for machines."""
    reports = [report for row in rows for report in row.reports]
    return {
        "rounds": len(reports),
        "kills": sum(report.kills for report in reports),
        "faults": sum((row.faults for row in rows), Counter()),
        "dispatches": sum(report.dispatches for report in reports),
        "settled": sum(report.attempts for report in reports),
        "unknown": sum(report.unknown for report in reports),
        "over_admissions": sum(row.count(Kind.OVER_ADMISSION) for row in rows),
        "double_settlements": sum(row.count(Kind.DOUBLE) for row in rows),
        "lost_settlements": sum(row.count(Kind.LOST) for row in rows),
        "failures": sum(len(row.failures) + len(row.missing) for row in rows),
        "broken": [
            {"what": f"{row.chosen.name}, seed {seed}: {said}", "again": again(row.chosen.name, seed)}
            for row in rows
            for seed, said in row.failures
        ],
        "never": [f"{row.chosen.name}: {fault}" for row in rows for fault in row.missing],
        "skipped": skipped,
    }


def again(name: str, seed: int) -> str:
    """Some rounds: the seed does not fix how processes interleave."""
    return f"python -m tests.faults --only {name} --seed {seed} --rounds 5"


def commit() -> str:
    found = subprocess.run(["git", "rev-parse", "--short", "HEAD"], check=False, capture_output=True, text=True)
    return found.stdout.strip() or "unknown"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("--seed", type=int, default=None, help="the first round's seed (default: another each time)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--requests", type=int, default=REQUESTS, help="of a round of every_dispatch_is_charged_once (%(default)s)"
    )
    parser.add_argument("--only", action="append", default=[], metavar="NAME", choices=list(SCENARIOS))
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the sums there")
    parser.add_argument("--verbose", action="store_true", help="show what the parts in this process log")
    given = parser.parse_args()
    if not given.verbose:
        structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(50))
    chosen = [SCENARIOS[name] for name in given.only or SCENARIOS]
    if any(one.clock for one in chosen):
        try:
            faketime_library()
        except FaketimeMissing as missing:
            console.print(f"[red]{missing}[/red]")
            return 2
    if any(one.pooled for one in chosen):
        try:
            pgbouncer()
        except PoolerMissing as missing:
            console.print(f"[red]{missing}[/red]")
            return 2
    skipped = without_small_disk(chosen)
    if skipped:
        chosen = [one for one in chosen if one.small is None]
    seed = random.SystemRandom().randrange(1_000_000) if given.seed is None else given.seed
    console.print(f"seed {seed}, commit {commit()}, {os.cpu_count()} cores, {given.rounds} rounds each")
    rows = [Row(one) for one in chosen]
    began = time.monotonic()
    progress = Progress(given.rounds * len(rows))
    done = 0
    # Each scenario once, then each again: what a first round finds is heard of early.
    for number in range(given.rounds):
        for row in rows:
            name = f"{row.chosen.name}, round {number + 1}, seed {seed + number}"
            progress.tell(done, f"{name} ...", always=True)
            wrong = len(row.failures)
            played(row.chosen, seed + number, row, given.requests, functools.partial(tell, progress, done, name))
            done += 1
            said = f"{name}: {row.reports[-1].took_s:.0f} s, {time.monotonic() - began:.0f} s in all"
            progress.tell(done, said, wrong=len(row.failures) > wrong, always=True)
    console.print(table(rows))
    faults = sum((row.faults for row in rows), Counter())
    console.print("faults: " + ", ".join(f"{name} {count}" for name, count in sorted(faults.items())))
    answers = sum((report.answers for row in rows for report in row.reports), Counter())
    console.print("answers: " + ", ".join(f"{name} {count}" for name, count in answers.most_common()))
    for row in rows:
        for _, failure in row.failures:
            console.print(f"{row.chosen.name}: {failure}", style="red", markup=False, soft_wrap=True)
        if row.missing:
            console.print(f"[red]{row.chosen.name}: these faults never happened: {', '.join(row.missing)}[/red]")
    for said in skipped:
        console.print(f"NOT RUN  {said}", style="red", markup=False, soft_wrap=True)
    if given.json is not None:
        given.json.write_bytes(msgspec.json.encode(figures(rows, skipped)))
    return 1 if any(row.failures or row.missing for row in rows) or not rows else 0


if __name__ == "__main__":
    command(main)
