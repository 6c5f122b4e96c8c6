"""Gemini: any split gives the same events, no bytes and no request crash it, and what is told is read back the same."""

from __future__ import annotations

import contextlib
import json

from hypothesis import given, settings
from hypothesis import strategies as st

from adapters.chat import (
    ChatResponse,
    Choice,
    Image,
    Reasoning,
    StopReason,
    TokenLogprob,
    ToolCall,
    as_events,
)
from adapters.contract import AnswerHead, Endpoint
from adapters.errors import Broken, MalformedRequest, ProviderError
from adapters.protocols.gemini import Gemini
from metering.usage import Usage
from tests.fakes.answers import gathered, gathered_response, parsed

PROTOCOL = Gemini()
ENDPOINT = Endpoint(provider="p", protocol="gemini", base_url="")

_text = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
_signature = st.none() | st.sampled_from(["QUJD", "REVG", "-_", "no base64"])
_part = st.one_of(
    st.builds(lambda t, s: {"text": t} | ({"thoughtSignature": s} if s else {}), _text, _signature),
    st.builds(lambda t: {"text": t, "thought": True}, _text),
    st.builds(
        lambda n, a, s: {"functionCall": {"name": n, "args": a}} | ({"thoughtSignature": s} if s else {}),
        st.just("f"),
        st.dictionaries(_text, _text | st.integers(-9, 9) | st.none(), max_size=2),
        _signature,
    ),
    st.just({"inlineData": {"mimeType": "image/png", "data": "AAEC"}}),
    st.just({"executableCode": {"code": "1"}}),
    st.just({"unknown": 1}),
    st.just({}),
)
_usage = st.none() | st.fixed_dictionaries(
    {"promptTokenCount": st.integers(0, 99)}, optional={"candidatesTokenCount": st.integers(0, 99)}
)
_chunk = st.builds(
    lambda index, parts, usage, finish: {
        "candidates": [{"index": index, "content": {"parts": parts}} | ({"finishReason": finish} if finish else {})],
        "usageMetadata": usage,
        "responseId": "r",
    },
    st.integers(0, 1),
    st.lists(_part, max_size=3),
    _usage,
    st.sampled_from([None, None, "STOP"]),
)


@st.composite
def streams(draw: st.DrawFn) -> list[bytes]:
    """The events of a complete stream, each with its blank line."""
    chunks = draw(st.lists(_chunk, min_size=1, max_size=6))
    seen = {candidate["index"] for chunk in chunks for candidate in chunk["candidates"]}
    chunks += [{"candidates": [{"index": index, "finishReason": "STOP"}]} for index in sorted(seen)]
    end = draw(st.sampled_from([b"\n", b"\r\n", b"\r"]))
    ascii_only = draw(st.booleans())
    return [b"data: " + json.dumps(chunk, ensure_ascii=ascii_only).encode() + end + end for chunk in chunks]


@given(streams(), st.data())
@settings(deadline=None)
def test_any_split_of_the_bytes_gives_the_same_events(events, data):
    body = b"".join(events)
    cuts = sorted(data.draw(st.sets(st.integers(1, len(body) - 1), max_size=20)))
    pieces = [body[start:stop] for start, stop in zip([0, *cuts], [*cuts, len(body)], strict=True)]
    whole, error = parsed(PROTOCOL.new_parser(ENDPOINT, {}), [body])
    assert error is None
    assert gathered(whole)["finished"]
    assert parsed(PROTOCOL.new_parser(ENDPOINT, {}), pieces) == (whole, None)


@given(streams())
@settings(deadline=None)
def test_a_stream_cut_within_its_last_event_never_finishes(events):
    body = b"".join(events)
    for cut in range(len(body) - len(events[-1]) + 7, len(body.rstrip())):
        told, error = parsed(PROTOCOL.new_parser(ENDPOINT, {}), [body[:cut]])
        assert isinstance(error, Broken)
        assert not gathered(told)["finished"]


@given(
    st.lists(
        st.binary(max_size=40) | st.sampled_from([b"data: ", b"\n", b"\r\n", b"{", b"[", b'{"candidates":']),
        max_size=12,
    )
)
@settings(deadline=None)
def test_no_bytes_raise_anything_but_an_error_of_a_provider(pieces):
    _, error = parsed(PROTOCOL.new_parser(ENDPOINT, {}), pieces)
    assert isinstance(error, ProviderError)


_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | _text,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_text, inner, max_size=3),
    max_leaves=8,
)
_names = st.sampled_from(
    [
        "role",
        "parts",
        "text",
        "thought",
        "thoughtSignature",
        "functionCall",
        "functionResponse",
        "inlineData",
        "args",
        "name",
        "response",
        "mimeType",
        "data",
        "fileData",
        "fileUri",
        "user",
        "model",
        "id",
    ]
)
_shaped = st.recursive(
    _json | _names,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_names, inner, max_size=4),
    max_leaves=12,
)


@given(
    st.binary(max_size=60)
    | st.dictionaries(
        st.sampled_from(
            ["contents", "tools", "toolConfig", "generationConfig", "systemInstruction", "generation_config"]
        ),
        _shaped,
        max_size=5,
    ).map(lambda fields: json.dumps(fields).encode())
)
@settings(deadline=None)
def test_no_request_raises_anything_but_what_is_wrong_with_it(body):
    for parse in (PROTOCOL.parse_request, PROTOCOL.parse_embedding_request):
        with contextlib.suppress(MalformedRequest):
            parse(body)


@st.composite
def responses(draw: st.DrawFn) -> ChatResponse:
    choices = []
    for index in range(draw(st.integers(1, 2))):
        calls = tuple(
            ToolCall(
                id=f"c{number}",
                name="f",
                arguments=json.dumps(draw(st.dictionaries(_text, _json, max_size=2))),
                signature=draw(st.none() | st.sampled_from(["gemini:call:QUJD", "gemini:call:REVG"])),
            )
            for number in range(draw(st.integers(0, 2)))
        )
        text = draw(_text)
        reasoning: list[Reasoning] = []
        if thought := draw(_text):
            reasoning.append(
                Reasoning(text=thought, signature=draw(st.sampled_from([None, "gemini:thought:QUJD", "EqoB"])))
            )
        if draw(st.booleans()):
            start = draw(st.integers(0, len(text)))
            end = draw(st.integers(start, len(text)))
            reasoning.append(Reasoning(signature=f"gemini:text:{start}:{end}:REVG"))
        choices.append(
            Choice(
                index=index,
                text=text,
                reasoning=tuple(reasoning),
                tool_calls=calls,
                images=tuple(draw(st.lists(st.just(Image(data=b"\0", media_type="image/png")), max_size=2))),
                logprobs=draw(st.none() | st.just((TokenLogprob(token="a", logprob=-1.5),))),
                stop_reason=StopReason.TOOL_CALLS
                if calls
                else draw(st.sampled_from([StopReason.STOP, StopReason.LENGTH])),
                native_stop_reason="",
            )
        )
    return ChatResponse(
        choices=tuple(choices),
        usage=draw(st.just(Usage()) | st.just(Usage(input_total=7, cache_read=2, output_total=5, reasoning=3))),
        response_id="id",
        served_model="m",
    )


def _comparable(told: dict[str, object]) -> dict[str, object]:
    """Without the native word for the end, which is of the protocol it came from."""
    choices = told["choices"]
    assert isinstance(choices, dict)
    return {**told, "choices": {i: {**choice, "end": choice["end"][0]} for i, choice in choices.items()}}


@given(responses(), st.booleans())
@settings(deadline=None)
def test_what_is_told_is_read_back_the_same(response, one_by_one):
    again = PROTOCOL.parse_response(200, {}, PROTOCOL.render_response(response))
    assert _comparable(gathered_response(again)) == _comparable(gathered_response(response))
    renderer = PROTOCOL.new_renderer(AnswerHead(id="id", model="m", created=1))
    events = list(as_events(response))
    batches = [[event] for event in events] if one_by_one else [events]
    stream = b"".join(renderer.feed(batch) for batch in batches)
    told, error = parsed(PROTOCOL.new_parser(ENDPOINT, {}), [stream])
    assert error is None
    assert _comparable(gathered(told)) == _comparable(gathered_response(response))
