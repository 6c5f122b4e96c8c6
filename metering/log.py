"""
The invocation log: what was written of each attempt, by page and in sums.

The log grows for ever, and a filter may let nothing through. So a page is read in pieces, each of which reads so many
rows and no more, and a page whose time is over is answered as far as it came. Readings have connections of their own:
were they those of admission, a report would keep requests from being sent.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
import importlib.resources
import struct
import time
import uuid
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import AsyncIterator, Mapping, Sequence
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from typing import Any, Final, Literal, TypeAlias

import asyncpg
import msgspec

from metering.cost import decimal_string

#: The range of a sum where nothing is said.
USUAL_RANGE: Final = timedelta(hours=24)
#: Words that a sum can be grouped by at once.
MAX_GROUPS: Final = 3

State: TypeAlias = Literal["charged", "zero", "unknown"]
Status: TypeAlias = Literal["success", "error", "timeout", "cancelled", "not_dispatched", "unknown"]
Order: TypeAlias = Literal["cost", "count"]
#: A moment; or a day of the declared zone, all of it.
When: TypeAlias = datetime | date

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND: Final = timedelta(microseconds=1)
_FIRST: Final = datetime(1, 1, 1, tzinfo=UTC)
_LAST: Final = datetime(9999, 12, 31, 23, 59, 59, 999999, tzinfo=UTC)
_PLACE: Final = struct.Struct(">q16sH")
_DIGEST: Final = 10
#: Text in the database, and a list or an object here.
_DOCUMENTS: Final = ("tags", "left_out", "flags")
_AMOUNTS: Final = ("usd", "upper_bound_usd", "list_usd")


class Bounds(msgspec.Struct, frozen=True, kw_only=True):
    """How much a reading may take. Seconds."""

    #: After this a page is answered as far as it was read.
    page_s: float = 2.0
    #: Of one piece of a page, and of a sum over a range.
    piece_s: float = 6.0
    stats_s: float = 20.0
    #: For a connection while others read.
    wait_s: float = 5.0
    #: Rows of a piece; the next is larger where this one took no longer than `quick_s`.
    sizes: tuple[int, ...] = (128, 1024, 8192)
    quick_s: float = 0.05


USUAL: Final = Bounds()


class LogError(Exception):
    """
    What goes wrong with a reading of the log, beside asyncpg's errors.

    LogError
    |- WrongCursor      it is not one of this reading's
    |- RangeTooWide    the database did not get through the range in time
    `- TooManyReaders   all connections for reading are in use
    """


class WrongCursor(LogError):
    """The cursor is broken, or is one of another reading: of other filters, or another key's."""


class RangeTooWide(LogError):
    """There is too much in the range to be read in time."""


class TooManyReaders(LogError):
    """Others are reading; come back later."""


class Search(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Which rows. What is None asks for nothing."""

    key_id: uuid.UUID | None = None
    session_id: str | None = None
    run_id: str | None = None
    step_id: str | None = None
    scope_id: str | None = None
    debit_id: str | None = None
    request_id: str | None = None
    provider: str | None = None
    requested_model: str | None = None
    upstream_model: str | None = None
    statuses: tuple[Status, ...] | None = None
    state: State | None = None
    ended: str | None = None
    error_code: str | None = None
    error_class: str | None = None
    skill: str | None = None
    tool: str | None = None
    role: str | None = None
    transport: str | None = None
    tags: dict[str, str] | None = None
    is_fallback: bool | None = None
    #: USD that were charged at least. What is unknown has no such amount.
    min_usd: Decimal | None = None
    min_total_ms: int | None = None
    #: By the time of the grant: from this moment or day, up to this moment, which is not in it, or this day, which is.
    since: When | None = None
    until: When | None = None


class Place(msgspec.Struct, frozen=True):
    """Where a reading stands: the row it has told last."""

    granted_at: datetime
    ticket_id: uuid.UUID
    correction: int


class Page(msgspec.Struct, frozen=True, kw_only=True):
    """Rows, the newest grant first."""

    rows: Sequence[dict[str, Any]]
    #: Where to go on; None where there is nothing more.
    next: Place | None
    #: Where the time was over: everything after this moment has been read.
    scanned_to: datetime | None = None


class Stats(msgspec.Struct, frozen=True, kw_only=True):
    """Sums of a range."""

    since: datetime | None
    until: datetime | None
    #: In all; and by group, the first in order.
    total: dict[str, Any]
    groups: Sequence[dict[str, Any]]
    groups_in_all: int


class _Driver(msgspec.Struct, frozen=True):
    """How an index leads to the rows of a search."""

    condition: str
    source: str = "control.invocation i"
    #: What is before the time of the grant in the order of the index.
    first: str = ""
    #: What a ticket is compared as. The order stays the same.
    as_: str = ""


def _led_by(column: str, parameter: str) -> _Driver:
    # The planner may know a word that is in nearly every row, and take the order of all rows for it. To one that takes
    # "any of these" for several, only the index of the column has the order.
    return _Driver(f"i.{column} = any (array[{parameter}])", first=f"i.{column} desc, ")


_OF_DEBIT: Final = (
    "({keys}(select * from control.attempt a where {key} and a.debit_id = $8 offset 0) a"
    " cross join lateral (select * from control.invocation r"
    " where r.granted_at = a.granted_at and r.ticket_id = a.ticket_id offset 0) i)"
)

#: The first that a search has a word for is used.
_DRIVERS: Final[Mapping[str, _Driver]] = {
    "request_id": _led_by("request_id", "$9::text"),
    # A debit has few attempts, which are found first. It is one key's, and so is their index.
    "debit_id": _Driver("true", source=_OF_DEBIT.format(keys="", key="a.key_id = $3")),
    "debit_id of any key": _Driver(
        "true", source=_OF_DEBIT.format(keys="control.api_key k cross join lateral ", key="a.key_id = k.key_id")
    ),
    "session_id": _led_by("session_id", "$4::text"),
    "run_id": _led_by("run_id", "$5::text"),
    "key_id": _led_by("key_id", "$3::uuid"),
    # As text, so that the primary key, which has the successes, too, cannot look the better index.
    "failed": _Driver("i.status <> 'success'", as_='::text collate "C"'),
    "all": _Driver("true"),
}

#: By the word for it, what a sum is grouped by.
GROUPS: Final[Mapping[str, str]] = {
    "key": "i.key_id",
    "provider": "i.provider",
    "model": "i.requested_model",
    "upstream_model": "i.upstream_model",
    "run": "i.run_id",
    "step": "i.step_id",
    "session": "i.session_id",
    "skill": "i.skill",
    "tool": "i.tool",
    "role": "i.role",
    "transport": "i.transport",
    "status": "i.status",
    "error_code": "i.error_code",
    "hour": "date_trunc('hour', i.granted_at, 'UTC')",
    "day": "i.day",
}
#: Before the name of a tag.
TAG: Final = "tag:"
_ORDERS: Final[Mapping[Order, str]] = {
    "cost": "charged_usd desc, attempts desc",
    "count": "attempts desc, charged_usd desc",
}
_METRICS: Final = ("first_byte_ms", "total_ms", "queued_ms")

#: For a page, whose plan must be led by an index whatever the statistics say. Other connections keep their settings.
_PAGE_SETTINGS: Final = {
    "enable_seqscan": "off",
    # Of all that there is, to have the first of it. An incremental sort, of what an index has in order, is none.
    "enable_sort": "off",
    "enable_bitmapscan": "off",
    "enable_hashjoin": "off",
    "enable_mergejoin": "off",
    "jit": "off",
    "work_mem": "32MB",
}
#: For a sum. Plans are made for what is asked; one core is enough for a report.
_STATS_SETTINGS: Final = {
    "plan_cache_mode": "force_custom_plan",
    "max_parallel_workers_per_gather": "0",
    "jit": "off",
    "work_mem": "32MB",
}


@functools.cache
def _sql(name: str) -> str:
    text = importlib.resources.files("metering").joinpath("sql", f"{name}.sql").read_text()
    return "\n".join(line for line in text.splitlines() if not line.startswith("--"))


def driver_of(search: Search) -> str:
    """The index that leads to the rows of a search."""
    if search.request_id is None and search.debit_id is not None:
        return "debit_id of any key" if search.key_id is None else "debit_id"
    for name in ("request_id", "session_id", "run_id", "key_id"):
        if getattr(search, name) is not None:
            return name
    return "failed" if search.statuses and "success" not in search.statuses else "all"


@functools.cache
def page_sql(driver: str, size: int) -> str:
    """The statement of one piece."""
    found = _DRIVERS[driver]
    return (
        _sql("log_page")
        .replace("{source}", found.source)
        .replace("{driver}", found.condition)
        .replace("{first}", found.first)
        .replace("{as}", found.as_)
        .replace("{size}", str(size))
        .replace("{filters}", _sql("log_filters"))
    )


def stats_sql(group_by: Sequence[str], order: Order) -> str:
    """The statement of a sum by these words."""
    tags = [word for word in group_by if word.startswith(TAG)]
    groups = [
        f"i.tags ->> ($27::text[])[{tags.index(word) + 1}]" if word in tags else GROUPS[word] for word in group_by
    ]
    names = [f"g{at}" for at in range(len(groups))]
    return (
        _sql("log_stats")
        .replace("{groups}", "".join(f"{group} as {name}, " for group, name in zip(groups, names, strict=True)))
        .replace("{names}", "".join(f"{name}, " for name in names))
        .replace("{all}", f"grouping({names[0]}) = 1" if names else "true")
        .replace("{sets}", f"grouping sets (({', '.join(names)}), ())" if names else "()")
        .replace("{order}", ", ".join([_ORDERS[order], *names]))
        .replace("{filters}", _sql("log_filters"))
    )


def cursor(place: Place, search: Search, *, corrections: bool) -> str:
    """The place as a caller keeps it."""
    packed = _PLACE.pack((place.granted_at - _EPOCH) // _MICROSECOND, place.ticket_id.bytes, place.correction)
    return urlsafe_b64encode(_digest(packed, search, corrections=corrections) + packed).rstrip(b"=").decode()


def place_of(text: str, search: Search, *, corrections: bool) -> Place:
    """What `cursor` made of it. Raises WrongCursor; also where anything else is asked for now."""
    try:
        raw = urlsafe_b64decode(text.encode("ascii") + b"=" * (-len(text) % 4))
    except ValueError:
        raise WrongCursor from None
    digest, packed = raw[:_DIGEST], raw[_DIGEST:]
    if len(packed) != _PLACE.size or digest != _digest(packed, search, corrections=corrections):
        raise WrongCursor
    microseconds, ticket, correction = _PLACE.unpack(packed)
    return Place(_EPOCH + microseconds * _MICROSECOND, uuid.UUID(bytes=ticket), correction)


def _digest(packed: bytes, search: Search, *, corrections: bool) -> bytes:
    asked = msgspec.json.encode((search, corrections), order="deterministic")
    return hashlib.blake2b(asked + packed, digest_size=_DIGEST).digest()


class InvocationLog:
    """Reads the log. Raises LogError and asyncpg's errors."""

    def __init__(self, pool: asyncpg.Pool, *, zone: str, readers: int, bounds: Bounds = USUAL) -> None:
        """`readers`: connections of the pool, which is for this alone. Half of them may make sums at a time."""
        self._pool = pool
        self._zone = zone
        self._bounds = bounds
        self._readers = asyncio.Semaphore(readers)
        self._summing = asyncio.Semaphore(max(1, readers // 2))

    async def page(
        self, search: Search, *, after: Place | None, limit: int, corrections: bool, wait_s: float | None = None
    ) -> Page:
        """
        At most `limit` rows before `after`, the newest grant first: of each attempt the row that holds, or, with
        `corrections`, all that were written. Waits `wait_s` for a connection, or as
        long as is usual.

        What is settled while pages are read stands where its grant puts it, and moves nothing else.
        """
        driver = driver_of(search)
        rows: list[dict[str, Any]] = []
        began = time.monotonic()
        async with self._reading(_PAGE_SETTINGS, self._bounds.piece_s, wait_s) as connection:
            since, until = await self._range(connection, search, None)
            at = start = after or Place(until or _LAST, uuid.UUID(int=0), 0)
            given = [since or _FIRST, until or _LAST, *_given(search), corrections]
            bounds, sizes = self._bounds, self._bounds.sizes
            size = next((each for each in sizes if each > limit), sizes[-1])
            while True:
                piece_began = time.monotonic()
                place = [at.granted_at, at.ticket_id, at.correction]
                try:
                    found = await connection.fetch(page_sql(driver, size), *given, *place, limit + 1 - len(rows))
                except asyncpg.QueryCanceledError:
                    if at == start:
                        raise
                    return Page(rows=rows, next=at, scanned_to=at.granted_at)
                rows += [_row(each) for each in found if each["ticket_id"] is not None]
                if len(rows) > limit:
                    last = rows[limit - 1]
                    told = Place(last["granted_at"], last["ticket_id"], last["correction"])
                    return Page(rows=rows[:limit], next=told)
                if not found or found[0]["piece_rows"] < size:
                    return Page(rows=rows, next=None)
                first = found[0]
                at = Place(first["piece_granted_at"], first["piece_ticket_id"], first["piece_correction"])
                now = time.monotonic()
                if now - began > bounds.page_s:
                    return Page(rows=rows, next=at, scanned_to=at.granted_at)
                if now - piece_began < bounds.quick_s:
                    size = next((each for each in sizes if each > size), size)

    async def attempt(self, ticket_id: uuid.UUID, *, key_id: uuid.UUID | None) -> list[dict[str, Any]]:
        """All rows of an attempt, the settlement first. No row: there is no such attempt, or it is another key's."""
        async with self._reading(_PAGE_SETTINGS, self._bounds.piece_s) as connection:
            return [_row(each) for each in await connection.fetch(_sql("log_attempt"), ticket_id, key_id)]

    async def stats(self, search: Search, *, group_by: Sequence[str], order: Order, limit: int) -> Stats:
        """
        Sums of a range, which is the last 24 hours where the search has no beginning: by these words, at most `limit`
        groups, and in all.
        """
        tags = [word.removeprefix(TAG) for word in group_by if word.startswith(TAG)]
        async with (
            _taken(self._summing, self._bounds.wait_s),
            self._reading(_STATS_SETTINGS, self._bounds.stats_s) as connection,
        ):
            since, until = await self._range(connection, search, USUAL_RANGE)
            given = [since or _FIRST, until or _LAST, *_given(search), False]
            found = await connection.fetch(
                stats_sql(group_by, order), *given, tags, limit, timeout=self._bounds.stats_s + 5.0
            )
        told = [_sums(row) for row in found]
        groups = [
            {**{word: row[f"g{at}"] for at, word in enumerate(group_by)}, **sums}
            for row, sums in zip(found, told, strict=True)
            if not row["is_all"]
        ]
        return Stats(
            since=since,
            until=until,
            total=told[0] if told else {},
            groups=groups,
            groups_in_all=found[0]["groups_in_all"] if group_by and found else 0,
        )

    async def _range(
        self, connection: Any, search: Search, usual: timedelta | None
    ) -> tuple[datetime | None, datetime | None]:
        """From and to; None: without an end. Days and the present are the database's."""
        since, until = (_split(when) for when in (search.since, search.until))
        row = await connection.fetchrow(_sql("log_range"), since[0], until[0], since[1], until[1], self._zone, usual)
        return row["from_at"], row["to_at"]

    @contextlib.asynccontextmanager
    async def _reading(
        self, settings: Mapping[str, str], seconds: float, wait_s: float | None = None
    ) -> AsyncIterator[Any]:
        """A connection with these settings, which reads one state of the database."""
        told = {**settings, "statement_timeout": str(round(seconds * 1000))}
        try:
            async with (
                _taken(self._readers, self._bounds.wait_s if wait_s is None else wait_s),
                self._pool.acquire() as connection,
                connection.transaction(isolation="repeatable_read", readonly=True),
            ):
                await connection.execute("; ".join(f"set local {name} = '{value}'" for name, value in told.items()))
                yield connection
        except asyncpg.QueryCanceledError as error:
            raise RangeTooWide from error


@contextlib.asynccontextmanager
async def _taken(semaphore: asyncio.Semaphore, wait_s: float) -> AsyncIterator[None]:
    try:
        await asyncio.wait_for(semaphore.acquire(), wait_s)
    except TimeoutError:
        raise TooManyReaders from None
    try:
        yield
    finally:
        semaphore.release()


def _split(when: When | None) -> tuple[datetime | None, date | None]:
    return (when, None) if isinstance(when, datetime) else (None, when)


def _given(search: Search) -> list[Any]:
    """$3 to $25."""
    return [
        search.key_id,
        search.session_id,
        search.run_id,
        search.step_id,
        search.scope_id,
        search.debit_id,
        search.request_id,
        search.provider,
        search.requested_model,
        search.upstream_model,
        search.statuses,
        search.state,
        search.ended,
        search.error_code,
        search.error_class,
        search.skill,
        search.tool,
        search.role,
        search.transport,
        None if search.tags is None else msgspec.json.encode(search.tags).decode(),
        search.is_fallback,
        search.min_usd,
        search.min_total_ms,
    ]


def _row(record: asyncpg.Record) -> dict[str, Any]:
    """A row of `control.invocation`: documents as such, amounts as decimal text."""
    row = {name: value for name, value in record.items() if not name.startswith("piece_")}
    for name in _DOCUMENTS:
        row[name] = None if row[name] is None else msgspec.json.decode(row[name])
    for name in _AMOUNTS:
        row[name] = None if row[name] is None else decimal_string(row[name])
    return row


def _sums(record: asyncpg.Record) -> dict[str, Any]:
    attempts = record["attempts"]

    def share(count: int) -> float | None:
        return round(count / attempts, 6) if attempts else None

    statuses = {
        status: record[status] for status in ("success", "error", "timeout", "cancelled", "not_dispatched", "unknown")
    }
    return {
        "attempts": attempts,
        "requests": record["requests"],
        "charged_usd": decimal_string(record["charged_usd"]),
        "unknown_attempts": record["unknown_attempts"],
        "unknown_upper_bound_usd": decimal_string(record["unknown_upper_bound_usd"]),
        "unbounded_attempts": record["unbounded_attempts"],
        **{
            f"{name}_tokens": record[f"{name}_tokens"]
            for name in ("input", "output", "cache_read", "cache_write", "reasoning")
        },
        "by_status": statuses,
        "error_rate": share(statuses["error"] + statuses["timeout"]),
        "cancel_rate": share(statuses["cancelled"]),
        "fallback_rate": share(record["fallbacks"]),
        "retry_rate": share(record["retried"]),
        "unknown_rate": share(record["unknown_attempts"]),
        **{name: dict(zip(("p50", "p90", "p99"), record[name] or (None,) * 3, strict=True)) for name in _METRICS},
    }
