"""
One client process of the admission benchmark: a controller as a gateway has it, and clients that keep it busy.

It reads one order a line and answers "ready", then begins at the time it is told, so that all processes begin together,
and goes on until it is told to stop: who reads CPU times at the end of the measured seconds must not meet sessions that
end. Run by the benchmark, not by hand: `python -m tests.benchmarks.admission.worker NUMBER URL SETTINGS`.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import random
import sys
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

import asyncpg
import msgspec
import structlog

from admission.controller import Controller
from admission.ids import new_id
from admission.lease import Class, Demand, Ending, Lease, Settlement, Verdict
from admission.settings import AdmissionSettings
from admission.store import Store
from metering.ledger import Intent, Record

#: Attempts belong to so many API keys.
KEYS = [uuid.UUID(int=n) for n in range(1, 5)]
MODEL = "gpt-4o-mini-2024-07-18"
#: Of a varied order. A session is one run.
REQUESTS_A_SESSION, REQUESTS_A_STEP = 20, 2
#: Each client does so many before the start: a session that compiles its functions for the first time says nothing.
FIRST = 3
BARE = "update bench.bare set n = n + 1 where id = $1 returning n"


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """What to do: admissions with settlement in `groups`, or without any a bare UPDATE of one of `rows` rows."""

    groups: Sequence[str] = ()
    rows: int = 1
    clients: int
    #: What is done in the first seconds is not measured.
    warmup_s: float = 0.0
    seconds: float = 0.0
    #: Instead of a time: so many by each client, and nobody says stop.
    count: int | None = None
    #: Sessions, runs and steps come and go, and half of the debits have ids of their callers'.
    varied: bool = False


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """What one process did. Latencies in microseconds, of what ended within the measured seconds."""

    #: Whatever came before and after the measured seconds included.
    done: int
    cpu_s: float
    pair_us: Sequence[int]
    admit_us: Sequence[int] = ()
    settle_us: Sequence[int] = ()


class Refused(Exception):
    """An admission was refused that nothing should refuse: there is nothing to measure."""


#: Does one thing and answers its parts: when it began, was granted and was settled, on `time.perf_counter`.
Work = Callable[[], Awaitable[tuple[float, float, float]]]


def only_warnings() -> None:
    """On standard error: standard output is for answers."""
    structlog.configure(
        wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )


@asynccontextmanager
async def controller(url: str, settings: AdmissionSettings) -> AsyncIterator[Controller]:
    store = Store(url, settings)
    try:
        await store.configure()
        async with Controller(store, settings).opened() as opened:
            yield opened
    finally:
        await store.close()


def intent(session: str, *, step: int = 7) -> bytes:
    """As the gateway writes it for a request of an agent."""
    return msgspec.json.encode(
        Intent(
            request_id=new_id().hex,
            transport="grpc",
            created_at="2026-11-30T12:00:00.000000Z",
            requested_model="plain",
            route_id="openai/" + MODEL,
            provider="openai",
            upstream_model=MODEL,
            protocol="chat_completions",
            fallback_index=0,
            is_fallback=False,
            class_="interactive",
            session_id=session,
            scope_id="nightly",
            run_id="run-" + session,
            step_id=f"step-{step}",
            skill="summarise",
            skill_version="3",
            role="writer",
            tags={"team": "research", "experiment": "b"},
            upper_bound_usd="0.0123",
            price_version="2026-11-30",
        )
    )


RECORD = msgspec.json.encode(
    Record(
        status="success",
        ended="complete",
        usd="0.00043125",
        price_version="2026-11-30",
        input_total=1275,
        cache_read=1024,
        output_total=400,
        served_model=MODEL,
        provider_request_id="req_0123456789abcdef0123456789abcdef",
        queued_ms=3,
        first_byte_ms=412,
        total_ms=2850,
    )
)


def demand(
    group: str,
    said: bytes,
    key: uuid.UUID,
    *,
    model: str = MODEL,
    patience_s: float = 60.0,
    debit_id: str | None = None,
) -> Demand:
    return Demand(
        ticket_id=new_id(),
        group=group,
        model=model,
        klass=Class.INTERACTIVE,
        key_id=key,
        debit_id=debit_id or uuid.uuid4().hex,
        attempt=1,
        execution_limit_s=120,
        isolation_s=30,
        queue_timeout_s=patience_s,
        intent=said,
    )


def settlement(lease: Lease) -> Settlement:
    return Settlement(lease=lease, ending=Ending.CONFIRMED, verdict=Verdict.ANSWERED, state="charged", record=RECORD)


def _pairs(of: Controller, order: Order, client: str) -> Work:
    said = intent(client)
    chosen = random.Random(client)
    key = KEYS[chosen.randrange(len(KEYS))]
    clock = time.perf_counter
    number = 0
    session = client

    async def work() -> tuple[float, float, float]:
        nonlocal number, session
        if order.varied:
            if number % REQUESTS_A_SESSION == 0:
                session = uuid.uuid4().hex
            wanted = demand(
                chosen.choice(order.groups),
                intent(session, step=number % REQUESTS_A_SESSION // REQUESTS_A_STEP),
                key,
                debit_id=new_id().hex if number % 2 else None,
            )
            number += 1
        else:
            wanted = demand(chosen.choice(order.groups), said, key)
        began = clock()
        lease = await of.admit(wanted)
        granted = clock()
        if not isinstance(lease, Lease):
            raise Refused(f"{wanted.group}: {lease}")
        settled = await of.settle(settlement(lease))
        ended = clock()
        if not settled.applied:
            raise Refused(f"{wanted.group}: settled twice")
        return began, granted, ended

    return work


async def _bare(connection: asyncpg.Connection, order: Order, client: str) -> Work:
    statement = await connection.prepare(BARE)
    chosen = random.Random(client)
    clock = time.perf_counter

    async def work() -> tuple[float, float, float]:
        row = chosen.randrange(order.rows)
        began = clock()
        await statement.fetchval(row)
        return began, began, clock()

    return work


async def _first(work: Work) -> None:
    for _ in range(FIRST):
        await work()


async def _run(order: Order, works: Sequence[Work], start_at: float, stop: asyncio.Future[bytes]) -> Measured:
    # `perf_counter` and `monotonic` are one clock on Linux; elsewhere they may differ by a constant.
    shift = time.perf_counter() - time.monotonic()
    since = start_at + shift + order.warmup_s
    until = since + order.seconds
    done = 0
    parts: list[tuple[float, float, float]] = []
    cpu: list[float] = []

    async def client(work: Work) -> None:
        nonlocal done
        mine = 0
        while mine < order.count if order.count is not None else not stop.done():
            part = await work()
            mine += 1
            if since <= part[2] < until:
                parts.append(part)
        done += mine

    async def watch(moment: float) -> None:
        await asyncio.sleep(moment - time.perf_counter())
        cpu.append(time.process_time())

    gc.collect()
    await asyncio.sleep(start_at + shift - time.perf_counter())
    await asyncio.gather(watch(since), watch(until), *map(client, works))
    return Measured(
        done=done,
        cpu_s=cpu[-1] - cpu[0],
        pair_us=[round((ended - began) * 1e6) for began, _, ended in parts],
        admit_us=[round((granted - began) * 1e6) for began, granted, _ in parts] if order.groups else (),
        settle_us=[round((ended - granted) * 1e6) for _, granted, ended in parts] if order.groups else (),
    )


async def serve(number: str, url: str, settings: AdmissionSettings) -> None:
    loop = asyncio.get_running_loop()
    orders = asyncio.StreamReader(limit=1 << 20)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(orders), sys.stdin)
    #: Kept, for opening as many as the largest order needs takes longer than a round.
    connections: list[asyncpg.Connection] = []
    while line := await orders.readline():
        order = msgspec.json.decode(line, type=Order)
        names = [f"{number}-{client}" for client in range(order.clients)]
        async with AsyncExitStack() as stack:
            if order.groups:
                opened = await stack.enter_async_context(controller(url, settings))
                works = [_pairs(opened, order, name) for name in names]
            else:
                while len(connections) < order.clients:
                    connections.append(await asyncpg.connect(url, server_settings={"application_name": "bare"}))
                works = [await _bare(c, order, name) for c, name in zip(connections, names, strict=False)]
            if order.count is None:
                await asyncio.gather(*(_first(work) for work in works))
            _say(b"ready")
            start_at = float(await orders.readline())
            if order.count is not None:
                measured = await _run(order, works, start_at, loop.create_future())
            else:
                measured = await _run(order, works, start_at, asyncio.ensure_future(orders.readline()))
                measured = msgspec.structs.replace(measured, done=measured.done + FIRST * len(works))
        _say(msgspec.json.encode(measured))
    for connection in connections:
        await connection.close()


def _say(line: bytes) -> None:
    sys.stdout.buffer.write(line + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    only_warnings()
    asyncio.run(serve(sys.argv[1], sys.argv[2], msgspec.json.decode(sys.argv[3], type=AdmissionSettings)))
