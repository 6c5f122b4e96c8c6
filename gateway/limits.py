"""
What a caller is told whose key, or whose session, has a limit in the way.

Admission says which limit it is and what has been used of it; here are the words. They name no other key, and no price.
"""

from __future__ import annotations

from typing import Final

from admission.lease import KeyLimit, Refusal, RefusalReason
from metering.cost import decimal_string

_RATES: Final = {
    "requests_per_minute": "makes as many requests a minute as it may",
    "tokens_per_minute": "uses as many tokens a minute as it may",
}
_PERIODS: Final = {
    "budget_day_usd": (
        "budget of the day of this API key",
        "The budget starts anew at midnight in the gateway's zone.",
    ),
    "budget_month_usd": (
        "budget of the month of this API key",
        "The budget starts anew with the next month, in the gateway's zone.",
    ),
    "budget_total_usd": ("total budget of this API key", "It does not start anew: an operator has to raise it."),
    "budget_session_usd": ("budget of this session", "It does not start anew: raise it, or begin another session."),
}


def told(refusal: Refusal) -> str | None:
    """None where it is not the key that is in the way."""
    limit = refusal.key_limit
    if limit is None:
        return None
    if refusal.reason is RefusalReason.NOT_BOUNDED:
        return (
            "this session has a budget, and nobody knows the most that the request can cost (cost_not_bounded): "
            "ask for a model whose price is known, and limit the answer"
        )
    if refusal.reason is RefusalReason.TOO_LARGE:
        return f"the request may use more tokens than this API key may in a minute (tokens_per_minute: {limit.most})"
    if limit.name == "concurrency":
        return (
            f"this API key has as many requests in the gateway at once as it may (concurrency: {limit.most}), waiting "
            "ones included"
        )
    if limit.name in _RATES:
        return f"this API key {_RATES[limit.name]} ({limit.name}: {limit.most})"
    return _budget(limit, over=refusal.reason is RefusalReason.BUDGET_EXCEEDED)


def _budget(limit: KeyLimit, *, over: bool) -> str:
    which, anew = _PERIODS[limit.name]
    unknown = f", {decimal_string(limit.unknown)} for attempts whose cost is not known" if limit.unknown else ""
    used = (
        f"{limit.name} is {decimal_string(limit.most)}: {decimal_string(limit.spent)} is spent{unknown}, "
        f"{decimal_string(limit.reserved)} is reserved for attempts at work, and this one may cost "
        f"{decimal_string(limit.wanted)}"
    )
    if over:
        return f"the {which} does not suffice ({used}). {anew}"
    return f"what is left of the {which} is reserved ({used}). When those have ended, more may be left."
