"""What an error of Gemini means, from the details in it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from adapters.errors import ErrorClass, Rejected
from adapters.protocols.gemini import Gemini

_F, _O, _T = ErrorClass.FATAL, ErrorClass.OURS, ErrorClass.TRANSIENT
_RPC = "type.googleapis.com/google.rpc."


def detail(kind: str, **fields: Any) -> dict[str, Any]:
    return {"@type": _RPC + kind, **fields}


def quota(name: str, **fields: Any) -> dict[str, Any]:
    return detail("QuotaFailure", violations=[{"quotaId": name, **fields}])


def meaning(status: int, word: str, *details: Any, message: str = "", headers: Any = None) -> Rejected:
    error = {"code": status, "status": word, "message": message, "details": list(details)}
    found = Gemini().parse_error(status, headers or {}, json.dumps({"error": error}).encode())
    assert isinstance(found, Rejected)
    return found


@pytest.mark.parametrize(
    ("status", "word", "details", "message", "expected"),
    [
        (400, "INVALID_ARGUMENT", [], "", (_F, None, False, False)),
        (400, "INVALID_ARGUMENT", [], "API key expired. Please renew the API key.", (_O, None, False, True)),
        (400, "INVALID_ARGUMENT", [detail("ErrorInfo", reason="API_KEY_INVALID")], "", (_O, None, False, True)),
        (400, "FAILED_PRECONDITION", [], "", (_O, None, False, True)),
        (401, "UNAUTHENTICATED", [], "", (_O, None, False, True)),
        (402, "RESOURCE_EXHAUSTED", [], "", (_O, None, False, True)),
        (403, "PERMISSION_DENIED", [detail("ErrorInfo", reason="CONSUMER_SUSPENDED")], "", (_O, None, False, True)),
        (403, "PERMISSION_DENIED", [detail("ErrorInfo", reason="IAM_PERMISSION_DENIED")], "", (_O, None, False, False)),
        (404, "NOT_FOUND", [], "models/x is not found for API version v1beta", (_O, None, False, False)),
        (404, "NOT_FOUND", [], "CachedContent not found", (_F, None, False, False)),
        (409, "ABORTED", [], "", (_T, None, False, False)),
        (413, "INVALID_ARGUMENT", [], "", (_F, None, False, False)),
        (429, "RESOURCE_EXHAUSTED", [quota("GenerateRequestsPerMinutePerProject")], "", (_T, None, True, False)),
        (
            429,
            "RESOURCE_EXHAUSTED",
            [quota("GenerateRequestsPerMinute"), detail("RetryInfo", retryDelay="7s")],
            "",
            (_T, 7.0, True, False),
        ),
        (
            429,
            "RESOURCE_EXHAUSTED",
            [quota("GenerateRequestsPerDayPerProjectPerModel-FreeTier"), detail("RetryInfo", retryDelay="7s")],
            "",
            (_O, 7.0, False, False),
        ),
        (429, "RESOURCE_EXHAUSTED", [quota("GenerateRequestsPerDayPerProject")], "", (_O, None, False, True)),
        (429, "RESOURCE_EXHAUSTED", [quota("PerMinute", quotaValue="0")], "", (_O, None, False, False)),
        (429, "RESOURCE_EXHAUSTED", [], "* Quota exceeded for metric: x, limit: 0, model: y", (_O, None, False, False)),
        (429, "RESOURCE_EXHAUSTED", [], "Please retry in 48.9s.", (_T, 48.9, True, False)),
        (429, "RESOURCE_EXHAUSTED", [], "Please retry in 1h2m3.5s.", (_T, 3723.5, True, False)),
        (429, "RESOURCE_EXHAUSTED", [], "Please retry in 250ms", (_T, 0.25, True, False)),
        (429, "RESOURCE_EXHAUSTED", [], "", (_T, None, True, False)),
        (499, "CANCELLED", [], "", (_T, None, False, False)),
        (500, "INTERNAL", [], "", (_T, None, False, False)),
        (503, "UNAVAILABLE", [], "", (_T, None, False, False)),
        (504, "DEADLINE_EXCEEDED", [], "", (_T, None, False, False)),
    ],
)
def test_an_error_means_what_google_documents(status, word, details, message, expected):
    error = meaning(status, word, *details, message=message)
    assert (error.error_class, error.retry_after_s, error.rate_limited, error.credential_fault) == expected
    assert error.status == status


def test_the_longer_of_two_waits_counts():
    error = meaning(429, "RESOURCE_EXHAUSTED", detail("RetryInfo", retryDelay="7s"), headers={"retry-after": "9"})
    assert error.retry_after_s == 9.0


def test_the_most_telling_word_is_the_code_and_the_field_at_fault_is_named():
    error = meaning(
        400,
        "INVALID_ARGUMENT",
        detail("BadRequest", fieldViolations=[{"field": "contents[0].parts", "description": "SECRET"}]),
        message="SECRET",
    )
    assert error.code == "INVALID_ARGUMENT"
    assert "param contents[0].parts" in error.message
    assert "SECRET" not in error.message
    assert meaning(403, "PERMISSION_DENIED", detail("ErrorInfo", reason="SERVICE_DISABLED")).code == "SERVICE_DISABLED"


@pytest.mark.parametrize(
    ("status", "body", "error_class"),
    [
        (404, b"<!DOCTYPE html><html>SECRET</html>", _O),
        (403, b"<html>SECRET</html>", _O),
        (502, b"<html>SECRET</html>", _T),
        (503, b"", _T),
        (400, b'[{"error": {"code": 400, "status": "INVALID_ARGUMENT", "message": "SECRET"}}]', _F),
        (429, b'[{"error": {"details": [{"@type": "x.RetryInfo", "retryDelay": "2s"}]}}]', _T),
        (400, b'{"error": "SECRET"}', _F),
        (400, b'{"error": {"code": "SECRET", "details": "SECRET", "message": 5, "status": []}}', _F),
        (400, b'{"error": {"details": [5, {"@type": 5}, {"@type": "x.QuotaFailure", "violations": 5}]}}', _F),
        (500, b"[" * 100_000, _T),
        (301, b"", _O),
    ],
)
def test_an_error_in_any_other_envelope_is_still_one(status, body, error_class):
    error = Gemini().parse_error(status, {}, body)
    assert isinstance(error, Rejected)
    assert error.error_class is error_class
    assert not error.credential_fault
    assert "SECRET" not in f"{error} {error.code}"
