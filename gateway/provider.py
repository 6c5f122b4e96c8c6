"""
A provider as configuration resolves it, and what a model or a single route may say otherwise.

A setting that reached one route and not another of the same model would be found out at the wrong moment. So there is
one way in which they are laid over each other, `Provider.adjusted`, and what follows knows of no levels.
"""

from __future__ import annotations

import enum
import fnmatch
from collections.abc import Mapping

import msgspec

from adapters.contract import Clocks, Endpoint
from gateway.call import Resend, Unsupported
from gateway.needs import Capability


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
    #: Limits of its group on tokens per minute by upstream model, "" for the whole group. Where there is any, each
    #: request says how many it may use.
    tokens_per_minute: Mapping[str, int] = {}
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
    #: What it is known not to do. What is not known is tried.
    cannot: frozenset[Capability] = frozenset()
    #: What becomes of a parameter that cannot be said here, where the request does not say.
    unsupported: Unsupported = Unsupported.REFUSE
    #: A route whose price is not known is refused.
    require_pricing: bool = False
    #: Its free endpoint is open to anybody: only a call tells whether the credential is good.
    check_is_open: bool = False
    #: Patterns of upstream models that cost nothing.
    free: tuple[str, ...] = ()
    #: What holds for those upstream models only that fit a pattern, in the order of the file.
    per_model: tuple[tuple[str, Adjustment], ...] = ()

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

    def for_model(self, model: str) -> Provider:
        """With what its own profile says of this upstream model."""
        return self.adjusted(
            *(adjustment for pattern, adjustment in self.per_model if fnmatch.fnmatchcase(model, pattern))
        )

    def adjusted(self, *adjustments: Adjustment) -> Provider:
        """The same provider as one of its routes sees it. Later adjustments win."""
        found = self
        for adjustment in adjustments:
            found = adjustment.over(found)
        return found

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


class Adjustment(msgspec.Struct, frozen=True, kw_only=True):
    """What a table says of some of a provider's routes. None: nothing, the provider's own setting holds."""

    protocol: str | None = None
    reasoning: str | None = None
    #: Added to what is left out already; "!name" takes a name back. What is forced at a nearer table is sent, too.
    omit: frozenset[str] = frozenset()
    #: Field by field; the nearest table wins.
    force: Mapping[str, msgspec.Raw] = {}
    max_tokens_field: str | None = None
    reasoning_field: str | None = None
    reasoning_object: bool | None = None
    cache_control: bool | None = None
    default_max_tokens: int | None = None
    no_sentinel: bool | None = None
    connect_s: float | None = None
    first_byte_s: float | None = None
    gap_s: float | None = None
    execution_limit_s: float | None = None
    execution_base_s: float | None = None
    slowest_tokens_per_s: float | None = None
    reasoning_execution_limit_s: float | None = None
    isolation_s: float | None = None
    queue_timeout_s: float | None = None
    first_byte_objective_s: float | None = None
    max_output_tokens: int | None = None
    resend_uncertain: Resend | None = None
    unsupported: Unsupported | None = None
    require_pricing: bool | None = None
    #: What it cannot do beside what is said already, and what it can do whatever is said.
    cannot: frozenset[Capability] = frozenset()
    can: frozenset[Capability] = frozenset()

    def over(self, provider: Provider) -> Provider:
        said = {name: value for name in _OF_THE_PROVIDER if (value := getattr(self, name)) is not None}
        return msgspec.structs.replace(
            provider,
            protocol=self.protocol or provider.protocol,
            cannot=(provider.cannot | self.cannot) - self.can,
            endpoint=None if provider.endpoint is None else self._over(provider.endpoint),
            **said,
        )

    def _over(self, endpoint: Endpoint) -> Endpoint:
        said = {name: value for name in _OF_THE_ENDPOINT if (value := getattr(self, name)) is not None}
        taken_back = {name.removeprefix("!") for name in self.omit if name.startswith("!")}
        omit = {name for name in self.omit if not name.startswith("!")}
        clocks = {name: value for name in Clocks.__struct_fields__ if (value := getattr(self, name)) is not None}
        return msgspec.structs.replace(
            endpoint,
            omit=(endpoint.omit - self.force.keys() - taken_back) | omit,
            force={**{name: value for name, value in endpoint.force.items() if name not in omit}, **self.force},
            clocks=msgspec.structs.replace(endpoint.clocks, **clocks),
            **said,
        )


_OF_THE_PROVIDER = (
    "execution_limit_s",
    "execution_base_s",
    "slowest_tokens_per_s",
    "reasoning_execution_limit_s",
    "isolation_s",
    "queue_timeout_s",
    "first_byte_objective_s",
    "max_output_tokens",
    "resend_uncertain",
    "unsupported",
    "require_pricing",
)
_OF_THE_ENDPOINT = (
    "protocol",
    "reasoning",
    "max_tokens_field",
    "reasoning_field",
    "reasoning_object",
    "cache_control",
    "default_max_tokens",
    "no_sentinel",
)
