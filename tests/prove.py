"""
Everything that shows admission to be exact: `python -m tests.prove`, or `make prove`.

Each part can be run for itself, and takes a different way to the same rules: models that visit every state, a
simulation of the code that decides, that code against the SQL, real processes under faults, and planted bugs, which
show that the tests would notice. Here they run with numbers that fit into one sitting, and come to one table. A part
that fails fails the whole; a part that could not run is not left out but an error, told before anything begins.

While it runs it tells how far each part has come, and at once what went wrong.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

import msgspec
from rich import box
from rich.console import Console
from rich.live import Live
from rich.rule import Rule
from rich.table import Table

from tests import progress
from tests.faults.pooler import PoolerMissing, pgbouncer
from tests.faults.server import FaketimeMissing, faketime_library
from tests.model.spin import Unusable, require_tools
from tests.stopping import command

ROOT: Final = Path(__file__).parents[1]

#: Meant to come to less than an hour on two quiet cores; the table tells what they came to.
SEEDS: Final = 30_000
SCHEDULES: Final = 1_500
ROUNDS: Final = 2

#: Seconds between lines that tell of a part where there is no terminal.
_QUIET_S: Final = 15.0


class Missing(Exception):
    """Something that a part needs is not on this machine. Its argument says what; `packages` are Debian's."""

    def __init__(self, said: str, *packages: str) -> None:
        super().__init__(said)
        self.packages = packages


class Broken(msgspec.Struct, frozen=True, kw_only=True):
    """Something that does not hold, and the command that shows it again."""

    what: str
    again: str


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
    #: Planted bugs, those that were noticed, and the names of those that were not.
    planted: int | None = None
    killed: int | None = None
    alive: list[str] = []
    failures: int
    broken: list[Broken] = []
    #: What had to happen at least once and did not: then the run shows nothing of it.
    never: list[str] = []
    #: What could not be run on this machine, and why.
    skipped: list[str] = []


class Part(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    #: What it shows, in a line.
    shows: str
    module: str
    arguments: Sequence[str] = ()
    #: Raises `Missing`.
    needs: Sequence[Callable[[], None]] = ()
    #: It only computes, with `--jobs` processes: another such part may run beside it. The others measure time.
    computes: bool = False

    @property
    def command(self) -> str:
        return " ".join(("python -m", self.module, *self.arguments))


class Ran(msgspec.Struct, frozen=True, kw_only=True):
    part: Part
    code: int
    seconds: float
    #: None where it did not get so far as to tell them.
    figures: Figures | None
    #: What it printed besides how far it was.
    said: str = ""

    @property
    def well(self) -> bool:
        return self.code == 0 and self.figures is not None and self.figures.failures == 0

    @property
    def broken(self) -> list[Broken]:
        """Never empty where it is not well."""
        found: list[Broken] = []
        if self.figures is not None:
            found += self.figures.broken
            found += [
                Broken(what=f"not noticed: {name}", again=f"python -m tests.mutants --only '{name}'")
                for name in self.figures.alive
            ]
            found += [Broken(what=f"never happened: {what}", again=self.part.command) for what in self.figures.never]
        if not found and not self.well:
            found.append(Broken(what=f"it ended with {self.code}", again=self.part.command))
        return found


def needs_spin() -> None:
    try:
        require_tools()
    except Unusable as unusable:
        raise Missing(str(unusable), "spin", "gcc", "libc6-dev") from None
    # The checker that Spin writes includes the C library's headers, which come apart from the compiler.
    tried = subprocess.run(
        ["gcc", "-E", "-x", "c", "-"], input=b"#include <stdio.h>\n", capture_output=True, check=False, timeout=60
    )
    if tried.returncode != 0:
        raise Missing("the headers of the C library are needed for the models", "libc6-dev")


def needs_faketime() -> None:
    try:
        faketime_library()
    except FaketimeMissing as missing:
        raise Missing(str(missing), "faketime") from None


def needs_pgbouncer() -> None:
    try:
        pgbouncer()
    except PoolerMissing as missing:
        raise Missing(str(missing), "pgbouncer") from None


def parts(given: argparse.Namespace) -> list[Part]:
    """In the order in which they begin: the short ones first."""
    return [
        Part(
            name="models",
            shows="every state that the rules allow, in every order",
            module="tests.model",
            needs=[needs_spin],
            computes=True,
        ),
        Part(
            name="simulation",
            shows="the code that decides, under faults, in virtual time",
            module="tests.simulation",
            arguments=["--seeds", str(given.seeds)],
            computes=True,
        ),
        Part(
            name="differential",
            shows="the SQL does what that code does",
            module="tests.differential",
            arguments=["--schedules", str(given.schedules), "--steps", "50"],
            computes=True,
        ),
        Part(
            name="faults",
            shows="real processes and a real database, killed, stopped and cut",
            module="tests.faults",
            arguments=["--rounds", str(given.rounds)],
            needs=[needs_faketime, needs_pgbouncer],
        ),
        Part(name="mutants", shows="the tests notice planted bugs", module="tests.mutants"),
    ]


class Board:
    """How far each part is: a table that moves on a terminal, else a line now and then."""

    def __init__(self, chosen: Sequence[Part], console: Console) -> None:
        self._console = console
        self._lock = threading.Lock()
        self._began: dict[str, float] = {}
        self._steps: dict[str, progress.Step] = {}
        self._wrong: Counter[str] = Counter()
        self._ended: dict[str, Ran] = {}
        self._told: dict[str, float] = {}
        self._chosen = chosen

    @contextlib.contextmanager
    def shown(self) -> Iterator[None]:
        if not self._console.is_terminal:
            yield
            return
        with Live(get_renderable=self._table, console=self._console, refresh_per_second=4, transient=True):
            yield

    def begins(self, part: Part) -> None:
        with self._lock:
            self._began[part.name] = self._told[part.name] = time.monotonic()
        self._print(part, f"begins: {part.shows}\n             $ {part.command}")

    def steps(self, part: Part, step: progress.Step) -> None:
        with self._lock:
            self._steps[part.name] = step
            self._wrong[part.name] += step.wrong
            now = time.monotonic()
            due = now - self._told[part.name] > _QUIET_S and not self._console.is_terminal
            if due or step.wrong:
                self._told[part.name] = now
        if due or step.wrong:
            self._print(part, self._far(part), red=step.wrong)

    def ends(self, ran: Ran) -> None:
        with self._lock:
            self._ended[ran.part.name] = ran
        if ran.said.strip():
            self._console.print(Rule(f"{ran.part.name}: {ran.part.shows}"))
            self._console.print(ran.said.rstrip(), markup=False, soft_wrap=True)
        self._print(ran.part, f"{'holds' if ran.well else 'FAILED'} after {_clock(ran.seconds)}", red=not ran.well)

    def _print(self, part: Part, said: str, *, red: bool = False) -> None:
        line = f"{part.name:<13}{said}"
        self._console.print(line, style="red" if red else None, markup=False, soft_wrap=True)

    def _far(self, part: Part) -> str:
        began, step = self._began[part.name], self._steps.get(part.name)
        elapsed = _clock(time.monotonic() - began)
        if step is None:
            return elapsed
        return f"{elapsed}  {step.done:,} of {step.total:,}, {self._wrong[part.name]} wrong  {step.said}"

    def _table(self) -> Table:
        with self._lock:
            table = Table.grid(padding=(0, 2))
            for part in self._chosen:
                if (ran := self._ended.get(part.name)) is not None:
                    far = f"{'holds' if ran.well else 'FAILED'}, {_clock(ran.seconds)}"
                else:
                    far = self._far(part) if part.name in self._began else "waits"
                table.add_row(part.name, far.replace("[", "\\["))
            return table


def _clock(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02}"


def run(part: Part, jobs: int | None, board: Board) -> Ran:
    """`jobs`: processes of a part that only computes; None: as many as there are cores."""
    began = time.monotonic()
    board.begins(part)
    said: list[str] = []
    with tempfile.TemporaryDirectory(prefix="tollbridge-prove-") as place:
        told = Path(place) / "figures.json"
        command = [sys.executable, "-m", part.module, *part.arguments, "--json", str(told)]
        if part.computes and jobs is not None:
            command += ["--jobs", str(jobs)]
        with subprocess.Popen(
            command,
            cwd=ROOT,
            env=os.environ | {"PYTHONUNBUFFERED": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        ) as process:
            assert process.stdout is not None
            for line in process.stdout:
                step = progress.read(line)
                if step is None:
                    said.append(line)
                else:
                    board.steps(part, step)
            code = process.wait()
        figures = msgspec.json.decode(told.read_bytes(), type=Figures) if told.exists() else None
    ran = Ran(part=part, code=code, seconds=time.monotonic() - began, figures=figures, said="".join(said))
    board.ends(ran)
    return ran


def run_all(chosen: Sequence[Part], board: Board) -> list[Ran]:
    """Two at a time of those that only compute, then the others one by one."""
    computing = [part for part in chosen if part.computes]
    cores = os.cpu_count() or 1
    beside = 2 if len(computing) > 1 and cores > 1 else 1
    jobs = cores // beside if beside > 1 else None
    with ThreadPoolExecutor(beside) as pool:
        done = list(pool.map(lambda part: run(part, jobs, board), computing))
    return done + [run(part, None, board) for part in chosen if not part.computes]


def _number(value: int | None) -> str:
    return "" if value is None else f"{value:,}"


def _noticed(killed: int | None, planted: int | None) -> str:
    return "" if planted is None else f"{killed} of {planted}"


def _sum(values: Sequence[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def _row(figures: Figures | None) -> list[int | None]:
    f = figures or Figures(failures=0)
    return [
        f.states,
        f.schedules,
        f.rounds,
        f.kills,
        sum(f.faults.values()) if f.faults else None,
        f.settled,
        f.over_admissions,
        f.double_settlements,
        f.lost_settlements,
        f.unknown,
    ]


#: What `_row` counts.
COUNTS: Final = (
    "states",
    "schedules",
    "rounds",
    "kills",
    "faults",
    "attempts settled",
    "over-admissions",
    "double settlements",
    "lost settlements",
    "attempts of unknown cost",
)


def summary(done: Sequence[Ran], seconds: float) -> tuple[Table, str]:
    """The table of all parts, which took so long together, and the faults by their kind."""
    table = Table("", *(ran.part.name for ran in done), "together", box=box.SIMPLE, pad_edge=False)
    for column in table.columns[1:]:
        column.justify = "right"
        column.no_wrap = True
    for count, row in zip(COUNTS, zip(*(_row(ran.figures) for ran in done), strict=True), strict=True):
        table.add_row(count, *map(_number, row), _number(_sum(row)))
    known = [ran.figures for ran in done if ran.figures is not None]
    table.add_row("scenarios not run", *_skipped([ran.figures for ran in done]))
    noticed = ["" if ran.figures is None else _noticed(ran.figures.killed, ran.figures.planted) for ran in done]
    sums = _noticed(_sum([f.killed for f in known]), _sum([f.planted for f in known]))
    table.add_row("planted bugs noticed", *noticed, sums)
    table.add_row("minutes", *(f"{ran.seconds / 60:.1f}" for ran in done), f"{seconds / 60:.1f}")
    held = [ran.well for ran in done]
    ends = ["holds" if well else "[red]FAILED[/red]" for well in (*held, all(held))]
    table.add_row("", *ends)
    faults: Counter[str] = Counter()
    for figures in known:
        faults.update(figures.faults)
    return table, ", ".join(f"{name} {count:,}" for name, count in sorted(faults.items()))


def _skipped(of: Sequence[Figures | None]) -> list[str]:
    counts = [len(figures.skipped) if figures is not None else 0 for figures in of]
    return [f"[red]{count}[/red]" if count else "" for count in (*counts, sum(counts))]


def broken(done: Sequence[Ran]) -> list[str]:
    """What does not hold, each with the command that shows it again."""
    lines: list[str] = []
    for ran in done:
        for one in ran.broken:
            lines += [f"{ran.part.name}: {one.what}", f"    again: {one.again}"]
    return lines


def missing(chosen: Sequence[Part]) -> list[str]:
    """What the parts need and this machine has not, and last the command that brings it."""
    lines: list[str] = []
    packages: list[str] = []
    for part in chosen:
        for need in part.needs:
            try:
                need()
            except Missing as error:
                lines.append(f"{part.name}: {error}")
                packages += [package for package in error.packages if package not in packages]
    return [*lines, f"on Debian: apt-get install {' '.join(packages)}"] if lines else []


def main(arguments: Sequence[str] | None = None) -> int:
    """0: everything holds. 1: something does not. 2: something is missing, and nothing was run."""
    parser = argparse.ArgumentParser(prog="python -m tests.prove", description="Runs everything that shows the rules.")
    parser.add_argument("--seeds", type=int, default=SEEDS, help="schedules of the simulation (%(default)s)")
    parser.add_argument("--schedules", type=int, default=SCHEDULES, help="schedules against the SQL (%(default)s)")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="rounds of each fault scenario (%(default)s)")
    parser.add_argument("--only", action="append", default=[], metavar="PART", help="one part (may be repeated)")
    parser.add_argument("--list", action="store_true", help="only tell the parts")
    given = parser.parse_args(arguments)
    terminal = Console()
    console = Console(width=None if terminal.is_terminal else max(100, terminal.width), highlight=False)
    every = parts(given)
    if unknown := set(given.only) - {part.name for part in every}:
        parser.error(f"there is no part called {', '.join(sorted(unknown))}")
    chosen = [part for part in every if not given.only or part.name in given.only]
    if given.list:
        for part in chosen:
            console.print(f"{part.name:<13}{part.shows}\n             $ {part.command}", markup=False, soft_wrap=True)
        return 0
    if lacking := missing(chosen):
        console.print("Nothing was run:", *lacking, sep="\n  ", markup=False, soft_wrap=True)
        return 2
    began = time.monotonic()
    board = Board(chosen, console)
    with board.shown():
        done = run_all(chosen, board)
    console.print(Rule("summary"))
    table, faults = summary(done, time.monotonic() - began)
    Console(width=max(terminal.width, 24 + 14 * (len(done) + 1)), highlight=False).print(table)
    if faults:
        console.print(f"faults: {faults}", markup=False, soft_wrap=True)
    for ran in done:
        for said in ran.figures.skipped if ran.figures is not None else ():
            console.print(f"NOT RUN  {ran.part.name}: {said}", style="red", markup=False, soft_wrap=True)
    if lines := broken(done):
        console.print("\n".join(lines), style="red", markup=False, soft_wrap=True)
    return 0 if all(ran.well for ran in done) else 1


if __name__ == "__main__":
    command(main)
