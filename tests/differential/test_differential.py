"""The SQL of admission decides as the pure core does: a sample of `python -m tests.differential`."""

from __future__ import annotations

import asyncpg
import pytest

from admission import decision
from tests.differential import sides
from tests.differential.schedule import BEGIN, Failure, opened, play, shortest, steps

SCHEDULES = 60
STEPS = 40


@pytest.mark.timeout(120)
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


@pytest.mark.parametrize(
    "harm",
    [
        "update control.ticket set number = number + 1",
        "update control.ticket set hard_deadline = hard_deadline + interval '1 us'",
        "update control.capacity_group set generation = generation + 1 where group_id = 'a'",
        "update control.capacity_group set failed_at = array[clock_timestamp()] where group_id = 'a'",
        "delete from control.owner",
        "insert into control.floor (group_id, credential, model, kind, since, until) "
        "values ('a', 'c', 'm1', 'rate_limit', clock_timestamp(), clock_timestamp())",
        "insert into control.fence values (gen_random_uuid(), 's', 'r', 1, clock_timestamp())",
        "update control.reclaim set not_before = clock_timestamp()",
        "delete from control.attempt",
    ],
)
async def test_what_differs_is_found(database_url, harm):
    async with opened(database_url) as both:
        # With these steps there are a ticket and an attempt.
        seed = await _with_tickets(both)
        await play(both, steps(seed, STEPS))
        assert sides.differences(both.core, both.sql, both.now) == []
        connection = await asyncpg.connect(database_url)
        try:
            await connection.execute(harm)
            assert sides.differences(both.core, await sides.look(connection, both.sql), both.now) != []
        finally:
            await connection.close()


async def _with_tickets(both) -> int:
    for seed in range(SCHEDULES):
        await play(both, steps(seed, STEPS))
        active = any(ticket.state == "active" for ticket in both.core.tickets.values())
        if active and both.core.attempts and decision.SECOND:
            return seed
    raise AssertionError("no schedule ends with a ticket")
