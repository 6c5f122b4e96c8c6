"""Files and batches in OpenAI's shapes over REST: what they are, and the flows of both faces."""

from __future__ import annotations

import os
import re
import tempfile
import uuid
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import IO, Any, Final, TypeAlias

import msgspec

from gateway.client import errors
from gateway.client.flow import (
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
from gateway.client.jobs import Ended, Fault, Line, encoded

#: The path of a file of JSON lines, its bytes, or the requests themselves.
Source: TypeAlias = str | os.PathLike[str] | bytes | Iterable[Line]

OVER: Final = frozenset({"completed", "failed", "expired", "cancelled"})
#: Seconds between two looks at a batch: at first, and at most.
_FIRST_LOOK_S: Final = 0.2
_LONGEST_LOOK_S: Final = 5.0
#: Lines encoded in one go; then other tasks of the caller's have their turn.
_TURN_LINES: Final = 256
#: Bytes of encoded requests that are held in memory; more go to a temporary file.
_SPOOL_BYTES: Final = 8 * 1024 * 1024
_ID: Final = re.compile(r"[A-Za-z0-9_-]{1,128}")


class File(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    bytes: int
    filename: str
    #: Unix time.
    created_at: int
    expires_at: int | None = None


class Counts(msgspec.Struct, frozen=True):
    total: int = 0
    completed: int = 0
    failed: int = 0


class LineFault(msgspec.Struct, frozen=True, kw_only=True):
    """Why a line of the input cannot be served."""

    code: str
    message: str
    param: str | None = None
    line: int | None = None


class _Faults(msgspec.Struct, frozen=True):
    data: list[LineFault]


class Batch(msgspec.Struct, frozen=True, kw_only=True):
    """A batch as it was when it was asked for. docs/batches.md says what the fields mean; times are Unix times."""

    id: str
    status: str
    endpoint: str
    input_file_id: str | None = None
    output_file_id: str | None = None
    error_file_id: str | None = None
    request_counts: Counts = Counts()
    errors: _Faults | None = None
    created_at: int | None = None
    in_progress_at: int | None = None
    expires_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelled_at: int | None = None
    metadata: dict[str, str] | None = None
    usage: dict[str, Any] | None = None

    @property
    def ended(self) -> bool:
        return self.status in OVER

    @property
    def faults(self) -> list[LineFault]:
        """The lines for which it failed before anything was run."""
        return [] if self.errors is None else self.errors.data


class BatchResult(Ended, frozen=True, kw_only=True):
    """What became of one line. `answer()` is its body, or raises why there is none."""

    custom_id: str
    #: The line itself, where it was asked for.
    request: dict[str, Any] | None = None


# ------------------------------------------------------------------ flows


def upload(source: Source, filename: str | None, url: str, idempotency_key: str | None, budget_s: float) -> Flow[File]:
    """May be repeated until somebody has it: the same content under the same key is the same file."""
    if isinstance(source, str | os.PathLike):
        path = Path(source)
        with path.open("rb") as file:
            return (yield from _uploaded(file, filename or path.name, idempotency_key, budget_s))
    with tempfile.SpooledTemporaryFile(max_size=_SPOOL_BYTES) as spool:
        if isinstance(source, bytes):
            spool.write(source)
        else:
            for number, line in enumerate(encoded(source, url), 1):
                spool.write(line)
                if number % _TURN_LINES == 0:
                    yield Pause(0.0)
        return (yield from _uploaded(spool, filename or "batch.jsonl", idempotency_key, budget_s))


def _uploaded(file: IO[bytes], filename: str, idempotency_key: str | None, budget_s: float) -> Flow[File]:
    step = Send(
        method="POST",
        path="/v1/files",
        file=(filename, file),
        headers={"idempotency-key": idempotency_key or uuid.uuid4().hex},
        timeout_s=STORED_S,
    )
    return decoded((yield from exchange(step, Patience(budget_s, repeatable=True))), File)


def create(
    input_file_id: str,
    endpoint: str,
    metadata: Mapping[str, str] | None,
    webhook_url: str | None,
    idempotency_key: str | None,
    budget_s: float,
) -> Flow[Batch]:
    asked: dict[str, Any] = {"input_file_id": input_file_id, "endpoint": endpoint, "completion_window": "24h"}
    if metadata is not None:
        asked["metadata"] = metadata
    if webhook_url is not None:
        asked["webhook_url"] = webhook_url
    step = Send(
        method="POST",
        path="/v1/batches",
        content=msgspec.json.encode(asked),
        headers={"content-type": "application/json", "idempotency-key": idempotency_key or uuid.uuid4().hex},
    )
    return decoded((yield from exchange(step, Patience(budget_s, repeatable=True))), Batch)


def submit(
    source: Source,
    endpoint: str,
    metadata: Mapping[str, str] | None,
    webhook_url: str | None,
    idempotency_key: str | None,
    budget_s: float,
) -> Flow[Batch]:
    # One table keeps the keys of files and batches.
    of_file = None if idempotency_key is None else f"{idempotency_key}.file"
    file = yield from upload(source, None, endpoint, of_file, budget_s)
    return (yield from create(file.id, endpoint, metadata, webhook_url, idempotency_key, budget_s))


def get(batch_id: str, budget_s: float) -> Flow[Batch]:
    return read(_path("batches", batch_id), Batch, budget_s)


def wait(
    batch_id: str, timeout_s: float | None, progress: Callable[[Batch], object] | None, budget_s: float
) -> Flow[Batch]:
    """Raises TimeoutError where it has not ended by then."""
    deadline = deadline_of(timeout_s)
    look_s = _FIRST_LOOK_S
    told: Batch | None = None
    while True:
        batch = yield from get(batch_id, budget_s)
        if progress is not None and batch != told:
            progress(batch)
            told = batch
        if batch.ended:
            return batch
        left = remaining(deadline)
        if left == 0.0:
            raise TimeoutError(f"the batch {batch_id} is {batch.status} after {timeout_s} s")
        yield Pause(look_s if left is None else min(look_s, left))
        look_s = min(look_s * 1.5, _LONGEST_LOOK_S)


def cancel(batch_id: str, budget_s: float) -> Flow[Batch]:
    # To cancel twice is to cancel once.
    step = Send(method="POST", path=f"{_path('batches', batch_id)}/cancel")
    return decoded((yield from exchange(step, Patience(budget_s, repeatable=True))), Batch)


def results(batch: Batch | str, with_requests: bool, budget_s: float) -> Items[BatchResult]:
    """
    What became of every line: the answers and then the failures, each in the order of the input.

    `with_requests` reads the input beside them and joins by `custom_id`: all in the order of the input, each with its
    line, in the memory of one line. Raises for a batch that has not ended, and for one that was never run.
    """
    if isinstance(batch, str):
        batch = yield from get(batch, budget_s)
    if not batch.ended:
        raise errors.failure(f"the batch {batch.id} is {batch.status}: wait for its end", code="conflict")
    if batch.status == "failed":
        told = batch.faults[0] if batch.faults else Fault(code="invalid_request", message="the batch failed")
        raise errors.failure(told.message, code=told.code, param=told.param, attempts=0, dispatched=False)
    found = [
        _lines(file_id, BatchResult, budget_s) for file_id in (batch.output_file_id, batch.error_file_id) if file_id
    ]
    if not with_requests:
        for lines in found:
            yield from emitted(lines)
        return
    if batch.input_file_id is None:
        raise errors.failure(f"the input of the batch {batch.id} is gone", code="not_found")
    requests = _lines(batch.input_file_id, dict[str, Any], budget_s)
    heads: list[BatchResult | None] = []
    for lines in found:
        head = yield from lines.next()
        heads.append(head)
    while (request := (yield from requests.next())) is not None:
        for at, head in enumerate(heads):
            if head is not None and head.custom_id == request["custom_id"]:
                yield Emit(msgspec.structs.replace(head, request=request))
                heads[at] = yield from found[at].next()
                break
        else:
            raise errors.failure(f"no result for the line {request['custom_id']!r}", code="not_found")


def _lines(file_id: str, kind: Any, budget_s: float) -> Lines[Any]:
    return Lines(f"{_path('files', file_id)}/content", kind, budget_s)


def _path(kind: str, name: str) -> str:
    # A name with other characters would be another path.
    if not _ID.fullmatch(name):
        raise errors.failure(f"there is nothing called {name!r}", code="not_found")
    return f"/v1/{kind}/{name}"
