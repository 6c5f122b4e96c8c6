"""Requests of chat completions, in and out."""

from __future__ import annotations

import json
import time
from typing import Any

import msgspec
import pytest

from adapters.body import MAX_DEPTH, MAX_VALUES
from adapters.chat import (
    Audio,
    ChatRequest,
    Document,
    Image,
    Message,
    NativeRequest,
    Opaque,
    Reasoning,
    ResponseFormat,
    Role,
    Text,
    Tool,
    ToolCall,
    ToolChoice,
)
from adapters.contract import Endpoint, HttpRequest, UpstreamCall
from adapters.errors import MalformedRequest, RequestNotExpressible
from adapters.protocols.chat_completions import ChatCompletions, envelope

PROTOCOL = ChatCompletions()
HELLO = {"role": "user", "content": "hi"}


def parse(**fields: object) -> ChatRequest:
    return PROTOCOL.parse_request(json.dumps({"messages": [HELLO], **fields}).encode())


def sent(request: ChatRequest, *, stream: bool = False, **endpoint: object) -> HttpRequest:
    target = Endpoint(provider="p", protocol="chat_completions", base_url="http://h/v1", **endpoint)  # type: ignore[arg-type]
    call = UpstreamCall(endpoint=target, model="upstream-model", request=request, deadline=0)
    return PROTOCOL.render_request(call, stream=stream)


def render(request: ChatRequest, *, stream: bool = False, **endpoint: object) -> dict[str, Any]:
    rendered = sent(request, stream=stream, **endpoint)
    assert rendered.path == "/chat/completions"
    content = json.loads(rendered.body)
    assert isinstance(content, dict)
    return content


def chat(*messages: Message, **fields: object) -> ChatRequest:
    return ChatRequest(messages=messages, **fields)  # type: ignore[arg-type]


USER = Message(role=Role.USER, content=(Text(text="hi"),))


# -------------------------------------------------------------------- reading


def test_a_request_is_read_into_the_canonical_form():
    request = parse(
        model="m",
        messages=[
            {"role": "system", "content": "be brief"},
            {
                "role": "user",
                "name": "ann",
                "content": [
                    {"type": "text", "text": "see", "cache_control": {"type": "ephemeral", "ttl": "1h"}},
                    {"type": "image_url", "image_url": {"url": "data:image/gif;base64,R0lG", "detail": "low"}},
                    {"type": "image_url", "image_url": {"url": "https://h/i.png"}},
                    {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}},
                    {"type": "file", "file": {"file_id": "f1"}},
                ],
            },
            {
                "role": "assistant",
                "content": None,
                "reasoning_content": "hm",
                "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
            },
            {"role": "tool", "tool_call_id": "c1", "content": "42"},
        ],
        tools=[{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}, "strict": True}}],
        tool_choice={"type": "function", "function": {"name": "f"}},
        response_format={"type": "json_schema", "json_schema": {"name": "s", "schema": {"a": 1}}},
        max_tokens=5,
        stop="x",
        temperature=1,
        user="u",
    )
    assert request.messages == (
        Message(role=Role.SYSTEM, content=(Text(text="be brief"),)),
        Message(
            role=Role.USER,
            name="ann",
            content=(
                Text(text="see", cache="1h"),
                Image(data=b"GIF", media_type="image/gif", detail="low"),
                Image(url="https://h/i.png"),
                Audio(data=b"\0\0\0", format="wav"),
                Document(file_id="f1"),
            ),
        ),
        Message(
            role=Role.ASSISTANT,
            tool_calls=(ToolCall(id="c1", name="f", arguments="{}"),),
            reasoning=(Reasoning(text="hm"),),
        ),
        Message(role=Role.TOOL, tool_call_id="c1", content=(Text(text="42"),)),
    )
    assert request.tools == (Tool(name="f", parameters=msgspec.Raw(b'{"type": "object"}'), strict=True),)
    assert request.tool_choice == ToolChoice(mode="tool", tool="f")
    assert request.response_format == ResponseFormat(kind="json_schema", name="s", schema=msgspec.Raw(b'{"a": 1}'))
    assert (request.max_output_tokens, request.stop, request.temperature) == (5, ("x",), 1.0)
    assert request.end_user == "u"
    assert request.native is not None
    assert request.native.unmapped == ()


def test_the_functions_of_old_are_read_as_tools():
    request = parse(
        functions=[{"name": "f"}],
        function_call={"name": "f"},
        messages=[
            {"role": "assistant", "function_call": {"name": "f", "arguments": "{}"}},
            {"role": "function", "name": "f", "content": "42"},
        ],
    )
    assert request.tools == (Tool(name="f"),)
    assert request.tool_choice == ToolChoice(mode="tool", tool="f")
    assert request.messages[0].tool_calls[0].id == request.messages[1].tool_call_id == "f"


def test_what_the_canonical_form_does_not_carry_is_named():
    request = parse(
        prediction={"type": "content", "content": "x"},
        tools=[{"type": "custom", "custom": {"name": "x"}}],
        messages=[{"role": "user", "content": [{"type": "video_url", "video_url": {"url": "u"}}]}],
    )
    assert request.native is not None
    assert request.native.unmapped == ("prediction", "tools[0]")
    assert request.messages[0].content == (
        Opaque(protocol="chat_completions", raw=msgspec.Raw(b'{"type": "video_url", "video_url": {"url": "u"}}')),
    )


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({}, (None, False, False)),
        ({"model": "m", "stream": None}, ("m", False, False)),
        ({"model": "m", "stream": True}, ("m", True, False)),
        ({"model": "m", "stream": True, "stream_options": {"include_usage": True, "x": 1}}, ("m", True, True)),
        ({"stream": False, "stream_options": None}, (None, False, False)),
    ],
)
def test_the_envelope_tells_model_and_streaming(fields, told):
    found = envelope(parse(**fields))
    assert (found.model, found.stream, found.include_usage) == told


@pytest.mark.parametrize(
    ("fields", "path"),
    [
        ({"messages": []}, "messages"),
        ({"messages": None}, "messages"),
        ({"messages": [{"role": "user", "content": 7}]}, "messages[0].content"),
        ({"messages": [HELLO, {"role": "pope", "content": "SECRET"}]}, "messages[1].role"),
        ({"messages": [HELLO, {"content": "SECRET"}]}, "messages[1].role"),
        ({"messages": [{"role": "user", "content": ["SECRET"]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": [{"text": "x"}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": 1}]}]}, "messages[0].content[0].text"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id"),
        ({"temperature": "SECRET"}, "temperature"),
        ({"n": 0}, "n"),
        ({"n": 10**30}, "n"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"seed": 2**70}, "seed"),
        ({"model": ""}, "model"),
        ({"model": 3}, "model"),
        ({"stream": "yes"}, "stream"),
        ({"tool_choice": "SECRET"}, "tool_choice"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [{"type": "function", "function": {"name": 1}}]}, "tools[0].function.name"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:SECRET"}}]}]},
            "messages[0].content[0].image_url.url",
        ),
        (
            {
                "messages": [
                    {"role": "user", "content": [{"type": "input_audio", "input_audio": {"data": "!", "format": "x"}}]}
                ]
            },
            "messages[0].content[0].input_audio.data",
        ),
        ({"metadata": {"a": ["x\0SECRET"]}}, "metadata.a[0]"),
    ],
)
def test_a_fault_is_told_by_its_path_and_never_by_its_content(fields, path):
    with pytest.raises(MalformedRequest) as caught:
        parse(**fields)
    assert caught.value.path == path
    assert "SECRET" not in str(caught.value)


def _nested(depth: int) -> bytes:
    return b'{"messages":[{"role":"user","content":"x"}],"x":' + b"[" * depth + b"]" * depth + b"}"


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"null",
        b"[]",
        b'"x"',
        b'{"messages":',
        b'{"messages":[{"role":"user","content":"x"}],"temperature":NaN}',
        b'{"messages":[{"role":"user","content":"x"}],"temperature":1e400}',
        b'{"messages":[{"role":"user","content":"x"}],"unknown":-1e400}',
        b'{"messages":[{"role":"user","content":"x"}],"unknown":Infinity}',
        b'{"messages":[{"role":"user","content":"\\ud800"}]}',
        b'{"messages":[{"role":"user","content":"\\udc00x"}]}',
        b'{"messages":[{"role":"user","content":"x"}],"unknown":["\\ud800"]}',
        b'{"messages":[{"role":"user","content":"\\u0000"}]}',
        b'{"messages":[{"role":"user","content":"x"}],"a\\u0000b":1}',
        b'{"messages":[{"role":"user","content":"\xff"}]}',
        b'{"messages":[{"role":"user","content":"x"}],"unknown":"\xff"}',
        b'{"messages":[{"role":"user","content":"x"}],"model":"a","model":"b"}',
        b'{"messages":[{"role":"user","content":"x"}],"model":"a","mod\\u0065l":"b"}',
        b'{ "messages":[{"role":"user","content":"x"}] , "n":1,"n":1}',
        b"\xef\xbb\xbf{}",
        _nested(MAX_DEPTH + 1),
        _nested(100_000),
        b"[" * 1_000_000,
        b'{"a":' * 1_000_000,
    ],
)
def test_hostile_json_is_refused_and_never_crashes(body):
    with pytest.raises(MalformedRequest):
        PROTOCOL.parse_request(body)


def test_a_flood_of_values_is_refused_before_they_are_made_and_a_table_in_a_text_is_not():
    flood = b'{"messages":[{"role":"user","content":"x"}],"x":[' + b"[]," * MAX_VALUES + b"0]}"
    started = time.process_time()
    with pytest.raises(MalformedRequest, match=f"more than {MAX_VALUES} values"):
        PROTOCOL.parse_request(flood)
    assert time.process_time() - started < 0.5
    table = ",".join(['1"2'] * (MAX_VALUES + 1))
    asked = json.dumps({"messages": [{"role": "user", "content": table}]}).encode()
    assert PROTOCOL.parse_request(asked).messages[0].content == (Text(text=table),)


@pytest.mark.parametrize("quote", [b'"', b'\\"'], ids=["closed", "never closed"])
def test_looking_for_values_is_quick_whatever_the_quotes_are(quote):
    body = b'{"messages":["' + (quote + b",") * (MAX_VALUES + 2)
    started = time.process_time()
    with pytest.raises(MalformedRequest):
        PROTOCOL.parse_request(body)
    assert time.process_time() - started < 0.5


def test_brackets_and_escapes_inside_strings_are_content():
    text = "[" * 500 + "{" * 500 + r"\u0000 \ud800" + '"\\'
    request = PROTOCOL.parse_request(json.dumps({"messages": [{"role": "user", "content": text}]}).encode())
    assert request.messages[0].content == (Text(text=text),)
    assert PROTOCOL.parse_request(_nested(MAX_DEPTH - 4)).messages


# -------------------------------------------------------------------- writing


def test_unknown_fields_at_any_depth_go_through_untouched():
    body = b'{"messages":[{"role":"user","content":"x","zz":{"a":1.10}}],"model":"a","big":1.0000000000000000001}'
    target = Endpoint(provider="p", protocol="chat_completions", base_url="http://h")
    call = UpstreamCall(endpoint=target, model="b", request=PROTOCOL.parse_request(body), deadline=0)
    assert PROTOCOL.render_request(call, stream=False).body == body.replace(b'"model":"a"', b'"model":"b"')


def test_a_stream_always_asks_for_usage_and_keeps_what_the_caller_asked_of_it():
    request = parse(model="m", stream=False, stream_options={"include_usage": False, "include_obfuscation": False})
    rendered = render(request, stream=True)
    assert rendered["stream"] is True
    assert rendered["stream_options"] == {"include_usage": True, "include_obfuscation": False}
    plain = render(parse(stream=True, stream_options={"include_usage": True}))
    assert not {"stream", "stream_options"} & plain.keys()


@pytest.mark.parametrize("native", [True, False])
def test_the_endpoint_omits_and_forces_fields(native):
    request = parse(temperature=0.5, user="u") if native else chat(USER, temperature=0.5, end_user="u")
    quirks = {
        "omit": frozenset({"user", "stream_options", "seed", "temperature"}),
        "force": {"temperature": msgspec.Raw(b"1")},
    }
    rendered = render(request, stream=True, **quirks)
    assert rendered["temperature"] == 1
    assert not {"user", "stream_options"} & rendered.keys()
    # What is forced to another value was not sent as it was asked; what was not asked is not dropped.
    assert sent(request, stream=True, **quirks).dropped == ("temperature", "user" if native else "end_user")


@pytest.mark.parametrize(
    ("given", "known", "limits"),
    [
        ({"max_tokens": 5}, None, {"max_tokens": 5}),
        ({"max_completion_tokens": 5}, None, {"max_completion_tokens": 5}),
        ({"max_tokens": 5}, "max_completion_tokens", {"max_completion_tokens": 5}),
        ({"max_completion_tokens": 5}, "max_tokens", {"max_tokens": 5}),
        ({"max_tokens": 5, "max_completion_tokens": 6}, "max_tokens", {"max_tokens": 6}),
        ({"max_tokens": None}, "max_completion_tokens", {}),
    ],
)
def test_the_output_limit_is_sent_under_the_name_the_provider_knows(given, known, limits):
    rendered = render(parse(**given), max_tokens_field=known)
    assert {k: v for k, v in rendered.items() if k.startswith("max_")} == limits


def test_a_canonical_limit_takes_the_name_of_the_endpoint():
    assert render(chat(USER, max_output_tokens=5))["max_completion_tokens"] == 5
    assert render(chat(USER, max_output_tokens=5), max_tokens_field="max_tokens")["max_tokens"] == 5


def test_the_canonical_form_is_written_and_read_back_the_same():
    request = chat(
        Message(role=Role.DEVELOPER, content=(Text(text="be brief"),)),
        Message(
            role=Role.USER,
            name="ann",
            content=(
                Text(text="see"),
                Image(data=b"GIF", media_type="image/gif", detail="low"),
                Document(data=b"%PDF", media_type="application/pdf", filename="a.pdf"),
                Audio(data=b"\0", format="wav"),
            ),
        ),
        Message(role=Role.ASSISTANT, tool_calls=(ToolCall(id="c", name="f", arguments='{"x":'),)),
        Message(role=Role.TOOL, tool_call_id="c", content=(Text(text="a"), Text(text="b"))),
        Message(role=Role.ASSISTANT, refusal="no"),
        tools=(Tool(name="f", description="d", parameters=msgspec.Raw(b'{"type":"object"}'), strict=False),),
        tool_choice=ToolChoice(mode="required"),
        parallel_tool_calls=False,
        response_format=ResponseFormat(kind="json_schema", name="s", schema=msgspec.Raw(b"{}"), strict=True),
        max_output_tokens=9,
        temperature=0.1,
        top_p=0.9,
        stop=("a", "b"),
        seed=1,
        n=2,
        presence_penalty=0.1,
        frequency_penalty=0.2,
        logprobs=True,
        top_logprobs=3,
        logit_bias={"1": -100.0},
        reasoning_effort="low",
        end_user="u",
    )
    back = PROTOCOL.parse_request(json.dumps(render(request)).encode())
    raws = ("tools", "response_format")
    assert [getattr(back, n) for n in back.__struct_fields__ if n not in {"native", "paths", *raws}] == [
        getattr(request, n) for n in request.__struct_fields__ if n not in {"native", "paths", *raws}
    ]
    assert back.tools[0].name == "f"


def test_extra_fields_are_sent_and_may_not_shadow_one_the_request_has():
    assert render(chat(USER, extra={"top_k": msgspec.Raw(b"3")}))["top_k"] == 3
    for name in ("messages", "model", "stream", "temperature"):
        with pytest.raises(RequestNotExpressible) as caught:
            render(chat(USER, temperature=1.0, extra={name: msgspec.Raw(b"1")}))
        assert caught.value.path == f"extra.{name}"


@pytest.mark.parametrize(
    ("request_", "path", "omit"),
    [
        (chat(USER, tools=(Tool(name="f", cache="1h"),)), "tools[0].cache", "messages.cache"),
        (
            chat(Message(role=Role.USER, content=(Text(text="x", cache="5m"),))),
            "messages[0].content[0].cache",
            "messages.cache",
        ),
        (chat(Message(role=Role.USER, content=(Document(url="u"),))), "messages[0].content[0].url", None),
        (chat(Message(role=Role.TOOL, content=(Image(url="u"),))), "messages[0].content[0]", None),
        (
            chat(Message(role=Role.USER, content=(Opaque(protocol="gemini", raw=msgspec.Raw(b"{}")),))),
            "messages[0].content[0]",
            None,
        ),
        (
            chat(USER, native=NativeRequest(protocol="gemini", fields={}, unmapped=("safetySettings",))),
            "safetySettings",
            "safetySettings",
        ),
    ],
)
def test_what_the_protocol_cannot_say_is_refused_by_its_path_unless_the_endpoint_omits_it(request_, path, omit):
    with pytest.raises(RequestNotExpressible) as caught:
        render(request_)
    assert caught.value.path == path
    if omit is not None:
        assert sent(request_, omit=frozenset({omit})).dropped == (path,)


def test_reasoning_goes_back_in_the_field_the_provider_takes_it_in():
    request = chat(USER, Message(role=Role.ASSISTANT, reasoning=(Reasoning(text="hm"),)))
    messages = render(request, reasoning_field="reasoning_content")["messages"]
    assert messages == [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "", "reasoning_content": "hm"},
    ]


# ------------------------------------------------------------------ reasoning

SIGNED = Reasoning(text="hm", signature="chat_completions:c2ln", id="rs_1")
HIDDEN = Reasoning(signature="chat_completions:gAAA", redacted=True)
CALLED = ToolCall(id="c1", name="f", arguments="{}", signature="gemini:call:dGM=")


@pytest.mark.parametrize("field", ["reasoning", "reasoning_content"])
def test_a_field_of_text_takes_the_text_and_the_signature_is_told_as_dropped(field):
    request = chat(USER, Message(role=Role.ASSISTANT, reasoning=(SIGNED, Reasoning(text=" so")), tool_calls=(CALLED,)))
    message = render(request, reasoning_field=field)["messages"][1]
    assert message[field] == "hm so"
    assert message["tool_calls"] == [{"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
    assert sent(request, reasoning_field=field).dropped == (
        "messages[1].tool_calls[0].signature",
        "messages[1].reasoning[0].signature",
    )


def test_details_take_blocks_and_signatures_and_come_back_as_they_were():
    request = chat(USER, Message(role=Role.ASSISTANT, reasoning=(SIGNED, HIDDEN), content=(Text(text="4"),)))
    rendered = sent(request, reasoning_field="reasoning_details")
    assert rendered.dropped == ()
    assert json.loads(rendered.body)["messages"][1]["reasoning_details"] == [
        {"type": "reasoning.text", "text": "hm", "signature": "c2ln", "id": "rs_1", "index": 0},
        {"type": "reasoning.encrypted", "data": "gAAA", "index": 1},
    ]
    assert PROTOCOL.parse_request(rendered.body).messages == request.messages


def test_thinking_parts_go_back_in_the_content_and_are_read_from_there():
    request = chat(USER, Message(role=Role.ASSISTANT, reasoning=(Reasoning(text="hm"),), content=(Text(text="4"),)))
    rendered = sent(request, reasoning_field="content")
    assert json.loads(rendered.body)["messages"][1]["content"] == [
        {"type": "thinking", "thinking": [{"type": "text", "text": "hm"}]},
        {"type": "text", "text": "4"},
    ]
    assert PROTOCOL.parse_request(rendered.body).messages == request.messages


def test_signatures_of_tool_calls_go_back_where_the_endpoint_takes_them():
    request = chat(USER, Message(role=Role.ASSISTANT, tool_calls=(CALLED,)))
    rendered = sent(request, reasoning_field="extra_content")
    assert rendered.dropped == ()
    (call,) = json.loads(rendered.body)["messages"][1]["tool_calls"]
    assert call["extra_content"] == {"google": {"thought_signature": "dGM="}}
    assert PROTOCOL.parse_request(rendered.body).messages == request.messages
    with_details = render(request, reasoning_field="reasoning_details")["messages"][1]
    assert with_details["reasoning_details"] == [
        {"type": "reasoning.encrypted", "data": "dGM=", "id": "c1", "index": 0}
    ]


@pytest.mark.parametrize(
    ("asked", "mode", "in_object", "fields"),
    [
        ({"reasoning_effort": "low"}, None, False, {"reasoning_effort": "low"}),
        ({"reasoning_budget_tokens": 5000}, None, False, {"reasoning_effort": "medium"}),
        ({"reasoning_effort": "xhigh", "reasoning_budget_tokens": 1}, "effort", False, {"reasoning_effort": "xhigh"}),
        ({"reasoning_effort": "low"}, None, True, {"reasoning": {"effort": "low"}}),
        ({"reasoning_effort": "low"}, "budget", True, {"reasoning": {"max_tokens": 1024}}),
        ({"reasoning_budget_tokens": 77}, "budget", True, {"reasoning": {"max_tokens": 77}}),
        ({"reasoning_budget_tokens": 0}, "budget", True, {"reasoning": {"effort": "none"}}),
        ({"reasoning_effort": "high"}, "budget", False, {"thinking_budget": 24576}),
        ({"reasoning_effort": "high"}, "off", True, {"reasoning": {"effort": "none"}}),
        ({"reasoning_effort": "high"}, "off", False, {}),
        ({}, "off", True, {"reasoning": {"effort": "none"}}),
        ({}, "budget", True, {}),
        ({}, None, False, {}),
    ],
)
def test_reasoning_is_asked_for_in_the_way_of_the_endpoint(asked, mode, in_object, fields):
    request = chat(USER, **asked)
    rendered = render(request, reasoning=mode, reasoning_object=in_object)
    assert {k: v for k, v in rendered.items() if k not in {"messages", "model"}} == fields
    dropped = sent(request, reasoning=mode, reasoning_object=in_object).dropped
    assert dropped == (("reasoning_effort",) if mode == "off" and asked else ())


def test_a_native_request_for_reasoning_is_turned_only_where_the_endpoint_says_so():
    request = parse(reasoning_effort="low", thinking={"type": "enabled"})
    assert render(request)["reasoning_effort"] == "low"
    assert sent(request).dropped == ()
    budget = render(request, reasoning="budget", reasoning_object=True)
    assert budget["reasoning"] == {"max_tokens": 1024}
    assert "reasoning_effort" not in budget
    off = sent(request, reasoning="off")
    assert not {"reasoning_effort", "thinking"} & json.loads(off.body).keys()
    assert sorted(off.dropped) == ["reasoning_effort", "thinking"]


def test_the_object_of_openrouter_is_read_and_what_else_it_asks_is_named():
    request = parse(reasoning={"effort": "low", "exclude": True})
    assert request.reasoning_effort == "low"
    assert parse(reasoning={"max_tokens": 7}).reasoning_budget_tokens == 7
    assert request.native is not None
    assert request.native.unmapped == ("reasoning.exclude",)
    odd = parse(reasoning="much").native
    assert odd is not None
    assert odd.unmapped == ("reasoning",)


def test_details_of_an_unknown_kind_are_named_and_fail_nothing():
    details = [{"type": "reasoning.new"}, {"type": 5}, {"type": "reasoning.text", "text": "hm"}]
    message = {"role": "assistant", "content": "4", "reasoning_details": details}
    request = PROTOCOL.parse_request(json.dumps({"messages": [message]}).encode())
    assert request.messages[0].reasoning == (Reasoning(text="hm"),)
    assert request.native is not None
    assert request.native.unmapped == ("messages[0].reasoning_details",)


# --------------------------------------------------------------- cache markers

CACHED = (
    Message(role=Role.SYSTEM, content=(Text(text="long", cache="1h"),)),
    Message(role=Role.USER, content=(Text(text="hi", cache="5m"),)),
)


def test_cache_boundaries_go_to_a_provider_that_takes_them():
    request = chat(*CACHED, tools=(Tool(name="f", cache="5m"),))
    rendered = sent(request, cache_control=True)
    content = json.loads(rendered.body)
    long, short = (message["content"][0]["cache_control"] for message in content["messages"])
    assert long == {"type": "ephemeral", "ttl": "1h"}
    assert short == {"type": "ephemeral"} == content["tools"][0]["cache_control"]
    assert rendered.dropped == ()
    back = PROTOCOL.parse_request(rendered.body)
    assert (back.messages, back.tools) == (request.messages, request.tools)


SIGNATURE = {"extra_content": {"google": {"thought_signature": "dGM="}}}


def test_marks_are_taken_off_a_native_request_for_a_provider_that_has_no_word_for_them():
    messages = [
        {"role": "system", "content": [{"type": "text", "text": "s", "cache_control": {"type": "ephemeral"}}]},
        {"role": "user", "content": "hi", "unknown": 1},
        {
            "role": "assistant",
            "content": "4",
            "reasoning_content": "hm",
            "reasoning_details": [],
            "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": ""}, **SIGNATURE}],
        },
    ]
    tools = [{"type": "function", "function": {"name": "f"}, "cache_control": {"type": "ephemeral"}}]
    request = PROTOCOL.parse_request(json.dumps({"messages": messages, "tools": tools}).encode())
    untouched = render(request)
    assert (untouched["messages"], untouched["tools"]) == (messages, tools)
    rendered = sent(request, omit=frozenset({"messages.cache", "messages.reasoning"}))
    content = json.loads(rendered.body)
    assert content["messages"] == [
        {"role": "system", "content": [{"type": "text", "text": "s"}]},
        {"role": "user", "content": "hi", "unknown": 1},
        {
            "role": "assistant",
            "content": "4",
            "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": ""}}],
        },
    ]
    assert content["tools"] == [{"type": "function", "function": {"name": "f"}}]
    assert rendered.dropped == (
        "messages[0].content[0].cache_control",
        "messages[2].reasoning_content",
        "messages[2].tool_calls[0].extra_content",
        "tools[0].cache_control",
    )


def test_what_a_message_or_a_tool_holds_that_nobody_reads_is_named_for_other_protocols():
    messages = [
        {"role": "assistant", "content": "4", "audio": {"id": "a"}, "annotations": [{"type": "url_citation"}]},
        {"role": "assistant", "content": "4", "prefix": True, "images": [], "audio": None, "id": "m1"},
    ]
    tools = [{"type": "function", "function": {"name": "f"}, "defer_loading": True}]
    request = PROTOCOL.parse_request(json.dumps({"messages": messages, "tools": tools}).encode())
    assert request.native is not None
    assert request.native.unmapped == ("messages[0].audio", "messages[1].prefix", "tools[0].defer_loading")
    # To a provider of the same protocol they go as they are.
    assert render(request)["messages"] == messages
