"""Errors of chat completions: what they mean, and that nothing of prompt, answer or key is repeated."""

from __future__ import annotations

import json
from email.utils import formatdate

import pytest

from adapters.classify import retry_after_s
from adapters.errors import ErrorClass, Rejected
from adapters.protocols.chat_completions import ChatCompletions

PROTOCOL = ChatCompletions()
F, O, T = ErrorClass.FATAL, ErrorClass.OURS, ErrorClass.TRANSIENT  # noqa: E741 - a table's columns


def error(status: int, body: object, **headers: str) -> Rejected:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    found = PROTOCOL.parse_error(status, {name.replace("_", "-"): value for name, value in headers.items()}, content)
    assert isinstance(found, Rejected)
    return found


def wrapped(code: object = None, kind: str | None = None, message: str = "") -> dict[str, object]:
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}


@pytest.mark.parametrize(
    ("status", "body", "headers", "expected"),
    [
        (400, wrapped("context_length_exceeded"), {}, (F, False, False)),
        (400, wrapped("model_not_found"), {}, (O, False, False)),
        (400, wrapped("billing_hard_limit_reached"), {}, (O, False, True)),
        (400, {"code": "x", "error": "Incorrect API key provided."}, {}, (O, False, True)),
        (400, {"status": 400, "detail": "Function id 'x': DEGRADED function cannot be invoked"}, {}, (T, False, False)),
        (401, wrapped("invalid_api_key"), {}, (O, False, True)),
        (402, wrapped(402), {}, (O, False, True)),
        (402, wrapped(402), {"retry_after": "3"}, (T, True, False)),
        (403, wrapped(), {}, (O, False, True)),
        (403, b"<html>blocked</html>", {}, (O, False, False)),
        (403, {"error": {"code": 403, "metadata": {"reasons": ["x"], "provider_name": "y"}}}, {}, (F, False, False)),
        (404, wrapped("model_not_found"), {}, (O, False, False)),
        (404, wrapped(None, None, 'model "llama9" not found, try pulling it first'), {}, (O, False, False)),
        (404, wrapped(None, None, "No such File object: file-1"), {}, (F, False, False)),
        (404, b"404 page not found", {}, (O, False, False)),
        (408, b"", {}, (T, False, False)),
        (409, wrapped(), {}, (F, False, False)),
        (409, wrapped(), {"x_should_retry": "true"}, (T, False, False)),
        (413, wrapped(), {}, (F, False, False)),
        (422, {"detail": [{"loc": ["body", "messages", 0], "msg": "x", "input": "y"}]}, {}, (F, False, False)),
        (429, wrapped("rate_limit_exceeded", "requests"), {}, (T, True, False)),
        (429, wrapped("insufficient_quota"), {}, (O, False, True)),
        (429, wrapped("rate_limit_exceeded", "tokens", "Request too large for x"), {}, (O, False, False)),
        (429, wrapped("1305"), {}, (T, False, False)),
        (429, wrapped("1113"), {}, (O, False, True)),
        (429, wrapped(), {"x_should_retry": "false"}, (O, False, False)),
        (429, b"", {}, (T, True, False)),
        (498, wrapped("capacity_exceeded"), {}, (T, False, False)),
        (500, b"<html>oops</html>", {}, (T, False, False)),
        (503, wrapped(None, None, "upstream connect error"), {}, (T, False, False)),
        (529, wrapped(), {}, (T, False, False)),
        (302, b"", {}, (O, False, False)),
        (418, b"[1, 2]", {}, (F, False, False)),
        (500, b"[" * 5000, {}, (T, False, False)),
        (500, b'{"error": {"message": 7, "type": [], "code": {}}}', {}, (T, False, False)),
    ],
)
def test_status_machine_code_and_headers_together_decide(status, body, headers, expected):
    found = error(status, body, **headers)
    assert (found.error_class, found.rate_limited, found.credential_fault) == expected
    assert found.status == status


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({}, None),
        ({"retry-after": "20"}, 20.0),
        ({"retry-after": "1.5"}, 1.5),
        ({"retry-after-ms": "660"}, 0.66),
        ({"retry-after": "1", "retry-after-ms": "0"}, 1.0),
        ({"retry-after": "0"}, None),
        ({"retry-after": "-4"}, None),
        ({"retry-after": "nan"}, None),
        ({"retry-after": "inf"}, None),
        ({"retry-after": "soon"}, None),
        ({"retry-after": formatdate(1000060, usegmt=True), "date": formatdate(1000000, usegmt=True)}, 60.0),
        ({"retry-after": formatdate(1000000, usegmt=True), "date": formatdate(1000060, usegmt=True)}, None),
        ({"retry-after": "Sun, 06 Nov 1994 08:49:37 GMT"}, None),
        ({"x-ratelimit-reset-requests": "6ms"}, None),
    ],
)
def test_the_wait_is_read_in_every_unit_it_is_sent_in(headers, expected):
    assert retry_after_s(headers) == expected


CANARY = "CANARY-7f3a"


@pytest.mark.parametrize(
    ("status", "body"),
    [
        (400, wrapped("invalid_value", "invalid_request_error", f"Invalid value: '{CANARY}'.")),
        (400, wrapped("context_length_exceeded", None, f"{CANARY} This model's maximum context length is 10 tokens.")),
        (401, wrapped("invalid_api_key", None, f"Incorrect API key provided: sk-{CANARY}.")),
        (400, wrapped(f"{CANARY} as a code", f"and {CANARY} as a type")),
        (400, {"error": {"message": "m", "param": f"messages {CANARY}"}}),
        (422, {"detail": [{"loc": ["body", f"{CANARY} is no name"], "msg": CANARY, "input": CANARY}]}),
        (400, {"error": {"message": "x", "code": "tool_use_failed", "failed_generation": CANARY}}),
        (422, f"cannot read {CANARY} at line 1".encode()),
        (500, f"<html>{CANARY}</html>".encode()),
        (400, {"error": f"no good: {CANARY}"}),
        (429, {"error": {"message": "x", "metadata": {"raw": CANARY, "provider_name": CANARY}}}),
    ],
)
def test_an_error_never_repeats_what_the_provider_quoted(status, body):
    found = error(status, body, x_request_id=f"{CANARY} not an id")
    assert CANARY not in f"{found} {found.code} {found.provider_request_id} {found!r} {found.args}"


@pytest.mark.parametrize(
    ("body", "told"),
    [
        (
            wrapped(
                "unsupported_parameter", None, "Unsupported parameter: 'max_tokens' is not supported with this model."
            ),
            "Unsupported parameter: 'max_tokens' is not supported with this model",
        ),
        (wrapped("x", None, "This model's maximum context length is 8192 tokens."), "context length is 8192 tokens"),
        (
            wrapped("x", None, "Rate limit on tokens per min (TPM): Limit 6000, Used 5447, Requested 783."),
            "Limit 6000, Used 5447, Requested 783",
        ),
        (
            wrapped("x", None, "The model `gpt-9` does not exist or you do not have access to it."),
            "model `gpt-9` does not",
        ),
        ({"error": {"message": "", "code": "x", "param": "messages[0].content"}}, "(x, param messages[0].content)"),
    ],
)
def test_what_helps_and_cannot_be_content_is_told(body, told):
    assert told in str(error(400, body))


def test_the_provider_request_id_is_kept():
    assert error(500, b"", x_request_id="req_123").provider_request_id == "req_123"
