"""
Published prices, from the genai-prices library.

Few operators type in the price of a public model, and a list kept by hand goes stale: that would make most costs
unknown or wrong. The library brings dated prices, off-peak hours, context tiers and service tiers; no other module
knows it. Its list comes with the installed release; a newer one can be kept in a file, `metering.price_list`.

Four habits of the library are corrected here: a model it lists without a token price (speech, pages, or nobody entered
one) would cost 0 and is unknown instead; so is one with a part that no usage tells apart; its provider is found by the
address that is really called, never by what an operator named it; and lookups of names that callers made up do not fill
its unbounded caches.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from datetime import date, datetime
from decimal import Decimal
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

import msgspec

from metering.prices import STANDARD, Banded, KnownPrice, Media, Price

if TYPE_CHECKING:
    from genai_prices.data_snapshot import DataSnapshot
    from genai_prices.types import ModelInfo, PriceVariant, Provider, TieredPrices

    _Figures: TypeAlias = Mapping[str, Decimal | TieredPrices]

#: Lookups kept, hits and misses; all are forgotten beyond it. Configured routes are a few hundred at most.
LOOKUPS = 4096

#: USD for whatever a price is of. A figure above it is none.
_MOST_USD: Final = Decimal(1_000_000_000)

#: The library's names for tokens, and ours. A model priced in any other has a part that no usage tells apart.
_TOKENS: Final = {
    "input_mtok": "input",
    "output_mtok": "output",
    "cache_read_mtok": "cache_read",
    "cache_write_mtok": "cache_write_5m",
    "cache_write_5m_mtok": "cache_write_5m",
    "cache_write_1h_mtok": "cache_write_1h",
    "output_reasoning_mtok": "reasoning",
}
_MEDIA: Final = {
    "input_image_mtok": "input_image",
    "input_audio_mtok": "input_audio",
    "input_video_mtok": "input_video",
    "cache_image_read_mtok": "cache_read_image",
    "cache_audio_read_mtok": "cache_read_audio",
    "output_image_mtok": "output_image",
    "output_audio_mtok": "output_audio",
}
#: By the thousand.
_PIECES: Final = {"web_searches_kcount": "web_search", "storage_searches_kcount": "file_search"}
_REQUESTS: Final = "requests_kcount"
_COUNTED: Final = frozenset({*_TOKENS, *_MEDIA, *_PIECES, _REQUESTS})

#: What the library knows a price by, and the word in an answer that says so. Other conditions are of no tier.
_TIERS: Final = {("processing", "batch"): "batch", ("speed", "fast"): "fast"}


class Found(NamedTuple):
    """A model of the list."""

    model: ModelInfo
    #: Its service tiers hold only at the provider that it is listed under.
    own: bool


class Library:
    """A price list. Opening the bundled one costs about 0.4 s and 40 MB: do it at start-up."""

    def __init__(self, snapshot: DataSnapshot | None = None, version: str | None = None) -> None:
        """None: the list of the installed release."""
        # Here and not at the top, so that a gateway whose routes all have a configured price never pays for it.
        import genai_prices  # noqa: PLC0415
        from genai_prices import data_snapshot  # noqa: PLC0415

        self.version = version or f"genai-prices:{genai_prices.__version__}"
        self._snapshot = snapshot or data_snapshot.get_snapshot()
        self._providers: dict[str, Provider | None] = {}
        self._models: dict[tuple[str, str], Found | None] = {}
        self._in_force: dict[tuple[str, str], tuple[int, KnownPrice | None]] = {}
        # By identity: the library hands out the same objects as long as it lives, and keeps them alive.
        self._prices: dict[tuple[object, ...], KnownPrice | None] = {}

    @classmethod
    def of_list(cls, published: bytes, version: str) -> Library:
        """
        A list in the form in which the library's makers publish it.

        Raises ValueError for what is none: no JSON, another form, a price that is no amount.
        """
        # The library reads such a list only where it downloads it itself.
        from genai_prices.data_snapshot import DataSnapshot  # noqa: PLC0415
        from genai_prices.types import _providers_from_raw  # noqa: PLC0415

        try:
            told = json.loads(published, parse_float=Decimal, parse_constant=_no_number)
        except RecursionError:
            raise ValueError("its JSON is nested too deeply") from None
        try:
            providers = _providers_from_raw(told)
        except TypeError as error:
            raise ValueError(str(error)) from error
        snapshot = DataSnapshot(providers, from_auto_update=False)
        found = cls(snapshot, version)
        found._check()
        return found

    def _check(self) -> None:
        """Every figure is one. Raises ValueError."""
        for provider in self._snapshot.providers:
            for model in provider.models:
                for figure in _figures_of(model):
                    if not 0 <= figure < _MOST_USD:
                        raise ValueError(f"{provider.id}/{model.id} has a price of {figure}")

    @property
    def models(self) -> int:
        """How many models it lists."""
        return sum(len(provider.models) for provider in self._snapshot.providers)

    def price(self, base_url: str, upstream_model: str, at: datetime) -> KnownPrice | None:
        """
        The price in force at that time of the model served under that address by that name.

        A time without zone is UTC. None where the library does not know the address, the name or a price for tokens.
        """
        key, second = (base_url, upstream_model), int(at.timestamp())
        known = self._in_force.get(key)
        if known is not None and known[0] == second:
            return known[1]
        found = self._model(base_url, upstream_model)
        price = None if found is None else self._price(found, upstream_model, at)
        if len(self._in_force) >= LOOKUPS:
            self._in_force.clear()
        self._in_force[key] = (second, price)
        return price

    def since(self, base_url: str, upstream_model: str, at: datetime) -> date | None:
        """The day on which the price that is in force then began, where the list tells one."""
        found = self._model(base_url, upstream_model)
        if found is None or not isinstance(found.model.prices, list):
            return None
        in_force = found.model.get_prices(at)
        constraint = next((each.constraint for each in found.model.prices if each.prices is in_force), None)
        start: date | None = getattr(constraint, "start_date", None)
        return start

    def context_window(self, base_url: str, upstream_model: str) -> int | None:
        found = self._model(base_url, upstream_model)
        return None if found is None else found.model.context_window

    def _model(self, base_url: str, upstream_model: str) -> Found | None:
        key = (base_url, upstream_model)
        if key not in self._models:
            if len(self._models) >= LOOKUPS:
                self._models.clear()
            provider = self._provider(base_url)
            model = (
                None
                if provider is None
                else provider.find_model(upstream_model, all_providers=self._snapshot.providers)
            )
            own = provider is not None and any(model is each for each in provider.models)
            self._models[key] = None if model is None else Found(model, own)
        return self._models[key]

    def _provider(self, base_url: str) -> Provider | None:
        if base_url not in self._providers:
            try:
                self._providers[base_url] = self._snapshot.find_provider(None, None, base_url)
            except LookupError:
                self._providers[base_url] = None
        return self._providers[base_url]

    def _price(self, found: Found, upstream_model: str, at: datetime) -> KnownPrice | None:
        standard = found.model.get_prices(at)
        # An entry without a figure is free only where the vendor's own name for it says so. Embeddings have no output.
        free, no_output = upstream_model.endswith(":free"), "embed" in upstream_model.lower()
        variants = tuple(
            variant
            for variant in (found.model.price_variants or () if found.own else ())
            if variant.constraint is None or variant.constraint.active(at)
        )
        key = (id(standard), free, no_output, *map(id, variants))
        if key not in self._prices:
            known = self._known(vars(standard), free=free, no_output=no_output)
            if known is not None and variants:
                tiers = {}
                for name, context in _tiers(variants):
                    figures = vars(found.model.get_prices(at, context))
                    if (tier := self._known(figures, no_output=no_output)) is not None:
                        tiers[name] = tier
                known = msgspec.structs.replace(known, service_tiers=tiers)
            self._prices[key] = known
        return self._prices[key]

    def _known(
        self, told: Mapping[str, Decimal | TieredPrices | None], *, free: bool = False, no_output: bool = False
    ) -> KnownPrice | None:
        figures = {key: value for key, value in told.items() if value is not None}
        if no_output:
            figures.setdefault("output_mtok", Decimal(0))
        if not figures and free:
            return Price(input=Decimal(0), output=Decimal(0), version=self.version)
        if "input_mtok" not in figures or "output_mtok" not in figures or not figures.keys() <= _COUNTED:
            return None
        starts = {0} | {
            tier.start for value in figures.values() if not isinstance(value, Decimal) for tier in value.tiers
        }
        bands = tuple((start, _band(figures, start, self.version)) for start in sorted(starts))
        return bands[0][1] if len(bands) == 1 else Banded(bands=bands, version=self.version)


def _tiers(variants: Iterable[PriceVariant]) -> Iterator[tuple[str, dict[str, str]]]:
    """What answers call the tiers that these are the prices of, each with the library's name for it."""
    for variant in variants:
        if len(variant.when) == 1:
            ((key, value),) = variant.when.items()
            name = value if key == "service_tier" else _TIERS.get((key, value))
            if name is not None and name not in STANDARD:
                yield name, dict(variant.when)


def _no_number(told: str) -> float:
    raise ValueError(f"{told} is no number")


def _figures_of(model: ModelInfo) -> Iterator[Decimal]:
    prices = [each.prices for each in model.prices] if isinstance(model.prices, list) else [model.prices]
    for price in (*prices, *(variant.prices for variant in model.price_variants or ())):
        for value in vars(price).values():
            if isinstance(value, Decimal):
                yield value
            elif value is not None:
                yield value.base
                yield from (tier.price for tier in value.tiers)


def _band(figures: _Figures, start: int, version: str) -> Price:
    """What holds just above that many input tokens."""

    def rate(value: Decimal | TieredPrices) -> Decimal:
        if isinstance(value, Decimal):
            return value
        return next((tier.price for tier in reversed(value.tiers) if start >= tier.start), value.base)

    rates = {key: rate(value) for key, value in figures.items()}
    media = {ours: rates[key] for key, ours in _MEDIA.items() if key in rates}
    write = rates.get("cache_write_mtok")
    return Price(
        input=rates["input_mtok"],
        output=rates["output_mtok"],
        cache_read=rates.get("cache_read_mtok"),
        cache_write_5m=rates.get("cache_write_5m_mtok", write),
        cache_write_1h=rates.get("cache_write_1h_mtok", write),
        reasoning=rates.get("output_reasoning_mtok"),
        media=Media(**media) if media else None,
        per_request=rates.get(_REQUESTS, Decimal(0)).scaleb(-3),
        per_unit={ours: rates[key].scaleb(-3) for key, ours in _PIECES.items() if key in rates},
        version=version,
    )
