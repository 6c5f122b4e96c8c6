"""
Tokens used by one attempt.

Providers disagree on what "input tokens" means; a protocol module turns its own words into this one form, so that
prices, counters and reports never have to ask who said it. A figure the provider did not give is None: absent is not
zero, and adding absent to something stays honest by keeping the something.
"""

from __future__ import annotations

import msgspec


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """Two totals in tokens, each with the parts it contains."""

    #: All input, cached parts included.
    input_total: int | None = None
    cache_read: int | None = None
    cache_write_5m: int | None = None
    cache_write_1h: int | None = None
    #: All output, reasoning included.
    output_total: int | None = None
    reasoning: int | None = None
    #: What is billed apart from tokens and has no price here: searches that a tool of the provider's made. The charge
    #: of an attempt that has any is not known, unless the provider tells it.
    billed_units: int | None = None

    def merge(self, later: Usage) -> Usage:
        """
        The usage after a later report of the same attempt: reports are cumulative, so the last one wins, field by
        field; an absent or zero figure never overwrites one that was given. A zero where nothing was given is kept: an
        answer without a token has cost nothing but its input, and that is known.
        """
        return Usage(
            input_total=_later(self.input_total, later.input_total),
            cache_read=_later(self.cache_read, later.cache_read),
            cache_write_5m=_later(self.cache_write_5m, later.cache_write_5m),
            cache_write_1h=_later(self.cache_write_1h, later.cache_write_1h),
            output_total=_later(self.output_total, later.output_total),
            reasoning=_later(self.reasoning, later.reasoning),
            billed_units=_later(self.billed_units, later.billed_units),
        )


def _later(given: int | None, later: int | None) -> int | None:
    return later if later or given is None else given


#: Nothing reported yet.
NOTHING = Usage()
