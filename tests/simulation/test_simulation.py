"""A sample of the schedules that `python -m tests.simulation` runs many of, and proof that it would notice."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from decimal import Decimal
from typing import Any

import msgspec
import pytest

from admission import memory
from admission.controller import Controller
from admission.core import acquire, confirm, grants, reconcile
from admission.core.keys import Sessions
from admission.core.occupancy import Occupancy
from admission.core.work import Work
from admission.state import Acquire, AttemptState, Charge, Ticket, initial
from tests.simulation.tally import Tally, play
from tests.simulation.world import SOMETIMES, run

SAMPLE = 150


@pytest.fixture(scope="module")
def tally() -> Tally:
    return play(range(SAMPLE))


def test_whatever_goes_wrong_every_invariant_holds(tally: Tally):
    replay = "replay: python -m tests.simulation --seed"
    assert not tally.failures, "\n".join(f"seed={seed}: {what}; {replay} {seed}" for seed, what in tally.failures)


@pytest.mark.parametrize("what", SOMETIMES)
def test_each_fault_state_and_refusal_happens_at_least_once(tally: Tally, what: str):
    assert tally.seen[what] > 0


def test_a_seed_gives_the_same_schedule_every_time():
    assert run(5) == run(5)


def _no_room_for_quarantine(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Occupancy, "room", property(lambda o: max(0, o.group.limits.concurrency - o.active)))


def _grants_whatever_the_breaker(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Occupancy, "grants", property(lambda o: o.room))


def _dead_owners_are_granted(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Work, "fresh", lambda *_: True)


def _last_come_first_served(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(grants, "_place", lambda ticket: (-ticket.number, 0))


def _a_lost_attempt_is_not_settled(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Work, "lose", lambda *_: None)


def _an_unknown_end_is_corrected_again_and_again(patch: pytest.MonkeyPatch) -> None:
    def correct(work: Work, ticket_id: uuid.UUID, state: AttemptState, _: Charge) -> bool:
        was = work.attempts.view.get(ticket_id)
        if was is not None:
            work.attempts.put(ticket_id, msgspec.structs.replace(was, state=state))
        return was is not None

    patch.setattr(Work, "correct", correct)


def _quarantine_ends_with_the_hard_deadline(patch: pytest.MonkeyPatch) -> None:
    free = reconcile._reconcile_quarantined

    def early(work: Work, ticket: Ticket) -> None:
        free(work, msgspec.structs.replace(ticket, quarantined_until=ticket.hard_deadline))

    patch.setattr(reconcile, "_reconcile_quarantined", early)


def _floors_are_forgotten(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Work, "floors_of", lambda *_: [])


def _the_queue_has_no_bound(patch: pytest.MonkeyPatch) -> None:
    enqueue = acquire._enqueue

    def unbounded(work: Work, event: Acquire, *rest: Any) -> None:
        group = work.groups.view[event.group]
        wide = msgspec.structs.replace(group.settings, queue=1000)
        work.groups.put(event.group, msgspec.structs.replace(group, settings=wide))
        enqueue(work, event, *rest)
        after = work.groups.view[event.group]
        work.groups.put(event.group, msgspec.structs.replace(after, settings=group.settings))

    patch.setattr(acquire, "_enqueue", unbounded)


def _a_closed_store_grants(patch: pytest.MonkeyPatch) -> None:
    choose = grants.choose

    def open_again(work: Work, *rest: Any) -> Any:
        until, work.closed_until = work.closed_until, 0
        try:
            return choose(work, *rest)
        finally:
            work.closed_until = until

    patch.setattr(acquire, "choose", open_again)


def _an_unconfirmed_grant_lasts_for_ever(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(memory, "initial", lambda s: msgspec.structs.replace(initial(s), unconfirmed_grant=10**12))


def _a_lease_is_used_however_old(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Controller, "valid", lambda *_: True)


def _a_grant_is_confirmed_whatever_came_since(patch: pytest.MonkeyPatch) -> None:
    def confirmed(work: Work, ticket: Ticket) -> Ticket:
        deadline = work.now + ticket.execution_limit
        return msgspec.structs.replace(ticket, state="active", grant_expires_at=None, hard_deadline=deadline)

    patch.setattr(confirm, "_confirmed", confirmed)


def _a_session_reserves_nothing(patch: pytest.MonkeyPatch) -> None:
    looked_up = Sessions._looked_up

    def unreserved(sessions: Sessions, *name: Any) -> Any:
        money = looked_up(sessions, *name)
        money.reserved = Decimal(0)
        return money

    patch.setattr(Sessions, "_looked_up", unreserved)


@pytest.mark.parametrize(
    "plant",
    [
        _no_room_for_quarantine,
        _grants_whatever_the_breaker,
        _dead_owners_are_granted,
        _last_come_first_served,
        _a_lost_attempt_is_not_settled,
        _an_unknown_end_is_corrected_again_and_again,
        _quarantine_ends_with_the_hard_deadline,
        _floors_are_forgotten,
        _the_queue_has_no_bound,
        _a_closed_store_grants,
        _an_unconfirmed_grant_lasts_for_ever,
        _a_lease_is_used_however_old,
        _a_grant_is_confirmed_whatever_came_since,
        _a_session_reserves_nothing,
    ],
)
def test_a_planted_bug_is_noticed(plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch):
    plant(monkeypatch)
    assert any(play(range(seed, seed + 1)).failures for seed in range(SAMPLE))
