"""Admission against a real PostgreSQL, by several controllers at once, each as another process would be."""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from decimal import Decimal

import asyncpg
import msgspec
import pytest

from admission.controller import Controller
from admission.ids import new_id
from admission.lease import Class, Demand, Ending, Lease, Refusal, RefusalReason, Settlement, Verdict, Waiting
from admission.settings import AdmissionSettings, GroupSettings
from admission.store import Store

GROUP = "http://provider.test:80"
KEY = uuid.UUID(int=1)


def settings(**changes) -> AdmissionSettings:
    limits = {
        name: changes.pop(name)
        for name in ("concurrency", "queue", "failure_threshold", "first_cooldown_s", "longest_cooldown_s")
        if name in changes
    }
    return AdmissionSettings(groups={GROUP: GroupSettings(**limits)}, **changes)


@asynccontextmanager
async def controller(url: str, given: AdmissionSettings) -> AsyncIterator[Controller]:
    store = Store(url, given)
    try:
        await store.configure()
        async with Controller(store, given).opened() as opened:
            yield opened
    finally:
        await store.close()


def demand(**changes) -> Demand:
    return msgspec.structs.replace(
        Demand(
            ticket_id=new_id(),
            group=GROUP,
            model="m",
            klass=Class.INTERACTIVE,
            key_id=KEY,
            debit_id=new_id().hex,
            attempt=1,
            execution_limit_s=30,
            isolation_s=5,
            queue_timeout_s=10,
            intent=b'{"session_id":"s"}',
        ),
        **changes,
    )


def settlement(lease: Lease, ending: Ending = Ending.CONFIRMED, **changes) -> Settlement:
    return msgspec.structs.replace(
        Settlement(
            lease=lease,
            ending=ending,
            verdict=Verdict.ANSWERED,
            state="charged",
            record=b'{"usd":"0.25","status":"success","input_total":3,"output_total":4}',
        ),
        **changes,
    )


async def granted(of: Controller, wanted: Demand) -> Lease:
    answer = await of.admit(wanted)
    assert isinstance(answer, Lease), answer
    return answer


async def rows(url: str, statement: str, *args) -> list[asyncpg.Record]:
    connection = await asyncpg.connect(url)
    try:
        return await connection.fetch(statement, *args)
    finally:
        await connection.close()


async def test_two_processes_never_hold_more_than_the_limit_together(database_url):
    given = settings(concurrency=3, queue=100)
    holding = peak = 0

    async def use(of: Controller) -> None:
        nonlocal holding, peak
        lease = await granted(of, demand())
        holding += 1
        peak = max(peak, holding)
        await asyncio.sleep(0)
        [count] = await rows(database_url, "select count(*) from control.ticket where state <> 'queued'")
        assert count[0] <= 3
        holding -= 1
        assert (await of.settle(settlement(lease))).applied

    async with controller(database_url, given) as one, controller(database_url, given) as two:
        await asyncio.gather(*(use(of) for _ in range(20) for of in (one, two)))
    assert peak == 3
    [left] = await rows(database_url, "select count(*) from control.ticket")
    assert left[0] == 0


async def test_grants_follow_the_order_of_arrival(database_url):
    order = []

    async def use(of: Controller, number: int) -> None:
        lease = await granted(of, demand())
        order.append(number)
        await of.settle(settlement(lease))

    async with controller(database_url, settings(concurrency=1)) as one:
        await asyncio.gather(*(use(one, number) for number in range(20)))
    assert order == list(range(20))


async def test_a_full_queue_refuses_and_writes_nothing(database_url):
    async with controller(database_url, settings(concurrency=1, queue=1)) as one:
        await granted(one, demand())
        waiting = asyncio.create_task(one.admit(demand()))
        await until(lambda: rows(database_url, "select from control.ticket where state = 'queued'"))
        answer = await one.admit(demand())
        assert isinstance(answer, Refusal)
        assert answer.reason is RefusalReason.QUEUE_FULL
        assert len(await rows(database_url, "select from control.ticket")) == 2
        waiting.cancel()


async def until(found, within_s: float = 30.0):
    give_up = time.monotonic() + within_s
    while not (result := await found()):
        assert time.monotonic() < give_up, "it did not come true in time"
        await asyncio.sleep(0.01)
    return result


async def test_a_waiter_that_is_cancelled_leaves_the_queue(database_url):
    async with controller(database_url, settings(concurrency=1)) as one:
        lease = await granted(one, demand())
        waiting = asyncio.create_task(one.admit(demand()))
        await until(lambda: rows(database_url, "select from control.ticket where state = 'queued'"))
        waiting.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await waiting

        async def gone():
            return not await rows(database_url, "select from control.ticket where state = 'queued'")

        await until(gone)
        await one.settle(settlement(lease))
        assert await rows(database_url, "select from control.ticket") == []


async def test_a_waiter_is_told_its_position_and_times_out_with_it(database_url):
    heard: list[Waiting] = []
    async with controller(database_url, settings(concurrency=1)) as one:
        await granted(one, demand())
        first = asyncio.create_task(one.admit(demand()))
        await until(lambda: rows(database_url, "select from control.ticket where state = 'queued'"))
        answer = await one.admit(demand(queue_timeout_s=0.3), heard.append)
        assert isinstance(answer, Refusal)
        assert answer.reason is RefusalReason.QUEUE_TIMEOUT
        assert answer.position == 2
        assert [(waiting.position, waiting.reason) for waiting in heard] == [(2, "capacity")]
        first.cancel()


async def test_a_settlement_in_one_process_grants_the_waiter_of_another(database_url):
    # A rescan so late that only the notification can be what wakes it.
    given = settings(concurrency=1, rescan_s=60.0)
    async with controller(database_url, given) as one, controller(database_url, given) as two:
        lease = await granted(one, demand())
        waiting = asyncio.create_task(two.admit(demand()))
        await until(lambda: rows(database_url, "select from control.ticket where state = 'queued'"))
        await one.settle(settlement(lease))
        async with asyncio.timeout(20):
            assert isinstance(await waiting, Lease)


async def test_without_notifications_a_waiter_is_found_by_the_rescan(database_url, monkeypatch):
    given = settings(concurrency=1, rescan_s=0.1)
    async with controller(database_url, given) as one, controller(database_url, given) as two:
        monkeypatch.setattr(two, "_hear", lambda _: None)
        lease = await granted(one, demand())
        waiting = asyncio.create_task(two.admit(demand()))
        await until(lambda: rows(database_url, "select from control.ticket where state = 'queued'"))
        await one.settle(settlement(lease))
        async with asyncio.timeout(20):
            assert isinstance(await waiting, Lease)


async def test_waiting_for_the_slot_that_is_kept_for_interactive_calls_is_capacity(database_url):
    heard: list[Waiting] = []
    async with controller(database_url, settings(concurrency=2)) as one:
        await granted(one, demand(klass=Class.BATCH))
        waiting = asyncio.create_task(one.admit(demand(klass=Class.BATCH), heard.append))
        await until(lambda: _queued(database_url, 1))
        await until(lambda: asyncio.sleep(0, heard))
        assert heard[0].reason == "capacity"
        waiting.cancel()


async def test_an_uncertain_end_keeps_the_slot_until_deadline_plus_isolation(database_url):
    async with controller(database_url, settings(concurrency=1, rescan_s=0.1)) as one:
        asked = time.monotonic()
        lease = await granted(one, demand(execution_limit_s=0.4, isolation_s=0.4))
        await one.settle(
            settlement(lease, Ending.UNCERTAIN, verdict=Verdict.NONE, state="unknown", record=b'{"status":"cancelled"}')
        )
        [slot] = await rows(database_url, "select state from control.ticket")
        assert slot["state"] == "quarantined"
        await granted(one, demand())
        assert 0.75 < time.monotonic() - asked < 20
        [counter] = await rows(database_url, "select * from control.counter where kind = 'total'")
        assert (counter["attempts"], counter["unknown_attempts"], counter["charged_usd"]) == (1, 1, 0)


async def test_where_closing_the_connection_stops_the_work_quarantine_is_short(database_url):
    async with controller(database_url, settings(concurrency=1, rescan_s=0.1)) as one:
        lease = await granted(one, demand())
        await one.settle(
            settlement(
                lease,
                Ending.UNCERTAIN,
                verdict=Verdict.NONE,
                state="unknown",
                record=b'{"status":"cancelled"}',
                cancel_confirms_after_s=0.2,
            )
        )
        async with asyncio.timeout(20):
            await granted(one, demand())


async def test_an_attempt_settles_once_and_unknown_is_corrected_once(database_url):
    async with controller(database_url, settings()) as one:
        lease = await granted(one, demand())
        unknown = settlement(
            lease,
            Ending.UNCERTAIN,
            verdict=Verdict.NONE,
            state="unknown",
            record=b'{"status":"unknown","upper_bound_usd":"2"}',
        )
        assert (await one.settle(unknown)).applied
        assert not (await one.settle(unknown)).applied
        first = await one.settle(settlement(lease))
        assert first.applied
        assert first.counters is not None
        assert Decimal(msgspec.json.decode(first.counters)["total_usd"]) == Decimal("0.25")
        assert not (await one.settle(settlement(lease))).applied
        history = await rows(database_url, "select state, usd, correction from control.invocation order by correction")
        assert [tuple(row) for row in history] == [("unknown", None, 0), ("charged", Decimal("0.25"), 1)]
        for counter in await rows(database_url, "select * from control.counter"):
            assert counter["charged_usd"] == Decimal("0.25")
            assert (counter["attempts"], counter["unknown_attempts"], counter["unknown_upper_bound_usd"]) == (1, 0, 0)


async def test_a_debit_with_a_live_or_an_ended_attempt_is_a_duplicate(database_url):
    async with controller(database_url, settings()) as one, controller(database_url, settings()) as two:
        lease = await granted(one, demand(debit_id="d"))
        for of in (one, two):
            answer = await of.admit(demand(debit_id="d"))
            assert isinstance(answer, Refusal)
            assert answer.reason is RefusalReason.DUPLICATE_DEBIT
        await one.settle(settlement(lease))
        answer = await two.admit(demand(debit_id="d"))
        assert isinstance(answer, Refusal)
        await granted(two, demand(debit_id="d", attempt=2))


async def test_what_a_dead_process_held_goes_to_quarantine_and_its_cost_is_unknown(database_url):
    given = settings(concurrency=1)
    async with controller(database_url, given) as one, controller(database_url, given) as two:
        lease = await granted(one, demand(intent=b'{"session_id":"s","upper_bound_usd":"1.5"}'))
        await two.bury([one.owner])
        [slot] = await rows(database_url, "select state from control.ticket")
        assert slot["state"] == "quarantined"
        [record] = await rows(database_url, "select state, usd, upper_bound_usd, ended from control.invocation")
        assert tuple(record) == ("unknown", None, Decimal("1.5"), "lost")
        # It was not dead after all: the true end is a correction, and frees the slot.
        assert (await one.settle(settlement(lease))).applied
        assert await rows(database_url, "select from control.ticket") == []


async def test_a_lapsed_process_starts_nothing_and_comes_back_as_another(database_url):
    given = settings(lease_s=0.6, margin_s=0.1)
    async with controller(database_url, given) as one:
        before = one.owner
        await rows(database_url, "update control.owner set expires_at = clock_timestamp()")
        await until(lambda: asyncio.sleep(0, one.owner != before and one.available))
        await granted(one, demand())


async def test_the_breaker_opens_lets_one_probe_through_and_closes(database_url):
    given = settings(failure_threshold=2, first_cooldown_s=0.3, concurrency=5)
    async with controller(database_url, given) as one, controller(database_url, given) as two:
        for _ in range(2):
            lease = await granted(one, demand())
            await one.settle(settlement(lease, verdict=Verdict.TRANSIENT, state="zero", record=b'{"status":"error"}'))
        answer = await two.admit(demand())
        assert isinstance(answer, Refusal)
        assert answer.reason is RefusalReason.COOLDOWN
        assert answer.retry_after_s is not None
        assert 0 < answer.retry_after_s <= 0.3
        # One that waits for the cooldown becomes the probe; meanwhile others are sent away.
        probe = await granted(two, demand(waits_for_cooldown=True))
        assert probe.probe
        assert isinstance(await one.admit(demand()), Refusal)
        await two.settle(settlement(probe))
        await granted(one, demand())


async def test_a_probe_is_decided_by_its_first_content_and_not_by_its_end(database_url):
    given = settings(failure_threshold=1, first_cooldown_s=0.1, concurrency=3)
    async with controller(database_url, given) as one:
        lease = await granted(one, demand())
        await one.settle(settlement(lease, verdict=Verdict.TRANSIENT, state="zero", record=b'{"status":"error"}'))
        probe = await granted(one, demand(waits_for_cooldown=True))
        assert probe.probe
        waiting = asyncio.create_task(granted(one, demand(waits_for_cooldown=True)))
        await until(lambda: _queued(database_url, 1))
        one.content_seen(probe)
        next_one = await waiting
        assert not next_one.probe
        # Its late failure belongs to a generation that is over.
        await one.settle(settlement(probe, verdict=Verdict.TRANSIENT, state="zero", record=b'{"status":"error"}'))
        # After a closing admission ramps: one, then two, then all.
        assert isinstance(await one.admit(demand(queue_timeout_s=0.3)), Refusal)
        await one.settle(settlement(next_one))
        await asyncio.gather(*(granted(one, demand()) for _ in range(2)))


async def test_a_rate_limit_opens_at_once_for_as_long_as_the_provider_says(database_url):
    async with controller(database_url, settings(rescan_s=0.1)) as one:
        lease = await granted(one, demand())
        limited = settlement(
            lease, verdict=Verdict.RATE_LIMITED, state="zero", record=b'{"status":"error"}', retry_after_s=0.5
        )
        asked = time.monotonic()
        await one.settle(limited)
        await granted(one, demand(waits_for_cooldown=True))
        assert 0.45 < time.monotonic() - asked < 20


async def test_interactive_goes_first_and_batch_is_not_starved(database_url):
    order: list[Class] = []

    async def use(of: Controller, klass: Class) -> None:
        lease = await granted(of, demand(klass=klass))
        order.append(klass)
        await of.settle(settlement(lease))

    async with controller(database_url, settings(concurrency=1, queue=100)) as one:
        first = await granted(one, demand())
        tasks = [asyncio.create_task(use(one, Class.BATCH)) for _ in range(3)]
        tasks += [asyncio.create_task(use(one, Class.INTERACTIVE)) for _ in range(27)]

        async def all_wait():
            return len(await rows(database_url, "select from control.ticket where state = 'queued'")) == 30

        await until(all_wait)
        await one.settle(settlement(first))
        await asyncio.gather(*tasks)
    batch = [place for place, klass in enumerate(order) if klass is Class.BATCH]
    assert batch[0] >= 8
    assert batch[1] < 20


async def test_a_refused_element_does_not_fail_its_neighbours(database_url):
    async with controller(database_url, settings(concurrency=10)) as one:
        good = [demand() for _ in range(6)]
        bad = demand(attempt=2**40)
        answers = await asyncio.gather(*(one.admit(wanted) for wanted in (*good[:3], bad, *good[3:])))
        assert [isinstance(answer, Lease) for answer in answers] == [True] * 3 + [False] + [True] * 3


@pytest.mark.parametrize("newer", [1, 9], ids=["lower limit", "higher limit"])
async def test_the_newest_configuration_first_seen_is_in_force(database_url, newer):
    old = settings(concurrency=4)
    new = settings(concurrency=newer)
    async with controller(database_url, old), controller(database_url, new), controller(database_url, old):
        [group] = await rows(database_url, "select concurrency from control.capacity_group")
        assert group["concurrency"] == newer


async def test_going_back_to_earlier_limits_takes_another_revision(database_url):
    for limits, expected in (
        (settings(concurrency=8), 8),
        (settings(concurrency=2), 2),
        (settings(concurrency=8), 2),
        (settings(concurrency=8, revision=2), 8),
    ):
        store = Store(database_url, limits)
        overruled = await store.configure()
        await store.close()
        [group] = await rows(database_url, "select concurrency from control.capacity_group")
        assert group["concurrency"] == expected
        assert overruled == ([] if limits.groups[GROUP].concurrency == expected else [GROUP])


async def test_a_record_the_ledger_refuses_still_frees_the_slot_and_is_told(database_url):
    async with controller(database_url, settings()) as one:
        leases = [await granted(one, demand()) for _ in range(3)]
        absurd = settlement(leases[1], record=b'{"usd":"9e30","status":"success"}')
        ends = [one.settle(settlement(leases[0])), one.settle(absurd), one.settle(settlement(leases[2]))]
        assert [end.applied for end in await asyncio.gather(*ends)] == [True, True, True]
        assert await rows(database_url, "select from control.ticket") == []
        states = await rows(database_url, "select state, ended from control.invocation order by state, ended")
        assert [tuple(row) for row in states] == [("charged", None), ("charged", None), ("unknown", "unrecordable")]


async def test_batch_takes_at_most_half_of_the_queue(database_url):
    async with controller(database_url, settings(concurrency=1, queue=4)) as one:
        await granted(one, demand())
        waits = [asyncio.create_task(one.admit(demand(klass=Class.BATCH))) for _ in range(2)]
        await until(lambda: _queued(database_url, 2))
        refused = await one.admit(demand(klass=Class.BATCH))
        assert isinstance(refused, Refusal)
        assert refused.reason is RefusalReason.QUEUE_FULL
        waits += [asyncio.create_task(one.admit(demand())) for _ in range(2)]
        await until(lambda: _queued(database_url, 4))
        for waiting in waits:
            waiting.cancel()


async def _queued(url: str, count: int) -> bool:
    return len(await rows(url, "select from control.ticket where state = 'queued'")) == count


async def test_a_fault_nobody_foresaw_is_told_at_once_and_not_waited_out(database_url, monkeypatch):
    async with controller(database_url, settings()) as one:

        async def broken(*_):
            raise RuntimeError("a fault of ours")

        monkeypatch.setattr(one._store, "acquire", broken)
        async with asyncio.timeout(20):
            with pytest.raises(RuntimeError):
                await one.admit(demand())
