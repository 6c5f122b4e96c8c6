"""One call a key, on a real PostgreSQL: who makes it, who is told to wait, and what the others get."""

from __future__ import annotations

import asyncio
import importlib.resources
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Collection, Sequence
from contextlib import asynccontextmanager, suppress
from decimal import Decimal
from typing import Any, cast

import msgspec
import pytest
from typing_extensions import override

from adapters.chat import (
    ChatResponse,
    Choice,
    Delta,
    Image,
    ImageOutput,
    LogprobsDelta,
    Native,
    ReasoningDelta,
    StopReason,
    TextDelta,
    TokenLogprob,
    ToolCallDelta,
    ToolCallStart,
)
from adapters.contract import EmbeddingRequest, EmbeddingResponse
from adapters.protocols import PROTOCOLS
from admission.ids import new_id
from gateway import database
from gateway.answer import SILENT, Ended, Item, Observer
from gateway.call import Call, Caller, Embedded, Options, Scope, size_of_embedding
from gateway.errors import (
    AdmissionRefused,
    AllRoutesFailed,
    AttemptedError,
    Code,
    GatewayError,
    IdempotencyMismatch,
    PermissionDenied,
    StreamBroken,
)
from gateway.idempotency import Idempotency, IdempotencySettings
from gateway.idempotency.kept import ENDED_BEFORE, REPLAYED
from gateway.idempotency.store import CallStore, Claim
from gateway.outcome import Cost, Outcome
from tests.fakes.line import CHARGED, COMPLETION, ENDS, FakeLine, attempt, outcome
from tests.postgres import execute

MINE = Caller(key_id=uuid.UUID(int=7), name="mine", scopes=frozenset(Scope))
YOURS = Caller(key_id=uuid.UUID(int=8), name="yours", scopes=frozenset(Scope))
UNKNOWN = Cost(state="unknown")
BODY = b'{"model":"m","max_tokens":20,"messages":[{"role":"user","content":"what is a bridge?"}]}'
VECTORS = EmbeddingResponse(vectors=((0.25, -1.5),), served_model="e")


async def sends(call: Call, observer: Observer) -> None:
    await observer.dispatching(1)


class FakeLines(FakeLine):
    """With embeddings, too."""

    async def embed(self, call: Call, observer: Observer = SILENT) -> Embedded:
        async with self._recorded(call):
            await self.before(call, observer)
        return Embedded(response=VECTORS, outcome=outcome())


class FakeLedger:
    """What is known of processes and attempts."""

    def __init__(self) -> None:
        self.gone: set[uuid.UUID] = set()
        self.outcomes: dict[str, Outcome] = {}

    async def dead(self, owners: Sequence[uuid.UUID]) -> Collection[uuid.UUID]:
        return self.gone.intersection(owners)

    async def outcome_of(self, *, key_id: uuid.UUID, debit_id: str) -> Outcome | None:
        return self.outcomes.get(debit_id)


class Process:
    """One gateway's part in it."""

    def __init__(self, once: Idempotency, line: FakeLines, owner: uuid.UUID) -> None:
        self.once = once
        self.line = line
        self.owner = owner


class World:
    def __init__(self, url: str) -> None:
        self.url = url
        self.ledger = FakeLedger()

    @asynccontextmanager
    async def process(
        self,
        *,
        before: Callable[[Call, Observer], Awaitable[None]] = sends,
        items: Callable[[], AsyncGenerator[Item, None]] | None = None,
        **settings: Any,
    ) -> AsyncIterator[Process]:
        line = FakeLines(before=before) if items is None else FakeLines(before=before, items=items)
        given = IdempotencySettings(**settings)
        owner = new_id()
        async with (
            database.open_pool(self.url, name="test-content", size=4) as pool,
            Idempotency(
                line=line,
                store=CallStore(pool, retention_s=given.retention_s),
                recovery=self.ledger,
                owner=owner,
                settings=given,
            ).opened() as once,
        ):
            yield Process(once, line, owner)

    async def rows(self) -> list[str]:
        async with database.open_connection(self.url, name="test") as connection:
            return [row["state"] for row in await connection.fetch("select state from content.idempotent_call")]

    async def until(self, *states: str) -> None:
        async with asyncio.timeout(30):
            while await self.rows() != list(states):  # noqa: ASYNC110  it is in the database
                await asyncio.sleep(0.01)


@pytest.fixture
def world(database_url: str) -> World:
    return World(database_url)


def call(
    key: str | None = "k",
    *,
    caller: Caller = MINE,
    body: bytes = BODY,
    protocol: str = "chat_completions",
    **given: Any,
) -> Call:
    options = {name: given.pop(name) for name in Options.__struct_fields__ if name in given}
    return Call(
        request_id=new_id().hex,
        caller=caller,
        model="m",
        chat=PROTOCOLS[protocol].parse_request(body),
        options=Options(idempotency_key=key, **options),
        transport="rest",
        **given,
    )


async def read(process: Process, asked: Call) -> list[Item]:
    async with process.once.stream(asked) as items:
        return [item async for item in items]


async def code_of(asked: Awaitable[Any]) -> Code:
    with pytest.raises(GatewayError) as caught:
        await asked
    return caught.value.code


async def test_a_call_without_a_key_goes_by(world: World) -> None:
    async with world.process() as process:
        for _ in range(2):
            assert await process.once.complete(call(None)) is COMPLETION
            await read(process, call(None))
    assert len(process.line.calls) == 4
    assert await world.rows() == []


async def test_a_plain_answer_is_given_again_by_any_process_and_says_so(world: World) -> None:
    async with world.process() as one, world.process() as two:
        first = await one.once.complete(call())
        for process in (one, two):
            again = await process.once.complete(call())
            assert again.response == first.response
            assert again.outcome == msgspec.structs.replace(first.outcome, warnings=(REPLAYED,))
    assert (len(one.line.calls), len(two.line.calls)) == (1, 0)


async def test_a_whole_answer_comes_back_with_all_that_it_had(world: World) -> None:
    response = ChatResponse(
        choices=(
            Choice(
                index=0,
                text="a\x00b \N{SNOWMAN}",
                images=(Image(data=b"\x00\xff", media_type="image/png"),),
                logprobs=(TokenLogprob(token="a", logprob=-0.5, bytes=(97,)),),
                stop_reason=StopReason.STOP,
                native_stop_reason="stop",
            ),
        ),
        native=msgspec.Raw(b'{"id": 1, "citations": [1.50]}'),
        native_protocol="chat_completions",
    )

    class Line(FakeLines):
        @override
        async def complete(self, call: Call, observer: Observer = SILENT) -> Any:
            await observer.dispatching(1)
            return msgspec.structs.replace(COMPLETION, response=response)

    async with world.process() as process:
        process.once._line = Line()
        await process.once.complete(call())
        again = (await process.once.complete(call())).response
    assert msgspec.structs.replace(again, native=None) == msgspec.structs.replace(response, native=None)
    assert again.native is not None
    assert response.native is not None
    assert bytes(again.native) == bytes(response.native)


async def test_vectors_are_given_again(world: World) -> None:
    request = EmbeddingRequest(inputs=("a",))
    asked = [
        msgspec.structs.replace(call(), request_id=new_id().hex, embedding=given, chat=size_of_embedding(given))
        for given in (request, request, EmbeddingRequest(inputs=("b",)))
    ]
    async with world.process() as process:
        first, again = [await process.once.embed(each) for each in asked[:2]]
        assert again.response == first.response
        assert await code_of(process.once.embed(asked[2])) is Code.IDEMPOTENCY_MISMATCH
    assert len(process.line.calls) == 1


DELTAS: list[Item] = [
    (ReasoningDelta("I "), ReasoningDelta("think")),
    (ReasoningDelta("", signature="s"),),
    (TextDelta("a"), LogprobsDelta((TokenLogprob(token="a", logprob=-1.0),))),
    (TextDelta("b"), TextDelta("c")),
    (TextDelta("z", choice=1),),
    (ImageOutput(Image(data=b"\x01", media_type="image/png")),),
    (ToolCallStart(0, "id", "f"), ToolCallDelta(0, '{"a"'), ToolCallDelta(0, ": 1}")),
    (ToolCallStart(1, "id2", "g"), ToolCallDelta(1, "{}")),
]


async def many() -> AsyncGenerator[Item, None]:
    for item in DELTAS:
        yield item
    yield Ended(ends=ENDS, outcome=outcome())


async def test_a_stream_is_given_again_as_one_that_amounts_to_the_same(world: World) -> None:
    async with world.process(items=many) as process:
        assert await read(process, call()) == [*DELTAS, Ended(ends=ENDS, outcome=outcome())]
        *batches, ended = await read(process, call())
    assert [delta for batch in batches for delta in batch] == [  # type: ignore[union-attr]
        ReasoningDelta("I think"),
        ReasoningDelta("", signature="s"),
        TextDelta("a"),
        LogprobsDelta((TokenLogprob(token="a", logprob=-1.0),)),
        TextDelta("bc"),
        TextDelta("z", choice=1),
        ImageOutput(Image(data=b"\x01", media_type="image/png")),
        ToolCallStart(0, "id", "f"),
        ToolCallDelta(0, '{"a": 1}'),
        ToolCallStart(1, "id2", "g"),
        ToolCallDelta(1, "{}"),
    ]
    assert ended == Ended(ends=ENDS, outcome=msgspec.structs.replace(outcome(), warnings=(REPLAYED,)))
    assert len(process.line.calls) == 1


async def test_relayed_bytes_come_again_to_whoever_speaks_their_protocol_and_to_no_other(world: World) -> None:
    async def relayed() -> AsyncGenerator[Item, None]:
        for text, raw in (("a", b"data: 1\n\n"), ("b", b"data: 2\n\n")):
            yield (TextDelta(text), cast("Delta", Native(raw)))
        yield Ended(ends=ENDS, outcome=outcome(), native=b"data: end\n\n")

    async with world.process(items=relayed) as process:
        await read(process, call(relay=True))
        deltas, ended = await read(process, call(relay=True))
        assert deltas == [TextDelta("ab"), Native(b"data: 1\n\ndata: 2\n\n")]
        assert isinstance(ended, Ended)
        assert ended.native == b"data: end\n\n"
        for other in (call(), call(relay=True, protocol="anthropic_messages")):
            deltas, ended = await read(process, other)
            assert deltas == [TextDelta("ab")]
            assert isinstance(ended, Ended)
            assert ended.native is None
    assert len(process.line.calls) == 1


@pytest.mark.parametrize(
    "other",
    [
        pytest.param({"body": BODY.replace(b"bridge", b"tunnel")}, id="another question"),
        pytest.param({"body": BODY.replace(b"20", b"21")}, id="another parameter"),
        pytest.param({"body": BODY.replace(b"{", b'{"unheard_of":1,', 1)}, id="a field of the provider's own"),
        pytest.param({"allowed_providers": ("a",)}, id="another provider"),
        pytest.param({"betas": ("b",)}, id="a beta"),
    ],
)
async def test_another_question_under_the_key_is_refused(world: World, other: dict[str, Any]) -> None:
    async with world.process() as process:
        await process.once.complete(call())
        with pytest.raises(IdempotencyMismatch):
            await process.once.complete(call(**other))
        # Streamed or not is part of the question.
        with pytest.raises(IdempotencyMismatch):
            await read(process, call())
    assert len(process.line.calls) == 1


@pytest.mark.parametrize(
    "same",
    [
        pytest.param({"body": BODY.replace(b",", b" ,\n ").replace(b"20", b"20 ")}, id="other spacing"),
        pytest.param({"protocol": "anthropic_messages"}, id="another API"),
        pytest.param({"session_id": "s", "tags": {"a": "b"}, "run_id": "r", "owner_fence": 2}, id="for whom it is"),
    ],
)
async def test_the_same_question_in_other_words_is_the_same(world: World, same: dict[str, Any]) -> None:
    async with world.process() as process:
        await process.once.complete(call())
        await process.once.complete(call(**same))
    assert len(process.line.calls) == 1


async def test_a_key_is_one_api_keys_own(world: World) -> None:
    async with world.process() as process:
        await process.once.complete(call())
        await process.once.complete(call(caller=YOURS, body=BODY.replace(b"bridge", b"tunnel")))
    assert len(process.line.calls) == 2


async def test_of_many_at_once_one_is_made_and_the_others_come_back(world: World) -> None:
    go_on = asyncio.Event()

    async def waits(call: Call, observer: Observer) -> None:
        await observer.dispatching(1)
        await go_on.wait()

    async with world.process(before=waits) as one, world.process(before=waits) as two:
        asked = [asyncio.create_task(p.once.complete(call())) for _ in range(8) for p in (one, two)]
        async with asyncio.timeout(30):
            while sum(task.done() for task in asked) < len(asked) - 1:  # noqa: ASYNC110  any of them
                await asyncio.sleep(0.01)
        go_on.set()
        results = await asyncio.gather(*asked, return_exceptions=True)
    refusals = [result for result in results if isinstance(result, GatewayError)]
    assert len(refusals) == len(asked) - 1
    assert {refusal.code for refusal in refusals} == {Code.IDEMPOTENCY_IN_PROGRESS}
    assert all(refusal.retry_after_s for refusal in refusals)
    assert len(one.line.calls) + len(two.line.calls) == 1


#: What a call costs that every provider refused.
FREE = Cost(state="zero", usd=Decimal(0), reason="rejected")


def raising(error: Exception, *, sent: bool) -> Callable[[Call, Observer], Awaitable[None]]:
    async def before(call: Call, observer: Observer) -> None:
        if sent:
            await observer.dispatching(1)
        raise error

    return before


@pytest.mark.parametrize(
    ("error", "sent"),
    [
        pytest.param(AdmissionRefused("full", outcome=outcome(attempt(status="not_dispatched"))), False, id="no slot"),
        pytest.param(PermissionDenied("revoked"), False, id="not allowed"),
        pytest.param(
            AllRoutesFailed("refused", outcome=outcome(attempt(status="not_dispatched"), ended="failed")),
            True,
            id="no byte was written",
        ),
        pytest.param(
            AllRoutesFailed(
                "limited",
                outcome=outcome(attempt(status="error", code="rate_limit_exceeded"), ended="failed", cost=FREE),
                retry_after_s=1.0,
            ),
            True,
            id="refused at no cost",
        ),
        pytest.param(PermissionDenied("revoked after an attempt of which nothing is known"), True, id="none granted"),
    ],
)
async def test_where_nothing_was_sent_the_key_is_free_again(world: World, error: GatewayError, sent: bool) -> None:
    async with world.process(before=raising(error, sent=sent)) as one, world.process() as two:
        assert await code_of(one.once.complete(call())) is error.code
        # At once in the same process, and soon in the other.
        assert await code_of(one.once.complete(call())) is error.code
        async with asyncio.timeout(30):
            while True:
                with suppress(GatewayError):
                    await two.once.complete(call())
                    break
                await asyncio.sleep(0.01)
    assert len(one.line.calls) == 2


@pytest.mark.parametrize(
    "error",
    [
        AllRoutesFailed("all", outcome=outcome(attempt(status="error", code="overloaded"), ended="failed")),
        AttemptedError("bad", code=Code.UPSTREAM_REJECTED, param="messages", outcome=outcome(attempt(status="error"))),
        StreamBroken(
            "?", code=Code.UNCERTAIN, outcome=outcome(attempt(status="unknown"), ended="uncertain", cost=UNKNOWN)
        ),
    ],
    ids=["failed", "rejected", "uncertain"],
)
async def test_how_a_call_ended_that_was_sent_is_told_again(world: World, error: AttemptedError) -> None:
    async with world.process(before=raising(error, sent=True)) as one, world.process() as two:
        assert await code_of(read(one, call())) is error.code
        with pytest.raises(AttemptedError) as again:
            await read(two, call())
    told = again.value
    assert (told.code, told.message, told.param, told.retry_after_s) == (error.code, error.message, error.param, None)
    assert told.outcome is not None
    assert error.outcome is not None
    assert told.outcome.cost == error.outcome.cost
    assert ENDED_BEFORE in told.outcome.warnings
    assert two.line.calls == []


async def test_a_stream_that_breaks_after_content_is_not_made_again(world: World) -> None:
    async def breaks() -> AsyncGenerator[Item, None]:
        yield (TextDelta("a"),)
        raise StreamBroken("broken", outcome=outcome(attempt(status="unknown"), ended="uncertain", cost=UNKNOWN))

    async with world.process(items=breaks) as process:
        for _ in range(2):
            assert await code_of(read(process, call())) is Code.UPSTREAM_BROKEN
    assert len(process.line.calls) == 1


async def left_early(process: Process, asked: Call) -> None:
    async with process.once.stream(asked) as items:
        await anext(items)


@pytest.mark.parametrize(
    ("known", "code"),
    [
        pytest.param(None, None, id="the ledger knows of none"),
        pytest.param(outcome(attempt(status="not_dispatched")), None, id="it was not dispatched"),
        pytest.param(outcome(cost=CHARGED), Code.IDEMPOTENCY_ANSWER_LOST, id="it was charged"),
        pytest.param(outcome(attempt(status="unknown"), cost=UNKNOWN), Code.UNCERTAIN, id="it is not known"),
    ],
)
async def test_what_a_caller_left_is_what_the_ledger_says(
    world: World, known: Outcome | None, code: Code | None
) -> None:
    asked = call()
    if known is not None:
        world.ledger.outcomes[asked.request_id] = known
    async with world.process() as one, world.process() as two:
        await left_early(one, asked)
        await world.until("left")
        if code is None:
            await read(two, call())
            assert await world.rows() == ["ended"]
        else:
            for process in (one, two):
                with pytest.raises(AttemptedError) as told:
                    await read(process, call())
                assert told.value.code is code
                assert told.value.dispatched
    assert len(two.line.calls) == (code is None)


async def test_a_call_that_is_read_on_is_uncertain_until_it_is_settled(world: World) -> None:
    asked = call()
    pending = msgspec.structs.replace(outcome(cost=UNKNOWN), settlement="pending")
    world.ledger.outcomes[asked.request_id] = pending
    async with world.process() as process:
        await left_early(process, asked)
        await world.until("left")
        assert await code_of(read(process, call())) is Code.UNCERTAIN
        world.ledger.outcomes[asked.request_id] = outcome()
        assert await code_of(read(process, call())) is Code.IDEMPOTENCY_ANSWER_LOST
    assert len(process.line.calls) == 1


@pytest.mark.parametrize("sent", [False, True], ids=["waiting", "sent"])
async def test_a_cancelled_caller_leaves_its_key_or_gives_it_back(world: World, sent: bool) -> None:
    entered = asyncio.Event()

    async def hangs(call: Call, observer: Observer) -> None:
        if sent:
            await observer.dispatching(1)
        entered.set()
        await asyncio.Event().wait()

    async with world.process(before=hangs) as process:
        task = asyncio.create_task(process.once.complete(call()))
        await entered.wait()
        task.cancel()
        await asyncio.wait([task])
        await world.until(*(["left"] if sent else []))


async def test_the_key_of_a_dead_process_is_what_the_ledger_says_and_of_a_living_one_is_taken(world: World) -> None:
    asked, entered = call(), asyncio.Event()

    async def hangs(call: Call, observer: Observer) -> None:
        await observer.dispatching(1)
        entered.set()
        await asyncio.Event().wait()

    world.ledger.outcomes[asked.request_id] = outcome(attempt(status="unknown"), cost=UNKNOWN)
    async with world.process(before=hangs) as one, world.process() as two:
        task = asyncio.create_task(one.once.complete(asked))
        await entered.wait()
        assert await code_of(two.once.complete(call())) is Code.IDEMPOTENCY_IN_PROGRESS
        world.ledger.gone.add(one.owner)
        assert await code_of(two.once.complete(call())) is Code.UNCERTAIN
        task.cancel()
        await asyncio.wait([task])
    assert two.line.calls == []


async def test_a_process_that_was_thought_dead_sends_nothing_under_a_key_that_was_given_away(world: World) -> None:
    go_on, entered, sent = asyncio.Event(), asyncio.Event(), []

    async def queues(call: Call, observer: Observer) -> None:
        entered.set()
        await go_on.wait()
        await observer.dispatching(1)
        sent.append(call)

    async with world.process(before=queues) as one, world.process() as two:
        task = asyncio.create_task(one.once.complete(call()))
        await entered.wait()
        world.ledger.gone.add(one.owner)
        await two.once.complete(call())
        go_on.set()
        assert await code_of(task) is Code.IDEMPOTENCY_IN_PROGRESS
        world.ledger.gone.clear()
        assert (await one.once.complete(call())).response == COMPLETION.response
    assert sent == []


async def test_an_answer_that_is_too_large_goes_out_and_is_not_kept(world: World) -> None:
    async def large() -> AsyncGenerator[Item, None]:
        for _ in range(100):
            yield (TextDelta("x" * 100),)
        yield Ended(ends=ENDS, outcome=outcome())

    async with world.process(items=large, max_answer_bytes=2000) as process:
        assert sum(len(item) for item in (await read(process, call()))[:-1] if not isinstance(item, Ended)) == 100
        assert await code_of(read(process, call())) is Code.IDEMPOTENCY_ANSWER_LOST
    async with world.process(max_answer_bytes=10) as process:
        await process.once.complete(call("other"))
        assert await code_of(process.once.complete(call("other"))) is Code.IDEMPOTENCY_ANSWER_LOST
    assert len(process.line.calls) == 1


async def test_a_key_is_free_after_its_retention_and_its_answer_is_gone(world: World) -> None:
    async with world.process(purge_s=0.05) as process:
        await process.once.complete(call())
        execute(world.url, "update content.idempotent_call set expires_at = clock_timestamp() - interval '1 s'")
        await world.until()
        await process.once.complete(call())
    async with world.process(purge_s=1000) as late:
        execute(world.url, "update content.idempotent_call set expires_at = clock_timestamp() - interval '1 s'")
        # Purged at a start, or taken over: either way it is another call.
        await late.once.complete(call(body=BODY.replace(b"bridge", b"tunnel")))
    assert len(process.line.calls) == 2
    assert len(late.line.calls) == 1


class FlakyStore(CallStore):
    """Away while `lost`."""

    lost = False

    @override
    async def reserve(self, claim: Claim, digest: bytes, owner: uuid.UUID) -> bool:
        self.there()
        return await super().reserve(claim, digest, owner)

    @override
    async def send(self, claim: Claim) -> bool:
        self.there()
        return await super().send(claim)

    @override
    async def end(self, claim: Claim, answer: bytes) -> None:
        self.there()
        await super().end(claim, answer)

    def there(self) -> None:
        if self.lost:
            raise database.StoreUnavailable("lost")


class ReadableStore(FlakyStore):
    """Reservations go on where ends cannot be written."""

    @override
    async def reserve(self, claim: Claim, digest: bytes, owner: uuid.UUID) -> bool:
        return await CallStore.reserve(self, claim, digest, owner)


async def test_without_its_store_nothing_is_sent_under_a_key_and_all_else_goes_on(world: World) -> None:
    sent: list[str | None] = []

    async def loses(call: Call, observer: Observer) -> None:
        store.lost = call.options.idempotency_key is not None
        await observer.dispatching(1)
        sent.append(call.options.idempotency_key)

    async with world.process(before=loses) as process:
        store = process.once.store = FlakyStore(process.once.store._pool, retention_s=100.0)
        for _ in range(2):
            # Between the reservation and the dispatch, and before the reservation.
            assert await code_of(process.once.complete(call())) is Code.CONTENT_STORE_UNAVAILABLE
        assert await process.once.complete(call(None)) is COMPLETION
        assert sent == [None]
        store.lost = False
        await world.until()


async def test_an_answer_that_cannot_be_written_goes_out_and_is_written_later(world: World) -> None:
    async def loses(call: Call, observer: Observer) -> None:
        await observer.dispatching(1)
        store.lost = True

    async with world.process(before=loses) as one, world.process() as two:
        store = one.once.store = ReadableStore(one.once.store._pool, retention_s=100.0)
        assert await one.once.complete(call()) is COMPLETION
        assert (await one.once.complete(call())).response == COMPLETION.response
        assert await code_of(two.once.complete(call())) is Code.IDEMPOTENCY_IN_PROGRESS
        store.lost = False
        await world.until("ended")
        assert (await two.once.complete(call())).response == COMPLETION.response
    assert (len(one.line.calls), len(two.line.calls)) == (1, 0)


STATEMENTS: dict[str, tuple[Any, ...]] = {
    "reserve": (MINE.key_id, "k9", b"0" * 32, "r", "d", MINE.key_id, 100.0),
    "found": (MINE.key_id, "k9"),
    "take": (MINE.key_id, "k9", "r9", "waiting", "r", "d", MINE.key_id),
    "send": (MINE.key_id, "k9", "r9"),
    "leave": (MINE.key_id, "k9", "r9"),
    "end": (MINE.key_id, "k9", "r9", b"x", 100.0),
    "release": (MINE.key_id, "k9", "r9"),
    "purge": (500,),
    # It reads what one API key has: here another one has all of it.
    "used": (YOURS.key_id,),
}


async def counted(process: Process, *, keys: int = 0, size: int = 0) -> None:
    """Until the process knows that my key has so much."""
    async with asyncio.timeout(20):
        while (used := process.once._used.get(MINE.key_id)) is None or used.keys < keys or used.bytes < size:
            process.once._to_count.add(MINE.key_id)
            process.once._in_use.set()
            await asyncio.sleep(0.01)


async def test_no_statement_reads_all_that_was_ever_kept(database_url: str) -> None:
    folder = importlib.resources.files("gateway.idempotency").joinpath("sql")
    assert {file.name for file in folder.iterdir() if file.is_file()} == {f"{name}.sql" for name in STATEMENTS}
    async with database.open_connection(database_url, name="test") as connection:
        await connection.execute(
            "insert into content.idempotent_call"
            " (key_id, idempotency_key, digest, request_id, debit_id, owner, state, answer, expires_at)"
            f" select '{MINE.key_id}', 'k' || n, sha256('x'), 'r' || n, 'd', '{MINE.key_id}', 'ended', 'x',"
            " clock_timestamp() + make_interval(secs => n) from generate_series(1, 20000) n"
        )
        await connection.execute("analyze content.idempotent_call")
        for name, arguments in STATEMENTS.items():
            text = folder.joinpath(f"{name}.sql").read_text()
            plan = "\n".join(row[0] for row in await connection.fetch(f"explain {text}", *arguments))
            assert "Seq Scan on idempotent_call" not in plan, plan
            assert "idempotent_call" in plan


@pytest.mark.parametrize("sent", [False, True], ids=["refused before", "refused by the provider"])
async def test_the_key_of_a_refused_call_is_free_before_its_caller_hears_of_it(world: World, sent: bool) -> None:
    """Another process, so that nothing but the row tells it; repeated at once, many times."""
    refused = attempt(status="error") if sent else attempt(status="not_dispatched")
    error = AllRoutesFailed("no", outcome=outcome(refused, cost=Cost(state="zero", usd=Decimal(0))))

    async def refuses(call: Call, observer: Observer) -> None:
        if sent:
            await observer.dispatching(1)
        raise error if sent else AdmissionRefused("full")

    async with world.process(before=refuses) as one, world.process(before=refuses) as two:
        for process in (one, two) * 10:
            for ask in (process.once.complete, lambda asked, process=process: read(process, asked)):
                assert await code_of(ask(call())) is (Code.ALL_ROUTES_FAILED if sent else Code.QUEUE_FULL)
                assert await world.rows() == []
        assert len(one.line.calls) + len(two.line.calls) == 40


async def test_one_key_more_than_an_api_key_may_have_is_refused_and_what_it_has_is_answered(world: World) -> None:
    async with world.process(max_keys=3, count_s=0.01) as process:
        for number in range(3):
            await process.once.complete(call(f"k{number}"))
        await counted(process, keys=3)
        assert await code_of(process.once.complete(call("one more"))) is Code.IDEMPOTENCY_FULL
        assert (await process.once.complete(call("k0"))).response == COMPLETION.response
        # Another API key's are not among them, and a call without one needs none.
        await process.once.complete(call("one more", caller=YOURS))
        await process.once.complete(call(None))
    assert len(process.line.calls) == 5


async def test_an_answer_for_which_there_is_no_room_goes_out_and_is_not_kept(world: World) -> None:
    async with world.process(max_bytes=1, count_s=0.01) as process:
        async with database.open_connection(world.url, name="test") as connection:
            await connection.execute(
                "insert into content.idempotent_call"
                " (key_id, idempotency_key, digest, request_id, debit_id, owner, state, answer, expires_at)"
                f" values ('{MINE.key_id}', 'first', sha256('x'), 'r', 'd', '{MINE.key_id}', 'ended', 'xx',"
                " clock_timestamp() + interval '1 h')"
            )
        await counted(process, size=2)
        assert (await process.once.complete(call("second"))).response == COMPLETION.response
        with pytest.raises(AttemptedError, match="take up 1 bytes") as told:
            await process.once.complete(call("second"))
        assert told.value.code is Code.IDEMPOTENCY_ANSWER_LOST
    assert len(process.line.calls) == 1
