"""grpc_requests: a client without generated code, which asks the server by reflection what it can be asked."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from functools import partial
from typing import Any

import grpc
from grpc_requests import AsyncClient, Client

from tests.clients.running import KEY, main, occupied, provider, scenario, until

TARGET = os.environ.get("CLIENTS_GRPC", "")
GATEWAY = "tollbridge.v1.Gateway"
METADATA = [("authorization", f"Bearer {KEY}")]
QUESTION: dict[str, Any] = {"model": "chat", "messages": [{"role": "user", "text": "what is a bridge?"}]}
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}

client = Client.get_by_endpoint(TARGET)


def ask(method: str, **fields: Any) -> Any:
    return client.request(GATEWAY, method, {**QUESTION, **fields}, metadata=METADATA)


@scenario
def reflection_tells_the_services_and_the_fields() -> None:
    assert {GATEWAY, "grpc.health.v1.Health"} <= set(client.service_names)
    assert set(client.service(GATEWAY).method_names) == {"Complete", "Stream"}
    fields = {field.name for field in client.get_method_descriptor(GATEWAY, "Complete").input_type.fields}
    assert {"model", "messages", "session_id", "max_cost_usd"} <= fields
    assert client.request("grpc.health.v1.Health", "Check", {"service": GATEWAY}) == {"status": "SERVING"}


@scenario
def a_chat_is_answered_with_who_served_it_and_what_it_cost() -> None:
    answer = ask("Complete", session_id="reflected", max_output_tokens=200)
    assert answer["choices"][0]["text"]
    assert answer["choices"][0]["finish_reason"] == "FINISH_REASON_STOP"
    outcome = answer["outcome"]
    assert (outcome["ended"], outcome["settlement"], outcome["route"]["provider"]) == ("complete", "settled", "chat")
    assert float(outcome["cost"]["usd"]) > 0
    assert float(outcome["counters"]["session_usd"]) >= float(outcome["cost"]["usd"])


@scenario
def a_stream_comes_in_pieces_and_ends_with_finished() -> None:
    chunks = list(ask("Stream"))
    assert "started" in chunks[0]
    text = "".join(piece.get("text", "") for chunk in chunks for piece in chunk.get("delta", {}).get("pieces", []))
    assert text == ask("Complete")["choices"][0]["text"]
    assert chunks[-1]["finished"]["outcome"]["cost"]["state"] == "charged"


@scenario
def leaving_a_stream_gives_its_slot_back() -> None:
    provider("faults", {"hang": "mid"}, model="sim-late")
    call = client.request(GATEWAY, "Stream", {**QUESTION, "model": "late"}, raw_output=True, metadata=METADATA)
    next(call)
    call.cancel()
    until(lambda: occupied() == 0)


@scenario
def a_tool_is_called_and_its_result_is_answered() -> None:
    tools = [{"name": "weather", "description": "The weather of a city.", "parameters": SCHEMA}]
    answer = ask("Complete", tools=tools, tool_choice={"mode": "MODE_REQUIRED"})
    [call] = answer["choices"][0]["tool_calls"]
    assert call["name"] == "weather"
    assert isinstance(json.loads(call["arguments"]), dict)
    spoken = [
        *QUESTION["messages"],
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": call["id"], "text": "It rains."},
    ]
    assert ask("Complete", messages=spoken, tools=tools)["choices"][0]["text"]


@scenario
def an_answer_keeps_to_a_schema() -> None:
    form = {"kind": "KIND_JSON_SCHEMA", "name": "place", "schema": SCHEMA, "strict": True}
    answer = json.loads(ask("Complete", response_format=form)["choices"][0]["text"])
    assert isinstance(answer["city"], str)


def failure(ask: Callable[[], Any]) -> Any:
    """The error it raises. gRPC has no public name for its class."""
    try:
        ask()
    except grpc.RpcError as error:
        return error
    raise AssertionError("it did not fail")


@scenario
def errors_have_their_status_and_their_stable_code() -> None:
    for fields, status, code in (
        ({"model": "no-such-model"}, grpc.StatusCode.NOT_FOUND, b"model_not_found"),
        ({"messages": []}, grpc.StatusCode.INVALID_ARGUMENT, b"invalid_request"),
    ):
        error = failure(partial(ask, "Complete", **fields))
        assert error.code() is status
        assert code in dict(error.trailing_metadata())["grpc-status-details-bin"]
    error = failure(lambda: client.request(GATEWAY, "Complete", QUESTION))
    assert error.code() is grpc.StatusCode.UNAUTHENTICATED
    provider("faults", {"hang": "before_headers"}, model="sim-late")
    late = {**QUESTION, "model": "late"}
    error = failure(lambda: list(client.request(GATEWAY, "Stream", late, timeout=0.2, metadata=METADATA)))
    assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    until(lambda: occupied() == 0)


@scenario
async def its_asynchronous_client_does_the_same() -> None:
    other = AsyncClient(TARGET)
    try:
        service = await other.service(GATEWAY)
        answer = await service.Complete(QUESTION, metadata=METADATA)
        assert answer["choices"][0]["text"]
        chunks = [chunk async for chunk in await service.Stream(QUESTION, metadata=METADATA)]
        assert "finished" in chunks[-1]
    finally:
        await other.channel.close()


if __name__ == "__main__":
    main("grpc-requests", alone=True)
