"""Requests of Workers AI: what a caller's becomes, what a provider is sent, and what is refused."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from adapters.chat import (
    Audio,
    ChatRequest,
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
from adapters.contract import EmbeddingCall, EmbeddingRequest, EmbeddingResponse, Endpoint, HttpRequest, UpstreamCall
from adapters.errors import Broken, ErrorClass, MalformedRequest, Rejected, RequestNotExpressible
from adapters.protocols.workers_ai import WorkersAI, envelope
from metering.usage import Usage

PROTOCOL = WorkersAI()
HI = Message(role=Role.USER, content=(Text(text="hi"),))
MODEL = "@cf/meta/llama-3.3-70b-instruct-fp8-fast"


def rendered(request: ChatRequest, model: str = MODEL, *, stream: bool = False, **endpoint: Any) -> HttpRequest:
    call = UpstreamCall(
        endpoint=Endpoint(provider="p", protocol="workers_ai", base_url="", **endpoint),
        model=model,
        request=request,
        deadline=0.0,
    )
    return PROTOCOL.render_request(call, stream=stream)


def body(request: ChatRequest, **endpoint: Any) -> Any:
    return json.loads(rendered(request, **endpoint).body)


def read(**fields: Any) -> ChatRequest:
    return PROTOCOL.parse_request(json.dumps(fields).encode())


def test_the_slashes_of_a_model_are_steps_of_the_address():
    assert rendered(ChatRequest(messages=(HI,))).path == f"/run/{MODEL}"
    assert rendered(ChatRequest(messages=(HI,)), "a?b#c/d e").path == "/run/a%3Fb%23c/d%20e"


@pytest.mark.parametrize("name", ["", "..", "@cf/../../x", "@cf//x", "@cf/", "./x"])
def test_what_is_no_name_of_a_model_is_refused(name):
    with pytest.raises(RequestNotExpressible) as caught:
        rendered(ChatRequest(messages=(HI,)), name)
    assert caught.value.path == "model"


def test_a_canonical_request_is_said_in_full():
    request = ChatRequest(
        messages=(
            Message(role=Role.DEVELOPER, content=(Text(text="be kind"),)),
            Message(
                role=Role.USER,
                content=(Text(text="look"), Image(data=b"\0", media_type="image/png"), Image(url="https://x/a.png")),
            ),
            Message(role=Role.ASSISTANT, tool_calls=(ToolCall(id="1", name="f", arguments='{"a":1}'),)),
            Message(role=Role.TOOL, tool_call_id="1", content=(Text(text="so"), Text(text="me"))),
        ),
        tools=(
            Tool(name="f", description="d", parameters=msgspec.Raw(b'{"type":"object"}')),
            Tool(name="g"),
        ),
        tool_choice=ToolChoice(mode="tool", tool="f"),
        max_output_tokens=5,
        temperature=0.5,
        top_p=0.9,
        top_k=3,
        seed=7,
        presence_penalty=0.1,
        frequency_penalty=0.2,
        prompt_cache_key="k-1",
        extra={"repetition_penalty": msgspec.Raw(b"1.5")},
    )
    sent = rendered(request, stream=True)
    assert sent.headers["x-session-affinity"] == "k-1"
    assert json.loads(sent.body) == {
        "messages": [
            {"role": "system", "content": "be kind"},
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "look"},
                    {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}},
                    {"type": "image_url", "image_url": {"url": "https://x/a.png"}},
                ],
            },
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a":1}'}}],
            },
            {"role": "tool", "content": "some", "tool_call_id": "1", "name": "f"},
        ],
        "tools": [
            {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}},
            {
                "type": "function",
                "function": {"name": "g", "description": "", "parameters": {"type": "object", "properties": {}}},
            },
        ],
        "tool_choice": {"type": "function", "function": {"name": "f"}},
        "max_tokens": 5,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 3,
        "seed": 7,
        "presence_penalty": 0.1,
        "frequency_penalty": 0.2,
        "repetition_penalty": 1.5,
        "stream": True,
    }


def test_a_limit_of_the_profile_is_sent_where_the_request_has_none():
    assert body(ChatRequest(messages=(HI,)), default_max_tokens=2048)["max_tokens"] == 2048
    assert "max_tokens" not in body(ChatRequest(messages=(HI,)))


def test_json_mode_takes_the_schema_itself_and_does_not_stream():
    wanted = ResponseFormat(kind="json_schema", name="n", schema=msgspec.Raw(b'{"type":"object"}'))
    sent = rendered(ChatRequest(messages=(HI,), response_format=wanted), stream=True)
    assert sent.headers["accept"] == "application/json"
    content = json.loads(sent.body)
    assert "stream" not in content
    assert content["response_format"] == {"type": "json_schema", "json_schema": {"type": "object"}}
    again = PROTOCOL.parse_request(sent.body)
    assert again.response_format is not None
    assert bytes(again.response_format.schema or b"") == b'{"type":"object"}'


@pytest.mark.parametrize(
    ("change", "path"),
    [
        ({"stop": ("x",)}, "stop"),
        ({"n": 2}, "n"),
        ({"logprobs": True}, "logprobs"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logit_bias": {"1": 1.0}}, "logit_bias"),
        ({"verbosity": "low"}, "verbosity"),
        ({"service_tier": "flex"}, "service_tier"),
        ({"store": True}, "store"),
        ({"metadata": {"a": "b"}}, "metadata"),
        ({"end_user": "u"}, "end_user"),
        ({"parallel_tool_calls": False}, "parallel_tool_calls"),
        ({"reasoning_effort": "high"}, "reasoning_effort"),
        ({"reasoning_budget_tokens": 5}, "reasoning_budget_tokens"),
    ],
)
def test_what_it_has_no_word_for_is_refused_or_dropped_as_the_profile_says(change, path):
    request = ChatRequest(messages=(HI,), **change)
    with pytest.raises(RequestNotExpressible) as caught:
        rendered(request)
    assert caught.value.path == path
    sent = rendered(request, omit=frozenset({path}))
    assert sent.dropped == (path,)
    assert json.loads(sent.body) == {"messages": [{"role": "user", "content": "hi"}]}


@pytest.mark.parametrize(
    ("messages", "path", "key"),
    [
        ((Message(role=Role.USER, content=(Audio(data=b"", format="wav"),)),), "messages[0].content[0]", None),
        (
            (Message(role=Role.USER, content=(Opaque(protocol="x", raw=msgspec.Raw(b"{}")),)),),
            "messages[0].content[0]",
            None,
        ),
        ((msgspec.structs.replace(HI, name="Ann"),), "messages[0].name", "messages.name"),
        (
            (Message(role=Role.USER, content=(Text(text="a", cache="5m"),)),),
            "messages[0].content[0].cache",
            "messages.cache",
        ),
    ],
)
def test_what_a_message_cannot_hold_is_refused_by_its_path(messages, path, key):
    request = ChatRequest(messages=messages)
    with pytest.raises(RequestNotExpressible) as caught:
        rendered(request)
    assert caught.value.path == path
    if key is not None:
        assert rendered(request, omit=frozenset({key})).dropped == (path,)


def test_reasoning_is_asked_for_and_sent_back_as_the_profile_takes_it():
    thought = Message(role=Role.ASSISTANT, content=(Text(text="a"),), reasoning=(Reasoning(text="t"),))
    sent = body(
        ChatRequest(messages=(HI, thought), reasoning_budget_tokens=900),
        reasoning="effort",
        reasoning_field="reasoning_content",
    )
    assert sent["reasoning_effort"] == "low"
    assert sent["messages"][1]["reasoning_content"] == "t"
    off = rendered(ChatRequest(messages=(HI,), reasoning_effort="high"), reasoning="off")
    assert off.dropped == ("reasoning_effort",)


def test_a_request_of_its_own_goes_on_byte_for_byte_but_for_model_and_stream():
    native = b'{"messages":[{"role":"user","content":"hi","new":1}],"raw":true,"temperature":1.50,"stream":true}'
    request = PROTOCOL.parse_request(native)
    assert envelope(request).stream is True
    assert request.native is not None
    assert request.native.unmapped == ("raw", "messages[0].new")
    assert rendered(request).body == native.replace(b',"stream":true', b"")
    sent = rendered(request, stream=True, omit=frozenset({"raw"}), force={"temperature": msgspec.Raw(b"0")})
    assert json.loads(sent.body) == {
        "messages": [{"role": "user", "content": "hi", "new": 1}],
        "temperature": 0,
        "stream": True,
    }
    assert sent.dropped == ("raw", "temperature")


def test_a_callers_request_is_read_in_either_shape():
    request = read(
        messages=[
            {"role": "system", "content": "be kind"},
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "video", "x": 1}]},
            {"role": "assistant", "content": None, "tool_calls": [{"name": "f", "arguments": {"a": 1}}]},
            {"role": "tool", "name": "f", "content": "done"},
        ],
        tools=[{"name": "f", "description": "d", "parameters": {}}, {"type": "function", "function": {"name": "g"}}],
        tool_choice="any",
    )
    assert [tool.name for tool in request.tools] == ["f", "g"]
    assert request.tool_choice == ToolChoice(mode="required")
    assert isinstance(request.messages[1].content[1], Opaque)
    assert request.messages[2].tool_calls == (ToolCall(id="f", name="f", arguments='{"a": 1}'),)
    assert request.messages[3].tool_call_id == "f"
    assert read(prompt="hi").messages == (HI,)


@pytest.mark.parametrize(
    ("fields", "path"),
    [
        ({}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id"),
        ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "messages[0].tool_calls[0].name"),
        ({"prompt": "a", "tools": [{}]}, "tools[0].function"),
        ({"prompt": "a", "response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"prompt": "a", "max_tokens": -1}, "max_tokens"),
    ],
)
def test_a_fault_is_named_by_its_path(fields, path):
    with pytest.raises(MalformedRequest) as caught:
        read(**fields)
    assert caught.value.path == path


def test_fields_of_another_protocol_are_refused_unless_the_profile_omits_them():
    request = ChatRequest(messages=(HI,), native=NativeRequest(protocol="other", fields={}, unmapped=("audio",)))
    with pytest.raises(RequestNotExpressible):
        rendered(request)
    assert rendered(request, omit=frozenset({"audio"})).dropped == ("audio",)


# ---------------------------------------------------------------- embeddings


def embedding(request: EmbeddingRequest, **endpoint: Any) -> HttpRequest:
    return PROTOCOL.render_embedding_request(
        EmbeddingCall(
            endpoint=Endpoint(provider="p", protocol="workers_ai", base_url="", **endpoint),
            model="@cf/baai/bge-base-en-v1.5",
            request=request,
            deadline=0.0,
        )
    )


def test_texts_become_vectors():
    sent = embedding(EmbeddingRequest(inputs=("a", "b")))
    assert sent.path == "/run/@cf/baai/bge-base-en-v1.5"
    assert json.loads(sent.body) == {"text": ["a", "b"]}
    answer = b'{"result": {"shape": [2, 2], "data": [[0.5, 1], [2, 3]]}, "success": true, "errors": []}'
    response = PROTOCOL.parse_embedding_response(200, {}, answer)
    assert response.vectors == ((0.5, 1.0), (2.0, 3.0))
    assert PROTOCOL.render_embedding_response(response, base64=False) == answer
    told = PROTOCOL.render_embedding_response(
        EmbeddingResponse(vectors=((1.0, 2.0),), usage=Usage(input_total=3)), base64=False
    )
    again = PROTOCOL.parse_embedding_response(200, {}, told)
    assert (again.vectors, again.usage) == (((1.0, 2.0),), Usage(input_total=3))


@pytest.mark.parametrize(
    ("change", "path"),
    [
        ({"dimensions": 3}, "dimensions"),
        ({"purpose": "query"}, "purpose"),
        ({"end_user": "u"}, "end_user"),
        ({"inputs": ("a", (1, 2))}, "inputs[1]"),
    ],
)
def test_what_embeddings_cannot_say_is_refused(change, path):
    with pytest.raises(RequestNotExpressible) as caught:
        embedding(EmbeddingRequest(**{"inputs": ("a",), **change}))
    assert caught.value.path == path


def test_a_callers_texts_are_read_and_go_on():
    request = PROTOCOL.parse_embedding_request(b'{"text":"a","pooling":"cls"}')
    assert request.inputs == ("a",)
    assert request.native is not None
    assert request.native.unmapped == ("pooling",)
    assert embedding(request).body == b'{"text":"a","pooling":"cls"}'
    with pytest.raises(MalformedRequest) as caught:
        PROTOCOL.parse_embedding_request(b'{"text":[]}')
    assert caught.value.path == "text"


def test_what_are_no_vectors_is_no_answer():
    for answer in (b"{}", b"no", b'{"result": {"data": [[]]}, "success": true}'):
        with pytest.raises(Broken):
            PROTOCOL.parse_embedding_response(200, {}, answer)
    for status in (200, 429):
        with pytest.raises(Rejected) as caught:
            PROTOCOL.parse_embedding_response(status, {}, b'{"success": false, "errors": [{"code": 3040}]}')
        assert caught.value.error_class is ErrorClass.TRANSIENT
