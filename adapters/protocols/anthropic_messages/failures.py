"""
The error table of Anthropic's Messages API, and its envelope.

Sources: https://platform.claude.com/docs/en/api/errors, the error types of the vendor's own client, and recorded errors
of the API and of OpenCode, which puts its own words into the same envelope.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import msgspec

from adapters.classify import NOT_THERE, Failure, Rule, classify, failure_in, prose_of
from adapters.contract import ToldError
from adapters.errors import ErrorClass, Rejected

_NO_CREDIT = frozenset(
    {
        "billing_error",
        "enforced_spend_limit_reached",
        "contract_spend_limit_reached",
        "linked_organization_spend_limit_reached",
        "linked_organization_billing_unavailable",
        "organization_on_hold",
        "creditserror",  # OpenCode
    }
)

_PATH = re.compile(r"([a-z_]{1,32}(?:\.[a-z0-9_]{1,32}){0,8}): ")

_FATAL, _OURS, _TRANSIENT = ErrorClass.FATAL, ErrorClass.OURS, ErrorClass.TRANSIENT

TABLE: tuple[Rule, ...] = (
    Rule(codes=_NO_CREDIT, error_class=_OURS, credential_fault=True),
    Rule(
        # An empty purse or a limit of one's own is told as a bad request.
        statuses=frozenset({400}),
        message=re.compile(r"credit balance is too low|specified API usage limits|spend limit", re.IGNORECASE),
        error_class=_OURS,
        credential_fault=True,
    ),
    Rule(codes=frozenset({"modelerror"}), statuses=frozenset({400, 401, 404}), error_class=_OURS),  # OpenCode
    Rule(statuses=frozenset({401}), error_class=_OURS, credential_fault=True),
    Rule(statuses=frozenset({402}), error_class=_OURS, credential_fault=True),
    # Refused by something before the API: not our credential.
    Rule(statuses=frozenset({403}), marks=frozenset({"not_json"}), error_class=_OURS),
    Rule(statuses=frozenset({403}), error_class=_OURS, credential_fault=True),
    # A file, a container or a skill that the caller named by its id.
    Rule(
        statuses=frozenset({404}),
        message=re.compile(r"\b(?:file|container|skill)_[A-Za-z0-9]{4,}"),
        error_class=_FATAL,
    ),
    Rule(statuses=NOT_THERE, error_class=_OURS),
    Rule(codes=frozenset({"overloaded_error"}), error_class=_TRANSIENT),
    Rule(statuses=frozenset({429}), error_class=_TRANSIENT, rate_limited=True),
    Rule(codes=frozenset({"conflict_error"}), error_class=_TRANSIENT),
    Rule(statuses=frozenset({408, 425, 499}), error_class=_TRANSIENT),
    Rule(statuses=frozenset(range(300, 400)), error_class=_OURS),
    Rule(statuses=frozenset(range(400, 500)), error_class=_FATAL),
    Rule(error_class=_TRANSIENT),
)

#: What a type means where no status came with it: in a stream, or under 200.
_STATUS_OF: dict[str, int] = {
    "invalid_request_error": 400,
    "authentication_error": 401,
    "billing_error": 402,
    "permission_error": 403,
    "not_found_error": 404,
    "conflict_error": 409,
    "request_too_large": 413,
    "rate_limit_error": 429,
    "api_error": 500,
    "timeout_error": 504,
    "overloaded_error": 529,
}
_TYPE_OF: dict[int, str] = {status: name for name, status in _STATUS_OF.items()} | {
    408: "timeout_error",
    503: "overloaded_error",
}
#: This API's word for what OpenAI's says more of than the status does.
_TYPE_FOR: dict[str, str] = {"insufficient_quota": "billing_error"}


def from_response(status: int, headers: Mapping[str, str], body: bytes) -> Rejected:
    """An HTTP error, whatever its body."""

    def read(content: dict[str, Any]) -> Failure:
        return _failure(content.get("error", content), status=status, headers=headers)

    return classify(TABLE, failure_in(body, read, status=status, headers=headers))


def from_error(error: bytes | msgspec.Raw, *, headers: Mapping[str, str]) -> Rejected:
    """An error that came where an answer should: an event of a stream, or a body under 200."""
    try:
        content = msgspec.json.decode(error)
    except (msgspec.DecodeError, RecursionError):
        content = None
    failure = _failure(content, status=None, headers=headers)
    status = next((_STATUS_OF[code] for code in failure.codes if code in _STATUS_OF), None)
    return classify(TABLE, msgspec.structs.replace(failure, status=status))


def from_text(error: bytes, *, headers: Mapping[str, str]) -> Rejected:
    """An error event whose data is no JSON."""
    return classify(TABLE, Failure(status=None, message=prose_of(error), headers=headers))


def _failure(error: object, *, status: int | None, headers: Mapping[str, str]) -> Failure:
    if isinstance(error, str):
        return Failure(status=status, message=error[:2048], headers=headers)
    inner = error if isinstance(error, dict) else {}
    details = inner.get("details")
    # The finer word first: one type stands for many reasons.
    codes = (details.get("error_code") if isinstance(details, dict) else None, inner.get("type"), inner.get("code"))
    message = inner.get("message")
    return Failure(
        status=status,
        # "error" is what the envelope is called.
        codes=tuple(code for code in codes if isinstance(code, str) and code not in {"", "error"}),
        message=message[:2048] if isinstance(message, str) else "",
        param=_param(message) if isinstance(message, str) else None,
        param_in_prose=True,
        headers=headers,
    )


def _param(message: str) -> str | None:
    """The field at fault begins the sentence: "messages.0.content: ..."."""
    found = _PATH.match(message)
    return re.sub(r"\.(\d+)", r"[\1]", found.group(1)) if found else None


def render_error(error: ToldError) -> bytes:
    """
    The error object of this API, with our stable `code` beside its type, and the field at fault where one is known.
    The vendor's clients choose their exception by status and by `type`.
    """
    usual = _TYPE_OF.get(error.status) or ("invalid_request_error" if 400 <= error.status < 500 else "api_error")
    kind = _TYPE_FOR.get(error.type or "", usual)
    inner: dict[str, Any] = {"type": kind, "message": error.message, "code": error.code}
    if error.param is not None:
        inner["param"] = error.param
    return msgspec.json.encode({"type": "error", "error": inner, "request_id": error.request_id})
