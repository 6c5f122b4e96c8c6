"""
`tollbridge check --live`: does each ready provider answer, and does it take our credential?

A free endpoint is asked where the provider has one that tells. Where only a call tells, a running gateway makes it:
with a ticket, metered, in its ledger, like any other. A check that went around the limits would break them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Sequence
from typing import Any, Final

import msgspec

from adapters.client import Upstream
from adapters.errors import ErrorClass, NotSent, ProviderError, Rejected
from gateway.cli import remote, tables
from gateway.cli.failure import Failed
from gateway.provider import Provider

#: A call that is to find out whether it works, not to be waited for.
_DEADLINE_S: Final = 120
_ENDED: Final = frozenset({"succeeded", "failed", "cancelled", "expired"})


class Tried(msgspec.Struct, frozen=True, kw_only=True):
    """What came of trying one provider."""

    provider: str
    #: "works"; "answers", where its credential was not tried; "fails".
    result: str
    #: "list" or "call".
    by: str
    latency_ms: int | None = None
    said: str | None = None
    #: What to do about it.
    hint: str | None = None


def tried(providers: Iterable[Provider]) -> list[Tried]:
    """Asks the free endpoint of each provider that is ready and enabled, all at once."""
    return asyncio.run(_all([provider for provider in providers if provider.ready and provider.enabled]))


async def _all(providers: Sequence[Provider]) -> list[Tried]:
    async with Upstream() as upstream:
        return list(await asyncio.gather(*(_asked(upstream, provider) for provider in providers)))


async def _asked(upstream: Upstream, provider: Provider) -> Tried:
    assert provider.endpoint is not None, "a provider that is ready has an endpoint"
    started = time.monotonic()
    try:
        listed = await upstream.health_check(provider.endpoint)
    except ProviderError as error:
        return Tried(
            provider=provider.id,
            result="fails",
            by="list",
            latency_ms=_since(started),
            said=error.message,
            hint=hint(provider, error),
        )
    advice = None
    if not listed:
        advice = "it has no list of models at this address, if it is one: --spend tries it with a call of one token"
    elif provider.check_is_open:
        advice = "anybody may ask it this: --spend tries the credential with a call of one token"
    return Tried(
        provider=provider.id,
        result="works" if advice is None else "answers",
        by="list",
        latency_ms=_since(started),
        hint=advice,
    )


def hint(provider: Provider, error: ProviderError) -> str:
    """What to do about a provider that does not answer as it should."""
    if isinstance(error, NotSent):
        return f"nothing was reached at {provider.origin}: is base_url right, is the server up, is there a firewall?"
    if isinstance(error, Rejected) and (error.credential_fault or error.status in {401, 403}):
        return f"it does not take the credential in {provider.credential}: make a new one, or look at its quota"
    if isinstance(error, Rejected) and error.rate_limited:
        return "it asks to wait: try again later"
    if isinstance(error, Rejected) and error.error_class is ErrorClass.TRANSIENT:
        return "the fault is the provider's: look at its status page, try again later"
    if isinstance(error, Rejected):
        return "is base_url right, and protocol?"
    return "it took the request and gave no answer in time: is base_url right, is the server overloaded?"


def called(gateway: remote.Remote, providers: Iterable[Provider]) -> list[Tried]:
    """One token of each provider, by jobs of a running gateway: no failover, one attempt."""
    return [_called(gateway, provider) for provider in providers]


def _called(gateway: remote.Remote, provider: Provider) -> Tried:
    model = provider.default_model or next(iter(provider.models), None)
    if model is None:
        return Tried(
            provider=provider.id, result="fails", by="call", hint="list a model in its `models`, to be tried by"
        )
    job = {
        "custom_id": f"check-{provider.id}"[:64],
        "url": "/v1/chat/completions",
        "body": {
            "model": f"{provider.id}/{model}",
            "max_tokens": 1,
            "messages": [{"role": "user", "content": "Say yes."}],
        },
        "class": "interactive",
        "allow_failover": False,
        "max_attempts": 1,
        "deadline_s": _DEADLINE_S,
        "tags": {"purpose": "check"},
    }
    started = time.monotonic()
    try:
        receipt = gateway.post("/v1/jobs", msgspec.json.encode(job))
        path = f"/v1/jobs/{receipt['jobs'][0]['id']}"
        view = gateway.get(path, wait=30)
        while view["status"] not in _ENDED and time.monotonic() - started < _DEADLINE_S:
            view = gateway.get(path, wait=30)
    except Failed as failed:
        return Tried(
            provider=provider.id,
            result="fails",
            by="call",
            said=failed.message,
            hint=failed.hint or "is it one of the gateway's providers?",
        )
    took = _since(started)
    if view["status"] == "succeeded":
        return Tried(provider=provider.id, result="works", by="call", latency_ms=took)
    error: dict[str, Any] = view.get("error") or {}
    return Tried(
        provider=provider.id,
        result="fails",
        by="call",
        latency_ms=took,
        said=str(error.get("message") or view["status"]),
        hint="`tollbridge usage` has the attempt, `tollbridge groups` what holds the provider back",
    )


def _since(started: float) -> int:
    return round((time.monotonic() - started) * 1000)


def show(results: Sequence[Tried]) -> None:
    colours = {"works": "green", "answers": "yellow", "fails": "red"}
    tables.table(
        tables.console(),
        "live",
        ("provider", "result", "by", "ms", "it said", "what to do"),
        [(e.provider, tables.text(e.result, colours[e.result]), e.by, e.latency_ms, e.said, e.hint) for e in results],
    )


def failure(results: Sequence[Tried]) -> Failed | None:
    """None where every provider that was tried answers."""
    if not results:
        return Failed("no provider is ready: nothing was tried", code="provider_not_ready", hint="See the table above.")
    failing = [entry.provider for entry in results if entry.result == "fails"]
    return Failed(f"{', '.join(failing)}: see the table above") if failing else None
