"""
What a token costs: the operator's own prices first, published ones second.

Without one place that answers this, a deployment nobody priced would silently count as free, and a record could not say
which price list it was made with. A price that is not known is None, never 0, and every price carries its version.
"""

from __future__ import annotations

import fnmatch
import hashlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from decimal import Context, Decimal
from functools import cached_property
from typing import Final, NamedTuple, Protocol, TypeAlias

import msgspec

#: What providers call the tier that their plain prices are of: OpenAI, Anthropic and Gemini, Groq.
STANDARD: Final = frozenset({"default", "standard", "standard_only", "on_demand"})
#: Asks for whatever the account has; in an answer it says nothing.
AUTO: Final = "auto"
#: In `service_tiers`: every tier that is not named.
ANY_TIER: Final = "*"

_PLAIN_DECIMAL = re.compile(r"[0-9]{1,9}(\.[0-9]{1,12})?")
_UNIT = re.compile(r"[a-z][a-z0-9_]{0,63}")
_SERVICE_TIER = re.compile(r"\*|[a-z0-9][a-z0-9_.-]{0,63}")
_REQUIRED = ("input", "output")
_OPTIONAL = ("cache_read", "cache_write_5m", "cache_write_1h", "reasoning")
_MEDIA = (
    "input_image",
    "input_audio",
    "input_video",
    "cache_read_image",
    "cache_read_audio",
    "output_image",
    "output_audio",
)
_RATES = (*_REQUIRED, *_OPTIONAL, *_MEDIA)
_EXACT = Context(prec=60)


class Media(msgspec.Struct, frozen=True, kw_only=True):
    """What tokens that are no text cost, in USD per million. None: as if they were text."""

    input_image: Decimal | None = None
    input_audio: Decimal | None = None
    input_video: Decimal | None = None
    #: None: as any token read from the cache, where that has a price, else as one that was not.
    cache_read_image: Decimal | None = None
    cache_read_audio: Decimal | None = None
    output_image: Decimal | None = None
    output_audio: Decimal | None = None


class Price(msgspec.Struct, frozen=True, kw_only=True, dict=True):
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
    #: None: every token costs what one of text does.
    media: Media | None = None
    #: USD for each answer, whatever its size.
    per_request: Decimal = Decimal(0)
    #: USD for each piece of what is billed by the piece, by its kind. What is not in it has no price.
    per_unit: Mapping[str, Decimal] = {}
    #: Names the list it comes from: `config:<hash>`, `free:<provider>:<pattern>` or `genai-prices:<version>`.
    version: str
    #: What holds instead where the provider says that another tier than its standard one served the call.
    service_tiers: Mapping[str, KnownPrice] = {}

    @cached_property
    def input_rates(self) -> tuple[Decimal, ...]:
        """Of text: uncached, read, written for 5 minutes, written for an hour."""
        write_5m = self.input if self.cache_write_5m is None else self.cache_write_5m
        return (
            self.input,
            self.input if self.cache_read is None else self.cache_read,
            write_5m,
            write_5m if self.cache_write_1h is None else self.cache_write_1h,
        )

    @cached_property
    def dearest_text(self) -> Decimal:
        """What a token of input can cost at most, where it is of text."""
        return max(self.input_rates)

    @cached_property
    def dearest_output(self) -> Decimal:
        """What a token of output can cost at most."""
        rates = [self.output, self.reasoning]
        if self.media is not None:
            rates += [self.media.output_image, self.media.output_audio]
        return max(rate for rate in rates if rate is not None)


class Banded(msgspec.Struct, frozen=True, kw_only=True):
    """A price that depends on the size of the input: the whole request costs what its band says, as providers bill."""

    #: The price where the whole input has more than that many tokens, in ascending order, from 0.
    bands: tuple[tuple[int, Price], ...]
    version: str
    service_tiers: Mapping[str, KnownPrice] = {}

    def of(self, input_tokens: int) -> Price:
        """The band of an input of this size."""
        return next(band for above, band in reversed(self.bands) if not above or input_tokens > above)


KnownPrice: TypeAlias = Price | Banded


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


def configured_price(table: Mapping[str, object]) -> KnownPrice:
    """
    The price in a configuration table such as `{ input = "2.50", output = "10.00" }`; these two are required.

    Raises ValueError that lists every fault of the table.
    """
    reading = _Reading()
    known = reading.price(table, "", service_tiers=True)
    if reading.faults or known is None:
        raise ValueError("; ".join(reading.faults))
    return known


class _Reading:
    """A price table on its way to a price, collecting its faults by their paths."""

    def __init__(self) -> None:
        self.faults: list[str] = []
        #: Everything that was read, in one order, whatever the order it was written in.
        self._canonical: list[str] = []

    def price(
        self, table: Mapping[str, object], at: str, *, service_tiers: bool = False, standard: Price | None = None
    ) -> KnownPrice | None:
        """None where it has faults. `standard` is the price that this one is a service tier of."""
        known = (*_RATES, "per_request", "per_unit", "tiers", *(("service_tiers",) if service_tiers else ()))
        self._unknown(table, known, at)
        amounts = self._amounts(table, at)
        per_request = self._amount(table, "per_request", at)
        per_unit: Mapping[str, Decimal] | None = self._per_unit(table.get("per_unit"), f"{at}per_unit")
        if standard is not None:
            per_request = standard.per_request if per_request is None else per_request
            per_unit = standard.per_unit if per_unit is None else per_unit
        base = self._made(amounts, per_request or Decimal(0), per_unit or {})
        bands = [(0, base), *self._bands(table.get("tiers"), f"{at}tiers", amounts, base)]
        services: dict[str, KnownPrice | None] = {}
        if service_tiers and base is not None:
            services = self._services(table.get("service_tiers"), f"{at}service_tiers", bands, base)
        if self.faults or base is None:
            return None
        version = f"config:{hashlib.sha256(';'.join(self._canonical).encode()).hexdigest()[:12]}"
        return _versioned([(above, band) for above, band in bands if band is not None], services, version)

    def _services(
        self, given: object, at: str, bands: Sequence[tuple[int, Price | None]], base: Price
    ) -> dict[str, KnownPrice | None]:
        found: dict[str, KnownPrice | None] = {}
        for name, table in sorted(self._table(given, at).items()):
            where = f"{at}.{name}"
            if name in STANDARD or name == AUTO:
                self.faults.append(f"{where}: is no tier beside the standard one, whose prices are those of the table")
            elif not _SERVICE_TIER.fullmatch(name):
                self.faults.append(f'{where}: not a tier as providers name them, such as "flex", or "*" for all others')
            self._canonical.append(f"{where}:")
            entries = self._table(table, where)
            if "factor" not in entries:
                found[name] = self.price(entries, f"{where}.", standard=base)
                continue
            self._unknown(entries, ("factor",), f"{where}.", "a tier has a factor or prices of its own")
            factor = self._amount(entries, "factor", f"{where}.")
            if factor is not None:
                scaled = [(above, _scaled(band, factor)) for above, band in bands if band is not None]
                found[name] = _versioned(scaled, {}, "")
        return found

    def _bands(
        self, given: object, at: str, base: Mapping[str, Decimal], price: Price | None
    ) -> Iterator[tuple[int, Price | None]]:
        if given is None:
            return
        if not isinstance(given, list) or not given:
            self.faults.append(f"{at}: must be a list of tables, each with `above` in tokens")
            return
        last = 0
        for place, entry in enumerate(given):
            where = f"{at}.{place}"
            table = self._table(entry, where)
            self._unknown(table, ("above", *_RATES), f"{where}.")
            above = table.get("above")
            if type(above) is not int or not last < above <= 10**12:
                more = f" and more than the one before, {last}" if last else ""
                self.faults.append(f"{where}.above: must be a number of input tokens, more than 0{more}")
                continue
            last = above
            self._canonical.append(f"{where}.above={above}")
            # What a table leaves out would else cost as much as plain input, or as little as below the band: neither
            # is what the operator meant to say.
            amounts = self._amounts(table, f"{where}.", _REQUIRED + tuple(n for n in base if n not in _REQUIRED))
            yield above, price and self._made(amounts, price.per_request, price.per_unit)

    def _amounts(self, table: Mapping[str, object], at: str, required: Sequence[str] = _REQUIRED) -> dict[str, Decimal]:
        for name in required:
            if name not in table:
                self.faults.append(f'{at}{name}: missing; write "0" where it costs nothing')
        found = {name: self._amount(table, name, at) for name in _RATES}
        return {name: amount for name, amount in found.items() if amount is not None}

    def _amount(self, table: Mapping[str, object], name: str, at: str) -> Decimal | None:
        if name not in table:
            return None
        try:
            amount = usd(table[name], name=f"{at}{name}")
        except ValueError as fault:
            self.faults.append(str(fault))
            return None
        self._canonical.append(f"{at}{name}={amount.normalize():f}")
        return amount

    def _per_unit(self, given: object, at: str) -> dict[str, Decimal] | None:
        if given is None:
            return None
        table = self._table(given, at)
        self.faults.extend(
            f'{at}.{name}: not a kind of what is billed by the piece, such as "web_search"'
            for name in table
            if not _UNIT.fullmatch(name)
        )
        found = {name: self._amount(table, name, f"{at}.") for name in sorted(table)}
        return {name: amount for name, amount in found.items() if amount is not None}

    def _table(self, given: object, at: str) -> Mapping[str, object]:
        if given is None:
            return {}
        if not isinstance(given, Mapping):
            self.faults.append(f"{at}: must be a table")
            return {}
        return given

    def _unknown(self, table: Mapping[str, object], known: Sequence[str], at: str, why: str | None = None) -> None:
        told = why or f"not a price; known are {', '.join(known)}"
        self.faults.extend(f"{at}{name}: {told}" for name in table if name not in known)

    def _made(
        self, amounts: Mapping[str, Decimal], per_request: Decimal, per_unit: Mapping[str, Decimal]
    ) -> Price | None:
        if not all(name in amounts for name in _REQUIRED):
            return None
        media = {name: amounts[name] for name in _MEDIA if name in amounts}
        return Price(
            input=amounts["input"],
            output=amounts["output"],
            cache_read=amounts.get("cache_read"),
            cache_write_5m=amounts.get("cache_write_5m"),
            cache_write_1h=amounts.get("cache_write_1h"),
            reasoning=amounts.get("reasoning"),
            media=Media(**media) if media else None,
            per_request=per_request,
            per_unit=per_unit,
            version="",
        )


def _versioned(
    bands: Sequence[tuple[int, Price]], services: Mapping[str, KnownPrice | None], version: str
) -> KnownPrice:
    """One price of these bands, all of it with its version."""
    tiers: dict[str, KnownPrice] = {}
    for name, service in services.items():
        if service is not None:
            of_it = service.bands if isinstance(service, Banded) else ((0, service),)
            tiers[name] = _versioned(of_it, {}, version)
    named = tuple((above, msgspec.structs.replace(band, version=version)) for above, band in bands)
    if len(named) == 1:
        return msgspec.structs.replace(named[0][1], service_tiers=tiers)
    return Banded(bands=named, version=version, service_tiers=tiers)


def _scaled(price: Price, factor: Decimal) -> Price:
    """The same with every token's price multiplied. What is billed by the call and by the piece stays."""

    def times(amount: Decimal | None) -> Decimal | None:
        return None if amount is None else _EXACT.multiply(amount, factor)

    media = price.media and Media(**{name: times(getattr(price.media, name)) for name in _MEDIA})
    tokens = {name: times(getattr(price, name)) for name in (*_REQUIRED, *_OPTIONAL)}
    return msgspec.structs.replace(price, **tokens, media=media)


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
        models: Mapping[str, KnownPrice],
        routes: Mapping[str, KnownPrice],
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
            return _free(f"free:{provider_id}:{pattern}")
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


def _free(version: str) -> Price:
    """Nothing costs anything, whoever serves it."""
    nothing = Price(input=Decimal(0), output=Decimal(0), version=version)
    return msgspec.structs.replace(nothing, service_tiers={ANY_TIER: nothing})
