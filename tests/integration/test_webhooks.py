"""Word of each end arrives, signed, at least once, and nowhere else than where it may."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
from aiohttp import web

from admission.ids import new_id
from gateway.jobs.settings import WebhookSettings
from gateway.jobs.webhooks import Webhooks, signed
from tests.fakes.job_world import FAST, World, client_of, line, ndjson, own_database, until, world_on

SECRET = b"0123456789abcdef0123456789abcdef"
LOCAL = WebhookSettings(
    allowed_hosts=("127.0.0.1", "localhost"),
    secret=SECRET,
    allow_http=True,
    allow_private=True,
    timeout_s=2.0,
    poll_s=0.02,
    retry_delay_s=0.05,
    retry_longest_s=0.1,
)


class Receiver:
    """Takes messages, or answers as it is told to."""

    def __init__(self) -> None:
        self.port = 0
        self.messages: list[tuple[dict[str, str], bytes]] = []
        self.answers: list[web.StreamResponse | float] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/hook"

    async def take(self, request: web.BaseRequest) -> web.StreamResponse:
        self.messages.append((dict(request.headers), await request.read()))
        answer = self.answers.pop(0) if self.answers else web.Response(status=204)
        if isinstance(answer, float):
            await asyncio.sleep(answer)
            return web.Response()
        return answer

    def events(self) -> list[dict[str, Any]]:
        return [json.loads(body) for _, body in self.messages]


@pytest.fixture
async def receiver() -> AsyncIterator[Receiver]:
    receiver = Receiver()
    server = web.Server(receiver.take)
    listener = await asyncio.get_running_loop().create_server(server, "127.0.0.1", 0)
    receiver.port = listener.sockets[0].getsockname()[1]
    yield receiver
    listener.close()
    await server.shutdown(0.1)


@pytest.fixture(scope="module")
def url(database_server: str, database_template: str) -> Iterator[str]:
    yield from own_database(database_server, database_template)


@asynccontextmanager
async def telling(url: str, receiver: Receiver, **changes: Any) -> AsyncIterator[World]:
    hosts = (f"127.0.0.1:{receiver.port}", f"localhost:{receiver.port}")
    async with world_on(url, FAST, msgspec.structs.replace(LOCAL, allowed_hosts=hosts, **changes)) as world:
        yield world


async def left(world: World) -> int:
    count: int = await world.pool.fetchval("select count(*) from content.webhook")
    return count


async def nothing_left(world: World) -> None:
    async def none() -> bool:
        return await left(world) == 0

    await until(none)


async def one_message(world: World, url: str, **fields: Any) -> None:
    """A job that has ended, and of which nobody has been told yet."""
    job_id = await world.one(webhook_url=url, **fields)
    assert await world.store.cancel(world.key_id, job_id) is not None
    assert await left(world) == 1


def test_the_signature_is_that_of_the_published_example() -> None:
    import base64

    secret = base64.b64decode("MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw")
    headers = signed(secret, "msg_p5jXN8AQM9LWM0D4loKWxJek", 1614265330, b'{"test": 2432232314}')
    assert headers["webhook-signature"] == "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="


@pytest.mark.parametrize(
    ("model", "status", "code"), [("ok", "succeeded", None), ("rejected", "failed", "upstream_rejected")]
)
async def test_the_end_of_a_job_is_told(
    url: str, receiver: Receiver, model: str, status: str, code: str | None
) -> None:
    async with telling(url, receiver) as world, world.runner(), world.webhooks.opened():
        job_id = await world.one(custom_id="a", model=model, webhook_url=receiver.url)
        await world.one(model=model)
        await until(lambda: bool(receiver.messages))
        await nothing_left(world)
        submission_id = (await world.row(job_id))["submission_id"]
    ((headers, body),) = receiver.messages
    event = json.loads(body)
    assert event["type"] == f"job.{status}"
    assert event["object"] == "event"
    assert event["data"] == {
        "id": str(job_id),
        "object": "job",
        "submission_id": str(submission_id),
        "custom_id": "a",
        "status": status,
        "error_code": code,
    }
    named = {name.lower(): value for name, value in headers.items()}
    wanted = signed(SECRET, named["webhook-id"], int(named["webhook-timestamp"]), body)
    assert {name: named[name] for name in wanted} == wanted
    assert b"hello" not in body
    assert b"hi" not in json.dumps(event["data"]["custom_id"]).encode()


async def test_every_way_to_end_is_told(url: str, receiver: Receiver) -> None:
    async with telling(url, receiver) as world:
        cancelled = await world.one(webhook_url=receiver.url)
        await world.store.cancel(world.key_id, cancelled)
        expired = await world.one(webhook_url=receiver.url, deadline_s=0.001)
        await asyncio.sleep(0.01)
        await world.store.expire()
        owner = new_id()
        back = await world.one(webhook_url=receiver.url)
        await world.store.claim(owner, 1)
        await world.store.cancel(world.key_id, back)
        await world.runner().recover(owner)
        assert await left(world) == 3
        async with world.webhooks.opened():
            await nothing_left(world)
    told = {event["data"]["id"]: event["type"] for event in receiver.events()}
    assert told == {str(cancelled): "job.cancelled", str(expired): "job.expired", str(back): "job.cancelled"}


async def test_the_end_of_a_batch_is_told_with_its_counts(url: str, receiver: Receiver) -> None:
    async with telling(url, receiver) as world, client_of(world) as client:
        files = {"file": ("a", ndjson([line("a"), line("b", model="rejected")]), "application/jsonl")}
        file_id = (await client.post("/v1/files", data={"purpose": "batch"}, files=files)).json()["id"]
        body = {"input_file_id": file_id, "endpoint": "/v1/chat/completions", "completion_window": "24h"}
        batch = (await client.post("/v1/batches", json=body | {"webhook_url": receiver.url})).json()
        async with world.runner(), world.batches.opened(), world.webhooks.opened():
            await until(lambda: bool(receiver.messages))
            await nothing_left(world)
    (event,) = receiver.events()
    assert event["type"] == "batch.completed"
    assert event["data"] == {
        "id": batch["id"],
        "object": "batch",
        "status": "completed",
        "request_counts": {"total": 2, "completed": 1, "failed": 1},
    }


@pytest.mark.parametrize("target", ["https://evil.example/", "http://127.0.0.1:1/", "file:///etc/passwd"])
async def test_a_host_that_is_not_allowed_is_refused_where_it_is_named(
    url: str, receiver: Receiver, target: str
) -> None:
    async with telling(url, receiver) as world, client_of(world) as client:
        answer = await client.post("/v1/jobs", json=line("a", webhook_url=target))
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "webhook_url")
        body = {
            "input_file_id": "file-00000000000000000000000000000001",
            "endpoint": "/v1/chat/completions",
            "completion_window": "24h",
        }
        answer = await client.post("/v1/batches", json=body | {"webhook_url": target})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "webhook_url")
        assert await world.pool.fetchval("select count(*) from content.job") == 0


async def test_without_configuration_nobody_can_be_told(url: str) -> None:
    async with world_on(url) as world, client_of(world) as client:
        answer = await client.post("/v1/jobs", json=line("a", webhook_url="https://hooks.example.com/"))
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "webhook_url")


async def test_a_message_is_sent_again_under_its_id_until_it_is_taken(url: str, receiver: Receiver) -> None:
    receiver.answers = [web.Response(status=500), web.Response(status=404), 30.0]
    async with telling(url, receiver, timeout_s=0.3) as world:
        await one_message(world, receiver.url)
        async with world.webhooks.opened():
            await nothing_left(world)
    assert len(receiver.messages) == 4
    assert len({headers["webhook-id"] for headers, _ in receiver.messages}) == 1
    assert len({body for _, body in receiver.messages}) == 1


async def test_redirects_are_not_followed(url: str, receiver: Receiver) -> None:
    elsewhere = Receiver()
    server = web.Server(elsewhere.take)
    listener = await asyncio.get_running_loop().create_server(server, "127.0.0.1", 0)
    port = listener.sockets[0].getsockname()[1]
    for status in (301, 302, 307, 308):
        receiver.answers.append(web.Response(status=status, headers={"location": f"http://127.0.0.1:{port}/"}))
    async with telling(url, receiver) as world:
        await one_message(world, receiver.url)
        async with world.webhooks.opened():
            await nothing_left(world)
    listener.close()
    await server.shutdown(0.1)
    assert len(receiver.messages) == 5
    assert elsewhere.messages == []


async def test_a_name_that_stands_for_a_private_address_is_not_connected_to(url: str, receiver: Receiver) -> None:
    async with telling(url, receiver, allow_private=True) as world:
        await one_message(world, f"http://localhost:{receiver.port}/hook")
        # The operator no longer allows it.
        strict = msgspec.structs.replace(
            LOCAL, allowed_hosts=(f"localhost:{receiver.port}",), allow_private=False, give_up_s=0.5
        )
        async with Webhooks(world.pool, world.store, strict).opened():
            await nothing_left(world)
    assert receiver.messages == []


async def test_a_host_that_is_allowed_no_longer_is_not_told(url: str, receiver: Receiver) -> None:
    async with telling(url, receiver) as world:
        await one_message(world, receiver.url)
        other = msgspec.structs.replace(LOCAL, allowed_hosts=("hooks.example.com",), give_up_s=0.3)
        async with Webhooks(world.pool, world.store, other).opened():
            await nothing_left(world)
    assert receiver.messages == []


async def test_a_receiver_that_is_gone_or_never_takes_it_is_given_up(url: str, receiver: Receiver) -> None:
    receiver.answers = [web.Response(status=410)]
    async with telling(url, receiver, give_up_s=0.3) as world:
        await one_message(world, receiver.url)
        async with world.webhooks.opened():
            await nothing_left(world)
        assert len(receiver.messages) == 1
        receiver.answers = [web.Response(status=503) for _ in range(100)]
        await one_message(world, receiver.url)
        async with world.webhooks.opened():
            await nothing_left(world)
    assert len(receiver.messages) > 2


async def test_a_message_whose_process_died_is_sent_by_another(url: str, receiver: Receiver) -> None:
    async with telling(url, receiver, timeout_s=0.1) as world:
        await one_message(world, receiver.url)
        # Claimed, and then nothing.
        (claimed,) = await world.webhooks.claim(1)
        assert await world.webhooks.claim(1) == []
        await world.pool.execute("update content.webhook set due_at = due_at - interval '5.2 seconds'")
        async with world.webhooks.opened():
            await nothing_left(world)
    ((headers, _),) = receiver.messages
    assert headers["webhook-id"] == f"msg_{claimed.webhook_id.hex}"


async def test_two_processes_send_each_message_once(url: str, receiver: Receiver) -> None:
    async with telling(url, receiver) as world:
        jobs = [await world.one(webhook_url=receiver.url) for _ in range(40)]
        for job_id in jobs:
            await world.store.cancel(world.key_id, job_id)
        async with world.webhooks.opened(), world.webhooks.opened():
            await nothing_left(world)
    assert sorted(event["data"]["id"] for event in receiver.events()) == sorted(map(str, jobs))


async def test_a_receiver_that_hangs_does_not_hold_up_the_others(url: str, receiver: Receiver) -> None:
    receiver.answers = [30.0] * 4
    async with telling(url, receiver, timeout_s=25.0) as world:
        jobs = [await world.one(webhook_url=receiver.url) for _ in range(8)]
        for job_id in jobs:
            await world.store.cancel(world.key_id, job_id)
        async with world.webhooks.opened(), asyncio.timeout(20):
            while await left(world) > 4:  # noqa: ASYNC110  another task empties it
                await asyncio.sleep(0.01)
