"""What API keys promise, on whole gateways as real processes: each test is a client that knows the ports only."""

from __future__ import annotations

import asyncio
import json
import signal
import time
import urllib.parse
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import Any

import asyncpg
import grpc
import httpx
import pytest

from gateway.keys import KeysSettings
from tests.fakes.gateway_process import (
    KEY,
    METADATA,
    GatewayProcess,
    batch_line,
    bearer,
    completion,
    gateway_process,
)
from tests.fakes.postgres_proxy import postgres_proxy

STALE_S = KeysSettings().stale_after_s


def toml(url: str, *, concurrency: int = 8) -> str:
    endpoint = "/".join(url.split("/")[:3])
    return f"""
        [providers.simulated]
        protocol = "chat_completions"
        base_url = "{url}"
        first_byte_s = 60
        gap_s = 60
        [providers.twin]
        protocol = "chat_completions"
        base_url = "{url}"
        first_byte_s = 60
        gap_s = 60
        [models.sim-fast]
        providers = ["simulated", "twin"]
        price = {{ input = "1", output = "1" }}
        [models.sim-other]
        providers = ["simulated"]
        price = {{ input = "1", output = "1" }}
        [groups."{endpoint}"]
        concurrency = {concurrency}
        [admission]
        lease_s = 3
        margin_s = 1
    """


def chat(model: str = "sim-fast", text: str = "what is a bridge?", **fields: Any) -> dict[str, Any]:
    return {"model": model, "messages": [{"role": "user", "content": text}], **fields}


async def ask(
    gateway: GatewayProcess, secret: str, path: str = "/v1/chat/completions", *, method: str = "POST", **given: Any
) -> httpx.Response:
    headers = {**bearer(secret), **given.pop("headers", {})}
    async with httpx.AsyncClient(base_url=gateway.rest_url, timeout=60, trust_env=False) as client:
        return await client.request(method, path, headers=headers, **given)


async def called(gateway: GatewayProcess, secret: str, model: str = "sim-fast", **fields: Any) -> str | None:
    """The code that a gRPC call fails with; None where it does not."""
    async with gateway.stub() as stub:
        try:
            await stub.Complete(completion(model, **fields), metadata=(("authorization", f"Bearer {secret}"),))
        except grpc.aio.AioRpcError as error:
            return error.code().name
    return None


async def made(gateway: GatewayProcess, name: str, *scopes: str, **given: Any) -> dict[str, Any]:
    answer = await ask(gateway, KEY, "/v1/keys", json={"name": name, "scopes": scopes or ["chat"], **given})
    assert answer.status_code == 201, answer.text
    found: dict[str, Any] = answer.json()
    return found


async def seconds_until(condition: Callable[[], Awaitable[bool]], *, within_s: float) -> float:
    began = time.monotonic()
    while not await condition():
        assert time.monotonic() - began < within_s
        await asyncio.sleep(0.02)
    return time.monotonic() - began


@asynccontextmanager
async def two(url: str, provider: str, tmp_path: Any, **given: Any) -> AsyncIterator[tuple[GatewayProcess, ...]]:
    async with AsyncExitStack() as stack:
        yield tuple(
            [
                await stack.enter_async_context(
                    gateway_process(tmp_path, toml(provider, **given), name=name, TOLLBRIDGE_DATABASE_URL=url)
                )
                for name in ("one", "two")
            ]
        )


async def test_what_a_key_may_use_holds_on_every_transport_and_its_tags_are_on_every_call(
    database_url, simulator, tmp_path
):
    async with gateway_process(tmp_path, toml(simulator.url), TOLLBRIDGE_DATABASE_URL=database_url) as gateway:
        key = await made(gateway, "web", "chat", "jobs", models=["sim-fast"], providers=["twin"], tags={"team": "core"})
        secret = key["secret"]
        listed = (await ask(gateway, secret, "/v1/models", method="GET")).json()["data"]
        assert [(model["id"], [place["id"] for place in model["providers"]]) for model in listed] == [
            ("sim-fast", ["twin"])
        ]
        assert (await ask(gateway, secret, "/v1/models/sim-other", method="GET")).status_code == 404
        assert len((await ask(gateway, KEY, "/v1/models", method="GET")).json()["data"]) == 2
        assert await called(gateway, secret, tags={"team": "mine", "step": "1"}) is None
        assert await called(gateway, secret, "sim-other") == "NOT_FOUND"
        answered = await ask(gateway, secret, json=chat(), headers={"x-tollbridge-tags": "team=mine"})
        assert answered.status_code == 200
        assert answered.headers["x-tollbridge-route"].startswith("twin/")
        assert "tags.team" in answered.headers["x-tollbridge-warnings"]
        for model in ("sim-other", "simulated/sim-fast"):
            refused = await ask(gateway, secret, json=chat(model))
            assert (refused.status_code, refused.json()["error"]["code"]) == (404, "model_not_found")
        explained = await ask(gateway, secret, json=chat(), headers={"x-tollbridge-explain": "true"})
        assert "simulated/sim-fast: not_allowed: key" in explained.headers["x-tollbridge-left-out"]
        [job] = (await ask(gateway, secret, "/v1/jobs", json=batch_line("sim-fast", 1))).json()["jobs"]
        ended = await ask(gateway, secret, f"/v1/jobs/{job['id']}?wait=20", method="GET")
        assert ended.json()["status"] == "succeeded"
        refused = await ask(gateway, secret, "/v1/jobs", json=batch_line("sim-other", 1))
        assert (refused.status_code, refused.json()["error"]["code"]) == (404, "model_not_found"), refused.text
        connection = await asyncpg.connect(database_url)
        try:
            rows = await connection.fetch(
                "select tags, provider from control.invocation where key_id = $1", uuid.UUID(key["id"])
            )
        finally:
            await connection.close()
    assert len(rows) == 4
    assert {row["provider"] for row in rows} == {"twin"}
    assert {json.loads(row["tags"])["team"] for row in rows} == {"core"}
    assert (await simulator.ledger())["dispatches"] == 4


async def test_a_change_and_a_revocation_hold_in_the_other_gateway_within_two_seconds(
    database_url, simulator, tmp_path
):
    async with two(database_url, simulator.url, tmp_path) as (one, other):

        async def answers(status: int, secret: str) -> bool:
            return (await ask(other, secret, json=chat())).status_code == status

        async def within_seconds(name: str) -> float:
            """The longest that the other gateway took for any of it."""
            key = await made(one, name, "chat")
            path = f"/v1/keys/{key['id']}"
            took = [await seconds_until(lambda: answers(200, key["secret"]), within_s=60)]
            assert (await ask(one, KEY, path, method="PATCH", json={"models": ["sim-other"]})).status_code == 200
            assert (await ask(one, key["secret"], json=chat())).status_code == 404
            took.append(await seconds_until(lambda: answers(404, key["secret"]), within_s=60))
            assert (await ask(one, KEY, path, method="PATCH", json={"models": None})).status_code == 200
            rotated = (await ask(one, KEY, f"{path}/rotate", json={"overlap_s": 600})).json()["secret"]
            took.append(await seconds_until(lambda: answers(200, rotated), within_s=60))
            assert await answers(200, key["secret"])
            assert (await ask(one, KEY, path, method="DELETE")).status_code == 200
            assert (await ask(one, rotated, json=chat())).status_code == 401
            took.append(await seconds_until(lambda: answers(401, rotated), within_s=60))
            assert await answers(401, key["secret"])
            assert await called(other, rotated) == "UNAUTHENTICATED"
            return max(took)

        # A busy machine keeps nobody's time: what holds once in five is the gateway's doing.
        took: list[float] = []
        while not took or (took[-1] >= 2 and len(took) < 5):
            took.append(await within_seconds(f"web-{len(took)}"))
    assert min(took) < 2, took


async def test_a_known_key_outlives_the_database_by_its_time_and_no_longer_and_nothing_is_sent(
    database_url, simulator, tmp_path
):
    async with postgres_proxy(database_url) as proxy:
        url = proxy.url(urllib.parse.urlsplit(database_url).path.removeprefix("/"))
        async with two(url, simulator.url, tmp_path) as gateways:
            key = await made(gateways[0], "web", "chat")

            async def known(gateway: GatewayProcess, status: int, secret: str) -> bool:
                return (await ask(gateway, secret, "/v1/models", method="GET")).status_code == status

            for gateway in gateways:
                await seconds_until(partial(known, gateway, 200, key["secret"]), within_s=60)
            proxy.refusing = True
            proxy.cut()
            lost_at = time.monotonic()
            # Behind the gateways' backs, as another gateway with a way to the database would do it.
            connection = await asyncpg.connect(database_url)
            try:
                await connection.execute("update control.api_key set revoked_at = clock_timestamp() where name = 'web'")
            finally:
                await connection.close()
            before = (await simulator.ledger())["dispatches"]
            for gateway in gateways:
                assert await known(gateway, 200, key["secret"])
                assert await known(gateway, 401, "tb_unknown000_" + "0" * 43)
                # It is known, but there is no admission.
                assert (await ask(gateway, key["secret"], json=chat())).status_code == 503
            closed = []
            for gateway in gateways:
                await seconds_until(partial(known, gateway, 503, KEY), within_s=STALE_S + 5)
                closed.append(time.monotonic() - lost_at)
            assert all(STALE_S - 2 < seconds < STALE_S + 2 for seconds in closed), closed
            for gateway in gateways:
                refused = await ask(gateway, key["secret"], json=chat())
                assert (refused.status_code, refused.json()["error"]["code"]) == (503, "control_store_unavailable")
                assert await known(gateway, 503, "tb_unknown000_" + "0" * 43)
            proxy.refusing = False
            for gateway in gateways:
                await seconds_until(partial(known, gateway, 200, KEY), within_s=60)
                assert await known(gateway, 401, key["secret"])
            assert (await simulator.ledger())["dispatches"] == before


async def test_there_are_three_ways_to_give_a_key_and_every_other_is_none(database_url, simulator, tmp_path):
    async with gateway_process(tmp_path, toml(simulator.url), TOLLBRIDGE_DATABASE_URL=database_url) as gateway:
        good = (await made(gateway, "web", "chat", "usage:read"))["secret"]
        accepted = [
            [("authorization", f"Bearer {good}")],
            [("Authorization", f"bearer  {good}")],
            [("x-api-key", good)],
            [("api-key", good)],
        ]
        accepted.append([("x-api-key", good), ("authorization", f"Bearer {good}")])
        refused: list[list[tuple[str, str]]] = [
            [],
            [("authorization", good)],
            [("authorization", f"Basic {good}")],
            [("authorization", f"Bearer {good}x")],
            [("authorization", f"Bearer {good[:-1]}")],
            [("authorization", f"Bearer {good.upper()}")],
            [("authorization", "Bearer ' or '1'='1")],
            [("authorization", "Bearer")],
            [("authorization", f"Bearer {good},Bearer {good}")],
            [("authorization", f"Bearer {good}"), ("authorization", f"Bearer {good}")],
            [("x-api-key", good), ("x-api-key", good)],
            [("x-api-key", good), ("authorization", f"Bearer {KEY}")],
            [("api-key", good), ("api-key", good)],
            [("api-key", good), ("x-api-key", KEY)],
            [("x-goog-api-key", good)],
            [("cookie", f"key={good}")],
            [("proxy-authorization", f"Bearer {good}")],
            [("authorization", f"Bearer {'x' * 15_000}")],
        ]
        bodies = set()
        async with httpx.AsyncClient(base_url=gateway.rest_url, trust_env=False) as client:
            for headers in accepted:
                assert (await client.get("/v1/usage", headers=headers)).status_code == 200, headers
            for headers in refused:
                answer = await client.get("/v1/usage", headers=headers)
                assert answer.status_code == 401, headers
                assert good not in answer.text
                told = answer.json()["error"]
                bodies.add((told["code"], told["message"], told["param"]))
            assert len(bodies) == 1
            names = ("key", "api_key", "api-key", "access_token", "token", "authorization")
            for name in names:
                # Alone it is none, and beside a good one it is refused: it would be in logs on the way.
                assert (await client.get(f"/v1/usage?{name}={good}")).status_code == 401
                beside = await client.get(f"/v1/usage?{name}={good}", headers=bearer(good))
                assert beside.status_code == 400
                assert good not in beside.text
                posted = await client.post(f"/v1/chat/completions?{name}={good}", headers=bearer(good), json=chat())
                assert posted.status_code == 400
            in_user = httpx.URL(gateway.rest_url).copy_with(username=good, password="x")
            assert (await client.get(str(in_user) + "/v1/usage")).status_code == 401
        async with gateway.stub() as stub:
            for metadata in (
                (("x-api-key", good),),
                (("authorization", f"Bearer {good}"), ("authorization", f"Bearer {good}")),
                (("authorization", good),),
            ):
                with pytest.raises(grpc.aio.AioRpcError) as failed:
                    await stub.Complete(completion("sim-fast"), metadata=metadata)
                assert failed.value.code() is grpc.StatusCode.UNAUTHENTICATED
                assert good not in str(failed.value)
    assert (await simulator.ledger())["dispatches"] == 0


async def everything_stored(url: str) -> str:
    """Every row of every table of ours, as text; bytes as they are where they are text."""
    connection = await asyncpg.connect(url)
    try:
        tables = await connection.fetch(
            "select format('%I.%I', table_schema, table_name) as name from information_schema.tables"
            " where table_schema in ('control', 'content') and table_type = 'BASE TABLE'"
        )
        rows = []
        for table in tables:
            for row in await connection.fetch(f"select * from {table['name']}"):
                rows.append(repr(tuple(row.values())))  # noqa: PERF401
        return "\n".join(rows)
    finally:
        await connection.close()


async def test_no_secret_of_a_key_is_in_a_log_an_error_or_the_database(database_url, simulator, tmp_path):
    async with gateway_process(
        tmp_path, toml(simulator.url), arguments=("--log-level", "debug"), TOLLBRIDGE_DATABASE_URL=database_url
    ) as gateway:
        key = await made(gateway, "web", "chat", "admin", "jobs")
        path = f"/v1/keys/{key['id']}"
        second = (await ask(gateway, KEY, f"{path}/rotate", json={"overlap_s": 60})).json()["secret"]
        almost = second[:-1] + ("0" if second[-1] != "0" else "1")
        canaries = [key["secret"], second, almost]
        told = []
        for secret in canaries:
            for faults in ({}, {"status": 400}, {"die": "rst"}):
                await simulator.set_faults(**faults)
                named = {"idempotency-key": uuid.uuid4().hex, "x-tollbridge-resend-uncertain": "never"}
                told.append(await ask(gateway, secret, json=chat(), headers=named))
            await simulator.set_faults()
            told.append(await ask(gateway, secret, path, method="PATCH", json={"scopes": ["usage:read"]}))
            told.append(await ask(gateway, secret, "/v1/keys", json={"name": "x", "secret": secret}))
            told.append(await ask(gateway, secret, "/v1/jobs", json=batch_line("sim-fast", 1)))
            told.append(await ask(gateway, secret, f"/v1/usage?key={secret}", method="GET"))
            await called(gateway, secret)
        assert (await ask(gateway, KEY, path, method="DELETE")).status_code == 200
        told.extend([await ask(gateway, secret, json=chat()) for secret in canaries])
        stored = await everything_stored(database_url)
    assert {answer.status_code for answer in told} >= {200, 400, 401, 403, 502}
    log = gateway.log.read_text()
    assert "gateway.key_rotated" in log
    assert key["id"] in stored
    for secret in (*canaries, KEY):
        # What tells whose a secret is may be told; what makes it one may not.
        canary = secret.rpartition("_")[2] if secret != KEY else secret
        assert canary not in log
        assert canary not in stored
        assert not any(canary in answer.text or canary in str(answer.headers) for answer in told)


# ------------------------------------------------------------------ idempotency keys


async def test_a_call_is_made_once_whatever_transport_and_gateway_it_is_repeated_on(database_url, simulator, tmp_path):
    async with two(database_url, simulator.url, tmp_path) as (one, other):
        named = {"idempotency-key": "k-1"}
        async with one.stub() as stub:
            first = await stub.Complete(
                completion("sim-fast", idempotency_key="k-1", max_output_tokens=50), metadata=METADATA
            )
        text = first.choices[0].text
        assert text
        again = await ask(other, KEY, json=chat(max_tokens=50), headers=named)
        assert again.status_code == 200
        assert again.json()["choices"][0]["message"]["content"] == text
        assert again.headers["x-tollbridge-cost-usd"]
        assert "kept" in again.headers["x-tollbridge-warnings"]
        messages = await ask(other, KEY, "/v1/messages", json=chat(max_tokens=50), headers=named)
        assert messages.status_code == 200
        assert messages.json()["content"][0]["text"] == text
        for body in (chat(), chat(max_tokens=50, stream=True)):
            mismatch = await ask(other, KEY, json=body, headers=named)
            assert (mismatch.status_code, mismatch.json()["error"]["code"]) == (422, "idempotency_mismatch")
        assert (await simulator.ledger())["dispatches"] == 1
        streams = [
            await ask(gateway, KEY, json=chat(stream=True), headers={"idempotency-key": "k-2"})
            for gateway in (one, other, one)
        ]
        assert {answer.status_code for answer in streams} == {200}

        def pieces(answer: httpx.Response) -> list[str]:
            events = [line[6:] for line in answer.text.splitlines() if line.startswith("data: ")]
            assert events[-1] == "[DONE]"
            found = [json.loads(event) for event in events[:-1]]
            return [c["delta"].get("content") or "" for event in found for c in event["choices"]]

        # The same API, so the provider's own bytes.
        assert pieces(streams[0]) == pieces(streams[1]) == pieces(streams[2])
        assert "".join(pieces(streams[0]))
        assert (await simulator.ledger())["dispatches"] == 2
        told = []
        for gateway in (one, other):
            async with gateway.stub() as stub:
                asked = completion("sim-fast", text="over gRPC", idempotency_key="k-3")
                told.append([chunk async for chunk in stub.Stream(asked, metadata=METADATA)])
        texts = ["".join(piece.text for c in chunks for piece in c.delta.pieces) for chunks in told]
        assert texts[0] == texts[1] != ""
        assert [chunks[-1].WhichOneof("chunk") for chunks in told] == ["finished", "finished"]
        assert told[0][-1].finished.outcome.cost == told[1][-1].finished.outcome.cost
        assert (await simulator.ledger())["dispatches"] == 3


async def test_a_repetition_beside_the_first_is_told_to_come_back_and_then_gets_its_answer(
    database_url, simulator, tmp_path
):
    await simulator.set_faults(hold=True)
    refused = asyncio.Event()
    async with two(database_url, simulator.url, tmp_path) as gateways:

        async def until_answered(gateway: GatewayProcess) -> tuple[str, set[int]]:
            seen = set()
            async with asyncio.timeout(20):
                while True:
                    answer = await ask(gateway, KEY, json=chat(), headers={"idempotency-key": "k"})
                    seen.add(answer.status_code)
                    if answer.status_code == 200:
                        return answer.json()["choices"][0]["message"]["content"], seen
                    assert answer.json()["error"]["code"] == "idempotency_in_progress"
                    assert answer.headers["retry-after"] == "1"
                    assert "x-should-retry" not in answer.headers
                    refused.set()
                    await asyncio.sleep(0.1)

        asking = [asyncio.create_task(until_answered(gateway)) for gateway in gateways for _ in range(3)]
        await asyncio.wait([asyncio.create_task(refused.wait()), *asking], return_when=asyncio.FIRST_COMPLETED)
        await simulator.set_faults()
        answers = await asyncio.gather(*asking)
    assert len({text for text, _ in answers}) == 1
    assert any(409 in seen for _, seen in answers)
    assert (await simulator.ledger())["dispatches"] == 1


@pytest.mark.parametrize("sent", [True, False], ids=["after the dispatch", "in the queue"])
async def test_the_key_of_a_killed_gateway_is_uncertain_or_free_as_the_ledger_says(
    database_url, simulator, tmp_path, sent
):
    named = {"idempotency-key": "k"}
    async with two(database_url, simulator.url, tmp_path, concurrency=1) as (one, other):
        running = []
        try:
            if sent:
                await simulator.set_faults(latency=60)
            else:
                await simulator.set_faults(model="sim-other", latency=6)
                running.append(asyncio.create_task(ask(other, KEY, json=chat("sim-other"))))
            await simulator.until(lambda ledger: ledger["active"] == (0 if sent else 1))
            running.append(asyncio.create_task(ask(one, KEY, json=chat(), headers=named)))

            async def held() -> bool:
                return (await ask(other, KEY, json=chat(), headers=named)).status_code == 409

            if sent:
                await simulator.until(lambda ledger: ledger["active"] == 1)
            else:
                await seconds_until(lambda: reserved(database_url), within_s=60)
            assert await held()
            one.send(signal.SIGKILL)

            async def decided() -> bool:
                return not await held()

            took = await seconds_until(decided, within_s=20)
            answer = await ask(other, KEY, json=chat(), headers=named)
            if sent:
                assert (answer.status_code, answer.json()["error"]["code"]) == (502, "uncertain")
                assert answer.json()["error"]["message"]
                assert (await simulator.ledger())["dispatches"] == 1
            else:
                assert answer.status_code == 200
                assert (await simulator.ledger())["dispatches"] == 2
            assert took < 15
        finally:
            for task in running:
                task.cancel()
            await asyncio.wait(running)


async def reserved(url: str) -> bool:
    connection = await asyncpg.connect(url)
    try:
        return bool(await connection.fetchval("select count(*) from content.idempotent_call where state = 'waiting'"))
    finally:
        await connection.close()
