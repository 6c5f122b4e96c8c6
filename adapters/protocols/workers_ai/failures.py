"""
Workers AI's error table, and the envelopes an error comes in.

Cloudflare's own number tells what happened, not the status: one 429 is the day's allocation used up, another a full
data centre that may have room in a second.

Sources: https://developers.cloudflare.com/workers-ai/platform/errors/,
https://developers.cloudflare.com/fundamentals/api/troubleshooting/
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from adapters.classify import NOT_THERE, Failure, Rule, classify
from adapters.errors import ErrorClass, Rejected

_FATAL, _OURS, _TRANSIENT = ErrorClass.FATAL, ErrorClass.OURS, ErrorClass.TRANSIENT

#: Cloudflare's numbers: a word for each, and the status it comes with.
_NUMBERS: dict[str, tuple[str, int]] = {
    "3003": ("incomplete_request", 400),
    "3006": ("request_too_large", 413),
    "3007": ("timeout", 408),
    "3008": ("aborted", 408),
    "3023": ("account_blocked", 403),
    "3036": ("account_limited", 429),
    "3039": ("finetune_incomplete", 400),
    "3040": ("out_of_capacity", 429),
    "3041": ("model_not_allowed", 403),
    "3042": ("invalid_model_id", 404),
    "4006": ("account_limited", 429),
    "5004": ("invalid_data", 400),
    "5005": ("lora_unsupported", 405),
    "5007": ("no_such_model", 400),
    "5016": ("model_agreement", 403),
    "5018": ("model_not_allowed", 403),
    "5019": ("deprecated_sdk", 405),
    "6003": ("invalid_headers", 400),
    "7000": ("no_route", 404),
    "7003": ("no_route", 404),
    "9106": ("authentication_error", 401),
    "9109": ("authentication_error", 403),
    "10000": ("authentication_error", 401),
}

TABLE: tuple[Rule, ...] = (
    Rule(
        # The account's own limit, its standing or its token: nothing of it works for now.
        codes=frozenset({"account_limited", "account_blocked", "authentication_error", "invalid_headers"}),
        error_class=_OURS,
        credential_fault=True,
    ),
    Rule(codes=frozenset({"out_of_capacity"}), error_class=_TRANSIENT),
    Rule(
        codes=frozenset(
            {
                "no_such_model",
                "invalid_model_id",
                "model_not_allowed",
                "model_agreement",
                "deprecated_sdk",
                # A path that there is not: of this model, or of an account's number that is none.
                "no_route",
            }
        ),
        error_class=_OURS,
    ),
    Rule(codes=frozenset({"lora_unsupported"}), error_class=_FATAL),
    Rule(statuses=frozenset({401, 402}), error_class=_OURS, credential_fault=True),
    Rule(statuses=frozenset({403}), marks=frozenset({"not_json"}), error_class=_OURS),
    Rule(statuses=frozenset({403}), error_class=_OURS, credential_fault=True),
    Rule(statuses=NOT_THERE, error_class=_OURS),
    Rule(statuses=frozenset({429}), error_class=_TRANSIENT, rate_limited=True),
    Rule(statuses=frozenset({408, 425, 499}), error_class=_TRANSIENT),
    Rule(statuses=frozenset(range(300, 400)), error_class=_OURS),
    Rule(statuses=frozenset(range(400, 500)), error_class=_FATAL),
    Rule(error_class=_TRANSIENT),
)


def from_response(status: int, headers: Mapping[str, str], body: bytes) -> Rejected:
    """An HTTP error, whatever its body."""
    try:
        content: Any = msgspec.json.decode(body) if body.strip() else None
    except (msgspec.DecodeError, RecursionError):
        content = None
    marks = frozenset({"not_json"}) if content is None else frozenset[str]()
    return classify(TABLE, _failure(content, status=status, headers=headers, marks=marks))


def from_body(body: bytes | msgspec.Raw, *, headers: Mapping[str, str]) -> Rejected:
    """An error that came where an answer should, in a stream or under 200: the object that holds it."""
    try:
        content: Any = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError):
        content = None
    return classify(TABLE, _failure(content, status=None, headers=headers, marks=frozenset()))


def from_finish_reason(reason: str, *, headers: Mapping[str, str]) -> Rejected:
    """A choice that ended with an error for its finish reason."""
    return classify(TABLE, Failure(status=None, codes=(reason,), headers=headers))


def _failure(content: Any, *, status: int | None, headers: Mapping[str, str], marks: frozenset[str]) -> Failure:
    error = _first(content)
    number = error.get("code")
    told = str(number) if isinstance(number, int | str) and not isinstance(number, bool) else ""
    word, usual = _NUMBERS.get(told, ("", None))
    if status is None:
        is_status = isinstance(number, int) and not isinstance(number, bool) and 400 <= number < 600
        status = usual if usual is not None else int(told) if is_status else None
    message = error.get("message")
    kind = error.get("type")
    return Failure(
        status=status,
        codes=tuple(code for code in (word, told, kind if isinstance(kind, str) else "") if code),
        message=message[:2048] if isinstance(message, str) else "",
        headers=headers,
        marks=marks,
    )


def _first(content: Any) -> dict[str, Any]:
    """`errors` of the envelope, or the `error` of OpenAI's shape: an object or text."""
    if not isinstance(content, dict):
        return {}
    errors = content.get("errors")
    if isinstance(errors, list) and errors:
        errors = errors[0]
    for error in (errors, content.get("error")):
        if isinstance(error, dict):
            return error
        if isinstance(error, str):
            return {"message": error}
    return content
