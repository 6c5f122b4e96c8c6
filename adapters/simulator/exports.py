"""
The simulated provider's ledger as the providers it stands for export theirs, so that a reconciliation can be tried.

`GET /_control/export?format=openai_costs&input=1&output=2`: what answers cost at these USD a million tokens. It has no
price of its own; without `input` and `output` all costs nothing. An answer is charged that was written to its end, with
its protocol's terminal or without: of the latter the gateway does not know, and the provider does. Nothing else is.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, datetime, timedelta
from decimal import Decimal, InvalidOperation
from typing import Any

import msgspec

from adapters.simulator.ledger import Dispatch, Ended
from adapters.simulator.requests import BadRequest

FORMATS = ("openai_costs", "openai_usage", "anthropic_costs", "anthropic_usage")
_MILLION = Decimal(1_000_000)


def export(dispatches: Iterable[Dispatch], query: Mapping[str, list[str]], *, whole: bool) -> bytes:
    """
    One page in the format that the query asks for, a bucket a day of UTC. Where it is not `whole`, it says that there
    is more.

    Raises `BadRequest`.
    """
    form = query.get("format", [""])[0]
    if form not in FORMATS:
        raise BadRequest(f"The format must be one of {', '.join(FORMATS)}.", param="format")
    rates = {"input": _rate(query, "input"), "output": _rate(query, "output")}
    days: dict[datetime, dict[str, tuple[int, int, int]]] = defaultdict(dict)
    for one in dispatches:
        if one.ended in {Ended.COMPLETE, Ended.UNPROVEN}:
            day = datetime.fromtimestamp(one.received, UTC).replace(hour=0, minute=0, second=0, microsecond=0)
            given, told, requests = days[day].get(one.model, (0, 0, 0))
            days[day][one.model] = (given + one.tokens_in, told + one.tokens_out, requests + 1)
    buckets = []
    for day in sorted(days):
        results = [result for model in sorted(days[day]) for result in _results(form, model, days[day][model], rates)]
        buckets.append({**_span(form, day), "results": results})
    return msgspec.json.encode({"data": buckets, "has_more": not whole, "next_page": None})


def _rate(query: Mapping[str, list[str]], name: str) -> Decimal:
    try:
        rate = Decimal(query.get(name, ["0"])[0])
    except InvalidOperation:
        raise BadRequest("A price must be USD a million tokens.", param=name) from None
    if not rate.is_finite() or rate < 0:
        raise BadRequest("A price must be USD a million tokens.", param=name)
    return rate


def _span(form: str, day: datetime) -> dict[str, Any]:
    after = day + timedelta(days=1)
    if form.startswith("openai"):
        return {"object": "bucket", "start_time": int(day.timestamp()), "end_time": int(after.timestamp())}
    return {"starting_at": f"{day:%Y-%m-%dT%H:%M:%SZ}", "ending_at": f"{after:%Y-%m-%dT%H:%M:%SZ}"}


def _results(
    form: str, model: str, counts: tuple[int, int, int], rates: Mapping[str, Decimal]
) -> Iterator[dict[str, Any]]:
    given, told, requests = counts
    parts = (("input", "uncached_input_tokens", given), ("output", "output_tokens", told))
    match form:
        case "openai_costs":
            for name, _, tokens in parts:
                amount = {"value": f"{tokens * rates[name] / _MILLION:f}", "currency": "usd"}
                item = f"{model}, {name}"
                yield {"object": "organization.costs.result", "amount": amount, "line_item": item, "project_id": None}
        case "openai_usage":
            yield {
                "object": "organization.usage.completions.result",
                "input_tokens": given,
                "input_cached_tokens": 0,
                "output_tokens": told,
                "num_model_requests": requests,
                "model": model,
            }
        case "anthropic_costs":
            for name, token_type, tokens in parts:
                yield {
                    "amount": f"{100 * tokens * rates[name] / _MILLION:f}",
                    "currency": "USD",
                    "cost_type": "tokens",
                    "token_type": token_type,
                    "model": model,
                    "description": f"{model} Usage - {name.title()} Tokens",
                    "service_tier": "standard",
                }
        case _:
            yield {
                "uncached_input_tokens": given,
                "cache_read_input_tokens": 0,
                "cache_creation": {"ephemeral_5m_input_tokens": 0, "ephemeral_1h_input_tokens": 0},
                "output_tokens": told,
                "model": model,
                "service_tier": "standard",
            }
