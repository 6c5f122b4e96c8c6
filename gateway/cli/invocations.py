"""`tollbridge invocations`: the invocation log, for people as a table, for programs as JSON, JSONL or CSV."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, TypeVar

import click
import msgspec
from rich.console import Console

from gateway.cli import remote, tables
from gateway.cli.failure import Failed

#: Rows of a table where nothing is said.
USUAL_ROWS = 50
#: Rows that a page of the gateway has at most.
_PAGE = 1000

_F = TypeVar("_F", bound=Callable[..., Any])

#: Filters by one word, and what they are.
_WORDS = {
    "session": "The session.",
    "run": "The run.",
    "step": "The step of a run.",
    "scope": "The scope.",
    "debit": "The debit: the caller's name for the work.",
    "request": "The request's id.",
    "provider": "The provider.",
    "model": "The model that was asked for.",
    "upstream-model": "The provider's model.",
    "state": "What is known of the cost: charged, zero or unknown.",
    "ended": "How it ended.",
    "error-code": "The error's code.",
    "error-class": "The error's class.",
    "skill": "The skill.",
    "tool": "The tool.",
    "role": "The role.",
    "transport": "How it came.",
    "min-usd": "Charged at least so much.",
    "min-total-ms": "Took at least so long.",
}


def filters(command: _F) -> _F:
    """The options that say which attempts. They come as `given`, for `query`."""
    for option in (
        click.option("--from", "since", metavar="WHEN", help="From this day or time on: 2026-11-01, or with its zone."),
        click.option("--to", metavar="WHEN", help="To this day, or up to this time."),
        click.option("--of-key", "key_", metavar="ID", help="The key whose attempts. Others' need the scope admin."),
        click.option("--status", multiple=True, help="How it went. May be given several times."),
        click.option("--tag", multiple=True, metavar="NAME:VALUE", help="A tag. May be given several times."),
        click.option("--fallback/--no-fallback", default=None, help="Whether it was a fallback."),
    ):
        command = option(command)
    for name, told in _WORDS.items():
        command = click.option(f"--{name}", metavar="WORD", help=told)(command)
    return command


def query(given: Mapping[str, Any]) -> dict[str, Any]:
    """What `filters` took, in the words of the API."""
    found = {
        **given,
        "from": given["since"],
        "key": given["key_"],
        "status": ",".join(given["status"]) or None,
        "fallback": None if given["fallback"] is None else str(given["fallback"]).lower(),
    }
    return {name: value for name, value in found.items() if name not in {"since", "key_"}}


@click.command("invocations")
@click.argument("ticket_id", required=False)
@filters
@click.option("--corrections", is_flag=True, help="Rows that a correction has replaced, too.")
@click.option("--limit", type=click.IntRange(1), default=USUAL_ROWS, show_default=True, help="Rows of the table.")
@click.option("--csv", "form", flag_value="csv", help="The whole range as CSV.")
@click.option("--jsonl", "form", flag_value="jsonl", help="The whole range, a JSON document a line.")
@remote.options
def command(
    ticket_id: str | None,
    corrections: bool,
    limit: int,
    form: str | None,
    url: str | None,
    key: str | None,
    as_json: bool,
    **given: Any,
) -> None:
    """
    Show what each attempt used, cost and took, the newest first; of TICKET_ID all that was written.

    A key with the scope `admin` sees everyone's, any other its own. CSV and JSONL have the whole range, in which an
    exit status other than 0 says that not all came. In CSV a ' stands before text that would be a formula.

    \b
    Examples:
      tollbridge invocations --session nightly
      tollbridge invocations --status error --status timeout --from 2026-11-30
      tollbridge invocations --from 2026-11-01 --to 2026-11-30 --csv > november.csv
    """  # noqa: D301  a real backspace: click keeps the paragraph's lines
    if form is not None and as_json:
        raise click.UsageError("--json, --jsonl and --csv are three forms: give one of them")
    with remote.reach(url, key) as gateway:
        if ticket_id is not None:
            answer = gateway.get(f"/v1/invocations/{ticket_id}")
            if as_json:
                tables.json(answer)
            else:
                show(tables.console(), answer["data"])
            return
        asked = {**query(given), "corrections": "all" if corrections else None}
        if form is not None:
            _export(gateway, form, asked)
            return
        rows = _rows(gateway, asked, limit)
    if as_json:
        tables.json(rows)
    else:
        show(tables.console(), rows)


def _rows(gateway: remote.Remote, asked: Mapping[str, Any], limit: int) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    cursor = None
    while True:
        page = gateway.get("/v1/invocations", **asked, limit=min(limit - len(rows), _PAGE), cursor=cursor)
        rows += page["data"]
        cursor = page["next_cursor"]
        if len(rows) >= limit or cursor is None:
            return rows
        if page["scanned_to"] is not None:
            click.echo(f"looked back to {page['scanned_to']}, {len(rows)} found", err=True)


def _export(gateway: remote.Remote, form: str, asked: Mapping[str, Any]) -> None:
    out = sys.stdout.buffer
    if form == "csv":
        for piece in gateway.pieces("/v1/invocations", **asked, format=form):
            out.write(piece)
    else:
        last = b""
        for line in gateway.lines("/v1/invocations", **asked, format=form):
            out.write(last)
            last = line + b"\n"
        if not last or "end" not in msgspec.json.decode(last):
            raise Failed("the export broke off: not all rows came", hint="Try again.")
    out.flush()


def show(out: Console, rows: Sequence[Mapping[str, Any]]) -> None:
    tables.table(
        out,
        "invocations",
        (
            "granted",
            "ticket",
            "session",
            "model",
            "served by",
            "status",
            "why",
            "input",
            "output",
            "cost",
            "first byte ms",
            "ms",
        ),
        [
            (
                datetime.fromisoformat(row["granted_at"]).astimezone().strftime("%Y-%m-%d %H:%M:%S"),
                f"{row['ticket_id']} ({row['correction']})" if row["correction"] else row["ticket_id"],
                row["session_id"],
                row["requested_model"],
                "/".join(part for part in (row["provider"], row["upstream_model"]) if part) or None,
                row["status"],
                row["error_code"],
                row["input_total"],
                row["output_total"],
                _cost(row),
                row["first_byte_ms"],
                row["total_ms"],
            )
            for row in rows
        ],
        numbers=("input", "output", "cost", "first byte ms", "ms"),
    )


def _cost(row: Mapping[str, Any]) -> str:
    if row["state"] != "unknown":
        return tables.usd(row["usd"])
    bound = row["upper_bound_usd"]
    return "unknown" if bound is None else f"unknown, at most {tables.usd(bound)}"
