"""
What is told of a provider that is held back: each cause by its own name, to callers that are refused, to those that
wait and to operators, whichever process they ask.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any, cast

import pytest
import structlog

from admission.contract import StoreUnavailable
from admission.store import Store
from gateway.errors import AdmissionRefused, AllRoutesFailed, AttemptedError, Code, GatewayError
from gateway.jobs.model import Wait, waits_for
from gateway.reading import Reading
from tests.fakes.simulated import SimulatedProvider, simulated
from tests.fakes.whole_line import Heard, WholeLine, call
from tests.integration.test_limits import group, host, occupied, processes, profile, queued, start


async def until(found: Callable[[], object], within_s: float = 30.0) -> None:
    give_up = time.monotonic() + within_s
    while not found():
        assert time.monotonic() < give_up, "it did not come true in time"
        await asyncio.sleep(0.005)


def plain(upstream: SimulatedProvider, limits: str = "concurrency = 2") -> str:
    return profile("p", upstream, 'models = ["sim-fast"]') + group(upstream, limits)


async def refused(work: Awaitable[object]) -> AttemptedError:
    with pytest.raises(GatewayError) as error:
        await work
    assert isinstance(error.value, AttemptedError)
    return error.value


def reading(line: WholeLine) -> Reading:
    nothing = cast("Any", None)
    return Reading(
        line.settings,
        line.controller,
        cast("Store", line.controller._store),
        nothing,
        nothing,
        nothing,
        nothing,
        nothing,
    )


async def floors(line: WholeLine) -> list[dict[str, Any]]:
    [row] = await reading(line).groups()
    return list(row["floors"])


async def test_a_rate_limit_is_told_as_one_by_every_process(database_url, tmp_path):
    async with simulated() as upstream, processes(database_url, tmp_path, *[plain(upstream)] * 2) as (one, two):
        await upstream.set_faults(status=429, retry_after=30)
        first = await refused(one.pipeline.complete(call("p/sim-fast", deadline_s=3)))
        assert isinstance(first, AllRoutesFailed)
        assert first.groups == (host(upstream),)
        for line in (one, two):
            error = await refused(line.pipeline.complete(call("p/sim-fast", deadline_s=3)))
            assert isinstance(error, AdmissionRefused)
            assert error.code is Code.COOLDOWN
            assert "p limits the rate of sim-fast" in error.message
            assert "failures" not in error.message
            assert (error.groups, error.cause, waits_for(error)) == (
                (host(upstream),),
                "rate_limited",
                Wait.RATE_LIMITED,
            )
            [floor] = await floors(line)
            assert (floor["cause"], floor["providers"], floor["model"]) == ("rate_limited", ["p"], "sim-fast")


async def test_failures_are_told_as_failures(database_url, tmp_path):
    async with simulated() as upstream:
        toml = plain(upstream, "concurrency = 2\nfailure_threshold = 1\nfirst_cooldown_s = 30")
        async with processes(database_url, tmp_path, toml, toml) as (one, two):
            await upstream.set_faults(status=503)
            await refused(one.pipeline.complete(call("p/sim-fast", deadline_s=1)))
            error = await refused(two.pipeline.complete(call("p/sim-fast", deadline_s=1)))
            assert error.code is Code.COOLDOWN
            assert "is cooling down after failures until 20" in error.message
            assert waits_for(error) is Wait.COOLDOWN


@pytest.mark.parametrize(
    ("status", "cause", "said"),
    [
        (401, "credential_rejected", "p rejected the gateway's credential"),
        (402, "quota_exhausted", "the quota of the gateway's account at p is exhausted"),
    ],
)
async def test_a_credential_that_is_set_aside_is_told_with_who_has_to_act(database_url, tmp_path, status, cause, said):
    async with simulated() as upstream, processes(database_url, tmp_path, *[plain(upstream)] * 2) as (one, two):
        await upstream.set_faults(status=status)
        with structlog.testing.capture_logs() as logs:
            await refused(one.pipeline.complete(call("p/sim-fast")))
        [line] = [line for line in logs if line["event"] == "gateway.provider_left_out"]
        assert (line["provider"], line["cause"], line["http_status"]) == ("p", cause, status)
        # The other process has never seen the provider's answer.
        for process in (one, two):
            error = await refused(process.pipeline.complete(call("p/sim-fast")))
            assert error.code is Code.PROVIDER_UNAVAILABLE
            assert said in error.message
            assert "an operator has to" in error.message
            assert waits_for(error) is Wait(cause)
            [floor] = await floors(process)
            assert (floor["cause"], floor["providers"]) == (cause, ["p"])
        assert (await upstream.ledger())["dispatches"] == 1


async def test_a_rate_limit_for_longer_than_anybody_waits_is_told_as_one_by_every_process(database_url, tmp_path):
    async with simulated() as upstream, processes(database_url, tmp_path, *[plain(upstream)] * 2) as (one, two):
        await upstream.set_faults(status=429, retry_after=86_400)
        await refused(one.pipeline.complete(call("p/sim-fast")))
        error = await refused(two.pipeline.complete(call("p/sim-fast")))
        assert error.code is Code.PROVIDER_UNAVAILABLE
        assert "p limits the rate of sim-fast" in error.message
        assert waits_for(error) is Wait.RATE_LIMITED
        [floor] = await floors(two)
        assert (floor["cause"], floor["model"]) == ("rate_limited", "sim-fast")


async def test_what_an_earlier_version_had_put_aside_is_told_with_all_that_it_may_be(database_url, tmp_path):
    async with simulated() as upstream, processes(database_url, tmp_path, plain(upstream)) as (line,):
        await upstream.set_faults(status=401)
        await refused(line.pipeline.complete(call("p/sim-fast")))
        await line.rows("update control.floor set kind = 'unavailable'")
        error = await refused(line.pipeline.complete(call("p/sim-fast")))
        assert "rejected the gateway's credential, or said that its quota is exhausted" in error.message
        assert waits_for(error) is Wait.PROVIDER_UNAVAILABLE
        [floor] = await floors(line)
        assert floor["cause"] == "provider_unavailable"


async def test_who_waits_out_a_rate_limit_is_told_so_and_what_an_operator_reads_says_so_too(database_url, tmp_path):
    async with simulated() as upstream, processes(database_url, tmp_path, *[plain(upstream)] * 2) as (one, two):
        await upstream.set_faults(status=429, retry_after=1.5, fail_first=1, key="k")
        heard = [Heard(), Heard()]
        works = [start(one.pipeline.complete(call("p/sim-fast", deadline_s=20, debit_id="first"), heard[0]))]
        await until(lambda: heard[0].waits)
        works.append(start(two.pipeline.complete(call("p/sim-fast", deadline_s=20, debit_id="second"), heard[1])))
        await queued(one, 2)
        told = await reading(two).waiting(["first", "second"])
        assert {debit: waiting.reason for debit, waiting in told.items()} == {
            "first": "rate_limited",
            "second": "rate_limited",
        }
        [row] = await reading(one).groups()
        assert [waiting["reason"] for waiting in row["waiting"]] == ["rate_limited"] * 2
        await asyncio.gather(*works)
        for one_heard in heard:
            assert {waiting.reason for waiting in one_heard.waits} == {"rate_limited"}
        assert heard[0].waits[0].until_s is not None


async def test_a_process_that_had_lapsed_asks_again_for_those_who_waited_there(database_url, tmp_path):
    async with simulated() as upstream:
        toml = plain(upstream, "concurrency = 1")
        async with processes(database_url, tmp_path, toml, toml) as (one, two):
            held, gate = await occupied(one, "p/sim-fast")
            waits = start(two.pipeline.complete(call("p/sim-fast", deadline_s=20)))
            await queued(one, 1)
            await lapse(one, two)
            await two.controller._renew(first=False)
            gate.set()
            await held
            assert (await waits).outcome.ended == "complete"


async def test_a_place_that_the_store_still_keeps_for_a_process_that_had_lapsed_is_told_as_lost(database_url, tmp_path):
    async with simulated() as upstream:
        toml = plain(upstream, "concurrency = 1")
        async with processes(database_url, tmp_path, toml, toml) as (one, two):
            _, gate = await occupied(one, "p/sim-fast")
            waits = start(two.pipeline.complete(call("p/sim-fast", deadline_s=20)))
            await queued(one, 1)
            await lapse(one, two)
            store = cast("Any", two.controller._store)

            async def lost(*_: object, **__: object) -> list[str]:
                raise StoreUnavailable("gone")

            abandon, store.abandon = store.abandon, lost
            await two.controller._renew(first=False)
            error = await refused(waits)
            store.abandon = abandon
            assert (error.code, error.retry_after_s) == (Code.CONTROL_STORE_UNAVAILABLE, 1.0)
            assert "had not heard of this process for longer than its lease" in error.message
            gate.set()


async def test_who_waited_in_a_process_that_had_lapsed_is_told_what_happened(database_url, tmp_path):
    async with simulated() as upstream:
        toml = plain(upstream, "concurrency = 1")
        async with processes(database_url, tmp_path, toml, toml) as (one, two):
            _, gate = await occupied(one, "p/sim-fast")
            waits = start(two.pipeline.complete(call("p/sim-fast", deadline_s=20)))
            await queued(one, 1)
            await lapse(one, two)
            store = cast("Any", two.controller._store)
            renew = store.renew

            async def away(*given: Any, first: bool) -> float | None:
                if first:
                    raise StoreUnavailable("gone")
                known: float | None = await renew(*given, first=first)
                return known

            store.renew = away
            with pytest.raises(StoreUnavailable):
                await two.controller._renew(first=False)
            error = await refused(waits)
            assert error.code is Code.CONTROL_STORE_UNAVAILABLE
            assert "had not heard of this process for longer than its lease" in error.message
            assert "does not answer" not in error.message
            assert error.dispatched is False
            gate.set()


async def lapse(one: WholeLine, other: WholeLine) -> None:
    """The store has not heard of the other for longer than its lease."""
    await one.rows(
        "update control.owner set expires_at = clock_timestamp() - interval '1 hour' where owner_id = $1",
        other.controller.owner,
    )


async def test_a_store_that_is_away_is_not_confused_with_one_that_does_not_admit(database_url, tmp_path):
    async with simulated() as upstream, processes(database_url, tmp_path, plain(upstream)) as (line,):
        await line.rows("update control.store set closed_until = clock_timestamp() + interval '1 minute'")
        error = await refused(line.pipeline.complete(call("p/sim-fast")))
        assert error.code is Code.CONTROL_STORE_UNAVAILABLE
        assert "answers, and was replaced" in error.message
        assert error.retry_after_s is not None
        assert 50 < error.retry_after_s <= 60
        line.controller._trusted_until = 0.0
        error = await refused(line.pipeline.complete(call("p/sim-fast")))
        assert error.message == "the control store does not answer: nothing was dispatched"
        assert (await upstream.ledger())["dispatches"] == 0
