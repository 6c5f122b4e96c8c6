"""The audit finds what it is there to find: each fault planted in books that are otherwise in order."""

from __future__ import annotations

import datetime as dt
from decimal import Decimal
from typing import Any

import pytest

from tests.faults.audit import Audit, Heard, Kind, Snapshot, audit

DAY = dt.date(2026, 1, 2)
USD = Decimal("0.000075")


class Books:
    """One charged attempt, everywhere as it should be."""

    def __init__(self) -> None:
        self.ledger: dict[str, Any] = {"peak_concurrency": 1}
        self.dispatch: dict[str, Any] = {
            "correlation": "d", "request_id": "req_1", "started": 1.0, "finished": 2.0, "released": 2.0,
            "ended": "complete", "tokens_in": 10, "tokens_out": 5,
        }  # fmt: skip
        self.dispatches = [self.dispatch]
        self.attempt: dict[str, Any] = {
            "ticket_id": 1, "key_id": "k", "debit_id": "d", "attempt": 1, "state": "charged", "day": DAY,
        }  # fmt: skip
        self.invocation: dict[str, Any] = {
            **self.attempt, "correction": 0, "status": "success", "ended": "complete", "cost_reason": None,
            "http_status": None, "provider_request_id": "req_1", "usd": USD, "upper_bound_usd": None,
            "input_total": 10, "output_total": 5,
        }  # fmt: skip
        self.invocations = [self.invocation]
        self.counters = [
            {"kind": kind, "name": name, "usd": USD, "attempts": 1, "unknown": 0, "bound": 0, "in": 10, "out": 5}
            for kind, name in (("total", ""), ("day", f"{DAY}"), ("key", "k"), ("key_day", f"k/{DAY}"))
        ]
        self.tickets: list[dict[str, Any]] = []
        self.heard = [Heard(marker="d", ended="complete", settled=True, usd=USD)]

    def audited(self) -> Audit:
        found: Any = Snapshot([self.attempt], self.invocations, self.counters, self.tickets)  # type: ignore[arg-type, list-item]
        return audit(found, ledger=self.ledger, dispatches=self.dispatches, heard=self.heard, limit=1)


def test_books_in_order_have_nothing_against_them() -> None:
    result = Books().audited()
    assert not result.violations
    assert result.charged == 1


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
        "a ticket left",
    ],
)
def test_a_planted_fault_is_found(kind: Kind, plant: Any) -> None:
    books = Books()
    plant(books)
    assert books.audited().count(kind) >= 1
