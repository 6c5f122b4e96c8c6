"""
Tokens used by one attempt.

Providers disagree on what "input tokens" means; a protocol module turns its own words into this one form, so that
prices, counters and reports never have to ask who said it. A figure the provider did not give is None: absent is not
zero, and adding absent to something stays honest by keeping the something.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import msgspec


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """Two totals in tokens, each with the parts it contains, and what is billed apart from tokens."""

    #: All input, cached parts included.
    input_total: int | None = None
    cache_read: int | None = None
    cache_write_5m: int | None = None
    cache_write_1h: int | None = None
    #: All output, reasoning included.
    output_total: int | None = None
    reasoning: int | None = None
    #: Parts of the input that are no text, cached ones included; and which of the tokens read from the cache are such.
    input_image: int | None = None
    input_audio: int | None = None
    input_video: int | None = None
    cache_read_image: int | None = None
    cache_read_audio: int | None = None
    #: Parts of the output that are no text.
    output_image: int | None = None
    output_audio: int | None = None
    #: What is billed by the piece and not by the token, by its kind: "web_search", "file_search". The last field.
    units: Mapping[str, int] | None = None

    def merge(self, later: Usage) -> Usage:
        """
        The usage after a later report of the same attempt: reports are cumulative, so the last one wins, field by
        field; an absent or zero figure never overwrites one that was given. A zero where nothing was given is kept: an
        answer without a token has cost nothing but its input, and that is known.
        """
        if self is NOTHING:
            return later
        return Usage(
            **{name: _later(getattr(self, name), getattr(later, name)) for name in COUNTS},
            units=_each(self.units, later.units, _later),
        )

    def plus(self, other: Usage) -> Usage:
        """What two calls used together."""
        return Usage(
            **{name: _sum(getattr(self, name), getattr(other, name)) for name in COUNTS},
            units=_each(self.units, other.units, _sum),
        )


#: The fields that are a number of tokens.
COUNTS = tuple(name for name in Usage.__struct_fields__ if name != "units")

#: Nothing reported yet.
NOTHING = Usage()


def _later(given: int | None, later: int | None) -> int | None:
    return later if later or given is None else given


def _sum(one: int | None, other: int | None) -> int | None:
    return other if one is None else one if other is None else one + other


def _each(
    one: Mapping[str, int] | None, other: Mapping[str, int] | None, joined: Callable[[int, int], int | None]
) -> Mapping[str, int] | None:
    if not one or not other:
        return one or other
    return {kind: joined(one.get(kind, 0), other.get(kind, 0)) or 0 for kind in {**one, **other}}
