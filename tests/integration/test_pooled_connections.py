"""What a statement is told behind a pooler, where no session is a process's own: in force for it, and gone after it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import asyncpg
import pytest

from admission.contract import StoreUnavailable
from admission.settings import AdmissionSettings, GroupSettings
from admission.store import PooledConnection, Store
from gateway import database
from tests.fakes.postgres_proxy import postgres_proxy

SETTINGS = AdmissionSettings(groups={"http://provider.test": GroupSettings()}, statement_s=0.7)
TOLD = """
    select current_setting('lock_timeout') as lock_timeout,
           current_setting('transaction_timeout') as transaction_timeout,
           current_setting('jit') as jit, current_setting('enable_seqscan') as enable_seqscan,
           current_setting('enable_sort') as enable_sort,
           current_setting('plan_cache_mode') as plan_cache_mode
"""


@asynccontextmanager
async def pooled(url: str, listen_url: str | None = None) -> AsyncIterator[tuple[Store, PooledConnection]]:
    store = Store(url, SETTINGS, listen_url=listen_url or url)
    try:
        connection = await store._connect()
        assert isinstance(connection, PooledConnection)
        yield store, connection
    finally:
        await store.close()


async def test_a_statement_is_told_before_it_runs_and_the_session_is_as_it_was(database_url):
    async with pooled(database_url) as (_, connection):
        before = await asyncpg.Connection.fetchrow(connection, TOLD)
        for ask in (connection.fetchrow, connection.fetch):
            told = await ask(TOLD)
            [row] = told if isinstance(told, list) else [told]
            assert dict(row) == {
                "lock_timeout": "700ms",
                "transaction_timeout": "700ms",
                "jit": "off",
                "enable_seqscan": "off",
                "enable_sort": "off",
                "plan_cache_mode": "force_generic_plan",
            }
        assert await connection.fetchval("select current_setting('lock_timeout')") == "700ms"
        assert await asyncpg.Connection.fetchrow(connection, TOLD) == before
        assert before is not None
        assert before["lock_timeout"] == "0"


async def test_nothing_is_prepared_for_a_later_transaction(database_url):
    async with pooled(database_url) as (store, connection):
        await store.configure()
        for _ in range(2):
            await connection.fetch("select $1::int + 1", 1)
        assert await asyncpg.Connection.fetchval(connection, "select count(*) from pg_prepared_statements") == 0


async def test_a_lock_is_waited_for_no_longer_than_a_statement_may_take(database_url):
    holder = await asyncpg.connect(database_url)
    try:
        async with pooled(database_url) as (store, connection), holder.transaction():
            await store.configure()
            await holder.execute("select from control.capacity_group for update")
            with pytest.raises(asyncpg.LockNotAvailableError):
                await connection.fetch("select group_id from control.capacity_group for update")
    finally:
        await holder.close()


async def test_a_transaction_that_takes_too_long_is_ended_by_the_server(database_url):
    async with pooled(database_url) as (_, connection):
        if connection.get_server_version().major < 17:
            pytest.skip("needs PostgreSQL 17 or newer")
        with pytest.raises((asyncpg.PostgresError, asyncpg.InterfaceError)):
            async with asyncio.timeout(60):
                await connection.fetch("select pg_sleep(600)")
        assert connection.is_closed()


async def test_only_listen_goes_to_the_server_itself(database_url):
    async with postgres_proxy(database_url) as gone:
        gone.refusing = True
        async with pooled(database_url, gone.url("postgres")) as (store, _):
            await store.configure()
            with pytest.raises(StoreUnavailable):
                async with store.listen(lambda _: None):
                    pass
    async with postgres_proxy(database_url) as gone:
        gone.refusing = True
        store = Store(gone.url("postgres"), SETTINGS, listen_url=database_url)
        async with store.listen(lambda _: None) as lost:
            assert not lost.is_set()
            with pytest.raises(StoreUnavailable):
                await store.configure()
        await store.close()


async def test_a_pool_asks_the_server_nothing_after_a_statement_and_leaves_no_transaction_open(database_url):
    last = "select query from pg_stat_activity where application_name = 'tollbridge once'"
    async with (
        database.open_connection(database_url, name="tollbridge other") as other,
        database.open_pool(database_url, name="tollbridge once", size=1) as pool,
    ):
        assert await pool.fetchval("select 41 + 1") == 42
        assert await other.fetchval(last) == "select 41 + 1"
        async with pool.acquire() as connection:
            await connection.execute("begin; set local lock_timeout = '123ms'")
            asyncio.get_running_loop().set_exception_handler(lambda *_: None)
        async with pool.acquire() as connection:
            assert not connection.is_in_transaction()
            assert await connection.fetchval("show lock_timeout") == "0"
