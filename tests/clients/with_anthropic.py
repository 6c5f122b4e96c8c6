"""Anthropic's own client."""

from __future__ import annotations

import json
from functools import partial

import anthropic
from anthropic import Anthropic, AsyncAnthropic

from tests.clients import anthropic_batches  # noqa: F401  its scenarios
from tests.clients.running import KEY, URL, main, occupied, provider, raising, reset, scenario, until

client = Anthropic(base_url=URL, api_key=KEY, max_retries=0, timeout=60)
QUESTION = [{"role": "user", "content": "what is a bridge?"}]
ASKED = {"max_tokens": 500, "messages": QUESTION}
WEATHER = {
    "name": "weather",
    "description": "The weather of a place.",
    "input_schema": {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]},
}


@scenario
def a_message_is_answered_with_who_served_it() -> None:
    raw = client.messages.with_raw_response.create(model="claude", **ASKED)
    answer = raw.parse()
    assert answer.content[0].text
    assert answer.stop_reason == "end_turn"
    assert answer.usage.output_tokens > 0
    assert raw.headers["x-tollbridge-route"] == "messages/sim-fast"
    assert float(raw.headers["x-tollbridge-cost-usd"]) > 0
    assert answer._request_id == raw.headers["x-tollbridge-request-id"]


@scenario
def the_same_question_is_answered_from_every_protocol() -> None:
    for model in ("claude", "chat", "responses"):
        answer = client.messages.create(model=model, **ASKED)
        assert answer.content[0].text, model
        assert answer.usage.output_tokens > 0, model


@scenario
def both_headers_for_the_key_are_taken() -> None:
    bearer = Anthropic(base_url=URL, auth_token=KEY, api_key=None, max_retries=0)
    assert bearer.messages.create(model="claude", **ASKED).content


@scenario
def a_base_url_with_v1_is_served_and_what_is_not_there_is_told_in_the_clients_words() -> None:
    one = Anthropic(base_url=f"{URL}/v1", api_key=KEY, max_retries=0)
    assert one.messages.create(model="claude", **ASKED).content
    assert one.messages.count_tokens(model="claude", messages=ASKED["messages"]).input_tokens > 0
    assert "claude" in {model.id for model in one.models.list()}
    with raising(anthropic.NotFoundError) as caught:
        client.beta.skills.list()
    assert caught.error.body["error"]["type"] == "not_found_error"


@scenario
def the_streaming_helper_gives_the_whole_message() -> None:
    for model in ("claude", "chat", "responses"):
        whole = client.messages.create(model=model, **ASKED).content[0].text
        with client.messages.stream(model=model, **ASKED) as stream:
            text = "".join(stream.text_stream)
            final = stream.get_final_message()
        assert text == whole == final.content[0].text, model
        assert final.stop_reason == "end_turn", model
        assert final.usage.output_tokens > 0, model


@scenario
async def the_asynchronous_client_works() -> None:
    async with AsyncAnthropic(base_url=URL, api_key=KEY, max_retries=0) as own:
        assert (await own.messages.create(model="claude", **ASKED)).content
        async with own.messages.stream(model="claude", **ASKED) as stream:
            assert [text async for text in stream.text_stream]


@scenario
def tools_are_used_and_their_results_taken_back() -> None:
    for model in ("claude", "chat"):
        answer = client.messages.create(model=model, tools=[WEATHER], tool_choice={"type": "any"}, **ASKED)
        assert answer.stop_reason == "tool_use", model
        use = next(block for block in answer.content if block.type == "tool_use")
        assert use.name == "weather"
        turns = [
            *QUESTION,
            {"role": "assistant", "content": [block.model_dump(exclude_none=True) for block in answer.content]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": use.id, "content": "sunny"}]},
        ]
        assert client.messages.create(model=model, max_tokens=500, messages=turns, tools=[WEATHER]).content
        with client.messages.stream(model=model, tools=[WEATHER], tool_choice={"type": "any"}, **ASKED) as stream:
            streamed = stream.get_final_message()
        [again] = [block for block in streamed.content if block.type == "tool_use"]
        assert again.input == use.input, model


@scenario
def thinking_comes_back() -> None:
    answer = client.messages.create(
        model="claude-thinking",
        max_tokens=4000,
        thinking={"type": "enabled", "budget_tokens": 2000},
        messages=QUESTION,
    )
    assert [block.type for block in answer.content] == ["thinking", "text"]
    with client.messages.stream(
        model="claude-thinking",
        max_tokens=4000,
        thinking={"type": "enabled", "budget_tokens": 2000},
        messages=QUESTION,
    ) as stream:
        kinds = {event.type for event in stream}
    assert "thinking" in kinds


@scenario
def betas_are_taken_and_what_has_none_says_so() -> None:
    betas = ["context-management-2025-06-27"]
    assert client.beta.messages.create(model="claude", betas=betas, **ASKED).content
    raw = client.beta.messages.with_raw_response.create(model="chat", betas=betas, **ASKED)
    assert "anthropic-beta: context-management-2025-06-27 dropped" in raw.headers["x-tollbridge-warnings"]


@scenario
def tokens_are_counted_by_the_provider_for_nothing() -> None:
    raw = client.messages.with_raw_response.count_tokens(model="claude", messages=QUESTION, tools=[WEATHER])
    assert raw.parse().input_tokens > 0
    assert raw.headers["x-tollbridge-cost-usd"] == "0"
    with raising(anthropic.BadRequestError) as caught:
        client.messages.count_tokens(model="chat", messages=QUESTION)
    assert caught.error.body["error"]["code"] == "unsupported_field"


@scenario
def models_are_listed_in_pages_and_found_by_name() -> None:
    page = client.models.list(limit=2)
    assert len(page.data) == 2
    assert page.has_more
    names = [model.id for model in client.models.list(limit=2)]
    assert {"chat", "claude", "messages/sim-fast"} <= set(names)
    assert len(names) == len(set(names))
    assert client.models.retrieve("messages/sim-fast").id == "messages/sim-fast"
    with raising(anthropic.NotFoundError):
        client.models.retrieve("no-such-model")


@scenario
def every_error_is_the_clients_own() -> None:
    def raised(expected: type[anthropic.APIStatusError], call) -> anthropic.APIStatusError:
        with raising(expected) as caught:
            call()
        assert caught.error.request_id
        assert caught.error.body["type"] == "error"
        return caught.error

    create = client.messages.create
    error = raised(anthropic.NotFoundError, lambda: create(model="no-such-model", **ASKED))
    assert error.body["error"]["code"] == "model_not_found"
    assert error.body["error"]["type"] == "not_found_error"
    stranger = Anthropic(base_url=URL, api_key="tb_nobody", max_retries=0)
    error = raised(anthropic.AuthenticationError, lambda: stranger.messages.create(model="claude", **ASKED))
    assert error.body["error"]["type"] == "authentication_error"
    error = raised(anthropic.BadRequestError, lambda: create(model="claude", max_tokens=5, messages="x"))
    assert error.body["error"]["param"] == "messages"
    for status, expected in (
        (400, anthropic.BadRequestError),
        (422, anthropic.UnprocessableEntityError),
        (429, anthropic.RateLimitError),
        (500, anthropic.InternalServerError),
    ):
        for stream in (False, True):
            reset()
            provider("faults", {"status": status}, model="sim-fast")
            raised(expected, partial(create, model="claude", stream=stream, **ASKED))


@scenario
def the_client_repeats_what_may_pass() -> None:
    patient = Anthropic(base_url=URL, api_key=KEY, max_retries=2)
    provider("faults", {"status": 429, "retry_after": 1, "fail_first": 1}, model="sim-fast")
    assert patient.messages.create(model="claude", **ASKED).content
    assert provider("ledger")["dispatches"] == 2


@scenario
def a_stream_that_is_cut_raises_and_is_no_whole_message() -> None:
    for model in ("claude", "chat"):
        reset()
        provider("faults", {"die": "rst", "die_after": 4}, model="sim-fast")
        seen: list[str] = []
        with raising(anthropic.APIStatusError) as caught, client.messages.stream(model=model, **ASKED) as stream:
            seen.extend(stream.text_stream)
        assert caught.error.body["error"]["code"] == "upstream_broken"
        assert seen


@scenario
def what_became_known_late_is_in_a_comment_before_the_end() -> None:
    with client.messages.with_streaming_response.create(model="claude", stream=True, **ASKED) as streamed:
        assert streamed.headers["x-tollbridge-route"] == "messages/sim-fast"
        lines = [line for line in streamed.iter_lines() if line]
    at = next(place for place, line in enumerate(lines) if line.startswith(": tollbridge "))
    assert float(json.loads(lines[at].removeprefix(": tollbridge "))["cost_usd"]) > 0
    assert lines[at + 1 :][0] == "event: message_stop"


@scenario
def who_leaves_in_the_middle_frees_the_slot() -> None:
    provider("faults", {"pace": 0.2, "chunks": 100}, model="sim-fast")
    with client.messages.stream(model="claude", **ASKED) as stream:
        next(iter(stream.text_stream))
        assert occupied() == 1
    until(lambda: occupied() == 0)
    until(lambda: provider("ledger")["active"] == 0)


if __name__ == "__main__":
    main("anthropic", alone=True)
