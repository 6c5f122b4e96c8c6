"""
How the gateway reaches PostgreSQL, and brings the schema of every package up to what this version needs.

A package keeps its SQL beside its code: `migrations/NNNN_name.sql`, applied once, in order, never edited again, and
`functions/*.sql`, applied again whenever the text changes. The names of functions carry a version (`acquire_v1`), so
processes of two versions run side by side. Each file is one transaction, and each transaction takes one advisory lock
before it looks: any number of processes may start at once, also through a pooler that hands out connections by
transaction. Without the recorded hashes, an edited migration would give two databases that differ and say the same.
docs/adr/0002 has what was rejected.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import importlib.resources
import re
import time
import urllib.parse
from collections.abc import AsyncIterator, Iterator, Sequence
from importlib.resources.abc import Traversable
from typing import TypeAlias

import asyncpg
import msgspec
import structlog
from typing_extensions import override

log = structlog.get_logger(__name__)

Connection: TypeAlias = "asyncpg.Connection[asyncpg.Record]"
Pool: TypeAlias = "asyncpg.Pool[asyncpg.Record]"

#: Seconds for one attempt to connect, and between attempts while the server starts.
CONNECT_TIMEOUT_S = 5.0
_RETRY_S = 0.05
#: Seconds one statement of a pool may take. A server that is frozen answers nothing, not even a refusal; asyncpg waits
#: as long again for the cancellation.
STATEMENT_TIMEOUT_S = 8.0
#: Seconds to wait for the process that is migrating, and for any lock that a migration takes.
MIGRATION_LOCK_TIMEOUT_S = 120
#: Any constant will do, as long as it never changes: "tollb" in ASCII.
_ADVISORY_LOCK = 0x746F6C6C62


class DatabaseError(Exception):
    """
    What goes wrong with the database as a whole.

    DatabaseError
    |- StoreUnavailable     it cannot be reached, is read-only, or the connection broke: a commit's outcome is unknown
    |- UrlRefused           its URL cannot be read, or the server refuses what it asks for
    `- MigrationRefused     its schema and this version's SQL files do not belong together
    """


class StoreUnavailable(DatabaseError):
    """The database cannot be reached or written. Whether a statement in flight took effect is unknown."""


class UrlRefused(DatabaseError):
    """The database URL cannot be used. The message does not repeat it: it may hold a password."""


class MigrationRefused(DatabaseError):
    """The database's schema and the SQL files of this version do not belong together."""


_SETTINGS = "the database URL (TOLLBRIDGE_DATABASE_URL, or that of content or LISTEN, or theirs in [gateway])"
_UNREADABLE = "cannot be read: is a special character in it not %-encoded, or a parameter of it unknown?"
#: A host as a URL has it: a name, an address, or the %-encoded path of a socket.
_HOST = re.compile(r"[\w.%-]+", re.ASCII)
#: SQLSTATE classes and codes: connection lost, no slots or disk left, I/O error, shut down or starting, read-only or a
#: standby, cut off by a transaction timeout, credentials or database not there.
_UNAVAILABLE = ("08", "53", "58", "57P", "25006", "25P03", "25P04", "28", "3D000")
#: Of these, the ones that waiting can mend.
_STARTING = ("08", "53300", "57P")


@contextlib.contextmanager
def store_errors() -> Iterator[None]:
    """Turn every sign that the database is not there into StoreUnavailable; a fault of the statement stays itself."""
    try:
        yield
    except OSError as error:
        raise StoreUnavailable(f"the database cannot be reached ({type(error).__name__})") from error
    except asyncpg.PostgresError as error:
        if not (error.sqlstate or "").startswith(_UNAVAILABLE):
            raise
        raise StoreUnavailable(f"the database is not available ({type(error).__name__})") from error
    except asyncpg.InternalClientError as error:
        # Its state machine, met by a connection that was cut while it was handed out.
        raise StoreUnavailable("the connection to the database broke") from error
    except asyncpg.InterfaceError as error:
        # asyncpg has one class for a lost connection and for a wrong call.
        if not re.search(r"clos(ed|ing)", str(error)):
            raise
        raise StoreUnavailable("the connection to the database is closed") from error


def url_fault(url: str) -> str | None:
    """
    What is wrong with a database URL, as far as that can be seen without connecting; None where nothing is.

    Never repeats the URL, or a part of it: what is taken for a host or a port may be the end of a password.
    """
    try:
        parts = urllib.parse.urlsplit(url)
        options = urllib.parse.parse_qs(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query))
    except ValueError:
        return _UNREADABLE
    if parts.scheme not in ("postgresql", "postgres") or not url.startswith(f"{parts.scheme}://"):
        return "does not begin with postgresql:// or postgres://"
    if parts.fragment:
        return "holds a #, which ends a URL: in a user name or password it is written %23"
    places = [place for place in parts.netloc.rpartition("@")[2].split(",") if place]
    ports = [text for place in places if (text := place.rpartition("]")[2].partition(":")[2])]
    ports += [text for given in options.get("port", ()) for text in given.split(",")]
    if any(not (text.isascii() and text.isdecimal() and 0 < int(text) < 65536) for text in ports):
        return "has a port that is not a number from 1 to 65535; / and : in a user name or password are %2F and %3A"
    if any(":" in place and place.count(":") > 1 and not place.startswith("[") for place in places):
        return "has a host with more than one ':'; an IPv6 address is written in []"
    if parts.netloc.count("@") > 1:
        return "holds more than one @: in a user name or password it is written %40"
    if any(not place.startswith(("[", ":")) and not _HOST.fullmatch(place.partition(":")[0]) for place in places):
        return "has a host that is not a name or an address; special characters in a password are %-encoded"
    return None


def _cache_size(*, pooled: bool) -> int:
    # A pooler runs the next statement in another session, which does not know what this one has prepared. With no cache
    # asyncpg parses each statement in the transaction that runs it. Else its own default.
    return 0 if pooled else 100


async def connect(url: str, *, name: str, wait_s: float = 0.0, pooled: bool = False) -> Connection:
    """
    One dedicated connection, known to the server as `name`. `pooled`: the URL is that of a pooler which hands out
    sessions by transaction.

    Within `wait_s` a server that is starting, recovering or restarting is tried again. Raises StoreUnavailable,
    UrlRefused.
    """
    deadline = time.monotonic() + wait_s
    told = False
    while True:
        try:
            with store_errors():
                settings = {"application_name": name}
                return await asyncpg.connect(
                    url,
                    timeout=CONNECT_TIMEOUT_S,
                    server_settings=settings,
                    statement_cache_size=_cache_size(pooled=pooled),
                )
        except (ValueError, OverflowError, TypeError):
            # asyncpg's own errors quote what they could not read.
            raise UrlRefused(f"{_SETTINGS} {_UNREADABLE}") from None
        except asyncpg.PostgresError as error:
            # What is in the URL and is no part of an address goes to the server, which may not know it.
            raise UrlRefused(f"{_SETTINGS} has a parameter that the server refuses ({type(error).__name__})") from None
        except StoreUnavailable as error:
            if time.monotonic() >= deadline or not _may_be_starting(error.__cause__):
                raise
            if not told:
                told = True
                log.info("database.waited_for", reason=str(error), for_at_most_s=wait_s)
        await asyncio.sleep(_RETRY_S)


@contextlib.asynccontextmanager
async def open_connection(
    url: str, *, name: str, wait_s: float = 0.0, pooled: bool = False
) -> AsyncIterator[Connection]:
    """`connect`, closed at the end; cut where the block fails, so that a dead server cannot hold up the error."""
    connection = await connect(url, name=name, wait_s=wait_s, pooled=pooled)
    try:
        yield connection
    except BaseException:
        connection.terminate()
        raise
    with store_errors():
        await connection.close(timeout=CONNECT_TIMEOUT_S)


@contextlib.asynccontextmanager
async def open_pool(
    url: str, *, name: str, size: int, wait_s: float = 0.0, pooled: bool = False
) -> AsyncIterator[Pool]:
    """
    At most `size` connections for what is not hot; they open on demand, so a server that died is found again.
    `pooled` as for `connect`.

    Raises StoreUnavailable if the first connection cannot be made within `wait_s`. Leaving waits for the connections
    that are in use, bounded, then cuts them.
    """
    async with open_connection(url, name=name, wait_s=wait_s, pooled=pooled):
        pass
    settings = {"application_name": name}
    pool = await asyncpg.create_pool(
        url,
        min_size=0,
        max_size=size,
        timeout=CONNECT_TIMEOUT_S,
        command_timeout=STATEMENT_TIMEOUT_S,
        server_settings=settings,
        statement_cache_size=_cache_size(pooled=pooled),
        reset=_nothing_to_undo,
    )
    try:
        yield pool
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(pool.close(), CONNECT_TIMEOUT_S)
    finally:
        pool.terminate()


async def _nothing_to_undo(_connection: object) -> None:
    """
    A connection goes back to its pool as it is. Whatever runs on one is told what it needs with `set local`, since
    behind a pooler a session is nobody's own. asyncpg's default would cost a round trip after each use; it rolls back a
    transaction that was left open before this is called.
    """


def _may_be_starting(error: BaseException | None) -> bool:
    if isinstance(error, asyncpg.PostgresError):
        return (error.sqlstate or "").startswith(_STARTING)
    return isinstance(error, OSError)


class Source(msgspec.Struct, frozen=True, kw_only=True):
    """Where a component keeps its SQL: `migrations` and `functions` in `directory`, either of which may be missing."""

    component: str
    directory: Traversable


#: In the order in which they are applied.
MIGRATIONS: tuple[Source, ...] = tuple(
    Source(component=component, directory=importlib.resources.files(package).joinpath("sql"))
    for component, package in (
        ("admission", "admission"),
        ("metering", "metering"),
        ("keys", "gateway.keys"),
        ("jobs", "gateway.jobs"),
        ("idempotency", "gateway.idempotency"),
        ("capture", "gateway.capture"),
    )
)


class _File(msgspec.Struct, frozen=True, kw_only=True):
    component: str
    #: None: a file of functions.
    number: int | None
    name: str
    sql: str
    sha256: str

    @override
    def __str__(self) -> str:
        return f"{self.component}/{self.name}"


async def migrate(
    url: str, sources: Sequence[Source] = MIGRATIONS, *, wait_s: float = 0.0, pooled: bool = False
) -> int:
    """
    Bring the database up to `sources`; the number of files applied. All migrations come before all functions.
    `pooled` as for `connect`.

    Idempotent, and safe in several processes at once. A database that newer code has migrated further is accepted as
    long as every file known here is in it unchanged. Raises MigrationRefused, StoreUnavailable, asyncpg.PostgresError.
    """
    files = [*_read(sources, "migrations"), *_read(sources, "functions")]
    async with open_connection(url, name="tollbridge-migrate", wait_s=wait_s, pooled=pooled) as connection:
        with store_errors():
            applied = await _applied(connection)
            if applied is None:
                async with _locked(connection):
                    await connection.execute(_LEDGER)
                applied = await _applied(connection) or {}
            newer = _compare(files, applied)
            count = 0
            for file in files:
                known = applied.get((file.component, file.name))
                # Newer code may have corrected a function that this version knows: its text stays.
                if known == file.sha256 or (known is not None and newer):
                    continue
                count += await _apply(connection, file)
            return count


# One row a file that is in force. `number` is null for functions.
_LEDGER = """
create schema if not exists control;
create table if not exists control.migration (
    component text not null,
    number integer,
    name text not null,
    sha256 text not null,
    applied_at timestamptz not null default clock_timestamp(),
    primary key (component, name),
    unique (component, number)
);
"""


def _read(sources: Sequence[Source], kind: str) -> Iterator[_File]:
    for source in sources:
        directory = source.directory.joinpath(kind)
        if not directory.is_dir():
            continue
        seen: dict[int | None, str] = {}
        for path in sorted(directory.iterdir(), key=lambda entry: entry.name):
            if not path.name.endswith(".sql"):
                continue
            text = path.read_bytes()
            number = None
            if kind == "migrations":
                numbered = re.fullmatch(r"(\d{4})_[a-z0-9_]+\.sql", path.name)
                if numbered is None:
                    raise MigrationRefused(f"{source.component}: {path.name} is not named NNNN_name.sql")
                number = int(numbered[1])
                if number in seen:
                    raise MigrationRefused(f"{source.component}: {seen[number]} and {path.name} have the same number")
                seen[number] = path.name
            yield _File(
                component=source.component,
                number=number,
                name=path.name if number is not None else f"functions/{path.name}",
                sql=text.decode(),
                sha256=hashlib.sha256(text).hexdigest(),
            )


async def _applied(connection: Connection) -> dict[tuple[str, str], str] | None:
    # Only read here: a role without the right to create anything can start on a schema that is up to date.
    if await connection.fetchval("select to_regclass('control.migration')") is None:
        return None
    rows = await connection.fetch("select component, name, sha256 from control.migration")
    return {(row["component"], row["name"]): row["sha256"] for row in rows}


def _compare(files: Sequence[_File], applied: dict[tuple[str, str], str]) -> bool:
    """Whether the database is newer than the code. Raises MigrationRefused if the two do not belong together."""
    newer: list[str] = []
    for component in {file.component for file in files}:
        known = {file.name: file for file in files if file.component == component and file.number is not None}
        present = {name for owner, name in applied if owner == component and not name.startswith("functions/")}
        for name in sorted(present - known.keys()):
            # Names are zero-padded numbers first, so their order is that of the numbers.
            if known and name < max(known):
                raise MigrationRefused(f"{component}/{name} is in the database, but not in this version")
            newer.append(f"{component}/{name}")
        for name, file in known.items():
            if name in present and applied[component, name] != file.sha256:
                raise MigrationRefused(f"{file} was changed after it was applied; undo that and add a new file instead")
            if name not in present and present and name < max(present):
                raise MigrationRefused(f"{file} comes before {component}/{max(present)}, which is already applied")
    if newer:
        log.info("database.newer_than_code", unknown=newer)
    return bool(newer)


@contextlib.asynccontextmanager
async def _locked(connection: Connection) -> AsyncIterator[None]:
    async with connection.transaction(isolation="read_committed"):
        await connection.execute(f"set local lock_timeout = '{MIGRATION_LOCK_TIMEOUT_S}s'")
        await connection.execute(f"select pg_advisory_xact_lock({_ADVISORY_LOCK})")
        yield


async def _apply(connection: Connection, file: _File) -> bool:
    """Apply one file, unless another process was faster. False: it was."""
    async with _locked(connection):
        key = (file.component, file.name)
        found = await connection.fetchval(
            "select sha256 from control.migration where component = $1 and name = $2", *key
        )
        if found == file.sha256:
            return False
        if found is not None and file.number is not None:
            raise MigrationRefused(f"{file} was applied with another text by another process just now")
        try:
            await connection.execute(file.sql)
        except asyncpg.PostgresError as error:
            position = int(getattr(error, "position", None) or 1)
            error.add_note(f"in {file}, line {file.sql.count(chr(10), 0, position) + 1}")
            raise
        await connection.execute(
            "insert into control.migration (component, name, number, sha256) values ($1, $2, $3, $4)"
            " on conflict (component, name) do update set sha256 = excluded.sha256, applied_at = clock_timestamp()",
            *key,
            file.number,
            file.sha256,
        )
    log.info("database.file_applied", component=file.component, name=file.name)
    return True
