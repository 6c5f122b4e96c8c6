"""What a run of the benchmarks leaves: tables on the terminal, and a file of numbers."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

import msgspec
from rich import box
from rich.console import Console
from rich.table import Table

from tests.benchmarks.figures import Figure, Target

RESULTS = Path(__file__).parent / "results"


class Origin(msgspec.Struct, frozen=True, kw_only=True):
    """What is measured, asked before it is: meanwhile the files may become others."""

    commit: str
    uncommitted_changes: bool


def origin() -> Origin:
    return Origin(
        commit=_git("rev-parse", "--short", "HEAD") or "unknown",
        uncommitted_changes=bool(_git("status", "--porcelain", "--untracked-files=no")),
    )


def _git(*words: str) -> str:
    found = subprocess.run(["git", *words], capture_output=True, text=True, check=False, cwd=RESULTS.parent)
    return found.stdout.strip()


def keep(run: msgspec.Struct, name: str, console: Console) -> None:
    """To four digits: there is no more in it."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    content = msgspec.json.encode(rounded(msgspec.to_builtins(run)))
    path.write_bytes(msgspec.json.format(content, indent=1) + b"\n")
    console.print(f"kept as {path.relative_to(RESULTS.parents[2])}")


def rounded(value: object) -> object:
    match value:
        case float():
            return float(f"{value:.4g}")
        case dict():
            return {name: rounded(part) for name, part in value.items() if part is not None}
        case list():
            return [rounded(part) for part in value]
        case _:
            return value


def table_of_targets(targets: Sequence[Target], others: Sequence[Figure]) -> Table:
    table = Table(box=box.SIMPLE, header_style="bold", pad_edge=False)
    table.add_column("target")
    for name in ("meant", "measured", "rounds"):
        table.add_column(name, justify="right")
    table.add_column("")
    for target in targets:
        table.add_row(*_told(target), _judged(target), style=None if target.reached else "bold")
    table.add_section()
    for figure in others:
        table.add_row(*_told(figure), style="dim")
    return table


def markdown_of_targets(targets: Sequence[Target], others: Sequence[Figure]) -> str:
    lines = ["| | meant | measured | rounds | |", "|---|---|---|---|---|"]
    lines += [f"| {' | '.join(_told(target))} | {_judged(target)} |" for target in targets]
    lines += [f"| {' | '.join(_told(figure))} | |" for figure in others]
    return "\n".join(lines)


def _judged(target: Target) -> str:
    if target.reached:
        return "reached" if target.alike else "in most rounds"
    return "not reached" if target.alike else "in some rounds"


def _told(figure: Figure) -> tuple[str, str, str, str]:
    meant = ""
    if isinstance(figure, Target):
        meant = "; ".join(
            f"{sign} {_number(bound)}{_of(figure)}"
            for sign, bound in (("at most", figure.at_most), ("at least", figure.at_least))
            if bound is not None
        )
    spread = "" if figure.low == figure.high else f"{_number(figure.low)} to {_number(figure.high)}"
    return figure.name, meant, _number(figure.measured) + _of(figure), spread


def _of(figure: Figure) -> str:
    return f" {figure.unit}" if figure.unit else ""


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def shown(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)
