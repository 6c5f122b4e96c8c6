"""A reset at one of two real gateways wakes the jobs that wait for the group, whichever of them runs them."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from typing import Any

import httpx

from tests.acceptance.test_gateway import toml
from tests.fakes.gateway_process import batch_line, gateway_process


async def ended(client: httpx.AsyncClient, ids: list[str]) -> list[dict[str, Any]]:
    return [(await client.get(f"/v1/jobs/{job_id}", params={"wait": "20"})).json() for job_id in ids]


async def test_a_reset_at_one_gateway_makes_jobs_due_that_wait_for_the_group_at_both(database_url, simulator, tmp_path):
    await simulator.set_faults(status=429, retry_after=900)
    text = toml(simulator.url)
    endpoint = simulator.url.removesuffix("/v1")
    async with (
        gateway_process(tmp_path, text, name="one", TOLLBRIDGE_DATABASE_URL=database_url) as one,
        gateway_process(tmp_path, text, name="two", TOLLBRIDGE_DATABASE_URL=database_url) as two,
        one.rest() as first,
        two.rest() as second,
    ):
        ids: list[str] = []
        for number in range(4):
            answer = await first.post("/v1/jobs", json=batch_line("sim-fast", number))
            ids += [job["id"] for job in answer.json()["jobs"]]

        async def waiting() -> list[dict[str, Any]]:
            return [(await second.get(f"/v1/jobs/{job_id}")).json()["waiting"] or {} for job_id in ids]

        async with asyncio.timeout(20):
            while not all(seen.get("until") for seen in await waiting()):  # noqa: ASYNC110  it is another process
                await asyncio.sleep(0.05)
        later = datetime.now(UTC) + timedelta(seconds=600)
        told = await waiting()
        assert {seen["group"] for seen in told} == {endpoint}
        # The one that was sent is to be run again, the others were refused for what it had been told.
        assert {seen["reason"] for seen in told} <= {"retry", "rate_limited"}
        assert all(datetime.fromisoformat(seen["until"]) > later for seen in told)
        [group] = (await second.get("/v1/groups")).json()["groups"]
        assert group["endpoints"] == [{"endpoint": endpoint, "provider": "simulated"}]
        assert [(floor["cause"], floor["providers"]) for floor in group["floors"]] == [("rate_limited", ["simulated"])]
        await simulator.set_faults()
        answer = await second.post("/v1/groups/reset", json={"group": endpoint})
        assert answer.json() == {"group": endpoint, "reset": True}
        assert [job["status"] for job in await ended(first, ids)] == ["succeeded"] * len(ids)
