"""What a caller of Responses is told: whole answers, the events of a stream, errors."""

from __future__ import annotations

import json
from typing import Any

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
    LogprobsDelta,
    Reasoning,
    ReasoningDelta,
    RefusalDelta,
    StopReason,
    TextDelta,
    TokenLogprob,
    ToolCallDelta,
    ToolCallStart,
    UsageReport,
)
from adapters.contract import AnswerHead, Endpoint, ToldError
from adapters.errors import Rejected
from adapters.protocols.responses import Responses
from metering.usage import Usage
from tests.fakes.answers import gathered, parsed

PROTOCOL = Responses()
HEAD = AnswerHead(id="resp_1", model="m", created=7)
USAGE = UsageReport(usage=Usage(input_total=10, output_total=5))


def end(reason: StopReason = StopReason.STOP) -> Finished:
    return Finished(ends=(ChoiceEnd(choice=0, stop_reason=reason, native_stop_reason="x"),))


def stream(*batches: list[Event]) -> bytes:
    renderer = PROTOCOL.new_renderer(HEAD)
    return b"".join(map(renderer.feed, batches))


def told(body: bytes) -> list[dict[str, Any]]:
    """The events, each with the name that its data has, numbered without a gap."""
    found: list[dict[str, Any]] = []
    for event in body.decode().split("\n\n")[:-1]:
        name, data = event.split("\n")
        content = json.loads(data.removeprefix("data: "))
        assert name == f"event: {content['type']}"
        assert content.pop("sequence_number") == len(found)
        found.append(content)
    return found


def kinds(body: bytes) -> list[str]:
    return [event["type"].removeprefix("response.") for event in told(body)]


def test_a_text_is_announced_told_and_repeated_whole():
    events = told(stream([TextDelta("Hel"), TextDelta("lo")], [TextDelta("!")], [USAGE, end()]))
    message = {"id": "msg_resp_1_0", "type": "message", "role": "assistant"}
    at = {"item_id": "msg_resp_1_0", "output_index": 0, "content_index": 0}
    whole = {"type": "output_text", "annotations": [], "logprobs": [], "text": "Hello!"}
    done = {**message, "status": "completed", "content": [whole]}
    created, in_progress, *middle, completed = events
    assert created["type"] == "response.created"
    assert in_progress["type"] == "response.in_progress"
    assert created["response"] == in_progress["response"]
    assert created["response"]["status"] == "in_progress"
    assert created["response"]["usage"] is None
    assert middle == [
        {
            "type": "response.output_item.added",
            "output_index": 0,
            "item": {**message, "status": "in_progress", "content": []},
        },
        {"type": "response.content_part.added", **at, "part": {**whole, "text": ""}},
        {"type": "response.output_text.delta", **at, "delta": "Hello", "logprobs": []},
        {"type": "response.output_text.delta", **at, "delta": "!", "logprobs": []},
        {"type": "response.output_text.done", **at, "text": "Hello!", "logprobs": []},
        {"type": "response.content_part.done", **at, "part": whole},
        {"type": "response.output_item.done", "output_index": 0, "item": done},
    ]
    assert completed["type"] == "response.completed"
    assert completed["response"] == {
        **created["response"],
        "status": "completed",
        "output": [done],
        "usage": {
            "input_tokens": 10,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": 5,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": 15,
        },
    }
    assert completed["response"]["id"] == "resp_1"
    assert completed["response"]["created_at"] == 7


def test_log_probabilities_go_with_the_text_of_their_batch():
    token = TokenLogprob(token="Hi", logprob=-0.5, top=(TokenLogprob(token="é", logprob=-2.0, bytes=(195,)),))
    events = told(stream([TextDelta("Hi"), LogprobsDelta((token,))], [end()]))
    (delta,) = [event for event in events if event["type"] == "response.output_text.delta"]
    rendered = {
        "token": "Hi",
        "bytes": [72, 105],
        "logprob": -0.5,
        "top_logprobs": [{"token": "é", "bytes": [195], "logprob": -2.0}],
    }
    assert delta["logprobs"] == [rendered]
    assert events[-1]["response"]["output"][0]["content"][0]["logprobs"] == [rendered]


def test_reasoning_is_a_summary_and_its_signature_comes_with_the_end_of_its_item():
    events = told(
        stream(
            [ReasoningDelta("Hm", id="rs_own"), ReasoningDelta(".", id="rs_own")],
            [ReasoningDelta("", 0, "sig", 0)],
            [ReasoningDelta("", 0, "enc", 1, redacted=True)],
            [TextDelta("4"), end()],
        )
    )
    of = {"item_id": "rs_own", "output_index": 0, "summary_index": 0}
    summary = {"type": "summary_text", "text": "Hm."}
    first = {
        "id": "rs_own",
        "type": "reasoning",
        "summary": [summary],
        "status": "completed",
        "encrypted_content": "sig",
    }
    second = {
        "id": "rs_made_resp_1_1",
        "type": "reasoning",
        "summary": [],
        "status": "completed",
        "encrypted_content": "enc",
    }
    assert events[3:11] == [
        {
            "type": "response.reasoning_summary_part.added",
            **of,
            "part": {"type": "summary_text", "text": ""},
        },
        {"type": "response.reasoning_summary_text.delta", **of, "delta": "Hm"},
        {"type": "response.reasoning_summary_text.delta", **of, "delta": "."},
        {"type": "response.reasoning_summary_text.done", **of, "text": "Hm."},
        {"type": "response.reasoning_summary_part.done", **of, "part": summary},
        {"type": "response.output_item.done", "output_index": 0, "item": first},
        {
            "type": "response.output_item.added",
            "output_index": 1,
            "item": {"id": "rs_made_resp_1_1", "type": "reasoning", "summary": [], "status": "in_progress"},
        },
        {"type": "response.output_item.done", "output_index": 1, "item": second},
    ]
    assert events[-1]["response"]["output"][:2] == [first, second]


def test_calls_whose_pieces_come_interleaved_stay_apart_and_in_their_places():
    body = stream(
        [ToolCallStart(0, "c0", "f", 0, "signed"), ToolCallStart(1, "c1", "g"), ToolCallDelta(0, "{"), TextDelta("x")],
        [ToolCallDelta(1, "[]"), ToolCallDelta(0, "}"), end(StopReason.TOOL_CALLS)],
    )
    output = told(body)[-1]["response"]["output"]
    call = {"type": "function_call", "status": "completed"}
    assert output[:2] == [
        {**call, "id": "fc_resp_1_0", "call_id": "c0", "name": "f", "arguments": "{}", "signature": "signed"},
        {**call, "id": "fc_resp_1_1", "call_id": "c1", "name": "g", "arguments": "[]"},
    ]
    assert output[2]["content"][0]["text"] == "x"
    assert kinds(body)[-7:] == [
        "content_part.done",
        "output_item.done",
        "function_call_arguments.done",
        "output_item.done",
        "function_call_arguments.done",
        "output_item.done",
        "completed",
    ]


def test_what_comes_late_of_a_block_still_goes_into_its_item():
    body = stream(
        [ReasoningDelta("One."), TextDelta("a"), ReasoningDelta("Two."), TextDelta("b")],
        [ReasoningDelta("", 0, "sig"), end()],
    )
    thought, first, second = told(body)[-1]["response"]["output"]
    assert [part["text"] for part in thought["summary"]] == ["One.", "Two."]
    assert thought["encrypted_content"] == "sig"
    assert [item["content"][0]["text"] for item in (first, second)] == ["a", "b"]


def test_a_refusal_is_a_part_of_its_own():
    body = stream([TextDelta("I"), RefusalDelta("can"), RefusalDelta("not."), end(StopReason.REFUSAL)])
    (message,) = told(body)[-1]["response"]["output"]
    assert [part["type"] for part in message["content"]] == ["output_text", "refusal"]
    assert message["content"][1]["refusal"] == "cannot."


def test_a_refusal_without_words_is_told_all_the_same():
    events, error = parsed(
        PROTOCOL.new_parser(Endpoint(provider="p", protocol="responses", base_url=""), {}),
        [stream([TextDelta("I"), end(StopReason.REFUSAL)])],
    )
    assert error is None
    assert gathered(events)["choices"]["0"]["end"] == ["refusal", "completed"]


@pytest.mark.parametrize(
    ("reason", "status", "why"),
    [
        (StopReason.STOP, "completed", None),
        (StopReason.OTHER, "completed", None),
        (StopReason.TOOL_CALLS, "completed", None),
        (StopReason.LENGTH, "incomplete", "max_output_tokens"),
        (StopReason.CONTENT_FILTER, "incomplete", "content_filter"),
        (StopReason.PAUSE, "incomplete", "pause"),
    ],
)
def test_how_an_answer_ended_is_told_by_its_status(reason, status, why):
    last = told(stream([TextDelta("x"), end(reason)]))[-1]
    assert last["type"] == f"response.{status}"
    assert last["response"]["status"] == status
    assert last["response"]["incomplete_details"] == (None if why is None else {"reason": why})
    assert last["response"]["output"][0]["status"] == status


def test_a_picture_is_an_item_with_its_data():
    body = stream([ImageOutput(Image(data=b"\x89PNG", media_type="image/webp")), end()])
    (item,) = told(body)[-1]["response"]["output"]
    assert (item["type"], item["result"], item["output_format"]) == ("image_generation_call", "iVBORw==", "webp")


def test_nothing_follows_the_last_event():
    renderer = PROTOCOL.new_renderer(HEAD)
    renderer.feed([TextDelta("x"), end()])
    assert renderer.feed([USAGE]) == b""
    assert renderer.feed([]) == b""


def test_an_error_in_a_stream_is_told_by_two_events_and_read_as_one():
    renderer = PROTOCOL.new_renderer(HEAD)
    body = renderer.feed([TextDelta("Hel")])
    body += renderer.fail(ToldError(status=503, code="cooldown", message="wait", param="model", request_id="r"))
    body += renderer.feed([end()])
    error, failed = told(body)[-2:]
    assert error == {
        "type": "error",
        "code": "cooldown",
        "message": "wait",
        "param": "model",
        "error": {
            "message": "wait",
            "type": "overloaded_error",
            "param": "model",
            "code": "cooldown",
            "request_id": "r",
        },
    }
    assert failed["response"]["status"] == "failed"
    assert failed["response"]["error"] == {"code": "server_error", "message": "wait"}
    events, caught = parsed(PROTOCOL.new_parser(Endpoint(provider="p", protocol="responses", base_url=""), {}), [body])
    assert events == [TextDelta("Hel")]
    assert isinstance(caught, Rejected)
    assert caught.code == "cooldown"


@pytest.mark.parametrize(
    ("status", "kind", "failed"),
    [
        (400, "invalid_request_error", "invalid_prompt"),
        (401, "authentication_error", "invalid_prompt"),
        (403, "permission_error", "invalid_prompt"),
        (404, "not_found_error", "invalid_prompt"),
        (409, "conflict_error", "invalid_prompt"),
        (429, "rate_limit_error", "rate_limit_exceeded"),
        (502, "api_error", "server_error"),
        (503, "overloaded_error", "server_error"),
        (504, "timeout_error", "server_error"),
    ],
)
def test_an_error_has_the_type_of_its_status_and_our_code(status, kind, failed):
    error = ToldError(status=status, code="our_code", message="m", param="input[0]")
    assert json.loads(PROTOCOL.render_error(error)) == {
        "error": {"message": "m", "type": kind, "param": "input[0]", "code": "our_code"}
    }
    assert told(PROTOCOL.new_renderer(HEAD).fail(error))[-1]["response"]["error"]["code"] == failed


def test_an_answer_of_this_protocol_passes_as_it_came():
    native = msgspec.Raw(b'{"id": "resp_x", "future" : 1.0}')
    choice = Choice(index=0, stop_reason=StopReason.STOP, native_stop_reason="completed")
    answer = ChatResponse(choices=(choice,), native=native, native_protocol="responses")
    assert PROTOCOL.render_response(answer) == bytes(native)
    other = msgspec.structs.replace(answer, native_protocol="other", response_id="a")
    assert json.loads(PROTOCOL.render_response(other))["id"] == "a"


def test_a_whole_answer_has_the_items_of_its_stream():
    choice = Choice(
        index=0,
        text="4",
        reasoning=(Reasoning(text="Hm.", signature="s"), Reasoning(id="rs_of_nothing")),
        stop_reason=StopReason.LENGTH,
        native_stop_reason="x",
    )
    answer = ChatResponse(choices=(choice,), usage=Usage(output_total=3), response_id="resp_1", served_model="m")
    body = json.loads(PROTOCOL.render_response(answer))
    streamed = told(
        stream([ReasoningDelta("Hm.", 0, "s"), ReasoningDelta("", 0, None, 1), TextDelta("4"), end(StopReason.LENGTH)])
    )[-1]["response"]
    assert body["output"] == streamed["output"]
    # Half of the figures are no usage in this protocol.
    assert body["usage"] is None
    assert {**body, "created_at": 7} == streamed
