"""What of a provider's own words reaches the caller: what helps to mend the request, and nothing that tells of us."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adapters.classify import told, words_for_the_caller
from adapters.errors import Broken, ErrorClass, Rejected
from adapters.protocols import PROTOCOLS

KEY = "sk-proj-Canary0123456789abcdefghij"
BODIES = {
    "chat_completions": {"error": {"message": "WORDS", "type": "invalid_request_error", "code": "x", "param": "n"}},
    "responses": {"error": {"message": "WORDS", "type": "invalid_request_error", "code": "x", "param": "n"}},
    "anthropic_messages": {"type": "error", "error": {"type": "invalid_request_error", "message": "WORDS"}},
    "gemini": {"error": {"code": 400, "message": "WORDS", "status": "INVALID_ARGUMENT"}},
    "workers_ai": {"success": False, "errors": [{"code": 5004, "message": "WORDS"}], "result": None},
}


@pytest.mark.parametrize(
    "words",
    [
        "Invalid 'messages[0].content': string too long. Expected at most 10485760, but got length 10485761 instead.",
        "This model's maximum context length is 128000 tokens. However, your messages resulted in 150000 tokens.",
        "Invalid value: 'foo'. Supported values are: 'system', 'assistant', 'user', 'function' and 'developer'.",
        "messages.1.content.0: unexpected `tool_use_id` found in `tool_result` blocks",
        "* GenerateContentRequest.contents: contents is not specified",
    ],
)
def test_what_helps_to_mend_a_request_is_told_as_it_was_said(words: str) -> None:
    assert told(words_for_the_caller(words) or "", [f"Bearer {KEY}"]) == words


@pytest.mark.parametrize(
    "secret",
    [
        "sk-abc***xyz",
        "org-AbCdEf123456",
        "proj_0123456789",
        "https://internal.example/path?key=canary",
        "postgresql://user:canary@db/x",
        "ops@example.com",
        "10.20.30.40",
        "Bearer canary",
        "AIzaSyCanary-key",
        "gsk_4Canary4Canary4Canary",
        "0123456789abcdef0123456789abcdef",
        "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0NTY3ODkwIn0",
        "****canary",
    ],
)
def test_what_looks_like_a_key_an_id_or_an_address_is_not(secret: str) -> None:
    for words in (f"it was {secret}", f"it was '{secret}', which is wrong", f"({secret})", secret):
        said = told(words_for_the_caller(words) or "", ())
        assert secret not in said
        assert "canary" not in said.lower()
        assert "[...]" in said


@given(st.text(max_size=1500), st.integers(0, 1500), st.sampled_from([KEY, "plainwordsecret", "two words of one"]))
def test_wherever_a_secret_of_ours_stands_no_beginning_of_it_is_left(text: str, at: int, secret: str) -> None:
    message = text[:at] + " " + secret + " " + text[at:]
    said = told(words_for_the_caller(message) or "", [f"Bearer {secret}", secret])
    assert secret not in said
    assert len(said) <= 300
    assert said.isprintable()
    if secret == KEY:
        assert KEY[:12] not in said


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_only_where_the_request_is_at_fault_are_there_words_and_never_in_the_message(protocol: str) -> None:
    if protocol not in BODIES:
        pytest.fail(f"{protocol} has no error body here")
    body = json.dumps(BODIES[protocol]).replace("WORDS", "your prompt was: canary").encode()
    seen = set()
    for status in (400, 401, 402, 403, 404, 413, 422, 429, 500, 503, 529):
        error = PROTOCOLS[protocol].parse_error(status, {}, body)
        assert "canary" not in str(error)
        if isinstance(error, Broken):
            continue
        assert isinstance(error, Rejected)
        assert (error.said is not None) == (error.error_class is ErrorClass.FATAL), status
        if error.said is not None:
            assert "your prompt was: canary" in error.said
        seen.add(error.error_class)
    assert {ErrorClass.FATAL, ErrorClass.OURS, ErrorClass.TRANSIENT} <= seen
