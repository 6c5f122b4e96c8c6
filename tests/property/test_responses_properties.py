"""Any split of a stream gives the same; what is rendered for a caller is read back as it was; no input is a crash."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from adapters.chat import (
    ChatResponse,
    Choice,
    Event,
    Finished,
    Image,
    NativeRequest,
    Reasoning,
    StopReason,
    TokenLogprob,
    ToolCall,
    as_events,
)
from adapters.contract import AnswerHead, Endpoint, ToldError, UpstreamCall
from adapters.errors import Broken, MalformedRequest, ProviderError, Rejected, RequestNotExpressible
from adapters.protocols.responses import Responses
from metering.usage import Usage
from tests.fakes.answers import gathered, gathered_response, parsed

PROTOCOL = Responses()
ENDPOINT = Endpoint(provider="p", protocol="responses", base_url="")
HEAD = AnswerHead(id="resp_1", model="m", created=1)

_text = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
_some = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12)
#: Whose it is stands before a signature.
_signed = st.builds("{}:{}".format, st.sampled_from(["responses", "chat_completions", "gemini:thought"]), _some)
_number = st.floats(-9, 0, allow_nan=False)
_token = st.builds(
    lambda token, logprob, top: TokenLogprob(token=token, logprob=logprob, bytes=None, top=tuple(top)),
    _some,
    _number,
    st.lists(st.builds(lambda t, p: TokenLogprob(token=t, logprob=p), _some, _number), max_size=2),
)
_thought = st.one_of(
    st.builds(lambda text, sig, rs: Reasoning(text=text, signature=sig, id=rs), _some, st.none() | _signed, st.none()),
    st.builds(lambda text, sig: Reasoning(text=text, signature=sig, id="rs_own"), _some, _signed),
    st.builds(lambda sig, red: Reasoning(signature=sig, redacted=red), _signed, st.booleans()),
)
_image = st.builds(lambda data: Image(data=data, media_type="image/png"), st.binary(min_size=1, max_size=9)) | st.just(
    Image(url="https://h/i.png")
)


@st.composite
def answers(draw: st.DrawFn) -> ChatResponse:
    names = draw(st.lists(_some, max_size=3, unique=True))
    calls = tuple(
        ToolCall(id=f"c{i}", name=name, arguments=draw(_text), signature=draw(st.none() | _some))
        for i, name in enumerate(names)
    )
    text, refusal = draw(_text), draw(_text)
    stop = draw(st.sampled_from([StopReason.STOP, StopReason.LENGTH, StopReason.CONTENT_FILTER]))
    if stop is StopReason.STOP:
        stop = StopReason.TOOL_CALLS if calls else StopReason.REFUSAL if refusal else stop
    logprobs = tuple(draw(st.lists(_token, max_size=2))) if text else ()
    cached = draw(st.integers(0, 9))
    return ChatResponse(
        choices=(
            Choice(
                index=0,
                text=text,
                refusal=refusal,
                reasoning=tuple(draw(st.lists(_thought, max_size=3))),
                tool_calls=calls,
                images=tuple(draw(st.lists(_image, max_size=2))),
                logprobs=logprobs or None,
                stop_reason=stop,
                native_stop_reason="x",
            ),
        ),
        usage=Usage(
            input_total=draw(st.integers(9, 99)),
            cache_read=cached,
            cache_write_5m=9 - cached,
            output_total=draw(st.integers(5, 99)),
            reasoning=draw(st.integers(0, 5)),
        ),
        response_id="resp_1",
        served_model="m",
    )


def _told(answer: ChatResponse) -> dict[str, Any]:
    """
    What a reader of the rendered answer must find: a block without a name of its own was given one, and a picture is
    one of the calls that OpenAI bills.
    """
    (choice,) = answer.choices
    named = tuple(
        thought if thought.id is not None else msgspec.structs.replace(thought, id=f"rs_made_resp_1_{i}")
        for i, thought in enumerate(choice.reasoning)
    )
    usage = answer.usage
    if choice.images:
        usage = msgspec.structs.replace(usage, units={"image_generation": len(choice.images)})
    choices = (msgspec.structs.replace(choice, reasoning=named),)
    return _read(gathered_response(msgspec.structs.replace(answer, choices=choices, usage=usage)))


def _read(told: dict[str, Any]) -> dict[str, Any]:
    """Without the provider's own word for the end, which a caller is not told."""
    for choice in told["choices"].values():
        choice["end"] = choice["end"][0]
    return told


@st.composite
def rendered(draw: st.DrawFn) -> tuple[ChatResponse, bytes]:
    answer = draw(answers())
    renderer, body, batch = PROTOCOL.new_renderer(HEAD), b"", list[Event]()
    for event in as_events(answer):
        batch.append(event)
        if draw(st.booleans()):
            body += renderer.feed(batch)
            batch = []
    return answer, body + renderer.feed(batch)


@given(rendered())
@settings(deadline=None)
def test_a_rendered_stream_is_read_back_as_the_answer_it_was(told):
    answer, body = told
    events, error = parsed(PROTOCOL.new_parser(ENDPOINT, {}), [body])
    assert error is None
    assert _read(gathered(events)) == _told(answer)


@given(answers())
@settings(deadline=None)
def test_a_rendered_answer_is_read_back_as_it_was(answer):
    body = PROTOCOL.render_response(answer)
    again = PROTOCOL.parse_response(200, {}, body)
    assert _read(gathered_response(again)) == _told(answer)
    events, error = parsed(PROTOCOL.new_parser(ENDPOINT, {}), [body])
    assert error is None
    assert _read(gathered(events)) == _told(answer)


@given(rendered(), st.data())
@settings(deadline=None)
def test_any_split_of_the_bytes_gives_the_same_events(told, data):
    _, body = told
    cuts = sorted(data.draw(st.sets(st.integers(1, len(body) - 1), max_size=20)))
    pieces = [body[start:stop] for start, stop in zip([0, *cuts], [*cuts, len(body)], strict=True)]
    whole = parsed(PROTOCOL.new_parser(ENDPOINT, {}), [body])
    assert whole[1] is None
    assert parsed(PROTOCOL.new_parser(ENDPOINT, {}), pieces) == whole


@given(rendered(), st.data())
@settings(deadline=None)
def test_a_stream_cut_before_the_end_of_its_last_event_never_finishes(told, data):
    _, body = told
    cut = data.draw(st.integers(0, len(body.rstrip()) - 1))
    events, error = parsed(PROTOCOL.new_parser(ENDPOINT, {}), [body[:cut]])
    assert isinstance(error, Broken)
    assert not any(isinstance(event, Finished) for event in events)


@given(rendered(), st.integers(0, 6))
@settings(deadline=None)
def test_a_stream_that_fails_is_an_error_to_its_reader_and_never_an_answer(told, kept):
    answer, _ = told
    renderer = PROTOCOL.new_renderer(HEAD)
    content = [event for event in as_events(answer) if not isinstance(event, Finished)][:kept]
    body = renderer.feed(content) + renderer.fail(ToldError(status=502, code="upstream_broken", message="m"))
    events, error = parsed(PROTOCOL.new_parser(ENDPOINT, {}), [body])
    assert isinstance(error, Rejected)
    assert error.code == "upstream_broken"
    assert not any(isinstance(event, Finished) for event in events)


@given(st.lists(st.binary(max_size=40), max_size=20))
@settings(deadline=None)
def test_bytes_that_are_no_stream_end_in_an_error_and_never_in_a_crash(pieces):
    events, error = parsed(PROTOCOL.new_parser(ENDPOINT, {}), [b"data: ", *pieces])
    assert error is not None
    assert not any(isinstance(event, Finished) for event in events)


@given(rendered(), st.data())
@settings(deadline=None)
def test_a_stream_with_spoilt_bytes_is_never_a_crash(told, data):
    body = bytearray(told[1])
    for _ in range(data.draw(st.integers(1, 4))):
        body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    parsed(PROTOCOL.new_parser(ENDPOINT, {}), [bytes(body)])


_json = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-5, 5)
    | st.floats(allow_nan=False)
    | _text
    | st.sampled_from(["x", "auto"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["type", "role", "content", "text", "call_id", "output", "name", "summary", "status", "id", "error"]
            ),
            inner
            | st.sampled_from(["message", "user", "function_call", "reasoning", "input_text", "refusal", "function"]),
            max_size=4,
        )
    ),
    max_leaves=8,
)
_types = st.sampled_from(
    [
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.added",
        "response.output_item.done",
        "response.function_call_arguments.delta",
        "response.function_call_arguments.done",
        "response.reasoning_text.delta",
        "response.reasoning_summary_text.done",
        "response.refusal.done",
        "response.created",
        "response.failed",
        "response.completed",
        "error",
        "unknown",
    ]
)
_event = st.builds(
    lambda kind, fields: {"type": kind, **fields},
    _types,
    st.dictionaries(
        st.sampled_from(
            [
                "delta",
                "text",
                "output_index",
                "content_index",
                "item",
                "part",
                "response",
                "error",
                "usage",
                "arguments",
            ]
        ),
        _json,
        max_size=5,
    ),
)


@given(st.lists(_event, max_size=8))
@settings(deadline=None)
def test_events_of_any_content_are_an_answer_or_an_error_and_never_a_crash(told):
    body = b"".join(b"data: " + json.dumps(event).encode() + b"\n\n" for event in told)
    events, error = parsed(PROTOCOL.new_parser(ENDPOINT, {}), [body])
    gathered(events)
    assert (error is None) == any(isinstance(event, Finished) for event in events)


@given(_json, st.sampled_from([200, 302, 400, 401, 404, 429, 500]))
@settings(deadline=None)
def test_a_body_of_any_content_is_an_answer_or_an_error_and_never_a_crash(content, status):
    with contextlib.suppress(ProviderError):
        PROTOCOL.parse_response(status, {}, json.dumps(content).encode())


@given(
    st.dictionaries(
        st.sampled_from(["input", "instructions", "tools", "tool_choice", "text", "reasoning", "include", "new"]),
        _json,
        max_size=6,
    ),
    st.frozensets(st.sampled_from(["messages.cache", "messages.reasoning", "store", "input", "tools"])),
)
@settings(deadline=None)
def test_a_request_of_any_content_is_read_or_refused_and_what_is_read_can_be_sent_or_refused(fields, omit):
    try:
        request = PROTOCOL.parse_request(json.dumps(fields).encode())
    except MalformedRequest:
        return
    assert request.native is not None
    foreign = NativeRequest(protocol="other", fields={}, unmapped=request.native.unmapped)
    endpoint = msgspec.structs.replace(ENDPOINT, omit=omit)
    for one in (request, msgspec.structs.replace(request, native=foreign)):
        try:
            sent = PROTOCOL.render_request(
                UpstreamCall(endpoint=endpoint, model="m", request=one, deadline=0), stream=False
            )
        except RequestNotExpressible:
            continue
        assert json.loads(sent.body)["model"] == "m"
