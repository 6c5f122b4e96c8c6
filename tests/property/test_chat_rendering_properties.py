"""What we tell a caller in Chat Completions, our own parser reads back as the same answer, proven complete."""

from __future__ import annotations

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from adapters.chat import (
    ChatResponse,
    Choice,
    Event,
    Finished,
    Image,
    Reasoning,
    StopReason,
    TokenLogprob,
    ToolCall,
    as_events,
)
from adapters.contract import AnswerHead, Endpoint, ToldError
from adapters.errors import Broken, Rejected
from adapters.protocols.chat_completions import ChatCompletions
from metering.usage import Usage
from tests.fakes.answers import gathered, gathered_response, parsed

PROTOCOL = ChatCompletions()
ENDPOINT = Endpoint(provider="p", protocol="chat_completions", base_url="")
HEAD = AnswerHead(id="id-1", model="m-1", created=1)

_text = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=12)
_some = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1, max_size=12)
#: Whose it is stands before a signature.
_signed = st.builds("{}:{}".format, st.sampled_from(["responses", "chat_completions", "gemini:thought"]), _some)
_block = st.one_of(
    st.builds(Reasoning, text=_some, signature=st.none() | _signed, id=st.none() | _some),
    st.builds(Reasoning, signature=_signed),
    st.builds(Reasoning, signature=_signed, redacted=st.just(True), id=st.none() | _some),
)
_image = st.builds(Image, url=st.just("https://example.com/a.png")) | st.builds(
    Image, data=st.binary(min_size=1, max_size=9), media_type=st.just("image/webp")
)
_token = st.builds(TokenLogprob, token=_text, logprob=st.floats(-9, 0))
_logprob = st.builds(TokenLogprob, token=_text, logprob=st.floats(-9, 0), top=st.lists(_token, max_size=2).map(tuple))
_call = st.builds(ToolCall, id=_some, name=_some, arguments=_text, signature=st.none() | _signed)


@st.composite
def choices(draw: st.DrawFn, index: int) -> Choice:
    refusal, calls = draw(_text), tuple(draw(st.lists(_call, max_size=3)))
    ended = {True: StopReason.TOOL_CALLS, False: StopReason.REFUSAL if refusal else StopReason.STOP}[bool(calls)]
    stop_reason = draw(st.sampled_from([ended, StopReason.LENGTH, StopReason.CONTENT_FILTER]))
    return Choice(
        index=index,
        text=draw(_text),
        refusal=refusal,
        reasoning=tuple(draw(st.lists(_block, max_size=3))),
        tool_calls=calls,
        images=tuple(draw(st.lists(_image, max_size=2))),
        logprobs=draw(st.none() | st.lists(_logprob, min_size=1, max_size=3).map(tuple)),
        stop_reason=stop_reason,
        native_stop_reason="",
    )


@st.composite
def responses(draw: st.DrawFn) -> ChatResponse:
    return ChatResponse(
        choices=tuple(draw(choices(index)) for index in range(draw(st.integers(1, 2)))),
        usage=draw(st.sampled_from([Usage(input_total=3, output_total=4, cache_read=1, reasoning=2), Usage()])),
        response_id="id-1",
        served_model="m-1",
    )


def without_native_ends(told: dict[str, object]) -> dict[str, object]:
    for choice in told["choices"].values():  # type: ignore[attr-defined]
        choice["end"] = choice["end"][0]
    return told


def batches(events: list[Event], data: st.DataObject) -> list[list[Event]]:
    cuts = sorted(data.draw(st.sets(st.integers(0, len(events)), max_size=5)))
    return [events[start:stop] for start, stop in zip([0, *cuts], [*cuts, len(events)], strict=True)]


@given(responses(), st.data())
@settings(deadline=None)
def test_a_rendered_stream_is_read_back_as_the_answer_it_was(response, data):
    events = list(as_events(response))
    renderer = PROTOCOL.new_renderer(HEAD)
    pieces = [renderer.feed(batch) for batch in batches(events, data)]
    found, error = parsed(PROTOCOL.new_parser(ENDPOINT, {}), pieces)
    assert error is None
    assert without_native_ends(gathered(found)) == without_native_ends(gathered(events))


@given(responses())
@settings(deadline=None)
def test_a_rendered_answer_is_read_back_as_the_answer_it_was(response):
    found = PROTOCOL.parse_response(200, {}, PROTOCOL.render_response(response))
    assert without_native_ends(gathered_response(found)) == without_native_ends(gathered_response(response))


@given(responses(), st.data())
@settings(deadline=None)
def test_a_rendered_stream_is_proven_by_its_last_event_and_never_before(response, data):
    events = list(as_events(response))
    renderer = PROTOCOL.new_renderer(HEAD)
    pieces = [renderer.feed([event]) for event in events[: data.draw(st.integers(0, len(events) - 1))]]
    found, error = parsed(PROTOCOL.new_parser(ENDPOINT, {}), pieces)
    assert isinstance(error, Broken)
    assert not any(isinstance(event, Finished) for event in found)
    # An error in its place is read as one.
    pieces.append(renderer.fail(ToldError(status=503, code="provider_failed", message="it failed")))
    _, error = parsed(PROTOCOL.new_parser(ENDPOINT, {}), pieces)
    assert isinstance(error, Rejected)
    assert error.code == "provider_failed"


@given(responses())
@settings(deadline=None)
def test_what_was_answered_may_be_sent_back_with_its_signatures(response):
    message = msgspec.json.decode(PROTOCOL.render_response(response))["choices"][0]["message"]
    body = msgspec.json.encode({"messages": [message, {"role": "user", "content": "go on"}]})
    back = PROTOCOL.parse_request(body).messages[0]
    first = response.choices[0]
    assert back.reasoning == first.reasoning
    assert back.tool_calls == first.tool_calls
