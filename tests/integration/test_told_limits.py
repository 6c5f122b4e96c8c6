"""What a provider says is left of its rate limits, through the whole line: from its headers to our allowances."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from gateway.errors import GatewayError
from tests.fakes.simulated import SimulatedProvider
from tests.fakes.whole_line import Heard, WholeLine, call, read, whole_line

#: No more than this fills while a test runs, so that a level is known.
SLACK = 10.0


def toml(upstream: SimulatedProvider, scope: str = "model") -> str:
    host = "/".join(upstream.url.split("/")[:3])
    return f"""
        [providers.p]
        protocol = "chat_completions"
        base_url = "{upstream.url}"
        rate_limit_scope = "{scope}"
        [models.m]
        providers = [{{ provider = "p", model = "sim-fast" }}]
        price = {{ input = "2.50", output = "10.00" }}
        [routing]
        backoff_s = []
        [groups."{host}"]
        concurrency = 9
        requests_per_minute = 60
        tokens_per_minute = 100000
        [groups."{host}".models.sim-fast]
        requests_per_minute = 60
        tokens_per_minute = 100000
    """


async def levels(line: WholeLine) -> dict[str, Any]:
    """Of requests and tokens, by model; "" is the group."""
    await line.settled()
    return {
        row["model"]: (row["requests_left"], row["tokens_left"])
        for row in await line.rows("select model, requests_left, tokens_left from control.allowance")
    }


async def plain(line: WholeLine) -> None:
    await line.pipeline.complete(call("m"))


async def streamed(line: WholeLine) -> None:
    async with line.pipeline.stream(call("m"), Heard()) as items:
        await read(items)


async def refused(line: WholeLine) -> None:
    with pytest.raises(GatewayError):
        await line.pipeline.complete(call("m"))


@pytest.mark.parametrize(
    ("ask", "faults"),
    [
        (plain, {}),
        (streamed, {}),
        (refused, {"status": 500}),
        (refused, {"error_in_stream": True}),
    ],
    ids=["plain", "streamed", "error", "error under 200"],
)
async def test_an_answer_of_any_kind_lowers_the_model_and_not_the_group(database_url, tmp_path, simulator, ask, faults):
    async with whole_line(database_url, tmp_path, toml(simulator)) as line:
        await simulator.set_faults(remaining_requests=20, remaining_tokens=3000, **faults)
        await ask(line)
        found = await levels(line)
    requests, tokens = found["sim-fast"]
    assert 20 <= requests <= 20 + SLACK
    assert 3000 <= tokens <= 3000 + SLACK / 60 * 100_000
    assert found[""][0] > 50
    assert found[""][1] > 90_000


async def test_where_the_limits_are_of_the_account_the_group_is_lowered_too(database_url, tmp_path, simulator):
    async with whole_line(database_url, tmp_path, toml(simulator, "account")) as line:
        await simulator.set_faults(remaining_requests=20, remaining_tokens=3000)
        await plain(line)
        found = await levels(line)
    for model in ("", "sim-fast"):
        assert 20 <= found[model][0] <= 20 + SLACK
        assert 3000 <= found[model][1] <= 3000 + SLACK / 60 * 100_000


async def test_a_refused_credential_lowers_nothing(database_url, tmp_path, simulator):
    async with whole_line(database_url, tmp_path, toml(simulator)) as line:
        await simulator.set_faults(status=401, remaining_requests=0, remaining_tokens=0)
        await refused(line)
        assert all(requests > 50 and tokens > 90_000 for requests, tokens in (await levels(line)).values())


async def test_who_comes_after_nothing_was_left_waits_for_the_rate(database_url, tmp_path, simulator):
    async with whole_line(database_url, tmp_path, toml(simulator)) as line:
        await simulator.set_faults(remaining_requests=0)
        await plain(line)
        await line.settled()
        await simulator.set_faults()
        heard = Heard()
        async with asyncio.timeout(20):
            await line.pipeline.complete(call("m"), heard)
        assert "rate" in {waiting.reason for waiting in heard.waits}
        assert (await simulator.ledger())["dispatches"] == 2
