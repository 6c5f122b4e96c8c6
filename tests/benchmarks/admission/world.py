"""What the admission benchmark runs on: one PostgreSQL that waits for its disk, and the client processes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import asyncpg
import msgspec
import psutil

from admission.lease import Lease, Waiting
from admission.settings import AdmissionSettings, GroupSettings
from gateway import database, embedded
from tests.benchmarks import cpu
from tests.benchmarks.admission.worker import KEYS, Measured, Order, controller, demand, intent, settlement

HOT, LIMIT_8, QUEUED = "http://hot.test:80", "http://eight.test:80", "http://queued.test:80"
MANY = tuple(f"http://many-{n:02}.test:80" for n in range(64))
#: The upstream model whose tickets wait and are never granted.
STUCK = "stuck"

#: Beside what production sets. The statistics are off until `counting` or `--profile` turns them on.
SERVER = {"max_connections": "300", "shared_preload_libraries": "pg_stat_statements"}
#: What makes a commit wait for the disk.
DURABLE = ("fsync", "synchronous_commit", "full_page_writes")


class NotMeasurable(Exception):
    """This version of admission does not have what a case needs."""


def settings() -> AdmissionSettings:
    wide = GroupSettings(concurrency=1000, queue=1000)
    stuck: dict[str, Any] = {}
    # A version without limits per model is told by `hold_queue`, from what it does.
    if "models" in GroupSettings.__struct_fields__:
        stuck["models"] = {STUCK: {"concurrency": 0}}
    queued = msgspec.convert(
        {"concurrency": 1000, "queue": 1_000_000, **stuck},
        GroupSettings,
    )
    return AdmissionSettings(
        groups={
            HOT: wide,
            LIMIT_8: GroupSettings(concurrency=8, queue=1000),
            QUEUED: queued,
            **dict.fromkeys(MANY, wide),
        }
    )


class Round(msgspec.Struct, frozen=True, kw_only=True):
    """One order, done by some processes at once."""

    #: Pairs or updates: within the measured seconds, and in all.
    count: int
    done: int
    seconds: float
    admit_us: Sequence[int]
    settle_us: Sequence[int]
    pair_us: Sequence[int]
    #: CPU seconds of PostgreSQL, of the client processes, and of programs that are none of ours.
    postgres_s: float
    clients_s: float
    foreign_s: float
    wal_bytes: int
    #: Transactions that wrote.
    transactions: int

    @property
    def per_s(self) -> float:
        return self.count / self.seconds


class Counted(msgspec.Struct, frozen=True, kw_only=True):
    """Of one uncontended pair."""

    commits: float
    #: Statements that a client sent.
    round_trips: float
    #: Those, by their text.
    statements: Mapping[str, float]


class World:
    def __init__(
        self, url: str, observer: asyncpg.Connection, *, postmaster: int, fsync_us: float, filesystem: str
    ) -> None:
        self.url = url
        #: On another database, so that looking is not counted.
        self.observer = observer
        self.postmaster = postmaster
        #: The median of an 8 KiB write with fdatasync, beside the database.
        self.fsync_us = fsync_us
        #: The kind that the database is on.
        self.filesystem = filesystem
        self.settings = settings()
        self._workers: list[asyncio.subprocess.Process] = []
        #: Pairs so far, which the ledger must have too.
        self.pairs = 0

    async def start_workers(self, count: int) -> None:
        for number in range(len(self._workers), count):
            worker = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "tests.benchmarks.admission.worker",
                str(number), self.url, msgspec.json.encode(self.settings).decode(),
                stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, limit=1 << 26,
            )  # fmt: skip
            self._workers.append(worker)

    async def stop_workers(self) -> None:
        for worker in self._workers:
            if worker.returncode is None:
                worker.terminate()
        await asyncio.gather(*(worker.communicate() for worker in self._workers))
        self._workers.clear()

    async def run(self, order: Order, processes: int) -> Round:
        """Raises RuntimeError if a process ends; what it said is on its standard error."""
        await self.start_workers(processes)
        workers = self._workers[:processes]
        await asyncio.gather(*(self._tell(worker, msgspec.json.encode(order)) for worker in workers))
        start_at = time.monotonic() + 0.02
        answers = [asyncio.create_task(self._tell(worker, str(start_at).encode())) for worker in workers]
        try:
            await _sleep_until(start_at + order.warmup_s, answers)
            before = await self._look()
            await _sleep_until(before[0] + order.seconds, answers)
            after = await self._look()
            if order.count is None:
                for worker in workers:
                    self._write(worker, b"stop")
            measured = [msgspec.json.decode(answer, type=Measured) for answer in await asyncio.gather(*answers)]
        finally:
            for answer in answers:
                answer.cancel()
            await asyncio.gather(*answers, return_exceptions=True)
        done = sum(m.done for m in measured)
        if order.groups:
            self.pairs += done
        clients_s = sum(m.cpu_s for m in measured)
        took = order.seconds / max(after[0] - before[0], 1e-9)
        postgres_s = (after[1] - before[1]) * took
        return Round(
            count=sum(len(m.pair_us) for m in measured),
            done=done,
            seconds=order.seconds,
            admit_us=_together(m.admit_us for m in measured),
            settle_us=_together(m.settle_us for m in measured),
            pair_us=_together(m.pair_us for m in measured),
            postgres_s=postgres_s,
            clients_s=clients_s,
            foreign_s=max((after[2] - before[2]) * took - postgres_s - clients_s, 0.0),
            wal_bytes=round((after[3] - before[3]) * took),
            transactions=round((after[4] - before[4]) * took),
        )

    async def _look(self) -> tuple[float, float, float, int, int]:
        """When; CPU seconds of PostgreSQL and of the machine; WAL bytes and transaction ids so far."""
        row = await self.observer.fetchrow(
            "select (pg_current_wal_insert_lsn() - '0/0')::bigint,"
            " pg_snapshot_xmax(pg_current_snapshot())::text::bigint"
        )
        assert row is not None
        return time.monotonic(), cpu.spent([self.postmaster]), cpu.machine()[0], row[0], row[1]

    @staticmethod
    def _write(worker: asyncio.subprocess.Process, line: bytes) -> None:
        assert worker.stdin is not None
        worker.stdin.write(line + b"\n")

    async def _tell(self, worker: asyncio.subprocess.Process, line: bytes) -> bytes:
        assert worker.stdout is not None
        self._write(worker, line)
        answer = await worker.stdout.readline()
        if not answer:
            raise RuntimeError("a client process ended; what it said is above")
        return answer

    # ---------------------------------------------------------------- counting

    async def configure(self, **values: str) -> None:
        for name, value in values.items():
            await self.observer.execute(f"alter system set {name} = '{value}'")
        await self.observer.execute("select pg_reload_conf()")

    async def _quiet(self) -> None:
        """Until no session of the benchmark's database is left."""
        left = (
            "select exists (select from pg_stat_activity where datname = 'bench' and backend_type = 'client backend')"
        )
        async with asyncio.timeout(20):
            # The server has nothing to wait on.
            while await self.observer.fetchval(left):  # noqa: ASYNC110
                await asyncio.sleep(0.02)

    async def counted(self, pairs: int) -> Counted:
        """
        What one uncontended pair costs the server, by its own count.

        The same process does few pairs and then more; what both did beside the pairs (connecting, registering) falls
        out of the difference.
        """
        # A session adds its commits up when it ends, or much later.
        await self.stop_workers()
        await self.configure(**{"pg_stat_statements.track": "top", "autovacuum": "off"})
        try:
            few, more = [await self._counts(count) for count in (10, 10 + pairs)]
        finally:
            await self.configure(**{"pg_stat_statements.track": "none", "autovacuum": "on"})
        each = {query: (calls - few[1].get(query, 0)) / pairs for query, calls in more[1].items()}
        return Counted(
            commits=(more[0] - few[0]) / pairs,
            round_trips=sum(each.values()),
            statements={query: calls for query, calls in each.items() if calls},
        )

    async def _counts(self, pairs: int) -> tuple[int, dict[str, int]]:
        commits = "select xact_commit from pg_stat_database where datname = 'bench'"
        sent = (
            "select s.query, sum(s.calls)::bigint as calls from pg_stat_statements s"
            " join pg_database d on d.oid = s.dbid where d.datname = 'bench' and s.toplevel group by 1"
        )
        await self._quiet()
        await self.observer.fetch("select pg_stat_statements_reset()")
        before = await self.observer.fetchval(commits)
        await self.run(Order(groups=[HOT], clients=1, count=pairs), 1)
        await self._quiet()
        after = await self.observer.fetchval(commits)
        return after - before, {row["query"]: row["calls"] for row in await self.observer.fetch(sent)}

    @asynccontextmanager
    async def profiled(self) -> AsyncIterator[None]:
        """Statements inside functions are counted too. This slows what it counts."""
        await self.configure(**{"pg_stat_statements.track": "all"})
        await self.observer.fetch("select pg_stat_statements_reset()")
        try:
            yield
        finally:
            await self.configure(**{"pg_stat_statements.track": "none"})

    async def dearest(self, count: int) -> list[asyncpg.Record]:
        return await self.observer.fetch(
            "select calls, toplevel, total_exec_time + total_plan_time as total_ms, rows,"
            " shared_blks_hit + shared_blks_read as blocks, wal_bytes::bigint,"
            " left(regexp_replace(query, '\\s+', ' ', 'g'), 300) as query from pg_stat_statements s"
            " join pg_database d on d.oid = s.dbid where d.datname = 'bench' order by total_ms desc limit $1",
            count,
        )

    # ---------------------------------------------------------------- a long queue

    @asynccontextmanager
    async def hold_queue(self, length: int) -> AsyncIterator[None]:
        """
        `length` tickets wait in QUEUED for a model that is never granted; requests for other models go past them.

        One is asked for as any request is, and stays with a live controller; the others are copies of its row. Raises
        NotMeasurable where the model is granted.
        """
        async with controller(self.url, self.settings) as holder, self._connection() as connection:
            told: asyncio.Queue[Waiting] = asyncio.Queue()
            wanted = demand(QUEUED, intent("stuck"), KEYS[0], model=STUCK, patience_s=3600)
            asked = asyncio.create_task(holder.admit(wanted, told.put_nowait))
            waits = asyncio.create_task(told.get())
            try:
                async with asyncio.timeout(10):
                    await asyncio.wait((asked, waits), return_when=asyncio.FIRST_COMPLETED)
                if asked.done():
                    answer = asked.result()
                    if isinstance(answer, Lease):
                        self.pairs += 1
                        await holder.settle(settlement(answer))
                    raise NotMeasurable(
                        f"a group has no limit per model: a model limited to 0 was answered {type(answer).__name__}"
                    )
                await _copy(connection, wanted.ticket_id, length)
                yield
                waiting = await connection.fetchval(
                    "select count(*) from control.ticket where state = 'queued' and group_id = $1", QUEUED
                )
                if waiting != length:
                    raise RuntimeError(f"{waiting} tickets wait where {length} should")
            finally:
                for task in (asked, waits):
                    task.cancel()
                await asyncio.gather(asked, waits, return_exceptions=True)
                # What is left belongs to nobody.
                await connection.execute("delete from control.ticket where model = $1", STUCK)

    def _connection(self) -> contextlib.AbstractAsyncContextManager[asyncpg.Connection]:
        return database.open_connection(self.url, name="bench")

    async def audit(self) -> None:
        """What the clients counted is what the ledger has, and nothing occupies a slot. Raises RuntimeError."""
        async with self._connection() as connection:
            row = await connection.fetchrow(
                "select (select count(*) from control.attempt where state = 'charged') as attempts,"
                " (select count(*) from control.invocation) as lines,"
                " (select coalesce(sum(attempts), 0)::bigint from control.counter where kind = 'total') as counted,"
                " (select count(*) from control.ticket) as tickets"
            )
        assert row is not None
        if tuple(row) != (self.pairs, self.pairs, self.pairs, 0):
            raise RuntimeError(f"{self.pairs} pairs were made, and the database has {dict(row)}")


async def _copy(connection: asyncpg.Connection, ticket_id: object, length: int) -> None:
    """Whatever columns a ticket has, the copies have the original's, and an id, a debit and a number of their own."""
    async with connection.transaction():
        await connection.execute("create temp sequence place")
        await connection.execute("create temp table copy on commit drop as select * from control.ticket limit 0")
        await connection.execute(
            "insert into copy select t.* from control.ticket t, generate_series(2, $2::int) where t.ticket_id = $1",
            ticket_id,
            length,
        )
        await connection.execute(
            "update copy set ticket_id = gen_random_uuid(), debit_id = gen_random_uuid()::text,"
            " number = number + nextval('place')"
        )
        await connection.execute(
            "update control.capacity_group set next_number = next_number + $2 where group_id = $1", QUEUED, length
        )
        await connection.execute("insert into control.ticket select * from copy")
    await connection.execute("vacuum analyze control.ticket")


async def _sleep_until(moment: float, answers: Sequence[asyncio.Task[bytes]]) -> None:
    """Or until a process fails."""
    done, _ = await asyncio.wait(
        answers, timeout=max(moment - time.monotonic(), 0.0), return_when=asyncio.FIRST_EXCEPTION
    )
    for answer in done:
        answer.result()


def _together(parts: Any) -> list[int]:
    return [value for part in parts for value in part]


def _fsync_us(directory: Path) -> float:
    took = []
    with (directory / "fsync").open("wb", buffering=0) as file:
        for _ in range(100):
            began = time.perf_counter()
            file.seek(0)
            file.write(os.urandom(8192))
            os.fdatasync(file.fileno())
            took.append(time.perf_counter() - began)
    return statistics.median(took) * 1e6


@asynccontextmanager
async def opened(kept: Path | None = None, settings: Mapping[str, str] = SERVER) -> AsyncIterator[World]:
    """
    A server of its own, in the directory for temporary files, or in one that is kept: what it has is used again.
    `settings` are the server's. Raises RuntimeError if it would not be durable.
    """
    async with AsyncExitStack() as stack:
        if kept is None:
            directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tollbridge-bench-")))
        else:
            directory = kept
            directory.mkdir(parents=True, exist_ok=True)
        fsync_us = _fsync_us(directory)
        server = await stack.enter_async_context(embedded.running(directory, settings=settings))
        observer = await stack.enter_async_context(database.open_connection(server.url, name="observer", wait_s=20))
        await observer.execute("create extension if not exists pg_stat_statements")
        url = server.url.replace("/postgres?", "/bench?")
        await _database(observer, url, "bench")
        async with database.open_connection(url, name="bench") as connection:
            for name in DURABLE:
                if (value := await connection.fetchval("select current_setting($1)", name)) != "on":
                    raise RuntimeError(f"{name} is {value}: the figures would say nothing")
            await connection.execute("create schema if not exists bench")
            await connection.execute(
                "create table if not exists bench.bare (id int primary key, n bigint not null) with (fillfactor = 10)"
            )
            await connection.execute(
                "insert into bench.bare select n, 0 from generate_series(0, 63) n on conflict do nothing"
            )
        postmaster = int((directory / "postgres" / "postmaster.pid").read_text().split("\n", 1)[0])
        world = World(url, observer, postmaster=postmaster, fsync_us=fsync_us, filesystem=_filesystem(directory))
        await world.configure(**{"pg_stat_statements.track": "none"})
        stack.push_async_callback(world.stop_workers)
        yield world


async def second(world: World, name: str) -> World:
    """Another database of the same server. Its workers are its own: stop them."""
    url = world.url.replace("/bench?", f"/{name}?")
    await _database(world.observer, url, name)
    return World(url, world.observer, postmaster=world.postmaster, fsync_us=world.fsync_us, filesystem=world.filesystem)


async def beside(observer: asyncpg.Connection, server_url: str, name: str, *, postmaster: int) -> World:
    """A database of its own at a server that somebody else has started. Its workers are to be stopped."""
    url = server_url.replace("/postgres?", f"/{name}?")
    await _database(observer, url, name)
    return World(url, observer, postmaster=postmaster, fsync_us=0.0, filesystem="")


async def _database(observer: asyncpg.Connection, url: str, name: str) -> None:
    if not await observer.fetchval("select exists (select from pg_database where datname = $1)", name):
        await observer.execute(f"create database {name}")
    await database.migrate(url)


def _filesystem(directory: Path) -> str:
    path = directory.resolve()
    mounts = [part for part in psutil.disk_partitions(all=True) if path.is_relative_to(part.mountpoint)]
    return max(mounts, key=lambda part: len(part.mountpoint)).fstype if mounts else "unknown"
