"""The SQL of admission decides as the pure core does: a sample of `python -m tests.differential`."""

from __future__ import annotations

import asyncpg
import pytest

from tests.differential import sides
from tests.differential.schedule import BEGIN, Failure, opened, play, shortest, steps

SCHEDULES = 30
STEPS = 40


@pytest.mark.timeout(400)
async def test_postgresql_and_the_pure_core_decide_alike(database_url):
    async with opened(database_url) as both:
        for seed in range(SCHEDULES):
            schedule = steps(seed, STEPS)
            try:
                await play(both, schedule)
            except Failure as failure:
                less = await shortest(both, schedule)
                pytest.fail(
                    f"seed {seed}: {failure if less is None else less}\n"
                    f"replay: python -m tests.differential --schedules 1 --steps {STEPS} --seed {seed}"
                )


async def test_the_functions_of_the_store_read_the_clock_that_the_test_moves(database_url):
    async with opened(database_url) as both:
        await play(both, steps(1, 0))
        await both.tick(1)
        connection = await asyncpg.connect(database_url)
        try:
            assert await connection.fetchval("select us(control.now_v1())") == BEGIN + 1 == both.now
        finally:
            await connection.close()


HARMS = (
    "update control.ticket set number = number + 1",
    "update control.ticket set hard_deadline = hard_deadline + interval '1 us'",
    "update control.capacity_group set generation = generation + 1 where group_id = 'a'",
    "update control.capacity_group set failed_at = array[clock_timestamp()] where group_id = 'a'",
    "update control.capacity_group set next_number = next_number + 1 where group_id = 'a'",
    "update control.owner set expires_at = expires_at - interval '1 us'",
    "insert into control.floor values ('a', 'c', 'm1', 'rate_limit', clock_timestamp(), clock_timestamp())",
    "insert into control.fence values (gen_random_uuid(), 's', 'r', 1, clock_timestamp())",
    "select control.limit_key_v1(gen_random_uuid(), '{\"concurrency\": 1}')",
    "update control.counter set charged_usd = charged_usd + 1 where kind = 'key_day'",
    "update control.ticket set reserved_usd = coalesce(reserved_usd, 0) + 1",
    "update control.reclaim set not_before = clock_timestamp()",
    "delete from control.attempt",
)


async def test_each_thing_that_differs_is_found(database_url):
    async with opened(database_url) as both:
        await _play_to_a_ticket(both)
        connection = await asyncpg.connect(database_url)
        try:
            for harm in ("select 1", *HARMS):
                harming = connection.transaction()
                await harming.start()
                await connection.execute(harm)
                found = sides.differences(both.core, await sides.look(connection, both.sql), both.now)
                assert (found == []) == (harm == "select 1"), (harm, found)
                await harming.rollback()
        finally:
            await connection.close()


async def _play_to_a_ticket(both) -> None:
    """Until a ticket is active and another has ended."""
    for seed in range(SCHEDULES):
        await play(both, steps(seed, STEPS))
        if both.core.attempts and any(ticket.state == "active" for ticket in both.core.tickets.values()):
            return
    raise AssertionError("no schedule ends with a ticket")
