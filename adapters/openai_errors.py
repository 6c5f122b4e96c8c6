"""
OpenAI's envelope of an error, in which two of its APIs and their many speakers tell one. What an error means is for the
table of each protocol.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import msgspec

from adapters.classify import Failure
from adapters.contract import ToldError

#: Codes and sentences of a 404 that speak of a thing the caller named by its id, not of the address or of the model:
#: OpenAI tells a missing item of a conversation with no code at all. A sentence without an id may speak of anything.
MISSING_CODES = frozenset(
    {
        "previous_response_not_found",
        "conversation_not_found",
        "prompt_not_found",
        "file_not_found",
        "image_file_not_found",
        "container_not_found",
        "vector_store_not_found",
    }
)
MISSING_SENTENCE = re.compile(
    r"^(?:No such file object: \S|No such file: \S"
    r"|(?:Item|Previous response|Conversation|Prompt|Container|Vector store|File|Image)s? "
    r"(?:with id\b|\S{1,100} (?:was |were )?not found))",
    re.IGNORECASE,
)

#: The words of OpenAI's error types, by status.
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    409: "conflict_error",
    429: "rate_limit_error",
    499: "cancelled_error",
    503: "overloaded_error",
    504: "timeout_error",
    529: "overloaded_error",
}


def error_of(content: Mapping[str, Any]) -> dict[str, Any]:
    """The error itself: in the envelope, as text (xAI, Ollama), or unwrapped (Cerebras, Mistral, FastAPI)."""
    error = content.get("error")
    if isinstance(error, dict):
        return error
    if isinstance(error, str):
        return {**content, "message": error}
    return dict(content)


def failure_of(error: Mapping[str, Any], *, status: int | None, headers: Mapping[str, str]) -> Failure:
    """What the error says; `status` is that of the response, None where it came in an answer."""
    metadata = error.get("metadata")
    metadata = metadata if isinstance(metadata, dict) else {}
    code = error.get("code")
    for own in (error.get("status_code"), code, error.get("status")):
        # The provider's number inside the body tells more than a 200 around it, never more than an error status.
        if status is None and isinstance(own, int) and 300 <= own < 600:
            status = own
    message, param = error.get("message"), error.get("param")
    return Failure(
        status=status,
        codes=tuple(
            str(word)
            for word in (code, error.get("type"), metadata.get("error_type"))
            if isinstance(word, str | int) and not isinstance(word, bool) and str(word)
        ),
        message=message[:2048] if isinstance(message, str) else "",
        param=param if isinstance(param, str) else None,
        headers=headers,
        marks=_marks(metadata),
    )


def with_status(failure: Failure, statuses: Mapping[str, int]) -> Failure:
    """The failure with the status of its first code that has one, where it has none of its own."""
    known = (statuses[word] for code in failure.codes if (word := code.lower()) in statuses)
    return msgspec.structs.replace(failure, status=failure.status or next(known, None))


def told(error: ToldError) -> dict[str, Any]:
    """An error of ours inside the envelope, with our stable code in it."""
    usual = "invalid_request_error" if 400 <= error.status < 500 else "api_error"
    inner: dict[str, Any] = {
        "message": error.message,
        "type": error.type or _TYPES.get(error.status, usual),
        "param": error.param,
        "code": error.code,
    }
    if error.request_id is not None:
        inner["request_id"] = error.request_id
    return inner


def _marks(metadata: Mapping[str, Any]) -> frozenset[str]:
    marks = set()
    if "reasons" in metadata or "flagged_input" in metadata:
        marks.add("moderation")
    if metadata.get("provider_name"):
        marks.add("aggregator")
    return frozenset(marks)
