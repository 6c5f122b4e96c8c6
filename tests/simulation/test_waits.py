"""Who waits is told how long, and so it is, by a factor of two: in virtual time, over the code that decides."""

from __future__ import annotations

import heapq
import itertools
import random
import uuid
from collections.abc import Callable, Iterable
from typing import Any

import msgspec
import pytest

from admission.clock import SECOND
from admission.contract import TicketRow
from admission.decision import decide
from admission.lease import Class, Demand, Ending, Lease, Settlement, Verdict
from admission.settings import AdmissionSettings, GroupSettings, ModelLimits
from admission.state import Acquire, Configure, Event, Outcome, Renew, Rescan, Settle, element, initial

GROUP = "g"
OWNER = uuid.UUID(int=1)
DAY = 86_400 * SECOND
#: What is no further apart happens at once.
_SAME = 0.002


class Told:
    """What one waiter, or one that was turned away, was told at a time, and when it came true. In seconds."""

    def __init__(self, row: TicketRow, at: float) -> None:
        assert row.expected_ms is not None
        self.ticket = row.ticket_id
        self.position = row.ahead or 0
        self.reason = row.wait_reason
        self.at = at
        self.wait = row.expected_ms / 1000
        self.true_at: float | None = None

    def __repr__(self) -> str:
        return f"at {self.at:.2f}, place {self.position}, {self.reason}: told {self.wait:.2f} s, was {self.truth:.2f} s"

    @property
    def truth(self) -> float:
        assert self.true_at is not None
        return self.true_at - self.at

    @property
    def within_a_factor_of_two(self) -> bool:
        # The store counts in milliseconds.
        return self.truth / 2 - _SAME <= self.wait <= self.truth * 2 + _SAME


class Provider:
    """A group whose calls come at given times and take what they take."""

    def __init__(self, **limits: Any) -> None:
        settings = AdmissionSettings(groups={GROUP: GroupSettings(queue=1000, **limits)})
        self.state = initial(settings)
        self.now = 0.0
        self.ids = itertools.count(2)
        self.demands: dict[uuid.UUID, Demand] = {}
        self.took: dict[uuid.UUID, float] = {}
        self.waiting: list[Demand] = []
        self.told: list[Told] = []
        self.turned_away: list[Told] = []
        self.untold = 0
        self.looks_s = 0.1
        self.ends: list[tuple[float, int, Lease]] = []
        self._ask(Configure(settings.groups))
        self._ask(Renew(OWNER, uuid.UUID(int=0), DAY, first=True))

    def _ask(self, event: Event) -> Any:
        self.state, answers = decide(self.state, event, DAY + round(self.now * SECOND))
        return answers

    def run(self, arrivals: Iterable[float], takes: Callable[[], float], **demand: Any) -> None:
        """Until all that came has ended."""
        coming = sorted(arrivals, reverse=True)
        while coming or self.ends or self.waiting:
            due = [coming[-1]] if coming else []
            due += [self.ends[0][0]] if self.ends else []
            # Who waits is looked at as often as a rescan would look.
            self.now = min([*due, self.now + self.looks_s]) if self.waiting else min(due)
            while coming and coming[-1] <= self.now + _SAME:
                coming.pop()
                self._arrives(takes(), demand)
            while self.ends and self.ends[0][0] <= self.now + _SAME:
                self._settle(heapq.heappop(self.ends)[2])
            self._rows(self._ask(Acquire(GROUP, OWNER)).tickets)
            for row in self._ask(Rescan(OWNER, tuple(self.waiting))).tickets:
                if row.expected_ms is None:
                    self.untold += 1
                else:
                    self.told.append(Told(row, self.now))

    def _arrives(self, takes: float, demand: dict[str, Any]) -> None:
        wanted = Demand(
            ticket_id=uuid.UUID(int=next(self.ids)),
            group=GROUP,
            klass=Class.INTERACTIVE,
            key_id=uuid.UUID(int=0),
            debit_id=f"d{self.now}-{takes}-{len(self.demands)}",
            attempt=1,
            execution_limit_s=7000.0,
            isolation_s=1.0,
            queue_timeout_s=80_000.0,
            model="m",
        )
        wanted = msgspec.structs.replace(wanted, **demand)
        self.demands[wanted.ticket_id] = wanted
        self.took[wanted.ticket_id] = takes
        self._rows(self._ask(Acquire(GROUP, OWNER, (element(wanted),))).tickets)

    def _rows(self, rows: Iterable[TicketRow]) -> None:
        for row in rows:
            if row.answer == "granted":
                self._starts(row)
            elif row.answer == "queued" and self.demands[row.ticket_id] not in self.waiting:  # type: ignore[index]
                self.waiting.append(self.demands[row.ticket_id])  # type: ignore[index]
            elif row.answer == "queue_full" and row.expected_ms is not None:
                self.turned_away.append(Told(row, self.now))

    def _starts(self, row: TicketRow) -> None:
        assert row.ticket_id is not None
        assert row.granted_at is not None
        assert row.day is not None
        if any(demand.ticket_id == row.ticket_id for demand in self.waiting):
            self.waiting = [demand for demand in self.waiting if demand.ticket_id != row.ticket_id]
            for told in self.turned_away:
                told.true_at = told.true_at or self.now
            for told in self.told:
                if told.ticket == row.ticket_id:
                    told.true_at = self.now
        lease = Lease(
            ticket_id=row.ticket_id, group=GROUP, number=row.number or 0, generation=row.generation or 0,
            probe=bool(row.probe), judged=bool(row.judged), hard_deadline=0.0, granted_at=row.granted_at, day=row.day,
            queued_s=0.0,
        )  # fmt: skip
        heapq.heappush(self.ends, (self.now + self.took[row.ticket_id], lease.ticket_id.int, lease))

    def lose(self, seconds: float) -> None:
        """One call whose end nobody knows: its slot is in quarantine for so long."""
        self._arrives(1.0, {"execution_limit_s": seconds, "isolation_s": 0.0})
        self._settle(self.ends.pop()[2], Ending.UNCERTAIN, "unknown")
        assert not self.ends

    def _settle(self, lease: Lease, ending: Ending = Ending.CONFIRMED, state: str = "charged") -> None:
        verdict = Verdict.ANSWERED if ending is Ending.CONFIRMED else Verdict.NONE
        settlement = Settlement(lease=lease, ending=ending, verdict=verdict, state=state, record=b"{}")
        self._ask(Settle((Outcome(settlement),), judged=lease.judged))

    def wrong(self) -> list[Told]:
        return [told for told in (*self.told, *self.turned_away) if not told.within_a_factor_of_two]


@pytest.mark.parametrize(
    ("slots", "takes", "arrivals"),
    [
        pytest.param(3, 1.5, [0.0] * 48, id="forty-five wait for three slots"),
        pytest.param(3, 1.5, [n * 0.11 for n in range(60)], id="they come one by one"),
        pytest.param(1, 30.0, [0.0, 29.9, 31.0, 31.0, 31.0], id="the first waits for the end of a long call"),
        pytest.param(8, 0.25, [n * 0.01 for n in range(80)], id="short calls"),
        pytest.param(3, 1.5, [*[0.0] * 12, *[5000.0] * 12], id="after an hour of nothing"),
        pytest.param(3, 1.5, [*[0.0] * 12, *[n * 20.0 for n in range(1, 60)], *[1300.0] * 12], id="after an idle time"),
    ],
)
def test_calls_that_take_as_long_as_each_other_are_told_so(slots, takes, arrivals):
    provider = Provider(concurrency=slots)
    provider.looks_s = takes / 5
    provider.run(arrivals, lambda: takes)
    assert provider.wrong() == []
    assert len(provider.told) > provider.untold / 10


def test_what_a_group_of_three_has_learnt_it_tells_at_once_after_an_hour():
    provider = Provider(concurrency=3)
    provider.run([0.0] * 9, lambda: 1.5)
    provider.told.clear()
    provider.untold = 0
    provider.now = 5000.0
    provider.run([5000.0] * 48, lambda: 1.5)
    assert provider.untold == 0
    assert provider.wrong() == []
    # Forty-five wait for three slots of a second and a half: the last for 22.5 s.
    assert max(told.wait for told in provider.told) == pytest.approx(22.5, rel=0.05)


@pytest.mark.parametrize("headroom", [0, 1])
def test_who_waits_beside_slots_in_quarantine_is_told_of_the_others(headroom):
    provider = Provider(concurrency=3, quarantine_headroom=headroom)
    provider.run([0.0] * 9, lambda: 0.5)
    for _ in range(headroom + 1):
        provider.lose(57.0)
    provider.told.clear()
    provider.run([provider.now] * 14, lambda: 0.5)
    assert provider.wrong() == []
    assert max(told.wait for told in provider.told) == pytest.approx(3.0, abs=0.1)


def test_batch_is_told_of_the_slots_that_it_may_have():
    provider = Provider(concurrency=3)
    provider.run([0.0] * 16, lambda: 1.0, klass=Class.BATCH)
    assert len(provider.told) > 20
    assert provider.wrong() == []


def test_after_calls_have_become_slower_who_waits_is_told_so_at_once():
    provider = Provider(concurrency=2)
    provider.run([n * 0.14 for n in range(62)], lambda: 0.3)
    provider.told.clear()
    began = provider.now
    provider.run([provider.now] * 24, lambda: 1.05)
    # Of the first ones what they know of the calls that run decides, and that is little.
    later = [told for told in provider.wrong() if told.position >= 4 and told.at > began + 0.95]
    assert later == []
    assert sum(told.position >= 4 for told in provider.told) > 100


@pytest.mark.parametrize("seed", range(2))
def test_calls_that_take_very_different_times_are_told_so_on_average(seed):
    rng = random.Random(seed)
    provider = Provider(concurrency=4)
    provider.looks_s = 0.5
    provider.run([n * 0.05 for n in range(80)], lambda: rng.uniform(0.5, 2.5))
    # Of the head of the queue one call decides, and nobody knows of one how long it takes.
    wrong = [told for told in provider.wrong() if told.position >= 8]
    assert wrong == [], f"seed {seed}"
    assert sum(told.position >= 8 for told in provider.told) > 100


def test_who_is_turned_away_is_told_of_the_next_place_and_not_of_the_whole_queue():
    settings = AdmissionSettings(groups={GROUP: GroupSettings(concurrency=2, queue=20)})
    provider = Provider(concurrency=2)
    provider._ask(Configure(settings.groups, revision=2))
    provider.run([n * 0.05 for n in range(60)], lambda: 1.0)
    assert len(provider.turned_away) > 10
    assert [told for told in provider.turned_away if not told.within_a_factor_of_two] == []
    assert max(told.wait for told in provider.turned_away) <= 1.0


@pytest.mark.parametrize(
    "limits",
    [
        pytest.param({"requests_per_minute": 30}, id="requests of the group"),
        pytest.param({"tokens_per_minute": 6000}, id="tokens of the group"),
        pytest.param({"models": {"m": ModelLimits(requests_per_minute=30)}}, id="requests of the model"),
        pytest.param({"models": {"m": ModelLimits(tokens_per_minute=6000)}}, id="tokens of the model"),
    ],
)
def test_who_waits_for_a_rate_is_told_when_it_allows_it(limits):
    provider = Provider(concurrency=50, **limits)
    provider.run([0.0] * 40, lambda: 0.05, tokens=200)
    rated = [told for told in provider.told if told.reason == "rate"]
    assert len(rated) > 100
    # Exact, but for the tenth of a second in which it is looked at.
    assert [told for told in rated if not -_SAME <= told.truth - told.wait <= 0.11] == []


def test_who_waits_for_a_model_that_is_full_is_told_by_the_calls_of_the_model():
    provider = Provider(concurrency=50, models={"m": ModelLimits(concurrency=2)})
    provider.run([n * 0.05 for n in range(40)], lambda: 1.0)
    assert {told.reason for told in provider.told} == {"model_capacity"}
    assert provider.wrong() == []
