"""
Gemini's error table, and the `google.rpc.Status` an error comes in.

The status word and the HTTP status say little: a bad key is a 400, and one 429 ends within the minute and another with
the day. The details tell them apart: `ErrorInfo.reason`, the quota's name in `QuotaFailure`, the wait in `RetryInfo`.

Sources: https://ai.google.dev/gemini-api/docs/troubleshooting, https://ai.google.dev/gemini-api/docs/rate-limits,
https://cloud.google.com/apis/design/errors, and recorded errors.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from adapters.classify import NOT_THERE, Failure, Rule, classify
from adapters.errors import ErrorClass, Rejected

_FATAL, _OURS, _TRANSIENT = ErrorClass.FATAL, ErrorClass.OURS, ErrorClass.TRANSIENT

#: Reasons that speak of the key or of the account behind it.
_CREDENTIAL = frozenset(
    {
        "api_key_invalid",
        "api_key_service_blocked",
        "api_key_http_referrer_blocked",
        "api_key_ip_address_blocked",
        "api_key_android_app_blocked",
        "api_key_ios_app_blocked",
        "access_token_expired",
        "access_token_scope_insufficient",
        "access_token_type_unsupported",
        "account_state_invalid",
        "billing_disabled",
        "consumer_invalid",
        "consumer_suspended",
        "credentials_missing",
        "service_disabled",
        "user_project_denied",
    }
)

TABLE: tuple[Rule, ...] = (
    Rule(codes=_CREDENTIAL, error_class=_OURS, credential_fault=True),
    Rule(
        statuses=frozenset({400}),
        message=re.compile(r"^API key (?:not valid|not found|expired)", re.IGNORECASE),
        error_class=_OURS,
        credential_fault=True,
    ),
    # Where the account may be used from, or that it has to pay: nothing a caller can mend.
    Rule(statuses=frozenset({400}), codes=frozenset({"failed_precondition"}), error_class=_OURS, credential_fault=True),
    # Of one model, which may only not exist.
    Rule(codes=frozenset({"iam_permission_denied"}), error_class=_OURS),
    Rule(statuses=frozenset({403}), marks=frozenset({"not_json"}), error_class=_OURS),
    # A file that is another account's, or nobody's.
    Rule(
        statuses=frozenset({403}),
        message=re.compile(r"access the file \S{1,200} or it may not exist", re.IGNORECASE),
        error_class=_FATAL,
    ),
    Rule(statuses=frozenset({401, 402, 403}), error_class=_OURS, credential_fault=True),
    # A file or a cache that the caller named; any other thing that is missing here is a model or an address of ours.
    Rule(
        statuses=frozenset({404}),
        message=re.compile(r"cached ?content|\bfiles?\b|\bfiles?/", re.IGNORECASE),
        error_class=_FATAL,
    ),
    Rule(statuses=NOT_THERE, error_class=_OURS),
    # A quota of nothing: the model is not in the account's plan, and no waiting helps.
    Rule(statuses=frozenset({429}), marks=frozenset({"no_quota"}), error_class=_OURS),
    # Used up for today, for this model alone or for all of them.
    Rule(statuses=frozenset({429}), marks=frozenset({"day_of_model"}), error_class=_OURS),
    Rule(statuses=frozenset({429}), marks=frozenset({"day"}), error_class=_OURS, credential_fault=True),
    Rule(statuses=frozenset({429}), error_class=_TRANSIENT, rate_limited=True),
    Rule(statuses=frozenset({409}), codes=frozenset({"aborted"}), error_class=_TRANSIENT),
    Rule(statuses=frozenset({408, 425, 499}), error_class=_TRANSIENT),
    Rule(codes=frozenset({"missing_thought_signature"}), error_class=_FATAL),
    Rule(statuses=frozenset(range(300, 400)), error_class=_OURS),
    Rule(statuses=frozenset(range(400, 500)), error_class=_FATAL),
    Rule(error_class=_TRANSIENT),
)

#: HTTP's number for the words of google.rpc.Code, for an error that has no number of its own.
_STATUS_OF: dict[str, int] = {
    "CANCELLED": 499,
    "INVALID_ARGUMENT": 400,
    "FAILED_PRECONDITION": 400,
    "OUT_OF_RANGE": 400,
    "UNAUTHENTICATED": 401,
    "PERMISSION_DENIED": 403,
    "NOT_FOUND": 404,
    "ABORTED": 409,
    "ALREADY_EXISTS": 409,
    "RESOURCE_EXHAUSTED": 429,
    "INTERNAL": 500,
    "UNKNOWN": 500,
    "DATA_LOSS": 500,
    "UNIMPLEMENTED": 501,
    "UNAVAILABLE": 503,
    "DEADLINE_EXCEEDED": 504,
}

#: Reasons an answer ended by that are no end of an answer: the model, or the request, failed.
FAILED_FINISH = frozenset(
    {
        "MALFORMED_FUNCTION_CALL",
        "UNEXPECTED_TOOL_CALL",
        "TOO_MANY_TOOL_CALLS",
        "MALFORMED_RESPONSE",
        "MISSING_THOUGHT_SIGNATURE",
        "OTHER",
        "NO_IMAGE",
    }
)

_SECONDS = re.compile(r"(?:([0-9]{1,4})h)?(?:([0-9]{1,4})m(?!s))?(?:([0-9]{1,9}(?:\.[0-9]{1,9})?)(ms|s))?")
_RETRY_IN = re.compile(r"[Pp]lease retry in ([0-9][0-9hms.]{0,40})")
_LIMIT_ZERO = re.compile(r"\blimit: 0\b")
_MOST_DETAILS = 32


def from_response(status: int, headers: Mapping[str, str], body: bytes) -> Rejected:
    """An HTTP error, whatever its body: an object, an array of one, or Vertex's page in HTML."""
    try:
        content: Any = msgspec.json.decode(body) if body.strip() else None
    except (msgspec.DecodeError, RecursionError):
        content = None
    if isinstance(content, list) and content:
        content = content[0]
    if not isinstance(content, dict):
        marks = frozenset({"not_json"}) if content is None else frozenset[str]()
        return classify(TABLE, Failure(status=status, headers=headers, marks=marks))
    return classify(TABLE, _failure(content.get("error", content), status=status, headers=headers))


def from_error(error: msgspec.Raw, *, headers: Mapping[str, str]) -> Rejected:
    """An `error` that came where an answer should: in a chunk of a stream, or under 200."""
    try:
        content = msgspec.json.decode(error)
    except (msgspec.DecodeError, RecursionError):
        content = None
    return classify(TABLE, _failure(content, status=None, headers=headers))


def from_finish_reason(reason: str, *, headers: Mapping[str, str]) -> Rejected:
    """A candidate that ended with a fault of the model for its finish reason, under a status that calls all well."""
    return classify(TABLE, Failure(status=None, codes=(reason,), headers=headers))


def _failure(error: object, *, status: int | None, headers: Mapping[str, str]) -> Failure:
    if not isinstance(error, dict):
        return Failure(status=status, headers=headers)
    word = error.get("status")
    word = word if isinstance(word, str) else ""
    message = error.get("message")
    message = message[:4096] if isinstance(message, str) else ""
    code = error.get("code")
    if status is None:
        told = isinstance(code, int) and not isinstance(code, bool) and 300 <= code < 600
        status = code if told else _STATUS_OF.get(word)
    codes, marks, wait, param = [], set[str](), None, None
    for detail in _details(error):
        kind = str(detail.get("@type", "")).rpartition(".")[2]
        if kind == "ErrorInfo":
            if isinstance(reason := detail.get("reason"), str):
                codes.append(reason)
            metadata = detail.get("metadata")
            if isinstance(metadata, dict):
                marks |= _quota_marks(metadata.get("quota_limit"), metadata.get("quota_limit_value"))
        elif kind == "QuotaFailure":
            for violation in _objects(detail.get("violations")):
                marks |= _quota_marks(violation.get("quotaId"), violation.get("quotaValue"))
        elif kind == "RetryInfo":
            wait = _seconds(detail.get("retryDelay"))
        elif kind == "BadRequest":
            violation = next(_objects(detail.get("fieldViolations")), {})
            param = violation.get("field")
    if _LIMIT_ZERO.search(message):
        marks.add("no_quota")
    if wait is None and (told_wait := _RETRY_IN.search(message)):
        wait = _seconds(told_wait[1].rstrip("."))
    return Failure(
        status=status,
        codes=tuple(code for code in (*codes, word) if code),
        message=message,
        param=param if isinstance(param, str) else None,
        headers=headers,
        retry_after_s=wait,
        marks=frozenset(marks),
    )


def _details(error: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    return _objects(error.get("details"))


def _objects(value: object) -> Iterator[dict[str, Any]]:
    if isinstance(value, list):
        yield from (inner for inner in value[:_MOST_DETAILS] if isinstance(inner, dict))


def _quota_marks(name: object, value: object) -> set[str]:
    marks = set()
    if isinstance(name, str) and "PerDay" in name:
        marks.add("day_of_model" if "PerModel" in name else "day")
    if isinstance(value, str | int) and not isinstance(value, bool) and value in {"0", 0}:
        marks.add("no_quota")
    return marks


def _seconds(text: object) -> float | None:
    """Of a duration as Google writes it: "34.4s", "1h2m3s". None for anything else."""
    found = _SECONDS.fullmatch(text) if isinstance(text, str) and text else None
    if found is None:
        return None
    hours, minutes, amount, unit = found.groups()
    return int(hours or 0) * 3600 + int(minutes or 0) * 60 + float(amount or 0) / (1000 if unit == "ms" else 1)
