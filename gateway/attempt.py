"""
One dispatch and its single settlement.

Whatever happens between grant and end (an answer, an error, a broken stream, a caller who went away, an exception of
our own) leaves through the attempt's `async with`, which settles exactly once. A lease that is held anywhere else would
leak.

A caller who goes away need not end the call: where closing the connection is not known to stop the work, a task of
`Attempts` reads the answer on for a bounded while and settles by its true end. People press stop all the time, and each
of these slots would otherwise stay occupied until the hard deadline, at a cost that nobody knows.
"""

from __future__ import annotations

import asyncio
import functools
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager
from decimal import Decimal
from types import TracebackType
from typing import Any, Final, Self, TypeVar, cast

import msgspec
import structlog

from adapters.chat import ChatResponse, Delta, Event, Finished, Native, TextDelta, ToolCallDelta, UsageReport, as_events
from adapters.contract import (
    Adapter,
    Batch,
    CountResponse,
    EmbeddingCall,
    EmbeddingResponse,
    Endpoint,
    HttpRequest,
    UpstreamCall,
    Way,
    relayed,
)
from adapters.errors import Broken, ErrorClass, NotSent, ProviderError, Rejected, RequestNotExpressible
from adapters.limits import Remaining
from adapters.protocols import PROTOCOLS
from adapters.telling import Untold
from admission.lease import Ending, Lease, Settled, Settlement, Verdict, Waiting
from gateway.billing import FREE_OF_CHARGE, NOT_DISPATCHED, REFUSED, Billing, total
from gateway.call import Call, Unsupported
from gateway.errors import Code
from gateway.needs import DROPPED_WORDS, lacking
from gateway.outcome import AttemptReport, Cost, Counters, LeftOut
from gateway.router import Route
from gateway.settling import Settling, Unacknowledged
from gateway.standing import of_money
from gateway.stopping import Stopping
from metering.cost import Reason, State, decimal_string
from metering.ledger import CountersAfter, Intent, Record
from metering.usage import NOTHING, Usage

log: Final = structlog.get_logger("gateway")

T = TypeVar("T")

#: What every format has a place for, and most of a stream is.
_SAID_BY_ALL: Final = frozenset({TextDelta, ToolCallDelta})
_GOES_ON: Final = _SAID_BY_ALL | {Native}

#: While these are the reason of a wait nobody is let through, however few are at work.
_COOLING: Final = frozenset({"cooldown", "rate_limited", "credential_rejected", "quota_exhausted"})

_CLOCKS: Final = ("first_byte_timeout", "gap_timeout", "deadline")

_NOTHING_TOLD: Final = Remaining()

_encoded: Final = msgspec.json.Encoder().encode
_counters: Final = msgspec.json.Decoder(CountersAfter)

#: The one protocol that has betas, and the header that names them.
_WITH_BETAS: Final = "anthropic_messages"
_BETA_HEADER: Final = "anthropic-beta"


class Late(Exception):
    """The caller's deadline passed before the provider had answered."""


class Asking:
    """What a route is asked of a call. Made before there is a slot for it: what cannot be said there needs none."""

    def __init__(self, call: Call, route: Route, billing: Billing) -> None:
        self.call = call
        self.route = route
        self.quote = billing.quote(call, route)
        #: The request, without what the route cannot be told where that may be dropped.
        self.chat = call.chat
        #: Paths of what it is not sent, as the caller wrote them.
        self.dropped: tuple[str, ...] = ()
        self._drops = (call.options.unsupported or route.provider.unsupported) is Unsupported.DROP
        if self._drops:
            self.chat, names = lacking(call.chat, route.provider.cannot)
            self.dropped = tuple(call.chat.written(name) for name in names)
        #: With what this call asks of it in particular.
        self.endpoint = self._its_endpoint()
        #: Seconds of the wait for its slot in which nobody was let through.
        self.cooldown_s = 0.0
        self._cooling_since: float | None = None
        #: What is sent. None: whoever sends it makes it, as a request that has to wait is not kept twice.
        self.rendered: HttpRequest | None = None

    def render(self, adapter: Adapter, way: Way) -> None:
        """Raises `RequestNotExpressible`."""
        call = self.upstream(math.inf) if self.call.embedding is None else self.embedding(math.inf)
        self.rendered = adapter.render(call, way)

    def waits(self, waiting: Waiting) -> None:
        """It has to wait, or the reason for it has changed."""
        # As many as wait would be kept twice: it is made again when it is sent.
        self.rendered = None
        self.waited()
        if waiting.reason in _COOLING:
            self._cooling_since = time.monotonic()

    def waited(self) -> None:
        """Its wait is over, or goes on for another reason."""
        if self._cooling_since is not None:
            self.cooldown_s += time.monotonic() - self._cooling_since
            self._cooling_since = None

    def upstream(self, deadline: float) -> UpstreamCall:
        return UpstreamCall(
            endpoint=self.endpoint,
            model=self.route.model,
            request=self.chat,
            deadline=deadline,
            relay=self.call.relay,
            rendered=self.rendered,
        )

    def embedding(self, deadline: float) -> EmbeddingCall:
        assert self.call.embedding is not None, "a call for embeddings says which"
        return EmbeddingCall(
            endpoint=self.endpoint,
            model=self.route.model,
            request=self.call.embedding,
            deadline=deadline,
            rendered=self.rendered,
        )

    def _its_endpoint(self) -> Endpoint:
        endpoint, betas = self.route.endpoint, self.call.betas
        if self._drops:
            endpoint = msgspec.structs.replace(endpoint, drops=DROPPED_WORDS)
        if not betas or endpoint.protocol != _WITH_BETAS:
            return endpoint
        own = [value for name, value in endpoint.headers.items() if name.lower() == _BETA_HEADER]
        headers = {name: value for name, value in endpoint.headers.items() if name.lower() != _BETA_HEADER}
        headers[_BETA_HEADER] = ",".join(dict.fromkeys([*own, *betas]))
        return msgspec.structs.replace(endpoint, headers=headers)


class Attempt:
    """
    A granted ticket on its way to an end. The lease ends with the `async with` block, whatever ends the block, or is
    handed to a task of ours; then the attempt is in the reports of its request.

    One that ends by itself is settled with `Attempts.settle` inside the block. One that has begun may be passed on: it
    leaves its block open, and whoever gets it opens another at once.
    """

    def __init__(
        self,
        attempts: Attempts,
        asking: Asking,
        lease: Lease,
        number: int,
        reports: list[AttemptReport],
        *,
        streamed: bool,
    ) -> None:
        self.asking = asking
        self.call = call = asking.call
        self.route = route = asking.route
        self.lease = lease
        self.number = number
        #: Of its request, this one's among them once it is over.
        self.reports = reports
        self.streamed = streamed
        self._attempts = attempts
        self._passed_on = False
        #: Seconds for which the answer is read on after the caller has gone. Above 0 the caller's deadline is not the
        #: provider's.
        self.drain_s = route.provider.drains_for_s(streamed=streamed)
        self.started_at = time.monotonic()
        self.dispatched = False
        #: Content has been seen: from here on an error may have cost something.
        self.content = False
        self.first_byte_s: float | None = None
        self.usage: Usage = NOTHING
        self.reported_cost_usd: str | None = None
        self.finished: Finished | None = None
        self.served_model: str | None = None
        self.service_tier: str | None = None
        self.provider_request_id: str | None = None
        self.remaining: Remaining | None = None
        self.error: Exception | None = None
        #: Paths of what it was not sent, as the caller wrote them.
        self.dropped = asking.dropped
        #: Kinds of content of the answer that no caller of another protocol gets.
        self.omitted: tuple[str, ...] = ()
        cannot = _cannot_tell(call, route)
        self._untold = Untold(cannot) if cannot else None
        #: The caller does not wait for its end any more, since its deadline passed or for reasons of its own.
        self.left = False
        self.late = False
        #: Nor does the process: it is stopping, and has ended it.
        self.stopped = False
        #: The dispatch while it is under way, where it may outlive its caller; then what is left of a stream.
        self.dispatch: asyncio.Task[Any] | None = None
        self.rest: AsyncIterator[Batch] | None = None
        #: What the adapter holds open for it. Closed before the settlement: a window that starts with the closing of
        #: the connection must not start earlier.
        self._connection: AbstractAsyncContextManager[AsyncIterator[Batch]] | None = None
        self.settled = False
        self.receipt = _UNSETTLED
        #: The provider's own events that nobody was given yet; None where the answer is not relayed.
        self._native: list[bytes] | None = None
        #: Its last one, which is not to be given before the settlement.
        self.native_end: bytes | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._passed_on:
            self._passed_on = False
        elif not self.settled:
            await self._attempts.leave(self)

    def passed_on(self) -> Self:
        """For whoever opens it next."""
        self._passed_on = True
        return self

    @property
    def upstream(self) -> UpstreamCall:
        """What the adapter is asked for."""
        return self.asking.upstream(self._deadline)

    @property
    def embedding(self) -> EmbeddingCall:
        """What the adapter is asked for, where that is no chat."""
        return self.asking.embedding(self._deadline)

    @property
    def _deadline(self) -> float:
        """The attempt's, or the caller's where that comes first and nobody would read on after it."""
        deadline = self.lease.hard_deadline
        if self.call.deadline is not None and not self.drain_s:
            deadline = min(deadline, self.call.deadline)
        return deadline

    @property
    def start_s(self) -> float | None:
        """How quick this route is to be called for it: a start that failed is as slow as its clock is long."""
        if self.first_byte_s is not None:
            return self.first_byte_s
        if self.verdict() not in (Verdict.TRANSIENT, Verdict.RATE_LIMITED):
            return None
        return max(time.monotonic() - self.started_at, self.route.endpoint.clocks.first_byte_s)

    @property
    def warnings(self) -> tuple[str, ...]:
        """What the caller must know of an answer that is not quite to what it asked, or not all of what came."""
        provider = self.route.provider.id
        told = [
            f"{self.call.told_path(path)}: dropped, {provider} was not sent it" for path in dict.fromkeys(self.dropped)
        ]
        native, untold = self.call.chat.native, self._untold
        if native is None or native.protocol != self.route.endpoint.protocol:
            kinds = self.omitted if untold is None else (*self.omitted, *untold.kinds)
            told += [f"answer: {kind} of {provider} has no place in this format" for kind in dict.fromkeys(kinds)]
        if untold is not None:
            told += [
                f"answer: {provider} ended it with {word}, for which this format has no word" for word in untold.ends
            ]
            if untold.usage_is_invented(self.usage):
                told.append(f"answer: {provider} did not tell all of the usage, and a zero in its place is no figure")
        if self.route.endpoint.protocol != _WITH_BETAS:
            told += [f"{_BETA_HEADER}: {beta} dropped, {provider} has no such betas" for beta in self.call.betas]
        return tuple(told)

    def observe(self, batch: Sequence[Event]) -> Sequence[Delta]:
        """Takes note of what a batch says about usage and end; the deltas in it."""
        batch, raw = relayed(batch)
        if raw is not None:
            self._native = [*self._native, raw] if self._native else [raw]
        # Of most batches there is nothing to take note of, which is seen at once for all of it.
        if not _SAID_BY_ALL.issuperset(map(type, batch)):
            batch = [event for event in batch if not self._noted(event)]
        deltas = cast("Sequence[Delta]", batch)
        if self.first_byte_s is None and (deltas or self.finished):
            self.first_byte_s = time.monotonic() - self.started_at
        self.content = self.content or bool(deltas)
        return deltas

    def passed(self, batch: Sequence[Event]) -> Sequence[Delta]:
        """A batch that came after content: what the caller gets of it. Most of them go on as they are."""
        if self.content and not self._native and _GOES_ON.issuperset(map(type, batch)):
            return cast("Sequence[Delta]", batch)
        return self.item(self.observe(batch))

    def _noted(self, event: Event) -> bool:
        """Takes note of what it says, if it is no delta."""
        if isinstance(event, UsageReport):
            self.usage = self.usage.merge(event.usage)
            self.reported_cost_usd = event.reported_cost_usd or self.reported_cost_usd
            return True
        if self._untold is not None and not isinstance(event, TextDelta | ToolCallDelta):
            self._untold.note(event)
        if not isinstance(event, Finished):
            return False
        self.finished = event
        self.served_model = event.served_model
        self.service_tier = event.service_tier
        self.provider_request_id = event.provider_request_id
        self.remaining = event.remaining
        self.dropped += event.dropped
        self.omitted = event.omitted
        return True

    def item(self, deltas: Sequence[Delta]) -> Sequence[Delta]:
        """What the caller gets with these: the provider's own bytes beside them, where it asked for those."""
        if self._native is None:
            return deltas
        raw = b"".join(self._native)
        self._native = []
        if self.finished is not None:
            last = _last_event(raw)
            raw, self.native_end = raw[:last], raw[last:]
        return [*deltas, cast("Delta", Native(raw))] if deltas or raw else []

    def counted(self, response: CountResponse) -> None:
        """A count came. How soon says nothing of how soon an answer would."""
        self.remaining = response.remaining
        self.dropped += response.dropped
        self.finished = Finished(ends=())

    def answered(self, response: ChatResponse | EmbeddingResponse) -> None:
        """A plain call got its whole answer."""
        self.first_byte_s = time.monotonic() - self.started_at
        self.usage = response.usage
        self.reported_cost_usd = response.reported_cost_usd
        self.served_model = response.served_model
        self.provider_request_id = response.provider_request_id
        self.remaining = response.remaining
        self.dropped += response.dropped
        if isinstance(response, ChatResponse):
            self.omitted = response.omitted
            self.service_tier = response.service_tier
            if self._untold is not None:
                for event in as_events(response):
                    self._untold.note(event)
        else:
            # Nobody tells it, since there can be none.
            self.usage = msgspec.structs.replace(response.usage, output_total=0)
        self.finished = Finished(ends=())

    async def begin(self, dispatch: Callable[[Attempt], Coroutine[Any, Any, T]]) -> T:
        """
        Sends the request and returns what `dispatch` does, or raises it. Raises `Late` at the caller's deadline.

        Where the answer may be read on, the dispatch has a task of its own, which outlives a caller that leaves.
        """
        self.dispatched = True
        # What came before, the store's own time included, is not the provider's.
        self.started_at = time.monotonic()
        if not self.drain_s:
            return await dispatch(self)
        # A caller that leaves cancels its wait, and not the task.
        task = asyncio.create_task(dispatch(self), name="dispatch")
        self.dispatch = task
        if self.call.deadline is not None:
            await asyncio.wait((task,), timeout=max(self.call.deadline - asyncio.get_running_loop().time(), 0.0))
            if not task.done():
                raise Late
        else:
            over = task.get_loop().create_future()
            task.add_done_callback(functools.partial(_tell, over))
            await over
        self.dispatch = None
        return task.result()

    async def connect(self, stream: AbstractAsyncContextManager[AsyncIterator[Batch]]) -> AsyncIterator[Batch]:
        """Opens what the adapter gives, until `disconnect`."""
        rest = await stream.__aenter__()
        self._connection = stream
        self.rest = rest
        return rest

    async def disconnect(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            await connection.__aexit__(None, None, None)

    def next_batch(self) -> Awaitable[Batch]:
        """What comes next of a stream that has begun. Raises as the adapter does, and `Late`."""
        assert self.rest is not None, "a stream that has begun has a rest"
        if not self.drain_s or self.call.deadline is None:
            return anext(self.rest)
        return _in_time(self.rest, self.call.deadline)

    async def read_on(self) -> None:
        """Reads to the end, for usage and proof only. Raises as the adapter does; cancelling it ends the dispatch."""
        if self.dispatch is not None:
            await self.dispatch
            self.dispatch = None
        while self.finished is None and self.rest is not None:
            self.observe(await anext(self.rest))
            self._native = None

    # ---------------------------------------------------------------- its end

    @property
    def readable(self) -> bool:
        """It was sent and may yet be read to its end."""
        return self.dispatched and self.drain_s > 0 and self.finished is None and self.error is None

    @property
    def proven(self) -> bool:
        return self.finished is not None and self.error is None

    @property
    def _came_after_content(self) -> bool:
        return self.content or (isinstance(self.error, Rejected) and self.error.after_content)

    @property
    def may_have_cost(self) -> bool:
        """Sending the request again may pay for it twice."""
        return self.ending() is Ending.UNCERTAIN or self._came_after_content

    def ending(self) -> Ending:
        if self.proven or isinstance(self.error, Rejected):
            return Ending.CONFIRMED
        if not self.dispatched or isinstance(self.error, NotSent | RequestNotExpressible):
            return Ending.NOT_DISPATCHED
        return Ending.UNCERTAIN

    def verdict(self) -> Verdict:
        """What the group's breaker should make of it."""
        if self.proven:
            return Verdict.SLOW if self._slow else Verdict.ANSWERED
        match self.error:
            case Rejected(credential_fault=True) as error:
                return Verdict.QUOTA_EXHAUSTED if of_money(error) else Verdict.CREDENTIAL_REJECTED
            case Rejected(rate_limited=True):
                return Verdict.RATE_LIMITED
            case Rejected(error_class=ErrorClass.TRANSIENT) | NotSent():
                return Verdict.TRANSIENT
            case Rejected():
                return Verdict.ANSWERED
            case Broken(code="deadline") if self._deadline_was_the_callers:
                return Verdict.NONE
            case Broken(code="malformed" | "response_too_large"):
                return Verdict.NONE  # bad output says nothing about capacity
            case Broken():
                return Verdict.TRANSIENT
            case _:
                return Verdict.NONE

    @property
    def _deadline_was_the_callers(self) -> bool:
        deadline = self.call.deadline
        return deadline is not None and deadline <= self.lease.hard_deadline and not self.drain_s

    def status(self) -> str:
        if self.stopped and self.error is None and self.dispatched:
            return "success" if self.proven else "unknown"
        if self.left and self.error is None:
            if not self.dispatched:
                return "not_dispatched"
            return "timeout" if self.late else "cancelled"
        if self.proven:
            return "success"
        match self.error:
            case Rejected():
                return "error"
            case NotSent() | RequestNotExpressible():
                return "not_dispatched"
            case Broken(code=code) if code in _CLOCKS:
                return "timeout"
            case Broken():
                return "unknown"
            case _:
                return "cancelled" if self.dispatched else "not_dispatched"

    def _ended(self) -> str:
        if self.proven:
            return "complete"
        match self.error:
            case Rejected():
                return "error_in_stream" if self._came_after_content else "error"
            case Broken():
                return "broken"
            case _ if self.ending() is Ending.UNCERTAIN:
                return "stopped" if self.stopped else "cancelled"
            case _:
                return "not_dispatched"

    def cost(self) -> Cost:
        if self.call.counts and self.ending() is not Ending.NOT_DISPATCHED:
            return FREE_OF_CHARGE
        if self.proven:
            return self.asking.quote.complete(self.usage, self.reported_cost_usd, served_tier=self.service_tier)
        if self.ending() is Ending.NOT_DISPATCHED:
            return NOT_DISPATCHED
        if isinstance(self.error, Rejected) and not self._came_after_content:
            return REFUSED
        return self.asking.quote.unproven(self.usage)

    def report(self, cost: Cost) -> AttemptReport:
        error = self.error if isinstance(self.error, ProviderError) else None
        message = None if self.error is None else str(self.error)
        if isinstance(self.error, RequestNotExpressible):
            message = f"{self.call.told_path(self.error.path)}: {self.error.reason}"
        return AttemptReport(
            number=self.number,
            route=self.route.report,
            status=self.status(),
            error_class=None if error is None else error.error_class.value,
            code=self._code(error),
            http_status=None if error is None else error.status,
            message=message,
            cost=cost,
        )

    def _code(self, error: ProviderError | None) -> str | None:
        if error is not None:
            return error.code
        if self.error is not None:
            return "unsupported_field"
        if self.stopped and not self.proven:
            return Code.SHUTTING_DOWN.value
        return "deadline" if self.late else None

    @property
    def _slow(self) -> bool:
        # A plain answer comes when all of it is there: how long that took says nothing of its first byte.
        objective = self.route.provider.first_byte_objective_s if self.streamed else None
        return objective is not None and self.first_byte_s is not None and self.first_byte_s > objective

    @property
    def _used_tokens(self) -> int | None:
        """For limits per minute: what was used, nothing where it was refused, None where it is not known."""
        if self.usage.input_total is not None or self.usage.output_total is not None:
            return (self.usage.input_total or 0) + (self.usage.output_total or 0)
        return 0 if isinstance(self.error, Rejected) and not self._came_after_content else None

    def settlement(self, report: AttemptReport) -> Settlement:
        cost = report.cost
        error = self.error if isinstance(self.error, ProviderError) else None
        refused = isinstance(error, Rejected) and error.credential_fault
        left = self.remaining if error is None else error.remaining
        if left is None or refused:
            # What is left for a credential that is refused says nothing of the others.
            left = _NOTHING_TOLD
        record = Record(
            status=report.status,
            ended=self._ended(),
            usd=None if cost.usd is None else decimal_string(cost.usd),
            upper_bound_usd=bound_of(cost),
            cost_reason=cost.reason,
            price_version=cost.price_version,
            input_total=self.usage.input_total,
            cache_read=self.usage.cache_read,
            cache_write_5m=self.usage.cache_write_5m,
            cache_write_1h=self.usage.cache_write_1h,
            output_total=self.usage.output_total,
            reasoning=self.usage.reasoning,
            served_model=_kept(self.served_model),
            service_tier=self.service_tier,
            provider_request_id=_kept(self.provider_request_id),
            error_class=report.error_class,
            error_code=_kept(report.code if self.stopped else None if error is None else error.code),
            http_status=report.http_status,
            list_usd=None if cost.list_usd is None else decimal_string(cost.list_usd),
            flags=cost.flags,
            queued_ms=round(self.lease.queued_s * 1000),
            cooldown_ms=round(self.asking.cooldown_s * 1000) or None,
            first_byte_ms=None if self.first_byte_s is None else round(self.first_byte_s * 1000),
            total_ms=round((time.monotonic() - self.started_at) * 1000),
        )
        return Settlement(
            lease=self.lease,
            ending=self.ending(),
            verdict=self.verdict(),
            retry_after_s=error.retry_after_s if isinstance(error, Rejected) else None,
            received_at=time.monotonic(),
            # A credential that is refused is refused for every model.
            account_wide=self.route.provider.account_wide_limits or refused,
            used_tokens=self._used_tokens,
            requests_left=left.requests,
            tokens_left=left.tokens,
            told_at=left.told_at,
            cancel_confirms_after_s=self.route.provider.confirms_after_s(streamed=self.streamed),
            state=cost.state,
            record=_encoded(record),
        )


async def _in_time(rest: AsyncIterator[Batch], deadline: float) -> Batch:
    patience = asyncio.timeout_at(deadline)
    try:
        async with patience:
            return await anext(rest)
    except TimeoutError:
        if not patience.expired():
            raise
        raise Late from None


def _tell(over: asyncio.Future[None], _task: asyncio.Task[Any]) -> None:
    if not over.done():
        over.set_result(None)


def _cannot_tell(call: Call, route: Route) -> frozenset[str]:
    """What the caller's format has no word for; nothing where the provider's own words are handed on, or in ours."""
    native = call.chat.native
    if native is None or native.protocol == route.endpoint.protocol or native.protocol not in PROTOCOLS:
        return frozenset()
    return PROTOCOLS[native.protocol].untold


class Attempts:
    """Opens attempts and settles them, all of one process."""

    def __init__(self, settling: Settling, stopping: Stopping) -> None:
        self._settling = settling
        self._stopping = stopping
        #: Each holds a lease, so there are never more of them than slots.
        self._drains: set[asyncio.Task[None]] = set()
        self._closed = False

    def opened(
        self, asking: Asking, lease: Lease, number: int, reports: list[AttemptReport], *, streamed: bool
    ) -> Attempt:
        """For an `async with` at once: until then nobody owns the lease."""
        return Attempt(self, asking, lease, number, reports, streamed=streamed)

    async def leave(self, attempt: Attempt) -> None:
        """
        Nobody waits for the end of this attempt any more: it was taken back, is too late, or a fault of ours ended it.

        Returns at once where the answer is read on.
        """
        attempt.settled = True
        attempt.left = not attempt.proven
        attempt.stopped = self._stopping.ends()
        before = [report.cost for report in attempt.reports]
        attempt.reports.append(attempt.report(attempt.cost()))
        if attempt.readable:
            task = asyncio.create_task(self._drain(attempt, before), name="drain")
            self._drains.add(task)
            task.add_done_callback(self._drained)
        else:
            await self._end(attempt)

    async def _drain(self, attempt: Attempt, before: list[Cost]) -> None:
        """`before` is what the earlier attempts of its request cost."""
        started = time.monotonic()
        seconds = 0.0 if self._closed else min(attempt.drain_s, attempt.lease.hard_deadline - started)
        try:
            async with asyncio.timeout(seconds):
                await attempt.read_on()
        except TimeoutError:
            pass
        except (ProviderError, RequestNotExpressible) as error:
            attempt.error = error
        finally:
            await self._end(attempt)
            call, cost = attempt.call, attempt.cost()
            whole = total([*before, cost])
            log.info(
                "gateway.attempt_drained",
                request_id=call.request_id,
                debit_id=call.options.debit_id or call.request_id,
                key_id=str(call.caller.key_id),
                session_id=call.options.session_id,
                transport=call.transport,
                model=call.model,
                provider=attempt.route.provider.id,
                route_id=attempt.route.route_id,
                attempt=attempt.number,
                ending=attempt.ending().value,
                input_tokens=attempt.usage.input_total,
                output_tokens=attempt.usage.output_total,
                cost_state=cost.state,
                cost_usd=None if cost.usd is None else decimal_string(cost.usd),
                request_cost_usd=None if whole.usd is None else decimal_string(whole.usd),
                duration_ms=round((time.monotonic() - started) * 1000),
            )

    def _drained(self, task: asyncio.Task[None]) -> None:
        self._drains.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("gateway.task_failed", task=task.get_name(), exc_info=error)

    async def _end(self, attempt: Attempt) -> None:
        """Closes what is open and settles, with nobody to tell."""
        try:
            await attempt.disconnect()
        finally:
            self._settling.settle_unheard(attempt.settlement(attempt.report(attempt.cost())))

    async def close(self, until: float) -> None:
        """Lets answers be read on until that time of the event loop, then closes what is left. All are settled."""
        loop = asyncio.get_running_loop()
        if self._drains:
            await asyncio.wait(self._drains, timeout=max(until - loop.time(), 0.0))
        self._closed = True
        # A task that is cancelled before its first step would never settle.
        await asyncio.sleep(0)
        while self._drains:
            for task in self._drains:
                task.cancel()
            await asyncio.wait(self._drains)

    async def settle(self, attempt: Attempt) -> Receipt:
        """Settles an attempt by what is known of its end."""
        await attempt.disconnect()
        attempt.settled = True
        report = attempt.report(attempt.cost())
        attempt.reports.append(report)
        attempt.receipt = receipt = _receipt(await self._settling.settle(attempt.settlement(report)))
        return receipt


def _receipt(settled: Settled | Unacknowledged) -> Receipt:
    if isinstance(settled, Unacknowledged):
        return Receipt(acknowledged=False, lasting=settled is Unacknowledged.PENDING)
    if settled.counters is None:
        return Receipt(acknowledged=True)
    after = _counters.decode(settled.counters)
    counters = Counters(
        session_usd=None if after.session_usd is None else Decimal(after.session_usd),
        day_usd=Decimal(after.day_usd),
        total_usd=Decimal(after.total_usd),
        day=after.day,
    )
    return Receipt(acknowledged=True, counters=counters)


def bound_of(cost: Cost) -> str | msgspec.UnsetType | None:
    """What the ledger is told of the most that it can be, beside the bound of its intent."""
    if cost.upper_bound_usd is not None:
        return decimal_string(cost.upper_bound_usd)
    # Figures that cannot be believed say nothing. Whatever else leaves no bound has something in it that the intent's
    # does not have.
    unbounded = cost.state == State.UNKNOWN and cost.reason != Reason.IMPLAUSIBLE
    return None if unbounded else msgspec.UNSET


class Receipt(msgspec.Struct, frozen=True, kw_only=True):
    """Whether the store acknowledged a settlement in time, and the counters after it."""

    acknowledged: bool
    #: It will be settled, whatever becomes of this process.
    lasting: bool = True
    counters: Counters | None = None

    @property
    def settlement(self) -> str:
        if self.acknowledged:
            return "settled"
        return "pending" if self.lasting else "unknown"


#: So far nobody has acknowledged anything.
_UNSETTLED: Final = Receipt(acknowledged=False)


def intent(asking: Asking, *, left_out: Sequence[LeftOut], created_at: str, reports: Sequence[AttemptReport]) -> bytes:
    """What the ledger is to know of an attempt should nobody live to tell its end."""
    call, route, quote = asking.call, asking.route, asking.quote
    options = call.options
    failed = reports[-1] if reports else None
    return _encoded(
        Intent(
            request_id=call.request_id,
            transport=call.transport,
            created_at=created_at,
            # A role names no model: the configured one that was chosen for it stands in its place, for its price.
            requested_model=call.model or route.asked,
            route_id=route.route_id,
            provider=route.provider.id,
            upstream_model=route.model,
            protocol=route.endpoint.protocol,
            fallback_index=route.fallback_index,
            is_fallback=route.fallback_index > 0,
            retries=sum(report.route == route.report for report in reports),
            class_=options.klass.name.lower(),
            failed_provider=None if failed is None else failed.route.provider,
            failure_reason=None if failed is None else failed.code or failed.status,
            left_out=[{"provider": out.provider, "model": out.model, "reason": out.reason} for out in left_out] or None,
            session_id=options.session_id,
            scope_id=options.scope_id,
            run_id=options.run_id,
            step_id=options.step_id,
            skill=options.skill,
            skill_version=options.skill_version,
            tool=options.tool,
            role=options.role,
            tags=call.tags or None,
            upper_bound_usd=None if quote.most is None else decimal_string(quote.most),
            price_version=quote.price_version,
            asked_tier=quote.asked_tier,
        )
    )


def _last_event(raw: bytes) -> int:
    """Where the last event of these begins."""
    rest = raw.rstrip(b"\r\n")
    blanks = (b"\n\n", b"\n\r\n", b"\r\r") if b"\r" in rest else (b"\n\n",)
    return max((at + len(blank) for blank in blanks if (at := rest.rfind(blank)) >= 0), default=0)


def _kept(text: str | None) -> str | None:
    """A provider's own word, safe to store: bounded, and without what PostgreSQL cannot hold."""
    return None if text is None else text[:200].replace("\x00", "").encode("utf-8", "replace").decode()
