"""Answers and errors of Workers AI, as they are read and as its callers are told them."""

from __future__ import annotations

import contextlib
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adapters.chat import ChatResponse, Choice, Reasoning, StopReason, TextDelta, ToolCall, as_events
from adapters.contract import AnswerHead, Endpoint, ToldError
from adapters.errors import Broken, ErrorClass, MalformedRequest, ProviderError, Rejected
from adapters.protocols.workers_ai import WorkersAI
from metering.usage import Usage
from tests.fakes.answers import gathered, gathered_response, parsed

PROTOCOL = WorkersAI()
ENDPOINT = Endpoint(provider="p", protocol="workers_ai", base_url="")
HEAD = AnswerHead(id="id", model="m", created=1)

_F, _O, _T = ErrorClass.FATAL, ErrorClass.OURS, ErrorClass.TRANSIENT


@pytest.mark.parametrize(
    ("status", "number", "expected"),
    [
        (400, 5007, (_O, False, False)),
        (400, 5004, (_F, False, False)),
        (400, 3003, (_F, False, False)),
        (400, 3039, (_F, False, False)),
        (401, 10000, (_O, False, True)),
        (403, 9109, (_O, False, True)),
        (400, 6003, (_O, False, True)),
        (404, 7003, (_O, False, False)),
        (403, 5018, (_O, False, False)),
        (403, 5016, (_O, False, False)),
        (403, 3041, (_O, False, False)),
        (403, 3023, (_O, False, True)),
        (404, 3042, (_O, False, False)),
        (405, 5019, (_O, False, False)),
        (405, 5005, (_F, False, False)),
        (408, 3007, (_T, False, False)),
        (408, 3008, (_T, False, False)),
        (413, 3006, (_F, False, False)),
        (429, 3036, (_O, False, True)),
        (429, 4006, (_O, False, True)),
        (429, 3040, (_T, False, False)),
        (429, 971, (_T, True, False)),
        (500, 1, (_T, False, False)),
        (422, 1, (_F, False, False)),
    ],
)
def test_a_number_means_what_cloudflare_documents(status, number, expected):
    body = {"success": False, "errors": [{"code": number, "message": "SECRET"}], "result": None}
    error = PROTOCOL.parse_error(status, {}, json.dumps(body).encode())
    assert isinstance(error, Rejected)
    assert (error.error_class, error.rate_limited, error.credential_fault) == expected
    assert error.status == status
    assert "SECRET" not in f"{error} {error.code}"


@pytest.mark.parametrize(
    ("status", "body", "error_class"),
    [
        (403, b"<html>SECRET</html>", _O),
        (404, b"SECRET", _O),
        (502, b"", _T),
        (400, b'{"error": "SECRET"}', _F),
        (400, b'{"errors": "SECRET"}', _F),
        (400, b'{"errors": [5], "error": []}', _F),
        (400, b"[1]", _F),
        (500, b"[" * 100_000, _T),
        (429, b'{"error": {"message": "SECRET", "type": "x"}}', _T),
    ],
)
def test_an_error_in_any_other_envelope_is_still_one(status, body, error_class):
    error = PROTOCOL.parse_error(status, {"retry-after": "3"}, body)
    assert isinstance(error, Rejected)
    assert error.error_class is error_class
    assert error.retry_after_s == 3.0
    assert "SECRET" not in f"{error} {error.code}"


def test_an_answer_of_its_own_passes_untouched():
    native = b'{"result":{"response":"a","new":1.50},"success":true,"errors":[],"messages":[]}'
    assert PROTOCOL.render_response(PROTOCOL.parse_response(200, {}, b"\n" + native)) == native


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (b'{"result":{"response":"a"},"success":true}', "a"),
        (b'{"response":"a"}', "a"),
        (b'{"result":"a","success":true}', "a"),
        (b'{"result":{"response":{"n": 1.50}},"success":true,"errors":null}', '{"n": 1.50}'),
        (b'{"result":{"response":[1, 2]},"success":true}', "[1, 2]"),
        (b'{"choices":[{"message":{"content":"a"},"finish_reason":"stop"}]}', "a"),
    ],
)
def test_an_answer_is_read_in_its_envelope_or_bare(body, text):
    (choice,) = PROTOCOL.parse_response(200, {}, body).choices
    assert (choice.text, choice.stop_reason) == (text, StopReason.STOP)


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b"{}", "malformed"),
        (b'{"result":{"response":null},"success":true}', "no_terminal"),
        (b'{"response":"","usage":{"prompt_tokens":1,"completion_tokens":0}}', "no_terminal"),
        (b"no", "malformed"),
        (b'{"result":{},"success":true}', "malformed"),
        (b'{"result":{"choices":[]},"success":true}', "malformed"),
        (b'{"result":{"choices":[{"message":{"content":"a"}}]},"success":true}', "no_terminal"),
        (b'{"result":' + b"[" * 5000, "malformed"),
    ],
)
def test_a_body_that_is_no_whole_answer_is_none(body, code):
    with pytest.raises(Broken) as caught:
        PROTOCOL.parse_response(200, {}, body)
    assert caught.value.code == code


@pytest.mark.parametrize(
    "body",
    [
        b'{"success":false,"errors":[{"code":3040}],"result":null}',
        b'{"result":{"errors":[{"code":3040}]},"success":true}',
        b'{"errors":[{"code":3040}]}',
        b'{"error":{"code":503,"message":"SECRET"}}',
        b'{"choices":[{"message":{"content":"a"},"finish_reason":"error"}]}',
    ],
)
def test_an_error_under_200_is_an_error(body):
    with pytest.raises(Rejected) as caught:
        PROTOCOL.parse_response(200, {}, body)
    assert caught.value.error_class is _T


def test_an_error_is_told_in_cloudflares_envelope_with_our_code_in_it():
    error = ToldError(status=429, code="queue_full", message="full", param="model", request_id="r")
    told = json.loads(PROTOCOL.render_error(error))
    assert told["success"] is False
    assert told["errors"] == [
        {"code": 3040, "message": "full", "type": "queue_full", "source": {"pointer": "model"}, "request_id": "r"}
    ]
    renderer = PROTOCOL.new_renderer(HEAD)
    stream = renderer.feed([TextDelta("a")]) + renderer.fail(ToldError(status=503, code="c", message="m"))
    _, failed = parsed(PROTOCOL.new_parser(ENDPOINT, {}), [stream])
    assert isinstance(failed, Rejected)


def test_arguments_that_are_no_object_are_told_as_the_text_they_are():
    call = ToolCall(id="1", name="f", arguments='{"a": ')
    choice = Choice(index=0, tool_calls=(call,), stop_reason=StopReason.LENGTH, native_stop_reason="length")
    again = PROTOCOL.parse_response(200, {}, PROTOCOL.render_response(ChatResponse(choices=(choice,))))
    assert again.choices[0].tool_calls == (call,)


_text = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)


@st.composite
def responses(draw: st.DrawFn) -> ChatResponse:
    choices = []
    for index in range(draw(st.integers(1, 2))):
        calls = tuple(
            ToolCall(id=f"c{n}", name="f", arguments=json.dumps(draw(st.dictionaries(_text, _text, max_size=2))))
            for n in range(draw(st.integers(0, 2)))
        )
        thought = draw(_text)
        choices.append(
            Choice(
                index=index,
                text=draw(_text),
                reasoning=(Reasoning(text=thought),) if thought else (),
                tool_calls=calls,
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


@given(responses(), st.booleans(), st.data())
@settings(deadline=None)
def test_what_is_told_is_read_back_the_same_at_any_split(response, one_by_one, data):
    again = PROTOCOL.parse_response(200, {}, PROTOCOL.render_response(response))
    assert _comparable(gathered_response(again)) == _comparable(gathered_response(response))
    renderer = PROTOCOL.new_renderer(HEAD)
    events = list(as_events(response))
    batches = [[event] for event in events] if one_by_one else [events]
    stream = b"".join(renderer.feed(batch) for batch in batches)
    whole, error = parsed(PROTOCOL.new_parser(ENDPOINT, {}), [stream])
    assert error is None
    assert _comparable(gathered(whole)) == _comparable(gathered_response(response))
    cuts = sorted(data.draw(st.sets(st.integers(1, len(stream) - 1), max_size=20)))
    pieces = [stream[start:stop] for start, stop in zip([0, *cuts], [*cuts, len(stream)], strict=True)]
    assert parsed(PROTOCOL.new_parser(ENDPOINT, {}), pieces) == (whole, None)
    cut = data.draw(st.integers(0, len(stream.rstrip()) - 2))
    _, unfinished = parsed(PROTOCOL.new_parser(ENDPOINT, {}), [stream[:cut]])
    assert isinstance(unfinished, Broken)


_PIECES = [b"data: ", b"\n\n", b"\r\n", b"{", b"[", b'{"response":', b'{"tool_calls":[{}]}', b"data: [DONE]\n\n"]


@given(st.lists(st.binary(max_size=40) | st.sampled_from(_PIECES), max_size=12))
@settings(deadline=None)
def test_no_bytes_raise_anything_but_an_error_of_a_provider(pieces):
    events, error = parsed(PROTOCOL.new_parser(ENDPOINT, {}), pieces)
    assert (error is None) == gathered(events)["finished"]
    assert error is None or isinstance(error, ProviderError)


_names = st.sampled_from(["role", "content", "user", "tool", "type", "text", "tool_calls", "function", "name"])
_shaped = st.recursive(
    st.none() | st.booleans() | st.integers() | _text | _names,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_names, inner, max_size=4),
    max_leaves=12,
)
_fields = st.dictionaries(
    st.sampled_from(["messages", "prompt", "tools", "tool_choice", "response_format", "text"]), _shaped, max_size=5
)


@given(st.binary(max_size=60) | _fields.map(lambda fields: json.dumps(fields).encode()))
@settings(deadline=None)
def test_no_request_raises_anything_but_what_is_wrong_with_it(body):
    for parse in (PROTOCOL.parse_request, PROTOCOL.parse_embedding_request):
        with contextlib.suppress(MalformedRequest):
            parse(body)
