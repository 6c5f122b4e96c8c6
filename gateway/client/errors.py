"""
How a call fails, the same for both transports.

    CallFailed       the gateway said no, or that it did not work out; `code` is stable, branch on it
    `- Unreachable   nobody answered as a gateway does; what became of the request is not known
"""

from __future__ import annotations

from typing import Any

import grpc
import grpc.aio
import httpx
import msgspec
from google.rpc import error_details_pb2, status_pb2

from protos.tollbridge.v1 import gateway_pb2 as pb

_DETAILS = "grpc-status-details-bin"
#: Codes of statuses that gRPC makes up itself, on this side or in the server's library.
_OWN_CODES = {
    grpc.StatusCode.DEADLINE_EXCEEDED: "deadline_exceeded",
    grpc.StatusCode.CANCELLED: "cancelled",
    grpc.StatusCode.RESOURCE_EXHAUSTED: "payload_too_large",
}


class CallFailed(Exception):
    """A call did not give what was asked for."""

    def __init__(
        self,
        message: str,
        *,
        code: str,
        status: str,
        param: str | None = None,
        request_id: str | None = None,
        retry_after_s: float | None = None,
        outcome: pb.Outcome | None = None,
        dispatched: bool | None = None,
    ) -> None:
        super().__init__(f"{code}: {message}")
        self.message = message
        #: Stable: "queue_full", "all_routes_failed", ...
        self.code = code
        #: The gRPC status by name, or the HTTP status as digits.
        self.status = status
        #: The path of the field that is at fault.
        self.param = param
        self.request_id = request_id
        #: Seconds after which trying again may help.
        self.retry_after_s = retry_after_s
        #: The attempts that were made and what they cost, where there were any and gRPC had room for them.
        self.outcome = outcome
        #: False: no provider got any of it, so asking again costs nothing. None: not known.
        self.dispatched = dispatched


class Unreachable(CallFailed):
    """Nobody answered as a gateway does. The request may or may not have been executed."""


def from_grpc(failed: grpc.aio.AioRpcError) -> CallFailed:
    status = failed.code()
    message = failed.details() or ""
    rich = status_pb2.Status()
    for name, value in failed.trailing_metadata() or ():
        if name == _DETAILS and isinstance(value, bytes):
            rich.ParseFromString(value)
    info = error_details_pb2.ErrorInfo()
    retry = error_details_pb2.RetryInfo()
    outcome = pb.Outcome()
    found = {detail.TypeName() for detail in rich.details for known in (info, retry, outcome) if detail.Unpack(known)}
    if info.DESCRIPTOR.full_name in found:
        return CallFailed(
            message,
            code=info.reason,
            status=status.name,
            param=info.metadata.get("param"),
            request_id=info.metadata.get("request_id"),
            retry_after_s=retry.retry_delay.ToNanoseconds() / 1e9 if retry.DESCRIPTOR.full_name in found else None,
            outcome=outcome if outcome.DESCRIPTOR.full_name in found else None,
            dispatched={"true": True, "false": False}.get(info.metadata.get("dispatched", "")),
        )
    if status in _OWN_CODES:
        return CallFailed(message, code=_OWN_CODES[status], status=status.name)
    return Unreachable(message, code="unreachable", status=status.name)


class _Body(msgspec.Struct):
    error: dict[str, Any]


def from_http(response: httpx.Response) -> CallFailed:
    status = str(response.status_code)
    try:
        error = msgspec.json.decode(response.content, type=_Body).error
        code, message = str(error["code"]), str(error["message"])
    except (msgspec.DecodeError, KeyError):
        return Unreachable("the answer is not a gateway's", code="unreachable", status=status)
    after = response.headers.get("retry-after", "")
    return CallFailed(
        message,
        code=code,
        status=status,
        param=error.get("param"),
        request_id=error.get("request_id"),
        retry_after_s=float(after) if after.isdecimal() else None,
        dispatched=error.get("dispatched"),
    )


def from_transport(failed: httpx.TransportError) -> CallFailed:
    return Unreachable(str(failed) or type(failed).__name__, code="unreachable", status="none")
