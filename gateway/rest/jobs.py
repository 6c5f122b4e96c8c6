"""
Jobs over HTTP: submit now, collect later.

`POST /v1/jobs` is answered with 202 after the commit and never before. What belongs to another key is answered exactly
as what never was.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import re
import uuid
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any, Final, Literal, Protocol, TypeVar

import msgspec
from aiohttp import web
from typing_extensions import TypedDict

from adapters.body import refuse_flood
from adapters.errors import MalformedRequest
from admission.lease import Class, Waiting
from gateway.call import Scope
from gateway.database import StoreUnavailable
from gateway.errors import STATUS, Code, Conflict, GatewayError, InvalidRequest, NotFound
from gateway.jobs import output
from gateway.jobs.intake import ErrorEntry, Idempotency, Intake, Receipt
from gateway.jobs.model import TERMINAL, JobView, Result, Status, Wait, as_settled, wait_of
from gateway.jobs.output import JobAnswer, JobError
from gateway.jobs.settings import JobsSettings
from gateway.jobs.store import Filter, JobStore
from gateway.jobs.submission import JobFields, LineSplitter
from gateway.jobs.watch import Watch
from gateway.outcome import Outcome, RouteReport
from gateway.rest.apis import error_headers
from gateway.rest.body import decode
from gateway.rest.endpoint import Endpoint, Exchange, plain, usd
from gateway.rest.fields import FIELDS, IDEMPOTENCY_KEY, MAX_IDEMPOTENCY_KEY_CHARS, refuse_headers
from gateway.rest.ids import as_uuid
from gateway.rest.operation import OF_CONTENT, Content, Link, Operation
from gateway.rest.status import Error, error_body
from metering.usage import Usage

NDJSON = "application/x-ndjson"
#: Jobs of a page of the list: where nothing is said, and at most.
DEFAULT_LIMIT, MAX_LIMIT = 100, 1000

#: Bytes of a body that is parsed beside the event loop, not on it.
_APART = 256 * 1024

#: Values in one list of jobs.
_MOST_VALUES = 2_000_000
#: Bytes of a line after which others get a turn.
_LONG_LINE = 64 * 1024
_raw_list = msgspec.json.Decoder(list[msgspec.Raw])

_NUMBER: Final = re.compile(r"-?\d{1,15}(\.\d{0,15})?([eE][+-]?\d{1,3})?", re.ASCII)

_FILTERS = ("status", "session_id", "submission_id", "custom_id")


class _Filters(msgspec.Struct, frozen=True, kw_only=True):
    status: Status | None = None
    session_id: str | None = None
    submission_id: uuid.UUID | None = None
    custom_id: str | None = None


class _Page(_Filters, frozen=True, kw_only=True):
    #: The `next_cursor` of the page before.
    cursor: uuid.UUID | None = None
    limit: Annotated[int, msgspec.Meta(ge=1, le=MAX_LIMIT)] = DEFAULT_LIMIT


class _OfSubmission(msgspec.Struct, frozen=True, kw_only=True):
    submission_id: uuid.UUID


class JobWaiting(TypedDict):
    """Why a job is not being executed now."""

    reason: str
    #: Its place in the queue of the group.
    position: int | None
    group: str | None
    until: datetime | None
    expected_wait_s: float | None


_Classed = TypedDict("_Classed", {"class": Literal["interactive", "batch"]})


class JobSummary(_Classed):
    """A job, as the list has it."""

    id: uuid.UUID
    object: Literal["job"]
    submission_id: uuid.UUID
    line: int
    custom_id: str | None
    status: Status
    url: str | None
    model: str | None
    session_id: str | None
    created_at: datetime
    deadline_at: datetime
    started_at: datetime | None
    ended_at: datetime | None
    expires_at: datetime | None
    cancel_requested: bool
    attempts: int
    route: RouteReport | None
    usage: Usage | None
    cost_usd: str | None
    waiting: JobWaiting | None
    error: JobError | None
    response: JobAnswer | None


class Job(JobSummary):
    """A job, with how it went."""

    outcome: Outcome | None


class JobPage(TypedDict):
    """A page of jobs, the oldest first."""

    object: Literal["list"]
    data: list[JobSummary]
    has_more: bool
    next_cursor: str | None


class ResultLine(TypedDict):
    """A job that has ended, in the shape of a line of OpenAI's batch output."""

    id: uuid.UUID
    custom_id: str | None
    response: JobAnswer | None
    error: JobError | None
    job_id: uuid.UUID
    line: int
    status: Status
    cost_usd: str | None


class JobDeleted(TypedDict):
    id: uuid.UUID
    object: Literal["job"]
    deleted: Literal[True]


class SubmissionDeleted(TypedDict):
    submission_id: uuid.UUID
    deleted: int
    #: Cancel those first, and delete again.
    some_not_ended: bool


class NothingAccepted(TypedDict):
    """No line of a submission can be accepted."""

    error: Error
    errors: list[ErrorEntry]


#: A job as it is submitted: the fields of a line, and the caller fields.
NewJob: Final[Any] = msgspec.defstruct(
    "NewJob",
    [(field.name, field.kind | None, None) for field in FIELDS],
    bases=(JobFields,),
    kw_only=True,
    forbid_unknown_fields=True,
)


class NewJobs(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Jobs. Those that cannot be accepted are listed in the answer, and do not hold up the others."""

    jobs: tuple[NewJob, ...]


#: What is wrong with the only job of a submission is told as what is wrong with the request.
#: What a job waits for that is due.
_WITH_ITS_PLACE: Final = frozenset({Wait.RUNNER, Wait.QUEUE_FULL, Wait.KEY_LIMIT, Wait.BUDGET_RESERVED})
_OF_A_LINE: Final = frozenset({Code.UNSUPPORTED_FIELD, Code.MODEL_NOT_FOUND, Code.TOO_LARGE})
_EXAMPLE: Final = {
    "custom_id": "1",
    "url": "/v1/chat/completions",
    "session_id": "evening",
    "body": {"model": "gpt-4o", "messages": [{"role": "user", "content": "Say hello."}]},
}


class Waits(Protocol):
    """Why requests wait. Admission knows."""

    async def waiting(self, debit_ids: Sequence[str]) -> Mapping[str, Waiting]:
        """Of those that wait in a queue. Raises StoreUnavailable."""
        ...


class Costs(Protocol):
    """What attempts cost, as far as is known now. `gateway.recovery` tells."""

    async def outcomes_of(self, *, key_id: uuid.UUID, debit_ids: Sequence[str]) -> Mapping[str, Outcome]:
        """What became of the attempts of these debits; those without any are left out. Raises StoreUnavailable."""
        ...


class Cancels(Protocol):
    """Whoever may be running a job here. `gateway.jobs.runner.Runner` is it."""

    def cancel(self, job_id: uuid.UUID) -> None:
        """Its row already says that it is to be taken back."""
        ...


def routes(
    *,
    store: JobStore,
    intake: Intake,
    watch: Watch,
    runner: Cancels,
    waits: Waits,
    costs: Costs,
    settings: JobsSettings,
) -> list[Endpoint]:
    """The endpoints of this module."""

    async def submit(exchange: Exchange) -> web.StreamResponse:
        exchange.query(())
        refuse_headers(exchange.request.headers)
        key = idempotency_key(exchange)
        digest = hashlib.sha256()
        idempotency = None if key is None else Idempotency(key=key, digest=digest.digest)
        single = False
        if exchange.media_type == NDJSON:
            lines = _ndjson(exchange, digest, settings.max_line_bytes)
        elif exchange.media_type == "application/json":
            body = await exchange.body()
            digest.update(body)
            documents = _documents(body) if len(body) < _APART else await asyncio.to_thread(_documents, body)
            single = documents is None
            lines = _listed([body] if documents is None else documents)
        else:
            raise GatewayError(
                f"send `content-type: application/json` or `{NDJSON}`",
                code=Code.UNSUPPORTED_MEDIA_TYPE,
                param="content-type",
            )
        receipt, repeated = await intake.submit(exchange.caller.key_id, lines, idempotency)
        if not receipt.accepted:
            return _nothing_accepted(exchange, receipt, single=single)
        return exchange.answer(receipt, status=202, headers={"Idempotent-Replayed": "true"} if repeated else None)

    async def get(exchange: Exchange) -> web.StreamResponse:
        query = exchange.query(("wait",))
        wait_s = _seconds(query["wait"], settings.longest_wait_s) if "wait" in query else 0.0
        key_id, job_id = exchange.caller.key_id, _job_id(exchange)
        with content_store():
            if wait_s > 0:
                job = await awaited(exchange, store, watch, job_id, wait_s)
            else:
                job = await store.get(key_id, job_id)
        if job is None:
            raise _absent()
        (job,) = await _settled(costs, key_id, [job])
        waiting = await _waiting(waits, [job])
        return exchange.answer(_whole(job, waiting))

    async def page(exchange: Exchange) -> web.StreamResponse:
        query = exchange.query((*_FILTERS, "cursor", "limit"))
        limit = _limit(query.get("limit"))
        after = _uuid(query["cursor"], "cursor") if "cursor" in query else None
        with content_store():
            jobs = await store.page(exchange.caller.key_id, _filter(query), after=after, limit=limit + 1)
        more, jobs = len(jobs) > limit, await _settled(costs, exchange.caller.key_id, jobs[:limit])
        waiting = await _waiting(waits, jobs)
        told: JobPage = {
            "object": "list",
            "data": [_rendered(job, waiting) for job in jobs],
            "has_more": more,
            "next_cursor": str(jobs[-1].job_id) if more else None,
        }
        return exchange.answer(told)

    async def results(exchange: Exchange) -> web.StreamResponse:
        query = exchange.query(_FILTERS)
        key_id, wanted = exchange.caller.key_id, _filter(query)
        if wanted.status is not None and wanted.status not in TERMINAL:
            raise InvalidRequest("only ended jobs have results", param="status")
        with content_store():
            found = await store.results(key_id, wanted, after=None)
        response = exchange.stream(NDJSON)
        await response.prepare(exchange.request)
        while found:
            told = await _settled(costs, key_id, found)
            await response.write(b"".join(_result_line(result) for result in told))
            with content_store():
                found = await store.results(key_id, wanted, after=found[-1].job_id)
        await response.write_eof()
        return response

    async def cancel(exchange: Exchange) -> web.StreamResponse:
        exchange.query(())
        key_id, job_id = exchange.caller.key_id, _job_id(exchange)
        with content_store():
            status = await store.cancel(key_id, job_id)
            if status is Status.RUNNING:
                runner.cancel(job_id)
            elif status is not None:
                watch.ended([job_id])
            job = await store.get(key_id, job_id)
        if job is None:
            raise _absent()
        (job,) = await _settled(costs, key_id, [job])
        return exchange.answer(_whole(job, {}))

    async def delete(exchange: Exchange) -> web.StreamResponse:
        exchange.query(())
        key_id, job_id = exchange.caller.key_id, _job_id(exchange)
        with content_store():
            deleted = await store.delete(key_id, job_id)
            if not deleted and await store.get(key_id, job_id) is None:
                raise _absent()
        if not deleted:
            raise Conflict("the job has not ended: cancel it first")
        gone: JobDeleted = {"id": job_id, "object": "job", "deleted": True}
        return exchange.answer(gone)

    async def delete_submission(exchange: Exchange) -> web.StreamResponse:
        query = exchange.query(("submission_id",))
        if "submission_id" not in query:
            raise InvalidRequest("is required", param="submission_id")
        submission_id = _uuid(query["submission_id"], "submission_id")
        key_id = exchange.caller.key_id
        with content_store():
            deleted = await store.delete_submission(key_id, submission_id)
            left = await store.page(key_id, Filter(submission_id=submission_id), after=None, limit=1)
        if not deleted and not left:
            raise NotFound("no such submission")
        gone: SubmissionDeleted = {"submission_id": submission_id, "deleted": deleted, "some_not_ended": bool(left)}
        return exchange.answer(gone)

    one, cancelled = "/v1/jobs/{job_id}", "/v1/jobs/{job_id}/cancel"
    submitted = Operation(
        summary="Submit jobs",
        description="They are on disk when this is answered. Many come as `application/x-ndjson`, one a line.",
        takes=(
            Content(type=NewJob | NewJobs, example=_EXAMPLE),
            Content(type=NewJob, media_type=NDJSON, lines=True),
        ),
        gives=(Content(type=Receipt, status=202),),
        refused={STATUS[Code.INVALID_REQUEST].http: NothingAccepted},
        errors=OF_CONTENT | _OF_A_LINE,
        repeatable=True,
        links={
            "get": Link(method="GET", path=one, parameters={"job_id": "/jobs/0/id"}),
            "cancel": Link(method="POST", path=cancelled, parameters={"job_id": "/jobs/0/id"}),
        },
    )
    listed = Operation(
        summary="List jobs", query=_Page, gives=(Content(type=JobPage),), errors=OF_CONTENT | {Code.INVALID_REQUEST}
    )
    collected = Operation(
        summary="Results of ended jobs, one a line",
        query=_Filters,
        gives=(Content(type=ResultLine, media_type=NDJSON, lines=True),),
        errors=OF_CONTENT,
    )
    looked_at = Operation(
        summary="A job",
        description="With `wait`, once it has ended or so many seconds have passed.",
        query=_wait_query(settings.longest_wait_s),
        gives=(Content(type=Job),),
        errors=OF_CONTENT,
        links={
            "cancel": Link(method="POST", path=cancelled, parameters={"job_id": "/id"}),
            "delete": Link(method="DELETE", path=one, parameters={"job_id": "/id"}),
        },
    )
    deleted_one = Operation(
        summary="Delete an ended job", gives=(Content(type=JobDeleted),), errors=OF_CONTENT | {Code.CONFLICT}
    )
    deleted_all = Operation(
        summary="Delete the ended jobs of a submission",
        query=_OfSubmission,
        gives=(Content(type=SubmissionDeleted),),
        errors=OF_CONTENT | {Code.NOT_FOUND},
    )
    taken_back = Operation(summary="Cancel a job", gives=(Content(type=Job),), errors=OF_CONTENT)
    return [
        Endpoint(method="POST", path="/v1/jobs", access=Scope.JOBS, handler=submit, told=submitted),
        Endpoint(method="GET", path="/v1/jobs", access=Scope.JOBS, handler=page, told=listed),
        Endpoint(method="DELETE", path="/v1/jobs", access=Scope.JOBS, handler=delete_submission, told=deleted_all),
        Endpoint(method="GET", path="/v1/jobs/results", access=Scope.JOBS, handler=results, told=collected),
        Endpoint(method="GET", path=one, access=Scope.JOBS, handler=get, told=looked_at),
        Endpoint(method="DELETE", path=one, access=Scope.JOBS, handler=delete, told=deleted_one),
        Endpoint(method="POST", path=cancelled, access=Scope.JOBS, handler=cancel, told=taken_back),
    ]


def _wait_query(longest_s: float) -> type:
    seconds = Annotated[float, msgspec.Meta(ge=0, le=longest_s)]
    return msgspec.defstruct("_WaitQuery", [("wait", seconds, 0.0)])


# ------------------------------------------------------------------ reading


async def _ndjson(
    exchange: Exchange, digest: hashlib._Hash, max_line_bytes: int
) -> AsyncIterator[tuple[int, bytes | None]]:
    splitter = LineSplitter(max_line_bytes=max_line_bytes)
    async for piece in exchange.chunks():
        digest.update(piece)
        for line in splitter.feed(piece):
            yield line
            if len(line[1] or b"") > _LONG_LINE:
                await asyncio.sleep(0)
    for line in splitter.close():
        yield line


async def _listed(documents: Sequence[bytes | msgspec.Raw]) -> AsyncIterator[tuple[int, bytes | None]]:
    for number, document in enumerate(documents, 1):
        yield number, bytes(document)
        if len(bytes(document)) > _LONG_LINE:
            await asyncio.sleep(0)


def _documents(body: bytes) -> Sequence[msgspec.Raw] | None:
    """The jobs of `{"jobs": [...]}`; None where the body is one job itself."""
    try:
        refuse_flood(body, _MOST_VALUES)
    except MalformedRequest as error:
        raise InvalidRequest(error.reason, code=Code.TOO_LARGE) from error
    members = decode(body, dict[str, msgspec.Raw])
    if "jobs" not in members:
        return None
    unknown = members.keys() - {"jobs"}
    if unknown:
        name = min(unknown)
        raise InvalidRequest("unknown field", param=name[:64] if name.isprintable() else None)
    try:
        return _raw_list.decode(members["jobs"])
    except msgspec.ValidationError as error:
        raise InvalidRequest("must be a list of jobs", param="jobs") from error


def idempotency_key(exchange: Exchange) -> str | None:
    """The caller's own name for what it creates. Raises InvalidRequest."""
    given = exchange.request.headers.getall(IDEMPOTENCY_KEY, [])
    if not given:
        return None
    if len(given) > 1:
        raise InvalidRequest("given twice", param=IDEMPOTENCY_KEY)
    if not 1 <= len(given[0]) <= MAX_IDEMPOTENCY_KEY_CHARS or not given[0].isprintable():
        raise InvalidRequest(f"must have 1 to {MAX_IDEMPOTENCY_KEY_CHARS} printable characters", param=IDEMPOTENCY_KEY)
    return given[0]


def _filter(query: Mapping[str, str]) -> Filter:
    status = query.get("status")
    if status is not None and status not in set(Status):
        raise InvalidRequest(f"must be one of: {', '.join(Status)}", param="status")
    return Filter(
        status=None if status is None else Status(status),
        session_id=query.get("session_id"),
        custom_id=query.get("custom_id"),
        submission_id=_uuid(query["submission_id"], "submission_id") if "submission_id" in query else None,
    )


def _job_id(exchange: Exchange) -> uuid.UUID:
    try:
        return as_uuid(exchange.path_args["job_id"])
    except ValueError:
        raise _absent() from None


def _uuid(text: str, param: str) -> uuid.UUID:
    try:
        return as_uuid(text)
    except ValueError as error:
        raise InvalidRequest("must be a UUID", param=param) from error


def _limit(text: str | None) -> int:
    if text is None:
        return DEFAULT_LIMIT
    if not (text.isascii() and text.isdigit() and len(text) <= 4 and 1 <= int(text) <= MAX_LIMIT):
        raise InvalidRequest(f"must be from 1 to {MAX_LIMIT}", param="limit")
    return int(text)


def _seconds(text: str, most: float) -> float:
    # float() takes underscores, spaces and the digits of other scripts as well.
    seconds = float(text) if _NUMBER.fullmatch(text) else -1.0
    if not 0 <= seconds <= most:
        raise InvalidRequest(f"must be a number of seconds from 0 to {most:g}", param="wait")
    return seconds


async def awaited(
    exchange: Exchange, store: JobStore, watch: Watch, job_id: uuid.UUID, wait_s: float
) -> JobView | None:
    """The job once it has ended, or as it is when the time is over or the process begins to stop."""
    key_id = exchange.caller.key_id
    with watch.on(job_id) as ended:
        job = await store.get(key_id, job_id)
        if job is None or job.status in TERMINAL:
            return job
        over = [asyncio.ensure_future(event.wait()) for event in (ended, exchange.draining)]
        try:
            await asyncio.wait(over, timeout=wait_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for waiting in over:
                waiting.cancel()
    return await store.get(key_id, job_id)


async def _waiting(waits: Waits, jobs: Sequence[JobView]) -> Mapping[str, Waiting]:
    debits = [job.options.debit_id for job in jobs if job.status is Status.RUNNING and job.options.debit_id]
    if not debits:
        return {}
    try:
        return await waits.waiting(debits)
    except StoreUnavailable:
        # The job is known all the same.
        return {}


_Told = TypeVar("_Told", JobView, Result)


async def _settled(costs: Costs, key_id: uuid.UUID, jobs: Sequence[_Told]) -> list[_Told]:
    """These jobs, where their cost was not known when they ended with what is known of it now."""
    unknown = [job.outcome.debit_id for job in jobs if job.outcome is not None and job.outcome.cost.state == "unknown"]
    if not unknown:
        return list(jobs)
    try:
        now = await costs.outcomes_of(key_id=key_id, debit_ids=unknown)
    except StoreUnavailable:
        # The job is known all the same.
        return list(jobs)
    return [
        job
        if job.outcome is None or job.outcome.debit_id not in now
        else msgspec.structs.replace(job, outcome=as_settled(job.outcome, now[job.outcome.debit_id]))
        for job in jobs
    ]


@contextlib.contextmanager
def content_store() -> Iterator[None]:
    """For what is read, cancelled or deleted."""
    try:
        yield
    except StoreUnavailable as error:
        raise GatewayError(
            "the store of jobs cannot be reached", code=Code.CONTENT_STORE_UNAVAILABLE, retry_after_s=1.0
        ) from error


def _absent() -> NotFound:
    return NotFound("no such job")


# ------------------------------------------------------------------ rendering


def _nothing_accepted(exchange: Exchange, receipt: Receipt, *, single: bool) -> web.StreamResponse:
    if not receipt.errors:
        raise InvalidRequest("there is no job in the body", param="body")
    first = receipt.errors[0]
    if single:
        raise GatewayError(first.message, code=Code(first.code), param=first.param)
    error = InvalidRequest(f"no line can be accepted; the first: {first.message}", param=first.param)
    body: NothingAccepted = {
        **error_body(error, exchange.request_id),
        "errors": [msgspec.structs.replace(entry, id=None) for entry in receipt.errors],
    }
    return exchange.answer(body, status=error.status.http, headers=error_headers(error))


def _whole(job: JobView, waiting: Mapping[str, Waiting]) -> Job:
    return {**_rendered(job, waiting), "outcome": plain(job.outcome)}


def _rendered(job: JobView, waiting: Mapping[str, Waiting]) -> JobSummary:
    outcome = job.outcome
    return {
        "id": job.job_id,
        "object": "job",
        "submission_id": job.submission_id,
        "line": job.line,
        "custom_id": job.custom_id,
        "status": job.status,
        "url": job.url,
        "model": job.model,
        "session_id": job.session_id,
        "class": "batch" if job.options.klass is Class.BATCH else "interactive",
        "created_at": job.created_at,
        "deadline_at": job.deadline_at,
        # One that was claimed, and refused before anything was sent, has not started.
        "started_at": job.claimed_at if job.attempts else None,
        "ended_at": job.ended_at,
        "expires_at": job.expires_at,
        "cancel_requested": job.cancel_requested,
        "attempts": job.attempts,
        "route": outcome.route if outcome else None,
        "usage": outcome.usage if outcome else None,
        "cost_usd": _cost_usd(outcome),
        "waiting": _why(job, waiting),
        "error": output.error(job),
        "response": None if job.result is None else output.response(job.result, job.result_status, outcome),
    }


def _result_line(result: Result) -> bytes:
    """A line of OpenAI's batch output, with what we know beside it."""
    line: ResultLine = {
        "id": result.job_id,
        "custom_id": result.custom_id,
        "response": None
        if result.result is None
        else output.response(result.result, result.result_status, result.outcome),
        "error": output.error(result),
        "job_id": result.job_id,
        "line": result.line,
        "status": result.status,
        "cost_usd": _cost_usd(result.outcome),
    }
    return msgspec.json.encode(line) + b"\n"


def _why(job: JobView, waiting: Mapping[str, Waiting]) -> JobWaiting | None:
    """Why it is not being executed now. Null: it is, or it has ended."""
    until: datetime | None
    if job.status is Status.QUEUED:
        # Not claimed yet: it waits for a free runner, or out what it was refused for.
        reason = wait_of(job.wait_reason)
        until = None if reason in _WITH_ITS_PLACE else job.not_before
        group = job.wait_groups[0] if job.wait_groups else None
        return {"reason": reason, "position": None, "group": group, "until": until, "expected_wait_s": None}
    found = waiting.get(job.options.debit_id or "")
    if job.status is not Status.RUNNING or found is None:
        return None
    return {
        "reason": found.reason,
        "position": found.position,
        "group": found.group,
        "until": None if found.until_s is None else datetime.now(UTC) + timedelta(seconds=found.until_s),
        "expected_wait_s": found.expected_wait_s,
    }


def _cost_usd(outcome: Outcome | None) -> str | None:
    """A decimal string; null where it is not known, which is not zero."""
    return None if outcome is None or outcome.cost.usd is None else usd(outcome.cost.usd)
