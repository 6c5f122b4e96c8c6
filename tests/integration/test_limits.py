"""
What a user may rely on where capacity is limited, through the whole line: several processes on one database, and the
provider's own ledger as the judge.
"""

from __future__ import annotations

import asyncio
import itertools
import operator
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import pytest

from admission.lease import Class
from gateway.answer import Ended
from gateway.call import Resend
from gateway.errors import AdmissionRefused, AllRoutesFailed, Code, GatewayError
from tests.fakes.postgres_proxy import Action, Rule, postgres_proxy
from tests.fakes.simulated import SimulatedProvider, simulated
from tests.fakes.whole_line import Heard, WholeLine, call, read, whole_line

T = TypeVar("T")


def host(upstream: SimulatedProvider) -> str:
    return "/".join(upstream.url.split("/")[:3])


def profile(name: str, upstream: SimulatedProvider, more: str = "") -> str:
    return f"""
        [providers.{name}]
        protocol = "chat_completions"
        base_url = "{upstream.url}"
        first_byte_s = 20
        gap_s = 20
        {more}
    """


def model(name: str, *targets: str) -> str:
    """`targets` as provider/model, the first as the primary."""
    entries = [f'{{ provider = "{p}", model = "{m}" }}' for p, _, m in (target.partition("/") for target in targets)]
    return f"""
        [models.{name}]
        providers = [{entries[0]}]
        fallback = [{", ".join(entries[1:])}]
        price = {{ input = "2.50", output = "10.00" }}
    """


def group(upstream: SimulatedProvider | str, limits: str = "", models: str = "") -> str:
    name = upstream if isinstance(upstream, str) else host(upstream)
    tables = "".join(
        f'\n[groups."{name}".models."{line.split(":")[0].strip()}"]\n{line.split(":")[1]}\n'
        for line in models.splitlines()
        if line.strip()
    )
    return f"""
        [groups."{name}"]
        {limits}
        {tables}
    """


_started: set[asyncio.Task[Any]] = set()


def start(work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
    """Beside the test; taken back before the processes end."""
    task = asyncio.create_task(work)
    _started.add(task)
    return task


@asynccontextmanager
async def processes(url: str, tmp_path: Path, *tomls: str) -> AsyncIterator[list[WholeLine]]:
    """One process for each configuration, started in this order."""
    async with AsyncExitStack() as stack:
        lines = [await stack.enter_async_context(whole_line(url, tmp_path, toml)) for toml in tomls]
        try:
            yield lines
        finally:
            for task in _started:
                task.cancel()
            await asyncio.gather(*_started, return_exceptions=True)
            _started.clear()


class Gated(Heard):
    """Holds its request back between grant and dispatch: it has a slot for as long as the test wants."""

    def __init__(self) -> None:
        super().__init__()
        self.granted = asyncio.Event()
        self.gate = asyncio.Event()

    async def dispatching(self, attempt: int) -> None:
        self.granted.set()
        await self.gate.wait()


async def occupied(line: WholeLine, name: str, **options: Any) -> tuple[asyncio.Task[Any], asyncio.Event]:
    """A request that has a slot, and the event that lets it go on."""
    held = Gated()
    task = start(line.pipeline.complete(call(name, **options), held))
    async with asyncio.timeout(30):
        await held.granted.wait()
    return task, held.gate


async def streamed(line: WholeLine, name: str, heard: Heard | None = None, **options: Any) -> Ended:
    async with line.pipeline.stream(call(name, **options), heard or Heard()) as items:
        _, ended = await read(items)
    assert ended is not None
    return ended


async def until(found: Callable[[], Awaitable[T]], within_s: float = 30.0) -> T:
    give_up = time.monotonic() + within_s
    while not (result := await found()):
        assert time.monotonic() < give_up, "it did not come true in time"
        await asyncio.sleep(0.005)
    return result


async def queued(line: WholeLine, count: int) -> None:
    async def enough() -> bool:
        return (await line.slots()).count("queued") == count

    await until(enough)


async def refusal(line: WholeLine, name: str, **options: Any) -> GatewayError:
    with pytest.raises(GatewayError) as refused:
        await line.pipeline.complete(call(name, **options))
    return refused.value


async def group_row(line: WholeLine) -> dict[str, Any]:
    """The one group, as operators see it."""
    [found] = await line.controller._store.groups()
    return found


async def ends(*calls: Coroutine[Any, Any, Any] | asyncio.Task[Any]) -> Sequence[Any]:
    return await asyncio.gather(*(one if isinstance(one, asyncio.Task) else start(one) for one in calls))


# ------------------------------------------------------------------ one endpoint, one group


async def test_profiles_models_and_aliases_of_one_endpoint_share_one_limit_over_all_processes(database_url, tmp_path):
    async with simulated() as upstream:
        await upstream.set_faults(latency=0.01, jitter=0.01)
        toml = (
            profile("one", upstream, 'models = ["sim-fast"]')
            + profile("two", upstream, 'models = ["sim-large"]')
            + model("alias-a", "one/sim-fast")
            + model("alias-b", "two/sim-fast")
            + model("other", "two/sim-small", "one/sim-large")
            + group(upstream, "concurrency = 4\nqueue = 500")
        )
        async with processes(database_url, tmp_path, toml, toml, toml) as lines:
            names = ("alias-a", "alias-b", "other", "one/sim-fast", "two/sim-large")
            await ends(
                *(
                    streamed(line, name, klass=Class(number % 2)) if number % 3 else line.pipeline.complete(call(name))
                    for number in range(6)
                    for line in lines
                    for name in names
                )
            )
            ledger = await upstream.ledger()
            assert ledger["completed"] == ledger["dispatches"] == 90
            assert ledger["peak_concurrency"] == 4
            assert [row["group_id"] for row in await lines[0].rows("select group_id from control.capacity_group")] == [
                host(upstream)
            ]
            await lines[0].audit()


# ------------------------------------------------------------------ limits of models inside a group


async def test_a_full_model_holds_up_nobody_behind_it_and_says_that_it_is_the_model(database_url, tmp_path):
    async with simulated() as upstream:
        toml = (
            profile("p", upstream)
            + model("large", "p/sim-large")
            + model("small", "p/sim-small")
            + group(upstream, "concurrency = 4\nqueue = 50", "sim-large: concurrency = 1")
        )
        async with processes(database_url, tmp_path, toml, toml) as (one, two):
            heard = Heard()
            first, gate = await occupied(one, "large")
            slow = [start(one.pipeline.complete(call("large")))]
            await queued(one, 1)
            slow.append(start(two.pipeline.complete(call("large"), heard)))
            await until(lambda: asyncio.sleep(0, heard.waits))
            assert heard.waits[0].reason == "model_capacity"
            await ends(*(line.pipeline.complete(call("small")) for _ in range(6) for line in (one, two)))
            assert await one.slots() == ["active", "queued", "queued"]
            gate.set()
            await ends(first, *slow)
            by_model = (await upstream.ledger())["by_model"]
            assert by_model["sim-large"]["peak_concurrency"] == 1
            assert by_model["sim-small"]["peak_concurrency"] <= 3


# ------------------------------------------------------------------ requests and tokens per minute


@pytest.mark.parametrize("of", ["group", "model"])
async def test_requests_per_minute_are_counted_over_all_processes_and_fill_continuously(database_url, tmp_path, of):
    async with simulated() as upstream:
        rate = "requests_per_minute = 240"
        toml = (
            profile("p", upstream)
            + model("m", "p/sim-fast")
            + group(upstream, f"concurrency = 50\nqueue = 500\n{rate if of == 'group' else ''}")
            + (f'[groups."{host(upstream)}".models.sim-fast]\n{rate}' if of == "model" else "")
        )
        async with processes(database_url, tmp_path, toml, toml) as (one, two):
            # Nobody waits a minute here: the bucket is taken down to two first.
            started = time.monotonic()
            await one.rows("update control.allowance set requests_left = 2, filled_at = control.now_v1()")
            heard = [Heard() for _ in range(6)]
            await ends(
                *(line.pipeline.complete(call("m"), heard[n]) for n, line in enumerate((one, two, one, two, one, two)))
            )
            # Four more than there were, at four a second.
            assert 1.0 <= time.monotonic() - started < 15
            arrivals = sorted(dispatch["started"] for dispatch in await upstream.dispatches())
            assert all(at - started >= (place - 1) / 4 for place, at in enumerate(arrivals))
            reasons = {waiting.reason for one_heard in heard for waiting in one_heard.waits}
            assert reasons == {"rate"}


async def test_a_request_takes_from_the_buckets_of_group_and_model_or_from_neither(database_url, tmp_path):
    async with simulated() as upstream:
        toml = (
            profile("p", upstream)
            + model("a", "p/sim-fast")
            + model("b", "p/sim-small")
            + group(
                upstream,
                "concurrency = 10\nqueue = 10\nrequests_per_minute = 60\ntokens_per_minute = 60000",
                "sim-fast: requests_per_minute = 6",
            )
        )
        async with processes(database_url, tmp_path, toml) as (line,):
            await line.rows("update control.allowance set requests_left = 0.5 where model = 'sim-fast'")
            before = await buckets(line)
            waiting = start(line.pipeline.complete(call("a", deadline_s=1.5)))
            await queued(line, 1)
            # The model's bucket is empty: its waiter has taken nothing of the group's, and another model goes on.
            assert (await buckets(line))["", "requests_left"] == pytest.approx(before["", "requests_left"], abs=0.7)
            await line.pipeline.complete(call("b"))
            with pytest.raises(GatewayError):
                await waiting
            await line.settled()
            after = await buckets(line)
            # One was taken of 60, and it comes back in a second; nothing of the model's was.
            assert 59 <= after["", "requests_left"] <= 60
            assert after["sim-fast", "requests_left"] >= 0.5


async def buckets(line: WholeLine) -> dict[tuple[str, str], float]:
    """What is in each bucket now, by model and kind."""
    rows = await line.rows(
        "select a.model, control.filled_v1(requests_left, requests_per_minute, filled_at, now) as requests_left,"
        " control.filled_v1(tokens_left, tokens_per_minute, filled_at, now) as tokens_left"
        " from control.allowance a, control.now_v1() now"
    )
    return {(row["model"], kind): row[kind] for row in rows for kind in ("requests_left", "tokens_left")}


async def test_tokens_are_estimated_before_and_corrected_by_what_was_used(database_url, tmp_path):
    async with simulated() as upstream:
        toml = (
            profile("p", upstream)
            + model("m", "p/sim-fast")
            + model("failing", "p/sim-down")
            + group(upstream, "concurrency = 10\ntokens_per_minute = 1200", "sim-fast: tokens_per_minute = 1000")
            + "[routing]\nbackoff_s = []"
        )
        async with processes(database_url, tmp_path, toml) as (line,):
            await upstream.set_faults(model="sim-fast", latency=0.2)
            running = start(line.pipeline.complete(call("m")))
            await upstream.until(lambda ledger: ledger["active"] == 1)
            held = await buckets(line)
            # 200 tokens of output at most, and the question.
            assert held["", "tokens_left"] < 1200 - 200 + 10
            assert held["sim-fast", "tokens_left"] < 1000 - 200 + 10
            used = (await running).outcome.usage
            total = (used.input_total or 0) + (used.output_total or 0)
            assert 0 < total < 200
            corrected = await buckets(line)
            assert corrected["sim-fast", "tokens_left"] == pytest.approx(1000 - total, abs=12)
            assert corrected["", "tokens_left"] == pytest.approx(1200 - total, abs=15)
            # One that the provider refused has used none.
            with pytest.raises(AllRoutesFailed):
                await line.pipeline.complete(call("failing"))
            assert (await buckets(line))["", "tokens_left"] >= corrected["", "tokens_left"]


@pytest.mark.parametrize("of", ["group", "model"])
async def test_what_can_never_fit_is_refused_at_once_and_uses_nothing_up(database_url, tmp_path, of):
    async with simulated() as upstream:
        limit = "tokens_per_minute = 150"
        toml = (
            profile("p", upstream)
            + model("m", "p/sim-fast")
            + group(
                upstream,
                f"requests_per_minute = 600\n{limit if of == 'group' else ''}",
                f"sim-fast: {limit}" if of == "model" else "",
            )
        )
        async with processes(database_url, tmp_path, toml) as (line,):
            refused = await refusal(line, "m")
            assert refused.code is Code.TOO_LARGE
            assert refused.retry_after_s is None
            whose = "the model sim-fast of " if of == "model" else ""
            assert refused.message.endswith(f"tokens, and {whose}{host(upstream)} has 150 in a minute")
            assert refused.param == "max_tokens"
            assert (await buckets(line))["", "requests_left"] == 600
            assert (await upstream.ledger())["dispatches"] == 0
            assert await line.slots() == []


async def test_the_tokens_of_a_minute_come_back_without_anybody_asking(database_url, tmp_path):
    async with simulated() as upstream:
        toml = (
            profile("p", upstream)
            + model("m", "p/sim-fast")
            + group(upstream, "concurrency = 10\ntokens_per_minute = 30000")
            # So late that no rescan helps: the next event alone.
            + "[admission]\nrescan_s = 30"
        )
        async with processes(database_url, tmp_path, toml) as (line,):
            # 500 a second come back, and about 240 are asked for.
            await line.rows("update control.allowance set tokens_left = 0, filled_at = control.now_v1()")
            heard = Heard()
            started = time.monotonic()
            await line.pipeline.complete(call("m"), heard)
            assert 0.3 < time.monotonic() - started < 15
            assert [waiting.reason for waiting in heard.waits] == ["rate"]


# ------------------------------------------------------------------ rate limits of the provider


def gaps(dispatches: Sequence[dict[str, Any]], name: str) -> list[float]:
    """Seconds from each 429 of this model to the next of its calls."""
    mine = sorted((d for d in dispatches if d["model"] == name), key=lambda d: d["started"])
    return [
        later["started"] - earlier["finished"]
        for earlier, later in itertools.pairwise(mine)
        if earlier["status"] == 429
    ]


async def test_a_single_providers_rate_limit_is_waited_for_and_no_call_comes_early(database_url, tmp_path):
    async with simulated() as upstream:
        await upstream.set_faults(model="sim-fast", status=429, retry_after=4, fail_first=1, key="k")
        toml = (
            profile("p", upstream)
            + model("m", "p/sim-fast")
            + model("other", "p/sim-small")
            + group(upstream, "concurrency = 2\nqueue = 50")
        )
        async with processes(database_url, tmp_path, toml, toml) as (one, two):
            started = time.monotonic()
            first = start(one.pipeline.complete(call("m", deadline_s=30)))
            await upstream.until(lambda ledger: ledger["statuses"].get("429") == 1)
            await queued(one, 1)
            heard = Heard()
            rest = [
                start(line.pipeline.complete(call("m", deadline_s=30), heard)) for _ in range(4) for line in (one, two)
            ]
            # Another model of the same endpoint goes on meanwhile.
            unheld = Heard()
            for _ in range(3):
                await one.pipeline.complete(call("other"), unheld)
                await two.pipeline.complete(call("other"), unheld)
            assert "rate_limited" not in {waiting.reason for waiting in unheld.waits}
            await ends(first, *rest)
            assert time.monotonic() - started >= 4
            assert gaps(await upstream.dispatches(), "sim-fast")[0] >= 4
            ledger = await upstream.ledger()
            assert ledger["by_model"]["sim-fast"]["dispatches"] == 10
            assert ledger["statuses"] == {"429": 1, "200": 15}
            assert {waiting.reason for waiting in heard.waits} <= {"rate_limited", "capacity"}
            assert max(waiting.until_s or 0 for waiting in heard.waits) <= 4


async def test_with_an_alternative_a_rate_limit_is_no_wait(database_url, tmp_path):
    async with simulated() as upstream, simulated() as second:
        await upstream.set_faults(status=429, retry_after=30)
        toml = profile("p", upstream) + profile("q", second) + model("m", "p/sim-fast", "q/sim-fast")
        async with processes(database_url, tmp_path, toml, toml) as lines:
            started = time.monotonic()
            await lines[0].pipeline.complete(call("m"))
            await ends(*(line.pipeline.complete(call("m")) for _ in range(5) for line in lines))
            assert time.monotonic() - started < 20
            assert (await upstream.ledger())["dispatches"] == 1
            assert (await second.ledger())["completed"] == 11


async def test_of_several_limited_providers_the_one_that_is_ready_first_is_waited_for(database_url, tmp_path):
    async with simulated() as upstream, simulated() as second:
        await upstream.set_faults(status=429, retry_after=0.5, fail_first=1, key="k")
        await second.set_faults(status=429, retry_after=30)
        toml = profile("p", upstream) + profile("q", second) + model("m", "p/sim-fast", "q/sim-fast")
        async with processes(database_url, tmp_path, toml, toml) as (one, two):
            # The one that hears of both limits, and one that comes later.
            first = start(one.pipeline.complete(call("m", deadline_s=5)))
            await second.until(lambda ledger: ledger["statuses"].get("429") == 1)
            await one.settled()
            later = start(two.pipeline.complete(call("m", deadline_s=5)))
            await ends(first, later)
            assert gaps(await upstream.dispatches(), "sim-fast")[0] >= 0.5
            assert (await upstream.ledger())["dispatches"] == 3
            assert (await second.ledger())["dispatches"] == 1


async def test_a_rate_limit_of_the_account_holds_all_its_models_back(database_url, tmp_path):
    async with simulated() as upstream:
        await upstream.set_faults(model="sim-fast", status=429, retry_after=0.7, fail_first=1, key="k")
        toml = (
            profile("p", upstream, 'rate_limit_scope = "account"')
            + model("m", "p/sim-fast")
            + model("other", "p/sim-small")
        )
        async with processes(database_url, tmp_path, toml, toml) as (one, two):
            first = start(one.pipeline.complete(call("m")))
            await upstream.until(lambda ledger: ledger["statuses"].get("429") == 1)
            await queued(one, 1)
            await ends(first, two.pipeline.complete(call("other")), one.pipeline.complete(call("other")))
            dispatches = await upstream.dispatches()
            limited = dispatches[0]
            assert limited["status"] == 429
            assert all(later["started"] - limited["finished"] >= 0.7 for later in dispatches[1:])


async def test_a_short_rate_limit_fits_into_a_short_deadline(database_url, tmp_path):
    async with simulated() as upstream:
        await upstream.set_faults(status=429, retry_after=0.2, fail_first=1, key="k")
        toml = profile("p", upstream) + model("m", "p/sim-fast")
        async with processes(database_url, tmp_path, toml) as (line,):
            await line.pipeline.complete(call("m", deadline_s=3))


async def test_a_rate_limit_beyond_the_deadline_is_told_at_once_with_its_time(database_url, tmp_path):
    async with simulated() as upstream:
        await upstream.set_faults(status=429, retry_after=30)
        toml = profile("p", upstream) + model("m", "p/sim-fast")
        async with processes(database_url, tmp_path, toml, toml) as (one, two):
            started = time.monotonic()
            first = await refusal(one, "m", deadline_s=20)
            assert isinstance(first, AllRoutesFailed)
            assert first.retry_after_s is not None
            assert 20 < first.retry_after_s <= 38
            second = await refusal(two, "m", deadline_s=15)
            assert second.code is Code.COOLDOWN
            assert second.retry_after_s is not None
            assert 20 < second.retry_after_s <= 30
            assert time.monotonic() - started < 15
            assert (await upstream.ledger())["dispatches"] == 1


async def test_a_failure_after_a_rate_limit_is_backed_off_from_again(database_url, tmp_path):
    async with simulated() as upstream:
        await upstream.set_faults(status=429, retry_after=0.1)
        toml = profile("p", upstream) + model("m", "p/sim-fast") + "[routing]\nbackoff_s = [0.5, 0.5, 0.5]"
        async with processes(database_url, tmp_path, toml) as (line,):
            task = start(line.pipeline.complete(call("m")))
            await upstream.until(lambda ledger: ledger["dispatches"] == 1)
            await upstream.set_faults(status=500)
            with pytest.raises(AllRoutesFailed):
                await task
            dispatches = await upstream.dispatches()
            assert [dispatch["status"] for dispatch in dispatches[-2:]] == [500, 500]
            assert all(
                later["started"] - earlier["finished"] >= 0.5
                for earlier, later in itertools.pairwise(dispatches)
                if earlier["status"] == 500
            )


# ------------------------------------------------------------------ credentials and quotas


@pytest.mark.parametrize(
    "fault", [{"status": 401}, {"status": 429, "code": "insufficient_quota"}], ids=["401", "quota"]
)
async def test_a_provider_that_refuses_the_credential_is_left_out_for_a_while(database_url, tmp_path, fault):
    async with simulated() as upstream, simulated() as second:
        await upstream.set_faults(**fault)
        toml = (
            profile("p", upstream)
            + profile("q", second)
            + model("m", "p/sim-fast", "q/sim-fast")
            + model("only", "p/sim-small")
            + "[admission]\nunavailable_s = 10"
        )
        async with processes(database_url, tmp_path, toml, toml) as (one, two):
            started = time.monotonic()
            await one.pipeline.complete(call("m"))
            await ends(*(line.pipeline.complete(call("m")) for _ in range(4) for line in (one, two)))
            # Of every model, by every process.
            for line in (one, two):
                refused = await refusal(line, "only")
                assert refused.code is Code.PROVIDER_UNAVAILABLE
                assert refused.retry_after_s is not None
                assert 0 < refused.retry_after_s <= 10
            assert time.monotonic() - started < 10
            assert (await upstream.ledger())["dispatches"] == 1
            rows = await one.controller._store.groups()
            [floor] = [floor for row in rows for floor in row["floors"]]
            cause = "quota_exhausted" if "code" in fault else "credential_rejected"
            assert (floor["cause"], floor["credential"], floor["model"]) == (cause, "p", None)
            assert 0 < floor["remaining_s"] <= 10
            # Then one more call finds out.
            await upstream.set_faults()

            async def served() -> bool:
                return (await two.pipeline.complete(call("m"))).outcome.attempts[-1].route.provider == "p"

            await until(served)
            assert time.monotonic() - started >= 10
            assert (await upstream.ledger())["dispatches"] == 2


async def test_a_reset_ends_what_keeps_a_provider_out_for_every_process(database_url, tmp_path):
    async with simulated() as upstream:
        await upstream.set_faults(status=401, fail_first=1, key="k")
        toml = profile("p", upstream) + model("m", "p/sim-fast")
        async with processes(database_url, tmp_path, toml, toml) as (one, two):
            assert isinstance(await refusal(one, "m"), AllRoutesFailed)
            assert (await refusal(two, "m")).code is Code.PROVIDER_UNAVAILABLE
            assert await one.controller._store.reset(host(upstream))
            await two.pipeline.complete(call("m"))
            assert (await group_row(one))["floors"] == []


# ------------------------------------------------------------------ the breaker

COOLING = "failure_threshold = 3\nfailure_window_s = 30\nfirst_cooldown_s = 0.5\nlongest_cooldown_s = 4"
ONCE = "[routing]\nbackoff_s = []"


async def breaker(line: WholeLine, upstream: SimulatedProvider) -> tuple[str, int | None]:
    [row] = await line.rows("select breaker, ramp from control.capacity_group where group_id = $1", host(upstream))
    return row["breaker"], row["ramp"]


async def test_the_breaker_counts_failures_of_all_processes_in_a_window_that_slides(database_url, tmp_path):
    async with simulated() as upstream:
        await upstream.set_faults(status=503)
        toml = profile("p", upstream) + model("m", "p/sim-fast") + group(upstream, COOLING) + ONCE
        async with processes(database_url, tmp_path, toml, toml) as (one, two):
            await refusal(one, "m")
            await refusal(two, "m")
            # They have left the window when the third comes: it opens at the third of the last half minute.
            await one.rows(
                "update control.capacity_group set failed_at ="
                " array(select f - interval '31 s' from unnest(failed_at) f)"
            )
            await refusal(one, "m")
            await refusal(two, "m")
            assert await breaker(one, upstream) == ("closed", None)
            await refusal(one, "m")
            assert await breaker(one, upstream) == ("open", None)
            assert (await upstream.ledger())["dispatches"] == 5


async def test_an_open_breaker_sends_nothing_and_the_last_route_waits_for_its_end(database_url, tmp_path):
    async with simulated() as upstream:
        await upstream.set_faults(status=503, fail_first=3, key="k")
        toml = profile("p", upstream) + model("m", "p/sim-fast") + group(upstream, "concurrency = 8\n" + COOLING) + ONCE
        async with processes(database_url, tmp_path, toml, toml) as lines:
            for number in range(3):
                await refusal(lines[number % 2], "m")
            opened = time.monotonic()
            heard = Heard()
            await ends(*(line.pipeline.complete(call("m"), heard) for _ in range(6) for line in lines))
            dispatches = await upstream.dispatches()
            assert len(dispatches) == 15
            assert dispatches[3]["started"] - dispatches[2]["finished"] >= 0.5
            # One probe alone, then one, two, four.
            assert most_at_once(dispatches[3:4]) == 1
            assert all(later["started"] >= dispatches[3]["finished"] for later in dispatches[4:])
            assert all(later["started"] >= dispatches[4]["finished"] for later in dispatches[5:])
            assert most_at_once(dispatches[5:7]) <= 2
            assert time.monotonic() - opened < 15
            assert "cooldown" in {waiting.reason for waiting in heard.waits}


def most_at_once(dispatches: Sequence[dict[str, float]]) -> int:
    return max(
        sum(other["started"] <= one["started"] < other["finished"] for other in dispatches) for one in dispatches
    )


async def test_after_it_closed_a_group_takes_one_then_two_then_four_at_once(database_url, tmp_path):
    async with simulated() as upstream:
        await upstream.set_faults(status=503, fail_first=3, key="k")
        toml = (
            profile("p", upstream)
            + model("m", "p/sim-fast")
            + group(upstream, "concurrency = 16\nqueue = 100\n" + COOLING)
            + ONCE
        )
        async with processes(database_url, tmp_path, toml, toml) as lines:
            for number in range(3):
                await refusal(lines[number % 2], "m")
            await upstream.set_faults(latency=0.15)
            await ends(*(line.pipeline.complete(call("m")) for _ in range(12) for line in lines))
            dispatches = (await upstream.dispatches())[3:]
            at_once = []
            ended = 0
            for dispatch in dispatches:
                active = sum(o["started"] <= dispatch["started"] < o["finished"] for o in dispatches)
                ended = sum(o["finished"] <= dispatch["started"] for o in dispatches)
                at_once.append((active, ended))
            # The probe; then, by how many answers there were since: 0: 1, 1: 2, 2: 4, 3: 8, 4: the limit.
            for active, ended in at_once:
                allowed = 1 if ended == 0 else min(2 ** (ended - 1), 16)
                assert active <= allowed, at_once
            assert max(active for active, _ in at_once) > 4


async def test_a_primary_that_recovered_serves_again_within_one_cooldown(database_url, tmp_path):
    async with simulated() as upstream, simulated() as second:
        await upstream.set_faults(status=503)
        toml = (
            profile("p", upstream)
            + profile("q", second)
            + model("m", "p/sim-fast", "q/sim-fast")
            + group(upstream, COOLING)
        )
        async with processes(database_url, tmp_path, toml, toml) as lines:
            failed: list[BaseException] = []
            stop = asyncio.Event()
            served: dict[str, float] = {}

            async def traffic(line: WholeLine) -> None:
                while not stop.is_set():
                    try:
                        done = await line.pipeline.complete(call("m"))
                    except GatewayError as error:
                        failed.append(error)
                        raise
                    served[done.outcome.attempts[-1].route.provider] = time.monotonic()
                    await asyncio.sleep(0.02)

            callers = [start(traffic(line)) for line in lines for _ in range(2)]

            async def opened() -> bool:
                return (await breaker(lines[0], upstream))[0] == "open"

            await until(opened)
            await upstream.set_faults()
            recovered = time.monotonic()

            async def found() -> bool:
                return "p" in served

            await until(found)
            # At its first or second probe: a machine that is busy comes on top.
            assert served["p"] - recovered < 20
            stop.set()
            await ends(*callers)
            assert not failed


async def test_a_probe_that_fails_keeps_the_breaker_open_for_twice_as_long_and_its_caller_goes_on(
    database_url, tmp_path
):
    async with simulated() as upstream, simulated() as second:
        await upstream.set_faults(status=503)
        toml = (
            profile("p", upstream)
            + profile("q", second)
            + model("m", "p/sim-fast", "q/sim-fast")
            + group(upstream, COOLING)
        )
        async with processes(database_url, tmp_path, toml, toml) as lines:
            stop = asyncio.Event()

            async def traffic(line: WholeLine) -> None:
                while not stop.is_set():
                    await line.pipeline.complete(call("m"))
                    await asyncio.sleep(0.01)

            callers = [start(traffic(line)) for line in lines]

            async def cooldowns() -> list[float]:
                starts = [dispatch["started"] for dispatch in await upstream.dispatches()]
                # Two at once may be on their way when it opens.
                found = [gap for gap in map(operator.sub, starts[1:], starts) if gap > 0.3]
                return found if len(found) >= 2 else []

            first, second_one, *_ = await until(cooldowns)
            stop.set()
            await ends(*callers)
            # What the machine takes comes on top.
            assert first >= 0.5
            assert second_one >= 1.0


async def test_late_first_content_opens_the_breaker_where_the_provider_has_an_objective(database_url, tmp_path):
    async with simulated() as upstream:
        await upstream.set_faults(think=0.15)
        toml = (
            profile("p", upstream, "first_byte_objective_s = 0.1")
            + model("m", "p/sim-fast")
            + group(upstream, COOLING)
            + ONCE
        )
        async with processes(database_url, tmp_path, toml, toml) as (one, two):
            for line in (one, two, one):
                await streamed(line, "m")
            assert (await breaker(one, upstream))[0] == "open"


async def test_how_long_an_answer_is_does_not_count_against_the_first_byte_objective(database_url, tmp_path):
    async with simulated() as upstream:
        toml = (
            profile("p", upstream, "first_byte_objective_s = 0.1")
            + model("m", "p/sim-fast")
            + group(upstream, COOLING)
            + ONCE
        )
        async with processes(database_url, tmp_path, toml) as (line,):
            await upstream.set_faults(latency=0.15)
            for _ in range(3):
                # A plain answer comes when all of it is there: it has no first byte to be judged by.
                await line.pipeline.complete(call("m"))
            assert (await breaker(line, upstream))[0] == "closed"
            await upstream.set_faults(pace=0.05, chunks=4)
            for _ in range(3):
                await streamed(line, "m")
            assert (await breaker(line, upstream))[0] == "closed"


FAULTLESS: dict[str, dict[str, Any]] = {
    "bad request": {"status": 400},
    "not found": {"status": 404},
    "malformed": {"json": "bad"},
    "a page": {"json": "html"},
}


@pytest.mark.parametrize("fault", FAULTLESS)
async def test_what_says_nothing_about_capacity_does_not_move_the_breaker(database_url, tmp_path, fault):
    async with simulated() as upstream:
        await upstream.set_faults(**FAULTLESS[fault])
        toml = (
            profile("p", upstream, 'resend_uncertain = "never"\nexecution_limit_s = 0.5\nisolation_s = 0.1')
            + model("m", "p/sim-fast")
            + group(upstream, "concurrency = 10\n" + COOLING)
            + ONCE
        )
        async with processes(database_url, tmp_path, toml) as (line,):
            for _ in range(5):
                await refusal(line, "m")
            assert (await upstream.ledger())["dispatches"] == 5
            [row] = await line.rows("select breaker, failed_at from control.capacity_group")
            assert (row["breaker"], row["failed_at"]) == ("closed", [])


@pytest.mark.parametrize("way", ["close", "drain"])
async def test_callers_that_leave_do_not_move_the_breaker(database_url, tmp_path, way):
    async with simulated() as upstream:
        await upstream.set_faults(latency=0.3)
        toml = (
            profile("p", upstream, f'on_cancel = "{way}"\ncancel_confirms_after_s = 0.1')
            + model("m", "p/sim-fast")
            + group(upstream, "concurrency = 10\n" + COOLING)
            + ONCE
        )
        async with processes(database_url, tmp_path, toml) as (line,):
            tasks = [start(line.pipeline.complete(call("m"))) for _ in range(5)]
            await upstream.until(lambda ledger: ledger["active"] == 5)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await line.settled()
            [row] = await line.rows("select breaker, failed_at from control.capacity_group")
            assert (row["breaker"], row["failed_at"]) == ("closed", [])


async def opened_and_over(line: WholeLine, upstream: SimulatedProvider) -> None:
    """The breaker has opened, and its cooldown is over: the next request is the probe."""
    await line.rows("select control.open_breaker_v2($1, control.now_v1())", host(upstream))
    await line.rows("update control.capacity_group set cooldown_until = control.now_v1()")


async def test_a_probe_that_its_caller_cancels_before_the_dispatch_hands_its_place_to_the_next(database_url, tmp_path):
    async with simulated() as upstream:
        toml = (
            profile("p", upstream)
            + model("m", "p/sim-fast")
            + group(upstream, "concurrency = 4\nfirst_cooldown_s = 30")
        )
        async with processes(database_url, tmp_path, toml, toml) as (one, two):
            await opened_and_over(one, upstream)
            probe, _ = await occupied(one, "m")
            heard = Heard()
            behind = start(two.pipeline.complete(call("m"), heard))
            await queued(one, 1)
            await until(lambda: asyncio.sleep(0, heard.waits))
            assert heard.waits[0].reason == "cooldown"
            probe.cancel()
            async with asyncio.timeout(20):
                await behind
            assert (await breaker(one, upstream))[0] == "closed"
            assert (await upstream.ledger())["dispatches"] == 1


async def test_a_long_answer_of_the_probe_keeps_nobody_waiting_once_it_has_begun(database_url, tmp_path):
    async with simulated() as upstream:
        toml = (
            profile("p", upstream)
            + model("m", "p/sim-fast")
            + group(upstream, "concurrency = 4\nfirst_cooldown_s = 30")
        )
        async with processes(database_url, tmp_path, toml, toml) as (one, two):
            await opened_and_over(one, upstream)
            await upstream.set_faults(think=0.2, pace=0.2, chunks=30)
            begun = asyncio.Event()

            async def probe() -> None:
                async with one.pipeline.stream(call("m")) as items:
                    async for _ in items:
                        begun.set()

            long = start(probe())
            await upstream.until(lambda ledger: ledger["active"] == 1)
            await upstream.set_faults()
            others = [start(two.pipeline.complete(call("m"))) for _ in range(2)]
            await asyncio.wait_for(begun.wait(), 30)
            await ends(*others)
            assert not long.done()
            assert (await breaker(one, upstream))[0] == "closed"


async def test_a_grant_from_just_before_it_opened_is_not_sent_by_another_process(database_url, tmp_path):
    async with simulated() as upstream:
        toml = (
            profile("p", upstream)
            + model("m", "p/sim-fast")
            + group(upstream, "concurrency = 1\nfailure_threshold = 1\nfirst_cooldown_s = 1.2\nlongest_cooldown_s = 4")
            + ONCE
        )
        async with (
            postgres_proxy(database_url) as proxy,
            processes(database_url, tmp_path, toml) as (one,),
            processes(proxy.url(urlsplit(database_url).path[1:]), tmp_path, toml) as (two,),
        ):
            first, gate = await occupied(one, "m")
            second = start(two.pipeline.complete(call("m")))
            await queued(one, 1)
            # What the second process asks about its waiters is on the way for so long that it takes its grant late.
            proxy.rules.append(Rule(action=Action.DELAY_BEFORE, statement="rescan", commits_only=False, delay_s=1.0))
            gate.set()
            await first

            async def granted() -> bool:
                return await one.slots() == ["granted"]

            await until(granted)
            # Meanwhile the breaker opens.
            await one.rows("select control.open_breaker_v2($1, control.now_v1())", host(upstream))
            opened = time.monotonic()
            await second
            dispatches = await upstream.dispatches()
            assert len(dispatches) == 2
            assert dispatches[1]["started"] - opened >= 1.15


# ------------------------------------------------------------------ rolling restarts


async def holding(lines: Sequence[WholeLine], upstream: SimulatedProvider, name: str, calls: int) -> None:
    await ends(*(line.pipeline.complete(call(name)) for _ in range(calls) for line in lines))
    assert await upstream.ledger()


@pytest.mark.parametrize("order", ["old first", "new first"])
@pytest.mark.parametrize(("old", "new"), [(2, 5), (5, 2)])
async def test_old_and_new_limits_side_by_side_are_never_added_up(database_url, tmp_path, old, new, order):
    async with simulated() as upstream:
        await upstream.set_faults(latency=0.03)

        def toml(limit: int) -> str:
            return (
                profile("p", upstream)
                + model("m", "p/sim-fast")
                + group(upstream, f"concurrency = {limit}\nqueue = 200")
            )

        started = [old, new] if order == "old first" else [old, new, old]
        async with processes(database_url, tmp_path, *(toml(limit) for limit in started)) as lines:
            await holding(lines, upstream, "m", 12)
            # The newest first seen is in force, whoever starts last.
            assert (await upstream.ledger())["peak_concurrency"] == new
            assert (await group_row(lines[0]))["concurrency"] == new


async def test_a_lowered_limit_takes_nothing_back_and_admits_nothing_until_below_it(database_url, tmp_path):
    async with simulated() as upstream:
        await upstream.set_faults(latency=0.4)

        def toml(limit: int) -> str:
            return profile("p", upstream) + model("m", "p/sim-fast") + group(upstream, f"concurrency = {limit}")

        async with processes(database_url, tmp_path, toml(4)) as (one,):
            running = [start(one.pipeline.complete(call("m"))) for _ in range(4)]
            await upstream.until(lambda ledger: ledger["active"] == 4)
            async with processes(database_url, tmp_path, toml(2)) as (two,):
                later = [start(line.pipeline.complete(call("m"))) for line in (one, two, one, two)]
                await ends(*running, *later)
            dispatches = await upstream.dispatches()
            assert all(dispatch["status"] == 200 for dispatch in dispatches)
            assert most_at_once(dispatches[4:]) <= 2
            # When the fifth came, at most one of the four was left.
            assert all(
                sum(o["started"] <= d["started"] < o["finished"] for o in dispatches) <= 2 for d in dispatches[4:]
            )


@pytest.mark.parametrize("order", ["old first", "new first"])
async def test_two_endpoints_that_become_one_group_are_one_for_every_process(database_url, tmp_path, order):
    async with simulated() as first, simulated() as second:
        for upstream in (first, second):
            await upstream.set_faults(latency=0.6)
        shared = profile("p", first) + profile("q", second) + model("a", "p/sim-fast") + model("b", "q/sim-fast")
        apart = shared + group(first, "concurrency = 3\nqueue = 200") + group(second, "concurrency = 3\nqueue = 200")
        joint = shared + group("both", f'concurrency = 2\nqueue = 200\nendpoints = ["{host(first)}", "{host(second)}"]')
        started = [apart, joint] if order == "old first" else [apart, joint, apart]
        async with processes(database_url, tmp_path, started[0]) as (old,):
            # Six run when the new configuration comes.
            running = [start(old.pipeline.complete(call(name))) for name in "ab" for _ in range(3)]
            await first.until(lambda ledger: ledger["active"] == 3)
            await second.until(lambda ledger: ledger["active"] == 3)
            waiting = [start(old.pipeline.complete(call(name))) for name in "ab" for _ in range(3)]
            await queued(old, 6)
            for upstream in (first, second):
                await upstream.set_faults(latency=0.02)
            async with processes(database_url, tmp_path, *started[1:]) as rest:
                joined = time.monotonic()
                await ends(*running, *waiting)
                await ends(
                    *(line.pipeline.complete(call(name)) for line in (old, *rest) for name in "ab" for _ in range(4))
                )
                dispatches = [*await first.dispatches(), *await second.dispatches()]
                assert all(dispatch["status"] == 200 for dispatch in dispatches)
                later = [dispatch for dispatch in dispatches if dispatch["started"] > joined]
                assert later
                for dispatch in later:
                    assert sum(o["started"] <= dispatch["started"] < o["finished"] for o in dispatches) <= 2
                rows = await old.rows("select distinct group_id from control.endpoint")
                assert [row["group_id"] for row in rows] == ["both"]


async def test_a_profile_that_is_given_a_group_of_its_own_leaves_the_endpoints(database_url, tmp_path):
    async with simulated() as upstream:
        await upstream.set_faults(latency=0.05)

        def toml(own: str) -> str:
            return (
                profile("p", upstream)
                + profile("q", upstream, own)
                + model("a", "p/sim-fast")
                + model("b", "q/sim-small")
                + group(upstream, "concurrency = 2\nqueue = 200")
                + (group("research", "concurrency = 1\nqueue = 200") if own else "")
            )

        async with processes(database_url, tmp_path, toml(""), toml('group = "research"')) as lines:
            await ends(*(line.pipeline.complete(call(name)) for line in lines for name in "ab" for _ in range(6)))
            by_model = (await upstream.ledger())["by_model"]
            assert by_model["sim-fast"]["peak_concurrency"] <= 2
            assert by_model["sim-small"]["peak_concurrency"] == 1


# ------------------------------------------------------------------ quarantine


@pytest.mark.parametrize("headroom", [0, 1])
async def test_headroom_lets_that_many_quarantined_slots_hold_up_nobody(database_url, tmp_path, headroom):
    async with simulated() as upstream:
        toml = (
            profile("p", upstream, 'on_cancel = "close"')
            + model("m", "p/sim-fast")
            + group(upstream, f"concurrency = 2\nquarantine_headroom = {headroom}")
        )
        async with processes(database_url, tmp_path, toml, toml) as (one, two):
            await upstream.set_faults(latency=5)
            tasks = [start(one.pipeline.complete(call("m"))) for _ in range(2)]
            await upstream.until(lambda ledger: ledger["active"] == 2)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await one.settled()
            assert await one.slots() == ["quarantined", "quarantined"]
            await upstream.set_faults()
            heard = Heard()
            if headroom:
                await ends(*(line.pipeline.complete(call("m"), heard) for _ in range(3) for line in (one, two)))
                dispatches = (await upstream.dispatches())[2:]
                # Two in quarantine, and of the three that may be, one more.
                assert most_at_once(dispatches) == 1
            else:
                with pytest.raises(AdmissionRefused) as refused:
                    await two.pipeline.complete(call("m", deadline_s=0.4), heard)
                assert refused.value.code is Code.DEADLINE_EXCEEDED
                assert (await upstream.ledger())["dispatches"] == 2
                assert [waiting.reason for waiting in heard.waits] == ["quarantine"]


# ------------------------------------------------------------------ all at once


async def test_whatever_providers_and_callers_do_the_limits_hold_and_nothing_is_left_behind(database_url, tmp_path):
    chance = random.Random("whatever")
    async with simulated() as upstream, simulated() as second:
        toml = (
            profile("p", upstream, "execution_limit_s = 3\nisolation_s = 0.2\ndrain_s = 1")
            + profile("q", second, "execution_limit_s = 3\nisolation_s = 0.2\ndrain_s = 1")
            + model("a", "p/sim-fast", "q/sim-fast")
            + model("b", "p/sim-small", "p/sim-large")
            + model("c", "q/sim-small")
            + group(
                upstream,
                "concurrency = 4\nqueue = 60\nfailure_threshold = 6\nfirst_cooldown_s = 0.1\nlongest_cooldown_s = 0.4",
                "sim-fast: concurrency = 2\nsim-large: requests_per_minute = 3000",
            )
            + group(second, "concurrency = 2\nqueue = 60\nfirst_cooldown_s = 0.1\nlongest_cooldown_s = 0.4")
            + "[routing]\nbackoff_s = [0.05, 0.1, 0.2]"
        )
        faults: list[dict[str, Any]] = [
            {"status": 503},
            {"status": 429, "retry_after": 0.2},
            {"status": 429},
            {"status": 500, "latency": 0.05},
            {"die": "rst_before_headers"},
            {"error_in_stream": "chunk"},
        ]
        async with processes(database_url, tmp_path, toml, toml, toml) as lines:
            codes: dict[str, int] = {}

            async def ask(line: WholeLine) -> None:
                await asyncio.sleep(chance.random() * 1.5)
                options: dict[str, Any] = {
                    "deadline_s": chance.choice([None, 0.2, 1, 5]),
                    "klass": Class(chance.randrange(2)),
                    "resend_uncertain": chance.choice([None, Resend.NEVER]),
                }
                name = chance.choice("aabbc")
                work = streamed(line, name, **options) if chance.random() < 0.5 else plain(line, name, **options)
                task = start(work)
                if chance.random() < 0.2:
                    asyncio.get_running_loop().call_later(chance.random() * 0.3, task.cancel)
                try:
                    await task
                    code = "success"
                except GatewayError as error:
                    code = error.code.value
                except asyncio.CancelledError:
                    code = "taken back"
                codes[code] = codes.get(code, 0) + 1

            async def misbehave() -> None:
                while True:
                    for provider in (upstream, second):
                        fault = chance.choice(faults) if chance.random() < 0.6 else {}
                        kind: dict[str, Any] = {"rate": 0.3, "rate_seed": chance.randrange(1000)} if fault else {}
                        await provider.set_faults(**{"latency": 0.02, "jitter": 0.03, **fault, **kind})
                    await asyncio.sleep(0.2)

            start(misbehave())
            async with asyncio.timeout(40):
                await ends(*(ask(line) for _ in range(40) for line in lines))
            for line in lines:
                await line.pipeline.drain(asyncio.get_running_loop().time() + 2)
            first_ledger, second_ledger = await upstream.until(), await second.until()
            told = f"{codes}"
            assert first_ledger["peak_concurrency"] <= 4, told
            assert first_ledger["by_model"]["sim-fast"]["peak_concurrency"] <= 2, told
            assert second_ledger["peak_concurrency"] <= 2, told
            assert not set(codes) - {
                "success",
                "taken back",
                "deadline_exceeded",
                "all_routes_failed",
                "cooldown",
                "queue_full",
                "uncertain",
                "upstream_broken",
            }, told
            assert codes["success"] > 20, told
            await lines[0].settled()
            rows = await lines[0].invocations()
            sent = [row for row in rows if row["correction"] == 0 and row["status"] != "not_dispatched"]
            # Of a call that ended before the provider had read it nobody knows more than that it was begun.
            unseen = len(sent) - first_ledger["dispatches"] - second_ledger["dispatches"]
            assert 0 <= unseen <= sum(row["state"] == "unknown" for row in sent), told
            assert set(await lines[0].slots()) <= {"quarantined"}, told
            await lines[0].audit()


async def plain(line: WholeLine, name: str, **options: Any) -> None:
    await line.pipeline.complete(call(name, **options))
