"""The batch helpers of OpenAI's own client, and of its files and webhooks. Run by `with_openai`."""

from __future__ import annotations

import contextlib
import io
import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import openai
from openai import AsyncOpenAI, OpenAI
from openai.types import webhooks as events

from tests.clients.running import KEY, URL, provider, raising, reset, scenario, until

client = OpenAI(base_url=f"{URL}/v1", api_key=KEY, max_retries=0, timeout=60)

#: What the gateway signs with, and the socket to which it may send word: bound by who started us, so that its port is
#: nobody else's.
HOOK_SECRET = os.environ.get("CLIENTS_HOOK_SECRET", "")
HOOK = socket.socket(fileno=int(os.environ["CLIENTS_HOOK_FD"]))
HOOK_URL = f"http://127.0.0.1:{HOOK.getsockname()[1]}/hook"
ENDED = ("completed", "failed", "expired", "cancelled")


def jsonl(*lines: dict[str, Any]) -> io.BytesIO:
    file = io.BytesIO(b"".join(json.dumps(line).encode() + b"\n" for line in lines))
    file.name = "lines.jsonl"
    return file


def chat(number: int, *, model: str = "chat") -> dict[str, Any]:
    return {
        "custom_id": f"line-{number}",
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": {"model": model, "messages": [{"role": "user", "content": f"question {number}"}]},
    }


def over(batch_id: str) -> openai.types.Batch:
    deadline = time.monotonic() + 60
    while (batch := client.batches.retrieve(batch_id)).status not in ENDED:
        assert time.monotonic() < deadline, batch
        time.sleep(0.1)
    return batch


@scenario
def a_batch_is_uploaded_run_and_read() -> None:
    provider("faults", {"hold": True}, model="sim-fast")
    file = client.files.create(file=jsonl(*(chat(n) for n in range(20))), purpose="batch")
    assert (file.object, file.purpose, file.status, file.filename) == ("file", "batch", "processed", "lines.jsonl")
    assert client.files.wait_for_processing(file.id, poll_interval=0.05).id == file.id
    assert client.files.retrieve(file.id) == file
    assert file.id in [one.id for one in client.files.list(purpose="batch")]
    batch = client.batches.create(
        input_file_id=file.id,
        endpoint="/v1/chat/completions",
        completion_window="24h",
        metadata={"team": "a"},
        output_expires_after={"anchor": "created_at", "seconds": 3600},
    )
    assert batch.status in {"validating", "in_progress"}
    assert (batch.metadata, batch.input_file_id) == ({"team": "a"}, file.id)
    provider("faults", {}, model="sim-fast")
    batch = over(batch.id)
    assert batch.status == "completed"
    counts = batch.request_counts
    assert (counts.total, counts.completed, counts.failed) == (20, 20, 0)
    assert batch.usage.total_tokens == batch.usage.input_tokens + batch.usage.output_tokens > 0
    assert batch.error_file_id is None
    lines = [json.loads(line) for line in client.files.content(batch.output_file_id).text.splitlines()]
    assert [line["custom_id"] for line in lines] == [f"line-{n}" for n in range(20)]
    answer = openai.types.chat.ChatCompletion.model_validate(lines[0]["response"]["body"])
    assert answer.choices[0].message.content
    assert client.files.content(file.id).text.count("\n") == 20
    assert client.files.retrieve(batch.output_file_id).purpose == "batch_output"
    assert client.files.delete(file.id).deleted
    with raising(openai.NotFoundError):
        client.files.retrieve(file.id)
    assert batch.id in [one.id for one in client.batches.list(limit=1)]


@scenario
def a_batch_of_every_endpoint_is_answered_in_its_own_shape() -> None:
    asked: dict[str, dict[str, Any]] = {
        "/v1/responses": {"model": "responses", "input": "hi"},
        "/v1/embeddings": {"model": "embed", "input": ["a", "b"]},
    }
    answers = {}
    for endpoint, body in asked.items():
        line = {"custom_id": "a", "method": "POST", "url": endpoint, "body": body}
        file = client.files.create(file=jsonl(line), purpose="batch")
        made = client.batches.create(input_file_id=file.id, endpoint=endpoint, completion_window="24h")
        batch = over(made.id)
        assert batch.status == "completed", batch
        (one,) = client.files.content(batch.output_file_id).text.splitlines()
        answers[endpoint] = json.loads(one)["response"]["body"]
    # As the client itself builds them from an answer.
    assert openai.types.responses.Response.construct(**answers["/v1/responses"]).output_text
    vectors = openai.types.CreateEmbeddingResponse.construct(**answers["/v1/embeddings"])
    assert [item.index for item in vectors.data] == [0, 1]


@scenario
def wrong_lines_fail_a_batch_and_each_is_told() -> None:
    file = client.files.create(file=jsonl(chat(1), chat(2, model="nobody"), chat(1)), purpose="batch")
    made = client.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")
    batch = over(made.id)
    assert batch.status == "failed"
    assert [(error.line, error.code, error.param) for error in batch.errors.data] == [
        (2, "model_not_found", "body.model"),
        (3, "invalid_request", "custom_id"),
    ]


@scenario
def a_batch_is_cancelled() -> None:
    provider("faults", {"hold": True}, model="sim-fast")
    file = client.files.create(file=jsonl(*(chat(n) for n in range(3000))), purpose="batch")
    made = client.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")
    assert client.batches.cancel(made.id).status in {"cancelling", "cancelled"}
    batch = over(made.id)
    assert batch.status == "cancelled"
    reset()
    with raising(openai.ConflictError):
        client.batches.cancel(done().id)


def done() -> openai.types.Batch:
    file = client.files.create(file=jsonl(chat(1)), purpose="batch")
    made = client.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")
    return over(made.id)


@scenario
def errors_are_the_clients_own() -> None:
    with raising(openai.NotFoundError):
        client.files.retrieve("file-unknown")
    with raising(openai.NotFoundError):
        client.batches.retrieve("batch_unknown")
    with raising(openai.BadRequestError):
        client.files.create(file=jsonl(chat(1)), purpose="vision")
    file = client.files.create(file=jsonl(chat(1)), purpose="batch")
    with raising(openai.BadRequestError) as caught:
        client.batches.create(input_file_id=file.id, endpoint="/v1/moderations", completion_window="24h")
    assert caught.error.param == "endpoint"
    with raising(openai.NotFoundError):
        client.batches.create(input_file_id="file-x", endpoint="/v1/chat/completions", completion_window="24h")
    key = {"Idempotency-Key": "one"}
    first = client.batches.create(
        input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h", extra_headers=key
    )
    again = client.batches.create(
        input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h", extra_headers=key
    )
    assert first.id == again.id
    with raising(openai.UnprocessableEntityError):
        client.batches.create(
            input_file_id=file.id,
            endpoint="/v1/chat/completions",
            completion_window="24h",
            metadata={"a": "b"},
            extra_headers=key,
        )


@scenario
async def the_async_client_does_the_same() -> None:
    async with AsyncOpenAI(base_url=f"{URL}/v1", api_key=KEY, max_retries=0, timeout=60) as client:
        file = await client.files.create(file=jsonl(chat(1)), purpose="batch")
        made = await client.batches.create(
            input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
        )
        assert made.id in [one.id async for one in client.batches.list(limit=1)]
        assert (await client.batches.retrieve(made.id)).object == "batch"
        assert (await client.files.content(file.id)).text.startswith("{")


class Told:
    """The events that came about the batches and responses asked for in a block, by whose they are."""

    def __init__(self) -> None:
        self._taken: list[tuple[dict[str, str], bytes]] = []

    def take(self, headers: dict[str, str], body: bytes) -> None:
        self._taken.append((headers, body))

    def about(self, asked: str) -> tuple[dict[str, str], bytes] | None:
        """Headers and body of what was told of it. An event may come twice, and one of an earlier block late."""
        return next((one for one in self._taken if json.loads(one[1])["data"]["id"] == asked), None)


@contextlib.contextmanager
def hook() -> Iterator[Told]:
    """What is told, as it comes."""
    told = Told()

    class Hook(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            told.take(dict(self.headers), body)
            self.send_response(204)
            self.end_headers()

        def log_message(self, *_: object) -> None: ...

    server = HTTPServer(HOOK.getsockname(), Hook, bind_and_activate=False)
    server.socket.close()
    server.socket = HOOK.dup()
    server.server_activate()
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield told
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@scenario
def the_client_reads_our_webhooks() -> None:
    with hook() as told:
        file = client.files.create(file=jsonl(chat(1)), purpose="batch")
        made = client.batches.create(
            input_file_id=file.id,
            endpoint="/v1/chat/completions",
            completion_window="24h",
            extra_body={"webhook_url": HOOK_URL},
        )
        until(lambda: told.about(made.id) is not None)
    headers, body = told.about(made.id) or ({}, b"")
    event = client.webhooks.unwrap(body, headers, secret=HOOK_SECRET)
    assert isinstance(event, events.BatchCompletedWebhookEvent)
    assert event.data.id == made.id
    with raising(openai.InvalidWebhookSignatureError):
        client.webhooks.unwrap(body + b" ", headers, secret=HOOK_SECRET)
    with raising(openai.BadRequestError):
        client.batches.create(
            input_file_id=file.id,
            endpoint="/v1/chat/completions",
            completion_window="24h",
            extra_body={"webhook_url": "https://elsewhere.example/"},
        )


@scenario
def the_client_reads_how_a_response_in_the_background_ended() -> None:
    def asked(**given: Any) -> str:
        made = client.responses.create(
            input="what is a bridge?",
            background=True,
            extra_headers={"x-tollbridge-webhook-url": HOOK_URL},
            **{"model": "chat", **given},
        )
        response_id: str = made.id
        return response_id

    with hook() as told:
        # The one to be cancelled first, where nothing else of the model runs that would be held up with it.
        provider("faults", {"hold": True}, model="sim-fast")
        cancelled = asked()
        until(lambda: provider("ledger")["active"] == 1)
        client.responses.cancel(cancelled)
        until(lambda: told.about(cancelled) is not None)
        provider("faults", {}, model="sim-fast")
        wanted = {
            cancelled: events.ResponseCancelledWebhookEvent,
            asked(): events.ResponseCompletedWebhookEvent,
            asked(model="responses", max_output_tokens=1): events.ResponseIncompleteWebhookEvent,
            # No provider of Chat Completions has conversations.
            asked(conversation="conv_1"): events.ResponseFailedWebhookEvent,
        }
        until(lambda: all(map(told.about, wanted)))
    for response_id, kind in wanted.items():
        headers, body = told.about(response_id) or ({}, b"")
        event = client.webhooks.unwrap(body, headers, secret=HOOK_SECRET)
        assert type(event) is kind, event
        assert client.responses.retrieve(event.data.id).status == event.type.removeprefix("response.")
