"""The rules of admission, one sentence each, on the pure decisions."""

from __future__ import annotations

import uuid
from datetime import UTC, date, datetime
from typing import Any

import msgspec
import pytest

from admission import decision
from admission.breaker import Breaker, BreakerState
from admission.clock import SECOND
from admission.contract import SettledRow, TicketRow
from admission.lease import Class, Demand, Ending, Fence, Lease, Settlement, Verdict
from admission.settings import AdmissionSettings, GroupSettings, ModelLimits
from admission.state import (
    Abandon,
    Acquire,
    Answers,
    Bury,
    Close,
    Configure,
    Decide,
    Event,
    Group,
    Outcome,
    Overdue,
    Renew,
    Rescan,
    Reset,
    Settle,
    State,
    Ticket,
    UnknownGroup,
    element,
    initial,
)

GROUP = "g"
KEY = uuid.UUID(int=1)
#: 23:59:50 in UTC.
START = 1_800_057_590 * SECOND


class World:
    """A store with one group, and the processes "a", "b" and "c". Times in seconds."""

    def __init__(self, *, zone: str = "UTC", **limits: Any) -> None:
        limits.setdefault("concurrency", 2)
        limits.setdefault("queue", 4)
        limits.setdefault("failure_threshold", 2)
        self.groups = {GROUP: GroupSettings(**limits)}
        self.state: State = initial(AdmissionSettings(groups=self.groups, zone=zone))
        self.now = START
        self._ids = 0
        self.owners = {name: uuid.UUID(int=100 + n) for n, name in enumerate("abc")}
        self.do(Configure(self.groups))
        for name in "abc":
            self.renew(name, first=True)

    def do(self, event: Event) -> Answers:
        self.state, answers = decision.decide(self.state, event, self.now)
        return answers

    def renew(self, *names: str, first: bool = False) -> None:
        for name in names:
            self.do(Renew(self.owners[name], uuid.UUID(int=200), 60_000, first))

    def wait(self, seconds: float, *, alive: str = "abc") -> None:
        """Time passes, and these processes live on."""
        until = self.now + round(seconds * SECOND)
        while self.now < until:
            self.now = min(self.now + 20 * SECOND, until)
            self.renew(*alive)

    def demand(self, **changes: Any) -> Demand:
        self._ids += 1
        return msgspec.structs.replace(
            Demand(
                ticket_id=uuid.UUID(int=10_000 + self._ids),
                group=GROUP,
                model="m",
                credential="c",
                klass=Class.INTERACTIVE,
                key_id=KEY,
                debit_id=f"d{self._ids}",
                attempt=1,
                execution_limit_s=30,
                isolation_s=5,
                queue_timeout_s=60,
            ),
            **changes,
        )

    def acquire(self, *demands: Demand, by: str = "a") -> dict[uuid.UUID | None, TicketRow]:
        elements = tuple(element(demand) for demand in demands)
        return {row.ticket_id: row for row in self.do(Acquire(GROUP, self.owners[by], elements)).tickets}

    def ask(self, by: str = "a", **changes: Any) -> TicketRow:
        demand = self.demand(**changes)
        return self.acquire(demand, by=by)[demand.ticket_id]

    def granted(self, by: str = "a", **changes: Any) -> uuid.UUID:
        row = self.ask(by, **changes)
        assert row.answer == "granted", row
        assert row.ticket_id is not None
        return row.ticket_id

    def queued(self, by: str = "a", **changes: Any) -> uuid.UUID:
        row = self.ask(by, **changes)
        assert row.answer == "queued", row
        assert row.ticket_id is not None
        return row.ticket_id

    def rescan(self, demand: Demand, by: str = "a") -> TicketRow:
        [row] = self.do(Rescan(self.owners[by], (demand,))).tickets
        return row

    def settle(
        self, ticket: uuid.UUID, ending: Ending = Ending.CONFIRMED, *, judged: bool = True, **facts: Any
    ) -> SettledRow:
        there = self.state.tickets.get(ticket)
        generation = facts.pop("generation", there.generation if there is not None and there.generation else 0)
        retry_after_s = facts.pop("retry_after_s", None)
        facts.setdefault("verdict", Verdict.ANSWERED)
        facts.setdefault("state", "charged")
        lease = Lease(
            ticket_id=ticket,
            group=GROUP,
            generation=generation,
            probe=False,
            hard_deadline=0,
            granted_at=datetime(2027, 1, 1, tzinfo=UTC),
            day=date(2027, 1, 1),
            queued_s=0,
        )
        settlement = Settlement(lease=lease, ending=ending, record=b"{}", **facts)
        outcome = Outcome(settlement, None if retry_after_s is None else round(retry_after_s * 1000))
        [row] = self.do(Settle((outcome,), judged)).settled
        return row

    def fail(self, ticket: uuid.UUID, **facts: Any) -> SettledRow:
        return self.settle(ticket, verdict=Verdict.TRANSIENT, state="zero", **facts)

    def open_breaker(self) -> None:
        tickets = [self.granted() for _ in range(2)]
        for ticket in tickets:
            self.fail(ticket)
        assert self.breaker.state is BreakerState.OPEN

    def abandon(self, *tickets: uuid.UUID, tombstone: bool = False) -> tuple[str, ...]:
        return self.do(Abandon(tickets, tombstone)).groups

    def advance(self, by: str = "a") -> dict[uuid.UUID | None, TicketRow]:
        return self.acquire(by=by)

    @property
    def group(self) -> Group:
        return self.state.groups[GROUP]

    @property
    def breaker(self) -> Breaker:
        return self.group.breaker

    @property
    def closed(self) -> bool:
        return self.breaker.state is BreakerState.CLOSED

    def ticket(self, ticket: uuid.UUID) -> Ticket:
        return self.state.tickets[ticket]

    def states(self) -> list[str]:
        return sorted(ticket.state for ticket in self.state.tickets.values())


# ---------------------------------------------------------------- slots, order and classes


def test_as_many_are_granted_as_the_limit_and_the_rest_wait():
    world = World(concurrency=2)
    assert [world.ask().answer for _ in range(4)] == ["granted", "granted", "queued", "queued"]


def test_one_batch_of_demands_is_granted_in_its_order():
    world = World(concurrency=2)
    demands = [world.demand() for _ in range(4)]
    rows = world.acquire(*demands)
    assert [rows[d.ticket_id].answer for d in demands] == ["granted", "granted", "queued", "queued"]


def test_a_state_that_was_passed_in_stays_as_it_was():
    world = World()
    world.granted()
    before = world.state
    kept = msgspec.json.encode({str(k): v for k, v in before.tickets.items()})
    world.granted()
    world.abandon(*before.tickets)
    assert msgspec.json.encode({str(k): v for k, v in before.tickets.items()}) == kept


def test_who_came_first_is_granted_first_whoever_owns_it():
    world = World(concurrency=1)
    holder = world.granted("a")
    first, second = world.queued("b"), world.queued("a")
    world.settle(holder)
    rows = world.advance("a")
    assert rows[first].answer == "notify"
    assert rows[first].owner_id == world.owners["b"]
    assert second not in rows


def test_interactive_goes_before_batch():
    world = World(concurrency=1)
    holder = world.granted()
    world.queued(klass=Class.BATCH)
    interactive = world.queued()
    world.settle(holder)
    assert world.advance()[interactive].answer == "granted"


def test_while_both_wait_every_tenth_grant_is_batch():
    world = World(concurrency=1, queue=40)
    holder = world.granted()
    for _ in range(2):
        world.queued(klass=Class.BATCH)
    for _ in range(20):
        world.queued()
    order = []
    for _ in range(20):
        world.settle(holder)
        [holder] = [row.ticket_id for row in world.advance().values() if row.answer == "granted" and row.ticket_id]
        order.append(world.ticket(holder).klass.name[0])
    assert "".join(order) == "IIIIIIIIIB" * 2


def test_batch_holds_at_most_one_less_than_the_limit():
    world = World(concurrency=3)
    assert [world.ask(klass=Class.BATCH).answer for _ in range(3)] == ["granted", "granted", "queued"]
    assert world.ask().answer == "granted"


def test_with_a_limit_of_one_batch_may_hold_it():
    assert World(concurrency=1).ask(klass=Class.BATCH).answer == "granted"


def test_quarantined_batch_counts_as_batch():
    world = World(concurrency=2, quarantine_headroom=1)
    world.settle(world.granted(klass=Class.BATCH), Ending.UNCERTAIN, verdict=Verdict.NONE, state="unknown")
    assert world.ask(klass=Class.BATCH).answer == "queued"
    assert world.ask().answer == "granted"


def test_lowering_the_limit_revokes_nothing_and_grants_nothing():
    world = World(concurrency=3)
    for _ in range(3):
        world.granted()
    world.do(Configure({GROUP: GroupSettings(concurrency=1, queue=4)}, revision=2))
    world.settle(next(iter(world.state.tickets)))
    assert world.ask().answer == "queued"
    assert world.states() == ["active", "active", "queued"]


def test_quarantined_slots_count_against_the_limit():
    world = World(concurrency=1)
    world.settle(world.granted(), Ending.UNCERTAIN, verdict=Verdict.NONE, state="unknown")
    assert world.ask().answer == "queued"


def test_headroom_lets_others_pass_a_quarantined_slot_up_to_its_size():
    world = World(concurrency=1, quarantine_headroom=1)
    for _ in range(2):
        world.settle(world.granted(), Ending.UNCERTAIN, verdict=Verdict.NONE, state="unknown")
    assert world.ask().answer == "queued"


# ---------------------------------------------------------------- the queue


def test_a_full_queue_refuses_and_writes_nothing():
    world = World(concurrency=1, queue=1)
    world.granted()
    world.queued()
    before = world.state
    assert world.ask().answer == "queue_full"
    assert world.state == before


def test_batch_takes_at_most_half_of_the_queue():
    world = World(concurrency=1, queue=3)
    world.granted()
    assert [world.ask(klass=Class.BATCH).answer for _ in range(3)] == ["queued", "queued", "queue_full"]
    assert world.ask().answer == "queued"


def test_a_retry_keeps_its_place_and_may_exceed_the_bound_by_as_many_as_the_limit():
    world = World(concurrency=1, queue=2)
    holder = world.granted()
    first, second = world.queued(), world.queued()
    place = world.ticket(first).number
    world.abandon(first)
    world.queued()
    assert world.ask().answer == "queue_full"
    again = world.queued(place=place)
    assert world.ticket(again).number == place
    assert world.ask(place=place).answer == "queue_full"
    world.settle(holder)
    rows = world.advance()
    assert rows[again].answer == "granted"
    assert second not in rows


def test_a_place_that_was_never_given_is_no_place():
    world = World(concurrency=1, queue=1)
    world.granted()
    world.queued(place=99)
    assert world.ask(place=99).answer == "queue_full"


def test_who_claims_a_place_that_was_never_given_keeps_the_order_of_arrival():
    world = World(concurrency=1)
    held = world.granted()
    claimed, later = world.queued(place=99), world.queued()
    assert world.ticket(claimed).number < world.ticket(later).number
    world.settle(held)
    assert world.advance()[claimed].answer == "granted"


def test_numbers_grow_only_when_somebody_is_queued():
    world = World(concurrency=1)
    world.granted()
    assert world.group.next_number == 1
    numbers = [world.ticket(world.queued()).number for _ in range(3)]
    assert numbers == [1, 2, 3]


def test_a_waiter_is_left_to_its_owner_for_two_seconds_after_its_deadline():
    world = World(concurrency=1)
    world.granted()
    waiter = world.queued(queue_timeout_s=10)
    world.wait(12)
    world.advance()
    assert waiter in world.state.tickets
    world.wait(0.001)
    world.advance()
    assert waiter not in world.state.tickets


def test_the_callers_deadline_ends_the_wait_too():
    world = World(concurrency=1)
    world.granted()
    waiter = world.queued(queue_timeout_s=60, caller_deadline_s=3)
    assert world.ticket(waiter).queue_deadline == world.now + 3 * SECOND


def test_a_rescan_tells_the_position_over_both_classes():
    world = World(concurrency=1)
    world.granted()
    batch = world.demand(klass=Class.BATCH)
    world.acquire(batch)
    world.queued()
    assert world.rescan(batch).ahead == 1


def test_somebody_who_waits_is_told_the_next_event_that_time_brings():
    world = World(concurrency=1)
    ticket = world.granted()
    world.settle(ticket, Ending.UNCERTAIN, verdict=Verdict.NONE, state="unknown", cancel_confirms_after_s=3.0)
    demand = world.demand()
    assert world.acquire(demand)[None].wait_ms == 3000


def test_without_waiters_there_is_no_next_event():
    assert None not in World().advance()


@pytest.mark.parametrize(
    ("reason", "limits"),
    [
        ("capacity", {"concurrency": 1}),
        ("model_capacity", {"concurrency": 2, "models": {"m": ModelLimits(concurrency=1)}}),
        ("rate", {"concurrency": 2, "requests_per_minute": 1}),
        ("rate", {"concurrency": 2, "models": {"m": ModelLimits(requests_per_minute=1)}}),
        ("stopped", {"concurrency": 0}),
        ("stopped", {"concurrency": 1, "models": {"m": ModelLimits(concurrency=0)}}),
    ],
)
def test_a_waiter_is_told_why(reason: str, limits: dict[str, Any]):
    world = World(**limits)
    if reason != "stopped":
        world.granted()
    demand = world.demand()
    world.acquire(demand)
    assert world.rescan(demand).wait_reason == reason


def test_a_waiter_behind_a_quarantined_slot_is_told_so_and_until_when():
    world = World(concurrency=1)
    world.settle(world.granted(), Ending.UNCERTAIN, verdict=Verdict.NONE, state="unknown")
    demand = world.demand()
    world.acquire(demand)
    row = world.rescan(demand)
    assert (row.wait_reason, row.wait_ms) == ("quarantine", 35_000)


def test_a_waiter_in_a_cooldown_is_told_until_when():
    world = World(first_cooldown_s=10)
    world.open_breaker()
    demand = world.demand(waits_for_cooldown=True)
    world.acquire(demand)
    row = world.rescan(demand)
    assert (row.wait_reason, row.wait_ms) == ("cooldown", 10_000)


# ---------------------------------------------------------------- who may ask


def test_a_replay_is_answered_by_the_state_of_its_ticket():
    world = World(concurrency=1)
    held, waiting = world.demand(), world.demand()
    world.acquire(held, waiting)
    rows = world.acquire(held, waiting)
    assert (rows[held.ticket_id].answer, rows[waiting.ticket_id].answer) == ("granted", "queued")
    world.settle(held.ticket_id, Ending.UNCERTAIN, verdict=Verdict.NONE, state="unknown")
    assert world.acquire(held)[held.ticket_id].answer == "ended"


def test_a_replay_by_another_incarnation_is_a_duplicate():
    world = World()
    demand = world.demand()
    world.acquire(demand, by="a")
    assert world.acquire(demand, by="b")[demand.ticket_id].answer == "duplicate_debit"


def test_another_process_that_replays_a_ticket_just_granted_to_its_owner_is_answered_too():
    world = World(concurrency=1)
    holder = world.granted("a")
    waiting = world.demand()
    world.acquire(waiting, by="b")
    world.settle(holder)
    event = Acquire(GROUP, world.owners["a"], (element(waiting),))
    assert [row.answer for row in world.do(event).tickets] == ["notify", "duplicate_debit"]


def test_a_ticket_that_was_settled_has_ended():
    world = World()
    demand = world.demand()
    world.acquire(demand)
    world.settle(demand.ticket_id)
    assert world.acquire(demand)[demand.ticket_id].answer == "ended"


def test_a_tombstone_keeps_a_late_acquire_from_reviving_its_ticket():
    world = World()
    demand = world.demand()
    world.abandon(demand.ticket_id, tombstone=True)
    assert world.acquire(demand)[demand.ticket_id].answer == "ended"


def test_an_endpoint_of_another_group_is_moved():
    world = World()
    world.do(Configure({"other": GroupSettings(endpoints=("e",))}))
    row = world.ask(endpoint="e")
    assert (row.answer, row.group_id) == ("moved", "other")


def test_an_owner_that_is_not_heard_of_has_lapsed():
    world = World()
    world.wait(60, alive="b")
    assert world.ask("a").answer == "lapsed"
    assert world.ask("b").answer == "granted"


@pytest.mark.parametrize("settled", [False, True])
def test_a_debit_with_a_live_or_a_made_attempt_is_a_duplicate(settled: bool):
    world = World()
    ticket = world.granted(debit_id="d")
    if settled:
        world.settle(ticket)
    assert world.ask(debit_id="d").answer == "duplicate_debit"


def test_the_next_attempt_of_a_debit_may_follow_and_may_pass_its_quarantined_one():
    world = World(concurrency=3)
    ticket = world.granted(debit_id="d")
    assert world.ask(debit_id="d", attempt=2).answer == "duplicate_debit"
    world.settle(ticket, Ending.UNCERTAIN, verdict=Verdict.NONE, state="unknown")
    assert world.ask(debit_id="d", attempt=2).answer == "granted"


def test_a_quarantined_attempt_without_an_end_has_its_number():
    world = World(concurrency=3)
    ticket = world.granted(debit_id="d")
    world.wait(30)
    world.advance()
    assert world.ticket(ticket).state == "quarantined"
    assert world.ask(debit_id="d").answer == "duplicate_debit"


def test_another_key_may_use_the_same_debit():
    world = World()
    world.granted(debit_id="d")
    assert world.ask(debit_id="d", key_id=uuid.UUID(int=2)).answer == "granted"


def test_one_debit_twice_in_a_batch_is_a_duplicate_the_second_time():
    world = World(concurrency=3)
    one, two = world.demand(debit_id="d"), world.demand(debit_id="d", attempt=2)
    rows = world.acquire(one, two)
    assert (rows[one.ticket_id].answer, rows[two.ticket_id].answer) == ("granted", "duplicate_debit")


def test_a_passed_deadline_is_refused():
    assert World().ask(caller_deadline_s=0.0).answer == "deadline_exceeded"


def test_an_unknown_group_is_an_error():
    world = World()
    with pytest.raises(UnknownGroup):
        world.do(Acquire("nobody", world.owners["a"]))


def fence(number: int) -> Fence:
    return Fence(scope_id="s", run_id="r", number=number)


def test_a_lower_fence_than_the_newest_seen_is_refused():
    world = World(concurrency=5)
    world.granted(fence=fence(2))
    assert world.ask(fence=fence(1)).answer == "owner_fence"
    assert world.ask(fence=fence(2)).answer == "granted"
    assert world.ask(fence=fence(1), key_id=uuid.UUID(int=2)).answer == "granted"


def test_a_newer_fence_ends_the_waiters_of_older_ones_and_no_slots():
    world = World(concurrency=1)
    held = world.granted(fence=fence(1))
    waiting = world.demand(fence=fence(1))
    world.acquire(waiting)
    world.queued(fence=fence(2))
    assert waiting.ticket_id not in world.state.tickets
    assert held in world.state.tickets
    assert world.rescan(waiting).answer == "owner_fence"
    assert decision.fenced(world.state, KEY, fence(1))
    assert not decision.fenced(world.state, KEY, fence(2))


# ---------------------------------------------------------------- grants of others


def waiting_in_b(world: World) -> Demand:
    """A ticket of "b" that "a" has granted."""
    holder = world.granted("a")
    demand = world.demand()
    world.acquire(demand, by="b")
    world.settle(holder)
    world.advance("a")
    assert world.ticket(demand.ticket_id).state == "granted"
    return demand


def test_a_grant_by_another_process_is_confirmed_by_its_owner_and_its_time_begins_then():
    world = World(concurrency=1)
    demand = waiting_in_b(world)
    world.wait(1)
    assert world.rescan(demand, by="a").answer == "cooldown"  # it is not its own
    row = world.rescan(demand, by="b")
    assert (row.answer, row.remaining_ms) == ("granted", 30_000)


def test_an_unconfirmed_grant_returns_to_its_place():
    world = World(concurrency=1)
    demand = waiting_in_b(world)
    number = world.ticket(demand.ticket_id).number
    world.wait(2)
    assert world.rescan(demand, by="b").answer == "queued"
    world.do(Close(1000))
    world.advance("a")
    ticket = world.ticket(demand.ticket_id)
    assert (ticket.state, ticket.number, ticket.generation) == ("queued", number, None)


def test_an_unconfirmed_grant_past_its_deadline_is_deleted_and_not_granted_for_ever():
    world = World(concurrency=1)
    demand = waiting_in_b(world)
    for _ in range(70):
        world.wait(1)
        world.advance("a")
    assert demand.ticket_id not in world.state.tickets


def test_a_grant_from_before_its_breaker_opened_goes_back_to_its_place():
    world = World(concurrency=2, failure_threshold=1)
    holder, other = world.granted("a"), world.granted("a")
    demand = world.demand(waits_for_cooldown=True)
    world.acquire(demand, by="b")
    world.settle(holder)
    world.advance("a")
    number = world.ticket(demand.ticket_id).number
    world.fail(other)
    assert world.rescan(demand, by="b").answer == "queued"
    assert (world.ticket(demand.ticket_id).state, world.ticket(demand.ticket_id).number) == ("queued", number)


def test_a_grant_with_a_floor_put_under_its_model_goes_back_to_its_place():
    world = World(concurrency=2)
    holder, other = world.granted("a"), world.granted("a")
    demand = world.demand(waits_for_cooldown=True)
    world.acquire(demand, by="b")
    world.settle(holder)
    world.advance("a")
    world.settle(other, verdict=Verdict.RATE_LIMITED, state="zero", retry_after_s=5)
    row = world.rescan(demand, by="b")
    assert (row.answer, row.wait_reason) == ("queued", "rate_limited")


def test_a_lapsed_owner_can_not_confirm():
    world = World(concurrency=1)
    demand = waiting_in_b(world)
    world.do(Bury((world.owners["b"],)))
    assert world.rescan(demand, by="b").answer == "queued"
    world.advance("a")
    assert demand.ticket_id not in world.state.tickets


def test_owners_that_are_not_heard_of_are_granted_nothing():
    world = World(concurrency=1)
    holder = world.granted("a", execution_limit_s=600)
    first = world.queued("b", queue_timeout_s=600)
    world.wait(60, alive="ac")
    second = world.queued("c")
    world.settle(holder)
    rows = world.advance("a")
    assert first not in rows
    assert rows[second].answer == "notify"


# ---------------------------------------------------------------- endings


def test_a_confirmed_end_frees_the_slot_and_settles_once():
    world = World(concurrency=1)
    ticket = world.granted()
    assert world.settle(ticket).applied
    assert not world.settle(ticket).applied
    assert world.ask().answer == "granted"


def test_a_settlement_tells_whether_somebody_waits():
    world = World(concurrency=1)
    first = world.granted()
    row = world.settle(first)
    assert (row.group_id, row.waiters) == (GROUP, False)
    ticket = world.granted()
    world.queued()
    assert world.settle(ticket).waiters


def test_a_waiter_whose_model_is_full_or_that_a_floor_keeps_back_is_no_reason_to_look():
    world = World(concurrency=3, models={"n": ModelLimits(concurrency=1)})
    world.granted(model="n")
    held = world.granted()
    world.queued(model="n")
    world.settle(world.granted(), verdict=Verdict.RATE_LIMITED, state="zero", retry_after_s=5)
    world.queued(waits_for_cooldown=True)
    assert not world.settle(held).waiters


def test_a_window_that_began_anew_is_not_cut_short_by_an_uncertain_end():
    world = World(concurrency=1)
    ticket = world.granted()
    world.wait(100)
    world.advance()
    until = world.ticket(ticket).quarantined_until
    world.settle(ticket, Ending.UNCERTAIN, verdict=Verdict.NONE, state="unknown")
    assert world.ticket(ticket).quarantined_until == until


def test_unknown_is_corrected_once():
    world = World()
    ticket = world.granted()
    assert world.settle(ticket, Ending.UNCERTAIN, verdict=Verdict.NONE, state="unknown").applied
    assert not world.settle(ticket, Ending.UNCERTAIN, verdict=Verdict.NONE, state="unknown").applied
    assert world.settle(ticket, state="charged").applied
    assert not world.settle(ticket, state="zero").applied
    assert world.state.attempts[ticket].state == "charged"


def test_a_correction_frees_the_quarantined_slot():
    world = World(concurrency=1)
    ticket = world.granted()
    world.settle(ticket, Ending.UNCERTAIN, verdict=Verdict.NONE, state="unknown")
    world.settle(ticket)
    assert world.states() == []


def test_an_uncertain_end_keeps_the_slot_for_deadline_plus_isolation():
    world = World(concurrency=1)
    ticket = world.granted()
    world.settle(ticket, Ending.UNCERTAIN, verdict=Verdict.NONE, state="unknown")
    world.wait(35 - 0.000_001)
    world.advance()
    assert world.states() == ["quarantined"]
    world.wait(0.000_001)
    world.advance()
    assert world.states() == []


def test_where_closing_confirms_the_end_the_slot_is_kept_for_that_long():
    world = World(concurrency=1)
    ticket = world.granted()
    world.settle(ticket, Ending.UNCERTAIN, verdict=Verdict.NONE, state="unknown", cancel_confirms_after_s=2.0)
    world.wait(2)
    assert world.ask().answer == "granted"


def test_a_passed_hard_deadline_gives_the_full_window_from_then():
    world = World(concurrency=1)
    ticket = world.granted()
    world.wait(100)
    world.advance()
    assert world.ticket(ticket).quarantined_until == world.now + 5 * SECOND
    assert ticket not in world.state.attempts


def test_quarantine_that_passes_without_an_end_is_settled_as_unknown():
    world = World(concurrency=1)
    ticket = world.granted()
    world.wait(100)
    world.advance()
    world.wait(5)
    world.advance()
    assert world.states() == []
    assert world.state.attempts[ticket].state == "unknown"
    assert world.settle(ticket).applied


def test_the_callers_deadline_plus_isolation_bounds_the_hard_deadline():
    world = World()
    assert world.ask(caller_deadline_s=10).remaining_ms == 15_000
    assert world.ask(caller_deadline_s=100).remaining_ms == 30_000


def test_the_attempts_of_a_dead_owner_are_quarantined_and_unknown():
    world = World(concurrency=1)
    ticket = world.granted("a")
    deadline = world.ticket(ticket).hard_deadline
    assert deadline is not None
    assert world.do(Bury((world.owners["a"],))).groups == (GROUP,)
    world.advance("b")
    assert world.ticket(ticket).quarantined_until == deadline + 5 * SECOND
    assert world.state.attempts[ticket].state == "unknown"


def test_where_nobody_was_heard_of_nobody_is_dead_for_one_ttl_more():
    world = World(concurrency=1)
    ticket = world.granted("a", execution_limit_s=600)
    world.now += 3600 * SECOND
    world.do(Renew(uuid.UUID(int=300), uuid.UUID(int=301), 60_000, first=True))
    assert decision.dead(world.state, world.now, [world.owners["a"]]) == set()
    world.do(Acquire(GROUP, uuid.UUID(int=300)))
    assert ticket not in world.state.attempts
    world.now += 60 * SECOND
    assert decision.dead(world.state, world.now, [world.owners["a"]]) == {world.owners["a"]}


def test_a_lapsed_incarnation_stays_dead_and_its_process_may_come_back():
    world = World()
    world.wait(60, alive="bc")
    late = world.do(Renew(world.owners["a"], uuid.UUID(int=200), 60_000))
    assert late.lives_ms is None
    again = world.do(Renew(uuid.UUID(int=400), uuid.UUID(int=200), 60_000, first=True))
    assert again.lives_ms == 60_000


def test_burying_ends_waiters_and_leaves_slots_to_quarantine():
    world = World(concurrency=1)
    world.granted("a")
    world.queued("a")
    world.do(Bury((world.owners["a"],)))
    assert world.states() == ["active"]
    world.advance("b")
    assert world.states() == ["quarantined"]


def test_the_sweep_ends_the_waiters_of_dead_owners_and_names_what_is_due():
    world = World(concurrency=1)
    world.granted("b", execution_limit_s=600)
    world.queued("a", queue_timeout_s=600)
    assert world.do(Overdue()).groups == ()
    world.wait(61, alive="b")
    assert world.do(Overdue()).groups == ()
    assert world.states() == ["active"]
    world.wait(540, alive="b")
    assert world.do(Overdue()).groups == (GROUP,)


def test_the_sweep_names_a_group_whose_waiter_was_forgotten():
    world = World(concurrency=1)
    world.granted(execution_limit_s=600)
    world.queued(queue_timeout_s=5)
    world.wait(8)
    assert world.do(Overdue()).groups == (GROUP,)


def test_abandoning_ends_waiters_and_settles_a_grant_as_zero():
    world = World(concurrency=1)
    held, waiting = world.granted(), world.queued()
    assert world.abandon(waiting) == ()
    assert waiting not in world.state.attempts
    assert world.abandon(held) == (GROUP,)
    assert world.state.attempts[held].state == "zero"
    assert world.states() == []


def test_abandoning_leaves_a_quarantined_slot():
    world = World(concurrency=1)
    ticket = world.granted()
    world.settle(ticket, Ending.UNCERTAIN, verdict=Verdict.NONE, state="unknown")
    assert world.abandon(ticket, tombstone=True) == ()
    assert world.states() == ["quarantined"]
    assert world.state.attempts[ticket].state == "unknown"


# ---------------------------------------------------------------- breaker


def test_an_open_breaker_grants_nothing_and_sends_those_away_that_do_not_wait():
    world = World(first_cooldown_s=10)
    world.open_breaker()
    row = world.ask()
    assert (row.answer, row.wait_ms) == ("cooldown", 10_000)
    assert world.ask(waits_for_cooldown=True).answer == "queued"


def test_who_can_not_outlive_the_cooldown_is_sent_away_even_if_it_would_wait():
    world = World(first_cooldown_s=10)
    world.open_breaker()
    assert world.ask(waits_for_cooldown=True, queue_timeout_s=9.9).answer == "cooldown"
    assert world.ask(waits_for_cooldown=True, queue_timeout_s=10).answer == "queued"


def test_opening_lets_those_waiters_go_that_do_not_wait_or_can_not_outlive_it():
    world = World(concurrency=2, first_cooldown_s=10)
    held = [world.granted(), world.granted()]
    leaves = world.demand()
    world.acquire(leaves)
    late = world.queued(waits_for_cooldown=True, queue_timeout_s=10)
    stays = world.queued(waits_for_cooldown=True, queue_timeout_s=11)
    for ticket in held:
        world.fail(ticket)
    assert {leaves.ticket_id, late} & set(world.state.tickets) == set()
    assert stays in world.state.tickets
    row = world.rescan(leaves)
    assert (row.answer, row.wait_ms) == ("cooldown", 10_000)


def test_after_the_cooldown_the_first_is_the_one_probe():
    world = World(concurrency=3, first_cooldown_s=10)
    world.open_breaker()
    first = world.queued(waits_for_cooldown=True)
    world.queued(waits_for_cooldown=True)
    world.wait(10)
    rows = world.advance()
    assert rows[first].probe
    assert rows[first].judged
    assert [row.answer for row in rows.values() if row.ticket_id].count("granted") == 1
    assert world.ask().answer == "cooldown"


def test_after_closing_grants_ramp_up_with_good_answers():
    world = World(concurrency=8, queue=20, first_cooldown_s=10)
    world.open_breaker()
    world.wait(10)
    probe = world.granted()
    waiting = [world.queued(waits_for_cooldown=True) for _ in range(8)]
    world.settle(probe)
    assert [row.ticket_id for row in world.advance().values() if row.answer == "granted"] == waiting[:1]
    world.settle(waiting[0])
    assert [row.ticket_id for row in world.advance().values() if row.answer == "granted"] == waiting[1:3]


def test_a_probe_is_decided_by_its_first_content():
    world = World(concurrency=1, first_cooldown_s=10)
    for _ in range(2):
        world.fail(world.granted())
    world.wait(10)
    probe = world.granted()
    generation = world.ticket(probe).generation
    assert generation is not None
    world.do(Decide(GROUP, probe, generation - 1))
    assert world.breaker.state is BreakerState.HALF_OPEN
    world.do(Decide(GROUP, probe, generation))
    assert world.closed
    assert world.ask().answer == "queued"  # its slot is a slot
    world.fail(probe)
    assert world.breaker.failed_at == ()  # of a generation that is over


def test_a_probe_that_dies_with_its_owner_opens_for_longer():
    world = World(first_cooldown_s=10)
    world.open_breaker()
    world.wait(10)
    world.granted("b")
    world.do(Bury((world.owners["b"],)))
    world.advance("a")
    assert world.breaker.state is BreakerState.OPEN
    assert world.breaker.cooldown_until == world.now + 20 * SECOND


def test_a_probe_that_is_abandoned_hands_its_place_on():
    world = World(first_cooldown_s=10)
    world.open_breaker()
    world.wait(10)
    world.abandon(world.granted())
    row = world.ask()
    assert (row.answer, row.probe) == ("granted", True)


def test_a_probe_that_was_not_dispatched_hands_its_place_on():
    world = World(first_cooldown_s=10)
    world.open_breaker()
    world.wait(10)
    probe = world.granted()
    world.settle(probe, Ending.NOT_DISPATCHED, verdict=Verdict.NONE, state="zero")
    row = world.ask()
    assert (row.answer, row.probe) == ("granted", True)


def test_results_of_an_older_generation_move_nothing():
    world = World(concurrency=4)
    old = [world.granted() for _ in range(2)]
    world.open_breaker()
    generation = world.breaker.generation
    for ticket in old:
        world.fail(ticket)
    assert world.breaker.generation == generation


def test_failures_of_an_older_generation_count_for_no_later_one():
    world = World(concurrency=4, failure_threshold=2)
    old = [world.granted() for _ in range(2)]
    world.do(Reset(GROUP))
    for ticket in old:
        world.fail(ticket)
    assert world.closed


def test_a_replay_counts_no_failure_twice():
    world = World(failure_threshold=2)
    ticket = world.granted()
    for _ in range(2):
        world.settle(ticket, Ending.UNCERTAIN, verdict=Verdict.TRANSIENT, state="unknown")
    assert world.closed


def test_an_outcome_that_is_not_judged_moves_nothing():
    world = World(failure_threshold=1)
    world.fail(world.granted(), judged=False)
    assert world.closed


def test_an_operator_may_reset_a_group():
    world = World()
    world.settle(world.granted(), verdict=Verdict.CREDENTIAL_REJECTED, state="zero")
    assert world.do(Reset(GROUP)).groups == (GROUP,)
    assert world.ask().answer == "granted"
    assert world.do(Reset("nobody")).groups == ()


# ---------------------------------------------------------------- floors


def limited(
    world: World, *, verdict: Verdict = Verdict.RATE_LIMITED, ask: dict[str, Any] | None = None, **facts: Any
) -> None:
    world.settle(world.granted(**(ask or {})), verdict=verdict, state="zero", **facts)


def test_a_rate_limit_gates_its_credential_and_model_only_and_leaves_the_breaker():
    world = World(concurrency=4)
    limited(world, retry_after_s=7)
    row = world.ask()
    assert (row.answer, row.wait_ms) == ("cooldown", 7_000)
    assert world.ask(model="n").answer == "granted"
    assert world.ask(credential="d").answer == "granted"
    assert world.breaker == Breaker()


def test_an_account_wide_rate_limit_gates_all_models_of_the_credential():
    world = World(concurrency=4)
    limited(world, retry_after_s=7, account_wide=True)
    assert world.ask(model="n").answer == "cooldown"
    assert world.ask(credential="d").answer == "granted"


def test_a_floor_is_raised_and_never_lowered():
    world = World(concurrency=4)
    tickets = [world.granted() for _ in range(2)]
    for ticket, seconds in zip(tickets, (7, 3), strict=True):
        world.settle(ticket, verdict=Verdict.RATE_LIMITED, state="zero", retry_after_s=seconds)
    assert world.ask().wait_ms == 7_000


def test_who_waits_for_the_cooldown_is_granted_when_the_floor_is_over():
    world = World(concurrency=2)
    limited(world, retry_after_s=2)
    waiting = world.queued(waits_for_cooldown=True)
    world.wait(1.999)
    assert waiting not in world.advance()
    world.wait(0.001)
    assert world.advance()[waiting].answer == "granted"


def test_a_floor_lets_those_waiters_go_that_do_not_wait_or_can_not_outlive_it():
    world = World(concurrency=1)
    held = world.granted()
    leaves = world.queued()
    late = world.queued(waits_for_cooldown=True, queue_timeout_s=7)
    stays = world.queued(waits_for_cooldown=True, queue_timeout_s=8)
    other = world.queued(model="n")
    world.settle(held, verdict=Verdict.RATE_LIMITED, state="zero", retry_after_s=7)
    assert {leaves, late} & set(world.state.tickets) == set()
    assert {stays, other} <= set(world.state.tickets)


def test_waiters_of_other_models_pass_one_under_a_floor():
    world = World(concurrency=1)
    held = world.granted()
    waiting = world.queued(waits_for_cooldown=True)
    other = world.queued(model="n")
    world.settle(held, verdict=Verdict.RATE_LIMITED, state="zero", retry_after_s=7)
    rows = world.advance()
    assert rows[other].answer == "granted"
    assert waiting not in rows


def test_rate_limits_that_do_not_say_for_how_long_double():
    world = World(concurrency=1, first_cooldown_s=10, longest_cooldown_s=30)
    waits = []
    for _ in range(4):
        limited(world)
        waits.append(world.ask().wait_ms)
        world.wait((waits[-1] or 0) / 1000)
    assert waits == [10_000, 20_000, 30_000, 30_000]


def test_a_rate_limit_long_after_the_last_begins_anew():
    world = World(concurrency=1, first_cooldown_s=10)
    for _ in range(2):
        limited(world)
        assert world.ask().wait_ms == 10_000
        world.wait(20.001)


def test_a_rate_limit_counts_in_every_generation():
    world = World(concurrency=3, first_cooldown_s=1)
    old = world.granted()
    world.open_breaker()
    world.settle(old, verdict=Verdict.RATE_LIMITED, state="zero", retry_after_s=30)
    world.wait(1)
    assert world.ask().wait_ms == 29_000


def test_a_rate_limited_probe_closes_the_breaker_and_leaves_a_floor():
    world = World(first_cooldown_s=10)
    world.open_breaker()
    world.wait(10)
    limited(world, retry_after_s=7)
    assert world.closed
    assert world.ask().answer == "cooldown"
    assert world.ask(model="n").answer == "granted"


def test_an_unavailable_credential_is_refused_and_its_waiters_go():
    world = World(concurrency=1)
    held = world.granted()
    waiting = world.queued(waits_for_cooldown=True, queue_timeout_s=600)
    world.settle(held, verdict=Verdict.CREDENTIAL_REJECTED, state="zero", account_wide=True)
    assert waiting not in world.state.tickets
    row = world.ask(waits_for_cooldown=True, queue_timeout_s=600)
    assert (row.answer, row.wait_ms) == ("provider_unavailable", 300_000)
    assert world.ask(credential="d").answer == "granted"


# ---------------------------------------------------------------- limits inside a group


def test_a_full_model_does_not_hold_up_the_others_behind_it():
    world = World(concurrency=3, models={"m": ModelLimits(concurrency=1)})
    world.granted()
    world.queued()
    assert world.ask(model="n").answer == "granted"


def test_a_quarantined_attempt_keeps_its_place_in_its_model():
    world = World(concurrency=3, models={"m": ModelLimits(concurrency=1)})
    world.settle(world.granted(), Ending.UNCERTAIN, verdict=Verdict.NONE, state="unknown")
    assert world.ask().answer == "queued"


def test_requests_per_minute_refill_continuously():
    world = World(concurrency=9, requests_per_minute=2)
    for _ in range(2):
        world.settle(world.granted())
    waiting = world.queued()
    world.wait(29)
    assert world.advance()[None].wait_ms == 1000
    world.wait(1)
    assert world.advance()[waiting].answer == "granted"


def test_tokens_that_do_not_fit_hold_up_their_model_and_no_other():
    world = World(concurrency=9, models={"m": ModelLimits(tokens_per_minute=100)})
    world.granted(tokens=60)
    world.queued(tokens=60)
    assert world.ask(tokens=10).answer == "queued"
    assert world.ask(model="n", tokens=60).answer == "granted"


def test_tokens_of_the_group_that_do_not_fit_hold_up_everybody_behind():
    world = World(concurrency=9, tokens_per_minute=100)
    world.granted(tokens=60)
    world.queued(tokens=60)
    assert world.ask(model="n", tokens=10).answer == "queued"


def test_more_tokens_than_a_minute_allows_are_too_large():
    world = World(tokens_per_minute=100, models={"n": ModelLimits(tokens_per_minute=50)})
    assert world.ask(tokens=101).answer == "too_large"
    assert world.ask(model="n", tokens=51).answer == "too_large"
    assert world.ask(tokens=51).answer == "granted"


def left(world: World, model: str = "") -> tuple[float, float]:
    allowance = world.state.allowances[(GROUP, model)]
    return allowance.requests_left, allowance.tokens_left


@pytest.mark.parametrize(("seconds", "requests"), [(60, 1), (61, 4)])
def test_what_was_granted_more_than_a_minute_ago_weighs_no_more(seconds, requests):
    world = World(concurrency=9, models={"m": ModelLimits(requests_per_minute=6)})
    first = world.granted(execution_limit_s=600)
    for _ in range(3):
        world.granted(execution_limit_s=600)
    world.wait(seconds)
    world.settle(first, requests_left=4)
    assert left(world, "m")[0] == requests


def test_a_refusal_uses_no_allowance():
    world = World(concurrency=1, queue=0, requests_per_minute=10, tokens_per_minute=100)
    world.granted(tokens=40)
    assert world.ask(tokens=40).answer == "queue_full"
    assert left(world) == (9, 60)


@pytest.mark.parametrize("give_back", ["not_dispatched", "abandoned"])
def test_what_was_not_dispatched_gives_its_allowance_back(give_back: str):
    world = World(requests_per_minute=10, tokens_per_minute=100)
    ticket = world.granted(tokens=40)
    if give_back == "abandoned":
        world.abandon(ticket)
    else:
        world.settle(ticket, Ending.NOT_DISPATCHED, verdict=Verdict.NONE, state="zero")
    assert left(world) == (10, 100)


@pytest.mark.parametrize(("used", "tokens_left"), [(10, 90), (40, 60), (500, -400)])
def test_estimated_tokens_are_corrected_by_what_was_used(used: int, tokens_left: int):
    world = World(tokens_per_minute=100)
    world.settle(world.granted(tokens=40), used_tokens=used)
    assert left(world)[1] == tokens_left


def test_an_allowance_never_holds_more_than_a_minute():
    world = World(tokens_per_minute=100)
    ticket = world.granted(tokens=40)
    world.wait(600)
    world.settle(ticket, used_tokens=0)
    assert left(world)[1] == 100


def test_a_lease_whose_model_or_group_has_limits_of_its_own_is_judged():
    assert World(requests_per_minute=10).ask().judged
    world = World(models={"m": ModelLimits(concurrency=1)})
    assert world.ask().judged
    assert not world.ask(model="n").judged
    assert not World().ask().judged


# ---------------------------------------------------------------- the store, configuration, days


def test_a_closed_store_grants_nothing_and_says_when_it_opens():
    world = World(concurrency=1)
    held = world.demand()
    world.acquire(held)
    waiting = world.queued()
    world.do(Close(10_000))
    row = world.ask()
    assert (row.answer, row.wait_ms) == ("store_closed", 10_000)
    assert world.acquire(held)[held.ticket_id].answer == "granted"
    world.settle(held.ticket_id)
    assert waiting not in world.advance()
    world.wait(10)
    assert world.advance()[waiting].answer == "granted"


def test_the_limits_first_seen_last_are_in_force_whoever_starts_with_which():
    world = World(concurrency=2)
    newer = {GROUP: GroupSettings(concurrency=1, queue=4)}
    assert world.do(Configure(newer)).groups == ()
    assert world.do(Configure(world.groups)).groups == (GROUP,)
    assert world.group.limits.concurrency == 1
    assert world.do(Configure(world.groups, revision=2)).groups == ()
    assert world.group.limits.concurrency == 2


def test_live_tickets_move_along_with_their_endpoint():
    world = World(concurrency=1)
    held, waiting = world.granted(), world.queued()
    merged = {"all": GroupSettings(concurrency=5, endpoints=(GROUP,))}
    world.do(Configure(merged, revision=2))
    assert {world.ticket(t).group for t in (held, waiting)} == {"all"}
    rows = {r.ticket_id: r for r in world.do(Acquire("all", world.owners["a"])).tickets}
    assert rows[waiting].answer == "granted"


def test_a_bucket_that_is_new_begins_full_and_one_that_shrinks_keeps_what_fits():
    world = World(requests_per_minute=10)
    world.granted()
    world.do(Configure({GROUP: GroupSettings(requests_per_minute=5, tokens_per_minute=100)}))
    assert left(world) == (5, 100)


@pytest.mark.parametrize(("zone", "day"), [("UTC", date(2027, 1, 15)), ("Asia/Tokyo", date(2027, 1, 16))])
def test_a_charge_belongs_to_the_day_of_its_grant_in_the_declared_zone(zone: str, day: date):
    row = World(zone=zone).ask()
    assert row.granted_at == datetime(2027, 1, 15, 23, 59, 50, tzinfo=UTC)
    assert row.day == day
