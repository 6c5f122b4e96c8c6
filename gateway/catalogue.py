"""What may be asked for by name, where, and what is known of it: the list behind `GET /v1/models`."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Final

from gateway.needs import Capability
from gateway.provider import Provider
from gateway.rest.models import ModelEntry, ModelPlace, Prices
from gateway.router import Model, Target, target_provider
from metering.cost import decimal_string
from metering.prices import Banded, PriceBook

#: Seconds. Only prices can change while a process lives, and they do so by the day.
_KEPT_S: Final = 60.0


class Catalogue:
    """A `gateway.rest.models.Catalogue` over the configuration and the prices."""

    def __init__(self, providers: Mapping[str, Provider], models: Mapping[str, Model], prices: PriceBook) -> None:
        self._providers = providers
        self._models = models
        self._prices = prices
        self._kept: tuple[float, Sequence[ModelEntry]] | None = None

    def models(self) -> Sequence[ModelEntry]:
        now = time.monotonic()
        if self._kept is None or now - self._kept[0] > _KEPT_S:
            self._kept = now, sorted(self._entries(), key=lambda entry: entry.name)
        return self._kept[1]

    def _entries(self) -> Iterator[ModelEntry]:
        at = datetime.now(UTC)
        for model in self._models.values():
            yield ModelEntry(
                name=model.name, providers=tuple(self._place(target, model.name, at) for target in model.targets)
            )
        for provider in self._providers.values():
            for name in provider.models:
                pinned = f"{provider.id}/{name}"
                if pinned not in self._models:
                    target = Target(provider=provider.id, model=name)
                    yield ModelEntry(name=pinned, providers=(self._place(target, pinned, at),))

    def _place(self, target: Target, asked: str, at: datetime) -> ModelPlace:
        provider = target_provider(self._providers, target)
        return ModelPlace(
            id=provider.id,
            model=target.model,
            protocol=provider.protocol,
            ready=provider.ready and provider.enabled,
            context_window=self._prices.context_window(provider.base_url, target.model),
            max_output_tokens=provider.max_output_tokens,
            prices=self._price(provider, asked, target.model, at),
            capabilities={
                capability.value: False if capability in provider.cannot else None for capability in Capability
            },
        )

    def _price(self, provider: Provider, asked: str, upstream: str, at: datetime) -> Prices | None:
        price = self._prices.price(provider.id, provider.base_url, asked, upstream, at)
        if price is None:
            return None
        # Of one that depends on the size of the input, what a small one costs.
        figures = price.bands[0][1] if isinstance(price, Banded) else price
        return Prices(
            input=decimal_string(figures.input),
            output=decimal_string(figures.output),
            cache_read=None if figures.cache_read is None else decimal_string(figures.cache_read),
            version=price.version,
        )
