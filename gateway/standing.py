"""
Why a provider is held back, in words that are true.

Admission says that nothing is sent for now, and when that ends. Whether that is for failures, for a rate limit of the
provider, for a credential it rejects or for a quota that is used up, is what decides who has to do something: nobody,
or an operator. Without this file a rejected credential would be told as a cooldown that will pass.

The store knows of failures and rate limits, for all processes. It does not tell a rejected credential from an exhausted
quota: the process that saw the provider's answer does, and logs it; the others say that it is one of the two.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, Final, Protocol

import msgspec
import structlog

from adapters.errors import Rejected
from admission.contract import StoreUnavailable
from admission.lease import Waiting
from admission.settings import AdmissionSettings
from gateway.router import Route

log: Final = structlog.get_logger("gateway")

#: What was read of the groups answers further questions for so long: a burst of refusals is one read.
_FRESH_S: Final = 1.0
#: Who is refused does not wait longer than this for the reason.
_PATIENCE_S: Final = 1.0
#: Two ends of one hold, as told by two clocks, are this close.
_SAME_END_S: Final = 2.0

_OF_MONEY: Final = re.compile(r"quota|credit|balance|billing|payment|insufficient_funds", re.IGNORECASE)
_PAYMENT_REQUIRED: Final = 402


class Cause(enum.StrEnum):
    """Also what a caller's `waiting` and an operator's `floors` say: docs/operations.md has the table."""

    #: The breaker is open, or one request tries whether it may close.
    FAILURES = "cooldown"
    RATE_LIMITED = "rate_limited"
    CREDENTIAL_REJECTED = "credential_rejected"
    QUOTA_EXHAUSTED = "quota_exhausted"
    #: One of the last two, or a rate limit longer than anybody should wait: another process saw which.
    UNAVAILABLE = "provider_unavailable"


class Hold(msgspec.Struct, frozen=True, kw_only=True):
    """Nothing is sent before it ends."""

    cause: Cause
    #: None while it is not known: a request tries whether the provider has recovered.
    until: datetime | None

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


class Groups(Protocol):
    """The capacity groups as operators see them. `admission.store` knows them."""

    async def groups(self) -> Sequence[Mapping[str, Any]]:
        """Raises `admission.contract.StoreUnavailable`."""
        ...


class _Look(msgspec.Struct, frozen=True):
    #: `time.monotonic` before it was asked for.
    at: float
    groups: Mapping[str, Mapping[str, Any]]


class _Note(msgspec.Struct, frozen=True):
    """What this process saw."""

    cause: Cause
    #: `time.monotonic` at which the hold that came of it ends.
    ends: float


class Standing:
    """What one process knows of why its providers are held back."""

    def __init__(self, groups: Groups, settings: AdmissionSettings) -> None:
        self._groups = groups
        self._settings = settings
        self._look = _Look(float("-inf"), {})
        self._asking = asyncio.Lock()
        self._notes: dict[tuple[str, str, str | None], _Note] = {}

    # ---------------------------------------------------------------- what is seen

    def refused(self, route: Route, group: str, error: Rejected) -> None:
        """The provider refused an attempt in a way that leaves its credential out for a while."""
        if error.credential_fault:
            of_money = error.status == _PAYMENT_REQUIRED or _OF_MONEY.search(error.code)
            cause = Cause.QUOTA_EXHAUSTED if of_money else Cause.CREDENTIAL_REJECTED
        elif error.rate_limited and (error.retry_after_s or 0.0) > self._settings.longest_retry_after_s:
            cause = Cause.RATE_LIMITED
        else:
            return
        provider = route.provider
        wide = error.credential_fault or provider.account_wide_limits
        asked = self._settings.unavailable_s if error.retry_after_s is None else error.retry_after_s
        lasts_s = min(asked, self._settings.longest_retry_after_s)
        self._notes[group, provider.credential, None if wide else route.model] = _Note(
            cause, time.monotonic() + lasts_s
        )
        log.warning(
            "gateway.provider_left_out",
            provider=provider.id,
            group=group,
            credential=provider.credential,
            cause=cause.value,
            code=error.code,
            http_status=error.status,
            for_s=lasts_s,
        )

    # ---------------------------------------------------------------- what is told

    async def hold(self, route: Route, group: str) -> Hold | None:
        """Why nothing is sent on this route now; None where that is over, or the store does not tell in time."""
        asked_at = time.monotonic()
        if asked_at - self._look.at < _FRESH_S and (hold := self._hold(route, group)) is not None:
            return hold
        try:
            async with asyncio.timeout(_PATIENCE_S), self._asking:
                if self._look.at < asked_at:
                    at = time.monotonic()
                    found = await self._groups.groups()
                    self._look = _Look(at, {each["group"]: each for each in found})
        except (TimeoutError, StoreUnavailable):
            return None
        return self._hold(route, group)

    def _hold(self, route: Route, group: str) -> Hold | None:
        """The one that ends last, in what was looked at."""
        found = self._look.groups.get(group)
        if found is None:
            return None
        since = time.monotonic() - self._look.at
        ends: list[tuple[float, Cause]] = [
            (floor["remaining_s"] - since, self.cause_of(group, floor, self._look.at))
            for floor in found.get("floors", ())
            if floor["credential"] == route.provider.credential and floor["model"] in (None, route.model)
        ]
        if found["breaker"] == "open":
            ends.append((found["cooldown_s"] - since, Cause.FAILURES))
        remaining_s, cause = max(ends, default=(0.0, Cause.FAILURES))
        if remaining_s > 0:
            return Hold(cause=cause, until=datetime.now(UTC) + timedelta(seconds=remaining_s))
        return Hold(cause=Cause.FAILURES, until=None) if found["breaker"] == "half_open" else None

    def cause_of(self, group: str, floor: Mapping[str, Any], read_at: float | None = None) -> Cause:
        """Of a floor as the store tells it, read at that `time.monotonic`; None: now."""
        if floor["kind"] == "rate_limit":
            return Cause.RATE_LIMITED
        note = self._notes.get((group, floor["credential"], floor["model"]))
        ends = (time.monotonic() if read_at is None else read_at) + floor["remaining_s"]
        # What another process has seen since ends at another time, and may be something else.
        return note.cause if note is not None and abs(note.ends - ends) < _SAME_END_S else Cause.UNAVAILABLE

    @contextlib.contextmanager
    def telling(self, route: Route, tell: Callable[[Waiting], None]) -> Iterator[Callable[[Waiting], None]]:
        """An observer for one ticket of this route: a cooldown that is a rate limit is told as one."""
        reading: list[asyncio.Task[None]] = []

        async def look(waiting: Waiting) -> None:
            asked_at = time.monotonic()
            hold = await self.hold(route, waiting.group)
            if hold is not None:
                tell(msgspec.structs.replace(waiting, reason=hold.cause.value))
            elif self._look.at < asked_at:
                # The store did not say. Else it is over, and what comes next is news enough.
                tell(waiting)

        def heard(waiting: Waiting) -> None:
            while reading:
                # What it was about to tell is old.
                reading.pop().cancel()
            if waiting.reason == Cause.FAILURES:
                reading.append(asyncio.create_task(look(waiting), name="standing"))
            else:
                tell(waiting)

        try:
            yield heard
        finally:
            while reading:
                reading.pop().cancel()


def is_rate_limit(group: Mapping[str, Any], model: str | None = None) -> bool:
    """
    Of a group as the store tells it: a ticket that waits for a cooldown there waits for a rate limit, not for failures.

    With a breaker that is closed there is nothing else to wait for, but for the ramp after an outage.
    """
    floors = group.get("floors", ())
    return group["breaker"] == "closed" and any(model is None or floor["model"] in (None, model) for floor in floors)
