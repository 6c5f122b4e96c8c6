"""However a provider splits the same charges into rows, days, files and spellings, they reconcile to zero."""

from __future__ import annotations

import contextlib
import csv
import io
import json
from collections import defaultdict
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from metering.exports.lines import Refused
from metering.exports.reading import read
from metering.reconciliation import Tolerance, Used, compare

FIRST = date(2026, 9, 1)
MODELS = ("gpt-4o", "gpt-4o-mini", "o3")
EXACT = Tolerance(usd=Decimal(0), percent=Decimal(0))

AMOUNTS = st.integers(-(10**18), 10**18).map(lambda part: Decimal(part).scaleb(-12))
CHARGES = st.lists(
    st.tuples(st.integers(0, 5), st.sampled_from(MODELS), AMOUNTS, st.integers(0, 10**9), st.integers(0, 10**9)),
    min_size=1,
    max_size=5,
)


def ledger(charges: list[tuple[int, str, Decimal, int, int]]) -> list[Used]:
    sums: dict[tuple[int, str], list[Any]] = defaultdict(lambda: [Decimal(0), 0, 0, 0])
    for day, model, usd, given_tokens, told in charges:
        sums[day, model] = [a + b for a, b in zip(sums[day, model], (usd, given_tokens, told, 1), strict=True)]
    return [
        Used(
            day=FIRST + timedelta(day), provider="openai", upstream_model=model, charged_usd=usd, attempts=attempts,
            unknown_attempts=0, unknown_upper_bound_usd=Decimal(0), unbounded_attempts=0, input_tokens=given_tokens,
            output_tokens=told,
        )
        for (day, model), (usd, given_tokens, told, attempts) in sums.items()
    ]  # fmt: skip


@st.composite
def split(draw: Any, total: Decimal) -> list[Decimal]:
    parts = draw(st.lists(AMOUNTS, max_size=3))
    return [*parts, total - sum(parts, Decimal(0))]


@st.composite
def split_count(draw: Any, total: int) -> list[int]:
    cuts = sorted(draw(st.lists(st.integers(0, total), max_size=3)))
    return [after - before for before, after in zip([0, *cuts], [*cuts, total], strict=True)]


def span(day: int) -> tuple[int, int]:
    start = int(datetime(2026, 9, 1, tzinfo=UTC).timestamp()) + day * 86_400
    return start, start + 86_400


@given(charges=CHARGES, data=st.data())
def test_any_split_of_the_same_charges_reconciles_to_zero(
    charges: list[tuple[int, str, Decimal, int, int]], data: st.DataObject
) -> None:
    cost_rows: list[tuple[int, str, Decimal]] = []
    usage: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for day, model, usd, given_tokens, told in charges:
        served = model + data.draw(st.sampled_from(["", "-2024-08-06"]))
        for part in data.draw(split(usd)):
            kind = data.draw(st.sampled_from(["input", "cached input", "output"]))
            cost_rows.append((day, f"{served}, {kind}", part))
        given_parts, told_parts = data.draw(split_count(given_tokens)), data.draw(split_count(told))
        while len(given_parts) < len(told_parts):
            given_parts.append(0)
        told_parts += [0] * (len(given_parts) - len(told_parts))
        for given_part, told_part in zip(given_parts, told_parts, strict=True):
            usage[day].append(
                {
                    "object": "organization.usage.completions.result",
                    "model": served,
                    "num_model_requests": 0,
                    "input_tokens": given_part,
                    "output_tokens": told_part,
                }
            )
    written = io.StringIO()
    writer = csv.writer(written, lineterminator=data.draw(st.sampled_from(["\n", "\r\n"])))
    writer.writerow(["start_time", "end_time", "amount_value", "amount_currency", "line_item"])
    for day, item, part in data.draw(st.permutations(cost_rows)):
        spelled = data.draw(
            st.sampled_from([f"{part:f}", f"{part:E}", f"{part:f}" + ("0" * 9 if "." in f"{part:f}" else "")])
        )
        writer.writerow([*span(day), spelled, "usd", item])
    pages = [
        {"data": [{"start_time": span(day)[0], "end_time": span(day)[1], "results": results}], "has_more": False}
        for day, results in usage.items()
    ]
    exports = read([("costs", written.getvalue().encode()), ("usage", json.dumps(pages).encode())])
    lines = [line for export in exports for line in export.lines]
    for by_day in (True, False):
        result = compare(ledger(charges), lines, by_day=by_day, money=True, tokens=True, tolerance=EXACT)
        assert result.differing == []
        assert result.agrees
        assert result.sums.difference_usd == 0
    # And a planted difference of the last digit is found.
    ours = ledger(charges)
    ours[0] = Used(
        **{name: getattr(ours[0], name) for name in Used.__struct_fields__}
        | {"charged_usd": ours[0].charged_usd + Decimal("1e-12")}
    )
    [row] = compare(ours, lines, by_day=True, money=True, tokens=True, tolerance=EXACT).differing
    assert row.difference_usd == Decimal("-1e-12")


PIECES = (
    "start_time", "end_time", "starting_at", "ending_at", "results", "data", "amount", "value", "currency", "usd",
    "model",
    "input_tokens", "output_tokens", "uncached_input_tokens", "object", "amount_value", "amount_currency", "line_item",
    "usage_date_utc", "token_type", "cost_usd", "model_version", "usage_input_tokens_no_cache", "usage_output_tokens",
    "num_model_requests", "1788307200", "2026-09-02", "9999-12-31", "1e999", "-1", "NaN", '"', ",", "\n", "\r", "{",
    "}", "[", "]", ":", "null", "true", ";", "\t", " ", "\x00", "\ufeff", "[" * 3000,
)  # fmt: skip
WHOLE = (
    '{"data":[{"start_time":1788307200,"end_time":1788393600,"results":[{"amount":{"value":1,"currency":"usd"}}]}]}',
    '{"data":[{"start_time":1788307200,"end_time":1788393600,"results":[{"input_tokens":1,"num_model_requests":1}]}]}',
    '{"data":[{"starting_at":"2026-09-02T00:00:00Z","ending_at":"2026-09-03T00:00:00Z","results":[{"amount":"1"}]}]}',
    "start_time,end_time,amount_value,amount_currency\n1788307200,1788393600,1,usd\n",
    "usage_date_utc,model,token_type,cost_usd\n2026-09-02,m,output,1\n",
    "usage_date_utc,model_version,usage_input_tokens_no_cache,usage_output_tokens\n2026-09-02,m,1,1\n",
)


@given(
    whole=st.sampled_from(WHOLE),
    changes=st.lists(st.tuples(st.integers(0, 200), st.integers(0, 30), st.sampled_from(PIECES) | st.text(max_size=3))),
)
def test_whatever_stands_in_a_file_it_is_understood_or_refused(whole: str, changes: list[tuple[int, int, str]]) -> None:
    text = whole
    for at, cut, piece in changes:
        text = text[:at] + piece + text[at + cut :]
    with contextlib.suppress(Refused):
        [export] = read([("file", text.encode(errors="replace"))])
        assert all(line.amount is None or line.amount.is_finite() for line in export.lines)
