from __future__ import annotations

import json
from typing import Any

import pytest

from adapters.simulator import content, requests, tokens
from adapters.simulator.content import Answer, Shape

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]}},
            "required": ["city"],
        },
    },
}
TIME = {
    "type": "function",
    "function": {
        "name": "get_time",
        "parameters": {"type": "object", "properties": {"zone": {"type": "string"}}, "required": ["zone"]},
    },
}


def ask(
    question: str = "How do I plan a database migration?", *, shape: Shape = content.PLAIN, **fields: Any
) -> Answer:
    messages = [{"role": "user", "content": question}]
    request, _ = requests.parse(json.dumps({"model": "m", "messages": messages, **fields}).encode())
    return content.answer(request, "m", shape)


def text(answer: Answer, choice: int = 0) -> str:
    return answer.choices[choice].text("text")


def calls(answer: Answer) -> list[tuple[str, Any]]:
    return [(name, json.loads(arguments)) for _, name, arguments in answer.choices[0].calls()]


def test_the_same_request_gets_the_same_answer_and_another_seed_may_get_another() -> None:
    assert ask() == ask()
    assert len({text(ask(seed=seed)) for seed in range(8)}) > 1


def test_text_in_parts_is_the_same_question() -> None:
    parts = [{"type": "text", "text": "How do I plan "}, {"type": "text", "text": "a database migration?"}]
    assert text(ask(messages=[{"role": "user", "content": parts}])) == text(ask())


def test_the_answer_speaks_of_the_question() -> None:
    assert "migration" in text(ask())
    assert "🗼" in text(ask("Is \u2028 a separator? 🗼"))


def test_the_system_message_has_influence() -> None:
    user = {"role": "user", "content": "How do I plan a database migration?"}
    brief = text(ask(messages=[{"role": "system", "content": "Be brief."}, user]))
    assert "Be brief." in brief
    assert "1." not in brief
    assert "1." in text(ask(messages=[{"role": "developer", "content": "Be kind."}, user]))


def test_each_choice_is_an_answer_of_its_own() -> None:
    answer = ask(n=4)
    assert len({text(answer, index) for index in range(4)}) > 1
    assert answer.completion_tokens == sum(tokens.count(text(answer, index)) for index in range(4))


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
@pytest.mark.parametrize("limit", [1, 2, 17])
def test_an_answer_is_cut_at_exactly_the_limit(field: str, limit: int) -> None:
    fields: dict[str, Any] = {field: limit}
    answer = ask(**fields)
    assert answer.choices[0].finish_reason == "length"
    assert answer.completion_tokens == tokens.count(text(answer)) == limit
    assert text(ask()).startswith(text(answer))


def test_an_answer_that_fits_is_not_cut() -> None:
    whole = ask()
    assert ask(max_tokens=whole.completion_tokens) == whole
    assert whole.choices[0].finish_reason == "stop"


@pytest.mark.parametrize("stop", ["migration", ["nowhere to be found", "\n"]])
def test_an_answer_ends_before_the_first_stop_sequence(stop: Any) -> None:
    said = text(ask(stop=stop))
    assert text(ask()).startswith(said)
    assert "migration" not in said if stop == "migration" else "\n" not in said
    assert ask(stop=stop).choices[0].finish_reason == "stop"


def test_a_tool_is_called_with_what_the_question_names() -> None:
    answer = ask("What is the weather in Paris?", tools=[TIME, WEATHER])
    assert calls(answer) == [("get_weather", {"city": "Paris", "unit": "celsius"})] or calls(answer) == [
        ("get_weather", {"city": "Paris", "unit": "fahrenheit"})
    ]
    assert answer.choices[0].finish_reason == "tool_calls"
    arguments = next(arguments for _, _, arguments in answer.choices[0].calls())
    assert answer.completion_tokens == 1 + tokens.count(arguments)


def test_tools_are_called_in_parallel_unless_that_is_forbidden() -> None:
    question = "Compare the weather in Paris and in San Francisco."
    assert [arguments["city"] for _, arguments in calls(ask(question, tools=[WEATHER]))] == ["Paris", "San Francisco"]
    assert len(calls(ask(question, tools=[WEATHER], parallel_tool_calls=False))) == 1
    both = calls(ask("Tell me the time and the weather in Rome", tools=[TIME, WEATHER]))
    assert {name for name, _ in both} == {"get_time", "get_weather"}


@pytest.mark.parametrize(
    ("choice", "names"),
    [
        ("none", []),
        ("auto", ["get_weather"]),
        ("required", ["get_weather"]),
        ({"type": "function", "function": {"name": "get_time"}}, ["get_time"]),
        ({"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [TIME]}}, ["get_time"]),
    ],
)
def test_the_tool_choice_is_obeyed(choice: Any, names: list[str]) -> None:
    answer = ask("Weather in Paris?", tools=[WEATHER, TIME], tool_choice=choice)
    assert [name for name, _ in calls(answer)] == names


def test_the_results_of_tools_are_answered_in_words() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": "{}"}}
    messages = [
        {"role": "user", "content": "Weather in Paris?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "18 degrees and sunny"},
    ]
    answer = ask(messages=messages, tools=[WEATHER])
    assert "get_weather returned: 18 degrees and sunny" in text(answer)


def test_structured_output_satisfies_its_schema() -> None:
    schema = {
        "type": "object",
        "properties": {"title": {"type": "string"}, "points": {"type": "array", "items": {"type": "integer"}}},
        "required": ["title", "points"],
    }
    said = json.loads(
        text(ask(response_format={"type": "json_schema", "json_schema": {"name": "plan", "schema": schema}}))
    )
    assert isinstance(said["title"], str)
    assert all(isinstance(point, int) for point in said["points"])
    assert isinstance(json.loads(text(ask(response_format={"type": "json_object"}))), dict)


@pytest.mark.parametrize("chunks", [1, 7, 60, 500, 4001])
def test_so_many_chunks_are_so_many_tokens(chunks: int) -> None:
    answer = ask(shape=Shape(chunks=chunks))
    assert answer.completion_tokens == chunks == tokens.count(text(answer))


@pytest.mark.parametrize("size", [1, 2, 16_384, 16_385, 100_003])
def test_a_huge_answer_has_its_size(size: int) -> None:
    answer = ask(shape=Shape(huge=size))
    assert len(text(answer)) == size
    assert answer.completion_tokens == tokens.count(text(answer))


def test_reasoning_counts_within_the_output_and_its_limit() -> None:
    answer = ask(shape=Shape(reasoning=30))
    assert answer.reasoning_tokens == 30
    assert answer.completion_tokens == 30 + tokens.count(text(answer))
    cut = ask(shape=Shape(reasoning=30), max_completion_tokens=12)
    assert (cut.reasoning_tokens, cut.completion_tokens, text(cut)) == (12, 12, "")
