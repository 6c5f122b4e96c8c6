"""Published prices change with each release: every expected figure here is asked of the library itself."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from decimal import Decimal

import genai_prices
import pytest
from genai_prices import data_snapshot
from genai_prices.types import ModelPrice, StartDateConstraint, Tier, TieredPrices

from metering import library_prices
from metering.cost import SCALE, Ceiling, Reason, State, cost, upper_bound
from metering.library_prices import Library
from metering.prices import Banded, KnownPrice, Price
from metering.usage import Usage

AT = datetime(2026, 6, 1, 12, tzinfo=UTC)
OPENAI = "https://api.openai.com/v1"
ANTHROPIC = "https://api.anthropic.com"
GEMINI = "https://generativelanguage.googleapis.com/v1beta"
OPENROUTER = "https://openrouter.ai/api/v1"

USAGE = Usage(input_total=1000, cache_read=300, cache_write_5m=200, cache_write_1h=100, output_total=400, reasoning=150)


@pytest.fixture(scope="module")
def library() -> Library:
    return Library()


#: Of each kind, where the vendor tells them apart; the cached ones are told, too.
MIXED = Usage(
    input_total=9000,
    cache_read=900,
    output_total=4000,
    reasoning=150,
    input_image=2000,
    input_audio=3000,
    input_video=400,
    cache_read_image=200,
    cache_read_audio=300,
    output_image=600,
    output_audio=700,
)


def counted(usage: Usage) -> genai_prices.Usage:
    return genai_prices.Usage(
        input_tokens=usage.input_total,
        cache_read_tokens=usage.cache_read or 0,
        cache_write_tokens=(usage.cache_write_5m or 0) + (usage.cache_write_1h or 0),
        cache_write_5m_tokens=usage.cache_write_5m or 0,
        cache_write_1h_tokens=usage.cache_write_1h or 0,
        output_tokens=usage.output_total,
        output_reasoning_tokens=usage.reasoning or 0,
        input_image_tokens=usage.input_image or 0,
        input_audio_tokens=usage.input_audio or 0,
        input_video_tokens=usage.input_video or 0,
        cache_image_read_tokens=usage.cache_read_image or 0,
        cache_audio_read_tokens=usage.cache_read_audio or 0,
        output_image_tokens=usage.output_image or 0,
        output_audio_tokens=usage.output_audio or 0,
        web_searches=(usage.units or {}).get("web_search", 0),
        storage_searches=(usage.units or {}).get("file_search", 0),
    )


def charged(usage: Usage, price: KnownPrice) -> Decimal:
    usd = cost(usage, price).usd
    assert usd is not None
    return usd


def rounded(amount: Decimal) -> Decimal:
    return amount.quantize(Decimal(1).scaleb(-SCALE))


@pytest.mark.parametrize("input_total", [1000, 199_999, 200_000, 200_001, 272_000, 272_001, 900_000])
@pytest.mark.parametrize(
    ("base_url", "model"),
    [
        (OPENAI, "gpt-4o"),
        (OPENAI, "gpt-4o-mini-2024-07-18"),
        (OPENAI, "gpt-5"),
        (ANTHROPIC, "claude-sonnet-4-5"),
        (ANTHROPIC, "claude-opus-4-1"),
        (GEMINI, "gemini-2.5-pro"),
        (GEMINI, "gemini-2.5-flash"),
        ("https://api.groq.com/openai/v1", "llama-3.3-70b-versatile"),
        ("https://api.deepseek.com", "deepseek-chat"),
        ("https://mine.openai.azure.com/openai/v1", "gpt-4o"),
    ],
)
def test_a_well_known_model_costs_what_the_library_says(library, base_url, model, input_total):
    usage = Usage(input_total=input_total, cache_read=900, output_total=400, reasoning=150)
    expected = genai_prices.calc_price(
        counted(usage), model, provider_api_url=base_url, genai_request_timestamp=AT
    ).total_price
    charge = cost(usage, library.price(base_url, model, AT))
    assert charge.state is State.CHARGED
    assert charge.usd == rounded(expected) > 0
    assert charge.price_version == f"genai-prices:{genai_prices.__version__}"


def every_published_price() -> list[ModelPrice]:
    prices = []
    for provider in data_snapshot.get_snapshot().providers:
        for model in provider.models:
            dated = model.prices
            prices += [dated] if isinstance(dated, ModelPrice) else [one.prices for one in dated]
    return prices


def test_every_published_price_agrees_with_the_librarys_own_calculation(library):
    """What is read out of an entry (flat prices, bands) must stay what the library means by it, for all it has."""
    flat = tiered = 0
    for published in every_published_price():
        price = library._known(vars(published))
        if price is None:
            continue
        flat, tiered = flat + isinstance(price, Price), tiered + isinstance(price, Banded)
        assert cost(USAGE, price).usd == rounded(published.calc_price(counted(USAGE))["total_price"]), published
        for above, band in price.bands if isinstance(price, Banded) else ():
            usage = Usage(input_total=above + 1, cache_read=above // 3, output_total=77, reasoning=7)
            assert cost(usage, band).usd == cost(usage, price).usd, published
    assert flat > 1000
    assert tiered > 50


def test_a_bound_is_never_below_the_charge_at_any_size(library):
    for published in every_published_price():
        price = library._known(vars(published))
        if not isinstance(price, Banded):
            continue
        for above, _ in price.bands:
            for total in (above or 1, above + 1):
                usage = Usage(input_total=total, cache_write_1h=total // 2, output_total=50, reasoning=20)
                bound = upper_bound(price, Ceiling(input_tokens=total, output_tokens=50))
                assert bound is not None
                assert charged(usage, price) <= bound


def test_a_price_without_a_token_price_is_unknown_and_not_zero(library):
    for published in every_published_price():
        if not {"input_mtok", "output_mtok"} <= {key for key, value in vars(published).items() if value is not None}:
            assert library._known(vars(published)) is None


def test_embeddings_have_no_output_to_pay_for(library):
    price = library.price("https://api.openai.com/v1", "text-embedding-3-small", datetime.now(UTC))
    assert price is not None
    assert (price.input > 0, price.output) == (True, 0)


def test_a_model_marked_free_by_its_vendor_costs_zero(library):
    free = next(
        model.id
        for provider in data_snapshot.get_snapshot().providers
        if provider.id == "openrouter"
        for model in provider.models
        if model.id.endswith(":free") and isinstance(model.prices, ModelPrice) and not vars(model.prices)
    )
    charge = cost(Usage(input_total=10, output_total=10), library.price(OPENROUTER, free, AT))
    assert (charge.state, charge.usd) == (State.CHARGED, Decimal(0))


@pytest.mark.parametrize(
    ("base_url", "model"),
    [
        (OPENAI, "no-such-model"),
        ("http://127.0.0.1:8000/v1", "gpt-4o"),
        ("https://llm.corp.example/v1", "gpt-4o"),
        ("https://api.groq.com/openai/v1", "whisper-large-v3"),
    ],
    ids=["unknown model", "local address", "unknown address", "priced by the hour"],
)
def test_what_the_library_does_not_price_is_unknown(library, base_url, model):
    assert library.price(base_url, model, AT) is None


def test_a_tiered_price_jumps_for_the_whole_request(library):
    price = library.price(GEMINI, "gemini-2.5-pro", AT)
    assert isinstance(price, Banded)
    below, beyond = (charged(Usage(input_total=n, output_total=0), price) for n in (200_000, 200_001))
    assert beyond > below * Decimal("1.5")


def test_the_price_is_the_one_in_force_at_the_time(library):
    name, dated, start = next(
        (model.id, model.prices, last.start_date)
        for provider in data_snapshot.get_snapshot().providers
        if provider.id == "openai"
        for model in provider.models
        if not isinstance(model.prices, ModelPrice)
        and len(model.prices) == 2
        and isinstance(last := model.prices[-1].constraint, StartDateConstraint)
    )
    midnight = datetime(start.year, start.month, start.day, tzinfo=UTC)
    assert library.price(OPENAI, name, midnight) == library._known(vars(dated[1].prices))
    assert library.price(OPENAI, name, midnight - timedelta(seconds=1)) == library._known(vars(dated[0].prices))


def test_names_made_up_by_callers_do_not_fill_the_memory(library, monkeypatch):
    monkeypatch.setattr(library_prices, "LOOKUPS", 8)
    before = len(library._snapshot._lookup_cache), len(library._snapshot._provider_misses)
    for number in range(30):
        library.price(OPENAI, f"gpt-4o-made-up-{number}", AT)
        library.price("http://127.0.0.1:1/v1", f"made-up-{number}", AT)
    assert len(library._models) <= 8
    assert len(library._snapshot._lookup_cache) == before[0]
    assert len(library._snapshot._provider_misses) <= before[1] + 1


def test_tiers_with_different_starts_become_bands_of_their_union(library):
    published = ModelPrice(
        input_mtok=TieredPrices(base=Decimal(1), tiers=[Tier(start=100, price=Decimal(2))]),
        output_mtok=TieredPrices(base=Decimal(3), tiers=[Tier(start=200, price=Decimal(4))]),
    )
    price = library._known(vars(published))
    assert [(above, band.input, band.output) for above, band in price.bands] == [(0, 1, 3), (100, 2, 3), (200, 2, 4)]


def test_what_is_no_text_costs_what_the_library_says(library):
    compared = 0
    for published in every_published_price():
        price = library._known(vars(published))
        if isinstance(price, Price) and price.media is not None:
            assert cost(MIXED, price).usd == rounded(published.calc_price(counted(MIXED))["total_price"]), published
            compared += 1
    assert compared > 10


@pytest.mark.parametrize("unit", ["web_search", "file_search"])
def test_searches_cost_what_the_library_says_and_where_it_says_nothing_they_are_unknown(library, unit):
    usage = Usage(input_total=1000, output_total=50, units={unit: 3})
    known = unknown = 0
    for published in every_published_price():
        price = library._known(vars(published))
        if price is None:
            continue
        charge = cost(usage, price)
        if charge.usd is None:
            assert charge.reason is Reason.UNPRICED_UNITS
            unknown += 1
        else:
            assert charge.usd == rounded(published.calc_price(counted(usage))["total_price"]), published
            known += 1
    assert min(known, unknown) > 10


def test_each_service_tier_costs_what_the_library_says(library):
    """Also those that begin on a day, and where the model is listed under the provider that is called only."""
    tiers = set()
    for provider in data_snapshot.get_snapshot().providers:
        for model in provider.models:
            at = datetime(2026, 12, 1, tzinfo=UTC)
            price = library._price(library_prices.Found(model, own=True), model.id, at)
            if price is None:
                continue
            for tier in price.service_tiers:
                context = {"batch": {"processing": "batch"}}.get(tier, {"service_tier": tier})
                if provider.id == "anthropic" and tier == "fast":
                    context = {"speed": "fast"}
                expected = model.get_prices(at, context).calc_price(counted(USAGE))["total_price"]
                charge = cost(USAGE, price, served_tier=tier)
                assert charge.usd == rounded(expected), (provider.id, model.id, tier)
                tiers.add((provider.id, tier))
            assert library._price(library_prices.Found(model, own=False), model.id, at).service_tiers == {}
    assert {("openai", "flex"), ("openai", "priority"), ("openai", "batch"), ("anthropic", "batch")} <= tiers


def test_a_part_that_no_usage_tells_apart_makes_the_price_unknown(library):
    published = ModelPrice(input_mtok=Decimal(1), output_mtok=Decimal(2), output_citation_mtok=Decimal(2))
    assert library._known(vars(published)) is None
