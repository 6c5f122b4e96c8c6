"""Files and batches over HTTP on a real PostgreSQL, in the shapes of OpenAI's APIs, over the same jobs."""

from __future__ import annotations

import asyncio
import json
import random
import uuid
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import msgspec
import pytest

from admission.ids import new_id
from gateway.jobs import batch_store as statements
from gateway.jobs.batch_store import NewBatch
from gateway.jobs.submission import new_submission_id
from tests.fakes.job_world import FAST, World, client_of, line, ndjson, own_database, until, world_on

OTHER = {"authorization": "Bearer other"}


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


async def upload(client: httpx.AsyncClient, content: bytes, **headers: str) -> httpx.Response:
    files = {"file": ("lines.jsonl", content, "application/jsonl")}
    return await client.post("/v1/files", data={"purpose": "batch"}, files=files, headers=headers)


async def uploaded(client: httpx.AsyncClient, *lines: object) -> str:
    answer = await upload(client, ndjson(lines))
    assert answer.status_code == 200, answer.text
    file_id: str = answer.json()["id"]
    return file_id


async def create(client: httpx.AsyncClient, file_id: str, **fields: Any) -> httpx.Response:
    headers = fields.pop("headers", {})
    body = {"input_file_id": file_id, "endpoint": "/v1/chat/completions", "completion_window": "24h"}
    return await client.post("/v1/batches", json=body | fields, headers=headers)


async def batch_of(client: httpx.AsyncClient, *lines: object) -> str:
    answer = await create(client, await uploaded(client, *lines))
    assert answer.status_code == 200, answer.text
    assert answer.json()["status"] == "validating"
    batch_id: str = answer.json()["id"]
    return batch_id


async def read(client: httpx.AsyncClient, batch_id: str) -> dict[str, Any]:
    answer = await client.get(f"/v1/batches/{batch_id}")
    assert answer.status_code == 200
    batch: dict[str, Any] = answer.json()
    return batch


async def over(client: httpx.AsyncClient, batch_id: str) -> dict[str, Any]:
    async def ended() -> bool:
        return (await read(client, batch_id))["status"] in ("completed", "failed", "expired", "cancelled")

    await until(ended)
    return await read(client, batch_id)


async def lines_of(client: httpx.AsyncClient, file_id: str | None) -> list[dict[str, Any]]:
    assert file_id is not None
    answer = await client.get(f"/v1/files/{file_id}/content")
    assert answer.status_code == 200
    assert (await client.get(f"/v1/files/{file_id}")).json()["bytes"] == len(answer.content)
    return [json.loads(text) for text in answer.text.splitlines()]


async def later(world: World, seconds: float) -> None:
    """As if so much time had passed."""
    for table, column in (
        ("job", "deadline_at"),
        ("job", "expires_at"),
        ("batch", "deadline_at"),
        ("batch", "expires_at"),
        ("file", "expires_at"),
    ):
        await world.pool.execute(
            f"update content.{table} set {column} = {column} - make_interval(secs => $1)", float(seconds)
        )


# ------------------------------------------------------------------ files


async def test_a_file_comes_back_as_it_was(client: httpx.AsyncClient, world: World) -> None:
    content = b"\n\r\n" + json.dumps(line("a")).encode() + b"\r\n\n  \n" + b"\xff not json\n" + b"last without an end"
    answer = await upload(client, content)
    assert answer.status_code == 200
    file = answer.json()
    assert (file["object"], file["filename"], file["purpose"], file["bytes"], file["status"]) == (
        "file",
        "lines.jsonl",
        "batch",
        len(content),
        "processed",
    )
    # It is kept from its end on.
    assert 0 <= file["expires_at"] - file["created_at"] - 30 * 86_400 < 60
    assert (await client.get(f"/v1/files/{file['id']}")).json() == file
    assert (await client.get(f"/v1/files/{file['id']}/content")).content == content
    assert (await client.get("/v1/files")).json()["data"] == [file]
    # Empty lines need no rows of their own.
    assert await world.pool.fetchval("select count(*) from content.file_line") == 3


async def test_files_are_listed_in_pages_from_either_end(client: httpx.AsyncClient) -> None:
    ids = [await uploaded(client, line(f"c{n}")) for n in range(5)]
    for order, wanted in (("asc", ids), ("desc", ids[::-1])):
        seen: list[str] = []
        after: dict[str, str] = {}
        while True:
            page = (await client.get("/v1/files", params={"limit": 2, "order": order, **after})).json()
            seen += [file["id"] for file in page["data"]]
            assert (page["first_id"], page["last_id"]) == (page["data"][0]["id"], page["data"][-1]["id"])
            if not page["has_more"]:
                break
            after = {"after": page["last_id"]}
        assert seen == wanted
    assert (await client.get("/v1/files", params={"purpose": "batch_output"})).json()["data"] == []


async def test_a_deleted_file_is_gone_with_its_lines(client: httpx.AsyncClient, world: World) -> None:
    file_id = await uploaded(client, line("a"))
    answer = await client.delete(f"/v1/files/{file_id}")
    assert answer.json() == {"id": file_id, "object": "file", "deleted": True}
    for call in (client.get(f"/v1/files/{file_id}"), client.get(f"/v1/files/{file_id}/content")):
        assert (await call).status_code == 404
    assert (await client.delete(f"/v1/files/{file_id}")).status_code == 404
    assert await world.pool.fetchval("select count(*) from content.file") == 0
    assert await world.pool.fetchval("select count(*) from content.file_line") == 0


FORM = (
    b'--xx\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
    b'--xx\r\ncontent-disposition: form-data; name="file"; filename="a.jsonl"\r\n\r\n{}\n\r\n--xx--\r\n'
)


@pytest.mark.parametrize(
    ("content", "media_type", "status", "param"),
    [
        (FORM, "multipart/form-data", 400, "content-type"),
        (FORM, "application/json", 415, "content-type"),
        (FORM.replace(b"--xx--", b""), "multipart/form-data; boundary=xx", 400, "body"),
        (FORM.replace(b"batch", b"vision"), "multipart/form-data; boundary=xx", 400, "purpose"),
        (FORM.replace(b'name="purpose"', b'name="other"'), "multipart/form-data; boundary=xx", 400, "other"),
        (FORM.replace(b'name="file"', b'name="purpose"'), "multipart/form-data; boundary=xx", 400, "purpose"),
        (FORM.replace(b"{}\n", b""), "multipart/form-data; boundary=xx", 400, "file"),
        (FORM.replace(b"a.jsonl", b""), "multipart/form-data; boundary=xx", 400, "file"),
        (FORM.replace(b"content-disposition", b"other"), "multipart/form-data; boundary=xx", 400, "body"),
        (b"nothing", "multipart/form-data; boundary=xx", 400, "body"),
    ],
)
async def test_what_is_no_file_is_refused_and_leaves_nothing(
    client: httpx.AsyncClient, world: World, content: bytes, media_type: str, status: int, param: str
) -> None:
    answer = await client.post("/v1/files", content=content, headers={"content-type": media_type})
    assert (answer.status_code, answer.json()["error"]["param"]) == (status, param)
    assert await world.pool.fetchval("select count(*) from content.file") == 0
    assert await world.pool.fetchval("select count(*) from content.file_line") == 0


async def test_files_that_are_too_large_are_refused_and_leave_nothing(url: str) -> None:
    small = msgspec.structs.replace(FAST, max_file_bytes=200_000, max_line_bytes=1000, max_lines=600)
    async with world_on(url, small) as world, client_of(world) as client:
        for content in (b"x" * 1001, b"{}\n" * 601, b" {}  \n" * 200_000, b"\n" * 1001):
            answer = await upload(client, content)
            assert (answer.status_code, answer.json()["error"]["code"]) == (413, "payload_too_large")
        assert (await upload(client, b"{}\n" * 600)).status_code == 200
        assert await world.pool.fetchval("select count(*) from content.file") == 1
        assert await world.pool.fetchval("select count(*) from content.file_line") == 600


async def test_a_sender_that_stops_in_the_middle_leaves_no_file(client: httpx.AsyncClient, world: World) -> None:
    _, writer = await asyncio.open_connection(client.base_url.host, client.base_url.port)
    head = FORM.partition(b"{}")[0]
    writer.write(
        b"POST /v1/files HTTP/1.1\r\nhost: x\r\nauthorization: Bearer me\r\n"
        b"content-type: multipart/form-data; boundary=xx\r\ncontent-length: 10000000\r\n\r\n" + head
    )
    writer.write(b"{}\n" * 1200)
    await writer.drain()

    async def some() -> bool:
        return int(await world.pool.fetchval("select count(*) from content.file_line")) >= 1000

    await until(some)
    assert (await client.get("/v1/files")).json()["data"] == []
    writer.close()
    await writer.wait_closed()

    async def none() -> bool:
        return int(await world.pool.fetchval("select count(*) from content.file_line")) == 0

    await until(none)


async def test_an_upload_may_be_repeated_under_an_idempotency_key(client: httpx.AsyncClient, world: World) -> None:
    key = {"idempotency-key": "k1"}
    answers = await asyncio.gather(*(upload(client, ndjson([line("a")]), **key) for _ in range(8)))
    assert {answer.status_code for answer in answers} == {200}
    assert len({answer.json()["id"] for answer in answers}) == 1
    assert (await upload(client, ndjson([line("b")]), **key)).status_code == 422
    assert await world.pool.fetchval("select count(*) from content.file") == 1
    assert await world.pool.fetchval("select count(*) from content.file_line") == 1


# ------------------------------------------------------------------ batches


async def test_a_batch_runs_and_its_outputs_have_every_line_once(client: httpx.AsyncClient, world: World) -> None:
    lines = [line(f"c{n}", model="rejected" if n % 5 == 0 else "ok") for n in range(50)]
    file_id = await uploaded(client, *lines)
    answer = await create(client, file_id, metadata={"team": "a"})
    batch = answer.json()
    assert (batch["object"], batch["status"], batch["input_file_id"]) == ("batch", "validating", file_id)
    assert (batch["endpoint"], batch["completion_window"]) == ("/v1/chat/completions", "24h")
    assert batch["expires_at"] - batch["created_at"] == 86_400
    async with world.runner(), world.batches.opened():
        batch = await over(client, batch["id"])
    assert (batch["status"], batch["metadata"], batch["errors"]) == ("completed", {"team": "a"}, None)
    assert batch["request_counts"] == {"total": 50, "completed": 40, "failed": 10}
    assert batch["created_at"] <= batch["in_progress_at"] <= batch["finalizing_at"] <= batch["completed_at"]
    assert (batch["usage"]["input_tokens"], batch["usage"]["output_tokens"]) == (400, 200)
    succeeded = await lines_of(client, batch["output_file_id"])
    failed = await lines_of(client, batch["error_file_id"])
    assert [entry["custom_id"] for entry in succeeded] == [f"c{n}" for n in range(50) if n % 5]
    assert [entry["custom_id"] for entry in failed] == [f"c{n}" for n in range(50) if n % 5 == 0]
    one = succeeded[0]
    assert one["id"].startswith("batch_req_")
    assert (one["error"], one["response"]["status_code"]) == (None, 200)
    assert one["response"]["body"]["choices"][0]["message"]["content"] == "hello"
    assert (failed[0]["response"], failed[0]["error"]["code"]) == (None, "upstream_rejected")
    page = (await client.get("/v1/files", params={"purpose": "batch_output"})).json()
    assert {file["id"] for file in page["data"]} == {batch["output_file_id"], batch["error_file_id"]}


async def test_the_text_of_a_request_is_kept_once(client: httpx.AsyncClient, world: World) -> None:
    await batch_of(client, line("a"), line("b"))
    await world.batches.look_after_all()
    assert await world.count("queued") == 2
    assert await world.pool.fetchval("select count(*) from content.job where body is not null") == 0
    assert await world.pool.fetchval("select count(*) from content.file_line") == 2


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/messages"])
async def test_a_batch_may_be_of_any_protocol(client: httpx.AsyncClient, world: World, path: str) -> None:
    body = {"model": "ok", "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]}
    if path == "/v1/responses":
        body = {"model": "ok", "input": "hi"}
    file_id = await uploaded(client, line("a", url=path, body=body))
    batch_id = (await create(client, file_id, endpoint=path)).json()["id"]
    async with world.runner(), world.batches.opened():
        batch = await over(client, batch_id)
    assert batch["error_file_id"] is None
    (one,) = await lines_of(client, batch["output_file_id"])
    assert "hello" in json.dumps(one["response"]["body"])


async def test_a_file_with_wrong_lines_fails_with_each_of_them_and_nothing_runs(
    client: httpx.AsyncClient, world: World
) -> None:
    lines: list[object] = [line(f"c{n}") for n in range(12)]
    lines[1] = b'{"custom_id": "c1", "method": '
    lines[3] = line("c3", model="missing")
    lines[4] = line("c2")
    lines[5] = line("c5", url="/v1/responses", body={"model": "ok", "input": "hi"})
    lines[6] = line()
    lines[7] = line("c7", **{"class": "interactive"})
    lines[8] = line("c8", surprise=1)
    lines[9] = b"\xff\xfe"
    batch_id = await batch_of(client, *lines)
    async with world.runner(), world.batches.opened():
        batch = await over(client, batch_id)
    assert batch["status"] == "failed"
    assert batch["failed_at"] is not None
    assert batch["request_counts"] == {"total": 0, "completed": 0, "failed": 0}
    assert (batch["output_file_id"], batch["error_file_id"]) == (None, None)
    assert batch["errors"]["object"] == "list"
    assert [(fault["line"], fault["code"], fault["param"]) for fault in batch["errors"]["data"]] == [
        (2, "invalid_json", None),
        (4, "model_not_found", "body.model"),
        (5, "invalid_request", "custom_id"),
        (6, "invalid_request", "url"),
        (7, "invalid_request", "custom_id"),
        (8, "invalid_request", "class"),
        (9, "unsupported_field", "surprise"),
        (10, "invalid_json", None),
    ]
    assert await world.pool.fetchval("select count(*) from content.job") == 0
    assert not world.line.sent


async def test_a_file_of_wrong_lines_is_told_in_bounded_length(client: httpx.AsyncClient, world: World) -> None:
    batch_id = await batch_of(client, *([b"{"] * 1203))
    await world.batches.look_after_all()
    faults = (await read(client, batch_id))["errors"]["data"]
    assert len(faults) == 1001
    assert (faults[-1]["line"], faults[-1]["message"]) == (None, "203 more lines are wrong")


@pytest.mark.parametrize(
    ("fields", "status", "param"),
    [
        ({"endpoint": "/v1/images/generations"}, 400, "endpoint"),
        ({"completion_window": "1h"}, 400, "completion_window"),
        ({"input_file_id": "file-00000000000000000000000000000001"}, 404, "input_file_id"),
        ({"input_file_id": "nonsense"}, 404, "input_file_id"),
        ({"metadata": {"a": "x" * 513}}, 400, "metadata[...]"),
        ({"metadata": {"a": "\0"}}, 400, "metadata.a"),
        ({"surprise": 1}, 400, "surprise"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 1}}, 400, "output_expires_after.seconds"),
    ],
)
async def test_a_batch_that_cannot_be_is_refused(
    client: httpx.AsyncClient, fields: dict[str, Any], status: int, param: str
) -> None:
    answer = await create(client, await uploaded(client, line("a")), **fields)
    assert (answer.status_code, answer.json()["error"]["param"]) == (status, param)


async def test_a_batch_is_created_once_under_an_idempotency_key(client: httpx.AsyncClient, world: World) -> None:
    file_id = await uploaded(client, line("a"), line("b"))
    headers = {"idempotency-key": "k1"}
    answers = await asyncio.gather(*(create(client, file_id, headers=headers) for _ in range(16)))
    assert {answer.status_code for answer in answers} == {200}
    assert len({answer.json()["id"] for answer in answers}) == 1
    assert sum("idempotent-replayed" not in answer.headers for answer in answers) == 1
    assert (await create(client, file_id, headers=headers, metadata={"a": "b"})).status_code == 422
    await world.batches.look_after_all()
    assert await world.count("queued") == 2
    # Another key's is its own.
    assert (await create(client, file_id, headers=headers | OTHER)).status_code == 404


async def test_tenants_do_not_see_each_others_files_and_batches(client: httpx.AsyncClient, world: World) -> None:
    batch_id = await batch_of(client, line("a"))
    async with world.runner(), world.batches.opened():
        batch = await over(client, batch_id)
    absent = uuid.uuid4().hex
    for real, fake in (
        (f"/v1/files/{batch['input_file_id']}", f"/v1/files/file-{absent}"),
        (f"/v1/files/{batch['output_file_id']}", f"/v1/files/file-{absent}"),
        (f"/v1/files/{batch['output_file_id']}/content", f"/v1/files/file-{absent}/content"),
        (f"/v1/batches/{batch_id}", f"/v1/batches/batch_{absent}"),
    ):
        foreign, missing = (await client.get(real, headers=OTHER)), (await client.get(fake, headers=OTHER))
        assert foreign.status_code == missing.status_code == 404
        assert foreign.json()["error"]["message"] == missing.json()["error"]["message"]
    assert (await client.delete(f"/v1/files/{batch['input_file_id']}", headers=OTHER)).status_code == 404
    assert (await client.post(f"/v1/batches/{batch_id}/cancel", headers=OTHER)).status_code == 404
    assert (await client.get("/v1/files", headers=OTHER)).json()["data"] == []
    assert (await client.get("/v1/batches", headers=OTHER)).json()["data"] == []
    assert (await create(client, batch["input_file_id"], headers=OTHER)).status_code == 404
    assert len((await client.get("/v1/files")).json()["data"]) == 2


async def test_batches_are_listed_in_pages_the_newest_first(client: httpx.AsyncClient) -> None:
    file_id = await uploaded(client, line("a"))
    ids = [(await create(client, file_id)).json()["id"] for _ in range(5)]
    seen: list[str] = []
    after: dict[str, str] = {}
    while True:
        page = (await client.get("/v1/batches", params={"limit": 2, **after})).json()
        seen += [batch["id"] for batch in page["data"]]
        if not page["has_more"]:
            break
        after = {"after": page["last_id"]}
    assert seen == ids[::-1]


# ------------------------------------------------------------------ ends


async def test_a_cancelled_batch_keeps_what_was_finished_and_answers_every_line(
    client: httpx.AsyncClient, world: World
) -> None:
    lines = [line(f"done{n}") for n in range(3)] + [line("sent", model="wait")] + [line(f"c{n}") for n in range(700)]
    batch_id = await batch_of(client, *lines)
    await world.batches.look_after_all()
    async with world.runner(concurrency=1):
        await world.line.inside.wait()

        async def waiting() -> bool:
            return await world.count("running") == 1 and await world.count("succeeded") >= 3

        await until(waiting)
        async with world.batches.opened():
            answer = await client.post(f"/v1/batches/{batch_id}/cancel")
            assert (answer.status_code, answer.json()["status"]) == (200, "cancelling")
            assert answer.json()["cancelling_at"] is not None
            batch = await over(client, batch_id)
    assert batch["status"] == "cancelled"
    assert batch["cancelled_at"] is not None
    done = await lines_of(client, batch["output_file_id"])
    not_done = await lines_of(client, batch["error_file_id"])
    counts = batch["request_counts"]
    assert (counts["total"], counts["completed"], counts["failed"]) == (704, len(done), len(not_done))
    assert sorted(entry["custom_id"] for entry in done + not_done) == sorted(str(one["custom_id"]) for one in lines)
    assert {entry["error"]["code"] for entry in not_done} <= {"batch_cancelled", "uncertain"}
    again = await client.post(f"/v1/batches/{batch_id}/cancel")
    assert (again.status_code, again.json()["status"]) == (200, "cancelled")


async def test_a_batch_that_is_still_validated_can_be_cancelled(client: httpx.AsyncClient, world: World) -> None:
    batch_id = await batch_of(client, line("a"))
    await client.post(f"/v1/batches/{batch_id}/cancel")
    await world.batches.look_after_all()
    batch = await read(client, batch_id)
    assert (batch["status"], batch["output_file_id"], batch["error_file_id"]) == ("cancelled", None, None)
    assert await world.pool.fetchval("select count(*) from content.job") == 0


async def test_a_batch_cancelled_while_it_is_validated_leaves_no_job(client: httpx.AsyncClient, world: World) -> None:
    batch_id = await batch_of(client, *(line(f"c{n}") for n in range(600)))
    looking = asyncio.create_task(world.batches.look_after_all())
    await asyncio.sleep(random.Random(5).uniform(0.0, 0.05))
    assert (await client.post(f"/v1/batches/{batch_id}/cancel")).status_code == 200
    await looking
    async with world.batches.opened():
        assert (await over(client, batch_id))["status"] == "cancelled"
    assert await world.count("queued") == 0


async def test_a_finished_batch_cannot_be_cancelled(client: httpx.AsyncClient, world: World) -> None:
    batch_id = await batch_of(client, line("a"))
    async with world.runner(), world.batches.opened():
        await over(client, batch_id)
    answer = await client.post(f"/v1/batches/{batch_id}/cancel")
    assert (answer.status_code, answer.json()["error"]["code"]) == (409, "conflict")


async def test_expiry_keeps_finished_work(client: httpx.AsyncClient, world: World) -> None:
    lines = [line(f"done{n}") for n in range(3)] + [line(f"late{n}", model="busy") for n in range(4)]
    batch_id = await batch_of(client, *lines)
    async with world.runner(), world.batches.opened():

        async def three() -> bool:
            return (await world.count("succeeded")) == 3

        await until(three)
        await later(world, 86_401)
        batch = await over(client, batch_id)
    assert (batch["status"], batch["completed_at"]) == ("expired", None)
    assert batch["expired_at"] is not None
    assert batch["request_counts"] == {"total": 7, "completed": 3, "failed": 4}
    assert len(await lines_of(client, batch["output_file_id"])) == 3
    late = await lines_of(client, batch["error_file_id"])
    assert {entry["error"]["code"] for entry in late} == {"batch_expired"}
    assert [entry["custom_id"] for entry in late] == [f"late{n}" for n in range(4)]


async def test_a_line_with_a_shorter_deadline_does_not_make_the_batch_expire(
    client: httpx.AsyncClient, world: World
) -> None:
    batch_id = await batch_of(client, line("a"), line("late", model="busy", deadline_s=0.2))
    async with world.runner(), world.batches.opened():
        batch = await over(client, batch_id)
    assert (batch["status"], batch["request_counts"]["failed"]) == ("completed", 1)


# ------------------------------------------------------------------ retention


async def test_an_input_stays_as_long_as_a_batch_reads_it(client: httpx.AsyncClient, world: World) -> None:
    file_id = await uploaded(client, line("a", model="wait"))
    batch_id = (await create(client, file_id)).json()["id"]
    answer = await client.delete(f"/v1/files/{file_id}")
    assert (answer.status_code, answer.json()["error"]["code"]) == (409, "conflict")
    await world.pool.execute("update content.file set expires_at = clock_timestamp() - interval '1 hour'")
    assert await world.batches.store.purge(10) == 0
    async with world.runner(), world.batches.opened():
        world.line.gate.set()
        assert (await over(client, batch_id))["status"] == "completed"
    assert await world.batches.store.purge(10) == 1
    assert await world.pool.fetchval("select count(*) from content.file_line") == 0


async def test_deleting_an_output_deletes_its_answers(client: httpx.AsyncClient, world: World) -> None:
    batch_id = await batch_of(client, line("a"), line("b"), line("c", model="rejected"))
    async with world.runner(), world.batches.opened():
        batch = await over(client, batch_id)
    assert (await client.delete(f"/v1/files/{batch['output_file_id']}")).status_code == 200
    assert (await client.get(f"/v1/files/{batch['output_file_id']}/content")).status_code == 404
    assert await world.pool.fetchval("select array_agg(status) from content.job") == ["failed"]
    assert len(await lines_of(client, batch["error_file_id"])) == 1
    assert (await read(client, batch_id))["request_counts"]["completed"] == 2


async def test_after_the_retention_nothing_of_a_batch_is_left(client: httpx.AsyncClient, world: World) -> None:
    file_id = await uploaded(client, line("a"), line("b", model="rejected"))
    expiry = {"anchor": "created_at", "seconds": 3600}
    batch_id = (await create(client, file_id, output_expires_after=expiry)).json()["id"]
    async with world.runner(), world.batches.opened():
        batch = await over(client, batch_id)
    output = (await client.get(f"/v1/files/{batch['output_file_id']}")).json()
    assert output["expires_at"] - output["created_at"] == 3600
    await later(world, 3601)
    # Before it is purged, too.
    assert (await client.get(f"/v1/files/{batch['output_file_id']}")).status_code == 404
    assert await world.batches.store.purge(10) == 2
    assert await world.pool.fetchval("select count(*) from content.job") == 0
    await later(world, 30 * 86_400)
    assert await world.batches.store.purge(10) == 2
    for table in ("file", "file_line", "batch", "job"):
        assert await world.pool.fetchval(f"select count(*) from content.{table}") == 0


async def test_an_upload_that_was_given_up_is_purged(world: World) -> None:
    file_id = new_id()
    await world.batches.store.begin_file(world.key_id, file_id)
    await world.batches.store.add_lines(file_id, [(1, b"{}\n")])
    assert await world.batches.store.purge(10) == 0
    await later(world, 3601)
    assert await world.batches.store.purge(10) == 1
    assert await world.pool.fetchval("select count(*) from content.file_line") == 0
    async with world.store.transaction() as connection:
        assert not await world.batches.store.file_ready(connection, file_id, filename="a", size=3, kept_s=9.0)


# ------------------------------------------------------------------ processes


async def test_many_processes_make_each_line_one_job(client: httpx.AsyncClient, world: World) -> None:
    batches = [await batch_of(client, *(line(f"c{n}") for n in range(40))) for _ in range(5)]
    await asyncio.gather(*(world.batches.look_after_all() for _ in range(4)))
    async with world.runner(), world.batches.opened():
        found = [await over(client, batch_id) for batch_id in batches]
    assert [batch["request_counts"]["completed"] for batch in found] == [40] * 5
    assert set(world.line.sent.values()) == {1}
    assert len(world.line.sent) == 200


async def test_a_batch_whose_creation_is_repeated_is_one(world: World) -> None:
    store = world.batches.store
    file_id = new_id()
    await store.begin_file(world.key_id, file_id)
    await store.add_lines(file_id, [(1, ndjson([line("a")]))])
    batch = NewBatch(
        batch_id=new_submission_id(),
        input_file_id=file_id,
        endpoint="/v1/chat/completions",
        completion_window="24h",
        window_s=60.0,
        metadata=None,
        output_retention_s=None,
    )
    async with world.store.transaction() as connection:
        assert await store.file_ready(connection, file_id, filename="a", size=3, kept_s=900.0)
    for _ in range(2):
        view, repeated = await world.batches.create(world.key_id, batch, idempotency_key="k", digest=b"d")
        assert (view.batch_id, repeated) == (batch.batch_id, False)
    assert await world.pool.fetchval("select count(*) from content.batch") == 1


async def test_counts_are_asked_of_the_database_no_more_often_than_once_a_second(
    client: httpx.AsyncClient, world: World
) -> None:
    batch_id = await batch_of(client, *(line(f"c{n}") for n in range(10)))
    await world.batches.look_after_all()
    assert (await read(client, batch_id))["request_counts"] == {"total": 10, "completed": 0, "failed": 0}
    began = asyncio.get_running_loop().time()
    async with world.runner():

        async def all_ended() -> bool:
            return await world.count("succeeded") == 10

        await until(all_ended)
        seen = [(await read(client, batch_id))["request_counts"]["completed"] for _ in range(20)]
        if asyncio.get_running_loop().time() - began < 0.9:
            assert seen == [0] * 20

        async def counted() -> bool:
            return bool((await read(client, batch_id))["request_counts"]["completed"] == 10)

        await until(counted)


def nodes(plan: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield plan
    for part in plan.get("Plans", ()):
        yield from nodes(part)


async def jobs_read(world: World, statement: str, *arguments: object) -> int:
    """Rows of jobs that a statement reads."""
    text = await world.pool.fetchval(f"explain (analyze, format json) {statement}", *arguments)
    of_jobs = [
        node
        for node in nodes(json.loads(text)[0]["Plan"])
        if node.get("Relation Name") == "job" or node.get("Index Name", "").startswith("job_")
    ]
    assert of_jobs
    return int(sum(node["Actual Rows"] + node.get("Rows Removed by Filter", 0) for node in of_jobs))


@pytest.mark.parametrize("ended", [0, 1500, 2999, 3000])
async def test_whether_a_batch_has_open_jobs_is_known_without_reading_those_that_ended(
    client: httpx.AsyncClient, world: World, ended: int
) -> None:
    batch_id = await batch_of(client, *(line(f"c{n}") for n in range(3000)))
    await world.batches.look_after_all()
    await world.pool.execute(
        "update content.job set status = 'expired', error_code = 'expired', ended_at = now(), expires_at = now()"
        " where line <= $1",
        ended,
    )
    await world.pool.execute("vacuum analyze content.job")
    low = uuid.UUID(batch_id.removeprefix("batch_"))
    assert await jobs_read(world, statements.BATCH_DUE) <= 1
    assert await jobs_read(world, statements.BATCH_OPEN_JOBS, low) <= 1
    assert bool(await world.batches.store.due()) is (ended == 3000)
