"""Batches in the shapes of Anthropic's API, on a real PostgreSQL: accepted whole or not at all, each answered once."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import httpx
import pytest

from tests.fakes.job_world import World, client_of, own_database, until, world_on

PATH = "/v1/messages/batches"
#: Nothing waits so long, unless it fails.
PATIENCE_S = 30.0


@pytest.fixture(scope="module")
def url(database_server: str, database_template: str) -> Iterator[str]:
    yield from own_database(database_server, database_template)


@pytest.fixture
async def world(url: str) -> AsyncIterator[World]:
    async with world_on(url) as world:
        yield world


@pytest.fixture
async def client(world: World) -> AsyncIterator[httpx.AsyncClient]:
    async with client_of(world) as client:
        client.headers["anthropic-version"] = "2023-06-01"
        yield client


def request(custom_id: str, model: str = "ok", **params: Any) -> dict[str, Any]:
    body = {"model": model, "max_tokens": 50, "messages": [{"role": "user", "content": "hi\nthere"}]}
    return {"custom_id": custom_id, "params": {**body, **params}}


async def create(
    client: httpx.AsyncClient, *requests: Any, headers: dict[str, str] | None = None, **more: Any
) -> httpx.Response:
    # As a person writes it: over many lines.
    body = json.dumps({"requests": requests, **more}, indent=2)
    return await client.post(PATH, content=body, headers={"content-type": "application/json", **(headers or {})})


async def made(client: httpx.AsyncClient, *requests: Any) -> dict[str, Any]:
    answer = await create(client, *requests)
    assert answer.status_code == 200, answer.text
    batch: dict[str, Any] = answer.json()
    return batch


async def once(client: httpx.AsyncClient, batch_id: str, is_so: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    async with asyncio.timeout(PATIENCE_S):
        while True:
            answer = await client.get(f"{PATH}/{batch_id}")
            assert answer.status_code == 200, answer.text
            batch: dict[str, Any] = answer.json()
            if is_so(batch):
                return batch
            await asyncio.sleep(0.02)


async def ended(client: httpx.AsyncClient, batch_id: str) -> dict[str, Any]:
    return await once(client, batch_id, lambda batch: bool(batch["processing_status"] == "ended"))


async def results(client: httpx.AsyncClient, batch: dict[str, Any]) -> dict[str, Any]:
    """By custom id."""
    answer = await client.get(batch["results_url"])
    assert answer.status_code == 200, answer.text
    lines = [json.loads(text) for text in answer.text.splitlines()]
    assert all(line.keys() == {"custom_id", "result"} for line in lines)
    return {line["custom_id"]: line["result"] for line in lines}


def counts(**given: int) -> dict[str, int]:
    return {"processing": 0, "succeeded": 0, "errored": 0, "canceled": 0, "expired": 0, **given}


def fault(answer: httpx.Response) -> tuple[int, str, str | None]:
    body = answer.json()
    assert body["type"] == "error"
    return answer.status_code, answer.headers["x-tollbridge-code"], body["error"].get("param")


async def test_a_batch_is_run_and_its_results_are_read_by_their_names(client: httpx.AsyncClient, world: World) -> None:
    batch = await made(client, request("a"), request("b", "rejected"), request("c"))
    assert batch["id"].startswith("msgbatch_")
    assert (batch["type"], batch["processing_status"]) == ("message_batch", "in_progress")
    assert batch["request_counts"] == counts(processing=3)
    assert (batch["ended_at"], batch["results_url"], batch["cancel_initiated_at"]) == (None, None, None)
    for refused in (
        await client.get(f"{PATH}/{batch['id']}/results"),
        await client.delete(f"{PATH}/{batch['id']}"),
    ):
        assert fault(refused)[:2] == (409, "conflict")
    async with world.batches.opened(), world.runner():
        batch = await ended(client, batch["id"])
    assert batch["request_counts"] == counts(succeeded=2, errored=1)
    assert batch["ended_at"] is not None
    told = await results(client, batch)
    assert list(told) == ["a", "b", "c"]
    assert (told["a"]["type"], told["a"]["message"]["type"]) == ("succeeded", "message")
    assert told["a"]["message"]["content"][0]["text"] == "hello"
    assert told["b"]["type"] == "errored"
    assert (told["b"]["error"]["type"], told["b"]["error"]["error"]["type"]) == ("error", "invalid_request_error")
    assert "the provider refused it" in told["b"]["error"]["error"]["message"]
    # It is a batch like those of the other API.
    other = (await client.get(f"/v1/batches/batch_{batch['id'].removeprefix('msgbatch_')}")).json()
    assert (other["endpoint"], other["status"]) == ("/v1/messages", "completed")
    answer = await client.delete(f"{PATH}/{batch['id']}")
    assert answer.json() == {"id": batch["id"], "type": "message_batch_deleted"}
    for table in ("job", "batch"):
        assert await world.pool.fetchval(f"select count(*) from content.{table}") == 0
    assert await world.pool.fetchval("select count(*) from content.file where state = 'ready'") == 0
    assert fault(await client.get(f"{PATH}/{batch['id']}"))[:2] == (404, "not_found")


async def test_a_batch_is_cancelled_before_its_requests_are_jobs_and_while_they_run(
    client: httpx.AsyncClient, world: World
) -> None:
    early = await made(client, request("a"), request("b"))
    answers = await asyncio.gather(*(client.post(f"{PATH}/{early['id']}/cancel") for _ in range(2)))
    assert {answer.json()["processing_status"] for answer in answers} == {"canceling"}
    async with world.batches.opened(), world.runner():
        early = await ended(client, early["id"])
        assert early["request_counts"] == counts(canceled=2)
        assert await results(client, early) == {"a": {"type": "canceled"}, "b": {"type": "canceled"}}
        late = await made(client, request("a"), request("b", "wait"))
        await asyncio.wait_for(world.line.inside.wait(), PATIENCE_S)
        await until(lambda: world.line.sent.total() == 2)
        await client.post(f"{PATH}/{late['id']}/cancel")
        late = await ended(client, late["id"])
    assert late["cancel_initiated_at"] is not None
    assert late["request_counts"] == counts(succeeded=1, canceled=1)
    assert {name: result["type"] for name, result in (await results(client, late)).items()} == {
        "a": "succeeded",
        "b": "canceled",
    }
    # One that has ended is left as it is.
    assert (await client.post(f"{PATH}/{late['id']}/cancel")).json() == late


async def test_what_ended_before_it_was_jobs_has_a_result_for_each_request(
    client: httpx.AsyncClient, world: World
) -> None:
    late = await made(client, request("a"), request("b"))
    await world.pool.execute("update content.batch set deadline_at = clock_timestamp() - interval '1 minute'")
    # Its model was taken out of the configuration meanwhile.
    wrong = await made(client, request("c"), request("d", "gone"))
    await world.pool.execute(
        "update content.file_line set text = convert_to(replace(convert_from(text, 'utf8'), 'gone', 'missing'), 'utf8')"
    )
    async with world.batches.opened():
        late, wrong = await ended(client, late["id"]), await ended(client, wrong["id"])
    assert (late["request_counts"], wrong["request_counts"]) == (counts(expired=2), counts(errored=2))
    assert await results(client, late) == {"a": {"type": "expired"}, "b": {"type": "expired"}}
    told = await results(client, wrong)
    assert {name: result["type"] for name, result in told.items()} == {"c": "errored", "d": "errored"}
    for result in told.values():
        assert result["error"]["error"]["type"] == "not_found_error"
        assert "request 2" in result["error"]["error"]["message"]


@pytest.mark.parametrize(
    ("requests", "refused"),
    [
        ([], (400, "invalid_request", "requests")),
        (["x"], (400, "invalid_request", "requests[0]")),
        ([{"custom_id": "a"}], (400, "invalid_request", "requests[0].params")),
        ([{"params": request("a")["params"]}], (400, "invalid_request", "requests[0].custom_id")),
        ([request("a"), request("a")], (400, "invalid_request", "requests[1].custom_id")),
        ([request("a"), request("b", "missing")], (404, "model_not_found", "requests[1].params.model")),
        ([request("a", max_tokens="x")], (400, "invalid_request", "requests[0].params.max_tokens")),
        ([request("a", stream=True)], (400, "unsupported_field", "requests[0].params.stream")),
        ([{**request("a"), "url": "/v1/responses"}], (400, "unsupported_field", "requests[0].url")),
        ([{**request("a"), "surprise": 1}], (400, "unsupported_field", "requests[0].surprise")),
        ([{**request("a"), "class": "interactive"}], (400, "invalid_request", "requests[0].class")),
    ],
)
async def test_what_is_wrong_is_said_with_its_place_and_nothing_is_accepted(
    client: httpx.AsyncClient, world: World, requests: list[Any], refused: tuple[int, str, str | None]
) -> None:
    answer = await create(client, *requests)
    status, code, param = refused
    assert (answer.status_code, answer.headers["x-tollbridge-code"]) == (status, code)
    assert answer.json()["type"] == "error"
    assert param is None or param in answer.text
    for table in ("job", "batch", "file"):
        assert await world.pool.fetchval(f"select count(*) from content.{table}") == 0


async def test_what_a_batch_cannot_act_on_is_refused(client: httpx.AsyncClient) -> None:
    for headers in ({"x-tollbridge-session-id": "s"}, {"anthropic-beta": "context-1m-2025-08-07"}):
        assert (await create(client, request("a"), headers=headers)).status_code == 400
    assert (await create(client, request("a"), webhook_url="https://elsewhere.test/")).status_code == 400
    assert (await create(client, request("a"), more=1)).status_code == 400
    assert (await client.get(PATH, params={"before_id": "x"})).status_code == 400
    tolerated = await create(client, request("a"), headers={"anthropic-beta": "message-batches-2024-09-24"})
    assert tolerated.status_code == 200


async def test_a_request_may_carry_the_caller_fields(client: httpx.AsyncClient, world: World) -> None:
    await made(client, {**request("a"), "session_id": "nightly"})
    async with world.batches.opened():
        await until(lambda: _one_job(world))
    assert await world.pool.fetchval("select session_id from content.job") == "nightly"


async def _one_job(world: World) -> bool:
    return bool(await world.pool.fetchval("select count(*) from content.job") == 1)


async def test_pages_have_only_the_keys_own_batches_of_messages_newest_first(client: httpx.AsyncClient) -> None:
    ids = [(await made(client, request("a")))["id"] for _ in range(3)]
    first = (await client.get(PATH, params={"limit": 2})).json()
    assert [batch["id"] for batch in first["data"]] == ids[:0:-1]
    assert (first["has_more"], first["first_id"], first["last_id"]) == (True, ids[2], ids[1])
    rest = (await client.get(PATH, params={"after_id": first["last_id"]})).json()
    assert ([batch["id"] for batch in rest["data"]], rest["has_more"]) == (ids[:1], False)
    others = {"authorization": "Bearer other"}
    assert (await client.get(PATH, headers=others)).json()["data"] == []
    for method, more in (("GET", ""), ("DELETE", ""), ("POST", "/cancel"), ("GET", "/results")):
        for answer in (
            await client.request(method, f"{PATH}/{ids[0]}{more}", headers=others),
            await client.request(method, f"{PATH}/msgbatch_{'0' * 32}{more}"),
            await client.request(method, f"{PATH}/batch_1{more}"),
        ):
            assert fault(answer)[:2] == (404, "not_found")


async def test_a_batch_under_an_idempotency_key_is_one_batch(client: httpx.AsyncClient, world: World) -> None:
    key = {"idempotency-key": "k-1"}
    answers = await asyncio.gather(*(create(client, request("a"), headers=key) for _ in range(4)))
    assert {answer.json()["id"] for answer in answers} == {answers[0].json()["id"]}
    assert sorted("idempotent-replayed" in answer.headers for answer in answers) == [False, True, True, True]
    assert await world.pool.fetchval("select count(*) from content.file where state = 'ready'") == 1
    assert fault(await create(client, request("b"), headers=key))[:2] == (422, "idempotency_mismatch")
