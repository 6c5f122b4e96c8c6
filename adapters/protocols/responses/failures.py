"""
The error table of Responses.

Sources: OpenAI's error guide (https://platform.openai.com/docs/guides/error-codes), the codes of `response.error` in
its published schema, and recorded errors of OpenAI, Azure, OpenRouter and of the servers that copy the format.
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
    }
)
_NO_MODEL = frozenset(
    {
        "model_not_found",
        "model_not_available",
        "invalid_model",
        "deploymentnotfound",
        "model_permission_blocked_org",
        "model_permission_blocked_project",
        # Kept in another region than the one this provider's address stands for.
        "data_residency_mismatch",
    }
)
_OVERLOADED = frozenset(
    {
        "server_error",
        "internal_server_error",
        "server_is_overloaded",
        "service_unavailable_error",
        "engine_overloaded",
        "overloaded_error",
        "slow_down",
        "vector_store_timeout",
    }
)
#: Of the request, wherever they come: in an answer that failed there is no status to say so.
_CALLERS = frozenset(
    {
        "invalid_prompt",
        "bio_policy",
        "cyber_policy",
        "misalignment_policy_violation",
        "content_policy_violation",
        "content_filter",
        "context_length_exceeded",
        "invalid_image",
        "invalid_image_format",
        "invalid_base64_image",
        "invalid_image_url",
        "image_too_large",
        "image_too_small",
        "image_parse_error",
        "image_content_policy_violation",
        "invalid_image_mode",
        "image_file_too_large",
        "unsupported_image_media_type",
        "empty_image_file",
        "failed_to_download_image",
        "image_file_not_found",
        "previous_response_not_found",
    }
)

_FATAL, _OURS, _TRANSIENT = ErrorClass.FATAL, ErrorClass.OURS, ErrorClass.TRANSIENT

TABLE: tuple[Rule, ...] = (
    Rule(codes=_NO_CREDIT, error_class=_OURS, credential_fault=True),
    Rule(
        # More tokens in one request than the account may use in a minute: waiting never helps.
        statuses=frozenset({413, 429}),
        message=re.compile(r"^Request too large"),
        error_class=_OURS,
    ),
    Rule(codes=_NO_MODEL, error_class=_OURS),
    Rule(codes=_CALLERS, error_class=_FATAL),
    Rule(codes=_OVERLOADED, error_class=_TRANSIENT),
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
    Rule(
        statuses=frozenset({400}),
        message=re.compile(r"model\b.*\b(?:not found|does not exist)", re.IGNORECASE | re.DOTALL),
        error_class=_OURS,
    ),
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
    "tokens": 429,
    "requests": 429,
    "insufficient_quota": 429,
    "invalid_request_error": 400,
    "bad_request": 400,
    "authentication_error": 401,
    "invalid_api_key": 401,
    "permission_error": 403,
    "not_found_error": 404,
    "model_not_found": 404,
}


def from_response(status: int, headers: Mapping[str, str], body: bytes) -> Rejected:
    """An HTTP error, whatever its body."""
    read = partial(_failure, status=status, headers=headers)
    return classify(TABLE, failure_in(body, read, status=status, headers=headers))


def from_error(error: object, *, headers: Mapping[str, str]) -> Rejected:
    """An error that came where an answer should: in an event of a stream, or in a body under 200."""
    failure = _failure({"error": error}, status=None, headers=headers)
    return classify(TABLE, with_status(failure, _STATUS_OF))


def ended(status: str, *, headers: Mapping[str, str]) -> Rejected:
    """An answer that failed, or was cancelled at the provider, and does not say why."""
    return classify(TABLE, Failure(status=None, codes=(f"response_{status}",), headers=headers))


def _failure(content: Mapping[str, Any], *, status: int | None, headers: Mapping[str, str]) -> Failure:
    failure = failure_of(error_of(content), status=status, headers=headers)
    # "error" is what the event is called that may be the error itself.
    return msgspec.structs.replace(failure, codes=tuple(code for code in failure.codes if code != "error"))
