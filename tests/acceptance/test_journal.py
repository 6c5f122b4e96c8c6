"""Real gateways whose database stops, whose disk is full, that are killed: no charge is lost, and none is doubled."""

from __future__ import annotations

import asyncio
import resource
import tempfile
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path

import asyncpg
import grpc
import pytest

from gateway.embedded import EmbeddedPostgres
from tests.acceptance.test_gateway import audit, toml
from tests.fakes.gateway_process import METADATA, GatewayProcess, completion, gateway_process
from tests.postgres import TEST_SETTINGS


@pytest.fixture
def own_server() -> Iterator[EmbeddedPostgres]:
    """A PostgreSQL that the test may stop. Starting it again gives the same URL."""
    with tempfile.TemporaryDirectory(prefix="tollbridge-tests-") as directory:
        server = EmbeddedPostgres.start(Path(directory), settings=TEST_SETTINGS)
        try:
            yield server
        finally:
            EmbeddedPostgres.start(Path(directory), settings=TEST_SETTINGS).stop()
            server.stop()


async def test_answers_given_while_the_database_is_away_are_charged_once_after_a_kill(
    own_server, simulator_process, tmp_path
):
    await simulator_process.set_faults(hold=True)
    text = toml(
        simulator_process.url,
        concurrency=20,
        more="[routing]\nsettlement_patience_s = 0.3\n[admission]\nstatement_s = 1.0",
    )

    async def ask(gateway: GatewayProcess, number: int):
        async with gateway.stub() as stub:
            if number % 2:
                return (await stub.Complete(completion("sim-fast", session_id="s"), metadata=METADATA)).outcome
            outcome = None
            async for chunk in stub.Stream(completion("sim-fast", session_id="s"), metadata=METADATA):
                if chunk.WhichOneof("chunk") == "finished":
                    outcome = chunk.finished.outcome
            return outcome

    async with gateway_process(tmp_path, text, TOLLBRIDGE_DATABASE_URL=own_server.url) as gateway:
        calls = [asyncio.create_task(ask(gateway, number)) for number in range(12)]
        await simulator_process.until(lambda ledger: ledger["active"] == 12)
        await asyncio.to_thread(own_server.stop)
        await simulator_process.set_faults()
        outcomes = await asyncio.gather(*calls)
        assert [(o.ended, o.settlement, o.HasField("counters")) for o in outcomes] == [
            ("complete", "pending", False)
        ] * 12
        expected = sum((Decimal(o.cost.usd) for o in outcomes), Decimal(0))
        assert expected > 0
        await gateway.kill()

        again = await asyncio.to_thread(EmbeddedPostgres.start, own_server._data_dir, settings=TEST_SETTINGS)
        assert again.url == own_server.url
        connection = await asyncpg.connect(again.url)
        assert (
            await connection.fetchval("select count(*) from control.ticket where state in ('active', 'quarantined')")
            == 12
        )
        for started in range(2):
            await gateway.start()
            told = gateway.lines("gateway.journal_replayed")
            assert [(line["replayed"], line["parked"]) for line in told] == [(12, 0)], f"after start {started}"
            async with gateway.rest() as client:
                usage = (await client.get("/v1/usage", params={"session_id": "s"})).json()
            assert [Decimal(usage[kind]["charged_usd"]) for kind in ("session", "day", "total")] == [expected] * 3
            await gateway.kill()
        charges = await connection.fetch(
            "select ticket_id, count(*) as n from control.invocation where state = 'charged' group by ticket_id"
        )
        assert [row["n"] for row in charges] == [1] * 12
        await connection.close()
        await audit(again.url, await simulator_process.ledger())
        again.stop()


@pytest.mark.skipif(not hasattr(resource, "prlimit"), reason="needs Linux to limit the files of another process")
async def test_a_gateway_that_cannot_keep_a_journal_takes_nothing_until_it_can(
    database_url, simulator_process, tmp_path
):
    text = toml(simulator_process.url)
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    soft = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    # Inherited by the gateway: its files may not grow past what its log needs.
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    try:
        started = gateway_process(tmp_path, text, TOLLBRIDGE_DATABASE_URL=database_url)
        gateway = await started.__aenter__()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    try:
        async with gateway.rest() as client, gateway.stub() as stub:
            ready = await client.get("/readyz")
            assert ready.status_code == 503
            assert ready.json()["parts"] == {"control_store": "ok", "journal": "unavailable"}
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await stub.Complete(completion("sim-fast"), metadata=METADATA)
            assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
            assert "the journal of this process cannot be written (File too large)" in (refused.value.details() or "")
            assert (await simulator_process.ledger())["dispatches"] == 0
            assert [line["reason"] for line in gateway.lines("gateway.journal_failed")] == ["File too large"]

            resource.prlimit(gateway.pid, resource.RLIMIT_FSIZE, (hard, hard))
            async with asyncio.timeout(60):
                while (await client.get("/readyz")).status_code != 200:  # noqa: ASYNC110  it is another process
                    await asyncio.sleep(0.05)
            answer = await stub.Complete(completion("sim-fast"), metadata=METADATA)
            assert answer.outcome.settlement == "settled"
    finally:
        await started.__aexit__(None, None, None)
    await audit(database_url, await simulator_process.ledger())
