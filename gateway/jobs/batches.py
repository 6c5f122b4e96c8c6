"""
Batches: groups of jobs that a file submits at once, from their acceptance to their outputs.

    validating ---every line may run---> in_progress ---every job has ended---> finalizing ---> completed | expired
        |  `---a line is wrong---> failed     |
        `--------------cancel-----------------`---> cancelling ---every job has ended---> cancelled

A batch is in the hands of one process for as long as the transaction lasts in which its next step is made; a step that
its process does not survive was never made. So any process may take any batch at any time, and each line becomes a job
exactly once.
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from datetime import datetime

import asyncpg
import msgspec
import structlog

from admission.ids import new_id
from gateway.database import StoreUnavailable, store_errors
from gateway.errors import Code, GatewayError, NotFound
from gateway.jobs.batch_store import BatchStore, BatchView, LineFault, Moved, NewBatch, Output, Over, Taken, Usage
from gateway.jobs.intake import as_gateway_error, matching
from gateway.jobs.model import Status
from gateway.jobs.output import batch_line
from gateway.jobs.rounds import rounds
from gateway.jobs.settings import JobsSettings
from gateway.jobs.store import Accepted, Session
from gateway.jobs.submission import Judge, Line, Submission, request_in

log = structlog.get_logger(__name__)

#: Faults that are kept of one file, so that what is told of it stays readable. All are counted.
MOST_FAULTS = 1000
#: Lines of an output measured in one go; then other requests have their turn.
_TURN_LINES = 32
#: Queued jobs that are cancelled by one statement.
_CANCELLED_ROWS = 500
_RETRY_S = 0.1
_MOST_PURGED = 20
#: A count of jobs is not repeated sooner than this, nor sooner than ten times what it took.
_COUNTED_FOR_S = 1.0
_MOST_COUNTED = 1000

OPEN = frozenset({"validating", "in_progress", "finalizing", "cancelling"})


class _Count:
    """How far one batch is, as it was counted last."""

    def __init__(self) -> None:
        self.turn = asyncio.Lock()
        self.until = 0.0
        self.counts = (0, 0)


class Batches:
    """The batches of one process. `opened`, it does what any of them needs next."""

    def __init__(
        self,
        store: BatchStore,
        judge: Judge,
        settings: JobsSettings,
        *,
        submitted: Callable[[], object],
        ended: Callable[[Iterable[uuid.UUID]], object],
    ) -> None:
        """`submitted` is called when there are new jobs, `ended` with those that have ended here."""
        self.store = store
        self._judge = judge
        self._settings = settings
        self._submitted = submitted
        self._ended = ended
        self._wake = asyncio.Event()
        self._counted: dict[uuid.UUID, _Count] = {}

    @contextlib.asynccontextmanager
    async def opened(self) -> AsyncIterator[Batches]:
        loops = [
            asyncio.create_task(rounds("batches", self._look), name="batches"),
            asyncio.create_task(rounds("batches-purge", self._purge), name="batches-purge"),
        ]
        try:
            yield self
        finally:
            for loop in loops:
                loop.cancel()
            await asyncio.gather(*loops, return_exceptions=True)

    # -------------------------------------------------------------- for callers

    async def create(
        self, key_id: uuid.UUID, batch: NewBatch, *, idempotency_key: str | None, digest: bytes
    ) -> tuple[BatchView, bool]:
        """
        Accept a batch; and whether it was accepted before under this idempotency key.

        Raises NotFound for an input that is none, IdempotencyMismatch, `content_store_unavailable`.
        """
        loop = asyncio.get_running_loop()
        give_up = loop.time() + self._settings.write_patience_s
        accepted = Accepted(submission_id=batch.batch_id, digest=digest, answer="{}")
        with as_gateway_error():
            batch_id: uuid.UUID | None = None
            while batch_id is None:
                try:
                    with store_errors():
                        batch_id = await self._create(key_id, batch, idempotency_key, accepted)
                except StoreUnavailable:
                    # The commit may have taken effect. The same id is written again, which then changes nothing.
                    if loop.time() >= give_up:
                        raise
                    await asyncio.sleep(_RETRY_S)
            view = await self.store.get(key_id, batch_id)
        if view is None:
            raise NotFound("the batch that this Idempotency-Key stands for was deleted")
        self._wake.set()
        return view, batch_id != batch.batch_id

    async def _create(self, key_id: uuid.UUID, batch: NewBatch, key: str | None, accepted: Accepted) -> uuid.UUID:
        jobs = self.store.jobs
        async with jobs.transaction() as connection:
            if key is not None and not await jobs.accept(connection, key_id, key, accepted):
                earlier = await jobs.submission(key_id, key, connection)
                assert earlier is not None
                return matching(earlier, accepted.digest).submission_id
            if not await self.store.lock_input(connection, key_id, batch.input_file_id):
                raise NotFound("no such file, or not one of purpose `batch`", param="input_file_id")
            await self.store.create(connection, key_id, batch)
        return batch.batch_id

    async def counts(self, batch: BatchView) -> tuple[int, int]:
        """
        How many jobs succeeded, and how many ended otherwise. While the batch runs this may be a second old, or ten
        times as old as counting takes: callers who ask all the time must not slow down what they ask about.
        """
        if batch.completed is not None and batch.failed is not None:
            self._counted.pop(batch.batch_id, None)
            return batch.completed, batch.failed
        if not batch.total:
            return 0, 0
        count = self._counted.setdefault(batch.batch_id, _Count())
        loop = asyncio.get_running_loop()
        async with count.turn:
            began = loop.time()
            if began >= count.until:
                count.counts = await self.store.counts(batch.key_id, batch.batch_id, batch.last_job_id)
                now = loop.time()
                count.until = now + max(_COUNTED_FOR_S, 10 * (now - began))
        if len(self._counted) > _MOST_COUNTED:
            self._counted.pop(next(iter(self._counted)), None)
        return count.counts

    def lines(self, key_id: uuid.UUID, endpoint: str, within_s: float) -> Submission:
        """Judges the lines of a batch that is not accepted yet, as they will be judged then."""
        return Submission(self._judge.for_batch(endpoint, within_s), key_id)

    async def cancel(self, key_id: uuid.UUID, batch_id: uuid.UUID) -> bool:
        """False: there was nothing to cancel any more, or never."""
        asked = await self.store.cancel(key_id, batch_id)
        self._wake.set()
        return asked

    # -------------------------------------------------------------- for the batches

    async def _look(self) -> float:
        self._wake.clear()
        await self.look_after_all()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._wake.wait(), self._settings.batch_poll_s)
        return 0.0

    async def _purge(self) -> float:
        return 0.05 if await self.store.purge(_MOST_PURGED) >= _MOST_PURGED else self._settings.purge_s

    async def look_after_all(self) -> None:
        """Each batch that needs something gets its next step, here or in the process that has it."""
        for batch_id in await self.store.due():
            try:
                await self._look_after(batch_id)
            except (asyncpg.PostgresError, asyncpg.InterfaceError, GatewayError, ValueError):
                log.exception("batches.fault", batch_id=str(batch_id))
                await self._give_up(batch_id)

    async def _look_after(self, batch_id: uuid.UUID) -> None:
        """Steps until it waits for its jobs, or is over."""
        with contextlib.suppress(Moved):
            while await self._step(batch_id):
                pass

    async def _step(self, batch_id: uuid.UUID) -> bool:
        """Whether there is another one to be made at once."""
        cancelling: Taken | None = None
        with store_errors():
            async with self.store.jobs.transaction() as connection:
                batch = await self.store.take(connection, batch_id)
                if batch is None:
                    return False
                match batch.status:
                    case "validating":
                        over = await self._validate(connection, batch)
                    case "in_progress":
                        if not await self.store.has_open_jobs(connection, batch):
                            await self.store.finalizing(connection, batch_id)
                            return True
                        return False
                    case "cancelling" if await self.store.has_open_jobs(connection, batch):
                        cancelling, over = batch, None
                    case _:
                        over = await self._outcome(connection, batch)
                if over is not None:
                    await self.store.end(connection, batch, over)
        if cancelling is not None:
            return await self._cancel_jobs(cancelling)
        if over is None:
            self._submitted()
        else:
            log.info(
                "batches.ended",
                batch_id=str(batch_id),
                status=over.status,
                completed=over.completed,
                failed=over.failed,
            )
        return False

    async def _give_up(self, batch_id: uuid.UUID) -> None:
        """A batch that cannot be validated would be tried for ever. Others are tried again: they have results."""
        fault = LineFault(line=0, code=Code.INTERNAL.value, message="the gateway could not read the input")
        with store_errors():
            async with self.store.jobs.transaction() as connection:
                batch = await self.store.take(connection, batch_id)
                if batch is not None and batch.status == "validating":
                    await self.store.end(connection, batch, Over(status="failed", errors=[fault]))

    async def _validate(self, connection: Session, batch: Taken) -> Over | None:
        """None: all of its lines have become jobs. Else nothing of it has."""
        if batch.remaining_s <= 0:
            return Over(status="expired")
        submission = Submission(self._judge.for_batch(batch.endpoint, batch.remaining_s), batch.key_id, batch.batch_id)
        faults: list[LineFault] = []
        accepted = refused = 0
        jobs = connection.transaction()
        await jobs.start()

        async def judged() -> AsyncIterator[Sequence[Line]]:
            nonlocal accepted, refused
            after = 0
            # Through another connection: on this one the jobs of the page before are being written.
            while page := await self.store.lines(batch.input_file_id, after):
                after = page[-1][0]
                requests = [(number, request) for number, text in page if (request := request_in(text))]
                lines = await submission.add_all(requests)
                wrong = [line for line in lines if line.fault is not None]
                faults.extend(_fault(line) for line in wrong[: max(MOST_FAULTS - refused, 0)])
                refused += len(wrong)
                accepted += len(lines) - len(wrong)
                if not refused:
                    yield [msgspec.structs.replace(line, body=None, file_id=batch.input_file_id) for line in lines]

        await self.store.jobs.insert_all(judged(), connection)
        if accepted and not refused:
            await jobs.commit()
            await self.store.started(connection, batch.batch_id, accepted)
            return None
        await jobs.rollback()
        if refused > MOST_FAULTS:
            more = f"{refused - MOST_FAULTS} more lines are wrong"
            faults.append(LineFault(line=0, code=Code.INVALID_REQUEST.value, message=more))
        if not faults:
            faults.append(LineFault(line=0, code=Code.INVALID_REQUEST.value, message="the input has no line"))
        return Over(status="failed", errors=faults)

    async def _outcome(self, connection: Session, batch: Taken) -> Over:
        outputs: list[Output] = []
        counts = {False: 0, True: 0}
        tokens = dict.fromkeys(("input_tokens", "cached_tokens", "output_tokens", "reasoning_tokens"), 0)
        expired = False
        for failures in (False, True):
            after, size = batch.batch_id, 0
            goes: datetime | None = None
            while page := await self.store.output(
                (batch.key_id, after, batch.last_job_id), failures=failures, connection=connection
            ):
                after = page[-1][0].job_id
                for turn, (result, expires_at) in enumerate(page):
                    if turn % _TURN_LINES == 0:
                        await asyncio.sleep(0)
                    size += len(batch_line(result))
                    counts[failures] += 1
                    goes = expires_at if goes is None else min(goes, expires_at)
                    expired = expired or result.status is Status.EXPIRED
                    if result.outcome is not None:
                        used = result.outcome.usage
                        tokens["input_tokens"] += used.input_total or 0
                        tokens["cached_tokens"] += used.cache_read or 0
                        tokens["output_tokens"] += used.output_total or 0
                        tokens["reasoning_tokens"] += used.reasoning or 0
            if goes is not None:
                kind = "error" if failures else "output"
                name = f"batch_{batch.batch_id.hex}_{kind}.jsonl"
                outputs.append(Output(file_id=new_id(), filename=name, failures=failures, bytes=size, expires_at=goes))
        status = "completed"
        if batch.status == "cancelling":
            status = "cancelled"
        elif expired and batch.remaining_s <= 0:
            status = "expired"
        return Over(status=status, completed=counts[False], failed=counts[True], usage=Usage(**tokens), outputs=outputs)

    async def _cancel_jobs(self, batch: Taken) -> bool:
        """Whether some were cancelled: it may be over then."""
        asked = await self.store.cancel_running(batch)
        any_ended = False
        while cancelled := await self.store.cancel_queued(batch, _CANCELLED_ROWS):
            any_ended = True
            self._ended(cancelled)
        if asked:
            log.info("batches.cancelling", batch_id=str(batch.batch_id), running=len(asked))
        return any_ended


def _fault(line: Line) -> LineFault:
    fault = line.fault
    assert fault is not None
    return LineFault(line=line.number, code=fault.code, message=fault.message, param=fault.param)
