"""
The jobs' tables, one method per statement.

Everything that decides who may change a job is in the statements: the state it leaves and the claim that holds it.
Times that are set and compared are the store's (sql/functions/10_time.sql); times that are shown are the clock's.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.resources
import re
import time
import uuid
from collections.abc import AsyncIterable, AsyncIterator, Collection, Sequence
from datetime import datetime, timedelta
from typing import Any, TypeAlias

import asyncpg
import msgspec

from admission.combiner import Lane
from gateway.call import Options
from gateway.database import CONNECT_TIMEOUT_S, Connection, Pool, StoreUnavailable, store_errors
from gateway.jobs.lane import lane
from gateway.jobs.model import Claimed, Decision, End, GiveBack, Held, JobView, ResponseView, Result, Status
from gateway.jobs.settings import JobsSettings
from gateway.jobs.submission import Line, body_of, storable
from gateway.outcome import Outcome

#: A connection of the pool, or one of its own.
Session: TypeAlias = "Connection | asyncpg.pool.PoolConnectionProxy[asyncpg.Record]"

_SQL = importlib.resources.files("gateway.jobs").joinpath("sql")

#: Rows and bytes of one INSERT.
INSERT_ROWS, INSERT_BYTES = 500, 1024 * 1024

#: Rows and bytes of one page of what is read from end to end.
PAGE_ROWS, PAGE_BYTES = 500, 1024 * 1024
#: Jobs that callers look at, in one statement.
_MOST_LOOKS = 64

_options = msgspec.json.Decoder(Options)
_outcome = msgspec.json.Decoder(Outcome)

#: A member of an object that says null, but for the first of each. Within a string each quote has a backslash before.
_NULL = re.compile(r',"[a-z0-9_]+":null')


def read_statement(name: str) -> str:
    return _SQL.joinpath(f"{name}.sql").read_text()


INSERT = read_statement("insert")
CLAIM = read_statement("claim")
STEPS = read_statement("steps")
RELEASE = read_statement("release")
CANCEL = read_statement("cancel")
CANCEL_REQUESTS = read_statement("cancel_requests")
GET = read_statement("get")
RESPONSE_GET = read_statement("response_get")
RESPONSE_BODY = read_statement("response_body")
LIST = read_statement("list")
RESULTS = read_statement("results")
ENDED = read_statement("ended")
DELETE = read_statement("delete")
DELETE_SUBMISSION = read_statement("delete_submission")
EXPIRE = read_statement("expire")
OWNERS = read_statement("owners")
HELD = read_statement("held")
PURGE = read_statement("purge")
PURGE_SUBMISSIONS = read_statement("purge_submissions")
ACCEPT_SUBMISSION = read_statement("accept_submission")
ANSWER_SUBMISSION = read_statement("answer_submission")
SUBMISSION = read_statement("submission")
KEEP_TIME = read_statement("keep_time")
TIME = read_statement("time")

#: Counts the time that the host sleeps, too, where it can: without it all that is awake would seem to have leapt.
_STEADY = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


class Intent(msgspec.Struct, frozen=True, kw_only=True):
    """An attempt is about to be sent."""

    job_id: uuid.UUID
    claims: int
    attempt: int


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """What came back, before it is settled."""

    job_id: uuid.UUID
    claims: int
    attempt: int
    #: JSON text.
    body: str
    status: int


class Ending(msgspec.Struct, frozen=True, kw_only=True):
    """How a claim ends."""

    job_id: uuid.UUID
    claims: int
    decision: Decision
    outcome: Outcome | None
    attempts: int
    #: Only where it could not be stored before.
    answer: Answer | None = None


#: What a run comes to.
Step: TypeAlias = Intent | Answer | Ending


class Accepted(msgspec.Struct, frozen=True, kw_only=True):
    """What an Idempotency-Key stands for."""

    submission_id: uuid.UUID
    digest: bytes
    answer: str


class Filter(msgspec.Struct, frozen=True, kw_only=True):
    """Which of a key's jobs. None: any."""

    status: Status | None = None
    session_id: str | None = None
    custom_id: str | None = None
    submission_id: uuid.UUID | None = None


class _Kept:
    """
    A connection for one kind of statement, kept between them.

    Taking one from the pool and giving it back costs as much as the statement. Its users take turns.
    """

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._turn = asyncio.Lock()
        self._connection: asyncpg.pool.PoolConnectionProxy[asyncpg.Record] | None = None

    async def fetch(self, statement: str, *arguments: Any) -> Sequence[asyncpg.Record]:
        async with self._turn:
            connection = self._connection
            if connection is None or _is_lost(connection):
                self._connection = connection = await self._pool.acquire()
            try:
                return await connection.fetch(statement, *arguments)
            except BaseException:
                # Whatever state it is in, the next statement is not to find out.
                await self._release()
                raise

    async def let_go(self) -> None:
        async with self._turn:
            await self._release()

    async def _release(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            await self._pool.release(connection, timeout=CONNECT_TIMEOUT_S)


def _is_lost(connection: asyncpg.pool.PoolConnectionProxy[asyncpg.Record]) -> bool:
    try:
        return connection.is_closed()
    except asyncpg.InterfaceError:
        # The pool has taken it back, as it does when the server has cut it.
        return True


class _Told(msgspec.Struct, frozen=True, kw_only=True):
    """What the store's time was, after how many steps of its server's clock, and when that was by our own clock."""

    time: datetime
    steps: int
    at: float

    @property
    def since_s(self) -> float:
        return time.clock_gettime(_STEADY) - self.at


class JobStore:
    """Every method raises `gateway.database.StoreUnavailable` when the store is away."""

    def __init__(self, pool: Pool, settings: JobsSettings) -> None:
        self._pool = pool
        self._settings = settings
        self._claiming, self._stepping, self._looking = _Kept(pool), _Kept(pool), _Kept(pool)
        self._looks: Lane[tuple[uuid.UUID, uuid.UUID], JobView | None] = lane(
            self._look, most=_MOST_LOOKS, patience_s=0.0
        )
        self._told: _Told | None = None

    async def let_go(self) -> None:
        """Give back the connections that were kept. They are taken again when there is use for them."""
        for kept in (self._claiming, self._stepping, self._looking):
            with contextlib.suppress(StoreUnavailable), store_errors():
                await kept.let_go()

    # -------------------------------------------------------------- submission

    async def insert(self, lines: Sequence[Line], connection: Session | None = None) -> None:
        """Persist jobs, all or none; on `connection`, in its transaction. May be repeated."""
        with store_errors():
            session = connection or self._pool
            await session.execute(
                INSERT,
                *_columns(lines),
                self._settings.retention_s,
                *self.known(),
                [line.file_id for line in lines],
                [line.webhook_url for line in lines],
                [line.response_head for line in lines],
            )

    async def insert_all(self, batches: AsyncIterable[Sequence[Line]], connection: Session) -> None:
        """`insert` in the connection's transaction, batch by batch. The next one is made while one is written."""
        writing: asyncio.Task[None] | None = None
        try:
            async for lines in batches:
                if writing is not None:
                    await writing
                writing = asyncio.create_task(self.insert(lines, connection))
            if writing is not None:
                await writing
        finally:
            # The connection is to be used again, if only to roll back.
            if writing is not None:
                writing.cancel()
                await asyncio.gather(writing, return_exceptions=True)

    async def accept(self, connection: Session, key_id: uuid.UUID, key: str, accepted: Accepted) -> bool:
        """Tie an Idempotency-Key to a submission. False: another one has it."""
        with store_errors():
            row = await connection.fetchval(
                ACCEPT_SUBMISSION,
                accepted.submission_id,
                key_id,
                key,
                accepted.digest,
                accepted.answer,
                self._settings.idempotency_retention_s,
                *self.known(),
            )
        return row is not None

    async def answer(self, connection: Session, submission_id: uuid.UUID, answer: str) -> None:
        """What a submission that was accepted in this transaction is answered with."""
        with store_errors():
            await connection.execute(ANSWER_SUBMISSION, submission_id, answer)

    async def submission(self, key_id: uuid.UUID, key: str, connection: Session | None = None) -> Accepted | None:
        with store_errors():
            row = await (connection or self._pool).fetchrow(SUBMISSION, key_id, key)
        if row is None:
            return None
        return Accepted(submission_id=row["submission_id"], digest=row["body_digest"], answer=row["answer"])

    @contextlib.asynccontextmanager
    async def transaction(self) -> AsyncIterator[Session]:
        """To be entered under `store_errors`."""
        async with self._pool.acquire() as connection, connection.transaction():
            yield connection

    # -------------------------------------------------------------- callers

    async def get(self, key_id: uuid.UUID, job_id: uuid.UUID) -> JobView | None:
        return await self._looks.submit((job_id, key_id))

    async def _look(self, asked: Sequence[tuple[uuid.UUID, uuid.UUID]]) -> Sequence[JobView | None]:
        """Of each job and key."""
        with store_errors():
            rows = await self._looking.fetch(GET, [job_id for job_id, _ in asked], [key_id for _, key_id in asked])
        found = {(row["job_id"], row["key_id"]): row for row in rows}
        return [None if (row := found.get(each)) is None else _view(row) for each in asked]

    async def response(self, key_id: uuid.UUID, job_id: uuid.UUID) -> ResponseView | None:
        """A job that was asked for as a response."""
        with store_errors():
            row = await self._pool.fetchrow(RESPONSE_GET, job_id, key_id)
        if row is None:
            return None
        return ResponseView(
            job_id=job_id,
            status=Status(row["status"]),
            created_at=row["created_at"],
            model=row["model"],
            head=row["response_head"],
            outcome=read_outcome(row["outcome"]),
            error_code=row["error_code"],
            error_message=row["error_message"],
            error_param=row["error_param"],
            ended_at=row["ended_at"],
            result=row["result"],
        )

    async def response_body(self, key_id: uuid.UUID, job_id: uuid.UUID) -> str | None:
        """The request of a job that was asked for as a response."""
        with store_errors():
            body: str | None = await self._pool.fetchval(RESPONSE_BODY, job_id, key_id)
        return body

    async def page(
        self, key_id: uuid.UUID, wanted: Filter, *, after: uuid.UUID | None, limit: int
    ) -> Sequence[JobView]:
        """A page in the order of ids, without the answers."""
        return [_view(row) for row in await self._page(LIST, key_id, wanted, after, limit)]

    async def results(self, key_id: uuid.UUID, wanted: Filter, *, after: uuid.UUID | None) -> Sequence[Result]:
        """The next of these jobs that have ended, in the order of ids, about PAGE_BYTES of them; none at the end."""
        rows = await self._page(RESULTS, key_id, wanted, after, PAGE_ROWS, PAGE_BYTES)
        return [
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
            )
            for row in rows
        ]

    async def cancel(self, key_id: uuid.UUID, job_id: uuid.UUID) -> Status | None:
        """The state after it; None where there was nothing to cancel any more, or never."""
        with store_errors():
            status = await self._pool.fetchval(CANCEL, job_id, key_id, self._settings.retention_s, *self.known())
        return None if status is None else Status(status)

    async def ended(self, job_ids: Collection[uuid.UUID]) -> Sequence[uuid.UUID]:
        with store_errors():
            return [row["job_id"] for row in await self._pool.fetch(ENDED, list(job_ids))]

    async def delete(self, key_id: uuid.UUID, job_id: uuid.UUID) -> bool:
        """False: it is not there, or has not ended."""
        with store_errors():
            return await self._pool.fetchval(DELETE, job_id, key_id) is not None

    async def delete_submission(self, key_id: uuid.UUID, submission_id: uuid.UUID) -> int:
        """The number of ended jobs that were deleted."""
        after, upto = _range(Filter(submission_id=submission_id), None)
        deleted = 0
        while True:
            with store_errors():
                rows = await self._pool.fetch(DELETE_SUBMISSION, key_id, after, upto, INSERT_ROWS)
            deleted += len(rows)
            if len(rows) < INSERT_ROWS:
                return deleted

    # -------------------------------------------------------------- the runner

    async def claim(
        self, owner: uuid.UUID, most: int, held: Collection[str] = (), held_keys: Collection[uuid.UUID] = ()
    ) -> Sequence[Claimed]:
        """Takes jobs that are due, but none of the models and of the keys that are held."""
        with store_errors():
            rows = await self._claiming.fetch(CLAIM, owner, most, list(held), list(held_keys), *self.known())
        return [
            Claimed(
                job_id=row["job_id"],
                key_id=row["key_id"],
                url=row["url"],
                model=row["model"],
                body=row["body"] if row["file_line"] is None else body_of(row["file_line"]),
                options=_options.decode(row["options"]),
                claims=row["claims"],
                returned=row["returned"],
                runs=row["runs"],
                attempts_allowed=row["attempts_allowed"],
                attempts=row["attempts"],
                outcome=read_outcome(row["outcome"]),
                remaining_s=row["remaining_s"],
                background=row["background"],
            )
            for row in rows
        ]

    async def steps(self, owner: uuid.UUID, steps: Sequence[Step]) -> Sequence[Status | None]:
        """
        For each the state that its job has after it; None where the job was no longer this claim's. Of an attempt that
        may not be sent, since somebody has taken its job back, it is CANCELLED.
        """
        intents = [step for step in steps if isinstance(step, Intent)]
        answers = [step for step in steps if isinstance(step, Answer)]
        endings = [step for step in steps if isinstance(step, Ending)]
        ends = [(ending, ending.decision) for ending in endings if isinstance(ending.decision, End)]
        backs = [(ending, ending.decision) for ending in endings if isinstance(ending.decision, GiveBack)]
        with store_errors():
            rows = await self._stepping.fetch(
                STEPS,
                owner,
                self._settings.retention_s,
                *self.known(),
                *_intent_columns(intents),
                *_answer_columns(answers),
                *_end_columns(ends),
                *_back_columns(backs),
            )
        after = {(row["step"], row["job_id"], row["claims"]): Status(row["said"]) for row in rows}
        return [after.get((_name(step), step.job_id, step.claims)) for step in steps]

    async def release(self, group: str, most: int) -> int:
        """Makes some of the jobs due that wait for a capacity group; how many."""
        with store_errors():
            return len(await self._pool.fetch(RELEASE, group, most, *self.known()))

    async def cancel_requests(self, owner: uuid.UUID) -> Sequence[uuid.UUID]:
        with store_errors():
            return [row["job_id"] for row in await self._pool.fetch(CANCEL_REQUESTS, owner)]

    # -------------------------------------------------------------- upkeep

    async def keep_time(self) -> None:
        """
        Learn the store's time, and make up for a step of its server's clock that nobody has made up for.

        Admission does that in its own database. That of jobs may be another one, where nobody else does.
        """
        with store_errors():
            async with self._pool.acquire() as connection:
                await connection.execute(KEEP_TIME, *self.known())
                row = await connection.fetchrow(TIME, *self.known())
        if row is not None:
            self._told = _Told(time=row["now"], steps=row["steps"], at=time.clock_gettime(_STEADY))

    def known(self) -> tuple[datetime | None, int | None]:
        """What the store's time is by our knowledge, and the steps it is of: the last parameters of a statement."""
        told = self._told
        return (None, None) if told is None else (told.time + timedelta(seconds=told.since_s), told.steps)

    async def expire(self, most: int = INSERT_ROWS) -> Sequence[uuid.UUID]:
        with store_errors():
            rows = await self._pool.fetch(EXPIRE, most, self._settings.retention_s, *self.known())
        return [row["job_id"] for row in rows]

    async def owners(self, owner: uuid.UUID) -> Sequence[uuid.UUID]:
        """The other processes that hold running jobs."""
        with store_errors():
            return [row["owner"] for row in await self._pool.fetch(OWNERS, owner)]

    async def held(self, owner: uuid.UUID, *, except_for: Collection[uuid.UUID], most: int) -> Sequence[Held]:
        with store_errors():
            rows = await self._pool.fetch(HELD, owner, list(except_for), most)
        return [
            Held(
                job_id=row["job_id"],
                key_id=row["key_id"],
                url=row["url"],
                options=_options.decode(row["options"]),
                claims=row["claims"],
                returned=row["returned"],
                runs=row["runs"],
                attempts_allowed=row["attempts_allowed"],
                attempts=row["attempts"],
                intent_attempt=row["intent_attempt"],
                cancel_requested=row["cancel_requested"],
                outcome=read_outcome(row["outcome"]),
                result=row["result"],
                result_attempt=row["result_attempt"],
            )
            for row in rows
        ]

    async def purge(self, most: int) -> int:
        """Delete some of what is past its retention; the number of rows."""
        with store_errors():
            jobs = await self._pool.fetch(PURGE, most, *self.known())
            submissions = await self._pool.fetch(PURGE_SUBMISSIONS, most, *self.known())
        return len(jobs) + len(submissions)

    async def _page(
        self, statement: str, key_id: uuid.UUID, wanted: Filter, after: uuid.UUID | None, *most: int
    ) -> Sequence[Any]:
        low, high = _range(wanted, after)
        with store_errors():
            async with self._pool.acquire() as connection, connection.transaction():
                # Which index is right depends on the filters that are given, which a generic plan does not know.
                await connection.execute("set local plan_cache_mode = force_custom_plan")
                return await connection.fetch(
                    statement,
                    key_id,
                    low,
                    high,
                    wanted.status.value if wanted.status else None,
                    wanted.session_id,
                    wanted.custom_id,
                    *most,
                )


#: More than the lines of any submission.
SPAN = 1 << 20


def _range(wanted: Filter, after: uuid.UUID | None) -> tuple[uuid.UUID, uuid.UUID]:
    """The ids to look at. Those of a submission follow its own id, so naming it needs no index of its own."""
    low, high = uuid.UUID(int=0), uuid.UUID(int=(1 << 128) - 1)
    if wanted.submission_id is not None:
        low = wanted.submission_id
        high = uuid.UUID(int=min(low.int + SPAN, high.int))
    return max(low, after) if after is not None else low, high


def _columns(lines: Sequence[Line]) -> tuple[list[Any], ...]:
    return (
        [line.job_id for line in lines],
        [line.key_id for line in lines],
        [line.submission_id for line in lines],
        [line.number for line in lines],
        [line.custom_id for line in lines],
        [line.url for line in lines],
        [line.model for line in lines],
        [line.session_id for line in lines],
        [line.klass for line in lines],
        [line.body for line in lines],
        [line.options for line in lines],
        [line.attempts_allowed for line in lines],
        [line.deadline_s for line in lines],
        [line.fault.code if line.fault else None for line in lines],
        [line.fault.message if line.fault else None for line in lines],
        [line.fault.param if line.fault else None for line in lines],
    )


def _name(step: Step) -> str:
    """As the statement calls it."""
    match step:
        case Intent():
            return "intent"
        case Answer():
            return "answer"
        case Ending():
            return "end" if isinstance(step.decision, End) else "back"


def _intent_columns(intents: Sequence[Intent]) -> tuple[list[Any], ...]:
    return (
        [intent.job_id for intent in intents],
        [intent.claims for intent in intents],
        [intent.attempt for intent in intents],
    )


def _answer_columns(answers: Sequence[Answer]) -> tuple[list[Any], ...]:
    return (
        [answer.job_id for answer in answers],
        [answer.claims for answer in answers],
        [answer.attempt for answer in answers],
        [answer.body for answer in answers],
        [answer.status for answer in answers],
    )


def _end_columns(ends: Sequence[tuple[Ending, End]]) -> tuple[list[Any], ...]:
    return (
        [ending.job_id for ending, _ in ends],
        [ending.claims for ending, _ in ends],
        [end.status.value for _, end in ends],
        [end.code for _, end in ends],
        [_storable(end.message) for _, end in ends],
        [_storable(end.param) for _, end in ends],
        [write_outcome(ending.outcome) for ending, _ in ends],
        [ending.attempts for ending, _ in ends],
        [ending.answer.body if ending.answer else None for ending, _ in ends],
        [ending.answer.status if ending.answer else None for ending, _ in ends],
    )


def _back_columns(backs: Sequence[tuple[Ending, GiveBack]]) -> tuple[list[Any], ...]:
    return (
        [ending.job_id for ending, _ in backs],
        [ending.claims for ending, _ in backs],
        [back.delay_s for _, back in backs],
        [int(back.in_order) for _, back in backs],
        [int(back.counts) for _, back in backs],
        [back.reason for _, back in backs],
        [write_outcome(ending.outcome) for ending, _ in backs],
        [ending.attempts for ending, _ in backs],
        [msgspec.json.encode(back.groups).decode() for _, back in backs],
    )


def _view(row: Any) -> JobView:
    return JobView(
        job_id=row["job_id"],
        submission_id=row["submission_id"],
        line=row["line"],
        custom_id=row["custom_id"],
        url=row["url"],
        model=row["model"],
        session_id=row["session_id"],
        options=_options.decode(row["options"]),
        status=Status(row["status"]),
        created_at=row["created_at"],
        not_before=row["not_before"] - row["ahead"],
        deadline_at=row["deadline_at"] - row["ahead"],
        claimed_at=row["claimed_at"],
        attempts=row["attempts"],
        wait_reason=row["wait_reason"],
        wait_groups=tuple(row["wait_groups"] or ()),
        outcome=read_outcome(row["outcome"]),
        error_code=row["error_code"],
        error_message=row["error_message"],
        error_param=row["error_param"],
        cancel_requested=row["cancel_requested"],
        ended_at=row["ended_at"],
        expires_at=row["expires_at"] and row["expires_at"] - row["ahead"],
        result=row["result"],
        result_status=row["result_status"],
    )


def read_outcome(text: str | None) -> Outcome | None:
    return None if text is None else _outcome.decode(text)


def write_outcome(outcome: Outcome | None) -> str | None:
    """Without what is null, which is 0.4 of it and is null again when it is read."""
    return None if outcome is None else _NULL.sub("", msgspec.json.encode(outcome).decode())


def _storable(text: str | None) -> str | None:
    return None if text is None else storable(text)
