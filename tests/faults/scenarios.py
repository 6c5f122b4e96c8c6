"""
What goes wrong, one function each. A scenario does its worst to a `World` under load and returns when it is over.

The order of what it does comes from the seed. `Scenario.seconds` is how long the load runs; the tests of `make test`
run a sample of them, `python -m tests.faults` all.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import signal
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final, Literal

import asyncpg

from admission.contract import StoreUnavailable
from admission.ids import new_id
from admission.store import Store
from tests.conformance.test_admission_stores import GROUP, Process, configured, uncertain, wanted
from tests.fakes.postgres_proxy import CUT, Action, Rule, postgres_proxy
from tests.faults import traffic
from tests.faults.audit import Heard, Kind, Violation
from tests.faults.pooler import SESSIONS
from tests.faults.server import Clock, Server, promoted
from tests.faults.world import (
    CALL_S,
    EXECUTION_S,
    ISOLATION_S,
    LEASE_S,
    LIMIT,
    MODELS,
    QUEUE_S,
    QUICK_ANSWERS,
    RETRY_S,
    STATEMENT_S,
    USUAL,
    Gateway,
    Report,
    Setup,
    Violated,
    World,
    asked,
    replay,
    world,
)

GATEWAY_KILLED: Final = "gateway killed (kill -9)"
GATEWAY_STOPPED: Final = "gateway stopped past its lease, continued"
POSTGRES_KILLED: Final = "PostgreSQL killed with its backends"
POSTMASTER_KILLED: Final = "postmaster killed"
POSTGRES_IMMEDIATE: Final = "PostgreSQL stopped immediately"
LISTENER_KILLED: Final = "LISTEN connection killed"
SLOTS_TAKEN: Final = "connection slots exhausted"
HOST_SKEWED: Final = "gateway's clock an hour off"
CLOCK_FORWARD: Final = "database clock +1 h"
CLOCK_BACK: Final = "database clock -2 h"
CLOCK_TWICE: Final = "database clock stepped twice in a row"
HOLDER_STOPPED: Final = "holder of the group lock stopped"
BACKEND_STOPPED: Final = "backend with the group lock stopped"
STORE_CUT_OFF: Final = "store cut off while answers were on their way"
POOLER_KILLED: Final = "PgBouncer killed (kill -9)"
STANDBY_PROMOTED: Final = "streaming standby promoted"
DATA_FULL: Final = "PostgreSQL's disk full: a table cannot grow"
WAL_FULL: Final = "PostgreSQL's disk full: its log cannot grow, and it stops"
JOURNAL_FULL: Final = "journal's disk full"
ROLLED_BACK: Final = "database replaced by a lagging copy on a new timeline"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scenario:
    name: str
    play: Callable[[World], Awaitable[None]]
    #: The faults that must have happened, in a round.
    faults: tuple[str, ...]
    gateways: int = 2
    #: In `make test`, too.
    sample: bool = False
    #: The clocks that are not the machine's: "database", or "gateway" for the first of them. Needs libfaketime.
    clock: str | None = None
    #: It replaces its server, so it needs one of its own.
    own_server: bool = False
    #: The gateways reach the server through PgBouncer, but for LISTEN. Needs it.
    pooled: bool = False
    #: Who is on a disk with little room: "server", or "gateway" for the first of them. Needs root, on Linux.
    small: Literal["server", "gateway"] | None = None
    setup: Setup = USUAL


#: In the long runs; `make test` does it once.
TIMES: Final = 3
#: Requests of a scenario that makes a number of them.
REQUESTS: Final = 1_000
#: As long as they may be, and work that goes on when the caller leaves: a slot that comes free too early is seen.
LONG_ANSWERS: Final[dict[str, Any]] = {
    "latency": 1.2,
    "jitter": 0.3,
    "pace": 0.12,
    "chunks": 8,
    "work_continues": ISOLATION_S * 0.7,
}

SCENARIOS: dict[str, Scenario] = {}


def scenario(
    *faults: str,
    gateways: int = 2,
    sample: bool = False,
    clock: str | None = None,
    own_server: bool = False,
    pooled: bool = False,
    small: Literal["server", "gateway"] | None = None,
    setup: Setup = USUAL,
) -> Callable[[Callable[[World], Awaitable[None]]], Callable[[World], Awaitable[None]]]:
    def register(play: Callable[[World], Awaitable[None]]) -> Callable[[World], Awaitable[None]]:
        name = play.__name__
        SCENARIOS[name] = Scenario(
            name=name,
            play=play,
            faults=faults,
            gateways=gateways,
            sample=sample,
            clock=clock,
            own_server=own_server or clock == "database" or small == "server",
            pooled=pooled,
            small=small,
            setup=setup,
        )
        return play

    return register


async def run(
    chosen: Scenario,
    seed: int,
    server: Server | None = None,
    *,
    times: int = TIMES,
    requests: int = REQUESTS,
    report: Report | None = None,
    tell: Callable[[str], None] = lambda _: None,
) -> Report:
    """
    One round, judged. `times`: how often the scenario does its worst, where it does it more than once. `requests`: how
    many it makes, where that is not a matter of time. `tell` hears how far a long one is.

    `report` is filled as far as it gets. Raises `Violated`, `FaketimeMissing`, `PoolerMissing`, `NoSmallDisk`.
    """
    report = report or Report(scenario=chosen.name, seed=seed)
    began = time.monotonic()
    try:
        async with AsyncExitStack() as stack:
            clock: Clock | None = None
            if chosen.clock is not None:
                clock = Clock(Path(stack.enter_context(TemporaryDirectory(prefix="tollbridge-clock-"))))
            made = await stack.enter_async_context(
                world(
                    report,
                    gateways=chosen.gateways,
                    server=None if chosen.own_server else server,
                    clock=clock,
                    pooled=chosen.pooled,
                    small=chosen.small,
                    times=times,
                    setup=chosen.setup,
                    requests=requests,
                    tell=tell,
                    server_environ=clock.environ if clock is not None and chosen.clock == "database" else None,
                    gateway_environ=[clock.environ] if clock is not None and chosen.clock == "gateway" else (),
                )
            )
            await chosen.play(made)
            if not made.judged:
                await made.ends_well()
            missing = [fault for fault in chosen.faults if not report.faults[fault]]
            assert not missing, f"these faults never happened, so the run shows nothing of them: {missing}"
    except BaseException as error:
        if not isinstance(error, Violated):
            error.add_note(replay(report))
        raise
    finally:
        report.took_s = time.monotonic() - began
    return report


# ------------------------------------------------------------------ the way to the database


@scenario(
    Action.DROP_BEFORE, Action.DROP_AFTER, Action.RESET, Action.DELAY_BEFORE, Action.DELAY_AFTER, Action.SLICE,
    sample=True,
)  # fmt: skip
async def commits_are_lost(world: World) -> None:
    """Any commit may be lost on its way, or its answer, or come late; nobody knows which."""
    for gateway in world.gateways:
        gateway.proxy.rules = [
            Rule(action=Action.DROP_BEFORE, probability=0.04),
            Rule(action=Action.DROP_AFTER, probability=0.04),
            Rule(action=Action.RESET, probability=0.02),
            Rule(action=Action.DELAY_BEFORE, probability=0.03, delay_s=0.15),
            Rule(action=Action.DELAY_AFTER, probability=0.03, delay_s=0.15),
            Rule(action=Action.DELAY_AFTER, probability=0.01, delay_s=STATEMENT_S + 0.3),
            Rule(action=Action.SLICE, probability=0.03),
        ]
    async with world.load():
        await asyncio.sleep(1.5 + 1.5 * world.times)
    world.faults_end()


@scenario(Action.HALF_OPEN, "connection reset", "connection turned away")
async def the_network_breaks(world: World) -> None:
    """Connections go silent, are reset all at once, and new ones are turned away for a while."""
    for gateway in world.gateways:
        gateway.proxy.rules = [Rule(action=Action.HALF_OPEN, probability=0.01)]
    async with world.load():
        for _ in range(world.times):
            await asyncio.sleep(world.chance.uniform(0.5, 1.0))
            gateway = world.chance.choice(world.gateways)
            gateway.proxy.refusing = True
            gateway.proxy.cut()
            # Sometimes shorter than an admission is tried again, sometimes longer than a lease.
            await asyncio.sleep(world.chance.uniform(0.2, LEASE_S * 1.3))
            gateway.proxy.refusing = False
        for gateway in world.gateways:
            gateway.proxy.rules = []
            # What is half-open is found by whoever uses it; what nobody uses is not.
            gateway.proxy.cut()
        world.faults_end()


# ------------------------------------------------------------------ gateways


@scenario(GATEWAY_KILLED, gateways=3, sample=True)
async def gateways_are_killed(world: World) -> None:
    """kill -9 of one of three, again and again; it comes back in the directory it had."""
    async with world.load():
        for _ in range(world.times):
            await asyncio.sleep(world.chance.uniform(0.7, 1.3))
            gateway = world.chance.choice(world.gateways)
            await gateway.kill()
            world.report.kills += 1
            world.struck(GATEWAY_KILLED)
            # Before or after its lease has lapsed.
            await asyncio.sleep(world.chance.uniform(0, LEASE_S))
            await gateway.start()
        world.faults_end()


@scenario(GATEWAY_STOPPED, gateways=3, sample=True)
async def gateways_are_stopped(world: World) -> None:
    """SIGSTOP for longer than the lease, then SIGCONT: what it held is another's by then."""
    async with world.load():
        for _ in range(world.times):
            await asyncio.sleep(world.chance.uniform(0.4, 0.8))
            gateway = world.chance.choice(world.gateways)
            gateway.suspend()
            await asyncio.sleep(LEASE_S * world.chance.uniform(1.1, 1.8))
            gateway.resume()
            world.struck(GATEWAY_STOPPED)
        world.faults_end()
        await asyncio.sleep(0.5)


@scenario(HOST_SKEWED, clock="gateway")
async def a_host_clock_is_wrong(world: World) -> None:
    """One gateway lives an hour ahead, then two hours behind that."""
    clock = world.clock
    assert clock is not None
    async with world.load():
        for seconds in (3600, -3600):
            clock.step(seconds)
            world.struck(HOST_SKEWED)
            await asyncio.sleep(2)
    world.faults_end()


@scenario(STORE_CUT_OFF, GATEWAY_KILLED)
async def answers_outlive_store_and_process(world: World) -> None:
    """
    The store goes while answers are on their way; they arrive, with their settlement pending; then the process dies.

    A lost database loses no charge: what was answered is charged once the process is back.
    """
    await world.provider.set_faults(latency=0.4, pace=0.05, chunks=8, work_continues=0.3)
    gateway = world.gateways[0]
    calls = [
        asyncio.create_task(asked(world, gateway, f"s{world.seed}-cut-{number}", stream=number % 2 == 0))
        for number in range(LIMIT)
    ]
    await world.provider.until(lambda ledger: ledger["active"] == LIMIT)
    gateway.proxy.refusing = True
    gateway.proxy.cut()
    world.struck(STORE_CUT_OFF)
    heard = await asyncio.gather(*calls)
    pending = [one for one in heard if one.ended == "complete" and not one.settled]
    assert pending, f"no answer arrived without the store: {heard}"
    await gateway.kill()
    world.report.kills += 1
    world.struck(GATEWAY_KILLED)
    gateway.proxy.refusing = False
    await gateway.start()
    world.faults_end()


# ------------------------------------------------------------------ everything at once


@scenario(
    GATEWAY_KILLED, POSTGRES_KILLED, CUT, Action.DROP_BEFORE, Action.DROP_AFTER,
    traffic.CALLER_LEFT, traffic.STREAM_BROKEN, traffic.REFUSED,
    gateways=3, sample=True, setup=traffic.SETUP,
)  # fmt: skip
async def every_dispatch_is_charged_once(world: World) -> None:
    """
    Requests of every kind through three gateways, while gateways and PostgreSQL are killed and commits are lost.

    In the end all gateways are killed at once and started again; what they had in their journals is settled then, and
    when they are asked to stop nothing is left in them.
    """
    world.report.wanted = world.requests
    for model, faults in traffic.FAULTS.items():
        await world.provider.set_faults(model=model, **QUICK_ANSWERS, **faults)
    going = traffic.Traffic(world, await traffic.keys_of(world, 3))
    for gateway in world.gateways:
        gateway.proxy.rules = [
            Rule(action=Action.DROP_BEFORE, statement="settle", probability=0.02),
            Rule(action=Action.DROP_AFTER, statement="settle", probability=0.02),
            Rule(action=Action.DROP_BEFORE, probability=0.01),
            Rule(action=Action.DROP_AFTER, probability=0.01),
            Rule(action=Action.RESET, probability=0.005),
            Rule(action=Action.DELAY_AFTER, probability=0.005, delay_s=STATEMENT_S + 0.3),
        ]
    running = asyncio.create_task(going.run())
    worst = (_a_gateway_dies, _postgres_dies, _a_network_breaks)
    try:
        while not going.done:
            # Each of them in turn, in an order of its own each time.
            for strike in world.chance.sample(worst, len(worst)):
                await asyncio.sleep(world.chance.uniform(0.4, 1.2))
                if not going.done:
                    await strike(world)
            going.may_end.set()
        await running
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    for gateway in world.gateways:
        gateway.proxy.rules = []
    assert going.looks > 0, "the counters were never held against their rows"
    world.report.snapshots += going.looks
    await asyncio.gather(*(gateway.kill() for gateway in world.gateways))
    world.report.kills += len(world.gateways)
    await asyncio.gather(*(gateway.supervised() for gateway in world.gateways))
    dispatches = await world.provider.dispatches()
    world.struck(traffic.STREAM_BROKEN, sum(one["ended"] == "died" for one in dispatches))
    world.struck(traffic.REFUSED, sum(one["ended"] == "error" for one in dispatches))
    world.faults_end()
    await world.ends_well()
    await asyncio.gather(*(gateway.process.stop() for gateway in world.gateways))
    left = [path.name for gateway in world.gateways for path in (gateway.process.data_dir / "journal").iterdir()]
    if left:
        said = f"in the journals there is left: {', '.join(left)}"
        world.report.violations.append(Violation(Kind.LEFT_BEHIND, said))
        raise Violated(f"{said}\n{replay(world.report)}")


async def _a_gateway_dies(world: World) -> None:
    gateway = world.chance.choice(world.gateways)
    await gateway.kill()
    world.report.kills += 1
    world.struck(GATEWAY_KILLED)
    await asyncio.sleep(world.chance.uniform(0, LEASE_S))
    await gateway.supervised()


async def _postgres_dies(world: World) -> None:
    """All of it, as the first time, or the postmaster alone, whose backends end by themselves."""
    backends = not world.report.faults[POSTGRES_KILLED] or world.chance.random() < 0.5
    await asyncio.to_thread(world.server.kill, backends=backends)
    world.struck(POSTGRES_KILLED if backends else POSTMASTER_KILLED)
    world.report.kills += 1
    await asyncio.sleep(world.chance.uniform(0, 1.0))
    await asyncio.to_thread(world.server.start)


async def _a_network_breaks(world: World) -> None:
    gateway = world.chance.choice(world.gateways)
    gateway.proxy.refusing = True
    gateway.proxy.cut()
    await asyncio.sleep(world.chance.uniform(0.2, LEASE_S * 1.3))
    gateway.proxy.refusing = False


# ------------------------------------------------------------------ PostgreSQL


@scenario(POSTGRES_KILLED, POSTMASTER_KILLED, sample=True)
async def postgres_is_killed(world: World) -> None:
    """SIGKILL under load: once all of it, once the postmaster alone, whose backends end by themselves."""
    async with world.load():
        kinds = [True, False] * max(1, world.times // 2)
        world.chance.shuffle(kinds)
        for backends in kinds:
            await asyncio.sleep(world.chance.uniform(0.5, 1.2))
            await asyncio.to_thread(world.server.kill, backends=backends)
            world.struck(POSTGRES_KILLED if backends else POSTMASTER_KILLED)
            world.report.kills += 1
            await asyncio.sleep(world.chance.uniform(0, 0.5))
            await asyncio.to_thread(world.server.start)
        world.faults_end()


@scenario(POSTGRES_IMMEDIATE)
async def postgres_is_restarted(world: World) -> None:
    """An immediate restart, which is a crash and a recovery; once longer away than a lease lasts."""
    async with world.load():
        for away_s in (0.0, LEASE_S * 1.3):
            await asyncio.sleep(world.chance.uniform(0.8, 1.5))
            await asyncio.to_thread(world.server.immediate)
            world.struck(POSTGRES_IMMEDIATE)
            await asyncio.sleep(away_s)
            await asyncio.to_thread(world.server.start)
        world.faults_end()


@scenario(LISTENER_KILLED)
async def listeners_are_killed(world: World) -> None:
    """What waits for a hint goes on without it, within a rescan."""
    async with world.load(clients=14):
        for _ in range(4 * world.times):
            await asyncio.sleep(world.chance.uniform(0.2, 0.4))
            killed = await world.rows(
                "select pg_terminate_backend(pid) as done from pg_stat_activity"
                " where application_name like 'tollbridge%' and query ilike 'listen%' and datname = $1",
                world.database,
            )
            world.struck(LISTENER_KILLED, sum(row["done"] for row in killed))
    world.faults_end()


@scenario(SLOTS_TAKEN)
async def connection_slots_run_out(world: World) -> None:
    """Every slot of the server is taken by somebody else, and what the gateways had is cut."""
    held: list[asyncpg.Connection] = []
    try:
        async with world.load():
            await asyncio.sleep(1)
            for gateway in world.gateways:
                gateway.proxy.cut()
            # However long it takes until none is left: from then on it lasts for longer than a lease.
            since: float | None = None
            while since is None or time.monotonic() < since + LEASE_S * 1.3:
                try:
                    held.append(await asyncpg.connect(world.url, timeout=60))
                except asyncpg.TooManyConnectionsError:
                    since = since or time.monotonic()
                    world.struck(SLOTS_TAKEN)
                    for gateway in world.gateways:
                        gateway.proxy.cut()
                    await asyncio.sleep(0.1)
            for connection in held:
                connection.terminate()
            held.clear()
            world.faults_end()
            await asyncio.sleep(1)
    finally:
        for connection in held:
            connection.terminate()


@scenario(CLOCK_FORWARD, clock="database")
async def the_database_clock_jumps_forward(world: World) -> None:
    """An hour at once: every lease lapses, and each slot has its full window in quarantine before it is free."""
    await _clock_is_stepped(world, [3600, 3600], [CLOCK_FORWARD] * 2)


@scenario(CLOCK_BACK, GATEWAY_KILLED, gateways=3, clock="database")
async def the_database_clock_jumps_back(world: World) -> None:
    """
    Two hours at once: nothing revives, lives longer or stands still.

    What a caller left before comes out of quarantine at its time, and a process that is killed is dead when its lease
    lapses, not two hours later. It stays away, so that nobody finds its lock file free.
    """
    await _clock_is_stepped(world, [-7200, -7200], [CLOCK_BACK] * 2, kills=world.gateways[2])


@scenario(CLOCK_TWICE, GATEWAY_KILLED, gateways=3, clock="database")
async def the_database_clock_jumps_twice(world: World) -> None:
    """
    As when a bad time server is found out: the second step comes while the first is still being dealt with.

    Each pair of directions is as bad in its own way. A gateway dies with the second, and what it had seen of the first.
    """
    steps = world.chance.choice([(3600, -7200), (-7200, 3600), (-7200, -7200), (3600, 3600)])
    faults = [f"{CLOCK_TWICE}: {' '.join(f'{step:+d} s' for step in steps)}", CLOCK_TWICE]
    await _clock_is_stepped(world, steps, faults, in_a_row=True, kills=world.gateways[2])


async def _clock_is_stepped(
    world: World, steps: Sequence[int], faults: Sequence[str], *, in_a_row: bool = False, kills: Gateway | None = None
) -> None:
    clock = world.clock
    assert clock is not None
    await world.provider.set_faults(**LONG_ANSWERS)
    calls = await _all_slots_taken(world)
    left = await asked(world, world.gateways[0], f"s{world.seed}-left", stream=True, model=MODELS[1], leaves_at=0)
    async with world.load():
        await _until(world, "select from control.ticket where state = 'quarantined' and debit_id = $1", left.marker)
        for number, step in enumerate(steps):
            if not in_a_row:
                try:
                    await world.provider.until(lambda ledger: ledger["active"] == LIMIT)
                except TimeoutError:
                    said = f"{number} steps of the clock, and 10 s later not all of the slots are in use"
                    world.report.violations.append(Violation(Kind.SLOW, said))
            [before] = await world.rows("select clock_timestamp() as now")
            clock.step(sum(steps[: number + 1]))
            [after] = await world.rows("select clock_timestamp() as now")
            moved = (after["now"] - before["now"]).total_seconds()
            assert abs(moved - step) < 60, f"the server's clock moved by {moved} s"
            world.struck(faults[number])
            if kills is not None and kills.usable and number == len(steps) - 1:
                await kills.kill()
                world.report.kills += 1
                world.struck(GATEWAY_KILLED)
            await asyncio.sleep(world.chance.uniform(0.3, 0.9) if in_a_row else EXECUTION_S + ISOLATION_S)
        await asyncio.sleep(EXECUTION_S + ISOLATION_S if in_a_row else 0)
        await world.provider.set_faults(**QUICK_ANSWERS)
        world.faults_end()
    await asyncio.gather(*calls)


@scenario(CLOCK_FORWARD, clock="database")
async def the_database_clock_jumps_while_everybody_asks(world: World) -> None:
    """
    An hour at once, many times, while two processes ask as fast as they can: a statement may have looked at the clock
    before and look again after. What is in quarantine then stays there. The gateways hear of each step before the next.
    """
    clock = world.clock
    assert clock is not None
    limits = configured(concurrency=LIMIT, settings={"statement_s": STATEMENT_S, "lease_s": LEASE_S})
    async with AsyncExitStack() as stack:
        processes = [Process(Store(world.url, limits)) for _ in range(2)]
        for process in processes:
            stack.push_async_callback(process.store.close)
            await process.store.configure()
        for number in range(10 * world.times):
            await asyncio.sleep(LEASE_S / 3 + 0.3)
            for process in processes:
                process.owner = new_id()
                await process.store.renew(process.owner, process.process, first=True)
            # Its cost stays unknown, and has the bound that the audit wants of every one.
            held = await processes[0].granted(wanted(intent=b'{"upper_bound_usd":"0.01"}'))
            await processes[0].settle(uncertain(held))
            asking = [asyncio.create_task(_asks_on(process)) for process in processes]
            await asyncio.sleep(world.chance.uniform(0.01, 0.05))
            clock.step(3600 * (number + 1))
            world.struck(CLOCK_FORWARD)
            await asyncio.sleep(0.15)
            for task in asking:
                task.cancel()
            await asyncio.gather(*asking, return_exceptions=True)
            if not await world.rows("select from control.ticket where ticket_id = $1", held.ticket_id):
                said = f"step {number + 1} of the clock has freed a slot that was in quarantine"
                world.report.violations.append(Violation(Kind.OVER_ADMISSION, said))
            await world.rows("delete from control.ticket where group_id = $1", GROUP)
    world.faults_end()


async def _asks_on(process: Process) -> None:
    """Heartbeats and questions, for ever. One that the server ends, whose clock has passed its time, is asked again."""
    while True:
        with contextlib.suppress(StoreUnavailable):
            await process.store.renew(process.owner, process.process, first=False)
            await process.advance()


@scenario(HOLDER_STOPPED, Action.STALL, sample=True)
async def a_lock_holder_is_stopped(world: World) -> None:
    """A gateway is stopped in the middle of an admission, which holds the group's lock: the other goes on."""
    first, second = world.gateways
    await _served(world, second)
    first.proxy.rules = [Rule(action=Action.STALL, statement="acquire", times=1)]
    calls = [asyncio.create_task(asked(world, first, f"s{world.seed}-holder-{n}", stream=False)) for n in range(2)]
    async with asyncio.timeout(5):
        while not first.proxy.stalled:  # noqa: ASYNC110  it is told by nobody
            await asyncio.sleep(0.005)
    first.suspend()
    world.struck(HOLDER_STOPPED)
    began = time.monotonic()
    async with world.load(clients=6):
        await _served(world, second)
        took = time.monotonic() - began
        # The server ends a transaction that takes longer than a statement may; then the next one has the lock.
        if took > 2 * STATEMENT_S + 0.5:
            world.report.violations.append(
                Violation(Kind.SLOW, f"a stopped holder of the lock kept the group for {took:.1f} s")
            )
        await asyncio.sleep(max(0.0, LEASE_S * 1.2 - took))
        first.resume()
        first.proxy.release()
        world.faults_end()
        await asyncio.sleep(0.5)
    await asyncio.gather(*calls)


@scenario(BACKEND_STOPPED)
async def a_backend_is_stopped(world: World) -> None:
    """
    The server's own process that holds the group's lock is stopped: nothing can take the lock from it.

    Callers are refused in bounded time, and all goes on when it does.
    """
    holder = await asyncpg.connect(world.url)
    pid: int = holder.get_server_pid()
    try:
        async with world.load():
            await asyncio.sleep(0.8)
            transaction = holder.transaction()
            await transaction.start()
            await holder.execute("select from control.capacity_group for update")
            os.kill(pid, signal.SIGSTOP)
            world.struck(BACKEND_STOPPED)
            # A batch is tried until its time is over, and so was the one before it.
            bound = 2 * (RETRY_S + 2 * STATEMENT_S)
            probes = [
                asked(world, gateway, f"s{world.seed}-probe-{gateway.name}", stream=False, timeout_s=2 * bound)
                for gateway in world.gateways
            ]
            began = time.monotonic()
            for heard in await asyncio.gather(*probes):
                if heard.ended != "control_store_unavailable" or heard.at - began > bound:
                    said = f"while the lock was held a caller heard {heard.ended} after {heard.at - began:.1f} s"
                    world.report.violations.append(Violation(Kind.SLOW, said))
            os.kill(pid, signal.SIGCONT)
            await transaction.rollback()
            world.faults_end()
            await asyncio.sleep(0.5)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
        holder.terminate()


@scenario(ROLLED_BACK, own_server=True)
async def the_database_is_replaced_by_a_lagging_copy(world: World) -> None:
    """
    A copy, cut off before, is promoted while answers are on their way that it has never heard of.

    What it lost is lost. That it does not know who occupies must not let more in than the limit: admission stays closed
    until every dispatch it may have forgotten is over.
    """
    copy = await asyncio.to_thread(world.server.copied, world.directory / "copy")
    promoted_copy = await asyncio.to_thread(promoted, copy)
    try:
        await promoted_copy.accepts_writes()
        for gateway in world.gateways:
            await _served(world, gateway)
        await world.provider.set_faults(**LONG_ANSWERS)
        calls = await _all_slots_taken(world)
        async with world.load():
            old, world.server = world.server, promoted_copy
            for gateway in world.gateways:
                gateway.proxy.retarget(world.server.url())
                gateway.proxy.cut()
            await asyncio.to_thread(old.kill)
            world.report.kills += 1
            world.struck(ROLLED_BACK)
            [timeline] = await world.rows("select substr(pg_walfile_name(pg_current_wal_lsn()), 1, 8) as name")
            assert timeline["name"] == "00000002"
            # As long as a dispatch that the copy has never heard of may go on.
            await asyncio.sleep(EXECUTION_S + ISOLATION_S)
            world.lost_before = time.monotonic()
            await world.provider.set_faults(**QUICK_ANSWERS)
            world.faults_end()
        await asyncio.gather(*calls)
        await world.ends_well()
    finally:
        await asyncio.to_thread(promoted_copy.stop)


@scenario(STANDBY_PROMOTED, own_server=True)
async def a_streaming_standby_is_promoted(world: World) -> None:
    """
    The server dies under load and its synchronous standby takes over, on a timeline of its own.

    Nothing that was acknowledged is lost, so all of it is audited: no charge is missing, and admission stays closed for
    as long as a dispatch might run of which the new server has not heard.
    """
    async with postgres_proxy(world.server.url()) as line:
        standby = await asyncio.to_thread(world.server.standby, world.directory / "standby", line.port)
        try:
            await world.rows("alter system set synchronous_standby_names = 'standby'")
            await world.rows("select pg_reload_conf()")
            await _until(world, "select from pg_stat_replication where sync_state = 'sync'")
            for gateway in world.gateways:
                await _served(world, gateway)
            await world.provider.set_faults(**LONG_ANSWERS)
            calls = await _all_slots_taken(world)
            async with world.load():
                await asyncio.sleep(world.chance.uniform(0.2, 0.8))
                old, world.server = world.server, standby
                await asyncio.to_thread(old.kill)
                world.report.kills += 1
                await asyncio.sleep(world.chance.uniform(0, 1.0))
                await standby.promote()
                for gateway in world.gateways:
                    gateway.proxy.retarget(standby.url())
                    gateway.proxy.cut()
                [timeline] = await world.rows("select substr(pg_walfile_name(pg_current_wal_lsn()), 1, 8) as name")
                assert timeline["name"] == "00000002"
                world.struck(STANDBY_PROMOTED)
                await asyncio.sleep(EXECUTION_S + ISOLATION_S)
                await world.provider.set_faults(**QUICK_ANSWERS)
                world.faults_end()
                await asyncio.sleep(0.5)
            await asyncio.gather(*calls)
            await world.ends_well()
        finally:
            await asyncio.to_thread(standby.stop)


@scenario(DATA_FULL, WAL_FULL, small="server")
async def the_servers_disk_is_full(world: World) -> None:
    """
    First no table can grow, then the log cannot, at which PostgreSQL stops: what it does not take is no charge less.

    With room again it starts, and everything goes on.
    """
    assert world.disk is not None
    async with world.load():
        for kind in (DATA_FULL, WAL_FULL):
            await asyncio.sleep(world.chance.uniform(0.6, 1.2))
            # A session that begins needs room, too.
            bystander = await asyncpg.connect(world.url)
            await asyncio.to_thread(world.disk.fill)
            if kind == DATA_FULL:
                try:
                    await bystander.execute(
                        "create table filler as select repeat('x', 2000) from generate_series(1, 50000)"
                    )
                except asyncpg.DiskFullError:
                    world.struck(DATA_FULL)
            else:
                # Into the log alone, until it needs another file.
                with contextlib.suppress(asyncpg.PostgresError, asyncpg.InterfaceError, OSError):
                    for _ in range(400):
                        await bystander.execute("select pg_logical_emit_message(false, '', repeat('x', 1000000))")
                # It says so in its own log only, which is full, too. That it ended the session shows it.
                async with asyncio.timeout(5):
                    while not bystander.is_closed():  # noqa: ASYNC110  another process does it
                        await asyncio.sleep(0.02)
                world.struck(WAL_FULL)
            bystander.terminate()
            await asyncio.sleep(world.chance.uniform(0.5, LEASE_S * 1.3))
            await asyncio.to_thread(world.disk.empty)
            await asyncio.to_thread(world.server.start)
        world.faults_end()
        await asyncio.sleep(0.5)


@scenario(JOURNAL_FULL, STORE_CUT_OFF, GATEWAY_KILLED, small="gateway")
async def the_journals_disk_is_full(world: World) -> None:
    """
    A gateway's disk fills up, and then the store goes while answers are on their way, and then the process dies.

    The room for what is under way was there before: no charge is lost. A gateway that starts on the full disk settles
    what was left there and takes nothing on until there is room.
    """
    assert world.disk is not None
    await world.provider.set_faults(latency=0.4, pace=0.05, chunks=8, work_continues=0.3)
    gateway = world.gateways[0]
    calls = [
        asyncio.create_task(asked(world, gateway, f"s{world.seed}-full-{number}", stream=number % 2 == 0))
        for number in range(LIMIT)
    ]
    await world.provider.until(lambda ledger: ledger["active"] == LIMIT)
    await asyncio.to_thread(world.disk.fill)
    world.struck(JOURNAL_FULL)
    gateway.proxy.refusing = True
    gateway.proxy.cut()
    world.struck(STORE_CUT_OFF)
    heard = await asyncio.gather(*calls)
    assert [one.ended for one in heard] == ["complete"] * LIMIT, heard
    assert not any(one.settled for one in heard), heard
    await gateway.kill()
    world.report.kills += 1
    world.struck(GATEWAY_KILLED)
    gateway.proxy.refusing = False
    await gateway.start()
    before = (await world.provider.ledger())["dispatches"]
    refused = await asked(world, gateway, f"s{world.seed}-refused", stream=False)
    assert refused.ended == "control_store_unavailable", refused
    assert (await world.provider.ledger())["dispatches"] == before
    await _until(
        world, "select from control.attempt having count(*) filter (where state = 'charged') >= $1::int", LIMIT
    )
    await asyncio.to_thread(world.disk.empty)
    world.faults_end()


@scenario(GATEWAY_KILLED, POOLER_KILLED, pooled=True)
async def sessions_are_shared(world: World) -> None:
    """
    PgBouncer hands out sessions by transaction: no connection of a gateway is a session, but for LISTEN.

    One hot group, calls and jobs, fewer sessions than connections. A gateway is killed, and the pooler under all of
    them. Whatever a statement is told for its transaction, the next one in that session, of whomever, is not.
    """
    assert world.pooler is not None
    async with world.load(clients=14):
        for _ in range(world.times):
            await asyncio.sleep(world.chance.uniform(0.7, 1.3))
            gateway = world.chance.choice(world.gateways)
            await gateway.kill()
            world.report.kills += 1
            world.struck(GATEWAY_KILLED)
            await asyncio.sleep(world.chance.uniform(0, LEASE_S))
            await gateway.start()
            await asyncio.sleep(world.chance.uniform(0.3, 0.8))
            await _sessions_are_clean(world)
            await world.pooler.kill()
            world.report.kills += 1
            world.struck(POOLER_KILLED)
            await asyncio.sleep(world.chance.uniform(0, 1.0))
            await world.pooler.start()
        world.faults_end()
        await asyncio.sleep(0.5)
    await _sessions_are_clean(world)


async def _sessions_are_clean(world: World) -> None:
    """Each session that the pooler has is as any other program would want it, and only LISTEN has one of its own."""
    assert world.pooler is not None
    url = f"postgresql://postgres@127.0.0.1:{world.pooler.port}/{world.database}"
    connections = [await asyncpg.connect(url, statement_cache_size=0) for _ in range(SESSIONS)]
    try:
        # Each in a transaction, so that none of them shares a session with another.
        transactions = [connection.transaction() for connection in connections]
        await asyncio.gather(*(transaction.start() for transaction in transactions))
        found = await asyncio.gather(
            *(
                connection.fetch(
                    # Not `jit`: asyncpg itself turns it off, for a session it takes for its own.
                    "select current_setting('lock_timeout') as lock_timeout, pg_backend_pid() as pid,"
                    " current_setting('enable_seqscan') as enable_seqscan,"
                    " current_setting('plan_cache_mode') as plan_cache_mode"
                )
                for connection in connections
            )
        )
        await asyncio.gather(*(transaction.rollback() for transaction in transactions))
    finally:
        for connection in connections:
            connection.terminate()
    told = [row for [row] in found]
    assert len({row["pid"] for row in told}) == SESSIONS, told
    settings = {(row["lock_timeout"], row["enable_seqscan"], row["plan_cache_mode"]) for row in told}
    assert settings == {("0", "on", "auto")}, f"a session keeps what was told for one transaction: {settings}"
    own = await world.rows(
        "select query from pg_stat_activity where datname = $1 and pid <> pg_backend_pid() and not pid = any($2::int[])"
        " and application_name like 'tollbridge%' and query not ilike 'listen%' and query not like 'set %'",
        world.database,
        [row["pid"] for row in told],
    )
    assert not own, f"a gateway has a session of its own: {own}"


async def _all_slots_taken(world: World) -> list[asyncio.Task[Heard]]:
    """Calls that have just reached the provider, as many as may."""
    calls = [
        asyncio.create_task(
            asked(world, world.gateways[number % len(world.gateways)], f"s{world.seed}-first-{number}", stream=True)
        )
        for number in range(LIMIT)
    ]
    await world.provider.until(lambda ledger: ledger["active"] == LIMIT)
    return calls


async def _until(world: World, statement: str, *arguments: object) -> None:
    """Until the database has such a row."""
    async with asyncio.timeout(QUEUE_S + CALL_S):
        while not await world.rows(statement, *arguments):  # noqa: ASYNC110  another process does it
            await asyncio.sleep(0.02)


async def _served(world: World, gateway: Gateway) -> None:
    """Until it answers one request."""
    async with asyncio.timeout(QUEUE_S + CALL_S + RETRY_S):
        while True:
            heard = await asked(world, gateway, f"s{world.seed}-served-{time.monotonic_ns()}", stream=False)
            if heard.ended == "complete":
                return
            await asyncio.sleep(0.02)
