"""`tollbridge keys`: API keys, made and revoked in the database itself, whether a gateway runs or not."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, TypeVar

import click

from gateway import app, config, database, logs, workers
from gateway.call import Scope
from gateway.cli import tables
from gateway.cli.failure import Failed
from gateway.embedded import EmbeddedPostgresError
from gateway.errors import GatewayError
from gateway.keys import KeyRecord, Keys

_T = TypeVar("_T")
_F = TypeVar("_F", bound=Callable[..., Any])

_SPAN = re.compile(r"(\d{1,6})([hdw])")
_UNITS = {"h": "hours", "d": "days", "w": "weeks"}


@click.group("keys")
def command() -> None:
    """
    Create, list and revoke API keys.

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


def _expiry(_ctx: click.Context, _option: click.Parameter, text: str | None) -> datetime | None:
    if text is None:
        return None
    if span := _SPAN.fullmatch(text):
        return datetime.now(UTC) + timedelta(**{_UNITS[span[2]]: int(span[1])})
    try:
        at = datetime.fromisoformat(text)
    except ValueError as error:
        raise click.BadParameter("should be a span (12h, 90d, 4w) or a time (2027-01-31T00:00+00:00)") from error
    return at if at.tzinfo else at.replace(tzinfo=UTC)


@command.command("create")
@click.argument("name")
@click.option(
    "--scope",
    "scopes",
    multiple=True,
    type=click.Choice([scope.value for scope in Scope]),
    help="What it may do; repeat for more. Default: chat and jobs and reading its own usage.",
)
@click.option("--expires", callback=_expiry, metavar="WHEN", help="After a span (12h, 90d, 4w) or at a time.")
@_options
def create(
    name: str,
    scopes: tuple[str, ...],
    expires: datetime | None,
    path: Path | None,
    data_dir: Path | None,
    as_json: bool,
) -> None:
    """
    Make a key and print its secret, once: it is stored as a hash and cannot be shown again.

    \b
    Examples:
      tollbridge keys create web-frontend --scope chat
      tollbridge keys create operator --scope admin --scope usage:read --expires 12h
      export TOLLBRIDGE_API_KEY=$(tollbridge keys create me)
    """  # noqa: D301  a real backspace: click keeps the paragraph's lines
    granted = [Scope(scope) for scope in scopes] or [Scope.CHAT, Scope.JOBS, Scope.USAGE_READ]
    record, secret = _run(path, data_dir, lambda keys: keys.create(name, granted, expires))
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
        ("name", "state", "scopes", "created", "expires", "id"),
        [
            (
                record.name,
                _state(record, now),
                ", ".join(sorted(record.scopes)),
                _day(record.created_at),
                _day(record.expires_at),
                record.key_id,
            )
            for record in records
        ],
    )


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
        Keys.open(pool) as keys,
    ):
        yield keys


@contextlib.contextmanager
def _failing() -> Iterator[None]:
    try:
        yield
    except config.ConfigFaults as faults:
        raise Failed(str(faults), hint="`tollbridge check` says the same.") from None
    except GatewayError as error:
        raise Failed(error.message, code=error.code.value) from error
    except (database.DatabaseError, EmbeddedPostgresError) as error:
        raise Failed(str(error), code="control_store_unavailable") from error


def _told(record: KeyRecord) -> dict[str, object]:
    return {
        "id": record.key_id,
        "name": record.name,
        "scopes": sorted(record.scopes),
        "created_at": record.created_at,
        "expires_at": record.expires_at,
        "revoked_at": record.revoked_at,
    }


def _state(record: KeyRecord, now: datetime) -> object:
    if record.revoked_at is not None:
        return tables.text("revoked", "red")
    if record.expires_at is not None and record.expires_at <= now:
        return tables.text("expired", "yellow")
    return tables.text("active", "green")


def _day(at: datetime | None) -> str | None:
    return None if at is None else at.isoformat(timespec="minutes")
