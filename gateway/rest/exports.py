"""
Rows as CSV or JSONL: how a caller asks for them, how a row is spelled, and how it shows that all of them came.

An export that broke off must not pass for a whole one. JSONL ends with `{"end":true,"rows":N}`. CSV has no place for
such a line, so it is sent in chunks, and the last chunk is missing where not all came: a client of HTTP/1.1 fails then.
"""

from __future__ import annotations

import asyncio
import enum
import re
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from typing import Any, Final, Literal

import msgspec
from aiohttp import web
from typing_extensions import TypedDict

from gateway.errors import InvalidRequest
from gateway.rest.endpoint import Exchange, plain


class Format(enum.StrEnum):
    JSON = "json"
    CSV = "csv"
    JSONL = "jsonl"


MEDIA_TYPES: Final[Mapping[str, Format]] = {
    "application/json": Format.JSON,
    "text/csv": Format.CSV,
    "application/jsonl": Format.JSONL,
    "application/x-ndjson": Format.JSONL,
}
#: As they are told in the document of the API, and in answers.
CSV: Final = "text/csv"
JSONL: Final = "application/jsonl"

#: What a spreadsheet takes for the beginning of a formula, also in full width or after blanks; and the mark itself, so
#: that it can be taken off again.
_FORMULA: Final = re.compile(r"^(['\t\r\n]|\s*[-=+@\uff1d\uff0b\uff0d\uff20])")
_NUMBER: Final = re.compile(r"^[+-]?\d+(\.\d+)?$", re.ASCII)
_QUOTED: Final = re.compile(r'[",\r\n]|^\s|\s$')


class End(TypedDict):
    """The last line of JSONL. Without it, not all came."""

    end: Literal[True]
    rows: int


def asked(exchange: Exchange, given: str | None) -> Format:
    """
    The format that the query names, else the one that `Accept` likes best, else JSON.

    Raises InvalidRequest; also for CSV over HTTP/1.0, where a broken answer looks like a whole one.
    """
    if given is not None and given not in set(Format):
        raise InvalidRequest(f"must be one of: {', '.join(Format)}", param="format")
    found = _accepted(exchange.request.headers.getall("Accept", [])) if given is None else Format(given)
    if found is Format.CSV and exchange.request.version < (1, 1):
        raise InvalidRequest("CSV needs HTTP/1.1: over HTTP/1.0 a part would pass for the whole", param="format")
    return found


def _accepted(headers: Sequence[str]) -> Format:
    best, found = 0.0, Format.JSON
    for choice in ",".join(headers).split(","):
        name, *parameters = (part.strip() for part in choice.lower().split(";"))
        weight = next((part[2:] for part in parameters if part.startswith("q=")), "1")
        value = float(weight) if re.fullmatch(r"[01](\.\d{0,3})?", weight, re.ASCII) else 0.0
        if value > best and (name in MEDIA_TYPES or name in {"*/*", "application/*"}):
            best, found = value, MEDIA_TYPES.get(name, Format.JSON)
    return found


async def send(
    exchange: Exchange,
    wanted: Format,
    columns: Sequence[str],
    pages: AsyncIterator[Sequence[Mapping[str, Any]]],
    about: Mapping[str, Any] = {},
) -> web.StreamResponse:
    """
    The rows, page by page; no page is read before the one before it is on its way. JSONL's last line has `about`, too.

    What goes wrong with the first page is an error like any other; later it breaks the connection off.
    """
    first = await anext(pages, ())
    response = exchange.stream(f"{CSV}; charset=utf-8; header=present" if wanted is Format.CSV else JSONL)
    await response.prepare(exchange.request)
    rows = 0
    if wanted is Format.CSV:
        await response.write(csv_line(columns))
    page: Sequence[Mapping[str, Any]] | None = first
    while page is not None:
        rows += len(page)
        if page:
            # A page takes long enough to hold up everyone else's tokens.
            await response.write(await asyncio.to_thread(_lines, wanted, columns, page))
        page = await anext(pages, None)
    if wanted is Format.JSONL:
        end: End = {"end": True, "rows": rows}
        await response.write(msgspec.json.encode({**end, **plain(about)}) + b"\n")
    await response.write_eof()
    return response


def _lines(wanted: Format, columns: Sequence[str], page: Sequence[Mapping[str, Any]]) -> bytes:
    if wanted is Format.CSV:
        return b"".join(csv_line(row[name] for name in columns) for row in page)
    return b"".join(msgspec.json.encode(plain(row)) + b"\n" for row in page)


def csv_line(values: Iterable[object]) -> bytes:
    """A line as RFC 4180 has it."""
    return (",".join(map(_cell, values)) + "\r\n").encode()


def _cell(value: object) -> str:
    if value is None:
        return ""
    found = value if isinstance(value, str) else plain(value)
    match found:
        case str():
            text = f"'{found}" if _FORMULA.match(found) and not _NUMBER.fullmatch(found) else found
        case _:
            text = msgspec.json.encode(found).decode()
    return '"' + text.replace('"', '""') + '"' if _QUOTED.search(text) else text
