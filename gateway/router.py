"""
Which routes may serve a request, in which order, and why each of the others may not.

Pure: it takes the configuration and a call and returns a plan. What live outcomes say about a provider (cooldown,
capacity) is admission's to answer, at the moment it is asked; how quickly a route began to answer of late is told here.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator, Mapping, Sequence
from decimal import Decimal
from functools import cached_property
from typing import NamedTuple, Protocol

import msgspec

from adapters.contract import Endpoint
from gateway.call import Call, Order, Unsupported
from gateway.errors import Code, GatewayError, InvalidRequest, ModelNotFound, NoRoute
from gateway.needs import DROPPABLE, Capability, field_of, needs_of
from gateway.ordering import Candidate, Latencies, ordered
from gateway.outcome import LeftOut, RouteReport
from gateway.policy import ANYTHING, Policy, lowest
from gateway.provider import Adjustment, Provider


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """A place a model may be served at."""

    provider: str
    #: The upstream's name for the model.
    model: str
    #: What the model's table says otherwise than the provider's, then what the route's own does.
    adjustments: tuple[Adjustment, ...] = ()
    #: Its share where the order is drawn.
    weight: float = 1.0
    #: By role, the `route_id` that was found fit for it.
    qualified_for: Mapping[str, str] = {}


class Model(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    #: In the order they are tried: its providers, then its fallback.
    targets: tuple[Target, ...]
    #: How many of the targets are providers proper.
    primary: int
    order: Order = Order.PRIORITY


class Role(msgspec.Struct, frozen=True, kw_only=True):
    """What a caller may ask for instead of a model."""

    name: str
    #: Configured models, in order.
    models: tuple[str, ...]
    order: Order = Order.PRIORITY


class Route(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """Provider, upstream model, protocol and adapter settings. `route_id` stands for all of them."""

    #: As this route has it: with what the model's and the route's own tables say.
    provider: Provider
    endpoint: Endpoint
    model: str
    #: 0 for the first choice; counts the routes that were passed over before it.
    fallback_index: int
    #: The configured model it belongs to, or the name that pinned it. Prices may hang on it.
    asked: str
    weight: float = 1.0

    @cached_property
    def route_id(self) -> str:
        return fingerprint(self.provider.id, self.model, self.endpoint)

    @cached_property
    def report(self) -> RouteReport:
        return RouteReport(
            route_id=self.route_id, provider=self.provider.id, model=self.model, protocol=self.endpoint.protocol
        )


def fingerprint(provider_id: str, model: str, endpoint: Endpoint) -> str:
    """
    What stands for a route: all that decides what is asked of whom. Not the credentials, as a rotated key is the same
    route, and not the clocks, as a patient one gives the same answers.
    """
    identity = (
        provider_id,
        endpoint.base_url,
        model,
        endpoint.protocol,
        sorted(endpoint.omit),
        sorted((name, bytes(value)) for name, value in endpoint.force.items()),
        endpoint.no_sentinel,
        endpoint.max_tokens_field,
        endpoint.reasoning_field,
        endpoint.reasoning,
        endpoint.reasoning_object,
        endpoint.cache_control,
        endpoint.default_max_tokens,
    )
    return hashlib.sha256(msgspec.json.encode(identity)).hexdigest()[:16]


#: The key has a budget, and nobody knows the most that the request can cost there.
_NOT_BOUNDED = "cost_not_bounded"
#: Configured so that what has no price is not served.
_UNPRICED = "pricing_required"


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    routes: tuple[Route, ...]
    left_out: tuple[LeftOut, ...]


class RoutingSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How far the gateway goes for one request."""

    #: Routes tried.
    most_routes: int = 3
    #: Dispatches in all.
    most_attempts: int = 6
    #: Seconds before a transient failure is tried again where no other route is left; jitter comes on top.
    backoff_s: tuple[float, ...] = (1.0, 2.0, 4.0)
    #: How long the last message waits for its settlement before it says "pending".
    settlement_patience_s: float = 2.0
    #: What anybody may use.
    policy: Policy = ANYTHING


class Costs(Protocol):
    """What a request costs on a route, in USD."""

    def most(self, call: Call, route: Route) -> Decimal | None:
        """None where no bound is known."""
        ...

    def unbounded(self, call: Call, route: Route) -> str:
        """Where no bound is known: why not, and what would help."""
        ...

    def about(self, call: Call, route: Route) -> Decimal | None:
        """None where no price is known."""
        ...

    def unpriced(self, call: Call, route: Route) -> str | None:
        """What of its price is not known there; None where it is."""
        ...


class _Place(NamedTuple):
    """One of the targets of what was asked for."""

    target: Target
    #: The provider as this target has it.
    provider: Provider
    asked: str
    fallback: bool

    def route(self, index: int) -> Route | None:
        """None while its provider is not ready."""
        if self.provider.endpoint is None:
            return None
        return Route(
            provider=self.provider,
            endpoint=self.provider.endpoint,
            model=self.target.model,
            fallback_index=index,
            asked=self.asked,
            weight=self.target.weight,
        )


class Router:
    """Model names and roles to ordered routes, from a configuration that does not change while it lives."""

    def __init__(
        self,
        providers: Mapping[str, Provider],
        models: Mapping[str, Model],
        costs: Costs,
        settings: RoutingSettings,
        roles: Mapping[str, Role] = {},
    ) -> None:
        self._most_routes = settings.most_routes
        self._policy = settings.policy
        self._providers = providers
        self._models = models
        self._roles = roles
        self._costs = costs
        self._places: dict[str, tuple[_Place, ...]] = {}
        self._routes: dict[tuple[str, int, int], Route | None] = {}
        #: By model, the plan of every usual call, where there is but one.
        self._usual_plans: dict[str, Plan] = {}
        self._latencies = Latencies(time.monotonic)

    def seen(self, route: Route, seconds: float | None, *, streamed: bool) -> None:
        """
        The line tells how long a route took to its first content, or is to be taken for: to fail at once is not to be
        quick. None: that says nothing of it.
        """
        if seconds is not None:
            self._latencies.observe(route.route_id, seconds, streamed=streamed)

    # ---------------------------------------------------------------- what is asked for

    def places(self, model: str) -> Sequence[_Place]:
        """
        Where a model may be served, in order: a configured name, or `provider/model` for any the provider lists
        and any configured model it serves. Raises `ModelNotFound`.
        """
        known = self._places.get(model)
        if known is None:
            known = tuple(self._found(model))
            if not known:
                raise _absent(model)
            self._places[model] = known
        return known

    def _found(self, model: str) -> Iterator[_Place]:
        configured = self._models.get(model)
        if configured is not None:
            for at, target in enumerate(configured.targets):
                yield self._place(target, model, fallback=at >= configured.primary)
            return
        provider_id, _, name = model.partition("/")
        provider = self._providers.get(provider_id)
        if provider is None:
            return
        wanted = self._models.get(name)
        served = [target for target in wanted.targets if target.provider == provider_id] if wanted else []
        if name in provider.models:
            # Whoever pins the model by the upstream's name gets what the model's own table says of it, too.
            target = next((t for t in served if t.model == name), Target(provider=provider_id, model=name))
            yield self._place(target, name if target in served else model, fallback=False)
        elif served:
            yield self._place(served[0], name, fallback=False)

    def _place(self, target: Target, asked: str, *, fallback: bool) -> _Place:
        return _Place(target, target_provider(self._providers, target), asked, fallback)

    def known(self, model: str, role: str | None, policy: Policy) -> None:
        """
        Raises `ModelNotFound`, also for a model that a key of this policy may have nowhere, as `plan` does, or
        `InvalidRequest` for a role that is not configured.
        """
        if role is not None:
            self._role(role)
        if model or role is None:
            _not_hidden(model, self.places(model), policy)

    def allowed(self, model: str, policy: Policy) -> frozenset[tuple[str, str]]:
        """
        Where a key of this policy may have the model, by the configuration's own policy, too: the provider's id and its
        name for the model. Empty: nowhere, so the name is nothing to that key. Raises `ModelNotFound`.
        """
        return frozenset(
            (place.provider.id, place.target.model)
            for place in self.places(model)
            if all(party.allows(place.provider.id, place.target.model, place.asked) for party in (self._policy, policy))
        )

    def _role(self, name: str) -> Role:
        role = self._roles.get(name)
        if role is None:
            there = ", ".join(sorted(self._roles)) or "none: ask for a model"
            raise InvalidRequest(f"no role is called {name[:200]!r}; configured are {there}", param="role")
        return role

    def _asked(self, call: Call) -> tuple[str, Sequence[_Place], Order]:
        """A name for it, its places and their order."""
        name = call.options.role
        if name is None:
            configured = self._models.get(call.model)
            return call.model, self.places(call.model), Order.PRIORITY if configured is None else configured.order
        role = self._role(name)
        if call.model:
            return f"role:{name} {call.model}", self.places(call.model), role.order
        key = f"role:{name}"
        if key not in self._places:
            self._places[key] = tuple(place for model in role.models for place in self.places(model))
        return key, self._places[key], role.order

    # ---------------------------------------------------------------- the plan

    def plan(self, call: Call, *, streamed: bool = True) -> Plan:
        """
        The routes for a call, and why the others were left out.

        Raises `ModelNotFound`, also for a model that the key may have nowhere, `InvalidRequest`, and `NoRoute` where
        none is left.
        """
        usual = self._is_usual(call)
        if usual and (known := self._usual_plans.get(call.model)) is not None:
            return known
        name, places, order = self._asked(call)
        if call.model or call.options.role is None:
            _not_hidden(call.model, places, call.policy)
        routes: list[Route] = []
        left_out: list[LeftOut] = []
        missing: set[Capability] = set()
        policies = self._policies(call)
        for index, at in enumerate(self._ordered(call, name, places, call.options.order or order, streamed=streamed)):
            place = places[at]
            route = self._route(name, places, at, index)
            reason = self._objection(call, place, route, policies, missing)
            if reason is None and routes and not call.options.allow_failover:
                reason = "failover_off"
            if reason is None and len(routes) >= self._most_routes:
                reason = "route_limit"
            if reason is None and route is not None:
                routes.append(route)
            else:
                left_out.append(
                    LeftOut(provider=place.provider.id, model=place.target.model, reason=reason or "not_ready")
                )
        if not routes:
            error = _nothing_left(call, left_out, missing)
            if call.options.explain:
                error.left_out = tuple(left_out)
            raise error
        plan = Plan(routes=tuple(routes), left_out=tuple(left_out))
        if usual and (order is Order.PRIORITY or len(places) == 1) and not any(map(_looks_at_calls, places)):
            self._usual_plans[call.model] = plan
        return plan

    def _is_usual(self, call: Call) -> bool:
        """Nothing in it but its model, and what its chat needs, decides about its routes."""
        options = call.options
        return (
            options.role is None
            and options.order is None
            and options.allow_failover
            and not options.allowed_providers
            and not options.allowed_models
            and options.max_cost_usd is None
            and call.policy is ANYTHING
            and self._policy is ANYTHING
            and not call.budgeted
        )

    def _ordered(
        self, call: Call, name: str, places: Sequence[_Place], order: Order, *, streamed: bool
    ) -> Sequence[int]:
        if order is Order.PRIORITY or len(places) == 1:
            return range(len(places))
        candidates = []
        for at, place in enumerate(places):
            route = self._route(name, places, at, 0)
            if route is None:
                candidates.append(Candidate(route_id="", fallback=place.fallback, weight=0.0))
                continue
            candidates.append(
                Candidate(
                    route_id=route.route_id,
                    fallback=place.fallback,
                    cost=None if order is Order.LATENCY else self._costs.about(call, route),
                    latency_s=self._latencies.seconds(route.route_id, streamed=streamed),
                    weight=route.weight,
                )
            )
        return ordered(order, candidates, call.request_id)

    def _route(self, name: str, places: Sequence[_Place], at: int, index: int) -> Route | None:
        key = (name, at, index)
        if key not in self._routes:
            self._routes[key] = places[at].route(index)
        return self._routes[key]

    def _policies(self, call: Call) -> Sequence[tuple[str, Policy]]:
        """Of those parties that limit anything."""
        options = call.options
        asked_for = ANYTHING
        if options.allowed_providers or options.allowed_models or options.max_cost_usd is not None:
            asked_for = Policy(
                providers=frozenset(options.allowed_providers) or None,
                models=options.allowed_models or None,
                max_cost_usd=options.max_cost_usd,
            )
        parties = (("configuration", self._policy), ("key", call.policy), ("request", asked_for))
        return [(party, policy) for party, policy in parties if policy is not ANYTHING]

    def _objection(
        self,
        call: Call,
        place: _Place,
        route: Route | None,
        policies: Sequence[tuple[str, Policy]],
        missing: set[Capability],
    ) -> str | None:
        """Why this route may not serve; what it lacks for this request goes into `missing`."""
        provider, options = place.provider, call.options
        if not provider.enabled:
            return "disabled"
        if route is None:
            return f"not_ready: {', '.join(provider.missing)} not set"
        if options.role is not None and (objection := _unqualified(place, route, options.role)) is not None:
            return objection
        for party, policy in policies:
            if not policy.allows(provider.id, route.model, route.asked):
                return f"not_allowed: {party}"
        if provider.cannot and (lacks := provider.cannot & needs_of(call.chat)):
            if (options.unsupported or provider.unsupported) is Unsupported.DROP:
                lacks -= DROPPABLE
            if lacks:
                missing |= lacks
                return f"capability: {', '.join(sorted(lacks))}"
        if provider.require_pricing and (lacks_price := self._costs.unpriced(call, route)) is not None:
            return f"{_UNPRICED}: {lacks_price}"
        if call.budgeted and self._costs.most(call, route) is None:
            return f"{_NOT_BOUNDED}: {self._costs.unbounded(call, route)}"
        limit = lowest(*(policy.max_cost_usd for _, policy in policies))
        if limit is not None:
            most = self._costs.most(call, route)
            if most is None or most > limit:
                return "max_cost_usd"
        return None


def _looks_at_calls(place: _Place) -> bool:
    """What a call needs, or what it asks for, decides whether it may be served here."""
    return bool(place.provider.cannot) or place.provider.require_pricing


def target_provider(providers: Mapping[str, Provider], target: Target) -> Provider:
    """The provider as this target has it: provider, then model, then route."""
    return providers[target.provider].for_model(target.model).adjusted(*target.adjustments)


class Described(msgspec.Struct, frozen=True, kw_only=True):
    """A configured route, for those who look after it."""

    #: The configured model, and the provider with its name for it.
    model: str
    provider: str
    upstream: str
    protocol: str
    fallback: bool
    #: As it is now; None while its provider is not ready.
    route_id: str | None
    #: The roles that it was found fit for, as it is.
    roles: tuple[str, ...]
    #: The roles that it was found fit for as another route, and the `route_id` it had then. Empty while that is not
    #: known.
    lost: Mapping[str, str]


def described(providers: Mapping[str, Provider], models: Mapping[str, Model]) -> Iterator[Described]:
    """Every route of every configured model."""
    for model in models.values():
        for at, target in enumerate(model.targets):
            provider = target_provider(providers, target)
            endpoint = provider.endpoint
            current = None if endpoint is None else fingerprint(provider.id, target.model, endpoint)
            yield Described(
                model=model.name,
                provider=provider.id,
                upstream=target.model,
                protocol=provider.protocol,
                fallback=at >= model.primary,
                route_id=current,
                roles=tuple(role for role, recorded in target.qualified_for.items() if recorded == current),
                lost={
                    role: recorded
                    for role, recorded in target.qualified_for.items()
                    if current is not None and recorded != current
                },
            )


def _absent(model: str) -> ModelNotFound:
    return ModelNotFound(f"no model is called {model[:200]!r}: GET /v1/models lists what there is", param="model")


def _not_hidden(model: str, places: Sequence[_Place], policy: Policy) -> None:
    """Raises for what the key may have nowhere as for what there is not: it is not told that it exists."""
    if not any(policy.allows(place.provider.id, place.target.model, place.asked) for place in places):
        raise _absent(model)


def _unqualified(place: _Place, route: Route, role: str) -> str | None:
    recorded = place.target.qualified_for.get(role)
    if recorded is None:
        return f"not_qualified: {role}"
    if recorded != route.route_id:
        return f"not_qualified: {role}, it is another route than the one that was: {route.route_id}, not {recorded}"
    return None


def _nothing_left(call: Call, left_out: Sequence[LeftOut], missing: set[Capability]) -> GatewayError:
    wanted = repr(call.model[:200]) if call.options.role is None else f"the role {call.options.role[:200]!r}"
    reasons = "; ".join(f"{out.provider}: {out.reason}" for out in left_out)
    if missing:
        what = ", ".join(sorted(missing))
        return InvalidRequest(
            f"no route of {wanted} can do what the request needs: {what} ({reasons})",
            code=Code.UNSUPPORTED_FIELD,
            param=call.told_path(call.chat.written(field_of(call.chat, min(missing)))),
        )
    if (left_out and all(out.reason.startswith("not_qualified") for out in left_out)) or not left_out:
        return NoRoute(
            f"no route is qualified for {wanted} ({reasons or 'none is configured'}): "
            "`tollbridge check` shows what each route is now",
            code=Code.PROVIDER_NOT_READY,
        )
    if any(out.reason.startswith(_UNPRICED) for out in left_out):
        others = (_UNPRICED, "not_ready", "disabled", "not_qualified", "not_allowed")
        if all(out.reason.startswith(others) for out in left_out):
            return NoRoute(
                f"no route of {wanted} has a price, and none is served without one ({reasons}): "
                "`tollbridge prices check` lists them",
                code=Code.PRICING_REQUIRED,
            )
    if any(out.reason.startswith(_NOT_BOUNDED) for out in left_out):
        reasons += "; a key with a budget is served only where the most that a request can cost is known"
    operators = ("not_ready", "disabled", "not_qualified")
    return NoRoute(
        f"no provider can serve {wanted} ({reasons})",
        code=Code.PROVIDER_NOT_READY if all(out.reason.startswith(operators) for out in left_out) else Code.NO_ROUTE,
    )
