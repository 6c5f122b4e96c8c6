"""
What a job that has ended looks like in a file: the line of OpenAI's batch output.

The same text is made whenever an output is read, so that no copy of an answer has to be kept, and deleted, beside it.
"""

from __future__ import annotations

from typing import Final

import msgspec
from typing_extensions import TypedDict

from gateway.errors import Code
from gateway.jobs.model import JobView, Result
from gateway.outcome import Outcome

#: Ends that may come after something was sent and still leave no outcome.
_UNSURE: Final = frozenset({Code.UNCERTAIN, Code.POISON, Code.INTERNAL, Code.CANCELLED})

#: OpenAI's words for the lines of a batch that was over before they were.
_IN_A_BATCH: Final = {Code.EXPIRED.value: "batch_expired", Code.CANCELLED.value: "batch_cancelled"}


class JobAnswer(TypedDict):
    """What a direct call would have been answered."""

    status_code: int | None
    request_id: str | None
    body: msgspec.Raw


class JobError(TypedDict):
    """Why there is no answer."""

    code: str
    message: str | None
    #: The path of the field at fault.
    param: str | None
    #: Whether a provider got any of it; null where that is not known.
    dispatched: bool | None


def response(body: str, status: int | None, outcome: Outcome | None) -> JobAnswer:
    return {
        "status_code": status,
        "request_id": outcome.request_id if outcome else None,
        "body": msgspec.Raw(body.encode()),
    }


def error(job: JobView | Result) -> JobError | None:
    if job.error_code is None:
        return None
    # Without an outcome nothing was sent, unless its run ended in a way that left none.
    dispatched = (None if job.error_code in _UNSURE else False) if job.outcome is None else job.outcome.dispatched
    return {
        "code": job.error_code,
        "message": job.error_message,
        "param": job.error_param,
        "dispatched": dispatched,
    }


def batch_line(result: Result) -> bytes:
    """A line of a batch's output, or of its errors."""
    fault = error(result)
    if fault is not None:
        fault["code"] = _IN_A_BATCH.get(fault["code"], fault["code"])
    line = {
        "id": f"batch_req_{result.job_id.hex}",
        "custom_id": result.custom_id,
        "response": None if result.result is None else response(result.result, result.result_status, result.outcome),
        "error": fault,
    }
    return msgspec.json.encode(line) + b"\n"
