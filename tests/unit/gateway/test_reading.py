"""What operators are told of a group beyond what the store says."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, cast

import pytest

from admission.contract import StoreUnavailable
from admission.controller import Controller
from admission.store import Store
from gateway import database
from gateway.errors import NotFound
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

    async def reset(self, name: str) -> bool:
        if self.lost:
            raise StoreUnavailable("gone")
        self.asked.append(name)
        return name in {"fast", "https://api.example:443"}


class FakeController:
    def __init__(self) -> None:
        self.advanced: list[str] = []

    async def advance(self, groups: Collection[str]) -> None:
        self.advanced.extend(groups)


def reading(store: FakeStore, controller: FakeController) -> Reading:
    nothing = cast("Any", None)
    return Reading(nothing, cast("Controller", controller), cast("Store", store), nothing, nothing, nothing)


@pytest.mark.parametrize(
    ("asked", "name"),
    [("fast", "fast"), ("https://api.example", "https://api.example:443"), ("https://api.example/v1", None)],
)
async def test_a_group_is_reset_by_its_name_or_its_endpoint_and_its_queue_moves_on(asked, name):
    store, controller = FakeStore(), FakeController()
    assert await reading(store, controller).reset(asked) == (name or "https://api.example:443")
    assert controller.advanced == [name or "https://api.example:443"]


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
