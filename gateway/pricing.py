"""
The price book of a configuration, and the prices of its routes.

The server, `check` and `prices` must say the same of a route: one place says which routes there are and what they cost.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime

import msgspec

from gateway import config
from gateway.router import Model, target_provider
from metering import price_list
from metering.library_prices import Library
from metering.prices import KnownPrice, PriceBook, PricedRoute


class RoutePrice(msgspec.Struct, frozen=True, kw_only=True):
    """A route of a configured model, and what it costs."""

    #: The configured model, or the name that pins the route.
    model: str
    provider: str
    upstream_model: str
    fallback: bool
    #: Whether its provider may be called.
    ready: bool
    base_url: str
    #: It is not served without a price.
    required: bool
    price: KnownPrice | None


class Prices:
    """A configuration's price book, with the published list that it opens where it needs one."""

    def __init__(self, settings: config.Settings, published: Library | None = None) -> None:
        """`published` stands for the list in the data directory."""
        self._settings = settings
        self._list = published
        self.book = PriceBook(
            models=settings.prices_by_model,
            routes=settings.prices_by_route,
            published=self.published,
            free=settings.free,
        )

    def published(self) -> Library:
        """Raises `metering.price_list.PriceListFault`."""
        if self._list is None:
            self._list = price_list.library(self._settings.data_dir)
        return self._list

    def of_models(self, at: datetime) -> Iterator[RoutePrice]:
        """Each route of each configured model, in the order of the file. Raises `PriceListFault`."""
        for model in self._settings.models.values():
            yield from self.of_model(model, at)

    def of_model(self, model: Model, at: datetime) -> Iterator[RoutePrice]:
        for index, target in enumerate(model.targets):
            provider = target_provider(self._settings.providers, target)
            yield RoutePrice(
                model=model.name,
                provider=provider.id,
                upstream_model=target.model,
                fallback=index >= model.primary,
                ready=provider.ready and provider.enabled,
                base_url=provider.base_url,
                required=provider.require_pricing,
                price=self.book.price(provider.id, provider.base_url, model.name, target.model, at),
            )

    def of_pinned(self, provider_id: str, upstream: str, at: datetime) -> RoutePrice | None:
        """A route by its provider and the upstream's name for the model; None where no such provider is configured."""
        known = self._settings.providers.get(provider_id)
        if known is None:
            return None
        provider = known.for_model(upstream)
        asked = f"{provider_id}/{upstream}"
        return RoutePrice(
            model=asked,
            provider=provider_id,
            upstream_model=upstream,
            fallback=False,
            ready=provider.ready and provider.enabled,
            base_url=provider.base_url,
            required=provider.require_pricing,
            price=self.book.price(provider_id, provider.base_url, asked, upstream, at),
        )

    def prepare(self, at: datetime) -> tuple[PricedRoute, ...]:
        """
        Looks up whatever can be called now, so that no request waits for the list to load; returns what has no price.
        Raises `PriceListFault`.
        """
        settings = self._settings
        routes = {
            PricedRoute(provider.id, provider.base_url, model.name, target.model)
            for model in settings.models.values()
            for target in model.targets
            if (provider := settings.providers[target.provider]).ready
        }
        routes |= {
            PricedRoute(provider.id, provider.base_url, f"{provider.id}/{name}", name)
            for provider in settings.providers.values()
            if provider.ready
            for name in provider.models
        }
        return self.book.prepare(sorted(routes), at)


def checked_at_start(settings: config.Settings, at: datetime) -> tuple[Prices, list[str], list[str]]:
    """
    The prices of a gateway that starts, the routes that have none, and those of them that are refused for it. Takes a
    third of a second where the published list is needed.

    Raises `config.ConfigFaults` for a list that cannot be used, and where the configuration wants every route of a
    configured model to have a price.
    """
    label = str(settings.file) if settings.file else "built-in configuration"
    prices = Prices(settings)
    try:
        # One that was taken is looked at now, whoever needs it: a request must not find it damaged.
        if price_list.kept(settings.data_dir) is not None:
            prices.published()
        unpriced = sorted({f"{provider}/{upstream}" for provider, _, _, upstream in prices.prepare(at)})
        without = [route for route in prices.of_models(at) if route.price is None] if unpriced else []
    except price_list.PriceListFault as fault:
        reason = f"{fault}: `tollbridge prices update` takes another, `tollbridge prices update --reset` goes back"
        raise config.ConfigFaults([config.Fault(label, "gateway.data_dir", reason)]) from fault
    if settings.start_needs_prices:
        without = [route for route in prices.of_models(at) if route.price is None]
        if without:
            raise config.ConfigFaults(
                [
                    config.Fault(
                        label,
                        f"models.{route.model}",
                        f"{route.provider}/{route.upstream_model} has no price, and metering.start_needs_prices is set",
                    )
                    for route in without
                ]
            )
    refused = sorted({f"{route.provider}/{route.upstream_model}" for route in without if route.required})
    return prices, unpriced, refused
