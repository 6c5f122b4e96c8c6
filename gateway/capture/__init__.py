"""
What was asked and answered, kept for people: off unless an operator turns it on.

It is a line around the line. A request never waits for it and never fails for it: what was said is put aside as it goes
by, redacted in a thread, and written a little later, together with what else came meanwhile. Where the content store is
away for long, or more is said than can be written, captures are lost, and the log says how many.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, Final, Protocol

import msgspec
import structlog

from adapters.chat import ChatResponse, Delta, ReasoningDelta, RefusalDelta, TextDelta, ToolCallDelta, ToolCallStart
from adapters.contract import relayed
from gateway.answer import SILENT, EmbeddingLine, Ended, Item, Line, Observer
from gateway.call import Call, Completion, Embedded
from gateway.capture.redaction import Redaction
from gateway.capture.store import CaptureStore, Row
from gateway.database import StoreUnavailable
from gateway.errors import GatewayError

log: Final = structlog.get_logger("gateway")

#: Bytes that wait to be written; past it captures are lost.
_MOST_WAITING: Final = 64 * 1024**2
#: Of one write.
_ROWS_AT_ONCE: Final = 100
_BYTES_AT_ONCE: Final = 4 * 1024**2
_PURGED_AT_ONCE: Final = 500
#: Seconds: for others to come and be written together, between tries of a store that is away, between rounds that
#: forget, and for the last writes of a process.
_GATHER_S: Final = 0.2
_RETRY_S: Final = 0.5
_PURGE_S: Final = 60.0
_LAST_WRITES_S: Final = 2.0
#: The parts of a streamed answer are kept apart up to this many.
_MOST_PARTS: Final = 1000


class CaptureSettings(msgspec.Struct, frozen=True, kw_only=True):
    enabled: bool = False
    #: Seconds that a capture is kept.
    retention_s: float = 30 * 86_400.0
    #: Bytes of a request, and of an answer; what is larger is not kept.
    max_bytes: int = 256 * 1024
    #: Names of `gateway.capture.redaction.KNOWN`, and regular expressions of the operator's own.
    redact: tuple[str, ...] = ("secret", "email", "card")
    redact_patterns: tuple[str, ...] = ()


class Lines(Line, EmbeddingLine, Protocol):
    """All that can be captured."""


class _Said(msgspec.Struct, frozen=True, kw_only=True):
    """A capture before it is redacted."""

    call: Call
    ended: str
    request: bytes
    answer: bytes | None

    @property
    def size(self) -> int:
        return len(self.request) + len(self.answer or b"")


class Capture:
    """Satisfies `gateway.answer.Line` and `EmbeddingLine`, around those. Entered with `opened`."""

    def __init__(self, *, line: Lines, store: CaptureStore, settings: CaptureSettings) -> None:
        self._line = line
        self._store = store
        self._settings = settings
        self._redaction = Redaction(settings.redact, settings.redact_patterns)
        self._waiting: deque[_Said] = deque()
        self._bytes = 0
        self._lost = 0
        self._news = asyncio.Event()

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[Capture]:
        """Writes what is captured, and forgets what is past its time, while entered."""
        writer = asyncio.create_task(self._write(), name="capture.write")
        purge = asyncio.create_task(self._purge(), name="capture.purge")
        for task in (writer, purge):
            task.add_done_callback(_ended)
        try:
            yield self
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LAST_WRITES_S):
                    while self._waiting:  # noqa: ASYNC110  the writer tells nobody
                        await asyncio.sleep(0.01)
        finally:
            self._lost += len(self._waiting)
            self._tell_losses()
            for task in (writer, purge):
                task.cancel()
            await asyncio.wait((writer, purge))

    # ---------------------------------------------------------------- the faces of the line

    async def complete(self, call: Call, observer: Observer = SILENT) -> Completion:
        try:
            completion = await self._line.complete(call, observer)
        except (GatewayError, asyncio.CancelledError) as error:
            self._keep(call, _code(error), None)
            raise
        self._keep(call, "complete", _of_response(completion.response))
        return completion

    async def embed(self, call: Call, observer: Observer = SILENT) -> Embedded:
        """Of the answer only that there is one: its vectors say nothing to people."""
        try:
            embedded = await self._line.embed(call, observer)
        except (GatewayError, asyncio.CancelledError) as error:
            self._keep(call, _code(error), None)
            raise
        self._keep(call, "complete", None)
        return embedded

    @asynccontextmanager
    async def stream(self, call: Call, observer: Observer = SILENT) -> AsyncIterator[AsyncIterator[Item]]:
        so_far = _Answer(self._settings.max_bytes)
        async with AsyncExitStack() as stack:
            try:
                items = self._recorded(so_far, await stack.enter_async_context(self._line.stream(call, observer)))
                stack.push_async_callback(items.aclose)
                yield items
            except (GatewayError, asyncio.CancelledError) as error:
                so_far.ended = so_far.ended or _code(error)
                raise
            finally:
                self._keep(call, so_far.ended or "cancelled", so_far.json())

    async def _recorded(self, so_far: _Answer, items: AsyncIterator[Item]) -> AsyncGenerator[Item]:
        async for item in items:
            if isinstance(item, Ended):
                so_far.ended = "complete"
            else:
                so_far.add(item)
            yield item

    # ---------------------------------------------------------------- writing it down

    def _keep(self, call: Call, ended: str, answer: bytes | None) -> None:
        said = _Said(call=call, ended=ended, request=_of_request(call), answer=answer)
        if self._bytes + said.size > _MOST_WAITING:
            self._lost += 1
            return
        self._bytes += said.size
        self._waiting.append(said)
        self._news.set()

    async def _write(self) -> None:
        while True:
            await self._news.wait()
            await asyncio.sleep(_GATHER_S)
            self._news.clear()
            while self._waiting:
                together = self._together()
                rows = await asyncio.to_thread(self._redacted, together)
                while True:
                    try:
                        await self._store.write(rows, self._settings.retention_s)
                    except StoreUnavailable:
                        await asyncio.sleep(_RETRY_S)
                        continue
                    break
                for said in together:
                    self._waiting.popleft()
                    self._bytes -= said.size
            self._tell_losses()

    def _together(self) -> list[_Said]:
        """The first that wait. They wait on until they are written."""
        together: list[_Said] = []
        size = 0
        for said in self._waiting:
            size += said.size
            if together and (size > _BYTES_AT_ONCE or len(together) == _ROWS_AT_ONCE):
                break
            together.append(said)
        return together

    def _redacted(self, together: Sequence[_Said]) -> list[Row]:
        return [
            Row(
                request_id=said.call.request_id,
                key_id=said.call.caller.key_id,
                debit_id=said.call.options.debit_id or said.call.request_id,
                transport=said.call.transport,
                model=said.call.model,
                session_id=said.call.options.session_id,
                ended=said.ended,
                request=self._kept(said.request),
                request_bytes=len(said.request),
                answer=None if said.answer is None else self._kept(said.answer),
                answer_bytes=len(said.answer or b""),
            )
            for said in together
        ]

    def _kept(self, document: bytes) -> str | None:
        """None: it is too large, also without what is no text."""
        text = self._redaction.json(document)
        return text if len(text.encode()) <= self._settings.max_bytes else None

    def _tell_losses(self) -> None:
        if self._lost:
            log.warning("gateway.captures_lost", count=self._lost)
            self._lost = 0

    async def _purge(self) -> None:
        while True:
            with contextlib.suppress(StoreUnavailable):
                while await self._store.purge(_PURGED_AT_ONCE) == _PURGED_AT_ONCE:
                    pass
            await asyncio.sleep(_PURGE_S)


class _Answer:
    """What there is of a streamed answer, up to so many bytes."""

    def __init__(self, most: int) -> None:
        self.ended: str | None = None
        self._most = most
        self._size = 0
        self._whole = True
        #: By choice, kind and place, pieces of text; of a tool call its beginning, too.
        self._pieces: dict[tuple[int, str, int], list[str]] = {}
        self._starts: dict[tuple[int, str, int], ToolCallStart] = {}

    def add(self, item: Sequence[Delta]) -> None:
        if not self._whole:
            return
        deltas, _ = relayed(item)
        for delta in deltas:
            match delta:
                case TextDelta(text, choice):
                    self._add((choice, "text", 0), text)
                case RefusalDelta(text, choice):
                    self._add((choice, "refusal", 0), text)
                case ReasoningDelta(text, choice):
                    self._add((choice, "reasoning", delta.block), text)
                case ToolCallStart():
                    self._starts[delta.choice, "tool_calls", delta.index] = delta
                    self._add((delta.choice, "tool_calls", delta.index), "")
                case ToolCallDelta():
                    self._add((delta.choice, "tool_calls", delta.index), delta.arguments)
                case _:
                    pass
            if self._size > self._most or len(self._pieces) > _MOST_PARTS:
                # What is larger than is kept need not be held until it has ended.
                self._whole = False
                self._pieces.clear()
                return

    def _add(self, place: tuple[int, str, int], text: str) -> None:
        self._pieces.setdefault(place, []).append(text)
        self._size += len(text)

    def json(self) -> bytes | None:
        """None: nothing was said, or too much."""
        if not self._pieces:
            return None
        choices: dict[int, dict[str, Any]] = {}
        for (choice, kind, index), pieces in self._pieces.items():
            said = choices.setdefault(choice, {"index": choice})
            text = "".join(pieces)
            if kind in {"text", "refusal"}:
                said[kind] = text
            elif kind == "reasoning":
                said.setdefault(kind, []).append({"text": text})
            else:
                start = self._starts.get((choice, kind, index))
                named = {} if start is None else {"id": start.id, "name": start.name}
                said.setdefault(kind, []).append({**named, "arguments": text})
        return msgspec.json.encode({"choices": list(choices.values())})


def _of_request(call: Call) -> bytes:
    """In the caller's own words, where there are any."""
    asked = call.chat if call.embedding is None else call.embedding
    native = asked.native
    if native is not None:
        return msgspec.json.encode({"protocol": native.protocol, "body": native.fields})
    fields = {name: value for name, value in msgspec.structs.asdict(asked).items() if name not in {"native", "paths"}}
    return msgspec.json.encode({"protocol": "tollbridge", "body": fields})


def _of_response(response: ChatResponse) -> bytes:
    return msgspec.json.encode({"choices": response.choices})


def _code(error: BaseException) -> str:
    return error.code.value if isinstance(error, GatewayError) else "cancelled"


def _ended(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("gateway.task_failed", task=task.get_name(), exc_info=error)
