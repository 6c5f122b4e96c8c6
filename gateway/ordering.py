"""
In which order the routes of a model are tried, and what is remembered of how quickly each began to answer.

Pure: an order follows from the candidates, and a drawn one from a seed as well, so that it can be told again.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from decimal import Decimal
from typing import Final

import msgspec

from gateway.call import Order

#: After so long an observation counts for half of what a new one does.
_HALF_LIFE_S: Final = 60.0
#: Without an answer for so long, a route is one that nobody has tried: it may be quick again.
_FORGOTTEN_S: Final = 600.0


class Candidate(msgspec.Struct, frozen=True, kw_only=True):
    """A route as its place in the order depends on it."""

    route_id: str
    #: Tried after all that are none, whatever the order.
    fallback: bool
    #: About what this request costs there, in USD; None where no price is known.
    cost: Decimal | None = None
    #: Seconds to the first content, of late; None where nobody has tried.
    latency_s: float | None = None
    weight: float = 1.0


def ordered(order: Order, candidates: Sequence[Candidate], seed: str) -> list[int]:
    """The places of the candidates, first choice first."""
    places = range(len(candidates))
    match order:
        case Order.PRIORITY:
            return sorted(places, key=lambda at: candidates[at].fallback)
        case Order.COST:
            return sorted(places, key=lambda at: (candidates[at].fallback, *_unknown_last(candidates[at].cost)))
        case Order.LATENCY:
            return sorted(places, key=lambda at: (candidates[at].fallback, candidates[at].latency_s or 0.0))
        case Order.WEIGHTED:
            draws = _draws(candidates, seed)
            return sorted(places, key=lambda at: (candidates[at].fallback, draws[at]))


def _unknown_last(cost: Decimal | None) -> tuple[bool, Decimal]:
    return cost is None, Decimal(0) if cost is None else cost


def worths(candidates: Sequence[Candidate]) -> list[float]:
    """
    What each candidate counts for in a draw: its weight, times how cheap, times how quick it is beside the best.

    One that costs twice as much as the cheapest counts for a half. What is not known of one counts like the worst that
    is known, and for nothing where it is known of none. Free ones share the place of the cheapest; all that cost
    something then count for a hundredth.
    """
    cheap = _relative([None if c.cost is None else float(c.cost) for c in candidates])
    quick = _relative([c.latency_s for c in candidates])
    return [c.weight * p * q for c, p, q in zip(candidates, cheap, quick, strict=True)]


def _relative(figures: Sequence[float | None]) -> list[float]:
    known = [figure for figure in figures if figure is not None]
    if not known:
        return [1.0] * len(figures)
    best, worst = min(known), max(known)
    return [_beside(best, worst if figure is None else figure) for figure in figures]


def _beside(best: float, figure: float) -> float:
    if figure <= best:
        return 1.0
    return max(best / figure, 0.01)


def _draws(candidates: Sequence[Candidate], seed: str) -> list[float]:
    """Exponential with the worth as its rate: the smallest is each one's with a chance in proportion to its worth."""
    return [
        math.inf if worth <= 0 else -math.log(_uniform(seed, candidate.route_id)) / worth
        for candidate, worth in zip(candidates, worths(candidates), strict=True)
    ]


def _uniform(seed: str, route_id: str) -> float:
    """Above 0, at most 1."""
    digest = hashlib.sha256(f"{seed} {route_id}".encode()).digest()
    return (int.from_bytes(digest[:7]) + 1) / 2**56


class _Average(msgspec.Struct):
    value: float
    weight: float
    at: float


class Latencies:
    """
    How long the routes took to their first content, of late: an average in which an observation of a minute ago counts
    for half. This process's own; one step for each request, and one entry for each route and kind of call.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._averages: dict[tuple[str, bool], _Average] = {}

    def observe(self, route_id: str, seconds: float, *, streamed: bool) -> None:
        """A plain answer comes when all of it is there, so that the two kinds are not mixed."""
        now = self._clock()
        known = self._averages.get((route_id, streamed))
        if known is None:
            self._averages[route_id, streamed] = _Average(seconds, 1.0, now)
            return
        left = known.weight * 0.5 ** ((now - known.at) / _HALF_LIFE_S)
        known.value = (known.value * left + seconds) / (left + 1.0)
        known.weight = left + 1.0
        known.at = now

    def seconds(self, route_id: str, *, streamed: bool) -> float | None:
        known = self._averages.get((route_id, streamed))
        if known is None or self._clock() - known.at > _FORGOTTEN_S:
            return None
        return known.value
