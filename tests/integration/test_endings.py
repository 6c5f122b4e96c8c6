"""Callers who go away: their answers are read to the end where nothing else would tell it, and never for long."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from decimal import Decimal
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from gateway.errors import AttemptedError, Code, StreamBroken
from tests.fakes.simulated import SimulatedProvider, simulated
from tests.fakes.whole_line import WholeLine, call, read, whole_line

#: Far longer than any test: a slot that is free again within one was not in quarantine.
LONG = "execution_limit_s = 90\nisolation_s = 90"


@asynccontextmanager
async def one_provider(
    database_url: str, tmp_path: Path, *, provider: str = "", concurrency: int = 3
) -> AsyncIterator[tuple[WholeLine, SimulatedProvider]]:
    async with simulated() as upstream:
        host = "/".join(upstream.url.split("/")[:3])
        toml = f"""
            [providers.p]
            protocol = "chat_completions"
            base_url = "{upstream.url}"
            first_byte_s = 20
            gap_s = 20
            {LONG}
            {provider}
            [models.sim-fast]
            providers = ["p"]
            price = {{ input = "2.50", output = "10.00" }}
            [groups."{host}"]
            concurrency = {concurrency}
            """
        async with whole_line(database_url, tmp_path, toml) as line:
            yield line, upstream


async def stream_of(line: WholeLine, seen: asyncio.Event) -> None:
    async with line.pipeline.stream(call("sim-fast")) as items:
        async for _ in items:
            seen.set()


async def plain(line: WholeLine, seen: asyncio.Event) -> None:
    seen.set()
    await line.pipeline.complete(call("sim-fast"))


Way: TypeAlias = Callable[[WholeLine, asyncio.Event], Coroutine[None, None, None]]
#: How the answer is asked for, and what the provider does meanwhile.
WAYS: dict[str, tuple[Way, dict[str, Any]]] = {
    "stream, after its first content": (stream_of, {"pace": 0.02, "chunks": 20}),
    "stream, before its headers": (stream_of, {"latency": 0.3}),
    "stream, before its first content": (stream_of, {"think": 0.3}),
    "plain": (plain, {"latency": 0.3}),
}


#: The same, until the faults are set again or for longer than it takes to look.
STAYING: dict[str, dict[str, Any]] = {
    "stream, after its first content": {"pace": 0.1, "chunks": 20},
    "stream, before its headers": {"hold": True},
    "stream, before its first content": {"think": 2},
    "plain": {"hold": True},
}


async def taken_back(line: WholeLine, upstream: SimulatedProvider, way: str) -> None:
    """A call that its caller cancels while the provider works on it."""
    ask, faults = WAYS[way]
    seen = asyncio.Event()
    task = asyncio.create_task(ask(line, seen))
    await upstream.until(lambda ledger: ledger["active"] == 1)
    if "pace" in faults:
        await asyncio.wait_for(seen.wait(), 30)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_ten_cancelled_chats_do_not_close_a_group_of_eight(database_url, tmp_path):
    async with one_provider(database_url, tmp_path, concurrency=8) as (line, upstream):
        await upstream.set_faults(pace=0.02, chunks=30, capacity=8)
        seen = [asyncio.Event() for _ in range(10)]
        chats = [asyncio.create_task(stream_of(line, event)) for event in seen]
        await upstream.until(lambda ledger: ledger["active"] == 8)
        async with asyncio.timeout(30):
            while sum(event.is_set() for event in seen) < 8:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        stopped = time.monotonic()
        for chat in chats:
            chat.cancel()
        ends = await asyncio.gather(*chats, return_exceptions=True)
        assert {type(end) for end in ends} == {asyncio.CancelledError}
        assert time.monotonic() - stopped < 20
        answers = await asyncio.gather(*(line.pipeline.complete(call("sim-fast")) for _ in range(8)))
        assert len(answers) == 8
        assert time.monotonic() - stopped < 60
        await line.settled()
        rows = await line.invocations()
        ledger = await upstream.ledger()
        assert ledger["peak_concurrency"] <= 8
        assert all(dispatch["status"] == 200 for dispatch in await upstream.dispatches())
        assert len(rows) == ledger["dispatches"] == ledger["completed"] == 16
        assert {row["state"] for row in rows} == {"charged"}
        assert sum(row["input_total"] for row in rows) == ledger["tokens_in"]
        assert sum(row["output_total"] for row in rows) == ledger["tokens_out"]
        assert await line.slots() == []
        await line.audit()


@pytest.mark.parametrize("way", WAYS)
async def test_what_a_caller_took_back_is_read_to_its_end_and_charged(database_url, tmp_path, way):
    async with one_provider(database_url, tmp_path) as (line, upstream):
        await upstream.set_faults(**STAYING[way])
        await taken_back(line, upstream, way)
        # The caller was not kept until the answer was there.
        assert await line.slots() == ["active"]
        await upstream.set_faults()
        await line.settled()
        [row] = await line.invocations()
        ledger = await upstream.ledger()
        assert ledger["completed"] == 1
        assert (row["status"], row["ended"], row["state"]) == ("cancelled", "complete", "charged")
        assert (row["input_total"], row["output_total"]) == (ledger["tokens_in"], ledger["tokens_out"])
        cost = (row["input_total"] * Decimal("2.50") + row["output_total"] * Decimal(10)) / 1_000_000
        assert row["usd"] == cost
        assert await line.slots() == []
        await line.audit()


@pytest.mark.parametrize(
    ("ask", "hang"),
    [(stream_of, "mid"), (stream_of, "before_first_byte"), (stream_of, "before_headers"), (plain, "before_headers")],
    ids=["mid", "before_first_byte", "before_headers", "plain"],
)
async def test_an_answer_that_does_not_end_is_closed_after_the_time_to_drain(database_url, tmp_path, ask, hang):
    async with one_provider(database_url, tmp_path, provider="drain_s = 2") as (line, upstream):
        await upstream.set_faults(hang=hang)
        task = asyncio.create_task(ask(line, asyncio.Event()))
        await upstream.until(lambda ledger: ledger["active"] == 1)
        # So that it hangs where it is to hang.
        await asyncio.sleep(0.05)
        stopped = time.monotonic()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        # The caller was not kept for the time to drain.
        assert await line.slots() == ["active"]
        await upstream.until()
        assert time.monotonic() - stopped > 1.9
        await line.settled()
        [row] = await line.invocations()
        assert (row["status"], row["ended"], row["state"]) == ("cancelled", "cancelled", "unknown")
        assert row["upper_bound_usd"] > 0
        assert await line.slots() == ["quarantined"]
        await line.audit()


@pytest.mark.parametrize("way", WAYS)
async def test_closing_at_once_is_what_a_provider_may_ask_for(database_url, tmp_path, way):
    closes = 'on_cancel = "close"\ncancel_confirms_after_s = 0.3'
    async with one_provider(database_url, tmp_path, provider=closes) as (line, upstream):
        # Long enough that it cannot have ended by itself.
        asked = WAYS[way][1]
        await upstream.set_faults(**({"pace": 0.05, "chunks": 500} if "pace" in asked else dict.fromkeys(asked, 20)))
        await taken_back(line, upstream, way)
        await upstream.until(within=15)
        await line.settled()
        [row] = await line.invocations()
        assert (row["status"], row["state"]) == ("cancelled", "unknown")
        # Known to have ended soon after: the slot is free again, long before its hard deadline.
        await upstream.set_faults()
        await asyncio.gather(*(line.pipeline.complete(call("sim-fast", deadline_s=30)) for _ in range(6)))
        await line.audit()


async def test_where_only_streams_end_on_close_a_plain_call_is_read_on(database_url, tmp_path):
    streams = 'cancel_confirms_after_s = 0.2\ncancel_confirms = "streams"'
    async with one_provider(database_url, tmp_path, provider=streams) as (line, upstream):
        await upstream.set_faults(latency=0.4)
        await taken_back(line, upstream, "plain")
        await line.settled()
        await taken_back(line, upstream, "stream, before its headers")
        await line.settled()
        assert [row["state"] for row in await line.invocations()] == ["charged", "unknown"]
        assert (await upstream.ledger())["completed"] == 1


async def test_an_error_that_comes_after_the_caller_has_gone_frees_the_slot_and_costs_nothing(database_url, tmp_path):
    async with one_provider(database_url, tmp_path) as (line, upstream):
        await upstream.set_faults(latency=0.3, status=503)
        await taken_back(line, upstream, "plain")
        await line.settled()
        [row] = await line.invocations()
        assert (row["status"], row["state"], row["http_status"]) == ("error", "zero", 503)
        assert await line.slots() == []


async def test_a_connection_that_breaks_after_the_caller_has_gone_is_uncertain(database_url, tmp_path):
    async with one_provider(database_url, tmp_path) as (line, upstream):
        await upstream.set_faults(pace=0.05, die_after=8, chunks=30)
        await taken_back(line, upstream, "stream, after its first content")
        await line.settled()
        [row] = await line.invocations()
        assert (row["ended"], row["state"]) == ("broken", "unknown")
        assert await line.slots() == ["quarantined"]


async def test_a_deadline_ends_the_callers_wait_and_not_the_call(database_url, tmp_path):
    async with one_provider(database_url, tmp_path) as (line, upstream):
        await upstream.set_faults(hold=True)
        with pytest.raises(AttemptedError) as late:
            await line.pipeline.complete(call("sim-fast", deadline_s=1))
        assert late.value.code is Code.DEADLINE_EXCEEDED
        assert late.value.outcome is not None
        [attempt] = late.value.outcome.attempts
        assert (attempt.status, attempt.code, attempt.cost.state) == ("timeout", "deadline", "unknown")
        assert late.value.outcome.settlement == "pending"
        await upstream.set_faults()
        await line.settled()
        [row] = await line.invocations()
        assert (row["status"], row["ended"], row["state"]) == ("timeout", "complete", "charged")
        assert await line.slots() == []


async def test_a_deadline_in_the_middle_of_a_stream_is_told_and_the_rest_is_read(database_url, tmp_path):
    async with one_provider(database_url, tmp_path) as (line, upstream):
        await upstream.set_faults(pace=0.2, chunks=16)
        async with line.pipeline.stream(call("sim-fast", deadline_s=1.5)) as items:
            with pytest.raises(StreamBroken) as late:
                await read(items)
        assert late.value.code is Code.DEADLINE_EXCEEDED
        assert late.value.outcome is not None
        assert (late.value.outcome.ended, late.value.outcome.settlement) == ("uncertain", "pending")
        await line.settled()
        [row] = await line.invocations()
        assert (row["status"], row["state"]) == ("timeout", "charged")


async def test_a_stop_waits_for_what_is_read_on(database_url, tmp_path):
    async with one_provider(database_url, tmp_path) as (line, upstream):
        await upstream.set_faults(latency=0.3)
        await taken_back(line, upstream, "plain")
        await line.pipeline.drain(asyncio.get_running_loop().time() + 20)
        await line.settled()
        assert [row["state"] for row in await line.invocations()] == ["charged"]


async def test_a_stop_closes_what_does_not_end_in_its_time(database_url, tmp_path):
    async with one_provider(database_url, tmp_path) as (line, upstream):
        await upstream.set_faults(hang="before_headers")
        task = asyncio.create_task(line.pipeline.complete(call("sim-fast")))
        await upstream.until(lambda ledger: ledger["active"] == 1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        stopping = time.monotonic()
        await line.pipeline.drain(asyncio.get_running_loop().time() + 0.3)
        assert 0.25 < time.monotonic() - stopping < 15
        await upstream.until()
        await line.settled()
        assert [row["state"] for row in await line.invocations()] == ["unknown"]


async def test_what_a_caller_leaves_during_the_stop_itself_is_settled_too(database_url, tmp_path):
    async with one_provider(database_url, tmp_path) as (line, upstream):
        await upstream.set_faults(hang="before_headers")
        task = asyncio.create_task(line.pipeline.complete(call("sim-fast")))
        await upstream.until(lambda ledger: ledger["active"] == 1)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await line.pipeline.drain(0.0)
        await line.settled()
        assert [row["state"] for row in await line.invocations()] == ["unknown"]


async def test_the_hard_deadline_follows_from_what_the_request_may_produce(database_url, tmp_path):
    tight = "execution_base_s = 0.5\nslowest_tokens_per_s = 1000"
    async with one_provider(database_url, tmp_path, provider=tight) as (line, upstream):
        # 200 tokens: 20 s (the first byte's clock) and 0.2 s, and not the 90 s of the provider.
        await upstream.set_faults(latency=0.5)
        task = asyncio.create_task(line.pipeline.complete(call("sim-fast")))
        await upstream.until(lambda ledger: ledger["active"] == 1)
        [row] = await line.rows(
            "select extract(epoch from hard_deadline - granted_at)::float8 as s from control.ticket"
        )
        assert abs(row["s"] - 20.2) < 0.01
        await task


async def test_whenever_callers_leave_every_dispatch_is_charged_once_and_the_limit_holds(database_url, tmp_path):
    chance = random.Random("leaving")
    async with one_provider(database_url, tmp_path, concurrency=4) as (line, upstream):
        await upstream.set_faults(latency=0.02, jitter=0.05, pace=0.005, chunks=12, capacity=4)
        calls: list[asyncio.Task[None]] = []
        for _ in range(80):
            ask = chance.choice((stream_of, plain))
            calls.append(asyncio.create_task(ask(line, asyncio.Event())))
            asyncio.get_running_loop().call_later(chance.uniform(0, 0.4), calls[-1].cancel)
            await asyncio.sleep(chance.uniform(0, 0.02))
        async with asyncio.timeout(30):
            ends = await asyncio.gather(*calls, return_exceptions=True)
            ledger = await upstream.until()
            await line.settled()
        told = f"{sum(isinstance(end, BaseException) for end in ends)} of {len(ends)} left, {ledger}"
        rows = [row for row in await line.invocations() if row["status"] != "not_dispatched"]
        assert ledger["peak_concurrency"] <= 4, told
        assert len(rows) == ledger["dispatches"] == ledger["completed"], told
        assert {row["state"] for row in rows} == {"charged"}, told
        assert sum(row["output_total"] for row in rows) == ledger["tokens_out"], told
        assert {row["status"] for row in rows} <= {"success", "cancelled"}, told
        async with asyncio.timeout(60):
            while await line.slots():  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        await line.audit()
