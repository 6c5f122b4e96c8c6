"""
How long the ledger keeps single attempts.

The log is dropped by whole months, never row by row, and only where that was asked for: without it the log is kept for
ever. What counts money stays: the sums, and the last word on every attempt whose cost is not known yet. The work is in
`sql/functions/20_partitions.sql`, each call one transaction that may be killed at any point and run by several at once.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, date, datetime
from typing import Final

import asyncpg
import msgspec

#: Seconds one call may take: a month of many rows is unlinked by it.
_PATIENCE_S: Final = 600.0
#: How often the ledger's lock is asked for in one round, and the seconds between.
_TRIES: Final = 20
_PAUSE_S: Final = 0.5
#: Rows of one DELETE, and the seconds between two, which others have the database to themselves.
_MOST: Final = 2_000
_BREATH_S: Final = 0.02
#: The kinds of sums that go with the log, for there are as many as runs.
_KINDS: Final = ("run_day", "step_day", "tag_day")


class NotAllowed(Exception):
    """The database's role may not make or drop tables of the ledger."""


class Locked(Exception):
    """Somebody reads the ledger for so long that its lock could not be had."""


class Dropped(msgspec.Struct, frozen=True, kw_only=True):
    """What came of looking for a month to drop."""

    #: "dropped", "nothing", "busy": another process is about it, "clock": the database's time is not this host's,
    #: "young": a month is due that has rows written while the database's clock was behind.
    answer: str
    month: date | None
    #: About how many rows it had, and how many stay, of attempts whose cost is unknown.
    had: int | None
    kept: int | None


class Retention:
    """Makes months ahead, drops those that are over. Raises asyncpg's errors beside its own."""

    def __init__(self, pool: asyncpg.Pool, *, keep_days: int | None) -> None:
        """`keep_days`: rows granted so many days ago and later are kept, those before by month. None: all are."""
        self._pool = pool
        self._keep_days = keep_days

    async def partition(self) -> None:
        """Makes the partitions of this month and the two after it. Raises `NotAllowed`, `Locked`."""
        with _refusals():
            await self._patiently("select control.partition_invocations_v1()")

    async def drop(self) -> Dropped:
        """Drops one month, the oldest, if it is time. Raises `NotAllowed`, `Locked`."""
        if self._keep_days is None:
            return Dropped(answer="nothing", month=None, had=None, kept=None)
        with _refusals():
            row = await self._patiently(
                "select * from control.drop_invocations_v1($1, $2)", self._keep_days, datetime.now(UTC)
            )
        return Dropped(**dict(row))

    async def forget(self) -> tuple[int, int]:
        """
        Deletes, a few at a time, attempts settled long ago whose month is dropped, and sums by run, step and tag of
        days before the log. How many of each. Raises `NotAllowed`.
        """
        attempts = counters = 0
        if self._keep_days is None:
            return 0, 0
        with _refusals():
            after: uuid.UUID | None = uuid.UUID(int=0)
            while after is not None:
                row = await self._row(
                    "select * from control.forget_attempts_v1($1, $2, $3)", self._keep_days, after, _MOST
                )
                attempts += row["deleted"]
                after = row["next"]
                await asyncio.sleep(_BREATH_S)
            for kind in _KINDS:
                day: date | None = date.min
                while day is not None:
                    row = await self._row(
                        "select * from control.forget_counters_v1($1, $2, $3, $4)", self._keep_days, kind, day, _MOST
                    )
                    counters += row["deleted"]
                    day = row["next"]
                    await asyncio.sleep(_BREATH_S)
        return attempts, counters

    async def _patiently(self, statement: str, *values: object) -> asyncpg.Record:
        for _ in range(_TRIES - 1):
            try:
                return await self._row(statement, *values)
            except asyncpg.LockNotAvailableError:
                await asyncio.sleep(_PAUSE_S)
        return await self._row(statement, *values)

    async def _row(self, statement: str, *values: object) -> asyncpg.Record:
        row = await self._pool.fetchrow(statement, *values, timeout=_PATIENCE_S)
        assert row is not None
        return row


@contextmanager
def _refusals() -> Iterator[None]:
    try:
        yield
    except asyncpg.InsufficientPrivilegeError as error:
        raise NotAllowed from error
    except (asyncpg.LockNotAvailableError, asyncpg.DeadlockDetectedError) as error:
        raise Locked from error
