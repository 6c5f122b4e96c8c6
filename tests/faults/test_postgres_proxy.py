"""The proxy does what it says: without this, "the commit was lost" would be a belief."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

import asyncpg
import pytest

from tests.fakes.postgres_proxy import CUT, TURNED_AWAY, Action, Proxy, Rule, postgres_proxy

LOST = (OSError, asyncpg.PostgresConnectionError, asyncpg.InterfaceError)


@pytest.fixture
async def direct(database_url) -> AsyncIterator[asyncpg.Connection]:
    connection = await asyncpg.connect(database_url)
    await connection.execute("create table written (n integer primary key)")
    yield connection
    await connection.close()


@pytest.fixture
async def proxy(database_url) -> AsyncIterator[Proxy]:
    async with postgres_proxy(database_url, seed=1) as proxy:
        yield proxy


@pytest.fixture
async def through(direct, proxy) -> AsyncIterator[asyncpg.Connection]:
    connection = await asyncpg.connect(proxy.url(await direct.fetchval("select current_database()")))
    # Known to the server: what follows is one execution of it.
    await connection.fetch("insert into written values ($1)", 0)
    yield connection
    connection.terminate()
    await asyncio.sleep(0)


async def written(direct) -> list[int]:
    return [row["n"] for row in await direct.fetch("select n from written where n > 0 order by n")]


async def gone(direct) -> None:
    """Until the server has ended what came through the proxy."""
    async with asyncio.timeout(30):
        while await direct.fetchval(  # noqa: ASYNC110
            "select count(*) from pg_stat_activity where datname = current_database() and pid <> pg_backend_pid()"
        ):
            await asyncio.sleep(0.01)


@pytest.mark.parametrize(("action", "there"), [(Action.DROP_BEFORE, []), (Action.DROP_AFTER, [1])])
async def test_a_dropped_commit_has_happened_or_not_as_asked(direct, proxy, through, action, there):
    proxy.rules = [Rule(action=action, statement="insert into written")]
    with pytest.raises(LOST):
        await through.fetch("insert into written values ($1)", 1)
    await gone(direct)
    assert await written(direct) == there
    assert proxy.counts == {action.value: 1}


@pytest.mark.parametrize(("action", "there"), [(Action.DROP_BEFORE, []), (Action.DROP_AFTER, [1])])
async def test_an_explicit_commit_is_the_one_that_is_dropped(direct, proxy, through, action, there):
    proxy.rules = [Rule(action=action)]
    transaction = through.transaction()
    await transaction.start()
    await through.fetch("insert into written values ($1)", 1)
    assert not proxy.counts
    with pytest.raises(LOST):
        await transaction.commit()
    await gone(direct)
    assert await written(direct) == there


async def test_a_simple_query_is_struck_like_any_other(direct, proxy, through):
    proxy.rules = [Rule(action=Action.DROP_AFTER)]
    with pytest.raises(LOST):
        await through.execute("insert into written values (1)")
    await gone(direct)
    assert await written(direct) == [1]


async def test_what_is_stalled_holds_its_locks_until_it_is_released(direct, proxy, through):
    proxy.rules = [Rule(action=Action.STALL, times=1)]
    stalled = asyncio.create_task(through.fetch("insert into written values ($1)", 1))
    async with asyncio.timeout(30):
        while not proxy.stalled:  # noqa: ASYNC110  it is told by nobody
            await asyncio.sleep(0.005)
    assert await written(direct) == []
    with pytest.raises(asyncpg.LockNotAvailableError):
        await direct.execute("set lock_timeout = '100ms'; insert into written values (1)")
    proxy.release()
    await asyncio.wait_for(stalled, 30)
    assert await written(direct) == [1]


@pytest.mark.parametrize("action", [Action.DELAY_BEFORE, Action.DELAY_AFTER, Action.SLICE])
async def test_what_is_only_slow_arrives_whole(proxy, through, action):
    proxy.rules = [Rule(action=action, delay_s=0.2)]
    began = time.monotonic()
    rows = await through.fetch("select n, repeat('x', 3000) as text from generate_series(1, 5) n")
    assert [(row["n"], len(row["text"])) for row in rows] == [(n, 3000) for n in range(1, 6)]
    assert action is Action.SLICE or time.monotonic() - began >= 0.2


async def test_half_open_answers_nothing_and_closes_nothing(proxy, through):
    proxy.rules = [Rule(action=Action.HALF_OPEN)]
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(asyncio.shield(asyncio.ensure_future(through.fetch("select 1"))), 0.3)
    assert not through.is_closed()


async def test_it_turns_new_connections_away_and_resets_those_it_has(direct, proxy, through):
    name = await direct.fetchval("select current_database()")
    proxy.refusing = True
    with pytest.raises(LOST):
        await asyncpg.connect(proxy.url(name))
    assert proxy.counts[TURNED_AWAY] >= 1
    assert proxy.cut() == 1
    with pytest.raises(LOST):
        await through.fetch("select 1")
    assert proxy.counts[CUT] == 1
    proxy.refusing = False
    again = await asyncpg.connect(proxy.url(name))
    assert await again.fetchval("select 1") == 1
    await again.close()


async def test_a_seed_gives_the_same_choices(database_url):
    async def choices() -> list[bool]:
        async with postgres_proxy(database_url, seed=7) as proxy:
            proxy.rules = [Rule(action=Action.SLICE, probability=0.5)]
            return [proxy.struck(f"statement {n}", commits=True) is not None for n in range(40)]

    first = await choices()
    assert first == await choices()
    assert {True, False} == set(first)


async def test_a_rule_strikes_the_nth_and_no_more_often_than_it_may(database_url):
    async with postgres_proxy(database_url) as proxy:
        proxy.rules = [Rule(action=Action.RESET, statement="settle", nth=2), Rule(action=Action.SLICE, times=1)]
        struck = [
            proxy.struck(statement, commits=True) for statement in ("settle", "settle", "acquire", "settle", "settle")
        ]
        assert [rule.action if rule else None for rule in struck] == [Action.SLICE, Action.RESET, None, None, None]
