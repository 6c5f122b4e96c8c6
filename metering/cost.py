"""
What an attempt cost: usage times price, as a value that says how sure it is.

A charge is an amount that is known, a zero with its reason, or unknown with the most it can be. Were these three one
number, a broken stream, an unpriced model and a refused request would all read as free. Everything is exact until the
one rounding, here, to `SCALE` decimals: half to even for a charge, upwards for a bound.

The order of truth for an amount: what the provider says it charged, then the price in force.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from decimal import ROUND_CEILING, ROUND_HALF_EVEN, Context, Decimal

import msgspec

from metering.prices import ANY_TIER, AUTO, STANDARD, KnownPrice, Media, Price
from metering.usage import NOTHING, Usage

#: Decimals of every stored amount (`numeric(22,12)`): exact for prices per million tokens with up to 6 decimals.
SCALE = 12
#: USD. An amount of one attempt is below it, or it is not believed; the store checks the same.
LIMIT_USD = Decimal(1_000_000_000)
#: Above it a token count is not believed.
LIMIT_TOKENS = 10**12
#: Tokens a provider may add to any prompt by itself: chat template, default system text, instructions around tools. Of
#: Anthropic's tools 530 are documented (Claude 3 Opus); xAI puts texts before prompts without tools, too.
REQUEST_ALLOWANCE = 1_000
#: Tokens a chat template may put around one message.
MESSAGE_ALLOWANCE = 8

_ZERO = Decimal(0)
_QUANTUM = Decimal(1).scaleb(-SCALE)
# Wide enough for LIMIT_TOKENS at any price without rounding; the thread's own context may be narrower.
_EXACT = Context(prec=60, rounding=ROUND_HALF_EVEN)
_UPWARDS = Context(prec=60, rounding=ROUND_CEILING)


class State(enum.StrEnum):
    CHARGED = "charged"
    ZERO = "zero"
    UNKNOWN = "unknown"


class Reason(enum.StrEnum):
    """Why an attempt is zero or unknown."""

    #: Zero: no byte of the request was sent.
    NOT_DISPATCHED = "not_dispatched"
    #: Zero: the provider refused or failed it with a complete error response.
    ERROR_RESPONSE = "error_response"
    #: Zero: nobody charges for such a call, however it ends.
    FREE_OF_CHARGE = "free_of_charge"
    #: Unknown: it was sent, and how it ended is not proven.
    NO_TERMINAL = "no_terminal"
    #: Unknown: nobody has stated a price.
    NO_PRICE = "no_price"
    #: Unknown: a complete answer without token counts.
    NO_USAGE = "no_usage"
    #: Unknown: a complete answer that tells its input or its output, not both.
    PARTIAL_USAGE = "partial_usage"
    #: Unknown: the usage names what is billed apart from tokens, and nobody has stated a price for it.
    UNPRICED_UNITS = "unpriced_units"
    #: Unknown: the provider says that it served another tier than its standard one, and nobody has stated its price.
    UNPRICED_SERVICE_TIER = "unpriced_service_tier"
    #: Unknown: another tier than the standard one was asked for, and the answer does not say which one served it.
    SERVICE_TIER_NOT_TOLD = "service_tier_not_told"
    #: Unknown: a token count or the amount it leads to is negative or absurd.
    IMPLAUSIBLE = "implausible"


class Flag(enum.StrEnum):
    """Something odd in what the provider reported, for the record."""

    #: Cached parts exceeded the input they are part of, and were cut to it.
    CACHE_EXCEEDS_INPUT = "cache_exceeds_input"
    #: Reasoning exceeded the output it is part of, and was cut to it.
    REASONING_EXCEEDS_OUTPUT = "reasoning_exceeds_output"
    #: Images, sound and video exceeded the input or the output they are part of, and were cut to it.
    MEDIA_EXCEEDS_TOTAL = "media_exceeds_total"
    #: The cost the provider reported is not an amount, and was ignored.
    REPORTED_COST_INVALID = "reported_cost_invalid"


class Charge(msgspec.Struct, frozen=True, kw_only=True):
    """What one attempt cost. Amounts are in USD with `SCALE` decimals."""

    state: State
    #: None exactly where the state is unknown.
    usd: Decimal | None
    #: For an unknown one: the most it can be; None where even that is not known.
    upper_bound: Decimal | None = None
    #: None exactly where the state is charged.
    reason: Reason | None = None
    #: The price list of the amount or the bound: `config:...`, `genai-prices:...`, or `reported` by the provider.
    price_version: str | None = None
    #: Our own figure, where the provider's won.
    list_usd: Decimal | None = None
    flags: tuple[Flag, ...] = ()

    def __post_init__(self) -> None:
        assert (self.usd is None) == (self.state is State.UNKNOWN)
        assert (self.reason is None) == (self.state is State.CHARGED)


class Ceiling(msgspec.Struct, frozen=True, kw_only=True):
    """The most tokens an attempt can use; None where that is not known."""

    input_tokens: int | None
    output_tokens: int | None
    #: No token of the input is of anything but text.
    only_text: bool = False

    def raised_to(self, usage: Usage) -> Ceiling:
        """At least what an unfinished answer has reported so far."""
        return Ceiling(
            input_tokens=None if self.input_tokens is None else max(self.input_tokens, usage.input_total or 0),
            output_tokens=None if self.output_tokens is None else max(self.output_tokens, usage.output_total or 0),
            only_text=self.only_text,
        )


#: Nothing known beforehand.
UNBOUNDED = Ceiling(input_tokens=None, output_tokens=None)


def ceiling(
    *,
    body_bytes: int,
    messages: int,
    max_output_tokens: int | None,
    output_default: int | None,
    choices: int = 1,
    further_input_tokens: int | None = 0,
    only_text: bool = False,
) -> Ceiling:
    """
    The most tokens a request can use, known before it is sent.

    A token of the byte-pair vocabularies in use covers at least one byte of text, so the UTF-8 bytes of the request
    body bound its text; two allowances stand for what a provider adds. Not bounded by bytes is what the body only names
    or packs: images, files, earlier responses, results of tools that the provider itself runs. `further_input_tokens`
    is the most these can be, None where nobody can tell. `output_default` is the configured ceiling for a request that
    sets no maximum; None: the output has no bound.
    """
    output = output_default if max_output_tokens is None else max_output_tokens
    text = body_bytes + messages * MESSAGE_ALLOWANCE + REQUEST_ALLOWANCE
    return Ceiling(
        input_tokens=None if further_input_tokens is None else text + further_input_tokens,
        output_tokens=None if output is None else output * choices,
        only_text=only_text,
    )


def cost(
    usage: Usage,
    price: KnownPrice | None,
    reported_cost_usd: Decimal | None = None,
    *,
    limits: Ceiling = UNBOUNDED,
    asked_tier: str | None = None,
    served_tier: str | None = None,
) -> Charge:
    """
    The charge of an attempt whose answer is proven complete.

    A count that is missing makes it unknown, unless its tokens cost nothing. An input of 0 counts as missing: no prompt
    is empty. `limits` bounds what is not known. The tiers are in the provider's words; it charges the one that served.
    """
    flags: tuple[Flag, ...] = ()
    if reported_cost_usd is not None:
        if reported_cost_usd.is_finite() and 0 <= reported_cost_usd < LIMIT_USD:
            own = _own_charge(usage, price, UNBOUNDED, asked_tier, served_tier)
            return Charge(
                state=State.CHARGED,
                usd=_rounded(reported_cost_usd),
                price_version="reported",
                list_usd=own.usd,
                flags=own.flags,
            )
        flags = (Flag.REPORTED_COST_INVALID,)
    own = _own_charge(usage, price, limits, asked_tier, served_tier)
    return msgspec.structs.replace(own, flags=flags + own.flags) if flags else own


def zero(reason: Reason) -> Charge:
    """An attempt that is known to have cost nothing."""
    return Charge(state=State.ZERO, usd=_ZERO, reason=reason)


def unknown(
    reason: Reason, price: KnownPrice | None, limits: Ceiling, usage: Usage = NOTHING, *, asked_tier: str | None = None
) -> Charge:
    """An attempt that was sent and not proven complete. `usage` is what it had reported by then; more may follow."""
    return Charge(
        state=State.UNKNOWN,
        usd=None,
        reason=reason,
        # Of what is billed by the piece, nobody knows how many more there were.
        upper_bound=None
        if any((usage.units or {}).values())
        else upper_bound(price, limits.raised_to(usage), asked_tier=asked_tier),
        price_version=None if price is None else price.version,
    )


def upper_bound(
    price: KnownPrice | None, limits: Ceiling, usage: Usage = NOTHING, *, asked_tier: str | None = None
) -> Decimal | None:
    """
    The most an attempt can cost in USD, rounded up; None where no bound is known.

    Counts of `usage` are taken as final and `limits` stands in for those it lacks, at the dearest price that any such
    token can have, of every tier that may serve what was asked for.
    """
    if price is None or (usage is not NOTHING and _implausible(usage)):
        return None
    most: Decimal | None = None
    for tier in may_serve(price, asked_tier):
        bound = _tier_bound(tier, limits, usage)
        if bound is None:
            return None
        most = bound if most is None else max(most, bound)
    if most is None:
        return None
    most = most.quantize(_QUANTUM, context=_UPWARDS)
    return most if most < LIMIT_USD else None


# ------------------------------------------------------------------ service tiers


def _served(price: KnownPrice, asked: str | None, served: str | None) -> KnownPrice | Reason:
    """What holds for the tier that served, or why that is not known."""
    if served is None or served == AUTO:
        told = asked is None or asked == AUTO or asked in STANDARD
        return price if told else Reason.SERVICE_TIER_NOT_TOLD
    if served in STANDARD:
        return price
    return price.service_tiers.get(served) or price.service_tiers.get(ANY_TIER) or Reason.UNPRICED_SERVICE_TIER


def may_serve(price: KnownPrice, asked: str | None) -> tuple[KnownPrice, ...]:
    """
    The prices that may hold for the tier that was asked for; none where nobody has stated that tier's. A tier that has
    no room left is replaced by the standard one. Who asks for none gets the account's, taken to be the standard one.
    """
    if asked is None or asked in STANDARD:
        return (price,)
    if asked == AUTO:
        return (price, *price.service_tiers.values())
    tier = price.service_tiers.get(asked) or price.service_tiers.get(ANY_TIER)
    return () if tier is None else (price, tier)


# ------------------------------------------------------------------- known usage


def _own_charge(
    usage: Usage, known: KnownPrice | None, limits: Ceiling, asked: str | None, served: str | None
) -> Charge:
    if known is None:
        return Charge(state=State.UNKNOWN, usd=None, reason=Reason.NO_PRICE)
    if _implausible(usage):
        return Charge(state=State.UNKNOWN, usd=None, reason=Reason.IMPLAUSIBLE, price_version=known.version)
    usage, flags = _consistent(usage)
    found = known if served is None and asked is None else _served(known, asked, served)
    if isinstance(found, Reason):
        not_told = found is Reason.SERVICE_TIER_NOT_TOLD
        return Charge(
            state=State.UNKNOWN,
            usd=None,
            reason=found,
            # What serves at a tier without a price may cost anything.
            upper_bound=upper_bound(known, limits, usage, asked_tier=asked) if not_told else None,
            price_version=known.version,
            flags=flags,
        )
    if usage.units and any(count and kind not in _units_of(found) for kind, count in usage.units.items()):
        return Charge(
            state=State.UNKNOWN, usd=None, reason=Reason.UNPRICED_UNITS, price_version=known.version, flags=flags
        )
    price = found if isinstance(found, Price) else found.of(usage.input_total) if usage.input_total else None
    if price is not None:
        amount_in, amount_out = _input_amount(price, usage), _output_amount(price, usage)
        if amount_in is not None and amount_out is not None:
            return _charged(_dollars(price, amount_in, amount_out, usage), price, flags)
    return Charge(
        state=State.UNKNOWN,
        usd=None,
        reason=Reason.PARTIAL_USAGE if usage.input_total or usage.output_total is not None else Reason.NO_USAGE,
        upper_bound=upper_bound(found, limits, usage),
        price_version=known.version,
        flags=flags,
    )


def _charged(amount: Decimal, price: Price, flags: tuple[Flag, ...]) -> Charge:
    if amount >= LIMIT_USD:
        return Charge(
            state=State.UNKNOWN, usd=None, reason=Reason.IMPLAUSIBLE, price_version=price.version, flags=flags
        )
    return Charge(state=State.CHARGED, usd=_rounded(amount), price_version=price.version, flags=flags)


def _units_of(price: KnownPrice) -> Mapping[str, Decimal]:
    """What pieces cost is the same in all bands."""
    return price.per_unit if isinstance(price, Price) else price.bands[0][1].per_unit


# ------------------------------------------------------------------------ bounds


def _tier_bound(price: KnownPrice, limits: Ceiling, usage: Usage) -> Decimal | None:
    if usage.units and any(count and kind not in _units_of(price) for kind, count in usage.units.items()):
        return None
    if isinstance(price, Price):
        return _band_bound(price, usage, limits)
    if usage.input_total:
        return _band_bound(price.of(usage.input_total), usage, limits)
    bounds = []
    for above, band in price.bands:
        # Where the input is not known to stay below a band, that band may be the one that is charged.
        if above and limits.input_tokens is not None and limits.input_tokens <= above:
            continue
        bound = _band_bound(band, usage, limits)
        if bound is None:
            return None
        bounds.append(bound)
    return max(bounds)


def _band_bound(price: Price, usage: Usage, limits: Ceiling) -> Decimal | None:
    amount_in, amount_out = _input_amount(price, usage), _output_amount(price, usage)
    if amount_in is None and limits.input_tokens is not None:
        rate = price.dearest_text
        if price.media is not None and not limits.only_text:
            kinds = ("input_image", "input_audio", "input_video", "cache_read_image", "cache_read_audio")
            rate = max(rate, *_media_rates(price.media, *kinds))
        amount_in = _EXACT.multiply(rate, limits.input_tokens)
    if amount_out is None and limits.output_tokens is not None:
        amount_out = _EXACT.multiply(price.dearest_output, limits.output_tokens)
    if amount_in is None or amount_out is None:
        return None
    return _dollars(price, amount_in, amount_out, usage)


# ----------------------------------------------------------------------- amounts


def _input_amount(price: Price, usage: Usage) -> Decimal | None:
    """Millionths of a dollar; None where the tokens are not known and would cost something."""
    if not usage.input_total:
        return None if price.dearest_text or _costs_media(price.media) else _ZERO
    read, write_5m, write_1h = usage.cache_read or 0, usage.cache_write_5m or 0, usage.cache_write_1h or 0
    amount = _EXACT.multiply(price.input, usage.input_total - read - write_5m - write_1h)
    if read or write_5m or write_1h:
        _, read_rate, write_5m_rate, write_1h_rate = price.input_rates
        amount = _EXACT.fma(read_rate, read, amount)
        amount = _EXACT.fma(write_5m_rate, write_5m, amount)
        amount = _EXACT.fma(write_1h_rate, write_1h, amount)
    return amount if price.media is None else _EXACT.add(amount, _media_input(price, price.media, usage))


def _media_input(price: Price, media: Media, usage: Usage) -> Decimal:
    """What images, sound and video cost more, or less, than as much text."""
    read, written = usage.cache_read or 0, (usage.cache_write_5m or 0) + (usage.cache_write_1h or 0)
    read_rate = price.input if price.cache_read is None else price.cache_read
    #: Tokens left that were not cached, and that were read from the cache.
    fresh_left, read_left = (usage.input_total or 0) - read - written, read
    kinds = []
    for total, of_read, rate, of_read_rate in (
        (usage.input_image, usage.cache_read_image, media.input_image, media.cache_read_image),
        (usage.input_audio, usage.cache_read_audio, media.input_audio, media.cache_read_audio),
        (usage.input_video, None, media.input_video, None),
    ):
        if total and (rate is not None or of_read_rate is not None):
            fresh_rate = price.input if rate is None else rate
            otherwise = fresh_rate if price.cache_read is None else price.cache_read
            kinds.append((fresh_rate, otherwise if of_read_rate is None else of_read_rate, total, of_read))
    amount = _ZERO
    # Where it is not told which tokens the cache had, it had text first, and of the rest the cheapest.
    for rate, of_read_rate, total, of_read in sorted(kinds, key=lambda kind: kind[0], reverse=True):
        cached = max(total - fresh_left, 0) if of_read is None else min(of_read, total)
        cached = min(cached, read_left)
        fresh = min(total - cached, fresh_left)
        fresh_left, read_left = fresh_left - fresh, read_left - cached
        amount = _EXACT.fma(_EXACT.subtract(rate, price.input), fresh, amount)
        amount = _EXACT.fma(_EXACT.subtract(of_read_rate, read_rate), cached, amount)
    return amount


def _output_amount(price: Price, usage: Usage) -> Decimal | None:
    """Millionths of a dollar; None where the tokens are not known and would cost something."""
    if usage.output_total is None:
        return None if price.dearest_output else _ZERO
    amount = _EXACT.multiply(price.output, usage.output_total)
    if usage.reasoning and price.reasoning is not None:
        amount = _EXACT.fma(_EXACT.subtract(price.reasoning, price.output), usage.reasoning, amount)
    if price.media is not None:
        for rate, tokens in (
            (price.media.output_image, usage.output_image),
            (price.media.output_audio, usage.output_audio),
        ):
            if rate is not None and tokens:
                amount = _EXACT.fma(_EXACT.subtract(rate, price.output), tokens, amount)
    return amount


def _media_rates(media: Media, *names: str) -> tuple[Decimal, ...]:
    return tuple(rate for name in names if (rate := getattr(media, name)) is not None)


def _costs_media(media: Media | None) -> bool:
    return media is not None and any(_media_rates(media, "input_image", "input_audio", "input_video"))


def _dollars(price: Price, amount_in: Decimal, amount_out: Decimal, usage: Usage) -> Decimal:
    amount = _EXACT.add(_EXACT.scaleb(_EXACT.add(amount_in, amount_out), -6), price.per_request)
    if usage.units:
        for kind, count in usage.units.items():
            if count:
                amount = _EXACT.fma(price.per_unit[kind], count, amount)
    return amount


def _rounded(amount: Decimal) -> Decimal:
    return amount.quantize(_QUANTUM, context=_EXACT)


# ------------------------------------------------------------------- plausibility


def _implausible(usage: Usage) -> bool:
    *counts, units = msgspec.structs.astuple(usage)
    for count in counts:
        if count is not None and not 0 <= count <= LIMIT_TOKENS:
            return True
    return units is not None and not all(0 <= count <= LIMIT_TOKENS for count in units.values())


def _consistent(usage: Usage) -> tuple[Usage, tuple[Flag, ...]]:
    """The usage with its parts cut to their totals, the cheaper ones first, so as not to undercharge."""
    flags: tuple[Flag, ...] = ()
    total = usage.input_total
    read, write_5m, write_1h = usage.cache_read or 0, usage.cache_write_5m or 0, usage.cache_write_1h or 0
    if total and read + write_5m + write_1h > total:
        write_1h = min(write_1h, total)
        write_5m = min(write_5m, total - write_1h)
        read = total - write_1h - write_5m
        usage = msgspec.structs.replace(usage, cache_read=read, cache_write_5m=write_5m, cache_write_1h=write_1h)
        flags = (Flag.CACHE_EXCEEDS_INPUT,)
    if usage.output_total is not None and (usage.reasoning or 0) > usage.output_total:
        usage = msgspec.structs.replace(usage, reasoning=usage.output_total)
        flags = (*flags, Flag.REASONING_EXCEEDS_OUTPUT)
    if usage.input_image or usage.input_audio or usage.input_video or usage.output_image or usage.output_audio:
        cut = _media_cut(usage)
        if cut is not usage:
            usage = cut
            flags = (*flags, Flag.MEDIA_EXCEEDS_TOTAL)
    return usage, flags


def _media_cut(usage: Usage) -> Usage:
    """With no more images, sound and video than there are tokens to be of them; reasoning is text."""
    cut: dict[str, int] = {}
    said = None if usage.output_total is None else usage.output_total - (usage.reasoning or 0)
    for total, names in (
        (usage.input_total, ("input_audio", "input_image", "input_video")),
        (said, ("output_image", "output_audio")),
    ):
        if total is None:
            continue
        left = total
        for name in names:
            count = getattr(usage, name) or 0
            if count > left:
                cut[name] = left
            left -= min(count, left)
    return msgspec.structs.replace(usage, **cut) if cut else usage


def decimal_string(usd: Decimal) -> str:
    """An amount for people and JSON: plain digits, never an exponent, no trailing zeros."""
    text = f"{usd:f}"
    return text.rstrip("0").rstrip(".") if "." in text else text
