"""
API keys in PostgreSQL: one method a statement.

Several processes create, revoke and read keys at once; what they must agree on is decided here, inside transactions.
"""

from __future__ import annotations

import contextlib
import importlib.resources
import uuid
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from datetime import date, datetime
from decimal import Decimal
from typing import Any

import asyncpg
import msgspec

from admission.settings import KeyLimits
from gateway.call import Scope
from gateway.database import Connection, Pool, store_errors
from gateway.keys.rights import NO_LIMITS, Limits, Profile

_SQL = importlib.resources.files("gateway.keys").joinpath("sql")


def _sql(name: str) -> str:
    return _SQL.joinpath(f"{name}.sql").read_text()


_ACTIVE = _sql("active")
_ANY = _sql("any")
_BY_DIGEST = _sql("by_digest")
_CHANGE = _sql("change")
_GET = _sql("get")
_HOLD = _sql("hold")
_INSERT = _sql("insert")
_LIST = _sql("list")
_LOCK = _sql("lock")
_REPLACE_DIGEST = _sql("replace_digest")
_REVOKE = _sql("revoke")
_ROTATE = _sql("rotate")
_USED = _sql("used")
_VERSION = _sql("version")


_KNOWN = frozenset(Limits.__struct_fields__)


class KeyRecord(Profile, frozen=True, kw_only=True):
    """What may be told of a key. Its secret is known to nobody but whoever was shown it."""

    key_id: uuid.UUID
    created_at: datetime
    #: None: never.
    changed_at: datetime | None
    revoked_at: datetime | None
    #: Until when the secret from before the last rotation is good, too; None where it is not.
    previous_secret_until: datetime | None


class Spending(msgspec.Struct, frozen=True, kw_only=True):
    """The money of a key in a period, in USD. The budget is against the sum of the three."""

    spent_usd: Decimal
    #: The most that attempts cost which have ended and whose cost is not known.
    unknown_upper_bound_usd: Decimal
    #: The most that attempts cost which are in the gateway now.
    reserved_usd: Decimal


class Used(msgspec.Struct, frozen=True, kw_only=True):
    """What a key has used, at one moment."""

    #: Its requests in the gateway, waiting or at work.
    concurrency: int
    #: What is left of its requests and tokens of this minute; None: it has no such limit.
    requests_left: int | None
    tokens_left: int | None
    day: date
    of_day: Spending
    of_month: Spending
    of_all: Spending


class NewKey(msgspec.Struct, frozen=True, kw_only=True):
    key_id: uuid.UUID
    digest: bytes
    profile: Profile


class ActiveKey(msgspec.Struct, frozen=True, kw_only=True):
    key_id: uuid.UUID
    name: str
    digest: bytes
    scopes: frozenset[Scope]
    models: tuple[str, ...] | None
    providers: tuple[str, ...] | None
    tags: dict[str, str]
    #: None: among them is one that this version does not know.
    limits: Limits | None
    #: Seconds since the epoch by the database's clock; None: never.
    expires_at: float | None
    #: The digest of the secret before this one, and until when that is good, too.
    previous: tuple[bytes, float] | None


class Version(msgspec.Struct, frozen=True, kw_only=True):
    #: Another one whenever anything about any key has changed.
    version: int
    #: Seconds since the epoch by the database's clock.
    database_time: float


class Found(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    #: Neither revoked nor expired.
    usable: bool


class NameTaken(Exception):
    """An active key has this name."""


class Full(Exception):
    """There are as many active keys as a process keeps in memory."""


class KeyStore:
    """The statements, each in a transaction of its own. All raise `gateway.database.StoreUnavailable`."""

    def __init__(self, pool: Pool, *, most: int) -> None:
        self._pool = pool
        self._most = most

    async def version(self) -> Version:
        with store_errors():
            row = await self._pool.fetchrow(_VERSION)
        assert row is not None
        return Version(version=row["version"], database_time=row["database_time"])

    async def active(self, after: uuid.UUID | None, most: int) -> list[ActiveKey]:
        """In the order of their ids, those after this one."""
        with store_errors():
            rows = await self._pool.fetch(_ACTIVE, after, most)
        return [
            ActiveKey(
                key_id=row["key_id"],
                name=row["name"],
                digest=row["digest"],
                scopes=_scopes(row["scopes"]),
                models=_names(row["models"]),
                providers=_names(row["providers"]),
                tags={} if row["tags"] == "{}" else _tags(row["tags"]),
                limits=NO_LIMITS if row["limits"] == "{}" else _limits_held(row["limits"]),
                expires_at=row["expires_at"],
                previous=None if row["previous_digest"] is None else (row["previous_digest"], row["previous_until"]),
            )
            for row in rows
        ]

    async def list(self, after: uuid.UUID | None, most: int | None) -> list[KeyRecord]:
        """In the order of their ids. `most` None: all."""
        with store_errors():
            return [_record(row) for row in await self._pool.fetch(_LIST, after, most)]

    async def get(self, key_id: uuid.UUID) -> KeyRecord | None:
        with store_errors():
            row = await self._pool.fetchrow(_GET, key_id)
        return None if row is None else _record(row)

    async def used(self, key_id: uuid.UUID, zone: str) -> Used:
        """What this key has used up to now."""
        with store_errors():
            row = await self._pool.fetchrow(_USED, key_id, zone)
        assert row is not None
        of_day, of_month, of_all = (
            Spending(
                spent_usd=row[f"{period}_spent"],
                unknown_upper_bound_usd=row[f"{period}_unknown"],
                reserved_usd=row[f"{period}_reserved"],
            )
            for period in ("day", "month", "total")
        )
        return Used(
            concurrency=row["concurrency"],
            requests_left=row["requests_left"],
            tokens_left=row["tokens_left"],
            day=row["day"],
            of_day=of_day,
            of_month=of_month,
            of_all=of_all,
        )

    async def change(
        self, key_id: uuid.UUID | None, name: str, decide: Callable[[KeyRecord], Profile]
    ) -> KeyRecord | None:
        """
        Gives the active key with this id, or (id None) this name, the profile that is decided on by what it is now.
        What `decide` raises ends it. None where there is no such key. Raises NameTaken.
        """
        with store_errors():
            async with self._pool.acquire() as connection, connection.transaction():
                row = await connection.fetchrow(_HOLD, key_id, name)
                if row is None:
                    return None
                record = _record(row)
                with _name_taken():
                    row = await connection.fetchrow(_CHANGE, record.key_id, *_columns(decide(record)))
        assert row is not None
        return _record(row)

    async def rotate(
        self,
        key_id: uuid.UUID | None,
        name: str,
        overlap_s: float,
        make: Callable[[KeyRecord], bytes],
    ) -> KeyRecord | None:
        """As `change`: another secret, by its digest; the one before stays good for so long."""
        with store_errors():
            async with self._pool.acquire() as connection, connection.transaction():
                row = await connection.fetchrow(_HOLD, key_id, name)
                if row is None:
                    return None
                record = _record(row)
                row = await connection.fetchrow(_ROTATE, record.key_id, make(record), overlap_s)
        assert row is not None
        return _record(row)

    async def insert(self, key: NewKey) -> KeyRecord:
        """Raises NameTaken, Full."""
        with store_errors():
            async with self._pool.acquire() as connection:
                return await Session(connection, most=self._most).insert(key)

    async def revoke(self, key_id: uuid.UUID | None, name: str) -> KeyRecord | None:
        """None where no active key has this id, or (id None) this name."""
        with store_errors():
            row = await self._pool.fetchrow(_REVOKE, key_id, name)
        return None if row is None else _record(row)

    @contextlib.asynccontextmanager
    async def alone(self) -> AsyncIterator[Session]:
        """A transaction in which no other process changes keys."""
        with store_errors():
            async with self._pool.acquire() as connection, connection.transaction():
                await connection.execute(_LOCK)
                yield Session(connection, most=self._most)


class Session:
    """The statements that are used inside a transaction."""

    def __init__(self, connection: Connection | asyncpg.pool.PoolConnectionProxy[asyncpg.Record], *, most: int) -> None:
        self._connection = connection
        self._most = most

    async def any(self) -> bool:
        """Whether there has ever been a key, revoked ones included."""
        return bool(await self._connection.fetchval(_ANY))

    async def by_digest(self, digest: bytes) -> Found | None:
        row = await self._connection.fetchrow(_BY_DIGEST, digest)
        return (
            None
            if row is None
            else Found(
                name=row["name"], usable=row["revoked_at"] is None and not row["expired"] and not row["replaced"]
            )
        )

    async def replace_digest(self, name: str, digest: bytes) -> bool:
        """False where no active key has this name."""
        return await self._connection.fetchval(_REPLACE_DIGEST, name, digest) is not None

    async def insert(self, key: NewKey) -> KeyRecord:
        """Raises NameTaken, Full."""
        with _name_taken():
            row = await self._connection.fetchrow(
                _INSERT, key.key_id, key.profile.name, key.digest, *_columns(key.profile)[1:], self._most
            )
        if row is None:
            raise Full
        return _record(row)


def _columns(profile: Profile) -> tuple[object, ...]:
    return (
        profile.name,
        profile.description,
        sorted(scope.value for scope in profile.scopes),
        profile.models,
        profile.providers,
        msgspec.json.encode(profile.tags).decode(),
        msgspec.json.encode(profile.limits).decode(),
        profile.expires_at,
    )


@contextlib.contextmanager
def _name_taken() -> Iterator[None]:
    try:
        yield
    except asyncpg.UniqueViolationError as error:
        if error.constraint_name != "api_key_active_name":
            raise
        raise NameTaken from error


def _record(row: asyncpg.Record) -> KeyRecord:
    return KeyRecord(
        key_id=row["key_id"],
        name=row["name"],
        description=row["description"],
        scopes=_scopes(row["scopes"]),
        models=_names(row["models"]),
        providers=_names(row["providers"]),
        tags=_tags(row["tags"]),
        limits=_limits(row["limits"]),
        created_at=row["created_at"],
        changed_at=row["changed_at"],
        expires_at=row["expires_at"],
        revoked_at=row["revoked_at"],
        previous_secret_until=row["previous_until"],
    )


def _names(names: Sequence[str] | None) -> tuple[str, ...] | None:
    return None if names is None else tuple(names)


def _tags(text: str) -> dict[str, str]:
    return msgspec.json.decode(text, type=dict[str, str])


def _limits(text: str) -> Limits:
    """Those that this version knows: a newer one may know others."""
    return Limits(**msgspec.structs.asdict(msgspec.json.decode(text, type=KeyLimits)))


def _limits_held(text: str) -> Limits | None:
    return _limits(text) if msgspec.json.decode(text, type=dict[str, Any]).keys() <= _KNOWN else None


def _scopes(names: Sequence[str]) -> frozenset[Scope]:
    # A scope that a newer version knows gives nothing here, and must not lock its key out.
    known = {scope.value: scope for scope in Scope}
    return frozenset(known[name] for name in names if name in known)
