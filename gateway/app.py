"""
The composition root: opens every part in order, hands each what it needs, unwinds in reverse. Nothing imports it but
the command line.

Stopping is the same order seen from the other end: health first, a little later no new work, then what runs gets its
time, then what it settled is written, and the database goes last.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import UTC, datetime
from typing import Final

import structlog

from adapters.client import Upstream
from adapters.protocols import PROTOCOLS
from admission.contract import StoreUnavailable as AdmissionStoreUnavailable
from admission.controller import Controller
from admission.store import Store
from gateway import database, embedded, pricing
from gateway.billing import Billing
from gateway.capture import Capture
from gateway.capture.store import CaptureStore
from gateway.catalogue import Catalogue
from gateway.config import Settings
from gateway.idempotency import Idempotency
from gateway.idempotency.store import CallStore
from gateway.jobs.batch_store import BatchStore
from gateway.jobs.batches import Batches
from gateway.jobs.formats import formats
from gateway.jobs.intake import Intake
from gateway.jobs.runner import Runner
from gateway.jobs.store import JobStore
from gateway.jobs.submission import Judge
from gateway.jobs.watch import Watch
from gateway.jobs.webhooks import Webhooks
from gateway.keys import Bootstrap, Keys, KeysSettings
from gateway.liveness import Liveness
from gateway.pipeline import Pipeline
from gateway.reading import Reading
from gateway.recovery import Recovery
from gateway.rest import app as rest
from gateway.rest import batches as rest_batches
from gateway.rest import chat as rest_chat
from gateway.rest import content as rest_content
from gateway.rest import counting as rest_counting
from gateway.rest import embeddings as rest_embeddings
from gateway.rest import files as rest_files
from gateway.rest import invocations as rest_invocations
from gateway.rest import jobs as rest_jobs
from gateway.rest import keys as rest_keys
from gateway.rest import message_batches as rest_message_batches
from gateway.rest import models as rest_models
from gateway.rest import operators, usage_resolve
from gateway.rest import responses as rest_responses
from gateway.rest import sessions as rest_sessions
from gateway.rest import usage as rest_usage
from gateway.rest.body import unique_members
from gateway.rest.fields import BY_NAME, options_from_json
from gateway.router import Router
from gateway.rpc import server as rpc
from gateway.sessions import Sessions
from gateway.settling import Replay, Settling
from gateway.standing import Standing
from gateway.stopping import Stopping
from gateway.upkeep import Upkeep
from metering.journal import Journal
from metering.ledger import Ledger
from metering.log import InvocationLog
from metering.prices import PriceBook
from metering.resolving import Resolving
from metering.retention import Retention

log: Final = structlog.get_logger("gateway")

#: How long a start waits for a database that is starting, too.
_START_WAIT_S: Final = 30.0
#: How long a start waits for what dead processes left in their journals; then that goes on beside the rest.
_REPLAY_WAIT_S: Final = 10.0
#: Connections for readings of the invocation log, which may be long: of their own, so that none is kept from others.
_READERS: Final = 4
#: Between looks at whether the embedded server lives.
_WATCH_SERVER_S: Final = 1.0


@asynccontextmanager
async def open_database(settings: Settings) -> AsyncIterator[str]:
    """The database's URL: the given one, or that of an embedded server that is kept alive meanwhile; migrated."""
    async with AsyncExitStack() as stack:
        url = settings.database_url
        if url is None:
            server = await stack.enter_async_context(embedded.running(settings.data_dir))
            url = server.url
            await stack.enter_async_context(_background(_keep_alive(server), name="embedded database"))
        await database.migrate(url, wait_s=_START_WAIT_S, pooled=settings.pooled)
        if settings.content_database_url is not None:
            await database.migrate(settings.content_database_url, wait_s=_START_WAIT_S, pooled=settings.pooled)
        yield url


async def _keep_alive(server: embedded.EmbeddedPostgres) -> None:
    while True:
        await asyncio.sleep(_WATCH_SERVER_S)
        try:
            if await asyncio.to_thread(server.restart_if_dead):
                log.warning("gateway.embedded_database_restarted")
        except embedded.EmbeddedPostgresError as error:
            log.error("gateway.embedded_database_down", reason=str(error))  # noqa: TRY400  it is tried again


async def bootstrap_keys(url: str, settings: Settings) -> Bootstrap:
    """What a first start does about API keys."""
    async with (
        database.open_pool(url, name="tollbridge keys", size=1, wait_s=_START_WAIT_S, pooled=settings.pooled) as pool,
        Keys.open(pool) as keys,
    ):
        return await keys.bootstrap(settings.api_key)


class Gateway:
    """A gateway that serves. Made by `open_gateway`."""

    def __init__(
        self,
        *,
        settings: Settings,
        reading: Reading,
        runner: Runner,
        pipeline: Pipeline,
        rest_server: rest.RestServer,
        rpc_server: rpc.RpcServer,
    ) -> None:
        self._settings = settings
        self._pipeline = pipeline
        self._reading = reading
        self._runner = runner
        self._rest = rest_server
        self._rpc = rpc_server

    @property
    def rest_port(self) -> int:
        return self._rest.port

    @property
    def grpc_port(self) -> int:
        return self._rpc.port

    async def report_health(self) -> None:
        """For ever: the health service says what /readyz says."""
        said = True
        while True:
            ready, _ = self._reading.ready()
            if ready is not said:
                said = ready
                await self._rpc.set_serving(said)
                log.warning("gateway.health_changed", serving=said)
            await asyncio.sleep(0.2)

    async def drain(self) -> None:
        """
        Health says no while all is still served; then nothing new is taken, and what runs ends, or is ended at the
        drain's deadline and its callers told. Of the jobs none is begun from the start.
        """
        delay_s, drain_s = self._settings.drain_delay_s, self._settings.drain_s
        until = asyncio.get_running_loop().time() + delay_s + drain_s
        try:
            await asyncio.gather(
                self._rpc.drain(drain_s, lame_duck_s=delay_s), self._rest.drain(), self._runner.drain(delay_s + drain_s)
            )
            await self._pipeline.drain(until)
        finally:
            # Where the stop is cut short, what is read on is, too.
            await self._pipeline.drain(0.0)


@contextlib.contextmanager
def _of_admission() -> Iterator[None]:
    """A start that meets no store ends with one error, whichever of its parts met it."""
    try:
        yield
    except AdmissionStoreUnavailable as error:
        raise database.StoreUnavailable(f"the database is not available ({type(error.__cause__).__name__})") from error


@asynccontextmanager
async def open_gateway(settings: Settings, url: str) -> AsyncIterator[Gateway]:
    """
    Serves while entered; leaving drains. The database must be migrated.

    Raises `gateway.database.DatabaseError`, `OSError` where an address cannot be had.
    """
    settings.data_dir.mkdir(parents=True, exist_ok=True)
    async with AsyncExitStack() as stack:
        control = await stack.enter_async_context(
            database.open_pool(url, name="tollbridge control", size=4, wait_s=_START_WAIT_S, pooled=settings.pooled)
        )
        content = await stack.enter_async_context(
            database.open_pool(
                settings.content_database_url or url,
                name="tollbridge content",
                size=8,
                wait_s=_START_WAIT_S,
                pooled=settings.pooled,
            )
        )
        # Of its own, so that no reader keeps it from hearing of a revocation.
        keys = await stack.enter_async_context(
            Keys.open(
                await stack.enter_async_context(
                    database.open_pool(url, name="tollbridge keys", size=1, pooled=settings.pooled)
                ),
                KeysSettings(providers=frozenset(settings.providers), zone=settings.admission.zone),
            )
        )
        invocations = InvocationLog(
            await stack.enter_async_context(
                database.open_pool(url, name="tollbridge log", size=_READERS, pooled=settings.pooled)
            ),
            zone=settings.admission.zone,
            readers=_READERS,
        )
        ledger = Ledger(control, zone=settings.admission.zone)
        upkeep = Upkeep(Retention(control, keep_days=settings.keep_invocations_days))
        await upkeep.partition()
        await stack.enter_async_context(_background(upkeep.hourly(), name="upkeep"))

        store = Store(url, settings.admission, listen_url=settings.listen_database_url)
        stack.push_async_callback(store.close)
        with _of_admission():
            others = await store.configure()
        if others:
            log.warning(
                "gateway.newer_limits_in_force",
                groups=[name for name in others if "#" not in name],
                endpoints=[endpoint.replace("#", " of provider ") for endpoint in others if "#" in endpoint],
                hint="raise admission.revision to replace them",
            )
        liveness = stack.enter_context(Liveness(settings.data_dir).opened())
        journal = await stack.enter_async_context(Journal(settings.data_dir / "journal").opened())
        with _of_admission():
            controller = await stack.enter_async_context(Controller(store, settings.admission).opened())
        settling = await stack.enter_async_context(
            Settling(controller, settings.routing.settlement_patience_s, journal).opened()
        )
        await stack.enter_async_context(_background(settling.report(), name="journal"))
        # Before the dead are buried: what they charged is then charged, and not unknown first.
        replay = Replay(journal, controller, ledger.states)
        await stack.enter_async_context(_background(replay.watch(), name="replay"))
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(replay.looked.wait(), _REPLAY_WAIT_S)

        adapter = await stack.enter_async_context(Upstream())
        prices = await _prices(settings)
        billing = Billing(prices)
        router = Router(settings.providers, settings.models, billing, settings.routing, settings.roles)
        standing = Standing(settings.admission)
        stopping = Stopping()
        pipeline = Pipeline(
            router=router,
            controller=controller,
            adapter=adapter,
            billing=billing,
            usable=lambda call: keys.usable(call.caller.key_id),
            settings=settings.routing,
            standing=standing,
            settling=settling,
            stopping=stopping,
        )

        recovery = Recovery(
            liveness=liveness,
            controller=controller,
            store=store,
            ledger=ledger,
            billing=billing,
            providers=dict(settings.providers),
        )
        await recovery.look()
        await stack.enter_async_context(_background(recovery.watch(), name="recovery"))

        captures = CaptureStore(content)
        line: Pipeline | Capture = pipeline
        if settings.capture.enabled:
            line = await stack.enter_async_context(
                Capture(line=pipeline, store=captures, settings=settings.capture).opened()
            )
        once = await stack.enter_async_context(
            Idempotency(
                line=line,
                store=CallStore(content, retention_s=settings.idempotency.retention_s),
                recovery=recovery,
                owner=controller.process,
                settings=settings.idempotency,
            ).opened()
        )

        job_store = JobStore(content, settings.jobs)
        stack.push_async_callback(job_store.let_go)
        watch = Watch(job_store, settings.jobs)
        stack.push_async_callback(watch.close)
        runner = Runner(
            store=job_store,
            line=line,
            formats=formats(PROTOCOLS),
            callers=keys,
            recovery=recovery,
            watch=watch,
            owner=controller.process,
            settings=settings.jobs,
            stopping=stopping,
        )
        webhooks = await stack.enter_async_context(Webhooks(content, job_store, settings.webhooks).opened())
        judge = Judge(
            caller_fields=BY_NAME,
            parse_options=options_from_json,
            formats=formats(PROTOCOLS),
            resolve=router.known,
            policy_of=keys.policy,
            unambiguous=unique_members,
            may_be_told=webhooks.destinations.check,
            settings=settings.jobs,
        )
        intake = Intake(job_store, judge, settings.jobs, submitted=runner.wake)
        batches = await stack.enter_async_context(
            Batches(
                BatchStore(content, job_store, settings.jobs),
                judge,
                settings.jobs,
                submitted=runner.wake,
                ended=watch.ended,
            ).opened()
        )
        responses = rest_responses.Responses(store=job_store, intake=intake, watch=watch, runner=runner)
        reading = Reading(settings, controller, store, ledger, Resolving(control), keys, settling, runner)
        rest_server = await stack.enter_async_context(
            rest.serve(
                rest.RestSettings(
                    host=settings.rest.host,
                    port=settings.rest.port,
                    reuse_port=True,
                    drain_delay_s=settings.drain_delay_s,
                    drain_s=settings.drain_s,
                ),
                [
                    *rest_chat.routes(line=once, settings=settings.streams, in_background=responses.create),
                    *responses.routes(),
                    *rest_embeddings.routes(line=once),
                    *rest_counting.routes(line=pipeline),
                    *rest_models.routes(
                        catalogue=Catalogue(settings.providers, settings.models, prices), allowed=router.allowed
                    ),
                    *operators.routes(readiness=reading, groups=reading),
                    *rest_usage.routes(usage=reading),
                    *rest_content.routes(captures=captures),
                    *usage_resolve.routes(resolver=reading),
                    *rest_invocations.routes(reader=invocations),
                    *rest_sessions.routes(sessions=Sessions(control)),
                    *rest_jobs.routes(
                        store=job_store,
                        intake=intake,
                        watch=watch,
                        runner=runner,
                        waits=reading,
                        costs=recovery,
                        settings=settings.jobs,
                    ),
                    *rest_files.routes(store=batches.store, settings=settings.jobs),
                    *rest_batches.routes(batches=batches, may_be_told=webhooks.destinations.check),
                    *rest_message_batches.routes(
                        batches=batches, may_be_told=webhooks.destinations.check, settings=settings.jobs
                    ),
                    *rest_keys.routes(keys=keys),
                ],
                keys,
                stopping,
            )
        )
        rpc_server = await stack.enter_async_context(
            rpc.open_server(
                rpc.RpcSettings(
                    host=settings.grpc.host,
                    port=settings.grpc.port,
                    idle_consumer_s=settings.streams.idle_reader_s,
                    drain_s=settings.drain_s,
                ),
                line=once,
                authenticator=keys,
                stopping=stopping,
            )
        )
        await stack.enter_async_context(runner)
        gateway = Gateway(
            settings=settings,
            reading=reading,
            runner=runner,
            pipeline=pipeline,
            rest_server=rest_server,
            rpc_server=rpc_server,
        )
        stack.push_async_callback(gateway.drain)
        await stack.enter_async_context(_background(gateway.report_health(), name="health"))
        yield gateway


async def _prices(settings: Settings) -> PriceBook:
    """Raises `ConfigFaults`."""
    # Loading the price list takes a third of a second, and no request should wait for it.
    prices, unpriced, refused = await asyncio.to_thread(pricing.checked_at_start, settings, datetime.now(UTC))
    if refused:
        log.warning("gateway.models_without_price", models=unpriced, refused=refused)
    elif unpriced:
        log.info("gateway.models_without_price", models=unpriced, refused=[])
    return prices.book


@asynccontextmanager
async def _background(work: Coroutine[None, None, None], *, name: str) -> AsyncIterator[None]:
    """Runs beside the block and is cancelled after it. Should it end by itself, that is an event."""
    task = asyncio.create_task(work, name=name)
    task.add_done_callback(_ended)
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


def _ended(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("gateway.task_failed", task=task.get_name(), exc_info=error)
