"""`tollbridge keys`: API keys, made and revoked in the database itself, whether a gateway runs or not."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any, Final, TypeVar

import click
import msgspec

from gateway import app, config, database, logs, workers
from gateway.call import Scope
from gateway.cli import tables
from gateway.cli.failure import Failed
from gateway.embedded import EmbeddedPostgresError
from gateway.errors import GatewayError
from gateway.keys import LONGEST_OVERLAP_S, NO_LIMITS, Change, KeyRecord, Keys, KeysSettings, Limits

_T = TypeVar("_T")
_F = TypeVar("_F", bound=Callable[..., Any])

_SPAN = re.compile(r"(\d{1,6})([hdw])")
_UNITS = {"h": "hours", "d": "days", "w": "weeks"}


@click.group("keys")
def command() -> None:
    """
    Create, list, change, rotate and revoke API keys.

    These commands work on the gateway's database, the one of the configuration or the embedded one of the data
    directory. A running gateway hears of a change within two seconds.

    \b
    Example:
      tollbridge keys create nightly-batch --scope jobs --expires 90d
    """  # noqa: D301  a real backspace: click keeps the paragraph's lines


def _options(command: _F) -> _F:
    for option in (
        click.option("--json", "as_json", is_flag=True, help="Print JSON for machines."),
        click.option("--data-dir", type=click.Path(path_type=Path, file_okay=False), help="Instead of .tollbridge."),
        click.option(
            "--config", "path", type=click.Path(path_type=Path, dir_okay=False), help="Instead of tollbridge.toml."
        ),
    ):
        command = option(command)
    return command


def _span(text: str) -> timedelta | None:
    span = _SPAN.fullmatch(text)
    return None if span is None else timedelta(**{_UNITS[span[2]]: int(span[1])})


def _expiry(_ctx: click.Context, _option: click.Parameter, text: str | None) -> datetime | None:
    if text is None:
        return None
    if span := _span(text):
        return datetime.now(UTC) + span
    try:
        at = datetime.fromisoformat(text)
    except ValueError as error:
        raise click.BadParameter("should be a span (12h, 90d, 4w) or a time (2027-01-31T00:00+00:00)") from error
    return at if at.tzinfo else at.replace(tzinfo=UTC)


def _overlap(_ctx: click.Context, _option: click.Parameter, text: str) -> float:
    span = timedelta() if text == "0" else _span(text)
    if span is None or span.total_seconds() > LONGEST_OVERLAP_S:
        raise click.BadParameter("should be a span (12h, 7d) of at most 30 days, or 0")
    return span.total_seconds()


def _tags(_ctx: click.Context, _option: click.Parameter, given: tuple[str, ...]) -> dict[str, str]:
    tags = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise click.BadParameter("should be name=value")
        tags[name] = value
    return tags


def _limits(_ctx: click.Context, _option: click.Parameter, given: tuple[str, ...]) -> Limits:
    named: dict[str, str] = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not equals or name not in Limits.__struct_fields__:
            raise click.BadParameter(f"should be NAME=NUMBER, and NAME one of {', '.join(Limits.__struct_fields__)}")
        if name in named:
            raise click.BadParameter(f"{name} is given twice")
        named[name] = value
    try:
        return msgspec.convert(named, Limits, strict=False)
    except msgspec.ValidationError as error:
        said, _, where = str(error).partition(" - at `$.")
        raise click.BadParameter(f"{where.rstrip('`') or 'NAME=NUMBER'}: {said}") from error


_SCOPES: Final = click.Choice([scope.value for scope in Scope])


def _profile(command: _F) -> _F:
    """The options for what a key may use."""
    for option in (
        click.option("--expires", callback=_expiry, metavar="WHEN", help="After a span (12h, 90d, 4w) or at a time."),
        click.option("--description", metavar="TEXT", help="What it is for."),
        click.option(
            "--tag", "tags", multiple=True, callback=_tags, metavar="NAME=VALUE", help="On each of its calls."
        ),
        click.option(
            "--limit",
            "limits",
            multiple=True,
            callback=_limits,
            metavar="NAME=NUMBER",
            help=f"How much it may use ({', '.join(Limits.__struct_fields__)}); repeat for more.",
        ),
        click.option(
            "--provider", "providers", multiple=True, metavar="ID", help="A provider it may use; repeat for more."
        ),
        click.option("--model", "models", multiple=True, metavar="PATTERN", help="Models it may use; repeat for more."),
    ):
        command = option(command)
    return command


@command.command("create")
@click.argument("name")
@click.option(
    "--scope",
    "scopes",
    multiple=True,
    type=_SCOPES,
    help="What it may do; repeat for more. Default: chat and jobs and reading its own usage.",
)
@_profile
@_options
def create(
    name: str,
    scopes: tuple[str, ...],
    models: tuple[str, ...],
    providers: tuple[str, ...],
    limits: Limits,
    tags: dict[str, str],
    description: str | None,
    expires: datetime | None,
    path: Path | None,
    data_dir: Path | None,
    as_json: bool,
) -> None:
    """
    Make a key and print its secret, once: it is stored as a hash and cannot be shown again.

    \b
    Examples:
      tollbridge keys create web-frontend --scope chat --model 'gpt-*' --tag team=web
      tollbridge keys create operator --scope admin --scope usage:read --expires 12h
      tollbridge keys create intern --limit budget_month_usd=20 --limit requests_per_minute=30
      export TOLLBRIDGE_API_KEY=$(tollbridge keys create me)
    """  # noqa: D301  a real backspace: click keeps the paragraph's lines
    granted = [Scope(scope) for scope in scopes] or [Scope.CHAT, Scope.JOBS, Scope.USAGE_READ]
    record, secret = _run(
        path,
        data_dir,
        lambda keys: keys.create(
            name,
            granted,
            expires,
            tags,
            description=description or "",
            models=models or None,
            providers=providers or None,
            limits=limits,
        ),
    )
    _tell_secret(record, secret, as_json=as_json)


def _tell_secret(record: KeyRecord, secret: str, *, as_json: bool) -> None:
    if as_json:
        tables.json({**_told(record), "secret": secret})
        return
    # The secret alone on stdout: it can be taken from there without ever being on the screen.
    click.echo(f"key {record.name!r} may: {', '.join(sorted(record.scopes))}", err=True)
    click.echo("This is its secret. It is not shown again:", err=True)
    click.echo(secret)


@command.command("list")
@_options
def list_(path: Path | None, data_dir: Path | None, as_json: bool) -> None:
    """
    List every key there ever was, without secrets.

    \b
    Example:
      tollbridge keys list
    """  # noqa: D301  a real backspace: click keeps the paragraph's lines
    records = _run(path, data_dir, lambda keys: keys.list())
    if as_json:
        tables.json([_told(record) for record in records])
        return
    now = datetime.now(UTC)
    tables.table(
        tables.console(),
        "keys",
        ("name", "state", "scopes", "may use", "limits", "tags", "created", "expires", "id"),
        [
            (
                record.name,
                _state(record, now),
                ", ".join(sorted(record.scopes)),
                _may_use(record),
                ", ".join(f"{name}={value}" for name, value in _limits_of(record).items() if value is not None),
                ", ".join(f"{name}={value}" for name, value in sorted(record.tags.items())),
                _day(record.created_at),
                _day(record.expires_at),
                record.key_id,
            )
            for record in records
        ],
    )


@command.command("change")
@click.argument("key")
@click.option("--name", metavar="NAME", help="Its new name.")
@click.option("--scope", "scopes", multiple=True, type=_SCOPES, help="What it may do from now on; repeat for more.")
@click.option("--any-model", is_flag=True, help="It may use every model.")
@click.option("--any-provider", is_flag=True, help="It may use every provider.")
@click.option("--no-limits", is_flag=True, help="It may use as much as there is.")
@click.option("--no-tags", is_flag=True, help="Its calls have no tags of its own.")
@click.option("--no-expiry", is_flag=True, help="It does not expire.")
@_profile
@_options
def change(
    key: str,
    name: str | None,
    scopes: tuple[str, ...],
    any_model: bool,
    any_provider: bool,
    no_limits: bool,
    no_tags: bool,
    no_expiry: bool,
    models: tuple[str, ...],
    providers: tuple[str, ...],
    limits: Limits,
    tags: dict[str, str],
    description: str | None,
    expires: datetime | None,
    path: Path | None,
    data_dir: Path | None,
    as_json: bool,
) -> None:
    """
    Change KEY (its name or id). What is not named stays; a list that is named replaces the one it had.

    \b
    Examples:
      tollbridge keys change web-frontend --model gpt-4o-mini --model 'claude-*'
      tollbridge keys change web-frontend --any-model --expires 30d
      tollbridge keys change web-frontend --limit budget_day_usd=5 --limit concurrency=4
    """  # noqa: D301  a real backspace: click keeps the paragraph's lines
    both = {
        "--any-model": any_model and models,
        "--any-provider": any_provider and providers,
        "--no-limits": no_limits and limits != NO_LIMITS,
        "--no-tags": no_tags and tags,
        "--no-expiry": no_expiry and expires,
    }
    for option, given in both.items():
        if given:
            raise click.UsageError(f"{option} and its opposite are both given")
    fields: dict[str, Any] = {}
    for field, named, cleared, empty in (
        ("name", name, False, None),
        ("description", description, False, None),
        ("scopes", frozenset(Scope(scope) for scope in scopes) or None, False, None),
        ("models", models or None, any_model, None),
        ("providers", providers or None, any_provider, None),
        ("limits", None if limits == NO_LIMITS else limits, no_limits, NO_LIMITS),
        ("tags", tags or None, no_tags, {}),
        ("expires_at", expires, no_expiry, None),
    ):
        if named is not None or cleared:
            fields[field] = named if named is not None else empty
    if not fields:
        raise click.UsageError("nothing to change is named")
    record = _run(path, data_dir, lambda keys: keys.change(key, Change(**fields)))
    if as_json:
        tables.json(_told(record))
    else:
        click.echo(f"key {record.name!r} is changed: {', '.join(fields)}")


@command.command("rotate")
@click.argument("key")
@click.option(
    "--overlap",
    "overlap_s",
    default="24h",
    show_default=True,
    callback=_overlap,
    metavar="SPAN",
    help="How long the secret before this one is good, too; 0: it is refused at once.",
)
@_options
def rotate(key: str, overlap_s: float, path: Path | None, data_dir: Path | None, as_json: bool) -> None:
    """
    Make another secret for KEY (its name or id) and print it, once.

    The one before stays good for the overlap, so that programs can be moved one by one. One from before that does not.

    \b
    Example:
      tollbridge keys rotate web-frontend --overlap 7d
    """  # noqa: D301  a real backspace: click keeps the paragraph's lines
    record, secret = _run(path, data_dir, lambda keys: keys.rotate(key, overlap_s))
    _tell_secret(record, secret, as_json=as_json)


@command.command("revoke")
@click.argument("key")
@_options
def revoke(key: str, path: Path | None, data_dir: Path | None, as_json: bool) -> None:
    """
    End KEY (its name or id) for good.

    Its requests are refused from two seconds later on at the latest; what runs already goes on to its end.

    \b
    Example:
      tollbridge keys revoke web-frontend
    """  # noqa: D301  a real backspace: click keeps the paragraph's lines
    record = _run(path, data_dir, lambda keys: keys.revoke(key))
    if as_json:
        tables.json(_told(record))
    else:
        click.echo(f"key {record.name!r} is revoked")


def _run(path: Path | None, data_dir: Path | None, use: Callable[[Keys], Awaitable[_T]]) -> _T:
    async def run() -> _T:
        async with _opened(path, data_dir) as keys:
            return await use(keys)

    logs.configure(level="warning")
    with _failing():
        return asyncio.run(run())


@contextlib.asynccontextmanager
async def _opened(path: Path | None, data_dir: Path | None) -> AsyncIterator[Keys]:
    settings = workers.load(path, data_dir)
    async with (
        app.open_database(settings) as url,
        database.open_pool(url, name="tollbridge keys", size=2, pooled=settings.pooled) as pool,
        Keys.open(pool, KeysSettings(providers=frozenset(settings.providers), zone=settings.admission.zone)) as keys,
    ):
        yield keys


@contextlib.contextmanager
def _failing() -> Iterator[None]:
    try:
        yield
    except config.ConfigFaults as faults:
        raise Failed(str(faults), hint="`tollbridge check` says the same.") from None
    except GatewayError as error:
        at = "" if error.param is None or error.param in error.message else f"{error.param}: "
        raise Failed(at + error.message, code=error.code.value) from error
    except (database.DatabaseError, EmbeddedPostgresError) as error:
        raise Failed(str(error), code="control_store_unavailable") from error


def _told(record: KeyRecord) -> dict[str, object]:
    return {
        "id": record.key_id,
        "name": record.name,
        "description": record.description,
        "scopes": sorted(record.scopes),
        "models": record.models,
        "providers": record.providers,
        "tags": record.tags,
        "limits": _limits_of(record),
        "created_at": record.created_at,
        "changed_at": record.changed_at,
        "expires_at": record.expires_at,
        "revoked_at": record.revoked_at,
        "previous_secret_until": record.previous_secret_until,
    }


def _limits_of(record: KeyRecord) -> dict[str, str | int | None]:
    return {
        name: format(value, "f") if isinstance(value, Decimal) else value
        for name, value in msgspec.structs.asdict(record.limits).items()
    }


def _may_use(record: KeyRecord) -> str:
    models = "any model" if record.models is None else ", ".join(record.models)
    return models if record.providers is None else f"{models} at {', '.join(record.providers)}"


def _state(record: KeyRecord, now: datetime) -> object:
    if record.revoked_at is not None:
        return tables.text("revoked", "red")
    if record.expires_at is not None and record.expires_at <= now:
        return tables.text("expired", "yellow")
    return tables.text("active", "green")


def _day(at: datetime | None) -> str | None:
    return None if at is None else at.isoformat(timespec="minutes")
