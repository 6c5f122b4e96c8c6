"""
The day of an attempt is that of its grant, by the database's clock, in the declared zone, and stays it.

The clock of these databases is one that the tests set: whoever connects finds it in the place of PostgreSQL's own. So a
millisecond before midnight, a day of 23 hours and one that there never was need neither waiting nor another machine.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from decimal import Decimal
from typing import Final

import asyncpg
import msgspec
import pytest

from admission.contract import TicketRow
from admission.lease import Settlement
from admission.store import Store
from gateway.settling import Kept, keep, restore
from tests.conformance.test_admission_stores import Process, configured, ended, uncertain, wanted
from tests.ledger import counters_that_differ

MILLISECOND: Final = dt.timedelta(milliseconds=1)
HOUR: Final = dt.timedelta(hours=1)
#: No attempt is over before its test is.
_LONG_S: Final = 90 * 86_400.0


def utc(text: str) -> dt.datetime:
    return dt.datetime.fromisoformat(text).replace(tzinfo=dt.UTC)


class Days:
    """A database whose clock stands still where it is set, and a process that lives through all of it."""

    def __init__(self, db: asyncpg.Connection, process: Process) -> None:
        self.db = db
        self.process = process

    async def at(self, moment: dt.datetime) -> None:
        """From here on it is then, and nothing passes."""
        await self.db.execute("update moved.clock set now = $1", moment)

    async def granted(self, moment: dt.datetime) -> TicketRow:
        await self.at(moment)
        intent = b'{"session_id":"s","run_id":"r","tags":{"a":"b"}}'
        row = await self.process.granted(wanted(intent=intent, execution_limit_s=_LONG_S))
        assert row.granted_at == moment
        return row

    async def charged(self) -> dict[str, Decimal]:
        """By the day's counter."""
        rows = await self.db.fetch(
            "select name, sum(charged_usd) as usd from control.counter where kind = 'day' group by 1"
        )
        return {row["name"]: row["usd"] for row in rows}

    async def balanced(self) -> None:
        assert await counters_that_differ(self.db) == []


@asynccontextmanager
async def days(url: str, zone: str) -> AsyncIterator[Days]:
    async with AsyncExitStack() as stack:
        first = await asyncpg.connect(url)
        await first.execute("create schema moved")
        await first.execute("create table moved.clock (now timestamptz not null)")
        await first.execute("insert into moved.clock values (pg_catalog.clock_timestamp())")
        await first.execute(
            "create function moved.clock_timestamp() returns timestamptz language sql volatile"
            " as $$ select c.now from moved.clock c $$"
        )
        name = await first.fetchval("select current_database()")
        await first.execute(f'alter database "{name}" set search_path = moved, pg_catalog, public')
        await first.close()
        db = await asyncpg.connect(url)
        stack.push_async_callback(db.close)
        # It sends no heartbeat, so nobody takes the clock that is set for one that leapt.
        process = Process(Store(url, configured(concurrency=1_000, settings={"zone": zone})))
        stack.push_async_callback(process.store.close)
        await process.store.configure()
        await db.execute(
            "insert into control.owner (owner_id, expires_at, host, pid) values ($1, 'infinity', 'here', 1)",
            process.owner,
        )
        yield Days(db, process)


def as_replayed(settlement: Settlement) -> Settlement:
    """As it comes out of a journal."""
    return restore(msgspec.json.decode(keep(settlement), type=Kept))


#: A zone, and the first moment of each of three days in a row; worked out by hand from the zone's rules.
THREE_DAYS: Final = {
    "an ordinary day": ("UTC", "2026-05-05T00:00", "2026-05-06T00:00", "2026-05-07T00:00", "2026-05-05", 24),
    "a day of 23 hours in Berlin": (
        "Europe/Berlin", "2027-03-27T23:00", "2027-03-28T22:00", "2027-03-29T22:00", "2027-03-28", 23,
    ),
    "a day of 25 hours in Berlin": (
        "Europe/Berlin", "2027-10-30T22:00", "2027-10-31T23:00", "2027-11-01T23:00", "2027-10-31", 25,
    ),
    "a day of 23 hours in New York": (
        "America/New_York", "2027-03-14T05:00", "2027-03-15T04:00", "2027-03-16T04:00", "2027-03-14", 23,
    ),
    "a day of 25 hours in New York": (
        "America/New_York", "2027-11-07T04:00", "2027-11-08T05:00", "2027-11-09T05:00", "2027-11-07", 25,
    ),
    "a zone of quarter hours": (
        "Asia/Kathmandu", "2027-01-01T18:15", "2027-01-02T18:15", "2027-01-03T18:15", "2027-01-02", 24,
    ),
    "a day of 23 and a half hours": (
        "Australia/Lord_Howe", "2027-10-02T13:30", "2027-10-03T13:00", "2027-10-04T13:00", "2027-10-03", 23.5,
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", THREE_DAYS.values(), ids=THREE_DAYS.keys())
async def test_a_charge_belongs_to_the_day_of_its_grant_to_the_millisecond(database_url: str, case):
    zone, *firsts, name, hours = case
    begins, ends, after = map(utc, firsts)
    assert ends - begins == hours * HOUR
    day = dt.date.fromisoformat(name)
    async with days(database_url, zone) as d:
        held: list[tuple[TicketRow, dt.date]] = []
        moments = [
            (begins - MILLISECOND, -1),
            (begins, 0),
            (ends - MILLISECOND, 0),
            (ends, 1),
            (after - MILLISECOND, 1),
        ]
        # Each hour of it, too: the one that there is twice, and around the one that is missing.
        moments += [(begins + number * HOUR, 0) for number in range(1, int(hours))]
        for moment, off in sorted(moments):
            held.append((await d.granted(moment), day + off * dt.timedelta(1)))
        assert [row.day for row, _ in held] == [expected for _, expected in held]
        # Whenever they end, which is the day after.
        assert all(await d.process.settle(*(ended(row) for row, _ in held)))
        of_the_day = int(hours) + 1
        assert await d.charged() == {
            f"{day - dt.timedelta(1)}": Decimal("0.25"),
            f"{day}": of_the_day * Decimal("0.25"),
            f"{day + dt.timedelta(1)}": 2 * Decimal("0.25"),
        }
        await d.balanced()


async def test_a_day_that_there_never_was_has_no_charges(database_url: str):
    """Samoa went from the 29th of December 2011 to the 31st."""
    midnight = utc("2011-12-30T10:00")
    async with days(database_url, "Pacific/Apia") as d:
        for moment in (midnight - MILLISECOND, midnight):
            row = await d.granted(moment)
            assert await d.process.settle(ended(row)) == [True]
        assert await d.charged() == {"2011-12-29": Decimal("0.25"), "2011-12-31": Decimal("0.25")}
        await d.balanced()


async def test_what_is_settled_replayed_and_corrected_later_stays_with_the_day_and_the_month_of_its_grant(
    database_url: str,
):
    last, next_day, next_month = utc("2027-01-31T22:59:59.999"), utc("2027-01-31T23:00"), utc("2027-02-28T12:00")
    async with days(database_url, "Europe/Berlin") as d:
        for moment in (last, next_month):
            await d.at(moment)
            await d.db.execute("select control.partition_invocations_v1()")
        plain, lost, never = [await d.granted(last) for _ in range(3)]
        tomorrow = await d.granted(next_day)
        assert [row.day for row in (plain, lost, never, tomorrow)] == [dt.date(2027, 1, 31)] * 3 + [dt.date(2027, 2, 1)]
        # The next day, as its process does, and as a journal says that it did.
        assert await d.process.settle(ended(plain), uncertain(lost), ended(tomorrow)) == [True] * 3
        assert await d.process.settle(as_replayed(ended(plain)), as_replayed(uncertain(lost))) == [False, False]
        # Another month: what was never settled, what was and is said again, and what is known by now.
        await d.at(next_month)
        later = [as_replayed(ended(row)) for row in (never, plain, lost, tomorrow)]
        assert await d.process.settle(*later, judged=False) == [True, False, True, False]
        assert await d.process.settle(*later, judged=False) == [False] * 4
        rows = await d.db.fetch(
            "select tableoid::regclass::text as month, ticket_id, correction, state, day from control.invocation"
        )
        january, first = "control.invocation_2027_01", dt.date(2027, 1, 31)
        assert sorted((r["ticket_id"], r["correction"], r["state"], r["month"], r["day"]) for r in rows) == sorted(
            [
                (plain.ticket_id, 0, "charged", january, first),
                (lost.ticket_id, 0, "unknown", january, first),
                (lost.ticket_id, 1, "charged", january, first),
                (never.ticket_id, 0, "charged", january, first),
                # A month is UTC's, so this one is January's although its day is in February.
                (tomorrow.ticket_id, 0, "charged", january, dt.date(2027, 2, 1)),
            ]
        )
        assert await d.charged() == {"2027-01-31": Decimal("0.75"), "2027-02-01": Decimal("0.25")}
        await d.balanced()


async def test_a_grant_of_the_last_moment_of_a_month_and_one_of_the_first_of_the_next_are_in_their_own_partitions(
    database_url: str,
):
    first = utc("2027-02-01T00:00")
    async with days(database_url, "UTC") as d:
        await d.at(first - MILLISECOND)
        await d.db.execute("select control.partition_invocations_v1()")
        held = [await d.granted(moment) for moment in (first - MILLISECOND, first)]
        for _ in range(2):
            await d.process.settle(*(uncertain(row) for row in held))
            await d.process.settle(*(ended(row) for row in held))
        rows = await d.db.fetch(
            "select tableoid::regclass::text as month, ticket_id, correction from control.invocation order by 1, 3"
        )
        assert [(row["month"], row["ticket_id"], row["correction"]) for row in rows] == [
            (f"control.invocation_2027_0{number + 1}", row.ticket_id, correction)
            for number, row in enumerate(held)
            for correction in (0, 1)
        ]
        assert await d.charged() == {"2027-01-31": Decimal("0.25"), "2027-02-01": Decimal("0.25")}
        await d.balanced()
