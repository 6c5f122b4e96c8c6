"""
What OpenAI exports: pages of its costs and usage APIs, and the CSVs of its dashboard, which have the same fields.

Facts, and where they are from:

- Costs: `amount.value` is USD as a number, `amount.currency` a lower-case ISO 4217 code, `line_item` and `project_id`
  are null unless grouped by (https://platform.openai.com/docs/api-reference/usage/costs). Live answers write the value
  as text with an exponent, too: `"0E-6176"`.
- `line_item` is `MODEL, input`, `MODEL, cached input`, `MODEL, output`, with `priority | ` before it, a modality after
  the model (`gpt-audio-mini-2025-12-15 audio, input`) or `, long context` after it; what is no model's is a text of its
  own (`web search tool calls`). This is seen in exports, not documented; other texts are taken as other products.
- Usage: `input_tokens` has the cached ones in it, which `input_cached_tokens` tells again; `model`, `batch` and the ids
  are null unless grouped by (https://platform.openai.com/docs/api-reference/usage/completions).
- Buckets begin and end at `start_time` and `end_time`, seconds since the epoch; the dashboard's times are UTC
  (https://help.openai.com/en/articles/8554956-understanding-your-api-usage).
- CSV: `amount.value` is the column `amount_value`; a day without use is a row of times alone; counts are written
  `59200.0`.
"""

from __future__ import annotations

import re
from typing import Final

from metering.exports.lines import Line
from metering.exports.records import Record, within_a_day

DIMENSIONS: Final = ("project_id", "user_id", "api_key_id", "batch", "service_tier", "line_item", "model", "object")
#: What they say of a line that the gateway makes no calls for.
BATCH: Final = "of the provider's batch API, which the gateway does not call"

_LINE_ITEM = re.compile(
    r"(?:(?P<tier>[\w -]+) \| )?(?P<model>[^\s,|]+)(?: (?P<modality>[a-z]+))?, "
    r"(?P<what>(?:cached |cache )?(?:input|output|writes?|reads?)(?:[ _]tokens)?)(?:, [\w ]+)?",
    re.IGNORECASE,
)
#: Objects of the usage API that count tokens of calls that the gateway makes.
_OURS: Final = ("organization.usage.completions.result", "organization.usage.embeddings.result")


def bucket(record: Record) -> bool:
    """The row of a CSV is a bucket with nothing in it."""
    return all(record.text(name) is None for name in ("amount.value", "input_tokens", "num_model_requests"))


def cost(record: Record, times: Record) -> Line:
    """A result of the costs API or a row of the dashboard's costs. `times` has the bucket's. Raises `Refused`."""
    start, end = times.moment("start_time", "start_time_iso"), times.moment("end_time", "end_time_iso")
    amount = record.amount("amount.value")
    if amount is None:
        raise record.refuse("amount.value", "is missing")
    currency = record.text("amount.currency")
    if currency is None:
        raise record.refuse("amount.currency", "is missing")
    item = record.text("line_item")
    model, apart = None, None
    if item is not None:
        found = _LINE_ITEM.fullmatch(item)
        if found is None or found["modality"] == "image":
            apart = "of another product"
        elif (found["tier"] or "").lower().startswith("batch"):
            apart = BATCH
        else:
            model = found["model"]
    return Line(
        start=within_a_day(times, "end_time", start, end),
        label=item or "all",
        model=model,
        apart=apart,
        amount=amount,
        currency=currency.upper(),
        dimensions=record.dimensions(DIMENSIONS),
    )


def usage(record: Record, times: Record) -> Line:
    """A result of the usage API or a row of the dashboard's usage. `times` has the bucket's. Raises `Refused`."""
    start, end = times.moment("start_time", "start_time_iso"), times.moment("end_time", "end_time_iso")
    kind = record.text("object")
    model = record.text("model")
    apart = None
    if kind is not None and kind not in _OURS:
        apart = "of another product"
    elif record.flag("batch"):
        apart = BATCH
    elif record.count("input_tokens") is None:
        raise record.refuse("input_tokens", "is missing")
    return Line(
        start=within_a_day(times, "end_time", start, end),
        label=model or kind or "all",
        model=model if apart is None else None,
        apart=apart,
        input_tokens=record.count("input_tokens"),
        # Embeddings have no output.
        output_tokens=record.count("output_tokens") or 0,
        requests=record.count("num_model_requests"),
        dimensions=record.dimensions(DIMENSIONS),
    )
