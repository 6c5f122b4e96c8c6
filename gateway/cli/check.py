"""`tollbridge check`: is the configuration usable, and what do its providers lack?"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path

import click

from gateway import config
from gateway.cli import live, prices, remote, tables
from gateway.cli.failure import Failed
from gateway.pricing import Prices, RoutePrice
from gateway.provider import Provider
from gateway.router import Described, described
from metering.price_list import PriceListFault

#: Models listed before the rest is counted.
SHOWN = 4


@click.command("check")
@click.option("--config", "path", type=click.Path(path_type=Path, dir_okay=False), help="Instead of tollbridge.toml.")
@click.option("--require-ready", is_flag=True, help="Fail while a provider that a model needs is not ready.")
@click.option("--live", "ask", is_flag=True, help="Ask each ready provider, at an endpoint that costs nothing.")
@click.option("--spend", is_flag=True, help="With --live: where only a call tells, the running gateway makes one.")
@remote.options
def command(
    path: Path | None, require_ready: bool, ask: bool, spend: bool, url: str | None, key: str | None, as_json: bool
) -> None:
    """
    Validate the configuration without starting anything, and say which providers are ready and what each lacks.

    Every fault is listed with its file and path; one fault is enough for exit status 1. A provider is ready once its
    credentials are in the environment. With --require-ready, for deployment pipelines, it is an error as well if a
    model has a provider that is not, or if a route is not the one any more that was found fit for a role.

    With --live each ready provider is asked, and it is an error if one does not answer as it should. Some let anybody
    see the endpoints that cost nothing: with --spend the running gateway asks those for one token, with a ticket and
    metered like any call.

    \b
    Examples:
      tollbridge check
      OPENAI_API_KEY=... tollbridge check --config tollbridge.toml --require-ready
      tollbridge check --live --spend
    """  # noqa: D301  a real backspace: click keeps the paragraph's lines
    if spend and not ask:
        raise click.UsageError("--spend needs --live")
    try:
        settings = config.load(path)
    except config.ConfigFaults as faults:
        if as_json:
            tables.json({"ok": False, "faults": faults.faults})
        raise Failed(str(faults), hint=f"{len(faults.faults)} to mend; nothing was started.") from None
    used = {target.provider for model in settings.models.values() for target in model.targets}
    lacking = sorted(
        name for name, provider in settings.providers.items() if name in used and provider.enabled and provider.missing
    )
    routes = [] if settings.file is None else list(described(settings.providers, settings.models))
    unpriced = _unpriced(settings)
    lost = [route for route in routes if route.lost]
    results = _tried(settings, spend=spend, url=url, key=key) if ask else []
    if as_json:
        tables.json(
            {
                "ok": True,
                "file": str(settings.file) if settings.file else None,
                "providers": {
                    provider.id: {"ready": provider.ready, "enabled": provider.enabled, "missing": provider.missing}
                    for provider in settings.providers.values()
                },
                "models": {name: [target.provider for target in m.targets] for name, m in settings.models.items()},
                "not_ready": lacking,
                "routes": routes,
                "unpriced": [
                    {"model": route.model, "provider": route.provider, "upstream_model": route.upstream_model}
                    for route in unpriced
                ],
                "roles": {name: role.models for name, role in settings.roles.items()},
                **({"live": results} if ask else {}),
            }
        )
    else:
        _show(settings, routes)
        if unpriced:
            prices.show_unpriced(unpriced)
        if ask:
            live.show(results)
    if ask and (failure := live.failure(results)) is not None:
        raise failure
    if require_ready and lacking:
        needs = "; ".join(f"{name} lacks {', '.join(settings.providers[name].missing)}" for name in lacking)
        raise Failed(f"not ready: {needs}", code="provider_not_ready", hint="Set them in the environment.")
    if require_ready and lost:
        raise Failed(
            "; ".join(f"{_name(route)} has lost {', '.join(route.lost)}" for route in lost),
            code="provider_not_ready",
            hint="Find out whether the route is fit as it is now, and write its route_id into qualified_for.",
        )


def _unpriced(settings: config.Settings) -> list[RoutePrice]:
    """Routes of configured models whose price nobody knows."""
    try:
        return [route for route in Prices(settings).of_models(datetime.now(UTC)) if route.price is None]
    except PriceListFault as fault:
        raise Failed(str(fault), code="price_list", hint=prices.LIST_HINT) from fault


def _tried(settings: config.Settings, *, spend: bool, url: str | None, key: str | None) -> list[live.Tried]:
    results = {entry.provider: entry for entry in live.tried(settings.providers.values())}
    only_a_call_tells = [settings.providers[name] for name, entry in results.items() if entry.result == "answers"]
    if spend and only_a_call_tells:
        with remote.reach(url, key) as gateway:
            results |= {entry.provider: entry for entry in live.called(gateway, only_a_call_tells)}
    return list(results.values())


def _name(route: Described) -> str:
    return f"{route.model} at {route.provider}"


def _show(settings: config.Settings, routes: Sequence[Described]) -> None:
    out = tables.console()
    out.print(f"configuration: {settings.file or 'built in (no tollbridge.toml here)'}, valid")
    out.print(f"data: {settings.data_dir}, database: {'given' if settings.database_url else 'embedded PostgreSQL'}")
    out.print()
    tables.table(
        out,
        "providers",
        ("provider", "ready", "lacks", "protocol", "capacity group", "models"),
        [
            (
                provider.id,
                _ready(provider),
                ", ".join(provider.missing) or None,
                provider.protocol,
                provider.group,
                _some(provider.models),
            )
            for provider in sorted(settings.providers.values(), key=lambda p: (not p.ready, p.id))
        ],
    )
    if routes:
        tables.table(
            out,
            "routes, in order",
            ("model", "provider", "upstream model", "protocol", "route_id", "fit for", "lost"),
            [
                (
                    route.model,
                    f"{route.provider} (fallback)" if route.fallback else route.provider,
                    route.upstream,
                    route.protocol,
                    route.route_id,
                    ", ".join(route.roles) or None,
                    tables.text(", ".join(f"{role} (was {was})" for role, was in route.lost.items()), "yellow")
                    if route.lost
                    else None,
                )
                for route in routes
            ],
        )
    for role in settings.roles.values():
        if not any(role.name in route.roles and route.model in role.models for route in routes):
            out.print(f"No route is fit for the role {role.name!r}: a request for it will be refused.", style="yellow")
    if not any(provider.ready for provider in settings.providers.values()):
        out.print(
            "No provider is ready yet: set one of the variables above, or look at `tollbridge demo`.", style="dim"
        )


def _ready(provider: Provider) -> object:
    if not provider.enabled:
        return tables.text("off", "dim")
    return tables.text("yes", "green") if provider.ready else tables.text("no", "yellow")


def _some(names: Iterable[str]) -> str | None:
    names = list(names)
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more or None
