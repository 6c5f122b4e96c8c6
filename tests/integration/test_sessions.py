"""Budgets of sessions in PostgreSQL: the lock that makes two groups one after the other, and whose a session is."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from decimal import Decimal
from uuid import UUID

import asyncpg
import pytest

from admission.ids import new_id
from admission.lease import Class, Demand
from admission.settings import AdmissionSettings, GroupSettings
from admission.store import Store
from tests.fakes.whole_line import KEY

GROUPS = ("http://a.test:80", "http://b.test:80")
SETTINGS = AdmissionSettings(groups={group: GroupSettings() for group in GROUPS}, statement_s=60)
#: A budget that was said of this session, or one that its key has for each.
SAID = ("select control.budget_session_v1($1, 's', 1, true, false)", "session_budget")
OF_THE_KEY = ('select control.limit_key_v1($1, \'{"budget_session_usd": "1"}\')', "key_limit")


def demand(group: str, key_id: UUID = KEY, reserved_usd: Decimal | None = None) -> Demand:
    return Demand(
        ticket_id=new_id(),
        group=group,
        model="m",
        klass=Class.INTERACTIVE,
        key_id=key_id,
        debit_id=new_id().hex,
        attempt=1,
        execution_limit_s=30,
        isolation_s=5,
        queue_timeout_s=30,
        session_id="s",
        most_usd=Decimal(1),
        reserved_usd=reserved_usd,
        intent=b'{"session_id":"s","upper_bound_usd":"1"}',
    )


async def opened(stack: AsyncExitStack, url: str) -> tuple[list[Store], UUID]:
    stores = [Store(url, SETTINGS) for _ in GROUPS]
    for store in stores:
        stack.push_async_callback(store.close)
        await store.configure()
    owner = new_id()
    await stores[0].renew(owner, new_id(), first=True)
    return stores, owner


@pytest.mark.parametrize(
    ("budget", "limited"), [pytest.param(SAID, False, id="said of it"), pytest.param(OF_THE_KEY, True, id="of its key")]
)
async def test_two_groups_cannot_pass_the_budget_of_one_session_together(
    database_url: str, budget: tuple[str, str], limited: bool
):
    """Both wait for the row. The second looks at what the session has used after the first has had it."""
    how, table = budget
    async with AsyncExitStack() as stack:
        stores, owner = await opened(stack, database_url)
        holder, watcher = [await asyncpg.connect(database_url) for _ in range(2)]
        stack.push_async_callback(holder.close)
        stack.push_async_callback(watcher.close)
        await holder.execute(how, KEY)
        holding = holder.transaction()
        await holding.start()
        await holder.execute(f"select from control.{table} for update")
        reserved = Decimal(1) if limited else None
        asked = [
            asyncio.create_task(store.acquire(group, owner, [(demand(group, reserved_usd=reserved), 0.0)]))
            for store, group in zip(stores, GROUPS, strict=True)
        ]
        waiting = (
            "select count(*) from pg_stat_activity where application_name = 'tollbridge admission'"
            " and wait_event_type = 'Lock' and datname = current_database()"
        )
        async with asyncio.timeout(30):
            while await watcher.fetchval(waiting) < len(GROUPS):  # noqa: ASYNC110  the server has nothing to wait on
                await asyncio.sleep(0.01)
        await holding.commit()
        answers = sorted([row.answer for [row] in await asyncio.gather(*asked)])
        assert answers == ["budget_reserved", "granted"]


async def test_a_session_belongs_to_its_key(database_url: str):
    async with AsyncExitStack() as stack:
        [store, _], owner = await opened(stack, database_url)
        connection = await asyncpg.connect(database_url)
        stack.push_async_callback(connection.close)
        other = new_id()
        for key_id in (KEY, other):
            await connection.execute(SAID[0], key_id)
        for key_id, answer in ((KEY, "granted"), (other, "granted"), (KEY, "budget_reserved")):
            [row] = await store.acquire(GROUPS[0], owner, [(demand(GROUPS[0], key_id), 0.0)])
            assert row.answer == answer
