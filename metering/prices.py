"""
What a token costs: the operator's own prices first, published ones second.

Without one place that answers this, a deployment nobody priced would silently count as free, and a record could not say
which price list it was made with. A price that is not known is None, never 0, and every price carries its version.
"""

from __future__ import annotations

import fnmatch
import hashlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from decimal import Decimal
from typing import NamedTuple, Protocol, TypeAlias

import msgspec

from metering.usage import Usage

_PLAIN_DECIMAL = re.compile(r"[0-9]{1,9}(\.[0-9]{1,12})?")
_REQUIRED = ("input", "output")
_OPTIONAL = ("cache_read", "cache_write_5m", "cache_write_1h", "reasoning", "per_request")


class Price(msgspec.Struct, frozen=True, kw_only=True):
    """
    What one model costs: USD per million tokens, and per call.

    A part without a price of its own costs what holds for the whole it is part of: a cached or written token the input
    price, one written for an hour the price of one written for five minutes, a reasoning token the output price.
    """

    input: Decimal
    output: Decimal
    cache_read: Decimal | None = None
    cache_write_5m: Decimal | None = None
    cache_write_1h: Decimal | None = None
    reasoning: Decimal | None = None
    #: USD for each answer, whatever its size.
    per_request: Decimal = Decimal(0)
    #: Names the list it comes from: `config:<hash>`, `free:<provider>:<pattern>` or `genai-prices:<version>`.
    version: str


class LibraryPrice(msgspec.Struct, frozen=True, kw_only=True):
    """A published price that depends on the size of the input. The library calculates it; the bands bound it."""

    #: The price where the whole input has more than that many tokens, in ascending order, from 0.
    bands: tuple[tuple[int, Price], ...]
    #: USD, not rounded. Parts of the usage must not exceed their totals.
    calculate: Callable[[Usage], Decimal]
    version: str


KnownPrice: TypeAlias = Price | LibraryPrice


def usd(text: object, *, name: str) -> Decimal:
    """
    An amount in USD from configuration: a string of plain digits, such as "2.50", below a billion, at most 12 decimals.

    Raises ValueError, naming the field, for anything else: a binary float has already lost the figure that was typed.
    """
    if not isinstance(text, str) or not _PLAIN_DECIMAL.fullmatch(text):
        given = repr(text[:40]) if isinstance(text, str) else f"a value of type {type(text).__name__}"
        raise ValueError(
            f'{name}: {given} is not an amount in USD: give a string of plain digits, such as "2.50", not negative, '
            "below 1000000000, with at most 12 decimals"
        )
    return Decimal(text)


def configured_price(table: Mapping[str, object]) -> Price:
    """
    The price in a configuration table such as `{ input = "2.50", output = "10.00" }`; these two are required.

    Raises ValueError that lists every fault of the table.
    """
    known = (*_REQUIRED, *_OPTIONAL)
    faults = [f"{name}: not a price; known are {', '.join(known)}" for name in table if name not in known]
    faults += [f'{name}: missing; write "0" where it costs nothing' for name in _REQUIRED if name not in table]
    amounts: dict[str, Decimal] = {}
    for name in known:
        if name in table:
            try:
                amounts[name] = usd(table[name], name=name)
            except ValueError as fault:
                faults.append(str(fault))
    if faults:
        raise ValueError("; ".join(faults))
    canonical = ";".join(f"{name}={amounts[name].normalize():f}" for name in known if name in amounts)
    version = f"config:{hashlib.sha256(canonical.encode()).hexdigest()[:12]}"
    return Price(version=version, **amounts)


class PricedRoute(NamedTuple):
    """What of a route decides its price."""

    provider_id: str
    #: As it is called, variables filled in.
    provider_base_url: str
    #: As the caller names it, with or without the provider in front.
    requested_model: str
    upstream_model: str


class PublishedPrices(Protocol):
    """A maintained price list: `metering.library_prices.Library`."""

    def price(self, base_url: str, upstream_model: str, at: datetime) -> KnownPrice | None:
        """The price in force at that time; None where the list has none."""
        ...

    def context_window(self, base_url: str, upstream_model: str) -> int | None:
        """The most input tokens the model takes; None where the list does not know."""
        ...


class PriceBook:
    """All prices of a gateway. Configured ones win over published ones, and one for a route over one for a model."""

    def __init__(
        self,
        *,
        models: Mapping[str, Price],
        routes: Mapping[str, Price],
        published: Callable[[], PublishedPrices],
        free: Mapping[str, Sequence[str]] = {},
    ) -> None:
        """
        `models` is by the name callers use, for every route of that model; `routes` by `provider/upstream_model`.
        `published` opens the price list, once, when a route without a configured price first needs it. `free` has, by
        provider, patterns of the upstream models that cost nothing: they win over published prices. One that begins
        with "!" takes back what those before it say.
        """
        self._models = dict(models)
        self._routes = dict(routes)
        self._open = published
        self._free = dict(free)
        self._published: PublishedPrices | None = None

    def prepare(self, routes: Iterable[PricedRoute], at: datetime) -> tuple[PricedRoute, ...]:
        """
        Looks up every route once, at start-up, so that no request waits for the price list to load. Returns those
        without a price at that time.
        """
        return tuple(route for route in routes if self.price(*route, at) is None)

    def price(
        self, provider_id: str, provider_base_url: str, requested_model: str, upstream_model: str, at: datetime
    ) -> KnownPrice | None:
        """The price in force for a request made at that time; None where nobody has stated one."""
        configured = (
            self._routes.get(f"{provider_id}/{upstream_model}")
            or self._models.get(requested_model)
            or self._models.get(requested_model.removeprefix(f"{provider_id}/"))
        )
        if configured is not None:
            return configured
        if (pattern := self._free_by(provider_id, upstream_model)) is not None:
            return Price(input=Decimal(0), output=Decimal(0), version=f"free:{provider_id}:{pattern}")
        if self._published is None:
            self._published = self._open()
        return self._published.price(provider_base_url, upstream_model, at)

    def context_window(self, provider_base_url: str, upstream_model: str) -> int | None:
        """The most input tokens, where a price list is open that knows: it is not opened for this."""
        return None if self._published is None else self._published.context_window(provider_base_url, upstream_model)

    def _free_by(self, provider_id: str, upstream_model: str) -> str | None:
        found: str | None = None
        for pattern in self._free.get(provider_id, ()):
            if fnmatch.fnmatchcase(upstream_model, pattern.removeprefix("!")):
                found = None if pattern.startswith("!") else pattern
        return found
