"""Jobs over HTTP on a real PostgreSQL: what is accepted, what is said about what is not, and what comes back."""

from __future__ import annotations

import asyncio
import json
import resource
import uuid
from collections.abc import AsyncIterator, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest

from admission.lease import Waiting
from tests.fakes.job_world import World, client_of, line, ndjson, own_database, until, world_on

NDJSON = {"content-type": "application/x-ndjson"}


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


async def submit(client: httpx.AsyncClient, *lines: object, **headers: str) -> httpx.Response:
    return await client.post("/v1/jobs", content=ndjson(lines), headers=NDJSON | headers)


async def results(client: httpx.AsyncClient, **query: str) -> list[dict[str, Any]]:
    answer = await client.get("/v1/jobs/results", params=query)
    assert answer.status_code == 200
    return [json.loads(text) for text in answer.text.splitlines()]


# ------------------------------------------------------------------ submitting


async def test_one_object_a_list_and_lines_are_all_taken(client: httpx.AsyncClient, world: World) -> None:
    one = await client.post("/v1/jobs", json=line("a"))
    many = await client.post("/v1/jobs", json={"jobs": [line("a"), line("b")]})
    lines = await submit(client, line("a"), line("b"), line("c"))
    for answer, count in ((one, 1), (many, 2), (lines, 3)):
        assert answer.status_code == 202
        body = answer.json()
        assert (body["accepted"], body["rejected"], body["errors"]) == (count, 0, [])
        assert [job["line"] for job in body["jobs"]] == list(range(1, count + 1))
    assert await world.count("queued") == 6


async def test_bad_lines_are_told_beside_their_neighbours_and_come_back_as_error_lines(
    client: httpx.AsyncClient, world: World
) -> None:
    lines: list[object] = [line(f"c{n}") for n in range(20)]
    lines[4] = b'{"custom_id": "c4", "method": "POST", '
    lines[9] = line("c9", model="missing")
    lines[14] = line("c13")
    answer = await submit(client, *lines)
    assert answer.status_code == 202
    body = answer.json()
    assert (body["accepted"], body["rejected"]) == (17, 3)
    assert [(error["line"], error["custom_id"], error["code"], error["param"]) for error in body["errors"]] == [
        (5, None, "invalid_json", None),
        (10, "c9", "model_not_found", "body.model"),
        (15, "c13", "invalid_request", "custom_id"),
    ]
    async with world.runner():
        await world.ended(*(uuid.UUID(job["id"]) for job in body["jobs"]))
    found = await results(client, submission_id=body["submission_id"])
    assert [entry["line"] for entry in found] == list(range(1, 21))
    assert {entry["line"] for entry in found if entry["error"]} == {5, 10, 15}
    assert {entry["line"] for entry in found if entry["response"]} == set(range(1, 21)) - {5, 10, 15}
    assert (found[9]["error"]["code"], found[9]["error"]["dispatched"]) == ("model_not_found", False)


async def test_a_single_bad_job_is_refused_with_its_own_code_and_nothing_is_kept(
    client: httpx.AsyncClient, world: World
) -> None:
    answer = await client.post("/v1/jobs", json=line("a", surprise=1))
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert (error["code"], error["param"], error["type"]) == ("unsupported_field", "surprise", "invalid_request_error")
    assert (await client.post("/v1/jobs", json=line("a", model="missing"))).status_code == 404
    assert await world.count("failed") == 0


async def test_what_a_header_says_of_a_single_call_is_refused_for_many_at_once(
    client: httpx.AsyncClient, world: World
) -> None:
    headers = {"x-tollbridge-session-id": "s"}
    batch = {"input_file_id": "file-x", "endpoint": "/v1/chat/completions", "completion_window": "24h"}
    for path, body in (("/v1/jobs", line("a")), ("/v1/batches", batch)):
        answer = await client.post(path, json=body, headers=headers)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "x-tollbridge-session-id"), path
    assert await world.count("queued") == 0


async def test_lines_that_are_all_bad_are_refused_with_every_fault_and_nothing_is_kept(
    client: httpx.AsyncClient, world: World
) -> None:
    answer = await submit(client, b"{", line("a", method="GET"))
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "invalid_request"
    assert [(e["line"], e["code"]) for e in answer.json()["errors"]] == [(1, "invalid_json"), (2, "invalid_request")]
    assert await world.count("failed") == 0


@pytest.mark.parametrize(
    ("content", "media_type", "status", "code"),
    [
        (b"", "application/json", 400, "invalid_json"),
        (b"", "application/x-ndjson", 400, "invalid_request"),
        (b"\n \n", "application/x-ndjson", 400, "invalid_request"),
        (b"\n" * (1 << 20) + b"{}", "application/x-ndjson", 413, "payload_too_large"),
        (b'{"jobs": []}', "application/json", 400, "invalid_request"),
        (b'{"jobs": {}}', "application/json", 400, "invalid_request"),
        (b'{"jobs": [], "more": 1}', "application/json", 400, "invalid_request"),
        (b"[]", "application/json", 400, "invalid_request"),
        (b"{}", "text/plain", 415, "unsupported_media_type"),
    ],
)
async def test_a_body_without_jobs_is_refused(
    client: httpx.AsyncClient, content: bytes, media_type: str, status: int, code: str
) -> None:
    answer = await client.post("/v1/jobs", content=content, headers={"content-type": media_type})
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)


async def test_a_client_that_stops_in_the_middle_has_submitted_nothing(client: httpx.AsyncClient, world: World) -> None:
    _, writer = await asyncio.open_connection(client.base_url.host, client.base_url.port)
    part = ndjson(line(f"c{n}") for n in range(2000))
    writer.write(
        b"POST /v1/jobs HTTP/1.1\r\nhost: x\r\nauthorization: Bearer me\r\ncontent-type: application/x-ndjson\r\n"
        b"content-length: %d\r\n\r\n" % (len(part) + 100)
    )
    writer.write(part)
    await writer.drain()
    writer.close()
    await writer.wait_closed()
    assert (await submit(client, line("after"))).status_code == 202
    assert await world.pool.fetchval("select count(*) from content.job") == 1


STATM = Path("/proc/self/statm")


def resident() -> int:
    return int(STATM.read_text().split()[1]) * resource.getpagesize()


@pytest.mark.skipif(not STATM.exists(), reason="the memory in use is read from /proc")
async def test_a_large_submission_takes_little_memory_and_all_of_it(client: httpx.AsyncClient, world: World) -> None:
    count = 20_000
    before = resident()
    most = 0
    batch = ndjson(line(run_id="x" * 250, tags={"padding": "x" * 250, "more": "x" * 250}) for _ in range(200))

    async def body() -> AsyncIterator[bytes]:
        nonlocal most
        for _ in range(0, count, 200):
            yield batch
            most = max(most, resident())

    answer = await client.post("/v1/jobs", content=body(), headers=NDJSON)
    most = max(most, resident())
    assert answer.status_code == 202
    assert answer.json()["accepted"] == count
    assert await world.pool.fetchval("select count(*) from content.job") == count
    # Its lines, held as jobs, would take some 50 MiB beside the list of their ids that is the answer.
    assert most - before < 40 * 1024**2


# ------------------------------------------------------------------ idempotency


async def test_duplicates_of_a_submission_get_the_same_answer_and_make_one_job(
    client: httpx.AsyncClient, world: World
) -> None:
    headers = {"idempotency-key": "k1"}
    answers = await asyncio.gather(*(submit(client, line("a"), line("b"), **headers) for _ in range(32)))
    assert {answer.status_code for answer in answers} == {202}
    assert len({answer.text for answer in answers}) == 1
    assert await world.count("queued") == 2
    assert sum("idempotent-replayed" not in answer.headers for answer in answers) == 1


async def test_another_body_under_the_same_key_is_refused(client: httpx.AsyncClient, world: World) -> None:
    headers = {"idempotency-key": "k1"}
    answers = await asyncio.gather(*(submit(client, line(f"c{n % 2}"), **headers) for n in range(32)))
    assert sorted(answer.status_code for answer in answers) == [202] * 16 + [422] * 16
    refused = next(answer for answer in answers if answer.status_code == 422)
    assert refused.json()["error"]["code"] == "idempotency_mismatch"
    assert await world.count("queued") == 1


async def test_an_idempotency_key_belongs_to_one_api_key(client: httpx.AsyncClient, world: World) -> None:
    mine = await submit(client, line("a"), **{"idempotency-key": "k1"})
    theirs = await submit(client, line("b"), **{"idempotency-key": "k1", "authorization": "Bearer other"})
    assert (mine.status_code, theirs.status_code) == (202, 202)
    assert await world.count("queued") == 2


async def test_an_idempotency_key_outlives_its_jobs(client: httpx.AsyncClient, world: World) -> None:
    first = await submit(client, line("a"), **{"idempotency-key": "k1"})
    job_id = first.json()["jobs"][0]["id"]
    await client.post(f"/v1/jobs/{job_id}/cancel")
    assert (await client.delete(f"/v1/jobs/{job_id}")).status_code == 200
    again = await submit(client, line("a"), **{"idempotency-key": "k1"})
    assert (again.status_code, again.text) == (202, first.text)
    assert await world.pool.fetchval("select count(*) from content.job") == 0


async def test_a_refused_submission_leaves_its_idempotency_key_free(client: httpx.AsyncClient) -> None:
    headers = {"idempotency-key": "k1"}
    assert (await submit(client, b"{", **headers)).status_code == 400
    assert (await submit(client, line("a"), **headers)).status_code == 202


# ------------------------------------------------------------------ reading


async def test_a_job_shows_its_course(client: httpx.AsyncClient, world: World) -> None:
    job_id = (await client.post("/v1/jobs", json=line("a", session_id="s"))).json()["jobs"][0]["id"]
    job = (await client.get(f"/v1/jobs/{job_id}")).json()
    assert (job["id"], job["status"], job["custom_id"], job["session_id"]) == (job_id, "queued", "a", "s")
    assert (job["class"], job["attempts"], job["cost_usd"], job["response"]) == ("batch", 0, None, None)
    assert (job["started_at"], job["outcome"]) == (None, None)
    assert job["waiting"] == {
        "reason": "runner",
        "position": None,
        "group": None,
        "until": None,
        "expected_wait_s": None,
    }
    async with world.runner():
        job = (await client.get(f"/v1/jobs/{job_id}", params={"wait": "30"})).json()
    assert job["status"] == "succeeded"
    assert job["created_at"] <= job["started_at"] <= job["ended_at"]
    assert job["cost_usd"] == "0.000000125"
    assert job["outcome"]["attempts"][0]["cost"]["usd"] == "0.000000125"
    assert job["route"]["provider"] == "fake"
    assert (job["attempts"], job["usage"]["input_total"], job["error"]) == (1, 10, None)
    assert job["response"]["body"]["choices"][0]["message"]["content"] == "hello"
    assert job["waiting"] is None


async def test_a_job_says_why_it_waits(client: httpx.AsyncClient, world: World) -> None:
    job_id = await world.one(model="queue")
    world.waits.known[str(job_id)] = Waiting(group="g", position=3, reason="capacity")
    async with world.runner():
        await world.line.inside.wait()
        job = (await client.get(f"/v1/jobs/{job_id}")).json()
        assert job["waiting"] == {
            "reason": "capacity",
            "position": 3,
            "group": "g",
            "until": None,
            "expected_wait_s": None,
        }
        # It is in a process's hands, and nothing has been sent.
        assert (job["status"], job["started_at"]) == ("running", None)
        world.line.gate.set()
        await world.ended(job_id)
    busy = await world.one(model="busy")
    async with world.runner(full_hold_s=60.0):
        await until(lambda: world.line.refused == 1)

        async def given_back() -> bool:
            return bool((await client.get(f"/v1/jobs/{busy}")).json()["status"] == "queued")

        await until(given_back)
    job = (await client.get(f"/v1/jobs/{busy}")).json()
    # It was claimed and refused, and has not started.
    assert (job["started_at"], job["outcome"]) == (None, None)
    assert job["waiting"] == {
        "reason": "queue_full",
        "position": None,
        "group": "full",
        "until": None,
        "expected_wait_s": None,
    }


async def test_a_job_that_comes_back_later_says_what_for_where_and_when(
    client: httpx.AsyncClient, world: World
) -> None:
    world.line.cooling["limited"] = ("g", "h")
    job_id = await world.one(model="limited")
    async with world.runner():
        await until(lambda: world.line.refused == 1)

        async def given_back() -> bool:
            return bool((await client.get(f"/v1/jobs/{job_id}")).json()["status"] == "queued")

        await until(given_back)
    waiting = (await client.get(f"/v1/jobs/{job_id}")).json()["waiting"]
    assert (waiting["reason"], waiting["group"], waiting["position"]) == ("rate_limited", "g", None)
    assert datetime.fromisoformat(waiting["until"]) > datetime.now(UTC) + timedelta(seconds=3500)
    [listed] = (await client.get("/v1/jobs")).json()["data"]
    assert listed["waiting"] == waiting


async def test_a_waiting_caller_hears_of_an_end_in_another_process(client: httpx.AsyncClient, world: World) -> None:
    """The runner has a watch of its own here, as if it were elsewhere."""
    async with world_on_again(world) as elsewhere:
        job_id = await world.one(model="wait")
        async with elsewhere.runner():
            asked = asyncio.create_task(client.get(f"/v1/jobs/{job_id}", params={"wait": "30"}))
            await elsewhere.line.inside.wait()
            elsewhere.line.gate.set()
            async with asyncio.timeout(30):
                assert (await asked).json()["status"] == "succeeded"


def world_on_again(world: World) -> Any:
    class Again:
        async def __aenter__(self) -> World:
            return World(world.pool, world.settings)

        async def __aexit__(self, *_: object) -> None: ...

    return Again()


async def test_a_wait_that_is_over_returns_the_job_as_it_is(client: httpx.AsyncClient, world: World) -> None:
    job_id = await world.one()
    assert (await client.get(f"/v1/jobs/{job_id}", params={"wait": "0.05"})).json()["status"] == "queued"
    for wait in ("61", "-1", "nan", "x"):
        assert (await client.get(f"/v1/jobs/{job_id}", params={"wait": wait})).status_code == 400


async def test_what_belongs_to_another_key_is_answered_as_what_never_was(
    client: httpx.AsyncClient, world: World
) -> None:
    job_id = await world.one()
    stranger = {"authorization": "Bearer stranger"}
    for method, path in (
        ("GET", "/v1/jobs/{}"),
        ("GET", "/v1/jobs/{}?wait=5"),
        ("POST", "/v1/jobs/{}/cancel"),
        ("DELETE", "/v1/jobs/{}"),
    ):
        answers = [
            await client.request(method, path.format(one), headers=stranger) for one in (job_id, uuid.uuid4(), "junk")
        ]
        assert {answer.status_code for answer in answers} == {404}
        bodies = [answer.json()["error"] for answer in answers]
        assert all(body | {"request_id": ""} == bodies[0] | {"request_id": ""} for body in bodies)
    assert (await client.get("/v1/jobs", headers=stranger)).json()["data"] == []
    assert (await client.get("/v1/jobs/results", headers=stranger)).text == ""


async def test_jobs_are_listed_by_filter_and_page(client: httpx.AsyncClient, world: World) -> None:
    first = (await submit(client, *(line(f"c{n}", session_id="s") for n in range(5)))).json()
    second = (await submit(client, *(line(f"c{n}") for n in range(5)), b"{")).json()

    async def ids(**query: str) -> list[str]:
        found: list[str] = []
        while True:
            page = (await client.get("/v1/jobs", params=query | {"limit": "2"})).json()
            found.extend(job["id"] for job in page["data"])
            assert page["has_more"] == (page["next_cursor"] is not None)
            if not page["has_more"]:
                return found
            query["cursor"] = page["next_cursor"]

    of = {body["submission_id"]: [job["id"] for job in body["jobs"]] for body in (first, second)}
    every = [*of[first["submission_id"]], *of[second["submission_id"]], second["errors"][0]["id"]]
    assert await ids() == sorted(every)
    assert await ids(submission_id=first["submission_id"]) == of[first["submission_id"]]
    assert await ids(session_id="s") == of[first["submission_id"]]
    assert await ids(status="failed") == [second["errors"][0]["id"]]
    assert await ids(custom_id="c3") == [first["jobs"][3]["id"], second["jobs"][3]["id"]]
    assert await ids(custom_id="c3", submission_id=second["submission_id"]) == [second["jobs"][3]["id"]]
    for query in ({"limit": "0"}, {"limit": "1001"}, {"status": "done"}, {"cursor": "x"}, {"color": "red"}):
        assert (await client.get("/v1/jobs", params=query)).status_code == 400


async def test_results_are_complete_in_order_and_in_openais_shape(client: httpx.AsyncClient, world: World) -> None:
    body = (await submit(client, *(line(f"c{n}", model="rejected" if n == 7 else "ok") for n in range(250)))).json()
    async with world.runner():
        await world.ended(*(uuid.UUID(job["id"]) for job in body["jobs"]))
    found = await results(client, submission_id=body["submission_id"])
    assert [entry["custom_id"] for entry in found] == [f"c{n}" for n in range(250)]
    good, bad = found[0], found[7]
    assert good["id"] == good["job_id"] == body["jobs"][0]["id"]
    assert (good["error"], good["cost_usd"], good["response"]["status_code"]) == (None, "0.000000125", 200)
    assert good["response"]["request_id"]
    assert good["response"]["body"]["object"] == "chat.completion"
    assert (bad["response"], bad["error"]["code"], bad["error"]["dispatched"]) == (None, "upstream_rejected", True)
    assert [entry["custom_id"] for entry in await results(client, status="failed")] == ["c7"]
    assert (await client.get("/v1/jobs/results", params={"status": "queued"})).status_code == 400


# ------------------------------------------------------------------ changing


async def test_cancelling_is_told_and_may_be_repeated(client: httpx.AsyncClient, world: World) -> None:
    queued, running = await world.one(), await world.one(model="wait", **{"class": "interactive"})
    async with world.runner(concurrency=1, cancel_poll_s=60.0) as runner:
        world.local.runner = runner
        await world.line.inside.wait()
        for _ in range(2):
            answer = await client.post(f"/v1/jobs/{queued}/cancel")
            assert (answer.status_code, answer.json()["status"]) == (200, "cancelled")
        assert (await client.post(f"/v1/jobs/{running}/cancel")).json()["cancel_requested"]
        job = (await client.get(f"/v1/jobs/{running}", params={"wait": "5"})).json()
    assert (job["status"], job["error"]["code"]) == ("cancelled", "cancelled")
    assert (await client.post(f"/v1/jobs/{running}/cancel")).json()["status"] == "cancelled"


async def test_only_ended_jobs_can_be_deleted(client: httpx.AsyncClient, world: World) -> None:
    body = (await submit(client, line("a"), line("b"), line("c"))).json()
    ids = [job["id"] for job in body["jobs"]]
    refused = await client.delete(f"/v1/jobs/{ids[0]}")
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "conflict")
    await client.post(f"/v1/jobs/{ids[0]}/cancel")
    assert (await client.delete(f"/v1/jobs/{ids[0]}")).status_code == 200
    assert (await client.get(f"/v1/jobs/{ids[0]}")).status_code == 404
    await client.post(f"/v1/jobs/{ids[1]}/cancel")
    of = {"submission_id": body["submission_id"]}
    answer = (await client.delete("/v1/jobs", params=of)).json()
    assert (answer["deleted"], answer["some_not_ended"]) == (1, True)
    assert [job["id"] for job in (await client.get("/v1/jobs")).json()["data"]] == [ids[2]]
    assert (await client.delete("/v1/jobs", params={"submission_id": str(uuid.uuid4())})).status_code == 404
    assert (await client.delete("/v1/jobs")).status_code == 400
