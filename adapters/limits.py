"""
What a provider says is left of its rate limits, read from the headers of an answer.

A limit in our configuration can be higher than what the account really has, and others may use the same account. The
provider knows, and says so with every answer: what it has left can only lower what we still give out.

Read is what a provider documents, or what was recorded of it:

    OpenAI      x-ratelimit-remaining-requests, -tokens, -project-tokens
                https://platform.openai.com/docs/guides/rate-limits#rate-limits-in-headers
    Azure       the first two, recorded; -1 and 0 where it does not know
                https://learn.microsoft.com/en-us/answers/questions/5625878
    Groq        x-ratelimit-remaining-requests (of the day), -tokens (of the minute)
                https://console.groq.com/docs/rate-limits
    Cerebras    x-ratelimit-remaining-requests-day, -tokens-minute
                https://inference-docs.cerebras.ai/support/rate-limits
    Mistral     x-ratelimitbysize-remaining-minute (tokens), recorded; x-ratelimit-remaining-req-minute and
                -tokens-minute, in logs that its users published
    Anthropic   anthropic-ratelimit-requests-remaining, -tokens-remaining (rounded to a thousand)
                https://docs.anthropic.com/en/api/rate-limits

What is left of a day bounds a minute too. Not read: what is left of a second (Together's `x-ratelimit-remaining`,
https://docs.together.ai/docs/rate-limits), which says nothing of a minute; Anthropic's input and output tokens apart,
for our allowance is of both together; and every `reset`, for a bucket fills by its own rate.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import msgspec

_REQUESTS = (
    "x-ratelimit-remaining-requests",
    "x-ratelimit-remaining-requests-day",
    "x-ratelimit-remaining-req-minute",
    "anthropic-ratelimit-requests-remaining",
)
_TOKENS = (
    "x-ratelimit-remaining-tokens",
    "x-ratelimit-remaining-project-tokens",
    "x-ratelimit-remaining-tokens-minute",
    "x-ratelimitbysize-remaining-minute",
    "anthropic-ratelimit-tokens-remaining",
)
_NAMES = frozenset((*_REQUESTS, *_TOKENS))

#: More digits than any limit has are nonsense, and would not fit into the store.
_COUNT = re.compile(r"[0-9]{1,12}")
_AT_ONCE = re.compile(r"0(?:\.0*)?(?:ms|s)?")


class Remaining(msgspec.Struct, frozen=True, kw_only=True):
    """What the provider says is left. None where it does not say."""

    requests: int | None = None
    tokens: int | None = None
    #: When it said so, on the event loop's clock.
    told_at: float = 0.0


def remaining(headers: Mapping[str, str], told_at: float) -> Remaining | None:
    """None where nothing is said that makes sense. Of several figures for one thing the lowest counts."""
    if _NAMES.isdisjoint(headers):
        return None
    requests, tokens = _least(headers, _REQUESTS), _least(headers, _TOKENS)
    if requests is None and tokens is None:
        return None
    return Remaining(requests=requests, tokens=tokens, told_at=told_at)


def _least(headers: Mapping[str, str], names: Sequence[str]) -> int | None:
    return min((left for name in names if (left := _count(headers, name)) is not None), default=None)


def _count(headers: Mapping[str, str], name: str) -> int | None:
    text = headers.get(name)
    if text is None or _COUNT.fullmatch(text) is None:
        return None
    left = int(text)
    if left == 0 and _AT_ONCE.fullmatch(headers.get(name.replace("remaining", "reset"), "")) is not None:
        # Azure was recorded to say so beside an error: nothing left, and full again at once.
        return None
    return left
