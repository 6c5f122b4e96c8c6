"""
From the bytes of files to exports: which form it is, and its lines.

A form is recognised by the fields that only it has. What fits none, or could be two, is refused with what was looked
for: a guess here would be a wrong verdict on somebody's bill.
"""

from __future__ import annotations

import csv
import io
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime, time, timedelta
from decimal import Decimal
from typing import Any, Final

import msgspec

from metering.exports import anthropic, openai
from metering.exports.lines import Export, Form, Line, Refused
from metering.exports.records import Record, flat

#: By form of CSV, the columns by which it is known.
COLUMNS: Final[Mapping[Form, frozenset[str]]] = {
    Form.OPENAI_COSTS_CSV: frozenset({"start_time", "end_time", "amount_value", "amount_currency"}),
    Form.OPENAI_USAGE_CSV: frozenset({"start_time", "end_time", "num_model_requests", "input_tokens"}),
    Form.ANTHROPIC_COSTS_CSV: frozenset({"usage_date_utc", "model", "token_type", "cost_usd"}),
    Form.ANTHROPIC_USAGE_CSV: frozenset(
        {"usage_date_utc", "model_version", "usage_input_tokens_no_cache", "usage_output_tokens"}
    ),
}
#: Known columns of times, of which an export has seconds, text, or both.
_TIMES: Final = {"start_time": "start_time_iso", "end_time": "end_time_iso"}
_LOOKED_FOR: Final = (
    "looked for JSON pages of OpenAI (buckets with start_time, results with amount or an object organization.usage.*)"
    " and of Anthropic (buckets with starting_at, results with amount or uncached_input_tokens), and for CSVs with the"
    " columns " + "; or ".join(", ".join(sorted(columns)) for columns in COLUMNS.values())
)
_DELIMITERS: Final = ",\t;"
#: Told where it is not zero: nothing documents whether it is in `input_tokens`, too.
_AUDIO: Final = ("input_audio_tokens", "output_audio_tokens")


def read(files: Sequence[tuple[str, bytes]]) -> list[Export]:
    """
    The exports in these files, each (name, content).

    Raises `Refused`: for what is not understood, and where the same use would be counted twice, because files are of
    two providers, tell the same in two forms, or have a line in common.
    """
    exports = [_one(name, content) for name, content in files]
    hosts = {export.form.host for export in exports}
    if len(hosts) > 1:
        raise Refused(exports[-1].file, f"the files are of {' and '.join(sorted(hosts))}: one provider at a time")
    for money in (True, False):
        of_kind = [export for export in exports if export.form.money is money]
        if len({export.form for export in of_kind}) > 1:
            one, other = of_kind[0], next(e for e in of_kind if e.form is not of_kind[0].form)
            what = "costs" if money else "tokens"
            raise Refused(other.file, f"tells {what}, and so does {one.file}: give one of them, or both are counted")
        _refuse_twice(of_kind)
    return exports


def _refuse_twice(exports: Sequence[Export]) -> None:
    seen: dict[tuple[object, ...], str] = {}
    for export in exports:
        for key in {(line.start, *sorted(line.dimensions.items())) for line in export.lines}:
            if seen.setdefault(key, export.file) != export.file:
                raise Refused(
                    export.file,
                    f"has a line of {key[0]} that is in {seen[key]}, too: is an export given twice?",
                )
        if [other.file for other in exports].count(export.file) > 1:
            raise Refused(export.file, "is given twice")


def _one(file: str, content: bytes) -> Export:
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise Refused(file, "is not UTF-8", place=f"byte {error.start}") from None
    if not text.strip():
        raise Refused(file, f"is empty; {_LOOKED_FOR}")
    if text.lstrip()[0] in "{[":
        return _pages(file, text)
    return _table(file, text)


# ------------------------------------------------------------------------------------------------------- pages


def _pages(file: str, text: str) -> Export:
    pages = list(_split(file, text))
    found: Form | None = None
    lines: list[Line] = []
    spans: list[tuple[datetime, datetime]] = []
    audio = False
    for place, page in pages:
        if not isinstance(page, dict) or not isinstance(page.get("data"), list):
            raise Refused(file, f"has no list `data`; {_LOOKED_FOR}", place=place)
        for b, bucket in enumerate(page["data"]):
            where = f"{place}data[{b}]"
            if not isinstance(bucket, dict) or not isinstance(bucket.get("results"), list):
                raise Refused(file, f"is no bucket with `results`; {_LOOKED_FOR}", place=where)
            times = Record(file, where, bucket)
            spans.append(_span(file, where, times))
            for r, result in enumerate(bucket["results"]):
                at = f"{where}.results[{r}]"
                if not isinstance(result, dict):
                    raise Refused(file, "is no object", place=at)
                record = Record(file, at, dict(flat(result)))
                form = _form(file, at, bucket, record)
                if found is not None and form is not found:
                    raise Refused(file, f"is {form.title}, and before came {found.title}", place=at)
                found = form
                lines.append(_READERS[form](record, times))
                audio = audio or any(record.count(name) for name in _AUDIO)
    if found is None:
        raise Refused(file, f"has no result, so that nothing tells costs from usage; {_LOOKED_FOR}")
    notes = [_AUDIO_NOTE.format(file)] if audio else []
    whole = pages[-1][1].get("has_more") is not True
    if not whole:
        notes.append(f"{file}: its last page says that there are more; only what is in it is compared")
    return Export(
        file=file,
        form=found,
        lines=lines,
        first=min(start for start, _ in spans),
        last=max(end for _, end in spans),
        whole=whole,
        notes=notes,
    )


_CENT: Final = Decimal("0.01")
_CENTS_NOTE: Final = "{}: has whole cents alone: each of its {} amounts may be half a cent off"
_AUDIO_NOTE: Final = "{}: tells audio tokens apart; where they are not in its input_tokens too, they are missing"


def _split(file: str, text: str) -> Iterator[tuple[str, Any]]:
    """Each page and the beginning of its place: of one page, a list of pages, or a page a line. Raises `Refused`."""
    try:
        whole = _decoder.decode(text)
    except RecursionError:
        raise Refused(file, f"is nested too deeply; {_LOOKED_FOR}") from None
    except msgspec.DecodeError as error:
        lines = [(number, line) for number, line in enumerate(text.splitlines(), 1) if line.strip()]
        try:
            pages = [(f"line {number}, ", _decoder.decode(line)) for number, line in lines[:-1]]
            # A line that is no JSON of its own: then the file is not lines, and the first fault is the true one.
            pages += [(f"line {number}, ", _decoder.decode(line)) for number, line in lines[-1:]]
        except (msgspec.DecodeError, RecursionError):
            raise Refused(file, f"is no JSON: {error}; {_LOOKED_FOR}") from None
        yield from pages
        return
    if not isinstance(whole, list):
        yield "", whole
        return
    if not whole:
        raise Refused(file, f"has no page; {_LOOKED_FOR}")
    for number, page in enumerate(whole):
        yield f"[{number}].", page


_decoder = msgspec.json.Decoder(float_hook=Decimal)


def _span(file: str, where: str, times: Record) -> tuple[datetime, datetime]:
    if times.has("start_time"):
        return times.moment("start_time"), times.moment("end_time")
    if times.has("starting_at"):
        return times.moment("starting_at"), times.moment("ending_at")
    raise Refused(file, f"has neither start_time nor starting_at; {_LOOKED_FOR}", place=where)


def _form(file: str, at: str, bucket: Mapping[str, Any], record: Record) -> Form:
    if "start_time" in bucket:
        if record.has("amount.value"):
            return Form.OPENAI_COSTS
        if (record.text("object") or "").startswith("organization.usage.") or record.has("num_model_requests"):
            return Form.OPENAI_USAGE
    elif record.has("amount"):
        return Form.ANTHROPIC_COSTS
    elif record.has("uncached_input_tokens"):
        return Form.ANTHROPIC_USAGE
    raise Refused(file, f"is a result of no known form; {_LOOKED_FOR}", place=at)


# ------------------------------------------------------------------------------------------------------- tables


def _table(file: str, text: str) -> Export:
    header_line = next(line for line in text.splitlines() if line.strip())
    delimiter = max(_DELIMITERS, key=header_line.count)
    rows = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    header: list[str] = []
    form: Form | None = None
    lines: list[Line] = []
    spans: list[tuple[datetime, datetime]] = []
    audio = False
    for number, row in _numbered(file, rows):
        if not any(cell.strip() for cell in row):
            continue
        if form is None:
            header = [cell.strip().lower() for cell in row]
            form = _form_of(file, header)
            continue
        if len(row) != len(header):
            raise Refused(file, f"has {len(row)} cells, the header has {len(header)}", place=f"line {number}")
        record = Record(file, f"line {number}", dict(zip(header, row, strict=True)), joint="_")
        if form.host == "api.openai.com":
            spans.append((record.moment("start_time", "start_time_iso"), record.moment("end_time", "end_time_iso")))
            if openai.bucket(record):
                continue
            audio = audio or any(record.count(name) for name in _AUDIO)
        line = _READERS[form](record, record)
        if form.host != "api.openai.com":
            start = datetime.combine(line.day, time(), UTC)
            spans.append((start, start + timedelta(days=1)))
        lines.append(line)
    assert form is not None, "the text is not blank"
    notes = [_AUDIO_NOTE.format(file)] if audio else []
    amounts = [line.amount for line in lines if line.amount]
    if form is Form.ANTHROPIC_COSTS_CSV and amounts and not any(amount % _CENT for amount in amounts):
        notes.append(_CENTS_NOTE.format(file, len(amounts)))
    return Export(
        file=file,
        form=form,
        lines=lines,
        first=min((start for start, _ in spans), default=None),
        last=max((end for _, end in spans), default=None),
        notes=notes,
    )


def _numbered(file: str, rows: Any) -> Iterator[tuple[int, list[str]]]:
    """Each row with the number of its last line. Raises `Refused`."""
    while True:
        try:
            row = next(rows, None)
        except csv.Error as error:
            raise Refused(file, f"is no CSV: {error}", place=f"line {rows.line_num}") from None
        if row is None:
            return
        yield rows.line_num, row


def _form_of(file: str, header: Iterable[str]) -> Form:
    names = Counter(header)
    twice = sorted(name for name, times in names.items() if name and times > 1)
    if twice:
        raise Refused(file, f"has two columns {twice[0]!r}", place="line 1")
    known = set(names) | {name for name, iso in _TIMES.items() if iso in names}
    fitting = [form for form, columns in COLUMNS.items() if columns <= known]
    if len(fitting) != 1:
        fault = "could be " + " or ".join(form.title for form in fitting) if fitting else "is of no known form"
        raise Refused(file, f"{fault}; {_LOOKED_FOR}", place="line 1")
    return fitting[0]


_READERS: Final[Mapping[Form, Callable[[Record, Record], Line]]] = {
    Form.OPENAI_COSTS: openai.cost,
    Form.OPENAI_USAGE: openai.usage,
    Form.OPENAI_COSTS_CSV: openai.cost,
    Form.OPENAI_USAGE_CSV: openai.usage,
    Form.ANTHROPIC_COSTS: anthropic.cost,
    Form.ANTHROPIC_USAGE: anthropic.usage,
    Form.ANTHROPIC_COSTS_CSV: lambda record, _times: anthropic.cost_row(record),
    Form.ANTHROPIC_USAGE_CSV: lambda record, _times: anthropic.usage_row(record),
}
