"""Answers of Gemini as its callers are told them, and read back."""

from __future__ import annotations

import base64
import json
from typing import Any

import msgspec
import pytest

from adapters.chat import (
    ChatResponse,
    Choice,
    Event,
    Image,
    Reasoning,
    ReasoningDelta,
    StopReason,
    TextDelta,
    TokenLogprob,
    ToolCall,
    ToolCallStart,
    UsageReport,
    as_events,
)
from adapters.contract import AnswerHead, Endpoint, ToldError
from adapters.errors import Broken, ErrorClass, Rejected
from adapters.protocols.gemini import Gemini
from adapters.protocols.gemini.signatures import heard, of_image, of_text, of_thought, told
from metering.usage import Usage
from tests.fakes.answers import gathered, gathered_response, parsed

PROTOCOL = Gemini()
HEAD = AnswerHead(id="id-1", model="m-1", created=1)
ENDPOINT = Endpoint(provider="p", protocol="gemini", base_url="")

WHOLE = ChatResponse(
    choices=(
        Choice(
            index=0,
            text="Hello, you",
            reasoning=(
                Reasoning(text="First.", signature="gemini:thought:QUJD"),
                Reasoning(text="Second."),
                Reasoning(signature="gemini:text:7:10:REVG"),
            ),
            tool_calls=(
                ToolCall(id="a", name="f", arguments='{ "x": 1.50 }', signature="gemini:call:R0hJ"),
                ToolCall(id="b", name="g", arguments="{}"),
            ),
            images=(Image(data=b"\0\1", media_type="image/webp"),),
            logprobs=(TokenLogprob(token="H", logprob=-0.5, top=(TokenLogprob(token="J", logprob=-2.0),)),),
            stop_reason=StopReason.TOOL_CALLS,
            native_stop_reason="STOP",
        ),
        Choice(index=1, text="x", stop_reason=StopReason.LENGTH, native_stop_reason="MAX_TOKENS"),
    ),
    usage=Usage(input_total=10, cache_read=4, output_total=9, reasoning=5),
    response_id="id-1",
    served_model="m-1",
)


def streamed(response: ChatResponse, *, one_by_one: bool = True) -> bytes:
    renderer = PROTOCOL.new_renderer(HEAD)
    events = list(as_events(response))
    batches = [[event] for event in events] if one_by_one else [events]
    return b"".join(renderer.feed(batch) for batch in batches)


def choice(**fields: Any) -> ChatResponse:
    known = {"index": 0, "stop_reason": StopReason.STOP, "native_stop_reason": "end_turn", **fields}
    return msgspec.structs.replace(WHOLE, choices=(Choice(**known),))


def candidate(response: ChatResponse) -> Any:
    (found,) = json.loads(PROTOCOL.render_response(response))["candidates"]
    return found


def test_a_whole_answer_is_told_in_full_and_read_back_the_same():
    body = PROTOCOL.render_response(WHOLE)
    again = PROTOCOL.parse_response(200, {}, body)
    assert gathered_response(again) == gathered_response(WHOLE)
    told_body = json.loads(body)
    assert told_body["usageMetadata"] == {
        "promptTokenCount": 10,
        "cachedContentTokenCount": 4,
        "candidatesTokenCount": 4,
        "thoughtsTokenCount": 5,
        "totalTokenCount": 19,
    }
    assert told_body["candidates"][0]["content"]["parts"] == [
        {"text": "First.", "thought": True, "thoughtSignature": "QUJD"},
        {"text": "Second.", "thought": True},
        {"text": "Hello, "},
        {"text": "you", "thoughtSignature": "REVG"},
        {"inlineData": {"mimeType": "image/webp", "data": "AAE="}},
        {"functionCall": {"id": "a", "name": "f", "args": {"x": 1.5}}, "thoughtSignature": "R0hJ"},
        {"functionCall": {"id": "b", "name": "g", "args": {}}},
    ]


@pytest.mark.parametrize("one_by_one", [True, False])
def test_a_streamed_answer_is_read_back_the_same_and_only_its_last_chunk_ends_it(one_by_one):
    stream = streamed(WHOLE, one_by_one=one_by_one)
    events, error = parsed(PROTOCOL.new_parser(ENDPOINT, {}), [stream])
    assert error is None
    assert gathered(events) == gathered_response(WHOLE)
    chunks = stream.split(b"\r\n\r\n")[:-1]
    for count in range(len(chunks)):
        _, cut = parsed(PROTOCOL.new_parser(ENDPOINT, {}), [b"\r\n\r\n".join(chunks[:count]) + b"\r\n\r\n"])
        assert isinstance(cut, Broken)


def test_every_chunk_of_a_stream_names_the_answer():
    for chunk in streamed(WHOLE).split(b"\r\n\r\n")[:-1]:
        content = json.loads(chunk.removeprefix(b"data: "))
        assert content["responseId"] == "id-1"
        assert content["modelVersion"] == "m-1"
        assert content["candidates"]


def test_a_batch_without_news_gives_no_bytes():
    renderer = PROTOCOL.new_renderer(HEAD)
    assert renderer.feed([UsageReport(usage=Usage(input_total=3))]) == b""
    assert renderer.feed([ToolCallStart(0, "a", "f")]) == b""
    chunk = json.loads(renderer.feed([TextDelta("a")]).removeprefix(b"data: "))
    assert chunk["usageMetadata"] == {"promptTokenCount": 3}


def test_an_answer_of_gemini_passes_untouched():
    native = b'{"candidates":[{"content":{"parts":[{"text":"a"}]},"finishReason":"STOP"}],"new": 1.50}'
    assert PROTOCOL.render_response(PROTOCOL.parse_response(200, {}, b"\n" + native + b"\n")) == native


@pytest.mark.parametrize(
    ("reason", "native", "word"),
    [
        (StopReason.STOP, "end_turn", "STOP"),
        (StopReason.LENGTH, "length", "MAX_TOKENS"),
        (StopReason.CONTENT_FILTER, "content_filter", "SAFETY"),
        (StopReason.CONTENT_FILTER, "RECITATION", "RECITATION"),
        (StopReason.CONTENT_FILTER, "JAILBREAK", "SAFETY"),
        (StopReason.REFUSAL, "refusal", "STOP"),
        (StopReason.PAUSE, "pause_turn", "STOP"),
        (StopReason.OTHER, "odd", "STOP"),
    ],
)
def test_an_end_is_told_in_geminis_words(reason, native, word):
    found = candidate(choice(text="a", stop_reason=reason, native_stop_reason=native))
    assert found["finishReason"] == word
    assert found.get("finishMessage") == (native if reason in {StopReason.PAUSE, StopReason.OTHER} else None)


def test_a_refusal_is_told_as_what_it_says():
    found = candidate(choice(refusal="I will not.", stop_reason=StopReason.REFUSAL))
    assert found["content"]["parts"] == [{"text": "I will not."}]


@pytest.mark.parametrize(
    ("reason", "word"), [(StopReason.TOOL_CALLS, "MALFORMED_FUNCTION_CALL"), (StopReason.LENGTH, "MAX_TOKENS")]
)
def test_arguments_that_are_no_object_are_not_repaired_but_told(reason, word):
    call = ToolCall(id="a", name="f", arguments='{"x": ')
    found = candidate(choice(text="a", tool_calls=(call,), stop_reason=reason))
    assert found["finishReason"] == word
    assert found["content"]["parts"] == [{"text": "a"}]


def test_a_call_without_arguments_has_an_empty_object():
    found = candidate(choice(tool_calls=(ToolCall(id="a", name="f", arguments=""),)))
    assert found["content"]["parts"] == [{"functionCall": {"id": "a", "name": "f", "args": {}}}]


def test_usage_that_is_not_known_is_left_out():
    body = json.loads(PROTOCOL.render_response(msgspec.structs.replace(WHOLE, usage=Usage(output_total=3))))
    assert body["usageMetadata"] == {"candidatesTokenCount": 3}
    assert "usageMetadata" not in json.loads(PROTOCOL.render_response(msgspec.structs.replace(WHOLE, usage=Usage())))


@pytest.mark.parametrize(
    "signature", ["QUJD", "+/+/", "-_-_", "gAAAAAB-_==", "EqoB", "with spaces", "ümlaut", "a", "tollbridge"]
)
def test_a_signature_of_another_provider_comes_back_letter_by_letter_through_a_client_that_holds_bytes(signature):
    on_the_wire = told(signature)
    held = base64.b64decode(on_the_wire, validate=True)
    assert heard(base64.urlsafe_b64encode(held).decode()) == (signature, False)
    assert heard(on_the_wire) == (signature, False)


@pytest.mark.parametrize("signature", ["QUJD", "+/+/"])
def test_geminis_own_signature_is_told_as_it_was(signature):
    for marked in (of_thought(signature), of_text(signature, 0, 4), of_image(signature, 1)):
        assert told(marked) == signature
    assert heard(signature.replace("+", "-").replace("/", "_")) == (signature, True)


def test_a_thought_of_another_provider_is_told_with_its_signature_behind_it_and_read_back_as_one():
    renderer = PROTOCOL.new_renderer(HEAD)
    finished = list(as_events(choice(text="a")))[-1]
    batches: list[list[Event]] = [[ReasoningDelta("hm")], [ReasoningDelta("", 0, "EqoB")], [TextDelta("a")], [finished]]
    events, error = parsed(PROTOCOL.new_parser(ENDPOINT, {}), [renderer.feed(batch) for batch in batches])
    assert error is None
    assert gathered(events)["choices"]["0"]["blocks"] == [
        {"text": "hm", "signature": "EqoB", "redacted": False, "id": None}
    ]


def test_an_error_is_told_as_a_status_with_our_code_in_it():
    error = ToldError(status=429, code="queue_full", message="full", param="model", request_id="r-1")
    told_error = json.loads(PROTOCOL.render_error(error))["error"]
    assert (told_error["code"], told_error["status"], told_error["message"]) == (429, "RESOURCE_EXHAUSTED", "full")
    info, bad = told_error["details"]
    assert info["reason"] == "QUEUE_FULL"
    assert info["metadata"] == {"code": "queue_full", "request_id": "r-1"}
    assert bad["fieldViolations"] == [{"field": "model", "description": "full"}]


@pytest.mark.parametrize(
    ("status", "word"),
    [
        (400, "INVALID_ARGUMENT"),
        (401, "UNAUTHENTICATED"),
        (403, "PERMISSION_DENIED"),
        (404, "NOT_FOUND"),
        (413, "INVALID_ARGUMENT"),
        (422, "INVALID_ARGUMENT"),
        (500, "INTERNAL"),
        (502, "UNAVAILABLE"),
        (503, "UNAVAILABLE"),
        (504, "DEADLINE_EXCEEDED"),
        (599, "INTERNAL"),
    ],
)
def test_a_status_has_its_word(status, word):
    told_error = json.loads(PROTOCOL.render_error(ToldError(status=status, code="c", message="m")))
    assert told_error["error"]["status"] == word


def test_an_error_in_a_stream_is_one_that_the_parser_knows():
    renderer = PROTOCOL.new_renderer(HEAD)
    stream = renderer.feed([TextDelta("a")]) + renderer.fail(ToldError(status=503, code="c", message="m"))
    _, error = parsed(PROTOCOL.new_parser(ENDPOINT, {}), [stream])
    assert isinstance(error, Rejected)
    assert error.error_class is ErrorClass.TRANSIENT


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b"{}", "malformed"),
        (b"[]", "malformed"),
        (b"no", "malformed"),
        (b'{"candidates": []}', "malformed"),
        (b'{"candidates": [{"content": {"parts": [{"text": "a"}]}}]}', "no_terminal"),
        (b'{"candidates": [{"finishReason": "FINISH_REASON_UNSPECIFIED"}]}', "no_terminal"),
        (b'{"candidates": 5}', "malformed"),
        (b'{"candidates": ' + b"[" * 5000, "malformed"),
    ],
)
def test_a_body_without_proof_of_its_end_is_no_answer(body, code):
    with pytest.raises(Broken) as caught:
        PROTOCOL.parse_response(200, {}, body)
    assert caught.value.code == code


def test_an_error_under_200_is_an_error():
    with pytest.raises(Rejected) as caught:
        PROTOCOL.parse_response(200, {}, b'{"error": {"code": 503, "status": "UNAVAILABLE", "message": "SECRET"}}')
    assert caught.value.error_class is ErrorClass.TRANSIENT
    assert "SECRET" not in str(caught.value)


def test_a_failed_end_says_whether_content_came_with_it():
    for parts, came in (([{"text": "a"}], True), ([], False)):
        body = json.dumps({"candidates": [{"content": {"parts": parts}, "finishReason": "OTHER"}]}).encode()
        with pytest.raises(Rejected) as caught:
            PROTOCOL.parse_response(200, {}, body)
        assert caught.value.after_content is came
        assert caught.value.error_class is ErrorClass.TRANSIENT


@pytest.mark.parametrize(
    ("model", "queries", "maps", "units"),
    [
        ("gemini-3.5-flash", [["a"], ["a", "b"]], False, {"web_search": 2}),
        ("gemini-2.5-flash", [["a", "b"], ["a", "b"]], False, {"web_search": 1}),
        ("models/gemini-2.0-flash-001", [["a"], []], True, {"web_search": 1, "maps": 1}),
        ("gemini-20-flash", [["a", "b"], []], False, {"web_search": 2}),
        ("gemini-3.5-flash", [[], []], True, {"maps": 1}),
        ("gemini-3.5-flash", [[], []], False, None),
    ],
)
def test_what_was_looked_up_is_counted_as_it_is_billed_however_often_it_is_told(model, queries, maps, units):
    places = [{"maps": {"uri": "u"}}] if maps else [{"web": {"uri": "u"}}]

    def chunk(found: list[str], finish: str | None) -> bytes:
        said: dict[str, Any] = {"content": {"parts": [{"text": "a"}]}}
        said["groundingMetadata"] = {"webSearchQueries": found, "groundingChunks": places}
        if finish:
            said["finishReason"] = finish
        figures = {"promptTokenCount": 7, "candidatesTokenCount": 3}
        return json.dumps({"candidates": [said], "usageMetadata": figures, "modelVersion": model}).encode()

    all_of_it = max(queries, key=len)
    whole = PROTOCOL.parse_response(200, {}, chunk(all_of_it, "STOP"))
    assert whole.usage == Usage(input_total=7, output_total=3, units=units)
    body = b"".join(b"data: " + one + b"\n\n" for one in (chunk(queries[0], None), chunk(queries[1], "STOP")))
    events, error = parsed(PROTOCOL.new_parser(ENDPOINT, {}), [body])
    assert error is None
    told = Usage()
    for event in events:
        if isinstance(event, UsageReport):
            told = told.merge(event.usage)
    assert told == Usage(input_total=7, output_total=3, units=units)


@pytest.mark.parametrize("strange", [7, "x", [], {"webSearchQueries": 7}, {"groundingChunks": [7]}, None])
def test_words_about_searches_that_are_none_do_no_harm(strange):
    said = {"content": {"parts": [{"text": "a"}]}, "finishReason": "STOP", "groundingMetadata": strange}
    answer = PROTOCOL.parse_response(200, {}, json.dumps({"candidates": [said]}).encode())
    assert (answer.choices[0].text, answer.usage.units) == ("a", None)
