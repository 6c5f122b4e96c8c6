"""
What each protocol tells its callers, read by its own parser: the same answer, proven complete, and not before its end.

For every protocol, the template for the next one too; what only one of them can say has tests of its own.
"""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest

from adapters.chat import ChatResponse, Choice, Event, Finished, StopReason, TextDelta, ToolCall, as_events
from adapters.contract import AnswerHead, Endpoint, StreamParser, ToldError
from adapters.errors import Broken, ErrorClass, Rejected
from metering.usage import Usage
from tests.fakes.answers import gathered, gathered_response, parsed
from tests.fakes.protocols import EVERY

_HEAD = AnswerHead(id="x1", model="m", created=1767225600)
_CALLS = (
    ToolCall(id="call_1", name="get_weather", arguments='{"city":"Paris"}'),
    ToolCall(id="call_2", name="get_weather", arguments='{"city":"東京"}'),
)
_TEXTS = {
    "text": "Hello there.",
    "stumbling blocks": 'data: [DONE]\n\nevent: error\r\n"end"\u2028\u0085\x0c\\ {"type":"message_stop"} 🦑',
}


def _answer(reason: StopReason, **choice: Any) -> ChatResponse:
    return ChatResponse(
        choices=(Choice(index=0, stop_reason=reason, native_stop_reason="", **choice),),
        usage=Usage(input_total=30, output_total=7),
        response_id="x1",
        served_model="m",
    )


ANSWERS = {
    **{name: _answer(StopReason.STOP, text=text) for name, text in _TEXTS.items()},
    "a limit": _answer(StopReason.LENGTH, text="Hello th"),
    "calls": _answer(StopReason.TOOL_CALLS, tool_calls=_CALLS),
    "text and a call": _answer(StopReason.TOOL_CALLS, text="I will look.", tool_calls=_CALLS[:1]),
}
_EACH = [
    pytest.param(protocol, answer, id=f"{protocol}-{name}") for protocol in EVERY for name, answer in ANSWERS.items()
]


def _parser(protocol: str) -> StreamParser:
    return EVERY[protocol].new_parser(Endpoint(provider="p", protocol=protocol, base_url=""), {})


def _meaning(told: dict[str, Any]) -> dict[str, Any]:
    choice = told["choices"]["0"]
    return {
        "text": choice["text"],
        "calls": [(call["name"], call["arguments"]) for call in choice["tool_calls"]],
        "end": choice["end"][0],
        "input": told["usage"]["input_total"],
        "output": told["usage"]["output_total"],
    }


def _rendered(protocol: str, events: list[Event]) -> list[bytes]:
    renderer = EVERY[protocol].new_renderer(_HEAD)
    return [renderer.feed([event]) for event in events]


def _events(answer: ChatResponse) -> list[Event]:
    """As a provider would stream it: text in pieces, and of two calls the arguments by turns."""
    events: list[Event] = []
    for event in as_events(answer):
        if isinstance(event, TextDelta):
            events += [TextDelta(event.text[at : at + 5]) for at in range(0, len(event.text), 5)]
        else:
            events.append(event)
    return events


@pytest.mark.parametrize(("protocol", "answer"), _EACH)
def test_a_whole_answer_is_read_back_as_it_was(protocol, answer):
    body = EVERY[protocol].render_response(answer)
    assert _meaning(gathered_response(EVERY[protocol].parse_response(200, {}, body))) == _meaning(
        gathered_response(answer)
    )


@pytest.mark.parametrize(("protocol", "answer"), _EACH)
def test_a_stream_is_read_back_as_it_was_however_it_is_split(protocol, answer):
    body = b"".join(_rendered(protocol, _events(answer)))
    for size in (1, 7, len(body)):
        events, error = parsed(_parser(protocol), [body[at : at + size] for at in range(0, len(body), size)])
        assert error is None
        assert _meaning(gathered(events)) == _meaning(gathered_response(answer))


@pytest.mark.parametrize(("protocol", "answer"), _EACH)
def test_a_stream_that_is_cut_before_its_end_was_told_is_not_proven(protocol, answer):
    told = _rendered(protocol, _events(answer))
    unfinished = b"".join(told[:-1])
    for cut in sorted({0, len(unfinished), *random.Random(1).choices(range(len(unfinished) + 1), k=20)}):
        events, error = parsed(_parser(protocol), [unfinished[:cut]])
        assert isinstance(error, Broken)
        assert error.code == "no_terminal"
        assert not any(isinstance(event, Finished) for event in events)


@pytest.mark.parametrize(("protocol", "answer"), _EACH)
def test_an_answer_of_the_protocol_itself_is_handed_on_byte_for_byte(protocol, answer):
    body = EVERY[protocol].render_response(answer)
    strange = body[:-1] + b', "what_we_do_not_know":  [1.0]}'
    response = EVERY[protocol].parse_response(200, {}, strange)
    assert EVERY[protocol].render_response(response) == strange
    other = msgspec.structs.replace(response, native_protocol="another")
    assert b"what_we_do_not_know" not in EVERY[protocol].render_response(other)


@pytest.mark.parametrize("protocol", EVERY)
@pytest.mark.parametrize(
    ("status", "expected"), [(400, ErrorClass.FATAL), (429, ErrorClass.TRANSIENT), (503, ErrorClass.TRANSIENT)]
)
def test_an_error_that_is_told_is_read_as_one(protocol, status, expected):
    told = ToldError(status=status, code="told_here", message="It did not work.")
    error = EVERY[protocol].parse_error(status, {}, EVERY[protocol].render_error(told))
    assert isinstance(error, Rejected)
    assert error.error_class is expected
    renderer = EVERY[protocol].new_renderer(_HEAD)
    stream = renderer.feed([TextDelta("Hel")]) + renderer.fail(told)
    events, failure = parsed(_parser(protocol), [stream])
    assert isinstance(failure, Rejected)
    assert gathered(events)["choices"]["0"]["text"] == "Hel"
    assert not gathered(events)["finished"]


@pytest.mark.parametrize("protocol", EVERY)
@pytest.mark.parametrize(
    "body",
    [b"", b"<html>Bad Gateway</html>", b"[]", b'"x"', b"\xff", b"[" * 5000],
    ids=["empty", "a page", "a list", "text", "no UTF-8", "deep"],
)
def test_an_error_may_have_any_body(protocol, body):
    for status in (302, 400, 403, 429, 502):
        assert isinstance(EVERY[protocol].parse_error(status, {}, body), Rejected)
        with pytest.raises(Rejected):
            EVERY[protocol].parse_response(status, {}, body)
