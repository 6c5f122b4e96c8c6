from __future__ import annotations

from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

import pytest

from metering.exports.lines import Line
from metering.reconciliation import Reconciliation, Row, Tolerance, Used, compare, matched


def used(model: str = "gpt-4o", usd: str = "1", *, day: int = 2, **fields: Any) -> Used:
    known: dict[str, Any] = {
        "attempts": 1, "unknown_attempts": 0, "unknown_upper_bound_usd": Decimal(0), "unbounded_attempts": 0,
        "input_tokens": 10, "output_tokens": 5,
    }  # fmt: skip
    day_of = date(2026, 9, day)
    return Used(day=day_of, provider="p", upstream_model=model, charged_usd=Decimal(usd), **{**known, **fields})


def cost(model: str | None = "gpt-4o", usd: str = "1", *, day: int = 2, **fields: Any) -> Line:
    start = datetime(2026, 9, day, tzinfo=UTC)
    return Line(start=start, label=model or "all", model=model, amount=Decimal(usd), dimensions={}, **fields)


def tokens(model: str | None = "gpt-4o", given: int = 10, told: int = 5, *, day: int = 2, **fields: Any) -> Line:
    start = datetime(2026, 9, day, tzinfo=UTC)
    return Line(start=start, label="", model=model, input_tokens=given, output_tokens=told, dimensions={}, **fields)


def compared(ours: list[Used], theirs: list[Line], *, by_day: bool = True, **fields: Any) -> Reconciliation:
    money = any(line.amount is not None for line in theirs)
    told = any(line.amount is None for line in theirs)
    return compare(ours, theirs, by_day=by_day, money=money, tokens=told, **fields)


def of(row: Row, *names: str) -> list[Any]:
    return [getattr(row, name) for name in names]


def test_equal_books_agree_in_money_and_in_tokens() -> None:
    result = compared([used(), used(day=3)], [cost(), cost(day=3), tokens(), tokens(day=3)])
    assert result.agrees
    assert len(result.rows) == 2
    assert of(result.sums, "charged_usd", "theirs_usd", "input_tokens") == [2, 2, 20]


@pytest.mark.parametrize(
    ("theirs", "agrees"),
    [("1.01", True), ("1.010000000001", False), ("0.99", True), ("0.989999999999", False)],
)
def test_a_small_amount_may_be_a_cent_apart(theirs: str, agrees: bool) -> None:
    assert compared([used(usd="1")], [cost(usd=theirs)]).agrees is agrees


@pytest.mark.parametrize(("ours", "agrees"), [("99.5", True), ("99.499999", False), ("100.5", True), ("100.51", False)])
def test_a_large_amount_may_be_half_a_percent_apart(ours: str, agrees: bool) -> None:
    assert compared([used(usd=ours)], [cost(usd="100")]).agrees is agrees


def test_tokens_must_be_equal_unless_asked_otherwise() -> None:
    assert not compared([used()], [tokens(given=11)]).agrees
    assert not compared([used()], [tokens(told=4)]).agrees
    assert compared([used()], [tokens(given=11, told=4)], tolerance=Tolerance(tokens=1)).agrees


def test_what_one_side_alone_has_differs() -> None:
    [row] = compared([used("a")], [cost("a"), cost("b")]).differing
    assert of(row, "model", "charged_usd", "theirs_usd", "difference_percent") == ["b", 0, 1, 100]
    assert "other programs" in row.explanations[0]
    [row] = compared([used("a"), used("b")], [cost("a")]).differing
    assert of(row, "model", "theirs_usd", "difference_usd", "difference_percent") == ["b", 0, -1, None]
    assert "the export has nothing" in row.explanations[0]


@pytest.mark.parametrize(
    ("names", "groups"),
    [
        (["gpt-4o", "gpt-4o-2024-08-06"], 1),
        (["gpt-4o-2024-05-13", "gpt-4o-2024-08-06"], 2),
        (["gpt-4o", "gpt-4o-2024-05-13", "gpt-4o-2024-08-06"], 1),
        (["gpt-4o", "gpt-4o-mini-2024-07-18"], 2),
        (["gpt-4", "gpt-4-0613"], 1),
        (["gpt-5", "gpt-5.1"], 2),
        (["claude-haiku-4-5", "claude-haiku-4-5-20251001", "Claude Haiku 4.5"], 1),
        (["claude-3-5-sonnet-20241022", "claude-3-5-sonnet-latest", "Claude Sonnet 3.5"], 1),
        (["claude-opus-4-20250514", "claude-opus-4-0", "Claude Opus 4"], 1),
        (["Claude Opus 4", "claude-opus-4-1-20250805"], 2),
        (["Claude Sonnet 4.5", "Claude Haiku 4.5"], 2),
    ],
)
def test_an_alias_is_the_same_model_as_its_snapshots_and_two_snapshots_are_two(names: list[str], groups: int) -> None:
    assert len(set(matched(names).values())) == groups
    assert matched(names) == matched(reversed(names))


def test_an_alias_here_is_compared_with_the_snapshot_that_was_billed() -> None:
    result = compared([used("gpt-4o", "3")], [cost("gpt-4o-2024-08-06", "2"), cost("gpt-4o-2024-08-06", "1")])
    assert result.agrees
    [row] = result.rows
    assert (row.model, row.names) == ("gpt-4o", ["gpt-4o"])


def test_what_is_told_for_all_models_together_is_compared_with_all_of_ours() -> None:
    result = compared([used("a"), used("b")], [cost(None, "2"), tokens("a"), tokens("b")])
    assert result.agrees
    assert [(row.model, row.charged_usd, row.input_tokens) for row in result.rows] == [
        (None, 2, None), ("a", None, 10), ("b", None, 10),
    ]  # fmt: skip
    assert of(result.sums, "charged_usd", "input_tokens", "attempts") == [2, 20, 2]
    with pytest.raises(ValueError, match="count twice"):
        compared([used("a")], [cost(None), cost("a")])


def unknown(bound: str, *, unbounded: int = 0, **fields: Any) -> Used:
    return used(
        unknown_attempts=1, unknown_upper_bound_usd=Decimal(bound), unbounded_attempts=unbounded, attempts=2, **fields
    )


@pytest.mark.parametrize(
    ("ours", "theirs", "fits"),
    [
        (unknown("0.5"), "1.4", True),
        (unknown("0.5"), "1.51", True),
        (unknown("0.5"), "1.6", False),
        (unknown("0.5"), "0.5", False),
        (unknown("0", unbounded=1), "9", True),
        (used(), "1.4", False),
    ],
    ids=["within", "within the tolerance above", "beyond", "less than ours", "without a bound", "none"],
)
def test_an_attempt_of_unknown_cost_explains_what_it_can_have_cost(ours: Used, theirs: str, fits: bool) -> None:
    [row] = compared([ours], [cost(usd=theirs)]).differing
    assert row.unknown_fit is fits
    assert any("fit into it" in explanation for explanation in row.explanations) is fits


def test_a_call_that_ran_over_midnight_is_seen_as_such_and_the_range_agrees() -> None:
    ours, theirs = [used(usd="5"), used(usd="1", day=3)], [cost(usd="4"), cost(usd="2", day=3)]
    result = compared(ours, theirs)
    assert [row.explanations for row in result.differing] == [
        ["2026-09-03 differs by as much the other way: calls around midnight UTC?"],
        ["2026-09-02 differs by as much the other way: calls around midnight UTC?"],
    ]
    assert compared(ours, theirs, by_day=False).agrees


def test_more_requests_than_attempts_are_told() -> None:
    [row] = compared([used()], [tokens(given=11, requests=3)]).differing
    assert "beyond the attempts of the ledger: 2" in row.explanations[0]


def test_another_currency_is_told_apart_and_keeps_the_books_from_agreeing() -> None:
    result = compared([used()], [cost(), cost(usd="0.9", currency="EUR"), cost(None, "-3", apart="of another product")])
    assert not result.differing
    assert not result.agrees
    assert result.foreign_currencies == ["EUR"]
    assert [(apart.reason, apart.amount, apart.currency) for apart in result.apart] == [
        ("in EUR, and the ledger is in USD", Decimal("0.9"), "EUR"),
        ("of another product", -3, "USD"),
    ]
    assert compared([used()], [cost(), cost(usd="9", currency="EUR", apart="chosen away")]).agrees


def test_a_credit_lowers_what_the_provider_has() -> None:
    assert compared([used(usd="2")], [cost(usd="5"), cost(usd="-3")]).agrees


def test_rows_that_are_each_within_the_tolerance_do_not_agree_where_their_sum_is_not() -> None:
    models = [f"m{n}" for n in range(300)]
    result = compared([used(model, "0") for model in models], [cost(model, "0.009") for model in models])
    assert result.differing == []
    assert result.sums.differs
    assert not result.agrees
