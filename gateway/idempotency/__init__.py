"""
One call a key: what is asked again under the idempotency key of an earlier call is answered with that call's answer.

It is a line around the line, for the transports whose callers wait for their answer (jobs have keys of their own). A
call without a key goes by untouched. The first with one reserves it; another meanwhile is told to come back; once there
is an end, every repetition gets it, and nothing is sent for it.

Who holds a key is a request of a process. The row says `sent` before anything is: so where a process died, or a caller
left, a key under which nothing was sent is free, and for any other the ledger says what became of it. The write before
the dispatch also finds out a request whose key was given to another, since its process was thought dead.
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Collection, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from typing import Final, Protocol, TypeVar

import msgspec
import structlog

from adapters.chat import ChatResponse
from adapters.contract import EmbeddingResponse
from admission.lease import Waiting
from gateway.answer import SILENT, EmbeddingLine, Ended, Item, Line, Observer
from gateway.call import Call, Completion, Embedded
from gateway.database import StoreUnavailable
from gateway.errors import AttemptedError, Code, Conflict, GatewayError, IdempotencyMismatch
from gateway.idempotency import kept
from gateway.idempotency.kept import Failure, Kept, Recording, Streamed, Vectors, Whole
from gateway.idempotency.store import CallStore, Claim, Found, Used
from gateway.outcome import AttemptReport, Outcome, RouteReport

log = structlog.get_logger(__name__)

#: Bytes of a question from which it is hashed in a thread: nobody else's tokens should wait for it.
_ASIDE_BYTES: Final = 128 * 1024
#: Times that a key is looked at again which changed hands between two looks.
_MOST_LOOKS: Final = 5
#: Writes that wait for a store which is away. Past this, keys of calls that ended go without: the ledger knows of them.
_MOST_UNWRITTEN: Final = 10_000
_PURGED_AT_ONCE: Final = 500
#: Seconds.
_COME_BACK_S: Final = 1.0
_RETRY_S: Final = 0.5
_LAST_WRITES_S: Final = 2.0

T = TypeVar("T")


class IdempotencySettings(msgspec.Struct, frozen=True, kw_only=True):
    #: Seconds that an end is kept.
    retention_s: float = 86_400.0
    #: Bytes of an answer that is kept.
    max_answer_bytes: int = 1024 * 1024
    #: Idempotency keys that one API key may have at once, and the bytes of their answers.
    max_keys: int = 100_000
    max_bytes: int = 1024**3
    #: Seconds between two rounds that forget.
    purge_s: float = 60.0
    #: Seconds between two counts of what the API keys in use have. Between them a process knows of its own calls only.
    count_s: float = 30.0


class Lines(Line, EmbeddingLine, Protocol):
    """All that a caller may wait for."""


class Recovery(Protocol):
    """What the control store knows of processes and attempts. `gateway.recovery` is it."""

    async def dead(self, owners: Sequence[uuid.UUID]) -> Collection[uuid.UUID]:
        """Which of these processes will never write again. Raises StoreUnavailable."""
        ...

    async def outcome_of(self, *, key_id: uuid.UUID, debit_id: str) -> Outcome | None:
        """What became of the attempts of a debit. None: none was granted. Raises StoreUnavailable."""
        ...


class _Turn:
    """A call that holds its key, and the line's observer of it."""

    def __init__(self, book: Idempotency, claim: Claim, observer: Observer) -> None:
        self.claim = claim
        #: Something may have been sent.
        self.sent = False
        self.over = False
        self._book = book
        self._observer = observer

    def queued(self, waiting: Waiting) -> None:
        self._observer.queued(waiting)

    def started(self, route: RouteReport, attempt: int) -> None:
        self._observer.started(route, attempt)

    def failed(self, report: AttemptReport) -> None:
        self._observer.failed(report)

    async def dispatching(self, attempt: int) -> None:
        if not await self._book.stored(self._book.store.send(self.claim)):
            # This process was taken for dead, and another request has the key.
            self.over = True
            raise _in_progress()
        self.sent = True
        await self._observer.dispatching(attempt)

    async def completed(self, response: ChatResponse | EmbeddingResponse, attempt: int) -> None:
        await self._observer.completed(response, attempt)

    async def keep(self, answer: Kept) -> None:
        """The end is known."""
        self.over = True
        await self._book.end(self.claim, answer)

    async def broke(self, error: GatewayError) -> None:
        """The line raised this."""
        outcome = error.outcome if isinstance(error, AttemptedError) else None
        if self.over or (self.sent and outcome is None):
            # Where something was sent, the ledger knows of it.
            return
        settled = outcome is not None and outcome.settlement == "settled"
        if not self.sent or outcome is None or not outcome.dispatched or (settled and outcome.cost.state == "zero"):
            # Nothing was sent, or every provider refused it whole: there is nothing that a repetition would do twice.
            # The key is free before the caller hears of it, who may ask again at once.
            self.over = True
            await self._book.free(self.claim)
        elif settled:
            assert isinstance(error, AttemptedError)
            await self.keep(kept.failed(error))


class Idempotency:
    """Satisfies `gateway.answer.Line` and `EmbeddingLine`, around those. Entered with `opened`."""

    def __init__(
        self, *, line: Lines, store: CallStore, recovery: Recovery, owner: uuid.UUID, settings: IdempotencySettings
    ) -> None:
        """`owner`: this process, as `recovery` knows it."""
        self.store = store
        self._line = line
        self._recovery = recovery
        self._owner = owner
        self._settings = settings
        #: The requests of this process that hold a key.
        self._turns: set[str] = set()
        #: By request, what is yet to be written of it, and the answer it is to have.
        self._unwritten: dict[str, tuple[Claim, Callable[[Claim], Awaitable[None]], Kept | None]] = {}
        self._news = asyncio.Event()
        #: What the API keys that were seen here have, as far as it was counted, and those to count next.
        self._used: dict[uuid.UUID, Used] = {}
        self._to_count: set[uuid.UUID] = set()
        self._in_use = asyncio.Event()

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[Idempotency]:
        """Writes what could not be written at once, and forgets what is past its time, while entered."""
        tasks = [asyncio.create_task(self._write(), name="idempotency.write")]
        tasks.append(asyncio.create_task(self._purge(), name="idempotency.purge"))
        tasks.append(asyncio.create_task(self._count(), name="idempotency.count"))
        for task in tasks:
            task.add_done_callback(_ended)
        try:
            yield self
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LAST_WRITES_S):
                    while self._unwritten:  # noqa: ASYNC110  the writer tells nobody
                        await asyncio.sleep(0.01)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)

    # ---------------------------------------------------------------- the faces of the line

    async def complete(self, call: Call, observer: Observer = SILENT) -> Completion:
        if call.options.idempotency_key is None:
            return await self._line.complete(call, observer)
        async with self._once(call, observer, streamed=False) as turn:
            match turn:
                case _Turn():
                    completion = await self._told(turn, self._line.complete(call, turn))
                    await turn.keep(Whole.of(completion))
                    return completion
                case Whole():
                    _tell(observer, turn.outcome)
                    return turn.completion
                case _:
                    raise _not_readable()

    async def embed(self, call: Call, observer: Observer = SILENT) -> Embedded:
        if call.options.idempotency_key is None:
            return await self._line.embed(call, observer)
        async with self._once(call, observer, streamed=False) as turn:
            match turn:
                case _Turn():
                    embedded = await self._told(turn, self._line.embed(call, turn))
                    await turn.keep(Vectors.of(embedded))
                    return embedded
                case Vectors():
                    _tell(observer, turn.outcome)
                    return turn.embedded
                case _:
                    raise _not_readable()

    def stream(self, call: Call, observer: Observer = SILENT) -> AbstractAsyncContextManager[AsyncIterator[Item]]:
        if call.options.idempotency_key is None:
            return self._line.stream(call, observer)
        return self._stream(call, observer)

    @asynccontextmanager
    async def _stream(self, call: Call, observer: Observer) -> AsyncIterator[AsyncIterator[Item]]:
        async with self._once(call, observer, streamed=True) as turn, AsyncExitStack() as stack:
            match turn:
                case _Turn():
                    entering = stack.enter_async_context(self._line.stream(call, turn))
                    items = self._recorded(call, turn, await self._told(turn, entering))
                case Streamed():
                    _tell(observer, turn.outcome)
                    items = _again(turn, call)
                case _:
                    raise _not_readable()
            stack.push_async_callback(items.aclose)
            yield items

    async def _recorded(self, call: Call, turn: _Turn, items: AsyncIterator[Item]) -> AsyncGenerator[Item]:
        recording = Recording(call, self._settings.max_answer_bytes)
        while True:
            try:
                item = await self._told(turn, anext(items))
            except StopAsyncIteration:
                return
            if isinstance(item, Ended):
                await turn.keep(recording.kept(item))
            else:
                recording.add(item)
            yield item

    async def _told(self, turn: _Turn, asked: Awaitable[T]) -> T:
        """What the line answers; where it raises, that is noted first."""
        try:
            return await asked
        except GatewayError as error:
            await turn.broke(error)
            raise

    # ---------------------------------------------------------------- who has the key

    @asynccontextmanager
    async def _once(
        self, call: Call, observer: Observer, *, streamed: bool
    ) -> AsyncIterator[_Turn | Whole | Vectors | Streamed]:
        """
        A turn, in which the call may be made; or the answer it has had. Raises IdempotencyMismatch, the error it has
        had, and `idempotency_in_progress`.
        """
        key = call.options.idempotency_key
        assert key is not None
        text = kept.question(call, streamed=streamed)
        aside = len(text) > _ASIDE_BYTES
        digest = await asyncio.to_thread(kept.digest_of, text) if aside else kept.digest_of(text)
        claim = Claim(
            key_id=call.caller.key_id,
            idempotency_key=key,
            request_id=call.request_id,
            debit_id=call.options.debit_id or call.request_id,
        )
        self._turns.add(claim.request_id)
        try:
            answer = await self._reserve(claim, digest)
            if isinstance(answer, Failure):
                raise answer.error
            if answer is not None:
                yield answer
                return
            turn = _Turn(self, claim, observer)
            try:
                yield turn
            finally:
                if not turn.over:
                    self.later(claim, self.store.leave if turn.sent else self.store.release)
        finally:
            self._turns.discard(claim.request_id)

    async def _reserve(self, claim: Claim, digest: bytes) -> Kept | None:
        """None: the key is this request's."""
        used = self._used.get(claim.key_id)
        full = used is not None and used.keys >= self._settings.max_keys
        self._to_count.add(claim.key_id)
        self._in_use.set()
        try:
            for _ in range(_MOST_LOOKS):
                if not full and await self.store.reserve(claim, digest, self._owner):
                    if used is not None:
                        used.keys += 1
                    return None
                found = await self.store.found(claim.key_id, claim.idempotency_key)
                if found is None and full:
                    raise _full(self._settings.max_keys)
                if found is None:
                    continue
                if found.digest != digest:
                    raise IdempotencyMismatch(
                        "this idempotency key was used for another request", param="idempotency-key"
                    )
                answer = await self._answer_of(found)
                if answer is not None or await self.store.take(found, claim, self._owner):
                    return answer
        except (StoreUnavailable, asyncio.CancelledError) as error:
            # Whether it was written is not known.
            self.later(claim, self.store.release)
            if isinstance(error, asyncio.CancelledError):
                raise
            raise _unavailable() from error
        raise _in_progress()

    async def _answer_of(self, found: Found) -> Kept | None:
        """What became of the request that has the key. None: nothing, and it is gone. Raises Conflict while it runs."""
        if found.answer is not None:
            try:
                return kept.decoded(found.answer)
            except msgspec.DecodeError:
                raise _not_readable() from None
        request_id = found.claim.request_id
        if request_id in self._turns:
            raise _in_progress()
        _, _, unwritten = self._unwritten.get(request_id, (None, None, None))
        if unwritten is not None:
            return unwritten
        if found.owner != self._owner and found.state != "left" and not await self._recovery.dead([found.owner]):
            raise _in_progress()
        if found.state == "waiting":
            return None
        outcome = await self._recovery.outcome_of(key_id=found.claim.key_id, debit_id=found.claim.debit_id)
        if outcome is None or not outcome.dispatched:
            return None
        answer = kept.orphaned(outcome)
        if outcome.settlement == "settled":
            await self.store.end(found.claim, kept.encoded(answer))
        return answer

    # ---------------------------------------------------------------- writing it down

    async def stored(self, asked: Awaitable[T]) -> T:
        """Raises `content_store_unavailable`."""
        try:
            return await asked
        except StoreUnavailable as error:
            raise _unavailable() from error

    async def end(self, claim: Claim, answer: Kept) -> None:
        """Written now, or as soon as the store is there: the answer goes out whatever it says."""
        text = kept.encoded(answer)
        used = self._used.get(claim.key_id)
        if not isinstance(answer, Failure):
            if len(text) > self._settings.max_answer_bytes:
                answer = kept.too_large(answer.outcome, self._settings.max_answer_bytes)
            elif used is not None and used.bytes + len(text) > self._settings.max_bytes:
                answer = kept.no_room(answer.outcome, self._settings.max_bytes)
            text = kept.encoded(answer)
        if used is not None:
            used.bytes += len(text)
        try:
            await asyncio.shield(self.store.end(claim, text))
        except StoreUnavailable:
            self.later(claim, lambda claim: self.store.end(claim, text), answer)
        except asyncio.CancelledError:
            self.later(claim, lambda claim: self.store.end(claim, text), answer)
            raise

    async def free(self, claim: Claim) -> None:
        """Now, or as soon as the store is there."""
        try:
            await asyncio.shield(self.store.release(claim))
        except StoreUnavailable:
            self.later(claim, self.store.release)
        except asyncio.CancelledError:
            self.later(claim, self.store.release)
            raise

    def later(self, claim: Claim, write: Callable[[Claim], Awaitable[None]], answer: Kept | None = None) -> None:
        """The caller does not wait for it."""
        if len(self._unwritten) >= _MOST_UNWRITTEN:
            log.warning("gateway.idempotency_unwritten", waiting=len(self._unwritten))
            return
        self._unwritten[claim.request_id] = (claim, write, answer)
        self._news.set()

    async def _write(self) -> None:
        while True:
            await self._news.wait()
            self._news.clear()
            while self._unwritten:
                request_id, waits = next(iter(self._unwritten.items()))
                claim, write, _ = waits
                try:
                    await write(claim)
                except StoreUnavailable:
                    await asyncio.sleep(_RETRY_S)
                    continue
                if self._unwritten[request_id] is waits:
                    del self._unwritten[request_id]

    async def _count(self) -> None:
        while True:
            await self._in_use.wait()
            self._in_use.clear()
            keys, self._to_count = self._to_count, set()
            for key_id in keys:
                with contextlib.suppress(StoreUnavailable):
                    self._used[key_id] = await self.store.used(key_id)
            await asyncio.sleep(self._settings.count_s)

    async def _purge(self) -> None:
        while True:
            try:
                while await self.store.purge(_PURGED_AT_ONCE) == _PURGED_AT_ONCE:
                    pass
            except StoreUnavailable:
                pass
            await asyncio.sleep(self._settings.purge_s)


async def _again(answer: Streamed, call: Call) -> AsyncGenerator[Item]:
    for item in answer.items(call):
        yield item


def _tell(observer: Observer, outcome: Outcome) -> None:
    """Who served it, as the first caller heard it."""
    for attempt in outcome.attempts[:-1]:
        observer.failed(attempt)
    if outcome.attempts:
        observer.started(outcome.attempts[-1].route, outcome.attempts[-1].number)


def _in_progress() -> Conflict:
    return Conflict(
        "a request with this idempotency key is being served",
        code=Code.IDEMPOTENCY_IN_PROGRESS,
        param="idempotency-key",
        retry_after_s=_COME_BACK_S,
    )


def _full(most: int) -> Conflict:
    return Conflict(
        f"this API key has {most} idempotency keys already, which is the most it may have: nothing was sent. Send the "
        "call without one, or wait until older ones are past their retention",
        code=Code.IDEMPOTENCY_FULL,
        param="idempotency-key",
    )


def _unavailable() -> GatewayError:
    return GatewayError(
        "the store of idempotency keys does not answer: nothing was sent",
        code=Code.CONTENT_STORE_UNAVAILABLE,
        retry_after_s=_COME_BACK_S,
    )


def _not_readable() -> Conflict:
    return Conflict(
        "another version of the gateway kept the answer, and this one cannot read it: it is not sent again",
        code=Code.IDEMPOTENCY_ANSWER_LOST,
        param="idempotency-key",
    )


def _ended(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("gateway.task_failed", task=task.get_name(), exc_info=error)
