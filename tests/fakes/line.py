"""A line that does what a test says, for tests of what stands in front of it."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from datetime import date
from decimal import Decimal

from aiohttp import web

from adapters.chat import ChatRequest, ChatResponse, Choice, ChoiceEnd, StopReason, TextDelta
from gateway.answer import SILENT, Ended, Item, Observer
from gateway.call import Call, Caller, Completion, Scope
from gateway.errors import Unauthenticated
from gateway.outcome import AttemptReport, Cost, Counters, Outcome, RouteReport
from gateway.rest.endpoint import Exchange
from metering.usage import Usage

ROUTE = RouteReport(route_id="r1", provider="openai", model="gpt-4o", protocol="chat_completions")
BACKUP = RouteReport(route_id="r2", provider="backup", model="gpt-4o-mini", protocol="chat_completions")
CHARGED = Cost(state="charged", usd=Decimal("0.000125"), price_version="2026-01")


def attempt(number: int = 1, *, route: RouteReport = ROUTE, status: str = "success", code: str | None = None):
    error_class = None if code is None else "transient"
    return AttemptReport(number=number, route=route, status=status, error_class=error_class, code=code, cost=CHARGED)


def outcome(*attempts: AttemptReport, ended: str = "complete", cost: Cost = CHARGED) -> Outcome:
    return Outcome(
        request_id="0" * 32,
        debit_id="debit-1",
        ended=ended,
        attempts=attempts or (attempt(),),
        usage=Usage(input_total=12, output_total=0),
        cost=cost,
        settlement="settled",
        counters=Counters(day_usd=Decimal("1E+1"), total_usd=Decimal("20.50"), day=date(2026, 2, 3)),
    )


ENDS = (ChoiceEnd(choice=0, stop_reason=StopReason.STOP, native_stop_reason="stop"),)
ENDED = Ended(ends=ENDS, outcome=outcome())
COMPLETION = Completion(
    response=ChatResponse(
        choices=(Choice(index=0, text="Hello", stop_reason=StopReason.STOP, native_stop_reason="stop"),)
    ),
    outcome=outcome(),
)


async def nothing(call: Call, observer: Observer) -> None: ...


async def hello() -> AsyncGenerator[Item, None]:
    yield (TextDelta("Hel"),)
    yield (TextDelta("lo"),)
    yield ENDED


async def not_here(exchange: Exchange, chat: ChatRequest) -> web.StreamResponse:
    """Takes what is to be answered in the background, where a test is not about that."""
    raise AssertionError("nothing is kept here")


class FakeLine:
    """Implements `gateway.answer.Line`: `before` runs ahead of the first content, `items` is the content."""

    def __init__(
        self,
        *,
        before: Callable[[Call, Observer], Awaitable[None]] = nothing,
        items: Callable[[], AsyncGenerator[Item, None]] = hello,
        completion: Completion = COMPLETION,
    ) -> None:
        self.completion = completion
        self.before = before
        self.items = items
        self.calls: list[Call] = []
        self.entered = asyncio.Event()
        #: By what each call was left: the type of an exception, or None.
        self.exits: asyncio.Queue[type[BaseException] | None] = asyncio.Queue()

    async def complete(self, call: Call, observer: Observer = SILENT) -> Completion:
        async with self._recorded(call):
            await self.before(call, observer)
        return self.completion

    @asynccontextmanager
    async def stream(self, call: Call, observer: Observer = SILENT) -> AsyncIterator[AsyncIterator[Item]]:
        async with self._recorded(call):
            await self.before(call, observer)
            async with aclosing(self.items()) as items:
                yield items

    @asynccontextmanager
    async def _recorded(self, call: Call) -> AsyncIterator[None]:
        entered_by = asyncio.current_task()
        self.calls.append(call)
        self.entered.set()
        try:
            yield
        except BaseException as left:
            self.exits.put_nowait(type(left))
            raise
        else:
            self.exits.put_nowait(None)
        finally:
            assert asyncio.current_task() is entered_by


class FakeKeys:
    """Knows "good", which may chat, and "reader", which may not."""

    async def authenticate(self, token: str | None) -> Caller:
        scopes = {"good": frozenset({Scope.CHAT}), "reader": frozenset({Scope.USAGE_READ})}
        if token not in scopes:
            raise Unauthenticated
        return Caller(key_id=uuid.UUID(int=7), name=token, scopes=scopes[token])
