"""The models that may be asked for, and what is known of them."""

from __future__ import annotations

from pathlib import Path

from gateway import config
from gateway.catalogue import Catalogue
from metering.library_prices import Library
from metering.prices import PriceBook

TOML = """
[providers.here]
protocol = "chat_completions"
base_url = "http://127.0.0.1:9/v1"
models = ["big", "small"]
cannot = ["audio"]
max_output_tokens = 4000

[providers.away]
protocol = "chat_completions"
base_url = "http://127.0.0.1:9/v1"
credentials = ["AWAY_KEY"]
models = ["big"]

[providers.off]
protocol = "chat_completions"
base_url = "http://127.0.0.1:9/v1"
enabled = false
models = ["big"]

[models.alias]
providers = ["away", { provider = "here", model = "big", can = ["audio"] }]
price = { input = "2.50", output = "10.00" }
"""


def catalogue(tmp_path: Path) -> Catalogue:
    file = tmp_path / "tollbridge.toml"
    file.write_text(TOML)
    settings = config.load(file, {})
    prices = PriceBook(models=settings.prices_by_model, routes=settings.prices_by_route, published=Library)
    return Catalogue(settings.providers, settings.models, prices)


def test_aliases_and_pinned_names_are_there_with_who_is_ready(tmp_path: Path) -> None:
    entries = {entry.name: entry for entry in catalogue(tmp_path).models()}
    assert {name: [place.ready for place in entry.providers] for name, entry in entries.items() if "off" in name} == {
        "off/big": [False]
    }
    alias = entries["alias"]
    assert [(place.id, place.model, place.ready) for place in alias.providers] == [
        ("away", "alias", False),
        ("here", "big", True),
    ]
    assert alias.first is alias.providers[1]
    assert entries["away/big"].first is None
    assert list(entries) == sorted(entries)


def test_what_is_known_is_told_and_the_rest_is_null(tmp_path: Path) -> None:
    entries = {entry.name: entry for entry in catalogue(tmp_path).models()}
    [pinned] = entries["here/small"].providers
    assert (pinned.prices, pinned.context_window, pinned.max_output_tokens) == (None, None, 4000)
    assert (pinned.capabilities["audio"], pinned.capabilities["tools"]) == (False, None)
    prices = entries["alias"].providers[1].prices
    assert prices is not None
    assert (prices.input, prices.output) == ("2.5", "10")
    # The route says otherwise than its provider.
    assert entries["alias"].providers[1].capabilities["audio"] is None


def test_published_sizes_and_prices_are_told_of_a_known_provider(tmp_path: Path) -> None:
    settings = config.load(None, {"OPENAI_API_KEY": "x"})
    prices = PriceBook(models={}, routes={}, published=Library)
    found = Catalogue(settings.providers, settings.models, prices).models()
    known = [place for entry in found for place in entry.providers if place.id == "openai" and place.prices]
    assert known
    assert any(place.context_window for place in known)
