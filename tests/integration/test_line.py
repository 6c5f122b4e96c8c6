"""The line over a real database and real sockets to simulated providers: every way an attempt ends."""

from __future__ import annotations

import asyncio
import time
from contextlib import AsyncExitStack, asynccontextmanager
from decimal import Decimal

import pytest
from structlog.testing import capture_logs

from gateway.call import Resend
from gateway.errors import (
    AdmissionRefused,
    AllRoutesFailed,
    Code,
    GatewayError,
    InvalidRequest,
    ModelNotFound,
    NoRoute,
    PermissionDenied,
    StreamBroken,
    UpstreamRejected,
)
from tests.fakes.ports import refusing_port
from tests.fakes.simulated import simulated
from tests.fakes.whole_line import Heard, call, read, whole_line

PRICE = 'price = { input = "2.50", output = "10.00" }'


@asynccontextmanager
async def two_providers(database_url, tmp_path, *, more: str = "", of_first: str = "", of_second: str = ""):
    """A line with model `m` at `first` and then `second`, and `only` at `first` alone; and the two providers."""
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
                {of_first}
                [providers.second]
                protocol = "chat_completions"
                base_url = "{second.url}"
                {of_second}
                [models.m]
                providers = [{{ provider = "first", model = "sim-fast" }}]
                fallback = [{{ provider = "second", model = "sim-small" }}]
                {PRICE}
                [models.only]
                providers = [{{ provider = "first", model = "sim-fast" }}]
                {PRICE}
                [routing]
                backoff_s = [0.05, 0.1, 0.2]
                {more}
                """,
            )
        )
        yield line, first, second


@pytest.fixture
async def world(database_url, tmp_path):
    async with two_providers(
        database_url,
        tmp_path,
        of_first='first_byte_s = 0.3\ngap_s = 0.3\nexecution_limit_s = 2\nisolation_s = 0.5\non_cancel = "close"',
    ) as made:
        yield made


async def test_a_streamed_answer_is_settled_before_its_last_message(world):
    line, first, _ = world
    heard = Heard()
    async with line.pipeline.stream(call("m", session_id="s"), heard) as items:
        text, ended = await read(items)
    assert text
    assert ended is not None
    outcome = ended.outcome
    assert (outcome.ended, outcome.settlement, outcome.cost.state) == ("complete", "settled", "charged")
    expected = (
        Decimal(outcome.usage.input_total or 0) * Decimal("2.50")
        + Decimal(outcome.usage.output_total or 0) * Decimal("10.00")
    ) / 1_000_000
    assert outcome.cost.usd == expected
    assert outcome.counters is not None
    assert outcome.counters.session_usd == outcome.counters.day_usd == outcome.counters.total_usd == expected
    ledger = await first.ledger()
    assert (ledger["tokens_in"], ledger["tokens_out"]) == (outcome.usage.input_total, outcome.usage.output_total)
    assert heard.starts == [("first", 1)]
    assert await line.slots() == []
    await line.audit()


async def test_a_plain_answer_is_stored_before_it_is_settled(world):
    line, *_ = world
    heard = Heard()
    completion = await line.pipeline.complete(call("m"), heard)
    assert completion.response.choices[0].text
    assert heard.stored == [1]
    assert completion.outcome.cost.state == "charged"
    await line.audit()


async def test_a_transient_failure_switches_to_the_next_route_and_says_so(world):
    line, first, _ = world
    await first.set_faults(status=503)
    heard = Heard()
    async with line.pipeline.stream(call("m"), heard) as items:
        _, ended = await read(items)
    assert ended is not None
    assert [(a.route.provider, a.status, a.http_status) for a in ended.outcome.attempts] == [
        ("first", "error", 503),
        ("second", "success", None),
    ]
    assert heard.starts == [("first", 1), ("second", 2)]
    rows = await line.invocations()
    assert [(r["state"], r["is_fallback"], r["failed_provider"]) for r in rows] == [
        ("zero", False, None),
        ("charged", True, "first"),
    ]
    await line.audit()


async def test_a_provider_that_refuses_connections_is_not_dispatched_and_costs_nothing(database_url, tmp_path):
    with refusing_port() as port:
        async with simulated() as good:
            toml = f"""
            [providers.down]
            protocol = "chat_completions"
            base_url = "http://127.0.0.1:{port}/v1"
            [providers.good]
            protocol = "chat_completions"
            base_url = "{good.url}"
            [models.sim-fast]
            providers = ["down", "good"]
            {PRICE}
            """
            async with whole_line(database_url, tmp_path, toml) as line:
                completion = await line.pipeline.complete(call("sim-fast"))
                assert [a.status for a in completion.outcome.attempts] == ["not_dispatched", "success"]
                assert completion.outcome.attempts[0].cost.state == "zero"
                await line.audit()


async def test_without_another_route_a_transient_failure_is_tried_again(world):
    line, first, _ = world
    await first.set_faults(status=500, fail_first=2, key="k")
    completion = await line.pipeline.complete(call("only"))
    assert [a.status for a in completion.outcome.attempts] == ["error", "error", "success"]
    await line.audit()


async def test_attempts_are_bounded_and_all_of_them_are_listed(world):
    line, first, second = world
    await first.set_faults(status=500)
    await second.set_faults(status=502)
    with pytest.raises(AllRoutesFailed) as failed:
        await line.pipeline.complete(call("m"))
    assert failed.value.outcome is not None
    assert 2 <= len(failed.value.outcome.attempts) <= 6
    assert "first/sim-fast: 500" in failed.value.message
    assert "second/sim-small: 502" in failed.value.message
    await line.audit()


async def test_the_callers_own_fault_is_neither_retried_nor_switched(world):
    line, first, second = world
    await first.set_faults(status=400)
    with pytest.raises(UpstreamRejected):
        await line.pipeline.complete(call("m"))
    assert (await second.ledger())["dispatches"] == 0
    await line.audit()


async def test_a_bad_credential_is_ours_and_the_next_route_is_tried(world):
    line, first, _ = world
    await first.set_faults(status=401)
    completion = await line.pipeline.complete(call("m"))
    assert [a.error_class for a in completion.outcome.attempts] == ["ours", None]


async def test_failover_can_be_forbidden(world):
    line, first, second = world
    await first.set_faults(status=503)
    with pytest.raises(AllRoutesFailed):
        await line.pipeline.complete(call("m", allow_failover=False))
    assert (await second.ledger())["dispatches"] == 0


async def test_a_first_byte_that_does_not_come_moves_an_interactive_call_to_the_next_route(world):
    line, first, _ = world
    await first.set_faults(hang="before_first_byte")
    async with line.pipeline.stream(call("m")) as items:
        _, ended = await read(items)
    assert ended is not None
    assert [(a.status, a.cost.state) for a in ended.outcome.attempts] == [
        ("timeout", "unknown"),
        ("success", "charged"),
    ]
    assert ended.outcome.cost.state == "unknown"
    assert ended.outcome.cost.upper_bound_usd is not None
    assert await line.slots() == ["quarantined"]
    await line.audit()


async def test_an_uncertain_dispatch_is_not_sent_again_where_that_is_forbidden(world):
    line, first, second = world
    await first.set_faults(hang="before_first_byte")
    with pytest.raises(StreamBroken) as broken:
        async with line.pipeline.stream(call("m", resend_uncertain=Resend.NEVER)) as items:
            await read(items)
    assert broken.value.code is Code.UNCERTAIN
    assert (await second.ledger())["dispatches"] == 0


@pytest.mark.parametrize(
    ("faults", "cause"),
    [
        ({"terminal": "no_finish"}, "no_terminal"),
        ({"json": "truncated"}, "malformed"),
        ({"die": "fin"}, "connection_lost"),
    ],
    ids=str,
)
async def test_a_plain_answer_that_has_come_is_not_bought_twice_and_says_what_was_wrong_with_it(world, faults, cause):
    line, first, second = world
    await first.set_faults(**faults)
    with pytest.raises(StreamBroken) as broken, capture_logs() as told:
        await line.pipeline.complete(call("m"))
    assert broken.value.code is Code.UNCERTAIN
    assert broken.value.outcome is not None
    (attempt,) = broken.value.outcome.attempts
    assert (attempt.code, attempt.error_class) == (cause, "network")
    assert f"{attempt.message} ({cause})" in str(broken.value)
    (ended,) = [event for event in told if event["event"] == "gateway.request_ended"]
    assert (ended["ended"], ended["error_class"], ended["error_code"]) == ("uncertain", "network", cause)
    assert (await first.ledger())["dispatches"] == 1
    assert (await second.ledger())["dispatches"] == 0
    await line.audit()


@pytest.mark.parametrize("streamed", [False, True], ids=["plain", "stream"])
async def test_a_page_in_place_of_an_answer_is_no_answer_and_the_next_route_is_asked(world, streamed):
    line, first, second = world
    await first.set_faults(json="html")
    if streamed:
        async with line.pipeline.stream(call("m")) as items:
            _, ended = await read(items)
        assert ended is not None
        outcome = ended.outcome
    else:
        outcome = (await line.pipeline.complete(call("m"))).outcome
    # It is no proof of an end: what it cost stays open.
    assert [(attempt.error_class, attempt.cost.state) for attempt in outcome.attempts] == [
        ("network", "unknown"),
        (None, "charged"),
    ]
    assert (await second.ledger())["dispatches"] == 1
    await line.audit()


async def test_a_job_does_not_resend_an_uncertain_dispatch(world):
    line, first, second = world
    await first.set_faults(die="fin_before_headers")
    with pytest.raises(StreamBroken) as broken:
        await line.pipeline.complete(call("m", transport="job"))
    assert broken.value.code is Code.UNCERTAIN
    assert (await second.ledger())["dispatches"] == 0
    await line.audit()


@pytest.mark.parametrize(
    "faults",
    [{"die_after": 3}, {"terminal": "none"}, {"terminal": "no_done"}, {"hang": "mid"}, {"error_in_stream": "chunk"}],
    ids=str,
)
async def test_after_content_there_is_no_switch_and_the_failure_is_explicit(world, faults):
    line, first, second = world
    await first.set_faults(**faults)
    async with line.pipeline.stream(call("m")) as items:
        with pytest.raises(StreamBroken) as broken:
            await read(items)
    assert broken.value.outcome is not None
    assert broken.value.outcome.cost.state == "unknown"
    assert (await second.ledger())["dispatches"] == 0
    in_stream_error = "error_in_stream" in faults
    assert broken.value.outcome.ended == ("failed" if in_stream_error else "uncertain")
    assert await line.slots() == ([] if in_stream_error else ["quarantined"])
    await line.audit()


@pytest.mark.parametrize("terminal", ["masked", "error_word"])
async def test_a_plain_answer_that_ends_in_an_error_may_have_cost_something(world, terminal):
    line, first, second = world
    await first.set_faults(terminal=terminal)
    with pytest.raises(StreamBroken) as broken:
        await line.pipeline.complete(call("m", transport="job"))
    assert broken.value.code is Code.UNCERTAIN
    assert (await second.ledger())["dispatches"] == 0
    [row] = await line.invocations()
    assert (row["state"], row["usd"], row["ended"]) == ("unknown", None, "error_in_stream")
    assert await line.slots() == []
    await line.audit()


@pytest.mark.parametrize("gone", [asyncio.CancelledError, ConnectionResetError])
async def test_a_caller_who_goes_away_has_cancelled_however_that_is_noticed(world, gone):
    line, first, _ = world
    await first.set_faults(pace=0.05, chunks=200)

    async def leaves() -> None:
        async with line.pipeline.stream(call("only")) as items:
            await anext(items)
            raise gone

    with capture_logs() as logged, pytest.raises(gone):
        await leaves()
    [ended] = [entry for entry in logged if entry["event"] == "gateway.request_ended"]
    # What was sent is on its way to its end, and nothing of it is in the counters yet.
    assert (ended["ended"], ended["code"], ended["settlement"]) == ("cancelled", "cancelled", "pending")
    await line.settled()
    await line.audit()


async def test_a_stream_its_caller_leaves_keeps_its_slot_in_quarantine_until_its_time(world):
    line, first, _ = world
    await first.set_faults(pace=0.05, chunks=200)
    started = time.monotonic()
    async with line.pipeline.stream(call("only")) as items:
        await anext(items)
    await line.settled()
    assert await line.slots() == ["quarantined"]
    [row] = await line.invocations()
    assert (row["status"], row["state"], row["ended"]) == ("cancelled", "unknown", "cancelled")
    assert (await first.until(lambda ledger: ledger["active"] == 0))["dispatches"] == 1
    # execution limit 2 s and isolation 0.5 s: then the slot counts no more.
    await first.set_faults()
    for _ in range(3):
        await line.pipeline.complete(call("only"))
    while await line.slots() == ["quarantined"]:
        assert time.monotonic() - started < 20
        await asyncio.sleep(0.1)
        await line.pipeline.complete(call("only"))
    assert time.monotonic() - started > 2.4
    await line.audit()


async def test_a_call_cancelled_while_it_waits_leaves_nothing_behind(world):
    line, first, _ = world
    await first.set_faults(latency=0.5)
    holders = [asyncio.create_task(line.pipeline.complete(call("only"))) for _ in range(3)]
    await first.until(lambda ledger: ledger["active"] == 3)
    heard = Heard()
    waiting = asyncio.create_task(line.pipeline.complete(call("only"), heard))
    async with asyncio.timeout(30):
        while not heard.waits:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    waiting.cancel()
    await asyncio.gather(*holders)
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert (await first.ledger())["dispatches"] == 3
    await line.settled()
    assert await line.slots() == []


async def test_two_hundred_calls_at_once_never_exceed_the_limit(database_url, tmp_path):
    async with two_providers(database_url, tmp_path, more="", of_first="", of_second="") as (line, first, _):
        group = "http://" + first.url.split("/")[2]
        await line.rows("update control.capacity_group set queue_bound = 500 where group_id = $1", group)
        await first.set_faults(latency=0.005)
        answers = await asyncio.gather(*(line.pipeline.complete(call("only")) for _ in range(200)))
        assert len(answers) == 200
        ledger = await first.ledger()
        assert ledger["dispatches"] == 200
        assert ledger["peak_concurrency"] <= 3
        await line.audit()


async def test_with_one_provider_a_rate_limit_is_waited_out(world):
    line, first, _ = world
    await first.set_faults(status=429, retry_after=0.6, fail_first=1, key="k")
    asked = time.monotonic()
    completion = await line.pipeline.complete(call("only"))
    assert time.monotonic() - asked >= 0.6
    assert [a.status for a in completion.outcome.attempts] == ["error", "success"]
    moments = [dispatch["started"] for dispatch in await first.dispatches()]
    assert moments[1] - moments[0] >= 0.55


async def test_a_rate_limit_that_is_repeated_is_waited_out_as_long_as_it_says_each_time(world):
    line, first, _ = world
    await first.set_faults(status=429, retry_after=0.4, fail_first=3, key="k")
    asked = time.monotonic()
    completion = await line.pipeline.complete(call("only"))
    assert 1.2 <= time.monotonic() - asked < 20
    assert [a.status for a in completion.outcome.attempts] == ["error"] * 3 + ["success"]


async def test_waiters_that_cannot_outlive_a_cooldown_are_told_at_once(world):
    line, first, _ = world
    await first.set_faults(status=429, retry_after=30, latency=0.3)
    asked = time.monotonic()
    answers = await asyncio.gather(
        *(line.pipeline.complete(call("only", deadline_s=25)) for _ in range(6)), return_exceptions=True
    )
    assert time.monotonic() - asked < 25
    assert {type(answer) for answer in answers} <= {AdmissionRefused, AllRoutesFailed}
    refused = [answer for answer in answers if isinstance(answer, AdmissionRefused)]
    assert refused
    assert all(answer.code is Code.COOLDOWN and (answer.retry_after_s or 0) > 20 for answer in refused)
    assert await line.slots() == []


async def test_the_callers_deadline_ends_the_wait_for_a_slot(world):
    line, first, _ = world
    await first.set_faults(latency=1.0)
    holders = [asyncio.create_task(line.pipeline.complete(call("only"))) for _ in range(3)]
    await first.until(lambda ledger: ledger["active"] == 3)
    with pytest.raises(AdmissionRefused) as refused:
        await line.pipeline.complete(call("only", deadline_s=0.2))
    assert refused.value.code is Code.DEADLINE_EXCEEDED
    await asyncio.gather(*holders)


async def test_the_callers_deadline_ends_a_call_that_was_sent(world):
    line, first, _ = world
    await first.set_faults(latency=1.0)
    with pytest.raises(GatewayError) as late:
        await line.pipeline.complete(call("only", deadline_s=0.3))
    assert late.value.code is Code.DEADLINE_EXCEEDED
    [row] = await line.invocations()
    assert (row["state"], row["status"]) == ("unknown", "timeout")


async def test_a_debit_that_has_ended_is_not_dispatched_again(world):
    line, first, _ = world
    await line.pipeline.complete(call("m", debit_id="d"))
    with pytest.raises(AdmissionRefused) as refused:
        await line.pipeline.complete(call("m", debit_id="d"))
    assert refused.value.code is Code.DUPLICATE_DEBIT
    assert (await first.ledger())["dispatches"] == 1


async def test_a_key_revoked_while_its_call_waited_is_not_dispatched(world):
    line, first, _ = world
    line.revoked = True
    with pytest.raises(PermissionDenied):
        await line.pipeline.complete(call("m"))
    assert (await first.ledger())["dispatches"] == 0
    await line.settled()
    assert await line.slots() == []
    [row] = await line.invocations()
    assert (row["state"], row["status"]) == ("zero", "not_dispatched")


async def test_policy_leaves_routes_out_and_says_why(world):
    line, *_ = world
    completion = await line.pipeline.complete(call("m", allowed_providers=("second",)))
    assert completion.outcome.attempts[0].route.provider == "second"
    with pytest.raises(NoRoute) as none:
        await line.pipeline.complete(call("m", allowed_providers=("third",)))
    assert "first: not_allowed" in none.value.message
    with pytest.raises(NoRoute):
        await line.pipeline.complete(call("m", max_cost_usd=Decimal(0)))
    with pytest.raises(ModelNotFound):
        await line.pipeline.complete(call("no-such-model"))
    with pytest.raises(InvalidRequest):
        await line.pipeline.complete(call("m", role="planner"))
    [row] = await line.invocations()
    assert row["is_fallback"]


async def test_a_model_may_be_pinned_to_a_provider(world):
    line, *_ = world
    completion = await line.pipeline.complete(call("second/m"))
    assert [a.route.provider for a in completion.outcome.attempts] == ["second"]


async def test_a_bound_that_the_answer_passes_is_not_kept(database_url, tmp_path):
    """Served at a tier that nobody has a price for: what it can cost at most is not what was reckoned before."""
    async with two_providers(database_url, tmp_path) as (line, first, _):
        await first.set_faults(service_tier="priority")
        completion = await line.pipeline.complete(call("only"))
        assert (completion.outcome.cost.reason, completion.outcome.cost.upper_bound_usd) == (
            "unpriced_service_tier",
            None,
        )
        [row] = await line.invocations()
        assert (row["state"], row["upper_bound_usd"], row["cost_reason"]) == ("unknown", None, "unpriced_service_tier")
        [counted] = await line.rows(
            "select unbounded_attempts, unknown_upper_bound_usd from control.counter where kind = 'total'"
        )
        assert tuple(counted) == (1, 0)
        await line.audit()
