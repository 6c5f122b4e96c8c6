"""One class for each kind of code."""

from __future__ import annotations

import httpx
import pytest

from gateway.client import CallFailed, InvalidRequest, Unreachable, errors
from gateway.errors import Code
from gateway.jobs.output import _IN_A_BATCH


def test_every_code_of_the_gateway_has_a_class_and_no_other() -> None:
    kinds = CallFailed.__subclasses__()
    known = [code for kind in kinds for code in kind.codes]
    assert len(known) == len(set(known))
    assert set(known) == {code.value for code in Code} | set(_IN_A_BATCH.values()) | {"unreachable"}


def test_every_class_is_public_and_told() -> None:
    import gateway.client as public

    for kind in CallFailed.__subclasses__():
        assert getattr(public, kind.__name__) is kind
        assert kind.__name__ in public.__all__
        assert f"- {kind.__name__} " in (errors.__doc__ or "")


def test_a_code_that_is_younger_than_the_client_is_the_plain_error() -> None:
    failed = errors.failure("so it is", code="moon_phase", status="503")
    assert type(failed) is CallFailed
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
