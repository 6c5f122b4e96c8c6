"""
Admission's statements. The one file of this package with a socket.

asyncpg's pool costs more than the statement itself, so connections are dedicated and handed out here. A connection
that hangs or breaks is closed, and what was in flight on it is unknown: the same exception whether or not it committed.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import importlib.resources
import os
import socket
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from datetime import datetime
from decimal import Decimal
from typing import Any, Final, TypeVar

import asyncpg
import msgspec
import structlog
from typing_extensions import override

from admission.contract import BreakerEvent, Rejected, SettledRow, StoreUnavailable, TicketRow
from admission.lease import Demand, Ending, Fence, KeyLimit, Settlement, Verdict, Waiting
from admission.settings import AdmissionSettings

log: Final = structlog.get_logger("admission")

T = TypeVar("T")

CHANNEL: Final = "tollbridge_grants"

#: Failures of the element, not of the store: SQLSTATE classes 22 (data), 23 (constraint), 42 (statement), P0 (raised).
_DEFINITE: Final = ("22", "23", "42", "P0")


#: How asyncpg says that a connection is of no use any more. The last is its own state machine, surprised by a cut.
_LOST: Final = (OSError, TimeoutError, asyncpg.PostgresError, asyncpg.InterfaceError, asyncpg.InternalClientError)


@functools.cache
def _sql(name: str) -> str:
    return importlib.resources.files("admission").joinpath("sql", f"{name}.sql").read_text()


_NAME: Final = "tollbridge admission"
#: The functions' statements are small and many: planning them anew costs more than running them, and a table that was
#: just emptied looks cheap to scan until it is not. What their plans read must not depend on how full the tables were
#: when they were made: in the order of an index, and by an index alone.
_PLANS: Final = {
    "jit": "off",
    "plan_cache_mode": "force_generic_plan",
    "enable_seqscan": "off",
    "enable_sort": "off",
    "enable_incremental_sort": "off",
    "enable_bitmapscan": "off",
}

_KEY_LIMIT: Final = msgspec.json.Decoder(KeyLimit)


_JSON: Final = msgspec.json.Encoder()


class _Asked(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A demand as `control.acquire_v3` reads it: by the name of each field. What is not there is null."""

    ticket_id: uuid.UUID
    endpoint: str
    class_: int = msgspec.field(name="class")
    model: str
    credential: str
    key_id: uuid.UUID
    debit_id: str
    attempt: int
    tokens: int
    execution_ms: int
    isolation_ms: int
    queue_ms: int
    waits: bool
    #: Text, and JSON: it is kept as it is spelled.
    intent: msgspec.Raw
    place: int | None = None
    caller_ms: int | None = None
    scope: str | None = None
    run: str | None = None
    fence: int | None = None
    reserved: Decimal | None = None
    session: str | None = None
    bound: Decimal | None = None


class PooledConnection(asyncpg.Connection):
    """
    A connection to a pooler that hands out sessions by transaction, such as PgBouncer.

    What a session would have been told once is told with each statement, for its transaction alone. All of it is one
    statement, so it is no round trip more and still one commit.
    """

    #: Names and values of settings. Empty while it is being opened.
    local: dict[str, str]

    def _with_settings(self, query: str) -> str:
        told = " || ".join(f"set_config('{name}', '{value}', true)" for name, value in self.local.items())
        # The reference from the right to the left, and the two fences, are why the settings come first.
        return (
            f"select answer.* from (select {told} as done offset 0) as settings,"  # noqa: S608  nothing of a caller is in it
            f" lateral (select statement.* from ({query}) as statement where settings.done is not null offset 0) answer"
        )

    @override
    async def fetch(self, query: str, *args: Any, **named: Any) -> Any:
        return await super().fetch(self._with_settings(query), *args, **named)

    @override
    async def fetchrow(self, query: str, *args: Any, **named: Any) -> Any:
        return await super().fetchrow(self._with_settings(query), *args, **named)

    @override
    async def fetchval(self, query: str, *args: Any, **named: Any) -> Any:
        return await super().fetchval(self._with_settings(query), *args, **named)

    @override
    async def execute(self, query: str, *args: Any, **named: Any) -> str:
        return await super().execute(self._with_settings(query), *args, **named)


class Store:
    """PostgreSQL. Every method raises `StoreUnavailable`, or `Rejected` where the store refused definitely."""

    def __init__(self, url: str, settings: AdmissionSettings, *, listen_url: str | None = None) -> None:
        """`listen_url`: the server itself, where `url` is a pooler that hands out sessions by transaction."""
        self._url = url
        self._listen_url = listen_url
        self._settings = settings
        self._idle: asyncio.LifoQueue[asyncpg.Connection | None] = asyncio.LifoQueue()
        self._open: set[asyncpg.Connection] = set()
        for _ in range(settings.connections):
            self._idle.put_nowait(None)
        #: Its own, so that no burst of work delays it.
        self._heartbeat: asyncpg.Connection | None = None
        #: The store's time as it was told last, when that was here, and how many steps of its clock it had seen.
        self._told_time: datetime | None = None
        self._told_at = 0.0
        self._steps = 0

    async def configure(self) -> list[str]:
        """Makes the configured groups known. Answers those for which other settings than these are in force."""
        rows = await self._fetch(
            "configure",
            self._settings.revision,
            _groups_json(self._settings),
            _endpoints_json(self._settings),
        )
        return [row["name"] for row in rows]

    async def acquire(self, group: str, owner: uuid.UUID, demands: Sequence[tuple[Demand, float]]) -> list[TicketRow]:
        """Enqueues and grants, in one transaction. With each demand, the seconds it has waited here already."""
        settings = self._settings
        if any(b"\\u0000" in d.intent for d, _ in demands):
            raise Rejected("22P05")
        rows = await self._fetch(
            "acquire",
            group,
            owner,
            _ms(settings.unconfirmed_grant_s),
            _ms(settings.longest_hold_s),
            settings.zone,
            _JSON.encode([_asked(d, waited) for d, waited in demands]).decode(),
            timed=True,
        )
        answers: list[TicketRow] = []
        for row in map(_ticket_row, rows):
            if row.answer == "all":
                answers += _each(row, demands)
            elif row.answer != "time":
                answers.append(row)
            elif row.granted_at is not None and row.number is not None:
                self._tell_time(row.granted_at, row.number)
        return answers

    async def rescan(self, owner: uuid.UUID, demands: Sequence[Demand]) -> list[TicketRow]:
        """Confirms what other processes granted, reads the positions of the rest, and tells which were let go."""
        rows = await self._fetch(
            "rescan",
            owner,
            [demand.ticket_id for demand in demands],
            [demand.group for demand in demands],
            [demand.credential for demand in demands],
            [demand.model for demand in demands],
            [demand.key_id for demand in demands],
            *_fences([demand.fence for demand in demands]),
            timed=True,
        )
        return [TicketRow(*row) for row in rows]

    async def settle(self, shard: int, settlements: Sequence[Settlement], *, judged: bool) -> list[SettledRow]:
        """Ends attempts. Judged: under the locks of their groups, so that outcomes move breakers and allowances."""
        places: dict[uuid.UUID, int] = {}
        again = [p for p, s in enumerate(settlements) if places.setdefault(s.lease.ticket_id, p) != p]
        if again:
            # One statement sees each ticket once: what comes again, a correction perhaps, goes after it.
            first = list(places.values())
            order = [*first, *again]
            ended = [
                *await self.settle(shard, [settlements[p] for p in first], judged=judged),
                *await self.settle(shard, [settlements[p] for p in again], judged=judged),
            ]
            return [row for _, row in sorted(zip(order, ended, strict=True), key=lambda entry: entry[0])]
        if not judged and all(s.ending is not Ending.UNCERTAIN for s in settlements):
            rows = await self._fetch(
                "settle_clean",
                shard,
                [s.lease.ticket_id for s in settlements],
                [s.state for s in settlements],
                [s.record.decode() for s in settlements],
            )
        else:
            rows = await self._fetch(
                "settle",
                judged,
                shard,
                [s.lease.ticket_id for s in settlements],
                [s.ending.value for s in settlements],
                [self._verdict(s).value for s in settlements],
                [s.lease.generation for s in settlements],
                [self._floor_ms(s) for s in settlements],
                [s.account_wide for s in settlements],
                [s.used_tokens for s in settlements],
                *_told(settlements, judged=judged),
                _unless_none(
                    [None if s.cancel_confirms_after_s is None else _ms(s.cancel_confirms_after_s) for s in settlements]
                ),
                [s.state for s in settlements],
                [s.record.decode() for s in settlements],
                _ms(self._settings.unavailable_s),
                timed=True,
            )
        found = {row["ticket_id"]: SettledRow(*row) for row in rows}
        ended = [found[s.lease.ticket_id] for s in settlements]
        if None in found:
            ended[0] = msgspec.structs.replace(ended[0], untold=True)
        return ended

    async def decide(self, group: str, ticket: uuid.UUID, generation: int) -> None:
        """The probe of a half-open breaker has given valid content."""
        await self._fetch("decide", group, ticket, generation)

    async def abandon(self, shard: int, tickets: Sequence[uuid.UUID], *, tombstone: bool) -> list[str]:
        """Takes tickets back. Answers the groups in which a slot came free."""
        rows = await self._fetch("abandon", list(tickets), shard, tombstone, timed=True)
        return [row["group_id"] for row in rows]

    async def renew(self, owner: uuid.UUID, process: uuid.UUID, *, first: bool) -> float | None:
        """The heartbeat: the seconds the owner now lives, or None where it had lapsed."""
        try:
            async with asyncio.timeout(self._settings.statement_s):
                if self._heartbeat is None or self._heartbeat.is_closed():
                    self._heartbeat = await self._connect()
                [row] = await self._heartbeat.fetch(
                    _sql("renew"),
                    owner,
                    process,
                    _ms(self._settings.lease_s),
                    first,
                    socket.gethostname(),
                    os.getpid(),
                    _ms(self._settings.longest_hold_s),
                    *self._time_known(),
                )
        except _LOST as error:
            self._drop(self._heartbeat)
            self._heartbeat = None
            raise StoreUnavailable from error
        self._tell_time(row["clock"], row["steps"])
        return None if row["lives_ms"] is None else row["lives_ms"] / 1000

    async def bury(self, owners: Sequence[uuid.UUID]) -> list[str]:
        """Declares owners dead whose process is proven gone. Answers their groups."""
        rows = await self._fetch("bury", list(owners), timed=True)
        return [row["group_id"] for row in rows]

    async def dead(self, owners: Sequence[uuid.UUID]) -> set[uuid.UUID]:
        """Which of these owners have lapsed, or were buried, and are not merely unheard."""
        rows = await self._fetch("dead", list(owners), timed=True)
        return {row["owner_id"] for row in rows}

    async def overdue(self) -> list[str]:
        """The groups in which time alone has changed something."""
        rows = await self._fetch("overdue", timed=True)
        return [row["group_id"] for row in rows]

    async def breaker_events(self) -> list[BreakerEvent]:
        """Changes of breakers that nobody has taken note of yet, in their order, at most a hundred."""
        rows = await self._fetch("breaker_events")
        return [BreakerEvent(**dict(row)) for row in rows]

    async def oldest_snapshot(self) -> tuple[str, float] | None:
        """Who holds the oldest snapshot, and for how many seconds: while it is held, nothing that died is cleared."""
        rows = await self._fetch("oldest_snapshot")
        return (rows[0]["application_name"], rows[0]["age_s"]) if rows else None

    async def groups(self) -> list[dict[str, Any]]:
        """Who occupies and who waits, for operators."""
        rows = await self._fetch("groups")
        return [msgspec.json.decode(row["occupancy"]) for row in rows]

    async def waits(self, debits: Sequence[str]) -> dict[str, Waiting]:
        """Why these debits wait, where they do."""
        rows = await self._fetch("waits", list(debits))
        return {
            row["debit_id"]: Waiting(
                group=row["group_id"],
                reason=row["reason"],
                position=row["ahead"] + 1,
                expected_wait_s=_s(row["expected_ms"]),
                until_s=_s(row["until_ms"]),
            )
            for row in rows
        }

    async def fenced(self, key_id: uuid.UUID, fence: Fence) -> bool:
        """A newer executor of the run has been seen."""
        [(newer,)] = await self._fetch("fenced", key_id, fence.scope_id, fence.run_id, fence.number)
        return bool(newer)

    async def reset(self, group: str) -> bool:
        """Closes the group's breaker and takes its floors away. False: there is no such group."""
        [(found,)] = await self._fetch("reset", group)
        return bool(found)

    async def notify(self, owners: Sequence[uuid.UUID]) -> None:
        """A hint to other processes, after the commit it tells of. Losing it costs them a rescan's delay."""
        await self._fetch("notify", CHANNEL, list(owners))

    @asynccontextmanager
    async def listen(self, hear: Callable[[str], None]) -> AsyncIterator[asyncio.Event]:
        """Calls `hear` with every owner that is notified. The event is set when the connection is lost."""
        lost = asyncio.Event()
        try:
            async with asyncio.timeout(self._settings.statement_s):
                connection = await (self._connect() if self._listen_url is None else self._session(self._listen_url))
                connection.add_termination_listener(lambda _: lost.set())
                await connection.add_listener(CHANNEL, lambda *event: hear(str(event[3])))
        except _LOST as error:
            raise StoreUnavailable from error
        try:
            yield lost
        finally:
            self._drop(connection)

    async def close(self) -> None:
        for connection in list(self._open):
            try:
                await connection.close(timeout=self._settings.statement_s)
            except _LOST:
                self._drop(connection)
        # What was cut needs one turn of the loop to close its socket.
        await asyncio.sleep(0)

    def _time_known(self) -> tuple[datetime | None, int, int, int]:
        """The store's time as told last, by how many steps, the milliseconds since, and how many it may seem ahead."""
        return self._told_time, self._steps, _ms(_steady() - self._told_at), _ms(self._settings.statement_s + 1)

    def _tell_time(self, told: datetime, steps: int) -> None:
        if self._told_time is not None and steps != self._steps:
            # A message that was kept for longer than a statement may take looks the same from both ends.
            log.warning(
                "admission.time_made_up",
                steps=steps - self._steps,
                hint="the database's clock was set, or the database stood still",
            )
        self._told_time, self._told_at, self._steps = told, _steady(), steps

    def _verdict(self, settlement: Settlement) -> Verdict:
        """A rate limit for longer than anybody should wait leaves the route out instead."""
        longest = self._settings.longest_retry_after_s
        if settlement.verdict is Verdict.RATE_LIMITED and (settlement.retry_after_s or 0.0) > longest:
            return Verdict.LIMITED_FOR_LONG
        return settlement.verdict

    def _floor_ms(self, settlement: Settlement) -> int | None:
        if settlement.retry_after_s is None:
            return None
        since = 0.0 if settlement.received_at is None else asyncio.get_running_loop().time() - settlement.received_at
        return _ms(min(max(settlement.retry_after_s - since, 0.0), self._settings.longest_retry_after_s))

    async def _fetch(self, name: str, *arguments: Any, timed: bool = False) -> list[asyncpg.Record]:
        """
        The rows of one statement, a commit of its own. `timed`: what is known of the time are its last arguments, as it
        is when the statement is sent.
        """
        connection = await self._idle.get()
        try:
            async with asyncio.timeout(self._settings.statement_s):
                if connection is None or connection.is_closed():
                    connection = await self._connect()
                known = self._time_known() if timed else ()
                rows: list[asyncpg.Record] = await connection.fetch(_sql(name), *arguments, *known)
                return rows
        except asyncpg.LockNotAvailableError as error:
            self._drop(connection)
            await self._end_overdue()
            raise StoreUnavailable from error
        except asyncpg.PostgresError as error:
            if error.sqlstate.startswith(_DEFINITE):
                raise Rejected(error.sqlstate) from error
            self._drop(connection)
            raise StoreUnavailable from error
        except _LOST as error:
            self._drop(connection)
            raise StoreUnavailable from error
        except asyncio.CancelledError:
            self._drop(connection)
            raise
        finally:
            self._idle.put_nowait(connection)

    async def _end_overdue(self) -> None:
        """
        Somebody held a group's lock for longer than any statement may take: a process that was stopped between two
        messages, which no timeout of PostgreSQL before 17 ends.
        """
        try:
            async with asyncio.timeout(self._settings.statement_s):
                connection = await self._connect()
                try:
                    ended = await connection.fetchval(_sql("end_overdue"), self._settings.statement_s)
                finally:
                    self._drop(connection)
        except _LOST:
            return
        if ended:
            log.warning("admission.lock_holder_ended", backends=ended)

    async def _connect(self) -> asyncpg.Connection:
        return await (self._session(self._url) if self._listen_url is None else self._pooled(self._url))

    async def _session(self, url: str) -> asyncpg.Connection:
        """A session of the server, with settings of its own."""
        milliseconds = str(_ms(self._settings.statement_s))
        connection = await self._opened(
            asyncpg.connect(
                url,
                timeout=self._settings.statement_s,
                server_settings={
                    "application_name": _NAME,
                    # A holder of a group lock that stops must not stop the group.
                    "lock_timeout": milliseconds,
                    "idle_in_transaction_session_timeout": milliseconds,
                    **_PLANS,
                },
            )
        )
        if connection.get_server_version().major >= 17:
            await connection.execute(f"set transaction_timeout = {milliseconds}")
        return connection

    async def _pooled(self, url: str) -> asyncpg.Connection:
        """A pooler's: each statement may run in another session, which belongs to others before and after it."""
        connection = await self._opened(
            asyncpg.connect(
                url,
                timeout=self._settings.statement_s,
                connection_class=PooledConnection,
                # Without it, a statement is parsed in the transaction that runs it: the only one that will know it.
                statement_cache_size=0,
                server_settings={"application_name": _NAME},
            )
        )
        assert isinstance(connection, PooledConnection)
        milliseconds = str(_ms(self._settings.statement_s))
        connection.local = {**_PLANS, "lock_timeout": milliseconds}
        if connection.get_server_version().major >= 17:
            connection.local["transaction_timeout"] = milliseconds
        return connection

    async def _opened(self, connecting: Awaitable[asyncpg.Connection]) -> asyncpg.Connection:
        opening = asyncio.ensure_future(connecting)
        try:
            connection = await asyncio.shield(opening)
        except asyncio.CancelledError:
            # asyncpg leaves the socket open when it is cancelled half-way.
            with contextlib.suppress(*_LOST):
                (await opening).terminate()
            raise
        self._open.add(connection)
        return connection

    def _drop(self, connection: asyncpg.Connection | None) -> None:
        if connection is not None:
            self._open.discard(connection)
            connection.terminate()


def _asked(demand: Demand, waited: float) -> _Asked:
    fence = demand.fence
    return _Asked(
        ticket_id=demand.ticket_id,
        endpoint=demand.endpoint or demand.group,
        class_=demand.klass,
        model=demand.model,
        credential=demand.credential,
        key_id=demand.key_id,
        debit_id=demand.debit_id,
        attempt=demand.attempt,
        tokens=demand.tokens,
        execution_ms=_ms(demand.execution_limit_s),
        isolation_ms=_ms(demand.isolation_s),
        queue_ms=_ms(max(demand.queue_timeout_s - waited, 0)),
        waits=demand.waits_for_cooldown,
        intent=msgspec.Raw(demand.intent),
        place=demand.place,
        caller_ms=_caller_ms(demand, waited),
        scope=None if fence is None else fence.scope_id,
        run=None if fence is None else fence.run_id,
        fence=None if fence is None else fence.number,
        reserved=demand.reserved_usd,
        session=demand.session_id,
        bound=None if demand.session_id is None else demand.most_usd,
    )


def _caller_ms(demand: Demand, waited: float) -> int | None:
    return None if demand.caller_deadline_s is None else _ms(demand.caller_deadline_s - waited)


def _ticket_row(row: asyncpg.Record) -> TicketRow:
    if row["key_limit"] is None:
        return TicketRow(*row)
    return TicketRow(**{**row, "key_limit": _KEY_LIMIT.decode(row["key_limit"])})


def _each(row: TicketRow, demands: Sequence[tuple[Demand, float]]) -> list[TicketRow]:
    """The answer to each of these, all of which were granted as they came."""
    assert row.number is not None
    return [
        TicketRow(
            demand.ticket_id,
            "granted",
            row.owner_id,
            row.group_id,
            row.number if demand.place is None else min(demand.place, row.number),
            row.generation,
            row.probe,
            row.judged,
            row.granted_at,
            row.day,
            _ms(demand.execution_limit_s)
            if (caller_ms := _caller_ms(demand, waited)) is None
            else min(_ms(demand.execution_limit_s), caller_ms + _ms(demand.isolation_s)),
        )
        for demand, waited in demands
    ]


def _told(settlements: Sequence[Settlement], *, judged: bool) -> Iterator[list[int | None]]:
    """What providers said is left of requests and tokens, and how many ms ago. Empty where it changes nothing."""
    if not judged or all(s.requests_left is None and s.tokens_left is None for s in settlements):
        settlements = ()
    now = asyncio.get_running_loop().time()
    yield [s.requests_left for s in settlements]
    yield [s.tokens_left for s in settlements]
    yield [0 if s.told_at is None else _ms(max(now - s.told_at, 0.0)) for s in settlements]


def _unless_none(column: list[T | None]) -> list[T | None]:
    """Empty where it says nothing: what an array does not have is null."""
    return column if any(value is not None for value in column) else []


def _fences(fences: Sequence[Fence | None]) -> Iterator[list[Any]]:
    """Scopes, runs and numbers."""
    if not any(fences):
        fences = ()
    yield [None if fence is None else fence.scope_id for fence in fences]
    yield [None if fence is None else fence.run_id for fence in fences]
    yield [None if fence is None else fence.number for fence in fences]


def _steady() -> float:
    """Seconds of a clock that nobody sets and that goes on while the host sleeps, where there is one."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()


def _ms(seconds: float) -> int:
    return round(seconds * 1000)


def _s(milliseconds: int | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1000


def _groups_json(settings: AdmissionSettings) -> str:
    return msgspec.json.encode(
        [
            {
                "group": name,
                "concurrency": group.concurrency,
                "quarantine_headroom": group.quarantine_headroom,
                "queue": group.queue,
                "failure_threshold": group.failure_threshold,
                "failure_window_ms": _ms(group.failure_window_s),
                "first_cooldown_ms": _ms(group.first_cooldown_s),
                "longest_cooldown_ms": _ms(group.longest_cooldown_s),
                "models": [
                    {
                        "model": model,
                        "concurrency": limits.concurrency,
                        "requests_per_minute": limits.requests_per_minute,
                        "tokens_per_minute": limits.tokens_per_minute,
                    }
                    for model, limits in sorted(group.allowances.items())
                ],
            }
            for name, group in settings.groups.items()
        ]
    ).decode()


def _endpoints_json(settings: AdmissionSettings) -> str:
    return msgspec.json.encode(
        {endpoint: name for name, group in settings.groups.items() for endpoint in group.endpoints or (name,)}
    ).decode()
