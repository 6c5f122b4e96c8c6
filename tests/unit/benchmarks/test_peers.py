"""Which way round the ratios of other gateways are."""

from __future__ import annotations

import pytest

from tests.benchmarks.load import Measured
from tests.benchmarks.peers import LITELLM, SCENARIOS, _rows, _same, _targets


def one(place: str, *, cpu_s: float, count: int, characters: int = 5) -> Measured:
    return Measured(
        count=count,
        wall_s=1.0,
        cpu_s={place: cpu_s, "load": 0.1, "machine": 1.0},
        p50_ms=1.0,
        p99_ms=2.0,
        characters=characters,
    )


def test_a_peer_that_costs_more_and_does_less_has_large_ratios() -> None:
    # Of a request: 1 ms against 40, in a round 1 ms against 20.
    ours = [one("gateway", cpu_s=0.1, count=100)] * 3
    theirs = [one(LITELLM, cpu_s=cpu_s, count=10) for cpu_s in (0.4, 0.2, 0.4)]
    measured = {
        (kind, concurrency, place): rounds
        for kind, concurrency in SCENARIOS
        for place, rounds in (("gateway", ours), (LITELLM, theirs))
    }
    row = next(row for row in _rows(measured, ("gateway", LITELLM)) if row.place == LITELLM)
    plain, streamed = _targets(measured)

    assert row.cpu_ratio == pytest.approx(40.0) == plain.measured
    assert row.rate_ratio == pytest.approx(10.0) == streamed.measured
    assert [plain.low, plain.high] == pytest.approx([20.0, 40.0])
    assert plain.reached
    assert not streamed.reached


def test_gateways_that_gave_different_answers_are_not_compared() -> None:
    with pytest.raises(RuntimeError, match="another answer"):
        _same([one("gateway", cpu_s=1, count=1), one(LITELLM, cpu_s=1, count=1, characters=4)])
