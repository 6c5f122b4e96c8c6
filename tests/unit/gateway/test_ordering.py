"""Orders of routes, and what is remembered of how quickly they answered."""

from __future__ import annotations

from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.call import Order
from gateway.ordering import Candidate, Latencies, ordered, worths

CANDIDATES = st.lists(
    st.builds(
        Candidate,
        route_id=st.text("ab", max_size=3),
        fallback=st.booleans(),
        cost=st.none() | st.decimals(0, 10, places=4),
        latency_s=st.none() | st.floats(0, 60),
        weight=st.floats(0, 10),
    ),
    max_size=6,
)


@given(CANDIDATES, st.sampled_from(Order), st.text(max_size=4))
def test_an_order_leaves_nobody_out_and_puts_the_fallback_last(
    candidates: list[Candidate], order: Order, seed: str
) -> None:
    places = ordered(order, candidates, seed)
    assert sorted(places) == list(range(len(candidates)))
    assert [candidates[at].fallback for at in places] == sorted(c.fallback for c in candidates)
    assert places == ordered(order, candidates, seed)


@pytest.mark.parametrize("order", [Order.PRIORITY, Order.COST, Order.LATENCY])
def test_ties_keep_the_configured_order(order: Order) -> None:
    same = [Candidate(route_id=name, fallback=False, cost=Decimal(1), latency_s=1.0) for name in "zab"]
    assert ordered(order, same, "seed") == [0, 1, 2]


def test_twice_the_price_is_half_the_chance() -> None:
    cheap, dear = (Candidate(route_id=name, fallback=False, cost=Decimal(cost)) for name, cost in (("a", 1), ("b", 2)))
    assert worths([cheap, dear]) == [1.0, 0.5]
    first = [ordered(Order.WEIGHTED, [cheap, dear], f"r{number}")[0] for number in range(3000)]
    assert 1850 < first.count(0) < 2150  # two of three


def test_what_is_not_known_counts_like_the_worst_that_is() -> None:
    made = [
        Candidate(route_id="a", fallback=False, latency_s=1.0),
        Candidate(route_id="b", fallback=False, latency_s=4.0),
        Candidate(route_id="c", fallback=False),
    ]
    assert worths(made) == [1.0, 0.25, 0.25]


def test_free_ones_leave_a_hundredth_to_the_others_and_no_weight_comes_last() -> None:
    free, paid = (Candidate(route_id=name, fallback=False, cost=Decimal(cost)) for name, cost in (("a", 0), ("b", 9)))
    assert worths([free, paid]) == [1.0, 0.01]
    none = Candidate(route_id="c", fallback=False, cost=Decimal(0), weight=0.0)
    assert all(ordered(Order.WEIGHTED, [none, paid], f"r{number}") == [1, 0] for number in range(100))


def test_a_minute_halves_what_an_observation_counts_for_and_ten_forget_it() -> None:
    now = 0.0
    latencies = Latencies(lambda: now)
    assert latencies.seconds("r", streamed=True) is None
    latencies.observe("r", 4.0, streamed=True)
    now = 60.0
    latencies.observe("r", 1.0, streamed=True)
    assert latencies.seconds("r", streamed=True) == pytest.approx((4.0 * 0.5 + 1.0) / 1.5)
    assert latencies.seconds("r", streamed=False) is None
    now = 661.0
    assert latencies.seconds("r", streamed=True) is None


@given(st.lists(st.tuples(st.floats(0, 100), st.floats(0, 500)), min_size=1, max_size=30))
def test_an_average_stays_among_what_was_seen(seen: list[tuple[float, float]]) -> None:
    now = 0.0
    latencies = Latencies(lambda: now)
    for seconds, later in seen:
        now += later
        latencies.observe("r", seconds, streamed=True)
    average = latencies.seconds("r", streamed=True)
    assert average is not None
    figures = [seconds for seconds, _ in seen]
    assert min(figures) - 1e-6 <= average <= max(figures) + 1e-6
