"""
Runs one Promela model through Spin and reads what it says.

Spin generates a checker in C, gcc compiles it, and the checker visits every reachable state. Its report is text:
without this file nobody would notice a search that ran out of depth or memory and called itself free of errors.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import msgspec

#: No state of either model lies deeper than a few hundred steps; a search that gets here is cut, and fails.
DEPTH: Final = 10_000
#: Longer than the longest search on a loaded machine.
TIME_LIMIT_S: Final = 1800.0

#: What a checker is compiled with. No bit state, no hash compaction: each state is stored whole.
SAFETY: Final = ("-DSAFETY",)
CYCLES: Final = ("-DNP", "-DNOFAIR")


class Unusable(Exception):
    """The tools are missing, or did not do what they were asked."""


class Search(msgspec.Struct, frozen=True, kw_only=True):
    """One search of one model."""

    model: Path
    #: Sizes, by name, and switches with the value None.
    defines: Mapping[str, int | None]
    #: Look for cycles, in place of failed assertions alone and dead ends.
    cycles: bool = False
    #: Compile for a long search, rather than quickly.
    long: bool = True


class Found(msgspec.Struct, frozen=True, kw_only=True):
    """What a finished search says."""

    states: int
    transitions: int
    depth: int
    seconds: float
    #: The checker's own words for the first error.
    error: str | None
    #: Statements of the model that no path reaches. A search stopped by an error lists too many.
    unreached: Sequence[str]
    #: For an error: its path, one line a step, then the values that are not zero.
    trail: Sequence[str] = ()


def require_tools() -> None:
    """Raises Unusable with what to install."""
    missing = [tool for tool in ("spin", "gcc") if shutil.which(tool) is None]
    if missing:
        raise Unusable(
            f"the model checker needs {' and '.join(missing)}; on Debian: apt-get install spin gcc libc6-dev"
        )


def search(what: Search) -> Found:
    """Visits every state, or stops at the first error."""
    with tempfile.TemporaryDirectory(prefix="tollbridge-model-") as place:
        work = Path(place)
        shutil.copy(what.model, work)
        defines = [f"-D{name}" if value is None else f"-D{name}={value}" for name, value in what.defines.items()]
        _run(["spin", "-a", *defines, what.model.name], work)
        kind = CYCLES if what.cycles else SAFETY
        _run(["gcc", "-O3" if what.long else "-O0", "-w", *kind, "-o", "pan", "pan.c"], work)
        report = _run(["./pan", f"-m{DEPTH}", "-w25" if what.long else "-w20", *(["-l"] if what.cycles else [])], work)
        found = parsed(report)
        if found.error is None:
            return found
        replay = _run(["spin", "-t", "-p", "-g", *defines, what.model.name], work)
        return msgspec.structs.replace(found, trail=readable(replay, what.model.read_text(encoding="utf-8")))


def _run(command: Sequence[str], work: Path) -> str:
    try:
        done = subprocess.run(
            command, cwd=work, capture_output=True, text=True, timeout=TIME_LIMIT_S, check=False, errors="replace"
        )
    except subprocess.TimeoutExpired as error:
        raise Unusable(f"{command[0]} took longer than {TIME_LIMIT_S:.0f} s") from error
    # The checker and the replay exit with other codes where there is an error in the model to report.
    if done.returncode and (command[0] == "gcc" or "-a" in command):
        raise Unusable(f"{' '.join(command)}: {done.stdout}{done.stderr}")
    return done.stdout


def _number(pattern: str, report: str) -> float:
    match = re.search(pattern, report, re.MULTILINE)
    if match is None:
        raise Unusable(f"the checker's report says nothing of {pattern!r}:\n{report}")
    return float(match[1])


def parsed(report: str) -> Found:
    """Reads a checker's report. Raises Unusable for one that is not of a whole search and names no error either."""
    errors = _number(r"errors: (\d+)", report)
    error = re.search(r"^pan:\s*\d+: (.+?) \(at depth \d+\)", report, re.MULTILINE)
    cut = re.search(
        r"^(.*(?:max search depth too small|out of memory|Bit statespace|Hash-Compact).*)$", report, re.MULTILINE
    )
    if cut is not None:
        raise Unusable(f"not a whole search: {cut[1].strip()}")
    if not errors and ("Full statespace search" not in report or "Search not completed" in report):
        raise Unusable(f"not a whole search:\n{report}")
    if errors and error is None:
        raise Unusable(f"an error without a name:\n{report}")
    return Found(
        states=int(_number(r"^\s*([\d.e+]+) states, stored", report)),
        transitions=int(_number(r"^\s*([\d.e+]+) transitions", report)),
        depth=int(_number(r"depth reached (\d+)", report)),
        seconds=_number(r"^pan: elapsed time ([\d.e+-]+)", report),
        error=error[1] if error and errors else None,
        unreached=[
            line.strip()
            for line in re.findall(r"^\s+(\S+:\d+, state \d+, .*)$", report, re.MULTILINE)
            if '"-end-"' not in line
        ],
    )


def readable(replay: str, source: str) -> list[str]:
    """The replay of an error, one line a step, in the words of the model; last the values that are not zero."""
    lines = source.splitlines()
    first: dict[str, int] = {}
    for number, name in re.findall(r"proc\s+(\d+) \((\w+):\d+\)", replay):
        first[name] = min(first.get(name, int(number)), int(number))
    steps: list[str] = []
    values: dict[str, str] = {}
    seen: set[tuple[str, str]] = set()
    for line in replay.splitlines():
        step = re.match(r"\s*(\d+):\s+proc\s+(\d+) \((:?\w+:?):\d+\) \S+?:(\d+) \(state \d+\)\s*(.*)", line)
        value = re.match(r"\s*([a-z_]+(?:\[\d+\])?) = (\S+)\s*$", line)
        failed = re.match(r"spin: \S+?:(\d+), Error: assertion violated", line)
        if failed:
            steps.append(f"      FAILED  line {failed[1]}: {lines[int(failed[1]) - 1].strip()}")
        elif "START OF CYCLE" in line:
            steps.append("      FROM HERE IT GOES ROUND")
        elif step and step[5].startswith("[") and (step[1], step[2]) not in seen and not step[3].startswith(":"):
            seen.add((step[1], step[2]))
            who = f"{step[3]} {int(step[2]) - first[step[3]]}"
            steps.append(f"{step[1]:>4}  {who}, line {step[4]}: {lines[int(step[4]) - 1].strip()}")
        elif value:
            values[value[1]] = value[2]
    shown = "  ".join(f"{name}={value}" for name, value in values.items() if value not in {"0", "none", "absent"})
    return [*steps, f"      ENDS    {shown}"]
