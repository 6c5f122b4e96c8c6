"""Responses in the background on real processes: what was accepted is answered, whoever is killed, and ends once."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx

from tests.fakes.gateway_process import GatewayProcess, gateway_process

PATIENCE_S = 60.0


def toml(url: str) -> str:
    endpoint = "/".join(url.split("/")[:3])
    return f"""
        [providers.native]
        protocol = "responses"
        base_url = "{url}"
        execution_limit_s = 40.0
        isolation_s = 0.5
        cancel_confirms_after_s = 0
        cancel_source = "none"
        [providers.foreign]
        protocol = "anthropic_messages"
        base_url = "{url}"
        execution_limit_s = 40.0
        isolation_s = 0.5
        cancel_confirms_after_s = 0
        cancel_source = "none"
        [models.native]
        providers = [{{ provider = "native", model = "sim-fast" }}]
        price = {{ input = "2.50", output = "10.00" }}
        [models.foreign]
        providers = [{{ provider = "foreign", model = "sim-fast" }}]
        price = {{ input = "2.50", output = "10.00" }}
        [groups."{endpoint}"]
        concurrency = 24
        [jobs]
        concurrency = 2
        [admission]
        lease_s = 3
        margin_s = 1
    """


async def create(client: httpx.AsyncClient, model: str, **headers: str) -> str:
    body = {"model": model, "input": "what is a bridge?", "background": True}
    answer = await client.post("/v1/responses", json=body, headers=headers)
    assert (answer.status_code, answer.json().get("status")) == (200, "queued"), answer.text
    response_id: str = answer.json()["id"]
    return response_id


async def once(client: httpx.AsyncClient, response_id: str, *statuses: str) -> dict[str, Any]:
    """The response, once it is in one of these."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            answer = await client.get(f"/v1/responses/{response_id}")
            assert answer.status_code == 200, answer.text
            response: dict[str, Any] = answer.json()
            if response["status"] in statuses:
                return response
            await asyncio.sleep(0.05)


async def test_what_was_accepted_outlives_a_kill_and_is_cancelled_from_any_process(database_url, simulator, tmp_path):
    def process(name: str) -> Any:
        return gateway_process(tmp_path, toml(simulator.url), name=name, TOLLBRIDGE_DATABASE_URL=database_url)

    async with process("one") as one:
        await simulator.set_faults(latency=300)
        async with one.rest() as client:
            again = await create(client, "native", **{"x-tollbridge-resend-uncertain": "before_first_byte"})
            await once(client, again, "in_progress")
            lost = await create(client, "foreign")
            await once(client, lost, "in_progress")
            await simulator.until(lambda ledger: ledger["active"] == 2, within=PATIENCE_S)
            # The process runs two at a time.
            waiting = {model: await create(client, model) for model in ("native", "foreign")}
        await one.kill()
        await simulator.reset()
        async with process("two") as two, two.rest() as client:
            assert (await once(client, again, "completed", "failed"))["status"] == "completed"
            for model, response_id in waiting.items():
                done = await once(client, response_id, "completed", "failed")
                assert (done["status"], done["background"], done["id"]) == ("completed", True, response_id), model
                assert done["output"][-1]["content"][0]["text"], model
            failed = await once(client, lost, "completed", "failed")
            assert (failed["status"], failed["error"]["code"]) == ("failed", "uncertain")
            # Two were sent and killed; of those, one was sent again.
            assert (await simulator.ledger())["completed"] == 3
            await one.start()
            await cancelled_from_two(one, two, simulator)


async def cancelled_from_two(one: GatewayProcess, two: GatewayProcess, simulator: Any) -> None:
    await simulator.set_faults(latency=300)
    async with one.rest() as first, two.rest() as second:
        sent = [await create(first, "native") for _ in range(4)]
        for response_id in sent:
            await once(first, response_id, "in_progress")
        queued = [await create(second, "foreign") for _ in range(2)]
        for response_id in (*queued, *sent):
            answers = await asyncio.gather(
                *(client.post(f"/v1/responses/{response_id}/cancel") for client in (first, second))
            )
            assert [answer.status_code for answer in answers] == [200, 200]
            for client in (first, second):
                assert (await once(client, response_id, "cancelled", "completed", "failed"))["status"] == "cancelled"
            kept = [(await client.get(f"/v1/responses/{response_id}")).json() for client in (first, second)]
            assert kept[0] == kept[1]
