"""What providers answer in Responses: whole answers, and what their errors mean."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from adapters.chat import Event, Finished, TextDelta
from adapters.contract import Endpoint
from adapters.errors import Broken, ErrorClass, ProviderError, Rejected
from adapters.protocols.responses import Responses
from adapters.sse import MAX_EVENT_BYTES
from metering.usage import Usage

PROTOCOL = Responses()
ENDPOINT = Endpoint(provider="p", protocol="responses", base_url="")
MESSAGE = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Hello"}]}

_F, _O, _T = ErrorClass.FATAL, ErrorClass.OURS, ErrorClass.TRANSIENT


def body(**fields: object) -> bytes:
    whole = {"id": "resp_1", "object": "response", "model": "m-1", "status": "completed", "output": [MESSAGE]}
    return json.dumps({**whole, **fields}).encode()


def test_a_whole_answer_is_read_with_its_usage_and_ids():
    usage = {
        "input_tokens": 10,
        "input_tokens_details": {"cached_tokens": 3, "cache_write_tokens": 2},
        "output_tokens": 5,
        "output_tokens_details": {"reasoning_tokens": 4},
        "cost": "0.0010",
    }
    raw = body(usage=usage)
    answer = PROTOCOL.parse_response(200, {"x-request-id": "req_1"}, b"\n " + raw + b"\n")
    assert answer.choices[0].text == "Hello"
    assert answer.usage == Usage(input_total=10, cache_read=3, cache_write_5m=2, output_total=5, reasoning=4)
    assert answer.reported_cost_usd == "0.0010"
    assert (answer.response_id, answer.served_model, answer.provider_request_id) == ("resp_1", "m-1", "req_1")
    assert PROTOCOL.render_response(answer) == raw


@pytest.mark.parametrize("status", ["queued", "in_progress", "of_the_future", None])
def test_a_response_that_is_not_at_its_end_is_no_answer(status):
    with pytest.raises(Broken) as caught:
        PROTOCOL.parse_response(200, {}, body(status=status))
    assert caught.value.code == "no_terminal"


@pytest.mark.parametrize(
    ("fields", "code", "error_class", "after_content"),
    [
        (
            {"status": "failed", "error": {"code": "server_error", "message": "x"}, "output": []},
            "server_error",
            _T,
            False,
        ),
        ({"status": "failed", "error": {"code": "server_error", "message": "x"}}, "server_error", _T, True),
        ({"status": "failed", "error": {"code": "image_too_large"}, "output": []}, "image_too_large", _F, False),
        ({"status": "failed", "output": []}, "response_failed", _T, False),
        ({"status": "cancelled", "output": []}, "response_cancelled", _T, False),
        ({"status": "completed", "error": {"code": "rate_limit_exceeded"}}, "rate_limit_exceeded", _T, True),
    ],
)
def test_a_response_that_failed_is_an_error_with_its_code(fields, code, error_class, after_content):
    with pytest.raises(Rejected) as caught:
        PROTOCOL.parse_response(200, {}, body(**fields))
    assert (caught.value.code, caught.value.error_class) == (code, error_class)
    assert caught.value.after_content is after_content


def test_what_is_no_response_is_malformed():
    for content in (b"", b"[]", b"{", b"\xff", b'{"status": 5}', body(output=[5]), body(output=[{"type": 5}])):
        with pytest.raises(Broken) as caught:
            PROTOCOL.parse_response(200, {}, content)
        assert caught.value.code == "malformed"


def error(status: int, inner: dict[str, Any] | None, headers: dict[str, str] | None = None) -> ProviderError:
    content = b"upstream connect error" if inner is None else json.dumps({"error": inner}).encode()
    return PROTOCOL.parse_error(status, headers or {}, content)


@pytest.mark.parametrize(
    ("status", "inner", "error_class", "rate_limited", "credential_fault"),
    [
        (400, {"code": "unsupported_parameter", "type": "invalid_request_error"}, _F, False, False),
        (400, {"code": "context_length_exceeded"}, _F, False, False),
        (400, {"code": "model_not_found"}, _O, False, False),
        (400, {"message": "Incorrect API key provided: x"}, _O, False, True),
        (401, {"code": "invalid_api_key"}, _O, False, True),
        (402, {"message": "credit"}, _O, False, True),
        (403, {"code": "unsupported_country_region_territory"}, _O, False, True),
        (403, {"code": 403, "metadata": {"reasons": ["violence"]}}, _F, False, False),
        (403, {"code": 403, "metadata": {"provider_name": "x"}}, _O, False, False),
        (404, {"code": "not_found", "message": "The model `x` does not exist"}, _O, False, False),
        (404, {"code": "previous_response_not_found"}, _F, False, False),
        (404, None, _O, False, False),
        (409, {"code": "conflict"}, _F, False, False),
        (413, {"code": "too_large"}, _F, False, False),
        (429, {"code": "rate_limit_exceeded", "type": "tokens"}, _T, True, False),
        (429, {"code": "rate_limit_exceeded", "message": "Request too large for gpt-4o"}, _O, False, False),
        (429, {"code": "insufficient_quota"}, _O, False, True),
        (429, {"code": "slow_down"}, _T, False, False),
        (500, {"code": "server_error"}, _T, False, False),
        (503, None, _T, False, False),
        (529, {}, _T, False, False),
        (302, None, _O, False, False),
    ],
)
def test_an_error_means_what_status_and_code_say_together(status, inner, error_class, rate_limited, credential_fault):
    rejected = error(status, inner)
    assert isinstance(rejected, Rejected)
    assert (rejected.error_class, rejected.rate_limited, rejected.credential_fault) == (
        error_class,
        rate_limited,
        credential_fault,
    )
    assert rejected.status == status


def test_the_wait_a_provider_asks_for_is_read_from_its_headers():
    assert error(429, {"code": "x"}, {"retry-after": "3", "retry-after-ms": "3500"}).__dict__["retry_after_s"] == 3.5
    paid = error(402, {"code": "x"}, {"retry-after": "3"})
    assert paid.error_class is _T
    never = error(429, {"code": "x"}, {"x-should-retry": "false"})
    assert never.error_class is _O


def test_no_message_of_a_provider_is_repeated():
    said = error(400, {"code": "SECRET sentence", "message": "SECRET", "param": "SECRET value", "type": "t"})
    assert "SECRET" not in f"{said} {said.code} {said!r}"


def test_an_event_that_is_too_large_ends_the_stream():
    parser = PROTOCOL.new_parser(ENDPOINT, {})
    parser.feed(b"data: " + b"x" * (MAX_EVENT_BYTES - 10))
    with pytest.raises(Broken) as caught:
        parser.feed(b"x" * 20)
    assert caught.value.code == "response_too_large"
    with pytest.raises(Broken):
        parser.close()


def test_payloads_are_counted_and_what_only_keeps_the_connection_open_is_none():
    parser = PROTOCOL.new_parser(ENDPOINT, {})
    parser.feed(b': hello\n\nevent: keepalive\ndata: {"type":"keepalive","sequence_number":3}\n\n')
    assert parser.payloads == 0
    parser.feed(b'data: {"type":"response.in_progress","response":{}}\n\n')
    assert parser.payloads == 1


def test_an_error_is_raised_again_and_events_before_it_come_first():
    parser = PROTOCOL.new_parser(ENDPOINT, {})
    delta = b'data: {"type":"response.output_text.delta","output_index":0,"content_index":0,"delta":"x"}\n\n'
    assert parser.feed(delta + b'event: error\ndata: {"type":"error","code":"server_error"}\n\n') == [TextDelta("x")]
    for again in (parser.feed, parser.feed):
        with pytest.raises(Rejected):
            again(b"")
    with pytest.raises(Rejected):
        parser.close()


def test_a_long_stream_one_byte_at_a_time_takes_time_that_grows_with_it_and_no_faster():
    def seconds(events: int) -> float:
        piece = b'data: {"type":"response.function_call_arguments.delta","output_index":0,"delta":"x"}\n\n'
        last = b'data: {"type":"response.completed","response":{"status":"completed"}}\n\n'
        parser, found = PROTOCOL.new_parser(ENDPOINT, {}), list[Event]()
        start = time.process_time()
        for byte in piece * events + last:
            found += parser.feed(bytes([byte]))
        assert isinstance(found[-1], Finished)
        return time.process_time() - start

    few = min(seconds(200) for _ in range(3))
    assert min(seconds(1600) for _ in range(2)) < few * 8 * 4
