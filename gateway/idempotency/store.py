"""Idempotency keys of calls in PostgreSQL: one method a statement, each one transaction."""

from __future__ import annotations

import importlib.resources
import uuid
from typing import Final

import msgspec

from gateway.database import Pool, store_errors

_SQL: Final = importlib.resources.files("gateway.idempotency").joinpath("sql")


def _sql(name: str) -> str:
    return _SQL.joinpath(f"{name}.sql").read_text()


_END = _sql("end")
_FOUND = _sql("found")
_LEAVE = _sql("leave")
_PURGE = _sql("purge")
_RELEASE = _sql("release")
_RESERVE = _sql("reserve")
_SEND = _sql("send")
_TAKE = _sql("take")
_USED = _sql("used")


class Claim(msgspec.Struct, frozen=True, kw_only=True):
    """One request's hold of an idempotency key."""

    key_id: uuid.UUID
    idempotency_key: str
    request_id: str
    debit_id: str


class Found(msgspec.Struct, frozen=True, kw_only=True):
    """Who has an idempotency key, and what became of it."""

    claim: Claim
    digest: bytes
    owner: uuid.UUID
    #: "waiting", "sent", "left" or "ended".
    state: str
    answer: bytes | None


class Used(msgspec.Struct):
    """What an API key has kept."""

    keys: int
    #: Of answers.
    bytes: int


class CallStore:
    """The statements. All raise `gateway.database.StoreUnavailable`."""

    def __init__(self, pool: Pool, *, retention_s: float) -> None:
        self._pool = pool
        self._retention_s = retention_s

    async def reserve(self, claim: Claim, digest: bytes, owner: uuid.UUID) -> bool:
        """False: somebody has the key."""
        with store_errors():
            taken = await self._pool.fetchval(
                _RESERVE, *_names(claim), digest, claim.request_id, claim.debit_id, owner, self._retention_s
            )
        return taken is not None

    async def found(self, key_id: uuid.UUID, idempotency_key: str) -> Found | None:
        with store_errors():
            row = await self._pool.fetchrow(_FOUND, key_id, idempotency_key)
        if row is None:
            return None
        return Found(
            claim=Claim(
                key_id=key_id,
                idempotency_key=idempotency_key,
                request_id=row["request_id"],
                debit_id=row["debit_id"],
            ),
            digest=row["digest"],
            owner=row["owner"],
            state=row["state"],
            answer=row["answer"],
        )

    async def take(self, seen: Found, claim: Claim, owner: uuid.UUID) -> bool:
        """The key from a request that is gone. False: it was not as it was seen any more."""
        with store_errors():
            taken = await self._pool.fetchval(
                _TAKE, *_names(claim), seen.claim.request_id, seen.state, claim.request_id, claim.debit_id, owner
            )
        return taken is not None

    async def send(self, claim: Claim) -> bool:
        """Something may be sent from here on. False: the key is another request's."""
        with store_errors():
            return await self._pool.fetchval(_SEND, *_names(claim), claim.request_id) is not None

    async def leave(self, claim: Claim) -> None:
        with store_errors():
            await self._pool.execute(_LEAVE, *_names(claim), claim.request_id)

    async def end(self, claim: Claim, answer: bytes) -> None:
        with store_errors():
            await self._pool.execute(_END, *_names(claim), claim.request_id, answer, self._retention_s)

    async def release(self, claim: Claim) -> None:
        with store_errors():
            await self._pool.execute(_RELEASE, *_names(claim), claim.request_id)

    async def used(self, key_id: uuid.UUID) -> Used:
        with store_errors():
            row = await self._pool.fetchrow(_USED, key_id)
        assert row is not None
        return Used(keys=row["keys"], bytes=row["bytes"])

    async def purge(self, most: int) -> int:
        """Forgets what is past its retention, at most so many; how many it was."""
        with store_errors():
            return len(await self._pool.fetch(_PURGE, most))


def _names(claim: Claim) -> tuple[uuid.UUID, str]:
    return claim.key_id, claim.idempotency_key
