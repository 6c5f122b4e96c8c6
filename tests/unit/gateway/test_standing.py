"""Why a provider is held back, as callers and operators are told it."""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any, cast

import pytest
import structlog

from adapters.errors import ErrorClass, Rejected
from admission.lease import Refusal, RefusalReason
from admission.settings import AdmissionSettings
from gateway.router import Route
from gateway.standing import Cause, Hold, Standing

GROUP = "https://api.openai.com:443"
SETTINGS = AdmissionSettings(groups={}, unavailable_s=300.0, longest_retry_after_s=3600.0)


def refusal(cause: str | None, ends_in_s: float | None = 12.0) -> Refusal:
    return Refusal(
        reason=RefusalReason.COOLDOWN,
        group=GROUP,
        cause=cause,
        ends_at=None if ends_in_s is None else time.monotonic() + ends_in_s,
    )


@pytest.fixture
def route() -> Route:
    """As much of one as matters here."""
    provider = SimpleNamespace(id="openai", credential="KEY", account_wide_limits=False)
    return cast("Route", SimpleNamespace(provider=provider, model="gpt-4o"))


def told(hold: Hold | None) -> str:
    assert hold is not None
    return hold.told(group=GROUP, provider="openai", model="gpt-4o")


def rejected(status: int, code: str, **more: Any) -> Rejected:
    return Rejected("no", code=code, error_class=ErrorClass.OURS, status=status, **more)


@pytest.mark.parametrize(
    ("cause", "said"),
    [
        ("cooldown", "is cooling down after failures until 20"),
        ("rate_limited", "openai limits the rate of gpt-4o: nothing is sent there until 20"),
        ("credential_rejected", "rejected the gateway's credential: an operator has to replace it"),
        ("quota_exhausted", "quota of the gateway's account at openai is exhausted: an operator has to raise it"),
        ("provider_unavailable", "rejected the gateway's credential, or said that its quota is exhausted"),
    ],
)
def test_each_cause_is_told_by_its_own_name_with_its_end(cause, said):
    hold = Hold.of(refusal(cause))
    assert hold is not None
    assert hold.cause is Cause(cause)
    assert hold.until is not None
    assert abs(hold.until - datetime.now(UTC) - timedelta(seconds=12)) < timedelta(seconds=2)
    assert said in told(hold)


def test_while_a_request_tries_whether_a_provider_has_recovered_no_end_is_told():
    hold = Hold.of(refusal("cooldown", ends_in_s=None))
    assert hold is not None
    assert hold.until is None
    assert "is being tried again" in told(hold)


def test_what_is_over_is_not_told():
    assert Hold.of(refusal("rate_limited", ends_in_s=-0.1)) is None
    assert Hold.of(refusal(None)) is None


@pytest.mark.parametrize(
    ("error", "cause", "for_s"),
    [
        (rejected(401, "invalid_api_key", credential_fault=True), Cause.CREDENTIAL_REJECTED, 300.0),
        (rejected(403, "http_403", credential_fault=True), Cause.CREDENTIAL_REJECTED, 300.0),
        (rejected(402, "http_402", credential_fault=True), Cause.QUOTA_EXHAUSTED, 300.0),
        (rejected(429, "insufficient_quota", credential_fault=True, retry_after_s=9.0), Cause.QUOTA_EXHAUSTED, 9.0),
        (rejected(403, "billing_not_active", credential_fault=True), Cause.QUOTA_EXHAUSTED, 300.0),
        (rejected(429, "rate", rate_limited=True, retry_after_s=86_400.0), Cause.RATE_LIMITED, 3600.0),
    ],
)
def test_a_provider_that_is_left_out_is_in_the_log_with_its_cause(route, error, cause, for_s):
    with structlog.testing.capture_logs() as logs:
        Standing(SETTINGS).refused(route, GROUP, error)
    [line] = logs
    assert (line["event"], line["log_level"]) == ("gateway.provider_left_out", "warning")
    assert (line["provider"], line["credential"], line["cause"]) == ("openai", "KEY", cause.value)
    assert (line["code"], line["http_status"], line["for_s"]) == (error.code, error.status, for_s)


@pytest.mark.parametrize(
    "error",
    [rejected(503, "overloaded"), rejected(429, "rate", rate_limited=True, retry_after_s=30.0)],
    ids=["failed", "a rate limit that is waited for"],
)
def test_a_provider_that_is_not_left_out_is_not_in_the_log(route, error):
    with structlog.testing.capture_logs() as logs:
        Standing(SETTINGS).refused(route, GROUP, error)
    assert logs == []
