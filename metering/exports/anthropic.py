"""
What Anthropic exports: pages of its cost and usage reports, and the CSVs of its console.

Facts, and where they are from:

- Cost report: `amount` is a decimal string in the currency's lowest unit, for USD cents: `"123.45"` is $1.23. Its
  `currency` is always USD; `model`, `token_type`, `service_tier`, `cost_type` and `description` are null unless grouped
  by description, and `model` for what is no token (`web_search`, `code_execution`, `session_usage`) as well. Costs of
  Priority Tier are never in it. Buckets are days of UTC, `starting_at` to `ending_at`
  (https://platform.claude.com/docs/en/api/admin/cost_report/retrieve).
- Usage report: `uncached_input_tokens`, `cache_read_input_tokens`, `cache_creation.ephemeral_5m_input_tokens`,
  `cache_creation.ephemeral_1h_input_tokens` are disjoint, all input is their sum; buckets are of a minute, an hour or
  a day of UTC (https://platform.claude.com/docs/en/api/admin/usage_report/retrieve_messages).
- The console's CSVs are not documented; their columns are as seen in exports. Costs: `cost_usd` is in dollars, as seen
  with two decimals, `model` a name for people (`Claude Haiku 4.5`). Usage: `model_version` is the model's id,
  `usage_date_utc` a day or the start of an hour or minute in UTC; older ones have one
  `usage_input_tokens_cache_write` for both lifetimes.
"""

from __future__ import annotations

from decimal import Context, Decimal
from typing import Final

from metering.exports.lines import Line
from metering.exports.openai import BATCH
from metering.exports.records import Record, within_a_day

DIMENSIONS: Final = (
    "workspace_id", "workspace", "api_key_id", "api_key", "account_id", "service_account_id", "service_tier",
    "usage_type", "context_window", "inference_geo", "speed", "cost_type", "token_type", "description", "model",
    "model_version",
)  # fmt: skip

#: Cents to dollars, exactly.
_EXACT: Final = Context(prec=100)
_CENT: Final = Decimal(-2)
_INPUT: Final = (
    "uncached_input_tokens", "cache_read_input_tokens", "cache_creation.ephemeral_5m_input_tokens",
    "cache_creation.ephemeral_1h_input_tokens",
)  # fmt: skip
_INPUT_CSV: Final = ("no_cache", "cache_read", "cache_write_5m", "cache_write_1h", "cache_write")


def cost(record: Record, times: Record) -> Line:
    """A result of the cost report. `times` has the bucket's. Raises `Refused`."""
    start, end = times.moment("starting_at"), times.moment("ending_at")
    cents = record.amount("amount")
    if cents is None:
        raise record.refuse("amount", "is missing")
    grouped = any(record.text(name) is not None for name in ("description", "cost_type", "model"))
    model = record.text("model")
    currency = record.text("currency") or "USD"
    apart = None
    if record.text("service_tier") == "batch":
        apart = BATCH
    elif model is None and grouped:
        apart = "of another product"
    return Line(
        start=within_a_day(times, "ending_at", start, end),
        label=record.text("description") or model or record.text("cost_type") or "all",
        model=model if apart is None else None,
        apart=apart,
        amount=cents.scaleb(_CENT, _EXACT),
        currency=currency.upper(),
        dimensions=record.dimensions(DIMENSIONS),
    )


def usage(record: Record, times: Record) -> Line:
    """A result of the usage report of messages. `times` has the bucket's. Raises `Refused`."""
    start, end = times.moment("starting_at"), times.moment("ending_at")
    if record.count("uncached_input_tokens") is None:
        raise record.refuse("uncached_input_tokens", "is missing")
    output = record.count("output_tokens")
    if output is None:
        raise record.refuse("output_tokens", "is missing")
    model = record.text("model")
    apart = BATCH if (record.text("service_tier") or "").startswith("batch") else None
    return Line(
        start=within_a_day(times, "ending_at", start, end),
        label=model or "all",
        model=model if apart is None else None,
        apart=apart,
        input_tokens=sum(record.count(name) or 0 for name in _INPUT),
        output_tokens=output,
        dimensions=record.dimensions(DIMENSIONS),
    )


def cost_row(record: Record) -> Line:
    """A row of the console's costs. Raises `Refused`."""
    amount = record.amount("cost_usd")
    if amount is None:
        raise record.refuse("cost_usd", "is missing")
    model = record.text("model")
    apart = None
    if (record.text("usage_type") or "").startswith("batch"):
        apart = BATCH
    elif model is None:
        apart = "of another product"
    return Line(
        start=record.moment("usage_date_utc"),
        label=model or record.text("cost_type") or "no model",
        model=model if apart is None else None,
        apart=apart,
        amount=amount,
        dimensions=record.dimensions(DIMENSIONS),
    )


def usage_row(record: Record) -> Line:
    """A row of the console's usage. Raises `Refused`."""
    output = record.count("usage_output_tokens")
    if output is None:
        raise record.refuse("usage_output_tokens", "is missing")
    if record.count("usage_input_tokens_no_cache") is None:
        raise record.refuse("usage_input_tokens_no_cache", "is missing")
    model = record.text("model_version")
    if model is None:
        raise record.refuse("model_version", "is missing")
    apart = BATCH if (record.text("usage_type") or "").startswith("batch") else None
    return Line(
        start=record.moment("usage_date_utc"),
        label=model,
        model=model if apart is None else None,
        apart=apart,
        input_tokens=sum(record.count(f"usage_input_tokens_{name}") or 0 for name in _INPUT_CSV),
        output_tokens=output,
        dimensions=record.dimensions(DIMENSIONS),
    )
