"""
What an operator knows of an attempt whose cost the gateway could not find out.

A broken stream, a lost process or a model without a price leaves an attempt `unknown`, with the most that it can have
cost. Whoever has the provider's invoice knows more. Nothing is edited: the proof becomes another row of the ledger, on
the day of the attempt, and the counters move by the difference in the same transaction. An attempt whose cost is known
keeps it.
"""

from __future__ import annotations

import enum
import importlib.resources
import uuid
from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Final

import asyncpg
import msgspec

from metering.cost import decimal_string

_FIND: Final = importlib.resources.files("metering").joinpath("sql", "find_attempts.sql").read_text()
_RESOLVE: Final = importlib.resources.files("metering").joinpath("sql", "resolve.sql").read_text()

#: The price list that a person's figure comes from, and the reason of a zero that a person states.
RESOLVED: Final = "resolved"


class Resolution(msgspec.Struct, frozen=True, kw_only=True):
    """One attempt, by its ticket or by key, debit and number; and what it cost."""

    ticket_id: uuid.UUID | None = None
    key_id: uuid.UUID | None = None
    debit_id: str | None = None
    attempt: int | None = None
    #: USD. 0: it has cost nothing.
    usd: Decimal
    note: str | None = None
    evidence: str | None = None

    @property
    def state(self) -> str:
        return "charged" if self.usd else "zero"


class Result(enum.StrEnum):
    #: It was unknown, and is not any more.
    RESOLVED = "resolved"
    #: It is known to have cost just that.
    UNCHANGED = "unchanged"
    #: It is known to have cost something else.
    SETTLED = "settled"
    #: It is at work, or its end is not written yet.
    OPEN = "open"
    NOT_FOUND = "not_found"


class Resolved(msgspec.Struct, frozen=True, kw_only=True):
    result: Result
    #: None where there is no such attempt.
    ticket_id: uuid.UUID | None = None
    #: What the ledger has after this: "charged", "zero", "unknown" or "open".
    state: str | None = None
    usd: Decimal | None = None


class _Record(msgspec.Struct, frozen=True, kw_only=True):
    """What is laid over the facts of the row before."""

    usd: str
    cost_reason: str | None
    price_version: str | None
    resolved_by: str
    note: str | None
    evidence: str | None


class Resolving:
    """Corrects by hand."""

    def __init__(self, pool: asyncpg.Pool) -> None:
        self._pool = pool

    async def resolve(self, resolutions: Sequence[Resolution], *, by: uuid.UUID) -> list[Resolved]:
        """
        What became of each, in order. `by` is the key of whoever says so. One attempt is not to be named twice.

        The same again changes nothing. Raises asyncpg's errors; whether anything was written is then unknown, and the
        same call may be made again.
        """
        before = await self._find(resolutions)
        unknown: dict[uuid.UUID, Resolution] = {}
        for row, resolution in zip(before, resolutions, strict=True):
            if row["state"] == "unknown":
                # One that is named by its ticket and by its debit, too, is what it is called first.
                unknown.setdefault(row["ticket_id"], resolution)
        rows = await self._pool.fetch(
            _RESOLVE,
            list(unknown),
            [resolution.state for resolution in unknown.values()],
            [_record(resolution, by) for resolution in unknown.values()],
        )
        done = {row["ticket_id"]: unknown[row["ticket_id"]] for row in rows}
        after = await self._find(resolutions)
        return [_told(row, resolution, done) for row, resolution in zip(after, resolutions, strict=True)]

    async def _find(self, resolutions: Sequence[Resolution]) -> list[asyncpg.Record]:
        return await self._pool.fetch(
            _FIND,
            [one.ticket_id for one in resolutions],
            [one.key_id for one in resolutions],
            [one.debit_id for one in resolutions],
            [one.attempt for one in resolutions],
        )


def _record(resolution: Resolution, by: uuid.UUID) -> str:
    zero = not resolution.usd
    record = _Record(
        usd=decimal_string(resolution.usd),
        cost_reason=RESOLVED if zero else None,
        price_version=None if zero else RESOLVED,
        resolved_by=str(by),
        note=resolution.note,
        evidence=resolution.evidence,
    )
    return msgspec.json.encode(record).decode()


def _told(row: asyncpg.Record, resolution: Resolution, done: Mapping[uuid.UUID, Resolution]) -> Resolved:
    state = row["state"]
    usd = None if row["usd"] is None else Decimal(row["usd"])
    if state is None:
        result = Result.NOT_FOUND
    elif state == "open":
        result = Result.OPEN
    elif done.get(row["ticket_id"]) is resolution:
        result = Result.RESOLVED
    else:
        result = Result.UNCHANGED if (state, usd) == (resolution.state, resolution.usd) else Result.SETTLED
    return Resolved(result=result, ticket_id=row["ticket_id"], state=state, usd=usd)
