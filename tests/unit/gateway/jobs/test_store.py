"""What a job's row keeps of an outcome is the outcome, whatever its texts say."""

from __future__ import annotations

import json
from datetime import date
from decimal import Decimal
from typing import Any

import msgspec
import pytest
from msgspec.inspect import NoneType, StructType, type_info

from gateway.jobs.store import read_outcome, write_outcome
from gateway.outcome import AttemptReport, Cost, Counters, LeftOut, Outcome, RouteReport
from metering.usage import NOTHING, Usage

ROUTE = RouteReport(route_id="r", provider="p", model="m", protocol="chat_completions")
UNKNOWN = Cost(state="unknown", upper_bound_usd=Decimal("0.10"), reason="timeout")
BARE = Outcome(request_id="r", debit_id="d", ended="failed", attempts=(), cost=UNKNOWN, settlement="settled")

#: Texts of others, that look like what is left out.
LIKE_NULL = [
    ',"code":null',
    '","code":null',
    '\\","code":null',
    ",null",
    '{"a":1,"b":null}',
    '\\\\",\\"b":null,"c":null',
]


def attempt(message: str) -> AttemptReport:
    return AttemptReport(number=1, route=ROUTE, status="error", message=message, cost=UNKNOWN)


@pytest.mark.parametrize("text", LIKE_NULL)
def test_an_outcome_is_read_as_it_was_written(text: str) -> None:
    outcome = msgspec.structs.replace(
        BARE,
        attempts=(attempt(text), attempt("plain")),
        usage=Usage(output_total=0, units={"web_search": 1}),
        counters=Counters(day_usd=Decimal(1), total_usd=Decimal("1E-9"), day=date(2026, 1, 2)),
        warnings=(text, "", text),
        served_model=text,
        left_out=(LeftOut(provider=text, model="m", reason="disabled"),),
    )
    assert read_outcome(write_outcome(outcome)) == outcome


def test_an_outcome_with_nothing_in_it_is_read_as_it_was_written() -> None:
    assert read_outcome(write_outcome(BARE)) == BARE
    assert BARE.usage == NOTHING
    assert write_outcome(None) is None


def test_what_is_null_is_not_stored_but_for_the_first_of_an_object() -> None:
    text = write_outcome(msgspec.structs.replace(BARE, attempts=(attempt("x"),)))
    assert text is not None

    def nulls_behind_the_first(value: Any) -> int:
        if isinstance(value, dict):
            own = sum(item is None for item in list(value.values())[1:])
            return own + sum(nulls_behind_the_first(item) for item in value.values())
        return sum(map(nulls_behind_the_first, value)) if isinstance(value, list) else 0

    assert nulls_behind_the_first(json.loads(text)) == 0
    assert len(text) < len(msgspec.json.encode(BARE))


def test_whatever_may_be_null_in_an_outcome_is_null_where_it_is_absent() -> None:
    seen: set[type] = set()

    def look(kind: msgspec.inspect.Type) -> None:
        for part in getattr(kind, "types", ()):
            look(part)
        for name in ("item_type", "value_type"):
            if (inner := getattr(kind, name, None)) is not None:
                # Something null in a list or a mapping would be lost.
                assert not any(isinstance(part, NoneType) for part in getattr(inner, "types", ()))
                look(inner)
        if isinstance(kind, StructType) and kind.cls not in seen:
            seen.add(kind.cls)
            for field in kind.fields:
                if any(isinstance(part, NoneType) for part in getattr(field.type, "types", ())):
                    assert field.default is None, (kind.cls, field.name)
                look(field.type)

    look(type_info(Outcome))
    assert {Outcome, AttemptReport, Cost, Counters, LeftOut, RouteReport, Usage} <= seen


def test_an_outcome_that_an_earlier_version_stored_is_read() -> None:
    assert read_outcome(msgspec.json.encode(BARE).decode()) == BARE
