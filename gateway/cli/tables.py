"""What commands print for people: tables, and money to the last digit."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from decimal import Decimal
from typing import Any

import click
import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from gateway.cli.failure import Failed

#: Wider than any row, where there is no terminal to measure: a pipe must not fold lines.
PIPE_WIDTH = 100_000


def console(*, stderr: bool = False) -> Console:
    found = Console(stderr=stderr, highlight=False, soft_wrap=False)
    return found if found.is_terminal else Console(stderr=stderr, highlight=False, width=PIPE_WIDTH)


def table(
    out: Console, title: str, columns: Sequence[str], rows: Iterable[Sequence[object]], *, numbers: Iterable[str] = ()
) -> None:
    """Print a table; columns in `numbers` are flush right. Cells are shown as they are, never read as markup."""
    right = set(numbers)
    found = Table(title=title, title_justify="left", title_style="bold", header_style="dim", box=None, pad_edge=False)
    for column in columns:
        found.add_column(column, justify="right" if column in right else "left", overflow="fold")
    for row in rows:
        found.add_row(*(cell if isinstance(cell, Text) else Text(shown(cell)) for cell in row))
    out.print(found)
    out.print()


def heading(out: Console, title: str) -> None:
    """A line across a terminal; in a pipe as wide as what people read."""
    out.rule(title, align="left") if out.is_terminal else out.print(
        f"-- {title} {'-' * max(76 - len(title), 2)}", markup=False
    )


def text(content: str, style: str) -> Text:
    return Text(content, style=style)


def json(value: Any) -> None:
    """For machines. Exact numbers are text, as in the API: a JSON number would be a float to most readers."""
    click.echo(msgspec.json.format(msgspec.json.encode(value), indent=2).decode())


def shown(value: object) -> str:
    match value:
        case None:
            return "-"
        case bool():
            return "yes" if value else "no"
        case int():
            return f"{value:,}"
        case Decimal():
            return f"{value:f}"
        case _:
            # One line a cell: control characters of a stranger's text must not reach the terminal.
            return "".join(character if character.isprintable() else " " for character in str(value))


def usd(value: Any) -> str:
    """A decimal string as money, exact. None is what it is: not known."""
    if value is None:
        return "unknown"
    amount = Decimal(value)
    if not amount.is_finite():
        raise Failed("an amount in the answer is no number")
    exact = f"{amount.normalize():f}"
    whole, _, parts = exact.partition(".")
    return f"${whole}.{parts.ljust(2, '0')}"
