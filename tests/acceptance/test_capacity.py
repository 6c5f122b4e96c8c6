"""Capacity as users and operators meet it: real gateways on one database, gRPC and jobs, the command line."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import sys
import time
from collections import Counter
from typing import Any, cast
from urllib.parse import urlsplit

import grpc
import psutil
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from tests.fakes.gateway_process import (
    KEY,
    METADATA,
    GatewayProcess,
    batch_line,
    completion,
    gateway_process,
)
from tests.fakes.postgres_proxy import Action, Rule, postgres_proxy


def toml(url: str, *, concurrency: int, more: str = "", models: str = "") -> str:
    endpoint = "/".join(url.split("/")[:3])
    return f"""
        [providers.one]
        protocol = "chat_completions"
        base_url = "{url}"
        models = ["sim-fast", "sim-small"]
        first_byte_s = 20
        gap_s = 20
        [providers.two]
        protocol = "chat_completions"
        base_url = "{url}"
        models = ["sim-large"]
        first_byte_s = 20
        gap_s = 20
        [models.alias]
        providers = [{{ provider = "two", model = "sim-fast" }}]
        {models}
        [groups."{endpoint}"]
        concurrency = {concurrency}
        queue = 200
        {more}
    """


async def submit(gateway: GatewayProcess, *lines: dict[str, Any]) -> list[str]:
    async with gateway.rest() as client:
        answer = await client.post(
            "/v1/jobs",
            content="\n".join(json.dumps(line) for line in lines),
            headers={"content-type": "application/x-ndjson"},
        )
        assert answer.status_code == 202, answer.text
        return [job["id"] for job in answer.json()["jobs"]]


async def job(gateway: GatewayProcess, job_id: str, wait_s: float = 0) -> dict[str, Any]:
    async with gateway.rest() as client:
        answer = await client.get(f"/v1/jobs/{job_id}", params={"wait": wait_s} if wait_s else {})
        found: dict[str, Any] = answer.raise_for_status().json()
        return found


async def streamed(gateway: GatewayProcess, model: str, heard: list[Any] | None = None, **fields: Any) -> str:
    """The kinds of the last message; each message goes to `heard`."""
    last = ""
    async with gateway.stub() as stub:
        async for chunk in stub.Stream(completion(model, **fields), metadata=METADATA):
            last = chunk.WhichOneof("chunk")
            if heard is not None:
                heard.append(chunk)
    return last


async def until(found: Any, within_s: float = 30.0) -> Any:
    give_up = time.monotonic() + within_s
    while not (result := await found()):
        assert time.monotonic() < give_up, "it did not come true in time"
        await asyncio.sleep(0.02)
    return result


async def command(gateway: GatewayProcess, *words: str) -> str:
    """What `tollbridge ...` prints."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "gateway",
        *words,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env={**os.environ, "TOLLBRIDGE_URL": gateway.rest_url, "TOLLBRIDGE_API_KEY": KEY, "COLUMNS": "200"},
    )
    async with asyncio.timeout(40):
        said, _ = await process.communicate()
    assert process.returncode == 0, said.decode()
    return said.decode()


async def groups(gateway: GatewayProcess) -> dict[str, Any]:
    async with gateway.rest() as client:
        [found] = (await client.get("/v1/groups")).raise_for_status().json()["groups"]
        group: dict[str, Any] = found
        return group


async def test_streams_calls_and_jobs_of_every_profile_and_alias_share_one_limit(
    database_url, simulator_process, tmp_path
):
    await simulator_process.set_faults(latency=0.02, jitter=0.02)
    text = toml(simulator_process.url, concurrency=4)
    async with (
        gateway_process(tmp_path, text, name="first", TOLLBRIDGE_DATABASE_URL=database_url) as first,
        gateway_process(tmp_path, text, name="second", TOLLBRIDGE_DATABASE_URL=database_url) as second,
    ):
        names = ("one/sim-fast", "one/sim-small", "two/sim-large", "alias")
        jobs = [
            job_id
            for gateway in (first, second)
            for job_id in await submit(gateway, *(batch_line(names[number % 4], number) for number in range(24)))
        ]
        ends = await asyncio.gather(
            *(streamed(gateway, name) for gateway in (first, second) for name in names for _ in range(6))
        )
        assert set(ends) == {"finished"}
        for job_id in jobs:
            assert (await job(second, job_id, 30))["status"] == "succeeded"
    ledger = await simulator_process.ledger()
    assert ledger["dispatches"] == ledger["completed"] == 96
    assert ledger["peak_concurrency"] == 4
    assert set(ledger["by_model"]) == {"sim-fast", "sim-small", "sim-large"}


async def test_who_waits_is_told_why_on_every_way_in_and_operators_see_it_all(
    database_url, simulator_process, tmp_path
):
    await simulator_process.set_faults(hold=True)
    text = toml(simulator_process.url, concurrency=1)
    async with (
        gateway_process(tmp_path, text, name="first", TOLLBRIDGE_DATABASE_URL=database_url) as first,
        gateway_process(tmp_path, text, name="second", TOLLBRIDGE_DATABASE_URL=database_url) as second,
    ):
        running = asyncio.create_task(streamed(first, "one/sim-fast"))
        await simulator_process.until(lambda ledger: ledger["active"] == 1)
        heard: list[list[Any]] = [[], []]
        waiting = []
        for number, gateway in enumerate((second, first)):
            waiting.append(asyncio.create_task(streamed(gateway, "alias", heard[number])))

            async def told(number: int = number) -> bool:
                return bool(heard[number])

            await until(told)
        [job_id] = await submit(first, batch_line("one/sim-small", 1))

        async def explained() -> dict[str, Any] | None:
            found = (await job(second, job_id))["waiting"]
            return found if found and found["reason"] != "runner" else None

        why = await until(explained)
        group = await groups(second)
        shown = await command(second, "groups", "--slots")
        await simulator_process.set_faults()
        assert (why["reason"], why["position"]) == ("capacity", 3)
        assert why["group"] == group["group"]
        assert (group["active"], group["quarantined"], group["queued"]) == (1, 0, 3)
        [slot] = group["slots"]
        assert (slot["state"], slot["model"], slot["credential"]) == ("active", "sim-fast", "one")
        assert slot["pid"] == first.pid
        assert slot["since"]
        assert [(w["position"], w["class"], w["reason"]) for w in group["waiting"]] == [
            (1, "interactive", "capacity"),
            (2, "interactive", "capacity"),
            (3, "batch", "capacity"),
        ]
        assert "sim-small" in shown
        assert "capacity" in shown
        assert await asyncio.gather(running, *waiting) == ["finished"] * 3
        assert (await job(first, job_id, 30))["status"] == "succeeded"
    for number, chunks in enumerate(heard, 1):
        kinds = [chunk.WhichOneof("chunk") for chunk in chunks]
        queued = [chunk.queued for chunk in chunks if chunk.WhichOneof("chunk") == "queued"]
        # Told before it starts, and again when it moved up.
        assert kinds[: len(queued)] == ["queued"] * len(queued)
        places = [message.position for message in queued]
        assert places[0] == number
        assert places == sorted(set(places), reverse=True)
        assert {(message.reason, message.group) for message in queued} == {("capacity", group["group"])}


async def test_a_job_of_an_older_executor_is_not_sent_once_a_newer_one_was_seen_elsewhere(
    database_url, simulator_process, tmp_path
):
    await simulator_process.set_faults(hold=True)
    text = toml(simulator_process.url, concurrency=1)
    async with (
        gateway_process(tmp_path, text, name="first", TOLLBRIDGE_DATABASE_URL=database_url) as first,
        gateway_process(tmp_path, text, name="second", TOLLBRIDGE_DATABASE_URL=database_url) as second,
    ):
        running = asyncio.create_task(streamed(first, "one/sim-fast"))
        await simulator_process.until(lambda ledger: ledger["active"] == 1)
        fence: dict[str, Any] = {"scope_id": "s", "run_id": "r"}
        [older] = await submit(first, batch_line("alias", 1, owner_fence=1, **fence))

        async def waits() -> bool:
            return bool((await groups(first))["queued"] == 1)

        await until(waits)
        newer = asyncio.create_task(streamed(second, "alias", owner_fence=2, **fence))

        async def newer_waits() -> bool:
            return any(w["class"] == "interactive" for w in (await groups(first))["waiting"])

        await until(newer_waits)
        await simulator_process.set_faults()
        ended = await job(first, older, 20)
        assert (ended["status"], ended["error"]["code"]) == ("failed", "owner_fence")
        assert ended["error"]["dispatched"] is False
        assert await running == await newer == "finished"
        [equal] = await submit(second, batch_line("alias", 2, owner_fence=2, **fence))
        assert (await job(second, equal, 20))["status"] == "succeeded"
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await streamed(second, "alias", owner_fence=1, **fence)
        assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert (await simulator_process.ledger())["dispatches"] == 3


async def test_a_rejected_credential_is_shown_and_an_operators_reset_ends_it(database_url, simulator_process, tmp_path):
    await simulator_process.set_faults(status=401)
    text = toml(simulator_process.url, concurrency=2)
    async with gateway_process(tmp_path, text, TOLLBRIDGE_DATABASE_URL=database_url) as gateway:
        with pytest.raises(grpc.aio.AioRpcError):
            await streamed(gateway, "one/sim-fast")
        await simulator_process.set_faults()
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await streamed(gateway, "one/sim-small")
        assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
        status = rpc_status.from_call(cast("grpc.Call", refused.value))
        info, retry = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo()
        assert any(detail.Unpack(info) for detail in status.details)
        assert (info.reason, info.metadata["dispatched"]) == ("provider_unavailable", "false")
        assert any(detail.Unpack(retry) for detail in status.details)
        assert 200 < retry.retry_delay.seconds <= 300
        # The other profile has a credential of its own.
        assert await streamed(gateway, "alias") == "finished"
        group = await groups(gateway)
        assert [(floor["cause"], floor["credential"]) for floor in group["floors"]] == [("credential_rejected", "one")]
        assert "one" in await command(gateway, "groups")
        await command(gateway, "groups", "reset", group["group"])
        assert (await groups(gateway))["floors"] == []
        assert await streamed(gateway, "one/sim-small") == "finished"
    assert (await simulator_process.ledger())["dispatches"] == 3


@dataclasses.dataclass(kw_only=True)
class Listening(Rule):
    """Strikes nothing and remembers what went by."""

    statements: list[str] = dataclasses.field(default_factory=list)

    def strikes(self, statement: str, *, commits: bool, chance: Any) -> bool:
        self.statements.append(" ".join(statement.split())[:60])
        return False


async def test_a_gateway_without_traffic_does_next_to_nothing(database_url, tmp_path):
    """
    What polls: claims of jobs and the version of the keys once a second, batches, jobs past their deadline and those
    of dead processes every two (the last after a look at the store's time), the heartbeat and what time alone has
    changed every twenty. Each statement of a pool is followed by one that resets its session.
    """
    async with postgres_proxy(database_url) as proxy:
        listening = Listening(action=Action.SLICE)
        proxy.rules.append(listening)
        url = proxy.url(urlsplit(database_url).path[1:])
        text = toml("http://127.0.0.1:9/v1", concurrency=2)
        async with gateway_process(tmp_path, text, TOLLBRIDGE_DATABASE_URL=url) as gateway:
            process = psutil.Process(gateway.pid)
            # The pauses between looks for jobs have grown to their longest by then.
            await asyncio.sleep(3)
            listening.statements.clear()
            started, before = time.monotonic(), process.cpu_times()
            await asyncio.sleep(6)
            seconds, after = time.monotonic() - started, process.cpu_times()
            counts = Counter(listening.statements)
        cpu = (after.user + after.system - before.user - before.system) / seconds
        assert counts.total() * 60 / seconds < 480, counts
        # Measured: half a percent of a core.
        assert cpu < 0.03, counts
