"""What the simulated provider exports is what its ledger has, in the words that a reconciliation reads."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import pytest

from adapters.simulator import exports
from adapters.simulator.ledger import Ended, Ledger
from adapters.simulator.requests import BadRequest
from metering.exports.reading import read


@pytest.fixture
def ledger() -> Ledger:
    found = Ledger(keep=10)
    for number, model in enumerate(("a", "b", "a", "a")):
        dispatch = found.begin(model=model, correlation=None, question=None, fields=[], stream=False)
        dispatch.tokens_in, dispatch.tokens_out = 100 + number, 10
        # 2026-09-02T23:00:00Z, and an hour and a half later.
        dispatch.received = 1_788_390_000 + (number == 2) * 5_400
        found.end(dispatch, (Ended.COMPLETE, Ended.UNPROVEN, Ended.COMPLETE, Ended.DIED)[number])
        found.release(dispatch)
    return found


@pytest.mark.parametrize("form", exports.FORMATS)
def test_each_format_reads_as_what_was_answered_by_day_of_utc_and_model(form: str, ledger: Ledger) -> None:
    page = exports.export(ledger.closed(), {"format": [form], "input": ["2"], "output": ["0.5"]}, whole=ledger.whole)
    [export] = read([("page", page)])
    assert export.form.name.lower() == form
    assert export.notes == []
    sums: dict[tuple[int, str | None], list[Any]] = {}
    for line in export.lines:
        amount, given, told = sums.get((line.day.day, line.model), [Decimal(0), 0, 0])
        sums[line.day.day, line.model] = [
            amount + (line.amount or 0), given + (line.input_tokens or 0), told + (line.output_tokens or 0)
        ]  # fmt: skip
    money = {(2, "a"): Decimal("0.000205"), (2, "b"): Decimal("0.000207"), (3, "a"): Decimal("0.000209")}
    tokens = {(2, "a"): [100, 10], (2, "b"): [101, 10], (3, "a"): [102, 10]}
    if export.form.money:
        assert {key: amount for key, (amount, _, _) in sums.items()} == money
    else:
        assert {key: counts for key, (_, *counts) in sums.items()} == tokens


def test_what_is_forgotten_is_said_to_be_missing(ledger: Ledger) -> None:
    for _ in range(10):
        dispatch = ledger.begin(model="a", correlation=None, question=None, fields=[], stream=False)
        ledger.end(dispatch, Ended.COMPLETE)
        ledger.release(dispatch)
    assert not ledger.whole
    [export] = read([("page", exports.export(ledger.closed(), {"format": ["openai_usage"]}, whole=ledger.whole))])
    assert "there are more" in export.notes[0]


@pytest.mark.parametrize(
    ("query", "param"),
    [({}, "format"), ({"format": ["csv"]}, "format"), ({"format": ["openai_costs"], "output": ["-1"]}, "output")],
)
def test_a_wrong_question_is_refused(query: dict[str, list[str]], param: str, ledger: Ledger) -> None:
    with pytest.raises(BadRequest) as refused:
        exports.export(ledger.closed(), query, whole=True)
    assert refused.value.param == param
