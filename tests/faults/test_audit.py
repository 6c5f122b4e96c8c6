"""The audit finds what it is there to find: each fault planted in books that are otherwise in order."""

from __future__ import annotations

import datetime as dt
from decimal import Decimal
from typing import Any

import pytest

from tests.faults.audit import Audit, Heard, Kind, Snapshot, audit, true_cost

DAY = dt.date(2026, 1, 2)
USD = Decimal("0.000075")
PRICES = {"m": (Decimal("2.50"), Decimal("10.00"))}
#: One of each kind. The name of those of a day is nobody's business.
COUNTERS = (
    ("total", "", None, None, None),
    ("day", f"{DAY}", None, None, None),
    ("key", "k", None, None, None),
    ("key_day", f"k/{DAY}", None, None, None),
    ("session", "k/s", None, "k", ["s"]),
    ("route_day", "1", DAY, "k", ["p", "r", "m"]),
    ("run_day", "2", DAY, "k", ["run"]),
    ("step_day", "3", DAY, "k", ["run", "step"]),
    ("tag_day", "4", DAY, "k", ["team", "green"]),
)
#: What an attempt is whose end nobody saw.
UNKNOWN = {"state": "unknown", "usd": None, "provider_request_id": None, "upper_bound_usd": USD}


class Books:
    """One charged attempt, everywhere as it should be."""

    def __init__(self) -> None:
        self.ledger: dict[str, Any] = {"peak_concurrency": 1}
        self.dispatch: dict[str, Any] = {
            "correlation": "d", "request_id": "req_1", "started": 1.0, "finished": 2.0, "released": 2.0,
            "ended": "complete", "tokens_in": 10, "tokens_out": 5, "model": "m",
        }  # fmt: skip
        self.dispatches = [self.dispatch]
        self.attempt: dict[str, Any] = {
            "ticket_id": 1, "key_id": "k", "debit_id": "d", "attempt": 1, "state": "charged", "day": DAY,
        }  # fmt: skip
        self.invocation: dict[str, Any] = {
            **self.attempt, "correction": 0, "status": "success", "ended": "complete", "cost_reason": None,
            "http_status": None, "provider_request_id": "req_1", "usd": USD, "upper_bound_usd": None,
            "input_total": 10, "output_total": 5, "provider": "p", "requested_model": "r", "upstream_model": "m",
            "session_id": "s", "run_id": "run", "step_id": "step", "tags": '{"team":"green"}',
        }  # fmt: skip
        self.invocations = [self.invocation]
        sums = {"usd": USD, "attempts": 1, "unknown": 0, "bound": 0, "unbounded": 0, "in": 10, "out": 5}
        self.counters = [
            {"kind": kind, "name": name, "day": day, "key_id": key, "names": names, **sums}
            for kind, name, day, key, names in COUNTERS
        ]
        self.tickets: list[dict[str, Any]] = []
        self.heard = [Heard(marker="d", ended="complete", settled=True, usd=USD)]

    def end(self, **facts: Any) -> None:
        """In another way, of which no caller has heard."""
        self.invocation.update(facts)
        self.attempt["state"] = self.invocation["state"]
        self.heard.clear()

    def audited(self) -> Audit:
        found: Any = Snapshot([self.attempt], self.invocations, self.counters, self.tickets)  # type: ignore[arg-type, list-item]
        return audit(found, ledger=self.ledger, dispatches=self.dispatches, heard=self.heard, limit=1, prices=PRICES)


def test_books_in_order_have_nothing_against_them() -> None:
    result = Books().audited()
    assert not result.violations
    assert result.charged == 1


@pytest.mark.parametrize("bound", [USD, USD * 2])
def test_work_of_unknown_cost_is_covered_by_a_bound_of_what_it_is_worth_or_more(bound: Decimal) -> None:
    books = Books()
    books.end(**{**UNKNOWN, "upper_bound_usd": bound})
    assert {violation.kind for violation in books.audited().violations} == {Kind.COUNTER}


def test_a_cost_is_rounded_once_and_half_to_even() -> None:
    dispatch = {"model": "m", "tokens_in": 1, "tokens_out": 1}
    for price_in, price_out, usd in (
        ("0.0000005", "0", "0"),
        ("0.0000015", "0", "0.000000000002"),
        ("0.0000004", "0.0000003", "0.000000000001"),
    ):
        assert true_cost(dispatch, {"m": (Decimal(price_in), Decimal(price_out))}) == Decimal(usd)


@pytest.mark.parametrize(
    ("kind", "plant"),
    [
        (Kind.OVER_ADMISSION, lambda books: books.ledger.update(peak_concurrency=2)),
        (Kind.DOUBLE, lambda books: books.invocations.append(dict(books.invocation))),
        (Kind.DOUBLE, lambda books: books.invocations.append({**books.invocation, "correction": 1})),
        (Kind.DOUBLE, lambda books: books.invocations.append({**books.invocation, "ticket_id": 2})),
        (Kind.DOUBLE, lambda books: books.dispatches.clear()),
        (Kind.LOST, lambda books: books.invocations.clear()),
        (Kind.LOST, lambda books: books.attempt.update(state="open")),
        (Kind.LOST, lambda books: books.dispatches.append({**books.dispatch, "request_id": "req_2"})),
        (Kind.LOST, lambda books: books.invocation.update(status="not_dispatched")),
        (Kind.LOST, lambda books: books.heard.append(Heard(marker="other", ended="complete"))),
        (Kind.CHARGE, lambda books: books.dispatch.update(tokens_out=6)),
        (Kind.CHARGE, lambda books: books.heard[0].__setattr__("usd", USD * 2)),
        (Kind.CHARGE, lambda books: books.invocation.update(day=DAY + dt.timedelta(1))),
        (Kind.COUNTER, lambda books: books.counters[0].update(usd=USD * 2)),
        (Kind.COUNTER, lambda books: books.counters.pop()),
        *(
            (Kind.COUNTER, lambda books, n=number: books.counters[n].update(attempts=2))
            for number in range(len(COUNTERS))
        ),
        (Kind.COUNTER, lambda books: books.counters.append(dict(books.counters[-1]))),
        (Kind.COUNTER, lambda books: books.counters[-1].update(key_id="other")),
        (Kind.CHARGE, lambda books: books.end(provider_request_id=None, usd=USD * 2)),
        (Kind.CHARGE, lambda books: books.end(**{**UNKNOWN, "upper_bound_usd": USD - Decimal("1e-12")})),
        (Kind.CHARGE, lambda books: books.end(**{**UNKNOWN, "upper_bound_usd": None})),
        (Kind.LOST, lambda books: books.end(**{**UNKNOWN, "state": "zero", "usd": Decimal(0)})),
        (Kind.LEFT_BEHIND, lambda books: books.tickets.append({"state": "active", "debit_id": "d"})),
    ],
    ids=[
        "the provider had more than the limit",
        "settled twice",
        "a charge corrected",
        "an invocation without an attempt",
        "a charge without a dispatch",
        "no settlement",
        "still open",
        "a dispatch without an attempt",
        "dispatched but settled as not",
        "an answer that nobody charged",
        "other tokens than the provider's",
        "another cost than the caller was told",
        "another day",
        "a counter that is off",
        "a counter that is missing",
        *(f"a {kind} counter that is off" for kind, *_ in COUNTERS),
        "a counter that is there twice",
        "a counter of another key",
        "a charge that no dispatch made, by a process that knew the usage only",
        "a bound below what the provider did, by the last digit",
        "no bound although the price is known",
        "work that is settled as zero",
        "a ticket left",
    ],
)
def test_a_planted_fault_is_found(kind: Kind, plant: Any) -> None:
    books = Books()
    plant(books)
    assert books.audited().count(kind) >= 1
