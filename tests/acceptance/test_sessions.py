"""What budgets of sessions promise, on two whole gateways as real processes, by the provider's own count."""

from __future__ import annotations

import asyncio
from decimal import Decimal
from typing import Any
from urllib.parse import quote

import grpc
import httpx
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from tests.acceptance.test_key_limits import COST, TOKENS, line, paid, two
from tests.acceptance.test_keys import ask, made, seconds_until
from tests.fakes.gateway_process import KEY, GatewayProcess, batch_line, completion

#: Each way to call, by how it names the session: path, body, headers.
OVER_HTTP: dict[str, tuple[str, dict[str, Any], dict[str, str]]] = {
    "chat completions": ("/v1/chat/completions", paid(), {}),
    "streamed": ("/v1/chat/completions", {**paid(), "stream": True}, {}),
    "responses": ("/v1/responses", {"model": "paid", "input": "x", "max_output_tokens": TOKENS}, {}),
    "messages": ("/v1/messages", paid(), {"anthropic-version": "2023-06-01"}),
}
HEADER = "x-tollbridge-session-id"


async def session(gateway: GatewayProcess, secret: str, name: str, **query: str) -> httpx.Response:
    return await ask(gateway, secret, f"/v1/sessions/{quote(name, safe='')}", method="GET", params=query)


async def budget(gateway: GatewayProcess, secret: str, name: str, usd: object, **query: str) -> httpx.Response:
    path = f"/v1/sessions/{quote(name, safe='')}"
    return await ask(gateway, secret, path, method="PUT", json={"budget_usd": usd}, params=query)


async def over_grpc(gateway: GatewayProcess, secret: str, name: str | None, *metadata: tuple[str, str]) -> str:
    """How the call ends: "complete", or with which code."""
    async with gateway.stub() as stub:
        try:
            await stub.Complete(
                completion("paid", max_output_tokens=TOKENS, session_id=name),
                metadata=(("authorization", f"Bearer {secret}"), *metadata),
            )
        except grpc.aio.AioRpcError as error:
            status = rpc_status.from_call(error)  # type: ignore[arg-type]  # it has what is asked of a call
            assert status is not None
            info = error_details_pb2.ErrorInfo()
            assert any(detail.Unpack(info) for detail in status.details)
            return str(info.reason)
    return "complete"


async def as_job(gateway: GatewayProcess, secret: str, name: str) -> str:
    [job] = (await ask(gateway, secret, "/v1/jobs", json={**line(), "session_id": name})).json()["jobs"]
    ended = (await ask(gateway, secret, f"/v1/jobs/{job['id']}?wait=60", method="GET")).json()
    return "complete" if ended["status"] == "succeeded" else str(ended["error"]["code"])


async def test_a_budget_of_a_session_holds_over_all_processes_and_transports(database_url, simulator, tmp_path):
    async with two(database_url, simulator.url, tmp_path) as gateways:
        one, other = gateways
        key = await made(one, "agent", "chat", "jobs", "usage:read")
        friend = await made(one, "friend", "chat", "usage:read")
        secret = key["secret"]
        await seconds_until(lambda: knows(other, friend["secret"]), within_s=20)

        # The session is known by whatever way it is named.
        for name, (path, body, headers) in OVER_HTTP.items():
            answer = await ask(one, secret, path, json=body, headers={**headers, HEADER: name})
            assert answer.status_code == 200, answer.text
        assert await over_grpc(one, secret, "grpc") == "complete"
        assert await over_grpc(one, secret, None, (HEADER, "metadata")) == "complete"
        assert await over_grpc(one, secret, "both", (HEADER, "both")) == "complete"
        for metadata in ((HEADER, "another"),), ((HEADER, "both"), (HEADER, "both")):
            assert await over_grpc(one, secret, "both", *metadata) == "invalid_request"
        assert await as_job(one, secret, "a/job") == "complete"
        for name in (*OVER_HTTP, "grpc", "metadata", "both", "a/job"):
            told = (await session(other, secret, name)).json()
            assert (told["id"], told["attempts"], Decimal(told["charged_usd"])) == (name, 1, COST), name
            assert (told["budget_usd"], told["left_usd"], told["live"]) == (None, None, []), name
            assert told["first_attempt_at"] == told["last_attempt_at"] is not None, name
        # Another key has no such session, and an administrator finds whose it is.
        assert (await session(one, friend["secret"], "grpc")).status_code == 404
        assert (await session(one, friend["secret"], "grpc", key_id=key["id"])).status_code == 403
        assert (await session(one, KEY, "grpc")).json()["key_id"] == key["id"]

        # Thirty calls at once at two gateways, with money for three. The budget was set by one of them just before.
        await simulator.set_faults(latency=0.3)
        before = (await simulator.ledger())["dispatches"]
        told = (await budget(one, secret, "big", str(3 * COST))).json()
        assert (Decimal(told["budget_usd"]), Decimal(told["left_usd"])) == (3 * COST, 3 * COST)
        answers = await asyncio.gather(
            *(ask(gateways[n % 2], secret, json=paid(), headers={HEADER: "big"}) for n in range(30))
        )
        ends = [a.json()["error"]["code"] if a.status_code != 200 else "complete" for a in answers]
        assert ends.count("complete") == 3, ends
        assert {*ends} - {"complete"} <= {"budget_reserved", "budget_exceeded"}
        assert (await simulator.ledger())["dispatches"] == before + 3
        told = (await session(one, secret, "big")).json()
        assert (Decimal(told["charged_usd"]), Decimal(told["left_usd"]), told["attempts"]) == (3 * COST, Decimal(0), 3)

        # It is used up, on every transport; another session of the key is not.
        await simulator.set_faults()
        for name, (path, body, headers) in OVER_HTTP.items():
            answer = await ask(other, secret, path, json=body, headers={**headers, HEADER: "big"})
            assert (answer.status_code, answer.json()["error"]["code"]) == (429, "budget_exceeded"), name
            assert "budget_session_usd" in answer.text, name
            assert answer.headers["x-tollbridge-dispatched"] == "false", name
        assert await over_grpc(other, secret, "big") == "budget_exceeded"
        assert await as_job(other, secret, "big") == "budget_exceeded"
        assert await over_grpc(other, secret, "small") == "complete"

        # A job waits while calls at work have reserved what is left, and those of other sessions do not wait with it.
        await simulator.set_faults(hang="before_headers")
        await budget(one, secret, "small", str(2 * COST))
        running = asyncio.create_task(ask(one, secret, json=paid(), headers={HEADER: "small"}))
        await simulator.until(lambda ledger: ledger["active"] == 1, within=30)
        told = (await session(other, secret, "small")).json()
        assert (Decimal(told["reserved_usd"]), Decimal(told["left_usd"]), told["reserved_attempts"]) == (
            COST,
            Decimal(0),
            1,
        )
        assert [(live["state"], live["model"]) for live in told["live"]] == [("active", "sim-fast")]
        assert await over_grpc(other, secret, "small") == "budget_reserved"
        await simulator.set_faults()
        waiting = {**batch_line("paid", 1), "session_id": "small"}
        waiting["body"] = {**waiting["body"], "max_tokens": TOKENS}
        [job] = (await ask(one, secret, "/v1/jobs", json=waiting)).json()["jobs"]
        assert await as_job(one, secret, "third") == "complete"
        waits = (await ask(one, secret, f"/v1/jobs/{job['id']}", method="GET")).json()
        assert waits["status"] not in {"succeeded", "failed"}, waits
        assert (await budget(one, secret, "small", str(3 * COST))).status_code == 200
        ended = (await ask(one, secret, f"/v1/jobs/{job['id']}?wait=60", method="GET")).json()
        assert ended["status"] == "succeeded", ended

        # A key can only lower what its limit allows; an administrator sets it for any key.
        limits = {"budget_session_usd": str(COST)}
        answer = await ask(one, KEY, f"/v1/keys/{key['id']}", method="PATCH", json={"limits": limits})
        assert answer.status_code == 200, answer.text
        answer = await budget(one, secret, "fourth", str(2 * COST))
        assert (answer.status_code, answer.json()["error"]["param"]) == (403, "budget_usd")
        assert (await budget(one, secret, "fourth", "NaN")).status_code == 400
        assert (await budget(one, friend["secret"], "fourth", "1", key_id=key["id"])).status_code == 403
        assert (await budget(one, KEY, "fourth", "1", key_id=friend["id"][:-1] + "f")).status_code in {200, 404}
        assert await over_grpc(one, secret, "fourth") == "complete"
        assert await over_grpc(one, secret, "fourth") == "budget_exceeded"
        told = (await budget(other, KEY, "fourth", str(2 * COST), key_id=key["id"])).json()
        assert (Decimal(told["budget_usd"]), Decimal(told["left_usd"])) == (2 * COST, COST)
        assert await over_grpc(one, secret, "fourth") == "complete"
        assert await over_grpc(one, secret, "fourth") == "budget_exceeded"
        # What two keys have is told apart.
        assert await over_grpc(one, friend["secret"], "fourth") == "complete"
        answer = await session(one, KEY, "fourth")
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "key_id")
        assert key["id"] in answer.text
        assert friend["id"] in answer.text
        # What hangs in it would hold up its stop.
        await one.kill()
        await asyncio.gather(running, return_exceptions=True)


async def knows(gateway: GatewayProcess, secret: str) -> bool:
    return (await ask(gateway, secret, "/v1/models", method="GET")).status_code == 200
