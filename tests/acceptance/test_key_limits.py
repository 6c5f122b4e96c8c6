"""What limits of keys promise, on two whole gateways as real processes, by the provider's own count."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from decimal import Decimal
from pathlib import Path
from typing import Any, cast

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from tests.acceptance.test_keys import ask, chat, made, seconds_until
from tests.fakes.gateway_process import KEY, GatewayProcess, batch_line, completion, gateway_process

#: So few tokens that every answer uses them up: a call costs what it may cost at most, whenever it ends.
TOKENS = 5
COST = Decimal("0.005")


def toml(url: str) -> str:
    return f"""
        [providers.simulated]
        protocol = "chat_completions"
        base_url = "{url}"
        first_byte_s = 60
        gap_s = 60
        [models.paid]
        providers = [{{ provider = "simulated", model = "sim-fast" }}]
        price = {{ input = "0", output = "1000" }}
        [groups."{"/".join(url.split("/")[:3])}"]
        concurrency = 60
        [admission]
        lease_s = 3
        margin_s = 1
    """


@asynccontextmanager
async def two(url: str, provider: str, tmp_path: Path) -> AsyncIterator[tuple[GatewayProcess, GatewayProcess]]:
    async with AsyncExitStack() as stack:
        one, other = [
            await stack.enter_async_context(
                gateway_process(tmp_path, toml(provider), name=name, TOLLBRIDGE_DATABASE_URL=url)
            )
            for name in ("one", "other")
        ]
        yield one, other


def paid() -> dict[str, Any]:
    return chat("paid", max_tokens=TOKENS)


async def used(gateway: GatewayProcess, key: dict[str, Any]) -> dict[str, Any]:
    answer = await ask(gateway, KEY, f"/v1/keys/{key['id']}", method="GET")
    found: dict[str, Any] = answer.json()["used"]
    return found


async def changed(gateway: GatewayProcess, key: dict[str, Any], **limits: Any) -> None:
    answer = await ask(gateway, KEY, f"/v1/keys/{key['id']}", method="PATCH", json={"limits": limits})
    assert answer.status_code == 200, answer.text


async def refusal(gateway: GatewayProcess, secret: str) -> tuple[grpc.StatusCode, str, float | None, str]:
    """How a gRPC call is refused: its status, code, RetryInfo and `dispatched`."""
    async with gateway.stub() as stub:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Complete(
                completion("paid", max_output_tokens=TOKENS), metadata=(("authorization", f"Bearer {secret}"),)
            )
    status = rpc_status.from_call(cast("grpc.Call", caught.value))
    assert status is not None
    info, retry = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo()
    retry_s = None
    for detail in status.details:
        detail.Unpack(info)
        if detail.Unpack(retry):
            retry_s = retry.retry_delay.ToTimedelta().total_seconds()
    return caught.value.code(), info.reason, retry_s, info.metadata["dispatched"]


async def test_limits_hold_over_all_processes_and_transports_and_outlive_a_kill(database_url, simulator, tmp_path):
    async with two(database_url, simulator.url, tmp_path) as gateways:
        one, other = gateways
        # Fifty calls at once at two gateways, with money for three.
        await simulator.set_faults(latency=0.5)
        key = await made(one, "web", "chat", "jobs", limits={"budget_total_usd": str(3 * COST)})
        secret = key["secret"]
        await seconds_until(lambda: knows(other, secret), within_s=20)
        answers = await asyncio.gather(*(ask(gateways[n % 2], secret, json=paid()) for n in range(50)))
        told = [
            "complete" if answer.status_code == 200 else (answer.status_code, answer.json()["error"]["code"])
            for answer in answers
        ]
        assert told.count("complete") == 3, told
        assert {*told} - {"complete"} <= {(429, "budget_reserved"), (429, "budget_exceeded")}
        assert all(a.headers["x-tollbridge-dispatched"] == "false" for a in answers if a.status_code != 200)
        assert (await simulator.ledger())["dispatches"] == 3
        spent = await used(one, key)
        assert spent == await used(other, key)
        assert (spent["concurrency"], spent["total"]["reserved_usd"]) == (0, "0")
        assert spent["total"] == {k: v for k, v in spent["day"].items() if k != "day"}
        assert Decimal(spent["total"]["spent_usd"]) == 3 * COST

        # A budget that is used up, on both transports: nobody asks again by itself.
        answer = await ask(other, secret, json=paid())
        assert (answer.status_code, answer.json()["error"]["code"]) == (429, "budget_exceeded")
        assert answer.headers["x-should-retry"] == "false"
        assert "retry-after" not in answer.headers
        for path, body, kind in (
            ("/v1/chat/completions", paid(), "insufficient_quota"),
            ("/v1/responses", {"model": "paid", "input": "x", "max_output_tokens": TOKENS}, "insufficient_quota"),
            ("/v1/messages", paid(), "billing_error"),
        ):
            headers = {"anthropic-version": "2023-06-01"} if path == "/v1/messages" else {}
            answer = await ask(other, secret, path, json=body, headers=headers)
            told = answer.json()["error"]
            assert (answer.status_code, told["code"], told["type"]) == (429, "budget_exceeded", kind), path
        assert await refusal(one, secret) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "budget_exceeded", None, "false")
        [job] = (await ask(one, secret, "/v1/jobs", json=line())).json()["jobs"]
        ended = await ask(one, secret, f"/v1/jobs/{job['id']}?wait=30", method="GET")
        assert (ended.json()["status"], ended.json()["error"]["code"]) == ("failed", "budget_exceeded")

        # Jobs of a key at its concurrency wait, and those of other keys do not wait with them.
        await simulator.set_faults(latency=0.2)
        await changed(one, key, concurrency=1)
        jobs = (await ask(one, secret, "/v1/jobs", json={"jobs": [line(n) for n in range(6)]})).json()["jobs"]
        free = (await ask(other, KEY, "/v1/jobs", json=line())).json()["jobs"][0]
        assert (await ask(other, KEY, f"/v1/jobs/{free['id']}?wait=30", method="GET")).json()["status"] == "succeeded"
        for job in jobs:
            ended = await ask(one, secret, f"/v1/jobs/{job['id']}?wait=60", method="GET")
            assert ended.json()["status"] == "succeeded", ended.text

        # What a killed process had sent keeps its bound; what it had waiting is given back.
        await changed(one, key, concurrency=40)
        await simulator.set_faults(hang="before_headers")
        running = [asyncio.create_task(ask(one, secret, json=paid())) for _ in range(2)]
        await simulator.until(lambda ledger: ledger["active"] == 2, within=30)
        before = await used(other, key)
        assert before["concurrency"] == 2
        assert Decimal(before["total"]["reserved_usd"]) == 2 * COST
        await one.kill()
        await asyncio.gather(*running, return_exceptions=True)

        async def settled() -> bool:
            return Decimal((await used(other, key))["total"]["reserved_usd"]) == 0

        await seconds_until(settled, within_s=60)
        after = await used(other, key)
        assert after["total"]["unknown_upper_bound_usd"] == before["total"]["reserved_usd"]
        assert after["total"]["spent_usd"] == before["total"]["spent_usd"]


async def knows(gateway: GatewayProcess, secret: str) -> bool:
    return (await ask(gateway, secret, "/v1/models", method="GET")).status_code == 200


def line(number: int = 1) -> dict[str, Any]:
    asked = batch_line("paid", number)
    return {**asked, "body": {**asked["body"], "max_tokens": TOKENS}}
