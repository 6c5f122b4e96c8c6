"""Lanes: one statement in flight, one bad element fails alone, and no fault vanishes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

import pytest
import structlog

from admission.combiner import Lane
from admission.contract import Rejected


async def test_what_arrives_while_a_statement_is_in_flight_goes_out_together():
    sent: list[list[int]] = []
    under_way, answered = asyncio.Event(), asyncio.Event()

    async def send(batch: Sequence[int]) -> Sequence[int]:
        sent.append(list(batch))
        under_way.set()
        await answered.wait()
        return [2 * element for element in batch]

    lane: Lane[int, int] = Lane(send, batch=3)
    first = lane.submit(1)
    await under_way.wait()
    rest = [lane.submit(element) for element in (2, 3, 4, 5)]
    answered.set()
    assert await asyncio.gather(first, *rest) == [2, 4, 6, 8, 10]
    assert sent == [[1], [2, 3, 4], [5]]


async def test_what_arrives_in_the_next_turn_of_the_loop_goes_out_with_what_is_there():
    sent: list[list[int]] = []

    async def send(batch: Sequence[int]) -> Sequence[int]:
        sent.append(list(batch))
        return batch

    lane: Lane[int, int] = Lane(send)
    first = lane.submit(1)
    await asyncio.sleep(0)
    second = lane.submit(2)
    assert [await first, await second] == [1, 2]
    assert sent == [[1, 2]]


async def test_what_arrives_while_the_loop_has_other_work_goes_out_with_what_is_there():
    sent: list[list[int]] = []

    async def send(batch: Sequence[int]) -> Sequence[int]:
        sent.append(list(batch))
        return batch

    lane: Lane[int, int] = Lane(send)
    answers = []
    for element in range(8):
        answers.append(lane.submit(element))
        await asyncio.sleep(0)
        time.sleep(0.001)  # noqa: ASYNC251  the other work
    assert await asyncio.gather(*answers) == list(range(8))
    assert sent == [list(range(8))]


async def test_one_bad_element_fails_alone():
    async def send(batch: Sequence[int]) -> Sequence[int]:
        if 3 in batch:
            raise Rejected("22000")
        return list(batch)

    lane: Lane[int, int] = Lane(send)
    answers = await asyncio.gather(*(lane.submit(element) for element in range(6)), return_exceptions=True)
    assert [answer if isinstance(answer, int) else type(answer) for answer in answers] == [0, 1, 2, Rejected, 4, 5]


async def test_a_fault_is_heard_by_the_caller_or_else_by_the_log_and_the_lane_goes_on():
    broken = True

    async def send(batch: Sequence[int]) -> Sequence[int]:
        if broken:
            raise RuntimeError("a fault of ours")
        return list(batch)

    lane: Lane[int, int] = Lane(send)
    with structlog.testing.capture_logs() as logs:
        lane.post(1)
        with pytest.raises(RuntimeError):
            await lane.submit(2)
        await lane.drain()
    assert [entry["event"] for entry in logs] == ["admission.unheard_fault"]
    broken = False
    assert await lane.submit(3) == 3
