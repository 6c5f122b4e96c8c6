"""One class for each kind of code."""

from __future__ import annotations

import httpx
import pytest

from gateway.client import CallFailed, Conflict, InvalidRequest, Unavailable, Unreachable, errors
from gateway.errors import STATUS, Code
from gateway.jobs.output import _IN_A_BATCH

KNOWN = [code for kind in CallFailed.__subclasses__() for code in kind.codes]


def test_no_code_has_two_classes_and_none_is_made_up() -> None:
    assert len(KNOWN) == len(set(KNOWN))
    assert set(KNOWN) - {code.value for code in Code} == {*_IN_A_BATCH.values(), "unreachable"}


@pytest.mark.parametrize("code", Code)
def test_every_code_of_the_gateway_has_a_class_on_both_transports(code: Code) -> None:
    """Also one that was added after this client: by its status."""
    status = STATUS[code]
    kinds = {type(errors.failure("no", code=code.value, status=told)) for told in (f"{status.http}", status.grpc)}
    assert CallFailed not in kinds
    assert len(kinds) == 1 or code.value not in KNOWN


def test_every_class_is_public_and_told() -> None:
    import gateway.client as public

    for kind in CallFailed.__subclasses__():
        assert getattr(public, kind.__name__) is kind
        assert kind.__name__ in public.__all__
        assert f"- {kind.__name__} " in (errors.__doc__ or "")


@pytest.mark.parametrize(("status", "kind"), [("503", Unavailable), ("ABORTED", Conflict), ("failed", CallFailed)])
def test_a_code_that_is_younger_than_the_client_has_the_class_of_its_status(status: str, kind: type) -> None:
    failed = errors.failure("so it is", code="moon_phase", status=status)
    assert type(failed) is kind
    assert (failed.code, str(failed)) == ("moon_phase", "moon_phase: so it is")


def answer(status: int, body: str, **headers: str) -> httpx.Response:
    return httpx.Response(status, text=body, headers=headers)


def test_an_error_of_rest_carries_all_it_was_told() -> None:
    body = '{"error": {"code": "too_large", "message": "no", "param": "p", "dispatched": false, "request_id": "r"}}'
    failed = errors.from_http(answer(400, body, **{"retry-after": "3"}))
    assert isinstance(failed, InvalidRequest)
    told = (failed.code, failed.status, failed.param, failed.dispatched, failed.request_id, failed.retry_after_s)
    assert told == ("too_large", "400", "p", False, "r", 3.0)
    assert failed.attempts == 0


@pytest.mark.parametrize("body", ["", "<html>", "[]", '{"error": "no"}', '{"error": {"code": "x"}}', '{"detail": 1}'])
def test_what_no_gateway_says_is_unreachable(body: str) -> None:
    failed = errors.from_http(answer(404, body))
    assert isinstance(failed, Unreachable)
    assert (failed.code, failed.status, failed.dispatched) == ("unreachable", "404", None)
