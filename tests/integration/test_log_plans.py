"""
A piece of the invocation log reads so many rows and no more, and only the months that it is about: whatever the filter,
however many rows there are, with statistics and without, with plans made for a search and with plans made for any.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final

import asyncpg
import pytest

from metering import log
from tests.integration.plans import Node, Plan, rows_read

ROWS: Final = 6_000
#: Of the pieces that are looked at.
SIZE: Final = 128
INDEXED: Final = ("Index Scan", "Index Only Scan")
FILL: Final = Path("tests/benchmarks/invocations.sql")

#: The rarest word of each kind, and the most usual: the planner must not be led by either.
SEARCHES: Final = {
    "all": log.Search(skill="none"),
    "request_id": log.Search(request_id="r1000"),
    "debit_id": log.Search(debit_id="d2000", key_id=uuid.UUID("00000004-0000-7000-8000-00000000000b")),
    "debit_id of any key": log.Search(debit_id="d2000"),
    "session_id": log.Search(session_id="s10"),
    "run_id": log.Search(run_id="run50"),
    "key_id": log.Search(key_id=uuid.UUID("00000004-0000-7000-8000-000000000003")),
    "failed": log.Search(statuses=("error", "timeout")),
}


@pytest.fixture
async def connection(database_url: str) -> AsyncIterator[asyncpg.Connection]:
    connection = await asyncpg.connect(database_url, statement_cache_size=0)
    await connection.execute(FILL.read_text().format(rows=ROWS))
    # One session that has more rows than all others.
    await connection.execute(
        "update control.invocation set session_id = 's0' where granted_at > now() - '45 d'::interval"
    )
    yield connection
    await connection.close()


def literal(value: object) -> str:
    match value:
        case None:
            return "null"
        case bool() | int():
            return str(value).lower()
        case datetime():
            return f"'{value:%Y-%m-%d %H:%M:%S.%f%z}'"
        case tuple() | list():
            return "array[" + ", ".join(map(literal, value)) + "]"
        case _:
            return "'" + str(value).replace("'", "''") + "'"


async def plan(
    connection: asyncpg.Connection, mode: str, driver: str, search: log.Search, at: log.Place, since: datetime
) -> Plan:
    """The plan of a piece as it was run, on a connection as a reading has it."""
    given = [since, log._LAST, *log._given(search), False, at.granted_at, at.ticket_id, at.correction, 101]
    async with connection.transaction():
        for name, value in {**log._PAGE_SETTINGS, "plan_cache_mode": mode}.items():
            await connection.execute(f"set local {name} = '{value}'")
        await connection.execute(f"deallocate all; prepare piece as {log.page_sql(driver, SIZE)}")
        [row] = await connection.fetch(
            f"explain (analyze, timing off, format json) execute piece ({', '.join(map(literal, given))})"
        )
    [told] = json.loads(row[0])
    return Plan(driver, told["Plan"])


def tables(found: Plan) -> set[str]:
    """The months that were opened."""
    return {
        node["Relation Name"]
        for node in found.nodes()
        if str(node.get("Relation Name", "")).startswith("invocation") and node.get("Actual Loops", 0)
    }


def faults(found: Plan) -> list[str]:
    wrong: list[str] = []
    for node in found.nodes():
        relation = str(node.get("Relation Name", ""))
        if rows_read(node) > 2 * SIZE:
            wrong.append(f"{node['Node Type']} of {relation or 'what was read'}: {rows_read(node)} rows")
        if relation.startswith(("invocation", "attempt")) and node["Node Type"] not in INDEXED:
            wrong.append(f"{node['Node Type']} on {relation}")
        if relation.startswith(("invocation", "attempt")) and "Index Cond" not in node:
            wrong.append(f"all of an index on {relation}")
    return wrong


def shown(node: Node) -> Any:
    kept = ("Node Type", "Relation Name", "Index Name", "Index Cond", "Filter", "Actual Rows", "Rows Removed by Filter")
    return {
        **{name: node[name] for name in kept if name in node},
        "Plans": [shown(child) for child in node.get("Plans", ())],
    }


async def test_no_piece_reads_more_than_its_rows_and_their_months(connection: asyncpg.Connection) -> None:
    assert {log.driver_of(search) for search in SEARCHES.values()} == set(log._DRIVERS)
    now = await connection.fetchval("select max(granted_at) from control.invocation")
    newest = log.Place(now + timedelta(seconds=1), uuid.UUID(int=0), 0)
    middle = log.Place(now - timedelta(days=40), uuid.UUID(int=0), 0)
    searches = [*SEARCHES.items(), ("session_id", log.Search(session_id="s0"))]
    wrong: list[tuple[Any, ...]] = []
    for analysed in (False, True):
        if analysed:
            await connection.execute("analyze control.invocation; analyze control.attempt")
        for mode in ("force_custom_plan", "force_generic_plan"):
            for driver, search in searches:
                for at in (newest, middle):
                    found = await plan(connection, mode, driver, search, at, log._FIRST)
                    wrong += [(analysed, mode, driver, fault, shown(found.root)) for fault in faults(found)]
            # A place and a beginning in the same month: no other month is looked at, whoever made the plan.
            for driver in ("all", "key_id", "failed"):
                at = log.Place(middle.granted_at.replace(day=20), uuid.UUID(int=0), 0)
                since = at.granted_at - timedelta(days=10)
                found = await plan(connection, mode, driver, SEARCHES[driver], at, since)
                # What is no month's goes to the default partition.
                other = tables(found) - {f"invocation_{at.granted_at:%Y_%m}", "invocation_default"}
                wrong += [(analysed, mode, driver, month) for month in sorted(other)]
    assert not wrong, "\n".join(map(str, [*(each[:4] for each in wrong), wrong[0][4:]]))


async def test_a_sum_opens_the_months_of_its_range_only(connection: asyncpg.Connection) -> None:
    await connection.execute("analyze control.invocation")
    month = (datetime.now(UTC) - timedelta(days=40)).replace(day=10)
    since, until = month, month + timedelta(days=1)
    given = [since, until, *log._given(log.Search()), False, [], 10]
    async with connection.transaction():
        for name, value in log._STATS_SETTINGS.items():
            await connection.execute(f"set local {name} = '{value}'")
        [row] = await connection.fetch(
            f"explain (analyze, timing off, format json) {log.stats_sql(['provider'], 'cost')}", *given
        )
    [told] = json.loads(row[0])
    found = Plan("stats", told["Plan"])
    assert tables(found) <= {f"invocation_{month:%Y_%m}", "invocation_default"}
    # Of a day in ninety it does not read the month.
    assert max(rows_read(node) for node in found.nodes()) < ROWS / 20, json.dumps(shown(found.root), indent=1)
