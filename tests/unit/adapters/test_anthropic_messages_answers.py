"""Answers, streams and errors of the Messages API: as they are told to a caller, and what a provider's mean."""

from __future__ import annotations

import json

import msgspec
import pytest

from adapters.chat import (
    ChatResponse,
    Choice,
    ChoiceEnd,
    Event,
    Finished,
    Image,
    ImageOutput,
    Reasoning,
    ReasoningDelta,
    StopReason,
    TextDelta,
    ToolCall,
    ToolCallDelta,
    ToolCallStart,
    UsageReport,
    as_events,
)
from adapters.contract import AnswerHead, Endpoint, ToldError, UpstreamCall
from adapters.errors import Broken, ErrorClass, ProviderError, Rejected
from adapters.protocols.anthropic_messages import AnthropicMessages
from adapters.telling import Untold, breaks
from metering.usage import NOTHING, Usage
from tests.fakes.answers import gathered, gathered_response, parsed

PROTOCOL = AnthropicMessages()
ENDPOINT = Endpoint(provider="p", protocol="anthropic_messages", base_url="http://h")
HEAD = AnswerHead(id="msg_9", model="short", created=1)
F, O, T = ErrorClass.FATAL, ErrorClass.OURS, ErrorClass.TRANSIENT  # noqa: E741 - a table's columns

USAGE = Usage(input_total=100, cache_read=50, cache_write_5m=10, cache_write_1h=5, output_total=9, reasoning=2)
CHOICE = Choice(
    index=0,
    text="Hello",
    reasoning=(
        Reasoning(text="hm", signature="anthropic_messages:S"),
        Reasoning(signature="anthropic_messages:ENC", redacted=True),
    ),
    tool_calls=(ToolCall(id="t1", name="f", arguments='{"a": 1}'), ToolCall(id="t2", name="g", arguments="")),
    stop_reason=StopReason.TOOL_CALLS,
    native_stop_reason="tool_calls",
)


def answer(choice: Choice = CHOICE, usage: Usage = USAGE) -> ChatResponse:
    return ChatResponse(choices=(choice,), usage=usage, response_id="chatcmpl-1", served_model="gpt")


def ended(reason: StopReason = StopReason.STOP, native: str = "stop") -> Finished:
    return Finished(ends=(ChoiceEnd(choice=0, stop_reason=reason, native_stop_reason=native),))


def told(body: bytes) -> dict[str, object]:
    content = json.loads(body)
    assert isinstance(content, dict)
    return content


def streamed(*events: Event) -> list[dict[str, object]]:
    """Event by event, each in a batch of its own; the name of each is its type."""
    renderer = PROTOCOL.new_renderer(HEAD)
    written = b"".join(renderer.feed([event]) for event in events)
    found = []
    for piece in written.split(b"\n\n")[:-1]:
        name, data = piece.split(b"\n")
        found.append(told(data.removeprefix(b"data: ")))
        assert name == f"event: {found[-1]['type']}".encode()
    return found


def read_back(written: bytes) -> tuple[list[Event], ProviderError | None]:
    return parsed(PROTOCOL.new_parser(ENDPOINT, {}), [written])


# ------------------------------------------------------------------ whole answers


def test_an_answer_of_another_protocol_is_told_whole():
    assert told(PROTOCOL.render_response(answer())) == {
        "id": "chatcmpl-1",
        "type": "message",
        "role": "assistant",
        "model": "gpt",
        "content": [
            {"type": "thinking", "thinking": "hm", "signature": "S"},
            {"type": "redacted_thinking", "data": "ENC"},
            {"type": "text", "text": "Hello"},
            {"type": "tool_use", "id": "t1", "name": "f", "input": {"a": 1}},
            {"type": "tool_use", "id": "t2", "name": "g", "input": {}},
        ],
        "stop_reason": "tool_use",
        "stop_sequence": None,
        "stop_details": None,
        "usage": {
            "input_tokens": 35,
            "cache_creation_input_tokens": 15,
            "cache_read_input_tokens": 50,
            "cache_creation": {"ephemeral_5m_input_tokens": 10, "ephemeral_1h_input_tokens": 5},
            "output_tokens": 9,
            "output_tokens_details": {"thinking_tokens": 2},
        },
    }


def test_figures_that_are_not_known_are_0_only_where_this_api_must_have_them():
    assert told(PROTOCOL.render_response(answer(usage=NOTHING)))["usage"] == {"input_tokens": 0, "output_tokens": 0}


def test_a_native_answer_passes_untouched():
    body = b' {"type":"message", "id":"m","content":[],"stop_reason":"end_turn","new":  [1],"usage":{}}\n'
    assert PROTOCOL.render_response(PROTOCOL.parse_response(200, {}, body)) == body.strip()


@pytest.mark.parametrize("arguments", ['{"a": "unfini', "[1]", "7", '"x"'])
def test_a_call_whose_arguments_are_no_object_is_left_out_and_others_are_not_invented(arguments):
    choice = msgspec.structs.replace(CHOICE, tool_calls=(ToolCall(id="t", name="f", arguments=arguments),))
    content = told(PROTOCOL.render_response(answer(choice)))["content"]
    assert isinstance(content, list)
    assert "tool_use" not in [block["type"] for block in content]
    assert breaks(PROTOCOL.untold, answer(choice))
    assert not breaks(PROTOCOL.untold, answer(msgspec.structs.replace(choice, stop_reason=StopReason.LENGTH)))
    untold = Untold(PROTOCOL.untold)
    for event in as_events(answer(choice)):
        untold.note(event)
    assert "broken_call" in untold.kinds


@pytest.mark.parametrize(
    ("reason", "native", "word"),
    [
        (StopReason.STOP, "stop", "end_turn"),
        (StopReason.STOP, "stop_sequence", "stop_sequence"),
        (StopReason.LENGTH, "length", "max_tokens"),
        (StopReason.LENGTH, "model_context_window_exceeded", "model_context_window_exceeded"),
        (StopReason.TOOL_CALLS, "STOP", "tool_use"),
        (StopReason.CONTENT_FILTER, "SAFETY", "refusal"),
        (StopReason.REFUSAL, "stop", "refusal"),
        (StopReason.PAUSE, "pause_turn", "pause_turn"),
        (StopReason.OTHER, "end_turn", "end_turn"),
        (StopReason.OTHER, "whatever", "end_turn"),
    ],
)
def test_how_an_answer_ended_has_a_word_of_this_api(reason, native, word):
    choice = msgspec.structs.replace(CHOICE, stop_reason=reason, native_stop_reason=native)
    assert told(PROTOCOL.render_response(answer(choice)))["stop_reason"] == word
    *_, delta, _ = streamed(ended(reason, native))
    assert isinstance(delta["delta"], dict)
    assert delta["delta"]["stop_reason"] == word


def test_words_of_a_refusal_are_its_explanation_both_ways():
    choice = Choice(index=0, refusal="I cannot", stop_reason=StopReason.REFUSAL, native_stop_reason="stop")
    body = PROTOCOL.render_response(answer(choice))
    assert told(body)["stop_details"] == {"type": "refusal", "category": None, "explanation": "I cannot"}
    read = PROTOCOL.parse_response(200, {}, body).choices[0]
    assert (read.refusal, read.stop_reason) == ("I cannot", StopReason.REFUSAL)


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b"", "malformed"),
        (b"<html>", "malformed"),
        (b"[]", "malformed"),
        (b"{}", "malformed"),
        (b'{"content":[],"stop_reason":null}', "no_terminal"),
        (b'{"content":[],"usage":{}}', "no_terminal"),
        (b'{"content":[{}],"stop_reason":"end_turn"}', "malformed"),
        (b'{"content":[{"type":"text","text":7}],"stop_reason":"end_turn"}', "malformed"),
        (b'{"content":"x","stop_reason":"end_turn"}', "malformed"),
        (b"[" * 100_000, "malformed"),
    ],
)
def test_what_is_no_complete_answer_is_broken(body, code):
    with pytest.raises(Broken) as caught:
        PROTOCOL.parse_response(200, {}, body)
    assert caught.value.code == code


def test_an_answer_keeps_what_is_known_beside_figures_of_nonsense_and_kinds_of_the_future():
    body = {
        "id": "m",
        "model": "x",
        "content": [{"type": "text", "text": "a"}, {"type": "future", "text": [1]}, {"type": "text", "text": "b"}],
        "stop_reason": "end_turn",
        "stop_details": "odd",
        "usage": {"input_tokens": 3, "output_tokens": "many"},
        "cost": "0.5",
    }
    response = PROTOCOL.parse_response(200, {"request-id": "req_1"}, json.dumps(body).encode())
    assert response.choices[0].text == "ab"
    assert response.usage == Usage(input_total=3)
    assert response.omitted == ("future",)
    assert response.provider_request_id == "req_1"


def test_kinds_that_were_left_out_are_bounded_in_number_and_form():
    blocks = [{"type": f"kind_{i}"} for i in range(50)] + [{"type": "SECRET words"}]
    body = {"content": blocks, "stop_reason": "end_turn"}
    omitted = PROTOCOL.parse_response(200, {}, json.dumps(body).encode()).omitted
    assert len(omitted) == 16
    assert PROTOCOL.parse_response(
        200, {}, json.dumps({"content": blocks[-1:], "stop_reason": "end_turn"}).encode()
    ).omitted == ("other",)


# ----------------------------------------------------------------------- streams


def test_an_answer_is_streamed_in_the_events_of_this_api():
    assert streamed(
        UsageReport(usage=Usage(input_total=100, cache_read=50)),
        ReasoningDelta("h"),
        ReasoningDelta("m"),
        ReasoningDelta("", 0, "S"),
        ReasoningDelta("", 0, "ENC", 1, redacted=True),
        TextDelta("Hel"),
        TextDelta("lo"),
        ToolCallStart(0, "t1", "f"),
        ToolCallDelta(0, '{"a":'),
        ToolCallDelta(0, "1}"),
        UsageReport(usage=USAGE),
        ended(StopReason.TOOL_CALLS),
    ) == [
        {
            "type": "message_start",
            "message": {
                "id": "msg_9",
                "type": "message",
                "role": "assistant",
                "model": "short",
                "content": [],
                "stop_reason": None,
                "stop_sequence": None,
                "stop_details": None,
                "usage": {"input_tokens": 50, "cache_read_input_tokens": 50, "output_tokens": 0},
            },
        },
        {
            "type": "content_block_start",
            "index": 0,
            "content_block": {"type": "thinking", "thinking": "", "signature": ""},
        },
        {"type": "content_block_delta", "index": 0, "delta": {"type": "thinking_delta", "thinking": "h"}},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "thinking_delta", "thinking": "m"}},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "signature_delta", "signature": "S"}},
        {"type": "content_block_stop", "index": 0},
        {"type": "content_block_start", "index": 1, "content_block": {"type": "redacted_thinking", "data": "ENC"}},
        {"type": "content_block_stop", "index": 1},
        {"type": "content_block_start", "index": 2, "content_block": {"type": "text", "text": ""}},
        {"type": "content_block_delta", "index": 2, "delta": {"type": "text_delta", "text": "Hel"}},
        {"type": "content_block_delta", "index": 2, "delta": {"type": "text_delta", "text": "lo"}},
        {"type": "content_block_stop", "index": 2},
        {
            "type": "content_block_start",
            "index": 3,
            "content_block": {"type": "tool_use", "id": "t1", "name": "f", "input": {}},
        },
        {"type": "content_block_delta", "index": 3, "delta": {"type": "input_json_delta", "partial_json": '{"a":'}},
        {"type": "content_block_delta", "index": 3, "delta": {"type": "input_json_delta", "partial_json": "1}"}},
        {"type": "content_block_stop", "index": 3},
        {
            "type": "message_delta",
            "delta": {"stop_reason": "tool_use", "stop_sequence": None, "stop_details": None},
            "usage": {
                "input_tokens": 35,
                "cache_creation_input_tokens": 15,
                "cache_read_input_tokens": 50,
                "cache_creation": {"ephemeral_5m_input_tokens": 10, "ephemeral_1h_input_tokens": 5},
                "output_tokens": 9,
                "output_tokens_details": {"thinking_tokens": 2},
            },
        },
        {"type": "message_stop"},
    ]


def test_calls_that_come_by_turns_keep_a_block_each_and_every_index_is_used_once():
    events: list[Event] = [
        TextDelta("a"),
        ReasoningDelta("t"),
        ToolCallStart(0, "t1", "f"),
        ToolCallDelta(0, '{"x"'),
        ToolCallStart(1, "t2", "g"),
        ToolCallDelta(1, "{}"),
        ToolCallDelta(0, ":1}"),
        TextDelta("b"),
        ended(StopReason.TOOL_CALLS),
    ]
    written = streamed(*events)
    starts = [event["index"] for event in written if event["type"] == "content_block_start"]
    stops = [event["index"] for event in written if event["type"] == "content_block_stop"]
    assert starts == list(range(5))
    assert sorted(stops, key=str) == starts
    found, error = read_back(PROTOCOL.new_renderer(HEAD).feed(events))
    assert error is None
    choice = gathered(found)["choices"]["0"]
    assert choice["text"] == "ab"
    assert [call["arguments"] for call in choice["tool_calls"]] == ['{"x":1}', "{}"]


def test_an_answer_without_a_word_is_a_stream_too():
    assert [event["type"] for event in streamed(ended())] == ["message_start", "message_delta", "message_stop"]


def test_a_picture_has_no_place_in_this_api_and_breaks_nothing():
    written = streamed(ImageOutput(Image(url="https://h/i")), TextDelta("a"), ended())
    assert [event["type"] for event in written][-2:] == ["message_delta", "message_stop"]


@pytest.mark.parametrize("before", [[], [TextDelta("Hel")]])
def test_an_error_ends_the_stream_and_our_own_parser_reads_it(before):
    renderer = PROTOCOL.new_renderer(HEAD)
    error = ToldError(status=529, code="provider_overloaded", message="it failed", request_id="r")
    written = renderer.feed(before) + renderer.fail(error)
    events, read = read_back(written)
    assert not gathered(events)["finished"]
    assert isinstance(read, Rejected)
    assert (read.code, read.error_class) == ("overloaded_error", T)
    assert b'"code":"provider_overloaded"' in written
    assert renderer.feed([TextDelta("x"), ended()]) == b""


def test_a_stream_is_proven_complete_after_its_last_event_and_not_before():
    renderer = PROTOCOL.new_renderer(HEAD)
    parser = PROTOCOL.new_parser(ENDPOINT, {})
    for event in as_events(answer()):
        assert not parser.finished
        parser.feed(renderer.feed([event]))
    assert parser.finished


def test_reasoning_survives_the_way_to_the_caller_and_back_to_the_provider():
    body = {
        "content": [
            {"type": "thinking", "thinking": "hm", "signature": "S"},
            {"type": "redacted_thinking", "data": "ENC"},
            {"type": "tool_use", "id": "t1", "name": "f", "input": {"a": 1}},
        ],
        "stop_reason": "tool_use",
    }
    response = PROTOCOL.parse_response(200, {}, json.dumps(body).encode())
    foreign = msgspec.structs.replace(response, native=None, native_protocol=None)
    told_content = told(PROTOCOL.render_response(foreign))["content"]
    request = PROTOCOL.parse_request(
        json.dumps(
            {
                "messages": [
                    {"role": "user", "content": "hi"},
                    {"role": "assistant", "content": told_content},
                    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": "x"}]},
                ]
            }
        ).encode()
    )
    call = UpstreamCall(endpoint=ENDPOINT, model="m", request=msgspec.structs.replace(request, native=None), deadline=0)
    sent = told(PROTOCOL.render_request(call, stream=False).body)["messages"]
    assert isinstance(sent, list)
    assert sent[1]["content"] == body["content"]


def test_a_streamed_answer_and_a_whole_one_come_to_the_same():
    whole = gathered_response(answer())
    events, error = read_back(b"".join(map(PROTOCOL.new_renderer(HEAD).feed, [list(as_events(answer()))])))
    assert error is None
    found = gathered(events)
    whole["choices"]["0"]["tool_calls"][1]["arguments"] = "{}"  # this API has an empty object for no arguments
    whole["choices"]["0"]["end"] = ["tool_calls", "tool_use"]
    assert found["choices"] == whole["choices"]
    assert found["usage"] == whole["usage"]


def test_output_counted_when_the_stream_began_is_not_what_a_cut_answer_had():
    start = {"type": "message_start", "message": {"id": "m", "usage": {"input_tokens": 7, "output_tokens": 3}}}
    events, error = read_back(f"event: message_start\ndata: {json.dumps(start)}\n\n".encode())
    assert isinstance(error, Broken)
    assert events == [UsageReport(usage=Usage(input_total=7))]


def test_what_follows_the_terminal_in_the_same_bytes_is_given_before_the_last_event():
    body = (
        b'data: {"type":"message_delta","delta":{"stop_reason":"end_turn"}}\n\ndata: {"type":"message_stop"}\n\n'
        b'event: ping\ndata: {"type":"ping","cost":"0.5"}\n\n'
    )
    batch = PROTOCOL.new_parser(ENDPOINT, {}).feed(body)
    assert batch[0] == UsageReport(reported_cost_usd="0.5")
    assert isinstance(batch[1], Finished)


def test_a_second_start_and_a_second_reason_change_nothing_that_was_said():
    refusal: dict[str, object] = {
        "type": "message_delta",
        "delta": {"stop_reason": "refusal", "stop_details": {"type": "refusal", "explanation": "No."}},
    }
    told_twice: list[dict[str, object]] = [
        {"type": "message_start", "message": {"id": "first", "model": "a"}},
        {"type": "message_start", "message": {"id": "second", "model": "b"}},
        refusal,
        refusal,
        {"type": "message_stop"},
    ]
    events, error = read_back("".join(f"data: {json.dumps(event)}\n\n" for event in told_twice).encode())
    assert error is None
    found = gathered(events)
    assert (found["response_id"], found["served_model"]) == ("first", "a")
    assert found["choices"]["0"]["refusal"] == "No."


@pytest.mark.parametrize(
    ("wire", "usage"),
    [
        (
            {
                "input_tokens": 1,
                "cache_creation_input_tokens": 5,
                "cache_creation": {"ephemeral_1h_input_tokens": 9},
                "output_tokens": 2,
            },
            Usage(input_total=6, cache_write_5m=0, cache_write_1h=5, output_total=2),
        ),
        (
            {"output_tokens": 3, "output_tokens_details": {"thinking_tokens": 7}},
            Usage(output_total=3, reasoning=3),
        ),
    ],
)
def test_a_part_is_never_more_than_its_whole(wire, usage):
    body = {"content": [], "stop_reason": "end_turn", "usage": wire}
    assert PROTOCOL.parse_response(200, {}, json.dumps(body).encode()).usage == usage


def test_thoughts_of_two_blocks_are_two_blocks():
    written = streamed(ReasoningDelta("a"), ReasoningDelta("b", block=1), ended())
    assert [event["index"] for event in written if event["type"] == "content_block_start"] == [0, 1]


def test_a_ping_is_no_payload_and_every_other_event_is():
    parser = PROTOCOL.new_parser(ENDPOINT, {})
    parser.feed(b'event: ping\ndata: {"type":"ping"}\n\n: comment\n\n')
    assert parser.payloads == 0
    parser.feed(b'event: future\ndata: {"type":"future"}\n\n')
    assert parser.payloads == 1


def test_blocks_without_end_are_stopped_before_they_fill_memory():
    block = '{"type":"content_block_start","index":%d,"content_block":{"type":"text","text":""}}'
    _, error = read_back("".join(f"data: {block % i}\n\n" for i in range(1000)).encode())
    assert error is not None
    assert error.code == "malformed"


def test_an_event_without_end_is_stopped_before_it_fills_memory():
    _, error = parsed(PROTOCOL.new_parser(ENDPOINT, {}), [b"data: " + b"x" * 100_000] * 200)
    assert error is not None
    assert error.code == "response_too_large"


# ------------------------------------------------------------------------ errors


@pytest.mark.parametrize(
    ("status", "kind", "message", "headers", "expected"),
    [
        (400, "invalid_request_error", "messages: SECRET", {}, (F, None, False, False)),
        (400, "invalid_request_error", "prompt is too long: 9 tokens > 8 maximum", {}, (F, None, False, False)),
        (400, "invalid_request_error", "Your credit balance is too low to access", {}, (O, None, False, True)),
        (400, "invalid_request_error", "You have reached your specified API usage limits.", {}, (O, None, False, True)),
        (400, "ModelError", "SECRET", {}, (O, None, False, False)),
        (401, "authentication_error", "invalid x-api-key", {}, (O, None, False, True)),
        (401, "ModelError", "SECRET", {}, (O, None, False, False)),
        (401, "CreditsError", "SECRET", {}, (O, None, False, True)),
        (402, "billing_error", "", {}, (O, None, False, True)),
        (403, "permission_error", "", {}, (O, None, False, True)),
        (404, "not_found_error", "model: claude-x", {}, (O, None, False, False)),
        (404, "not_found_error", "no such object", {}, (O, None, False, False)),
        (409, "conflict_error", "", {}, (T, None, False, False)),
        (413, "request_too_large", "", {}, (F, None, False, False)),
        (422, "whatever", "", {}, (F, None, False, False)),
        (429, "rate_limit_error", "", {"retry-after": "12"}, (T, 12.0, True, False)),
        (429, "rate_limit_error", "", {"retry-after": "12", "x-should-retry": "true"}, (T, 12.0, True, False)),
        (429, "rate_limit_error", "", {"x-should-retry": "false"}, (O, None, False, False)),
        (
            429,
            "rate_limit_error",
            "",
            {"retry-after": "Sun, 06 Nov 1994 08:49:37 GMT", "date": "Sun, 06 Nov 1994 08:49:07 GMT"},
            (T, 30.0, True, False),
        ),
        (429, "FreeUsageLimitError", "", {"retry-after": "7200"}, (T, 7200.0, True, False)),
        (500, "api_error", "", {}, (T, None, False, False)),
        (500, "api_error", "", {"x-should-retry": "false"}, (O, None, False, False)),
        (502, "", "", {}, (T, None, False, False)),
        (503, "", "", {"retry-after": "3"}, (T, 3.0, False, False)),
        (504, "timeout_error", "", {}, (T, None, False, False)),
        (529, "overloaded_error", "Overloaded", {}, (T, None, False, False)),
        (301, "", "", {}, (O, None, False, False)),
    ],
)
def test_an_error_response_means_what_its_status_type_and_headers_say(status, kind, message, headers, expected):
    body = json.dumps({"type": "error", "error": {"type": kind, "message": message}, "request_id": "r"}).encode()
    error = PROTOCOL.parse_error(status, headers, body)
    assert isinstance(error, Rejected)
    assert (error.error_class, error.retry_after_s, error.rate_limited, error.credential_fault) == expected
    assert error.status == status
    assert "SECRET" not in str(error)


@pytest.mark.parametrize(
    "code", ["enforced_spend_limit_reached", "organization_on_hold", "linked_organization_billing_unavailable"]
)
def test_the_finer_word_of_an_error_tells_an_account_that_is_out(code):
    body = {"type": "error", "error": {"type": "permission_error", "message": "x", "details": {"error_code": code}}}
    error = PROTOCOL.parse_error(429, {}, json.dumps(body).encode())
    assert isinstance(error, Rejected)
    assert (error.code, error.error_class, error.credential_fault) == (code, O, True)


@pytest.mark.parametrize(
    ("status", "body", "expected"),
    [
        (400, b"", F),
        (403, b"<html>SECRET</html>", O),
        (404, b"<html>", O),
        (404, b"[1]", O),
        (500, b"SECRET upstream", T),
        (429, b'{"error":"SECRET"}', T),
        (413, b'{"error":{"type":"request_too_large","message":"x"}}', F),
        (500, b"[" * 100_000, T),
    ],
)
def test_an_error_with_another_body_than_documented_means_something_too(status, body, expected):
    error = PROTOCOL.parse_error(status, {}, body)
    assert error.error_class is expected
    assert "SECRET" not in str(error)


@pytest.mark.parametrize(
    ("message", "said"),
    [
        ("messages.1.content.0: SECRET", "(invalid_request_error, param messages[1].content[0])"),
        (
            "prompt is too long: 300 tokens > 200 maximum",
            "(invalid_request_error): prompt is too long: 300 tokens > 200 maximum",
        ),
        ("role 'system' is not supported on this model", "role 'system' is not supported on this model"),
        (
            '"thinking.type.enabled" is not supported for this model. SECRET',
            '"thinking.type.enabled" is not supported for this model',
        ),
    ],
)
def test_the_field_at_fault_and_known_sentences_are_passed_on_and_nothing_else(message, said):
    body = json.dumps({"type": "error", "error": {"type": "invalid_request_error", "message": message}}).encode()
    error = PROTOCOL.parse_error(400, {}, body)
    assert str(error).endswith(said)
    assert "SECRET" not in str(error)


def test_an_error_under_200_is_an_error():
    with pytest.raises(Rejected) as caught:
        PROTOCOL.parse_response(200, {}, b'{"type":"error","error":{"type":"overloaded_error","message":"SECRET"}}')
    assert (caught.value.error_class, caught.value.status) == (T, 529)


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "invalid_request_error"),
        (401, "authentication_error"),
        (402, "billing_error"),
        (403, "permission_error"),
        (404, "not_found_error"),
        (408, "timeout_error"),
        (409, "conflict_error"),
        (413, "request_too_large"),
        (422, "invalid_request_error"),
        (429, "rate_limit_error"),
        (500, "api_error"),
        (502, "api_error"),
        (503, "overloaded_error"),
        (504, "timeout_error"),
        (529, "overloaded_error"),
    ],
)
def test_an_error_is_told_with_this_apis_type_and_our_code(status, kind):
    error = ToldError(status=status, code="our_code", message="m", param="messages[0]", request_id="r")
    assert told(PROTOCOL.render_error(error)) == {
        "type": "error",
        "error": {"type": kind, "message": "m", "code": "our_code", "param": "messages[0]"},
        "request_id": "r",
    }


@pytest.mark.parametrize(
    ("used", "units"),
    [
        ({"web_search_requests": 3}, {"web_search": 3}),
        ({"web_search_requests": 2, "code_execution_requests": 1}, {"web_search": 2, "code_execution": 1}),
        ({"web_search_requests": 0, "web_fetch_requests": 4}, {"web_search": 0}),
        ({"web_search_requests": "x"}, None),
        (None, None),
        ([], None),
    ],
)
def test_searches_of_the_providers_own_tools_are_billed_apart_from_tokens(used, units):
    usage = {"input_tokens": 1, "output_tokens": 2, "server_tool_use": used}
    body = {"type": "message", "content": [], "stop_reason": "end_turn", "usage": usage}
    read = PROTOCOL.parse_response(200, {}, json.dumps(body).encode()).usage
    assert read == Usage(input_total=1, output_total=2, units=units)


@pytest.mark.parametrize(
    ("told_so", "tier"),
    [
        ({"inference_geo": "us"}, "geo_us"),
        ({"inference_geo": "us", "service_tier": "standard"}, "geo_us"),
        ({"inference_geo": "us", "service_tier": "priority"}, "priority-geo_us"),
        ({"inference_geo": "us", "speed": "fast"}, "fast-geo_us"),
        ({"inference_geo": "global", "service_tier": "standard"}, "standard"),
        ({"inference_geo": "not_available"}, None),
        ({"inference_geo": None}, None),
        ({"inference_geo": 7}, None),
        ({"inference_geo": "two words"}, "geo_other"),
    ],
)
def test_a_call_that_had_to_stay_in_some_place_is_told_by_its_tier(told_so, tier):
    figures = {"input_tokens": 7, "output_tokens": 3, **told_so}
    whole = {
        "type": "message",
        "id": "m",
        "role": "assistant",
        "model": "c",
        "content": [{"type": "text", "text": "a"}],
        "stop_reason": "end_turn",
        "usage": figures,
    }
    assert PROTOCOL.parse_response(200, {}, json.dumps(whole).encode()).service_tier == tier
