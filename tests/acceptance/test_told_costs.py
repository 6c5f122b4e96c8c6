"""That the end of a call tells what session, day and total come to with it, wherever it was asked."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

import httpx

from protos.tollbridge.v1 import gateway_pb2 as pb
from tests.fakes.gateway_process import METADATA, GatewayProcess, completion, gateway_process

SESSION = "told"
TOML = """
[providers.simulated]
protocol = "chat_completions"
base_url = "{url}"
first_byte_s = 60
gap_s = 60
[models.sim-fast]
providers = ["simulated"]
price = {{ input = "2.50", output = "10.00" }}
"""
HEADERS = {"x-tollbridge-session-id": SESSION}
CHAT = {"model": "sim-fast", "messages": [{"role": "user", "content": "what is a bridge?"}]}
PATHS: Mapping[str, dict[str, Any]] = {
    "/v1/chat/completions": CHAT,
    "/v1/responses": {"model": "sim-fast", "input": "what is a bridge?"},
    "/v1/messages": {**CHAT, "max_tokens": 100},
}
#: The cost of the call, its settlement, and what session, day and total come to.
Told = tuple[str, str, str, str, str]


def of_outcome(outcome: pb.Outcome) -> Told:
    counters = outcome.counters
    settlement = outcome.settlement
    return outcome.cost.usd, settlement, counters.session_usd, counters.day_usd, counters.total_usd


def of_names(told: Mapping[str, Any], prefix: str = "", between: str = "_") -> Told:
    names = [
        prefix + name.replace("_", between)
        for name in ("cost_usd", "settlement", "session_usd", "day_usd", "total_usd")
    ]
    cost, settlement, session, day, total = (told[name] for name in names)
    return cost, settlement, session, day, total


async def over_grpc(gateway: GatewayProcess, *, stream: bool) -> list[Told]:
    """By the last message, and by the trailing metadata."""
    async with gateway.stub() as stub:
        asked = completion("sim-fast", session_id=SESSION)
        if stream:
            call = stub.Stream(asked, metadata=METADATA)
            chunks = [chunk async for chunk in call]
            outcome = chunks[-1].finished.outcome
        else:
            call = stub.Complete(asked, metadata=METADATA)
            outcome = (await call).outcome
        trailing = dict(await call.trailing_metadata())
        return [of_outcome(outcome), of_names(trailing, "x-tollbridge-", "-")]


async def over_rest(client: httpx.AsyncClient, path: str, *, stream: bool) -> list[Told]:
    answer = await client.post(path, json={**PATHS[path], "stream": stream}, headers=HEADERS)
    assert answer.status_code == 200, answer.text
    if not stream:
        return [of_names(answer.headers, "x-tollbridge-", "-")]
    [comment] = re.findall(r"^: tollbridge (\{.*\})$", answer.text, re.MULTILINE)
    return [of_names(json.loads(comment))]


async def as_a_job(client: httpx.AsyncClient) -> list[Told]:
    line = {"custom_id": "told", "method": "POST", "url": "/v1/chat/completions", "body": CHAT, "session_id": SESSION}
    [accepted] = (await client.post("/v1/jobs", json=line)).json()["jobs"]
    job = (await client.get(f"/v1/jobs/{accepted['id']}", params={"wait": "50"})).json()
    outcome = job["outcome"]
    return [of_names({"cost_usd": job["cost_usd"], "settlement": outcome["settlement"], **outcome["counters"]})]


async def test_every_way_to_ask_tells_what_session_day_and_total_come_to(database_url, simulator_process, tmp_path):
    toml = TOML.format(url=simulator_process.url)
    async with (
        gateway_process(tmp_path, toml, TOLLBRIDGE_DATABASE_URL=database_url) as gateway,
        gateway.rest() as client,
    ):
        asking = {
            "grpc Complete": over_grpc(gateway, stream=False),
            "grpc Stream": over_grpc(gateway, stream=True),
            **{
                f"{path} stream={stream}": over_rest(client, path, stream=stream)
                for path in PATHS
                for stream in (False, True)
            },
            "job": as_a_job(client),
        }
        spent = Decimal(0)
        for name, call in asking.items():
            for told in (all_told := await call):
                cost, settlement, *counters = told
                assert settlement == "settled", name
                assert Decimal(cost) > 0, name
                assert [Decimal(usd) for usd in counters] == [spent + Decimal(cost)] * 3, name
            spent += Decimal(all_told[0][0])
            # And it is what is read there.
            usage = (await client.get("/v1/usage", params={"session": SESSION})).json()
            assert [Decimal(usage[kind]["charged_usd"]) for kind in ("session", "day", "total")] == [spent] * 3, name
