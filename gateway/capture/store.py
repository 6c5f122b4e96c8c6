"""Captures in PostgreSQL: one method a statement, each one transaction."""

from __future__ import annotations

import importlib.resources
import uuid
from collections.abc import Sequence
from datetime import datetime
from typing import Final

import msgspec

from gateway.database import Pool, store_errors

_SQL: Final = importlib.resources.files("gateway.capture").joinpath("sql")
_WRITE: Final = _SQL.joinpath("write.sql").read_text()
_PURGE: Final = _SQL.joinpath("purge.sql").read_text()
_COLUMNS: Final = (
    "request_id, key_id, debit_id, transport, model, session_id, ended, request, request_bytes, answer, answer_bytes"
)


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """What was asked and answered in one request."""

    request_id: str
    key_id: uuid.UUID
    debit_id: str
    transport: str
    model: str
    session_id: str | None
    #: "complete", a code of ours, or "cancelled".
    ended: str
    #: JSON, redacted; None where it was larger than is kept, or there was none. The bytes are those before.
    request: str | None
    request_bytes: int
    answer: str | None
    answer_bytes: int


class Captured(msgspec.Struct, frozen=True, kw_only=True):
    row: Row
    captured_at: datetime
    expires_at: datetime


class CaptureStore:
    """The statements. All raise `gateway.database.StoreUnavailable`."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool

    async def write(self, rows: Sequence[Row], retention_s: float) -> None:
        columns = zip(*(msgspec.structs.astuple(row) for row in rows), strict=True)
        with store_errors():
            await self._pool.execute(_WRITE, retention_s, *map(list, columns))

    async def found(self, request_id: str) -> Captured | None:
        with store_errors():
            row = await self._pool.fetchrow(
                f"select {_COLUMNS}, captured_at, expires_at from content.capture"  # noqa: S608  no words of others
                " where request_id = $1 and expires_at > clock_timestamp()",
                request_id,
            )
        if row is None:
            return None
        fields = dict(row)
        times = {name: fields.pop(name) for name in ("captured_at", "expires_at")}
        return Captured(row=Row(**fields), **times)

    async def delete(self, request_id: str) -> bool:
        """False: there was none."""
        with store_errors():
            gone = await self._pool.fetchval(
                "delete from content.capture where request_id = $1 returning true", request_id
            )
        return gone is not None

    async def purge(self, most: int) -> int:
        """Forgets what is past its retention, at most so many; how many it was."""
        with store_errors():
            return len(await self._pool.fetch(_PURGE, most))
