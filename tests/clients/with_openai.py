"""OpenAI's own client."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import openai
import pydantic
from openai import AsyncOpenAI, AzureOpenAI, OpenAI

from tests.clients import openai_background, openai_batches  # noqa: F401  their scenarios
from tests.clients.running import KEY, URL, main, occupied, provider, raising, reset, scenario, until

client = OpenAI(base_url=f"{URL}/v1", api_key=KEY, max_retries=0, timeout=60)
QUESTION = [{"role": "user", "content": "what is a bridge?"}]
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a place.",
        "parameters": {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]},
    },
}


@scenario
def a_chat_is_answered_with_who_served_it() -> None:
    raw = client.chat.completions.with_raw_response.create(model="chat", messages=QUESTION)
    answer = raw.parse()
    assert answer.choices[0].message.content
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.completion_tokens > 0
    assert answer.model == "sim-fast"
    headers = raw.headers
    assert headers["x-tollbridge-route"] == "chat/sim-fast"
    assert headers["x-tollbridge-attempts"] == "1"
    assert float(headers["x-tollbridge-cost-usd"]) > 0
    assert answer._request_id == headers["x-tollbridge-request-id"]


@scenario
def a_base_url_without_v1_and_azures_clients_are_served() -> None:
    bare = OpenAI(base_url=URL, api_key=KEY, max_retries=0)
    azure = AzureOpenAI(azure_endpoint=URL, api_key=KEY, api_version="2024-10-21", max_retries=0)
    pinned = AzureOpenAI(
        azure_endpoint=URL, azure_deployment="chat", api_key=KEY, api_version="2024-10-21", max_retries=0
    )
    v1 = OpenAI(base_url=f"{URL}/openai/v1/", api_key=KEY, default_query={"api-version": "preview"}, max_retries=0)
    for one in (bare, azure, v1):
        assert one.chat.completions.create(model="chat", messages=QUESTION).choices[0].message.content
        assert one.embeddings.create(model="embed", input="a").data[0].embedding
        assert one.responses.create(model="responses", input="what is a bridge?").output_text
        assert "chat" in {model.id for model in one.models.list()}
    # The deployment of the client is the model, whatever the call says.
    answer = pinned.chat.completions.with_raw_response.create(model="gpt-4o", messages=QUESTION)
    assert answer.headers["x-tollbridge-route"] == "chat/sim-fast"
    with raising(openai.NotFoundError) as caught:
        azure.chat.completions.create(model="no-such-model", messages=QUESTION)
    assert caught.error.code == "model_not_found"


@scenario
def the_same_chat_is_answered_from_every_protocol() -> None:
    for model in ("chat", "claude", "responses"):
        answer = client.chat.completions.create(model=model, messages=QUESTION)
        assert answer.choices[0].message.content, model
        assert answer.usage.total_tokens > 0, model


@scenario
def a_stream_has_its_text_its_end_and_its_usage() -> None:
    for model in ("chat", "claude", "responses"):
        whole = client.chat.completions.create(model=model, messages=QUESTION).choices[0].message.content
        chunks = list(
            client.chat.completions.create(
                model=model, messages=QUESTION, stream=True, stream_options={"include_usage": True}
            )
        )
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        assert text == whole, model
        assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "stop", model
        assert chunks[-1].usage.completion_tokens > 0, model


@scenario
def a_stream_that_did_not_ask_for_usage_has_choices_in_every_chunk() -> None:
    for model in ("chat", "claude"):
        for chunk in client.chat.completions.create(model=model, messages=QUESTION, stream=True):
            assert chunk.choices[0].index == 0


@scenario
def the_streaming_helper_of_the_client_works() -> None:
    for model in ("chat", "claude"):
        with client.chat.completions.stream(model=model, messages=QUESTION) as stream:
            kinds = {event.type for event in stream}
            final = stream.get_final_completion()
        assert "content.delta" in kinds
        assert final.choices[0].message.content


@scenario
async def the_asynchronous_client_works() -> None:
    async with AsyncOpenAI(base_url=f"{URL}/v1", api_key=KEY, max_retries=0) as own:
        assert (await own.chat.completions.create(model="chat", messages=QUESTION)).choices[0].message.content
        stream = await own.chat.completions.create(model="chat", messages=QUESTION, stream=True)
        assert [chunk async for chunk in stream]


@scenario
def tools_are_called_and_their_results_taken_back() -> None:
    for model in ("chat", "claude"):
        asked = [{"role": "user", "content": "what is the weather in Bern?"}]
        forced = {"type": "function", "function": {"name": "weather"}}
        answer = client.chat.completions.create(model=model, messages=asked, tools=[WEATHER], tool_choice=forced)
        message = answer.choices[0].message
        call = message.tool_calls[0]
        assert call.function.name == "weather"
        json.loads(call.function.arguments)
        result = {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
        again = client.chat.completions.create(
            model=model, messages=[*asked, message.model_dump(exclude_none=True), result], tools=[WEATHER]
        )
        assert again.choices[0].finish_reason in {"stop", "tool_calls"}


@scenario
def a_stream_of_a_tool_call_comes_together() -> None:
    for model in ("chat", "claude"):
        with client.chat.completions.stream(
            model=model, messages=QUESTION, tools=[WEATHER], tool_choice="required"
        ) as stream:
            for _ in stream:
                pass
            call = stream.get_final_completion().choices[0].message.tool_calls[0]
        assert call.function.name == "weather", model
        json.loads(call.function.arguments)


class Place(pydantic.BaseModel):
    name: str
    inhabitants: int


@scenario
def structured_output_is_what_was_asked_for() -> None:
    for model in ("chat", "claude", "responses"):
        answer = client.chat.completions.parse(model=model, messages=QUESTION, response_format=Place)
        assert isinstance(answer.choices[0].message.parsed, Place), model
        told = client.responses.parse(model=model, input="what is Bern?", text_format=Place)
        assert isinstance(told.output_parsed, Place), model


@scenario
def a_tool_of_responses_is_called_and_its_result_taken_back() -> None:
    tool = {"type": "function", "strict": False, **WEATHER["function"]}
    for model in ("responses", "chat", "claude"):
        asked = [{"role": "user", "content": "what is the weather in Bern?"}]
        answer = client.responses.create(model=model, input=asked, tools=[tool], tool_choice="required")
        call = next(item for item in answer.output if item.type == "function_call")
        assert call.name == "weather", model
        result = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
        turns = [*asked, *(item.model_dump(exclude_none=True) for item in answer.output), result]
        assert client.responses.create(model=model, input=turns, tools=[tool]).status == "completed", model


@scenario
def responses_are_answered_whole_and_streamed() -> None:
    for model in ("responses", "chat", "claude"):
        answer = client.responses.create(model=model, input="what is a bridge?")
        assert answer.output_text, model
        assert answer.status == "completed"
        assert answer.usage.output_tokens > 0
        with client.responses.stream(model=model, input="what is a bridge?") as stream:
            kinds = [event.type for event in stream]
            final = stream.get_final_response()
        assert kinds[0] == "response.created"
        assert kinds[-1] == "response.completed"
        assert final.output_text == answer.output_text, model


@scenario
def embeddings_come_in_order_with_their_cost() -> None:
    raw = client.embeddings.with_raw_response.create(model="embed", input=["a bridge", "a river"])
    answer = raw.parse()
    assert [item.index for item in answer.data] == [0, 1]
    assert len(answer.data[0].embedding) == 8
    assert answer.data[0].embedding != answer.data[1].embedding
    assert answer.usage.prompt_tokens > 0
    assert float(raw.headers["x-tollbridge-cost-usd"]) > 0
    assert raw.headers["x-tollbridge-route"] == "chat/sim-embed"
    plain = client.embeddings.create(model="embed", input=["a bridge", "a river"], encoding_format="float")
    assert [item.embedding for item in plain.data] == [item.embedding for item in answer.data]
    assert client.embeddings.create(model="embed", input="one").data[0].embedding
    with raising(openai.BadRequestError) as caught:
        client.embeddings.create(model="embed", input="")
    assert caught.error.param == "input"
    with raising(openai.BadRequestError) as caught:
        client.embeddings.create(model="claude", input="x")
    assert caught.error.code == "unsupported_field"
    provider("faults", {"status": 429}, model="sim-embed")
    with raising(openai.RateLimitError):
        client.embeddings.create(model="embed", input="x")


@scenario
def models_are_listed_and_found_by_name() -> None:
    listed = {model.id: model for model in client.models.list()}
    assert {"chat", "claude", "messages/sim-fast"} <= listed.keys()
    assert listed["claude"].owned_by == "messages"
    assert listed["claude"].prices["input"] == "3"
    assert client.models.retrieve("messages/sim-fast").id == "messages/sim-fast"
    with raising(openai.NotFoundError) as caught:
        client.models.retrieve("no/such/model")
    assert caught.error.code == "model_not_found"


@scenario
def every_error_is_the_clients_own() -> None:
    def raised(expected: type[openai.APIStatusError], call) -> openai.APIStatusError:
        with raising(expected) as caught:
            call()
        assert caught.error.request_id
        return caught.error

    chat = client.chat.completions.create
    error = raised(openai.NotFoundError, lambda: chat(model="no-such-model", messages=QUESTION))
    assert (error.code, error.param, error.type) == ("model_not_found", "model", "not_found_error")
    error = raised(openai.NotFoundError, lambda: client.responses.create(model="no-such-model", input="x"))
    assert error.code == "model_not_found"
    stranger = OpenAI(base_url=f"{URL}/v1", api_key="tb_nobody", max_retries=0)
    error = raised(
        openai.AuthenticationError, lambda: stranger.chat.completions.create(model="chat", messages=QUESTION)
    )
    assert error.code == "unauthenticated"
    error = raised(openai.BadRequestError, lambda: chat(model="chat", messages="x"))
    assert error.param == "messages"
    error = raised(
        openai.BadRequestError, lambda: chat(model="chat", messages=QUESTION, extra_headers={"x-tollbridge-what": "1"})
    )
    assert error.param == "x-tollbridge-what"
    for status, expected in (
        (400, openai.BadRequestError),
        (422, openai.UnprocessableEntityError),
        (429, openai.RateLimitError),
        (500, openai.InternalServerError),
        (503, openai.InternalServerError),
    ):
        for stream in (False, True):
            reset()
            provider("faults", {"status": status}, model="sim-fast")
            error = raised(expected, partial(chat, model="chat", messages=QUESTION, stream=stream))
            assert error.code in {"upstream_rejected", "all_routes_failed"}, error.code
    reset()


@scenario
def the_client_repeats_what_may_pass_and_only_that() -> None:
    patient = OpenAI(base_url=f"{URL}/v1", api_key=KEY, max_retries=2)
    provider("faults", {"status": 429, "retry_after": 1, "fail_first": 1}, model="sim-fast")
    before = provider("ledger")["dispatches"]
    assert patient.chat.completions.create(model="chat", messages=QUESTION).choices
    assert provider("ledger")["dispatches"] == before + 2
    reset()
    provider("faults", {"status": 400}, model="sim-fast")
    before = provider("ledger")["dispatches"]
    with raising(openai.BadRequestError):
        patient.chat.completions.create(model="chat", messages=QUESTION)
    assert provider("ledger")["dispatches"] == before + 1
    reset()
    provider("faults", {"die": "rst", "die_after": 5}, model="sim-fast")
    before = provider("ledger")["dispatches"]
    with raising(openai.InternalServerError) as caught:
        patient.chat.completions.create(
            model="chat", messages=QUESTION, extra_headers={"x-tollbridge-resend-uncertain": "never"}
        )
    # It may have cost something: the client must not pay twice by itself.
    assert caught.error.response.headers["x-should-retry"] == "false"
    assert provider("ledger")["dispatches"] == before + 1
    reset()


@scenario
def a_stream_that_is_cut_raises_and_is_no_whole_answer() -> None:
    for model in ("chat", "claude", "responses"):
        provider("faults", {"die": "rst", "die_after": 4}, model="sim-fast")
        seen: list[object] = []
        with raising(openai.APIError) as caught:
            seen.extend(client.chat.completions.create(model=model, messages=QUESTION, stream=True))
        assert caught.error.code == "upstream_broken"
        assert seen
        reset()
    provider("faults", {"die": "rst", "die_after": 4}, model="sim-fast")
    for model in ("responses", "chat"):
        with raising(openai.APIError) as caught:
            list(client.responses.create(model=model, input="x", stream=True))
        assert caught.error.code == "upstream_broken"
    reset()


@scenario
def failover_is_told_in_the_headers() -> None:
    raw = client.chat.completions.with_raw_response.create(model="over", messages=QUESTION)
    assert raw.headers["x-tollbridge-route"] == "chat/sim-fast"
    assert raw.headers["x-tollbridge-attempts"] == "2"
    assert raw.headers["x-tollbridge-failover-reason"] == "connect_refused"
    with client.chat.completions.with_streaming_response.create(
        model="over", messages=QUESTION, stream=True
    ) as streamed:
        assert streamed.headers["x-tollbridge-failover-reason"] == "connect_refused"
        assert streamed.headers["x-tollbridge-attempts"] == "2"
        lines = list(streamed.iter_lines())
    [late] = [json.loads(line.removeprefix(": tollbridge ")) for line in lines if line.startswith(": tollbridge ")]
    assert late["attempts"] == "2"
    assert float(late["cost_usd"]) > 0
    assert [line for line in lines if line][-1] == "data: [DONE]"


@scenario
def who_leaves_in_the_middle_frees_the_slot() -> None:
    provider("faults", {"pace": 0.2, "chunks": 100}, model="sim-fast")
    stream = client.chat.completions.create(model="chat", messages=QUESTION, stream=True)
    next(iter(stream))
    assert occupied() == 1
    stream.close()
    until(lambda: occupied() == 0)
    until(lambda: provider("ledger")["active"] == 0)
    provider("faults", {"think": 20}, model="sim-fast")
    impatient = OpenAI(base_url=f"{URL}/v1", api_key=KEY, max_retries=0, timeout=0.5)
    with raising(openai.APITimeoutError):
        impatient.chat.completions.create(model="chat", messages=QUESTION)
    until(lambda: occupied() == 0)
    until(lambda: provider("ledger")["active"] == 0)
    reset()


if __name__ == "__main__":
    main("openai", alone=True)
