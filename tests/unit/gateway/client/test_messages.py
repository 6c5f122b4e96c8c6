"""What a program has at hand becomes a request, and what is not understood is refused with its path."""

from __future__ import annotations

import base64
from decimal import Decimal
from typing import Any

import pytest

from gateway.client import InvalidRequest
from gateway.client.messages import Parameters, request_of
from gateway.rpc.codec import decode_request
from protos.tollbridge.v1 import gateway_pb2 as pb

PNG = base64.b64encode(b"png").decode()


def test_every_field_of_the_contract_is_a_parameter() -> None:
    named = {"class" if name == "klass" else name for name in Parameters.__annotations__}
    assert named == {field.name for field in pb.CompletionRequest.DESCRIPTOR.fields} - {"messages"}


def test_a_question_is_one_message_of_the_user() -> None:
    assert request_of("Hello?", {"model": "m"}) == pb.CompletionRequest(
        model="m", messages=[pb.Message(role="user", text="Hello?")]
    )


def test_messages_in_openais_shape_are_those_of_the_contract() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    request = request_of(
        [
            {"role": "system", "content": "Be brief."},
            {
                "role": "user",
                "name": "ann",
                "content": [
                    {"type": "text", "text": "What is it?", "cache": "5m"},
                    {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PNG}", "detail": "low"}},
                    {"type": "image_url", "image_url": {"url": "https://example.org/a.png"}},
                    {"type": "input_audio", "input_audio": {"data": PNG, "format": "wav"}},
                    {"type": "file", "file": {"file_data": f"data:application/pdf;base64,{PNG}", "filename": "a.pdf"}},
                    {"type": "file", "file": {"file_id": "file-1"}},
                    pb.Part(text="Well?"),
                ],
            },
            {"role": "assistant", "content": None, "tool_calls": [call, pb.ToolCall(id="c2", name="g")]},
            {"role": "tool", "tool_call_id": "c1", "content": "no", "is_error": True},
            pb.Message(role="user", text="Go on."),
        ],
        {},
    )
    parts = [
        pb.Part(text="What is it?", cache="5m"),
        pb.Part(image=pb.Image(data=b"png", media_type="image/png", detail="low")),
        pb.Part(image=pb.Image(url="https://example.org/a.png")),
        pb.Part(audio=pb.Audio(data=b"png", format="wav")),
        pb.Part(document=pb.Document(data=b"png", media_type="application/pdf", filename="a.pdf")),
        pb.Part(document=pb.Document(file_id="file-1")),
        pb.Part(text="Well?"),
    ]
    assert list(request.messages) == [
        pb.Message(role="system", text="Be brief."),
        pb.Message(role="user", name="ann", parts=pb.Parts(parts=parts)),
        pb.Message(
            role="assistant",
            tool_calls=[pb.ToolCall(id="c1", name="f", arguments="{}"), pb.ToolCall(id="c2", name="g")],
        ),
        pb.Message(role="tool", tool_call_id="c1", text="no", is_error=True),
        pb.Message(role="user", text="Go on."),
    ]


def test_every_parameter_reaches_the_gateway() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer", "maximum": 5}}}
    given: dict[str, Any] = {
        "model": "m",
        "temperature": 0.5,
        "stop": ["x"],
        "logit_bias": {"1": 2},
        "extra": {"seen": [1, None, True]},
        "tools": [
            {"type": "function", "function": {"name": "f", "parameters": schema, "strict": True}, "cache": "1h"},
            pb.Tool(name="g"),
        ],
        "tool_choice": {"type": "function", "function": {"name": "f"}},
        "response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": schema, "strict": False}},
        "tags": {"team": "blue"},
        "klass": "batch",
        "max_cost_usd": Decimal("1E-3"),
        "allowed_providers": ("a", "b"),
        "resend_uncertain": "before_first_byte",
        "order": "cost",
        "unsupported": "drop",
        "allow_failover": False,
    }
    asked = decode_request(request_of("Hello?", given))
    assert (asked.options.klass.name, asked.options.order, asked.options.unsupported) == ("BATCH", "cost", "drop")
    assert (asked.options.resend_uncertain, asked.options.allow_failover) == ("before_first_byte", False)
    assert (asked.options.max_cost_usd, asked.options.allowed_providers) == (Decimal("0.001"), ("a", "b"))
    assert asked.options.tags == {"team": "blue"}
    assert [(tool.name, tool.strict, tool.cache) for tool in asked.chat.tools] == [("f", True, "1h"), ("g", None, None)]
    assert bytes(asked.chat.tools[0].parameters or b"") == (
        b'{"properties":{"a":{"maximum":5,"type":"integer"}},"type":"object"}'
    )
    assert asked.chat.tool_choice is not None
    assert asked.chat.tool_choice.tool == "f"
    assert asked.chat.response_format is not None
    assert (asked.chat.response_format.name, asked.chat.response_format.strict) == ("s", False)
    assert bytes(asked.chat.extra["seen"]) == b"[1,null,true]"
    assert (asked.chat.stop, asked.chat.logit_bias, asked.chat.temperature) == (("x",), {"1": 2.0}, 0.5)


@pytest.mark.parametrize("word", ["auto", "none", "required"])
def test_a_tool_choice_may_be_a_word(word: str) -> None:
    chosen = decode_request(request_of("Hello?", {"model": "m", "tool_choice": word})).chat.tool_choice
    assert chosen is not None
    assert chosen.mode == word


USER = {"role": "user", "content": "Hello?"}


REFUSED: list[tuple[Any, dict[str, Any], str, str]] = [
    ([{**USER, "contents": 1}], {}, "messages[0].contents", "unsupported_field"),
    ([USER, {"role": "user", "content": 7}], {}, "messages[1].content", "invalid_request"),
    (["Hello?"], {}, "messages[0]", "invalid_request"),
    ([{"role": "user", "content": [{"type": "video"}]}], {}, "messages[0].content[0].type", "invalid_request"),
    ([{"role": "user", "content": [{"text": "a"}]}], {}, "messages[0].content[0].type", "invalid_request"),
    (
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png,x"}}]}],
        {},
        "messages[0].content[0].image_url.url",
        "invalid_request",
    ),
    (
        [{"role": "user", "content": [{"type": "input_audio", "input_audio": {"data": "?", "format": "wav"}}]}],
        {},
        "messages[0].content[0].input_audio.data",
        "invalid_request",
    ),
    (
        [{"role": "user", "content": [{"type": "file", "file": {"file_data": "abc"}}]}],
        {},
        "messages[0].content[0].file.file_data",
        "invalid_request",
    ),
    (
        [{"role": "assistant", "tool_calls": [{"id": "1", "type": "custom"}]}],
        {},
        "messages[0].tool_calls[0].type",
        "invalid_request",
    ),
    ([USER], {"temprature": 1}, "temprature", "unsupported_field"),
    ([USER], {"temperature": "hot"}, "temperature", "invalid_request"),
    ([USER], {"max_output_tokens": 2.5}, "max_output_tokens", "invalid_request"),
    ([USER], {"stop": "end"}, "stop", "invalid_request"),
    ([USER], {"tags": {"a": 1}}, "tags", "invalid_request"),
    ([USER], {"order": "best"}, "order", "invalid_request"),
    ([USER], {"resend_uncertain": "always"}, "resend_uncertain", "invalid_request"),
    ([USER], {"klass": "first"}, "klass", "invalid_request"),
    ([USER], {"tool_choice": "some"}, "tool_choice", "invalid_request"),
    ([USER], {"tools": [{"type": "web_search"}]}, "tools[0].type", "invalid_request"),
    ([USER], {"tools": [{"function": {"name": "f", "x": 1}}]}, "tools[0].function.x", "unsupported_field"),
    ([USER], {"extra": {"a": [2**53 + 1]}}, "extra", "invalid_request"),
    ([USER], {"extra": {"a": object()}}, "extra", "invalid_request"),
    ([USER], {"response_format": {"type": "yaml"}}, "response_format.type", "invalid_request"),
    (
        [USER],
        {"response_format": {"type": "json_schema", "json_schema": {"name": "s"}}},
        "response_format.json_schema.schema",
        "invalid_request",
    ),
]


@pytest.mark.parametrize(
    ("messages", "parameters", "param", "code"),
    REFUSED,
    ids=[f"{number}-{case[2]}" for number, case in enumerate(REFUSED)],
)
def test_what_is_not_understood_is_refused_with_its_path(
    messages: Any, parameters: dict[str, Any], param: str, code: str
) -> None:
    with pytest.raises(InvalidRequest) as failed:
        request_of(messages, parameters)
    assert (failed.value.param, failed.value.code, failed.value.status) == (param, code, "none")
    assert (failed.value.dispatched, failed.value.attempts) == (False, 0)


@pytest.mark.parametrize(("name", "meant"), [("max_tokens", "max_output_tokens"), ("user", "end_user")])
def test_a_vendor_s_name_of_a_parameter_is_told_ours(name: str, meant: str) -> None:
    with pytest.raises(InvalidRequest, match=f"no such parameter: {meant} is meant"):
        request_of("Hello?", {name: 5})


@pytest.mark.parametrize(
    ("name", "word", "known"),
    [
        ("order", "x", "priority, cost, latency, weighted"),
        ("resend_uncertain", "x", "never, before_first_byte"),
        ("klass", "x", "interactive, batch"),
        ("unsupported", "x", "refuse, drop"),
        ("tool_choice", "x", "auto, none, required"),
    ],
)
def test_a_wrong_word_is_told_the_right_ones(name: str, word: str, known: str) -> None:
    with pytest.raises(InvalidRequest, match=f"one of {known} is needed"):
        request_of("Hello?", {name: word})
