"""`tollbridge prices`: what models cost, which routes have no price, and a newer list of published prices."""

from __future__ import annotations

import contextlib
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import click

from gateway import config, workers
from gateway.cli import tables
from gateway.cli.failure import Failed
from gateway.pricing import Prices, RoutePrice
from metering import price_list
from metering.cost import decimal_string
from metering.library_prices import Library
from metering.prices import Banded, KnownPrice, Price

#: Seconds for the answer to begin, and between two pieces of it.
DOWNLOAD_S = 30.0
#: What to do about a list that cannot be used.
LIST_HINT = "`tollbridge prices update` takes another, `tollbridge prices update --reset` goes back."
#: Of a price, USD per million tokens, in the order of the table: the field and the column.
TOKENS = (
    ("input", "input"),
    ("output", "output"),
    ("cache_read", "cache read"),
    ("cache_write_5m", "write 5m"),
    ("cache_write_1h", "write 1h"),
    ("reasoning", "reasoning"),
)
MEDIA = (
    "input_image",
    "input_audio",
    "input_video",
    "cache_read_image",
    "cache_read_audio",
    "output_image",
    "output_audio",
)

_config = click.option(
    "--config", "path", type=click.Path(path_type=Path, dir_okay=False), help="Instead of tollbridge.toml."
)
_data_dir = click.option("--data-dir", type=click.Path(path_type=Path, file_okay=False), help="Where the list is kept.")
_json = click.option("--json", "as_json", is_flag=True, help="For machines. Amounts are text, exact.")


@click.group("prices")
def command() -> None:
    """
    What models cost, which routes have no price, and a newer list of published prices.

    Reads the configuration and the data directory; no gateway needs to run.

    \b
    Examples:
      tollbridge prices show gpt-5
      tollbridge prices check
      tollbridge prices update
    """  # noqa: D301  a real backspace: click keeps the paragraph's lines


@command.command("show")
@click.argument("model")
@_config
@_data_dir
@_json
def show(model: str, path: Path | None, data_dir: Path | None, as_json: bool) -> None:
    """
    Show what MODEL costs now at each of its routes: a configured model, or provider/model.

    Prices are in USD per million tokens. The version is the one that each charge is stored with.

    \b
    Examples:
      tollbridge prices show gpt-5
      tollbridge prices show openai/gpt-5 --json
    """  # noqa: D301  a real backspace: click keeps the paragraph's lines
    settings = _settings(path, data_dir)
    prices, at = Prices(settings), datetime.now(UTC)
    with _list_faults():
        routes = _routes(settings, prices, model, at)
        told = [_told(prices, route, at) for route in routes]
    if as_json:
        tables.json({"model": model, "at": at, "routes": told})
        return
    _show(model, routes, told)


@command.command("check")
@_config
@_data_dir
@_json
def check(path: Path | None, data_dir: Path | None, as_json: bool) -> None:
    """
    List the routes of configured models whose price nobody knows. Exit status 1 if there are any.

    \b
    Example:
      tollbridge prices check && deploy
    """  # noqa: D301  a real backspace: click keeps the paragraph's lines
    settings = _settings(path, data_dir)
    with _list_faults():
        routes = list(Prices(settings).of_models(datetime.now(UTC)))
    without = [route for route in routes if route.price is None]
    if as_json:
        tables.json({"ok": not without, "routes": len(routes), "unpriced": list(map(_place, without))})
    elif without:
        show_unpriced(without)
    else:
        click.echo(f"{len(routes)} routes of {len(settings.models)} models, each with a price")
    if without:
        raise Failed(
            f"{len(without)} of {len(routes)} routes have no price",
            code="unpriced",
            hint="State `price` of the model or the route, or take a newer list: `tollbridge prices update`.",
        )


@command.command("update")
@click.option("--from", "file", type=click.Path(path_type=Path, dir_okay=False), help="A list that is here already.")
@click.option("--url", help="A mirror of the list.")
@click.option("--reset", is_flag=True, help="Back to the list that came with this release.")
@_config
@_data_dir
@_json
def update(
    file: Path | None, url: str | None, reset: bool, path: Path | None, data_dir: Path | None, as_json: bool
) -> None:
    """
    Take the list of prices that its makers publish now, or one from a file where there is no internet.

    It is validated before it takes the place of the one in use, and is kept in the data directory: one for each
    machine. Its day and its hash are the version that charges are stored with. Gateways take it up at their next start.

    \b
    Examples:
      tollbridge prices update
      tollbridge prices update --from data.json
      tollbridge prices update --reset
    """  # noqa: D301  a real backspace: click keeps the paragraph's lines
    if sum((file is not None, url is not None, reset)) > 1:
        raise click.UsageError("--from, --url and --reset exclude each other")
    settings = _settings(path, data_dir)
    if reset:
        _reset(settings, as_json=as_json)
        return
    source = str(file) if file is not None else url or _published_at()
    published = _read(file) if file is not None else _download(source)
    at = datetime.now(UTC)
    try:
        before = Prices(settings, _in_use(settings))
        new = price_list.checked(published, taken_at=at)
        lost, changed = _differences(before, Prices(settings, new), at)
        kept = price_list.keep(settings.data_dir, published, source=source, taken_at=at)
    except price_list.PriceListFault as fault:
        raise Failed(f"{fault}; the one in use stays", code="price_list") from fault
    except OSError as error:
        raise Failed(f"{settings.data_dir} cannot be written: {error.strerror}") from error
    if as_json:
        tables.json(
            {
                "version": kept.version,
                "sha256": kept.sha256,
                "source": source,
                "models": new.models,
                "changed": changed,
                "lost": lost,
            }
        )
        return
    click.echo(f"{kept.version}: {new.models:,} models, from {source}")
    for line, names in (("cost otherwise than before", changed), ("have no price any more", lost)):
        if names:
            click.echo(f"routes that {line}: {', '.join(names)}")
    click.echo(f"kept in {settings.data_dir}. Each gateway of this machine takes it up when it starts next.")


def show_unpriced(routes: Sequence[RoutePrice]) -> None:
    """The routes that have no price, as a table; `tollbridge check` shows it as well."""
    tables.table(
        tables.console(),
        "routes without a price: what they cost is unknown",
        ("model", "provider", "upstream model", "served"),
        [
            (
                route.model,
                f"{route.provider} (fallback)" if route.fallback else route.provider,
                route.upstream_model,
                "refused" if route.required else "yes",
            )
            for route in routes
        ],
    )


# -------------------------------------------------------------------------- showing


def _routes(settings: config.Settings, prices: Prices, model: str, at: datetime) -> list[RoutePrice]:
    configured = settings.models.get(model)
    if configured is not None:
        return list(prices.of_model(configured, at))
    provider, slash, upstream = model.partition("/")
    route = prices.of_pinned(provider, upstream, at) if slash and upstream else None
    if route is None:
        raise Failed(
            f"no model or provider/model is called {model}",
            code="model_not_found",
            hint="`tollbridge check` lists the models and the providers.",
        )
    return [route]


def _place(route: RoutePrice) -> dict[str, Any]:
    return {
        "model": route.model,
        "provider": route.provider,
        "upstream_model": route.upstream_model,
        "fallback": route.fallback,
        "refused": route.required and route.price is None,
    }


def _told(prices: Prices, route: RoutePrice, at: datetime) -> dict[str, Any]:
    price = route.price
    source = "none" if price is None else price.version.partition(":")[0]
    published = source == "genai-prices"
    since = prices.published().since(route.base_url, route.upstream_model, at) if published else None
    return {
        **_place(route),
        "source": source,
        "version": None if price is None else price.version,
        "since": since,
        "context_window": prices.published().context_window(route.base_url, route.upstream_model),
        "prices": [] if price is None else list(_rows(price)),
    }


def _rows(price: KnownPrice) -> Iterator[dict[str, Any]]:
    """One for each band of each service tier."""
    services = {"standard": price, **price.service_tiers}
    for tier, known in services.items():
        for above, band in known.bands if isinstance(known, Banded) else ((0, known),):
            yield {"service_tier": tier, "above": above, **_figures(band)}


def _figures(price: Price) -> dict[str, Any]:
    told = {name: _amount(getattr(price, name)) for name, _ in TOKENS}
    if price.media is not None:
        told |= {name: _amount(getattr(price.media, name)) for name in MEDIA}
    told["per_request"] = _amount(price.per_request)
    units = {kind: decimal_string(amount) for kind, amount in price.per_unit.items()}
    return {**{name: amount for name, amount in told.items() if amount is not None}, "per_unit": units}


def _amount(amount: Decimal | None) -> str | None:
    return None if amount is None else decimal_string(amount)


def _show(model: str, routes: Sequence[RoutePrice], told: Sequence[dict[str, Any]]) -> None:
    out = tables.console()
    tables.table(
        out,
        f"routes of {model}",
        ("provider", "upstream model", "version of its price", "since", "context window"),
        [
            (
                f"{route.provider} (fallback)" if route.fallback else route.provider,
                route.upstream_model,
                entry["version"] or tables.text("unknown", "yellow"),
                entry["since"],
                entry["context_window"],
            )
            for route, entry in zip(routes, told, strict=True)
        ],
        numbers=("context window",),
    )
    columns = ("provider", "service tier", "input above", *(column for _, column in TOKENS), "and")
    rows = [
        (
            f"{route.provider}/{route.upstream_model}",
            row["service_tier"],
            row["above"] or None,
            *(row.get(name) for name, _ in TOKENS),
            "; ".join(_more(row)) or None,
        )
        for route, entry in zip(routes, told, strict=True)
        for row in entry["prices"]
    ]
    if rows:
        tables.table(
            out,
            "USD per million tokens",
            columns,
            rows,
            numbers=("input above", *(column for _, column in TOKENS)),
        )


def _more(row: dict[str, Any]) -> Iterator[str]:
    yield from (f"{name} {row[name]}" for name in MEDIA if name in row)
    if row["per_request"] != "0":
        yield f"{row['per_request']} a request"
    yield from (f"{amount} a {kind}" for kind, amount in row["per_unit"].items())


# ------------------------------------------------------------------------- updating


def _settings(path: Path | None, data_dir: Path | None) -> config.Settings:
    try:
        return workers.load(path, data_dir)
    except config.ConfigFaults as faults:
        raise Failed(str(faults), hint="`tollbridge check` lists them.") from None


@contextlib.contextmanager
def _list_faults() -> Iterator[None]:
    """A list that cannot be used, as a failure of the command."""
    try:
        yield
    except price_list.PriceListFault as fault:
        raise Failed(str(fault), code="price_list", hint=LIST_HINT) from fault


def _in_use(settings: config.Settings) -> Library:
    """What a damaged list is compared with is the one that came with the release."""
    try:
        return price_list.library(settings.data_dir)
    except price_list.PriceListFault:
        return Library()


def _reset(settings: config.Settings, *, as_json: bool) -> None:
    try:
        forgotten = price_list.forget(settings.data_dir)
    except OSError as error:
        raise Failed(f"{settings.data_dir} cannot be written: {error.strerror}") from error
    version = Library().version
    if as_json:
        tables.json({"version": version, "changed": forgotten})
    elif forgotten:
        click.echo(f"{version}: back to the list of this release. Gateways take it up when they start next.")
    else:
        click.echo(f"{version}: the list of this release is in use already")


def _published_at() -> str:
    from genai_prices.update_prices import DEFAULT_UPDATE_URL  # noqa: PLC0415 - it loads an HTTP client

    return DEFAULT_UPDATE_URL


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise Failed(f"{file} cannot be read: {error.strerror}") from error


def _download(url: str) -> bytes:
    if urllib.parse.urlsplit(url).scheme not in {"http", "https"}:
        raise Failed(f"{url} is no http or https address")
    try:
        with urllib.request.urlopen(url, timeout=DOWNLOAD_S) as answer:  # noqa: S310 - its scheme is looked at above
            found: bytes = answer.read(price_list.LARGEST + 1)
            return found
    except urllib.error.HTTPError as error:
        error.close()
        raise Failed(f"{url} answered {error.code}", code="price_list") from error
    except (OSError, ValueError) as error:
        reason = error.reason if isinstance(error, urllib.error.URLError) else error
        raise Failed(
            f"{url} could not be had: {reason}",
            code="price_list",
            hint="Where there is no internet, bring the file and say --from FILE.",
        ) from error


def _differences(before: Prices, after: Prices, at: datetime) -> tuple[list[str], list[str]]:
    """The routes of configured models that lose their price, and those that get another."""
    lost, changed = [], []
    for old, new in zip(before.of_models(at), after.of_models(at), strict=True):
        name = f"{old.provider}/{old.upstream_model}"
        if old.price is not None and new.price is None:
            lost.append(name)
        elif old.price is not None and new.price is not None and list(_rows(old.price)) != list(_rows(new.price)):
            changed.append(name)
    return sorted(set(lost)), sorted(set(changed))
