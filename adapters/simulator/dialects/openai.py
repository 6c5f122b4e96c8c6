"""What OpenAI's protocols have in common: errors, lists of models, and what is said of rate limits."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from adapters.simulator.dialect import text_of
from adapters.simulator.faults import Faults


def error_body(status: int, message: str, *, param: str | None, code: str | None, faults: Faults) -> bytes:
    """An error in one of the envelopes that OpenAI and those who follow it use."""
    kind, known_code, known_message = _ERRORS.get(status, ("server_error", None, None))
    code = code or known_code
    message = _MESSAGES.get(code or "", message or known_message or "The simulated server had an error.")
    if code == "insufficient_quota":
        kind = code
    match faults.body:
        case "string":
            return text_of({"code": code, "error": message})
        case "bare":
            return text_of({"message": message, "type": kind, "param": param, "code": code})
        case "detail":
            return text_of({"detail": [{"type": code, "loc": ["body", param], "msg": message}]})
        case _:
            return text_of({"error": {"message": message, "type": kind, "param": param, "code": code}})


def models(names: Sequence[str]) -> bytes:
    listed = [{"id": name, "object": "model", "created": 1767225600, "owned_by": "simulator"} for name in names]
    return text_of({"object": "list", "data": listed})


def left_headers(faults: Faults, *, limited: bool) -> Iterable[str]:
    """What OpenAI and those who follow it say is left."""
    requests = 0 if limited and faults.remaining_requests is None else faults.remaining_requests
    if requests is not None:
        yield "x-ratelimit-limit-requests: 500"
        yield f"x-ratelimit-remaining-requests: {requests}"
    if faults.remaining_tokens is not None:
        yield f"x-ratelimit-remaining-tokens: {faults.remaining_tokens}"


_ERRORS: dict[int, tuple[str, str | None, str | None]] = {
    400: ("invalid_request_error", None, None),
    401: ("invalid_request_error", "invalid_api_key", "Incorrect API key provided."),
    403: ("permission_error", "permission_denied", "You are not allowed to do this."),
    404: ("invalid_request_error", "model_not_found", "The model does not exist or you do not have access to it."),
    429: ("requests", "rate_limit_exceeded", "Rate limit reached for requests. Please try again later."),
    500: ("server_error", "server_error", "The simulated server had an error."),
    503: ("server_error", "overloaded", "The simulated engine is currently overloaded. Please try again later."),
    529: ("overloaded_error", "overloaded", "Overloaded."),
}
_MESSAGES = {
    "insufficient_quota": "You exceeded your current quota, please check your plan and billing details.",
    "request_too_large": "Request too large for this model on tokens per min (TPM): Limit 30000, Requested 61342.",
    "context_length_exceeded": "This model's maximum context length is 8192 tokens. Please reduce the messages.",
}
