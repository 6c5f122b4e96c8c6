"""Whole gateways as real processes, on both transports, against a provider that keeps its own ledger."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import signal
import time
from collections import Counter
from decimal import Decimal
from typing import Any, cast

import asyncpg
import grpc
import psutil
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from protos.tollbridge.v1 import gateway_pb2
from tests.fakes.gateway_process import METADATA, GatewayProcess, batch_line, completion, gateway_process
from tests.fakes.whole_line import OPEN

PRICE_IN, PRICE_OUT = Decimal("2.50"), Decimal("10.00")


def toml(url: str, *, concurrency: int = 5, queue: int = 500, provider: str = "", more: str = "") -> str:
    endpoint = "/".join(url.split("/")[:3])
    return f"""
        [providers.simulated]
        protocol = "chat_completions"
        base_url = "{url}"
        first_byte_s = 5
        gap_s = 5
        {provider}
        [models.sim-fast]
        providers = ["simulated"]
        price = {{ input = "{PRICE_IN}", output = "{PRICE_OUT}" }}
        [groups."{endpoint}"]
        concurrency = {concurrency}
        queue = {queue}
        {more}
    """


async def collect(stream, chunks: list) -> None:
    async for chunk in stream:
        chunks.append(chunk)  # noqa: PERF401  what came before the error counts


async def listens(host: str, port: int | None) -> bool:
    try:
        _, writer = await asyncio.open_connection(host, port)
    except ConnectionRefusedError:
        return False
    writer.close()
    return True


async def audit(url: str, ledger: dict) -> None:
    """In one snapshot: the counters are the sum of the attempts, and every dispatch has its one settlement."""
    connection = await asyncpg.connect(url)
    try:
        async with connection.transaction(isolation="repeatable_read"):
            sums = await connection.fetchrow(
                "select coalesce(sum(usd), 0) as usd, count(*) filter (where correction = 0) as attempts,"
                " count(*) filter (where correction = 0 and status <> 'not_dispatched') as dispatched"
                " from control.invocation"
            )
            counted = await connection.fetchrow(
                "select sum(charged_usd) as usd, sum(attempts) as attempts from control.counter where kind = 'total'"
            )
            attempts = await connection.fetchval("select count(*) from control.attempt")
            open_attempts = len(await connection.fetch(OPEN))
        assert sums is not None
        assert counted is not None
        assert counted["usd"] == sums["usd"]
        assert counted["attempts"] == sums["attempts"] == attempts
        assert open_attempts == 0
        assert sums["dispatched"] == ledger["dispatches"]
    finally:
        await connection.close()


async def test_two_gateways_on_one_database_never_exceed_the_limit_together(database_url, simulator_process, tmp_path):
    await simulator_process.set_faults(latency=0.02)
    text = toml(simulator_process.url)

    async def ask(gateway: GatewayProcess, number: int) -> None:
        async with gateway.stub() as stub:
            if number % 2:
                await stub.Complete(completion("sim-fast"), metadata=METADATA)
                return
            last = ""
            async for chunk in stub.Stream(completion("sim-fast"), metadata=METADATA):
                last = chunk.WhichOneof("chunk")
            assert last == "finished"

    async with (
        gateway_process(tmp_path, text, name="one", TOLLBRIDGE_DATABASE_URL=database_url) as one,
        gateway_process(tmp_path, text, name="two", TOLLBRIDGE_DATABASE_URL=database_url) as two,
    ):
        await asyncio.gather(*(ask(gateway, number) for number in range(100) for gateway in (one, two)))
    ledger = await simulator_process.ledger()
    assert ledger["dispatches"] == 200
    assert ledger["completed"] == 200
    assert 1 < ledger["peak_concurrency"] <= 5
    await audit(database_url, ledger)


async def test_jobs_in_flight_at_a_kill_all_end_once_after_a_restart(database_url, simulator_process, tmp_path):
    await simulator_process.set_faults(latency=0.5)
    text = toml(
        simulator_process.url,
        concurrency=10,
        provider="execution_limit_s = 4\nisolation_s = 0.5",
        more="[jobs]\nconcurrency = 50",
    )
    async with gateway_process(tmp_path, text, TOLLBRIDGE_DATABASE_URL=database_url) as gateway:
        async with gateway.rest() as client:
            lines = "\n".join(json.dumps(batch_line("sim-fast", number)) for number in range(50))
            answer = await client.post("/v1/jobs", content=lines, headers={"content-type": "application/x-ndjson"})
            assert answer.status_code == 202
            ids = [job["id"] for job in answer.json()["jobs"]]
            assert len(ids) == 50
        await simulator_process.until(lambda ledger: 5 <= ledger["active"] <= 9 and ledger["completed"] >= 5)
        await gateway.kill()
        killed = time.monotonic()
        await simulator_process.until()
        await gateway.start()
        async with gateway.rest() as client:
            ends = {}
            for job_id in ids:
                job = (await client.get(f"/v1/jobs/{job_id}", params={"wait": "30"})).json()
                ends[job_id] = (job["status"], (job["error"] or {}).get("code"))
            took = time.monotonic() - killed
            again = {
                job_id: (job["status"], (job["error"] or {}).get("code"))
                for job_id in ids
                for job in [(await client.get(f"/v1/jobs/{job_id}")).json()]
            }
        counts = Counter(ends.values())
        assert again == ends
        assert set(counts) <= {("succeeded", None), ("failed", "uncertain")}, counts
        # What was in flight at the kill was not sent again; everything else was done.
        assert 1 <= counts["failed", "uncertain"] <= 9
        assert took < 90
    dispatched = Counter(d["correlation"] for d in await simulator_process.dispatches())
    assert set(dispatched.values()) == {1}
    ledger = await simulator_process.ledger()
    assert ledger["peak_concurrency"] <= 10
    await audit(database_url, ledger)


async def test_a_large_submission_at_the_default_limits_keeps_its_slots_busy(database_url, simulator_process, tmp_path):
    """The queue is far shorter than the submission: what is refused for now must not be left lying."""
    await simulator_process.set_faults(latency=0.02)
    text = toml(simulator_process.url, concurrency=3, queue=32)
    async with gateway_process(tmp_path, text, TOLLBRIDGE_DATABASE_URL=database_url) as gateway:
        async with gateway.rest() as client:
            lines = "\n".join(json.dumps(batch_line("sim-fast", number)) for number in range(200))
            answer = await client.post("/v1/jobs", content=lines, headers={"content-type": "application/x-ndjson"})
            assert answer.json()["accepted"] == 200
            # An interactive caller is not turned away meanwhile.
            async with gateway.stub() as stub:
                await stub.Complete(completion("sim-fast"), metadata=METADATA, timeout=60)
        ledger = await simulator_process.until(lambda ledger: ledger["completed"] == 201, within=90)
        assert ledger["dispatches"] == 201
        assert ledger["peak_concurrency"] <= 3
    await audit(database_url, ledger)


async def test_a_stream_whose_provider_dies_ends_with_an_explicit_failure(database_url, simulator, tmp_path):
    await simulator.set_faults(die_after=3, chunks=20)
    async with gateway_process(tmp_path, toml(simulator.url), TOLLBRIDGE_DATABASE_URL=database_url) as gateway:
        chunks: list[gateway_pb2.CompletionChunk] = []
        async with gateway.stub() as stub:
            stream = stub.Stream(completion("sim-fast"), metadata=METADATA)
            with pytest.raises(grpc.aio.AioRpcError) as failed:
                await collect(stream, chunks)
    assert failed.value.code() is grpc.StatusCode.UNAVAILABLE
    kinds = [chunk.WhichOneof("chunk") for chunk in chunks]
    assert kinds[0] == "started"
    assert "delta" in kinds
    assert kinds[-1] == "failed"
    assert "finished" not in kinds
    said = chunks[-1].failed
    assert said.code == "upstream_broken"
    assert said.outcome.cost.state == "unknown"
    assert said.outcome.ended == "uncertain"
    status = rpc_status.from_call(cast("grpc.Call", failed.value))
    assert status is not None
    info = error_details_pb2.ErrorInfo()
    assert any(detail.Unpack(info) for detail in status.details)
    assert info.reason == "upstream_broken"
    await audit(database_url, await simulator.ledger())


async def test_a_stream_its_client_cancels_leaves_a_slot_that_is_freed_at_its_time(database_url, simulator, tmp_path):
    await simulator.set_faults(pace=0.05, chunks=400)
    text = toml(simulator.url, provider='execution_limit_s = 4\nisolation_s = 1\non_cancel = "close"')
    async with gateway_process(tmp_path, text, TOLLBRIDGE_DATABASE_URL=database_url) as gateway:
        began = time.monotonic()
        async with gateway.stub() as stub:
            stream = stub.Stream(completion("sim-fast"), metadata=METADATA)
            async for chunk in stream:
                if chunk.WhichOneof("chunk") == "delta":
                    break
            stream.cancel()
        await simulator.until()

        async def slots(client) -> Any:
            return (await client.get("/v1/groups")).json()["groups"][0]["slots"]

        async with gateway.rest() as client:
            while not (held := await slots(client)) or held[0]["state"] != "quarantined":
                assert time.monotonic() - began < 30
                await asyncio.sleep(0.05)
            while await slots(client):
                assert time.monotonic() - began < 60
                await asyncio.sleep(0.05)
            assert time.monotonic() - began > 4.5
            usage = (await client.get("/v1/usage")).json()
            assert usage["total"]["unknown_attempts"] == 1
            assert Decimal(usage["total"]["charged_usd"]) == 0
    await audit(database_url, await simulator.ledger())


async def test_a_stream_its_client_cancels_or_lets_run_out_is_read_on_and_charged(database_url, simulator, tmp_path):
    await simulator.set_faults(pace=0.05, chunks=30)
    text = toml(simulator.url, provider="execution_limit_s = 90\nisolation_s = 90")
    async with gateway_process(tmp_path, text, TOLLBRIDGE_DATABASE_URL=database_url) as gateway:
        async with gateway.stub() as stub:
            stream = stub.Stream(completion("sim-fast"), metadata=METADATA)
            async for chunk in stream:
                if chunk.WhichOneof("chunk") == "delta":
                    break
            stream.cancel()
            await simulator.set_faults(latency=5)
            with pytest.raises(grpc.aio.AioRpcError) as late:
                await stub.Complete(completion("sim-fast"), metadata=METADATA, timeout=2)
        assert late.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        async with gateway.rest() as client, asyncio.timeout(60):
            submitted = (await client.post("/v1/jobs", json=batch_line("sim-fast", 1))).json()
            [job_id] = [job["id"] for job in submitted["jobs"]]
            await simulator.until(lambda ledger: ledger["dispatches"] == 3)
            await client.post(f"/v1/jobs/{job_id}/cancel")
            job = (await client.get(f"/v1/jobs/{job_id}", params={"wait": "30"})).json()
            assert (job["status"], job["cost_usd"], job["outcome"]["ended"]) == ("cancelled", None, "uncertain")
            ledger = await simulator.until()
            assert ledger["completed"] == ledger["dispatches"] == 3
            while (usage := (await client.get("/v1/usage")).json()["total"])["attempts"] < 3:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
            [group] = (await client.get("/v1/groups")).json()["groups"]
            # What was not known when the job ended is told once it is.
            job = (await client.get(f"/v1/jobs/{job_id}")).json()
            [listed] = (await client.get("/v1/jobs")).json()["data"]
            result = json.loads((await client.get("/v1/jobs/results")).text)
        outcome = job["outcome"]
        [attempt] = outcome["attempts"]
        assert (outcome["settlement"], outcome["cost"]["state"], attempt["cost"]["state"]) == (
            "settled",
            "charged",
            "charged",
        )
        assert job["cost_usd"] == listed["cost_usd"] == result["cost_usd"] == attempt["cost"]["usd"]
        assert job["usage"]["output_total"] > 0
        assert (usage["unknown_attempts"], usage["output_tokens"]) == (0, ledger["tokens_out"])
        assert Decimal(usage["charged_usd"]) > 0
        assert group["slots"] == []
        assert group["quarantine"] == {"slots": 0, "held_back": 0, "share": 0.0, "frees_in_s": []}
        drained = gateway.lines("gateway.attempt_drained")
        assert [line["ending"] for line in drained] == ["confirmed"] * 3
        # The log alone adds up to the ledger.
        told = [line["request_cost_usd"] for line in drained]
        told += [line["cost_usd"] for line in gateway.lines("gateway.request_ended")]
        assert sum(Decimal(usd) for usd in told if usd is not None) == Decimal(usage["charged_usd"])
        ended = {line["request_id"]: line for line in gateway.lines("gateway.request_ended")}
        for line in drained:
            whose = ended[line["request_id"]]
            assert {name: line[name] for name in ("debit_id", "key_id", "session_id", "transport")} == {
                name: whose[name] for name in ("debit_id", "key_id", "session_id", "transport")
            }
    await audit(database_url, await simulator.ledger())


async def test_a_stop_waits_for_an_answer_that_is_read_on_and_answers_what_still_comes(
    database_url, simulator, tmp_path
):
    await simulator.set_faults(hold=True)
    async with gateway_process(tmp_path, toml(simulator.url), TOLLBRIDGE_DATABASE_URL=database_url) as gateway:
        async with gateway.rest() as client:
            host, port, key = client.base_url.host, client.base_url.port, dict(client.headers)["authorization"]

        def ask(connection: http.client.HTTPConnection) -> tuple[int, str | None]:
            connection.request("GET", "/v1/models", headers={"authorization": key})
            answer = connection.getresponse()
            answer.read()
            return answer.status, answer.getheader("connection")

        used, unused = (http.client.HTTPConnection(host, port, timeout=60) for _ in range(2))
        unused.connect()
        assert await asyncio.to_thread(ask, used) == (200, None)
        async with gateway.stub() as stub:
            left = stub.Complete(completion("sim-fast"), metadata=METADATA)
            await simulator.until(lambda ledger: ledger["active"] == 1)
            left.cancel()
        async with gateway.rest() as client:
            body = {"model": "sim-fast", "messages": [{"role": "user", "content": "Say hello."}]}
            waited = asyncio.create_task(client.post("/v1/chat/completions", json=body, timeout=60))
            await simulator.until(lambda ledger: ledger["active"] == 2)
            gateway.send(signal.SIGTERM)
            async with asyncio.timeout(60):
                while await listens(host, port):  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
            # It came back or it was refused: nothing hangs, and nothing is dropped.
            for connection in (used, unused):
                assert await asyncio.to_thread(ask, connection) == (503, "close")
                connection.close()
            await simulator.set_faults()
            answer = await waited
            assert (answer.status_code, answer.headers["connection"]) == (200, "close")
        assert await gateway.ended() == 0
        assert [line["cost_state"] for line in gateway.lines("gateway.attempt_drained")] == ["charged"]
    ledger = await simulator.ledger()
    assert ledger["completed"] == 2
    await audit(database_url, ledger)


async def test_sigterm_lets_a_running_stream_end_and_refuses_new_work(database_url, simulator, tmp_path):
    await simulator.set_faults(pace=0.1, chunks=15)
    async with gateway_process(tmp_path, toml(simulator.url), TOLLBRIDGE_DATABASE_URL=database_url) as gateway:
        async with gateway.stub() as stub:
            stream = stub.Stream(completion("sim-fast"), metadata=METADATA)
            kinds = []
            async for chunk in stream:
                kinds.append(chunk.WhichOneof("chunk"))
                if kinds[-1] == "delta" and kinds.count("delta") == 1:
                    gateway.send(signal.SIGTERM)
            assert kinds[-1] == "finished"
        assert await gateway.ended() == 0
        assert gateway.lines("gateway.stopped")
    await audit(database_url, await simulator.ledger())


async def test_a_second_sigterm_ends_it_at_once(database_url, simulator, tmp_path):
    await simulator.set_faults(hang="mid")
    async with (
        gateway_process(
            tmp_path,
            toml(simulator.url, provider="execution_limit_s = 100"),
            TOLLBRIDGE_DATABASE_URL=database_url,
        ) as gateway,
        gateway.stub() as stub,
    ):
        stream = stub.Stream(completion("sim-fast"), metadata=METADATA)
        async for chunk in stream:
            if chunk.WhichOneof("chunk") == "delta":
                break
        began = time.monotonic()
        gateway.send(signal.SIGTERM)
        await asyncio.sleep(0.3)
        gateway.send(signal.SIGTERM)
        await gateway.ended(10)
        assert time.monotonic() - began < 8


async def test_several_workers_share_both_ports_and_one_may_be_killed(database_url, simulator_process, tmp_path):
    async with gateway_process(
        tmp_path,
        toml(simulator_process.url),
        arguments=("--workers", "2"),
        TOLLBRIDGE_DATABASE_URL=database_url,
    ) as gateway:

        async def ask() -> None:
            async with gateway.stub() as stub:
                await stub.Complete(completion("sim-fast"), metadata=METADATA)

        await asyncio.gather(*(ask() for _ in range(30)))
        served = {line["pid"] for line in gateway.lines("gateway.worker_ready")}
        assert len(served) == 2
        os.kill(next(iter(served)), signal.SIGKILL)
        async with asyncio.timeout(30):
            while len(gateway.lines("gateway.worker_ready")) < 3:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        await asyncio.gather(*(ask() for _ in range(10)))
    assert (await simulator_process.ledger())["peak_concurrency"] <= 5


async def test_the_embedded_database_survives_its_own_and_the_gateways_kill(simulator, tmp_path):
    async with gateway_process(tmp_path, toml(simulator.url)) as gateway:
        async with gateway.rest() as client:
            job = (await client.post("/v1/jobs", json=batch_line("sim-fast", 1))).json()["jobs"][0]["id"]
            done = (await client.get(f"/v1/jobs/{job}", params={"wait": "20"})).json()
            assert done["status"] == "succeeded"
        await gateway.kill()
        await gateway.start()
        async with gateway.rest() as client:
            assert (await client.get(f"/v1/jobs/{job}")).json() == done
            os.kill(int((gateway.data_dir / "postgres" / "postmaster.pid").read_text().split()[0]), signal.SIGKILL)
            began = time.monotonic()
            while True:
                assert time.monotonic() - began < 30
                try:
                    answer = await client.get(f"/v1/jobs/{job}")
                except OSError:
                    continue
                if answer.status_code == 200 and (await client.get("/readyz")).status_code == 200:
                    break
                assert answer.status_code in (200, 401, 503)
                await asyncio.sleep(0.1)
            assert answer.json() == done
            answer = await client.post("/v1/jobs", json=batch_line("sim-fast", 2))
            assert answer.status_code == 202
        assert await gateway.stop() == 0


async def test_a_database_that_is_frozen_is_refused_in_bounded_time_and_found_again(simulator, tmp_path):
    async with gateway_process(tmp_path, toml(simulator.url)) as gateway, gateway.rest() as client:
        assert (await client.post("/v1/jobs", json=batch_line("sim-fast", 1))).status_code == 202
        assert (await client.get("/v1/usage")).status_code == 200
        postmaster = psutil.Process(int((gateway.data_dir / "postgres" / "postmaster.pid").read_text().split()[0]))
        frozen = [postmaster, *postmaster.children()]
        for process in frozen:
            process.suspend()
        try:
            answers = await asyncio.gather(
                client.post("/v1/jobs", json=batch_line("sim-fast", 2)), *(client.get("/v1/usage") for _ in range(3))
            )
            assert {answer.status_code for answer in answers} == {503}
            assert (await client.get("/readyz")).status_code == 503
        finally:
            for process in frozen:
                process.resume()
        async with asyncio.timeout(30):
            while (await client.get("/readyz")).status_code != 200:  # noqa: ASYNC110
                await asyncio.sleep(0.1)
        job = (await client.post("/v1/jobs", json=batch_line("sim-fast", 3))).json()["jobs"][0]["id"]
        assert (await client.get(f"/v1/jobs/{job}", params={"wait": "20"})).json()["status"] == "succeeded"


async def test_two_gateways_on_one_data_directory_leave_the_living_ones_address(simulator, tmp_path):
    async with gateway_process(tmp_path, toml(simulator.url)) as first:
        same = str(first.data_dir)
        async with gateway_process(tmp_path, toml(simulator.url), name="second", TOLLBRIDGE_DATA_DIR=same) as second:
            assert second.rest_url != first.rest_url
            assert await second.stop() == 0
        ready = first.data_dir / "ready.json"
        async with asyncio.timeout(60):
            while not ready.exists():  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        assert json.loads(ready.read_text())["rest"] == first.rest_url
        async with first.rest() as client:
            assert (await client.get("/v1/usage")).status_code == 200


async def test_no_prompt_answer_or_key_is_in_the_log(database_url, simulator, tmp_path):
    secret = "CANARY-prompt-5f1d"
    async with gateway_process(
        tmp_path,
        toml(simulator.url, provider='credentials = ["SIMULATED_KEY"]'),
        arguments=("--log-level", "debug"),
        TOLLBRIDGE_DATABASE_URL=database_url,
        SIMULATED_KEY="CANARY-provider-key-77",
    ) as gateway:
        async with gateway.stub() as stub:
            await stub.Complete(completion("sim-fast", text=secret), metadata=METADATA)
            for faults in ({"status": 400}, {"status": 500}, {"json": "bad"}, {"die": "rst"}):
                await simulator.set_faults(**faults)
                with pytest.raises(grpc.aio.AioRpcError) as failed:
                    await stub.Complete(completion("sim-fast", text=secret), metadata=METADATA, timeout=60)
                assert "CANARY" not in str(failed.value)
        async with gateway.rest() as client:
            line = batch_line("sim-fast", 1)
            line["body"]["messages"][0]["content"] = secret
            await client.post("/v1/jobs", json=line)
            await client.post("/v1/jobs", content=b'{"' + secret.encode())
    text = gateway.log.read_text()
    assert "CANARY" not in text
    assert "acceptance-test-key" not in text
    assert text


async def test_the_bound_ports_are_in_the_ready_file(database_url, simulator, tmp_path):
    async with gateway_process(tmp_path, toml(simulator.url), TOLLBRIDGE_DATABASE_URL=database_url) as gateway:
        ready = json.loads((gateway.data_dir / "ready.json").read_text())
        assert (ready["rest"], ready["grpc"]) == (gateway.rest_url, gateway.grpc_target)
        async with gateway.rest() as client:
            assert (await client.get("/healthz")).status_code == 200
            assert (await client.get("/readyz")).status_code == 200
        assert await gateway.stop() == 0
        assert "ready.json" not in os.listdir(gateway.data_dir)  # noqa: PTH208  names are what is asked


def test_the_chunk_is_one_of_five_kinds():
    kinds = gateway_pb2.CompletionChunk.DESCRIPTOR.oneofs_by_name["chunk"].fields
    assert [field.name for field in kinds] == ["queued", "started", "delta", "finished", "failed"]
