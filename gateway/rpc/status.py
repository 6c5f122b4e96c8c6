"""
How an outcome and an error look in a gRPC status.

The one table from codes to statuses is `gateway.errors.STATUS`. This file puts what it says on the wire, with details
for programs: without them a client could only branch on the text of a message meant for people.
"""

from __future__ import annotations

from typing import Final, TypeAlias

import grpc
from google.protobuf import duration_pb2
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from gateway.errors import STATUS, AttemptedError, GatewayError
from gateway.outcome import Outcome
from gateway.rpc import codec

DOMAIN: Final = "tollbridge"
#: Clients may drop a call whose trailing metadata passes 8 KiB (gRPC's default soft limit). Details are Base64 there,
#: and the message is in them a second time, so message and outcome are kept well below it.
MAX_MESSAGE_BYTES: Final = 1024
MAX_OUTCOME_BYTES: Final = 3072
#: Characters of the routes that were left out, where no outcome has them.
MAX_LEFT_OUT: Final = 1024

CODES: Final = {code: grpc.StatusCode[status.grpc] for code, status in STATUS.items()}

Metadata: TypeAlias = tuple[tuple[str, str | bytes], ...]


def outcome_of(error: GatewayError) -> Outcome | None:
    return error.outcome if isinstance(error, AttemptedError) else None


def attribution(request_id: str, outcome: Outcome | None) -> Metadata:
    """The trailing metadata that says who served a request and what it cost. Text beyond ASCII is percent-encoded."""
    metadata: list[tuple[str, str | bytes]] = [("x-tollbridge-request-id", request_id)]
    if outcome is not None:
        metadata.extend(outcome.attribution())
    return tuple(metadata)


def render(error: GatewayError, request_id: str) -> tuple[grpc.StatusCode, str, Metadata]:
    """The status, message and trailing metadata of an error: what `context.abort` takes."""
    outcome = outcome_of(error)
    code = CODES[error.code]
    message = error.message.encode()[:MAX_MESSAGE_BYTES].decode(errors="ignore")
    rich = status_pb2.Status(code=code.value[0], message=message)
    _attach(rich, _info(error, request_id, outcome))
    if error.retry_after_s is not None:
        delay = duration_pb2.Duration()
        delay.FromNanoseconds(round(max(error.retry_after_s, 0.0) * 1e9))
        _attach(rich, error_details_pb2.RetryInfo(retry_delay=delay))
    if outcome is not None:
        report = codec.encode_outcome(outcome)
        if report.ByteSize() <= MAX_OUTCOME_BYTES:
            _attach(rich, report)
    details = rpc_status.to_status(rich)
    return code, message, (*details.trailing_metadata, *attribution(request_id, outcome))


def _info(error: GatewayError, request_id: str, outcome: Outcome | None) -> error_details_pb2.ErrorInfo:
    info = error_details_pb2.ErrorInfo(reason=error.code, domain=DOMAIN)
    info.metadata["request_id"] = request_id
    info.metadata["attempts"] = str(0 if outcome is None else len(outcome.attempts))
    if error.dispatched is not None:
        info.metadata["dispatched"] = "true" if error.dispatched else "false"
    if error.param is not None:
        info.metadata["param"] = error.param
    if outcome is None and error.left_out:
        reasons = "; ".join(f"{out.provider}/{out.model}: {out.reason}" for out in error.left_out)
        info.metadata["left_out"] = reasons[:MAX_LEFT_OUT]
    if outcome is not None:
        info.metadata["ended"] = outcome.ended
        info.metadata["cost_state"] = outcome.cost.state
    return info


def _attach(rich: status_pb2.Status, detail: Message) -> None:
    rich.details.add().Pack(detail)
