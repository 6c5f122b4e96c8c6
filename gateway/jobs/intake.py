"""
Takes submissions: reads them to their end, then judges and persists all of their jobs in one transaction.

The answer is given after the commit and never before; a client that stops in the middle has submitted nothing. While
the database writes some lines the next ones are judged.
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterator, Sequence
from typing import TypeAlias

import msgspec

from admission.combiner import Lane
from gateway.database import StoreUnavailable, store_errors
from gateway.errors import Code, GatewayError, IdempotencyMismatch
from gateway.jobs.lane import lane
from gateway.jobs.settings import JobsSettings
from gateway.jobs.spool import Spool
from gateway.jobs.store import INSERT_BYTES, INSERT_ROWS, SPAN, Accepted, JobStore
from gateway.jobs.submission import Asked, Judge, Line, Submission, new_submission_id

#: Submissions of up to this many lines share a statement with others that arrive meanwhile.
_SHARED_LINES = 16
_SHARED_SUBMISSIONS = 64
#: Lines read in one go; then other requests have their turn.
_TURN_LINES = 512
_RETRY_S = 0.1


class JobEntry(msgspec.Struct, frozen=True, kw_only=True):
    id: uuid.UUID
    custom_id: str | None
    line: int


class ErrorEntry(msgspec.Struct, frozen=True, kw_only=True):
    line: int
    custom_id: str | None
    code: str
    message: str
    param: str | None
    #: The failed job that stands for the line in the results.
    id: uuid.UUID | None = None


class Receipt(msgspec.Struct, frozen=True, kw_only=True):
    """What a submission was answered with."""

    submission_id: uuid.UUID
    accepted: int
    rejected: int
    jobs: list[JobEntry]
    errors: list[ErrorEntry]


class _NothingAccepted(Exception):
    """No line is acceptable: what was written of them is to be rolled back."""

    def __init__(self, receipt: Receipt) -> None:
        super().__init__()
        self.receipt = receipt


#: Each call judges the lines from the first on, in batches, and comes to the same.
_Judged: TypeAlias = Callable[[], AsyncIterator[Sequence[Line]]]


class Idempotency(msgspec.Struct, frozen=True, kw_only=True):
    key: str
    #: Of the whole body. Asked for once that has been read.
    digest: Callable[[], bytes]


class Intake:
    def __init__(
        self, store: JobStore, judge: Judge, settings: JobsSettings, *, submitted: Callable[[], object]
    ) -> None:
        """`submitted` is called after each commit: somebody may be waiting for work."""
        self._store = store
        self._judge = judge
        self._settings = settings
        self._submitted = submitted
        self._shared: Lane[Sequence[Line], None] = lane(
            self._insert_shared, most=_SHARED_SUBMISSIONS, patience_s=settings.write_patience_s
        )

    async def submit(
        self,
        key_id: uuid.UUID,
        lines: AsyncIterable[tuple[int, bytes | None]],
        idempotency: Idempotency | None = None,
    ) -> tuple[Receipt, bool]:
        """
        Persist the jobs of these numbered lines; the receipt, and whether it repeats an earlier one.

        Where no line is acceptable nothing is persisted, and the receipt says `accepted` 0. Raises IdempotencyMismatch,
        `payload_too_large`, `content_store_unavailable`, and what `lines` raises.
        """
        submission = Submission(self._judge, key_id)
        spool = Spool(batch_lines=INSERT_ROWS, batch_bytes=INSERT_BYTES, memory_bytes=self._settings.spool_bytes)
        with contextlib.closing(spool):
            count = 0
            async for number, text in lines:
                if count >= self._settings.max_lines or number > SPAN:
                    raise GatewayError(
                        f"a submission may have {self._settings.max_lines} lines", code=Code.PAYLOAD_TOO_LARGE
                    )
                await spool.add(number, text)
                count += 1
                if count % _TURN_LINES == 0:
                    await asyncio.sleep(0)

            async def judged() -> AsyncIterator[Sequence[Line]]:
                submission.begin()
                async for batch in spool.batches():
                    yield await submission.add_all(batch)

            shared = idempotency is None and spool.whole is not None and len(spool.whole) <= _SHARED_LINES
            return await self._keep(key_id, submission.submission_id, judged, idempotency, shared=shared)

    async def take(
        self, key_id: uuid.UUID, asked: Asked, idempotency: Idempotency | None = None
    ) -> tuple[uuid.UUID, bool]:
        """
        Persist one job that was asked for by another API; its id, and whether that is the one of an earlier request.

        Raises as `submit` does, and what is wrong with the request.
        """
        submission_id = new_submission_id()
        job_id = uuid.UUID(int=submission_id.int + 1)
        empty = Line(job_id=job_id, key_id=key_id, submission_id=submission_id, number=1)
        line = self._judge.accept(asked, empty)

        async def judged() -> AsyncIterator[Sequence[Line]]:
            yield [line]

        receipt, repeated = await self._keep(key_id, submission_id, judged, idempotency, shared=idempotency is None)
        return receipt.jobs[0].id, repeated

    async def _keep(
        self,
        key_id: uuid.UUID,
        submission_id: uuid.UUID,
        judged: _Judged,
        idempotency: Idempotency | None,
        *,
        shared: bool,
    ) -> tuple[Receipt, bool]:
        """What was read to its end; the receipt, and whether it repeats an earlier one."""
        receipt, repeated = _empty(submission_id), False
        with as_gateway_error():
            earlier = await self._repeat(key_id, idempotency)
            if earlier is not None:
                return earlier, True
            if shared:
                lines = [line async for batch in judged() for line in batch]
                receipt = _with(receipt, lines)
                if receipt.accepted:
                    await self._shared.submit(lines)
            else:
                receipt, repeated = await self._persist(key_id, submission_id, judged, idempotency)
        if receipt.accepted and not repeated:
            self._submitted()
        return receipt, repeated

    async def _insert_shared(self, submissions: Sequence[Sequence[Line]]) -> Sequence[None]:
        await self._store.insert([line for lines in submissions for line in lines])
        return [None] * len(submissions)

    async def _persist(
        self, key_id: uuid.UUID, submission_id: uuid.UUID, judged: _Judged, idempotency: Idempotency | None
    ) -> tuple[Receipt, bool]:
        """The receipt, and whether it is that of an earlier submission with this key."""
        loop = asyncio.get_running_loop()
        give_up = loop.time() + self._settings.write_patience_s
        while True:
            try:
                with store_errors():
                    return await self._transaction(key_id, submission_id, judged, idempotency)
            except _NothingAccepted as nothing:
                return nothing.receipt, False
            except StoreUnavailable:
                # The commit may have taken effect. The same ids are written again, which then changes nothing.
                if loop.time() >= give_up:
                    raise
                await asyncio.sleep(_RETRY_S)

    async def _transaction(
        self, key_id: uuid.UUID, submission_id: uuid.UUID, judged: _Judged, idempotency: Idempotency | None
    ) -> tuple[Receipt, bool]:
        """Raises _NothingAccepted, which takes back what was written."""
        receipt = _empty(submission_id)

        async def entered() -> AsyncIterator[Sequence[Line]]:
            nonlocal receipt
            async for lines in judged():
                receipt = _with(receipt, lines)
                yield lines

        async with self._store.transaction() as connection:
            if idempotency is not None:
                # Before the jobs: who comes second waits here, and not after having written as much.
                accepted = Accepted(submission_id=submission_id, digest=idempotency.digest(), answer="")
                if not await self._store.accept(connection, key_id, idempotency.key, accepted):
                    earlier = await self._store.submission(key_id, idempotency.key, connection)
                    assert earlier is not None
                    # It may be this one: then an earlier commit of it has taken effect.
                    return _receipt(earlier, idempotency), earlier.submission_id != submission_id
            await self._store.insert_all(entered(), connection)
            if not receipt.accepted:
                raise _NothingAccepted(receipt)
            if idempotency is not None:
                await self._store.answer(connection, submission_id, msgspec.json.encode(receipt).decode())
        return receipt, False

    async def _repeat(self, key_id: uuid.UUID, idempotency: Idempotency | None) -> Receipt | None:
        if idempotency is None:
            return None
        earlier = await self._store.submission(key_id, idempotency.key)
        return None if earlier is None else _receipt(earlier, idempotency)


def matching(earlier: Accepted, digest: bytes) -> Accepted:
    """What the key stands for. Raises IdempotencyMismatch where that was of another body."""
    if earlier.digest != digest:
        raise IdempotencyMismatch("this Idempotency-Key was used with another body", param="idempotency-key")
    return earlier


def _receipt(earlier: Accepted, idempotency: Idempotency) -> Receipt:
    return msgspec.json.decode(matching(earlier, idempotency.digest()).answer, type=Receipt)


def _empty(submission_id: uuid.UUID) -> Receipt:
    return Receipt(submission_id=submission_id, accepted=0, rejected=0, jobs=[], errors=[])


def _with(receipt: Receipt, lines: Sequence[Line]) -> Receipt:
    """The receipt, with these lines entered."""
    receipt.jobs.extend(
        JobEntry(id=line.job_id, custom_id=line.custom_id, line=line.number) for line in lines if line.fault is None
    )
    receipt.errors.extend(
        ErrorEntry(
            line=line.number,
            custom_id=line.custom_id,
            code=line.fault.code,
            message=line.fault.message,
            param=line.fault.param,
            id=line.job_id,
        )
        for line in lines
        if line.fault is not None
    )
    return msgspec.structs.replace(receipt, accepted=len(receipt.jobs), rejected=len(receipt.errors))


@contextlib.contextmanager
def as_gateway_error() -> Iterator[None]:
    """For what is to be persisted."""
    try:
        yield
    except StoreUnavailable as error:
        raise GatewayError(
            "the store of jobs is not available; nothing is known to have been accepted",
            code=Code.CONTENT_STORE_UNAVAILABLE,
            retry_after_s=1.0,
        ) from error
