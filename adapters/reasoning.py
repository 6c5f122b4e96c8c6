"""
How hard a model is to think, in the two ways providers ask: a word of effort, or a budget of tokens.

The figures are the ones Gemini's own compatible endpoint uses for the words
(https://ai.google.dev/gemini-api/docs/openai#thinking), so that a request means the same by both roads.
"""

from __future__ import annotations

_BUDGETS = {"none": 0, "minimal": 1024, "low": 1024, "medium": 8192, "high": 24576}


def budget_of(effort: str) -> int:
    """Tokens for a word of effort, 0 for "none". A word of a provider's own, say "xhigh" or "max", is above "high"."""
    return _BUDGETS.get(effort, _BUDGETS["high"])


def effort_of(budget: int) -> str:
    """The least effort whose budget holds so many tokens; "none" for 0, "high" for all above."""
    if budget <= 0:
        return "none"
    return next((word for word in ("low", "medium") if budget <= _BUDGETS[word]), "high")
