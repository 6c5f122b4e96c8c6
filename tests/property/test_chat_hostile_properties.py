"""
Anything at all where the format has a field: from a provider it ends in an answer or a `ProviderError`, from a caller
in a request or a `MalformedRequest`, and never in anything else.
"""

from __future__ import annotations

import json
from typing import Any

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from adapters.chat import Finished
from adapters.contract import AnswerHead, Endpoint, UpstreamCall
from adapters.errors import MalformedRequest, ProviderError, RequestNotExpressible
from adapters.protocols.chat_completions import ChatCompletions, envelope
from tests.fakes.answers import parsed

PROTOCOL = ChatCompletions()
ENDPOINT = Endpoint(provider="p", protocol="chat_completions", base_url="")

_KEYS = [
    "type",
    "text",
    "thinking",
    "url",
    "image_url",
    "index",
    "id",
    "function",
    "custom",
    "name",
    "arguments",
    "input",
    "token",
    "logprob",
    "bytes",
    "top_logprobs",
    "content",
    "refusal",
    "google",
    "thought_signature",
    "data",
    "signature",
    "summary",
    "message",
    "code",
    "status",
    "metadata",
    "cached_tokens",
    "prompt_tokens",
    "completion_tokens",
    "cost",
    "total_cost",
]
_IN_CONTENT = [
    "role",
    "content",
    "refusal",
    "reasoning",
    "reasoning_content",
    "reasoning_details",
    "tool_calls",
    "function_call",
    "images",
    "annotations",
    "audio",
    "executed_tools",
]
_IN_MESSAGE = [
    "name",
    "tool_calls",
    "function_call",
    "tool_call_id",
    "refusal",
    "reasoning",
    "reasoning_content",
    "reasoning_details",
]
_IN_REQUEST = [
    "model",
    "stream",
    "stream_options",
    "tools",
    "functions",
    "tool_choice",
    "function_call",
    "response_format",
    "max_tokens",
    "max_completion_tokens",
    "stop",
    "logit_bias",
    "metadata",
    "reasoning",
    "reasoning_effort",
    "n",
    "seed",
    "top_logprobs",
]

_leaf = (
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=5)
    | st.sampled_from(
        ["stop", "error", "text", "thinking", "image_url", "data:image/png;base64,aGk=", "reasoning.text"]
    )
)
_json = st.recursive(
    _leaf,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(_KEYS),
            inner,
            max_size=4,
        )
    ),
    max_leaves=8,
)


_content = st.fixed_dictionaries({}, optional=dict.fromkeys(_IN_CONTENT, _json)) | _json
_finish = st.sampled_from(["stop", "length", "tool_calls", "error", "new"]) | _json
_choice = st.fixed_dictionaries(
    {},
    optional={
        "index": st.integers(0, 2) | _json,
        "delta": _content,
        "message": _content,
        "finish_reason": _finish,
        "native_finish_reason": _finish,
        "logprobs": _json,
    },
)
_answer = st.fixed_dictionaries(
    {"choices": st.lists(_choice, max_size=2) | _json},
    optional=dict.fromkeys(("id", "model", "usage", "x_groq", "cost", "error", "citations"), _json),
)


@given(st.lists(_answer, max_size=3), st.booleans())
@settings(deadline=None, max_examples=100)
def test_a_stream_of_anything_ends_in_an_answer_or_in_an_error_of_the_provider(chunks, done):
    body = b"".join(b"data: " + json.dumps(chunk).encode() + b"\n\n" for chunk in chunks)
    body += b"data: [DONE]\n\n" if done else b""
    whole, error = parsed(PROTOCOL.new_parser(ENDPOINT, {}), [body])
    assert (error is None) == any(isinstance(event, Finished) for event in whole)
    bytewise, split_error = parsed(PROTOCOL.new_parser(ENDPOINT, {}), [bytes([byte]) for byte in body])
    assert str(split_error) == str(error)
    # Whatever it was, a caller can be told.
    renderer = PROTOCOL.new_renderer(AnswerHead(id="x", model="m", created=1))
    assert isinstance(renderer.feed(bytewise), bytes)


@given(_answer, st.sampled_from([200, 400, 429, 500]))
@settings(deadline=None, max_examples=100)
def test_an_answer_of_anything_is_an_answer_or_an_error_of_the_provider(answer, status):
    try:
        response = PROTOCOL.parse_response(status, {}, json.dumps(answer).encode())
    except ProviderError:
        return
    assert response.choices


_message = st.fixed_dictionaries(
    {"role": st.sampled_from(["system", "user", "assistant", "tool", "function"])},
    optional={
        "content": st.text(max_size=5) | st.lists(_json, max_size=2) | _json,
        **dict.fromkeys(_IN_MESSAGE, _json),
    },
)
_request = st.fixed_dictionaries(
    {"messages": st.lists(_message, min_size=1, max_size=2)},
    optional=dict.fromkeys(_IN_REQUEST, _json),
)


@given(_request, st.sampled_from([None, "reasoning_details", "content", "extra_content", "reasoning_content"]))
@settings(deadline=None, max_examples=100)
def test_a_request_of_anything_is_read_and_sent_on_or_refused_by_its_path(request_, field):
    try:
        request = PROTOCOL.parse_request(json.dumps(request_).encode())
    except MalformedRequest:
        return
    envelope(request)
    quirks: dict[str, Any] = {"reasoning_field": field, "reasoning": "budget", "reasoning_object": True}
    omits = (frozenset[str](), frozenset({"messages.cache", "messages.reasoning", "messages.is_error"}))
    for omit in omits:
        endpoint = Endpoint(provider="p", protocol="chat_completions", base_url="", omit=omit, **quirks)
        for native in (request.native, None):
            given_ = msgspec.structs.replace(request, native=native)
            call = UpstreamCall(endpoint=endpoint, model="m", request=given_, deadline=0)
            try:
                sent = json.loads(PROTOCOL.render_request(call, stream=True).body)
            except RequestNotExpressible:
                assert native is None, "a native request is sent on as it is"
                continue
            assert sent["model"] == "m"
            assert len(sent["messages"]) == len(request.messages)
