"""
One run: real gateways, each behind a proxy of its own, one real PostgreSQL, one simulated provider, and load.

A scenario does its worst to a `World` while `load` runs; `World.ends_well` then waits for what must come to rest,
asks the auditor, and raises `Violated` with the seed where something is not as it has to be.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import random
import re
import shutil
import signal
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from decimal import Decimal
from pathlib import Path
from typing import Any, Final, Literal

import asyncpg
import httpx

from gateway.client import AsyncClient, CallFailed, CompletionRequest, Message, Outcome
from tests.fakes.gateway_process import KEY, GatewayProcess, NotStarted
from tests.fakes.postgres_proxy import Proxy, postgres_proxy
from tests.fakes.simulated import SimulatedProvider, simulated_process
from tests.faults.audit import PRICE_IN, PRICE_OUT, Audit, Heard, Kind, Price, Violation, audit, snapshot
from tests.faults.disk import SmallDisk, small_disk
from tests.faults.pooler import Pooler, pooler
from tests.faults.server import Clock, Server, fresh_database, postgres_server

#: Everything is short, so that a run sees many leases, deadlines and quarantines pass.
LIMIT: Final = 4
LEASE_S, MARGIN_S = 2.1, 0.3
EXECUTION_S, ISOLATION_S = 3.0, 1.0
STATEMENT_S, RETRY_S, QUEUE_S = 1.2, 1.5, 4.0
#: Two profiles of one endpoint, and so of one group: what the caller leaves is read to its end, or closed.
MODELS: Final = ("sim-fast", "sim-small")
PRICES: Final[Mapping[str, Price]] = dict.fromkeys(MODELS, (PRICE_IN, PRICE_OUT))
#: How long the provider goes on with what its caller has left: less than the isolation.
WORK_CONTINUES_S: Final = 0.5
CALL_S: Final = 4.0
#: How the provider answers, unless a scenario wants it otherwise.
QUICK_ANSWERS: Final[dict[str, Any]] = {
    "latency": 0.02,
    "jitter": 0.15,
    "pace": 0.01,
    "chunks": 8,
    "work_continues": WORK_CONTINUES_S,
}
#: After the last fault: for every gateway to serve again, and for nothing to be left.
SERVES_WITHIN_S: Final = 10.0
RESTS_WITHIN_S: Final = EXECUTION_S + ISOLATION_S + 4 * LEASE_S + 5
#: After a job is handed in again and again, its 202 is there or it is not taken for accepted.
_SUBMIT_S: Final = 4.0
_STARTS_WITHIN_S: Final = 300.0
#: So many ask at once how their jobs stand.
_POLLERS: Final = 8
#: asyncpg gives a pooled connection back in a task of its own. Where the connection has broken and whoever used it was
#: cancelled, nobody is left to hear of that; the connection is gone from the pool all the same.
_POOL_NOISE = re.compile(r"ConnectionDoesNotExistError.*asyncpg/pool.py:\d+ in release")
#: Characters of what a log says.
_LONGEST: Final = 3_000
_LOST = (OSError, TimeoutError, asyncpg.PostgresError, asyncpg.InterfaceError)


def _nothing(_said: str) -> None:
    """Nobody watches."""


class Violated(AssertionError):
    """Something that must hold does not. The message says what, and how to see it again."""


@dataclasses.dataclass(kw_only=True)
class Report:
    """What happened in one run, for the table."""

    scenario: str
    seed: int
    #: How many requests were to be made, where that is not a matter of time.
    wanted: int = 0
    requests: int = 0
    dispatches: int = 0
    attempts: int = 0
    charged: int = 0
    zero: int = 0
    unknown: int = 0
    snapshots: int = 0
    peak: int = 0
    kills: int = 0
    faults: Counter[str] = dataclasses.field(default_factory=Counter)
    answers: Counter[str] = dataclasses.field(default_factory=Counter)
    violations: list[Violation] = dataclasses.field(default_factory=list)
    #: Seconds after the last fault until a gateway served again, one for each.
    recoveries: list[float] = dataclasses.field(default_factory=list)
    #: Seconds after the last fault and the last request until nothing was left.
    rested_s: float = 0.0
    took_s: float = 0.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setup:
    """How the gateways are configured, and what of it is held against them in the end."""

    #: Of the provider's base URL.
    configuration: Callable[[str], str]
    #: At the provider at once.
    limit: int = LIMIT
    #: Of the provider's models.
    prices: Mapping[str, Price] = dataclasses.field(default_factory=lambda: PRICES)
    #: After the last fault.
    serves_within_s: float = SERVES_WITHIN_S
    rests_within_s: float = RESTS_WITHIN_S


class Gateway:
    """A gateway process, its proxy, and whoever talks to it."""

    def __init__(self, name: str, process: GatewayProcess, proxy: Proxy, stack: AsyncExitStack) -> None:
        self.name = name
        self.process = process
        self.proxy = proxy
        self.stopped = False
        self._stack = stack
        self.client: AsyncClient | None = None
        #: By secret: the clients of every key, `client` among them.
        self.clients: dict[str, AsyncClient] = {}
        self.secrets = [KEY]
        #: For what goes past the client: plain REST, with a key of the request's own.
        self.http: httpx.AsyncClient | None = None
        #: What it answered since it was started: a kill makes them answers of a dead process.
        self.heard: list[Heard] = []

    @property
    def usable(self) -> bool:
        return self.client is not None and self.process.running

    async def start(self) -> None:
        await self.process.start()
        self.heard = []
        await self.connect()

    async def supervised(self) -> None:
        """As `start`, by somebody who starts it again: a gateway ends where its first statements meet no database."""
        async with asyncio.timeout(_STARTS_WITHIN_S):
            while True:
                try:
                    return await self.start()
                except NotStarted:
                    await asyncio.sleep(0.1)

    async def connect(self) -> None:
        """Makes the clients of all keys."""
        enter = self._stack.enter_async_context
        grpc, rest = self.process.grpc_target, self.process.rest_url
        self.http = await enter(httpx.AsyncClient(base_url=rest, timeout=2 * CALL_S, trust_env=False))
        self.clients = {
            secret: await enter(AsyncClient(api_key=secret, grpc=grpc, rest=rest, retry_for_s=0))
            for secret in self.secrets
        }
        self.client = self.clients[KEY]

    async def kill(self) -> None:
        """kill -9."""
        self.client = None
        for one in self.heard:
            one.killed_after = True
        await self.process.kill()

    def suspend(self) -> None:
        self.stopped = True
        self.process.send(signal.SIGSTOP)

    def resume(self) -> None:
        self.process.send(signal.SIGCONT)
        self.stopped = False


class World:
    """Made by `world`."""

    def __init__(
        self,
        *,
        report: Report,
        directory: Path,
        server: Server,
        database: str,
        provider: SimulatedProvider,
        clock: Clock | None,
        pooler: Pooler | None,
        disk: SmallDisk | None,
        times: int,
        setup: Setup,
        requests: int,
        tell: Callable[[str], None],
    ) -> None:
        seed = self.seed = report.seed
        self.setup = setup
        #: How many requests a scenario is to make that makes a number of them.
        self.requests = requests
        #: Says how far it is, for whoever watches.
        self.tell = tell
        self.clock = clock
        #: Between the gateways and the server, where there is one.
        self.pooler = pooler
        #: Of the server, or of the first gateway, where it is small.
        self.disk = disk
        #: How often the scenario is to do its worst.
        self.times = times
        self.directory = directory
        self.server = server
        self.database = database
        self.provider = provider
        self.report = report
        self.gateways: list[Gateway] = []
        self.chance = random.Random(f"scenario {seed}")
        self.heard: list[Heard] = []
        #: Accepted jobs: their id and the debit they go by.
        self.jobs: dict[str, str] = {}
        #: Whose they are, where it is not the usual key: the secret.
        self.jobs_of: dict[str, str] = {}
        #: Set where the database was put back to an earlier state: `time.monotonic` of that.
        self.lost_before: float | None = None
        self._job_ends: Counter[str] = Counter()
        self._succeeded: list[Heard] = []
        #: `ends_well` has said its word.
        self.judged = False
        self._most_occupied = 0
        self._faults_ended: float | None = None
        self._load_ended = 0.0
        #: One for each gateway: until it serves again, or has not in the time it has.
        self._recovering: list[asyncio.Task[Violation | None]] = []

    @property
    def url(self) -> str:
        """The database itself, past the proxies."""
        return self.server.url(self.database)

    def struck(self, fault: str, times: int = 1) -> None:
        self.report.faults[fault] += times

    async def rows(self, statement: str, *arguments: Any) -> list[asyncpg.Record]:
        connection = await asyncpg.connect(self.url, timeout=10)
        try:
            return await connection.fetch(statement, *arguments)
        finally:
            await connection.close()

    def faults_end(self) -> None:
        """From here on everything has its time to recover."""
        self._faults_ended = time.monotonic()
        for gateway in self.gateways:
            gateway.proxy.rules = []
        self._recovering = [asyncio.create_task(self._recovers(gateway)) for gateway in self.gateways if gateway.usable]

    def gives_up(self) -> None:
        for task in self._recovering:
            task.cancel()

    # ---------------------------------------------------------------- load

    @asynccontextmanager
    async def load(self, clients: int = 10) -> AsyncIterator[Load]:
        load = Load(self)
        tasks = [asyncio.create_task(load.client(number)) for number in range(clients)]
        watch = asyncio.create_task(self._watch())
        try:
            yield load
            load.stopping = True
            async with asyncio.timeout(2 * CALL_S + _SUBMIT_S):
                await asyncio.gather(*tasks)
            self._load_ended = time.monotonic()
        finally:
            for task in (*tasks, watch):
                task.cancel()
            await asyncio.gather(*tasks, watch, return_exceptions=True)

    async def _watch(self) -> None:
        """Counts who occupies, again and again, each time in one snapshot."""
        while True:
            with contextlib.suppress(*_LOST):
                connection = await asyncpg.connect(self.url, timeout=2, command_timeout=2)
                try:
                    while True:
                        occupied = await connection.fetchval(
                            "select count(*) from control.ticket where state <> 'queued'"
                        )
                        self.report.snapshots += 1
                        self._most_occupied = max(self._most_occupied, occupied)
                        await asyncio.sleep(0.02)
                finally:
                    connection.terminate()
            await asyncio.sleep(0.1)

    # ---------------------------------------------------------------- the end

    async def ends_well(self) -> Report:
        """Waits for everything to come to rest, and judges. Raises `Violated`."""
        self.judged = True
        if self._faults_ended is None:
            self.faults_end()
        assert self._faults_ended is not None
        violations = [*self.report.violations, *filter(None, await asyncio.gather(*self._recovering))]
        violations += await self._jobs_ended()
        violations += await self._rested()
        violations += self._faults_in_logs()
        if self._most_occupied > self.setup.limit:
            said = (
                f"a snapshot of the database had {self._most_occupied} occupied slots, the limit is {self.setup.limit}"
            )
            violations.append(Violation(Kind.OVER_ADMISSION, said))
        ledger = await self.provider.ledger()
        found: Audit = audit(
            await snapshot(self.url),
            ledger=ledger,
            dispatches=await self.provider.dispatches(),
            heard=[*self.heard, *self._succeeded],
            limit=self.setup.limit,
            prices=self.setup.prices,
            lost_before=self.lost_before,
        )
        found.violations[:0] = violations
        report = self.report
        report.requests = len(self.heard) + len(self.jobs)
        report.answers = Counter(one.ended for one in self.heard) + self._job_ends
        report.dispatches, report.peak = ledger["dispatches"], ledger["peak_concurrency"]
        report.attempts, report.unknown = found.attempts, found.unknown
        report.charged, report.zero = found.charged, found.zero
        report.violations = found.violations
        for gateway in self.gateways:
            report.faults += gateway.proxy.counts
        if found.violations:
            raise Violated(f"{found.told()}\n{replay(report)}")
        return report

    async def _recovers(self, gateway: Gateway) -> Violation | None:
        assert self._faults_ended is not None
        said = "nothing"
        while time.monotonic() - self._faults_ended < self.setup.serves_within_s:
            heard = await asked(self, gateway, f"recovery-{uuid.uuid4().hex}", stream=False)
            if heard.ended == "complete":
                self.report.recoveries.append(heard.at - self._faults_ended)
                return None
            said = heard.ended
            await asyncio.sleep(0.05)
        return Violation(
            Kind.SLOW, f"gateway {gateway.name} did not serve again within {self.setup.serves_within_s} s: {said}"
        )

    async def _jobs_ended(self) -> list[Violation]:
        gateway = next(gateway for gateway in self.gateways if gateway.usable)
        until = time.monotonic() + self.setup.rests_within_s
        some = asyncio.Semaphore(_POLLERS)

        async def ended(job: str, marker: str) -> Violation | None:
            async with some:
                return await self._job_ended(gateway.clients[self.jobs_of.get(job, KEY)], job, marker, until)

        found = await asyncio.gather(*(ended(job, marker) for job, marker in self.jobs.items()))
        return [violation for violation in found if violation is not None]

    async def _job_ended(self, client: AsyncClient, job: str, marker: str, until: float) -> Violation | None:
        try:
            ended = await client.jobs.wait(job, timeout_s=max(until - time.monotonic(), 0.5))
        except TimeoutError:
            return Violation(Kind.JOB, f"{job} ({marker}) has not ended")
        except CallFailed as failed:
            said = f"{job} ({marker}) was accepted, and now: {failed}"
            return Violation(Kind.JOB, said) if self.lost_before is None else None
        self._job_ends[f"job {ended.status}"] += 1
        if ended.status == "succeeded":
            # It may have been succeeded by another process than the one that sent it; charged it is.
            self._succeeded.append(Heard(marker=marker, ended="complete", settled=True, at=time.monotonic()))
        return None

    async def _rested(self) -> list[Violation]:
        """No ticket is left, no attempt open, the provider idle."""
        assert self._faults_ended is not None
        since = max(self._faults_ended, self._load_ended)
        while True:
            [left] = await self.rows(
                "select (select count(*) from control.ticket) as tickets,"
                " (select count(*) from control.ticket where state in ('active', 'quarantined')) as open"
            )
            if not left["tickets"] and not left["open"] and not (await self.provider.ledger())["active"]:
                self.report.rested_s = time.monotonic() - since
                return []
            if time.monotonic() - since > self.setup.rests_within_s:
                return [Violation(Kind.SLOW, f"after {self.setup.rests_within_s} s there is left: {dict(left)}")]
            await asyncio.sleep(0.05)

    def _faults_in_logs(self) -> list[Violation]:
        """What is no answer to any fault: a task that ended, an exception nobody caught."""
        return [
            Violation(Kind.FAULT, f"gateway {gateway.name}: {said[:_LONGEST]}")
            for gateway in self.gateways
            for said in _entries(gateway.process.log.read_text())
            if any(sign in said for sign in ("gateway.task_failed", "Traceback", "never retrieved"))
            and _POOL_NOISE.search(said) is None
        ]


def _entries(log: str) -> Iterator[str]:
    """Each line of a log, or the lines together that are none of the gateway's own: what an interpreter prints."""
    for own, lines in itertools.groupby(log.splitlines(), key=lambda line: line.startswith("{")):
        if own:
            yield from lines
        else:
            yield "\n".join(lines)


def replay(report: Report) -> str:
    faults = ", ".join(f"{name} {count}" for name, count in sorted(report.faults.items()))
    wanted = f" --requests {report.wanted}" if report.wanted else ""
    return (
        f"seed {report.seed}; again with: python -m tests.faults --only {report.scenario} --seed {report.seed}"
        f" --rounds 1{wanted}\n(faults: {faults}; answers: {dict(report.answers)})"
    )


class Load:
    """Seeded callers: whole answers, streams and jobs, some of them taken back."""

    def __init__(self, world: World) -> None:
        self.stopping = False
        self._world = world

    async def client(self, number: int) -> None:
        world = self._world
        chance = random.Random(f"client {world.seed} {number}")
        count = 0
        while not self.stopping:
            usable = [gateway for gateway in world.gateways if gateway.usable]
            # A stopped one answers nobody: few ask it, so that the others have something to do.
            awake = [gateway for gateway in usable if not gateway.stopped or chance.random() < 0.1]
            if not awake:
                await asyncio.sleep(0.05)
                continue
            gateway = chance.choice(awake)
            count += 1
            marker = f"s{world.seed}-c{number}-{count}"
            model = chance.choice(MODELS)
            kind = chance.choices(("complete", "stream", "job"), (45, 40, 15))[0]
            leaves_after = chance.uniform(0, 0.5) if chance.random() < 0.25 else None
            leaves_at = chance.randrange(6) if chance.random() < 0.3 else None
            if kind == "job":
                await self._job(gateway, marker, model, leaves_after)
            else:
                heard = await asked(
                    world,
                    gateway,
                    marker,
                    model=model,
                    stream=kind == "stream",
                    leaves_after_s=leaves_after,
                    leaves_at=leaves_at,
                )
                if heard.ended != "complete":
                    await asyncio.sleep(chance.uniform(0.01, 0.1))

    async def _job(self, gateway: Gateway, marker: str, model: str, leaves_after: float | None) -> None:
        line = {
            "custom_id": marker,
            "url": "/v1/chat/completions",
            "debit_id": marker,
            "body": {
                "model": model,
                "max_tokens": 64,
                "messages": [{"role": "user", "content": f"question {marker}"}],
                "user": marker,
            },
        }
        await job_accepted(self._world, gateway, line, leaves_after_s=leaves_after)


async def job_accepted(
    world: World, gateway: Gateway, line: Mapping[str, Any], *, secret: str = KEY, leaves_after_s: float | None = None
) -> bool:
    """One job, handed in until it is taken or the time is over; taken back after so many seconds. False: not taken."""
    jobs = gateway.clients[secret].jobs
    marker = line["custom_id"]
    taken = False
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_SUBMIT_S):
            while True:
                try:
                    receipt = await jobs.submit([dict(line)], idempotency_key=marker)
                except (CallFailed, RuntimeError) as failed:
                    # Whether it was taken is not known; the key makes it safe to ask again. A client that was
                    # closed meanwhile says so with a RuntimeError.
                    if isinstance(failed, RuntimeError) or not gateway.usable:
                        return False
                    await asyncio.sleep(0.1)
                    continue
                break
            taken = True
            job = receipt.jobs[0].id
            world.jobs[job] = marker
            world.jobs_of[job] = secret
            if leaves_after_s is not None:
                await asyncio.sleep(leaves_after_s)
                with contextlib.suppress(CallFailed):
                    await jobs.cancel(job)
    return taken


async def asked(
    world: World,
    gateway: Gateway,
    marker: str,
    *,
    stream: bool,
    model: str = MODELS[0],
    leaves_after_s: float | None = None,
    leaves_at: int | None = None,
    timeout_s: float = CALL_S,
) -> Heard:
    """
    One request, and what its caller heard of it.

    The caller leaves after so many seconds, or a stream with its chunk number `leaves_at`.
    """
    client = gateway.client
    assert client is not None
    request = CompletionRequest(
        model=model,
        messages=[Message(role="user", text=f"question {marker}")],
        max_output_tokens=64,
        end_user=marker,
        debit_id=marker,
    )
    heard = Heard(marker=marker, ended="cancelled")
    try:
        async with asyncio.timeout(leaves_after_s):
            outcome: Outcome | None
            if stream:
                outcome = await streamed(client, request, leaves_at, timeout_s)
            else:
                outcome = (await client.complete(request, timeout_s=timeout_s)).outcome
        if outcome is not None:
            heard.ended = "complete"
            heard.settled = outcome.settlement == "settled"
            heard.usd = Decimal(outcome.cost.usd) if outcome.cost.HasField("usd") else None
    except TimeoutError:
        pass
    except CallFailed as failed:
        heard.ended = failed.code
    heard.at = time.monotonic()
    world.heard.append(heard)
    gateway.heard.append(heard)
    return heard


async def streamed(
    client: AsyncClient, request: CompletionRequest, leaves_at: int | None, timeout_s: float
) -> Outcome | None:
    """The outcome of a stream that is read to its end; None where its caller leaves it with its chunk `leaves_at`."""
    content = 0
    async with client.stream(request, timeout_s=timeout_s) as chunks:
        async for chunk in chunks:
            if chunk.HasField("finished"):
                outcome: Outcome = chunk.finished.outcome
                return outcome
            if leaves_at is not None and chunk.WhichOneof("chunk") in ("started", "delta"):
                if content == leaves_at:
                    return None
                content += 1
    raise AssertionError("a stream that ends without `finished` raises")


#: Of every configuration.
SHORT_TIMES: Final = f"""
        [routing]
        settlement_patience_s = 1.0
        [admission]
        lease_s = {LEASE_S}
        margin_s = {MARGIN_S}
        unconfirmed_grant_s = 1.0
        rescan_s = 0.3
        statement_s = {STATEMENT_S}
        retry_s = {RETRY_S}
        [jobs]
        concurrency = 8
        upkeep_s = 0.5
        retry_delay_s = 0.2
        write_patience_s = 3.0
"""


def configuration(provider_url: str) -> str:
    endpoint = "/".join(provider_url.split("/")[:3])
    profiles = "".join(
        f"""
        [providers.{on_cancel}]
        protocol = "chat_completions"
        base_url = "{provider_url}"
        first_byte_s = 3
        gap_s = 2
        execution_limit_s = {EXECUTION_S}
        reasoning_execution_limit_s = {EXECUTION_S}
        isolation_s = {ISOLATION_S}
        queue_timeout_s = {QUEUE_S}
        on_cancel = "{on_cancel}"
        [models.{model}]
        providers = ["{on_cancel}"]
        price = {{ input = "{PRICE_IN}", output = "{PRICE_OUT}" }}
        """
        for model, on_cancel in zip(MODELS, ("drain", "close"), strict=True)
    )
    return f"""
        [gateway]
        drain_s = 5
        {profiles}
        [groups."{endpoint}"]
        concurrency = {LIMIT}
        queue = 100
        first_cooldown_s = 0.5
        longest_cooldown_s = 1.0
        {SHORT_TIMES}
    """


USUAL: Final = Setup(configuration=configuration)


@asynccontextmanager
async def world(
    report: Report,
    *,
    gateways: int = 2,
    server: Server | None = None,
    clock: Clock | None = None,
    pooled: bool = False,
    small: Literal["server", "gateway"] | None = None,
    times: int = 1,
    setup: Setup | None = None,
    requests: int = 0,
    tell: Callable[[str], None] = _nothing,
    server_environ: Mapping[str, str] | None = None,
    gateway_environ: Sequence[Mapping[str, str]] = (),
) -> AsyncIterator[World]:
    """
    `server`: one that runs, to be used and left running. `gateway_environ`: for the first, the second, ...
    `pooled`: the gateways reach the server through a pooler, but for LISTEN.
    `small`: who is on a disk with little room.
    """
    setup = setup or USUAL
    directory = Path(tempfile.mkdtemp(prefix="tollbridge-faults-"))
    seed = report.seed
    async with AsyncExitStack() as stack:
        stack.callback(shutil.rmtree, directory, ignore_errors=True)
        disk: SmallDisk | None = None
        if small is not None:
            place, megabytes = ("server", 400) if small == "server" else ("gateway-0", 8)
            disk = stack.enter_context(small_disk(directory / place, megabytes=megabytes))
        if server is None:
            server = await stack.enter_async_context(postgres_server(directory / "server", environ=server_environ))
        provider = await stack.enter_async_context(simulated_process())
        await provider.set_faults(**QUICK_ANSWERS)
        name = f"faults_{uuid.uuid4().hex[:12]}"
        await fresh_database(server, name)
        shared: Pooler | None = None
        if pooled:
            beneath = await stack.enter_async_context(postgres_proxy(server.url(), seed=f"beneath {seed}"))
            shared = await stack.enter_async_context(pooler(directory / "pooler", beneath.port))
        made = World(
            report=report,
            directory=directory,
            server=server,
            database=name,
            provider=provider,
            clock=clock,
            pooler=shared,
            disk=disk,
            times=times,
            setup=setup,
            requests=requests,
            tell=tell,
        )
        config = directory / "tollbridge.toml"
        config.write_text(setup.configuration(provider.url))
        for number in range(gateways):
            behind = server.url() if shared is None else shared.url
            proxy = await stack.enter_async_context(postgres_proxy(behind, seed=f"proxy {seed} {number}"))
            environ = {"TOLLBRIDGE_DATABASE_URL": proxy.url(name)}
            if shared is not None:
                direct = await stack.enter_async_context(postgres_proxy(server.url(), seed=f"direct {seed} {number}"))
                environ["TOLLBRIDGE_LISTEN_DATABASE_URL"] = direct.url(name)
            environ |= dict(gateway_environ[number]) if number < len(gateway_environ) else {}
            process = GatewayProcess(directory / f"gateway-{number}", config, environ, ())
            made.gateways.append(Gateway(f"{number}", process, proxy, stack))
        stack.push_async_callback(_end, made)
        await asyncio.gather(*(gateway.start() for gateway in made.gateways))
        yield made


async def _end(made: World) -> None:
    """All at once, the stopped ones too. What is to be known of them is known."""
    made.gives_up()
    for gateway in made.gateways:
        gateway.resume()
    await asyncio.gather(*(gateway.process.kill() for gateway in made.gateways if gateway.process.running))
