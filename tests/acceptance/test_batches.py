"""Batches on real processes: large files in little memory, and every line answered once whoever is killed."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Iterator
from pathlib import Path
from typing import Any

import asyncpg
import httpx
import psutil
import pytest
from aiohttp import web

from tests.fakes.gateway_process import GatewayProcess, batch_line, gateway_process

CONTROL = Path("/proc/self/clear_refs")


def toml(url: str, *, more: str = "") -> str:
    endpoint = "/".join(url.split("/")[:3])
    return f"""
        [providers.simulated]
        protocol = "chat_completions"
        base_url = "{url}"
        execution_limit_s = 2.0
        isolation_s = 0.5
        [models.sim-fast]
        providers = ["simulated"]
        price = {{ input = "2.50", output = "10.00" }}
        [groups."{endpoint}"]
        concurrency = 24
        queue = 200
        {more}
    """


async def upload(client: httpx.AsyncClient, pieces: Iterable[bytes]) -> str:
    head = (
        b'--xx\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
        b'--xx\r\ncontent-disposition: form-data; name="file"; filename="lines.jsonl"\r\n\r\n'
    )

    async def form() -> AsyncIterator[bytes]:
        yield head
        for piece in pieces:
            yield piece
        yield b"\r\n--xx--\r\n"

    answer = await client.post(
        "/v1/files", content=form(), headers={"content-type": "multipart/form-data; boundary=xx"}, timeout=300
    )
    assert answer.status_code == 200, answer.text
    file_id: str = answer.json()["id"]
    return file_id


async def start(client: httpx.AsyncClient, file_id: str) -> str:
    body = {"input_file_id": file_id, "endpoint": "/v1/chat/completions", "completion_window": "24h"}
    answer = await client.post("/v1/batches", json=body)
    assert answer.status_code == 200, answer.text
    batch_id: str = answer.json()["id"]
    return batch_id


async def once(gateway: GatewayProcess, batch_id: str, *statuses: str, within_s: float = 60.0) -> dict[str, Any]:
    """The batch, once it is in one of these."""
    async with gateway.rest() as client, asyncio.timeout(within_s):
        while True:
            batch: dict[str, Any] = (await client.get(f"/v1/batches/{batch_id}")).json()
            if batch["status"] in statuses:
                return batch
            await asyncio.sleep(0.05)


async def content(client: httpx.AsyncClient, file_id: str | None) -> list[dict[str, Any]]:
    if file_id is None:
        return []
    answer = await client.get(f"/v1/files/{file_id}/content", timeout=60)
    assert answer.status_code == 200
    return [json.loads(text) for text in answer.text.splitlines()]


# ------------------------------------------------------------------ memory


class Memory:
    """What a process has had resident at most since the last `clear`, in bytes."""

    def __init__(self, gateway: GatewayProcess) -> None:
        family = [psutil.Process(gateway.pid), *psutil.Process(gateway.pid).children(recursive=True)]
        self._pids = [one.pid for one in family if one.name() != "postgres"]

    def clear(self) -> int:
        """And what it has now."""
        for pid in self._pids:
            Path(f"/proc/{pid}/clear_refs").write_text("5")
        return self.most()

    def most(self) -> int:
        return sum(
            int(line.split()[1]) * 1024
            for pid in self._pids
            for line in Path(f"/proc/{pid}/status").read_text().splitlines()
            if line.startswith("VmHWM")
        )


@pytest.mark.skipif(not CONTROL.exists(), reason="the peak of the memory in use is read from /proc")
async def test_a_batch_of_200_mb_takes_little_memory_on_every_way(database_url, tmp_path):
    count, padding = 50_000, "x" * 3900
    size = 0
    # Nothing answers there, so the jobs stay where they are.
    text = toml("http://127.0.0.1:9/v1", more="[jobs]\nconcurrency = 1")

    def line(number: int) -> bytes:
        one = batch_line("sim-fast", number)
        one["body"]["messages"][0]["content"] = padding
        return json.dumps(one).encode() + b"\n"

    def lines() -> Iterator[bytes]:
        nonlocal size
        for first in range(0, count, 50):
            piece = b"".join(line(number) for number in range(first, first + 50))
            size += len(piece)
            yield piece

    async with (
        gateway_process(tmp_path, text, TOLLBRIDGE_DATABASE_URL=database_url) as gateway,
        gateway.rest() as client,
    ):
        memory = Memory(gateway)
        took: dict[str, int] = {}
        resident = memory.clear()
        file_id = await upload(client, lines())
        took["upload"] = memory.most() - resident
        assert size > 190 * 1024**2
        resident = memory.clear()
        batch_id = await start(client, file_id)
        batch = await once(gateway, batch_id, "in_progress")
        assert batch["request_counts"]["total"] == count
        took["validation"] = memory.most() - resident
        resident = memory.clear()
        received = 0
        async with client.stream("GET", f"/v1/files/{file_id}/content", timeout=120) as answer:
            async for piece in answer.aiter_bytes():
                received += len(piece)
        assert received == size
        took["content"] = memory.most() - resident
        connection = await asyncpg.connect(database_url)
        # As if a provider had answered each of them.
        await connection.execute(
            "update content.job set status = 'succeeded', result = $1, result_status = 200, error_code = null,"
            " error_message = null, ended_at = clock_timestamp(),"
            " expires_at = clock_timestamp() + interval '30 days' where status <> 'succeeded'",
            json.dumps({"text": padding}),
        )
        await connection.close()
        resident = memory.clear()
        batch = await once(gateway, batch_id, "completed")
        assert batch["request_counts"] == {"total": count, "completed": count, "failed": 0}
        received = 0
        async with client.stream("GET", f"/v1/files/{batch['output_file_id']}/content", timeout=120) as answer:
            async for piece in answer.aiter_bytes():
                received += len(piece)
        assert received > 190 * 1024**2
        took["output"] = memory.most() - resident
    assert max(took.values()) < 24 * 1024**2, took


# ------------------------------------------------------------------ kills


async def test_every_line_is_answered_once_though_both_gateways_are_killed_in_turn(
    database_url, simulator_process, tmp_path
):
    count = 2000
    seed = 20_261_130
    chance = random.Random(seed)
    await simulator_process.set_faults(latency=0.05)
    text = toml(simulator_process.url, more="[jobs]\nconcurrency = 24\nupkeep_s = 0.5\nbatch_poll_s = 0.2")
    environ = {"TOLLBRIDGE_DATABASE_URL": database_url}
    whole = b"".join(json.dumps(batch_line("sim-fast", number)).encode() + b"\n" for number in range(count))
    killed: list[str] = []
    async with (
        gateway_process(tmp_path, text, name="one", **environ) as one,
        gateway_process(tmp_path, text, name="two", **environ) as two,
    ):
        gateways = [one, two]
        async with one.rest() as client:
            batch_id = await start(client, await upload(client, [whole]))
        # The first kill may come while the lines are validated, the others while they run.
        for turn in range(4):
            if turn:
                reached = (turn * count) // 5
                await simulator_process.until(lambda ledger, most=reached: ledger["dispatches"] >= most, within=60)
            await asyncio.sleep(chance.uniform(0.0, 0.2))
            victim = gateways[turn % 2]
            await victim.kill()
            killed.append(victim.data_dir.name)
            await victim.start()
        batch = await once(two, batch_id, "completed", within_s=90)
        async with one.rest() as client:
            answered = await content(client, batch["output_file_id"])
            failed = await content(client, batch["error_file_id"])
        ledger = await simulator_process.until()
        dispatches = await simulator_process.dispatches()
    shown = (seed, killed, batch["request_counts"])
    counted = sorted(entry["custom_id"] for entry in answered + failed)
    assert counted == sorted(f"line-{number}" for number in range(count)), shown
    assert (len(answered), len(failed)) == (
        batch["request_counts"]["completed"],
        batch["request_counts"]["failed"],
    ), shown
    # What was in flight at a kill may have been executed, and is not sent again.
    assert {entry["error"]["code"] for entry in failed} <= {"uncertain"}, shown
    assert len(failed) <= 4 * 24, shown
    assert all(entry["response"]["body"]["choices"] for entry in answered), shown
    connection = await asyncpg.connect(database_url)
    try:
        attempts = await connection.fetchval(
            "select count(*) from control.invocation where correction = 0 and status <> 'not_dispatched'"
        )
    finally:
        await connection.close()
    assert ledger["dispatches"] <= attempts, shown
    assert ledger["dispatches"] == len(dispatches) <= count, shown
    assert killed == ["one", "two", "one", "two"]


async def test_no_word_of_an_end_is_lost_though_its_gateway_is_killed(database_url, simulator_process, tmp_path):
    count = 120
    heard: Counter[str] = Counter()
    ids: dict[str, set[str]] = {}
    refused = 0

    async def take(request: web.BaseRequest) -> web.StreamResponse:
        nonlocal refused
        event = json.loads(await request.read())
        subject = event["data"]["id"]
        ids.setdefault(subject, set()).add(request.headers["webhook-id"])
        if len(ids[subject]) + refused < 20 and not heard[subject]:
            # The first ones must come again.
            refused += 1
            return web.Response(status=503)
        heard[subject] += 1
        return web.Response(status=204)

    server = web.Server(take)
    listener = await asyncio.get_running_loop().create_server(server, "127.0.0.1", 0)
    port = listener.sockets[0].getsockname()[1]
    await simulator_process.set_faults(latency=0.02)
    more = f"""
        [jobs]
        upkeep_s = 0.5
        [webhooks]
        allowed_hosts = ["127.0.0.1:{port}"]
        secret_env = "HOOK_SECRET"
        allow_http = true
        allow_private = true
        timeout_s = 1.0
        poll_s = 0.1
        retry_delay_s = 0.2
        retry_longest_s = 1.0
    """
    environ = {
        "TOLLBRIDGE_DATABASE_URL": database_url,
        "HOOK_SECRET": "whsec_MDEyMzQ1Njc4OWFiY2RlZjAxMjM0NTY3ODlhYmNkZWY=",
    }
    url = f"http://127.0.0.1:{port}/hook"
    lines = [batch_line("sim-fast", number, webhook_url=url) for number in range(count)]
    async with gateway_process(tmp_path, toml(simulator_process.url, more=more), **environ) as gateway:
        async with gateway.rest() as client:
            answer = await client.post("/v1/jobs", json={"jobs": lines})
            assert answer.status_code == 202, answer.text
            jobs = {job["id"] for job in answer.json()["jobs"]}
        for most in (15, 60):
            async with asyncio.timeout(40):
                while sum(heard.values()) < most:  # noqa: ASYNC110  another task counts
                    await asyncio.sleep(0.01)
            await gateway.kill()
            await gateway.start()
        async with asyncio.timeout(60):
            while heard.keys() != jobs:  # noqa: ASYNC110  another task counts
                await asyncio.sleep(0.05)
    listener.close()
    await server.shutdown(0.1)
    assert refused > 0
    # Those that came twice came under one id.
    assert {len(of_one) for of_one in ids.values()} == {1}
