from __future__ import annotations

import subprocess
import sys
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import pytest

from metering.cost import State, cost
from metering.prices import Banded, KnownPrice, Price, PriceBook, PricedRoute, configured_price, usd
from metering.usage import Usage

AT = datetime(2026, 6, 1, 12, tzinfo=UTC)
OPENAI = "https://api.openai.com/v1"
A = configured_price({"input": "1", "output": "2"})
B = configured_price({"input": "3", "output": "4"})


class FakePriceList:
    """Knows one price for every model named `known`, and counts how it is used."""

    def __init__(self) -> None:
        self.opened = 0
        self.asked: list[tuple[str, str, datetime]] = []

    def open(self) -> FakePriceList:
        self.opened += 1
        return self

    def price(self, base_url: str, upstream_model: str, at: datetime) -> KnownPrice | None:
        self.asked.append((base_url, upstream_model, at))
        return B if upstream_model == "known" else None

    def context_window(self, base_url: str, upstream_model: str) -> int | None:
        return 4096 if upstream_model == "known" else None


def test_the_size_of_a_model_is_told_where_a_list_is_open_and_opens_none() -> None:
    prices = FakePriceList()
    book = PriceBook(models={"mine": A}, routes={}, published=prices.open)
    assert book.context_window("https://x", "known") is None
    assert prices.opened == 0
    book.price("p", "https://x", "known", "known", datetime.now(UTC))
    assert book.context_window("https://x", "known") == 4096
    assert book.context_window("https://x", "other") is None


@pytest.mark.parametrize(
    ("text", "amount"),
    [("2.50", "2.5"), ("0", "0"), ("10", "10"), ("0.000000000001", "1E-12"), ("999999999.999999999999", None)],
)
def test_plain_decimal_strings_are_amounts(text, amount):
    assert usd(text, name="input") == Decimal(amount or text)


@pytest.mark.parametrize(
    "given",
    [
        "-1", "-0", "+1", "NaN", "nan", "Infinity", "inf", "1e400", "1e2", "1000000000", "0.0000000000001", "", " 1",
        "1 ", "1\n", ".5", "1.", "1,5", "1_000", "0x10", "$2", "\u0661", "1" * 400, 2.5, 1e400, float("nan"), 2, True,
        None, ["1"],
    ],
    ids=repr,
)  # fmt: skip
def test_anything_else_is_refused_by_name(given):
    with pytest.raises(ValueError, match=r"^models\.x\.price\.input: .* is not an amount in USD") as refused:
        usd(given, name="models.x.price.input")
    assert len(str(refused.value)) < 300


def test_a_price_table_may_state_every_part():
    table = {
        "input": "3", "output": "15", "cache_read": "0.30", "cache_write_5m": "3.75", "cache_write_1h": "6",
        "reasoning": "16", "per_request": "0.01",
    }  # fmt: skip
    price = configured_price(table)
    assert {name: getattr(price, name) for name in table} == {name: Decimal(text) for name, text in table.items()}


def test_every_fault_of_a_table_is_reported_together():
    with pytest.raises(ValueError) as refused:
        configured_price({"input": "-1", "outptu": "2", "cache_read": 0.5})
    message = str(refused.value)
    assert "outptu: not a price" in message
    assert "output: missing" in message
    assert "input: '-1' is not an amount" in message
    assert "cache_read: a value of type float" in message


def test_the_version_follows_the_values_and_not_how_they_are_written():
    same = configured_price({"output": "2.000", "input": "1.0"})
    assert same.version == A.version
    assert A.version.startswith("config:")
    assert len({A.version, B.version, configured_price({"input": "2", "output": "1"}).version}) == 3


def test_a_free_part_is_another_version_than_an_absent_one():
    assert configured_price({"input": "1", "output": "2", "cache_read": "0"}).version != A.version


def test_a_price_for_the_route_wins_over_one_for_the_model():
    book = PriceBook(models={"gpt-4o": A}, routes={"azure/prod-4o": B}, published=FakePriceList().open)
    assert book.price("azure", "https://x.example", "gpt-4o", "prod-4o", AT) is B
    assert book.price("openai", OPENAI, "gpt-4o", "gpt-4o", AT) is A


def test_a_model_costs_the_same_when_pinned_to_its_provider():
    book = PriceBook(models={"gpt-4o": A}, routes={}, published=FakePriceList().open)
    assert book.price("openai", OPENAI, "openai/gpt-4o", "gpt-4o", AT) is A


def test_a_model_name_that_holds_a_slash_is_found_whole():
    book = PriceBook(models={"openai/gpt-oss-120b": A}, routes={}, published=FakePriceList().open)
    assert book.price("groq", OPENAI, "openai/gpt-oss-120b", "x", AT) is A


def test_a_configured_price_wins_and_the_list_stays_closed():
    prices = FakePriceList()
    book = PriceBook(models={"known": A}, routes={}, published=prices.open)
    route = PricedRoute("p", "https://p.example", "known", "known")
    assert book.prepare([route], AT) == ()
    assert book.price(*route, AT) is A
    assert prices.opened == 0


def test_preparing_opens_the_list_once_and_names_what_has_no_price():
    prices = FakePriceList()
    book = PriceBook(models={}, routes={}, published=prices.open)
    known = PricedRoute("p", "https://p.example", "m", "known")
    lost = PricedRoute("p", "https://p.example", "n", "unheard-of")
    assert book.prepare([known, lost], AT) == (lost,)
    assert book.price(*known, AT) is B
    assert book.price(*lost, AT) is None
    assert prices.opened == 1
    assert prices.asked[0] == ("https://p.example", "known", AT)


def test_importing_the_price_book_does_not_load_the_library():
    program = "import sys, metering.cost, metering.library_prices; sys.exit('genai_prices' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


LONG: Any = {
    "input": "3",
    "output": "15",
    "cache_read": "0.30",
    "per_unit": {"web_search": "0.01"},
    "tiers": [{"above": 200_000, "input": "6", "output": "22.50", "cache_read": "0.60"}],
    "service_tiers": {"batch": {"factor": "0.5"}, "priority": {"input": "7", "output": "30", "cache_read": "0.70"}},
}


def test_tiers_above_a_context_size_are_bands_of_the_whole_request():
    price = configured_price(LONG)
    assert isinstance(price, Banded)
    assert [(above, band.input, band.output, band.cache_read) for above, band in price.bands] == [
        (0, Decimal(3), Decimal(15), Decimal("0.30")),
        (200_000, Decimal(6), Decimal("22.50"), Decimal("0.60")),
    ]
    assert {price.version, *(band.version for _, band in price.bands)} == {price.version}
    assert all(band.per_unit == {"web_search": Decimal("0.01")} for _, band in price.bands)


def test_a_service_tier_is_a_factor_on_tokens_or_prices_of_its_own():
    price = configured_price(LONG)
    batch, priority = price.service_tiers["batch"], price.service_tiers["priority"]
    assert isinstance(batch, Banded)
    assert [(above, band.input, band.output, band.cache_read) for above, band in batch.bands] == [
        (0, Decimal("1.5"), Decimal("7.5"), Decimal("0.15")),
        (200_000, Decimal(3), Decimal("11.25"), Decimal("0.30")),
    ]
    assert batch.bands[0][1].per_unit == {"web_search": Decimal("0.01")}
    assert isinstance(priority, Price)
    assert (priority.input, priority.per_unit) == (Decimal(7), {"web_search": Decimal("0.01")})
    assert batch.version == priority.version == price.version


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"tiers": []}, "tiers: must be a list of tables"),
        ({"tiers": [{"above": 0, "input": "6", "output": "7", "cache_read": "1"}]}, r"tiers\.0\.above: must be"),
        ({"tiers": [{"above": "200000", "input": "6", "output": "7", "cache_read": "1"}]}, r"tiers\.0\.above: must be"),
        ({"tiers": [LONG["tiers"][0], LONG["tiers"][0]]}, r"tiers\.1\.above: must .* more than the one before, 200000"),
        ({"tiers": [{"above": 5, "input": "6", "output": "7"}]}, r"tiers\.0\.cache_read: missing"),
        ({"tiers": [{**LONG["tiers"][0], "per_request": "1"}]}, r"tiers\.0\.per_request: not a price"),
        ({"tiers": [7]}, r"tiers\.0: must be a table"),
        ({"service_tiers": {"default": {"factor": "1"}}}, r"service_tiers\.default: is no tier beside"),
        ({"service_tiers": {"auto": {"factor": "1"}}}, r"service_tiers\.auto: is no tier beside"),
        ({"service_tiers": {"Flex ": {"factor": "1"}}}, r"service_tiers\.Flex : not a tier as providers name them"),
        (
            {"service_tiers": {"flex": {"factor": "1", "input": "1"}}},
            r"service_tiers\.flex\.input: a tier has a factor",
        ),
        ({"service_tiers": {"flex": {"factor": 0.5}}}, r"service_tiers\.flex\.factor: a value of type float"),
        ({"service_tiers": {"flex": {"input": "1"}}}, r"service_tiers\.flex\.output: missing"),
        ({"service_tiers": {"flex": {**LONG["service_tiers"]["priority"], "service_tiers": {}}}}, "not a price"),
        ({"service_tiers": 3}, "service_tiers: must be a table"),
        ({"per_unit": {"Web Search": "1"}}, r"per_unit\.Web Search: not a kind"),
        ({"per_unit": {"web_search": 1}}, r"per_unit\.web_search: a value of type int"),
        ({"input_image": "x"}, "input_image: 'x' is not an amount"),
    ],
)
def test_each_fault_of_a_price_is_told_by_its_path(change, fault):
    with pytest.raises(ValueError, match=fault):
        configured_price({**LONG, **change})


def test_every_figure_of_a_price_is_in_its_version():
    changes: list[dict[str, object]] = [
        {"tiers": [{**LONG["tiers"][0], "above": 200_001}]},
        {"tiers": [{**LONG["tiers"][0], "output": "22.51"}]},
        {"service_tiers": {**LONG["service_tiers"], "batch": {"factor": "0.4"}}},
        {"service_tiers": {"batch": LONG["service_tiers"]["batch"]}},
        {"service_tiers": {**LONG["service_tiers"], "priority": {"input": "7", "output": "31", "cache_read": "0.70"}}},
        {"per_unit": {"web_search": "0.02"}},
        {"per_unit": {"file_search": "0.01"}},
        {"tiers": [{**LONG["tiers"][0], "output_audio": "15"}]},
        {"tiers": [{**LONG["tiers"][0], "output_image": "15"}]},
    ]
    versions = {configured_price({**LONG, **change}).version for change in [{}, *changes]}
    assert len(versions) == len(changes) + 1
    reordered = {**LONG, "service_tiers": dict(reversed(LONG["service_tiers"].items()))}
    assert configured_price(reordered).version == configured_price(LONG).version


def test_what_costs_nothing_does_so_at_every_service_tier():
    book = PriceBook(models={}, routes={}, published=FakePriceList().open, free={"p": ["*"]})
    charge = cost(Usage(input_total=5, output_total=5), book.price("p", "https://p", "m", "m", AT), served_tier="flex")
    assert (charge.state, charge.usd) == (State.CHARGED, Decimal(0))
