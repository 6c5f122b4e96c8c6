"""A line without providers: it does what the model's name says, and keeps a ledger of what it was asked."""

from __future__ import annotations

import asyncio
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from decimal import Decimal
from typing import Any

import msgspec

from adapters.chat import ChatResponse, Choice, StopReason
from adapters.contract import EmbeddingResponse
from gateway.answer import SILENT, Item, Observer
from gateway.call import Call, Caller, Completion, Embedded, Options, Scope
from gateway.errors import AdmissionRefused, AllRoutesFailed, Code, UpstreamRejected
from gateway.jobs.formats import Response
from gateway.outcome import AttemptReport, Cost, Outcome, RouteReport
from metering.usage import Usage

ROUTE = RouteReport(route_id="r1", provider="fake", model="fake-1", protocol="chat_completions")
PRICE = Decimal("0.000000125")


def response(text: str = "hello") -> ChatResponse:
    return ChatResponse(
        choices=(Choice(index=0, text=text, stop_reason=StopReason.STOP, native_stop_reason="stop"),),
        usage=Usage(input_total=10, output_total=5),
        response_id="chatcmpl-1",
        served_model="fake-1",
    )


def vectors(count: int) -> EmbeddingResponse:
    return EmbeddingResponse(
        vectors=tuple((0.25 * n, 0.5) for n in range(count)),
        usage=Usage(input_total=10, output_total=0),
        served_model="fake-1",
    )


def outcome(
    call: Call, attempt: int, *, ended: str = "complete", status: str = "success", error_class: str | None = None
) -> Outcome:
    cost = (
        Cost(state="charged", usd=PRICE)
        if status == "success"
        else Cost(state="unknown", upper_bound_usd=Decimal(1))
        if status == "unknown"
        else Cost(state="zero", usd=Decimal(0), reason="error")
    )
    report = AttemptReport(number=attempt, route=ROUTE, status=status, error_class=error_class, cost=cost)
    return Outcome(
        request_id=call.request_id,
        debit_id=call.options.debit_id or "",
        ended=ended,
        attempts=(report,),
        usage=Usage(input_total=10, output_total=5) if status == "success" else Usage(),
        cost=cost,
        settlement="settled",
    )


class FakeLine:
    """
    Models: "ok", "nameless" (its answers have no id and no model),
    "wait" (sent, then until `gate` opens), "queue" (not sent, until `gate` opens), "busy" (refused until
    `free` is set), "flaky" (fails the first run), "down" (always fails), "uncertain", "rejected", "fault".
    """

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.free = asyncio.Event()
        self.sent: Counter[str] = Counter()
        self.attempts: list[tuple[str, int]] = []
        self.inside = asyncio.Event()
        self.cancelled: list[str] = []
        self.refused = 0
        #: Models that are refused for an hour, and the groups that refuse them.
        self.cooling: dict[str, tuple[str, ...]] = {}
        #: Keys that have as much at work as they may.
        self.at_their_limit: set[uuid.UUID] = set()
        #: Called with the debit between the stored answer and the settlement, and after the latter.
        self.pause_before_settlement: asyncio.Event | None = None

    async def complete(self, call: Call, observer: Observer = SILENT) -> Completion:
        try:
            return await self._complete(call, observer)
        except asyncio.CancelledError:
            self.cancelled.append(call.options.debit_id or "")
            raise

    async def embed(self, call: Call, observer: Observer = SILENT) -> Embedded:
        assert call.embedding is not None
        attempt = call.attempts_before + 1
        await observer.dispatching(attempt)
        self.sent[call.options.debit_id or ""] += 1
        answer = vectors(len(call.embedding.inputs))
        await observer.completed(answer, attempt)
        return Embedded(response=answer, outcome=outcome(call, attempt))

    async def _complete(self, call: Call, observer: Observer) -> Completion:
        debit, attempt = call.options.debit_id or "", call.attempts_before + 1
        if call.model == "queue":
            self.inside.set()
            await self.gate.wait()
        if call.model == "busy" and not self.free.is_set():
            self.refused += 1
            nothing = Outcome(
                request_id=call.request_id,
                debit_id=debit,
                ended="failed",
                attempts=(),
                usage=Usage(),
                cost=Cost(state="zero"),
                settlement="settled",
            )
            raise AdmissionRefused("the queue is full", code=Code.QUEUE_FULL, groups=("full",), outcome=nothing)
        if call.caller.key_id in self.at_their_limit:
            self.refused += 1
            raise AdmissionRefused("this API key has a limit", code=Code.KEY_LIMIT, retry_after_s=1.0)
        if (cooling := self.cooling.get(call.model)) is not None:
            self.refused += 1
            raise AdmissionRefused(
                "is cooling down",
                code=Code.COOLDOWN,
                retry_after_s=3600.0,
                groups=cooling,
                cause="rate_limited",
            )
        observer.started(ROUTE, attempt)
        await observer.dispatching(attempt)
        self.sent[debit] += 1
        self.attempts.append((debit, attempt))
        self.inside.set()
        match call.model:
            case "wait":
                await self.gate.wait()
            case "flaky" if self.sent[debit] == 1:
                failed = outcome(call, attempt, ended="failed", status="error", error_class="transient")
                raise AllRoutesFailed("every route failed", outcome=failed)
            case "down":
                failed = outcome(call, attempt, ended="failed", status="error", error_class="transient")
                raise AllRoutesFailed("every route failed", outcome=failed)
            case "uncertain":
                unknown = outcome(call, attempt, ended="uncertain", status="unknown", error_class="network")
                raise AllRoutesFailed("every route failed", outcome=unknown)
            case "rejected":
                failed = outcome(call, attempt, ended="failed", status="error", error_class="fatal")
                raise UpstreamRejected("the provider refused it\0", outcome=failed)
            case "fault":
                raise RuntimeError("a bug")
            case _:
                pass
        answer = response()
        if call.model == "nameless":
            answer = msgspec.structs.replace(answer, response_id=None, served_model=None)
        await observer.completed(answer, attempt)
        if self.pause_before_settlement is not None:
            await self.pause_before_settlement.wait()
        return Completion(response=answer, outcome=outcome(call, attempt))

    def stream(self, call: Call, observer: Observer = SILENT) -> AbstractAsyncContextManager[AsyncIterator[Item]]:
        raise NotImplementedError


class FakeCallers:
    def __init__(self) -> None:
        self.revoked: set[uuid.UUID] = set()
        self.scopes = frozenset({Scope.CHAT, Scope.JOBS})

    def caller(self, key_id: uuid.UUID) -> Caller | None:
        if key_id in self.revoked:
            return None
        return Caller(key_id=key_id, name="test", scopes=self.scopes)


class FakeRecovery:
    """What a control store would know."""

    def __init__(self) -> None:
        self.dead_owners: set[uuid.UUID] = set()
        self.settled: list[tuple[str, int, Response]] = []
        self.outcomes: dict[str, Outcome] = {}

    async def dead(self, owners: Sequence[uuid.UUID]) -> Collection[uuid.UUID]:
        return self.dead_owners & set(owners)

    async def settle_stored(self, *, key_id: Any, options: Options, attempt: int, response: Response) -> Outcome:
        debit = options.debit_id or ""
        self.settled.append((debit, attempt, response))
        cost = Cost(state="charged", usd=PRICE)
        report = AttemptReport(number=attempt, route=ROUTE, status="success", cost=cost)
        return Outcome(
            request_id="recovered",
            debit_id=debit,
            ended="complete",
            attempts=(report,),
            usage=response.usage,
            cost=cost,
            settlement="settled",
        )

    async def outcome_of(self, *, key_id: Any, debit_id: str) -> Outcome | None:
        return self.outcomes.get(debit_id)

    async def outcomes_of(self, *, key_id: Any, debit_ids: Sequence[str]) -> Mapping[str, Outcome]:
        return {debit_id: self.outcomes[debit_id] for debit_id in debit_ids if debit_id in self.outcomes}
