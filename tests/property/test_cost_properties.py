from __future__ import annotations

from decimal import Decimal

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from metering.cost import Ceiling, Flag, Reason, State, cost, unknown, upper_bound
from metering.prices import Price, configured_price
from metering.usage import Usage

TOKENS = st.integers(0, 10**9)
#: Up to 6 decimals, for which every amount is exact at the scale.
RATES = st.integers(0, 10**9).map(lambda millionths: f"{Decimal(millionths).scaleb(-6):f}")
FINE_RATES = st.integers(0, 10**15).map(lambda part: f"{Decimal(part).scaleb(-12):f}")
FIELDS = ("cache_read", "cache_write_5m", "cache_write_1h", "reasoning", "per_request")


@st.composite
def prices(draw, rates=RATES) -> Price:
    table = {"input": draw(rates), "output": draw(rates)}
    table |= {name: draw(rates) for name in draw(st.sets(st.sampled_from(FIELDS)))}
    price = configured_price(table)
    assert isinstance(price, Price)
    return price


@st.composite
def complete(draw) -> Usage:
    """A usage whose parts fit, with an input."""
    uncached, read, write_5m, write_1h, plain, reasoning = (draw(TOKENS) for _ in range(6))
    return Usage(
        input_total=max(1, uncached + read + write_5m + write_1h),
        cache_read=read,
        cache_write_5m=write_5m,
        cache_write_1h=write_1h,
        output_total=plain + reasoning,
        reasoning=reasoning,
    )


COUNTS = st.none() | st.integers(-5, 10**13)
ANY_USAGE = st.builds(
    Usage,
    input_total=COUNTS,
    cache_read=COUNTS,
    cache_write_5m=COUNTS,
    cache_write_1h=COUNTS,
    output_total=COUNTS,
    reasoning=COUNTS,
)


def charged(usage: Usage, price: Price) -> Decimal:
    usd = cost(usage, price).usd
    assert usd is not None
    return usd


@given(prices(), complete(), complete())
def test_cost_is_additive_over_disjoint_buckets(price, one, other):
    both = charged(one.plus(other), price)
    assert both + price.per_request == charged(one, price) + charged(other, price)


@given(prices(), complete())
def test_a_cost_is_the_sum_of_its_buckets(price, usage):
    def rate(*names: str) -> Decimal:
        return next(rate for name in names if isinstance(rate := getattr(price, name), Decimal))

    uncached = usage.input_total - usage.cache_read - usage.cache_write_5m - usage.cache_write_1h
    millionths = (
        uncached * rate("input")
        + usage.cache_read * rate("cache_read", "input")
        + usage.cache_write_5m * rate("cache_write_5m", "input")
        + usage.cache_write_1h * rate("cache_write_1h", "cache_write_5m", "input")
        + (usage.output_total - usage.reasoning) * rate("output")
        + usage.reasoning * rate("reasoning", "output")
    )
    assert charged(usage, price) == millionths / 10**6 + price.per_request


@given(prices(FINE_RATES), complete(), TOKENS, TOKENS)
def test_more_tokens_never_cost_less(price, usage, more_in, more_out):
    more = usage.plus(Usage(input_total=more_in, output_total=more_out))
    assert charged(more, price) >= charged(usage, price)


@given(st.none() | prices(FINE_RATES), ANY_USAGE, st.none() | st.decimals(allow_nan=True, allow_infinity=True))
def test_an_amount_is_known_and_plausible_or_unknown_with_a_reason(price, usage, reported):
    charge = cost(usage, price, reported)
    if charge.state is State.UNKNOWN:
        assert charge.usd is None
        assert charge.reason is not None
    else:
        assert charge.state is State.CHARGED
        assert charge.usd is not None
        assert 0 <= charge.usd < 10**9
        assert charge.usd.as_tuple().exponent == -12


@given(prices(FINE_RATES), ANY_USAGE)
def test_a_charge_of_zero_means_that_the_tokens_are_free_or_too_few_for_the_scale(price, usage):
    charge = cost(usage, price)
    if charge.usd == 0:
        known = Decimal(usage.input_total or 0) + Decimal(usage.output_total or 0)
        rates = [rate for name in ("input", "output", *FIELDS) if (rate := getattr(price, name)) is not None]
        assert min(rates) * known < Decimal("0.000001") or min(rates) == 0


@given(prices(FINE_RATES), complete(), TOKENS, TOKENS)
def test_a_bound_is_never_below_the_charge(price, usage, spare_in, spare_out):
    limits = Ceiling(input_tokens=usage.input_total + spare_in, output_tokens=usage.output_total + spare_out)
    usd = charged(usage, price)
    silent = msgspec.structs.replace(usage, output_total=None, reasoning=None)
    for bound in (
        upper_bound(price, limits),
        cost(silent, price, limits=limits).upper_bound,
        unknown(Reason.NO_TERMINAL, price, limits, silent).upper_bound,
    ):
        assert bound is None or bound >= usd


@given(prices(), complete(), TOKENS)
def test_parts_beyond_their_totals_cost_no_more_than_the_dearest_rate_for_the_total(price, usage, beyond):
    twisted = msgspec.structs.replace(usage, cache_read=usage.input_total + beyond + 1)
    assert Flag.CACHE_EXCEEDS_INPUT in cost(twisted, price).flags
    bound = upper_bound(price, Ceiling(input_tokens=usage.input_total, output_tokens=usage.output_total))
    assert bound is not None
    assert 0 <= charged(twisted, price) <= bound
