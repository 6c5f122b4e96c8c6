"""
The tables of files and batches, one method per statement.

A batch is a group of jobs with a row of its own, and its input is the text of their requests: a job of a batch has no
body, it names the line. So nothing is kept twice, however large a file is. The outputs are made from the jobs when they
are read.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import msgspec

from gateway.database import Pool, store_errors
from gateway.jobs.model import Result, Status
from gateway.jobs.settings import JobsSettings
from gateway.jobs.store import PAGE_BYTES, PAGE_ROWS, SPAN, JobStore, Session, read_outcome, read_statement
from gateway.jobs.submission import Fault

FILE_BEGIN = read_statement("file_begin")
FILE_LINES = read_statement("file_lines")
FILE_READY = read_statement("file_ready")
FILE_GET = read_statement("file_get")
FILE_LIST = read_statement("file_list")
FILE_LIST_OLDEST = read_statement("file_list_oldest")
FILE_PAGE = read_statement("file_page")
FILE_COUNT = read_statement("file_count")
FILE_DELETE = read_statement("file_delete")
FILE_LOCK = read_statement("file_lock")
FILE_LEFTOVERS = read_statement("file_leftovers")
FILE_FORGET = read_statement("file_forget")
OUTPUT_PAGE = read_statement("output_page")
OUTPUT_DELETE = read_statement("output_delete")
BATCH_CREATE = read_statement("batch_create")
BATCH_GET = read_statement("batch_get")
BATCH_LIST = read_statement("batch_list")
BATCH_COUNTS = read_statement("batch_counts")
BATCH_TAKEN_BACK = read_statement("batch_taken_back")
BATCH_DELETE = read_statement("batch_delete")
BATCH_DUE = read_statement("batch_due")
BATCH_TAKE = read_statement("batch_take")
BATCH_OPEN_JOBS = read_statement("batch_open_jobs")
BATCH_STARTED = read_statement("batch_started")
BATCH_FINALIZING = read_statement("batch_finalizing")
BATCH_END = read_statement("batch_end")
BATCH_OUTPUT = read_statement("batch_output")
BATCH_CANCEL = read_statement("batch_cancel")
BATCH_CANCEL_QUEUED = read_statement("batch_cancel_queued")
BATCH_CANCEL_RUNNING = read_statement("batch_cancel_running")
PURGE_BATCHES = read_statement("purge_batches")

#: Rows of a piece of a file's removal.
_REMOVED_ROWS = 1000

_FIRST, _LAST = uuid.UUID(int=0), uuid.UUID(int=(1 << 128) - 1)


def last_job_id(batch_id: uuid.UUID) -> uuid.UUID:
    """No job of this batch has a higher id."""
    return uuid.UUID(int=batch_id.int + SPAN)


class Moved(Exception):
    """The batch is in another status by now. What was written for it is to be rolled back."""


class FileView(msgspec.Struct, frozen=True, kw_only=True):
    """A file as its caller may see it."""

    file_id: uuid.UUID
    filename: str
    purpose: str
    bytes: int
    #: The batch that it is an output of.
    batch_id: uuid.UUID | None
    #: Of an output: its lines are those that did not succeed.
    failures: bool | None
    created_at: datetime
    expires_at: datetime


class LineFault(Fault, frozen=True, kw_only=True):
    """Why a line of an input was refused; 0: the file as a whole."""

    line: int


class BatchView(msgspec.Struct, frozen=True, kw_only=True):
    """A batch as its caller may see it."""

    batch_id: uuid.UUID
    key_id: uuid.UUID
    last_job_id: uuid.UUID
    input_file_id: uuid.UUID
    endpoint: str
    completion_window: str
    metadata: Mapping[str, str] | None
    status: str
    errors: Sequence[LineFault]
    total: int
    #: Of jobs that succeeded, and that ended otherwise. None: not over, count them.
    completed: int | None
    failed: int | None
    usage: Usage | None
    output_file_id: uuid.UUID | None
    error_file_id: uuid.UUID | None
    created_at: datetime
    deadline_at: datetime
    in_progress_at: datetime | None
    finalizing_at: datetime | None
    cancelling_at: datetime | None
    ended_at: datetime | None


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of a batch, where its providers told them."""

    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    reasoning_tokens: int = 0


class NewBatch(msgspec.Struct, frozen=True, kw_only=True):
    batch_id: uuid.UUID
    input_file_id: uuid.UUID
    endpoint: str
    completion_window: str
    window_s: float
    metadata: Mapping[str, str] | None
    output_retention_s: float | None
    #: Who is told of its end.
    webhook_url: str | None = None

    @property
    def last_job_id(self) -> uuid.UUID:
        return last_job_id(self.batch_id)


class Taken(msgspec.Struct, frozen=True, kw_only=True):
    """A batch in hand, for as long as a transaction lasts."""

    batch_id: uuid.UUID
    key_id: uuid.UUID
    last_job_id: uuid.UUID
    input_file_id: uuid.UUID
    endpoint: str
    status: str
    output_retention_s: float | None
    #: Of its window; negative when it is over.
    remaining_s: float

    @property
    def jobs(self) -> tuple[uuid.UUID, uuid.UUID, uuid.UUID]:
        """Its key, and the ids between which its jobs are."""
        return self.key_id, self.batch_id, self.last_job_id


class Output(msgspec.Struct, frozen=True, kw_only=True):
    """One of the two files of a batch that is over."""

    file_id: uuid.UUID
    filename: str
    failures: bool
    bytes: int
    #: When the first of its jobs goes, in the store's time.
    expires_at: datetime


class Over(msgspec.Struct, frozen=True, kw_only=True):
    """How a batch ended."""

    status: str
    completed: int = 0
    failed: int = 0
    usage: Usage | None = None
    outputs: Sequence[Output] = ()
    errors: Sequence[LineFault] = ()


_faults = msgspec.json.Decoder(list[LineFault])
_metadata = msgspec.json.Decoder(dict[str, str])
_usage = msgspec.json.Decoder(Usage)


class BatchStore:
    """Every method raises `gateway.database.StoreUnavailable` when the store is away."""

    def __init__(self, pool: Pool, jobs: JobStore, settings: JobsSettings) -> None:
        self._pool = pool
        self.jobs = jobs
        self._settings = settings

    # -------------------------------------------------------------- files

    async def begin_file(self, key_id: uuid.UUID, file_id: uuid.UUID) -> None:
        with store_errors():
            await self._pool.execute(FILE_BEGIN, file_id, key_id, self._settings.upload_patience_s, *self.jobs.known())

    async def add_lines(self, file_id: uuid.UUID, lines: Sequence[tuple[int, bytes]]) -> None:
        with store_errors():
            await self._pool.execute(FILE_LINES, file_id, [n for n, _ in lines], [text for _, text in lines])

    async def file_ready(
        self, connection: Session, file_id: uuid.UUID, *, filename: str, size: int, kept_s: float
    ) -> bool:
        """False: it was given up meanwhile. May be repeated."""
        with store_errors():
            row = await connection.fetchval(FILE_READY, file_id, filename, size, kept_s, *self.jobs.known())
        return row is not None

    async def file(self, key_id: uuid.UUID, file_id: uuid.UUID) -> FileView | None:
        with store_errors():
            row = await self._pool.fetchrow(FILE_GET, file_id, key_id, *self.jobs.known())
        return None if row is None else _file(row)

    async def files(
        self, key_id: uuid.UUID, *, after: uuid.UUID | None, purpose: str | None, newest_first: bool, limit: int
    ) -> Sequence[FileView]:
        statement = FILE_LIST if newest_first else FILE_LIST_OLDEST
        start = after or (_LAST if newest_first else _FIRST)
        with store_errors():
            rows = await self._pool.fetch(statement, key_id, start, purpose, limit, *self.jobs.known())
        return [_file(row) for row in rows]

    async def lines(
        self, file_id: uuid.UUID, after: int, connection: Session | None = None
    ) -> Sequence[tuple[int, bytes]]:
        """The next lines of a file, about PAGE_BYTES of them; none at its end."""
        with store_errors():
            rows = await (connection or self._pool).fetch(FILE_PAGE, file_id, after, PAGE_ROWS, PAGE_BYTES)
        return [(row["line"], row["text"]) for row in rows]

    async def line_count(self, file_id: uuid.UUID) -> int:
        with store_errors():
            count: int = await self._pool.fetchval(FILE_COUNT, file_id)
        return count

    async def delete_file(self, key_id: uuid.UUID, file: FileView) -> bool:
        """With what is in it. False: a batch that has not ended reads it, or it is gone."""
        with store_errors():
            row = await self._pool.fetchrow(FILE_DELETE, file.file_id, key_id, *self.jobs.known())
        if row is None:
            return False
        await self._remove(file.file_id, key_id, file.batch_id, failures=file.failures)
        return True

    async def forget_file(self, file_id: uuid.UUID) -> None:
        """One that was never ready."""
        with store_errors():
            await self._pool.execute(FILE_FORGET, file_id)

    async def _remove(
        self, file_id: uuid.UUID, key_id: uuid.UUID, batch_id: uuid.UUID | None, *, failures: bool | None
    ) -> None:
        """The jobs go first: what is cut short is found again by its file."""
        if batch_id is not None:
            upto = last_job_id(batch_id)
            while True:
                with store_errors():
                    rows = await self._pool.fetch(OUTPUT_DELETE, key_id, batch_id, upto, failures, _REMOVED_ROWS)
                if len(rows) < _REMOVED_ROWS:
                    break
        await self.forget_file(file_id)

    # -------------------------------------------------------------- outputs

    async def output(
        self,
        jobs: tuple[uuid.UUID, uuid.UUID, uuid.UUID],
        *,
        failures: bool,
        connection: Session | None = None,
    ) -> Sequence[tuple[Result, datetime]]:
        """
        The next of these jobs that succeeded, or of the others, in line order, and when each goes in the store's time;
        about PAGE_BYTES of them, none at the end.
        """
        with store_errors():
            rows = await (connection or self._pool).fetch(OUTPUT_PAGE, *jobs, failures, PAGE_ROWS, PAGE_BYTES)
        return [
            (
                Result(
                    job_id=row["job_id"],
                    submission_id=row["submission_id"],
                    line=row["line"],
                    custom_id=row["custom_id"],
                    status=Status(row["status"]),
                    outcome=read_outcome(row["outcome"]),
                    error_code=row["error_code"],
                    error_message=row["error_message"],
                    error_param=row["error_param"],
                    result=row["result"],
                    result_status=row["result_status"],
                ),
                row["expires_at"],
            )
            for row in rows
        ]

    # -------------------------------------------------------------- batches, for their callers

    async def lock_input(self, connection: Session, key_id: uuid.UUID, file_id: uuid.UUID) -> bool:
        """Whether a batch may be made of this file. It stays until the transaction ends."""
        with store_errors():
            return await connection.fetchval(FILE_LOCK, file_id, key_id, *self.jobs.known()) is not None

    async def create(self, connection: Session, key_id: uuid.UUID, batch: NewBatch) -> None:
        with store_errors():
            await connection.execute(
                BATCH_CREATE,
                batch.batch_id,
                key_id,
                batch.last_job_id,
                batch.input_file_id,
                batch.endpoint,
                batch.completion_window,
                batch.window_s,
                None if batch.metadata is None else msgspec.json.encode(batch.metadata).decode(),
                batch.output_retention_s,
                *self.jobs.known(),
                batch.webhook_url,
            )

    async def get(self, key_id: uuid.UUID, batch_id: uuid.UUID) -> BatchView | None:
        with store_errors():
            row = await self._pool.fetchrow(BATCH_GET, batch_id, key_id)
        return None if row is None else _batch(row)

    async def page(
        self, key_id: uuid.UUID, *, after: uuid.UUID | None, limit: int, endpoint: str | None = None
    ) -> Sequence[BatchView]:
        """The newest first. `endpoint`: of this one alone."""
        with store_errors():
            rows = await self._pool.fetch(BATCH_LIST, key_id, after or _LAST, limit, endpoint)
        return [_batch(row) for row in rows]

    async def taken_back(self, batch: BatchView) -> tuple[int, int]:
        """How many of its jobs were cancelled, and how many expired."""
        with store_errors():
            row = await self._pool.fetchrow(BATCH_TAKEN_BACK, batch.key_id, batch.batch_id, batch.last_job_id)
        assert row is not None
        return row["cancelled"], row["expired"]

    async def delete(self, batch: BatchView) -> None:
        """One that has ended, with all that belongs to it. The row goes last: what is cut short can be done again."""
        await self.jobs.delete_submission(batch.key_id, batch.batch_id)
        for file_id in (batch.output_file_id, batch.error_file_id, batch.input_file_id):
            file = None if file_id is None else await self.file(batch.key_id, file_id)
            if file is not None:
                await self.delete_file(batch.key_id, file)
        with store_errors():
            await self._pool.execute(BATCH_DELETE, batch.batch_id, batch.key_id)

    async def counts(self, key_id: uuid.UUID, batch_id: uuid.UUID, last_job_id: uuid.UUID) -> tuple[int, int]:
        """How many of its jobs succeeded, and how many ended otherwise."""
        with store_errors():
            row = await self._pool.fetchrow(BATCH_COUNTS, key_id, batch_id, last_job_id)
        assert row is not None
        return row["completed"], row["failed"]

    async def cancel(self, key_id: uuid.UUID, batch_id: uuid.UUID) -> bool:
        """False: there was nothing to cancel any more, or never."""
        with store_errors():
            return await self._pool.fetchval(BATCH_CANCEL, batch_id, key_id) is not None

    # -------------------------------------------------------------- batches, for their keeper

    async def due(self) -> Sequence[uuid.UUID]:
        with store_errors():
            return [row["batch_id"] for row in await self._pool.fetch(BATCH_DUE)]

    async def take(self, connection: Session, batch_id: uuid.UUID) -> Taken | None:
        """None: it has ended, or another process has it."""
        with store_errors():
            row = await connection.fetchrow(BATCH_TAKE, batch_id, *self.jobs.known())
        return None if row is None else Taken(**dict(row))

    async def started(self, connection: Session, batch_id: uuid.UUID, total: int) -> None:
        """Raises Moved."""
        with store_errors():
            _moved(await connection.fetchval(BATCH_STARTED, batch_id, total))

    async def has_open_jobs(self, connection: Session, batch: Taken) -> bool:
        with store_errors():
            found: bool = await connection.fetchval(BATCH_OPEN_JOBS, batch.batch_id)
        return found

    async def finalizing(self, connection: Session, batch_id: uuid.UUID) -> None:
        """Raises Moved."""
        with store_errors():
            _moved(await connection.fetchval(BATCH_FINALIZING, batch_id))

    async def end(self, connection: Session, batch: Taken, over: Over) -> None:
        """With its outputs. Raises Moved."""
        files: dict[bool, uuid.UUID] = {}
        with store_errors():
            for output in over.outputs:
                files[output.failures] = output.file_id
                await connection.execute(
                    BATCH_OUTPUT,
                    output.file_id,
                    batch.key_id,
                    output.filename,
                    output.bytes,
                    batch.batch_id,
                    output.failures,
                    output.expires_at,
                    batch.output_retention_s,
                    *self.jobs.known(),
                )
            row = await connection.fetchval(
                BATCH_END,
                batch.batch_id,
                over.status,
                over.completed,
                over.failed,
                None if over.usage is None else msgspec.json.encode(over.usage).decode(),
                files.get(False),
                files.get(True),
                msgspec.json.encode(over.errors).decode() if over.errors else None,
                self._settings.retention_s,
                *self.jobs.known(),
                batch.status,
            )
        _moved(row)

    async def cancel_queued(self, batch: Taken, most: int) -> Sequence[uuid.UUID]:
        """Ends some of its queued jobs; which."""
        with store_errors():
            rows = await self._pool.fetch(
                BATCH_CANCEL_QUEUED, *batch.jobs, most, self._settings.retention_s, *self.jobs.known()
            )
        return [row["job_id"] for row in rows]

    async def cancel_running(self, batch: Taken) -> Sequence[uuid.UUID]:
        with store_errors():
            return [row["job_id"] for row in await self._pool.fetch(BATCH_CANCEL_RUNNING, *batch.jobs)]

    async def purge(self, most: int) -> int:
        """Delete some of what is past its retention; the number of files and batches."""
        with store_errors():
            files = await self._pool.fetch(FILE_LEFTOVERS, most, *self.jobs.known())
        for row in files:
            await self._remove(row["file_id"], row["key_id"], row["batch_id"], failures=row["failures"])
        with store_errors():
            batches = await self._pool.fetch(PURGE_BATCHES, most, *self.jobs.known())
        return len(files) + len(batches)


def _moved(row: object) -> None:
    if row is None:
        raise Moved


def _file(row: Any) -> FileView:
    return FileView(
        file_id=row["file_id"],
        filename=row["filename"],
        purpose=row["purpose"],
        bytes=row["bytes"],
        batch_id=row["batch_id"],
        failures=row["failures"],
        created_at=row["created_at"],
        expires_at=row["expires_at"] - row["ahead"],
    )


def _batch(row: Any) -> BatchView:
    return BatchView(
        batch_id=row["batch_id"],
        key_id=row["key_id"],
        last_job_id=row["last_job_id"],
        input_file_id=row["input_file_id"],
        endpoint=row["endpoint"],
        completion_window=row["completion_window"],
        metadata=None if row["metadata"] is None else _metadata.decode(row["metadata"]),
        status=row["status"],
        errors=_faults.decode(row["errors"]) if row["errors"] else (),
        total=row["total"],
        completed=row["completed"],
        failed=row["failed"],
        usage=None if row["usage"] is None else _usage.decode(row["usage"]),
        output_file_id=row["output_file_id"],
        error_file_id=row["error_file_id"],
        created_at=row["created_at"],
        deadline_at=row["deadline_at"] - row["ahead"],
        in_progress_at=row["in_progress_at"],
        finalizing_at=row["finalizing_at"],
        cancelling_at=row["cancelling_at"],
        ended_at=row["ended_at"],
    )
