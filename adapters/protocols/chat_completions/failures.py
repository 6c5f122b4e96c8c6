"""
The error table of Chat Completions, and what its many speakers put into the envelope.

Sources: OpenAI's error guide and client, and the documented or recorded errors of Groq, OpenRouter, Cerebras, DeepSeek,
Mistral, xAI, Z.ai, NVIDIA, Azure, vLLM, Ollama and OpenCode.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from typing import Any

import msgspec

from adapters.classify import NOT_THERE, Failure, Rule, classify, failure_in
from adapters.errors import ErrorClass, Rejected
from adapters.openai_errors import MISSING_CODES, MISSING_SENTENCE, error_of, failure_of, with_status

_NO_CREDIT = frozenset(
    {
        "insufficient_quota",
        "billing_hard_limit_reached",
        "billing_not_active",
        "account_deactivated",
        "insufficient_balance",
        "insufficient_credits",
        "creditserror",
        "1113",  # Z.ai: no balance
    }
)
_NO_MODEL = frozenset(
    {
        "model_not_found",
        "model_not_available",
        "model_decommissioned",
        "invalid_model",
        "deploymentnotfound",
        "model_permission_blocked_org",
        "model_permission_blocked_project",
    }
)
_OVERLOADED = frozenset({"1305", "engine_overloaded", "capacity_exceeded", "overloaded_error", "server_is_overloaded"})

_FATAL, _OURS, _TRANSIENT = ErrorClass.FATAL, ErrorClass.OURS, ErrorClass.TRANSIENT

TABLE: tuple[Rule, ...] = (
    Rule(codes=_NO_CREDIT, error_class=_OURS, credential_fault=True),
    Rule(
        # More tokens in one request than the account may use in a minute: waiting never helps.
        statuses=frozenset({413, 429}),
        message=re.compile(r"^Request too large"),
        error_class=_OURS,
    ),
    Rule(codes=_OVERLOADED, error_class=_TRANSIENT),
    Rule(codes=_NO_MODEL, statuses=frozenset({400, 403, 404, 410}), error_class=_OURS),
    Rule(codes=frozenset({"tool_use_failed"}), error_class=_TRANSIENT),  # the model's fault
    Rule(statuses=frozenset({400}), message=re.compile(r"DEGRADED function"), error_class=_TRANSIENT),
    Rule(
        statuses=frozenset({400}),
        message=re.compile(r"^(?:Incorrect API key|API key not valid)", re.IGNORECASE),
        error_class=_OURS,
        credential_fault=True,
    ),
    Rule(statuses=frozenset({401}), error_class=_OURS, credential_fault=True),
    # OpenRouter: 402 with a wait is a budget in flight, without one the credit is gone.
    Rule(statuses=frozenset({402}), retry_after=True, error_class=_TRANSIENT, rate_limited=True),
    Rule(statuses=frozenset({402}), error_class=_OURS, credential_fault=True),
    Rule(statuses=frozenset({403}), marks=frozenset({"moderation"}), error_class=_FATAL),
    # Refused to an aggregator by a provider behind it, or by something before the API: not our credential.
    Rule(statuses=frozenset({403}), marks=frozenset({"aggregator", "not_json"}), error_class=_OURS),
    Rule(statuses=frozenset({403}), error_class=_OURS, credential_fault=True),
    Rule(statuses=frozenset({404}), codes=MISSING_CODES, error_class=_FATAL),
    Rule(statuses=frozenset({404}), message=MISSING_SENTENCE, error_class=_FATAL),
    Rule(statuses=NOT_THERE, error_class=_OURS),
    Rule(statuses=frozenset({429}), error_class=_TRANSIENT, rate_limited=True),
    Rule(statuses=frozenset({408, 425, 498, 499}), error_class=_TRANSIENT),
    Rule(statuses=frozenset(range(300, 400)), error_class=_OURS),
    Rule(statuses=frozenset(range(400, 500)), error_class=_FATAL),
    Rule(error_class=_TRANSIENT),
)

#: Machine words of errors that carry no status of their own (in a stream, or under 200).
_STATUS_OF: dict[str, int] = {
    "rate_limit_exceeded": 429,
    "rate_limit_error": 429,
    "too_many_requests": 429,
    "insufficient_quota": 429,
    "tool_use_failed": 400,
    "invalid_request_error": 400,
    "badrequesterror": 400,
    "context_length_exceeded": 400,
    "authentication_error": 401,
    "invalid_api_key": 401,
    "permission_error": 403,
    "not_found_error": 404,
    "notfounderror": 404,
    "model_not_found": 404,
}


def from_response(status: int, headers: Mapping[str, str], body: bytes) -> Rejected:
    """An HTTP error, whatever its body."""
    read = partial(_failure, status=status, headers=headers)
    return classify(TABLE, failure_in(body, read, status=status, headers=headers))


def from_error(error: object, *, headers: Mapping[str, str]) -> Rejected:
    """An `error` that came where an answer should: in a chunk of a stream, or in a body under 200."""
    failure = _failure({"error": error}, status=None, headers=headers)
    return classify(TABLE, with_status(failure, _STATUS_OF))


def from_finish_reason(reason: str, *, headers: Mapping[str, str]) -> Rejected:
    """A choice that ended with an error for its finish reason, though HTTP and stream say that all is well."""
    return classify(TABLE, Failure(status=None, codes=(reason,), headers=headers))


def is_failed_finish(reason: str | None) -> bool:
    """`error` (OpenRouter), `network_error` (Z.ai, also behind a `stop`), DeepSeek's and vLLM's words for giving up."""
    if reason is None:
        return False
    reason = reason.lower()
    return "error" in reason or reason in {"insufficient_system_resource", "abort"}


def _failure(content: Mapping[str, Any], *, status: int | None, headers: Mapping[str, str]) -> Failure:
    error = error_of(content)
    failure = failure_of(error, status=status, headers=headers)
    detail = error.get("detail")
    if isinstance(detail, list) and detail and isinstance(detail[0], dict):
        # FastAPI: [{loc: ["body", "messages", 0, ...], msg, input}]; the input is the caller's own text.
        location = detail[0].get("loc")
        param = _path(location) if isinstance(location, list) else None
        return msgspec.structs.replace(failure, message="", param=param)
    if isinstance(detail, str) and not isinstance(error.get("message"), str):
        return msgspec.structs.replace(failure, message=detail[:2048])
    return failure


def _path(location: list[Any]) -> str:
    path = ""
    for step in location[1:] if location[:1] == ["body"] else location:
        if isinstance(step, int):
            path += f"[{step}]"
        elif isinstance(step, str) and step.isidentifier():
            path += f".{step}" if path else step
        else:
            break
    return path
