"""The stream of Chat Completions that a caller gets, field for field as OpenAI's clients read it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from adapters.chat import (
    ChoiceEnd,
    Event,
    Finished,
    Image,
    ImageOutput,
    LogprobsDelta,
    ReasoningDelta,
    RefusalDelta,
    StopReason,
    TextDelta,
    TokenLogprob,
    ToolCallDelta,
    ToolCallStart,
    UsageReport,
)
from adapters.contract import AnswerHead, ToldError
from adapters.protocols.chat_completions import ChatCompletions
from metering.usage import Usage

PROTOCOL = ChatCompletions()
HEAD = AnswerHead(id="chatcmpl-9", model="m-1", created=7)
END = Finished(ends=(ChoiceEnd(choice=0, stop_reason=StopReason.STOP, native_stop_reason="end_turn"),))


def chunks(*batches: list[Event], head: AnswerHead = HEAD) -> list[Any]:
    renderer = PROTOCOL.new_renderer(head)
    body = b"".join(renderer.feed(batch) for batch in batches)
    *events, rest = body.split(b"\n\n")
    assert rest == b""
    assert all(event.startswith(b"data: ") for event in events)
    return [event[6:].decode() if event == b"data: [DONE]" else json.loads(event[6:]) for event in events]


def deltas(*events: Event) -> list[Any]:
    """Of the first choice, without the one that brings the role."""
    first, *rest = (chunk["choices"][0]["delta"] for chunk in chunks(list(events)))
    assert first == {"role": "assistant", "content": "", "refusal": None}
    return rest


def test_role_text_finish_usage_and_sentinel_come_in_the_order_of_openai():
    usage = UsageReport(usage=Usage(input_total=3, output_total=4, cache_read=1, reasoning=2))
    told = chunks([TextDelta("a"), TextDelta("b")], [TextDelta("c"), usage], [END])
    role, first, second, finish, last, sentinel = told
    assert role == {
        "id": "chatcmpl-9",
        "object": "chat.completion.chunk",
        "created": 7,
        "model": "m-1",
        "choices": [
            {
                "index": 0,
                "delta": {"role": "assistant", "content": "", "refusal": None},
                "logprobs": None,
                "finish_reason": None,
            }
        ],
        "usage": None,
    }
    assert [chunk["choices"][0]["delta"] for chunk in (first, second)] == [{"content": "ab"}, {"content": "c"}]
    assert finish["choices"] == [{"index": 0, "delta": {}, "logprobs": None, "finish_reason": "stop"}]
    assert last["choices"] == []
    assert last["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 4,
        "total_tokens": 7,
        "prompt_tokens_details": {"cached_tokens": 1},
        "completion_tokens_details": {"reasoning_tokens": 2},
    }
    assert sentinel == "[DONE]"


@pytest.mark.parametrize(("cost", "told"), [("0.000000000001", True), ("12.5", True), ("NaN", False), ("1,2", False)])
def test_what_it_cost_is_in_the_usage_digit_by_digit(cost: str, told: bool):
    usage = UsageReport(usage=Usage(input_total=3, output_total=4), reported_cost_usd=cost)
    rendered = PROTOCOL.new_renderer(HEAD).feed([TextDelta("a"), usage, END])
    assert (b'"cost":' + cost.encode() + b"}" in rendered) is told


def test_without_include_usage_no_chunk_speaks_of_it():
    usage = UsageReport(usage=Usage(input_total=3, output_total=4))
    told = chunks([TextDelta("a"), usage, END], head=AnswerHead(id="x", model="m", created=1, include_usage=False))
    assert [chunk["choices"][0]["finish_reason"] for chunk in told[:-1]] == [None, None, "stop"]
    assert not any("usage" in chunk for chunk in told[:-1])


def test_an_answer_of_nothing_has_its_role_and_its_end():
    role, finish, sentinel = chunks([END])
    assert role["choices"][0]["delta"]["role"] == "assistant"
    assert finish["choices"][0]["finish_reason"] == "stop"
    assert sentinel == "[DONE]"


def test_tool_calls_start_with_id_and_name_and_go_on_with_pieces():
    assert deltas(ToolCallStart(0, "c1", "f", signature="c2ln"), ToolCallDelta(0, '{"a"'), ToolCallDelta(0, ":1}")) == [
        {
            "tool_calls": [
                {
                    "index": 0,
                    "id": "c1",
                    "type": "function",
                    "function": {"name": "f", "arguments": ""},
                    "extra_content": {"google": {"thought_signature": "c2ln"}},
                }
            ]
        },
        {"tool_calls": [{"index": 0, "function": {"arguments": '{"a"'}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": ":1}"}}]},
    ]


def test_reasoning_refusals_and_pictures_have_the_fields_clients_know():
    assert deltas(
        ReasoningDelta("hm"),
        ReasoningDelta("", signature="c2ln"),
        ReasoningDelta("", signature="gAAA", block=1, redacted=True, id="rs_1"),
        RefusalDelta("no"),
        ImageOutput(Image(data=b"hello", media_type="image/png")),
        ImageOutput(Image(url="https://example.com/a.png")),
    ) == [
        {"reasoning_content": "hm"},
        {"reasoning_details": [{"type": "reasoning.text", "signature": "c2ln", "index": 0}]},
        {"reasoning_details": [{"type": "reasoning.encrypted", "data": "gAAA", "id": "rs_1", "index": 1}]},
        {"refusal": "no"},
        {"images": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,aGVsbG8="}, "index": 0}]},
        {"images": [{"type": "image_url", "image_url": {"url": "https://example.com/a.png"}, "index": 1}]},
    ]


def test_log_probabilities_are_in_the_chunk_of_their_text_and_choices_stay_apart():
    one, two = TokenLogprob(token="é", logprob=-1), TokenLogprob(token="\ufffd", logprob=-2, bytes=(195,), top=())
    told = chunks([TextDelta("é"), LogprobsDelta((one,)), TextDelta("?", 1), LogprobsDelta((two,), 1)])
    of = [(chunk["choices"][0]["index"], chunk["choices"][0]) for chunk in told]
    assert [index for index, _ in of] == [0, 0, 1, 1]
    assert of[1][1]["delta"] == {"content": "é"}
    assert of[1][1]["logprobs"] == {
        "content": [{"token": "é", "logprob": -1.0, "bytes": [195, 169], "top_logprobs": []}],
        "refusal": None,
    }
    assert of[3][1]["logprobs"]["content"][0]["bytes"] == [195]


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "invalid_request_error"),
        (401, "authentication_error"),
        (403, "permission_error"),
        (404, "not_found_error"),
        (408, "timeout_error"),
        (409, "conflict_error"),
        (413, "invalid_request_error"),
        (429, "rate_limit_error"),
        (499, "cancelled_error"),
        (500, "api_error"),
        (502, "api_error"),
        (503, "overloaded_error"),
        (504, "timeout_error"),
    ],
)
def test_an_error_has_the_envelope_of_openai_and_our_code(status, kind):
    error = ToldError(status=status, code="our_code", message="what to do", param="messages[0]", request_id="r1")
    expected = {"message": "what to do", "type": kind, "param": "messages[0]", "code": "our_code", "request_id": "r1"}
    assert json.loads(PROTOCOL.render_error(error)) == {"error": expected}
    assert PROTOCOL.new_renderer(HEAD).fail(error) == b"data: " + PROTOCOL.render_error(error) + b"\n\n"


def test_an_error_of_no_field_has_a_null_for_it():
    told = json.loads(PROTOCOL.render_error(ToldError(status=500, code="internal", message="m")))
    assert told == {"error": {"message": "m", "type": "api_error", "param": None, "code": "internal"}}
