"""The controller over a store that is slow, lost, or late: what it trusts, what it gives back, and what wakes it."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import msgspec
import pytest
from structlog.testing import capture_logs

from admission.controller import Controller
from admission.ids import new_id
from admission.lease import Class, Demand, Ending, Lease, Refusal, RefusalReason, Settlement, Verdict
from admission.memory import Fault, MemoryDatabase, MemoryStore
from admission.settings import AdmissionSettings, GroupSettings
from admission.state import Configure

GROUP = "g"


class World:
    """One database, and what goes wrong with the statements to it, by name."""

    def __init__(self, settings: AdmissionSettings) -> None:
        self.settings = settings
        self.database = MemoryDatabase(settings)
        self.faults: dict[str, Fault] = {}
        self.asked: list[str] = []
        self.database.fault = self._fault

    def _fault(self, name: str) -> Fault:
        self.asked.append(name)
        return self.faults.get(name, Fault())

    @asynccontextmanager
    async def controller(self) -> AsyncIterator[Controller]:
        store = MemoryStore(self.settings, database=self.database)
        await store.configure()
        async with Controller(store, self.settings).opened() as opened:
            yield opened

    def states(self) -> list[str]:
        return [ticket.state for ticket in self.database.state.tickets.values()]


def world(*, concurrency: int = 1, **settings: Any) -> World:
    groups = {GROUP: GroupSettings(concurrency=concurrency)}
    return World(AdmissionSettings(groups=groups, **({"margin_s": 0.1} | settings)))


def demand(**changes: Any) -> Demand:
    return msgspec.structs.replace(
        Demand(
            ticket_id=new_id(),
            group=GROUP,
            model="m",
            klass=Class.INTERACTIVE,
            key_id=uuid.UUID(int=1),
            debit_id=new_id().hex,
            attempt=1,
            execution_limit_s=30,
            isolation_s=5,
            queue_timeout_s=10,
        ),
        **changes,
    )


def ended(lease: Lease, ending: Ending = Ending.CONFIRMED) -> Settlement:
    state = "unknown" if ending is Ending.UNCERTAIN else "charged"
    return Settlement(lease=lease, ending=ending, verdict=Verdict.NONE, state=state, record=b"{}")


async def granted(of: Controller, wanted: Demand | None = None) -> Lease:
    answer = await of.admit(wanted or demand())
    assert isinstance(answer, Lease), answer
    return answer


async def until(so: Callable[[], bool], within_s: float = 10.0) -> None:
    async with asyncio.timeout(within_s):
        while not so():  # noqa: ASYNC110  a state of the store, which tells nobody
            await asyncio.sleep(0.005)


# ---------------------------------------------------------------- what it trusts


async def test_it_trusts_itself_from_when_it_asked_and_not_from_when_it_heard():
    w = world(lease_s=1.0, margin_s=0.1)
    w.faults["renew"] = Fault(back_s=0.3)
    before = time.monotonic()
    async with w.controller() as one:
        assert one._trusted_until <= before + 1.0 - 0.1 + 0.05


async def test_a_margin_is_taken_off_what_the_store_says():
    w = world(lease_s=10.0, margin_s=4.0)
    async with w.controller() as one:
        assert one._trusted_until <= time.monotonic() + 6.0


async def test_a_store_that_is_back_is_found_long_before_the_next_beat_although_nobody_asks_it_for_anything():
    w = world(lease_s=90.0)
    async with w.controller() as one:
        w.faults["renew"] = Fault(lost="before")
        # The first beat has begun its pause once it has had a turn.
        await asyncio.sleep(0)
        one._pulse.set()
        await until(lambda: one._lost_since is not None)
        # It has been heard of lately: it may dispatch for a while.
        assert one.available
        w.faults.clear()
        await until(lambda: one._lost_since is None)


async def test_a_ticket_that_the_store_does_not_answer_has_the_heart_beat_at_once():
    w = world(lease_s=90.0, retry_s=0.1)
    async with w.controller() as one:
        w.faults["acquire"] = Fault(lost="before")
        refused = await one.admit(demand())
        assert isinstance(refused, Refusal)
        assert refused.reason is RefusalReason.STORE_UNAVAILABLE
        await until(lambda: one.available)


async def test_the_hard_deadline_counts_from_when_it_asked():
    w = world()
    w.faults["acquire"] = Fault(back_s=0.3)
    async with w.controller() as one:
        before = time.monotonic()
        lease = await granted(one, demand(execution_limit_s=5))
        assert lease.hard_deadline <= before + 5.0 + 0.05


async def test_no_lease_is_valid_once_its_time_is_over_although_its_process_is_trusted():
    async with world().controller() as one:
        lease = await granted(one, demand(execution_limit_s=0.1))
        assert one.valid(lease)
        await until(lambda: not one.valid(lease))
        assert one.available


async def test_no_lease_is_valid_once_its_process_is_not_trusted_although_its_time_is_not_over():
    w = world(lease_s=0.6, margin_s=0.2)
    async with w.controller() as one:
        lease = await granted(one)
        w.faults["renew"] = Fault(lost="before")
        assert one.valid(lease)
        await until(lambda: not one.available)
        assert not one.valid(lease)


async def test_who_is_not_trusted_asks_for_nothing():
    w = world(lease_s=0.6, margin_s=0.2)
    async with w.controller() as one:
        w.faults["renew"] = Fault(lost="before")
        await until(lambda: not one.available)
        asked = w.asked.count("acquire")
        answer = await one.admit(demand())
        assert isinstance(answer, Refusal)
        assert answer.reason is RefusalReason.STORE_UNAVAILABLE
        assert w.asked.count("acquire") == asked


async def test_a_store_that_does_not_answer_is_a_bounded_refusal_and_ends_the_trust():
    w = world(retry_s=0.2)
    async with w.controller() as one:
        w.faults["acquire"] = Fault(lost="before")
        async with asyncio.timeout(10):
            answer = await one.admit(demand())
        assert isinstance(answer, Refusal)
        assert answer.reason is RefusalReason.STORE_UNAVAILABLE
        assert not one.available
        w.faults.clear()


# ---------------------------------------------------------------- what was lost


async def test_an_acquire_whose_answer_was_lost_is_asked_again_and_granted_once():
    w = world(retry_s=2.0)
    async with w.controller() as one:
        w.faults["acquire"] = Fault(lost="after")
        asking = asyncio.create_task(one.admit(demand()))
        await until(lambda: w.states() == ["active"])
        w.faults.clear()
        assert isinstance(await asking, Lease)
        assert w.states() == ["active"]


async def test_an_acquire_that_commits_after_it_was_given_up_revives_nothing():
    w = world(retry_s=0.1)
    async with w.controller() as one:
        w.faults["acquire"] = Fault(lost="late", late_s=0.6)
        assert isinstance(await one.admit(demand()), Refusal)
        asked = w.asked.count("acquire")
        assert asked >= 1
        given_up = time.monotonic()
        await until(lambda: time.monotonic() > given_up + 0.8)
        assert w.states() == []
        w.faults.clear()


async def test_one_that_a_lost_acquire_had_enqueued_is_given_up_with_a_tombstone():
    w = world(retry_s=5.0)
    async with w.controller() as one:
        await granted(one)
        w.faults["acquire"] = Fault(lost="late", late_s=0.8)
        asking = asyncio.create_task(one.admit(demand(queue_timeout_s=0.4)))
        sent = time.monotonic()
        await until(lambda: w.asked.count("acquire") >= 2)
        w.faults.clear()
        answer = await asking
        assert isinstance(answer, Refusal)
        await until(lambda: time.monotonic() > sent + 1.0)
        assert w.states() == ["active"]


async def test_a_settlement_is_tried_until_it_is_acknowledged_and_counts_once():
    w = world()
    async with w.controller() as one:
        lease = await granted(one)
        w.faults["settle"] = Fault(lost="after")
        ending = asyncio.ensure_future(one.settle(ended(lease)))
        await until(lambda: w.asked.count("settle") >= 3)
        w.faults.clear()
        await ending
        assert w.states() == []
        assert len(w.database.records[lease.ticket_id]) == 1


async def test_a_caller_that_goes_away_while_the_acquire_is_on_its_way_leaves_nothing():
    w = world()
    async with w.controller() as one:
        w.faults["acquire"] = Fault(there_s=0.05, back_s=0.05)
        asking = asyncio.create_task(one.admit(demand()))
        await until(lambda: w.states() == ["active"])
        asking.cancel()
        with suppress(asyncio.CancelledError):
            await asking
        await until(lambda: w.states() == [])


# ---------------------------------------------------------------- what wakes it


async def test_without_any_notification_the_next_look_finds_the_slot():
    w = world(rescan_s=0.3, unconfirmed_grant_s=10.0)
    w.faults["notify"] = Fault(lost="before")
    async with w.controller() as one, w.controller() as two:
        lease = await granted(one)
        waiting = asyncio.create_task(two.admit(demand()))
        await until(lambda: "queued" in w.states())
        looked = w.asked.count("rescan")
        await until(lambda: w.asked.count("rescan") > looked + 1)
        await one.settle(ended(lease))
        async with asyncio.timeout(10):
            assert isinstance(await waiting, Lease)


async def test_a_slot_that_comes_free_in_one_process_is_told_to_the_waiter_of_another():
    w = world(rescan_s=60.0, unconfirmed_grant_s=30.0)
    async with w.controller() as one, w.controller() as two:
        lease = await granted(one)
        waiting = asyncio.create_task(two.admit(demand()))
        # It has looked since it listens, and for the first time since it waits: the next look is far away.
        await until(lambda: w.asked.count("rescan") >= 2)
        await one.settle(ended(lease))
        async with asyncio.timeout(10):
            assert isinstance(await waiting, Lease)


async def test_what_was_notified_while_nobody_listened_is_found_on_listening_again():
    w = world(rescan_s=60.0, unconfirmed_grant_s=30.0)
    async with w.controller() as one, w.controller() as two:
        lease = await granted(one)
        waiting = asyncio.create_task(two.admit(demand(queue_timeout_s=30)))
        await until(lambda: w.asked.count("rescan") >= 2)
        w.database.lose_listeners()
        await one.settle(ended(lease))
        await until(lambda: "granted" in w.states())
        async with asyncio.timeout(10):
            assert isinstance(await waiting, Lease)


async def test_a_slot_that_time_alone_frees_is_given_at_that_time():
    w = world(rescan_s=60.0)
    async with w.controller() as one:
        lease = await granted(one, demand(execution_limit_s=0.2, isolation_s=0.2))
        await one.settle(ended(lease, Ending.UNCERTAIN))
        async with asyncio.timeout(10):
            assert isinstance(await one.admit(demand()), Lease)


async def test_what_a_dead_process_left_in_a_group_without_traffic_is_cleared_away():
    w = world(lease_s=0.5, margin_s=0.1)
    async with w.controller() as one:
        store = MemoryStore(w.settings, database=w.database)
        dead = new_id()
        await store.renew(dead, new_id(), first=True)
        await store.acquire(GROUP, dead, [(demand(execution_limit_s=0.3, isolation_s=0.2), 0.0), (demand(), 0.0)])
        assert sorted(w.states()) == ["active", "queued"]
        await until(lambda: w.states() == [])
        await until(lambda: one.available)


async def test_a_waiter_of_a_lapsed_incarnation_is_told_and_the_next_one_is_granted():
    w = world(lease_s=0.6, margin_s=0.2)
    async with w.controller() as one:
        first = await granted(one)
        waiting = asyncio.create_task(one.admit(demand()))
        await until(lambda: "queued" in w.states())
        before = one.owner
        owners = dict(w.database.state.owners)
        w.database.state = msgspec.structs.replace(w.database.state, owners=owners | {before: 0})
        answer = await waiting
        assert isinstance(answer, Refusal)
        assert answer.reason is RefusalReason.LAPSED
        assert one.owner != before
        await one.settle(ended(first))
        await granted(one)


@pytest.mark.parametrize("again_s", [60.0, 0.0])
async def test_who_waits_through_an_outage_is_told_of_the_store_and_the_log_says_it_once_and_then_each_minute(
    monkeypatch, again_s
):
    monkeypatch.setattr("admission.controller._LOST_AGAIN_S", again_s)
    w = world(lease_s=0.6, margin_s=0.2, retry_s=0.2)
    with capture_logs() as logs:
        async with w.controller() as one:
            await granted(one)
            waiting = asyncio.create_task(one.admit(demand(queue_timeout_s=1.0)))
            await until(lambda: "queued" in w.states(), 20)
            for statement in ("renew", "acquire", "rescan", "abandon"):
                w.faults[statement] = Fault(lost="before")
            answer = await waiting
            assert isinstance(answer, Refusal)
            assert answer.reason is RefusalReason.STORE_UNAVAILABLE
            missed = w.asked.count("renew")
            await until(lambda: w.asked.count("renew") >= missed + 3, 20)
            w.faults.clear()
            await until(lambda: any(line["event"] == "admission.store_found" for line in logs), 20)
    lost = [line for line in logs if line["event"] == "admission.store_lost"]
    [found] = [line for line in logs if line["event"] == "admission.store_found"]
    assert found["after_s"] > 0
    assert (lost[0]["for_s"], lost[0]["times"]) == (0.0, 1)
    assert (len(lost) == 1) is (again_s > 0), lost


def lapse(w: World, of: Controller) -> None:
    owners = dict(w.database.state.owners)
    w.database.state = msgspec.structs.replace(w.database.state, owners=owners | {of.owner: 0})


async def lapsed(w: World, of: Controller, waiting: asyncio.Future[Lease | Refusal]) -> Refusal:
    await until(lambda: "queued" in w.states())
    lapse(w, of)
    await of._renew(first=False)
    answer = await waiting
    assert isinstance(answer, Refusal)
    assert answer.reason is RefusalReason.LAPSED
    return answer


async def test_who_was_lost_with_a_lapse_is_told_when_the_debit_is_free_and_the_process_lives_again():
    w = world()
    async with w.controller() as one, w.controller() as other:
        held = await granted(other)
        w.faults["abandon"] = Fault(there_s=0.3)
        asked = demand()
        answer = await lapsed(w, one, asyncio.create_task(one.admit(asked)))
        assert one.available
        assert "queued" not in w.states()
        again = demand(debit_id=asked.debit_id, attempt=1 + answer.used)
        waiting = asyncio.create_task(one.admit(again))
        await until(lambda: "queued" in w.states())
        await other.settle(ended(held))
        assert isinstance(await waiting, Lease)


async def test_what_runs_when_its_process_lapses_is_left_to_its_end():
    w = world(concurrency=1)
    async with w.controller() as one:
        running = await granted(one)
        await lapsed(w, one, asyncio.create_task(one.admit(demand())))
        assert w.states() == ["active"]
        assert (await one.settle(ended(running))).applied
        assert "bury" not in w.asked


async def test_a_store_that_is_lost_with_the_lapse_keeps_who_waited_no_longer_than_the_patience_with_it():
    w = world(retry_s=0.3)
    async with w.controller() as one, w.controller() as other:
        await granted(other)
        w.faults["abandon"] = Fault(lost="before")
        before = time.monotonic()
        await lapsed(w, one, asyncio.create_task(one.admit(demand())))
        assert 0.25 < time.monotonic() - before < 15
        w.faults.clear()
        await until(lambda: "queued" not in w.states())


async def test_who_asks_before_the_heartbeat_has_found_the_lapse_makes_it_look_at_once():
    w = world(lease_s=60.0)
    async with w.controller() as one:
        before = one.owner
        lapse(w, one)
        async with asyncio.timeout(10):
            answer = await one.admit(demand())
        assert isinstance(answer, Refusal)
        assert (answer.reason, answer.used) == (RefusalReason.LAPSED, False)
        assert one.owner != before
        await granted(one)


async def test_a_grant_that_is_heard_of_after_the_lapse_is_given_back():
    w = world()
    async with w.controller() as one, w.controller() as other:
        held = await granted(other)
        waiting = asyncio.create_task(one.admit(demand()))
        await until(lambda: "queued" in w.states())
        w.faults["rescan"] = Fault(back_s=0.5)
        await other.settle(ended(held))
        # It is confirmed, and the answer is on its way.
        await until(lambda: w.states() == ["active"])
        w.faults["abandon"] = Fault(there_s=1.0)
        lapse(w, one)
        await one._renew(first=False)
        answer = await waiting
        assert isinstance(answer, Refusal)
        assert (answer.reason, answer.used) == (RefusalReason.LAPSED, True)
        await until(lambda: w.states() == [])


async def test_an_acquire_whose_incarnation_lapsed_on_the_way_back_leaves_nothing_in_the_queue():
    w = world()
    async with w.controller() as one, w.controller() as other:
        await granted(other)
        w.faults["acquire"] = Fault(back_s=0.3)
        waiting = asyncio.create_task(one.admit(demand()))
        answer = await lapsed(w, one, waiting)
        assert answer.used
        await until(lambda: "queued" not in w.states())


@pytest.mark.parametrize("acknowledged", [False, True], ids=["given up", "acknowledged"])
async def test_what_an_older_statement_hears_takes_no_lease_that_came_by_another(acknowledged):
    # An acquire is lost on its way back, again and again. Meanwhile its group is merged into another, whose queue moves
    # on and grants the ticket; the caller has its lease when the older statement comes to its end.
    w = World(
        AdmissionSettings(
            groups={GROUP: GroupSettings(concurrency=1), "h": GroupSettings(concurrency=1)}, margin_s=0.1, retry_s=0.4
        )
    )
    async with w.controller() as one:
        await granted(one, demand(group="h", endpoint="h"))
        w.faults["acquire"] = Fault(lost="after")
        waiting = asyncio.create_task(granted(one, demand(group="h", endpoint="h")))
        await until(lambda: w.states() == ["active", "queued"])
        merged = GroupSettings(concurrency=2, endpoints=(GROUP, "h"))
        w.database.apply(Configure({GROUP: merged}, 2))
        older = one._admissions["h"]
        w.faults["acquire"] = Fault()
        await one.advance([GROUP])
        await one._admissions[GROUP].drain()
        lease = await waiting
        w.faults["acquire"] = Fault() if acknowledged else Fault(lost="after")
        await older.drain()
        await one._abandoned.drain()
        assert w.states() == ["active", "active"]
        assert (await one.settle(ended(lease))).applied


async def test_a_caller_who_leaves_as_another_statement_brings_its_lease_leaves_nothing_behind():
    w = World(
        AdmissionSettings(
            groups={GROUP: GroupSettings(concurrency=1), "h": GroupSettings(concurrency=1)}, margin_s=0.1, retry_s=0.4
        )
    )
    async with w.controller() as one:
        await granted(one, demand(group="h", endpoint="h"))
        w.faults["acquire"] = Fault(lost="after")
        wanted = demand(group="h", endpoint="h")
        waiting = asyncio.create_task(one.admit(wanted))
        await until(lambda: w.states() == ["active", "queued"])
        w.database.apply(Configure({GROUP: GroupSettings(concurrency=2, endpoints=(GROUP, "h"))}, 2))
        ticket, deliver = one._tickets[wanted.ticket_id], one._deliver

        def delivered(*arguments: Any) -> None:
            deliver(*arguments)
            waiting.cancel()

        one._deliver = delivered  # type: ignore[assignment]
        w.faults["acquire"] = Fault()
        await one.advance([GROUP])
        with suppress(asyncio.CancelledError):
            await waiting
        assert ticket.leased
        await until(lambda: w.states() == ["active"])


async def test_a_store_that_has_forgotten_a_group_is_told_of_it_again():
    # As after a standby took over that lagged: it is from before the group was made known.
    w = world()
    async with w.controller() as one:
        w.database.state = msgspec.structs.replace(w.database.state, groups={}, endpoints={})
        lease = await granted(one)
        assert one.valid(lease)


# ---------------------------------------------------------------- what it tells


def failed(lease: Lease) -> Settlement:
    return msgspec.structs.replace(ended(lease), verdict=Verdict.TRANSIENT, state="zero")


async def test_each_change_of_a_breaker_is_one_line_in_the_log_of_all_processes():
    w = World(
        AdmissionSettings(
            groups={GROUP: GroupSettings(concurrency=2, failure_threshold=2, first_cooldown_s=0.05)}, margin_s=0.1
        )
    )
    with capture_logs() as logs:
        async with w.controller() as one, w.controller() as two:
            leases = [await granted(one), await granted(two)]
            await asyncio.gather(one.settle(failed(leases[0])), two.settle(failed(leases[1])))
            probe = await granted(two, demand(waits_for_cooldown=True))
            assert probe.probe
            one.content_seen(probe)
            await until(lambda: sum(line["event"].startswith("admission.breaker") for line in logs) >= 3)
            await one.settle(ended(probe))
    told = [line for line in logs if line["event"].startswith("admission.breaker")]
    assert [(line["event"], line["log_level"], line["cause"]) for line in told] == [
        ("admission.breaker_opened", "warning", "transient"),
        ("admission.breaker_probing", "info", "cooldown_over"),
        ("admission.breaker_closed", "info", "first_content"),
    ]
    assert [line["generation"] for line in told] == [2, 3, 4]
    assert all(line["group"] == GROUP for line in told)
    assert told[0]["at"] < told[0]["until"] <= told[1]["at"]


async def test_a_change_that_could_not_be_told_at_once_is_told_by_the_next_sweep():
    w = World(AdmissionSettings(groups={GROUP: GroupSettings(failure_threshold=1)}, margin_s=0.1, lease_s=0.6))
    w.faults["breaker_events"] = Fault(lost="before")
    with capture_logs() as logs:
        async with w.controller() as one:
            await one.settle(failed(await granted(one)))
            await until(lambda: "breaker_events" in w.asked)
        assert not [line for line in logs if line["event"] == "admission.breaker_opened"]
        # Its process is gone.
        del w.faults["breaker_events"]
        async with w.controller():
            await until(lambda: any(line["event"] == "admission.breaker_opened" for line in logs), within_s=20)


async def test_what_changes_no_breaker_asks_for_no_change_of_one():
    w = world(concurrency=2)
    async with w.controller() as one:
        for verdict in (Verdict.ANSWERED, Verdict.TRANSIENT, Verdict.RATE_LIMITED):
            await one.settle(msgspec.structs.replace(ended(await granted(one)), verdict=verdict, retry_after_s=0.0))
        assert "breaker_events" not in w.asked
