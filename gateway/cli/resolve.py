"""`tollbridge usage resolve`: what attempts of unknown cost have cost, told by somebody who can prove it."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import click
import msgspec

from gateway.cli import remote, tables
from gateway.cli.failure import Failed

#: Of one call to the gateway, which refuses all where it refuses one.
_AT_ONCE: Final = 10_000
#: Where in a call a fault is.
_PLACE: Final = re.compile(r" \(attempts\[(\d+)\](?:\.(\w+))?\)$")
_COLUMNS: Final = ("ticket_id", "key_id", "debit_id", "attempt", "state", "usd", "note", "evidence")
_WORDS: Final = {
    "resolved": "corrected",
    "unchanged": "was so already",
    "settled": "has another cost, which stands",
    "open": "is not settled yet",
    "not_found": "no such attempt",
}


@click.command("resolve")
@click.argument("ticket", required=False)
@click.option("--charged", metavar="USD", help="What the attempt has cost, such as 0.0123.")
@click.option("--zero", is_flag=True, help="It has cost nothing.")
@click.option("--note", metavar="TEXT", help="Why, for whoever reads the ledger.")
@click.option("--evidence", metavar="TEXT", help="What proves it: the number of an invoice, an id of the provider's.")
@click.option(
    "--file",
    "path",
    type=click.Path(path_type=Path, dir_okay=False, exists=True, allow_dash=True),
    help=f"Many at once: CSV with a header line, or JSONL; of {', '.join(_COLUMNS)}.",
)
@remote.options
def command(
    ticket: str | None,
    charged: str | None,
    zero: bool,
    note: str | None,
    evidence: str | None,
    path: Path | None,
    url: str | None,
    key: str | None,
    as_json: bool,
) -> None:
    """
    Tell what an attempt of unknown cost has cost. For keys with the scope `admin`.

    The ledger gets a correction on the day of the attempt, and all counters move with it. An attempt whose cost is
    known keeps it: that is said, and the exit status is 1. The same call again changes nothing.

    \b
    Examples:
      tollbridge invocations --state unknown
      tollbridge usage resolve 01938f0a-7c1e-7d52-9b1a-5a0c7f3f6d10 --charged 0.0123 --evidence "invoice 4711"
      tollbridge usage resolve --file proven.csv
    """  # noqa: D301  a real backspace: click keeps the paragraph's lines
    if path is not None:
        if ticket is not None or charged is not None or zero:
            raise click.UsageError("--file says which attempts and what they have cost: give nothing beside it")
        numbered = list(_read(path))
        if not numbered:
            raise Failed(f"{path} names no attempt")
        if len(numbered) > _AT_ONCE:
            raise Failed(f"{path} names {len(numbered):,} attempts, and {_AT_ONCE:,} can be corrected at once")
        numbers, proofs = [number for number, _ in numbered], [proof for _, proof in numbered]
    else:
        if ticket is None:
            raise click.UsageError("name the attempt by its ticket id, or give --file")
        if zero is (charged is not None):
            raise click.UsageError("say what it has cost: --charged USD or --zero")
        numbers, proofs = [], [{"ticket_id": ticket, "state": "zero"} if zero else _charged(ticket, charged)]
    for proof in proofs:
        proof.update({name: text for name, text in (("note", note), ("evidence", evidence)) if text})
    with remote.reach(url, key) as gateway:
        try:
            told = gateway.post("/v1/usage/resolve", msgspec.json.encode({"attempts": proofs}))["attempts"]
        except Failed as failed:
            raise _at_its_line(failed, numbers) from failed
    if as_json:
        tables.json({"attempts": told})
    else:
        _show(proofs, told)
    if kept := sum(one["result"] not in {"resolved", "unchanged"} for one in told):
        raise Failed(f"{kept} of {len(told)} attempts were not corrected")


def _at_its_line(failed: Failed, numbers: Sequence[int]) -> Failed:
    """A fault of one attempt of a file, by the line that names it. Nothing was corrected."""
    place = _PLACE.search(failed.message)
    if place is None or int(place[1]) >= len(numbers):
        return failed
    what = f"{place[2]}: " if place[2] else ""
    said = failed.message.removesuffix(place[0])
    return Failed(f"line {numbers[int(place[1])]}: {what}{said}; nothing was corrected", code=failed.code)


def _charged(ticket: str, usd: str | None) -> dict[str, Any]:
    return {"ticket_id": ticket, "state": "charged", "usd": usd}


def _show(proofs: list[dict[str, Any]], told: list[dict[str, Any]]) -> None:
    rows = [
        (
            one["ticket_id"] or proof.get("ticket_id") or f"{proof.get('debit_id')}, attempt {proof.get('attempt')}",
            _WORDS.get(one["result"], one["result"]),
            "-" if one["usd"] is None else tables.usd(one["usd"]),
        )
        for proof, one in zip(proofs, told, strict=True)
    ]
    tables.table(tables.console(), "corrections", ("attempt", "", "cost"), rows, numbers=("cost",))


def _read(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """The attempts of a file, with their lines. Raises `Failed` with the line of what is not understood."""
    with click.open_file(str(path), "rb") as file:
        content = file.read()
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise Failed(f"line {line} is not UTF-8", hint="Save the file as CSV UTF-8.") from error
    if text.lstrip().startswith("{"):
        for number, line in enumerate(text.splitlines(), 1):
            if line.strip():
                yield number, _of_json(line, number)
        return
    rows = csv.DictReader(text.splitlines())
    if unknown := [name for name in rows.fieldnames or () if name not in _COLUMNS]:
        raise Failed(f"line 1: there is no column {unknown[0]!r}; there are: {', '.join(_COLUMNS)}")
    for row in rows:
        yield rows.line_num, _of_csv(row, rows.line_num)


def _of_json(line: str, number: int) -> dict[str, Any]:
    try:
        found = msgspec.json.decode(line, type=dict[str, Any])
    except msgspec.MsgspecError as error:
        raise Failed(f"line {number} is no JSON object") from error
    if unknown := [name for name in found if name not in _COLUMNS]:
        raise Failed(f"line {number}: there is no field {unknown[0]!r}; there are: {', '.join(_COLUMNS)}")
    return found


def _of_csv(row: Mapping[str | None, Any], number: int) -> dict[str, Any]:
    if None in row:
        raise Failed(f"line {number} has more columns than the header")
    found = {str(name): text for name, text in row.items() if text}
    if "attempt" in found:
        if not found["attempt"].isdecimal():
            raise Failed(f"line {number}: the attempt is a number, from 1")
        found["attempt"] = int(found["attempt"])
    return found
