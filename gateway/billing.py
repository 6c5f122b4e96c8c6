"""
What a call may cost before it is dispatched, and what an attempt did cost after it ended.

Joins the two packages that must not know each other: the chat, and the prices.
"""

from __future__ import annotations

from datetime import UTC, datetime
from decimal import Decimal, InvalidOperation
from typing import Final

import msgspec

from adapters.chat import ChatRequest, Text
from gateway.call import Call
from gateway.outcome import Cost
from gateway.provider import Provider
from gateway.router import Route
from metering import cost
from metering.prices import KnownPrice, PriceBook
from metering.usage import NOTHING, Usage

#: English text in the tokenizers of the large providers: a rule of thumb, good enough for what is corrected later.
_BYTES_PER_TOKEN: Final = 4
#: Of a request that does not say how much it wants.
_USUAL_OUTPUT_TOKENS: Final = 1000
#: What the protocols call the tier of their service that a request asks for.
_TIER_FIELDS: Final = ("service_tier", "serviceTier")
_ZERO: Final = Decimal(0)


class Billing:
    """Prices applied to calls. Satisfies `gateway.router.Costs`."""

    def __init__(self, prices: PriceBook) -> None:
        self._prices = prices

    def quote(self, call: Call, route: Route) -> Quote:
        """What is known of the cost of the call there."""
        return Quote(self, call, route)

    def most(self, call: Call, route: Route) -> Decimal | None:
        """The most the call can cost there in USD; None where no bound is known."""
        return Quote(self, call, route).most

    def unbounded(self, call: Call, route: Route) -> str:
        """Why no bound is known there, and what would help."""
        if (lacks_price := self.unpriced(call, route)) is not None:
            return lacks_price
        limits = self.limits(call, route)
        if limits.input_tokens is None:
            return "it has pictures or files, and the size of the model's context is not known"
        if limits.output_tokens is None:
            return f"no limit of the answer is known, give {call.told_path(call.chat.written('max_output_tokens'))}"
        return "the price does not bound what is asked"

    def unpriced(self, call: Call, route: Route) -> str | None:
        """What of its price is not known there; None where it is, and for what is free of charge."""
        if call.counts:
            return None
        price = self.price_of(route)
        if price is None:
            return "no price is known"
        tier = self.asked_tier(call, route)
        return None if cost.may_serve(price, tier) else f"no price is known of the service tier {tier}"

    def about(self, call: Call, route: Route) -> Decimal | None:
        """About what the call costs there in USD, to compare routes; None where no price is known."""
        output = _output(call, route)
        usage = Usage(
            input_total=max(size_of(call.chat) // _BYTES_PER_TOKEN, 1), output_total=output * (call.chat.n or 1)
        )
        tier = self.asked_tier(call, route)
        return cost.cost(usage, self.price_of(route), asked_tier=tier, served_tier=tier).usd

    def tokens(self, call: Call, route: Route) -> int:
        """About how many tokens an attempt will use, for limits per minute: corrected when it has ended."""
        if call.counts:
            return 0
        output = _output(call, route)
        return size_of(call.chat) // _BYTES_PER_TOKEN + output * (call.chat.n or 1)

    def asked_tier(self, call: Call, route: Route) -> str | None:
        """The tier of the provider's service that it is asked for there, in small letters; None: for none."""
        endpoint, chat = route.endpoint, call.chat
        if endpoint.force:
            for name in _TIER_FIELDS:
                if name in endpoint.force:
                    return _word(endpoint.force[name])
        if chat.native is not None and (speed := chat.native.fields.get("speed")) is not None:
            # Anthropic's fast mode: its prices are told of as those of a tier, and so is what served.
            return _word(speed)
        if chat.service_tier is None or not endpoint.omit.isdisjoint(_TIER_FIELDS):
            return None
        return chat.service_tier.lower()

    def complete_elsewhere(
        self,
        *,
        requested: str,
        provider: Provider | None,
        upstream: str,
        usage: Usage,
        reported_cost_usd: str | None,
        asked_tier: str | None = None,
        served_tier: str | None = None,
    ) -> Cost:
        """`Quote.complete` for an attempt of another process. `provider` is None where it is configured no more."""
        price = None if provider is None else self._price(requested, provider, upstream)
        return _cost(
            cost.cost(usage, price, _reported(reported_cost_usd), asked_tier=asked_tier, served_tier=served_tier)
        )

    def limits(self, call: Call, route: Route) -> cost.Ceiling:
        """
        The most tokens a request can use. What it does not bound itself, pictures and an answer of any length, the
        model's context window does.
        """
        chat, provider = call.chat, route.provider
        window = self._prices.context_window(provider.base_url, route.model)
        only_text = _is_text(chat)
        return cost.ceiling(
            body_bytes=size_of(chat),
            messages=len(chat.messages),
            max_output_tokens=chat.max_output_tokens,
            output_default=window if provider.max_output_tokens is None else provider.max_output_tokens,
            choices=chat.n or 1,
            further_input_tokens=0 if only_text else window,
            only_text=only_text,
        )

    def price_of(self, route: Route) -> KnownPrice | None:
        return self._price(route.asked, route.provider, route.model)

    def _price(self, requested: str, provider: Provider, upstream: str) -> KnownPrice | None:
        return self._prices.price(provider.id, provider.base_url, requested, upstream, datetime.now(UTC))


class Quote:
    """What is known of the cost of a call at a route: worked out once, and held to however it ends."""

    def __init__(self, billing: Billing, call: Call, route: Route) -> None:
        #: Nobody charges for it, whatever comes of it.
        self._free = call.counts
        self._price = billing.price_of(route)
        self._limits = cost.UNBOUNDED if self._free else billing.limits(call, route)
        self.asked_tier = billing.asked_tier(call, route)
        #: The price that `most` rests on.
        self.price_version = None if self._free or self._price is None else self._price.version
        #: USD; None where no bound is known.
        self.most = _ZERO if self._free else cost.upper_bound(self._price, self._limits, asked_tier=self.asked_tier)

    def complete(self, usage: Usage, reported_cost_usd: str | None, *, served_tier: str | None = None) -> Cost:
        """The cost of an answer that is proven complete."""
        charge = cost.cost(
            usage,
            self._price,
            _reported(reported_cost_usd),
            limits=self._limits,
            asked_tier=self.asked_tier,
            served_tier=served_tier,
        )
        return _cost(charge)

    def unproven(self, usage: Usage = NOTHING) -> Cost:
        """The cost of an attempt that was sent and not proven complete: unknown, with what bounds it."""
        return _cost(
            cost.unknown(cost.Reason.NO_TERMINAL, self._price, self._limits, usage, asked_tier=self.asked_tier)
        )


def _output(call: Call, route: Route) -> int:
    """About how many tokens of output a choice has."""
    if call.embedding is not None:
        return 0
    return call.chat.max_output_tokens or route.provider.max_output_tokens or _USUAL_OUTPUT_TOKENS


def _is_text(chat: ChatRequest) -> bool:
    """Nothing of it but text is for the model to read."""
    for message in chat.messages:
        for part in message.content:
            if not isinstance(part, Text):
                return False
    return True


def size_of(chat: ChatRequest) -> int:
    """Bytes of what the model is to read, as JSON."""
    if chat.native is not None:
        return sum(map(len, chat.native.fields.values()))
    return len(msgspec.json.encode((chat.messages, chat.tools, chat.response_format)))


def total(costs: list[Cost]) -> Cost:
    """The cost of a request from its attempts': charged amounts add up, an unknown one makes it unknown."""
    if len(costs) == 1 and not costs[0].flags and costs[0].list_usd is None:
        return costs[0]
    charged = sum((c.usd for c in costs if c.usd is not None), Decimal(0))
    last = costs[-1] if costs else Cost(state="zero", usd=Decimal(0), reason="not_dispatched")
    unknown = [c for c in costs if c.state == "unknown"]
    if not unknown:
        state = "charged" if any(c.state == "charged" for c in costs) else "zero"
        return Cost(state=state, usd=charged, price_version=last.price_version, reason=last.reason)
    bounds = [c.upper_bound_usd for c in unknown if c.upper_bound_usd is not None]
    return Cost(
        state="unknown",
        upper_bound_usd=charged + sum(bounds, Decimal(0)) if len(bounds) == len(unknown) else None,
        price_version=last.price_version,
        reason=unknown[-1].reason,
    )


def _word(raw: msgspec.Raw) -> str | None:
    """A JSON string in small letters; None for what is none."""
    try:
        return msgspec.json.decode(raw, type=str).lower()
    except msgspec.DecodeError:
        return None


def _reported(text: str | None) -> Decimal | None:
    if text is None:
        return None
    try:
        return Decimal(text)
    except InvalidOperation:
        return None


def _cost(charge: cost.Charge) -> Cost:
    return Cost(
        state=charge.state.value,
        usd=charge.usd,
        upper_bound_usd=charge.upper_bound,
        price_version=charge.price_version,
        reason=None if charge.reason is None else charge.reason.value,
        list_usd=charge.list_usd,
        flags=tuple(flag.value for flag in charge.flags) if charge.flags else (),
    )


#: The provider answered with an error: nothing was done.
REFUSED: Final = _cost(cost.zero(cost.Reason.ERROR_RESPONSE))
NOT_DISPATCHED: Final = _cost(cost.zero(cost.Reason.NOT_DISPATCHED))
#: Whatever came of it, nobody charges for such a call.
FREE_OF_CHARGE: Final = _cost(cost.zero(cost.Reason.FREE_OF_CHARGE))
