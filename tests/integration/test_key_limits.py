"""Limits of keys on the line: what is reserved before each dispatch, over real sockets and a real database."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any, NamedTuple

import asyncpg
import msgspec
import pytest

from admission.ids import new_id
from admission.lease import Class, Demand
from admission.settings import AdmissionSettings, GroupSettings
from admission.store import Store
from gateway import database
from gateway.call import Call
from gateway.errors import AdmissionRefused, AttemptedError, Code, InvalidRequest, NoRoute
from gateway.keys.store import KeyStore
from tests.fakes.simulated import SimulatedProvider, simulated
from tests.fakes.whole_line import CALLER, KEY, Heard, WholeLine, call, read, whole_line

#: What the call of these tests may cost at most: 200 tokens, that is what it asks for.
PRICE = 'price = { input = "0", output = "1000" }'
BOUND = Decimal("0.2")


class World(NamedTuple):
    url: str
    line: WholeLine
    first: SimulatedProvider
    second: SimulatedProvider

    async def limit(self, **limits: Any) -> None:
        """What a key's change does."""
        text = msgspec.json.encode({name: str(limit) for name, limit in limits.items()}).decode()
        await self.line.rows("select control.limit_key_v1($1, $2::text::jsonb)", KEY, text)

    async def asked(self, model: str, **options: Any) -> str:
        """How the call ends: "complete", or with which code."""
        try:
            completion = await self.line.pipeline.complete(of_a_limited_key(model, **options), Heard())
        except (AdmissionRefused, NoRoute) as error:
            return error.code.value
        return completion.outcome.ended

    async def streamed(self, model: str) -> str:
        async with self.line.pipeline.stream(of_a_limited_key(model), Heard()) as items:
            _, ended = await read(items)
        assert ended is not None
        return ended.outcome.ended


def of_a_limited_key(model: str, *, budgeted: bool = True, **options: Any) -> Call:
    caller = msgspec.structs.replace(CALLER, limited=True, budgeted=budgeted)
    return msgspec.structs.replace(call(model, **options), caller=caller)


@pytest.fixture
async def world(database_url: str, tmp_path: Path) -> AsyncIterator[World]:
    async with AsyncExitStack() as stack:
        first = await stack.enter_async_context(simulated())
        second = await stack.enter_async_context(simulated())
        line = await stack.enter_async_context(
            whole_line(
                database_url,
                tmp_path,
                f"""
                [providers.first]
                protocol = "chat_completions"
                base_url = "{first.url}"
                first_byte_s = 0.3
                gap_s = 0.3
                isolation_s = 0.5
                execution_limit_s = 60
                queue_timeout_s = 2000
                [providers.second]
                protocol = "chat_completions"
                base_url = "{second.url}"
                [models.m]
                providers = [{{ provider = "first", model = "sim-fast" }}]
                fallback = [{{ provider = "second", model = "sim-small" }}]
                {PRICE}
                [models.cheap_first]
                providers = [{{ provider = "first", model = "sim-cheap", price = {{ input = "0", output = "10" }} }}]
                fallback = [{{ provider = "second", model = "sim-dear", price = {{ input = "0", output = "1000" }} }}]
                [models.only]
                providers = [{{ provider = "second", model = "sim-fast" }}]
                {PRICE}
                [models.unpriced]
                providers = [{{ provider = "first", model = "sim-other" }}]
                fallback = [{{ provider = "second", model = "sim-fast", price = {{ input = "0", output = "1000" }} }}]
                [models.nobodys]
                providers = [{{ provider = "first", model = "sim-other" }}]
                [groups."{"/".join(second.url.split("/")[:3])}"]
                concurrency = 60
                [groups."{"/".join(first.url.split("/")[:3])}"]
                first_cooldown_s = 1000
                longest_cooldown_s = 1000
                [routing]
                backoff_s = [0.05, 0.1, 0.2]
                """,
            )
        )
        yield World(database_url, line, first, second)


async def test_of_fifty_calls_at_once_with_money_for_three_three_reach_the_provider(world: World):
    await world.limit(budget_total_usd=3 * BOUND)
    await world.second.set_faults(latency=1.0)
    ended = await asyncio.gather(*(world.asked("only") for _ in range(50)))
    assert ended.count("complete") == 3
    assert {*ended} <= {"complete", "budget_reserved", "budget_exceeded"}
    assert (await world.second.ledger())["dispatches"] == 3
    await world.line.audit()
    [[reserved]] = await world.line.rows("select count(*) from control.ticket")
    assert reserved == 0


async def test_a_failover_is_held_against_the_budget_like_any_attempt(world: World):
    """The first attempt was sent and its end is not known: its bound is kept, and nothing is left for another."""
    await world.limit(budget_day_usd=BOUND)
    await world.first.set_faults(hang="before_first_byte")
    with pytest.raises(AdmissionRefused) as refused:
        await world.streamed("m")
    error = refused.value
    assert error.code is Code.BUDGET_EXCEEDED
    assert error.dispatched
    assert error.retry_after_s is not None
    assert error.retry_after_s <= 25 * 3600
    assert error.outcome is not None
    assert [attempt.status for attempt in error.outcome.attempts] == ["timeout"]
    for said in ("budget_day_usd is 0.2", "0.2 for attempts whose cost is not known", "midnight", "first/sim-fast"):
        assert said in error.message
    assert (await world.second.ledger())["dispatches"] == 0
    # With money for two, it is sent again.
    await world.limit(budget_day_usd=3 * BOUND)
    assert await world.streamed("m") == "complete"
    assert (await world.second.ledger())["dispatches"] == 1


async def refused(world: World, model: str) -> AttemptedError:
    with pytest.raises(AttemptedError) as error:
        async with asyncio.timeout(120):
            await world.streamed(model)
    return error.value


async def test_where_only_a_route_that_is_too_dear_is_up_no_cooldown_is_waited_for(world: World):
    # The first is tried again while nothing holds it back: it is cheap enough. That the other is not is told.
    await world.first.set_faults(status=503)
    await world.limit(budget_total_usd=BOUND / 2)
    error = await refused(world, "cheap_first")
    assert error.code is Code.ALL_ROUTES_FAILED
    assert error.message.count("first/sim-cheap: 503") == 4
    assert "; not tried: second/sim-dear: the total budget of this API key does not suffice" in error.message
    # Its breaker opens, for longer than this test may take.
    error = await refused(world, "cheap_first")
    assert error.message.count("first/sim-cheap: 503") == 1
    assert (error.code, error.dispatched) == (Code.ALL_ROUTES_FAILED, True)
    assert (error.retry_after_s or 0) > 600
    # It is worth while to come back when it is over.
    error = await refused(world, "cheap_first")
    assert (error.code, error.dispatched) == (Code.COOLDOWN, False)
    assert (error.retry_after_s or 0) > 600
    assert "; not tried: second/sim-dear: the total budget of this API key does not suffice" in error.message
    # Now it is not: neither could be paid for.
    await world.limit(budget_total_usd=BOUND / 1000)
    error = await refused(world, "cheap_first")
    assert (error.code, error.retry_after_s, error.dispatched) == (Code.BUDGET_EXCEEDED, None, False)
    error = await refused(world, "m")
    assert error.code is Code.BUDGET_EXCEEDED
    # What is reserved comes free before that.
    await world.limit(budget_total_usd=BOUND)
    await world.second.set_faults(latency=600)
    waits = Heard()
    work = asyncio.create_task(world.line.pipeline.complete(of_a_limited_key("only"), waits))
    await waits.has_started.wait()
    error = await refused(world, "m")
    assert (error.code, error.dispatched) == (Code.BUDGET_RESERVED, False)
    assert (error.retry_after_s or 601) < 600
    work.cancel()
    await asyncio.wait((work,))
    assert (await world.second.ledger())["dispatches"] == 1


async def test_a_key_with_a_budget_is_served_only_what_has_a_bound(world: World):
    await world.limit(budget_day_usd=BOUND)
    completion = await world.line.pipeline.complete(of_a_limited_key("unpriced", explain=True), Heard())
    assert [(out.provider, out.reason) for out in completion.outcome.left_out] == [
        ("first", "cost_not_bounded: no price is known")
    ]
    with pytest.raises(NoRoute, match=r"cost_not_bounded: no price is known\)?"):
        await world.line.pipeline.complete(of_a_limited_key("nobodys"), Heard())
    # With limits of other kinds nobody asks for a price.
    await world.limit(concurrency=1)
    completion = await world.line.pipeline.complete(of_a_limited_key("nobodys", budgeted=False), Heard())
    assert completion.outcome.cost.state == "unknown"


async def test_a_budget_of_nothing_serves_what_costs_nothing_and_a_changed_one_holds_at_once(world: World):
    await world.limit(budget_total_usd=0)
    with pytest.raises(AdmissionRefused, match="does not start anew") as refused:
        await world.line.pipeline.complete(of_a_limited_key("only"), Heard())
    assert (refused.value.code, refused.value.retry_after_s) == (Code.BUDGET_EXCEEDED, None)
    assert refused.value.dispatched is False
    await world.limit(budget_total_usd=BOUND)
    assert await world.asked("only") == "complete"
    [[spent]] = await world.line.rows("select sum(charged_usd) from control.counter where kind = 'key'")
    await world.limit(budget_total_usd=spent)
    assert await world.asked("only") == "budget_exceeded"
    await world.limit()
    assert await world.asked("only") == "complete"


async def test_a_request_over_a_limit_is_refused_at_once_and_says_which(world: World):
    await world.limit(concurrency=1)
    await world.second.set_faults(latency=60.0)
    running = asyncio.create_task(world.line.pipeline.complete(of_a_limited_key("only"), Heard()))
    await world.second.until(lambda ledger: ledger["active"] == 1)
    with pytest.raises(AdmissionRefused, match="concurrency: 1") as refused:
        await world.line.pipeline.complete(of_a_limited_key("m"), Heard())
    assert (refused.value.code, refused.value.retry_after_s) == (Code.KEY_LIMIT, 1.0)
    assert refused.value.groups == ()
    running.cancel()
    await asyncio.wait([running])
    await world.limit(requests_per_minute=1)
    await world.second.set_faults()
    assert await world.asked("only") == "complete"
    with pytest.raises(AdmissionRefused, match="requests_per_minute: 1") as refused:
        await world.line.pipeline.complete(of_a_limited_key("only"), Heard())
    assert refused.value.retry_after_s is not None
    assert 0 < refused.value.retry_after_s <= 60


# ------------------------------------------------------------------ the lock

GROUPS = ("http://a.test:80", "http://b.test:80")
SETTINGS = AdmissionSettings(groups={group: GroupSettings() for group in GROUPS}, statement_s=60)


async def test_what_is_left_of_a_minute_is_told_less_what_is_at_work(database_url: str):
    """The buckets fill so slowly here that no machine is slow enough to see it."""
    async with AsyncExitStack() as stack:
        store = Store(database_url, SETTINGS)
        stack.push_async_callback(store.close)
        await store.configure()
        owner = new_id()
        await store.renew(owner, new_id(), first=True)
        pool = await stack.enter_async_context(database.open_pool(database_url, name="tollbridge test", size=1))
        keys = KeyStore(pool, most=10)

        async def left() -> tuple[int | None, int | None]:
            used = await keys.used(KEY, "UTC")
            return used.requests_left, used.tokens_left

        await pool.execute("select control.limit_key_v1($1, '{\"requests_per_minute\": 3}')", KEY)
        assert await left() == (3, None)
        await pool.execute(
            'select control.limit_key_v1($1, \'{"requests_per_minute": 3, "tokens_per_minute": 100000000}\')', KEY
        )
        assert await left() == (3, 100000000)
        asked = msgspec.structs.replace(demand(GROUPS[0]), tokens=60000000)
        [row] = await store.acquire(GROUPS[0], owner, [(asked, 0.0)])
        assert row.answer == "granted"
        # It may have filled up meanwhile, but never by what is at work.
        requests, tokens = await left()
        assert requests in {2, 3}
        assert tokens == 40000000
        await pool.execute("update control.ticket set tokens = 200000000")
        assert (await left())[1] == 0


async def test_what_no_route_can_be_told_takes_no_slot_and_no_rate_and_waits_for_nothing(world: World):
    await world.limit(requests_per_minute=6)
    await world.first.set_faults(status=503)
    for _ in range(5):
        assert await world.asked("m", budgeted=False) == "complete"
    # The breaker of the first is open, for longer than this test may take. Chat Completions counts no tokens.
    before = await world.line.rows("select * from control.invocation")
    for model in ("m", "only", "nobodys") * 2:
        with pytest.raises(InvalidRequest) as told:
            async with asyncio.timeout(120):
                await world.line.pipeline.count(of_a_limited_key(model, budgeted=False))
        assert (told.value.code, told.value.param) == (Code.UNSUPPORTED_FIELD, "model")
    assert await world.line.rows("select * from control.invocation") == before
    assert await world.asked("only", budgeted=False) == "complete"


async def test_two_groups_cannot_pass_one_budget_together(database_url: str):
    """Both wait for the key's row. The second looks at what it has used after the first has had it."""
    async with AsyncExitStack() as stack:
        stores = [Store(database_url, SETTINGS) for _ in GROUPS]
        for store in stores:
            stack.push_async_callback(store.close)
            await store.configure()
        owner = new_id()
        await stores[0].renew(owner, new_id(), first=True)
        holder, watcher = [await asyncpg.connect(database_url) for _ in range(2)]
        stack.push_async_callback(holder.close)
        stack.push_async_callback(watcher.close)
        await holder.execute('select control.limit_key_v1($1, \'{"budget_total_usd": "1"}\')', KEY)
        holding = holder.transaction()
        await holding.start()
        await holder.execute("select from control.key_limit for update")
        asked = [
            asyncio.create_task(store.acquire(group, owner, [(demand(group), 0.0)]))
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


def demand(group: str) -> Demand:
    return Demand(
        ticket_id=new_id(),
        group=group,
        model="m",
        klass=Class.INTERACTIVE,
        key_id=KEY,
        debit_id=new_id().hex,
        attempt=1,
        execution_limit_s=30,
        isolation_s=5,
        queue_timeout_s=30,
        reserved_usd=Decimal(1),
        intent=b'{"upper_bound_usd":"1"}',
    )


# ------------------------------------------------------------------ days and months

SPENT = """
insert into control.counter (kind, name, shard, charged_usd, unknown_upper_bound_usd)
select 'key_day', $1::uuid || '/' || d.day, shard, d.usd, d.usd / 2
  from (values ('2026-11-01'::date, 1::numeric), ('2026-11-30', 2), ('2026-12-01', 4), ('2026-10-31', 8)) d (day, usd),
       generate_series(0, 1) shard
"""
HELD = """
select verdict, key_limit::jsonb ->> 'name' as name, wait_ms
  from control.hold_to_limits_v2(array[$1::uuid], '{d}', '{1}', '{0}', array[0.5], '{}', '{}', '{new}', 'Europe/Berlin',
                                 $2::timestamptz, '2 hours')
"""


async def test_days_and_months_begin_at_midnight_in_the_declared_zone_by_the_servers_clock(database_url: str):
    connection = await asyncpg.connect(database_url)
    try:
        await connection.execute("select control.limit_key_v1($1, '{}')", KEY)
        await connection.execute(SPENT, KEY)
        for day, of_day, of_month in ((date(2026, 11, 30), 4, 6), (date(2026, 12, 1), 8, 8), (date(2026, 11, 2), 0, 6)):
            [used] = await connection.fetch("select * from control.use_of_key_v1($1, '{}', $2)", KEY, day)
            assert (used["day_spent"], used["month_spent"]) == (of_day, of_month), day
            assert (used["day_unknown"], used["month_unknown"]) == (of_day / 2, of_month / 2), day
        # The store's time is two hours before the clock by which days are told: one second to midnight, and then it is.
        almost = datetime(2026, 12, 1, 0, 59, 59, tzinfo=UTC)
        day_ms = 86_400_000
        for limits, before, after in (
            ({"budget_day_usd": "6.1"}, ("budget_day_usd", 1000), ("budget_day_usd", day_ms)),
            ({"budget_month_usd": "9.2"}, ("budget_month_usd", 1000), ("budget_month_usd", 31 * day_ms)),
            ({"budget_day_usd": "12.5"}, None, None),
            (
                {"budget_month_usd": "12.5", "budget_day_usd": "6.4"},
                ("budget_day_usd", 1000),
                ("budget_day_usd", day_ms),
            ),
        ):
            text = msgspec.json.encode(limits).decode()
            await connection.execute("select control.limit_key_v1($1, $2::text::jsonb)", KEY, text)
            for now, expected in ((almost, before), (almost + timedelta(seconds=1), after)):
                found = [tuple(row) for row in await connection.fetch(HELD, KEY, now)]
                assert found == ([] if expected is None else [("budget_exceeded", *expected)]), (limits, now)
    finally:
        await connection.close()
