"""
Which providers may serve a request, in which order, and why each of the others may not.

Pure: it takes the configuration and a call and returns a plan. What live outcomes say about a provider (cooldown,
capacity) is admission's to answer, at the moment it is asked.
"""

from __future__ import annotations

import enum
import fnmatch
import hashlib
from collections.abc import Mapping, Sequence
from decimal import Decimal
from functools import cached_property
from typing import Protocol

import msgspec

from adapters.contract import Endpoint
from gateway.call import Call, Resend
from gateway.errors import Code, InvalidRequest, ModelNotFound, NoRoute
from gateway.outcome import RouteReport


class OnCancel(enum.StrEnum):
    """What becomes of a call that was sent when its caller takes it back."""

    #: The connection is closed at once.
    CLOSE = "close"
    #: The answer is read on for a while, and not kept: its end is then known, and what it cost.
    DRAIN = "drain"


class Confirms(enum.StrEnum):
    """Which calls are known to end when their connection is closed."""

    ALL = "all"
    #: A plain call goes on to its end.
    STREAMS = "streams"
    NONE = "none"


class Provider(msgspec.Struct, frozen=True, kw_only=True):
    """One server-owned profile, resolved against the environment."""

    id: str
    name: str
    enabled: bool
    protocol: str
    #: `scheme://host:port` of its base URL.
    origin: str
    #: The capacity group its requests compete in.
    group: str
    #: Whose account it uses: the name of the variable that holds the credential, never the credential.
    credential: str
    #: Its group limits tokens per minute, so each request says how many it may use.
    counts_tokens: bool = False
    #: Its rate limits are the account's, not the model's.
    account_wide_limits: bool = False
    #: Answers whose first content comes later than this count as failures for the breaker; None: they do not.
    first_byte_objective_s: float | None = None
    #: Environment variables that are needed and absent. Empty: it is ready.
    missing: tuple[str, ...]
    #: The names its upstream knows; any of them may be asked for as `provider/name`.
    models: tuple[str, ...]
    default_model: str | None
    #: None while it is not ready.
    endpoint: Endpoint | None
    #: The base URL as configured, for the record and for prices.
    base_url: str
    execution_limit_s: float
    isolation_s: float
    queue_timeout_s: float
    cancel_confirms_after_s: float | None
    resend_uncertain: Resend | None
    #: What the upstream makes of a request without an output limit, where that is known; bounds an unknown cost.
    max_output_tokens: int | None
    #: Of which calls `cancel_confirms_after_s` speaks.
    cancel_confirms: Confirms = Confirms.ALL
    #: None: close where that is known to end the call, else drain.
    on_cancel: OnCancel | None = None
    drain_s: float = 15.0
    #: Patterns of upstream models that think before they answer.
    reasoning_models: tuple[str, ...] = ()
    reasoning_execution_limit_s: float = 600.0
    #: What a call may take apart from its output, and how fast at least that has to come.
    execution_base_s: float = 30.0
    slowest_tokens_per_s: float = 10.0

    @property
    def capacity_key(self) -> str:
        """Its endpoint as admission knows it: two profiles at one endpoint can be put into groups of their own."""
        return f"{self.origin}#{self.id}"

    @property
    def ready(self) -> bool:
        return not self.missing

    def reasons(self, model: str) -> bool:
        """The upstream model is one that thinks before it answers."""
        return any(fnmatch.fnmatchcase(model, pattern) for pattern in self.reasoning_models)

    def limit_s(self, model: str, max_output_tokens: int | None) -> float:
        """
        From the dispatch of a call to its hard deadline.

        What a request asks for bounds how long its answer can take, and so how long a slot stays occupied should its
        end never be known. How much a model thinks is not bounded so: a reasoning model has its own limit.
        """
        if self.reasons(model):
            return self.reasoning_execution_limit_s
        tokens = self.max_output_tokens if max_output_tokens is None else max_output_tokens
        if tokens is None:
            return self.execution_limit_s
        # The first content alone may take as long as its clock says.
        first_byte_s = 0.0 if self.endpoint is None else self.endpoint.clocks.first_byte_s
        return min(
            self.execution_limit_s, max(self.execution_base_s, first_byte_s) + tokens / self.slowest_tokens_per_s
        )

    def confirms_after_s(self, *, streamed: bool) -> float | None:
        """How long after its connection was closed a call has ended; None where that is not known."""
        known = self.cancel_confirms is Confirms.ALL or (self.cancel_confirms is Confirms.STREAMS and streamed)
        return self.cancel_confirms_after_s if known else None

    def drains_for_s(self, *, streamed: bool) -> float:
        """How long a call is read on after its caller took it back; 0 closes it at once."""
        wish = self.on_cancel
        if wish is None:
            wish = OnCancel.DRAIN if self.confirms_after_s(streamed=streamed) is None else OnCancel.CLOSE
        return self.drain_s if wish is OnCancel.DRAIN else 0.0


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """A place a model may be served at."""

    provider: str
    #: The upstream's name for the model.
    model: str


class Model(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    #: In the order they are tried: its providers, then its fallback.
    targets: tuple[Target, ...]
    #: How many of the targets are providers proper.
    primary: int


class Route(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """Provider, upstream model, protocol and adapter settings. `route_id` stands for all of them."""

    provider: Provider
    endpoint: Endpoint
    model: str
    #: 0 for the first choice; counts the routes that were passed over before it.
    fallback_index: int

    @cached_property
    def route_id(self) -> str:
        endpoint = self.endpoint
        # Not the credentials: a rotated key is the same route.
        identity = (
            self.provider.id,
            endpoint.base_url,
            self.model,
            endpoint.protocol,
            sorted(endpoint.omit),
            sorted((name, bytes(value)) for name, value in endpoint.force.items()),
            endpoint.no_sentinel,
            endpoint.max_tokens_field,
            endpoint.reasoning_field,
        )
        return hashlib.sha256(msgspec.json.encode(identity)).hexdigest()[:16]

    @cached_property
    def report(self) -> RouteReport:
        return RouteReport(
            route_id=self.route_id, provider=self.provider.id, model=self.model, protocol=self.endpoint.protocol
        )


class LeftOut(msgspec.Struct, frozen=True, kw_only=True):
    provider: str
    model: str
    #: "disabled", "not_ready: OPENAI_API_KEY", "not_allowed", "max_cost_usd", "failover_off", "route_limit".
    reason: str


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


class Ceilings(Protocol):
    """The most a request can cost on a route in USD; None where no bound is known."""

    def __call__(self, call: Call, provider: Provider, upstream_model: str) -> Decimal | None: ...


class Router:
    """Model names to ordered routes, from a configuration that does not change while it lives."""

    def __init__(
        self,
        providers: Mapping[str, Provider],
        models: Mapping[str, Model],
        ceilings: Ceilings,
        settings: RoutingSettings,
    ) -> None:
        self._most_routes = settings.most_routes
        self._providers = providers
        self._models = models
        self._ceilings = ceilings
        self._routes: dict[tuple[str, str, int], Route] = {}

    def targets(self, model: str) -> Sequence[Target]:
        """
        Where a model may be served, in order: a configured name, or `provider/model` for any the provider lists
        and any configured model it serves. Raises `ModelNotFound`.
        """
        configured = self._models.get(model)
        if configured is not None:
            return configured.targets
        provider_id, _, name = model.partition("/")
        provider = self._providers.get(provider_id)
        if provider is not None:
            if name in provider.models:
                return (Target(provider=provider_id, model=name),)
            wanted = self._models.get(name)
            served = [t for t in wanted.targets if t.provider == provider_id] if wanted else []
            if served:
                return served[:1]
        raise ModelNotFound(f"no model is called {model[:200]!r}: GET /v1/models lists what there is", param="model")

    def plan(self, call: Call) -> Plan:
        """
        The routes for a call, and why the others were left out.

        Raises `ModelNotFound`, `InvalidRequest`, and `NoRoute` where none is left.
        """
        options = call.options
        if options.role is not None:
            raise InvalidRequest("no role is configured: ask for a model", code=Code.UNSUPPORTED_FIELD, param="role")
        routes: list[Route] = []
        left_out: list[LeftOut] = []
        for index, target in enumerate(self.targets(call.model)):
            provider = self._providers[target.provider]
            reason = self._objection(call, provider, target.model)
            if reason is None and routes and not options.allow_failover:
                reason = "failover_off"
            if reason is None and len(routes) >= self._most_routes:
                reason = "route_limit"
            if reason is None:
                routes.append(self._route(provider, target.model, index))
            else:
                left_out.append(LeftOut(provider=provider.id, model=target.model, reason=reason))
        if not routes:
            reasons = "; ".join(f"{out.provider}: {out.reason}" for out in left_out)
            unready = all(out.reason.startswith(("not_ready", "disabled")) for out in left_out)
            raise NoRoute(
                f"no provider can serve {call.model!r} ({reasons})",
                code=Code.PROVIDER_NOT_READY if unready else Code.NO_ROUTE,
            )
        return Plan(routes=tuple(routes), left_out=tuple(left_out))

    def _objection(self, call: Call, provider: Provider, model: str) -> str | None:
        if not provider.enabled:
            return "disabled"
        if not provider.ready:
            return f"not_ready: {', '.join(provider.missing)} not set"
        if call.options.allowed_providers and provider.id not in call.options.allowed_providers:
            return "not_allowed"
        if call.options.max_cost_usd is not None:
            ceiling = self._ceilings(call, provider, model)
            if ceiling is None or ceiling > call.options.max_cost_usd:
                return "max_cost_usd"
        return None

    def _route(self, provider: Provider, model: str, index: int) -> Route:
        known = self._routes.get((provider.id, model, index))
        if known is None:
            assert provider.endpoint is not None, "a provider without an endpoint is not ready"
            known = Route(provider=provider, endpoint=provider.endpoint, model=model, fallback_index=index)
            self._routes[provider.id, model, index] = known
        return known
