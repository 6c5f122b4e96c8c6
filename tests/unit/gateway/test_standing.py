"""Why a provider is held back, as callers and operators are told it."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest
import structlog

from adapters.errors import ErrorClass, Rejected
from admission.contract import StoreUnavailable
from admission.lease import Waiting
from admission.settings import AdmissionSettings
from gateway.router import Route
from gateway.standing import Cause, Hold, Standing

GROUP = "https://api.openai.com:443"
SETTINGS = AdmissionSettings(groups={}, unavailable_s=300.0, longest_retry_after_s=3600.0)


class FakeGroups:
    def __init__(self, **row: Any) -> None:
        self.row = {"group": GROUP, "breaker": "closed", "cooldown_s": None, "floors": [], **row}
        self.reads = 0
        self.lost = False
        self.gate: asyncio.Event | None = None

    async def groups(self) -> list[dict[str, Any]]:
        self.reads += 1
        if self.lost:
            raise StoreUnavailable("gone")
        row = dict(self.row)
        if self.gate is not None:
            await self.gate.wait()
        return [row]


def floor(kind: str, remaining_s: float = 12.0, model: str | None = None, credential: str = "KEY") -> dict[str, Any]:
    return {"credential": credential, "model": model, "kind": kind, "remaining_s": remaining_s}


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


async def test_failures_are_told_as_failures_with_their_end(route):
    hold = await Standing(FakeGroups(breaker="open", cooldown_s=9.0), SETTINGS).hold(route, GROUP)
    assert "cooling down after failures until 20" in told(hold)


async def test_a_probe_is_told_as_one(route):
    hold = await Standing(FakeGroups(breaker="half_open"), SETTINGS).hold(route, GROUP)
    assert "is being tried again" in told(hold)


async def test_a_rate_limit_is_not_told_as_failures(route):
    standing = Standing(FakeGroups(floors=[floor("rate_limit", model="gpt-4o")]), SETTINGS)
    hold = await standing.hold(route, GROUP)
    assert hold is not None
    assert hold.cause is Cause.RATE_LIMITED
    assert "openai limits the rate of gpt-4o" in told(hold)
    assert "failures" not in told(hold)


async def test_what_is_held_back_of_another_credential_or_model_is_not_the_reason(route):
    other = [floor("rate_limit", 60.0, model="gpt-5"), floor("unavailable", 60.0, credential="OTHER")]
    assert await Standing(FakeGroups(floors=other), SETTINGS).hold(route, GROUP) is None
    standing = Standing(FakeGroups(floors=[*other, floor("rate_limit", 3.0)]), SETTINGS)
    hold = await standing.hold(route, GROUP)
    assert hold is not None
    assert hold.cause is Cause.RATE_LIMITED


@pytest.mark.parametrize(
    ("error", "cause", "said"),
    [
        (
            rejected(401, "invalid_api_key", credential_fault=True),
            Cause.CREDENTIAL_REJECTED,
            "rejected the gateway's cred",
        ),
        (rejected(403, "http_403", credential_fault=True), Cause.CREDENTIAL_REJECTED, "an operator has to replace it"),
        (rejected(402, "http_402", credential_fault=True), Cause.QUOTA_EXHAUSTED, "quota of the gateway's account"),
        (rejected(429, "insufficient_quota", credential_fault=True), Cause.QUOTA_EXHAUSTED, "has to raise it"),
        (rejected(403, "billing_not_active", credential_fault=True), Cause.QUOTA_EXHAUSTED, "exhausted"),
    ],
)
async def test_the_process_that_saw_it_tells_a_rejected_credential_from_an_exhausted_quota(route, error, cause, said):
    groups = FakeGroups(floors=[floor("unavailable", 299.5)])
    standing = Standing(groups, SETTINGS)
    with structlog.testing.capture_logs() as logs:
        standing.refused(route, GROUP, error)
    [line] = logs
    assert (line["event"], line["log_level"]) == ("gateway.provider_left_out", "warning")
    assert (line["provider"], line["credential"], line["cause"]) == ("openai", "KEY", cause.value)
    assert (line["code"], line["http_status"], line["for_s"]) == (error.code, error.status, 300.0)
    hold = await standing.hold(route, GROUP)
    assert hold is not None
    assert hold.cause is cause
    assert said in told(hold)
    # Callers are not told the names of the gateway's own secrets.
    assert "KEY" not in told(hold)


async def test_a_process_that_has_not_seen_it_does_not_say_which_of_the_two_it_was(route):
    standing = Standing(FakeGroups(floors=[floor("unavailable", 299.5)]), SETTINGS)
    hold = await standing.hold(route, GROUP)
    assert hold is not None
    assert hold.cause is Cause.UNAVAILABLE
    assert "rejected the gateway's credential, or said that its quota" in told(hold)


async def test_what_was_seen_long_ago_is_not_told_of_what_another_process_has_seen_since(route):
    standing = Standing(FakeGroups(floors=[floor("unavailable", 120.0)]), SETTINGS)
    standing.refused(route, GROUP, rejected(401, "invalid_api_key", credential_fault=True))
    hold = await standing.hold(route, GROUP)
    assert hold is not None
    assert hold.cause is Cause.UNAVAILABLE


async def test_a_rate_limit_longer_than_anybody_should_wait_is_still_told_as_one(route):
    standing = Standing(FakeGroups(floors=[floor("unavailable", 3600.0, model="gpt-4o")]), SETTINGS)
    standing.refused(route, GROUP, rejected(429, "rate_limit_exceeded", rate_limited=True, retry_after_s=86_400.0))
    hold = await standing.hold(route, GROUP)
    assert hold is not None
    assert hold.cause is Cause.RATE_LIMITED


async def test_of_several_holds_the_one_that_ends_last_is_told(route):
    groups = FakeGroups(breaker="open", cooldown_s=5.0, floors=[floor("rate_limit", 12.0)])
    hold = await Standing(groups, SETTINGS).hold(route, GROUP)
    assert hold is not None
    assert hold.cause is Cause.RATE_LIMITED
    groups = FakeGroups(breaker="open", cooldown_s=50.0, floors=[floor("rate_limit", 12.0)])
    hold = await Standing(groups, SETTINGS).hold(route, GROUP)
    assert hold is not None
    assert hold.cause is Cause.FAILURES


async def test_a_burst_of_refusals_is_one_read_and_what_is_new_is_read_again(route):
    groups = FakeGroups(floors=[floor("rate_limit", 12.0)])
    standing = Standing(groups, SETTINGS)
    await asyncio.gather(*(standing.hold(route, GROUP) for _ in range(100)))
    assert groups.reads == 1
    quiet = FakeGroups()
    standing = Standing(quiet, SETTINGS)
    assert await standing.hold(route, GROUP) is None
    quiet.row["floors"] = [floor("rate_limit", 12.0)]
    # The refusal is younger than what was read before.
    assert await standing.hold(route, GROUP) is not None
    assert quiet.reads == 2


async def test_a_store_that_is_away_gives_no_reason_and_keeps_nobody(route):
    groups = FakeGroups()
    groups.lost = True
    assert await Standing(groups, SETTINGS).hold(route, GROUP) is None


async def test_a_waiter_is_told_a_rate_limit_as_one_and_news_that_is_old_is_not_told(route):
    groups = FakeGroups(floors=[floor("rate_limit", 12.0)])
    groups.gate = asyncio.Event()
    standing = Standing(groups, SETTINGS)
    heard: list[Waiting] = []
    with standing.telling(route, heard.append) as tell:
        tell(Waiting(group=GROUP, position=2, reason="capacity"))
        tell(Waiting(group=GROUP, position=2, reason="cooldown", until_s=12.0))
        tell(Waiting(group=GROUP, position=1, reason="cooldown", until_s=12.0))
        groups.gate.set()
        async with asyncio.timeout(5):
            while len(heard) < 2:  # noqa: ASYNC110
                await asyncio.sleep(0)
        tell(Waiting(group=GROUP, position=1, reason="cooldown", until_s=11.0))
    # The ticket has its answer: nothing is told of it any more.
    await asyncio.sleep(0)
    assert [(waiting.reason, waiting.position) for waiting in heard] == [("capacity", 2), ("rate_limited", 1)]
