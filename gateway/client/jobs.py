"""Jobs over REST, submitted now and collected later: what a job and a receipt are, and the flows of both faces."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterable, Mapping
from datetime import datetime
from decimal import Decimal
from typing import Any, Final, TypeAlias

import msgspec

from gateway.client import errors
from gateway.client.errors import CallFailed
from gateway.client.flow import (
    ANSWER_S,
    STORED_S,
    Emit,
    Flow,
    Items,
    Lines,
    Patience,
    Pause,
    Send,
    deadline_of,
    decoded,
    emitted,
    exchange,
    read,
    remaining,
)

#: A line of the OpenAI batch input format. A `url` that is left out is `CHAT`.
Line: TypeAlias = Mapping[str, Any]

CHAT: Final = "/v1/chat/completions"
ENDED: Final = frozenset({"succeeded", "failed", "cancelled", "expired"})
#: Seconds that one request asks the gateway to hold its answer back for a job's end.
_POLL_S: Final = 30.0
#: The same where the ends of others matter, too: at first, and at most.
_FIRST_LOOK_S: Final = 0.25
_LONGEST_LOOK_S: Final = 2.0
_PAGE: Final = 1000
#: Lines encoded in one go; then other tasks of the caller's have their turn.
_TURN_LINES: Final = 256


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """Why a job or a line has no answer."""

    code: str
    message: str
    param: str | None = None
    #: False: no provider got any of it. None: not known.
    dispatched: bool | None = None


class Response(msgspec.Struct, frozen=True, kw_only=True):
    """An answer in the format of the `url` that was asked."""

    body: Any
    status_code: int | None = None
    request_id: str | None = None


class Ended(msgspec.Struct, frozen=True, kw_only=True):
    """What a job, its result and a batch's line have in common."""

    id: str
    status: str = errors.LOCAL
    #: How many attempts were made, where that is told.
    attempts: int | None = None
    custom_id: str | None = None
    response: Response | None = None
    error: Fault | None = None

    def answer(self) -> Any:
        """The body of the answer. Raises the `CallFailed` that says why there is none."""
        if self.error is not None:
            fault = self.error
            raise errors.failure(
                fault.message,
                code=fault.code,
                status=self.status,
                param=fault.param,
                request_id=None if self.response is None else self.response.request_id,
                attempts=self.attempts,
                dispatched=fault.dispatched,
            )
        if self.response is None:
            raise errors.failure(f"{self.id} is {self.status}: there is no answer", code="conflict")
        return self.response.body


class Job(Ended, frozen=True, kw_only=True):
    """A job as it was when it was asked for. docs/jobs.md says what the fields mean."""

    submission_id: str
    line: int
    status: str
    url: str | None = None
    model: str | None = None
    session_id: str | None = None
    klass: str = msgspec.field(name="class", default="batch")
    created_at: datetime | None = None
    deadline_at: datetime | None = None
    started_at: datetime | None = None
    ended_at: datetime | None = None
    expires_at: datetime | None = None
    cancel_requested: bool = False
    attempts: int = 0
    route: dict[str, Any] | None = None
    usage: dict[str, Any] | None = None
    #: None: not known, which is not zero.
    cost_usd: Decimal | None = None
    waiting: dict[str, Any] | None = None
    #: Of a job that was asked for alone.
    outcome: dict[str, Any] | None = None

    @property
    def ended(self) -> bool:
        return self.status in ENDED


class Result(Ended, frozen=True, kw_only=True):
    """An ended job, as a line of the results has it."""

    job_id: str
    line: int
    status: str
    cost_usd: Decimal | None = None


class Accepted(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    line: int
    custom_id: str | None = None


class Rejected(msgspec.Struct, frozen=True, kw_only=True):
    """A line that cannot be served. `id` is the failed job that stands for it."""

    line: int
    code: str
    message: str
    custom_id: str | None = None
    param: str | None = None
    id: str | None = None


class Receipt(msgspec.Struct, frozen=True, kw_only=True):
    """What a submission was answered with, after the commit."""

    submission_id: str
    accepted: int
    rejected: int
    jobs: list[Accepted]
    errors: list[Rejected]


class _Page(msgspec.Struct):
    data: list[Job]
    next_cursor: str | None = None


# ------------------------------------------------------------------ flows


def submit(jobs: Line | Iterable[Line], idempotency_key: str | None, budget_s: float) -> Flow[Receipt]:
    pieces: list[bytes] = []
    for line in encoded(jobs):
        pieces.append(line)
        if len(pieces) % _TURN_LINES == 0:
            yield Pause(0.0)
    return (yield from submit_lines(b"".join(pieces), idempotency_key, budget_s))


def submit_lines(lines: bytes, idempotency_key: str | None, budget_s: float) -> Flow[Receipt]:
    headers = {"content-type": "application/x-ndjson", "idempotency-key": idempotency_key or uuid.uuid4().hex}
    step = Send(method="POST", path="/v1/jobs", content=lines, headers=headers, timeout_s=STORED_S)
    return decoded((yield from exchange(step, Patience(budget_s, repeatable=True))), Receipt)


def encoded(lines: Line | Iterable[Line], url: str = CHAT) -> Iterable[bytes]:
    for line in [lines] if isinstance(lines, Mapping) else lines:
        yield msgspec.json.encode(line if "url" in line else {**line, "url": url}) + b"\n"


def get(job_id: str, budget_s: float) -> Flow[Job]:
    return read(_path(job_id), Job, budget_s)


def wait(job_id: str, timeout_s: float | None, budget_s: float) -> Flow[Job]:
    """Raises TimeoutError where it has not ended by then."""
    deadline = deadline_of(timeout_s)
    while True:
        job = yield from _looked(job_id, _POLL_S, deadline, budget_s)
        if job.ended:
            return job
        if remaining(deadline) == 0.0:
            raise TimeoutError(f"the job {job_id} is {job.status} after {timeout_s} s")


def cancel(job_id: str, budget_s: float) -> Flow[Job]:
    # To cancel twice is to cancel once.
    step = Send(method="POST", path=f"{_path(job_id)}/cancel")
    return decoded((yield from exchange(step, Patience(budget_s, repeatable=True))), Job)


def delete(job_id: str, budget_s: float) -> Flow[None]:
    yield from exchange(Send(method="DELETE", path=_path(job_id)), Patience(budget_s))


def listed(filters: Mapping[str, str], budget_s: float) -> Items[Job]:
    cursor: str | None = None
    while True:
        page = yield from _page(filters, cursor, budget_s)
        for job in page.data:
            yield Emit(job)
        cursor = page.next_cursor
        if cursor is None:
            return


def results(filters: Mapping[str, str], budget_s: float) -> Items[Result]:
    return emitted(Lines("/v1/jobs/results", Result, budget_s, **filters))


def as_completed(submissions: Iterable[Receipt | str], timeout_s: float | None, budget_s: float) -> Items[Job]:
    """
    Every job of the submissions once it has ended, in the order of their ends.

    Between two looks at the lists it waits for the end of the oldest that has not ended: the gateway answers that at
    once, and jobs end about in the order of their lines.
    """
    deadline = deadline_of(timeout_s)
    pending = {
        one: _Submission(one) for one in (each if isinstance(each, str) else each.submission_id for each in submissions)
    }
    look_s = _FIRST_LOOK_S
    while pending:
        began = time.monotonic()
        news: list[Job] = []
        for submission in pending.values():
            news += yield from submission.look(budget_s)
        took_s = time.monotonic() - began
        for listed_job in sorted(news, key=_by_end):
            yield Emit((yield from get(listed_job.id, budget_s)))
        pending = {one: submission for one, submission in pending.items() if submission.oldest is not None}
        oldest = next((submission.oldest for submission in pending.values()), None)
        if oldest is None:
            return
        if remaining(deadline) == 0.0:
            raise TimeoutError(f"not all jobs have ended after {timeout_s} s")
        # A long list is not looked through all the time.
        look_s = max(_FIRST_LOOK_S if news else min(look_s * 2, _LONGEST_LOOK_S), 4 * took_s)
        yield from _looked(oldest, min(look_s, _POLL_S), deadline, budget_s)


class _Submission:
    """Which of its jobs are known to have ended."""

    def __init__(self, submission_id: str) -> None:
        self._submission_id = submission_id
        #: Everything up to this job has ended.
        self._cursor: str | None = None
        self._ended: set[str] = set()
        #: The first that has not. None: all have.
        self.oldest: str | None = None

    def look(self, budget_s: float) -> Flow[list[Job]]:
        """Those that have ended since the last look."""
        news: list[Job] = []
        seen = bool(self._cursor)
        cursor = self._cursor
        self.oldest = None
        while True:
            page = yield from _page({"submission_id": self._submission_id}, cursor, budget_s)
            seen = seen or bool(page.data)
            for job in page.data:
                if not job.ended:
                    self.oldest = self.oldest or job.id
                elif job.id not in self._ended:
                    self._ended.add(job.id)
                    news.append(job)
                if self.oldest is None:
                    self._cursor = job.id
                    self._ended.discard(job.id)
            cursor = page.next_cursor
            if cursor is None:
                break
        if not seen:
            raise errors.failure(f"no such submission: {self._submission_id}", code="not_found")
        return news


def _by_end(job: Job) -> tuple[float, str, int]:
    return (job.ended_at.timestamp() if job.ended_at else 0.0, job.submission_id, job.line)


def _looked(job_id: str, wait_s: float, deadline: float | None, budget_s: float) -> Flow[Job]:
    """The job once it has ended, or as it is after so long. Raises TimeoutError where nobody says so in time."""
    left = remaining(deadline)
    wait_s = wait_s if left is None else min(wait_s, left)
    answer_s = ANSWER_S if left is None else min(left - wait_s + 1.0, ANSWER_S)
    step = Send(method="GET", path=_path(job_id), params={"wait": f"{wait_s:.3f}"}, timeout_s=wait_s + answer_s)
    try:
        body = yield from exchange(step, Patience(budget_s, deadline, repeatable=True))
    except CallFailed as failed:
        if isinstance(failed, errors.Unreachable) and remaining(deadline) == 0.0:
            raise TimeoutError(f"nobody said in time how the job {job_id} is") from failed
        raise
    return decoded(body, Job)


def _page(filters: Mapping[str, str], cursor: str | None, budget_s: float) -> Flow[_Page]:
    params = {**filters, "limit": str(_PAGE)} | ({} if cursor is None else {"cursor": cursor})
    return read("/v1/jobs", _Page, budget_s, **params)


def _path(job_id: str) -> str:
    # An id is a UUID: a name with other characters would be another path.
    try:
        return f"/v1/jobs/{uuid.UUID(job_id)}"
    except ValueError:
        raise errors.failure(f"no such job: {job_id!r}", code="not_found", param="job_id") from None
