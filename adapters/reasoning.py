"""
How hard a model is to think, in the two ways providers ask: a word of effort, or a budget of tokens.

The figures are the ones Gemini's own compatible endpoint uses for the words
(https://ai.google.dev/gemini-api/docs/openai#thinking), so that a request means the same by both roads. A word that is
not in the list here has no figure: what it means only its own provider knows.
"""

from __future__ import annotations

from collections.abc import Sequence

#: From the least to the most, of all providers.
WORDS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
#: With these a caller leaves it to the provider.
LEFT_TO_PROVIDER = frozenset({"auto", "default"})

_MOST = 24576
_BUDGETS = {"none": 0, "minimal": 1024, "low": 1024, "medium": 8192, "high": _MOST, "xhigh": _MOST, "max": _MOST}


def budget_of(effort: str) -> int | None:
    """Tokens for a word of effort, 0 for "none". None for a word that is none of `WORDS`."""
    return _BUDGETS.get(effort)


def is_lessened(effort: str) -> bool:
    """The word asks for more than its budget says."""
    return effort in {"xhigh", "max"}


def within(budget: int, limit: int | None, *, least: int) -> int:
    """
    A budget that we made, held to half of the limit of output tokens that it counts against, so that there is room for
    an answer. `least`: what every model takes; it is never held below that.
    """
    return budget if limit is None else min(budget, max(limit // 2, least))


def nearest(effort: str, known: Sequence[str]) -> str:
    """The word of a provider's, which are in order, that comes nearest; a word that is none of `WORDS` stays."""
    if effort in known or effort not in WORDS:
        return effort
    above = [word for word in known if WORDS.index(word) > WORDS.index(effort)]
    return above[0] if above else known[-1]


def effort_of(budget: int) -> str:
    """The least effort whose budget holds so many tokens; "none" for 0, "high" for all above."""
    if budget <= 0:
        return "none"
    return next((word for word in ("low", "medium") if budget <= _BUDGETS[word]), "high")
