"""
Every error a caller can be told, and what it is on each transport.

    GatewayError
    |- InvalidRequest            the request cannot be served as it is; `param` names the field
    |- Unauthenticated, PermissionDenied
    |- NotFound, ModelNotFound, Conflict, IdempotencyMismatch
    |- AdmissionRefused          no slot: queue, deadline, cooldown, store, duplicate debit, fence, rate, limits
    |- NoRoute                   no route is left to try: policy, readiness
    |- AllRoutesFailed           every attempt failed; lists them
    |- UpstreamRejected          the provider refused the request as the caller's own fault
    |- StreamBroken              the provider's stream ended without proof, after content had gone out
    |- ShuttingDown              this process takes no new work
    |- Stopped                   it has ended the request
    `- Internal                  ours

An error knows its stable code and nothing of any transport: `STATUS` is the one table from code to HTTP status, gRPC
status and OpenAI-style type.
"""

from __future__ import annotations

import enum
import re
from typing import Final

import msgspec
from typing_extensions import override

from gateway.outcome import LeftOut, Outcome


class Code(enum.StrEnum):
    """Stable: clients may branch on these."""

    INVALID_REQUEST = "invalid_request"
    INVALID_JSON = "invalid_json"
    UNSUPPORTED_FIELD = "unsupported_field"
    UNAUTHENTICATED = "unauthenticated"
    PERMISSION_DENIED = "permission_denied"
    NOT_FOUND = "not_found"
    METHOD_NOT_ALLOWED = "method_not_allowed"
    REQUEST_TIMEOUT = "request_timeout"
    UNSUPPORTED_MEDIA_TYPE = "unsupported_media_type"
    MODEL_NOT_FOUND = "model_not_found"
    CONFLICT = "conflict"
    IDEMPOTENCY_MISMATCH = "idempotency_mismatch"
    IDEMPOTENCY_IN_PROGRESS = "idempotency_in_progress"
    IDEMPOTENCY_ANSWER_LOST = "idempotency_answer_lost"
    IDEMPOTENCY_FULL = "idempotency_full"
    PAYLOAD_TOO_LARGE = "payload_too_large"
    QUEUE_FULL = "queue_full"
    QUEUE_TIMEOUT = "queue_timeout"
    DEADLINE_EXCEEDED = "deadline_exceeded"
    COOLDOWN = "cooldown"
    CONTROL_STORE_UNAVAILABLE = "control_store_unavailable"
    CONTENT_STORE_UNAVAILABLE = "content_store_unavailable"
    DUPLICATE_DEBIT = "duplicate_debit"
    OWNER_FENCE = "owner_fence"
    PROVIDER_UNAVAILABLE = "provider_unavailable"
    TOO_LARGE = "too_large"
    RANGE_TOO_WIDE = "range_too_wide"
    KEY_LIMIT = "key_limit"
    BUDGET_EXCEEDED = "budget_exceeded"
    BUDGET_RESERVED = "budget_reserved"
    NO_ROUTE = "no_route"
    PRICING_REQUIRED = "pricing_required"
    PROVIDER_NOT_READY = "provider_not_ready"
    ALL_ROUTES_FAILED = "all_routes_failed"
    UPSTREAM_REJECTED = "upstream_rejected"
    UPSTREAM_BROKEN = "upstream_broken"
    CANCELLED = "cancelled"
    SHUTTING_DOWN = "shutting_down"
    INTERNAL = "internal"
    # How a job ends where a call would not.
    UNCERTAIN = "uncertain"
    POISON = "poison"
    EXPIRED = "expired"


class Status(msgspec.Struct, frozen=True):
    http: int
    #: The name of a grpc.StatusCode member.
    grpc: str
    #: The `type` of an OpenAI-style error body.
    type: str


STATUS: dict[Code, Status] = {
    Code.INVALID_REQUEST: Status(400, "INVALID_ARGUMENT", "invalid_request_error"),
    Code.INVALID_JSON: Status(400, "INVALID_ARGUMENT", "invalid_request_error"),
    Code.UNSUPPORTED_FIELD: Status(400, "INVALID_ARGUMENT", "invalid_request_error"),
    Code.UNAUTHENTICATED: Status(401, "UNAUTHENTICATED", "authentication_error"),
    Code.PERMISSION_DENIED: Status(403, "PERMISSION_DENIED", "permission_error"),
    Code.NOT_FOUND: Status(404, "NOT_FOUND", "not_found_error"),
    Code.METHOD_NOT_ALLOWED: Status(405, "UNIMPLEMENTED", "invalid_request_error"),
    Code.REQUEST_TIMEOUT: Status(408, "DEADLINE_EXCEEDED", "timeout_error"),
    Code.UNSUPPORTED_MEDIA_TYPE: Status(415, "INVALID_ARGUMENT", "invalid_request_error"),
    Code.MODEL_NOT_FOUND: Status(404, "NOT_FOUND", "not_found_error"),
    Code.CONFLICT: Status(409, "FAILED_PRECONDITION", "conflict_error"),
    Code.IDEMPOTENCY_MISMATCH: Status(422, "FAILED_PRECONDITION", "invalid_request_error"),
    Code.IDEMPOTENCY_IN_PROGRESS: Status(409, "ABORTED", "conflict_error"),
    Code.IDEMPOTENCY_ANSWER_LOST: Status(409, "FAILED_PRECONDITION", "conflict_error"),
    Code.IDEMPOTENCY_FULL: Status(429, "RESOURCE_EXHAUSTED", "rate_limit_error"),
    Code.PAYLOAD_TOO_LARGE: Status(413, "RESOURCE_EXHAUSTED", "invalid_request_error"),
    Code.QUEUE_FULL: Status(429, "RESOURCE_EXHAUSTED", "rate_limit_error"),
    Code.QUEUE_TIMEOUT: Status(503, "UNAVAILABLE", "overloaded_error"),
    Code.DEADLINE_EXCEEDED: Status(504, "DEADLINE_EXCEEDED", "timeout_error"),
    Code.COOLDOWN: Status(503, "UNAVAILABLE", "overloaded_error"),
    Code.CONTROL_STORE_UNAVAILABLE: Status(503, "UNAVAILABLE", "api_error"),
    Code.CONTENT_STORE_UNAVAILABLE: Status(503, "UNAVAILABLE", "api_error"),
    Code.DUPLICATE_DEBIT: Status(409, "ALREADY_EXISTS", "conflict_error"),
    # The caller lost its place to a newer owner of the run: it must look, not repeat.
    Code.OWNER_FENCE: Status(409, "FAILED_PRECONDITION", "conflict_error"),
    Code.PROVIDER_UNAVAILABLE: Status(503, "UNAVAILABLE", "api_error"),
    # Not 429: clients repeat that by themselves, and this one can never succeed as it is.
    Code.TOO_LARGE: Status(400, "INVALID_ARGUMENT", "invalid_request_error"),
    Code.RANGE_TOO_WIDE: Status(400, "INVALID_ARGUMENT", "invalid_request_error"),
    Code.KEY_LIMIT: Status(429, "RESOURCE_EXHAUSTED", "rate_limit_error"),
    # OpenAI's own word for money that is used up: its clients know that asking again does not help.
    Code.BUDGET_EXCEEDED: Status(429, "RESOURCE_EXHAUSTED", "insufficient_quota"),
    Code.BUDGET_RESERVED: Status(429, "RESOURCE_EXHAUSTED", "rate_limit_error"),
    Code.NO_ROUTE: Status(403, "FAILED_PRECONDITION", "permission_error"),
    Code.PRICING_REQUIRED: Status(403, "FAILED_PRECONDITION", "permission_error"),
    Code.PROVIDER_NOT_READY: Status(503, "FAILED_PRECONDITION", "api_error"),
    Code.ALL_ROUTES_FAILED: Status(502, "UNAVAILABLE", "api_error"),
    Code.UPSTREAM_REJECTED: Status(400, "INVALID_ARGUMENT", "invalid_request_error"),
    Code.UPSTREAM_BROKEN: Status(502, "UNAVAILABLE", "api_error"),
    Code.CANCELLED: Status(499, "CANCELLED", "cancelled_error"),
    Code.SHUTTING_DOWN: Status(503, "UNAVAILABLE", "api_error"),
    Code.INTERNAL: Status(500, "INTERNAL", "api_error"),
    Code.UNCERTAIN: Status(502, "ABORTED", "api_error"),
    Code.POISON: Status(500, "ABORTED", "api_error"),
    Code.EXPIRED: Status(504, "DEADLINE_EXCEEDED", "timeout_error"),
}


class GatewayError(Exception):
    """Base of all. Carries data; the transports turn it into their own words."""

    code: Code = Code.INTERNAL
    #: With `explain`: the routes that were not tried, and why. An error with an outcome has them there as well.
    left_out: tuple[LeftOut, ...] = ()

    def __init__(
        self,
        message: str,
        *,
        code: Code | None = None,
        param: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        if code is not None:
            self.code = code
        self.message = message
        #: The path of the field that is at fault.
        self.param = param or None
        #: Seconds after which trying again may help.
        self.retry_after_s = retry_after_s

    @property
    def status(self) -> Status:
        return STATUS[self.code]

    @property
    def dispatched(self) -> bool | None:
        """Whether a provider got any of the request; None where that is not known. False: it cannot run twice."""
        return False


class InvalidRequest(GatewayError):
    """The request cannot be served as it is."""

    code = Code.INVALID_REQUEST


_PLACE: Final = re.compile(r"^JSON is malformed: (?P<what>[a-z ,'-]+) \(byte (?P<byte>\d+)\)$")


def not_json(subject: str, error: Exception, *, param: str | None = None) -> InvalidRequest:
    """Where JSON is broken, and how, in msgspec's words: they name bytes and positions, never the content."""
    said = _PLACE.match(str(error))
    how = f": {said['what']} at byte {said['byte']}" if said else ""
    if "truncated" in str(error):
        how = ": it ends too early"
    return InvalidRequest(f"{subject} is not valid JSON{how}", code=Code.INVALID_JSON, param=param)


class Unauthenticated(GatewayError):
    """No key, or not one of ours. The message is the same for every reason."""

    code = Code.UNAUTHENTICATED

    def __init__(self) -> None:
        super().__init__("a valid API key is needed: send `authorization: Bearer <key>`")


class PermissionDenied(GatewayError):
    """The key does not have the scope, or may not use the model."""

    code = Code.PERMISSION_DENIED


class NotFound(GatewayError):
    """There is no such thing, or it belongs to another key."""

    code = Code.NOT_FOUND


class ModelNotFound(GatewayError):
    """No configured model has this name."""

    code = Code.MODEL_NOT_FOUND


class Conflict(GatewayError):
    """The thing is in a state that forbids this."""

    code = Code.CONFLICT


class IdempotencyMismatch(GatewayError):
    """The Idempotency-Key was used with another body."""

    code = Code.IDEMPOTENCY_MISMATCH


class AttemptedError(GatewayError):
    """An error of a request that may have been dispatched: `outcome` lists the attempts and what they cost."""

    def __init__(
        self,
        message: str,
        *,
        outcome: Outcome | None = None,
        code: Code | None = None,
        param: str | None = None,
        retry_after_s: float | None = None,
        groups: tuple[str, ...] = (),
        cause: str | None = None,
        limit: str | None = None,
    ) -> None:
        super().__init__(message, code=code, param=param, retry_after_s=retry_after_s)
        self.outcome = outcome
        #: The capacity groups that had no slot or no answer for it, the one that the message is about first.
        self.groups = groups
        #: What the code leaves open: a word of `gateway.standing.Cause`.
        self.cause = cause
        #: The limit of the key that is in the way, by its name.
        self.limit = limit

    @property
    @override
    def dispatched(self) -> bool | None:
        return None if self.outcome is None else self.outcome.dispatched


class AdmissionRefused(AttemptedError):
    """No slot on any route that was left. Nothing is being executed for this request."""

    code = Code.QUEUE_FULL

    @property
    @override
    def dispatched(self) -> bool | None:
        return self.outcome is not None and self.outcome.dispatched


class NoRoute(GatewayError):
    """Every route was left out before anything was tried; the message says why for each."""

    code = Code.NO_ROUTE


class AllRoutesFailed(AttemptedError):
    """Every attempt failed."""

    code = Code.ALL_ROUTES_FAILED


class UpstreamRejected(AttemptedError):
    """The provider refused the request as the caller's own fault."""

    code = Code.UPSTREAM_REJECTED


class StreamBroken(AttemptedError):
    """The answer ended without proof that it is complete, after part of it had gone out."""

    code = Code.UPSTREAM_BROKEN


class Cancelled(AttemptedError):
    """The caller took the request back."""

    code = Code.CANCELLED


class ShuttingDown(GatewayError):
    """This process takes no new work. Another one will."""

    code = Code.SHUTTING_DOWN


class Stopped(AttemptedError):
    """This process is stopping, and has ended a request that had not ended in its time."""

    code = Code.SHUTTING_DOWN


class Internal(GatewayError):
    """A fault of the gateway's own. The log has it under the request id."""

    code = Code.INTERNAL

    @property
    @override
    def dispatched(self) -> bool | None:
        return None
