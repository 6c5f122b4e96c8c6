"""How rows are spelled in CSV."""

from __future__ import annotations

import csv
import io
from datetime import UTC, date, datetime
from decimal import Decimal
from uuid import UUID

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.rest import exports


def read(line: bytes) -> list[str]:
    [row] = csv.reader(io.StringIO(line.decode(), newline=""))
    return row


@pytest.mark.parametrize(
    ("value", "cell"),
    [
        (None, ""),
        ("", ""),
        (True, "true"),
        (7, "7"),
        (Decimal("1E-7"), "0.0000001"),
        ("0.25", "0.25"),
        ("-1.5", "-1.5"),
        (date(2026, 2, 28), "2026-02-28"),
        (datetime(2026, 2, 28, 1, 2, 3, tzinfo=UTC), "2026-02-28T01:02:03Z"),
        (UUID(int=1), "00000000-0000-0000-0000-000000000001"),
        ({"team": "=1+1"}, '{"team":"=1+1"}'),
        (["a", "b"], '["a","b"]'),
        ('say "hi", twice', 'say "hi", twice'),
        ("two\r\nlines", "two\r\nlines"),
    ],
)
def test_a_value_is_read_as_it_was(value: object, cell: str) -> None:
    assert read(exports.csv_line([value, "x"])) == [cell, "x"]


@pytest.mark.parametrize(
    "text", ["=1+1", "+cmd|' /C calc'!A0", "-2+3", "@SUM(A1)", "\t=1", "\r=1", " =1", "\uff1d1+1", "'=1", "-"]
)
def test_no_text_begins_a_formula_and_the_mark_can_be_taken_off(text: str) -> None:
    [cell] = read(exports.csv_line([text]))
    assert cell == f"'{text}"


@settings(max_examples=50, deadline=None)
@given(st.lists(st.text(st.characters(codec="utf-8", exclude_characters="\x00")), min_size=2))
def test_any_text_comes_back(texts: list[str]) -> None:
    assert [cell.removeprefix("'") for cell in read(exports.csv_line(texts))] == texts


@pytest.mark.parametrize(
    ("accept", "found"),
    [
        ([], "json"),
        (["*/*"], "json"),
        (["text/csv"], "csv"),
        (["application/jsonl, application/json;q=0.5"], "jsonl"),
        (["text/csv;q=0.3", "application/x-ndjson"], "jsonl"),
        (["application/json, text/csv"], "json"),
        (["text/html"], "json"),
        (["text/csv;q=0"], "json"),
        (["text/csv;q=x"], "json"),
    ],
)
def test_the_format_is_the_one_that_accept_likes_best(accept: list[str], found: str) -> None:
    assert exports._accepted(accept) == found
