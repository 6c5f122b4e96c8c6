"""Responses in the background, by OpenAI's own client. Run by `with_openai`."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import openai
from openai import AsyncOpenAI, OpenAI

from tests.clients.running import KEY, URL, occupied, provider, raising, reset, scenario, until

client = OpenAI(base_url=f"{URL}/v1", api_key=KEY, max_retries=0, timeout=60)
QUESTION = "what is a bridge?"
#: Providers of Responses itself, and of others.
MODELS = ("responses", "chat", "claude")


def ended(response_id: str) -> openai.types.responses.Response:
    """As the guide of the API polls."""
    deadline = time.monotonic() + 60
    while (response := client.responses.retrieve(response_id)).status in {"queued", "in_progress"}:
        assert time.monotonic() < deadline, response
        time.sleep(0.05)
    return response


@scenario
def a_response_in_the_background_is_polled_to_its_end() -> None:
    for model in MODELS:
        response = client.responses.create(model=model, input=QUESTION, instructions="Be brief.", background=True)
        assert (response.status, response.background, response.output) == ("queued", True, []), model
        done = ended(response.id)
        assert (done.status, done.id, done.created_at) == ("completed", response.id, response.created_at), model
        assert done.background is True
        assert done.instructions == "Be brief.", model
        assert done.error is None
        assert done.usage.total_tokens > 0, model
        assert (
            done.output_text
            == client.responses.create(model=model, input=QUESTION, instructions="Be brief.").output_text
        ), model
        assert client.responses.retrieve(response.id) == done, model
        items = list(client.responses.input_items.list(response.id))
        assert [item.content[0].text for item in items] == [QUESTION], model


@scenario
def a_tool_is_called_in_the_background_and_its_result_taken_back() -> None:
    tool: dict[str, Any] = {
        "type": "function",
        "name": "weather",
        "parameters": {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]},
    }
    asked: list[Any] = [{"role": "user", "content": "what is the weather in Bern?"}]
    for model in MODELS:
        response = ended(
            client.responses.create(model=model, input=asked, tools=[tool], tool_choice="required", background=True).id
        )
        call = next(item for item in response.output if item.type == "function_call")
        assert call.name == "weather", model
        turns = [*asked, *response.output, {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}]
        again = client.responses.create(model=model, input=turns, tools=[tool], background=True)
        assert ended(again.id).status == "completed", model


@scenario
async def the_asynchronous_client_polls_cancels_and_deletes() -> None:
    async with AsyncOpenAI(base_url=f"{URL}/v1", api_key=KEY, max_retries=0) as own:
        response = await own.responses.create(model="responses", input=QUESTION, background=True)
        async with asyncio.timeout(60):
            while response.status in {"queued", "in_progress"}:
                await asyncio.sleep(0.05)
                response = await own.responses.retrieve(response.id)
        assert response.status == "completed"
        assert (await own.responses.cancel(response.id)) == response
        await own.responses.delete(response.id)
        with raising(openai.NotFoundError):
            await own.responses.retrieve(response.id)


@scenario
def a_running_response_is_cancelled_and_cancelling_again_says_the_same() -> None:
    for model in ("responses", "chat"):
        reset()
        provider("faults", {"latency": 60}, model="sim-fast")
        response = client.responses.create(model=model, input=QUESTION, background=True)
        until(lambda: provider("ledger")["active"] == 1)
        with raising(openai.ConflictError):
            client.responses.delete(response.id)
        cancelled = client.responses.cancel(response.id)
        if cancelled.status == "in_progress":
            # The busy machine took longer than the answer waits.
            cancelled = ended(response.id)
        assert (cancelled.status, cancelled.id, cancelled.output) == ("cancelled", response.id, []), model
        assert client.responses.cancel(response.id) == cancelled
        assert client.responses.retrieve(response.id) == cancelled
        until(lambda: occupied() == 0)


@scenario
def what_fails_is_told_in_the_response() -> None:
    provider("faults", {"status": 400}, model="sim-fast")
    for model in MODELS:
        response = ended(client.responses.create(model=model, input=QUESTION, background=True).id)
        assert (response.status, response.error.code) == ("failed", "upstream_rejected"), model
        assert response.error.message
    # A provider of another API has no conversations.
    response = ended(client.responses.create(model="chat", input="x", conversation="conv_1", background=True).id)
    assert (response.status, response.error.code) == ("failed", "unsupported_field")
    assert "conversation" in response.error.message


@scenario
def what_is_not_kept_is_said_to_be_so() -> None:
    direct = client.responses.create(model="responses", input=QUESTION)
    with raising(openai.NotFoundError) as caught:
        client.responses.retrieve(direct.id)
    assert "background" in caught.error.message
    response = client.responses.create(model="responses", input=QUESTION, background=True)
    refused: list[tuple[Any, str]] = [
        (lambda: client.responses.create(model="chat", input="x", background=True, stream=True), "stream"),
        (lambda: client.responses.create(model="chat", input="x", background=True, store=False), "store"),
        (lambda: client.responses.retrieve(response.id, stream=True), "stream"),
        (lambda: client.responses.retrieve(response.id, include=["reasoning.encrypted_content"]), "include"),
        (
            lambda: client.responses.create(model="responses", input="x", previous_response_id=response.id),
            "previous_response_id",
        ),
        # What is kept at a provider: one of another API keeps nothing, and has nothing to go on from.
        (lambda: client.responses.create(model="claude", input="x", store=True), "store"),
        (
            lambda: client.responses.create(model="claude", input="x", previous_response_id="resp_1"),
            "previous_response_id",
        ),
        (lambda: client.responses.create(model="claude", input="x", conversation="conv_1"), "conversation"),
    ]
    for ask, param in refused:
        with raising(openai.BadRequestError) as caught:
            ask()
        assert (caught.error.code, caught.error.param) == ("unsupported_field", param), caught.error
    # Unless it says so, nothing is kept, and the answer says that.
    assert client.responses.create(model="claude", input="x").store is False
