"""What must hold for any bytes and any answer in the Messages API."""

from __future__ import annotations

import contextlib
import json

from hypothesis import example, given, settings
from hypothesis import strategies as st

from adapters.chat import ChatResponse, Choice, Reasoning, StopReason, ToolCall, as_events
from adapters.contract import AnswerHead, Endpoint
from adapters.errors import MalformedRequest, ProviderError
from adapters.protocols.anthropic_messages import AnthropicMessages
from metering.usage import Usage
from tests.fakes.answers import gathered, gathered_response, parsed

PROTOCOL = AnthropicMessages()
ENDPOINT = Endpoint(provider="p", protocol="anthropic_messages", base_url="http://h")
HEAD = AnswerHead(id="msg_9", model="short", created=1)

_words = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
_signature = st.builds(
    "{}:{}".format,
    st.sampled_from(["anthropic_messages", "gemini:thought", "x"]),
    st.text("abcXYZ+/=", min_size=1, max_size=8),
)
_count = st.integers(0, 1000)
_native = {
    StopReason.STOP: "end_turn",
    StopReason.LENGTH: "max_tokens",
    StopReason.TOOL_CALLS: "tool_use",
    StopReason.REFUSAL: "refusal",
    StopReason.PAUSE: "pause_turn",
}
_thought = st.one_of(
    st.builds(Reasoning, text=_words.filter(bool), signature=_signature),
    st.builds(Reasoning, text=_words.filter(bool)),
    st.builds(Reasoning, signature=_signature, redacted=st.just(True)),
)
_object = st.dictionaries(_words, st.recursive(st.none() | _count | _words, st.lists, max_leaves=4), max_size=3)
_call = st.builds(ToolCall, id=_words.filter(bool), name=_words.filter(bool), arguments=_object.map(json.dumps))


@st.composite
def _answers(draw: st.DrawFn) -> ChatResponse:
    reason = draw(st.sampled_from(sorted(_native)))
    parts = [draw(_count) for _ in range(4)]
    return ChatResponse(
        choices=(
            Choice(
                index=0,
                text=draw(_words),
                refusal=draw(_words) if reason is StopReason.REFUSAL else "",
                reasoning=tuple(draw(st.lists(_thought, max_size=3))),
                tool_calls=tuple(draw(st.lists(_call, max_size=3))),
                stop_reason=reason,
                native_stop_reason=_native[reason],
            ),
        ),
        usage=Usage(
            input_total=sum(parts),
            cache_read=parts[1],
            cache_write_5m=parts[2],
            cache_write_1h=parts[3],
            output_total=draw(st.integers(500, 1000)),
            reasoning=draw(st.integers(0, 500)),
        ),
        response_id="msg_9",
        served_model="short",
    )


@given(response=_answers(), data=st.data())
@settings(deadline=None)
def test_a_rendered_stream_read_back_is_the_same_answer_whatever_the_batches_and_splits(response, data):
    events = list(as_events(response))
    cuts = sorted(data.draw(st.sets(st.integers(0, len(events)))))
    renderer = PROTOCOL.new_renderer(HEAD)
    bounds = zip([0, *cuts], [*cuts, len(events)], strict=True)
    written = b"".join(renderer.feed(events[start:stop]) for start, stop in bounds)
    size = data.draw(st.integers(1, 64))
    pieces = [written[start : start + size] for start in range(0, len(written), size)]
    found, error = parsed(PROTOCOL.new_parser(ENDPOINT, {}), pieces)
    assert error is None
    assert gathered(found) == gathered_response(response)


@given(response=_answers())
@settings(deadline=None)
def test_a_rendered_answer_read_back_is_the_same(response):
    body = PROTOCOL.render_response(response)
    assert gathered_response(PROTOCOL.parse_response(200, {}, body)) == gathered_response(response)


_events = st.sampled_from(
    [
        b'event: message_start\ndata: {"type":"message_start","message":{"id":"m","usage":{"input_tokens":1}}}\n\n',
        b'data: {"type":"content_block_start","index":0,"content_block":{"type":"text","text":""}}\n\n',
        b'data: {"type":"content_block_start","index":1,"content_block":{"type":"tool_use","id":"t","name":"f"}}\n\n',
        b'data: {"type":"content_block_start","index":2,"content_block":{"type":"thinking"}}\n\n',
        b'data: {"type":"content_block_delta","index":0,"delta":{"type":"text_delta","text":"a"}}\n\n',
        b'data: {"type":"content_block_delta","index":1,"delta":{"type":"input_json_delta","partial_json":"{"}}\n\n',
        b'data: {"type":"content_block_delta","index":2,"delta":{"type":"signature_delta","signature":"S"}}\n\n',
        b'data: {"type":"content_block_stop","index":0}\n\n',
        b'data: {"type":"content_block_stop","index":1}\n\n',
        b'data: {"type":"content_block_stop","index":2}\n\n',
        b'data: {"type":"message_delta","delta":{"stop_reason":"end_turn"},"usage":{"output_tokens":2}}\n\n',
        b'data: {"type":"message_stop"}\n\n',
        b'event: error\ndata: {"type":"error","error":{"type":"api_error"}}\n\n',
        b"event: message_stop\n\n",
        b"event: message_delta\ndata: {}\n\n",
        b'data: {"type":"content_block_delta","index":0}\n\n',
        b"data: [DONE]\n\n",
        b'{"type":"message"',
        b": x\n",
    ]
)


@given(pieces=st.lists(st.one_of(_events, st.binary(max_size=20)), max_size=30))
@example(pieces=[b'event: error\ndata: "x"\n\n'])
@example(pieces=[b"event: error\ndata: \xff\n\n"])
@example(pieces=[b"event: message_start\ndata: 1\n\n"])
@settings(deadline=None, max_examples=300)
def test_no_bytes_make_the_parser_raise_anything_else_and_no_split_changes_what_it_says(pieces):
    body = b"".join(pieces)
    whole, error = parsed(PROTOCOL.new_parser(ENDPOINT, {}), [body])
    split, split_error = parsed(PROTOCOL.new_parser(ENDPOINT, {}), [bytes([byte]) for byte in body])
    assert gathered(split) == gathered(whole)
    assert (type(split_error), str(split_error)) == (type(error), str(error))
    assert gathered(whole)["finished"] == (error is None)


@given(status=st.integers(100, 599), body=st.binary(max_size=60))
@settings(deadline=None)
def test_no_body_makes_an_answer_raise_anything_else(status, body):
    with contextlib.suppress(ProviderError):
        PROTOCOL.parse_response(status, {}, body)
    assert isinstance(PROTOCOL.parse_error(status, {}, body), ProviderError)


_INNER = ["type", "text", "content", "source", "input", "id", "name"]
_json = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.sampled_from(["", "x", "text", "user", "ephemeral", "5m"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(_INNER), inner, max_size=4),
    max_leaves=6,
)
_KINDS = ["text", "image", "document", "tool_use", "tool_result", "thinking", "redacted_thinking", "future", 3]
_FIELDS = [*_INNER[1:], "tool_use_id", "thinking", "data", "cache_control"]
_block = st.builds(
    lambda kind, fields: {"type": kind, **fields},
    st.sampled_from(_KINDS),
    st.dictionaries(st.sampled_from(_FIELDS), _json, max_size=4),
)
_message = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "system", "other"]), "content": st.lists(_block, max_size=3) | _json}
)
_TOP = ["max_tokens", "system", "tools", "tool_choice", "output_config", "output_format", "thinking", "metadata"]
_request = st.builds(
    lambda messages, fields: json.dumps({**fields, "messages": messages}).encode(),
    st.lists(_message, max_size=2),
    st.dictionaries(st.sampled_from([*_TOP, "stop_sequences", "stream"]), _json, max_size=2),
)


@given(request=_request | st.binary(max_size=60))
@settings(deadline=None, max_examples=200)
def test_no_body_of_a_caller_raises_anything_but_that_it_is_malformed(request):
    with contextlib.suppress(MalformedRequest):
        PROTOCOL.parse_request(request)
