"""Amounts here are worked out by hand from the price per million tokens, never by the code under test."""

from __future__ import annotations

from decimal import Decimal, localcontext

import msgspec
import pytest

from metering.cost import (
    LIMIT_TOKENS,
    MESSAGE_ALLOWANCE,
    REQUEST_ALLOWANCE,
    SCALE,
    UNBOUNDED,
    Ceiling,
    Charge,
    Flag,
    Reason,
    State,
    ceiling,
    cost,
    decimal_string,
    unknown,
    upper_bound,
    zero,
)
from metering.prices import Banded, Price, configured_price
from metering.usage import NOTHING, Usage


def price(**table: str) -> Price:
    made = configured_price(table)
    assert isinstance(made, Price)
    return made


PLAIN = price(input="2.50", output="10.00")
CACHED = price(input="3", output="15", cache_read="0.30", cache_write_5m="3.75", cache_write_1h="6")
REASONING = price(input="1", output="4", reasoning="8")
FREE = price(input="0", output="0")
PER_CALL = price(input="0", output="0", per_request="0.005")
FEE_AND_TOKENS = price(input="1", output="2", per_request="0.01")
INPUT_FREE = price(input="0", output="2")

HAND_PRICED = [
    ("one million each", PLAIN, Usage(input_total=1_000_000, output_total=1_000_000), "12.5"),
    ("one token each", PLAIN, Usage(input_total=1, output_total=1), "0.0000125"),
    ("an everyday request", PLAIN, Usage(input_total=1200, output_total=340), "0.0064"),
    ("an empty answer costs its input", PLAIN, Usage(input_total=400, output_total=0), "0.001"),
    (
        "cached at input price where it has none",
        PLAIN,
        Usage(input_total=1000, cache_read=900, output_total=0),
        "0.0025",
    ),
    (
        "reasoning at output price where it has none",
        PLAIN,
        Usage(input_total=2, output_total=100, reasoning=90),
        "0.001005",
    ),
    ("nothing cached", CACHED, Usage(input_total=1000, output_total=100), "0.0045"),
    ("read from cache", CACHED, Usage(input_total=1000, cache_read=900, output_total=100), "0.00207"),
    ("all read from cache", CACHED, Usage(input_total=1000, cache_read=1000, output_total=0), "0.0003"),
    ("written for five minutes", CACHED, Usage(input_total=1000, cache_write_5m=800, output_total=0), "0.0036"),
    ("written for an hour", CACHED, Usage(input_total=1000, cache_write_1h=800, output_total=0), "0.0054"),
    (
        "every part of the input at once",
        CACHED,
        Usage(input_total=1000, cache_read=400, cache_write_5m=300, cache_write_1h=200, output_total=10),
        "0.002895",
    ),
    (
        "an hour as five minutes where it has no price",
        price(input="3", output="15", cache_write_5m="3.75"),
        Usage(input_total=100, cache_write_1h=100, output_total=0),
        "0.000375",
    ),
    (
        "a cached read that is free",
        price(input="3", output="15", cache_read="0"),
        Usage(input_total=100, cache_read=90, output_total=0),
        "0.00003",
    ),
    ("parts that are absent", CACHED, Usage(input_total=10, output_total=2), "0.00006"),
    ("parts that are zero", CACHED, Usage(input_total=10, cache_read=0, output_total=2, reasoning=0), "0.00006"),
    ("reasoning dearer", REASONING, Usage(input_total=100, output_total=60, reasoning=50), "0.00054"),
    ("all reasoning", REASONING, Usage(input_total=100, output_total=60, reasoning=60), "0.00058"),
    ("reasoning not told", REASONING, Usage(input_total=100, output_total=60), "0.00034"),
    ("a free model", FREE, Usage(input_total=1000, output_total=1000), "0"),
    ("a free model that tells no usage", FREE, NOTHING, "0"),
    ("a fee for each call, no usage", PER_CALL, NOTHING, "0.005"),
    ("a fee beside tokens", FEE_AND_TOKENS, Usage(input_total=1000, output_total=500), "0.012"),
    ("free input not told", INPUT_FREE, Usage(output_total=500), "0.001"),
    (
        "four decimals are exact",
        price(input="0.0375", output="0.1501"),
        Usage(input_total=1, output_total=3),
        "0.0000004878",
    ),
    (
        "six decimals are exact",
        price(input="0.000001", output="0"),
        Usage(input_total=7, output_total=0),
        "0.000000000007",
    ),
    ("half rounds to even, down", price(input="0.0000005", output="0"), Usage(input_total=1, output_total=0), "0"),
    (
        "half rounds to even, up",
        price(input="0.0000005", output="0"),
        Usage(input_total=3, output_total=0),
        "0.000000000002",
    ),
    (
        "rounded once, not for each part",
        price(input="0.0000004", output="0.0000004"),
        Usage(input_total=1, output_total=1),
        "0.000000000001",
    ),
    (
        "more digits than a default context holds",
        price(input="999999.999999", output="0"),
        Usage(input_total=999_999_999, output_total=0),
        "999999998.999000000001",
    ),
]


@pytest.mark.parametrize(("rate", "usage", "usd"), [case[1:] for case in HAND_PRICED], ids=[c[0] for c in HAND_PRICED])
def test_costs_what_a_person_would_work_out(rate, usage, usd):
    charge = cost(usage, rate)
    assert charge.state is State.CHARGED
    assert charge.usd == Decimal(usd)
    assert charge.price_version == rate.version
    assert charge.flags == ()


def test_an_amount_does_not_depend_on_the_decimal_context_of_the_thread():
    with localcontext() as context:
        context.prec = 3
        assert cost(Usage(input_total=1_234_567, output_total=7), PLAIN).usd == Decimal("3.0864875")


UNKNOWN = [
    ("nobody has stated a price", None, Usage(input_total=10, output_total=10), Reason.NO_PRICE),
    ("nothing reported", PLAIN, NOTHING, Reason.NO_USAGE),
    ("zeros in place of a report", PLAIN, Usage(input_total=0), Reason.NO_USAGE),
    ("no output", PLAIN, Usage(input_total=10), Reason.PARTIAL_USAGE),
    ("no input", PLAIN, Usage(output_total=10), Reason.PARTIAL_USAGE),
    ("an input of zero", PLAIN, Usage(input_total=0, output_total=10), Reason.PARTIAL_USAGE),
    ("zero in both", PLAIN, Usage(input_total=0, output_total=0), Reason.PARTIAL_USAGE),
    ("a fee is known, tokens are not", FEE_AND_TOKENS, NOTHING, Reason.NO_USAGE),
    ("input free, output not told", INPUT_FREE, NOTHING, Reason.NO_USAGE),
    ("a negative count", PLAIN, Usage(input_total=10, output_total=-1), Reason.IMPLAUSIBLE),
    ("a negative part", PLAIN, Usage(input_total=10, cache_read=-1, output_total=1), Reason.IMPLAUSIBLE),
    ("an absurd count", PLAIN, Usage(input_total=LIMIT_TOKENS + 1, output_total=1), Reason.IMPLAUSIBLE),
    (
        "an absurd amount",
        price(input="1000", output="1"),
        Usage(input_total=LIMIT_TOKENS, output_total=1),
        Reason.IMPLAUSIBLE,
    ),
]


@pytest.mark.parametrize(("rate", "usage", "reason"), [case[1:] for case in UNKNOWN], ids=[case[0] for case in UNKNOWN])
def test_what_is_not_known_is_unknown_and_not_zero(rate, usage, reason):
    charge = cost(usage, rate)
    assert (charge.state, charge.usd, charge.reason) == (State.UNKNOWN, None, reason)
    assert charge.upper_bound is None


def test_cached_tokens_beyond_the_input_are_cut_and_flagged():
    charge = cost(Usage(input_total=100, cache_read=130, output_total=0), CACHED)
    assert charge.usd == Decimal("0.00003")
    assert charge.flags == (Flag.CACHE_EXCEEDS_INPUT,)


def test_the_dearest_parts_are_kept_when_cutting():
    usage = Usage(input_total=100, cache_read=100, cache_write_5m=50, cache_write_1h=70, output_total=0)
    assert cost(usage, CACHED).usd == Decimal("0.0005325")  # 70 at 6, 30 at 3.75


def test_reasoning_beyond_the_output_is_cut_and_flagged():
    charge = cost(Usage(input_total=100, output_total=10, reasoning=25), REASONING)
    assert charge.usd == Decimal("0.00018")
    assert charge.flags == (Flag.REASONING_EXCEEDS_OUTPUT,)


def test_what_the_provider_says_it_charged_wins_and_our_figure_is_kept():
    charge = cost(Usage(input_total=1200, output_total=340), PLAIN, Decimal("0.0061"))
    assert (charge.state, charge.usd, charge.price_version) == (State.CHARGED, Decimal("0.0061"), "reported")
    assert charge.list_usd == Decimal("0.0064")


@pytest.mark.parametrize("rate", [None, PLAIN], ids=["no price", "priced"])
def test_a_reported_cost_needs_neither_price_nor_usage(rate):
    charge = cost(NOTHING, rate, Decimal("0.25"))
    assert (charge.usd, charge.list_usd) == (Decimal("0.25"), None)


def test_a_reported_cost_of_zero_is_the_providers_word():
    assert cost(Usage(input_total=10, output_total=1), PLAIN, Decimal(0)).usd == 0


def test_a_reported_cost_is_rounded_to_the_scale():
    charge = cost(NOTHING, None, Decimal("0.00014310000000000001"))
    assert charge.usd is not None
    assert charge.usd == Decimal("0.0001431")
    assert charge.usd.as_tuple().exponent == -SCALE


@pytest.mark.parametrize("reported", ["-0.01", "NaN", "sNaN", "Infinity", "-Infinity", "1000000000", "1E400"])
def test_a_reported_cost_that_is_no_amount_is_ignored_and_flagged(reported):
    charge = cost(Usage(input_total=1200, output_total=340), PLAIN, Decimal(reported))
    assert charge.usd == Decimal("0.0064")
    assert charge.price_version == PLAIN.version
    assert charge.flags == (Flag.REPORTED_COST_INVALID,)


def test_a_missing_output_is_bounded_by_the_input_that_is_known():
    charge = cost(Usage(input_total=1000, cache_read=900), CACHED, limits=Ceiling(input_tokens=9000, output_tokens=200))
    assert charge.reason is Reason.PARTIAL_USAGE
    assert charge.upper_bound == Decimal("0.00357")  # 100 at 3, 900 at 0.30, 200 at 15


def test_a_missing_input_is_bounded_at_the_dearest_kind_of_input():
    charge = cost(Usage(output_total=100), CACHED, limits=Ceiling(input_tokens=1000, output_tokens=200))
    assert charge.upper_bound == Decimal("0.0075")  # 1000 at 6, 100 at 15


def test_an_attempt_without_terminal_is_bounded_by_what_it_could_use():
    limits = Ceiling(input_tokens=1000, output_tokens=200)
    charge = unknown(Reason.NO_TERMINAL, PLAIN, limits, Usage(input_total=300, output_total=1))
    assert (charge.state, charge.usd) == (State.UNKNOWN, None)
    assert charge.upper_bound == Decimal("0.0045")
    assert charge.price_version == PLAIN.version


def test_what_a_broken_stream_had_reported_raises_its_bound():
    limits = Ceiling(input_tokens=1000, output_tokens=200)
    charge = unknown(Reason.NO_TERMINAL, PLAIN, limits, Usage(input_total=2000, output_total=300))
    assert charge.upper_bound == Decimal("0.008")


def test_a_broken_stream_without_a_ceiling_has_no_bound():
    charge = unknown(Reason.NO_TERMINAL, PLAIN, UNBOUNDED, Usage(input_total=2000, output_total=300))
    assert charge.upper_bound is None


def test_an_unpriced_broken_stream_has_no_bound():
    charge = unknown(Reason.NO_TERMINAL, None, Ceiling(input_tokens=1, output_tokens=1))
    assert (charge.upper_bound, charge.price_version) == (None, None)


def test_a_bound_takes_the_dearer_of_output_and_reasoning():
    assert upper_bound(REASONING, Ceiling(input_tokens=100, output_tokens=50)) == Decimal("0.0005")


def test_a_bound_includes_the_fee():
    assert upper_bound(FEE_AND_TOKENS, Ceiling(input_tokens=1000, output_tokens=0)) == Decimal("0.011")


def test_a_bound_rounds_up():
    tiny = price(input="0.0000001", output="0")
    assert upper_bound(tiny, Ceiling(input_tokens=1, output_tokens=0)) == Decimal("1E-12")


def test_a_free_model_is_bounded_by_zero_whatever_it_uses():
    assert upper_bound(FREE, UNBOUNDED) == 0


def test_a_bound_beyond_belief_is_none():
    assert upper_bound(price(input="999999999", output="0"), Ceiling(input_tokens=10**9, output_tokens=0)) is None


def test_a_request_is_bounded_by_its_bytes_and_its_own_maximum():
    limits = ceiling(body_bytes=4000, messages=3, max_output_tokens=500, output_default=9999, choices=2)
    assert limits.input_tokens == 4000 + 3 * MESSAGE_ALLOWANCE + REQUEST_ALLOWANCE
    assert limits.output_tokens == 1000


def test_a_request_without_a_maximum_takes_the_configured_one():
    assert ceiling(body_bytes=1, messages=1, max_output_tokens=None, output_default=700).output_tokens == 700
    assert ceiling(body_bytes=1, messages=1, max_output_tokens=None, output_default=None).output_tokens is None


def test_a_request_with_input_nobody_can_measure_has_no_input_bound():
    limits = ceiling(body_bytes=1, messages=1, max_output_tokens=1, output_default=None, further_input_tokens=None)
    assert limits.input_tokens is None


TIERED = Banded(
    bands=((0, price(input="1", output="4")), (200_000, price(input="2", output="6"))), version="genai-prices:test"
)


@pytest.mark.parametrize(
    ("input_tokens", "usd"),
    [(200_000, "0.2004"), (200_001, "0.400602"), (None, None)],
    ids=["up to the tier", "beyond the tier", "input not known"],
)
def test_a_tiered_price_is_bounded_by_the_tiers_the_input_can_reach(input_tokens, usd):
    bound = upper_bound(TIERED, Ceiling(input_tokens=input_tokens, output_tokens=100))
    assert bound == (None if usd is None else Decimal(usd))


@pytest.mark.parametrize(
    "usage", [NOTHING, Usage(input_total=5), Usage(output_total=5)], ids=["none", "input", "output"]
)
def test_a_tiered_price_needs_both_counts(usage):
    assert cost(usage, TIERED).state is State.UNKNOWN


@pytest.mark.parametrize("reason", [Reason.NOT_DISPATCHED, Reason.ERROR_RESPONSE])
def test_a_zero_says_why(reason):
    charge = zero(reason)
    assert (charge.state, charge.usd, charge.reason) == (State.ZERO, Decimal(0), reason)


@pytest.mark.parametrize(
    "fields",
    [
        {"state": State.UNKNOWN, "usd": Decimal(0), "reason": Reason.NO_PRICE},
        {"state": State.CHARGED, "usd": None},
        {"state": State.ZERO, "usd": Decimal(0)},
    ],
    ids=["unknown with an amount", "charged without one", "zero without a reason"],
)
def test_a_charge_that_contradicts_itself_cannot_be_made(fields):
    with pytest.raises(AssertionError):
        Charge(**fields)


@pytest.mark.parametrize(
    ("amount", "text"),
    [("0E-12", "0"), ("0.000000003900", "0.0000000039"), ("100", "100"), ("12.500000000000", "12.5")],
)
def test_amounts_are_written_in_plain_digits(amount, text):
    assert decimal_string(Decimal(amount)) == text


def test_what_is_billed_apart_from_tokens_and_has_no_price_makes_the_charge_unknown_and_never_low():
    searched = Usage(input_total=10, output_total=5, units={"web_search": 3})
    charge = cost(searched, PLAIN, limits=Ceiling(input_tokens=100, output_tokens=100))
    assert (charge.state, charge.usd, charge.upper_bound) == (State.UNKNOWN, None, None)
    assert charge.reason is Reason.UNPRICED_UNITS
    assert unknown(Reason.NO_TERMINAL, PLAIN, Ceiling(input_tokens=9, output_tokens=9), searched).upper_bound is None
    assert cost(searched, PLAIN, Decimal("0.03")).usd == Decimal("0.03")
    assert cost(msgspec.structs.replace(searched, units={"web_search": 0}), PLAIN).state is State.CHARGED
