"""Responses in the background over HTTP, on a real PostgreSQL: kept from the commit on, and ended once."""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from adapters.protocols.responses import kept
from gateway.call import Scope
from gateway.jobs.settings import WebhookSettings
from tests.fakes.job_world import FAST, World, client_of, line, own_database, world_on

ASK: dict[str, Any] = {"model": "ok", "input": "hi", "background": True}
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
        yield client


async def create(client: httpx.AsyncClient, headers: dict[str, str] | None = None, **fields: Any) -> httpx.Response:
    return await client.post("/v1/responses", json={**ASK, **fields}, headers=headers)


async def made(client: httpx.AsyncClient, headers: dict[str, str] | None = None, **fields: Any) -> str:
    answer = await create(client, headers, **fields)
    assert answer.status_code == 200, answer.text
    response_id: str = answer.json()["id"]
    return response_id


async def once(client: httpx.AsyncClient, response_id: str, *statuses: str) -> httpx.Response:
    """The response, once it is in one of these."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            answer = await client.get(f"/v1/responses/{response_id}")
            assert answer.status_code == 200, answer.text
            if answer.json()["status"] in statuses:
                return answer
            await asyncio.sleep(0.01)


def job_of(response_id: str) -> uuid.UUID:
    return uuid.UUID(response_id.removeprefix(kept.ID_PREFIX))


@asynccontextmanager
async def running(world: World) -> AsyncIterator[None]:
    async with world.runner() as runner:
        world.local.runner = runner
        try:
            yield
        finally:
            world.local.runner = None


def fault(answer: httpx.Response) -> tuple[int, str, str | None]:
    error = answer.json()["error"]
    return answer.status_code, error["code"], error["param"]


# ------------------------------------------------------------------ the life of one


async def test_a_response_is_queued_at_once_and_has_its_answer_later(client: httpx.AsyncClient, world: World) -> None:
    asked: dict[str, Any] = {
        "instructions": "Be brief.",
        "metadata": {"team": "a"},
        "max_output_tokens": 50,
        "temperature": 0.5,
    }
    answer = await create(client, **asked)
    assert answer.status_code == 200
    first = answer.json()
    assert first["id"].startswith("resp_")
    assert (first["object"], first["status"], first["background"], first["output"]) == ("response", "queued", True, [])
    assert (first["error"], first["usage"], first["store"]) == (None, None, True)
    assert {name: first[name] for name in asked} == asked
    row = await world.row(job_of(first["id"]))
    assert (row["status"], row["klass"], row["key_id"]) == ("queued", 0, world.key_id)
    # The wish is ours to grant: whoever answers hears nothing of it.
    assert json.loads(row["body"]) == {"model": "ok", "input": "hi"} | asked
    again = (await client.get(f"/v1/responses/{first['id']}")).json()
    assert again == first

    async with running(world):
        done = await once(client, first["id"], "completed")
    told = done.json()
    assert told["output"][0]["content"][0]["text"] == "hello"
    assert told["usage"]["total_tokens"] == 15
    assert told["model"] == "fake-1"
    assert told["completed_at"] >= told["created_at"]
    same = ("id", "created_at", "background", "store", *asked)
    assert {name: told[name] for name in same} == {name: first[name] for name in same}
    assert done.headers["x-tollbridge-route"] == "fake/fake-1"
    assert done.headers["x-tollbridge-cost-usd"] == "0.000000125"
    assert done.headers["x-request-id"] == done.headers["x-tollbridge-request-id"]


async def test_what_failed_says_why_and_which_field_it_was(client: httpx.AsyncClient, world: World) -> None:
    late = await made(client, {"x-tollbridge-deadline-s": "0.001"})
    async with running(world):
        refused = await once(client, await made(client, model="rejected"), "failed")
        expired = await once(client, late, "failed")
        world.callers.scopes = frozenset({Scope.JOBS})
        barred = await once(client, await made(client), "failed")
    assert refused.json()["error"] == {"code": "upstream_rejected", "message": "the provider refused it"}
    assert (refused.json()["output"], refused.headers["x-tollbridge-code"]) == ([], "upstream_rejected")
    assert expired.json()["error"]["code"] == "expired"
    assert barred.json()["error"]["code"] == "permission_denied"


async def test_a_queued_one_is_cancelled_at_once_and_cancelling_again_says_the_same(
    client: httpx.AsyncClient, world: World
) -> None:
    response_id = await made(client)
    answers = await asyncio.gather(*(client.post(f"/v1/responses/{response_id}/cancel") for _ in range(4)))
    assert [(answer.status_code, answer.json()["status"]) for answer in answers] == [(200, "cancelled")] * 4
    async with running(world):
        other = await made(client)
        done = (await once(client, other, "completed")).json()
        assert (await client.post(f"/v1/responses/{other}/cancel")).json() == done
    assert (await client.get(f"/v1/responses/{response_id}")).json() == answers[0].json()
    assert world.line.sent.total() == 1


async def test_a_running_one_is_taken_back_by_whoever_runs_it(client: httpx.AsyncClient, world: World) -> None:
    async with running(world):
        response_id = await made(client, model="wait")
        await once(client, response_id, "in_progress")
        await asyncio.wait_for(world.line.inside.wait(), PATIENCE_S)
        answers = await asyncio.gather(*(client.post(f"/v1/responses/{response_id}/cancel") for _ in range(2)))
        assert [answer.json()["status"] for answer in answers] == ["cancelled"] * 2
        assert answers[0].json()["error"] is None
        # As it is where another process runs it.
        world.line.inside.clear()
        elsewhere = await made(client, model="wait")
        await asyncio.wait_for(world.line.inside.wait(), PATIENCE_S)
        world.local.runner = None
        assert (await client.post(f"/v1/responses/{elsewhere}/cancel")).json()["status"] == "cancelled"


async def test_an_ended_one_is_deleted_with_its_content_and_a_running_one_is_not(
    client: httpx.AsyncClient, world: World
) -> None:
    response_id = await made(client)
    refused = await client.delete(f"/v1/responses/{response_id}")
    assert fault(refused) == (409, "conflict", None)
    assert refused.headers["x-should-retry"] == "false"
    async with running(world):
        await once(client, response_id, "completed")
    answer = await client.delete(f"/v1/responses/{response_id}")
    assert answer.json() == {"id": response_id, "object": "response", "deleted": True}
    for gone in (await client.get(f"/v1/responses/{response_id}"), await client.delete(f"/v1/responses/{response_id}")):
        assert fault(gone) == (404, "not_found", None)
    assert await world.pool.fetchval("select count(*) from content.job") == 0


async def test_the_input_is_listed_as_items_with_ids(client: httpx.AsyncClient) -> None:
    items = [
        {"role": "user", "content": "one"},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "two"}], "id": "msg_own"},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "three"},
    ]
    path = f"/v1/responses/{await made(client, input=items)}/input_items"
    page = (await client.get(path, params={"order": "asc"})).json()
    assert [item["type"] for item in page["data"]] == ["message", "message", "function_call", "function_call_output"]
    assert page["data"][0]["content"] == [{"type": "input_text", "text": "one"}]
    ids = [item["id"] for item in page["data"]]
    assert len(set(ids)) == 4
    assert ids[1] == "msg_own"
    first = (await client.get(path, params={"limit": 3})).json()
    assert ([item["id"] for item in first["data"]], first["has_more"]) == (ids[:0:-1], True)
    rest = (await client.get(path, params={"after": first["last_id"]})).json()
    assert ([item["id"] for item in rest["data"]], rest["has_more"]) == (ids[:1], False)
    text = (await client.get(f"/v1/responses/{await made(client)}/input_items")).json()["data"]
    assert text[0]["content"] == [{"type": "input_text", "text": "hi"}]
    assert fault(await client.get(path, params={"after": "msg_other"})) == (404, "not_found", "after")
    for name, value in (("order", "up"), ("limit", "101")):
        assert fault(await client.get(path, params={name: value})) == (400, "invalid_request", name)


# ------------------------------------------------------------------ who, and what


async def test_what_is_anothers_is_answered_like_what_never_was(client: httpx.AsyncClient, world: World) -> None:
    mine = await made(client)
    body = {"model": "ok", "input": "hi"}
    job = (await client.post("/v1/jobs", json=line("a", url="/v1/responses", body=body))).json()
    paths = [
        f"/v1/responses/{response_id}"
        for response_id in (mine, kept.ID_PREFIX + "0" * 32, "resp_68aabbcc", kept.ID_PREFIX, "msg_1")
    ]
    others = {"authorization": "Bearer other"}
    told: list[dict[str, Any]] = []
    for method, more in (("GET", ""), ("DELETE", ""), ("POST", "/cancel"), ("GET", "/input_items")):
        answers = [await client.request(method, path + more, headers=others) for path in paths]
        # Nor is a job that was no response a response.
        own_job = kept.ID_PREFIX + uuid.UUID(job["jobs"][0]["id"]).hex
        answers.append(await client.request(method, f"/v1/responses/{own_job}{more}"))
        for answer in answers:
            assert answer.status_code == 404
            error = answer.json()["error"]
            assert error.pop("request_id") == answer.headers["x-tollbridge-request-id"]
            told.append(error)
        barred = await client.request(method, paths[0] + more, headers={"authorization": "Bearer only-jobs"})
        assert barred.status_code == 403
    assert all(error == told[0] for error in told)
    assert "background" in told[0]["message"]
    assert (await client.get(paths[0])).json()["status"] == "queued"
    assert (await client.get(f"/v1/jobs/{job_of(mine)}")).json()["url"] == "/v1/responses"


@pytest.mark.parametrize(
    ("fields", "headers", "refused"),
    [
        ({"stream": True}, {}, (400, "unsupported_field", "stream")),
        ({"store": False}, {}, (400, "unsupported_field", "store")),
        ({"model": "missing"}, {}, (404, "model_not_found", "model")),
        ({"model": None}, {}, (400, "invalid_request", "model")),
        ({"background": "yes"}, {}, (400, "invalid_request", "background")),
        ({"previous_response_id": kept.ID_PREFIX + "1" * 32}, {}, (400, "unsupported_field", "previous_response_id")),
        ({}, {"x-tollbridge-surprise": "1"}, (400, "invalid_request", "x-tollbridge-surprise")),
        ({}, {"x-tollbridge-deadline-s": "soon"}, (400, "invalid_request", "x-tollbridge-deadline-s")),
        ({}, {"x-tollbridge-deadline-s": "99999999"}, (400, "invalid_request", "x-tollbridge-deadline-s")),
        ({}, {"x-tollbridge-max-attempts": "0"}, (400, "invalid_request", "x-tollbridge-max-attempts")),
        ({}, {"x-tollbridge-webhook-url": "https://a.test/"}, (400, "invalid_request", "x-tollbridge-webhook-url")),
        ({}, {"x-tollbridge-class": "first"}, (400, "invalid_request", "x-tollbridge-class")),
        (
            {"background": False},
            {"x-tollbridge-deadline-s": "60"},
            (400, "invalid_request", "x-tollbridge-deadline-s"),
        ),
        (
            {"background": False, "previous_response_id": kept.ID_PREFIX + "1" * 32},
            {},
            (400, "unsupported_field", "previous_response_id"),
        ),
        ({"input": "x" * (FAST.max_line_bytes + 1)}, {}, (413, "payload_too_large", None)),
    ],
)
async def test_what_cannot_be_granted_is_refused_and_nothing_is_kept(
    client: httpx.AsyncClient,
    world: World,
    fields: dict[str, Any],
    headers: dict[str, str],
    refused: tuple[int, str, str | None],
) -> None:
    assert fault(await create(client, headers, **fields)) == refused
    assert await world.count("queued") == 0


async def test_a_lookup_that_asks_for_what_is_not_kept_is_refused(client: httpx.AsyncClient) -> None:
    path = f"/v1/responses/{await made(client)}"
    for query, param in (
        ({"stream": "true"}, "stream"),
        ({"starting_after": "3"}, "starting_after"),
        ({"include[]": "reasoning.encrypted_content"}, "include"),
    ):
        assert fault(await client.get(path, params=query)) == (400, "unsupported_field", param)
    assert (await client.get(path, params={"stream": "false"})).status_code == 200


async def test_a_direct_response_is_answered_at_once_as_before(client: httpx.AsyncClient, world: World) -> None:
    for background in (False, None):
        answer = await create(client, background=background)
        assert (answer.json()["status"], answer.json()["background"]) == ("completed", False)
    assert await world.pool.fetchval("select count(*) from content.job") == 0


async def test_the_caller_fields_and_those_of_a_job_are_headers(url: str) -> None:
    hooks = WebhookSettings(allowed_hosts=("hooks.example.com",), secret=b"s" * 32)
    async with world_on(url, webhooks=hooks) as world, client_of(world) as client:
        headers = {
            "x-tollbridge-class": "batch",
            "x-tollbridge-session-id": "nightly",
            "x-tollbridge-deadline-s": "60",
            "x-tollbridge-max-attempts": "2",
            "x-tollbridge-webhook-url": "https://hooks.example.com/end",
        }
        response_id = await made(client, headers)
        row = await world.row(job_of(response_id))
        assert (row["klass"], row["session_id"], row["attempts_allowed"]) == (1, "nightly", 2)
        assert 0 < (row["deadline_at"] - row["not_before"]).total_seconds() <= 60
        await client.post(f"/v1/responses/{response_id}/cancel")
        told = await world.pool.fetch("select url, payload from content.webhook")
    assert [entry["url"] for entry in told] == ["https://hooks.example.com/end"]
    event = json.loads(told[0]["payload"])
    assert (event["object"], event["type"]) == ("event", "response.cancelled")
    assert event["data"] == {
        "id": response_id,
        "object": "response",
        "status": "cancelled",
        "error_code": "cancelled",
    }


async def test_every_end_of_a_response_is_told_as_openais_event(url: str) -> None:
    """Those of the runner that the fake line cannot make are written as it writes them."""
    hooks = WebhookSettings(allowed_hosts=("hooks.example.com",), secret=b"s" * 32)
    named = {"x-tollbridge-webhook-url": "https://hooks.example.com/end"}
    ended = """
        update content.job set status = $2, result = $3, error_code = $4, ended_at = now(), expires_at = now()
         where job_id = $1"""
    ends: list[tuple[str, str | None, str | None, str]] = [
        ("succeeded", '{"status": "completed"}', None, "completed"),
        ("succeeded", '{"output": ["\\u0000\\\\\\"\\ud800"], "status" : "incomplete"}', None, "incomplete"),
        ("succeeded", '{"output": [{"status": "incomplete"}]}', None, "completed"),
        ("failed", None, "upstream_rejected", "failed"),
        ("expired", None, "expired", "failed"),
    ]
    wanted: dict[str, tuple[str, str | None]] = {}
    async with world_on(url, webhooks=hooks) as world, client_of(world) as client:
        for status, result, code, word in ends:
            response_id = await made(client, named)
            await world.pool.execute(ended, job_of(response_id), status, result, code)
            wanted[response_id] = (word, code)
        rows = await world.pool.fetch("select payload from content.webhook")
    events = [json.loads(row["payload"]) for row in rows]
    assert {event["data"]["id"]: (event["data"]["status"], event["data"]["error_code"]) for event in events} == wanted
    assert all(event["type"] == f"response.{event['data']['status']}" for event in events)


async def test_a_request_under_an_idempotency_key_is_one_response(client: httpx.AsyncClient, world: World) -> None:
    key = {"idempotency-key": "k-1"}
    answers = await asyncio.gather(*(create(client, key) for _ in range(8)))
    assert {answer.json()["id"] for answer in answers} == {answers[0].json()["id"]}
    assert sorted("idempotent-replayed" in answer.headers for answer in answers) == [False] + [True] * 7
    assert await world.count("queued") == 1
    assert fault(await create(client, key, input="other"))[:2] == (422, "idempotency_mismatch")
    assert fault(await create(client, {**key, "x-tollbridge-class": "batch"}))[:2] == (422, "idempotency_mismatch")
    async with running(world):
        await once(client, answers[0].json()["id"], "completed")
    assert (await create(client, key)).json()["status"] == "completed"
    await client.delete(f"/v1/responses/{answers[0].json()['id']}")
    assert fault(await create(client, key)) == (404, "not_found", None)


async def test_a_job_that_says_it_is_in_the_background_is_refused(client: httpx.AsyncClient) -> None:
    answer = await client.post("/v1/jobs", json=line("a", url="/v1/responses", body=ASK))
    assert fault(answer) == (400, "unsupported_field", "body.background")
