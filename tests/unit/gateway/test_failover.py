"""What a caller is told when no slot was to be had, on both transports."""

from __future__ import annotations

from decimal import Decimal
from types import SimpleNamespace
from typing import Any, cast

import grpc
import msgspec
import pytest
from google.rpc import error_details_pb2, status_pb2

from adapters.chat import ChatRequest, Message, Role, Text
from adapters.contract import Endpoint
from admission.ids import new_id
from admission.lease import KeyLimit, Refusal, RefusalReason
from gateway.call import Call, Caller, Options
from gateway.errors import AdmissionRefused, Code, GatewayError
from gateway.failover import Run
from gateway.outcome import AttemptReport, Cost, LeftOut, RouteReport
from gateway.provider import Provider
from gateway.rest.status import error_response
from gateway.router import Plan, Route, RoutingSettings
from gateway.rpc import status as rpc_status
from gateway.stopping import Stopping

GROUP = "https://api.example:443"


#: Whose key has a limit in the way is told which.
LIMITS = {
    "key_limit": KeyLimit(name="requests_per_minute", most=Decimal(60)),
    **dict.fromkeys(
        ("budget_exceeded", "budget_reserved"),
        KeyLimit(
            name="budget_day_usd", most=Decimal(5), spent=Decimal("4.50"), reserved=Decimal(1), wanted=Decimal("0.40")
        ),
    ),
}


def refusal(reason: str, retry_after_s: float | None = None, position: int | None = None) -> Refusal:
    """A refusal by its name: not every version of admission gives every one."""
    named = cast("RefusalReason", SimpleNamespace(value=reason))
    return Refusal(
        reason=RefusalReason(reason) if reason in set(RefusalReason) else named,
        group=GROUP,
        retry_after_s=retry_after_s,
        position=position,
        key_limit=LIMITS.get(reason),
    )


def run() -> Run:
    chat = ChatRequest(messages=(Message(role=Role.USER, content=(Text(text="hi"),)),))
    caller = Caller(key_id=new_id(), name="k", scopes=frozenset())
    call = Call(request_id="r", caller=caller, model="m", chat=chat, options=Options(), transport="rest")
    return Run(call, RoutingSettings(), Stopping())


async def told(asked: Run, *refusals: Refusal) -> AdmissionRefused:
    async def asks() -> None:
        for one in refusals:
            asked.refused(one)
        await asked.pause([])

    with pytest.raises(AdmissionRefused) as refused:
        await asks()
    return refused.value


def over_rest(error: GatewayError) -> tuple[int, dict[str, Any], str | None]:
    response = error_response(error, "r")
    assert isinstance(response.body, bytes)
    return response.status, msgspec.json.decode(response.body)["error"], response.headers.get("Retry-After")


def over_grpc(error: GatewayError) -> tuple[grpc.StatusCode, error_details_pb2.ErrorInfo, float | None]:
    code, _, trailing = rpc_status.render(error, "r")
    details = dict(trailing)["grpc-status-details-bin"]
    assert isinstance(details, bytes)
    info, retry = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo()
    found = {detail.TypeName() for detail in status_pb2.Status.FromString(details).details if detail.Unpack(retry)}
    assert status_pb2.Status.FromString(details).details[0].Unpack(info)
    return code, info, retry.retry_delay.ToMilliseconds() / 1000 if found else None


#: What admission says, and what it is on each transport; whether waiting helps.
TABLE = [
    ("queue_full", 429, grpc.StatusCode.RESOURCE_EXHAUSTED, True),
    ("queue_timeout", 503, grpc.StatusCode.UNAVAILABLE, True),
    ("deadline_exceeded", 504, grpc.StatusCode.DEADLINE_EXCEEDED, True),
    ("cooldown", 503, grpc.StatusCode.UNAVAILABLE, True),
    ("control_store_unavailable", 503, grpc.StatusCode.UNAVAILABLE, True),
    ("provider_unavailable", 503, grpc.StatusCode.UNAVAILABLE, True),
    ("key_limit", 429, grpc.StatusCode.RESOURCE_EXHAUSTED, True),
    ("budget_exceeded", 429, grpc.StatusCode.RESOURCE_EXHAUSTED, True),
    ("budget_reserved", 429, grpc.StatusCode.RESOURCE_EXHAUSTED, True),
    ("duplicate_debit", 409, grpc.StatusCode.ALREADY_EXISTS, False),
    ("owner_fence", 409, grpc.StatusCode.FAILED_PRECONDITION, False),
    ("too_large", 400, grpc.StatusCode.INVALID_ARGUMENT, False),
]


@pytest.mark.parametrize(("reason", "http", "grpc_code", "waits"), TABLE, ids=[row[0] for row in TABLE])
async def test_a_refusal_has_its_status_and_when_to_come_back_and_was_not_dispatched(reason, http, grpc_code, waits):
    error = await told(run(), refusal(reason, retry_after_s=12.25, position=7))
    assert error.code is Code(reason)
    status, body, after = over_rest(error)
    assert (status, body["code"], body["dispatched"], after) == (http, reason, False, "13" if waits else None)
    code, info, delay = over_grpc(error)
    assert (code, info.reason, info.metadata["dispatched"]) == (grpc_code, reason, "false")
    assert delay == (12.25 if waits else None)
    assert error.outcome is not None
    assert error.outcome.attempts == ()


def test_every_reason_of_admission_is_in_the_table_but_those_that_callers_are_told_otherwise():
    assert set(RefusalReason) - {row[0] for row in TABLE} == {
        "lapsed", "control_store_closed", "cost_not_bounded"
    }  # fmt: skip


async def test_what_a_session_with_a_budget_is_not_served_is_no_route_and_no_time_helps():
    limit = KeyLimit(name="budget_session_usd", most=Decimal(5))
    refused = msgspec.structs.replace(refusal("cost_not_bounded", retry_after_s=12.25), key_limit=limit)
    error = await told(run(), refused)
    assert isinstance(error, AdmissionRefused)
    assert (error.code, error.limit, error.dispatched) == (Code.NO_ROUTE, "budget_session_usd", False)
    assert "cost_not_bounded" in error.message
    assert over_rest(error)[0] == 403
    assert over_rest(error)[2] is None
    assert over_grpc(error)[0] is grpc.StatusCode.FAILED_PRECONDITION


async def test_a_store_that_was_replaced_is_told_apart_from_one_that_does_not_answer():
    with pytest.raises(AdmissionRefused) as closed:
        run().refused(refusal("control_store_closed", retry_after_s=40.0))
    away = run().unadmitted(refusal("control_store_unavailable", retry_after_s=1.0), lapsed=False)
    for error, said, after_s in ((closed.value, "was replaced", 40.0), (away, "does not answer", 1.0)):
        assert (error.code, error.retry_after_s) == (Code.CONTROL_STORE_UNAVAILABLE, after_s)
        assert said in error.message
        assert "nothing was dispatched" in error.message


@pytest.mark.parametrize(
    "reason", ["deadline_exceeded", "control_store_unavailable", "duplicate_debit", "owner_fence", "key_limit"]
)
async def test_what_no_other_route_could_do_better_is_told_at_once(reason):
    with pytest.raises(AdmissionRefused):
        run().refused(refusal(reason))


@pytest.mark.parametrize("reason", ["queue_full", "queue_timeout", "cooldown", "provider_unavailable", "too_large"])
async def test_what_another_route_may_do_better_is_left_to_it(reason):
    run().refused(refusal(reason))


async def test_a_budget_that_does_not_suffice_for_a_route_leaves_the_request_to_a_cheaper_one():
    error = await told(run(), refusal("queue_full", 3.0), refusal("budget_exceeded", 40_000.0))
    assert (error.code, error.retry_after_s) == (Code.QUEUE_FULL, 3.0)
    assert error.groups == (GROUP,)
    error = await told(run(), refusal("budget_exceeded", 40_000.0), refusal("budget_reserved", 1.0))
    assert (error.code, error.retry_after_s) == (Code.BUDGET_RESERVED, 1.0)
    error = await told(run(), refusal("budget_exceeded", 40_000.0))
    assert (error.code, error.retry_after_s, error.groups) == (Code.BUDGET_EXCEEDED, 40_000.0, ())
    for said in ("budget_day_usd is 5", "4.5 is spent", "1 is reserved", "0.4", "midnight"):
        assert said in error.message


async def test_of_several_routes_without_a_slot_the_soonest_says_when_to_come_back():
    error = await told(run(), refusal("cooldown", 240.0), refusal("queue_full", 3.0), refusal("queue_timeout", 9.0))
    assert (error.code, error.retry_after_s) == (Code.QUEUE_TIMEOUT, 3.0)


async def test_what_is_too_large_for_one_route_is_not_told_where_another_was_only_full():
    error = await told(run(), refusal("queue_full", 3.0), refusal("too_large"))
    assert (error.code, error.retry_after_s) == (Code.QUEUE_FULL, 3.0)
    error = await told(run(), refusal("too_large"), refusal("too_large"))
    assert error.code is Code.TOO_LARGE


def attempted(status: str) -> AttemptReport:
    route = RouteReport(route_id="r", provider="p", model="m", protocol="chat_completions")
    return AttemptReport(number=1, route=route, status=status, cost=Cost(state="zero"))


@pytest.mark.parametrize(
    ("status", "dispatched"), [("not_dispatched", False), ("error", True), ("timeout", True), ("unknown", True)]
)
async def test_a_refusal_after_an_attempt_tells_whether_that_one_was_sent(status, dispatched):
    asked = run()
    asked.reports.append(attempted(status))
    with pytest.raises(AdmissionRefused) as refused:
        asked.refused(refusal("deadline_exceeded"))
    assert over_rest(refused.value)[1]["dispatched"] is dispatched
    assert over_grpc(refused.value)[1].metadata["dispatched"] == str(dispatched).lower()


async def test_a_route_that_had_no_slot_and_was_tried_in_the_end_was_not_left_out() -> None:
    asked = run()
    endpoint = Endpoint(provider="p", protocol="chat_completions", base_url="https://api.example")
    provider = cast("Provider", SimpleNamespace(id="p"))
    route = Route(provider=provider, endpoint=endpoint, model="up", fallback_index=0, asked="m")
    asked.planned(Plan(routes=(route,), left_out=(LeftOut(provider="q", model="m", reason="disabled"),)))
    asked.refused(refusal("queue_full"), route)
    asked.refused(refusal("cooldown"), route)
    assert [(out.provider, out.reason) for out in asked.left_out] == [("q", "disabled"), ("p", "cooldown")]
    cost = Cost(state="zero")
    asked.reports.append(AttemptReport(number=1, route=route.report, status="success", cost=cost))
    assert [out.provider for out in asked.left_out] == ["q"]
