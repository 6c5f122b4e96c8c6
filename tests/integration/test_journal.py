"""Settlements that the database does not take, over a real database: kept, and replayed once by whoever lives."""

from __future__ import annotations

import asyncio
import fcntl
import json
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from decimal import Decimal
from pathlib import Path
from typing import Any

import asyncpg
import msgspec
import pytest
import structlog
from typing_extensions import override

from admission.contract import SettledRow, StoreUnavailable
from admission.controller import Controller
from admission.ids import new_id
from admission.lease import Class, Demand, Ending, Lease, Refusal, Settled, Settlement, Verdict
from admission.settings import AdmissionSettings, GroupSettings
from admission.store import Store
from gateway import database
from gateway.errors import AdmissionRefused, AllRoutesFailed, Code, UpstreamRejected
from gateway.pipeline import Pipeline
from gateway.settling import Replay, Settling, Unacknowledged
from metering.journal import PARKED, Journal
from metering.ledger import Ledger
from tests.fakes.disk import FakeDisk
from tests.fakes.simulated import simulated
from tests.fakes.whole_line import call, read, whole_line
from tests.unit.metering.test_journal import die, until

GROUP = "http://provider.test"
KEY = uuid.UUID(int=7)
USD = Decimal("0.25")


class ForgetfulStore(Store):
    """A store whose settlements can be lost on the way there, or on the way back."""

    away = False
    answer_lost = False

    @override
    async def settle(self, shard: int, settlements: Sequence[Settlement], *, judged: bool) -> list[SettledRow]:
        if self.away:
            raise StoreUnavailable
        rows = await super().settle(shard, settlements, judged=judged)
        if self.answer_lost:
            raise StoreUnavailable
        return rows


def kept(journal: Journal) -> int:
    """How many records are on the disk."""
    return sum(entry.written.done() for entry in journal._entries.values())


def is_free(path: Path) -> bool:
    """Nobody has its lock."""
    with path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


class Process:
    """What one gateway process has of admission and journal."""

    store: ForgetfulStore
    controller: Controller
    journal: Journal
    settling: Settling
    replay: Replay

    def __init__(self, directory: Path) -> None:
        self.disk = FakeDisk()
        self.directory = directory

    async def die(self) -> None:
        """As after kill -9: it says nothing any more, to the journal or to the store."""
        self.store.away = True
        files = {path for path in self.directory.glob("*.journal") if path.stat().st_size}
        await die(self.journal)
        # A child that is just being started may hold the lock for a moment more.
        await until(lambda: sum(map(is_free, files)) >= 1)

    async def lease(self, **changes) -> Lease:
        answer = await self.controller.admit(
            msgspec.structs.replace(
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
                    queue_timeout_s=5,
                    intent=b'{"session_id":"s","upper_bound_usd":"2"}',
                ),
                **changes,
            )
        )
        assert isinstance(answer, Lease), answer
        return answer


@asynccontextmanager
async def process(url: str, directory: Path, *, patience_s: float = 0.2, **limits) -> AsyncIterator[Process]:
    given = AdmissionSettings(groups={GROUP: GroupSettings(concurrency=50, **limits)}, statement_s=1.0)
    made = Process(directory)
    async with AsyncExitStack() as stack:
        # A statement that a busy machine delays is not lost. The controller's own time is how long an end may take.
        made.store = ForgetfulStore(url, msgspec.structs.replace(given, statement_s=20.0))
        stack.push_async_callback(made.store.close)
        await made.store.configure()
        made.journal = await stack.enter_async_context(Journal(directory, disk=made.disk).opened())
        made.controller = await stack.enter_async_context(Controller(made.store, given).opened())
        made.settling = await stack.enter_async_context(Settling(made.controller, patience_s, made.journal).opened())
        pool = await stack.enter_async_context(database.open_pool(url, name="test", size=1))
        made.replay = Replay(made.journal, made.controller, Ledger(pool, zone="UTC").states)
        yield made


def charge(lease: Lease, **changes) -> Settlement:
    return msgspec.structs.replace(
        Settlement(
            lease=lease,
            ending=Ending.CONFIRMED,
            verdict=Verdict.ANSWERED,
            state="charged",
            record=b'{"usd":"0.25","status":"success","ended":"complete","input_total":3,"output_total":4}',
        ),
        **changes,
    )


async def rows(url: str, statement: str, *arguments) -> list[asyncpg.Record]:
    connection = await asyncpg.connect(url)
    try:
        return await connection.fetch(statement, *arguments)
    finally:
        await connection.close()


async def charged(url: str) -> list[Decimal]:
    """What each counter says was charged: the total, and the session's."""
    found = await rows(
        url, "select sum(charged_usd) as usd from control.counter where kind in ('total', 'session') group by kind"
    )
    return [row["usd"] for row in found]


async def states(url: str) -> list[str]:
    return [
        row["state"]
        for row in await rows(
            url,
            "select state, granted_at from control.attempt union all select 'open', t.granted_at from control.ticket t"
            " where t.state in ('active', 'quarantined')"
            " and not exists (select from control.attempt a where a.ticket_id = t.ticket_id) order by granted_at",
        )
    ]


async def committed(url: str, *expected: str) -> None:
    """Until another connection sees the attempts in these states."""
    async with asyncio.timeout(20):
        while await states(url) != list(expected):  # noqa: ASYNC110  the server tells nobody
            await asyncio.sleep(0.01)


async def test_what_the_store_does_not_take_is_kept_and_settled_when_it_is_back(database_url, tmp_path):
    async with process(database_url, tmp_path) as one:
        lease = await one.lease()
        one.store.away = True
        assert await one.settling.settle(charge(lease)) is Unacknowledged.PENDING
        assert one.journal.outstanding == 1
        assert await states(database_url) == ["open"]
        one.store.away = False
        await until(lambda: not one.journal.outstanding)
        assert await states(database_url) == ["charged"]
        assert await charged(database_url) == [USD, USD]
        assert one.disk.syncs > 0
    assert list(tmp_path.iterdir()) == []


async def test_a_settlement_that_is_taken_in_time_never_touches_the_disk(database_url, tmp_path):
    async with process(database_url, tmp_path, patience_s=30) as one:
        syncs = one.disk.syncs
        for _ in range(5):
            settled = await one.settling.settle(charge(await one.lease()))
            assert isinstance(settled, Settled)
            assert settled.applied
        one.settling.settle_unheard(charge(await one.lease()))
        await until(lambda: not one.settling.outstanding)
        assert one.disk.syncs == syncs


@pytest.mark.parametrize("buried", [False, True], ids=["found open", "found unknown"])
async def test_what_a_killed_process_left_is_charged_once(database_url, tmp_path, buried):
    async with process(database_url, tmp_path) as dead, process(database_url, tmp_path) as alive:
        leases = [await dead.lease() for _ in range(10)]
        dead.store.away = True
        kept = await asyncio.gather(*(dead.settling.settle(charge(lease)) for lease in leases))
        assert kept == [Unacknowledged.PENDING] * 10
        await alive.replay.once()  # it lives
        assert await states(database_url) == ["open"] * 10
        await dead.die()
        if buried:
            await alive.controller.bury(dead.controller.incarnations)
            assert await states(database_url) == ["unknown"] * 10
        for _ in range(2):
            with structlog.testing.capture_logs() as events:
                await alive.replay.once()
            assert await states(database_url) == ["charged"] * 10
            assert await charged(database_url) == [10 * USD] * 2
        assert events == []
        [sums] = await rows(
            database_url,
            "select sum(attempts) as attempts, sum(unknown_attempts) as unknown,"
            " sum(unknown_upper_bound_usd) as bound, sum(input_tokens) as tokens"
            " from control.counter where kind = 'total'",
        )
        assert dict(sums) == {"attempts": 10, "unknown": 0, "bound": 0, "tokens": 30}
        assert await rows(database_url, "select from control.ticket") == []
        lines = await rows(database_url, "select day, correction from control.invocation where state = 'charged'")
        assert {row["day"] for row in lines} == {leases[0].day}
        assert {row["correction"] for row in lines} == {int(buried)}


async def test_a_replay_of_what_had_been_settled_changes_nothing_and_is_not_parked(database_url, tmp_path):
    async with process(database_url, tmp_path) as dead, process(database_url, tmp_path) as alive:
        lease = await dead.lease()
        dead.store.answer_lost = True
        assert await dead.settling.settle(charge(lease)) is Unacknowledged.PENDING
        # It has been waited for no longer than the patience; its commit may come later, and after a replay.
        await committed(database_url, "charged")
        await dead.die()
        with structlog.testing.capture_logs() as events:
            await alive.replay.once()
        [told] = events
        assert (told["event"], told["replayed"], told["repeated"], told["parked"]) == (
            "gateway.journal_replayed",
            0,
            1,
            0,
        )
        assert await charged(database_url) == [USD, USD]
        assert not (tmp_path / PARKED).exists()


async def test_a_replay_that_is_refused_is_parked_and_told_and_blocks_nothing(database_url, tmp_path):
    async with process(database_url, tmp_path) as dead, process(database_url, tmp_path) as alive:
        leases = [await dead.lease() for _ in range(3)]
        stranger = msgspec.structs.replace(leases[0], ticket_id=new_id())
        dead.store.away = True
        for lease in (stranger, *leases):
            dead.settling.settle_unheard(charge(lease))
        dead.journal.append(b"no settlement at all")
        await until(lambda: kept(dead.journal) == 5)
        await dead.die()
        assert (await alive.controller.settle(charge(leases[1], state="zero", record=b'{"status":"error"}'))).applied
        with structlog.testing.capture_logs() as events:
            await alive.replay.once()
        told = {(e["ticket"], e["reason"], e["recorded"]) for e in events if e["event"] == "gateway.journal_parked"}
        assert told == {
            (str(stranger.ticket_id), "absent", None),
            (str(leases[1].ticket_id), "settled_otherwise", "zero"),
            (None, "unreadable", None),
        }
        assert (events[-1]["replayed"], events[-1]["parked"], events[-1]["left"]) == (2, 3, 0)
        assert await states(database_url) == ["charged", "zero", "charged"]
        assert await charged(database_url) == [2 * USD] * 2
        lines = [json.loads(line) for line in (tmp_path / PARKED).read_bytes().splitlines()]
        parked = {line["reason"]: line["settlement"] for line in lines}
        assert parked["settled_otherwise"]["ticket_id"] == str(leases[1].ticket_id)
        assert parked["settled_otherwise"]["record"]["usd"] == "0.25"
        with structlog.testing.capture_logs() as events:
            await alive.replay.once()
        assert events == []


async def test_what_cannot_be_parked_stays_in_the_journal(database_url, tmp_path):
    async with process(database_url, tmp_path) as dead, process(database_url, tmp_path) as alive:
        lease = await dead.lease()
        dead.store.away = True
        dead.settling.settle_unheard(charge(lease))
        dead.journal.append(b"no settlement at all")
        await until(lambda: kept(dead.journal) == 2)
        await dead.die()
        alive.disk.full = True
        await alive.replay.once()
        assert await states(database_url) == ["charged"]
        assert not (tmp_path / PARKED).read_bytes()
        alive.disk.full = False
        await alive.replay.once()
        assert len((tmp_path / PARKED).read_bytes().splitlines()) == 1


async def test_a_replay_says_nothing_to_the_breaker(database_url, tmp_path):
    async with (
        process(database_url, tmp_path, failure_threshold=1) as dead,
        process(database_url, tmp_path, failure_threshold=1) as alive,
    ):
        leases = [await dead.lease() for _ in range(2)]
        dead.store.away = True
        for lease, verdict in zip(leases, (Verdict.TRANSIENT, Verdict.RATE_LIMITED), strict=True):
            dead.settling.settle_unheard(
                charge(lease, verdict=verdict, state="zero", record=b'{"status":"error"}', retry_after_s=60)
            )
        await until(lambda: kept(dead.journal) == 2)
        await dead.die()
        await alive.replay.once()
        assert await states(database_url) == ["zero", "zero"]
        assert isinstance(await alive.lease(), Lease)


async def test_an_uncertain_end_stays_in_quarantine_after_its_replay(database_url, tmp_path):
    async with process(database_url, tmp_path) as dead, process(database_url, tmp_path) as alive:
        lease = await dead.lease()
        dead.store.away = True
        dead.settling.settle_unheard(
            charge(
                lease,
                ending=Ending.UNCERTAIN,
                state="unknown",
                record=b'{"status":"cancelled","ended":"cancelled","upper_bound_usd":"1"}',
            )
        )
        await until(lambda: kept(dead.journal) == 1)
        await dead.die()
        await alive.replay.once()
        assert await states(database_url) == ["unknown"]
        assert [row["state"] for row in await rows(database_url, "select state from control.ticket")] == ["quarantined"]


async def test_a_caller_who_goes_away_meanwhile_does_not_take_the_settlement_along(database_url, tmp_path):
    async with process(database_url, tmp_path) as one:
        one.store.away = True
        waiting = asyncio.create_task(one.settling.settle(charge(await one.lease())))
        await asyncio.sleep(0)
        waiting.cancel()
        await until(lambda: one.journal.outstanding == 1)
        one.store.away = False
        await until(lambda: not one.journal.outstanding)
        assert await states(database_url) == ["charged"]


async def test_once_the_store_is_away_what_ends_is_kept_at_once(database_url, tmp_path):
    async with process(database_url, tmp_path) as one:
        leases = [await one.lease() for _ in range(2)]
        one.store.away = True
        assert await one.settling.settle(charge(leases[0])) is Unacknowledged.PENDING
        one.settling.settle_unheard(charge(leases[1]))
        assert one.journal.outstanding == 2
        one.store.away = False
        await until(lambda: not one.journal.outstanding)
        one.settling._patience_s = 30.0
        assert isinstance(await one.settling.settle(charge(await one.lease())), Settled)
        assert one.settling._overdue == set()


async def test_each_of_several_that_end_one_after_the_other_is_late_in_its_time(database_url, tmp_path):
    async with process(database_url, tmp_path) as one:
        leases = [await one.lease() for _ in range(2)]
        one.store.away = True
        ending = []
        for lease in leases:
            ending.append(asyncio.create_task(one.settling.settle(charge(lease))))
            # Less than the patience: the timer that is set for the first one rings too early for the other.
            await asyncio.sleep(0.01)
        async with asyncio.timeout(20):
            assert await asyncio.gather(*ending) == [Unacknowledged.PENDING] * 2
        one.store.away = False
        await until(lambda: not one.journal.outstanding)
        assert await states(database_url) == ["charged"] * 2


async def test_a_process_that_ends_while_the_store_is_away_leaves_everything_on_the_disk(database_url, tmp_path):
    # It ends before any of them is overdue.
    async with process(database_url, tmp_path, patience_s=30) as one:
        leases = [await one.lease() for _ in range(3)]
        one.store.away = True
        for lease in leases:
            one.settling.settle_unheard(charge(lease))
    assert [path.suffix for path in tmp_path.iterdir()] == [".journal"]
    async with process(database_url, tmp_path) as two:
        await two.replay.once()
        assert await states(database_url) == ["charged"] * 3
        assert await charged(database_url) == [3 * USD] * 2


async def test_a_settlement_that_neither_takes_is_unknown(database_url, tmp_path):
    async with process(database_url, tmp_path) as one:
        lease = await one.lease()
        one.store.away = one.disk.sync_fails = True
        assert await one.settling.settle(charge(lease)) is Unacknowledged.UNKNOWN
        assert one.settling.fault == "Input/output error"
        one.store.away = one.disk.sync_fails = False
        await until(lambda: one.settling.fault is None)
        await until(lambda: not one.journal.outstanding)
        assert await states(database_url) == ["charged"]


@asynccontextmanager
async def line_with_journal(database_url, tmp_path):
    """The whole line with a journal on a disk that can fail, at a simulated provider."""
    async with (
        simulated() as provider,
        whole_line(
            database_url,
            tmp_path,
            f"""
            [providers.p]
            protocol = "chat_completions"
            base_url = "{provider.url}"
            [models.m]
            providers = [{{ provider = "p", model = "sim-fast" }}]
            price = {{ input = "2.50", output = "10.00" }}
            """,
        ) as line,
    ):
        disk = FakeDisk()
        async with (
            Journal(tmp_path / "journal", disk=disk).opened() as journal,
            Settling(line.controller, 0.2, journal).opened() as settling,
        ):
            plain = line.pipeline
            line.pipeline = Pipeline(
                router=plain._router,
                controller=line.controller,
                adapter=plain._adapter,
                billing=plain._billing,
                usable=plain._usable,
                settings=plain._settings,
                standing=plain._standing,
                settling=settling,
            )
            yield line, provider, disk, settling


def losing_settlements(controller: Any) -> asyncio.Event:
    """While it is set, no settlement reaches the store."""
    store, away = controller._store, asyncio.Event()
    settle = store.settle

    async def lost(*arguments, **named) -> list[SettledRow]:
        if away.is_set():
            raise StoreUnavailable
        rows: list[SettledRow] = await settle(*arguments, **named)
        return rows

    store.settle = lost
    return away


async def test_a_journal_that_cannot_be_written_stops_admission_until_it_can(database_url, tmp_path):
    async with line_with_journal(database_url, tmp_path) as (line, provider, disk, settling):
        away = losing_settlements(line.controller)
        away.set()
        disk.sync_fails = True
        async with line.pipeline.stream(call("m")) as items:
            text, ended = await read(items)
        assert text
        assert ended is not None
        assert (ended.outcome.settlement, ended.outcome.counters, ended.outcome.cost.state) == (
            "unknown",
            None,
            "charged",
        )
        with pytest.raises(AdmissionRefused, match=r"journal.*Input/output error.*nothing was sent") as refused:
            await line.pipeline.complete(call("m"))
        assert refused.value.code is Code.CONTROL_STORE_UNAVAILABLE
        assert refused.value.retry_after_s == 1.0
        assert (await provider.ledger())["dispatches"] == 1
        disk.sync_fails = False
        await until(lambda: settling.fault is None)
        # The store is still away; the journal is enough to go on.
        completion = await line.pipeline.complete(call("m"))
        assert (completion.outcome.settlement, completion.outcome.counters) == ("pending", None)
        away.clear()
        await until(lambda: not settling.outstanding)
        assert [row["state"] for row in await line.invocations()] == ["charged", "charged"]
        await line.audit()
        assert await line.slots() == []


@pytest.mark.parametrize(("status", "error"), [(400, UpstreamRejected), (503, AllRoutesFailed)])
async def test_an_error_says_that_its_settlement_is_pending(database_url, tmp_path, status, error):
    async with line_with_journal(database_url, tmp_path) as (line, provider, *_, settling):
        away = losing_settlements(line.controller)
        away.set()
        await provider.set_faults(status=status)
        with pytest.raises(error) as raised:
            await line.pipeline.complete(call("m"))
        assert raised.value.outcome is not None
        assert raised.value.outcome.settlement == "pending"
        away.clear()
        await until(lambda: not settling.outstanding)
        assert [row["state"] for row in await line.invocations()] == ["zero"]


async def test_a_request_that_waited_while_the_journal_failed_is_not_sent(database_url, tmp_path):
    async with line_with_journal(database_url, tmp_path) as (line, provider, disk, settling):
        admit = line.controller.admit

        async def slow(*arguments) -> Lease | Refusal:
            answer: Lease | Refusal = await admit(*arguments)
            disk.sync_fails = True
            settling._journal.append(b"to find out")
            await until(lambda: settling.fault is not None)
            return answer

        line.controller.admit = slow
        with pytest.raises(AdmissionRefused, match="journal"):
            await line.pipeline.complete(call("m"))
        assert (await provider.ledger())["dispatches"] == 0
        await line.settled()
        [row] = await line.invocations()
        assert (row["state"], row["status"]) == ("zero", "not_dispatched")
        disk.sync_fails = False
