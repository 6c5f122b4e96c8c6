"""
The configuration: one TOML file and the environment, parsed once into frozen settings.

What is wrong is refused at start with file, path and reason, all faults together: a limit with a typing error in its
name would otherwise be no limit at all. Each package is handed its own settings and knows of no file.
"""

from __future__ import annotations

import base64
import importlib.resources
import os
import re
import tomllib
import urllib.parse
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec
import pydantic

from admission.settings import AdmissionSettings, GroupSettings, ModelLimits
from gateway import profiles
from gateway.call import Order
from gateway.capture import CaptureSettings
from gateway.capture.redaction import KNOWN
from gateway.database import url_fault
from gateway.idempotency import IdempotencySettings
from gateway.jobs.destinations import place_fault
from gateway.jobs.settings import JobsSettings, WebhookSettings
from gateway.keys import environment_key_fault
from gateway.policy import ANYTHING, Policy
from gateway.provider import Adjustment, Provider
from gateway.rest.streams import StreamSettings
from gateway.router import Model, Role, RoutingSettings, Target, target_provider
from gateway.tables import File, GroupTable, RoutingTable, TargetTable
from metering.prices import KnownPrice, configured_price, usd

FILE_NAME: Final = "tollbridge.toml"


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
    #: The server itself, where the database URLs are those of a pooler that hands out sessions by transaction.
    listen_database_url: str | None
    rest: Listen
    grpc: Listen
    #: A key with every scope, given by the operator.
    api_key: str | None
    drain_delay_s: float
    drain_s: float
    streams: StreamSettings
    idempotency: IdempotencySettings
    providers: Mapping[str, Provider]
    models: Mapping[str, Model]
    roles: Mapping[str, Role]
    prices_by_model: Mapping[str, KnownPrice]
    #: By `provider/upstream model`.
    prices_by_route: Mapping[str, KnownPrice]
    #: It does not start while a route of a configured model has no price.
    start_needs_prices: bool
    routing: RoutingSettings
    admission: AdmissionSettings
    jobs: JobsSettings
    webhooks: WebhookSettings
    #: Days for which single attempts stay in the ledger; None: for ever.
    keep_invocations_days: int | None
    capture: CaptureSettings

    @property
    def pooled(self) -> bool:
        """The database URLs are a pooler's: no session is this process's own."""
        return self.listen_database_url is not None

    @property
    def free(self) -> dict[str, tuple[str, ...]]:
        """By provider, patterns of the upstream models that cost nothing."""
        return {provider.id: provider.free for provider in self.providers.values() if provider.free}


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
                profile = shipped[provider_id]
                if given.get("base_url", profile["base_url"]) != profile["base_url"]:
                    # Who costs nothing is told of that place, and of no other.
                    profile = {key: value for key, value in profile.items() if key not in ("free", "free_source")}
                providers[provider_id] = {**profile, **given}
                if isinstance(given.get("per_model"), dict):
                    # The file's own come later, so that they win.
                    providers[provider_id]["per_model"] = _later(profile.get("per_model", {}), given["per_model"])


def _later(shipped: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    filled = {
        name: {**shipped[name], **table} if name in shipped and isinstance(table, dict) else table
        for name, table in given.items()
    }
    return {**{name: table for name, table in shipped.items() if name not in given}, **filled}


def _parse(label: str, raw: dict[str, Any]) -> tuple[File, list[Fault]]:
    """The file as far as it can be read: what is wrong is told and left out, so that the rest is looked at, too."""
    faults: list[Fault] = []
    while True:
        try:
            return File.model_validate(raw), faults
        except pydantic.ValidationError as error:
            told = {fault.path for fault in faults}
            wrong: list[tuple[dict[str, Any], Any]] = []
            for found in error.errors():
                if _of_the_other_shape(found):
                    continue
                fault = _fault(label, found)
                # What was left out for being wrong is not missing as well, nor is what held it too short.
                if not any(known == fault.path or known.startswith(f"{fault.path}.") for known in told):
                    faults.append(fault)
                wrong.append(_deepest(raw, found["loc"]))
            # Not before all are found: on the way to one that is gone already stands what is not wrong.
            for holder, key in wrong:
                holder.pop(key, None)


def _deepest(raw: dict[str, Any], location: Sequence[Any]) -> tuple[dict[str, Any], Any]:
    """
    The deepest entry on the way to a fault that is there, the wrong value, or what lacks one: its table and its key.
    A list stays whole, or its places would not be those of the file: what is wrong with an entry itself is the list's.
    """
    node: Any = raw
    holder, last = raw, location[0]
    for key in location:
        if isinstance(node, dict) and key in node:
            holder, last, node = node, key, node[key]
        elif isinstance(node, list) and isinstance(key, int) and key < len(node):
            node = node[key]
    return holder, last


#: What pydantic calls the two shapes of an entry that is a name or a table.
_NAME, _TABLE = "constrained-str", "TargetTable"


def _of_the_other_shape(found: Any) -> bool:
    """An entry may be a name or a table: what is wrong with it as the one that it is not is no fault."""
    is_table = isinstance(found["input"], dict)
    return (found["loc"][-1] == _NAME and is_table) or (found["loc"][-1] == _TABLE and not is_table)


def _fault(file: str, found: Any) -> Fault:
    path = ".".join(str(part) for part in found["loc"] if part not in ("[key]", _NAME, _TABLE, "function-after"))
    if found["type"] == "extra_forbidden":
        return Fault(file, path, "there is no such key")
    return Fault(file, path, str(found["msg"]))


S = TypeVar("S")


class _Resolved:
    """A parsed file on its way to settings, collecting what is wrong between its parts."""

    def __init__(
        self, label: str, file: Path | None, parsed: File, environ: Mapping[str, str], faults: list[Fault]
    ) -> None:
        self._label = label
        self._file = file
        self._parsed = parsed
        self._environ = environ
        self._faults = faults

    def settings(self) -> Settings:
        parsed, environ = self._parsed, self._environ
        providers = {
            name: msgspec.structs.replace(
                profiles.provider(name, given, environ, self._wrong, self._origin_of),
                require_pricing=parsed.metering.require_pricing,
            )
            for name, given in parsed.providers.items()
        }
        models = self._models(providers)
        roles = self._roles(models)
        routing = self._routing(parsed.routing, providers)
        providers, groups = self._grouped(providers, models)
        prices = dict(self._prices())
        prices_by_route = self._route_prices()
        jobs = self._jobs()
        webhooks = self._webhooks()
        capture = self._capture()
        rest = self._listen("TOLLBRIDGE_REST_LISTEN", parsed.gateway.rest_listen, "127.0.0.1:8080")
        grpc = self._listen("TOLLBRIDGE_GRPC_LISTEN", parsed.gateway.grpc_listen, "127.0.0.1:50051")
        database_url = self._database_url("database_url", parsed.gateway.database_url)
        content_database_url = self._database_url("content_database_url", parsed.gateway.content_database_url)
        listen_database_url = self._database_url("listen_database_url", parsed.gateway.listen_database_url)
        if listen_database_url is not None and database_url is None:
            self._wrong("gateway.listen_database_url", "needs gateway.database_url, which is the pooler's then")
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
            listen_database_url=listen_database_url,
            rest=rest,
            grpc=grpc,
            api_key=environ.get("TOLLBRIDGE_API_KEY") or None,
            drain_delay_s=parsed.gateway.drain_delay_s,
            drain_s=parsed.gateway.drain_s,
            idempotency=IdempotencySettings(
                retention_s=parsed.gateway.idempotency_retention_s,
                max_answer_bytes=parsed.gateway.idempotency_max_answer_bytes,
                max_keys=parsed.gateway.idempotency_max_keys,
                max_bytes=parsed.gateway.idempotency_max_bytes,
            ),
            streams=StreamSettings(
                commit_after_s=parsed.gateway.stream_commit_after_s,
                keepalive_s=parsed.gateway.stream_keepalive_s,
                idle_reader_s=parsed.gateway.idle_reader_s,
            ),
            providers=providers,
            models=models,
            roles=roles,
            prices_by_model=prices,
            prices_by_route=prices_by_route,
            start_needs_prices=parsed.metering.start_needs_prices,
            routing=routing,
            admission=AdmissionSettings(groups=groups, longest_hold_s=_longest_hold_s(providers, models), **admission),
            jobs=jobs,
            webhooks=webhooks,
            keep_invocations_days=parsed.metering.keep_invocations_days,
            capture=capture,
        )

    def _wrong(self, path: str, reason: str) -> None:
        self._faults.append(Fault(self._label, path, reason))

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
            of_all = profiles.adjustment(where, given, self._wrong)
            targets: list[Target] = []
            for key, entries in (("providers", given.providers), ("fallback", given.fallback)):
                for place, entry in enumerate(entries):
                    target = self._target(f"{where}.{key}.{place}", name, entry, of_all)
                    if target.provider not in providers:
                        self._wrong(f"{where}.{key}.{place}", f"no provider is called {target.provider!r}")
                    elif any(_same_route(target, other) for other in targets):
                        self._wrong(f"{where}.{key}.{place}", "is there twice")
                    targets.append(target)
            models[name] = Model(
                name=name, targets=tuple(targets), primary=len(given.providers), order=Order(given.order)
            )
        return models

    def _target(self, where: str, name: str, entry: str | TargetTable, of_all: Adjustment | None) -> Target:
        if isinstance(entry, str):
            return Target(provider=entry, model=name, adjustments=() if of_all is None else (of_all,))
        own = profiles.adjustment(where, entry, self._wrong)
        for role in entry.qualified_for:
            if role not in self._parsed.roles:
                self._wrong(f"{where}.qualified_for.{role}", "no role is called so")
        return Target(
            provider=entry.provider,
            model=name if entry.model is None else entry.model,
            adjustments=tuple(said for said in (of_all, own) if said is not None),
            weight=entry.weight,
            qualified_for=entry.qualified_for,
        )

    def _roles(self, models: Mapping[str, Model]) -> dict[str, Role]:
        roles: dict[str, Role] = {}
        for name, given in self._parsed.roles.items():
            for place, model in enumerate(given.models):
                if model not in models:
                    self._wrong(f"roles.{name}.models.{place}", f"no model is called {model!r}")
            with_one = [m.name for m in models.values() if any(name in t.qualified_for for t in m.targets)]
            roles[name] = Role(name=name, models=tuple(given.models or with_one), order=Order(given.order))
        return roles

    def _routing(self, given: RoutingTable, providers: Mapping[str, Provider]) -> RoutingSettings:
        for place, name in enumerate(given.allowed_providers or ()):
            if name not in providers:
                self._wrong(f"routing.allowed_providers.{place}", f"no provider is called {name!r}")
        limit = None
        if given.max_cost_usd is not None:
            try:
                limit = usd(given.max_cost_usd, name="max_cost_usd")
            except ValueError as error:
                self._wrong("routing.max_cost_usd", str(error))
        asks = (given.allowed_providers, given.allowed_models, limit)
        policy = (
            ANYTHING
            if asks == (None, None, None)
            else Policy(
                providers=None if given.allowed_providers is None else frozenset(given.allowed_providers),
                models=None if given.allowed_models is None else tuple(given.allowed_models),
                max_cost_usd=limit,
            )
        )
        own = given.model_dump(exclude={"allowed_providers", "allowed_models", "max_cost_usd"})
        return msgspec.convert({**own, "policy": policy}, RoutingSettings)

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
        given: dict[str, GroupTable] = {}
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
            name: {
                model: limits.tokens_per_minute
                for model, limits in group.allowances.items()
                if limits.tokens_per_minute is not None
            }
            for name, group in groups.items()
        }
        return {
            key: msgspec.structs.replace(provider, tokens_per_minute=counting.get(provider.group, {}))
            for key, provider in placed.items()
        }, groups

    def _group_name(self, name: str) -> str:
        if "://" not in name:
            return name
        return self._origin_of(f"groups.{name}", name)

    def _prices(self) -> Iterator[tuple[str, KnownPrice]]:
        for name, given in self._parsed.models.items():
            if given.price is not None:
                try:
                    yield name, configured_price(given.price)
                except ValueError as error:
                    self._wrong(f"models.{name}.price", str(error))

    def _route_prices(self) -> dict[str, KnownPrice]:
        found: dict[str, KnownPrice] = {}
        for name, given in self._parsed.models.items():
            for key, entries in (("providers", given.providers), ("fallback", given.fallback)):
                for place, entry in enumerate(entries):
                    if isinstance(entry, str) or entry.price is None:
                        continue
                    where = f"models.{name}.{key}.{place}.price"
                    try:
                        price = configured_price(entry.price)
                    except ValueError as error:
                        self._wrong(where, str(error))
                        continue
                    route = f"{entry.provider}/{name if entry.model is None else entry.model}"
                    if found.setdefault(route, price) != price:
                        self._wrong(where, f"{route} has another price at another place, and a route has one")
        return found

    def _jobs(self) -> JobsSettings:
        try:
            return msgspec.convert(self._parsed.jobs, JobsSettings)
        except msgspec.ValidationError as error:
            reason, _, path = str(error).partition(" - at `$.")
            self._wrong(f"jobs.{path.rstrip('`')}" if path else "jobs", reason)
            return JobsSettings()

    def _webhooks(self) -> WebhookSettings:
        given = self._parsed.webhooks
        for place, entry in enumerate(given.allowed_hosts):
            if (fault := place_fault(entry)) is not None:
                self._wrong(f"webhooks.allowed_hosts.{place}", fault)
        secret = self._environ.get(given.secret_env) if given.secret_env else None
        key = None
        if given.allowed_hosts and given.secret_env is None:
            self._wrong("webhooks.secret_env", "is needed: what is sent is signed")
        elif given.allowed_hosts and not secret:
            self._wrong("webhooks.secret_env", f"{given.secret_env} is not set")
        elif secret and (key := _signing_key(secret)) is None:
            self._wrong("webhooks.secret_env", f"{given.secret_env} is not whsec_ and the base64 of 24 to 64 bytes")
        own = given.model_dump(exclude={"allowed_hosts", "secret_env"})
        return WebhookSettings(allowed_hosts=tuple(given.allowed_hosts), secret=key, **own)

    def _capture(self) -> CaptureSettings:
        given = self._parsed.capture
        for place, name in enumerate(given.redact):
            if name not in KNOWN:
                self._wrong(f"capture.redact.{place}", f"{name!r} is none of {', '.join(KNOWN)}")
        for place, pattern in enumerate(given.redact_patterns):
            try:
                re.compile(pattern)
            except re.error as error:
                self._wrong(f"capture.redact_patterns.{place}", f"is no regular expression: {error}")
        lists = {"redact": tuple(given.redact), "redact_patterns": tuple(given.redact_patterns)}
        return CaptureSettings(**{**given.model_dump(), **lists})

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


def _same_route(one: Target, other: Target) -> bool:
    return (one.provider, one.model, one.adjustments) == (other.provider, other.model, other.adjustments)


def _group_settings(given: GroupTable | None, endpoints: Sequence[str]) -> GroupSettings:
    if given is None:
        return GroupSettings(endpoints=tuple(endpoints), concurrency_is_default=True)
    fields = given.model_dump(exclude={"endpoints", "models"})
    return GroupSettings(
        **fields,
        models={name: ModelLimits(**limits.model_dump()) for name, limits in given.models.items()},
        endpoints=tuple(endpoints),
        concurrency_is_default="concurrency" not in given.model_fields_set,
    )


def _longest_hold_s(providers: Mapping[str, Provider], models: Mapping[str, Model]) -> float:
    """The longest that an attempt can occupy a slot, its quarantine included."""
    seen = [provider.adjusted(said) for provider in providers.values() for _, said in provider.per_model]
    seen += [target_provider(providers, target) for model in models.values() for target in model.targets]
    return max(
        (max(p.execution_limit_s, p.reasoning_execution_limit_s) + p.isolation_s for p in (*providers.values(), *seen)),
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


def _signing_key(secret: str) -> bytes | None:
    """As Standard Webhooks writes one. None where it is none."""
    try:
        key = base64.b64decode(secret.removeprefix("whsec_"), validate=True)
    except ValueError:
        return None
    return key if secret.startswith("whsec_") and 24 <= len(key) <= 64 else None
