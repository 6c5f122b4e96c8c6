"""How a request ended, who served it, what it cost: one answer on every transport, in the status and in the log."""

from __future__ import annotations

import functools
import urllib.parse
from datetime import date
from decimal import Decimal

import msgspec

from metering.cost import decimal_string
from metering.usage import NOTHING, Usage


class RouteReport(msgspec.Struct, frozen=True, kw_only=True):
    """A route as the caller may see it."""

    route_id: str
    provider: str
    #: The upstream's name for the model.
    model: str
    protocol: str


class LeftOut(msgspec.Struct, frozen=True, kw_only=True):
    """A route that was not tried, and why."""

    provider: str
    model: str
    #: "disabled", "not_ready: OPENAI_API_KEY not set", "not_qualified: planner", "not_allowed: key",
    #: "capability: images", "max_cost_usd", "failover_off", "route_limit".
    reason: str


class Cost(msgspec.Struct, frozen=True, kw_only=True):
    #: "charged", "zero" or "unknown".
    state: str
    #: None where unknown.
    usd: Decimal | None = None
    upper_bound_usd: Decimal | None = None
    price_version: str | None = None
    #: Why it is zero or unknown.
    reason: str | None = None
    #: Our own figure, where the provider's won.
    list_usd: Decimal | None = None
    #: What was odd in what the provider reported.
    flags: tuple[str, ...] = ()


class AttemptReport(msgspec.Struct, frozen=True, kw_only=True):
    """One attempt as the caller may see it."""

    number: int
    route: RouteReport
    #: "success", "error", "timeout", "cancelled", "not_dispatched" or "unknown".
    status: str
    #: "fatal", "ours", "transient" or "network"; None where it succeeded.
    error_class: str | None = None
    code: str | None = None
    http_status: int | None = None
    message: str | None = None
    cost: Cost


class Counters(msgspec.Struct, frozen=True, kw_only=True):
    """USD charged, after this settlement."""

    #: None where the request named no session.
    session_usd: Decimal | None = None
    day_usd: Decimal
    total_usd: Decimal
    #: The day the charge belongs to, in the declared zone.
    day: date


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """How a request ended, who served it, what it cost."""

    request_id: str
    debit_id: str
    #: "complete", "failed", "cancelled" or "uncertain".
    ended: str
    attempts: tuple[AttemptReport, ...]
    usage: Usage = NOTHING
    #: Of all its attempts together.
    cost: Cost
    #: "settled"; "pending" where the store has not acknowledged yet and it will be settled, whatever happens here;
    #: "unknown" where that is not certain. Without "settled" `counters` is None.
    settlement: str
    counters: Counters | None = None
    warnings: tuple[str, ...] = ()
    served_model: str | None = None
    #: The tier of its service that the provider says served it, in its own word.
    service_tier: str | None = None
    provider_request_id: str | None = None
    #: Where the request asked for an explanation.
    left_out: tuple[LeftOut, ...] = ()

    @property
    def dispatched(self) -> bool:
        """A provider got the request, or part of it."""
        return any(attempt.status != "not_dispatched" for attempt in self.attempts)

    @property
    def route(self) -> RouteReport | None:
        """The route of the attempt that ended it."""
        return self.attempts[-1].route if self.attempts else None

    def attribution(self) -> list[tuple[str, str]]:
        """
        Who served it, what it cost, and what session, day and total come to with it, in the names and words of every
        transport's headers. All is ASCII.
        """
        attempts, counters = self.attempts, self.counters
        if attempts:
            told = serving(attempts[-1].route, len(attempts), attempts[-2] if len(attempts) > 1 else None)
        else:
            told = [("x-tollbridge-attempts", "0")]
        if self.cost.usd is not None:
            told.append(("x-tollbridge-cost-usd", decimal_string(self.cost.usd)))
        if attempts:
            told.append(("x-tollbridge-settlement", self.settlement))
        if counters is not None:
            if counters.session_usd is not None:
                told.append(("x-tollbridge-session-usd", decimal_string(counters.session_usd)))
            told.append(("x-tollbridge-day-usd", decimal_string(counters.day_usd)))
            told.append(("x-tollbridge-total-usd", decimal_string(counters.total_usd)))
        return told


def serving(route: RouteReport, attempts: int, before: AttemptReport | None) -> list[tuple[str, str]]:
    """Who serves a request, in the attempt of this number; `before` is the one that failed before it."""
    told = [("x-tollbridge-route", _named(route.provider, route.model)), ("x-tollbridge-attempts", str(attempts))]
    if before is not None and before.route != route:
        reason = before.code or before.error_class or before.status
        told.append(("x-tollbridge-failover-reason", urllib.parse.quote(reason)))
    return told


#: As many routes as the larger configurations have.
@functools.lru_cache(maxsize=4096)
def _named(provider: str, model: str) -> str:
    return urllib.parse.quote(f"{provider}/{model}", safe="/:@+,=")
