"""
From the tables of providers, models and routes to what the router works with: variables filled in, credentials found,
and one way of reading a setting wherever it may stand.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Final, TypeAlias

import msgspec

from adapters.contract import Clocks, Endpoint
from adapters.protocols import PROTOCOLS
from gateway.call import Resend, Unsupported
from gateway.needs import Capability
from gateway.provider import Adjustment, Confirms, OnCancel, Provider
from gateway.tables import NO_NAME, ProviderTable, RouteTable

_VARIABLE: Final = re.compile(r"\{([A-Za-z_][A-Za-z0-9_]*)\}")
#: A secret can be a name all the same: so long a run that mixes digits with small letters is no word.
_LIKE_A_SECRET: Final = re.compile(r"(?=[A-Za-z]*[0-9])(?=[A-Z0-9]*[a-z])[A-Za-z0-9]{20,}", re.ASCII)
#: Fields of a request that say what is asked, of whom and how it is answered, in any protocol. A profile that changed
#: them would bill and answer for something else.
_OURS: Final = frozenset({"model", "messages", "stream", "input", "contents"})
#: Keys of a table that are an adjustment's as they are.
_AS_THEY_ARE: Final = (
    "protocol",
    "reasoning",
    "max_tokens_field",
    "reasoning_field",
    "reasoning_object",
    "cache_control",
    "default_max_tokens",
    "no_sentinel",
    "connect_s",
    "first_byte_s",
    "gap_s",
    "execution_limit_s",
    "execution_base_s",
    "slowest_tokens_per_s",
    "reasoning_execution_limit_s",
    "isolation_s",
    "queue_timeout_s",
    "first_byte_objective_s",
    "max_output_tokens",
    "require_pricing",
)

#: Takes note of a fault: its path and the reason.
Wrong: TypeAlias = Callable[[str, str], None]
#: From the path of a URL in the file and the URL to its `scheme://host:port`.
OriginOf: TypeAlias = Callable[[str, str], str]


def adjustment(where: str, given: RouteTable, wrong: Wrong) -> Adjustment | None:
    """What a table says of its routes; None where it says nothing."""
    if given.protocol is not None:
        _check_protocol(where, given.protocol, wrong)
    _check_fields(where, given, wrong)
    for capability in set(given.can) & set(given.cannot):
        wrong(f"{where}.can", f"{capability!r} is in cannot, too")
    said = Adjustment(
        **{name: getattr(given, name) for name in _AS_THEY_ARE},
        omit=frozenset(given.omit),
        force=_raw(given.force),
        resend_uncertain=None if given.resend_uncertain is None else Resend(given.resend_uncertain),
        unsupported=None if given.unsupported is None else Unsupported(given.unsupported),
        cannot=frozenset(map(Capability, given.cannot)),
        can=frozenset(map(Capability, given.can)),
    )
    return None if said == Adjustment() else said


def provider(
    provider_id: str, given: ProviderTable, environ: Mapping[str, str], wrong: Wrong, origin_of: OriginOf
) -> Provider:
    """A provider's table, resolved against the environment. No fault repeats a credential."""
    where = f"providers.{provider_id}"
    if "/" in provider_id:
        wrong(where, "a provider's id must not hold '/'")
    if given.protocol is None:
        wrong(f"{where}.protocol", "is missing")
    else:
        _check_protocol(where, given.protocol, wrong)
    if not given.base_url:
        wrong(f"{where}.base_url", "is missing: a provider needs the URL that its endpoints start with")
    if given.default_model is not None and given.models and given.default_model not in given.models:
        wrong(f"{where}.default_model", "is not one of its models")
    _check_fields(where, given, wrong)
    for key, names in (("credentials", given.credentials), ("requires", given.requires)):
        for place, name in enumerate(names):
            if _LIKE_A_SECRET.search(name) and not environ.get(name):
                wrong(f"{where}.{key}.{place}", NO_NAME)
    per_model = [
        (pattern, said)
        for pattern, table in given.per_model.items()
        if (said := adjustment(f"{where}.per_model.{pattern}", table, wrong)) is not None
    ]
    template = given.base_url or "http://missing.invalid"
    variables = _VARIABLE.findall(template)
    missing = [name for name in (*given.requires, *variables) if not environ.get(name)]
    variable = next((name for name in given.credentials if environ.get(name)), None)
    credential = None if variable is None else environ[variable]
    if given.credentials and credential is None:
        missing.append(" or ".join(given.credentials))
    base_url = _VARIABLE.sub(lambda m: environ.get(m[1]) or m[0], template).rstrip("/")
    # Without its variables the URL is not one yet, and neither is the group it names.
    known = not set(variables) & set(missing)
    origin = origin_of(f"{where}.base_url", base_url) if known else template
    headers = dict(given.headers)
    if credential is not None:
        if not credential.isascii() or not credential.isprintable():
            wrong(where, f"the value of {variable} cannot be sent in a header")
        bearer = given.auth_header.lower() == "authorization"
        headers[given.auth_header] = f"Bearer {credential}" if bearer else credential
    endpoint = Endpoint(
        provider=provider_id,
        protocol=given.protocol or "",
        base_url=base_url,
        headers=headers,
        clocks=Clocks(first_byte_s=given.first_byte_s, gap_s=given.gap_s, connect_s=given.connect_s),
        omit=frozenset(given.omit),
        force=_raw(given.force),
        no_sentinel=given.no_sentinel,
        max_tokens_field=given.max_tokens_field,
        reasoning_field=given.reasoning_field,
        reasoning_object=given.reasoning_object,
        cache_control=given.cache_control,
        default_max_tokens=given.default_max_tokens,
        reasoning=given.reasoning,
        keep_alive_s=given.keep_alive_s,
        check_path=given.check_path,
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
        cannot=frozenset(map(Capability, given.cannot)),
        unsupported=Unsupported(given.unsupported),
        check_is_open=given.check_is_open,
        free=tuple(given.free),
        per_model=tuple(per_model),
    )


def _check_protocol(where: str, name: str, wrong: Wrong) -> None:
    if name not in PROTOCOLS:
        wrong(f"{where}.protocol", f"is not one of {', '.join(sorted(PROTOCOLS))}")


def _check_fields(where: str, given: ProviderTable | RouteTable, wrong: Wrong) -> None:
    for key, fields in (("omit", dict(enumerate(given.omit))), ("force", {name: name for name in given.force})):
        for place, name in fields.items():
            if name in _OURS:
                wrong(f"{where}.{key}.{place}", f"{name!r} is the gateway's to decide: it cannot be in {key}")
    for name in set(given.omit) & set(given.force):
        wrong(f"{where}.omit", f"{name!r} is in force, too")


def _raw(force: Mapping[str, object]) -> dict[str, msgspec.Raw]:
    return {name: msgspec.Raw(msgspec.json.encode(value)) for name, value in force.items()}
