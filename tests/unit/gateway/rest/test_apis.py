"""What of a stream and of headers is decided byte by byte."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.attempt import _last_event
from gateway.errors import AdmissionRefused, AttemptedError, Code, InvalidRequest
from gateway.rest.apis import CHAT_COMPLETIONS, MESSAGES, error_headers, header_text, spoken
from gateway.rest.apis import told as told_as
from gateway.rest.chat import without_usage
from tests.fakes.line import attempt, outcome

DELTA = b'data: {"choices":[{"index":0,"delta":{"content":"Hi"}}],"usage":null}'
TELLS = rb'data: {"choices":[{"index":0,"delta":{"content":"\"choices\":[] \"usage\":{"}}]}'
USAGE = b'data: {"id":"x", "choices" : [ ] ,"usage" : {"total_tokens":4}}'
FILTER = b'data: {"choices":[],"prompt_filter_results":[]}'
DONE = b"data: [DONE]"


@pytest.mark.parametrize("end", [b"\n\n", b"\r\n\r\n"], ids=["lf", "crlf"])
def test_the_usage_that_nobody_asked_for_is_taken_out_and_nothing_else_is(end: bytes) -> None:
    def joined(*events: bytes) -> bytes:
        return b"".join(event + end for event in events)

    whole = joined(FILTER, DELTA, TELLS, USAGE, DONE)
    assert without_usage(whole) == joined(FILTER, DELTA, TELLS, DONE)
    assert without_usage(joined(DELTA, TELLS)) == joined(DELTA, TELLS)
    assert without_usage(joined(USAGE)) == b""
    assert without_usage(joined(USAGE, DELTA) + DONE) == joined(DELTA) + DONE
    assert without_usage(joined(DELTA) + USAGE) == joined(DELTA)
    assert without_usage(b": comment" + end + joined(USAGE)) == b": comment" + end
    assert without_usage(b"") == b""


@pytest.mark.parametrize("end", [b"\n\n", b"\r\n\r\n", b"\r\r"], ids=["lf", "crlf", "cr"])
def test_the_last_event_of_a_stream_is_found_whatever_its_lines_end_with(end: bytes) -> None:
    for count in range(1, 4):
        events = [b"event: e\ndata: %d" % number + end for number in range(count)]
        whole = b"".join(events)
        assert whole[_last_event(whole) :] == events[-1]
    assert _last_event(b"") == 0
    assert _last_event(b"data: no end") == 0
    assert _last_event(end) == 0


@given(st.text())
def test_no_text_can_end_a_header_or_begin_another(text: str) -> None:
    told = header_text(text)
    assert told.isascii()
    assert told.isprintable() or not told
    assert len(told) <= 2048


def test_a_request_is_of_the_api_whose_mark_it_has() -> None:
    apis = (MESSAGES, CHAT_COMPLETIONS)
    for marked, key in itertools.product((True, False), ("authorization", "x-api-key")):
        headers = {key: "k"} | ({"anthropic-version": "2023-06-01"} if marked else {})
        assert spoken(apis, headers) is (MESSAGES if marked else CHAT_COMPLETIONS)
    assert spoken((MESSAGES,), {}) is MESSAGES
    assert spoken((), {}) is None


def _refused(code: str) -> AttemptedError:
    return AttemptedError("no", code=Code.UPSTREAM_REJECTED, outcome=outcome(attempt(status="error", code=code)))


@pytest.mark.parametrize(
    ("word", "told"), [("context_length_exceeded", "context_length_exceeded"), ("some_word", "upstream_rejected")]
)
def test_a_refusal_that_programs_decide_on_has_the_providers_word_and_ours_beside_it(word: str, told: str) -> None:
    assert told_as(_refused(word), "r").code == told
    assert error_headers(_refused(word))["x-tollbridge-code"] == "upstream_rejected"


def test_a_full_queue_may_always_be_asked_again() -> None:
    full = AdmissionRefused("full", code=Code.QUEUE_FULL, retry_after_s=600.0)
    assert "x-should-retry" not in error_headers(full)
    late = AdmissionRefused("late", code=Code.PROVIDER_UNAVAILABLE, retry_after_s=600.0)
    assert error_headers(late)["x-should-retry"] == "false"


def test_a_message_names_the_field_as_a_word_and_not_by_its_letters():
    for param, message, said in (
        ("n", "responses has no such field", "n: responses has no such field"),
        ("top_k", "top_k is too much", "top_k is too much"),
    ):
        assert told_as(InvalidRequest(message, param=param), "r").message == said
