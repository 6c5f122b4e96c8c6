"""
The shape of the configuration file: every table, its keys, their kinds and defaults.

Strict, so that a typing error is a fault and not a setting that was never made. What the tables mean together is
`gateway.config` and `gateway.profiles`.
"""

from __future__ import annotations

import re
import zoneinfo
from typing import Annotated, Any, Final, Literal

import pydantic
from pydantic_core import PydanticCustomError

#: What POSIX calls a name. Not what most secrets look like: those have other characters, or no letter at the start.
_VARIABLE_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)
NO_NAME: Final = (
    'must be the NAME of an environment variable, such as "OPENAI_API_KEY" (letters, digits and _): the secret itself '
    "belongs in the environment. What stands here is not repeated, as it may be one"
)
EXECUTION_LIMIT_S: Final = 120.0
#: Reasoning models think longer than others answer.
REASONING_LIMIT_S: Final = 600.0
#: A call that nobody waits for any more must not occupy a slot for longer than one that somebody does.
MOST_DRAIN_S: Final = 600.0

#: Seconds. Past this a time means nothing, and neither the clocks nor the database can add it to now.
_LONGEST_S: Final = 10_000_000.0
_Positive = Annotated[float, pydantic.Field(gt=0, le=_LONGEST_S, allow_inf_nan=False)]
_NotNegative = Annotated[float, pydantic.Field(ge=0, le=_LONGEST_S, allow_inf_nan=False)]
_Name = Annotated[str, pydantic.Field(min_length=1, max_length=200, pattern=r"^[^\s\x00-\x1f]+$")]


def _variable_name(text: str) -> str:
    if not _VARIABLE_NAME.fullmatch(text):
        raise PydanticCustomError("no_variable_name", NO_NAME)
    return text


_VariableName = Annotated[str, pydantic.AfterValidator(_variable_name)]


_Reasoning = Literal["effort", "budget", "off"]
_Resend = Literal["never", "before_first_byte"]
_Unsupported = Literal["refuse", "drop"]
_Order = Literal["priority", "cost", "latency", "weighted"]
_Capability = Literal[
    "tools", "images", "documents", "audio", "json_schema", "json_object", "reasoning", "logprobs", "n"
]


class Strict(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid", strict=True, frozen=True)


class RouteTable(Strict):
    """What may be said of one route, of all routes of a model, and of all routes to a kind of upstream model."""

    protocol: str | None = None
    omit: list[_Name] = []
    force: dict[str, Any] = {}
    reasoning: _Reasoning | None = None
    max_tokens_field: str | None = None
    reasoning_field: str | None = None
    reasoning_object: bool | None = None
    cache_control: bool | None = None
    default_max_tokens: Annotated[int, pydantic.Field(gt=0)] | None = None
    no_sentinel: bool | None = None
    connect_s: _Positive | None = None
    first_byte_s: _Positive | None = None
    gap_s: _Positive | None = None
    execution_limit_s: _Positive | None = None
    execution_base_s: _Positive | None = None
    slowest_tokens_per_s: _Positive | None = None
    reasoning_execution_limit_s: _Positive | None = None
    isolation_s: _NotNegative | None = None
    queue_timeout_s: _Positive | None = None
    first_byte_objective_s: _Positive | None = None
    max_output_tokens: Annotated[int, pydantic.Field(gt=0)] | None = None
    resend_uncertain: _Resend | None = None
    unsupported: _Unsupported | None = None
    cannot: list[_Capability] = []
    can: list[_Capability] = []
    #: None: as `metering` says.
    require_pricing: bool | None = None


class TargetTable(RouteTable):
    provider: _Name
    model: _Name | None = None
    #: Its share where the order is drawn; 0 comes last.
    weight: Annotated[float, pydantic.Field(ge=0, le=1_000_000, allow_inf_nan=False)] = 1.0
    #: By role: the route_id that was found fit for it.
    qualified_for: dict[_Name, Annotated[str, pydantic.Field(pattern=r"^[0-9a-f]{16}$")]] = {}
    #: Of this provider and its model, under whatever name it is asked for.
    price: dict[str, Any] | None = None


class ModelTable(RouteTable):
    providers: Annotated[list[_Name | TargetTable], pydantic.Field(min_length=1)]
    fallback: list[_Name | TargetTable] = []
    price: dict[str, Any] | None = None
    order: _Order = "priority"


class RoleTable(Strict):
    #: Configured models. Empty: those with a route that was qualified for the role, in the order of the file.
    models: list[_Name] = []
    order: _Order = "priority"


class ProviderTable(Strict):
    name: str | None = None
    type: Literal["llm"] = "llm"
    enabled: bool = True
    protocol: str | None = None
    base_url: str | None = None
    credentials: list[_VariableName] = []
    requires: list[_VariableName] = []
    #: The request header that carries the credential; "authorization" sends it as a Bearer token.
    auth_header: str = "authorization"
    headers: dict[str, str] = {}
    models: list[_Name] = []
    default_model: _Name | None = None
    omit: list[_Name] = []
    force: dict[str, Any] = {}
    reasoning: _Reasoning | None = None
    no_sentinel: bool = False
    max_tokens_field: str | None = None
    reasoning_field: str | None = None
    reasoning_object: bool = False
    cache_control: bool = False
    default_max_tokens: Annotated[int, pydantic.Field(gt=0)] | None = None
    max_output_tokens: Annotated[int, pydantic.Field(gt=0)] | None = None
    connect_s: _Positive = 5.0
    first_byte_s: _Positive = 5.0
    gap_s: _Positive = 1.5
    keep_alive_s: _NotNegative = 4.0
    execution_limit_s: _Positive = EXECUTION_LIMIT_S
    execution_base_s: _Positive = 30.0
    slowest_tokens_per_s: _Positive = 10.0
    #: Patterns: `*` stands for any text.
    reasoning_models: list[_Name] = []
    reasoning_execution_limit_s: _Positive = REASONING_LIMIT_S
    isolation_s: _NotNegative = 30.0
    queue_timeout_s: _Positive = 60.0
    cancel_confirms_after_s: _NotNegative | None = None
    cancel_confirms: Literal["all", "streams", "none"] = "all"
    #: Who says what closing a connection does: a URL; "none" where nobody does in public.
    cancel_source: Annotated[str, pydantic.Field(pattern=r"^(none|https?://\S+)$")] | None = None
    on_cancel: Literal["close", "drain"] | None = None
    drain_s: Annotated[float, pydantic.Field(gt=0, le=MOST_DRAIN_S, allow_inf_nan=False)] = 15.0
    resend_uncertain: _Resend | None = None
    unsupported: _Unsupported = "refuse"
    cannot: list[_Capability] = []
    #: Patterns of upstream models that cost nothing, and who says so.
    free: list[_Name] = []
    free_source: Annotated[str, pydantic.Field(pattern=r"^https?://\S+$")] | None = None
    #: What holds only for those upstream models that fit a pattern; a later one that fits wins over an earlier.
    per_model: dict[_Name, RouteTable] = {}
    #: A free endpoint that `check --live` asks, where the list of models tells less. After the base URL.
    check_path: Annotated[str, pydantic.Field(pattern=r"^/\S*$")] | None = None
    #: Whether that endpoint answers a wrong credential like a right one.
    check_is_open: bool = False
    #: The capacity group it competes in, where that is not the one of its endpoint.
    group: _Name | None = None
    #: Whether a rate limit is told of one model or of the account as a whole.
    rate_limit_scope: Literal["model", "account"] = "model"
    first_byte_objective_s: _Positive | None = None


class ModelLimitsTable(Strict):
    concurrency: Annotated[int, pydantic.Field(ge=0, le=100_000)] | None = None
    requests_per_minute: Annotated[int, pydantic.Field(gt=0, le=1_000_000_000)] | None = None
    tokens_per_minute: Annotated[int, pydantic.Field(gt=0, le=1_000_000_000_000)] | None = None


class GroupTable(Strict):
    #: Endpoints that share it, beside the one it may be named for.
    endpoints: list[_Name] = []
    concurrency: Annotated[int, pydantic.Field(ge=0, le=100_000)] = 3
    quarantine_headroom: Annotated[int, pydantic.Field(ge=0, le=100_000)] = 0
    requests_per_minute: Annotated[int, pydantic.Field(gt=0, le=1_000_000_000)] | None = None
    tokens_per_minute: Annotated[int, pydantic.Field(gt=0, le=1_000_000_000_000)] | None = None
    models: dict[_Name, ModelLimitsTable] = {}
    queue: Annotated[int, pydantic.Field(ge=0, le=1_000_000)] = 32
    failure_threshold: Annotated[int, pydantic.Field(gt=0)] = 5
    failure_window_s: _Positive = 30.0
    first_cooldown_s: _Positive = 10.0
    longest_cooldown_s: _Positive = 300.0


class GatewayTable(Strict):
    data_dir: str | None = None
    database_url: str | None = None
    content_database_url: str | None = None
    listen_database_url: str | None = None
    rest_listen: str | None = None
    grpc_listen: str | None = None
    #: Seconds for which all is still served when the gateway stops, while its health says no.
    drain_delay_s: _NotNegative = 1.0
    #: Seconds that running requests get to end after that.
    drain_s: _Positive = 30.0
    #: Seconds for which a stream without content keeps its status open.
    stream_commit_after_s: _NotNegative = 10.0
    #: Seconds between two comments after that.
    stream_keepalive_s: _Positive = 15.0
    #: Seconds that one piece of a stream may wait for its caller to read.
    idle_reader_s: _Positive = 60.0
    #: Seconds that the end of a call with an idempotency key is kept, and the bytes of an answer that is.
    idempotency_retention_s: _Positive = 86_400.0
    idempotency_max_answer_bytes: Annotated[int, pydantic.Field(gt=0, le=100_000_000)] = 1_048_576
    #: Of one API key: how many it may have at once, and the bytes of all their answers.
    idempotency_max_keys: Annotated[int, pydantic.Field(gt=0, le=100_000_000)] = 100_000
    idempotency_max_bytes: Annotated[int, pydantic.Field(gt=0, le=1_000_000_000_000)] = 1_073_741_824


class AdmissionTable(Strict):
    revision: Annotated[int, pydantic.Field(ge=0, le=2_000_000_000)] = 1
    lease_s: _Positive = 60.0
    margin_s: _Positive = 5.0
    unconfirmed_grant_s: _Positive = 2.0
    rescan_s: _Positive = 1.0
    statement_s: _Positive = 5.0
    retry_s: _Positive = 3.0
    longest_retry_after_s: _Positive = 3600.0
    unavailable_s: _Positive = 300.0
    connections: Annotated[int, pydantic.Field(gt=0, le=64)] = 4
    zone: str = "UTC"

    @pydantic.field_validator("zone")
    @classmethod
    def _known_zone(cls, zone: str) -> str:
        if zone not in zoneinfo.available_timezones():
            raise ValueError("not a time zone of the IANA database")
        return zone

    @pydantic.model_validator(mode="after")
    def _margin_fits(self) -> AdmissionTable:
        if self.margin_s >= self.lease_s / 2:
            raise ValueError("margin_s must be less than half of lease_s")
        return self


class RoutingTable(Strict):
    most_routes: Annotated[int, pydantic.Field(gt=0, le=20)] = 3
    most_attempts: Annotated[int, pydantic.Field(gt=0, le=50)] = 6
    backoff_s: list[_NotNegative] = [1.0, 2.0, 4.0]
    settlement_patience_s: _Positive = 2.0
    #: None: all that are configured.
    allowed_providers: list[_Name] | None = None
    allowed_models: list[_Name] | None = None
    max_cost_usd: str | None = None


class MeteringTable(Strict):
    #: A route whose price is not known is refused.
    require_pricing: bool = False
    #: So is the start, while a route of a configured model has none.
    start_needs_prices: bool = False
    #: None: for ever. Not less than a week: an attempt has ended long before its month is dropped.
    keep_invocations_days: Annotated[int, pydantic.Field(ge=7, le=36_500)] | None = None


class WebhooksTable(Strict):
    #: A host, or host:port; without a port the scheme's own is meant.
    allowed_hosts: list[str] = []
    #: The variable that holds the signing secret: "whsec_" and base64.
    secret_env: _VariableName | None = None
    allow_http: bool = False
    #: Also to addresses that are not public.
    allow_private: bool = False
    timeout_s: _Positive = 10.0
    poll_s: _Positive = 1.0
    retry_delay_s: _Positive = 5.0
    retry_longest_s: _Positive = 3600.0
    give_up_s: _Positive = 259_200.0


class CaptureTable(Strict):
    enabled: bool = False
    retention_s: _Positive = 2_592_000.0
    max_bytes: Annotated[int, pydantic.Field(gt=0, le=16_000_000)] = 262_144
    redact: list[str] = ["secret", "email", "card"]
    redact_patterns: list[str] = []


class File(Strict):
    gateway: GatewayTable = GatewayTable()
    providers: dict[_Name, ProviderTable] = {}
    models: dict[_Name, ModelTable] = {}
    roles: dict[_Name, RoleTable] = {}
    groups: dict[_Name, GroupTable] = {}
    routing: RoutingTable = RoutingTable()
    admission: AdmissionTable = AdmissionTable()
    metering: MeteringTable = MeteringTable()
    jobs: dict[str, Any] = {}
    webhooks: WebhooksTable = WebhooksTable()
    capture: CaptureTable = CaptureTable()
