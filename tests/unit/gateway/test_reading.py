"""What operators are told of a group beyond what the store says."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, cast

import pytest

from admission.contract import StoreUnavailable
from admission.controller import Controller
from admission.lease import Waiting
from admission.store import Store
from gateway import config, database
from gateway.errors import Code, GatewayError, InvalidRequest, NotFound
from gateway.reading import Reading, described


def slot(state: str, seconds: float | None = None) -> dict[str, Any]:
    return {"state": state, "quarantined_s": seconds}


def group(*slots: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"group": "g", "concurrency": 8, "queued": 0, "slots": list(slots), **more}


def test_quarantine_is_told_as_slots_seconds_and_a_share_of_the_limit():
    told = described(group(slot("active"), slot("quarantined", 40.5), slot("quarantined", 12.0)))
    assert told["quarantine"] == {"slots": 2, "held_back": 2, "share": 0.25, "frees_in_s": [12.0, 40.5]}
    assert told["group"] == "g"


def test_what_fits_the_headroom_costs_nothing():
    told = described(group(slot("quarantined", 5.0), slot("quarantined", 6.0), quarantine_headroom=1))
    assert told["quarantine"] == {"slots": 2, "held_back": 1, "share": 0.125, "frees_in_s": [5.0, 6.0]}


def test_a_group_that_is_stopped_has_no_share():
    assert described(group(slot("quarantined", 1.0), concurrency=0))["quarantine"]["share"] is None


def test_who_waits_is_counted_by_class_where_all_are_told_and_never_guessed():
    waiting = [{"class": "interactive"}, {"class": "batch"}, {"class": "batch"}]
    assert described(group(queued=3, waiting=waiting))["queued_by_class"] == {"interactive": 1, "batch": 2}
    assert described(group(queued=30, waiting=waiting))["queued_by_class"] is None
    counted = {"interactive": 10, "batch": 20}
    assert described(group(queued=30, waiting=waiting, queued_by_class=counted))["queued_by_class"] == counted


class FakeStore:
    lost = False

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.rows: list[dict[str, Any]] = []
        self.waiting: dict[str, Waiting] = {}

    async def reset(self, name: str) -> bool:
        if self.lost:
            raise StoreUnavailable("gone")
        self.asked.append(name)
        return name in {"fast", "slow", "https://api.example:443"}

    async def groups(self) -> list[dict[str, Any]]:
        return self.rows

    async def waits(self, debits: Sequence[str]) -> dict[str, Waiting]:
        return {debit: self.waiting[debit] for debit in debits if debit in self.waiting}


class FakeController:
    def __init__(self) -> None:
        self.advanced: list[str] = []

    async def advance(self, groups: Collection[str]) -> None:
        self.advanced.extend(groups)


class FakeJobs:
    lost = False

    def __init__(self) -> None:
        self.released: list[str] = []

    async def release(self, group: str) -> int:
        if self.lost:
            raise database.StoreUnavailable("gone")
        self.released.append(group)
        return 1


def reading(store: FakeStore, controller: FakeController, jobs: FakeJobs | None = None) -> Reading:
    nothing = cast("Any", None)
    settings = config.load(None, {"OPENAI_API_KEY": "k"})
    return Reading(
        settings,
        cast("Controller", controller),
        cast("Store", store),
        nothing,
        nothing,
        nothing,
        nothing,
        jobs or FakeJobs(),
    )


@pytest.mark.parametrize(
    ("asked", "name"),
    [("fast", "fast"), ("https://api.example", "https://api.example:443"), ("https://api.example/v1", None)],
)
async def test_a_group_is_reset_by_its_name_or_its_endpoint_and_its_queue_moves_on(asked, name):
    store, controller, jobs = FakeStore(), FakeController(), FakeJobs()
    assert await reading(store, controller, jobs).reset(asked) == (name or "https://api.example:443")
    assert controller.advanced == jobs.released == [name or "https://api.example:443"]


async def test_a_group_that_is_not_there_cannot_be_reset():
    store, controller = FakeStore(), FakeController()
    with pytest.raises(NotFound):
        await reading(store, controller).reset("https://other.example")
    assert store.asked == ["https://other.example", "https://other.example:443"]
    assert controller.advanced == []


async def test_a_store_that_is_away_resets_nothing():
    store = FakeStore()
    store.lost = True
    with pytest.raises(database.StoreUnavailable):
        await reading(store, FakeController()).reset("fast")


def merged(name: str, *endpoints: str, **more: Any) -> dict[str, Any]:
    return group(group=name, endpoints=list(endpoints), breaker="closed", **more)


async def test_a_group_is_reset_by_an_endpoint_that_it_alone_has():
    store, controller = FakeStore(), FakeController()
    store.rows = [
        merged("fast", "https://a.example:443#a", "https://b.example:443#b"),
        merged("slow", "https://b.example:443#c"),
    ]
    assert await reading(store, controller).reset("https://a.example") == "fast"
    with pytest.raises(InvalidRequest, match="fast, slow"):
        await reading(store, controller).reset("https://b.example")
    assert controller.advanced == ["fast"]


async def test_a_reset_that_the_store_of_jobs_did_not_hear_of_says_so():
    jobs = FakeJobs()
    jobs.lost = True
    with pytest.raises(GatewayError) as error:
        await reading(FakeStore(), FakeController(), jobs).reset("fast")
    assert error.value.code is Code.CONTENT_STORE_UNAVAILABLE
    assert "is reset" in error.value.message


def test_an_endpoint_is_told_in_two_plain_fields():
    told = described(merged("g", "https://api.example:443#openai", "http://[::1]:80"))
    assert told["endpoints"] == [
        {"endpoint": "https://api.example:443", "provider": "openai"},
        {"endpoint": "http://[::1]:80", "provider": None},
    ]


def floor(cause: str, model: str | None = None, credential: str = "OPENAI_API_KEY") -> dict[str, Any]:
    return {"credential": credential, "model": model, "cause": cause, "remaining_s": 12.0}


async def test_operators_read_of_whom_what_is_held_back_and_why_and_until_when():
    store = FakeStore()
    [row] = store.rows = [merged("g", "https://api.openai.com:443#openai", "https://api.groq.com:443#groq", queued=0)]
    row["floors"] = [floor("rate_limited", "gpt-4o"), floor("quota_exhausted")]
    before = datetime.now(UTC)
    [told] = await reading(store, FakeController()).groups()
    assert [(f["providers"], f["model"], f["cause"]) for f in told["floors"]] == [
        (["openai"], "gpt-4o", "rate_limited"),
        (["openai"], None, "quota_exhausted"),
    ]
    for one in told["floors"]:
        assert timedelta(0) <= one["until"] - before - timedelta(seconds=12) < timedelta(seconds=2)


def test_a_provider_is_ready_once_its_credentials_are_present() -> None:
    told = reading(FakeStore(), FakeController()).providers()
    assert (told["openai"], told["groq"], told["ollama"]) == ("ready", "not_ready", "ready")
