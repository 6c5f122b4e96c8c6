"""
What the client does, apart from how it waits.

A flow is a generator: it yields the next step, is sent what came of it, and returns its result. It opens no connection
and knows of no event loop, so both faces run the same flows, each with a driver of its own (`sync.py`, `aio.py`), and a
test can play the gateway by hand. A step that fails is thrown into its flow as a `CallFailed`.
"""

from __future__ import annotations

import dataclasses
import random
import time
from collections.abc import Callable, Generator, Mapping
from typing import IO, Any, Final, Generic, TypeAlias, TypeVar

import httpx
import msgspec

from gateway.client import errors
from gateway.client.errors import CallFailed, Unreachable
from protos.tollbridge.v1 import gateway_pb2 as pb

T = TypeVar("T")

#: Seconds that an answer over HTTP may let one wait for its next byte.
ANSWER_S: Final = 30.0
#: The same where much has to be stored first.
STORED_S: Final = 120.0
#: Seconds between repetitions: at first, and at most. Each is twice the one before.
_FIRST_PAUSE_S: Final = 0.2
_LONGEST_PAUSE_S: Final = 5.0
#: What passes by itself, whether the gateway knows when or not.
_PASSING: Final = frozenset(
    {
        "content_store_unavailable",
        "control_store_unavailable",
        "cooldown",
        "idempotency_in_progress",
        "queue_full",
        "queue_timeout",
        "shutting_down",
    }
)
#: Nobody listened, or something in front of the gateway found nobody who does.
_NOBODY_THERE: Final = frozenset({errors.LOCAL, "UNAVAILABLE", "502", "503", "504"})


# ------------------------------------------------------------------ steps


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Send:
    """One exchange over HTTP. Gives its `httpx.Response`, read."""

    method: str
    path: str
    params: Mapping[str, str] = dataclasses.field(default_factory=dict)
    headers: Mapping[str, str] = dataclasses.field(default_factory=dict)
    content: bytes | None = None
    #: Sent as a form with the file in it, from its beginning.
    file: tuple[str, IO[bytes]] | None = None
    timeout_s: float = ANSWER_S


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Open:
    """A GET whose answer is read in pieces. Gives an `Opened`; it is closed when the flow is left."""

    path: str
    params: Mapping[str, str] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, slots=True)
class Opened:
    #: Read where it is no success.
    response: httpx.Response
    #: An iterator of the face that opened it.
    pieces: Any


@dataclasses.dataclass(frozen=True, slots=True)
class Read:
    """Gives the next piece; b"" at the end."""

    opened: Opened


@dataclasses.dataclass(frozen=True, slots=True)
class Ask:
    """`Complete` over gRPC. Gives the `CompletionResponse`."""

    request: pb.CompletionRequest
    timeout_s: float | None


@dataclasses.dataclass(frozen=True, slots=True)
class Listen:
    """`Stream` over gRPC. Gives the call; it is cancelled when the flow is left."""

    request: pb.CompletionRequest
    timeout_s: float | None


@dataclasses.dataclass(frozen=True, slots=True)
class Hear:
    """Gives the next `CompletionChunk` of a call; None at the end."""

    call: Any


@dataclasses.dataclass(frozen=True, slots=True)
class Pause:
    seconds: float


@dataclasses.dataclass(frozen=True, slots=True)
class Emit(Generic[T]):
    """One item for whoever iterates over the flow."""

    item: T


Step: TypeAlias = Send | Open | Read | Ask | Listen | Hear | Pause
Flow: TypeAlias = Generator[Step, Any, T]
#: A flow that is iterated over.
Items: TypeAlias = Generator[Step | Emit[T], Any, None]


def body_of(step: Send) -> dict[str, Any]:
    """The part of httpx's arguments that is the body. A file is sent from its beginning, also again."""
    if step.file is None:
        return {"content": step.content}
    name, file = step.file
    file.seek(0)
    return {"data": {"purpose": "batch"}, "files": {"file": (name, file, "application/jsonl")}}


# ------------------------------------------------------------------ patience


@dataclasses.dataclass(slots=True)
class Patience:
    """
    Whether and when something is repeated. One for each thing that is asked.

    No repetition begins later than `budget_s` after the first try, or after `deadline` (of time.monotonic). What the
    gateway says of when it helps is a floor: where that is too late, the error is the answer.
    """

    budget_s: float
    deadline: float | None = None
    #: It may be sent again although the first may have been executed: it reads, or bears an idempotency key.
    repeatable: bool = False
    _until: float = dataclasses.field(init=False)
    _pause_s: float = dataclasses.field(default=_FIRST_PAUSE_S, init=False)

    def __post_init__(self) -> None:
        self._until = time.monotonic() + self.budget_s

    def after(self, failed: CallFailed) -> Pause:
        """How long to wait before it is asked again. Raises `failed` where it is not."""
        if not self._passes(failed):
            raise failed
        jitter = random.uniform(1.0, 1.25)  # noqa: S311  not for secrecy
        pause_s = max(self._pause_s, failed.retry_after_s or 0.0) * jitter
        self._pause_s = min(self._pause_s * 2, _LONGEST_PAUSE_S)
        again_at = time.monotonic() + pause_s
        if again_at > self._until or (self.deadline is not None and again_at >= self.deadline):
            raise failed
        return Pause(pause_s)

    def _passes(self, failed: CallFailed) -> bool:
        if isinstance(failed, Unreachable):
            return self.repeatable and failed.status in _NOBODY_THERE
        if failed.code not in _PASSING and failed.retry_after_s is None:
            return False
        # Even with an idempotency key: what was dispatched may have been paid for.
        return failed.dispatched is False or (self.repeatable and failed.dispatched is None)


def patiently(patience: Patience, attempt: Callable[[], Flow[T]]) -> Flow[T]:
    while True:
        try:
            return (yield from attempt())
        except CallFailed as failed:
            yield patience.after(failed)


def remaining(deadline: float | None) -> float | None:
    return None if deadline is None else max(deadline - time.monotonic(), 0.0)


def deadline_of(timeout_s: float | None) -> float | None:
    return None if timeout_s is None else time.monotonic() + timeout_s


# ------------------------------------------------------------------ calls over gRPC


def complete(request: pb.CompletionRequest, timeout_s: float | None, budget_s: float) -> Flow[pb.CompletionResponse]:
    deadline = deadline_of(timeout_s)
    patience = Patience(budget_s, deadline, repeatable=bool(request.idempotency_key))

    def once() -> Flow[pb.CompletionResponse]:
        response: pb.CompletionResponse = yield Ask(request, remaining(deadline))
        return response

    return patiently(patience, once)


def stream(request: pb.CompletionRequest, timeout_s: float | None, budget_s: float) -> Items[pb.CompletionChunk]:
    """The chunks up to `finished`, which is the last. Repeated only as long as no content has come."""
    deadline = deadline_of(timeout_s)
    patience = Patience(budget_s, deadline, repeatable=bool(request.idempotency_key))
    while True:
        content = False
        told: pb.Failed | None = None
        try:
            call = yield Listen(request, remaining(deadline))
            while True:
                chunk: pb.CompletionChunk | None = yield Hear(call)
                if chunk is None:
                    raise errors.failure("the stream ended without `finished`", code="upstream_broken", status="OK")
                if chunk.HasField("failed"):
                    # The status that follows says it, too, but has no room for a long outcome.
                    told = chunk.failed
                    continue
                content = content or chunk.HasField("delta")
                yield Emit(chunk)
                if chunk.HasField("finished"):
                    return
        except CallFailed as failed:
            if told is not None and failed.outcome is None and told.HasField("outcome"):
                failed.outcome = told.outcome
            if content:
                raise
            yield patience.after(failed)


# ------------------------------------------------------------------ exchanges over HTTP


def exchange(step: Send, patience: Patience) -> Flow[bytes]:
    """The body of the answer. Raises what the gateway said instead."""

    def once() -> Flow[bytes]:
        response: httpx.Response = yield step
        if not response.is_success:
            raise errors.from_http(response)
        return response.content

    return patiently(patience, once)


def read(path: str, kind: type[T], budget_s: float, **params: str) -> Flow[T]:
    """What a GET answers."""
    body = yield from exchange(Send(method="GET", path=path, params=params), Patience(budget_s, repeatable=True))
    return decoded(body, kind)


def decoded(body: bytes, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.DecodeError as error:
        raise errors.failure(f"the answer is not a gateway's: {error}", code="unreachable", status="200") from error


class Lines(Generic[T]):
    """The JSON objects of an answer, one a line, read as they are taken."""

    def __init__(self, path: str, kind: type[T], budget_s: float, **params: str) -> None:
        self._open = Open(path=path, params=params)
        self._patience = Patience(budget_s, repeatable=True)
        self._kind = kind
        self._opened: Opened | None = None
        self._ready: list[bytes] = []
        self._rest = b""
        self._ended = False

    def next(self) -> Flow[T | None]:
        """None at the end."""
        if self._opened is None:
            self._opened = yield from patiently(self._patience, self._begun)
        while not self._ready and not self._ended:
            piece: bytes = yield Read(self._opened)
            self._ended = not piece
            # Not by a text's lines: those end at U+2028 too, which JSON has inside strings.
            *whole, self._rest = (self._rest + (piece or b"\n")).split(b"\n")
            self._ready = [line for line in reversed(whole) if line.strip()]
        return decoded(self._ready.pop(), self._kind) if self._ready else None

    def _begun(self) -> Flow[Opened]:
        opened: Opened = yield self._open
        if not opened.response.is_success:
            raise errors.from_http(opened.response)
        return opened


def emitted(lines: Lines[T]) -> Items[T]:
    while (item := (yield from lines.next())) is not None:
        yield Emit(item)
