"""Months of the ledger come and go, over a real database: sums stay, and so does what may still be corrected."""

from __future__ import annotations

import asyncio
import random
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from typing import Any, Final

import asyncpg
import msgspec
import pytest
import structlog

from admission.ids import new_id
from admission.lease import Class, Demand, Ending, Lease, Settlement, Verdict
from admission.settings import AdmissionSettings, GroupSettings
from admission.store import Store
from gateway.upkeep import Upkeep
from metering.grouping import Question
from metering.ledger import Ledger
from metering.retention import Locked, NotAllowed, Retention

GROUP: Final = "http://provider.test:80"
KEY: Final = uuid.UUID(int=7)
OWNER: Final = uuid.UUID(int=1)
KEEP_DAYS: Final = 60
GIVEN: Final = AdmissionSettings(groups={GROUP: GroupSettings(concurrency=100)}, lease_s=3600, statement_s=60)
INTENT: Final = (
    b'{"session_id":"s","run_id":"r","step_id":"t","tags":{"team":"x"},"provider":"p","requested_model":"m",'
    b'"upstream_model":"u","request_id":"q"}'
)
CHARGED: Final = b'{"usd":"0.25","status":"success","input_total":3,"output_total":4}'
UNKNOWN: Final = b'{"upper_bound_usd":"2","status":"unknown","input_total":3}'

SUMS: Final = """
select kind, name, sum(charged_usd)::text as usd, sum(attempts)::int as attempts, sum(unknown_attempts)::int as unknown,
       sum(unknown_upper_bound_usd)::text as bound, sum(unbounded_attempts)::int as unbounded,
       sum(input_tokens)::int as input, sum(output_tokens)::int as output
  from control.counter group by kind, name order by kind, name
"""


def months_ago(months: int) -> datetime:
    """In the middle of a month that is over, so that no zone and no short month makes it another."""
    now = datetime.now(UTC)
    count = now.year * 12 + now.month - 1 - months
    return datetime(count // 12, count % 12 + 1, 15, 12, tzinfo=UTC)


def name_of(at: datetime) -> str:
    return f"invocation_{at:%Y_%m}"


class World:
    def __init__(self, url: str, store: Store, db: asyncpg.Connection, pool: asyncpg.Pool) -> None:
        self.url = url
        self.store = store
        self.db = db
        self.pool = pool
        self.retention = Retention(pool, keep_days=KEEP_DAYS)

    async def month(self, at: datetime) -> None:
        """The partition as it was made when the month was the present one."""
        first = at.replace(day=1, hour=0)
        after = (first + timedelta(days=32)).replace(day=1)
        await self.db.execute(
            f"create table control.{name_of(at)} partition of control.invocation"
            f" for values from ('{first.isoformat()}') to ('{after.isoformat()}')"
        )

    async def granted(self, at: datetime, count: int = 1) -> list[uuid.UUID]:
        """Attempts that were let go at this moment."""
        stamp = int(at.timestamp() * 1000)
        tickets = [uuid.UUID(int=stamp << 80 | new_id().int & (1 << 80) - 1) for _ in range(count)]
        demands = [
            Demand(
                ticket_id=ticket,
                group=GROUP,
                model="m",
                klass=Class.INTERACTIVE,
                key_id=KEY,
                debit_id=ticket.hex,
                attempt=1,
                execution_limit_s=600,
                isolation_s=5,
                queue_timeout_s=100,
                intent=INTENT,
            )
            for ticket in tickets
        ]
        rows = await self.store.acquire(GROUP, OWNER, [(each, 0.0) for each in demands])
        assert {row.answer for row in rows} == {"granted"}
        await self.db.execute(
            "update control.ticket set granted_at = $2, day = $3 where ticket_id = any ($1)", tickets, at, at.date()
        )
        return tickets

    async def settle(
        self, tickets: Sequence[uuid.UUID], state: str = "charged", ending: Ending = Ending.CONFIRMED, shard: int = 1
    ) -> list[bool]:
        """Which of them it applied to."""
        lease = Lease(
            ticket_id=new_id(),
            group="",
            generation=1,
            probe=False,
            hard_deadline=0,
            granted_at=datetime.now(UTC),
            day=date.min,
            queued_s=0,
        )
        rows = await self.store.settle(
            shard,
            [
                Settlement(
                    lease=msgspec.structs.replace(lease, ticket_id=ticket),
                    ending=ending,
                    verdict=Verdict.ANSWERED,
                    state=state,
                    record=UNKNOWN if state == "unknown" else CHARGED,
                )
                for ticket in tickets
            ],
            judged=False,
        )
        applied = {row.ticket_id: row.applied for row in rows if row.ticket_id is not None}
        return [applied[ticket] for ticket in tickets]

    async def lose(self, tickets: Sequence[uuid.UUID]) -> None:
        """They end unknown, and their slots come free."""
        assert all(await self.settle(tickets, "unknown", Ending.UNCERTAIN))
        await self.db.execute("delete from control.ticket where ticket_id = any ($1)", tickets)

    async def long_ago(self, tickets: Sequence[uuid.UUID]) -> None:
        """They were settled when they were granted."""
        await self.db.execute("update control.attempt set settled_at = granted_at where ticket_id = any ($1)", tickets)

    async def sums(self) -> list[tuple[Any, ...]]:
        return [tuple(row) for row in await self.db.fetch(SUMS)]

    async def log(self) -> set[tuple[uuid.UUID, int, str]]:
        rows = await self.db.fetch("select ticket_id, correction, state from control.invocation")
        assert len(rows) == len({(row[0], row[1]) for row in rows})
        return {tuple(row) for row in rows}

    async def tables(self) -> set[str]:
        return {
            row[0]
            for row in await self.db.fetch(
                "select relname from pg_class where relnamespace = 'control'::regnamespace and relkind = 'r'"
                " and relname like 'invocation\\_%'"
            )
        }


@asynccontextmanager
async def opened(url: str) -> AsyncIterator[World]:
    store = Store(url, GIVEN)
    db = await asyncpg.connect(url)
    pool = await asyncpg.create_pool(url, min_size=0, max_size=4)
    try:
        await store.configure()
        await store.renew(OWNER, uuid.UUID(int=2), first=True)
        world = World(url, store, db, pool)
        await world.retention.partition()
        yield world
    finally:
        await pool.close()
        await db.close()
        await store.close()


async def test_months_are_made_ahead_and_what_came_before_them_is_moved_in(database_url):
    async with opened(database_url) as w:
        now = datetime.now(UTC)
        ahead = {
            name_of(now),
            name_of(now.replace(day=1) + timedelta(days=32)),
            name_of(now.replace(day=1) + timedelta(days=63)),
        }
        assert await w.tables() == {"invocation_default", *ahead}
        await w.db.execute(f"drop table control.{name_of(now)}")
        tickets = await w.granted(now, 3)
        assert all(await w.settle(tickets))
        before = await w.log()
        assert await w.db.fetchval("select count(*) from control.invocation_default") == 3
        await asyncio.gather(*(w.retention.partition() for _ in range(3)))
        await w.retention.partition()
        assert await w.db.fetchval("select count(*) from control.invocation_default") == 0
        assert await w.db.fetchval(f"select count(*) from control.{name_of(now)}") == 3
        assert await w.log() == before

        # Many of them stay where they are.
        await w.db.execute(f"drop table control.{name_of(now)}")
        await w.db.execute(
            "insert into control.invocation (ticket_id, correction, granted_at, settled_at, day, key_id, debit_id,"
            " attempt, group_id, state, usd, status)"
            " select gen_random_uuid(), 0, now(), now(), current_date, $1, 'd', 1, 'g', 'charged', 1, 'success'"
            " from generate_series(1, 1001)",
            KEY,
        )
        await w.retention.partition()
        assert name_of(now) not in await w.tables()
        assert await w.db.fetchval("select count(*) from control.invocation_default") == 1001


async def test_a_month_is_dropped_whole_and_what_may_still_be_corrected_stays(database_url):
    async with opened(database_url) as w:
        old, older, recent = months_ago(5), months_ago(6), months_ago(1)
        for at in (old, older, recent):
            await w.month(at)
        gone = [*await w.granted(old, 20), *await w.granted(older, 5)]
        kept = await w.granted(recent, 3)
        assert all(await w.settle([*gone, *kept]))
        unknown = await w.granted(old, 3)
        await w.lose(unknown)
        corrected = await w.granted(old, 1)
        await w.lose(corrected)
        assert await w.settle(corrected) == [True]
        sums, facts = await w.sums(), await Ledger(w.pool, zone="UTC").attempts_of(KEY, [unknown[0].hex])

        first = await w.retention.drop()
        assert (first.answer, first.month, first.kept) == ("dropped", older.date().replace(day=1), 0)
        second = await w.retention.drop()
        assert (second.answer, second.month, second.kept) == ("dropped", old.date().replace(day=1), 3)
        assert (await w.retention.drop()).answer == "nothing"

        assert await w.sums() == sums
        assert await w.log() == {(t, 0, "charged") for t in kept} | {(t, 0, "unknown") for t in unknown}
        assert {name_of(old), name_of(older)} & await w.tables() == set()
        assert await Ledger(w.pool, zone="UTC").attempts_of(KEY, [unknown[0].hex]) == facts
        # Who asks the log is told from which day on it has all.
        by_skill = await Ledger(w.pool, zone="UTC").grouped(
            Question(group_by=("skill",), first=older.date(), last=recent.date())
        )
        assert by_skill.kept_from == (old.replace(day=1) + timedelta(days=32)).date().replace(day=2)
        # What is dropped is still refused a second time, and a debit that was in it a second dispatch.
        assert await w.settle(gone[:2]) == [False, False]

        # A late correction is laid over what was kept, in the month's own partition, and it is the last one.
        assert await w.settle(unknown[:1], shard=2) == [True]
        assert await w.settle(unknown[:1]) == [False]
        [total] = [row for row in await w.sums() if row[0] == "total"]
        assert total[2:] == ("7.500000000000", 32, 2, "4.000000000000", 0, 96, 120)
        assert all(row[4] == 2 and row[7] == 3 * row[3] for row in await w.sums() if row[0] == "run_day" and row[4])
        assert await w.db.fetchval("select count(*) from control.invocation_default") == 0
        assert (await w.retention.drop()).answer == "nothing"

        assert await w.settle(unknown[1:], "zero") == [True, True]
        last = await w.retention.drop()
        assert (last.answer, last.kept) == ("dropped", 0)
        assert await w.log() == {(t, 0, "charged") for t in kept}
        assert not [name for name in await w.tables() if name.endswith("_kept")]


async def test_attempts_and_sums_by_run_go_after_their_month_and_no_replay_brings_them_back(database_url):
    async with opened(database_url) as w:
        old, recent = months_ago(8), months_ago(1)
        await w.month(old)
        await w.month(recent)
        gone, kept = await w.granted(old, 5), await w.granted(recent, 2)
        assert all(await w.settle([*gone, *kept]))
        unknown = await w.granted(old + timedelta(days=1))
        await w.lose(unknown)
        late = await w.granted(old, 1)
        assert all(await w.settle(late))
        await w.long_ago([*gone, *kept, *unknown])
        before = await w.sums()

        assert await w.retention.forget() == (0, 3)  # the run, step and tag of a day without an unknown attempt
        assert (await w.retention.drop()).kept == 1
        assert await w.retention.forget() == (5, 0)
        assert await w.retention.forget() == (0, 0)
        by_run = await Ledger(w.pool, zone="UTC").grouped(
            Question(group_by=("run",), first=old.date(), last=recent.date())
        )
        assert (by_run.source, by_run.kept_from is not None) == ("counters", True)
        left = {row[0] for row in await w.db.fetch("select ticket_id from control.attempt")}
        assert left == {*kept, *unknown, *late}

        def stays(row: tuple[Any, ...]) -> bool:
            return row[0] not in ("run_day", "step_day", "tag_day") or f"{old.date()}" not in row[1]

        assert await w.sums() == [row for row in before if stays(row)]
        # A journal that comes now is refused: nothing is settled, and nobody knows the attempt.
        assert await w.settle([gone[0]]) == [False]
        assert await Ledger(w.pool, zone="UTC").states(gone) == {}
        assert await w.sums() == [row for row in before if stays(row)]
        assert await w.settle(unknown) == [True]
        [of_day] = [row for row in await w.sums() if row[0] == "run_day" and row[3] == 1]
        assert of_day[2:6] == ("0.250000000000", 1, 0, "0.000000000000")


async def test_it_drops_nothing_by_a_clock_that_is_wrong(database_url):
    async with opened(database_url) as w:
        old = months_ago(5)
        await w.month(old)
        asked = "select answer from control.drop_invocations_v1($1, $2)"
        for skew in (timedelta(days=2), timedelta(days=-400)):
            assert await w.pool.fetchval(asked, KEEP_DAYS, datetime.now(UTC) + skew) == "clock"
        # Written while the database's clock was behind: the ticket is from now.
        [ticket] = await w.granted(datetime.now(UTC))
        await w.db.execute("update control.ticket set granted_at = $1, day = $2", old, old.date())
        assert await w.settle([ticket]) == [True]
        with structlog.testing.capture_logs() as logs:
            await Upkeep(w.retention).retire()
        assert [(line["event"], line["reason"]) for line in logs] == [("gateway.retention_postponed", "young")]
        assert await w.log() == {(ticket, 0, "charged")}


#: Kills the session at the n-th change of the schema, counted past rollbacks.
KILLER: Final = """
create sequence public.changes;
create table public.dies_at (n bigint);
insert into public.dies_at values (1);
create function public.die() returns event_trigger language plpgsql as $$
begin
    if nextval('public.changes') = (select n from public.dies_at) then
        perform pg_terminate_backend(pg_backend_pid());
        perform pg_sleep(60);
    end if;
end $$;
create event trigger dies_before on ddl_command_start when tag in ('CREATE TABLE', 'ALTER TABLE', 'DROP TABLE')
    execute function public.die();
create event trigger dies_after on ddl_command_end when tag in ('CREATE TABLE', 'ALTER TABLE', 'DROP TABLE')
    execute function public.die();
"""


async def test_killed_anywhere_on_the_way_it_has_changed_nothing(database_url):
    async with opened(database_url) as w:
        old = months_ago(5)
        await w.month(old)
        assert all(await w.settle(await w.granted(old, 10)))
        await w.lose(unknown := await w.granted(old, 2))
        before = await w.log(), await w.sums(), await w.tables()
        await w.db.execute(KILLER)
        death, answer = 1, ""
        while answer != "dropped":
            assert death < 100
            await w.db.execute("update public.dies_at set n = $1", death)
            await w.db.execute("select setval('public.changes', 1, false)")
            one = await asyncpg.connect(database_url)
            try:
                answer = await one.fetchval(
                    "select answer from control.drop_invocations_v1($1, now())", KEEP_DAYS, timeout=60
                )
            except (asyncpg.AdminShutdownError, asyncpg.ConnectionDoesNotExistError):
                assert (await w.log(), await w.sums(), await w.tables()) == before, f"killed at {death}"
                death += 1
            except asyncpg.LockNotAvailableError:
                await asyncio.sleep(0.1)  # autovacuum is about it
            finally:
                one.terminate()
        # Made, detached, attached, its constraint gone, the old one dropped: before and after each.
        assert death > 10
        assert await w.log() == {(t, 0, "unknown") for t in unknown}
        assert await w.sums() == before[1]


async def test_corrections_and_two_droppers_at_once_lose_nothing(database_url):
    seed = random.randrange(2**32)
    chance = random.Random(seed)
    async with opened(database_url) as w:
        months = [months_ago(n) for n in (4, 5, 6)]
        unknown: list[uuid.UUID] = []
        for at in months:
            await w.month(at)
            assert all(await w.settle(await w.granted(at, 5)))
            lost = await w.granted(at, 12)
            await w.lose(lost)
            unknown += lost
        chance.shuffle(unknown)
        corrected = unknown[:24]

        async def correct() -> None:
            for ticket in corrected:
                assert await w.settle([ticket], chance.choice(["charged", "zero"]), shard=chance.randrange(4)) == [True]
                await asyncio.sleep(chance.random() * 0.01)

        async def drop() -> None:
            for _ in range(12):
                try:
                    await w.retention.drop()
                except Locked:
                    continue
                await asyncio.sleep(chance.random() * 0.02)

        await asyncio.gather(correct(), drop(), drop())
        while (await w.retention.drop()).answer == "dropped":
            pass
        log = await w.log()
        assert {entry for entry in log if entry[2] == "unknown"} >= {(t, 0, "unknown") for t in unknown[24:]}, seed
        sums = {row[0]: row for row in await w.sums() if row[0] in ("total", "key")}
        for row in sums.values():
            assert row[3:6] == (51, 12, "24.000000000000"), seed
        charged = await w.db.fetchval("select count(*) from control.attempt where state = 'charged'")
        assert Decimal(sums["total"][2]) == charged * Decimal("0.25"), seed
        # Each month that is left is of an attempt that is still unknown, and so is each last entry.
        for ticket in unknown[24:]:
            [found] = await Ledger(w.pool, zone="UTC").attempts_of(KEY, [ticket.hex])
            assert (found.state, found.facts["state"], found.facts["upper_bound_usd"]) == (
                "unknown",
                "unknown",
                "2.000000000000",
            ), seed
        assert not [row for row in await w.sums() if row[4] < 0], seed


async def test_who_reads_the_ledger_for_long_keeps_its_months_and_nobody_waits_for_a_lock(database_url, monkeypatch):
    monkeypatch.setattr("metering.retention._TRIES", 2)
    monkeypatch.setattr("metering.retention._PAUSE_S", 0.01)
    async with opened(database_url) as w:
        old = months_ago(5)
        await w.month(old)
        assert all(await w.settle(await w.granted(old, 3)))
        now = await w.granted(datetime.now(UTC))
        before = await w.log(), await w.tables()
        async with w.db.transaction():
            await w.db.fetch("select count(*) from control.invocation")
            with pytest.raises(Locked):
                await w.retention.drop()
            # Whoever settles does not stand behind who waits.
            [ticket] = now
            assert await w.settle([ticket]) == [True]
        assert (before[0] <= await w.log(), before[1] == await w.tables()) == (True, True)
        assert (await w.retention.drop()).answer == "dropped"


async def test_a_role_that_does_not_own_the_ledger_is_told_so_once(database_url):
    role = f"reader_{uuid.uuid4().hex[:8]}"
    async with opened(database_url) as w:
        await w.month(months_ago(5))
        await w.db.execute(
            f"create role {role} login; grant usage on schema control to {role};"
            f" grant select, insert, update, delete on all tables in schema control to {role};"
        )
        try:
            async with asyncpg.create_pool(
                w.url, min_size=0, max_size=1, setup=lambda c: c.execute(f"set role {role}")
            ) as pool:
                upkeep = Upkeep(Retention(pool, keep_days=KEEP_DAYS))
                with pytest.raises(NotAllowed):
                    await Retention(pool, keep_days=KEEP_DAYS).drop()
                # Months that are there need no right.
                await Retention(pool, keep_days=KEEP_DAYS).partition()
                await w.db.execute(f"drop table control.{name_of(datetime.now(UTC))}")
                with structlog.testing.capture_logs() as logs:
                    for _ in range(2):
                        await upkeep.partition()
                        await upkeep.retire()
                assert [line["event"] for line in logs] == [
                    "gateway.partitions_not_allowed",
                    "gateway.retention_not_allowed",
                ]
        finally:
            await w.db.execute(f"drop owned by {role}; drop role {role}")
