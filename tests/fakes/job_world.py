"""Everything jobs need but a gateway around them: a real store, real REST, any number of runners, a fake line."""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import httpx
import msgspec

from adapters.protocols import PROTOCOLS
from admission.ids import new_id
from admission.lease import Waiting
from gateway import database
from gateway.call import Caller, Scope
from gateway.errors import ModelNotFound, Unauthenticated
from gateway.jobs.batch_store import BatchStore
from gateway.jobs.batches import Batches
from gateway.jobs.formats import formats
from gateway.jobs.intake import Intake, Receipt
from gateway.jobs.model import Status
from gateway.jobs.runner import Runner
from gateway.jobs.settings import JobsSettings, WebhookSettings
from gateway.jobs.store import JobStore
from gateway.jobs.submission import Judge
from gateway.jobs.watch import Watch
from gateway.jobs.webhooks import Webhooks
from gateway.policy import ANYTHING, Policy
from gateway.rest import batches as rest_batches
from gateway.rest import chat as rest_chat
from gateway.rest import files as rest_files
from gateway.rest import jobs as rest_jobs
from gateway.rest import message_batches as rest_message_batches
from gateway.rest.app import RestSettings, serve
from gateway.rest.body import unique_members
from gateway.rest.fields import BY_NAME, options_from_json
from gateway.rest.responses import Responses
from gateway.rest.streams import StreamSettings
from tests.fakes.job_line import FakeCallers, FakeLine, FakeRecovery
from tests.postgres import execute, url_of

FAST = JobsSettings(
    poll_shortest_s=0.01,
    poll_longest_s=0.05,
    cancel_poll_s=0.05,
    watch_poll_s=0.05,
    upkeep_s=0.05,
    refused_delay_s=0.01,
    full_hold_s=0.01,
    refused_hold_s=0.05,
    retry_delay_s=0.01,
    retry_longest_s=0.05,
    write_patience_s=3.0,
    batch_poll_s=0.02,
)
CALLS = frozenset({Scope.CHAT, Scope.JOBS})
#: Nobody may be told of anything.
NO_WEBHOOKS = WebhookSettings()
#: Seconds for what should take milliseconds.
SOON = 10.0


def line(custom_id: str | None = None, *, model: str = "ok", **fields: Any) -> dict[str, Any]:
    body = {"model": model, "messages": [{"role": "user", "content": "hi"}]}
    named = {} if custom_id is None else {"custom_id": custom_id}
    return {**named, "method": "POST", "url": "/v1/chat/completions", "body": body, **fields}


def ndjson(lines: Iterable[object]) -> bytes:
    return b"".join((one if isinstance(one, bytes) else json.dumps(one).encode()) + b"\n" for one in lines)


async def until(condition: Callable[[], Awaitable[bool] | bool]) -> None:
    async with asyncio.timeout(SOON):
        while True:
            found = condition()
            if found if isinstance(found, bool) else await found:
                return
            await asyncio.sleep(0.005)


class FakeKeys:
    """Tokens are the names of callers; every name is a caller."""

    def __init__(self) -> None:
        self.callers: dict[str, Caller] = {}

    async def authenticate(self, token: str | None) -> Caller:
        if not token:
            raise Unauthenticated
        if token not in self.callers:
            self.callers[token] = Caller(key_id=new_id(), name=token, scopes=CALLS)
        return self.callers[token]


class FakeWaits:
    def __init__(self) -> None:
        self.known: dict[str, Waiting] = {}

    async def waiting(self, debit_ids: Sequence[str]) -> dict[str, Waiting]:
        return {debit: self.known[debit] for debit in debit_ids if debit in self.known}


class Routed:
    """Whatever runner is there."""

    def __init__(self) -> None:
        self.runner: Runner | None = None

    def cancel(self, job_id: uuid.UUID) -> None:
        if self.runner is not None:
            self.runner.cancel(job_id)

    def wake(self) -> None:
        if self.runner is not None:
            self.runner.wake()


class World:
    def __init__(self, pool: database.Pool, settings: JobsSettings, webhooks: WebhookSettings = NO_WEBHOOKS) -> None:
        self.pool = pool
        self.settings = settings
        self.stores: list[JobStore] = []
        self.store = self.another_store()
        self.watch = Watch(self.store, settings)
        self.line = FakeLine()
        self.callers = FakeCallers()
        self.recovery = FakeRecovery()
        self.waits = FakeWaits()
        self.local = Routed()
        self.key_id = new_id()
        self.webhooks = Webhooks(pool, self.store, webhooks)
        judge = Judge(
            caller_fields=BY_NAME,
            parse_options=options_from_json,
            formats=formats(PROTOCOLS),
            resolve=self._resolve,
            policy_of=lambda _: ANYTHING,
            unambiguous=unique_members,
            may_be_told=self.webhooks.destinations.check,
            settings=settings,
        )
        self.intake = Intake(self.store, judge, settings, submitted=self.local.wake)
        self.batches = Batches(
            BatchStore(pool, self.store, settings),
            judge,
            settings,
            submitted=self.local.wake,
            ended=self.watch.ended,
        )

    def _resolve(self, model: str, _role: str | None, _policy: Policy) -> None:
        if model == "missing":
            raise ModelNotFound("no configured model has this name", param="body.model")

    def another_store(self) -> JobStore:
        """As another process has it."""
        self.stores.append(JobStore(self.pool, self.settings))
        return self.stores[-1]

    def runner(self, owner: uuid.UUID | None = None, *, line: FakeLine | None = None, **settings: Any) -> Runner:
        return Runner(
            store=self.store,
            line=line or self.line,
            formats=formats(PROTOCOLS),
            callers=self.callers,
            recovery=self.recovery,
            watch=self.watch,
            owner=owner or new_id(),
            settings=msgspec.structs.replace(self.settings, **settings),
        )

    async def submit(self, *lines: object) -> Receipt:
        async def numbered() -> AsyncIterator[tuple[int, bytes | None]]:
            for number, one in enumerate(lines, 1):
                yield number, one if isinstance(one, bytes) else json.dumps(one).encode()

        receipt, _ = await self.intake.submit(self.key_id, numbered())
        return receipt

    async def one(self, **fields: Any) -> uuid.UUID:
        return (await self.submit(line(**fields))).jobs[0].id

    async def row(self, job_id: uuid.UUID) -> dict[str, Any]:
        row = await self.pool.fetchrow("select * from content.job where job_id = $1", job_id)
        assert row is not None
        return dict(row)

    async def status(self, job_id: uuid.UUID) -> Status:
        return Status((await self.row(job_id))["status"])

    async def count(self, status: str) -> int:
        count: int = await self.pool.fetchval("select count(*) from content.job where status = $1", status)
        return count

    async def step(self, seconds: float) -> None:
        """Set the server's clock, as far as the store's time goes: what is made up for is on top of that."""
        await self.pool.execute("update control.store set ahead = ahead + make_interval(secs => $1)", seconds)

    async def ahead_s(self) -> float:
        """How far the store's time is ahead of the clock."""
        ahead: float = await self.pool.fetchval("select extract(epoch from ahead)::float8 from control.store")
        return ahead

    async def ended(self, *job_ids: uuid.UUID) -> list[dict[str, Any]]:
        async def all_ended() -> bool:
            return len(await self.store.ended(job_ids)) == len(job_ids)

        await until(all_ended)
        return [await self.row(job_id) for job_id in job_ids]


def own_database(server: str, template: str) -> Iterator[str]:
    """The URL of a migrated database, for a module's own fixture."""
    name = f"tollbridge_jobs_{uuid.uuid4().hex}"
    execute(server, f"create database {name} template {template}")
    yield url_of(server, name)
    execute(server, f"drop database {name} with (force)")


@asynccontextmanager
async def world_on(
    url: str, settings: JobsSettings = FAST, webhooks: WebhookSettings = NO_WEBHOOKS
) -> AsyncIterator[World]:
    async with database.open_pool(url, name="test-jobs", size=8) as pool:
        # One database serves all tests of a module: making one takes longer than most of them.
        await pool.execute(
            "truncate content.job, content.submission, content.file, content.file_line, content.batch, content.webhook"
        )
        await pool.execute("update control.store set ahead = '0', steps = 0")
        world = World(pool, settings, webhooks)
        try:
            yield world
        finally:
            await world.watch.close()
            for store in world.stores:
                await store.let_go()


@asynccontextmanager
async def client_of(world: World) -> AsyncIterator[httpx.AsyncClient]:
    keys = FakeKeys()
    keys.callers["me"] = Caller(key_id=world.key_id, name="me", scopes=CALLS)
    keys.callers["only-jobs"] = Caller(key_id=world.key_id, name="only-jobs", scopes=frozenset({Scope.JOBS}))
    responses = Responses(
        store=world.store, intake=world.intake, watch=world.watch, runner=world.local, cancel_patience_s=60.0
    )
    endpoints = [
        *rest_chat.routes(line=world.line, settings=StreamSettings(), in_background=responses.create),
        *responses.routes(),
        *rest_jobs.routes(
            store=world.store,
            intake=world.intake,
            watch=world.watch,
            runner=world.local,
            waits=world.waits,
            costs=world.recovery,
            settings=world.settings,
        ),
        *rest_files.routes(store=world.batches.store, settings=world.settings),
        *rest_batches.routes(batches=world.batches, may_be_told=world.webhooks.destinations.check),
        *rest_message_batches.routes(
            batches=world.batches, may_be_told=world.webhooks.destinations.check, settings=world.settings
        ),
    ]
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(serve(RestSettings(port=0, drain_s=1.0), endpoints, keys))
        yield await stack.enter_async_context(
            httpx.AsyncClient(
                base_url=f"http://127.0.0.1:{server.port}", headers={"authorization": "Bearer me"}, timeout=60
            )
        )
