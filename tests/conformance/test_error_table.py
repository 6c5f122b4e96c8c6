"""Every error a caller can be told has a place on both transports: one table, two renderers, nothing missing."""

from __future__ import annotations

import http

import grpc
import msgspec
import pytest
from google.rpc import error_details_pb2, status_pb2

from gateway import errors
from gateway.rest import apis
from gateway.rest.status import error_response
from gateway.rpc import status as rpc_status

OPENAI_TYPES = {
    "api_error",
    "authentication_error",
    "cancelled_error",
    "conflict_error",
    "insufficient_quota",
    "invalid_request_error",
    "not_found_error",
    "overloaded_error",
    "permission_error",
    "rate_limit_error",
    "timeout_error",
}
#: Of Anthropic's API, but for `billing_error`.
ANTHROPIC_TYPES = {
    "api_error",
    "authentication_error",
    "conflict_error",
    "invalid_request_error",
    "not_found_error",
    "overloaded_error",
    "permission_error",
    "rate_limit_error",
    "request_too_large",
    "timeout_error",
}


def every_class(base: type[errors.GatewayError]) -> list[type[errors.GatewayError]]:
    return [base, *(found for sub in base.__subclasses__() for found in every_class(sub))]


CLASSES = every_class(errors.GatewayError)


def made(kind: type[errors.GatewayError]) -> errors.GatewayError:
    return errors.Unauthenticated() if kind is errors.Unauthenticated else kind("what to do")


def test_every_code_has_a_row_and_every_row_a_code() -> None:
    assert set(errors.STATUS) == set(errors.Code)


@pytest.mark.parametrize("code", errors.Code)
def test_every_row_names_statuses_that_exist(code: errors.Code) -> None:
    row = errors.STATUS[code]
    assert row.grpc in grpc.StatusCode.__members__
    assert row.grpc != "OK"
    # 499 is nginx's word for a client that went away; nobody is left to read it.
    assert row.http == 499 or http.HTTPStatus(row.http) >= http.HTTPStatus.BAD_REQUEST
    assert row.type in OPENAI_TYPES


@pytest.mark.parametrize("kind", CLASSES)
def test_every_error_class_has_a_code_of_its_own_and_a_row(kind: type[errors.GatewayError]) -> None:
    assert kind.code in errors.STATUS
    assert made(kind).status is errors.STATUS[kind.code]


@pytest.mark.parametrize("code", errors.Code)
def test_both_transports_tell_the_same_code(code: errors.Code) -> None:
    error = errors.GatewayError("what to do", code=code, param="messages[0]", retry_after_s=1.5)

    response = error_response(error, "f00")
    assert isinstance(response.body, bytes)
    told = msgspec.json.decode(response.body)["error"]
    assert response.status == errors.STATUS[code].http
    assert response.headers["Retry-After"] == "2"

    grpc_code, message, trailing = rpc_status.render(error, "f00")
    details = dict(trailing)["grpc-status-details-bin"]
    assert isinstance(details, bytes)
    info, retry = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo()
    first, second = status_pb2.Status.FromString(details).details
    assert first.Unpack(info)
    assert second.Unpack(retry)
    assert grpc_code.name == errors.STATUS[code].grpc
    assert retry.retry_delay.ToMilliseconds() == 1500

    assert told["code"] == info.reason == code.value
    assert told["message"] == message == "what to do"
    assert told["param"] == info.metadata["param"] == "messages[0]"
    assert told["request_id"] == info.metadata["request_id"] == "f00"
    assert told["type"] == errors.STATUS[code].type
    assert told["dispatched"] is False
    assert info.metadata["dispatched"] == "false"


@pytest.mark.parametrize("code", errors.Code)
def test_the_apis_of_others_tell_an_error_with_the_type_of_its_code(code: errors.Code) -> None:
    error = errors.GatewayError("what to do", code=code)
    for api in (apis.CHAT_COMPLETIONS, apis.RESPONSES, apis.MESSAGES):
        response = error_response(error, "f00", api)
        assert isinstance(response.body, bytes)
        told = msgspec.json.decode(response.body)["error"]
        assert (response.status, told["code"]) == (errors.STATUS[code].http, code.value)
        if api is not apis.MESSAGES:
            assert told["type"] == errors.STATUS[code].type
        elif code is errors.Code.BUDGET_EXCEEDED:
            assert told["type"] == "billing_error"
        else:
            assert told["type"] in ANTHROPIC_TYPES


@pytest.mark.parametrize("kind", CLASSES)
def test_both_transports_say_the_same_of_whether_anything_was_dispatched(kind: type[errors.GatewayError]) -> None:
    error = made(kind)
    response = error_response(error, "f00")
    assert isinstance(response.body, bytes)
    told = msgspec.json.decode(response.body)["error"]["dispatched"]
    details = dict(rpc_status.render(error, "f00")[2])["grpc-status-details-bin"]
    assert isinstance(details, bytes)
    info = error_details_pb2.ErrorInfo()
    assert status_pb2.Status.FromString(details).details[0].Unpack(info)
    assert {True: "true", False: "false", None: None}[told] == info.metadata.get("dispatched")
    # Without an outcome nobody may say that something was, or was not, sent by a request that got that far.
    attempted = issubclass(kind, errors.AttemptedError) and kind is not errors.AdmissionRefused
    assert told is (None if attempted or kind is errors.Internal else False)


@pytest.mark.parametrize("kind", CLASSES)
def test_both_transports_render_every_error_class(kind: type[errors.GatewayError]) -> None:
    error = made(kind)
    assert error_response(error, "f00").status == error.status.http
    assert rpc_status.render(error, "f00")[0].name == error.status.grpc
