"""
What the ledger is told of an attempt, and what it answers.

The writing is `sql/functions/10_record.sql`, inside the settlement's transaction: admission runs it and carries these
records without looking inside. Reading the counters adds their shards, in one snapshot, and is exact.
"""

from __future__ import annotations

import asyncio
import importlib.resources
import uuid
from collections.abc import Mapping, Sequence
from datetime import date, datetime
from typing import Any, Final

import asyncpg
import msgspec

from metering.cost import decimal_string
from metering.grouping import Grouped, Question, TooWide, statement


class Intent(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What is known of an attempt before it is dispatched; written with its grant, so that it outlives its process."""

    request_id: str
    transport: str
    created_at: str
    requested_model: str
    route_id: str
    provider: str
    upstream_model: str
    protocol: str
    fallback_index: int
    is_fallback: bool
    class_: str = msgspec.field(name="class")
    #: Attempts of its request that came before it at the same route.
    retries: int = 0
    failed_provider: str | None = None
    failure_reason: str | None = None
    left_out: list[dict[str, str]] | None = None
    session_id: str | None = None
    scope_id: str | None = None
    run_id: str | None = None
    step_id: str | None = None
    skill: str | None = None
    skill_version: str | None = None
    tool: str | None = None
    role: str | None = None
    tags: dict[str, str] | None = None
    #: USD as a decimal number: the most it can cost.
    upper_bound_usd: str | None = None
    price_version: str | None = None
    #: The tier of the provider's service that was asked for.
    asked_tier: str | None = None


class Record(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How an attempt ended; laid over its intent."""

    #: "success", "error", "timeout", "cancelled", "not_dispatched" or "unknown".
    status: str
    #: "complete", "error", "error_in_stream", "broken", "cancelled", "stopped", "not_dispatched", "lost".
    ended: str
    usd: str | None = None
    #: None: what is known now passes the bound of the intent, and there is no other. Unset: that of the intent.
    upper_bound_usd: str | msgspec.UnsetType | None = msgspec.UNSET
    cost_reason: str | None = None
    price_version: str | None = None
    input_total: int | None = None
    cache_read: int | None = None
    cache_write_5m: int | None = None
    cache_write_1h: int | None = None
    output_total: int | None = None
    reasoning: int | None = None
    served_model: str | None = None
    #: The tier of its service that the provider says served it.
    service_tier: str | None = None
    provider_request_id: str | None = None
    error_class: str | None = None
    error_code: str | None = None
    http_status: int | None = None
    #: Our own figure, where the provider's won.
    list_usd: str | None = None
    #: What was odd in what the provider reported: `metering.cost.Flag`.
    flags: tuple[str, ...] = ()
    queued_ms: int | None = None
    #: The part of it in which nobody was let through.
    cooldown_ms: int | None = None
    first_byte_ms: int | None = None
    total_ms: int | None = None


class CountersAfter(msgspec.Struct, frozen=True, kw_only=True):
    """The ledger's answer to a record: USD charged so far, as decimal numbers."""

    day: date
    day_usd: str
    total_usd: str
    session_usd: str | None = None


class LedgerAttempt(msgspec.Struct, frozen=True, kw_only=True):
    """What the store knows of an attempt."""

    debit_id: str
    ticket_id: uuid.UUID
    attempt: int
    #: "open" while it is not settled.
    state: str
    group_id: str
    granted_at: datetime
    day: date
    #: Its intent, and over it what the ledger last wrote.
    facts: dict[str, Any]


#: Milliseconds that adding up what is asked for may take. The log may be long, and others wait for the connection.
GROUPS_TIMEOUT_MS: Final = 5000
#: Questions of groups at once. The pool is for the other readers, too.
_QUESTIONS: Final = 2

_SUMS = importlib.resources.files("metering").joinpath("sql", "usage.sql").read_text()

_COUNTED_FROM = importlib.resources.files("metering").joinpath("sql", "usage_counted_from.sql").read_text()

_LOG_KEPT = importlib.resources.files("metering").joinpath("sql", "usage_log_kept.sql").read_text()

_ATTEMPTS = importlib.resources.files("metering").joinpath("sql", "attempts_of.sql").read_text()

_STATES = importlib.resources.files("metering").joinpath("sql", "states.sql").read_text()


class Ledger:
    """Reads what was written. Raises asyncpg's errors."""

    def __init__(self, pool: asyncpg.Pool, *, zone: str) -> None:
        self._pool = pool
        self.zone: Final = zone
        self._questions = asyncio.Semaphore(_QUESTIONS)

    async def usage(
        self, *, session_id: str | None, day: date | None, key_id: uuid.UUID | None, session_key: uuid.UUID
    ) -> dict[str, Any]:
        """
        The sums of a session of `session_key`, a day (None: today) and in total; of one key, or of all.

        Raises asyncpg's errors.
        """
        rows = await self._pool.fetch(_SUMS, session_id, day, key_id, self.zone, session_key)
        sums: dict[str, Any] = {"session": None}
        for row in rows:
            entry = dict(row)
            kind = entry.pop("kind")
            if kind != "day":
                entry.pop("day")
            sums[kind] = _spelled(entry)
        return sums

    async def grouped(self, question: Question, *, timeout_ms: int = GROUPS_TIMEOUT_MS) -> Grouped:
        """
        A page of the groups that are asked for, in order, and the sum of all of them: one statement, one snapshot.

        Without days: of this month, by the database's clock, up to today. Raises ValueError where the last day comes
        before the first; TooWide where adding up takes longer than `timeout_ms`; asyncpg's errors.
        """
        async with (
            self._questions,
            self._pool.acquire() as connection,
            connection.transaction(isolation="repeatable_read", readonly=True),
        ):
            # Which filters there are decides how it is best read; compiling takes longer than most answers.
            await connection.execute(
                f"set local plan_cache_mode = force_custom_plan; set local jit = off;"
                f" set local statement_timeout = {int(timeout_ms)}"
            )
            # Before the snapshot: a month that is dropped after it would be neither there nor known to be gone.
            try:
                await connection.execute("lock table only control.invocation in access share mode")
            except asyncpg.QueryCanceledError as error:
                raise TooWide from error
            today = await connection.fetchval("select (clock_timestamp() at time zone $1)::date", self.zone)
            last = question.last or today
            first = question.first or last.replace(day=1)
            if first > last:
                raise ValueError(f"{first} comes after {last}")
            asked = statement(question, first=first, last=last)
            try:
                rows = await connection.fetch(asked.sql, *asked.arguments)
                kept_from = None
                if asked.source == "log":
                    kept_from = await connection.fetchval(_LOG_KEPT, first)
                elif asked.of_late:
                    kept_from = await connection.fetchval(_COUNTED_FROM)
            except asyncpg.QueryCanceledError as error:
                raise TooWide from error
        *groups, whole = ({**row} for row in rows)
        told = [(tuple(group.pop("dimensions")), _spelled(group)) for group in groups]
        del whole["dimensions"]
        return Grouped(
            first=first,
            last=last,
            source=asked.source,
            kept_from=kept_from if kept_from is not None and kept_from > first else None,
            groups=tuple(told[: question.limit]),
            sum=_spelled(whole),
            more=len(told) > question.limit,
        )

    async def attempts_of(self, key_id: uuid.UUID, debit_ids: Sequence[str]) -> list[LedgerAttempt]:
        """The attempts of these debits that were granted, each debit's in order."""
        rows = await self._pool.fetch(_ATTEMPTS, key_id, debit_ids)
        return [LedgerAttempt(**{**row, "facts": msgspec.json.decode(row["facts"])}) for row in map(dict, rows)]

    async def states(self, tickets: Sequence[uuid.UUID]) -> dict[uuid.UUID, str]:
        """How these attempts stand: "open", "charged", "zero" or "unknown". One that is not known is left out."""
        return {row["ticket_id"]: row["state"] for row in await self._pool.fetch(_STATES, list(tickets))}


def _spelled(sums: dict[str, Any]) -> Mapping[str, Any]:
    """Sums as they are told: money as decimal numbers."""
    sums.pop("whole", None)
    return {name: decimal_string(value) if name.endswith("_usd") else value for name, value in sums.items()}
