"""
How a call fails, the same for both transports and both faces.

    CallFailed            it did not give what was asked for; `code` is stable, and chooses the class
    |- InvalidRequest     the request cannot be served as it is; `param` names the field
    |- Unauthenticated    no key, or not a valid one
    |- NotAllowed         the key, the policy or the prices left nothing that may serve it
    |- NotFound           no such model, job, batch or file
    |- Conflict           the state of something forbids it: an idempotency key, a debit, an owner, an end
    |- Busy               no slot for now: a full queue, a cooldown, a limit
    |- Unavailable        a store, a process or every provider is out for now
    |- ProviderFailed     every attempt failed, or the answer broke
    |- OutOfTime          a deadline passed
    |- Uncertain          it was sent, and nobody knows how it ended
    |- Cancelled          it was taken back
    |- Internal           a fault of the gateway
    `- Unreachable        nobody answered as a gateway does; what became of the request is not known

A code that is younger than this client has the class of its status.
"""

from __future__ import annotations

from typing import Any, ClassVar, Final

import grpc
import httpx
import msgspec
from google.rpc import error_details_pb2, status_pb2

from protos.tollbridge.v1 import gateway_pb2 as pb

_DETAILS: Final = "grpc-status-details-bin"
#: Codes of statuses that gRPC makes up itself, on this side or in the server's library.
_OWN_CODES: Final = {
    grpc.StatusCode.DEADLINE_EXCEEDED: "deadline_exceeded",
    grpc.StatusCode.CANCELLED: "cancelled",
    grpc.StatusCode.RESOURCE_EXHAUSTED: "payload_too_large",
}
#: The status of an error that needed no answer of anybody.
LOCAL: Final = "none"


class CallFailed(Exception):
    """A call did not give what was asked for."""

    #: The codes that have this class.
    codes: ClassVar[frozenset[str]] = frozenset()

    def __init__(
        self,
        message: str,
        *,
        code: str,
        status: str,
        param: str | None = None,
        request_id: str | None = None,
        retry_after_s: float | None = None,
        attempts: int | None = None,
        outcome: pb.Outcome | None = None,
        dispatched: bool | None = None,
    ) -> None:
        super().__init__(f"{code}: {message}")
        self.message = message
        #: Stable: "queue_full", "all_routes_failed", ...
        self.code = code
        #: The gRPC status by name, the HTTP status as digits, a job's status, or "none".
        self.status = status
        #: The path of the field that is at fault.
        self.param = param
        self.request_id = request_id
        #: Seconds after which trying again may help.
        self.retry_after_s = retry_after_s
        #: How many attempts got a slot, those that could not be sent included. None: not known.
        self.attempts = attempts
        #: The attempts and what they cost, where there were any and the transport had room for them.
        self.outcome = outcome
        #: False: no provider got any of it, so asking again costs nothing. None: not known.
        self.dispatched = dispatched


class InvalidRequest(CallFailed):
    """The request cannot be served as it is. `param` names the field; found by the gateway, or before it was sent."""

    codes = frozenset(
        {
            "invalid_json",
            "invalid_request",
            "method_not_allowed",
            "payload_too_large",
            "too_large",
            "unsupported_field",
            "unsupported_media_type",
            "upstream_rejected",
        }
    )


class Unauthenticated(CallFailed):
    """No key, or not a valid one."""

    codes = frozenset({"unauthenticated"})


class NotAllowed(CallFailed):
    """The key, its budget, the policy or the prices left nothing that may serve it."""

    codes = frozenset({"budget_exceeded", "no_route", "permission_denied", "pricing_required"})


class NotFound(CallFailed):
    """There is no such thing, or it belongs to another key."""

    codes = frozenset({"model_not_found", "not_found"})


class Conflict(CallFailed):
    """The state of something forbids it. Repeating it does not help, but for `idempotency_in_progress`."""

    codes = frozenset(
        {
            "conflict",
            "duplicate_debit",
            "idempotency_answer_lost",
            "idempotency_in_progress",
            "idempotency_mismatch",
            "owner_fence",
        }
    )


class Busy(CallFailed):
    """No slot for now, or none for this key."""

    codes = frozenset({"budget_reserved", "cooldown", "idempotency_full", "key_limit", "queue_full", "queue_timeout"})


class Unavailable(CallFailed):
    """What is needed to serve it is out for now."""

    codes = frozenset(
        {
            "content_store_unavailable",
            "control_store_unavailable",
            "provider_not_ready",
            "provider_unavailable",
            "shutting_down",
        }
    )


class ProviderFailed(CallFailed):
    """Every attempt failed, or the answer broke after part of it had come."""

    codes = frozenset({"all_routes_failed", "upstream_broken"})


class OutOfTime(CallFailed):
    """A deadline passed: the caller's, the job's or the batch's."""

    codes = frozenset({"batch_expired", "deadline_exceeded", "expired", "request_timeout"})


class Uncertain(CallFailed):
    """It was sent, and nobody knows how it ended. It is not sent again."""

    codes = frozenset({"poison", "uncertain"})


class Cancelled(CallFailed):
    """It was taken back."""

    codes = frozenset({"batch_cancelled", "cancelled"})


class Internal(CallFailed):
    """A fault of the gateway. Its log has the request id."""

    codes = frozenset({"internal"})


class Unreachable(CallFailed):
    """Nobody answered as a gateway does. The request may or may not have been executed."""

    codes = frozenset({"unreachable"})


_CLASSES: Final[dict[str, type[CallFailed]]] = {
    code: kind for kind in CallFailed.__subclasses__() for code in kind.codes
}
#: Of a code that is not in the table: what its status, over HTTP or gRPC, says of it.
_BY_STATUS: Final[dict[str, type[CallFailed]]] = {
    "400": InvalidRequest,
    "401": Unauthenticated,
    "402": NotAllowed,
    "403": NotAllowed,
    "404": NotFound,
    "405": InvalidRequest,
    "408": OutOfTime,
    "409": Conflict,
    "413": InvalidRequest,
    "415": InvalidRequest,
    "422": InvalidRequest,
    "429": Busy,
    "499": Cancelled,
    "500": Internal,
    "502": ProviderFailed,
    "503": Unavailable,
    "504": OutOfTime,
    "ABORTED": Conflict,
    "ALREADY_EXISTS": Conflict,
    "CANCELLED": Cancelled,
    "DEADLINE_EXCEEDED": OutOfTime,
    "FAILED_PRECONDITION": Conflict,
    "INTERNAL": Internal,
    "INVALID_ARGUMENT": InvalidRequest,
    "NOT_FOUND": NotFound,
    "PERMISSION_DENIED": NotAllowed,
    "RESOURCE_EXHAUSTED": Busy,
    "UNAUTHENTICATED": Unauthenticated,
    "UNAVAILABLE": Unavailable,
    "UNIMPLEMENTED": InvalidRequest,
}


def failure(message: str, *, code: str, status: str = LOCAL, **told: Any) -> CallFailed:
    """The error of this code, of the class that the code has, or else its status."""
    kind = _CLASSES.get(code) or _BY_STATUS.get(status, CallFailed)
    return kind(message, code=code, status=status, **told)


def refused(param: str, reason: str, *, code: str = "invalid_request") -> CallFailed:
    """What would be refused, before it is sent."""
    return failure(f"{param}: {reason}", code=code, param=param, attempts=0, dispatched=False)


def from_grpc(failed: Any) -> CallFailed:
    """`failed` is the grpc.RpcError of a call that has ended, of either kind of channel."""
    status: grpc.StatusCode = failed.code()
    message: str = failed.details() or ""
    rich = status_pb2.Status()
    for name, value in failed.trailing_metadata() or ():
        if name == _DETAILS and isinstance(value, bytes):
            rich.ParseFromString(value)
    info = error_details_pb2.ErrorInfo()
    retry = error_details_pb2.RetryInfo()
    outcome = pb.Outcome()
    found = {detail.TypeName() for detail in rich.details for known in (info, retry, outcome) if detail.Unpack(known)}
    if info.DESCRIPTOR.full_name in found:
        attempts = info.metadata.get("attempts", "")
        return failure(
            message,
            code=info.reason,
            status=status.name,
            param=info.metadata.get("param"),
            request_id=info.metadata.get("request_id"),
            retry_after_s=retry.retry_delay.ToNanoseconds() / 1e9 if retry.DESCRIPTOR.full_name in found else None,
            attempts=int(attempts) if attempts.isdecimal() else None,
            outcome=outcome if outcome.DESCRIPTOR.full_name in found else None,
            dispatched={"true": True, "false": False}.get(info.metadata.get("dispatched", "")),
        )
    return failure(message, code=_OWN_CODES.get(status, "unreachable"), status=status.name)


class _Body(msgspec.Struct):
    error: dict[str, Any]


def from_http(response: httpx.Response) -> CallFailed:
    """The error of an answer that was read."""
    status = str(response.status_code)
    try:
        error = msgspec.json.decode(response.content, type=_Body).error
        code, message = str(error["code"]), str(error["message"])
    except (msgspec.DecodeError, KeyError):
        return failure("the answer is not a gateway's", code="unreachable", status=status)
    after = response.headers.get("retry-after", "")
    dispatched = error.get("dispatched")
    return failure(
        message,
        code=code,
        status=status,
        param=error.get("param"),
        request_id=error.get("request_id"),
        retry_after_s=float(after) if after.isdecimal() else None,
        attempts=0 if dispatched is False else None,
        dispatched=dispatched,
    )


def from_transport(failed: httpx.RequestError) -> CallFailed:
    return failure(str(failed) or type(failed).__name__, code="unreachable")
