"""
API keys in PostgreSQL: one method a statement.

Several processes create, revoke and read keys at once; what they must agree on is decided here, inside transactions.
"""

from __future__ import annotations

import contextlib
import importlib.resources
import uuid
from collections.abc import AsyncIterator, Sequence
from datetime import datetime

import asyncpg
import msgspec

from gateway.call import Scope
from gateway.database import Connection, Pool, store_errors

_SQL = importlib.resources.files("gateway.keys").joinpath("sql")


def _sql(name: str) -> str:
    return _SQL.joinpath(f"{name}.sql").read_text()


_ACTIVE = _sql("active")
_ANY = _sql("any")
_BY_DIGEST = _sql("by_digest")
_INSERT = _sql("insert")
_LIST = _sql("list")
_LOCK = _sql("lock")
_REPLACE_DIGEST = _sql("replace_digest")
_REVOKE = _sql("revoke")
_VERSION = _sql("version")


class KeyRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What may be told of a key. Its secret is known to nobody but whoever was shown it."""

    key_id: uuid.UUID
    name: str
    scopes: frozenset[Scope]
    tags: dict[str, str]
    created_at: datetime
    #: None: never.
    expires_at: datetime | None
    revoked_at: datetime | None


class NewKey(msgspec.Struct, frozen=True, kw_only=True):
    key_id: uuid.UUID
    name: str
    digest: bytes
    scopes: frozenset[Scope]
    tags: dict[str, str] = {}
    expires_at: datetime | None = None


class ActiveKey(msgspec.Struct, frozen=True, kw_only=True):
    key_id: uuid.UUID
    name: str
    digest: bytes
    scopes: frozenset[Scope]
    #: Seconds since the epoch by the database's clock; None: never.
    expires_at: float | None


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

    async def active(self) -> list[ActiveKey]:
        with store_errors():
            rows = await self._pool.fetch(_ACTIVE)
        return [
            ActiveKey(
                key_id=row["key_id"],
                name=row["name"],
                digest=row["digest"],
                scopes=_scopes(row["scopes"]),
                expires_at=row["expires_at"],
            )
            for row in rows
        ]

    async def list(self) -> list[KeyRecord]:
        with store_errors():
            return [_record(row) for row in await self._pool.fetch(_LIST)]

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
        return None if row is None else Found(name=row["name"], usable=row["revoked_at"] is None and not row["expired"])

    async def replace_digest(self, name: str, digest: bytes) -> bool:
        """False where no active key has this name."""
        return await self._connection.fetchval(_REPLACE_DIGEST, name, digest) is not None

    async def insert(self, key: NewKey) -> KeyRecord:
        """Raises NameTaken, Full."""
        scopes = sorted(scope.value for scope in key.scopes)
        tags = msgspec.json.encode(key.tags).decode()
        try:
            row = await self._connection.fetchrow(
                _INSERT, key.key_id, key.name, key.digest, scopes, tags, key.expires_at, self._most
            )
        except asyncpg.UniqueViolationError as error:
            if error.constraint_name != "api_key_active_name":
                raise
            raise NameTaken from error
        if row is None:
            raise Full
        return _record(row)


def _record(row: asyncpg.Record) -> KeyRecord:
    return KeyRecord(
        key_id=row["key_id"],
        name=row["name"],
        scopes=_scopes(row["scopes"]),
        tags=msgspec.json.decode(row["tags"], type=dict[str, str]),
        created_at=row["created_at"],
        expires_at=row["expires_at"],
        revoked_at=row["revoked_at"],
    )


def _scopes(names: Sequence[str]) -> frozenset[Scope]:
    # A scope that a newer version knows gives nothing here, and must not lock its key out.
    known = {scope.value: scope for scope in Scope}
    return frozenset(known[name] for name in names if name in known)
