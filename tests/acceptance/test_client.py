"""The Python client, both faces, against a real gateway process that is killed, restarted and cut off."""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
from collections import Counter
from collections.abc import Callable
from contextlib import AsyncExitStack
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from gateway.client import Batch, Cancelled, Job, NotFound
from tests.fakes.faces import FACES
from tests.fakes.gateway_process import KEY, GatewayProcess, gateway_process
from tests.fakes.relay import Relay, relay

ROOT = Path(__file__).parents[2]
TOML = """
[gateway]
drain_s = 1
[providers.simulated]
protocol = "chat_completions"
base_url = "{url}"
first_byte_s = 600
gap_s = 30
execution_limit_s = 600
reasoning_execution_limit_s = 600
cancel_confirms_after_s = 0
cancel_source = "none"
[jobs]
concurrency = 50
batch_poll_s = 0.2
upkeep_s = 0.5
retry_delay_s = 0.2
[models.sim-fast]
providers = ["simulated"]
price = {{ input = "2.50", output = "10.00" }}
[models.sim-held]
providers = ["simulated"]
price = {{ input = "2.50", output = "10.00" }}
[models.sim-reasoning]
providers = ["simulated"]
price = {{ input = "2.50", output = "10.00" }}
[groups."{endpoint}"]
concurrency = 20
queue = 500
"""
TOOL = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}
#: Bounds only what never comes.
PATIENCE_S = 150.0
pytestmark = pytest.mark.timeout(600)


def configured(url: str) -> str:
    return TOML.format(url=url, endpoint="/".join(url.split("/")[:3]))


def line(model: str, custom_id: str, **fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": f"question {custom_id}"}]
    return {"custom_id": custom_id, "body": {"model": model, "messages": messages}, **fields}


async def until(reached: Callable[[], Any]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not await reached():  # noqa: ASYNC110  it is another process
            await asyncio.sleep(0.02)


async def test_both_faces_against_a_gateway_that_is_cut_off_killed_and_restarted(
    database_url, simulator_process, tmp_path
):
    """One gateway for all of it: a start is what costs."""
    configuration = configured(simulator_process.url)
    async with AsyncExitStack() as stack:
        gateway = await stack.enter_async_context(
            gateway_process(tmp_path, configuration, TOLLBRIDGE_DATABASE_URL=database_url)
        )
        cable = await stack.enter_async_context(relay(gateway.rest_url.removeprefix("http://")))
        address = {"grpc": gateway.grpc_target, "rest": f"http://{cable.address}", "api_key": KEY}
        clients = {
            name: await stack.enter_async_context(connect(**address, retry_for_s=PATIENCE_S))
            for name, connect in FACES.items()
        }
        for name, client in clients.items():
            await a_stream_amounts_to_the_whole_answer(client)
            await a_stream_that_is_left_frees_its_slot(client, gateway, simulator_process)
            await a_batch_of_a_file_is_cancelled(client, simulator_process, tmp_path)
            await a_submission_whose_answer_is_lost_is_stored_once(client, cable, name)
        await the_examples_of_the_documents_run(gateway, tmp_path)
        async with asyncio.TaskGroup() as tasks:
            for name, client in clients.items():
                tasks.create_task(a_batch_is_run_to_its_end(client, name, 1000 if name == "sync" else 50))
        await jobs_come_as_they_end_also_across_a_restart(clients, cable, gateway, simulator_process)


async def a_stream_amounts_to_the_whole_answer(client: Any) -> None:
    for asked in (
        {"model": "sim-fast"},
        {"model": "sim-reasoning", "seed": 3},
        {"model": "sim-fast", "n": 2},
        {"model": "sim-fast", "tools": [TOOL], "tool_choice": "required"},
        {"model": "sim-fast", "logprobs": True, "top_logprobs": 2},
    ):
        whole = await client.complete("What is a bridge?", **asked)
        async with client.stream("What is a bridge?", **asked) as stream:
            told = await stream.answer()
        assert told.choices == whole.choices, asked
        assert told.cost_usd == whole.cost_usd
        assert whole.cost_usd is not None
        assert whole.cost_usd > 0
    calls = (await client.complete("What is a bridge?", model="sim-fast", tools=[TOOL], tool_choice="required")).message
    assert calls.tool_calls
    results = [
        {"role": "tool", "tool_call_id": call.id, "content": "It rains.", "is_error": False}
        for call in calls.tool_calls
    ]
    question = {"role": "user", "content": "What is a bridge?"}
    assert (await client.complete([question, calls, *results], model="sim-fast", tools=[TOOL])).finish_reason


async def a_stream_that_is_left_frees_its_slot(client: Any, gateway: GatewayProcess, simulator: Any) -> None:
    await simulator.set_faults(model="sim-held", hang="mid")
    async with client.stream("What is a bridge?", model="sim-held") as stream:
        async for _ in stream.text():
            break

    async def free() -> bool:
        async with gateway.rest() as http:
            groups = (await http.get("/v1/groups")).json()["groups"]
        return not any(group["active"] or group["quarantined"] for group in groups)

    await until(free)
    assert (await simulator.ledger())["active"] == 0
    await simulator.set_faults(model="sim-held")


async def a_batch_is_run_to_its_end(client: Any, name: str, count: int) -> None:
    """One line in ten fails: it asks for a status that the caller is to blame for."""
    lines = [line("sim-fast", f"{name}-{number}") for number in range(count)]
    for number in range(0, count, 10):
        lines[number]["body"]["model"] = "sim-fast"
        lines[number]["body"]["simulate"] = {"status": 400}
    seen: list[Batch] = []
    started = await client.batches.submit(iter(lines), metadata={"of": name}, idempotency_key=f"batch {name}")
    again = await client.batches.submit(iter(lines), metadata={"of": name}, idempotency_key=f"batch {name}")
    assert again.id == started.id
    batch = await client.batches.wait(started.id, timeout_s=PATIENCE_S, progress=seen.append)
    assert (batch.status, batch.metadata) == ("completed", {"of": name})
    counts = batch.request_counts
    assert (counts.total, counts.completed, counts.failed) == (count, count - count // 10, count // 10)
    done = [one.request_counts.completed + one.request_counts.failed for one in seen]
    assert seen[-1] == batch
    assert done == sorted(done)
    async with client.batches.results(batch) as results:
        found = [result async for result in results]
    assert Counter(result.error is None for result in found) == {True: count - count // 10, False: count // 10}
    async with client.batches.results(batch.id, with_requests=True) as results:
        joined = [result async for result in results]
    assert [result.custom_id for result in joined] == [one["custom_id"] for one in lines]
    for result, asked in zip(joined, lines, strict=True):
        assert result.request["body"] == asked["body"]
        if "simulate" in asked["body"]:
            assert result.error.code == "upstream_rejected"
        else:
            assert result.answer()["object"] == "chat.completion"
    async with client.batches.results(batch) as results:
        async for result in results:
            assert result.custom_id == f"{name}-1"
            break


async def a_batch_of_a_file_is_cancelled(client: Any, simulator: Any, tmp_path: Path) -> None:
    await simulator.set_faults(model="sim-held", latency=600)
    path = tmp_path / "lines.jsonl"
    path.write_text("".join(json.dumps(line("sim-held", str(n), url="/v1/chat/completions")) + "\n" for n in range(30)))
    file = await client.batches.upload(path)
    assert (file.filename, file.bytes) == ("lines.jsonl", path.stat().st_size)
    batch = await client.batches.create(file.id)

    async def runs() -> bool:
        status: str = (await client.batches.get(batch.id)).status
        return status == "in_progress"

    await until(runs)
    await client.batches.cancel(batch.id)
    ended = await client.batches.wait(batch.id, timeout_s=PATIENCE_S)
    assert ended.status == "cancelled"
    async with client.batches.results(ended) as results:
        async for result in results:
            with pytest.raises(Cancelled):
                result.answer()
    await simulator.set_faults(model="sim-held")


# ------------------------------------------------------------------ jobs


async def a_submission_whose_answer_is_lost_is_stored_once(client: Any, cable: Relay, name: str) -> None:
    cable.swallows, cable.swallowed = 2, 0
    receipt = await client.jobs.submit(line("sim-fast", f"{name} {number}") for number in range(3))
    assert cable.swallowed == 2
    assert [one.custom_id for one in receipt.jobs] == [f"{name} {number}" for number in range(3)]
    for number in range(3):
        stored = [job async for job in client.jobs.list(custom_id=f"{name} {number}")]
        assert [job.submission_id for job in stored] == [receipt.submission_id]
    jobs = [job async for job in client.jobs.as_completed(receipt, timeout_s=PATIENCE_S)]
    assert all(job.answer()["choices"] and job.cost_usd > Decimal(0) for job in jobs)
    async with client.jobs.results(submission_id=receipt.submission_id) as results:
        assert [result.custom_id async for result in results] == [one.custom_id for one in receipt.jobs]
    await client.jobs.delete(receipt.jobs[0].id)
    with pytest.raises(NotFound):
        await client.jobs.get(receipt.jobs[0].id)


async def jobs_come_as_they_end_also_across_a_restart(
    clients: dict[str, Any], cable: Relay, gateway: GatewayProcess, simulator: Any
) -> None:
    """The first line is held at the provider until the others have come; then its gateway is killed."""
    await simulator.set_faults(model="sim-held", latency=600)
    all_came = asyncio.Barrier(len(clients) + 1)

    async def collect(client: Any) -> None:
        held = await client.jobs.submit(line("sim-held", "held", resend_uncertain="before_first_byte"))
        others = await client.jobs.submit([line("sim-fast", f"quick {number}") for number in range(3)] + [{"a": 1}])
        assert [one.line for one in others.errors] == [4]
        came: list[Job] = []
        async for job in client.jobs.as_completed(held, others.submission_id, timeout_s=2 * PATIENCE_S):
            came.append(job)
            if len(came) == 4:
                await all_came.wait()
        assert [job.status for job in came if job.custom_id is None] == ["failed"]
        assert {job.custom_id for job in came[:4]} == {None, "quick 0", "quick 1", "quick 2"}
        assert [(job.custom_id, job.status) for job in came[4:]] == [("held", "succeeded")]
        assert (await client.jobs.wait(held.jobs[0].id)).answer() == came[4].answer()

    async with asyncio.TaskGroup() as tasks:
        for client in clients.values():
            tasks.create_task(collect(client))
        await all_came.wait()
        await simulator.set_faults(model="sim-held")
        await gateway.kill()
        await gateway.start()
        cable.target = gateway.rest_url.removeprefix("http://")


# ------------------------------------------------------------------ documents


def examples() -> list[str]:
    """Those of docs/client.md are one program; the README's is another."""
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / "docs/client.md").read_text(), re.MULTILINE | re.DOTALL)
    asked = re.search(
        r"^cat > ask\.py <<'END'\n(.*?)^END\n", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL
    )
    assert len(blocks) > 5
    assert asked
    return ["\n".join(blocks), asked[1]]


async def the_examples_of_the_documents_run(gateway: GatewayProcess, tmp_path: Path) -> None:
    """As they stand there, but for the addresses."""
    printed = ""
    for number, example in enumerate(examples()):
        file = tmp_path / f"example{number}.py"
        file.write_text(
            example.replace("127.0.0.1:50051", gateway.grpc_target).replace("http://127.0.0.1:8080", gateway.rest_url)
        )
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-W",
            "error",
            str(file),
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT), "TOLLBRIDGE_API_KEY": KEY},
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        said, _ = await process.communicate()
        assert process.returncode == 0, said.decode()
        printed += said.decode()
    assert "invalid_request temperature" in printed
    assert "Counts(total=20, completed=20, failed=0)" in printed
    assert "1 simulated success charged" in printed
