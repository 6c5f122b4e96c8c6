"""
The configuration: one TOML file and the environment, parsed once into frozen settings.

What is wrong is refused at start with file, path and reason, all faults together: a limit with a typing error in its
name would otherwise be no limit at all. Each package is handed its own settings and knows of no file.
"""

from __future__ import annotations

import importlib.resources
import os
import re
import tomllib
import urllib.parse
import zoneinfo
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Final, Literal, TypeVar

import msgspec
import pydantic
from pydantic_core import PydanticCustomError

from adapters.contract import Clocks, Endpoint
from adapters.protocols import PROTOCOLS
from admission.settings import AdmissionSettings, GroupSettings, ModelLimits
from gateway.call import Resend
from gateway.database import url_fault
from gateway.jobs.settings import JobsSettings
from gateway.keys import environment_key_fault
from gateway.router import Confirms, Model, OnCancel, Provider, RoutingSettings, Target
from metering.prices import Price, configured_price

FILE_NAME: Final = "tollbridge.toml"
_VARIABLE = re.compile(r"\{([A-Za-z_][A-Za-z0-9_]*)\}")
#: What POSIX calls a name. Not what most secrets look like: those have other characters, or no letter at the start.
_VARIABLE_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)
#: A secret can be a name all the same: so long a run that mixes digits with small letters is no word.
_LIKE_A_SECRET = re.compile(r"(?=[A-Za-z]*[0-9])(?=[A-Z0-9]*[a-z])[A-Za-z0-9]{20,}", re.ASCII)
_NO_NAME: Final = (
    'must be the NAME of an environment variable, such as "OPENAI_API_KEY" (letters, digits and _): the secret itself '
    "belongs in the environment. What stands here is not repeated, as it may be one"
)
#: Fields of a request that say what is asked, of whom and how it is answered, in any protocol. A profile that changed
#: them would bill and answer for something else.
_OURS: Final = frozenset({"model", "messages", "stream", "input", "contents"})
EXECUTION_LIMIT_S: Final = 120.0
#: Reasoning models think longer than others answer.
REASONING_LIMIT_S: Final = 600.0
#: A call that nobody waits for any more must not occupy a slot for longer than one that somebody does.
MOST_DRAIN_S: Final = 600.0


class Fault(msgspec.Struct, frozen=True):
    file: str
    #: "models.gpt-4o.providers.0"; empty for the file as a whole.
    path: str
    reason: str


class ConfigFaults(Exception):
    """The configuration cannot be used. `faults` lists everything that is wrong with it."""

    def __init__(self, faults: list[Fault]) -> None:
        super().__init__("\n".join(f"{f.file}: {f.path + ': ' if f.path else ''}{f.reason}" for f in faults))
        self.faults = faults


class Listen(msgspec.Struct, frozen=True):
    host: str
    port: int


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """All of it. Holds provider keys inside its endpoints: never log it."""

    #: Where it was read from; None for the built-in configuration.
    file: Path | None
    data_dir: Path
    #: None: an embedded PostgreSQL in the data directory.
    database_url: str | None
    content_database_url: str | None
    rest: Listen
    grpc: Listen
    #: A key with every scope, given by the operator.
    api_key: str | None
    drain_s: float
    providers: Mapping[str, Provider]
    models: Mapping[str, Model]
    prices_by_model: Mapping[str, Price]
    routing: RoutingSettings
    admission: AdmissionSettings
    jobs: JobsSettings


# ------------------------------------------------------------------ the shape of the file

#: Seconds. Past this a time means nothing, and neither the clocks nor the database can add it to now.
_LONGEST_S: Final = 10_000_000.0
_Positive = Annotated[float, pydantic.Field(gt=0, le=_LONGEST_S, allow_inf_nan=False)]
_NotNegative = Annotated[float, pydantic.Field(ge=0, le=_LONGEST_S, allow_inf_nan=False)]
_Name = Annotated[str, pydantic.Field(min_length=1, max_length=200, pattern=r"^[^\s\x00-\x1f]+$")]


def _variable_name(text: str) -> str:
    if not _VARIABLE_NAME.fullmatch(text):
        raise PydanticCustomError("no_variable_name", _NO_NAME)
    return text


_VariableName = Annotated[str, pydantic.AfterValidator(_variable_name)]


class _Strict(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid", strict=True, frozen=True)


class _Provider(_Strict):
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
    no_sentinel: bool = False
    max_tokens_field: str | None = None
    reasoning_field: str | None = None
    max_output_tokens: Annotated[int, pydantic.Field(gt=0)] | None = None
    connect_s: _Positive = 5.0
    first_byte_s: _Positive = 5.0
    gap_s: _Positive = 1.5
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
    resend_uncertain: Literal["never", "before_first_byte"] | None = None
    #: The capacity group it competes in, where that is not the one of its endpoint.
    group: _Name | None = None
    #: Whether a rate limit is told of one model or of the account as a whole.
    rate_limit_scope: Literal["model", "account"] = "model"
    first_byte_objective_s: _Positive | None = None


class _Target(_Strict):
    provider: _Name
    model: _Name | None = None


class _Model(_Strict):
    providers: Annotated[list[_Name | _Target], pydantic.Field(min_length=1)]
    fallback: list[_Name | _Target] = []
    price: dict[str, Any] | None = None


class _ModelLimits(_Strict):
    concurrency: Annotated[int, pydantic.Field(ge=0, le=100_000)] | None = None
    requests_per_minute: Annotated[int, pydantic.Field(gt=0, le=1_000_000_000)] | None = None
    tokens_per_minute: Annotated[int, pydantic.Field(gt=0, le=1_000_000_000_000)] | None = None


class _Group(_Strict):
    #: Endpoints that share it, beside the one it may be named for.
    endpoints: list[_Name] = []
    concurrency: Annotated[int, pydantic.Field(ge=0, le=100_000)] = 3
    quarantine_headroom: Annotated[int, pydantic.Field(ge=0, le=100_000)] = 0
    requests_per_minute: Annotated[int, pydantic.Field(gt=0, le=1_000_000_000)] | None = None
    tokens_per_minute: Annotated[int, pydantic.Field(gt=0, le=1_000_000_000_000)] | None = None
    models: dict[_Name, _ModelLimits] = {}
    queue: Annotated[int, pydantic.Field(ge=0, le=1_000_000)] = 32
    failure_threshold: Annotated[int, pydantic.Field(gt=0)] = 5
    failure_window_s: _Positive = 30.0
    first_cooldown_s: _Positive = 10.0
    longest_cooldown_s: _Positive = 300.0


class _Gateway(_Strict):
    data_dir: str | None = None
    database_url: str | None = None
    content_database_url: str | None = None
    rest_listen: str | None = None
    grpc_listen: str | None = None
    #: Seconds that running requests get to end when the gateway stops.
    drain_s: _Positive = 30.0


class _Admission(_Strict):
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
    def _margin_fits(self) -> _Admission:
        if self.margin_s >= self.lease_s / 2:
            raise ValueError("margin_s must be less than half of lease_s")
        return self


class _Routing(_Strict):
    most_routes: Annotated[int, pydantic.Field(gt=0, le=20)] = 3
    most_attempts: Annotated[int, pydantic.Field(gt=0, le=50)] = 6
    backoff_s: list[_NotNegative] = [1.0, 2.0, 4.0]
    settlement_patience_s: _Positive = 2.0


class _File(_Strict):
    gateway: _Gateway = _Gateway()
    providers: dict[_Name, _Provider] = {}
    models: dict[_Name, _Model] = {}
    groups: dict[_Name, _Group] = {}
    routing: _Routing = _Routing()
    admission: _Admission = _Admission()
    jobs: dict[str, Any] = {}


# ------------------------------------------------------------------ reading it


def load(path: Path | None = None, environ: Mapping[str, str] = os.environ) -> Settings:
    """
    Reads `path`, else `TOLLBRIDGE_CONFIG`, else `tollbridge.toml` here, else the built-in configuration.

    Raises `ConfigFaults`.
    """
    named = path or (Path(environ["TOLLBRIDGE_CONFIG"]) if environ.get("TOLLBRIDGE_CONFIG") else None)
    file = named or (Path(FILE_NAME) if Path(FILE_NAME).is_file() else None)
    shipped = _shipped()
    label = str(file) if file else "built-in configuration"
    if file is None:
        raw: dict[str, Any] = {"providers": shipped}
    else:
        raw = _read(file)
        _fill_in(raw, shipped)
    parsed, faults = _parse(label, raw)
    return _Resolved(label, file, parsed, environ, faults).settings()


def _read(file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigFaults([Fault(str(file), "", "there is no such file")]) from None
    except OSError as error:
        raise ConfigFaults([Fault(str(file), "", f"cannot be read: {error.strerror}")]) from None
    except UnicodeDecodeError:
        raise ConfigFaults([Fault(str(file), "", "is not UTF-8")]) from None
    except tomllib.TOMLDecodeError as error:
        # A key or table that is given twice ends here, too.
        raise ConfigFaults([Fault(str(file), "", f"is not TOML: {error}")]) from None


def _shipped() -> dict[str, Any]:
    text = importlib.resources.files("adapters").joinpath("providers.toml").read_text(encoding="utf-8")
    providers: dict[str, Any] = tomllib.loads(text)["providers"]
    return providers


def _fill_in(raw: dict[str, Any], shipped: Mapping[str, Any]) -> None:
    """A configured provider takes from the shipped profile of the same id what it does not say itself."""
    providers = raw.get("providers")
    if isinstance(providers, dict):
        for provider_id, given in providers.items():
            if isinstance(given, dict) and provider_id in shipped:
                providers[provider_id] = {**shipped[provider_id], **given}


def _parse(label: str, raw: dict[str, Any]) -> tuple[_File, list[Fault]]:
    """The file as far as it can be read: what is wrong is told and left out, so that the rest is looked at, too."""
    faults: list[Fault] = []
    while True:
        try:
            return _File.model_validate(raw), faults
        except pydantic.ValidationError as error:
            told = {fault.path for fault in faults}
            for found in error.errors():
                fault = _fault(label, found)
                # What was left out for being wrong is not missing as well.
                if fault.path not in told:
                    faults.append(fault)
                _leave_out(raw, found["loc"])


def _leave_out(raw: dict[str, Any], location: Sequence[Any]) -> None:
    """Removes the deepest entry on the way to a fault that is there: the wrong value, or what lacks one."""
    node: Any = raw
    holder, last = raw, location[0]
    for key in location:
        if isinstance(node, dict) and key in node:
            holder, last, node = node, key, node[key]
    holder.pop(last, None)


def _fault(file: str, found: Any) -> Fault:
    path = ".".join(str(part) for part in found["loc"] if part not in ("[key]", "_Target", "function-after"))
    if found["type"] == "extra_forbidden":
        return Fault(file, path, "there is no such key")
    return Fault(file, path, str(found["msg"]))


S = TypeVar("S")


class _Resolved:
    """A parsed file on its way to settings, collecting what is wrong between its parts."""

    def __init__(
        self, label: str, file: Path | None, parsed: _File, environ: Mapping[str, str], faults: list[Fault]
    ) -> None:
        self._label = label
        self._file = file
        self._parsed = parsed
        self._environ = environ
        self._faults = faults

    def settings(self) -> Settings:
        parsed, environ = self._parsed, self._environ
        providers = {name: self._provider(name, given) for name, given in parsed.providers.items()}
        models = self._models(providers)
        providers, groups = self._grouped(providers, models)
        prices = dict(self._prices())
        jobs = self._jobs()
        rest = self._listen("TOLLBRIDGE_REST_LISTEN", parsed.gateway.rest_listen, "127.0.0.1:8080")
        grpc = self._listen("TOLLBRIDGE_GRPC_LISTEN", parsed.gateway.grpc_listen, "127.0.0.1:50051")
        database_url = self._database_url("database_url", parsed.gateway.database_url)
        content_database_url = self._database_url("content_database_url", parsed.gateway.content_database_url)
        if fault := environment_key_fault(environ.get("TOLLBRIDGE_API_KEY") or None):
            self._wrong("TOLLBRIDGE_API_KEY", fault)
        if self._faults:
            raise ConfigFaults(self._faults)
        admission = parsed.admission.model_dump()
        return Settings(
            file=self._file,
            data_dir=Path(environ.get("TOLLBRIDGE_DATA_DIR") or parsed.gateway.data_dir or ".tollbridge"),
            database_url=database_url,
            content_database_url=content_database_url,
            rest=rest,
            grpc=grpc,
            api_key=environ.get("TOLLBRIDGE_API_KEY") or None,
            drain_s=parsed.gateway.drain_s,
            providers=providers,
            models=models,
            prices_by_model=prices,
            routing=msgspec.convert(parsed.routing.model_dump(), RoutingSettings),
            admission=AdmissionSettings(groups=groups, longest_hold_s=_longest_hold_s(providers), **admission),
            jobs=jobs,
        )

    def _wrong(self, path: str, reason: str) -> None:
        self._faults.append(Fault(self._label, path, reason))

    def _provider(self, provider_id: str, given: _Provider) -> Provider:
        where = f"providers.{provider_id}"
        if "/" in provider_id:
            self._wrong(where, "a provider's id must not hold '/'")
        if given.protocol is None:
            self._wrong(f"{where}.protocol", "is missing")
        elif given.protocol not in PROTOCOLS:
            self._wrong(f"{where}.protocol", f"is not one of {', '.join(sorted(PROTOCOLS))}")
        if not given.base_url:
            self._wrong(f"{where}.base_url", "is missing: a provider needs the URL that its endpoints start with")
        if given.default_model is not None and given.models and given.default_model not in given.models:
            self._wrong(f"{where}.default_model", "is not one of its models")
        for key, fields in (("omit", dict(enumerate(given.omit))), ("force", {name: name for name in given.force})):
            for place, name in fields.items():
                if name in _OURS:
                    self._wrong(f"{where}.{key}.{place}", f"{name!r} is the gateway's to decide: it cannot be in {key}")
        for key, names in (("credentials", given.credentials), ("requires", given.requires)):
            for place, name in enumerate(names):
                if _LIKE_A_SECRET.search(name) and not self._environ.get(name):
                    self._wrong(f"{where}.{key}.{place}", _NO_NAME)
        template = given.base_url or "http://missing.invalid"
        variables = _VARIABLE.findall(template)
        missing = [name for name in (*given.requires, *variables) if not self._environ.get(name)]
        variable = next((name for name in given.credentials if self._environ.get(name)), None)
        credential = None if variable is None else self._environ[variable]
        if given.credentials and credential is None:
            missing.append(" or ".join(given.credentials))
        base_url = _VARIABLE.sub(lambda m: self._environ.get(m[1]) or m[0], template).rstrip("/")
        # Without its variables the URL is not one yet, and neither is the group it names.
        known = not set(variables) & set(missing)
        origin = self._origin_of(f"{where}.base_url", base_url) if known else template
        headers = dict(given.headers)
        if credential is not None:
            if not credential.isascii() or not credential.isprintable():
                self._wrong(where, f"the value of {variable} cannot be sent in a header")
            bearer = given.auth_header.lower() == "authorization"
            headers[given.auth_header] = f"Bearer {credential}" if bearer else credential
        endpoint = Endpoint(
            provider=provider_id,
            protocol=given.protocol or "",
            base_url=base_url,
            headers=headers,
            clocks=Clocks(first_byte_s=given.first_byte_s, gap_s=given.gap_s, connect_s=given.connect_s),
            omit=frozenset(given.omit),
            force={name: msgspec.Raw(msgspec.json.encode(value)) for name, value in given.force.items()},
            no_sentinel=given.no_sentinel,
            max_tokens_field=given.max_tokens_field,
            reasoning_field=given.reasoning_field,
        )
        return Provider(
            id=provider_id,
            name=given.name or provider_id,
            enabled=given.enabled,
            protocol=given.protocol or "",
            origin=origin,
            group=given.group or origin,
            credential=variable or provider_id,
            account_wide_limits=given.rate_limit_scope == "account",
            first_byte_objective_s=given.first_byte_objective_s,
            missing=tuple(dict.fromkeys(missing)),
            models=tuple(given.models),
            default_model=given.default_model,
            endpoint=None if missing else endpoint,
            base_url=base_url,
            execution_limit_s=given.execution_limit_s,
            isolation_s=given.isolation_s,
            queue_timeout_s=given.queue_timeout_s,
            cancel_confirms_after_s=given.cancel_confirms_after_s,
            cancel_confirms=Confirms(given.cancel_confirms),
            on_cancel=None if given.on_cancel is None else OnCancel(given.on_cancel),
            drain_s=given.drain_s,
            reasoning_models=tuple(given.reasoning_models),
            reasoning_execution_limit_s=given.reasoning_execution_limit_s,
            execution_base_s=given.execution_base_s,
            slowest_tokens_per_s=given.slowest_tokens_per_s,
            resend_uncertain=None if given.resend_uncertain is None else Resend(given.resend_uncertain),
            max_output_tokens=given.max_output_tokens,
        )

    def _origin_of(self, where: str, url: str) -> str:
        try:
            return normalised_endpoint(url)
        except ValueError as error:
            self._wrong(where, str(error))
            return url

    def _models(self, providers: Mapping[str, Provider]) -> dict[str, Model]:
        if self._file is None:
            return self._built_in_models(providers)
        models: dict[str, Model] = {}
        for name, given in self._parsed.models.items():
            where = f"models.{name}"
            targets: list[Target] = []
            for key, entries in (("providers", given.providers), ("fallback", given.fallback)):
                for place, entry in enumerate(entries):
                    provider = entry if isinstance(entry, str) else entry.provider
                    upstream = name if isinstance(entry, str) or entry.model is None else entry.model
                    target = Target(provider=provider, model=upstream)
                    if provider not in providers:
                        self._wrong(f"{where}.{key}.{place}", f"no provider is called {provider!r}")
                    elif target in targets:
                        self._wrong(f"{where}.{key}.{place}", "is there twice")
                    targets.append(target)
            models[name] = Model(name=name, targets=tuple(targets), primary=len(given.providers))
        return models

    def _built_in_models(self, providers: Mapping[str, Provider]) -> dict[str, Model]:
        """Without a file, every model that a shipped profile lists, at every ready provider that lists it."""
        targets: dict[str, list[Target]] = {}
        for provider in sorted(providers.values(), key=lambda p: not p.ready):
            for name in provider.models:
                targets.setdefault(name, []).append(Target(provider=provider.id, model=name))
        return {name: Model(name=name, targets=tuple(places), primary=len(places)) for name, places in targets.items()}

    def _grouped(
        self, providers: Mapping[str, Provider], models: Mapping[str, Model]
    ) -> tuple[dict[str, Provider], dict[str, GroupSettings]]:
        """
        Which group each provider competes in, and the limits of each group. One endpoint is one group, unless a group
        takes in several endpoints, or a provider is put into one by name.
        """
        origins = {provider.origin for provider in providers.values()}
        named = {name: self._group_name(name) for name in self._parsed.groups}
        given: dict[str, _Group] = {}
        for name, group in self._parsed.groups.items():
            if given.setdefault(named[name], group) is not group:
                self._wrong(f"groups.{name}", f"is the group {named[name]!r}, which has a table already")
        taken: dict[str, str] = {}
        for name, group in self._parsed.groups.items():
            for place, endpoint in enumerate(group.endpoints):
                where = f"groups.{name}.endpoints.{place}"
                origin = self._origin_of(where, endpoint)
                if origin not in origins:
                    self._wrong(where, "no provider has this endpoint")
                elif taken.setdefault(origin, named[name]) != named[name]:
                    self._wrong(where, f"is in the group {taken[origin]!r} already")
        placed = {
            key: msgspec.structs.replace(
                provider,
                group=provider.group
                if provider.group != provider.origin
                else taken.get(provider.origin, provider.group),
            )
            for key, provider in providers.items()
        }
        members: dict[str, list[str]] = {}
        for provider in placed.values():
            # A provider whose URL lacks a variable has no endpoint yet.
            if "{" not in provider.origin:
                members.setdefault(provider.group, []).append(provider.capacity_key)
        for provider in placed.values():
            if "://" in provider.group and "{" not in provider.group and provider.group not in origins:
                self._wrong(f"providers.{provider.id}.group", "no provider has this endpoint")
        upstream = {
            (placed[t.provider].group, t.model) for m in models.values() for t in m.targets if t.provider in placed
        }
        upstream |= {(provider.group, name) for provider in placed.values() for name in provider.models}
        for name, group in self._parsed.groups.items():
            for limited in group.models:
                if (named[name], limited) not in upstream:
                    self._wrong(
                        f"groups.{name}.models.{limited}", "no provider of the group has an upstream model so named"
                    )
        used = {provider.group for provider in placed.values()}
        for name, group_name in named.items():
            if group_name not in used:
                self._wrong(f"groups.{name}", "no provider has this endpoint, or names this group")
        groups = {name: _group_settings(given.get(name), sorted(keys)) for name, keys in sorted(members.items())}
        counting = {
            name
            for name, group in groups.items()
            if any(limits.tokens_per_minute is not None for limits in group.allowances.values())
        }
        return {
            key: msgspec.structs.replace(provider, counts_tokens=provider.group in counting)
            for key, provider in placed.items()
        }, groups

    def _group_name(self, name: str) -> str:
        if "://" not in name:
            return name
        return self._origin_of(f"groups.{name}", name)

    def _prices(self) -> Iterator[tuple[str, Price]]:
        for name, given in self._parsed.models.items():
            if given.price is not None:
                try:
                    yield name, configured_price(given.price)
                except ValueError as error:
                    self._wrong(f"models.{name}.price", str(error))

    def _jobs(self) -> JobsSettings:
        try:
            return msgspec.convert(self._parsed.jobs, JobsSettings)
        except msgspec.ValidationError as error:
            reason, _, path = str(error).partition(" - at `$.")
            self._wrong(f"jobs.{path.rstrip('`')}" if path else "jobs", reason)
            return JobsSettings()

    def _database_url(self, name: str, configured: str | None) -> str | None:
        variable = f"TOLLBRIDGE_{name.upper()}"
        given = self._environ.get(variable)
        url = given or configured or None
        if url is not None and (fault := url_fault(url)) is not None:
            self._wrong(variable if given else f"gateway.{name}", fault)
        return url

    def _listen(self, variable: str, configured: str | None, default: str) -> Listen:
        text = self._environ.get(variable) or configured or default
        host, _, port = text.rpartition(":")
        if not host or not port.isdecimal() or int(port) > 65535:
            where = (
                variable if self._environ.get(variable) else f"gateway.{variable.removeprefix('TOLLBRIDGE_').lower()}"
            )
            self._wrong(where, f"{text!r} is not host:port")
            return Listen("127.0.0.1", 0)
        return Listen(host.strip("[]"), int(port))


def _group_settings(given: _Group | None, endpoints: Sequence[str]) -> GroupSettings:
    if given is None:
        return GroupSettings(endpoints=tuple(endpoints), concurrency_is_default=True)
    fields = given.model_dump(exclude={"endpoints", "models"})
    return GroupSettings(
        **fields,
        models={name: ModelLimits(**limits.model_dump()) for name, limits in given.models.items()},
        endpoints=tuple(endpoints),
        concurrency_is_default="concurrency" not in given.model_fields_set,
    )


def _longest_hold_s(providers: Mapping[str, Provider]) -> float:
    """The longest that an attempt can occupy a slot, its quarantine included."""
    return max(
        (max(p.execution_limit_s, p.reasoning_execution_limit_s) + p.isolation_s for p in providers.values()),
        default=0.0,
    )


def normalised_endpoint(url: str) -> str:
    """`scheme://host:port` of a URL: what requests compete for. Raises ValueError."""
    parts = urllib.parse.urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError("is not an http:// or https:// URL")
    if parts.username or parts.password or parts.query or parts.fragment:
        raise ValueError("must not hold a user, a query or a fragment")
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    return f"{parts.scheme}://{host}:{parts.port or (443 if parts.scheme == 'https' else 80)}"
