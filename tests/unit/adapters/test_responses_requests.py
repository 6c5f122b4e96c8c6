"""Requests of Responses, in and out."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from adapters.chat import (
    Audio,
    ChatRequest,
    ChatResponse,
    Choice,
    Document,
    Image,
    Message,
    NativeRequest,
    Opaque,
    Reasoning,
    ResponseFormat,
    Role,
    StopReason,
    Text,
    Tool,
    ToolCall,
    ToolChoice,
)
from adapters.contract import Endpoint, HttpRequest, UpstreamCall
from adapters.errors import MalformedRequest, RequestNotExpressible
from adapters.protocols import PROTOCOLS
from adapters.protocols.responses import Responses, envelope

PROTOCOL = Responses()


def parse(**fields: object) -> ChatRequest:
    return PROTOCOL.parse_request(json.dumps({"input": "hi", **fields}).encode())


def sent(request: ChatRequest, *, stream: bool = False, **endpoint: object) -> HttpRequest:
    target = Endpoint(provider="p", protocol="responses", base_url="http://h/v1", **endpoint)  # type: ignore[arg-type]
    call = UpstreamCall(endpoint=target, model="upstream-model", request=request, deadline=0)
    return PROTOCOL.render_request(call, stream=stream)


def render(request: ChatRequest, *, stream: bool = False, **endpoint: object) -> dict[str, Any]:
    rendered = sent(request, stream=stream, **endpoint)
    assert rendered.path == "/responses"
    content = json.loads(rendered.body)
    assert isinstance(content, dict)
    return content


def chat(*messages: Message, **fields: object) -> ChatRequest:
    return ChatRequest(messages=messages, **fields)  # type: ignore[arg-type]


def unmapped(request: ChatRequest) -> tuple[str, ...]:
    assert request.native is not None
    return request.native.unmapped


def items(*messages: Message, **endpoint: Any) -> list[dict[str, Any]]:
    found = render(chat(USER, *messages), **endpoint)["input"]
    assert isinstance(found, list)
    return found[1:]


USER = Message(role=Role.USER, content=(Text(text="hi"),))
THOUGHT = {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "gAAA"}
CALL = {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "f", "arguments": "{}", "status": "completed"}


# -------------------------------------------------------------------- reading


def test_a_request_is_read_into_the_canonical_form():
    schema = {"type": "object", "properties": {}}
    request = parse(
        model="m",
        instructions="be brief",
        input=[
            {"role": "developer", "content": "be kind"},
            {
                "role": "user",
                "content": [
                    {"type": "input_text", "text": "see", "prompt_cache_breakpoint": {"mode": "explicit"}},
                    {"type": "input_image", "image_url": "data:image/gif;base64,R0lG", "detail": "low"},
                    {"type": "input_image", "image_url": "https://h/i.png"},
                    {"type": "input_image", "file_id": "file-1"},
                    {"type": "input_file", "file_id": "file-2"},
                    {"type": "input_file", "file_url": "https://h/d.pdf"},
                    {"type": "input_file", "filename": "a.pdf", "file_data": "data:application/pdf;base64,JVBE"},
                ],
            },
        ],
        tools=[{"type": "function", "name": "f", "description": "d", "parameters": schema, "strict": True}],
        tool_choice={"type": "function", "name": "f"},
        parallel_tool_calls=False,
        text={"format": {"type": "json_schema", "name": "n", "schema": schema, "strict": True}, "verbosity": "low"},
        reasoning={"effort": "high", "summary": "auto"},
        max_output_tokens=9,
        temperature=0.5,
        top_p=1,
        top_logprobs=2,
        include=["reasoning.encrypted_content", "message.output_text.logprobs"],
        store=False,
        metadata={"a": "b"},
        prompt_cache_key="k",
        service_tier="flex",
        safety_identifier="me",
        truncation="disabled",
        background=False,
        previous_response_id=None,
    )
    raw = msgspec.Raw(json.dumps(schema).encode())
    assert request == ChatRequest(
        messages=(
            Message(role=Role.SYSTEM, content=(Text(text="be brief"),)),
            Message(role=Role.DEVELOPER, content=(Text(text="be kind"),)),
            Message(
                role=Role.USER,
                content=(
                    Text(text="see", cache="5m"),
                    Image(data=b"GIF", media_type="image/gif", detail="low"),
                    Image(url="https://h/i.png"),
                    Opaque(protocol="responses", raw=msgspec.Raw(b'{"type": "input_image", "file_id": "file-1"}')),
                    Document(file_id="file-2"),
                    Document(url="https://h/d.pdf"),
                    Document(data=b"%PD", media_type="application/pdf", filename="a.pdf"),
                ),
            ),
        ),
        tools=(Tool(name="f", description="d", parameters=raw, strict=True),),
        tool_choice=ToolChoice(mode="tool", tool="f"),
        parallel_tool_calls=False,
        response_format=ResponseFormat(kind="json_schema", name="n", schema=raw, strict=True),
        max_output_tokens=9,
        temperature=0.5,
        top_p=1.0,
        logprobs=True,
        top_logprobs=2,
        reasoning_effort="high",
        verbosity="low",
        service_tier="flex",
        prompt_cache_key="k",
        store=False,
        metadata={"a": "b"},
        end_user="me",
        native=request.native,
        paths=request.paths,
    )
    assert unmapped(request) == ()


def test_what_a_model_said_in_one_turn_is_one_message_right_before_the_results():
    request = parse(
        input=[
            {"role": "user", "content": "hi"},
            {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "Hm."}]},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Wait."}]},
            CALL,
            THOUGHT,
            {**CALL, "call_id": "c2"},
            {"type": "function_call_output", "call_id": "c1", "output": "1"},
            {
                "type": "function_call_output",
                "call_id": "c2",
                "output": [{"type": "input_image", "image_url": "https://h/i.png"}],
            },
        ]
    )
    assert request.messages == (
        USER,
        Message(
            role=Role.ASSISTANT,
            content=(Text(text="Wait."),),
            reasoning=(
                Reasoning(text="Hm.", id="rs_1"),
                Reasoning(signature="responses:gAAA", redacted=True, id="rs_1"),
            ),
            tool_calls=(ToolCall(id="c1", name="f", arguments="{}"), ToolCall(id="c2", name="f", arguments="{}")),
        ),
        Message(role=Role.TOOL, tool_call_id="c1", content=(Text(text="1"),)),
        Message(role=Role.TOOL, tool_call_id="c2", content=(Image(url="https://h/i.png"),)),
    )


def test_two_texts_of_an_assistant_are_two_messages():
    said = {"type": "message", "role": "assistant", "phase": "commentary", "id": "msg_1", "status": "completed"}
    request = parse(
        input=[
            {**said, "content": [{"type": "output_text", "text": "One.", "annotations": []}]},
            THOUGHT,
            {**said, "content": [{"type": "refusal", "refusal": "No."}]},
        ]
    )
    assert request.messages == (
        Message(role=Role.ASSISTANT, content=(Text(text="One."),)),
        Message(
            role=Role.ASSISTANT,
            refusal="No.",
            reasoning=(Reasoning(signature="responses:gAAA", redacted=True, id="rs_1"),),
        ),
    )
    assert unmapped(request) == ()


def test_parts_of_a_summary_are_one_text():
    parts = [{"type": "summary_text", "text": "One."}, {"type": "summary_text", "text": "Two."}]
    (message,) = parse(input=[{"type": "reasoning", "summary": parts}]).messages
    assert message.reasoning == (Reasoning(text="One.\n\nTwo."),)


@pytest.mark.parametrize(
    ("fields", "path"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": {"id": "c"}}, "conversation"),
        ({"background": True}, "background"),
        ({"truncation": "auto"}, "truncation"),
        ({"include": ["file_search_call.results"]}, "include"),
        ({"reasoning": {"effort": "low", "context": "all_turns"}}, "reasoning.context"),
        ({"text": {"format": {"type": "grammar"}}}, "text.format"),
        ({"text": {"style": "odd"}}, "text.style"),
        ({"tools": [{"type": "web_search"}]}, "tools[0]"),
        ({"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []}}, "tool_choice"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0]"),
        ({"input": [{"type": "computer_call", "call_id": "c"}]}, "input[0]"),
        ({"max_tool_calls": 3}, "max_tool_calls"),
        ({"of_the_future": 1}, "of_the_future"),
    ],
)
def test_what_the_canonical_form_does_not_carry_is_named_and_refused_by_other_protocols(fields, path):
    request = parse(**fields)
    assert unmapped(request) == (path,)
    foreign = msgspec.structs.replace(
        request, native=NativeRequest(protocol="other", fields={}, unmapped=unmapped(request))
    )
    with pytest.raises(RequestNotExpressible) as caught:
        sent(foreign)
    assert caught.value.path == path
    assert sent(foreign, omit=frozenset({path})).dropped == (path,)


@pytest.mark.parametrize(
    ("fields", "path"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"input": [{"role": "user", "content": "hi"}, {"type": "item_reference", "id": "msg_1"}]}, "input[1]"),
    ],
)
@pytest.mark.parametrize("provider", [name for name in PROTOCOLS if name != "responses"])
def test_what_only_its_own_provider_could_look_up_is_refused_with_what_to_do_instead(fields, path, provider):
    endpoint = Endpoint(provider="p", protocol=provider, base_url="")
    call = UpstreamCall(endpoint=endpoint, model="m", request=parse(**fields), deadline=0)
    with pytest.raises(RequestNotExpressible) as caught:
        PROTOCOLS[provider].render_request(call, stream=False)
    assert caught.value.path == path
    assert "answers are not kept here" in caught.value.reason
    assert "`store` to false" in caught.value.reason


@pytest.mark.parametrize("instead", ["previous_response_id", "conversation", "prompt"])
def test_what_is_kept_at_the_provider_may_stand_for_the_input(instead):
    body = json.dumps({instead: {"id": "x"} if instead != "previous_response_id" else "x"}).encode()
    assert PROTOCOL.parse_request(body).messages == ()


@pytest.mark.parametrize(
    ("fields", "path"),
    [
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": 5}, "input"),
        ({"input": ["x"]}, "input[0]"),
        ({"input": [{}]}, "input[0].type"),
        ({"input": [{"type": 5}]}, "input[0].type"),
        ({"input": [{"role": "tool", "content": ""}]}, "input[0].role"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input[0].content[0].text"),
        ({"input": [{"role": "user", "content": [{"type": "refusal"}]}]}, "input[0].content[0].refusal"),
        ({"input": [{"role": "user", "content": [{"type": "refusal", "refusal": "x"}]}]}, "input[0].content"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0]"),
        ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, "input[0].content[0]"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "data:x"}]}]},
            "input[0].content[0].image_url",
        ),
        (
            {"input": [{"role": "user", "content": [{"type": "input_file", "file_data": "%"}]}]},
            "input[0].content[0].file_data",
        ),
        ({"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]}, "input[0].call_id"),
        ({"input": [{"type": "function_call_output", "call_id": "c"}]}, "input[0].output"),
        ({"input": [{"type": "reasoning", "summary": "x"}]}, "input[0].summary"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"tools": [5]}, "tools[0]"),
        ({"tool_choice": {"type": "function"}}, "tool_choice.name"),
        ({"tool_choice": "any"}, "tool_choice"),
        ({"text": {"format": {"type": "json_schema", "name": "n"}}}, "text.format.schema"),
        ({"text": 5}, "text"),
        ({"reasoning": {"effort": 5}}, "reasoning.effort"),
        ({"max_output_tokens": -1}, "max_output_tokens"),
        ({"metadata": {"a": 1}}, "metadata[...]"),
        ({"model": ""}, "model"),
    ],
)
def test_a_malformed_request_is_refused_with_the_path_of_the_field(fields, path):
    with pytest.raises(MalformedRequest) as caught:
        parse(**fields)
    assert caught.value.path == path


def test_a_refusal_repeats_none_of_the_content():
    with pytest.raises(MalformedRequest) as caught:
        parse(input=[{"role": "SECRET", "content": "SECRET"}])
    assert "SECRET" not in str(caught.value)


def test_the_envelope_says_model_and_stream_and_usage_is_always_told():
    asked = envelope(parse(model="m", stream=True))
    assert (asked.model, asked.stream, asked.include_usage) == ("m", True, True)
    bare = envelope(parse())
    assert (bare.model, bare.stream) == (None, False)


# -------------------------------------------------------------------- native


def test_a_native_request_passes_untouched_but_for_model_and_stream():
    body = (
        b'{"model":"x","input":[{"type":"item_reference","id":"msg_1"}],"future":{"a" : 1.50},"stream":true,'
        b'"stream_options":{"include_obfuscation":false},"reasoning":{"effort":"low"},"previous_response_id":"r"}'
    )
    request = PROTOCOL.parse_request(body)
    rendered = sent(request, stream=True)
    assert rendered.headers["accept"] == "text/event-stream"
    assert rendered.dropped == ()
    assert b'{"a" : 1.50}' in rendered.body
    assert json.loads(rendered.body) == {**json.loads(body), "model": "upstream-model"}
    plain = json.loads(sent(request).body)
    assert "stream" not in plain
    assert "stream_options" not in plain


def test_a_native_request_keeps_the_default_of_its_api_for_what_is_stored():
    assert "store" not in render(parse())
    assert render(parse(), force={"store": msgspec.Raw(b"false")})["store"] is False


def test_what_the_profile_says_changes_a_native_request_and_is_told():
    request = parse(
        input=[
            {**THOUGHT, "id": "rs_made_resp_1_0"},
            {**CALL, "signature": "s"},
            {
                "role": "user",
                "content": [{"type": "input_text", "text": "x", "prompt_cache_breakpoint": {"mode": "explicit"}}],
            },
        ],
        reasoning={"effort": "low"},
        temperature=1,
        metadata={"a": "b"},
    )
    rendered = sent(
        request,
        omit=frozenset({"messages.reasoning", "messages.cache", "temperature", "metadata"}),
        force={"metadata": msgspec.Raw(b"{}")},
        reasoning="off",
    )
    assert json.loads(rendered.body) == {
        "model": "upstream-model",
        "input": [CALL, {"role": "user", "content": [{"type": "input_text", "text": "x"}]}],
        "metadata": {},
    }
    assert rendered.dropped == (
        "reasoning",
        "input[2].content[0].prompt_cache_breakpoint",
        "input[0]",
        "input[1].signature",
        "metadata",
        "temperature",
    )


def test_a_profile_that_takes_no_reasoning_back_still_gets_its_own_from_a_native_request():
    own = [THOUGHT, {"type": "reasoning", "id": "rs_stored", "summary": []}, {**THOUGHT, "id": None}]
    foreign = [
        {**THOUGHT, "id": "rs_made_x_0"},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Hm."}]},
    ]
    rendered = sent(parse(input=[*own, *foreign]), omit=frozenset({"messages.reasoning"}))
    assert json.loads(rendered.body)["input"] == own
    assert rendered.dropped == ("input[3]", "input[4]")


def test_no_provider_is_asked_to_answer_in_the_background():
    for stream in (False, True):
        with pytest.raises(RequestNotExpressible) as caught:
            render(parse(background=True), stream=stream)
        assert caught.value.path == "background"
    dropped = sent(parse(background=True), omit=frozenset({"background"}))
    assert "background" not in json.loads(dropped.body)
    assert dropped.dropped == ("background",)


# ------------------------------------------------------------------ canonical


def test_a_canonical_request_is_written_in_full():
    schema = msgspec.Raw(b'{"type":"object"}')
    request = chat(
        Message(role=Role.SYSTEM, content=(Text(text="be brief"),)),
        Message(role=Role.SYSTEM, content=(Text(text="be kind"),)),
        Message(
            role=Role.USER,
            content=(
                Text(text="see", cache="1h"),
                Image(data=b"GIF", media_type="image/gif"),
                Image(url="https://h/i.png", detail="low", cache="5m"),
                Document(data=b"%PD", media_type="application/pdf"),
                Document(url="https://h/d.pdf"),
                Document(file_id="f"),
                Opaque(protocol="responses", raw=msgspec.Raw(b'{"type":"input_image","file_id":"f"}')),
            ),
        ),
        Message(
            role=Role.ASSISTANT,
            content=(Text(text="Wait."),),
            reasoning=(
                Reasoning(text="Hm.", signature="responses:s", id="rs_1"),
                Reasoning(signature="responses:e", redacted=True),
            ),
            tool_calls=(ToolCall(id="c1", name="f", arguments="{"),),
        ),
        Message(role=Role.TOOL, tool_call_id="c1", content=(Text(text="1"),)),
        Message(role=Role.ASSISTANT, content=(Text(text="a"), Text(text="b")), refusal="No."),
        tools=(Tool(name="f", description="d", parameters=schema), Tool(name="g", strict=True)),
        tool_choice=ToolChoice(mode="required"),
        parallel_tool_calls=True,
        response_format=ResponseFormat(kind="json_schema", schema=schema, description="d"),
        verbosity="low",
        max_output_tokens=9,
        temperature=0.5,
        top_p=0.9,
        logprobs=True,
        top_logprobs=2,
        reasoning_effort="low",
        service_tier="flex",
        prompt_cache_key="k",
        metadata={"a": "b"},
        end_user="me",
        n=1,
        presence_penalty=0.0,
        extra={"moderation": msgspec.Raw(b"1")},
    )
    assert render(request) == {
        "model": "upstream-model",
        "instructions": "be brief",
        "input": [
            {"type": "message", "role": "system", "content": "be kind"},
            {
                "type": "message",
                "role": "user",
                "content": [
                    {
                        "type": "input_text",
                        "text": "see",
                        "prompt_cache_breakpoint": {"mode": "explicit", "ttl": "12h"},
                    },
                    {"type": "input_image", "image_url": "data:image/gif;base64,R0lG", "detail": "auto"},
                    {
                        "type": "input_image",
                        "image_url": "https://h/i.png",
                        "detail": "low",
                        "prompt_cache_breakpoint": {"mode": "explicit", "ttl": "30m"},
                    },
                    {
                        "type": "input_file",
                        "filename": "document.pdf",
                        "file_data": "data:application/pdf;base64,JVBE",
                    },
                    {"type": "input_file", "file_url": "https://h/d.pdf"},
                    {"type": "input_file", "file_id": "f"},
                    {"type": "input_image", "file_id": "f"},
                ],
            },
            {
                "type": "reasoning",
                "id": "rs_1",
                "summary": [{"type": "summary_text", "text": "Hm."}],
                "encrypted_content": "s",
            },
            {"type": "reasoning", "summary": [], "encrypted_content": "e"},
            {"type": "message", "role": "assistant", "content": "Wait."},
            {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{"},
            {"type": "function_call_output", "call_id": "c1", "output": "1"},
            {
                "type": "message",
                "role": "assistant",
                "content": [
                    {"type": "output_text", "text": "a"},
                    {"type": "output_text", "text": "b"},
                    {"type": "refusal", "refusal": "No."},
                ],
            },
        ],
        "tools": [
            {"type": "function", "name": "f", "description": "d", "parameters": {"type": "object"}, "strict": False},
            {"type": "function", "name": "g", "parameters": {"type": "object", "properties": {}}, "strict": True},
        ],
        "tool_choice": "required",
        "parallel_tool_calls": True,
        "text": {
            "format": {"type": "json_schema", "name": "response", "description": "d", "schema": {"type": "object"}},
            "verbosity": "low",
        },
        "max_output_tokens": 9,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_logprobs": 2,
        "reasoning": {"effort": "low"},
        "service_tier": "flex",
        "prompt_cache_key": "k",
        "metadata": {"a": "b"},
        "safety_identifier": "me",
        "include": ["message.output_text.logprobs", "reasoning.encrypted_content"],
        "store": False,
        "moderation": 1,
    }


@pytest.mark.parametrize(
    ("fields", "path"),
    [
        ({"top_k": 1}, "top_k"),
        ({"stop": ("x",)}, "stop"),
        ({"seed": 0}, "seed"),
        ({"n": 2}, "n"),
        ({"presence_penalty": 0.5}, "presence_penalty"),
        ({"frequency_penalty": -0.5}, "frequency_penalty"),
        ({"logit_bias": {"1": 1.0}}, "logit_bias"),
    ],
)
def test_what_has_no_word_here_is_refused_by_its_path_or_dropped_and_told(fields, path):
    with pytest.raises(RequestNotExpressible) as caught:
        sent(chat(USER, **fields))
    assert caught.value.path == path
    rendered = sent(chat(USER, **fields), omit=frozenset({path}))
    assert rendered.dropped == (path,)
    assert json.loads(rendered.body) == {
        "model": "upstream-model",
        "input": [{"type": "message", "role": "user", "content": "hi"}],
        "store": False,
    }


@pytest.mark.parametrize(
    ("message", "path", "omit"),
    [
        (Message(role=Role.USER, name="ann", content=(Text(text="x"),)), "messages[1].name", "messages.name"),
        (
            Message(role=Role.ASSISTANT, content=(Text(text="x", cache="5m"),)),
            "messages[1].content[0].cache",
            "messages.cache",
        ),
        (Message(role=Role.USER, content=(Audio(data=b"", format="wav"),)), "messages[1].content[0]", None),
        (Message(role=Role.SYSTEM, content=(Image(url="https://h"),)), "messages[1].content[0]", None),
        (
            Message(role=Role.USER, content=(Opaque(protocol="other", raw=msgspec.Raw(b"{}")),)),
            "messages[1].content[0]",
            None,
        ),
    ],
)
def test_what_a_message_cannot_hold_here_is_refused_by_its_path(message, path, omit):
    with pytest.raises(RequestNotExpressible) as caught:
        sent(chat(USER, message))
    assert caught.value.path == path
    if omit is not None:
        assert sent(chat(USER, message), omit=frozenset({omit})).dropped == (path,)


def test_the_signature_of_a_call_is_dropped_and_told():
    call = ToolCall(id="c", name="f", arguments="", signature="s")
    request = sent(chat(USER, Message(role=Role.ASSISTANT, tool_calls=(call,))))
    assert request.dropped == ("messages[1].tool_calls[0].signature",)
    assert "signature" not in json.loads(request.body)["input"][1]


def test_the_name_of_a_tool_on_its_result_says_no_more_than_the_call_does():
    (result,) = items(Message(role=Role.TOOL, name="f", tool_call_id="c1", content=(Text(text="1"),)))
    assert result == {"type": "function_call_output", "call_id": "c1", "output": "1"}


def test_a_cache_boundary_after_a_tool_is_refused():
    with pytest.raises(RequestNotExpressible) as caught:
        sent(chat(USER, tools=(Tool(name="f", cache="5m"),)))
    assert caught.value.path == "tools[0].cache"


def test_nothing_is_stored_at_a_provider_unless_it_was_asked_for():
    assert render(chat(USER))["store"] is False
    assert render(chat(USER, store=True))["store"] is True
    assert "store" not in render(chat(USER), omit=frozenset({"store"}))


@pytest.mark.parametrize(
    ("fields", "endpoint", "asked"),
    [
        ({}, {}, False),
        ({"reasoning_effort": "low"}, {}, True),
        ({"reasoning_budget_tokens": 2000}, {}, True),
        ({"reasoning_effort": "none"}, {}, False),
        ({}, {"reasoning": "effort"}, True),
        ({"reasoning_effort": "low"}, {"reasoning": "off"}, False),
        ({"reasoning_effort": "low", "store": True}, {}, False),
    ],
)
def test_encrypted_reasoning_is_asked_for_where_a_model_reasons_and_nothing_is_stored(fields, endpoint, asked):
    include = render(chat(USER, **fields), **endpoint).get("include", [])
    assert ("reasoning.encrypted_content" in include) is asked


@pytest.mark.parametrize(
    ("budget", "effort"), [(0, "none"), (1, "low"), (1024, "low"), (8192, "medium"), (8193, "high")]
)
def test_a_budget_becomes_a_word_of_effort(budget, effort):
    assert render(chat(USER, reasoning_budget_tokens=budget))["reasoning"] == {"effort": effort}


def test_reasoning_that_is_off_is_dropped_and_told():
    rendered = sent(chat(USER, reasoning_effort="low", reasoning_budget_tokens=5), reasoning="off")
    assert "reasoning" not in json.loads(rendered.body)
    assert rendered.dropped == ("reasoning_effort", "reasoning_budget_tokens")


def test_reasoning_without_a_signature_goes_back_only_where_it_is_known_to_be_taken():
    said = Message(role=Role.ASSISTANT, reasoning=(Reasoning(text="Hm.", id="rs_1"),), content=(Text(text="x"),))
    (thought, _) = items(said, reasoning_field="content")
    assert thought == {
        "type": "reasoning",
        "id": "rs_1",
        "summary": [],
        "content": [{"type": "reasoning_text", "text": "Hm."}],
    }
    (thought, _) = items(said, reasoning_field="summary")
    assert thought["summary"] == [{"type": "summary_text", "text": "Hm."}]
    stored = render(chat(USER, said, store=True))["input"][1]
    assert stored == {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "Hm."}]}


def test_fields_that_the_endpoint_omits_or_forces_are_left_out_or_set():
    rendered = sent(
        chat(USER, temperature=0.5, verbosity="low", end_user="me", logprobs=True),
        omit=frozenset({"temperature", "verbosity", "end_user", "logprobs"}),
        force={"top_p": msgspec.Raw(b"0.1")},
    )
    assert json.loads(rendered.body) == {
        "model": "upstream-model",
        "input": [{"type": "message", "role": "user", "content": "hi"}],
        "store": False,
        "top_p": 0.1,
    }
    assert sorted(rendered.dropped) == ["end_user", "logprobs", "temperature", "verbosity"]


def test_an_extra_field_may_not_take_the_place_of_one_of_the_request():
    with pytest.raises(RequestNotExpressible) as caught:
        sent(chat(USER, extra={"model": msgspec.Raw(b'"x"')}))
    assert caught.value.path == "extra.model"


# ----------------------------------------------------------------- round trip


def test_reasoning_and_signed_calls_come_back_through_a_caller_as_they_were():
    thoughts = (
        Reasoning(text="One.\n\nTwo.", signature="responses:s", id="rs_1"),
        Reasoning(signature="anthropic_messages:e", redacted=True, id="rs_2"),
        Reasoning(signature="gemini:text:0:4:of nothing to read", id="rs_3"),
        Reasoning(text="Of a provider that has no ids.", signature="responses:n"),
    )
    calls = (ToolCall(id="c1", name="f", arguments="{", signature="g"), ToolCall(id="c2", name="g", arguments=""))
    answer = ChatResponse(
        choices=(
            Choice(
                index=0,
                text="Wait.",
                reasoning=thoughts,
                tool_calls=calls,
                stop_reason=StopReason.TOOL_CALLS,
                native_stop_reason="x",
            ),
        ),
    )
    output = json.loads(PROTOCOL.render_response(answer))["output"]
    (_, message) = parse(input=[{"role": "user", "content": "hi"}, *output]).messages
    assert message == Message(role=Role.ASSISTANT, content=(Text(text="Wait."),), reasoning=thoughts, tool_calls=calls)
