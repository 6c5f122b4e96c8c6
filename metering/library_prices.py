"""
Published prices, from the genai-prices library.

Few operators type in the price of a public model, and a list kept by hand goes stale: that would make most costs
unknown or wrong. The library brings dated prices, off-peak hours and context tiers; no other module knows it.

Three habits of the library are corrected here: a model it lists without a token price (speech, pages, or nobody entered
one) would cost 0 and is unknown instead; its provider is found by the address that is really called, never by what an
operator named it; and lookups of names that callers made up do not fill its unbounded caches.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from decimal import Decimal
from typing import TYPE_CHECKING, TypeAlias

from metering.prices import KnownPrice, LibraryPrice, Price
from metering.usage import Usage

if TYPE_CHECKING:
    from genai_prices.types import ModelInfo, ModelPrice, Provider, TieredPrices

    _Figures: TypeAlias = Mapping[str, Decimal | TieredPrices]

#: Lookups kept, hits and misses; all are forgotten beyond it. Configured routes are a few hundred at most.
LOOKUPS = 4096


class Library:
    """The prices bundled with the installed release. Opening it costs about 0.4 s and 40 MB: do it at start-up."""

    def __init__(self) -> None:
        # Here and not at the top, so that a gateway whose routes all have a configured price never pays for it.
        import genai_prices  # noqa: PLC0415
        from genai_prices import data_snapshot  # noqa: PLC0415

        self._version = f"genai-prices:{genai_prices.__version__}"
        self._count = genai_prices.Usage
        self._snapshot = data_snapshot.get_snapshot()
        self._providers: dict[str, Provider | None] = {}
        self._models: dict[tuple[str, str], ModelInfo | None] = {}
        # By identity: the library hands out the same object for as long as a price is in force, and keeps it alive.
        self._prices: dict[tuple[int, bool, bool], KnownPrice | None] = {}

    def price(self, base_url: str, upstream_model: str, at: datetime) -> KnownPrice | None:
        """
        The price in force at that time of the model served under that address by that name.

        A time without zone is UTC. None where the library does not know the address, the name or a price for tokens.
        """
        model = self._model(base_url, upstream_model)
        if model is None:
            return None
        price = model.get_prices(at)
        # An entry without a figure is free only where the vendor's own name for it says so. Embeddings have no output.
        key = (id(price), upstream_model.endswith(":free"), "embed" in upstream_model.lower())
        if key not in self._prices:
            self._prices[key] = self._known(price, free=key[1], no_output=key[2])
        return self._prices[key]

    def context_window(self, base_url: str, upstream_model: str) -> int | None:
        model = self._model(base_url, upstream_model)
        return None if model is None else model.context_window

    def _model(self, base_url: str, upstream_model: str) -> ModelInfo | None:
        key = (base_url, upstream_model)
        if key not in self._models:
            if len(self._models) >= LOOKUPS:
                self._models.clear()
            provider = self._provider(base_url)
            self._models[key] = (
                None
                if provider is None
                else provider.find_model(upstream_model, all_providers=self._snapshot.providers)
            )
        return self._models[key]

    def _provider(self, base_url: str) -> Provider | None:
        if base_url not in self._providers:
            try:
                self._providers[base_url] = self._snapshot.find_provider(None, None, base_url)
            except LookupError:
                self._providers[base_url] = None
        return self._providers[base_url]

    def _known(self, price: ModelPrice, *, free: bool, no_output: bool = False) -> KnownPrice | None:
        figures = {key: value for key, value in vars(price).items() if value is not None}
        if no_output:
            figures.setdefault("output_mtok", Decimal(0))
        if not figures and free:
            return Price(input=Decimal(0), output=Decimal(0), version=self._version)
        if "input_mtok" not in figures or "output_mtok" not in figures:
            return None
        starts = {0} | {
            tier.start for value in figures.values() if not isinstance(value, Decimal) for tier in value.tiers
        }
        bands = tuple((start, _band(figures, start, self._version)) for start in sorted(starts))
        # A price of one band is the same multiplication in the library, at ten times the cost.
        if len(bands) == 1:
            return bands[0][1]

        def calculate(usage: Usage) -> Decimal:
            counted = self._count(
                input_tokens=usage.input_total or 0,
                cache_read_tokens=usage.cache_read or 0,
                cache_write_tokens=(usage.cache_write_5m or 0) + (usage.cache_write_1h or 0),
                cache_write_5m_tokens=usage.cache_write_5m or 0,
                cache_write_1h_tokens=usage.cache_write_1h or 0,
                output_tokens=usage.output_total or 0,
                output_reasoning_tokens=usage.reasoning or 0,
            )
            return price.calc_price(counted)["total_price"]

        return LibraryPrice(bands=bands, calculate=calculate, version=self._version)


def _band(figures: _Figures, start: int, version: str) -> Price:
    """What holds just above that many input tokens."""

    def rate(value: Decimal | TieredPrices) -> Decimal:
        if isinstance(value, Decimal):
            return value
        return next((tier.price for tier in reversed(value.tiers) if start >= tier.start), value.base)

    rates = {key: rate(value) for key, value in figures.items()}
    write = rates.get("cache_write_mtok")
    return Price(
        input=rates["input_mtok"],
        output=rates["output_mtok"],
        cache_read=rates.get("cache_read_mtok"),
        cache_write_5m=rates.get("cache_write_5m_mtok", write),
        cache_write_1h=rates.get("cache_write_1h_mtok", write),
        reasoning=rates.get("output_reasoning_mtok"),
        per_request=rates.get("requests_kcount", Decimal(0)) / 1000,
        version=version,
    )
