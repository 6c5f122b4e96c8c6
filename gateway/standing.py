"""
Why a provider is held back, in words that are true.

Admission says that nothing is granted for now, why, and when that ends. Here is who has to do something about it:
nobody, or an operator. Without this file a rejected credential would be told as a cooldown that will pass.
"""

from __future__ import annotations

import enum
import re
import time
from datetime import UTC, datetime, timedelta
from typing import Final

import msgspec
import structlog

from adapters.errors import Rejected
from admission.lease import Refusal
from admission.settings import AdmissionSettings
from gateway.router import Route

log: Final = structlog.get_logger("gateway")

_OF_MONEY: Final = re.compile(r"quota|credit|balance|billing|payment|insufficient_funds", re.IGNORECASE)
_PAYMENT_REQUIRED: Final = 402


class Cause(enum.StrEnum):
    """Also what a caller's `waiting` and an operator's `floors` say: docs/operations.md has the table."""

    #: The breaker is open, or one request tries whether it may close.
    FAILURES = "cooldown"
    RATE_LIMITED = "rate_limited"
    CREDENTIAL_REJECTED = "credential_rejected"
    QUOTA_EXHAUSTED = "quota_exhausted"
    #: One of the last two, or a rate limit longer than anybody should wait: a process of an earlier version saw which.
    UNAVAILABLE = "provider_unavailable"


class Hold(msgspec.Struct, frozen=True, kw_only=True):
    """Nothing is sent before it ends."""

    cause: Cause
    #: None while it is not known: a request tries whether the provider has recovered.
    until: datetime | None

    @classmethod
    def of(cls, refusal: Refusal) -> Hold | None:
        """None where it is over, or was none."""
        if refusal.cause is None:
            return None
        if refusal.ends_at is None:
            return cls(cause=Cause(refusal.cause), until=None)
        remaining_s = refusal.ends_at - time.monotonic()
        if remaining_s <= 0:
            return None
        return cls(cause=Cause(refusal.cause), until=datetime.now(UTC) + timedelta(seconds=remaining_s))

    def told(self, *, group: str, provider: str, model: str) -> str:
        """For callers: no name of a credential, and who has to act."""
        until = "" if self.until is None else self.until.strftime("%Y-%m-%dT%H:%M:%SZ")
        match self.cause:
            case Cause.FAILURES if self.until is None:
                return f"{group} failed and is being tried again: nothing else is sent to it meanwhile"
            case Cause.FAILURES:
                return f"{group} is cooling down after failures until {until}"
            case Cause.RATE_LIMITED:
                return f"{provider} limits the rate of {model}: nothing is sent there until {until}"
            case Cause.CREDENTIAL_REJECTED:
                return (
                    f"{provider} rejected the gateway's credential: an operator has to replace it; "
                    f"it is not tried again before {until}"
                )
            case Cause.QUOTA_EXHAUSTED:
                return (
                    f"the quota of the gateway's account at {provider} is exhausted: an operator has to raise it; "
                    f"it is not tried again before {until}"
                )
            case Cause.UNAVAILABLE:
                return (
                    f"{provider} rejected the gateway's credential, or said that its quota is exhausted, or asked for "
                    f"a very long pause: it is left out until {until}, and an operator has to look"
                )


def of_money(error: Rejected) -> bool:
    """Of a refused credential: it is good, and what its account may spend is used up."""
    return error.status == _PAYMENT_REQUIRED or _OF_MONEY.search(error.code) is not None


class Standing:
    """Tells the log of providers that are left out for a while."""

    def __init__(self, settings: AdmissionSettings) -> None:
        self._settings = settings

    def refused(self, route: Route, group: str, error: Rejected) -> None:
        """The provider refused an attempt, perhaps in a way that leaves its credential out for a while."""
        if error.credential_fault:
            cause = Cause.QUOTA_EXHAUSTED if of_money(error) else Cause.CREDENTIAL_REJECTED
        elif error.rate_limited and (error.retry_after_s or 0.0) > self._settings.longest_retry_after_s:
            cause = Cause.RATE_LIMITED
        else:
            return
        provider = route.provider
        asked = self._settings.unavailable_s if error.retry_after_s is None else error.retry_after_s
        log.warning(
            "gateway.provider_left_out",
            provider=provider.id,
            group=group,
            credential=provider.credential,
            cause=cause.value,
            code=error.code,
            http_status=error.status,
            for_s=min(asked, self._settings.longest_retry_after_s),
        )
