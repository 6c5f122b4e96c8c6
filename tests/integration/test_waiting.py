"""
What a request is told while it waits, and what may still stop it between its grant and its dispatch. Through the whole
line, as several processes on one database; the provider's own ledger says what was sent.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

import pytest
import structlog

from admission.lease import Class
from gateway.call import Call
from gateway.errors import Code, GatewayError
from tests.fakes.simulated import SimulatedProvider, simulated
from tests.fakes.whole_line import Heard, WholeLine, call
from tests.integration.test_limits import Gated, group, host, occupied, processes, profile, queued, start

T = TypeVar("T")


async def until(found: Callable[[], T], within_s: float = 30.0) -> T:
    give_up = time.monotonic() + within_s
    while not (result := found()):
        assert time.monotonic() < give_up, "it did not come true in time"
        await asyncio.sleep(0.005)
    return result


def one_slot(upstream: SimulatedProvider, limits: str = "concurrency = 1", more: str = "") -> str:
    return profile("p", upstream, 'models = ["sim-fast", "sim-small"]') + group(upstream, limits) + more


# ------------------------------------------------------------------ waiting explains itself


async def test_a_waiter_hears_each_change_of_its_place_until_it_starts(database_url, tmp_path):
    async with simulated() as upstream:
        toml = one_slot(upstream)
        async with processes(database_url, tmp_path, toml, toml) as (one, two):
            first, gate = await occupied(one, "p/sim-fast")
            heard = [Heard() for _ in range(4)]
            rest = []
            for number, waits in enumerate(heard, 1):
                rest.append(start((one, two)[number % 2].pipeline.complete(call("p/sim-fast"), waits)))
                await queued(one, number)
            await until(lambda: all(waits.waits for waits in heard))
            # Long enough that a look falls between two changes.
            await upstream.set_faults(latency=0.15)
            gate.set()
            await asyncio.gather(first, *rest)
            assert [[waiting.reason for waiting in one_heard.waits] for one_heard in heard] == [
                ["capacity"] * len(one_heard.waits) for one_heard in heard
            ]
            places = [[waiting.position for waiting in one_heard.waits] for one_heard in heard]
            assert [seen[0] for seen in places] == [1, 2, 3, 4]
            for seen in places:
                assert seen == sorted(set(seen), reverse=True), places
            assert all(waiting.group == host(upstream) for one_heard in heard for waiting in one_heard.waits)
            # The last of them was told that it moved up.
            assert len(places[3]) > 1


async def test_who_waits_is_told_how_long_once_the_group_has_served_some(database_url, tmp_path):
    async with simulated() as upstream:
        toml = one_slot(upstream, "concurrency = 1\nqueue = 100")
        async with processes(database_url, tmp_path, toml) as (line,):
            await upstream.set_faults(latency=0.05)
            heard = [Heard() for _ in range(12)]
            started = time.monotonic()
            took: list[float] = []

            async def ask(waits: Heard) -> None:
                await line.pipeline.complete(call("p/sim-fast"), waits)
                took.append(time.monotonic() - started)

            await asyncio.gather(*(ask(waits) for waits in heard))
            later = Heard()
            first, gate = await occupied(line, "p/sim-fast")
            last = start(line.pipeline.complete(call("p/sim-fast"), later))
            await until(lambda: later.waits)
            gate.set()
            await asyncio.gather(first, last)
            expected = later.waits[0].expected_wait_s
            assert expected is not None
            # What was served lately: about twelve in a second.
            assert 0.0 < expected < 2.0


async def test_the_reason_changes_with_what_a_request_waits_for(database_url, tmp_path):
    async with simulated() as upstream:
        # Longer than any look at the queue may take to come, and not waited for.
        toml = one_slot(upstream, "concurrency = 2\nfirst_cooldown_s = 20")
        async with processes(database_url, tmp_path, toml, toml) as (one, two):
            held = [await occupied(one, "p/sim-fast") for _ in range(2)]
            heard = Heard()
            waiting = start(two.pipeline.complete(call("p/sim-fast"), heard))
            await until(lambda: heard.waits)
            await one.rows("select control.open_breaker_v2($1, control.now_v1())", host(upstream))
            await until(lambda: heard.waits[-1].reason == "cooldown")
            for _, gate in held:
                gate.set()
            assert await one.controller._store.reset(host(upstream))
            await one.controller.advance([host(upstream)])
            await asyncio.gather(*(first for first, _ in held), waiting)
            told = [(waits.reason, waits.position) for waits in heard.waits]
            assert told[0] == ("capacity", 1)
            assert ("cooldown", 1) in told
            until_s = next(waits.until_s for waits in heard.waits if waits.reason == "cooldown")
            assert until_s is not None
            assert 15 < until_s <= 20


async def test_a_group_that_queues_at_the_built_in_limit_says_so_once_with_what_to_configure(database_url, tmp_path):
    async with simulated() as upstream:
        toml = profile("p", upstream, 'models = ["sim-fast"]')
        with structlog.testing.capture_logs() as logs:
            async with processes(database_url, tmp_path, toml) as (line,):
                await upstream.set_faults(latency=0.15)
                for _ in range(2):
                    await asyncio.gather(*(line.pipeline.complete(call("p/sim-fast")) for _ in range(9)))
        told = [line for line in logs if line["event"] == "admission.queues_at_default_limit"]
        assert len(told) == 1
        assert (told[0]["group"], told[0]["concurrency"]) == (host(upstream), 3)
        assert host(upstream) in told[0]["hint"]
        assert "concurrency" in told[0]["hint"]


async def test_a_group_with_a_limit_of_its_own_is_not_told_to_set_one(database_url, tmp_path):
    async with simulated() as upstream:
        toml = one_slot(upstream, "concurrency = 3")
        with structlog.testing.capture_logs() as logs:
            async with processes(database_url, tmp_path, toml) as (line,):
                await upstream.set_faults(latency=0.1)
                heard = Heard()
                await asyncio.gather(*(line.pipeline.complete(call("p/sim-fast"), heard) for _ in range(9)))
                assert heard.waits
        assert not [line for line in logs if line["event"] == "admission.queues_at_default_limit"]


async def test_operators_see_each_slot_and_each_waiter_with_its_reason(database_url, tmp_path):
    async with simulated() as upstream:
        toml = one_slot(
            upstream, "concurrency = 2\nqueue = 10", f'[groups."{host(upstream)}".models.sim-small]\nconcurrency = 1'
        )
        async with processes(database_url, tmp_path, toml, toml) as (one, two):
            await occupied(one, "p/sim-small", debit_id="runs")
            for number, name in enumerate(("model-1", "model-2"), 1):
                start(two.pipeline.complete(call("p/sim-small", debit_id=name)))
                await queued(one, number)
            [row] = await one.controller._store.groups()
            assert (row["active"], row["quarantined"], row["queued"]) == (1, 0, 2)
            [slot] = row["slots"]
            assert (slot["debit_id"], slot["state"], slot["model"], slot["credential"]) == (
                "runs",
                "active",
                "sim-small",
                "p",
            )
            assert [(w["position"], w["debit_id"], w["reason"]) for w in row["waiting"]] == [
                (1, "model-1", "model_capacity"),
                (2, "model-2", "model_capacity"),
            ]
            await occupied(one, "p/sim-fast", debit_id="runs, too")
            start(one.pipeline.complete(call("p/sim-fast", debit_id="batch", klass=Class.BATCH)))
            await queued(one, 3)
            [row] = await two.controller._store.groups()
            assert row["queued_by_class"] == {"interactive": 2, "batch": 1}
            assert (row["waiting"][2]["debit_id"], row["waiting"][2]["reason"]) == ("batch", "capacity")


# ------------------------------------------------------------------ the owner fence


def run(number: int, run_id: str = "r") -> Call:
    return call("p/sim-fast", scope_id="s", run_id=run_id, owner_fence=number)


async def refused(work: Awaitable[object]) -> GatewayError:
    with pytest.raises(GatewayError) as error:
        await work
    return error.value


async def test_a_newer_executor_ends_the_wait_of_the_older_one_at_any_process(database_url, tmp_path):
    async with simulated() as upstream:
        toml = one_slot(upstream)
        async with processes(database_url, tmp_path, toml, toml) as (one, two):
            first, gate = await occupied(one, "p/sim-fast")
            older = start(two.pipeline.complete(run(1)))
            other_run = start(two.pipeline.complete(run(1, "another")))
            await queued(one, 2)
            newer = start(one.pipeline.complete(run(2)))
            equal = start(two.pipeline.complete(run(2)))
            # The slot is taken all the time: it did not wait for it.
            error = await refused(older)
            assert (error.code, error.retry_after_s) == (Code.OWNER_FENCE, None)
            gate.set()
            await asyncio.gather(first, equal, other_run, newer)
            # And from now on, whoever asks.
            for line in (one, two):
                assert (await refused(line.pipeline.complete(run(1)))).code is Code.OWNER_FENCE
            assert (await upstream.ledger())["dispatches"] == 4
            assert await one.slots() == []


async def test_a_granted_request_of_an_older_executor_is_not_sent(database_url, tmp_path):
    async with simulated() as upstream:
        toml = one_slot(upstream, "concurrency = 2")
        async with processes(database_url, tmp_path, toml, toml) as (one, two):
            held = Gated()
            older = start(one.pipeline.complete(run(1), held))
            await held.granted.wait()
            await two.pipeline.complete(run(2))
            held.gate.set()
            error = await refused(older)
            assert error.code is Code.OWNER_FENCE
            await one.settled()
            assert (await upstream.ledger())["dispatches"] == 1
            rows = await one.invocations()
            assert [(row["status"], row["state"]) for row in rows if row["status"] != "success"] == [
                ("not_dispatched", "zero")
            ]
            assert await one.slots() == []
            await one.audit()


async def test_a_granted_request_goes_on_where_the_other_executor_is_no_newer(database_url, tmp_path):
    async with simulated() as upstream:
        toml = one_slot(upstream, "concurrency = 2")
        async with processes(database_url, tmp_path, toml, toml) as (one, two):
            held = Gated()
            waits = start(one.pipeline.complete(run(2), held))
            await held.granted.wait()
            await two.pipeline.complete(run(2))
            assert (await refused(two.pipeline.complete(run(1)))).code is Code.OWNER_FENCE
            held.gate.set()
            await waits
            assert (await upstream.ledger())["dispatches"] == 2


# ------------------------------------------------------------------ between grant and dispatch


async def not_sent(line: WholeLine, upstream: SimulatedProvider, dispatches: int) -> None:
    """Nothing reached the provider, the attempt is settled as not dispatched, and its slot is free at once."""
    await line.settled()
    assert (await upstream.ledger())["dispatches"] == dispatches
    rows = [row for row in await line.invocations() if row["status"] != "success"]
    assert [(row["status"], row["state"], row["usd"]) for row in rows] == [("not_dispatched", "zero", 0)]
    assert await line.slots() == []
    await line.audit()


async def test_a_key_that_was_revoked_while_it_waited_sends_nothing(database_url, tmp_path):
    async with simulated() as upstream:
        toml = one_slot(upstream)
        async with processes(database_url, tmp_path, toml, toml) as (one, two):
            first, gate = await occupied(one, "p/sim-fast")
            waiting = start(two.pipeline.complete(call("p/sim-fast")))
            await queued(one, 1)
            two.revoked = True
            gate.set()
            await first
            assert (await refused(waiting)).code is Code.PERMISSION_DENIED
            await not_sent(two, upstream, 1)


async def test_a_deadline_that_passed_before_the_dispatch_sends_nothing(database_url, tmp_path):
    async with simulated() as upstream, processes(database_url, tmp_path, one_slot(upstream)) as (line,):
        held = Gated()
        late = start(line.pipeline.complete(call("p/sim-fast", deadline_s=0.2), held))
        await held.granted.wait()
        # Held until its time is over.
        asyncio.get_running_loop().call_later(0.25, held.gate.set)
        assert (await refused(late)).code is Code.DEADLINE_EXCEEDED
        await not_sent(line, upstream, 0)


async def test_a_call_that_was_cancelled_before_the_dispatch_sends_nothing(database_url, tmp_path):
    async with simulated() as upstream:
        toml = one_slot(upstream)
        async with processes(database_url, tmp_path, toml, toml) as (one, two):
            held = Gated()
            cancelled = start(one.pipeline.complete(call("p/sim-fast"), held))
            await held.granted.wait()
            behind = start(two.pipeline.complete(call("p/sim-fast")))
            await queued(one, 1)
            cancelled.cancel()
            with pytest.raises(asyncio.CancelledError):
                await cancelled
            # Its slot goes to the next one without waiting for anything.
            async with asyncio.timeout(30):
                await behind
            await not_sent(one, upstream, 1)


async def test_a_deadline_that_passes_in_the_queue_frees_the_place_and_tells_it(database_url, tmp_path):
    async with simulated() as upstream:
        toml = one_slot(upstream)
        async with processes(database_url, tmp_path, toml, toml) as (one, two):
            first, gate = await occupied(one, "p/sim-fast")
            started = time.monotonic()
            error = await refused(two.pipeline.complete(call("p/sim-fast", deadline_s=0.2)))
            assert error.code is Code.DEADLINE_EXCEEDED
            assert 0.15 < time.monotonic() - started < 30
            assert await one.slots() == ["active"]
            gate.set()
            await first
            assert (await upstream.ledger())["dispatches"] == 1


async def test_a_process_that_has_lapsed_sends_nothing(database_url, tmp_path):
    async with simulated() as upstream, processes(database_url, tmp_path, one_slot(upstream)) as (line,):
        held = Gated()
        waiting = start(line.pipeline.complete(call("p/sim-fast"), held))
        await held.granted.wait()
        line.controller._trusted_until = 0.0
        held.gate.set()
        assert (await refused(waiting)).code is Code.CONTROL_STORE_UNAVAILABLE
        await not_sent(line, upstream, 0)
