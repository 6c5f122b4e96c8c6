"""Message Batches, by Anthropic's own client. Run by `with_anthropic`."""

from __future__ import annotations

import time
from typing import Any

import anthropic
from anthropic import Anthropic, AsyncAnthropic

from tests.clients.running import KEY, URL, provider, raising, scenario, until

client = Anthropic(base_url=URL, api_key=KEY, max_retries=0, timeout=60)


def request(custom_id: str, model: str) -> Any:
    messages = [{"role": "user", "content": f"question {custom_id}"}]
    return {"custom_id": custom_id, "params": {"model": model, "max_tokens": 100, "messages": messages}}


def over(batch_id: str) -> anthropic.types.messages.MessageBatch:
    deadline = time.monotonic() + 60
    while (batch := client.messages.batches.retrieve(batch_id)).processing_status != "ended":
        assert time.monotonic() < deadline, batch
        time.sleep(0.1)
    return batch


@scenario
def a_message_batch_is_created_run_and_read() -> None:
    # Providers of this API, and of another.
    models = {"a": "claude", "b": "chat", "c": "claude", "d": "responses"}
    provider("faults", {"hold": True}, model="sim-fast")
    made = client.messages.batches.create(requests=[request(name, model) for name, model in models.items()])
    assert (made.type, made.processing_status, made.request_counts.processing) == ("message_batch", "in_progress", 4)
    assert made.expires_at > made.created_at
    provider("faults", {}, model="sim-fast")
    batch = over(made.id)
    assert (batch.request_counts.succeeded, batch.request_counts.processing) == (4, 0)
    assert batch.ended_at is not None
    results = {line.custom_id: line.result for line in client.messages.batches.results(made.id)}
    assert results.keys() == models.keys()
    for name, result in results.items():
        assert result.type == "succeeded", name
        assert result.message.content[0].text, name
        assert result.message.usage.output_tokens > 0, name
    # Its results have an address that is found behind any base URL.
    behind = Anthropic(base_url=f"{URL}/v1", api_key=KEY, max_retries=0)
    assert len(list(behind.messages.batches.results(made.id))) == len(models)
    assert made.id in [one.id for one in client.messages.batches.list(limit=1)]
    deleted = client.messages.batches.delete(made.id)
    assert (deleted.id, deleted.type) == (made.id, "message_batch_deleted")
    with raising(anthropic.NotFoundError):
        client.messages.batches.retrieve(made.id)


@scenario
def a_message_batch_is_cancelled_and_what_failed_is_told() -> None:
    provider("faults", {"latency": 60}, model="sim-late")
    made = client.messages.batches.create(requests=[request("a", "late"), request("b", "claude")])
    until(lambda: provider("ledger")["completed"] == 1 and provider("ledger")["active"] == 1)
    with raising(anthropic.AnthropicError):
        client.messages.batches.results(made.id)
    assert client.messages.batches.cancel(made.id).processing_status in {"canceling", "ended"}
    batch = over(made.id)
    assert (batch.request_counts.succeeded, batch.request_counts.canceled) == (1, 1)
    kinds = {line.custom_id: line.result.type for line in client.messages.batches.results(made.id)}
    assert kinds == {"a": "canceled", "b": "succeeded"}
    provider("faults", {"status": 400}, model="sim-fast")
    failed = over(client.messages.batches.create(requests=[request("a", "claude")]).id)
    (line,) = client.messages.batches.results(failed.id)
    assert (line.result.type, line.result.error.error.type) == ("errored", "invalid_request_error")


@scenario
def a_message_batch_with_a_wrong_request_is_refused_whole() -> None:
    with raising(anthropic.NotFoundError) as caught:
        client.messages.batches.create(requests=[request("a", "claude"), request("b", "nobody")])
    assert "requests[1].params.model" in str(caught.error)


@scenario
async def the_beta_face_of_message_batches_works_too() -> None:
    async with AsyncAnthropic(base_url=URL, api_key=KEY, max_retries=0) as own:
        made = await own.beta.messages.batches.create(requests=[request("a", "claude")])
        batch = over(made.id)
        results = [line async for line in await own.beta.messages.batches.results(batch.id)]
        assert [line.result.type for line in results] == ["succeeded"]
