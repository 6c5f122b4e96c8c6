"""
Everything that shows admission to be exact, one after the other: `python -m tests.prove`, or `make prove`.

Each part can be run for itself, and takes a different way to the same rules: models that visit every state, a
simulation of the code that decides, that code against the SQL, real processes under faults, and planted bugs, which
show that the tests would notice. Here they run with numbers that fit into one sitting, and come to one table. A part
that fails fails the whole; a part that could not run is not left out but an error, told before anything begins.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import msgspec
from rich import box
from rich.console import Console
from rich.rule import Rule
from rich.table import Table

from tests.faults.server import FaketimeMissing, faketime_library
from tests.model.spin import Unusable, require_tools

ROOT: Final = Path(__file__).parents[1]

#: Meant to come to less than 40 minutes on two quiet cores; the table tells what they came to.
SEEDS: Final = 30_000
SCHEDULES: Final = 1_500
ROUNDS: Final = 2


class Missing(Exception):
    """Something that a part needs is not on this machine."""


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """What a part writes with --json, as far as it has it. None is printed as nothing, and 0 as 0."""

    #: Of the models.
    states: int | None = None
    schedules: int | None = None
    steps: int | None = None
    #: Of the fault scenarios.
    rounds: int | None = None
    kills: int | None = None
    faults: dict[str, int] = {}
    settled: int | None = None
    unknown: int | None = None
    over_admissions: int | None = None
    double_settlements: int | None = None
    lost_settlements: int | None = None
    #: Planted bugs, and those that were noticed.
    planted: int | None = None
    killed: int | None = None
    failures: int


class Part(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    #: What it shows, in a line.
    shows: str
    module: str
    arguments: Sequence[str] = ()
    #: Raises `Missing`.
    needs: Sequence[Callable[[], None]] = ()

    @property
    def command(self) -> str:
        return " ".join(("python -m", self.module, *self.arguments))


class Ran(msgspec.Struct, frozen=True, kw_only=True):
    part: Part
    code: int
    seconds: float
    #: None where it did not get so far as to tell them.
    figures: Figures | None

    @property
    def well(self) -> bool:
        return self.code == 0 and self.figures is not None and self.figures.failures == 0


def needs_spin() -> None:
    try:
        require_tools()
    except Unusable as unusable:
        raise Missing(str(unusable)) from None
    # The checker that Spin writes includes the C library's headers, which come apart from the compiler.
    tried = subprocess.run(
        ["gcc", "-E", "-x", "c", "-"], input=b"#include <stdio.h>\n", capture_output=True, check=False, timeout=60
    )
    if tried.returncode != 0:
        raise Missing("the headers of the C library are needed for the models; on Debian: apt-get install libc6-dev")


def needs_faketime() -> None:
    try:
        faketime_library()
    except FaketimeMissing as missing:
        raise Missing(str(missing)) from None


def parts(given: argparse.Namespace) -> list[Part]:
    return [
        Part(
            name="models",
            shows="every state that the rules allow, in every order",
            module="tests.model",
            needs=[needs_spin],
        ),
        Part(
            name="simulation",
            shows="the code that decides, under faults, in virtual time",
            module="tests.simulation",
            arguments=["--seeds", str(given.seeds)],
        ),
        Part(
            name="differential",
            shows="the SQL does what that code does",
            module="tests.differential",
            arguments=["--schedules", str(given.schedules), "--steps", "50"],
        ),
        Part(
            name="faults",
            shows="real processes and a real database, killed, stopped and cut",
            module="tests.faults",
            arguments=["--rounds", str(given.rounds)],
            needs=[needs_faketime],
        ),
        Part(name="mutants", shows="the tests notice planted bugs", module="tests.mutants"),
    ]


def run(part: Part, console: Console) -> Ran:
    console.print(Rule(f"{part.name}: {part.shows}"))
    console.print(f"$ {part.command}\n", markup=False)
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="tollbridge-prove-") as place:
        told = Path(place) / "figures.json"
        code = subprocess.run(
            [sys.executable, "-m", part.module, *part.arguments, "--json", str(told)], cwd=ROOT, check=False
        ).returncode
        figures = msgspec.json.decode(told.read_bytes(), type=Figures) if told.exists() else None
    return Ran(part=part, code=code, seconds=time.monotonic() - began, figures=figures)


def _number(value: int | None) -> str:
    return "" if value is None else f"{value:,}"


def _noticed(killed: int | None, planted: int | None) -> str:
    return "" if planted is None else f"{killed} of {planted}"


def _sum(values: Sequence[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None


COLUMNS: Final = (
    "states",
    "schedules",
    "rounds",
    "kills",
    "faults",
    "settled",
    "over-adm.",
    "double",
    "lost",
    "unknown",
)


def _row(figures: Figures) -> list[int | None]:
    return [
        figures.states,
        figures.schedules,
        figures.rounds,
        figures.kills,
        sum(figures.faults.values()) if figures.faults else None,
        figures.settled,
        figures.over_admissions,
        figures.double_settlements,
        figures.lost_settlements,
        figures.unknown,
    ]


def summary(done: Sequence[Ran]) -> tuple[Table, str]:
    """The table of all parts, and the faults by their kind."""
    table = Table("", *COLUMNS, "planted bugs", "minutes", "", box=box.SIMPLE, pad_edge=False)
    for column in table.columns[1:-1]:
        column.justify = "right"
    rows = []
    for ran in done:
        numbers = _row(ran.figures) if ran.figures is not None else [None] * len(COLUMNS)
        rows.append(numbers)
        planted = "" if ran.figures is None else _noticed(ran.figures.killed, ran.figures.planted)
        table.add_row(
            ran.part.name,
            *(_number(number) for number in numbers),
            planted,
            f"{ran.seconds / 60:.1f}",
            "holds" if ran.well else "FAILED",
            style=None if ran.well else "red",
        )
    known = [ran.figures for ran in done if ran.figures is not None]
    table.add_section()
    table.add_row(
        "together",
        *(_number(_sum(column)) for column in zip(*rows, strict=True)),
        _noticed(_sum([f.killed for f in known]), _sum([f.planted for f in known])),
        f"{sum(ran.seconds for ran in done) / 60:.1f}",
        "holds" if all(ran.well for ran in done) else "FAILED",
    )
    faults: Counter[str] = Counter()
    for figures in known:
        faults.update(figures.faults)
    return table, ", ".join(f"{name} {count:,}" for name, count in sorted(faults.items()))


def main(arguments: Sequence[str] | None = None) -> int:
    """0: everything holds. 1: something does not. 2: something is missing, and nothing was run."""
    parser = argparse.ArgumentParser(prog="python -m tests.prove", description="Runs everything that shows the rules.")
    parser.add_argument("--seeds", type=int, default=SEEDS, help="schedules of the simulation (%(default)s)")
    parser.add_argument("--schedules", type=int, default=SCHEDULES, help="schedules against the SQL (%(default)s)")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="rounds of each fault scenario (%(default)s)")
    parser.add_argument("--only", action="append", default=[], metavar="PART", help="one part (may be repeated)")
    given = parser.parse_args(arguments)
    console = Console(width=max(170, Console().width), highlight=False)
    chosen = [part for part in parts(given) if not given.only or part.name in given.only]
    if unknown := set(given.only) - {part.name for part in chosen}:
        parser.error(f"there is no part called {', '.join(sorted(unknown))}")
    missing = []
    for part in chosen:
        for need in part.needs:
            try:
                need()
            except Missing as error:
                missing.append(f"{part.name}: {error}")
    if missing:
        console.print("Nothing was run:", *missing, sep="\n  ", markup=False, soft_wrap=True)
        return 2
    done = [run(part, console) for part in chosen]
    console.print(Rule("summary"))
    table, faults = summary(done)
    console.print(table)
    console.print(f"faults: {faults}", markup=False, soft_wrap=True)
    return 0 if all(ran.well for ran in done) else 1


if __name__ == "__main__":
    sys.exit(main())
