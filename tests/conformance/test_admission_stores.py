"""What every admission store does, whatever it is made of: one suite for PostgreSQL and for memory."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from datetime import datetime
from decimal import Decimal
from typing import Any

import asyncpg
import msgspec
import pytest

from admission.contract import AdmissionStore, Rejected, TicketRow
from admission.ids import new_id
from admission.lease import Class, Demand, Ending, Fence, Lease, Settlement, Verdict
from admission.memory import MemoryDatabase, MemoryStore
from admission.settings import AdmissionSettings, GroupSettings, KeyLimits, ModelLimits
from admission.state import LimitKey, LimitSession
from admission.store import Store

GROUP = "http://provider.test:80"
KEY = uuid.UUID(int=1)


Limit = Callable[[uuid.UUID, KeyLimits], Awaitable[None]]
Budget = Callable[[LimitSession], Awaitable[Decimal | None]]


async def _cannot(key_id: uuid.UUID, limits: KeyLimits) -> None:
    raise AssertionError(f"this process has no way to give {key_id} {limits}")


async def _cannot_say(event: LimitSession) -> Decimal | None:
    raise AssertionError(f"this process has no way to say {event}")


class Process:
    """A store, and who asks it."""

    def __init__(self, store: AdmissionStore, limit: Limit = _cannot, say: Budget = _cannot_say) -> None:
        """`limit`: what the change of a key's limits does; `say`: of a session's budget."""
        self.store = store
        self.limit = limit
        self._say = say
        self.owner = new_id()
        self.process = new_id()

    async def ask(self, *demands: Demand, group: str = GROUP) -> dict[uuid.UUID | None, TicketRow]:
        rows = await self.store.acquire(group, self.owner, [(demand, 0.0) for demand in demands])
        return {row.ticket_id: row for row in rows}

    async def answer(self, demand: Demand) -> str:
        return (await self.ask(demand))[demand.ticket_id].answer

    async def granted(self, demand: Demand | None = None) -> TicketRow:
        demand = demand or wanted()
        row = (await self.ask(demand))[demand.ticket_id]
        assert row.answer == "granted", row
        return row

    async def advance(self) -> dict[uuid.UUID | None, TicketRow]:
        return await self.ask()

    async def found(self, *demands: Demand) -> dict[uuid.UUID | None, TicketRow]:
        return {row.ticket_id: row for row in await self.store.rescan(self.owner, demands)}

    async def budget(
        self, usd: str | None, *, own: bool = True, raises: bool = True, key_id: uuid.UUID = KEY
    ) -> Decimal | None:
        """Of the session "s". Answers what it may cost at most where that is refused."""
        most = None if usd is None else Decimal(usd)
        return await self._say(LimitSession(key_id=key_id, session_id="s", usd=most, own=own, raises=raises))

    async def settle(self, *settlements: Settlement, judged: bool = True) -> list[bool]:
        rows = await self.store.settle(0, settlements, judged=judged)
        assert [row.ticket_id for row in rows] == [s.lease.ticket_id for s in settlements]
        return [row.applied for row in rows]


Processes = Callable[..., Awaitable[tuple[Process, Process]]]


@pytest.fixture(params=["memory", "postgresql", "as behind a pooler"])
async def processes(request: pytest.FixtureRequest) -> AsyncIterator[Processes]:
    """Two processes that share a store."""
    url = None if request.param == "memory" else request.getfixturevalue("database_url")
    listen_url = url if request.param == "as behind a pooler" else None
    async with AsyncExitStack() as stack:
        databases: list[MemoryDatabase] = []

        async def limit(key_id: uuid.UUID, limits: KeyLimits) -> None:
            if url is None:
                databases[0].apply(LimitKey(key_id, limits))
                return
            given = {name: value for name, value in msgspec.structs.asdict(limits).items() if value is not None}
            connection = await asyncpg.connect(url)
            try:
                text = msgspec.json.encode(given).decode()
                await connection.execute("select control.limit_key_v1($1, $2::text::jsonb)", key_id, text)
            finally:
                await connection.close()

        async def say(event: LimitSession) -> Decimal | None:
            if url is None:
                return databases[0].apply(event).most_usd
            connection = await asyncpg.connect(url)
            try:
                said = (event.key_id, event.session_id, event.usd, event.own, event.raises)
                most: Decimal | None = await connection.fetchval(
                    "select control.budget_session_v1($1, $2, $3, $4, $5)", *said
                )
                return most
            finally:
                await connection.close()

        async def start(**changes: Any) -> tuple[Process, Process]:
            settings = configured(**changes)
            started = []
            for _ in range(2):
                store: AdmissionStore
                if url is None:
                    if not databases:
                        databases.append(MemoryDatabase(settings))
                    store = MemoryStore(settings, database=databases[0])
                else:
                    store = Store(url, settings, listen_url=listen_url)
                stack.push_async_callback(store.close)
                process = Process(store, limit, say)
                await store.configure()
                await store.renew(process.owner, process.process, first=True)
                started.append(process)
            return started[0], started[1]

        yield start


def configured(*, revision: int = 1, settings: dict[str, Any] | None = None, **limits: Any) -> AdmissionSettings:
    return AdmissionSettings(**{"groups": {GROUP: GroupSettings(**limits)}, "revision": revision, **(settings or {})})


def wanted(**changes: Any) -> Demand:
    demand = Demand(
        ticket_id=new_id(),
        group=GROUP,
        model="m",
        credential="c",
        klass=Class.INTERACTIVE,
        key_id=KEY,
        debit_id=new_id().hex,
        attempt=1,
        execution_limit_s=30,
        isolation_s=5,
        queue_timeout_s=30,
        intent=b'{"session_id":"s"}',
    )
    return msgspec.structs.replace(demand, **changes)


def ended(row: TicketRow, ending: Ending = Ending.CONFIRMED, **facts: Any) -> Settlement:
    assert row.ticket_id is not None
    assert row.granted_at is not None
    assert row.day is not None
    lease = Lease(
        ticket_id=row.ticket_id,
        group=row.group_id or GROUP,
        number=row.number or 0,
        generation=row.generation or 0,
        probe=bool(row.probe),
        judged=bool(row.judged),
        hard_deadline=0.0,
        granted_at=row.granted_at,
        day=row.day,
        queued_s=0.0,
    )
    facts.setdefault("verdict", Verdict.ANSWERED)
    facts.setdefault("state", "charged")
    facts.setdefault("record", b'{"usd":"0.25","status":"success","ended":"complete"}')
    return Settlement(lease=lease, ending=ending, **facts)


def uncertain(row: TicketRow, **facts: Any) -> Settlement:
    facts.setdefault("verdict", Verdict.NONE)
    return ended(row, Ending.UNCERTAIN, state="unknown", record=b'{"status":"unknown","ended":"broken"}', **facts)


def failed(row: TicketRow, verdict: Verdict = Verdict.TRANSIENT, **facts: Any) -> Settlement:
    return ended(row, verdict=verdict, state="zero", record=b'{"status":"error","ended":"error"}', **facts)


async def until(found: Callable[[], Awaitable[Any]], within_s: float = 30.0) -> Any:
    give_up = time.monotonic() + within_s
    while not (result := await found()):
        assert time.monotonic() < give_up, "it did not come true in time"
        await asyncio.sleep(0.02)
    return result


# ---------------------------------------------------------------- slots and queue


async def test_two_processes_share_one_limit(processes: Processes):
    one, two = await processes(concurrency=2)
    assert [await p.answer(wanted()) for p in (one, two, one, two)] == ["granted", "granted", "queued", "queued"]


async def test_a_batch_is_granted_in_its_order(processes: Processes):
    one, _ = await processes(concurrency=2)
    demands = [wanted() for _ in range(4)]
    rows = await one.ask(*demands)
    assert [rows[d.ticket_id].answer for d in demands] == ["granted", "granted", "queued", "queued"]
    assert None in rows


async def test_a_grant_carries_what_a_lease_needs(processes: Processes):
    one, _ = await processes()
    row = await one.granted(wanted(execution_limit_s=30))
    assert (row.group_id, row.probe, row.judged, row.owner_id) == (GROUP, False, False, one.owner)
    assert row.granted_at is not None
    assert abs(row.granted_at.timestamp() - time.time()) < 5
    assert row.day is not None
    assert row.remaining_ms is not None
    assert 29_000 < row.remaining_ms <= 30_000


async def test_the_callers_deadline_bounds_the_hard_deadline(processes: Processes):
    one, _ = await processes()
    row = await one.granted(wanted(caller_deadline_s=3.0, isolation_s=5))
    assert row.remaining_ms is not None
    assert 7_000 < row.remaining_ms <= 8_000


async def test_who_waits_is_read_with_the_key_it_is_for(processes: Processes):
    one, two = await processes(concurrency=1)
    await one.granted()
    await one.ask(wanted(debit_id="mine"))
    await two.ask(wanted(debit_id="theirs", key_id=uuid.UUID(int=2), klass=Class.BATCH))
    [group] = await two.store.groups()
    found = [(w["position"], w["class"], w["model"], w["reason"], w["debit_id"], w["key_id"]) for w in group["waiting"]]
    assert found == [
        (1, "interactive", "m", "capacity", "mine", str(KEY)),
        (2, "batch", "m", "capacity", "theirs", str(uuid.UUID(int=2))),
    ]


async def test_a_full_queue_refuses_and_keeps_nothing(processes: Processes):
    one, _ = await processes(concurrency=1, queue=1)
    await one.granted()
    assert [await one.answer(wanted()) for _ in range(2)] == ["queued", "queue_full"]
    [group] = await one.store.groups()
    assert (group["active"], group["queued"]) == (1, 1)


async def test_batch_takes_half_of_the_queue_and_all_slots_but_one(processes: Processes):
    one, _ = await processes(concurrency=2, queue=2)
    answers = [await one.answer(wanted(klass=Class.BATCH)) for _ in range(3)]
    assert answers == ["granted", "queued", "queue_full"]
    assert await one.answer(wanted()) == "granted"


async def test_a_retry_keeps_its_place_beyond_the_bound(processes: Processes):
    one, _ = await processes(concurrency=1, queue=1)
    held = await one.granted()
    first = wanted()
    await one.ask(first)
    place = (await one.found(first))[first.ticket_id].number
    assert place is not None
    again = wanted(place=place)
    assert await one.answer(again) == "queued"
    assert await one.answer(wanted()) == "queue_full"
    assert await one.answer(wanted(place=place)) == "queue_full"
    await one.store.abandon(0, [first.ticket_id], tombstone=False)
    await one.settle(ended(held))
    assert (await one.advance())[again.ticket_id].answer == "granted"


async def test_a_ticket_of_another_process_is_notified_and_confirmed_by_it(processes: Processes):
    one, two = await processes(concurrency=1)
    held = await one.granted()
    waiting = wanted()
    await two.ask(waiting)
    await one.settle(ended(held))
    row = (await one.advance())[waiting.ticket_id]
    assert (row.answer, row.owner_id) == ("notify", two.owner)
    assert (await two.found(waiting))[waiting.ticket_id].answer == "granted"
    assert (await two.found(waiting))[waiting.ticket_id].answer == "granted"


async def test_an_unconfirmed_grant_returns_to_the_queue(processes: Processes):
    one, two = await processes(concurrency=1, settings={"unconfirmed_grant_s": 0.1})
    held = await one.granted()
    waiting = wanted()
    await two.ask(waiting)
    await one.settle(ended(held))
    assert (await one.advance())[waiting.ticket_id].answer == "notify"

    async def granted_again() -> bool:
        row = (await one.advance()).get(waiting.ticket_id)
        return row is not None and row.answer == "notify"

    await until(granted_again)


async def test_a_waiter_hears_its_position_and_why(processes: Processes):
    one, two = await processes(concurrency=1)
    await one.granted()
    first, second = wanted(), wanted(debit_id="second")
    await one.ask(first)
    await two.ask(second)
    row = (await two.found(second))[second.ticket_id]
    assert (row.answer, row.ahead, row.wait_reason, row.group_id) == ("queued", 1, "capacity", GROUP)
    waits = await one.store.waits(["second", "nobody"])
    assert {debit: (w.group, w.position, w.reason) for debit, w in waits.items()} == {"second": (GROUP, 2, "capacity")}


@pytest.mark.parametrize("limits", [{"concurrency": 0}, {"models": {"m": ModelLimits(concurrency=0)}}])
async def test_who_waits_for_a_group_or_model_that_is_stopped_is_told_so(processes: Processes, limits):
    one, _ = await processes(**limits)
    for demand in (wanted(), wanted(klass=Class.BATCH)):
        row = (await one.ask(demand))[demand.ticket_id]
        assert (row.answer, row.wait_reason, row.expected_ms) == ("queued", "stopped", None)
        row = (await one.found(demand))[demand.ticket_id]
        assert (row.answer, row.wait_reason, row.expected_ms) == ("queued", "stopped", None)


# ---------------------------------------------------------------- who may ask


async def test_a_replay_changes_nothing(processes: Processes):
    one, two = await processes(concurrency=1)
    held, waiting = wanted(), wanted()
    first = await one.ask(held, waiting)
    again = await one.ask(held, waiting)
    assert [again[d.ticket_id].answer for d in (held, waiting)] == ["granted", "queued"]
    assert again[held.ticket_id].granted_at == first[held.ticket_id].granted_at
    assert await two.answer(held) == "duplicate_debit"
    await one.settle(ended(first[held.ticket_id]))
    assert await one.answer(held) == "ended"


async def test_a_debit_has_one_live_ticket_and_each_attempt_once(processes: Processes):
    one, two = await processes(concurrency=3)
    row = await one.granted(wanted(debit_id="d"))
    assert await two.answer(wanted(debit_id="d", attempt=2)) == "duplicate_debit"
    await one.settle(uncertain(row))
    assert await two.answer(wanted(debit_id="d")) == "duplicate_debit"
    assert await two.answer(wanted(debit_id="d", attempt=2)) == "granted"
    assert await two.answer(wanted(debit_id="d", attempt=3)) == "duplicate_debit"


async def test_of_two_tickets_of_a_debit_that_come_together_the_first_is_judged_first(processes: Processes):
    one, _ = await processes(concurrency=3)
    first, second = wanted(debit_id="d", klass=Class.BATCH), wanted(debit_id="d")
    rows = await one.ask(first, second)
    assert [rows[d.ticket_id].answer for d in (first, second)] == ["granted", "duplicate_debit"]


async def test_a_passed_deadline_is_refused(processes: Processes):
    one, _ = await processes()
    assert await one.answer(wanted(caller_deadline_s=0.0)) == "deadline_exceeded"


async def test_a_lower_fence_is_refused_and_its_waiters_are_let_go(processes: Processes):
    one, two = await processes(concurrency=1)
    await one.granted()
    old = wanted(fence=Fence(scope_id="s", run_id="r", number=1))
    await one.ask(old)
    assert not await one.store.fenced(KEY, Fence(scope_id="s", run_id="r", number=1))
    assert await two.answer(wanted(fence=Fence(scope_id="s", run_id="r", number=2))) == "queued"
    assert (await one.found(old))[old.ticket_id].answer == "owner_fence"
    assert await one.answer(wanted(fence=Fence(scope_id="s", run_id="r", number=1))) == "owner_fence"
    assert await one.store.fenced(KEY, Fence(scope_id="s", run_id="r", number=1))
    assert not await one.store.fenced(uuid.UUID(int=2), Fence(scope_id="s", run_id="r", number=1))


async def test_a_tombstone_stops_a_late_acquire(processes: Processes):
    one, _ = await processes(concurrency=1)
    await one.granted()
    never, waiting = wanted(), wanted()
    await one.ask(waiting)
    await one.store.abandon(0, [never.ticket_id, waiting.ticket_id], tombstone=True)
    assert [await one.answer(demand) for demand in (never, waiting)] == ["ended", "ended"]


async def test_an_unknown_group_is_refused_definitely(processes: Processes):
    one, _ = await processes()
    # The controller knows it by this, and makes its groups known again.
    with pytest.raises(Rejected, match=r"^P0002$"):
        await one.ask(wanted(), group="nobody")


async def test_an_endpoint_that_moved_says_where(processes: Processes):
    one, _ = await processes(endpoints=("e",))
    other = {GROUP: GroupSettings(endpoints=("f",)), "other": GroupSettings(endpoints=("e",))}
    one.store._settings = msgspec.structs.replace(configured(revision=2), groups=other)  # type: ignore[attr-defined]
    assert await one.store.configure() == []
    demand = wanted(endpoint="e")
    row = (await one.ask(demand))[demand.ticket_id]
    assert (row.answer, row.group_id) == ("moved", "other")
    assert (await one.ask(demand, group="other"))[demand.ticket_id].answer == "granted"


async def regrouped(process: Process, revision: int, **groups: GroupSettings) -> None:
    settings = msgspec.structs.replace(configured(revision=revision), groups=groups)
    process.store._settings = settings  # type: ignore[attr-defined]
    assert await process.store.configure() == []


async def test_a_floor_that_was_reset_with_a_merged_group_is_not_there_again_after_a_split(processes: Processes):
    one, _ = await processes()
    await regrouped(one, 2, a=GroupSettings(endpoints=("a",)), b=GroupSettings(endpoints=("b",)))
    held = wanted(endpoint="a")
    await one.settle(failed((await one.ask(held, group="a"))[held.ticket_id], Verdict.RATE_LIMITED, retry_after_s=60.0))
    refused = wanted(endpoint="a")
    assert (await one.ask(refused, group="a"))[refused.ticket_id].answer == "cooldown"
    await regrouped(one, 3, b=GroupSettings(endpoints=("a", "b")))
    assert (await one.ask(refused, group="b"))[refused.ticket_id].answer == "cooldown"
    assert await one.store.reset("b")
    await regrouped(one, 4, a=GroupSettings(endpoints=("a",)), b=GroupSettings(endpoints=("b",)))
    assert (await one.ask(refused, group="a"))[refused.ticket_id].answer == "granted"


async def test_a_floor_stays_with_the_endpoints_that_stay(processes: Processes):
    one, _ = await processes()
    await regrouped(one, 2, a=GroupSettings(endpoints=("a", "b")))
    held = wanted(endpoint="a")
    await one.settle(failed((await one.ask(held, group="a"))[held.ticket_id], Verdict.RATE_LIMITED, retry_after_s=60.0))
    await regrouped(one, 3, a=GroupSettings(endpoints=("a",)), b=GroupSettings(endpoints=("b",)))
    for name in ("a", "b"):
        refused = wanted(endpoint=name)
        assert (await one.ask(refused, group=name))[refused.ticket_id].answer == "cooldown"


@pytest.mark.parametrize("judged", [False, True])
async def test_an_end_after_its_endpoint_moved_lets_the_queue_of_the_new_group_move(processes: Processes, judged: bool):
    one, _ = await processes()
    await regrouped(one, 2, a=GroupSettings(concurrency=1, endpoints=("a",)), b=GroupSettings(endpoints=("b",)))
    held = wanted(endpoint="a")
    row = (await one.ask(held, group="a"))[held.ticket_id]
    await one.settle(uncertain(row))
    await regrouped(one, 3, b=GroupSettings(concurrency=1, endpoints=("a", "b")))
    waiting = wanted(endpoint="b")
    assert (await one.ask(waiting, group="b"))[waiting.ticket_id].answer == "queued"
    [told] = await one.store.settle(0, [ended(row)], judged=judged)
    assert (told.applied, told.group_id, told.waiters) == (True, "b", True)


async def test_the_newest_limits_are_in_force_and_the_others_are_told(processes: Processes):
    one, two = await processes(concurrency=1)
    one.store._settings = configured(concurrency=2)  # type: ignore[attr-defined]
    assert await one.store.configure() == []
    assert await two.store.configure() == [GROUP]
    assert [await p.answer(wanted()) for p in (two, two)] == ["granted", "granted"]


# ---------------------------------------------------------------- endings


async def test_an_attempt_settles_once_and_unknown_is_corrected_once(processes: Processes):
    one, _ = await processes()
    row = await one.granted()
    assert await one.settle(uncertain(row)) == [True]
    assert await one.settle(uncertain(row)) == [False]
    assert await one.settle(ended(row)) == [True]
    assert await one.settle(ended(row)) == [False]


async def test_a_clean_settlement_settles_once_too(processes: Processes):
    one, _ = await processes()
    row = await one.granted()
    assert await one.settle(ended(row), judged=False) == [True]
    assert await one.settle(ended(row), judged=False) == [False]


async def test_one_settlement_twice_in_a_batch_counts_once(processes: Processes):
    one, _ = await processes()
    settlement = ended(await one.granted())
    assert await one.settle(settlement, settlement) == [True, False]


async def test_an_unknown_end_and_its_correction_may_come_together(processes: Processes):
    one, _ = await processes()
    row = await one.granted()
    assert await one.settle(uncertain(row), ended(row)) == [True, True]
    assert await one.settle(ended(row)) == [False]


async def test_a_settlement_tells_its_group_and_whether_somebody_waits(processes: Processes):
    one, two = await processes(concurrency=1)
    row = await one.granted()
    await two.ask(wanted())
    [settled] = await one.store.settle(0, [ended(row)], judged=False)
    assert (settled.group_id, settled.waiters) == (GROUP, True)


async def test_a_settlement_of_a_ticket_nobody_knows_is_not_applied(processes: Processes):
    one, _ = await processes()
    row = msgspec.structs.replace(await one.granted(), ticket_id=new_id())
    [settled] = await one.store.settle(0, [ended(row)], judged=False)
    assert (settled.applied, settled.group_id) == (False, None)


async def test_an_uncertain_slot_stays_until_its_window_has_passed(processes: Processes):
    one, _ = await processes(concurrency=1)
    row = await one.granted(wanted(execution_limit_s=0.1, isolation_s=1.0))
    await one.settle(uncertain(row))
    waiting = wanted()
    assert await one.answer(waiting) == "queued"
    [group] = await one.store.groups()
    assert (group["active"], group["quarantined"], group["queued"]) == (0, 1, 1)

    async def granted() -> bool:
        row = (await one.advance()).get(waiting.ticket_id)
        return row is not None and row.answer == "granted"

    await until(granted)


async def test_where_closing_confirms_the_end_the_slot_is_free_sooner(processes: Processes):
    one, _ = await processes(concurrency=1, queue=0)
    await one.settle(uncertain(await one.granted(), cancel_confirms_after_s=0.1))

    async def granted() -> bool:
        return await one.answer(wanted()) == "granted"

    await until(granted)


async def test_headroom_lets_one_pass_a_quarantined_slot(processes: Processes):
    one, _ = await processes(concurrency=1, quarantine_headroom=1)
    await one.settle(uncertain(await one.granted()))
    assert [await one.answer(wanted()) for _ in range(2)] == ["granted", "queued"]


async def test_abandoning_frees_slots_and_names_their_groups(processes: Processes):
    one, _ = await processes(concurrency=1)
    held, waiting = wanted(), wanted()
    await one.ask(held, waiting)
    assert await one.store.abandon(0, [waiting.ticket_id], tombstone=False) == []
    assert await one.store.abandon(0, [held.ticket_id], tombstone=False) == [GROUP]
    assert await one.answer(held) == "ended"
    assert await one.answer(wanted()) == "granted"


# ---------------------------------------------------------------- breaker, floors, allowances


async def opened(one: Process) -> None:
    for _ in range(2):
        await one.settle(failed(await one.granted()))


async def test_the_breaker_opens_and_one_probe_closes_it(processes: Processes):
    one, two = await processes(concurrency=3, failure_threshold=2, first_cooldown_s=0.2)
    await opened(one)
    refused = wanted()
    row = (await two.ask(refused))[refused.ticket_id]
    assert row.answer == "cooldown"
    assert row.wait_ms is not None
    assert 100 <= row.wait_ms <= 200
    first, second = wanted(waits_for_cooldown=True), wanted(waits_for_cooldown=True)
    await one.ask(first, second)

    async def probing() -> TicketRow | None:
        return (await one.advance()).get(first.ticket_id)

    probe = await until(probing)
    assert (probe.answer, probe.probe, probe.judged) == ("granted", True, True)
    assert await two.answer(wanted()) == "cooldown"
    assert (await one.found(second))[second.ticket_id].answer == "queued"
    await one.store.decide(GROUP, first.ticket_id, probe.generation)
    row = (await one.advance())[second.ticket_id]
    assert (row.answer, row.probe) == ("granted", False)


async def test_each_change_of_a_breaker_is_told_once_and_counted_in_its_group(processes: Processes):
    one, two = await processes(concurrency=3, failure_threshold=2, first_cooldown_s=0.1)
    assert await one.store.breaker_events() == []
    first, second = await one.granted(), await one.granted()
    [row] = await one.store.settle(0, [failed(first)], judged=True)
    assert not row.untold
    [row] = await one.store.settle(0, [failed(second)], judged=True)
    assert row.untold
    [told] = await two.store.breaker_events()
    assert (told.group, told.was, told.became, told.cause) == (GROUP, "closed", "open", "transient")
    assert told.generation == first.generation + 1  # type: ignore[operator]
    assert told.until is not None
    assert (told.until - told.at).total_seconds() == pytest.approx(0.1, abs=0.001)
    assert await one.store.breaker_events() == []
    [group] = await one.store.groups()
    assert (group["openings"], group["opened_for"]) == (1, "transient")
    assert datetime.fromisoformat(group["open_since"]) == told.at

    async def probing() -> tuple[TicketRow, bool] | None:
        demand = wanted()
        rows = await two.store.acquire(GROUP, two.owner, [(demand, 0.0)])
        row = next(row for row in rows if row.ticket_id == demand.ticket_id)
        return (row, any(row.answer == "breaker" for row in rows)) if row.answer == "granted" else None

    probe, hinted = await until(probing)
    assert hinted
    assert probe.generation is not None
    await two.store.decide(GROUP, probe.ticket_id, probe.generation)
    told_both = await asyncio.gather(one.store.breaker_events(), two.store.breaker_events())
    changes = sorted((event for told in told_both for event in told), key=lambda event: event.generation)
    assert [(c.was, c.became, c.cause) for c in changes] == [
        ("open", "half_open", "cooldown_over"),
        ("half_open", "closed", "first_content"),
    ]
    [group] = await one.store.groups()
    assert (group["openings"], group["opened_for"], group["open_since"]) == (1, "transient", None)
    # Closed, and reset once more: that is no change.
    assert await one.store.reset(GROUP)
    assert await one.store.breaker_events() == []
    [row] = await one.store.settle(0, [failed(await one.granted())], judged=True)
    assert not row.untold


async def test_a_failed_probe_opens_again(processes: Processes):
    one, _ = await processes(failure_threshold=2, first_cooldown_s=0.1)
    await opened(one)

    async def probing() -> TicketRow | None:
        demand = wanted()
        row = (await one.ask(demand))[demand.ticket_id]
        return row if row.answer == "granted" else None

    await one.settle(failed(await until(probing)))
    assert await one.answer(wanted()) == "cooldown"


async def test_a_replayed_failure_counts_once(processes: Processes):
    one, _ = await processes(failure_threshold=2)
    row = await one.granted()
    for _ in range(2):
        await one.settle(uncertain(row, verdict=Verdict.TRANSIENT))
    assert await one.answer(wanted()) == "granted"


async def test_an_operator_resets_a_group(processes: Processes):
    one, _ = await processes(failure_threshold=2)
    await opened(one)
    assert await one.store.reset(GROUP)
    assert await one.answer(wanted()) == "granted"
    assert not await one.store.reset("nobody")


async def test_a_rate_limit_gates_its_model_until_it_is_over(processes: Processes):
    one, two = await processes()
    await one.settle(failed(await one.granted(), Verdict.RATE_LIMITED, retry_after_s=0.3))
    refused = wanted()
    row = (await two.ask(refused))[refused.ticket_id]
    assert row.answer == "cooldown"
    assert row.wait_ms is not None
    assert row.wait_ms <= 300
    assert await two.answer(wanted(model="n")) == "granted"
    waiting = wanted(waits_for_cooldown=True)
    assert await two.answer(waiting) == "queued"

    async def granted() -> bool:
        row = (await two.advance()).get(waiting.ticket_id)
        return row is not None and row.answer == "granted"

    await until(granted)


async def test_a_rate_limit_beyond_all_patience_makes_the_credential_unavailable(processes: Processes):
    one, _ = await processes(settings={"longest_retry_after_s": 10.0})
    await one.settle(failed(await one.granted(), Verdict.RATE_LIMITED, retry_after_s=11.0, account_wide=True))
    assert await one.answer(wanted(model="n", waits_for_cooldown=True)) == "provider_unavailable"
    assert await one.answer(wanted(credential="d")) == "granted"


@pytest.mark.parametrize(
    ("verdict", "cause"),
    [
        (Verdict.RATE_LIMITED, "rate_limited"),
        (Verdict.CREDENTIAL_REJECTED, "credential_rejected"),
        (Verdict.QUOTA_EXHAUSTED, "quota_exhausted"),
    ],
)
async def test_a_floor_says_why_it_is_there_to_every_process(processes: Processes, verdict: Verdict, cause: str):
    one, two = await processes(concurrency=1)
    held = await one.granted()
    let_go = wanted()
    await one.ask(let_go)
    await one.settle(failed(held, verdict, retry_after_s=30.0))
    refused = wanted()
    for row in ((await two.ask(refused))[refused.ticket_id], (await one.found(let_go))[let_go.ticket_id]):
        assert row.answer == ("cooldown" if cause == "rate_limited" else "provider_unavailable")
        assert row.wait_reason == cause
        assert row.wait_ms is not None
        assert 25_000 < row.wait_ms <= 30_000
    [group] = await two.store.groups()
    [floor] = group["floors"]
    assert (floor["credential"], floor["model"], floor["cause"]) == ("c", "m", cause)
    assert 25 < floor["remaining_s"] <= 30


async def test_who_waits_under_a_floor_is_told_what_ends_last(processes: Processes):
    one, _ = await processes(failure_threshold=1, first_cooldown_s=5.0)
    rows = [await one.granted() for _ in range(2)]
    await one.settle(failed(rows[0], Verdict.RATE_LIMITED, retry_after_s=3.0))
    waiting = wanted(waits_for_cooldown=True, debit_id="waits")
    await one.ask(waiting)

    async def told() -> set[str | None]:
        [group] = await one.store.groups()
        [shown] = group["waiting"]
        found = (await one.found(waiting))[waiting.ticket_id].wait_reason
        return {found, (await one.store.waits(["waits"]))["waits"].reason, shown["reason"]}

    assert await told() == {"rate_limited"}
    await one.settle(failed(rows[1]))
    assert await told() == {"cooldown"}
    refused = wanted()
    assert (await one.ask(refused))[refused.ticket_id].wait_reason == "cooldown"


async def test_while_a_probe_is_out_a_refusal_tells_no_end(processes: Processes):
    one, two = await processes(failure_threshold=1, first_cooldown_s=0.05)
    await one.settle(failed(await one.granted()))
    await until(lambda: granted_by(one))
    refused = wanted()
    row = (await two.ask(refused))[refused.ticket_id]
    assert (row.answer, row.wait_reason, row.wait_ms) == ("cooldown", "cooldown", None)


async def granted_by(process: Process) -> bool:
    return await process.answer(wanted()) == "granted"


async def test_a_full_model_holds_up_nobody_else(processes: Processes):
    one, _ = await processes(models={"m": ModelLimits(concurrency=1)})
    await one.granted()
    assert await one.answer(wanted()) == "queued"
    assert await one.answer(wanted(model="n")) == "granted"


async def test_what_was_not_dispatched_gives_its_request_back(processes: Processes):
    one, _ = await processes(requests_per_minute=1)
    row = await one.granted()
    assert row.judged
    assert await one.answer(waiting := wanted()) == "queued"
    assert (await one.found(waiting))[waiting.ticket_id].wait_reason == "rate"
    await one.settle(ended(row, Ending.NOT_DISPATCHED, verdict=Verdict.NONE, state="zero"))
    assert (await one.advance())[waiting.ticket_id].answer == "granted"


async def test_tokens_are_estimated_and_then_corrected(processes: Processes):
    one, _ = await processes(tokens_per_minute=1000)
    assert await one.answer(wanted(tokens=1001)) == "too_large"
    row = await one.granted(wanted(tokens=900))
    waiting = wanted(tokens=800)
    assert await one.answer(waiting) == "queued"
    await one.settle(ended(row, used_tokens=100))
    assert (await one.advance())[waiting.ticket_id].answer == "granted"


async def admitted(process: Process, most: int = 9, **changes: Any) -> int:
    """How many more are granted, of at most so many. None is left waiting."""
    for count in range(most):
        demand = wanted(**changes)
        if await process.answer(demand) != "granted":
            await process.store.abandon(0, [demand.ticket_id], tombstone=False)
            return count
    return most


async def test_a_model_has_no_more_than_the_provider_says_is_left(processes: Processes):
    one, two = await processes(concurrency=20, models={"m": ModelLimits(requests_per_minute=6)})
    await one.settle(ended(await one.granted(), requests_left=2))
    assert await admitted(two) == 2
    assert await admitted(one, 1, model="n") == 1


async def test_what_the_provider_says_never_raises_what_is_left(processes: Processes):
    one, _ = await processes(concurrency=20, models={"m": ModelLimits(requests_per_minute=3, tokens_per_minute=100)})
    await one.settle(ended(await one.granted(wanted(tokens=60)), requests_left=5000, tokens_left=10**9))
    assert await admitted(one, tokens=60) == 0
    assert await admitted(one) == 2


async def test_tokens_that_the_provider_says_are_left_bound_the_model_after_the_correction(processes: Processes):
    one, _ = await processes(concurrency=20, models={"m": ModelLimits(tokens_per_minute=600)})
    row = await one.granted(wanted(tokens=500))
    await one.settle(ended(row, used_tokens=10, tokens_left=200))
    assert await admitted(one, tokens=100) == 2


async def test_only_what_is_of_the_account_lowers_the_group(processes: Processes):
    one, _ = await processes(concurrency=20, requests_per_minute=6)
    await one.settle(ended(await one.granted(), requests_left=0))
    row = await one.granted()
    await one.settle(ended(row, requests_left=0, account_wide=True))
    assert await admitted(one, model="n") == 0


async def test_what_was_granted_after_is_not_in_what_the_provider_says(processes: Processes):
    limits = ModelLimits(requests_per_minute=6, tokens_per_minute=600)
    one, two = await processes(concurrency=20, models={"m": limits})
    first = await one.granted(wanted(tokens=50))
    second = await two.granted(wanted(tokens=300))
    await two.granted(wanted(model="n", tokens=300))
    await one.settle(ended(first, requests_left=2, used_tokens=50, tokens_left=400))
    assert await admitted(one, 1, tokens=200) == 0, "100 of the 400 tokens are left"
    assert await admitted(one) == 1, "1 of the 2 requests is left"
    await two.settle(ended(second, requests_left=2))
    assert await admitted(two) == 0, "a later word does not give back what another lowered"


async def test_what_was_granted_before_is_in_what_the_provider_says(processes: Processes):
    one, _ = await processes(concurrency=20, models={"m": ModelLimits(requests_per_minute=6)})
    await one.granted()
    second = await one.granted()
    await one.settle(ended(second, requests_left=2))
    assert await admitted(one) == 2


async def test_more_in_flight_than_is_left_leaves_nothing_and_no_debt(processes: Processes):
    one, _ = await processes(concurrency=20, models={"m": ModelLimits(requests_per_minute=60)})
    first = await one.granted()
    for _ in range(9):
        await one.granted()
    await one.settle(ended(first, requests_left=0))
    waiting = wanted()
    assert await one.answer(waiting) == "queued"

    async def granted() -> bool:
        return waiting.ticket_id in (rows := await one.advance()) and rows[waiting.ticket_id].answer == "granted"

    # A debt of nine would last for ten seconds.
    await until(granted)


async def test_what_was_said_a_while_ago_has_filled_since(processes: Processes):
    one, _ = await processes(concurrency=20, models={"m": ModelLimits(requests_per_minute=6)})
    told_at = asyncio.get_running_loop().time() - 25
    await one.settle(ended(await one.granted(), requests_left=0, told_at=told_at))
    assert await admitted(one) == 2


async def test_who_is_not_judged_or_has_settled_before_lowers_nothing(processes: Processes):
    one, _ = await processes(concurrency=20, models={"m": ModelLimits(requests_per_minute=6)})
    row = await one.granted()
    await one.settle(ended(row, requests_left=0), judged=False)
    assert await one.settle(ended(row, requests_left=0)) == [False]
    assert await admitted(one) == 5


# ---------------------------------------------------------------- owners


async def test_a_lapsed_owner_gets_nothing_and_begins_again_as_another(processes: Processes):
    one, _ = await processes(settings={"lease_s": 0.2})

    async def lapsed() -> bool:
        return await one.answer(wanted()) == "lapsed"

    await until(lapsed)
    assert await one.store.renew(one.owner, one.process, first=False) is None
    one.owner = new_id()
    lives_s = await one.store.renew(one.owner, one.process, first=True)
    assert lives_s is not None
    assert 0.0 < lives_s <= 0.2


async def test_burying_ends_waiters_and_quarantines_slots(processes: Processes):
    one, two = await processes(concurrency=1)
    row = await one.granted()
    await one.ask(wanted())
    assert await two.store.dead([one.owner, two.owner]) == set()
    assert await two.store.bury([one.owner]) == [GROUP]
    assert await two.store.dead([one.owner, two.owner]) == {one.owner}
    await two.advance()
    [group] = await two.store.groups()
    assert (group["active"], group["quarantined"], group["queued"]) == (0, 1, 0)
    # It was not dead after all: the true end is a correction, and frees the slot.
    assert await one.settle(ended(row)) == [True]
    assert await two.answer(wanted()) == "granted"


async def test_the_sweep_names_groups_in_which_something_is_due(processes: Processes):
    one, two = await processes(concurrency=1)
    await one.granted(wanted(execution_limit_s=0.1))
    assert await until(two.store.overdue) == [GROUP]


async def test_who_listens_hears_of_its_owner(processes: Processes):
    one, two = await processes()
    heard: list[str] = []
    async with two.store.listen(heard.append):
        await one.store.notify([two.owner])
        await until(lambda: asyncio.sleep(0, bool(heard)))
    assert heard == [str(two.owner)]


# ---------------------------------------------------------------- limits of keys

OTHER_GROUP = "http://other.test:80"
TWO_GROUPS = {
    "groups": {GROUP: GroupSettings(concurrency=8), OTHER_GROUP: GroupSettings(concurrency=1)},
}


def paid(usd: str = "0.50", group: str = GROUP, **changes: Any) -> Demand:
    """Of a key with limits: it may cost so much."""
    demand = wanted(reserved_usd=Decimal(usd), group=group, **changes)
    return msgspec.structs.replace(demand, intent=f'{{"session_id":"s","upper_bound_usd":"{usd}"}}'.encode())


async def asked(process: Process, demand: Demand) -> TicketRow:
    return (await process.ask(demand, group=demand.group))[demand.ticket_id]


async def test_a_key_has_no_more_requests_at_once_than_it_may_in_all_groups_and_processes(processes: Processes):
    one, two = await processes(settings=TWO_GROUPS)
    await one.limit(KEY, KeyLimits(concurrency=3))
    first = paid("0")
    rows = [
        await asked(one, first),
        await asked(two, paid("0", OTHER_GROUP)),
        # It waits, and is in the gateway all the same.
        await asked(two, paid("0", OTHER_GROUP)),
        await asked(one, paid("0")),
    ]
    assert [row.answer for row in rows] == ["granted", "granted", "queued", "key_limit"]
    assert rows[-1].key_limit is not None
    assert (rows[-1].key_limit.name, rows[-1].key_limit.most, rows[-1].wait_ms) == ("concurrency", Decimal(3), None)
    assert await one.answer(wanted(key_id=new_id(), reserved_usd=Decimal(0))) == "granted"
    # Another attempt of a request whose first is in quarantine is the same request.
    await one.settle(uncertain(rows[0]))
    again = paid("0", debit_id=first.debit_id, attempt=2)
    row = await one.granted(again)
    assert await one.answer(paid("0")) == "key_limit"
    await two.settle(ended(row))
    assert await one.answer(paid("0")) == "key_limit", "what is in quarantine may still be at work"


async def test_where_all_of_a_key_is_in_quarantine_it_is_told_until_when(processes: Processes):
    one, _ = await processes()
    await one.limit(KEY, KeyLimits(concurrency=1))
    await one.settle(uncertain(await one.granted(paid("0"))))
    row = await asked(one, paid("0"))
    assert row.answer == "key_limit"
    assert row.wait_ms is not None
    assert 0 < row.wait_ms <= 35_000


async def test_a_budget_is_kept_for_what_attempts_may_cost_until_it_is_known_what_they_did(processes: Processes):
    one, two = await processes(settings=TWO_GROUPS)
    await one.limit(KEY, KeyLimits(budget_total_usd=Decimal("1.60"), budget_day_usd=Decimal(9)))
    first = await one.granted(paid())
    second = await asked(two, paid(group=OTHER_GROUP))
    waiting = paid(group=OTHER_GROUP)
    assert (await asked(two, waiting)).answer == "queued"
    row = await asked(one, paid())
    assert row.answer == "budget_reserved"
    limit = row.key_limit
    assert limit is not None
    assert (limit.name, limit.most, limit.spent, limit.unknown, limit.reserved, limit.wanted) == (
        "budget_total_usd", Decimal("1.60"), Decimal(0), Decimal(0), Decimal("1.50"), Decimal("0.50")
    )  # fmt: skip
    assert await one.answer(paid("0.10")) == "granted", "to the last cent"
    assert await one.answer(paid("0")) == "granted", "what costs nothing is no matter of money"
    # 0.25 was charged where 0.50 was reserved.
    await one.settle(ended(first))
    third = await one.granted(paid("0.25"))
    assert await one.answer(paid("0.01")) == "budget_reserved"
    # One that waits no longer reserves nothing.
    await two.store.abandon(0, [waiting.ticket_id], tombstone=False)
    assert await one.answer(paid("0.51")) == "budget_reserved"
    fourth = await one.granted(paid("0.50"))
    # Unknown: its bound stays, and is there once.
    await two.settle(uncertain(second))
    row = await asked(one, paid("0.01"))
    assert row.answer == "budget_reserved"
    assert row.key_limit is not None
    assert (row.key_limit.spent, row.key_limit.unknown, row.key_limit.reserved) == (
        Decimal("0.25"), Decimal("0.50"), Decimal("0.85")
    )  # fmt: skip
    row = await asked(one, paid("0.90"))
    assert (row.answer, row.wait_ms) == ("budget_exceeded", None)
    # What is corrected gives back its bound.
    assert await one.settle(failed(second, Verdict.NONE)) == [True]
    assert await one.answer(paid("0.50")) == "granted"
    # A settlement that comes again changes nothing.
    assert await one.settle(ended(third), ended(fourth)) == [True, True]
    assert await one.settle(ended(third), ended(fourth)) == [False, False]
    assert await one.answer(paid("0.25")) == "granted"
    assert await one.answer(paid("0.01")) == "budget_reserved"


async def test_what_a_dead_process_had_reserved_comes_back_but_for_what_it_had_sent(processes: Processes):
    one, two = await processes(settings=TWO_GROUPS)
    await one.limit(KEY, KeyLimits(budget_total_usd=Decimal(2)))
    assert (await asked(one, paid(group=OTHER_GROUP))).answer == "granted"
    answers = [(await asked(one, paid(group=OTHER_GROUP))).answer for _ in range(4)]
    assert answers == ["queued"] * 3 + ["budget_reserved"]
    await two.store.bury([one.owner])
    await two.ask(group=OTHER_GROUP)
    assert await two.answer(paid("1.50")) == "granted"
    row = await asked(two, paid("0.01"))
    assert row.key_limit is not None
    assert (row.key_limit.unknown, row.key_limit.reserved) == (Decimal("0.50"), Decimal("1.50"))


async def test_elements_of_one_batch_share_what_their_key_has_left(processes: Processes):
    one, _ = await processes(concurrency=2)
    await one.limit(KEY, KeyLimits(budget_total_usd=Decimal("1.50")))
    other = new_id()
    await one.limit(other, KeyLimits(concurrency=1))
    demands = [paid(), paid("1.01"), paid("1.00"), paid("0.50"), *(paid("0", key_id=other) for _ in range(2)), wanted()]
    rows = await one.ask(*demands)
    assert [rows[demand.ticket_id].answer for demand in demands] == [
        "granted", "budget_reserved", "granted", "budget_reserved", "queued", "key_limit", "queued"
    ]  # fmt: skip
    # Again, as after an answer that was lost: nothing is taken twice.
    again = await one.ask(*demands)
    assert [again[demand.ticket_id].answer for demand in demands] == [rows[d.ticket_id].answer for d in demands]
    assert await one.answer(paid("0.50")) == "budget_reserved"


def of_session(usd: str | None = "0.50", group: str = GROUP, session: str = "s", **changes: Any) -> Demand:
    """Of a session of a key that is taken for one without limits. `usd` None: nobody knows what it may cost."""
    most = None if usd is None else Decimal(usd)
    demand = wanted(session_id=session, most_usd=most, group=group, **changes)
    bound = "" if usd is None else f',"upper_bound_usd":"{usd}"'
    return msgspec.structs.replace(demand, intent=f'{{"session_id":"{session}"{bound}}}'.encode())


async def test_a_budget_of_a_session_is_kept_for_what_its_attempts_may_cost_in_all_groups(processes: Processes):
    one, two = await processes(settings=TWO_GROUPS)
    first = of_session()
    row_of_first = await one.granted(first)
    # What was at work before anything was said counts, too.
    assert await one.budget("1.60") is None
    second = await asked(two, of_session(group=OTHER_GROUP))
    waiting = of_session(group=OTHER_GROUP)
    assert (await asked(two, waiting)).answer == "queued"
    row = await asked(one, of_session())
    limit = row.key_limit
    assert limit is not None
    assert (row.answer, row.wait_ms) == ("budget_reserved", None)
    assert (limit.name, limit.most, limit.spent, limit.unknown, limit.reserved, limit.wanted) == (
        "budget_session_usd", Decimal("1.60"), Decimal(0), Decimal(0), Decimal("1.50"), Decimal("0.50")
    )  # fmt: skip
    # Other sessions have nothing to do with it, nor has the session of that name of another key, nor what is in none.
    assert await one.answer(of_session(session="t")) == "granted"
    assert await two.ask(of_session(key_id=new_id(), group=OTHER_GROUP), group=OTHER_GROUP)
    assert await one.answer(of_session("0")) == "granted", "what costs nothing is no matter of money"
    # 0.25 was charged where 0.50 was reserved; one that waits no longer reserves nothing.
    await one.settle(ended(row_of_first))
    await two.store.abandon(0, [waiting.ticket_id], tombstone=False)
    # Unknown: its bound stays, and is there once.
    await two.settle(uncertain(second))
    row = await asked(one, of_session("0.90"))
    assert (row.answer, row.wait_ms) == ("budget_exceeded", None)
    assert row.key_limit is not None
    assert (row.key_limit.spent, row.key_limit.unknown, row.key_limit.reserved) == (
        Decimal("0.25"), Decimal("0.50"), Decimal(0)
    )  # fmt: skip
    third = await one.granted(of_session("0.85"))
    assert await one.answer(of_session("0.01")) == "budget_reserved"
    # What is corrected gives back its bound, and what ends what it did not cost.
    assert await one.settle(failed(second, Verdict.NONE), ended(third)) == [True, True]
    assert await one.answer(of_session("1.11")) == "budget_exceeded"
    assert await one.answer(of_session("1.10")) in {"granted", "queued"}
    # What was said is taken back.
    assert await one.budget(None) is None
    assert await one.answer(of_session("9")) in {"granted", "queued"}


async def test_elements_of_one_batch_share_what_their_session_has_left(processes: Processes):
    one, _ = await processes(concurrency=2)
    await one.limit(KEY, KeyLimits(budget_session_usd=Decimal("1.00"), concurrency=4))
    own = new_id()
    await one.budget("0.50", key_id=own)

    def limited(usd: str, session: str = "s") -> Demand:
        return msgspec.structs.replace(of_session(usd, session=session), reserved_usd=Decimal(usd))

    demands = [
        limited("0.50"), limited("0.60"), limited("0.50"), limited("0.10"), limited("1.01", "t"), limited("1.00", "t"),
        of_session("0.30", key_id=own), of_session("0.30", key_id=own), of_session("0.20", key_id=own),
        of_session("0.51", key_id=own), of_session("0.51", key_id=own, session="t"),
    ]  # fmt: skip
    expected = [
        "granted", "budget_reserved", "granted", "budget_reserved", "budget_exceeded", "queued",
        "queued", "budget_reserved", "queued", "budget_exceeded", "queued",
    ]  # fmt: skip
    rows = await one.ask(*demands)
    assert [rows[demand.ticket_id].answer for demand in demands] == expected
    # What its session refuses is none of the requests that the key has at once: there is room for a fourth.
    assert await one.answer(limited("0.50", "u")) == "queued"
    assert await one.answer(limited("0.50", "u")) == "key_limit"


async def test_a_session_with_a_budget_is_served_only_what_has_a_bound(processes: Processes):
    one, _ = await processes()
    assert await one.answer(of_session(None)) == "granted"
    await one.budget("5")
    row = await asked(one, of_session(None))
    assert row.key_limit is not None
    assert (row.answer, row.key_limit.name, row.key_limit.most) == (
        "cost_not_bounded",
        "budget_session_usd",
        Decimal(5),
    )
    assert await one.answer(of_session(None, session="t")) == "granted"
    await one.limit(KEY, KeyLimits(budget_session_usd=Decimal(1)))
    assert await one.answer(paid("0", session_id="t")) == "cost_not_bounded"
    assert await one.answer(paid("0")) == "granted", "it is in no session"


async def test_a_key_can_only_lower_what_its_session_may_cost_and_an_administrator_sets_it(processes: Processes):
    one, _ = await processes()

    async def may_cost() -> Decimal | None:
        """As an element that costs too much is told."""
        demand = msgspec.structs.replace(of_session("1000"), reserved_usd=Decimal(1000))
        row = await asked(one, demand)
        if row.answer == "granted":
            await one.settle(failed(row, Verdict.NONE))
        return None if row.key_limit is None else row.key_limit.most

    # Without a limit of the key it says what it likes.
    assert await one.budget("7") is None
    assert await one.budget("8") is None
    assert await may_cost() == 8
    assert await one.budget(None) is None
    assert await may_cost() is None
    await one.limit(KEY, KeyLimits(budget_session_usd=Decimal(5)))
    assert await may_cost() == 5
    assert await one.budget("5.01") == 5
    assert await may_cost() == 5
    assert await one.budget("2") is None
    assert await one.budget("3") is None
    assert await may_cost() == 3
    # An administrator sets it above the key's limit; what the key has said stays below.
    assert await one.budget("9", own=False) is None
    assert await may_cost() == 3
    assert await one.budget(None) is None
    assert await may_cost() == 9
    assert await one.budget("9.01") == 9
    # One that has such a limit itself can only lower it.
    assert await one.budget("9.01", own=False, raises=False) == 9
    assert await one.budget(None, own=False, raises=False) == 9
    assert await one.budget("4", own=False, raises=False) is None
    assert await may_cost() == 4
    assert await one.budget(None, own=False) is None
    assert await may_cost() == 5
    # A limit that the key loses takes no budget away that was said of a session.
    await one.budget("1", own=False)
    await one.limit(KEY, KeyLimits())
    assert await may_cost() == 1


async def test_requests_of_a_minute_are_counted_once_each_and_what_is_refused_takes_none(processes: Processes):
    one, two = await processes(concurrency=20)
    await one.limit(KEY, KeyLimits(requests_per_minute=1))
    first = paid("0")
    row = await one.granted(first)
    refused = await asked(one, paid("0"))
    assert refused.answer == "key_limit"
    assert refused.key_limit is not None
    assert (refused.key_limit.name, refused.key_limit.most) == ("requests_per_minute", Decimal(1))
    assert refused.wait_ms is not None
    assert 0 < refused.wait_ms <= 60_000
    for _ in range(20):
        assert await one.answer(paid("0")) == "key_limit"
    later = await asked(two, paid("0"))
    assert later.wait_ms is not None
    assert later.wait_ms <= refused.wait_ms
    # A failover is the same request.
    await one.settle(failed(row, Verdict.NONE))
    assert await one.answer(paid("0", debit_id=first.debit_id, attempt=2)) == "granted"
    # More from here on, at the level it had; without a limit, as many as there are.
    await one.limit(KEY, KeyLimits(requests_per_minute=6000))
    await until(lambda: _granted(one, paid("0")))
    await one.limit(KEY, KeyLimits())
    assert [await two.answer(paid("0")) for _ in range(4)] == ["granted"] * 4


async def _granted(process: Process, demand: Demand) -> bool:
    return await process.answer(demand) == "granted"


async def test_tokens_of_a_minute_are_what_attempts_at_work_may_use_and_others_have_used(processes: Processes):
    one, _ = await processes(concurrency=20)
    await one.limit(KEY, KeyLimits(tokens_per_minute=1000))
    too_large = await asked(one, paid("0", tokens=1001))
    assert too_large.answer == "too_large"
    assert too_large.key_limit is not None
    assert too_large.key_limit.name == "tokens_per_minute"
    row = await one.granted(paid("0", tokens=900))
    refused = await asked(one, paid("0", tokens=700))
    assert refused.answer == "key_limit"
    assert refused.wait_ms is not None
    assert 0 < refused.wait_ms <= 36_000
    # It used 40 of its 900.
    record = b'{"usd":"0.25","status":"success","ended":"complete","input_total":30,"output_total":10}'
    await one.settle(ended(row, record=record))
    assert await one.answer(paid("0", tokens=900)) == "granted"
    assert await one.answer(paid("0", tokens=900)) == "key_limit"
