"""
Planted bugs, each of which a test must notice: `python -m tests.mutants`.

    --list             the bugs, by the invariant that each breaks
    --only NAME        one of them (may be given several times)
    --sample N         so many that need no database, chosen anew each time
    --json FILE        the figures, for machines

Exits with 1 where one survives, or breaks in another way than by a test that fails in its own body; with 2 where the
list does not fit the code any more, or the tests fail without any bug.
"""

from __future__ import annotations

import argparse
import random
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import msgspec
from rich import box
from rich.console import Console
from rich.table import Table

from tests.mutants.listed import MUTANTS
from tests.mutants.running import End, Mutant, Result, Stale, hunt_all
from tests.stopping import command


def short(test: str) -> str:
    return test.rpartition("/")[2]


def table(results: Sequence[Result]) -> Table:
    made = Table("mutant", "invariant", "", "killed by", "seconds", box=box.SIMPLE, pad_edge=False)
    made.columns[1].justify = made.columns[4].justify = "right"
    for result in sorted(results, key=lambda r: (r.mutant.invariant, r.mutant.name)):
        style = None if result.end is End.KILLED else "red"
        made.add_row(
            result.mutant.name,
            f"{result.mutant.invariant}",
            result.end.value,
            short(result.killed_by).replace("[", "\\["),
            f"{result.seconds:.1f}",
            style=style,
        )
    return made


def chosen(only: Sequence[str], sample: int | None) -> Sequence[Mutant]:
    if only:
        return [mutant for mutant in MUTANTS if mutant.name in only]
    if sample is not None:
        return random.SystemRandom().sample([mutant for mutant in MUTANTS if mutant.fast], sample)
    return MUTANTS


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.mutants", description="Plants bugs that the tests must notice."
    )
    parser.add_argument("--list", action="store_true", help="only list them")
    parser.add_argument("--only", action="append", default=[], metavar="NAME", choices=[m.name for m in MUTANTS])
    parser.add_argument("--sample", type=int, metavar="N", help="so many that need no database")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    given = parser.parse_args(arguments)
    console = Console(width=max(160, Console().width), highlight=False)
    if given.list:
        for mutant in sorted(MUTANTS, key=lambda m: m.invariant):
            console.print(f"{mutant.invariant:>3}  {mutant.name}  ({mutant.file})", markup=False, soft_wrap=True)
        return 0
    mutants = chosen(given.only, given.sample)
    done = 0
    began = time.monotonic()

    def told(result: Result) -> None:
        nonlocal done
        done += 1
        console.print(
            f"{done:>3}/{len(mutants)}  {result.seconds:5.1f} s  {result.end:8}  I{result.mutant.invariant:<2}  "
            f"{result.mutant.name}",
            markup=False,
            soft_wrap=True,
        )

    try:
        results = hunt_all(mutants, told)
    except Stale as error:
        console.print(f"{error}", markup=False, soft_wrap=True)
        return 2
    console.print(table(results))
    for result in results:
        if result.end is not End.KILLED:
            console.print(f"{result.mutant.name}: {result.end}\n{result.said}", markup=False, soft_wrap=True)
    ends = Counter(result.end for result in results)
    invariants = {mutant.invariant for mutant in mutants}
    console.print(
        f"{ends[End.KILLED]} of {len(mutants)} killed, over {len(invariants)} invariants, "
        f"{time.monotonic() - began:.0f} s"
    )
    if given.json is not None:
        figures = {
            "planted": len(mutants),
            "killed": ends[End.KILLED],
            "failures": len(mutants) - ends[End.KILLED],
            "invariants": sorted(invariants),
            "alive": [result.mutant.name for result in results if result.end is not End.KILLED],
        }
        given.json.write_bytes(msgspec.json.encode(figures))
    return int(ends[End.KILLED] < len(mutants))


if __name__ == "__main__":
    command(main)
