"""
Rules of admission that only PostgreSQL can break: locks, snapshots, its clock, what rows keep, what statements cost.

Two connections that meet are brought to meet: one is stopped in the middle of its transaction until the other waits for
it, so each test decides an order that would otherwise come up now and then.
"""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import AsyncIterator, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import asyncpg
import msgspec
import pytest

from admission.contract import StoreUnavailable
from admission.lease import Class, Demand, Ending, Verdict
from admission.settings import AdmissionSettings, GroupSettings, ModelLimits
from admission.store import Store
from gateway.answer import Ended
from gateway.errors import AdmissionRefused, Code, GatewayError
from tests.conformance.test_admission_stores import (
    GROUP,
    KEY,
    Process,
    configured,
    ended,
    failed,
    uncertain,
    until,
    wanted,
)
from tests.fakes.simulated import simulated
from tests.fakes.whole_line import Heard, call, whole_line

T = TypeVar("T")

SECOND = timedelta(seconds=1)


class World:
    """Some processes of one store, and a connection of the test's own."""

    def __init__(self, url: str, settings: AdmissionSettings, db: asyncpg.Connection, stack: AsyncExitStack) -> None:
        self.url = url
        self.settings = settings
        self.db = db
        self._stack = stack

    async def process(self, connection: asyncpg.Connection | None = None) -> Process:
        """Another process. With a connection: what it asks goes through that one, and into its transaction."""
        store = Store(self.url, self.settings)
        self._stack.push_async_callback(store.close)
        if connection is not None:
            store._idle.put_nowait(connection)
        process = Process(store)
        await store.configure()
        await store.renew(process.owner, process.process, first=True)
        return process

    async def ticket(self, ticket_id: uuid.UUID | None) -> asyncpg.Record:
        found = await self.db.fetchrow("select * from control.ticket where ticket_id = $1", ticket_id)
        assert found is not None
        return found

    async def holds(self, ticket_id: uuid.UUID | None) -> bool:
        return await self.db.fetchrow("select from control.ticket where ticket_id = $1", ticket_id) is not None

    async def group(self) -> asyncpg.Record:
        found = await self.db.fetchrow("select *, xmin::text from control.capacity_group where group_id = $1", GROUP)
        assert found is not None
        return found

    async def now(self) -> Any:
        return await self.db.fetchval("select clock_timestamp()")

    async def blocked(self) -> bool:
        """Somebody waits for a lock."""
        found: bool = await self.db.fetchval(
            "select exists (select from pg_stat_activity"
            " where datname = current_database() and state = 'active' and wait_event_type = 'Lock')"
        )
        return found

    async def lapse(self, process: Process) -> None:
        await self.db.execute(
            "update control.owner set expires_at = clock_timestamp() where owner_id = $1", process.owner
        )


@asynccontextmanager
async def world(url: str, *, settings: dict[str, Any] | None = None, **limits: Any) -> AsyncIterator[World]:
    given = configured(settings={"statement_s": 2.0, **(settings or {})}, **limits)
    async with AsyncExitStack() as stack:
        db = await asyncpg.connect(url)
        stack.push_async_callback(db.close)
        yield World(url, given, db, stack)


async def met(world: World, asking: asyncio.Task[Any]) -> None:
    """Until it waits for a lock, or is through, which the test then finds wrong."""

    async def so() -> bool:
        return asking.done() or await world.blocked()

    await until(so)


# ---------------------------------------------------------------- slots


async def test_batch_that_is_granted_as_it_comes_has_had_its_turn(database_url):
    async with world(database_url, concurrency=3) as w:
        one = await w.process()
        await w.db.execute("update control.capacity_group set batch_credit = 5")
        await one.granted(wanted(klass=Class.BATCH))
        assert (await w.group())["batch_credit"] == 0


async def test_who_asks_while_another_is_granted_the_last_slot_waits_to_see_it(database_url):
    async with world(database_url, concurrency=1) as w:
        other = await w.process()
        inside = await asyncpg.connect(database_url)
        first = await w.process(inside)
        transaction = inside.transaction()
        await transaction.start()
        assert await first.answer(wanted()) == "granted"
        asking = asyncio.create_task(other.answer(wanted()))
        await met(w, asking)
        await transaction.commit()
        assert await asking == "queued"
        await inside.close()


async def test_a_grant_that_nobody_has_confirmed_yet_occupies_its_slot(database_url):
    async with world(database_url, concurrency=1) as w:
        one, two = await w.process(), await w.process()
        held = await one.granted()
        waiting = wanted()
        await two.ask(waiting)
        await one.settle(ended(held))
        assert (await one.advance())[waiting.ticket_id].answer == "notify"
        assert await one.answer(wanted()) == "queued"


async def test_a_quarantined_attempt_keeps_its_place_in_its_model(database_url):
    async with world(database_url, concurrency=3, models={"m": ModelLimits(concurrency=1)}) as w:
        one = await w.process()
        await one.settle(uncertain(await one.granted()))
        assert await one.answer(wanted()) == "queued"
        assert await one.answer(wanted(model="n")) == "granted"


async def test_a_lower_limit_revokes_nothing_and_grants_nothing_until_fewer_run(database_url):
    async with world(database_url, concurrency=4) as w:
        one = await w.process()
        held = [await one.granted() for _ in range(4)]
        one.store._settings = configured(concurrency=2)  # type: ignore[attr-defined]
        await one.store.configure()
        assert (await w.group())["concurrency"] == 2
        waiting = wanted()
        assert await one.answer(waiting) == "queued"
        for row in held[:2]:
            assert await one.settle(ended(row)) == [True]
            assert waiting.ticket_id not in await one.advance()
        assert {row["state"] for row in await w.db.fetch("select state from control.ticket")} == {"active", "queued"}
        await one.settle(ended(held[2]))
        assert (await one.advance())[waiting.ticket_id].answer == "granted"


# ---------------------------------------------------------------- order and queue


async def test_a_waiter_whose_process_is_not_heard_of_is_passed_over(database_url):
    async with world(database_url, concurrency=1) as w:
        one, two = await w.process(), await w.process()
        held = await two.granted()
        dead, alive = wanted(), wanted()
        await one.ask(dead)
        await two.ask(alive)
        await w.lapse(one)
        await two.settle(ended(held))
        rows = await two.advance()
        assert rows[alive.ticket_id].answer == "granted"
        assert dead.ticket_id not in rows


async def test_a_retry_that_keeps_its_place_goes_before_who_came_later(database_url):
    async with world(database_url, concurrency=1) as w:
        one = await w.process()
        held = await one.granted()
        first, later = wanted(), wanted()
        await one.ask(first)
        await one.ask(later)
        place = (await one.found(first))[first.ticket_id].number
        await one.store.abandon(0, [first.ticket_id], tombstone=False)
        again = wanted(place=place)
        assert await one.answer(again) == "queued"
        await one.settle(ended(held))
        assert (await one.advance())[again.ticket_id].answer == "granted"


async def test_who_claims_a_place_that_was_never_given_keeps_the_order_of_arrival(database_url):
    async with world(database_url, concurrency=1) as w:
        one = await w.process()
        held = await one.granted()
        claimed, later = wanted(place=99), wanted()
        await one.ask(claimed)
        await one.ask(later)
        await one.settle(ended(held))
        assert (await one.advance())[claimed.ticket_id].answer == "granted"


async def test_an_overflow_writes_nothing_at_all(database_url):
    async with world(database_url, concurrency=1, queue=1) as w:
        one = await w.process()
        await one.granted()
        await one.ask(wanted())
        before = await w.group()
        assert await one.answer(wanted()) == "queue_full"
        assert await w.group() == before
        assert await w.db.fetchval("select count(*) from control.ticket") == 2
        assert await w.db.fetchval("select count(*) from control.attempt") == 0


async def test_who_waits_is_told_by_how_long_calls_held_their_slots_and_who_is_turned_away_by_the_first(database_url):
    async with world(database_url, concurrency=2, queue=5) as w:
        one = await w.process()
        running = [await one.granted(), await one.granted()]
        waiting = [wanted() for _ in range(5)]
        await one.ask(*waiting)
        over = wanted()
        assert (await one.ask(over))[over.ticket_id].expected_ms is None
        await w.db.execute("update control.pace set held = 40, ended = 4")
        told = await one.found(*waiting)
        waits = [told[demand.ticket_id].expected_ms for demand in waiting]
        # Two at a time, ten seconds each; the two that run have begun just now.
        for wait, expected in zip(waits, (10, 10, 20, 20, 30), strict=True):
            assert wait is not None
            assert expected - 5 < wait / 1000 <= expected
        wait = (await one.ask(over))[over.ticket_id].expected_ms
        assert wait is not None
        assert 5 < wait / 1000 <= 10
        # One that ends while others wait is taken note of, in place of a fourth of what was known.
        await one.settle(ended(running[0]), judged=False)
        held = await w.db.fetchval("select held from control.pace where ended = 4")
        assert 30 <= held < 40
        await one.settle(ended(running[1]), judged=True)
        assert 22.5 <= await w.db.fetchval("select held from control.pace where ended = 4") < held


async def test_who_waits_beside_a_slot_in_quarantine_is_told_of_the_other_slots_and_batch_of_those_it_may_have(
    database_url,
):
    async with world(database_url, concurrency=3) as w:
        one = await w.process()
        lost = await one.granted()
        await one.settle(ended(lost, Ending.UNCERTAIN), judged=False)
        for _ in range(2):
            await one.granted()
        await w.db.execute("update control.pace set held = 600, ended = 6")
        until = "update control.ticket set quarantined_until = control.now_v1() + interval '1 h'"
        await w.db.execute(f"{until} where state = 'quarantined'")
        interactive, batch = [wanted() for _ in range(6)], [wanted(klass=Class.BATCH) for _ in range(3)]
        await one.ask(*interactive, *batch)
        told = await one.found(*interactive, *batch)
        waits = [told[demand.ticket_id].expected_ms for demand in (*interactive, *batch)]
        # Two at a time, a hundred seconds each: the third slot serves nobody for an hour.
        for wait, expected in zip(waits, (100, 100, 200, 200, 300, 300, 400, 400, 500), strict=True):
            assert wait is not None
            assert expected - 50 < wait / 1000 <= expected, waits
        # Batch has two slots of the three: of those it holds one more has to end than it may have.
        await w.db.execute("delete from control.ticket where state = 'queued' and class = 0")
        await w.db.execute("update control.ticket set class = 1 where state in ('active', 'quarantined')")
        told = await one.found(*batch)
        waits = [told[demand.ticket_id].expected_ms for demand in batch]
        for wait, expected in zip(waits, (100, 200, 300), strict=True):
            assert wait is not None
            assert expected - 50 < wait / 1000 <= expected, waits


async def test_an_end_waits_for_nobody_who_takes_note_of_another(database_url):
    async with world(database_url, concurrency=1) as w:
        one = await w.process()
        running = await one.granted()
        await one.ask(wanted())
        other = await asyncpg.connect(database_url)
        async with other.transaction():
            await other.execute("select from control.pace for update")
            assert await one.settle(ended(running), judged=False) == [True]
        await other.close()
        assert await w.db.fetchval("select ended from control.pace") == 0


async def test_waiters_beyond_the_first_thousand_of_a_queue_are_let_go_by_their_owner(database_url):
    async with world(database_url, concurrency=1, queue=50_000) as w:
        one = await w.process()
        await one.granted()
        await w.db.execute(
            "insert into control.ticket (ticket_id, group_id, endpoint, number, class, model, credential, owner_id,"
            " key_id, debit_id, attempt, tokens, state, waits_for_cooldown, execution_limit, isolation, queued_at,"
            " queue_deadline, intent) select gen_random_uuid(), $1, $1, n, 0, 'm', 'c', $2, $3, 'd' || n, 1, 0,"
            " 'queued', false, '30 s', '5 s', clock_timestamp(), clock_timestamp() + interval '1 hour', '{}'"
            " from generate_series(1, 1000) n",
            GROUP,
            one.owner,
            KEY,
        )
        await w.db.execute("update control.capacity_group set next_number = 1001")
        leaves, patient = wanted(), wanted(waits_for_cooldown=True)
        await one.ask(leaves, patient)
        await w.db.execute("select control.open_breaker_v2($1, control.now_v1())", GROUP)
        assert await w.db.fetchval("select count(*) from control.ticket where state = 'queued'") == 2
        found = await one.found(leaves, patient)
        assert (found[leaves.ticket_id].answer, found[leaves.ticket_id].wait_reason) == ("cooldown", "cooldown")
        assert found[patient.ticket_id].answer == "queued"
        assert not await w.holds(leaves.ticket_id)


async def test_what_a_grant_costs_does_not_depend_on_how_many_wait(database_url):
    async with world(database_url, concurrency=1, queue=50_000) as w:
        one = await w.process()

        async def cost(waiters: int) -> int:
            held = await one.granted()
            await w.db.execute(
                "insert into control.ticket (ticket_id, group_id, endpoint, number, class, model, credential, owner_id,"
                " key_id, debit_id, attempt, tokens, state, waits_for_cooldown, execution_limit, isolation, queued_at,"
                " queue_deadline, intent) select gen_random_uuid(), $1, $1, n, 0, 'm', 'c', $2, $3, 'd' || n, 1, 0,"
                " 'queued', false, '30 s', '5 s', clock_timestamp(), clock_timestamp() + interval '1 hour', '{}'"
                " from generate_series(1, $4::integer) n",
                GROUP,
                one.owner,
                KEY,
                waiters,
            )
            await w.db.execute("analyze control.ticket")
            await one.settle(ended(held))
            none = ", ".join(["'{}'"] * 19 + ["null"] * 4)
            async with w.db.transaction():
                # As the store's connections are set.
                for setting in ("enable_seqscan = off", "plan_cache_mode = force_generic_plan", "jit = off"):
                    await w.db.execute(f"set local {setting}")
                asked = f"select * from control.acquire_v2('{GROUP}', '{one.owner}', 2000, 600000, 'UTC', {none})"
                # Once for the plans, and not to be: else there would be nothing left to grant.
                planned = w.db.transaction()
                await planned.start()
                await w.db.fetch(asked)
                await planned.rollback()
                told = await w.db.fetchval(f"explain (analyze, buffers, format json) {asked}")
            read = json.loads(told)[0]["Plan"]
            assert await w.db.fetchval("select count(*) from control.ticket where state = 'active'") == 1
            await w.db.execute("delete from control.ticket")
            await w.db.execute("vacuum control.ticket")
            return int(read["Shared Hit Blocks"]) + int(read["Shared Read Blocks"])

        few, many = await cost(50), await cost(5_000)
        assert many < 3 * few, (few, many)


@pytest.mark.parametrize(
    "opens",
    [
        "control.raise_floor_v1($1, 'c', 'm', 'rate_limit', interval '5 s', control.now_v1())",
        "control.raise_floor_v1($1, 'c', '', 'rate_limit', interval '5 s', control.now_v1())",
        "control.open_breaker_v2($1, control.now_v1())",
    ],
    ids=["a floor", "a floor of all models", "the breaker"],
)
async def test_what_a_lock_is_held_for_by_what_lets_waiters_go_does_not_depend_on_how_many_wait(database_url, opens):
    async with world(database_url, concurrency=1, queue=50_000) as w:
        one = await w.process()

        async def cost(waiters: int) -> int:
            await w.db.execute(
                "insert into control.ticket (ticket_id, group_id, endpoint, number, class, model, credential, owner_id,"
                " key_id, debit_id, attempt, tokens, state, waits_for_cooldown, execution_limit, isolation, queued_at,"
                " queue_deadline, intent) select gen_random_uuid(), $1, $1, n, 0, 'm', 'c', $2, $3, 'd' || n, 1, 0,"
                " 'queued', n <> 7, '30 s', '5 s', clock_timestamp(), clock_timestamp() + interval '1 hour', '{}'"
                " from generate_series(1, $4::integer) n",
                GROUP,
                one.owner,
                KEY,
                waiters,
            )
            await w.db.execute("analyze control.ticket")
            statement = "select " + opens.replace("$1", f"'{GROUP}'")
            async with w.db.transaction():
                for setting in ("enable_seqscan = off", "plan_cache_mode = force_generic_plan", "jit = off"):
                    await w.db.execute(f"set local {setting}")
                planned = w.db.transaction()
                await planned.start()
                await w.db.execute(statement)
                # Who does not wait for it, and nobody else.
                assert await w.db.fetchval("select count(*) from control.ticket") == waiters - 1
                await planned.rollback()
                told = await w.db.fetchval(f"explain (analyze, buffers, format json) {statement}")
            read = json.loads(told)[0]["Plan"]
            await w.db.execute("delete from control.ticket")
            await w.db.execute("vacuum control.ticket")
            return int(read["Shared Hit Blocks"]) + int(read["Shared Read Blocks"])

        few, many = await cost(1_000), await cost(20_000)
        assert many < 3 * few, (few, many)


# ---------------------------------------------------------------- who may ask


async def test_a_tombstone_stops_a_late_acquire_where_slots_are_free(database_url):
    async with world(database_url) as w:
        one = await w.process()
        never = wanted()
        await one.store.abandon(0, [never.ticket_id], tombstone=True)
        assert await one.answer(never) == "ended"
        assert not await w.holds(never.ticket_id)


async def test_a_tombstone_stops_an_acquire_that_is_just_under_way(database_url):
    async with world(database_url) as w:
        other = await w.process()
        inside = await asyncpg.connect(database_url)
        first = await w.process(inside)
        transaction = inside.transaction()
        await transaction.start()
        late = wanted()
        # Its answer is lost, and it is still at work when whoever asked gives it up.
        assert await first.answer(late) == "granted"
        giving_up = asyncio.create_task(other.store.abandon(0, [late.ticket_id], tombstone=True))
        await met(w, giving_up)
        await transaction.commit()
        await giving_up
        assert not await w.holds(late.ticket_id)
        assert await other.answer(late) == "ended"
        await inside.close()


async def test_a_replay_where_slots_are_free_is_told_of_its_first_grant(database_url):
    async with world(database_url) as w:
        one = await w.process()
        demand = wanted()
        first = (await one.ask(demand))[demand.ticket_id]
        deadline = (await w.ticket(demand.ticket_id))["hard_deadline"]
        again = (await one.ask(demand))[demand.ticket_id]
        assert (again.answer, again.granted_at, again.number) == ("granted", first.granted_at, first.number)
        assert (await w.ticket(demand.ticket_id))["hard_deadline"] == deadline
        assert again.remaining_ms is not None
        assert first.remaining_ms is not None
        assert again.remaining_ms <= first.remaining_ms


async def test_an_attempt_before_one_that_has_ended_is_a_duplicate(database_url):
    async with world(database_url) as w:
        one = await w.process()
        await one.settle(ended(await one.granted(wanted(debit_id="d", attempt=2))))
        assert await one.answer(wanted(debit_id="d", attempt=1)) == "duplicate_debit"
        await one.granted(wanted(debit_id="d", attempt=3))


async def test_a_debit_that_gets_a_ticket_in_two_groups_at_once_gets_one(database_url):
    groups = {GROUP: GroupSettings(), "other": GroupSettings()}
    async with world(database_url) as w:
        w.settings = msgspec.structs.replace(w.settings, groups=groups)
        other = await w.process()
        inside = await asyncpg.connect(database_url)
        first = await w.process(inside)
        transaction = inside.transaction()
        await transaction.start()
        assert await first.answer(wanted(debit_id="d")) == "granted"
        late = wanted(debit_id="d", group="other", attempt=2)
        asking = asyncio.create_task(other.ask(late, group="other"))
        await met(w, asking)
        await transaction.commit()
        assert (await asking)[late.ticket_id].answer == "duplicate_debit"
        await inside.close()


@pytest.mark.parametrize("end", [ended, uncertain])
@pytest.mark.parametrize("replayed", [False, True])
async def test_who_asks_again_while_an_attempt_is_being_settled_gets_no_second_lease(database_url, end, replayed):
    async with world(database_url) as w:
        inside = await asyncpg.connect(database_url)
        first = await w.process(inside)
        other = first if replayed else await w.process()
        held = wanted(debit_id="d")
        row = await first.granted(held)
        transaction = inside.transaction()
        await transaction.start()
        assert await first.settle(end(row), judged=False) == [True]
        # The row that stands in its way is going: whoever waits for that finds its place free.
        again = held if replayed else wanted(debit_id="d")
        other.store._idle.put_nowait(None)  # type: ignore[attr-defined]  # not the one in the transaction
        asking = asyncio.create_task(other.answer(again))
        await met(w, asking)
        await transaction.commit()
        # A replay may still be told of its first grant; there is none beside it.
        assert await asking in (("granted", "ended") if replayed else ("duplicate_debit",))
        left = await w.db.fetch("select ticket_id, state from control.ticket")
        assert [tuple(found) for found in left] == ([(held.ticket_id, "quarantined")] if end is uncertain else [])
        await inside.close()


# ---------------------------------------------------------------- transitions


async def test_locks_of_several_groups_are_taken_in_one_order(database_url):
    groups = {"a": GroupSettings(), "b": GroupSettings()}
    async with world(database_url) as w:
        w.settings = msgspec.structs.replace(w.settings, groups=groups)
        one = await w.process()
        rows = []
        for group in ("b", "a"):
            demand = wanted(group=group)
            rows.append((await one.ask(demand, group=group))[demand.ticket_id])
        inside = await asyncpg.connect(database_url)
        transaction = inside.transaction()
        await transaction.start()
        await inside.execute("select from control.capacity_group where group_id = 'b' for update")
        settling = asyncio.create_task(one.settle(*(ended(row) for row in rows)))
        await met(w, settling)
        # It waits for the second with the first in its hands.
        with pytest.raises(asyncpg.LockNotAvailableError):
            await w.db.execute("select from control.capacity_group where group_id = 'a' for update nowait")
        await transaction.commit()
        assert await settling == [True, True]
        await inside.close()


@pytest.mark.parametrize("judged", [False, True])
async def test_a_ticket_that_waits_cannot_be_settled(database_url, judged):
    async with world(database_url, concurrency=1) as w:
        one = await w.process()
        held = await one.granted()
        waiting = wanted()
        await one.ask(waiting)
        row = msgspec.structs.replace(held, ticket_id=waiting.ticket_id)
        for settlement in (ended(row), uncertain(row)):
            assert await one.settle(settlement, judged=judged) == [False]
        assert (await w.ticket(waiting.ticket_id))["state"] == "queued"


async def test_an_expired_grant_is_not_confirmed_however_long_its_owner_waited_for_the_row(database_url):
    async with world(database_url, concurrency=1, settings={"unconfirmed_grant_s": 0.2}) as w:
        one, two = await w.process(), await w.process()
        held = await one.granted()
        waiting = wanted()
        await two.ask(waiting)
        await one.settle(ended(held))
        inside = await asyncpg.connect(database_url)
        await one.advance()
        transaction = inside.transaction()
        await transaction.start()
        await inside.execute("select from control.ticket where ticket_id = $1 for update", waiting.ticket_id)
        confirming = asyncio.create_task(two.found(waiting))
        await met(w, confirming)

        async def expired() -> bool:
            return bool((await w.ticket(waiting.ticket_id))["grant_expires_at"] < await w.now())

        await until(expired)
        await transaction.commit()
        assert (await confirming)[waiting.ticket_id].answer == "queued"
        assert (await w.ticket(waiting.ticket_id))["state"] == "granted"
        await inside.close()


async def unconfirmed(w: World, **facts: Any) -> tuple[Process, Process, Demand, Any]:
    """A grant of one process to another, and an attempt of the first that still runs."""
    one, two = await w.process(), await w.process()
    held, running = await one.granted(), await one.granted(wanted(**facts))
    waiting = wanted(waits_for_cooldown=True)
    await two.ask(waiting)
    await one.settle(ended(held))
    assert (await one.advance())[waiting.ticket_id].answer == "notify"
    return one, two, waiting, running


async def test_a_grant_from_before_its_breaker_opened_is_not_confirmed(database_url):
    async with world(database_url, concurrency=2, failure_threshold=1) as w:
        one, two, waiting, running = await unconfirmed(w)
        await one.settle(failed(running))
        assert (await two.found(waiting))[waiting.ticket_id].answer == "queued"


async def test_a_grant_under_whose_model_a_floor_was_put_is_not_confirmed(database_url):
    async with world(database_url, concurrency=2) as w:
        one, two, waiting, running = await unconfirmed(w)
        await one.settle(failed(running, Verdict.RATE_LIMITED, retry_after_s=5.0))
        assert (await two.found(waiting))[waiting.ticket_id].answer == "queued"


async def test_a_confirmed_grant_has_the_callers_deadline_too(database_url):
    async with world(database_url, concurrency=1) as w:
        one, two = await w.process(), await w.process()
        held = await one.granted()
        waiting = wanted(caller_deadline_s=3.0, isolation_s=1.0)
        await two.ask(waiting)
        await one.settle(ended(held))
        await one.advance()
        row = (await two.found(waiting))[waiting.ticket_id]
        assert row.answer == "granted"
        assert row.remaining_ms is not None
        assert row.remaining_ms <= 4_000
        # Looking again does not prolong it.
        deadline = (await w.ticket(waiting.ticket_id))["hard_deadline"]
        await two.found(waiting)
        assert (await w.ticket(waiting.ticket_id))["hard_deadline"] == deadline


# ---------------------------------------------------------------- quarantine


async def test_what_a_lapsed_process_held_is_kept_until_its_hard_deadline_plus_isolation(database_url):
    async with world(database_url, concurrency=1) as w:
        one, two = await w.process(), await w.process()
        held = await one.granted(wanted(execution_limit_s=30, isolation_s=5))
        await w.lapse(one)
        await two.advance()
        row = await w.ticket(held.ticket_id)
        assert row["state"] == "quarantined"
        assert row["quarantined_until"] == row["hard_deadline"] + 5 * SECOND


async def test_an_attempt_past_its_hard_deadline_is_quarantined_although_its_process_lives(database_url):
    async with world(database_url, concurrency=1) as w:
        one, two = await w.process(), await w.process()
        held = await one.granted(wanted(execution_limit_s=0.1, isolation_s=5, debit_id="d"))

        async def quarantined() -> bool:
            await two.advance()
            return bool((await w.ticket(held.ticket_id))["state"] == "quarantined")

        await until(quarantined)
        # Nobody has said how it ended, but its number is used up, and the next one may pass it.
        assert await w.db.fetchval("select count(*) from control.attempt") == 0
        assert await two.answer(wanted(debit_id="d")) == "duplicate_debit"
        assert await two.answer(wanted(debit_id="d", attempt=2)) == "queued"


async def test_a_slot_that_comes_free_by_time_leaves_an_attempt_of_unknown_cost(database_url):
    async with world(database_url, concurrency=1) as w:
        one = await w.process()
        intent = b'{"session_id":"s","upper_bound_usd":"1.5"}'
        held = await one.granted(wanted(execution_limit_s=0.1, isolation_s=0.1, intent=intent))

        async def free() -> bool:
            await one.advance()
            return not await w.holds(held.ticket_id)

        await until(free)
        told = await w.db.fetch("select state, usd, upper_bound_usd::text as bound from control.invocation")
        assert [(row["state"], row["usd"], float(row["bound"])) for row in told] == [("unknown", None, 1.5)]
        assert await one.settle(ended(held), judged=False) == [True]
        assert await one.settle(ended(held), judged=False) == [False]


async def test_a_cost_that_becomes_known_does_not_free_the_slot(database_url):
    async with world(database_url, concurrency=1) as w:
        one = await w.process()
        held = await one.granted()
        assert await one.settle(uncertain(held)) == [True]
        assert await one.settle(ended(held, Ending.UNCERTAIN)) == [True]
        assert (await w.ticket(held.ticket_id))["state"] == "quarantined"


async def test_who_gives_up_a_quarantined_attempt_does_not_free_its_slot(database_url):
    async with world(database_url, concurrency=1) as w:
        one = await w.process()
        held = await one.granted()
        await one.settle(uncertain(held))
        assert held.ticket_id is not None
        assert await one.store.abandon(0, [held.ticket_id], tombstone=False) == []
        assert (await w.ticket(held.ticket_id))["state"] == "quarantined"


# ---------------------------------------------------------------- breaker and floors


async def half_open(w: World, one: Process) -> None:
    """After one failure and its cooldown."""
    await one.settle(failed(await one.granted()))
    await until(lambda: w.db.fetchval("select cooldown_until < clock_timestamp() from control.capacity_group"))


async def test_of_two_that_come_together_after_the_cooldown_one_is_the_probe(database_url):
    async with world(database_url, concurrency=3, failure_threshold=1, first_cooldown_s=0.1) as w:
        one = await w.process()
        await half_open(w, one)
        demands = [wanted(waits_for_cooldown=True) for _ in range(2)]
        rows = await one.ask(*demands)
        found = [(rows[d.ticket_id].answer, rows[d.ticket_id].probe) for d in demands]
        assert found == [("granted", True), ("queued", False)]
        assert (await w.group())["probe"] == demands[0].ticket_id
        assert await one.answer(wanted()) == "cooldown"


async def test_a_probe_that_is_lost_opens_again_for_longer(database_url):
    async with world(database_url, concurrency=3, failure_threshold=1, first_cooldown_s=0.1) as w:
        one, two = await w.process(), await w.process()
        await half_open(w, one)
        assert (await one.granted()).probe
        before = await w.group()
        await w.lapse(one)
        await two.advance()
        after = await w.group()
        assert (after["breaker"], after["probe"], after["openings"]) == ("open", None, 2)
        assert after["generation"] == before["generation"] + 1


@pytest.mark.parametrize("how", ["settled", "abandoned"])
async def test_a_probe_that_was_not_sent_hands_its_place_on(database_url, how):
    async with world(database_url, concurrency=3, failure_threshold=1, first_cooldown_s=0.1) as w:
        one = await w.process()
        await half_open(w, one)
        probe = await one.granted()
        if how == "settled":
            await one.settle(ended(probe, Ending.NOT_DISPATCHED, verdict=Verdict.NONE, state="zero"))
        else:
            assert probe.ticket_id is not None
            await one.store.abandon(0, [probe.ticket_id], tombstone=False)
        assert ((await w.group())["breaker"], (await w.group())["probe"]) == ("half_open", None)
        assert (await one.granted()).probe


async def test_every_change_of_the_breaker_is_another_generation(database_url):
    async with world(database_url, concurrency=3, failure_threshold=1, first_cooldown_s=0.1) as w:
        one = await w.process()
        seen = [(await w.group())["generation"]]

        async def changed(to: str) -> None:
            group = await w.group()
            assert group["breaker"] == to
            seen.append(group["generation"])

        await half_open(w, one)
        await changed("open")
        probe = await one.granted()
        await changed("half_open")
        await one.settle(failed(probe))
        await changed("open")
        await until(lambda: w.db.fetchval("select cooldown_until < clock_timestamp() from control.capacity_group"))
        probe = await one.granted()
        await changed("half_open")
        await one.settle(ended(probe))
        await changed("closed")
        await one.store.reset(GROUP)
        await changed("closed")
        assert seen == sorted(set(seen))


async def test_a_result_of_an_older_generation_moves_nothing(database_url):
    async with world(database_url, concurrency=4, failure_threshold=1, first_cooldown_s=30.0) as w:
        one = await w.process()
        first, good, bad, late = [await one.granted() for _ in range(4)]
        await one.settle(failed(first))
        opened = await w.group()
        await one.settle(ended(good))
        await one.settle(failed(bad))
        after = await w.group()
        assert [after[name] for name in ("breaker", "generation", "openings", "cooldown_until")] == [
            opened[name] for name in ("breaker", "generation", "openings", "cooldown_until")
        ]
        await one.store.reset(GROUP)
        await one.settle(failed(late))
        assert (await w.group())["breaker"] == "closed"


async def test_a_ticket_that_moved_says_nothing_of_the_breaker_of_its_new_group(database_url):
    async with world(database_url, endpoints=("e",)) as w:
        one = await w.process()
        held = await one.granted(wanted(endpoint="e"))
        groups = {GROUP: GroupSettings(endpoints=("f",)), "other": GroupSettings(endpoints=("e",), failure_threshold=1)}
        one.store._settings = msgspec.structs.replace(configured(revision=2), groups=groups)  # type: ignore[attr-defined]
        await one.store.configure()
        assert (await w.ticket(held.ticket_id))["group_id"] == "other"
        assert await one.settle(failed(held)) == [True]
        breakers = await w.db.fetch("select breaker, generation from control.capacity_group")
        assert [(row["breaker"], row["generation"]) for row in breakers] == [("closed", 1)] * 2


async def test_a_floor_is_raised_by_an_older_generation_too_and_never_lowered(database_url):
    async with world(database_url, concurrency=4, failure_threshold=1) as w:
        one = await w.process()
        rows = [await one.granted() for _ in range(3)]
        await one.settle(failed(rows[0]))
        await one.settle(failed(rows[1], Verdict.RATE_LIMITED, retry_after_s=60.0))
        until_first = await w.db.fetchval("select until from control.floor")
        assert until_first > await w.now() + 50 * SECOND
        await one.settle(failed(rows[2], Verdict.RATE_LIMITED, retry_after_s=1.0))
        assert await w.db.fetchval("select until from control.floor") == until_first


async def test_what_says_nothing_of_the_provider_never_opens(database_url):
    async with world(database_url, concurrency=3, failure_threshold=1) as w:
        one = await w.process()
        await one.settle(uncertain(await one.granted()))
        await one.settle(ended(await one.granted(), Ending.NOT_DISPATCHED, verdict=Verdict.NONE, state="zero"))
        await one.settle(ended(await one.granted(), verdict=Verdict.ANSWERED))
        assert ((await w.group())["breaker"], (await w.group())["generation"]) == ("closed", 1)


async def test_after_it_has_closed_a_failure_opens_for_the_first_cooldown_again(database_url):
    async with world(database_url, concurrency=3, failure_threshold=1, first_cooldown_s=0.2) as w:
        one = await w.process()
        await half_open(w, one)
        await one.settle(ended(await one.granted()))
        await one.settle(failed(await one.granted()))
        group = await w.group()
        assert (group["breaker"], group["openings"]) == ("open", 1)
        assert group["cooldown_until"] < await w.now() + 0.3 * SECOND


# ---------------------------------------------------------------- time


async def test_times_are_read_after_the_lock_was_waited_for(database_url):
    async with world(database_url, settings={"statement_s": 5.0}) as w:
        one = await w.process()
        inside = await asyncpg.connect(database_url)
        transaction = inside.transaction()
        await transaction.start()
        await inside.execute("select from control.capacity_group for update")
        demand = wanted(execution_limit_s=10)
        asking = asyncio.create_task(one.ask(demand))
        await met(w, asking)
        released = await w.now()
        await transaction.commit()
        row = (await asking)[demand.ticket_id]
        assert row.granted_at is not None
        assert row.granted_at >= released
        assert (await w.ticket(demand.ticket_id))["hard_deadline"] >= released + 10 * SECOND

        transaction = inside.transaction()
        await transaction.start()
        await inside.execute("select from control.capacity_group for update")
        settling = asyncio.create_task(one.settle(uncertain(row, cancel_confirms_after_s=1.0)))
        await met(w, settling)
        released = await w.now()
        await transaction.commit()
        assert await settling == [True]
        assert (await w.ticket(demand.ticket_id))["quarantined_until"] >= released + SECOND
        await inside.close()


async def test_a_step_back_of_the_servers_clock_is_made_up_for_once(database_url):
    async with world(database_url) as w:
        one, two = await w.process(), await w.process()
        for process in (one, two):
            await process.store.renew(process.owner, process.process, first=False)
            # As if the clock, an hour ahead then, had gone back since.
            process.store._told_time += 3600 * SECOND  # type: ignore[attr-defined]
        for process in (one, two):
            await process.store.renew(process.owner, process.process, first=False)
        ahead = await w.db.fetchval("select control.now_v1() - clock_timestamp()")
        assert 3599 * SECOND < ahead < 3601 * SECOND
        # What was granted before is past its deadline then, and not revived; grants go on.
        assert await (await w.process()).answer(wanted()) == "granted"


async def leap(w: World) -> None:
    """The store's clock goes forward by an hour."""
    await w.db.execute("update control.store set ahead = ahead + interval '1 hour'")


async def test_a_leap_forward_quarantines_for_the_whole_window_and_frees_nothing_at_once(database_url):
    async with world(database_url, concurrency=1) as w:
        one = await w.process()
        held = await one.granted(wanted(execution_limit_s=30, isolation_s=5))
        await leap(w)
        two = await w.process()
        await two.advance()
        assert await two.answer(wanted()) == "queued"
        row = await w.ticket(held.ticket_id)
        assert row["state"] == "quarantined"
        until_first = row["quarantined_until"]
        assert until_first > await w.now() + 3600 * SECOND
        # Nor does the late word of its process cut the window short.
        assert await one.settle(uncertain(held)) == [True]
        assert (await w.ticket(held.ticket_id))["quarantined_until"] == until_first


async def test_a_leap_that_a_process_has_seen_is_made_up_for_before_anything_is_decided(database_url):
    async with world(database_url, concurrency=1) as w:
        one = await w.process()
        held = await one.granted(wanted(execution_limit_s=30, isolation_s=5))
        assert await one.settle(uncertain(held)) == [True]
        before = await w.now()
        await one.store.renew(one.owner, one.process, first=False)
        await leap(w)
        await one.advance()
        assert await one.answer(wanted()) == "queued"
        assert (await w.ticket(held.ticket_id))["state"] == "quarantined"
        assert before < await w.now() < before + 60 * SECOND


async def test_a_leap_is_made_up_for_by_who_takes_a_ticket_back_or_buries_and_leaves_no_bucket_empty(database_url):
    async with world(database_url, concurrency=2, requests_per_minute=600) as w:
        one, other = await w.process(), await w.process()
        back = await one.granted()
        for process in (one, other):
            await process.store.renew(process.owner, process.process, first=False)
        before = await w.now()
        await leap(w)
        assert await one.store.abandon(0, [back.ticket_id], tombstone=False) == [GROUP]  # type: ignore[list-item]
        assert await w.db.fetchval("select filled_at from control.allowance") < before + 60 * SECOND
        await one.store.renew(one.owner, one.process, first=False)
        await leap(w)
        # It has not heard of the first step, so it believes the second.
        await other.store.bury([uuid.uuid4()])
        assert await w.db.fetchval("select not_before from control.reclaim") > before + 3000 * SECOND
        await one.store.renew(one.owner, one.process, first=False)
        assert await w.db.fetchval("select not_before from control.reclaim") < before + 120 * SECOND
        # A bucket that one of those has filled is not empty until that time.
        await w.db.execute(
            "update control.allowance set filled_at = clock_timestamp() + interval '1 hour', requests_left = 0"
        )
        assert await one.answer(wanted()) == "queued"

        async def refilled() -> bool:
            return bool(await w.db.fetchval("select exists (select from control.ticket where state = 'active')"))

        async def advanced() -> bool:
            await one.advance()
            return await refilled()

        await until(advanced)


async def test_who_buries_knows_of_a_leap(database_url):
    async with world(database_url) as w:
        one = await w.process()
        before = await w.now()
        await leap(w)
        await one.store.bury([uuid.uuid4()])
        assert await w.db.fetchval("select not_before from control.reclaim") < before + 60 * SECOND


async def set_by_hand(w: World) -> None:
    """
    From here on the clock of whoever connects is one that `leaps` moves, and not what is added to it: a statement may
    have looked at it before, and look again after.
    """
    await w.db.execute("create schema moved")
    await w.db.execute("create table moved.clock (by interval not null)")
    await w.db.execute("insert into moved.clock values ('0 s')")
    await w.db.execute(
        "create function moved.clock_timestamp() returns timestamptz language sql volatile"
        " as $$ select pg_catalog.clock_timestamp() + c.by from moved.clock c $$"
    )
    name = await w.db.fetchval("select current_database()")
    await w.db.execute(f'alter database "{name}" set search_path = moved, pg_catalog, public')


@asynccontextmanager
async def leaps_behind(w: World, locked: str, asking: Coroutine[Any, Any, T]) -> AsyncIterator[asyncio.Task[T]]:
    """Somebody asks and waits for what is locked; the clock goes forward by an hour; the lock is given back."""
    inside = await asyncpg.connect(w.url)
    transaction = inside.transaction()
    await transaction.start()
    await inside.execute(f"select from control.{locked} for update")
    task = asyncio.create_task(asking)
    await met(w, task)
    assert not task.done()
    await w.db.execute("update moved.clock set by = by + interval '1 hour'")
    await transaction.commit()
    await inside.close()
    yield task


async def test_a_leap_while_the_lock_is_waited_for_is_made_up_for_before_anything_is_decided(database_url):
    async with world(database_url, concurrency=2) as w:
        await set_by_hand(w)
        one, two = await w.process(), await w.process()
        left, runs = await one.granted(), await one.granted()
        assert await one.settle(uncertain(left)) == [True]
        async with leaps_behind(w, "capacity_group", two.answer(wanted())) as asking:
            assert await asking == "queued"
        assert (await w.ticket(left.ticket_id))["quarantined_until"] < await w.now() + 60 * SECOND
        assert (await w.ticket(runs.ticket_id))["state"] == "active"
        assert await one.settle(ended(runs)) == [True]
        await two.advance()
        assert await two.answer(wanted()) == "queued"


async def test_a_leap_while_the_lock_is_waited_for_lengthens_no_grant_where_slots_are_free(database_url):
    async with world(database_url, concurrency=2) as w:
        await set_by_hand(w)
        one = await w.process()
        # Else it would have lapsed by then.
        await w.db.execute("update control.owner set expires_at = expires_at + interval '2 hours'")
        demand, before = wanted(), await w.now()
        async with leaps_behind(w, "capacity_group", one.answer(demand)) as asking:
            assert await asking == "granted"
        assert (await w.ticket(demand.ticket_id))["hard_deadline"] < before + 600 * SECOND


async def test_a_leap_while_a_heartbeat_is_on_its_way_is_told_to_nobody(database_url):
    async with world(database_url, concurrency=1) as w:
        await set_by_hand(w)
        one = await w.process()
        left = await one.granted()
        assert await one.settle(uncertain(left)) == [True]
        renewed = one.store.renew(one.owner, one.process, first=False)
        async with leaps_behind(w, f"owner where owner_id = '{one.owner}'", renewed) as renewing:
            lives_s = await renewing
            assert lives_s is not None
            assert lives_s <= w.settings.lease_s
        assert (
            await w.db.fetchval("select expires_at from control.owner where owner_id = $1", one.owner)
            < await w.now() + 60 * SECOND
        )
        assert await one.answer(wanted()) == "queued"
        assert (await w.ticket(left.ticket_id))["state"] == "quarantined"


async def test_a_leap_while_a_row_is_waited_for_lengthens_nothing(database_url):
    async with world(database_url, concurrency=1) as w:
        await set_by_hand(w)
        one, two = await w.process(), await w.process()
        held, waiting = await one.granted(), wanted()
        await two.ask(waiting)
        await one.settle(ended(held))
        await one.advance()
        confirming = two.found(waiting)
        async with leaps_behind(w, f"ticket where ticket_id = '{waiting.ticket_id}'", confirming) as confirmed:
            row = (await confirmed)[waiting.ticket_id]
            assert row.answer == "granted"
        assert (await w.ticket(waiting.ticket_id))["hard_deadline"] < await w.now() + 60 * SECOND

        await two.store.renew(two.owner, two.process, first=False)
        failing = two.settle(failed(row, Verdict.RATE_LIMITED, retry_after_s=9.0))
        async with leaps_behind(w, "capacity_group", failing) as settled:
            assert await settled == [True]
        assert await w.db.fetchval("select max(until) from control.floor") < await w.now() + 60 * SECOND


async def test_a_leap_lets_no_waiter_go_and_declares_nobody_dead(database_url):
    async with world(database_url, concurrency=1) as w:
        one, two = await w.process(), await w.process()
        await one.granted()
        waiting = wanted()
        assert await two.answer(waiting) == "queued"
        await leap(w)
        assert await one.store.dead([one.owner, two.owner]) == set()
        await one.store.renew(one.owner, one.process, first=False)
        await leap(w)
        assert await one.store.overdue() == []
        assert await w.holds(waiting.ticket_id)


async def test_who_knows_another_time_learns_from_what_was_made_up_for_since(database_url):
    async with world(database_url) as w:
        one = await w.process()
        await one.store.renew(one.owner, one.process, first=False)
        await leap(w)
        late = await w.process()  # it begins between the step and its correction, and is told the wrong time
        before = await w.db.fetchval("select ahead from control.store")
        await one.advance()
        mended = await w.db.fetchval("select ahead from control.store")
        assert before - mended > 3500 * SECOND
        for process in (late, one, late, one):
            await process.advance()
            await process.store.renew(process.owner, process.process, first=False)
        assert abs(await w.db.fetchval("select ahead from control.store") - mended) < SECOND


async def test_the_day_is_that_of_the_grant_in_the_declared_zone_whatever_comes_after(database_url):
    async with world(database_url, settings={"zone": "Pacific/Kiritimati"}) as w:
        one = await w.process()
        held = await one.granted()
        assert held.day == await w.db.fetchval("select (clock_timestamp() at time zone 'Pacific/Kiritimati')::date")
        await w.db.execute("update control.ticket set day = '2000-01-01'")
        await one.settle(uncertain(held))
        await one.settle(ended(held))
        days = await w.db.fetch("select day::text from control.invocation")
        assert [row["day"] for row in days] == ["2000-01-01"] * 2


# ---------------------------------------------------------------- another database, or none


async def test_a_closed_store_grants_nothing_and_says_when_it_opens(database_url):
    async with world(database_url) as w:
        one = await w.process()
        await w.db.execute("update control.store set closed_until = clock_timestamp() + interval '9 s'")
        demand = wanted()
        row = (await one.ask(demand))[demand.ticket_id]
        assert row.answer == "store_closed"
        assert row.wait_ms is not None
        assert 5_000 < row.wait_ms <= 9_000


async def test_another_timeline_closes_the_store_for_the_longest_hold(database_url):
    async with world(database_url, settings={"longest_hold_s": 100.0}) as w:
        one = await w.process()
        await w.db.execute("update control.store set timeline = '00000009'")
        assert await one.answer(wanted()) == "store_closed"
        closed = await w.db.fetchval("select closed_until - control.now_v1() from control.store")
        assert 95 * SECOND < closed <= 100 * SECOND
        assert await one.answer(wanted()) == "store_closed"


async def test_another_system_closes_the_store_for_the_longest_hold(database_url):
    async with world(database_url, settings={"longest_hold_s": 100.0}) as w:
        await w.process()
        await w.db.execute("update control.store set system_identifier = '1'")
        one = await w.process()
        assert await one.answer(wanted()) == "store_closed"


# ---------------------------------------------------------------- those that stop or go away


async def as_before_17(process: Process) -> asyncpg.Connection:
    """A connection of the process's own, on a server that knows no limit for a whole transaction."""
    connection: asyncpg.Connection = await process.store._connect()  # type: ignore[attr-defined]
    if connection.get_server_version().major >= 17:
        await connection.execute("set transaction_timeout = 0")
    return connection


async def test_who_waits_for_a_lock_too_long_is_ended_by_the_server_itself(database_url):
    async with world(database_url, settings={"statement_s": 0.4}) as w:
        one = await w.process()
        one.store._idle.put_nowait(await as_before_17(one))  # type: ignore[attr-defined]
        inside = await asyncpg.connect(database_url)
        transaction = inside.transaction()
        await transaction.start()
        await inside.execute("select from control.capacity_group for update")
        with pytest.raises(StoreUnavailable):
            await one.ask(wanted())

        async def nobody_waits() -> bool:
            return not await w.blocked()

        await until(nobody_waits, within_s=20)
        await transaction.rollback()
        await inside.close()


@pytest.mark.parametrize("end", ["pg_cancel_backend", "pg_terminate_backend"])
async def test_a_statement_that_somebody_ends_is_unknown_and_no_refusal(database_url, end):
    async with world(database_url, settings={"statement_s": 5.0}) as w:
        one = await w.process()
        inside = await asyncpg.connect(database_url)
        transaction = inside.transaction()
        await transaction.start()
        await inside.execute("select from control.capacity_group for update")
        demand = wanted()
        asking = asyncio.create_task(one.answer(demand))
        await met(w, asking)
        await w.db.execute(
            f"select {end}(pid) from pg_stat_activity where datname = current_database() and wait_event_type = 'Lock'"
        )
        with pytest.raises(StoreUnavailable):
            await asking
        await transaction.rollback()
        assert await one.answer(demand) == "granted"
        await inside.close()


async def test_a_process_that_stops_in_a_transaction_does_not_stop_its_group(database_url):
    async with world(database_url, settings={"statement_s": 0.4}) as w:
        one, two = await w.process(), await w.process()
        stopped = await as_before_17(one)
        await stopped.execute("begin")
        await stopped.execute("select from control.capacity_group for update")

        async def granted() -> bool:
            with suppress(StoreUnavailable):
                return await two.answer(wanted()) == "granted"
            return False

        await until(granted, within_s=30)
        stopped.terminate()


async def test_a_cancelled_statement_gives_its_connection_back(database_url):
    async with world(database_url, settings={"connections": 1}) as w:
        one = await w.process()
        inside = await asyncpg.connect(database_url)
        transaction = inside.transaction()
        await transaction.start()
        await inside.execute("select from control.capacity_group for update")
        for _ in range(3):
            asking = asyncio.create_task(one.ask(wanted()))
            await met(w, asking)
            asking.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asking
        await transaction.rollback()
        async with asyncio.timeout(20):
            assert await one.answer(wanted()) == "granted"
        await inside.close()


async def test_a_heartbeat_does_not_wait_for_a_connection_that_work_has(database_url):
    async with world(database_url, settings={"connections": 1, "statement_s": 15.0}) as w:
        one = await w.process()
        inside = await asyncpg.connect(database_url)
        transaction = inside.transaction()
        await transaction.start()
        await inside.execute("select from control.capacity_group for update")
        asking = asyncio.create_task(one.ask(wanted()))
        await met(w, asking)
        async with asyncio.timeout(20):
            assert await one.store.renew(one.owner, one.process, first=False) is not None
        await transaction.rollback()
        await asking
        await inside.close()


async def test_the_sweep_ends_the_waiters_of_who_is_not_heard_of(database_url):
    async with world(database_url, concurrency=1) as w:
        one, two = await w.process(), await w.process()
        held = await two.granted()
        waiting = wanted(klass=Class.BATCH)
        await one.ask(waiting)
        await w.lapse(one)
        await two.store.overdue()
        assert not await w.holds(waiting.ticket_id)
        assert await w.holds(held.ticket_id)


async def test_where_the_store_itself_was_away_nobody_is_dead_at_once(database_url):
    async with world(database_url, concurrency=1) as w:
        one = await w.process()
        held = await one.granted()
        await w.db.execute("update control.owner set expires_at = clock_timestamp() - interval '1 s'")
        two = await w.process()
        await two.advance()
        assert (await w.ticket(held.ticket_id))["state"] == "active"
        assert await one.settle(ended(held)) == [True]


# ---------------------------------------------------------------- the line right before it sends


ONE_PROVIDER = """
    [providers.p]
    protocol = "chat_completions"
    base_url = "{url}"
    first_byte_s = 5
    gap_s = 5
    {provider}
    [models.sim-fast]
    providers = ["p"]
    price = {{ input = "2.50", output = "10.00" }}
    """


async def test_a_lease_that_is_not_valid_any_more_is_not_sent(database_url, tmp_path):
    async with simulated() as provider:
        toml = ONE_PROVIDER.format(url=provider.url, provider="")
        async with whole_line(database_url, tmp_path, toml) as line:

            class Stalls(Heard):
                async def dispatching(self, attempt: int) -> None:
                    line.controller._trusted_until = 0.0

            with pytest.raises(AdmissionRefused) as refused:
                await line.pipeline.complete(call("sim-fast"), Stalls())
            assert refused.value.code is Code.CONTROL_STORE_UNAVAILABLE
            assert (await provider.ledger())["dispatches"] == 0
            await line.settled()
            [row] = await line.invocations()
            assert (row["state"], row["status"]) == ("zero", "not_dispatched")


async def test_the_provider_is_left_at_the_hard_deadline(database_url, tmp_path):
    async with simulated() as provider:
        limits = "execution_limit_s = 0.6\nexecution_base_s = 0.5\nslowest_tokens_per_s = 100000"
        toml = ONE_PROVIDER.format(url=provider.url, provider=limits)
        async with whole_line(database_url, tmp_path, toml) as line:
            await provider.set_faults(hang="before_first_byte")
            async with asyncio.timeout(30):
                with pytest.raises(GatewayError):
                    await line.pipeline.complete(call("sim-fast", transport="job"))
            await line.settled()
            [row] = await line.invocations()
            assert row["state"] == "unknown"
            assert row["total_ms"] < 20_000


@asynccontextmanager
async def one_provider(database_url: str, tmp_path: Path, provider: str = "") -> AsyncIterator[tuple[Any, Any]]:
    """A line to one provider whose breaker opens at the first failure."""
    async with simulated() as upstream:
        host = "/".join(upstream.url.split("/")[:3])
        toml = ONE_PROVIDER.format(url=upstream.url, provider=provider)
        toml += f'\n[groups."{host}"]\nfailure_threshold = 1\n'
        async with whole_line(database_url, tmp_path, toml) as line:
            yield line, upstream


async def test_a_caller_who_goes_away_is_no_failure_of_the_provider(database_url, tmp_path):
    async with one_provider(database_url, tmp_path, 'on_cancel = "close"') as (line, provider):
        await provider.set_faults(pace=0.05, chunks=200)
        async with line.pipeline.stream(call("sim-fast")) as items:
            await anext(items)
        await line.settled()
        [row] = await line.invocations()
        assert row["status"] == "cancelled"
        assert [group["breaker"] for group in await line.rows("select breaker from control.capacity_group")] == [
            "closed"
        ]


async def test_a_request_that_is_refused_for_its_own_fault_is_no_failure_of_the_provider(database_url, tmp_path):
    async with one_provider(database_url, tmp_path) as (line, provider):
        await provider.set_faults(status=400)
        with pytest.raises(GatewayError):
            await line.pipeline.complete(call("sim-fast"))
        assert [group["breaker"] for group in await line.rows("select breaker from control.capacity_group")] == [
            "closed"
        ]
        await provider.set_faults(status=503)
        with pytest.raises(GatewayError):
            await line.pipeline.complete(call("sim-fast", deadline_s=3))
        assert [group["breaker"] for group in await line.rows("select breaker from control.capacity_group")] == ["open"]


async def test_a_stream_has_one_end_and_nothing_after_it(database_url, tmp_path):
    async with (
        one_provider(database_url, tmp_path) as (line, _),
        line.pipeline.stream(call("sim-fast")) as items,
    ):
        everything = [item async for item in items]
        assert [isinstance(item, Ended) for item in everything] == [False] * (len(everything) - 1) + [True]
