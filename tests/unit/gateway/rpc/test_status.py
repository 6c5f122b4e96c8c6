"""An error as a gRPC status: its code, its details, and what trailing metadata can take."""

from __future__ import annotations

from decimal import Decimal

import grpc
from google.rpc import error_details_pb2, status_pb2

from gateway.errors import AdmissionRefused, AllRoutesFailed, Internal, InvalidRequest, NoRoute
from gateway.outcome import Cost, LeftOut, RouteReport
from gateway.rpc import status
from protos.tollbridge.v1 import gateway_pb2 as pb
from tests.fakes.line import BACKUP, attempt, outcome


def rich_of(trailing: status.Metadata) -> status_pb2.Status:
    (details,) = [value for name, value in trailing if name == "grpc-status-details-bin"]
    assert isinstance(details, bytes)
    return status_pb2.Status.FromString(details)


def test_the_code_is_in_the_error_info_and_the_status_agrees() -> None:
    code, message, trailing = status.render(InvalidRequest("n: less than 1", param="n"), "f00")
    rich = rich_of(trailing)
    info = error_details_pb2.ErrorInfo()
    assert rich.details[0].Unpack(info)
    assert (code, rich.code) == (grpc.StatusCode.INVALID_ARGUMENT, 3)
    assert message == rich.message == "n: less than 1"
    assert (info.reason, info.domain) == ("invalid_request", "tollbridge")
    assert dict(info.metadata) == {"request_id": "f00", "attempts": "0", "dispatched": "false", "param": "n"}
    assert len(rich.details) == 1
    assert ("x-tollbridge-request-id", "f00") in trailing


def test_routes_that_were_left_out_are_in_the_error_info_where_no_outcome_has_them() -> None:
    error = NoRoute("nobody")
    error.left_out = (
        LeftOut(provider="a", model="m", reason="not_ready"),
        LeftOut(provider="b", model="m", reason="x"),
    )
    _, _, trailing = status.render(error, "f00")
    info = error_details_pb2.ErrorInfo()
    assert rich_of(trailing).details[0].Unpack(info)
    assert info.metadata["left_out"] == "a/m: not_ready; b/m: x"


def test_retry_info_is_there_where_waiting_helps_and_never_negative() -> None:
    for seconds, nanos in ((0.25, 250_000_000), (-1.0, 0)):
        _, _, trailing = status.render(AdmissionRefused("full", retry_after_s=seconds), "f00")
        retry = error_details_pb2.RetryInfo()
        assert rich_of(trailing).details[1].Unpack(retry)
        assert retry.retry_delay.ToNanoseconds() == nanos


def test_what_trailing_metadata_cannot_take_is_cut_or_left_out() -> None:
    wordy = [attempt(number, status="error", code="c" * 200) for number in range(40)]
    failed = AllRoutesFailed("ü" * 5000, outcome=outcome(*wordy, ended="failed"))
    _, message, trailing = status.render(failed, "f00")
    rich = rich_of(trailing)
    assert message == "ü" * 512
    assert not any(detail.Is(pb.Outcome.DESCRIPTOR) for detail in rich.details)
    assert rich.ByteSize() < 2048


def test_attribution_is_ascii_and_tells_an_unknown_cost_by_its_absence() -> None:
    route = RouteReport(route_id="r", provider="käse", model="a b\n", protocol="chat_completions")
    served = outcome(attempt(route=route), cost=Cost(state="unknown"))
    assert dict(status.attribution("f00", served)) == {
        "x-tollbridge-request-id": "f00",
        "x-tollbridge-route": "k%C3%A4se/a%20b%0A",
        "x-tollbridge-attempts": "1",
        "x-tollbridge-settlement": "settled",
        "x-tollbridge-day-usd": "10",
        "x-tollbridge-total-usd": "20.5",
    }


def test_a_retry_on_one_route_is_no_failover() -> None:
    again = outcome(attempt(1, status="error", code="overloaded"), attempt(2))
    moved = outcome(attempt(1, status="error", code="overloaded"), attempt(2, route=BACKUP))
    assert "x-tollbridge-failover-reason" not in dict(status.attribution("f00", again))
    assert dict(status.attribution("f00", moved))["x-tollbridge-failover-reason"] == "overloaded"


def test_a_cost_is_a_plain_decimal() -> None:
    tiny = outcome(cost=Cost(state="charged", usd=Decimal("1E-8")))
    assert dict(status.attribution("f00", tiny))["x-tollbridge-cost-usd"] == "0.00000001"


def test_an_error_that_was_never_dispatched_has_no_outcome() -> None:
    assert status.outcome_of(Internal("x")) is None
