"""
One dispatch and its single settlement.

Whatever happens between grant and end (an answer, an error, a broken stream, a caller who went away, an exception of
our own) leaves through `Attempts.open`, which settles exactly once. A lease that is held anywhere else would leak.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from decimal import Decimal
from typing import Final

import msgspec

from adapters.chat import ChatResponse, Delta, Event, Finished, UsageReport
from adapters.contract import UpstreamCall
from adapters.errors import Broken, ErrorClass, NotSent, ProviderError, Rejected, RequestNotExpressible
from admission.contract import Rejected as StoreRejected
from admission.controller import Controller
from admission.lease import Ending, Lease, Settlement, Verdict
from gateway.billing import Billing
from gateway.call import Call
from gateway.outcome import AttemptReport, Cost, Counters
from gateway.router import Plan, Route
from metering.cost import decimal_string
from metering.ledger import CountersAfter, Intent, Record
from metering.usage import NOTHING, Usage

_CLOCKS: Final = ("first_byte_timeout", "gap_timeout", "deadline")


class Attempt:
    """A granted ticket on its way to an end. Not for use outside `opened`."""

    def __init__(self, call: Call, route: Route, lease: Lease, number: int, billing: Billing) -> None:
        self.call = call
        self.route = route
        self.lease = lease
        self.number = number
        self.started_at = time.monotonic()
        self.dispatched = False
        #: Content has been seen: from here on an error may have cost something.
        self.content = False
        self.first_byte_s: float | None = None
        self.usage: Usage = NOTHING
        self.reported_cost_usd: str | None = None
        self.finished: Finished | None = None
        self.served_model: str | None = None
        self.provider_request_id: str | None = None
        self.error: Exception | None = None
        #: What the adapter holds open for it. Closed before the settlement: a window that starts with the closing of
        #: the connection must not start earlier.
        self.connection = AsyncExitStack()
        self.settled = False
        self._billing = billing

    @property
    def upstream(self) -> UpstreamCall:
        """What the adapter is asked for. Its deadline is the attempt's, or the caller's where that comes first."""
        deadline = self.lease.hard_deadline
        if self.call.deadline is not None:
            deadline = min(deadline, self.call.deadline)
        return UpstreamCall(
            endpoint=self.route.endpoint, model=self.route.model, request=self.call.chat, deadline=deadline
        )

    def observe(self, batch: Sequence[Event]) -> list[Delta]:
        """Takes note of what a batch says about usage and end; the deltas in it."""
        deltas: list[Delta] = []
        for event in batch:
            if isinstance(event, UsageReport):
                self.usage = self.usage.merge(event.usage)
                self.reported_cost_usd = event.reported_cost_usd or self.reported_cost_usd
            elif isinstance(event, Finished):
                self.finished = event
                self.served_model = event.served_model
                self.provider_request_id = event.provider_request_id
            else:
                deltas.append(event)
        if self.first_byte_s is None and (deltas or self.finished):
            self.first_byte_s = time.monotonic() - self.started_at
        self.content = self.content or bool(deltas)
        return deltas

    def answered(self, response: ChatResponse) -> None:
        """A plain call got its whole answer."""
        self.first_byte_s = time.monotonic() - self.started_at
        self.usage = response.usage
        self.reported_cost_usd = response.reported_cost_usd
        self.served_model = response.served_model
        self.provider_request_id = response.provider_request_id
        self.finished = Finished(ends=())

    # ---------------------------------------------------------------- its end

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
            return Verdict.ANSWERED
        match self.error:
            case Rejected(rate_limited=True):
                return Verdict.RATE_LIMITED
            case Rejected(error_class=ErrorClass.TRANSIENT) | NotSent():
                return Verdict.TRANSIENT
            case Rejected():
                return Verdict.ANSWERED
            case Broken(code="deadline") if self.call.deadline is not None and self._late():
                return Verdict.NONE  # the caller's own impatience
            case Broken(code="malformed" | "response_too_large"):
                return Verdict.NONE  # bad output says nothing about capacity
            case Broken():
                return Verdict.TRANSIENT
            case _:
                return Verdict.NONE

    def _late(self) -> bool:
        return self.call.deadline is not None and self.call.deadline <= self.lease.hard_deadline

    def status(self) -> str:
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
            case _:
                return "cancelled" if self.ending() is Ending.UNCERTAIN else "not_dispatched"

    def cost(self) -> Cost:
        if self.proven:
            return self._billing.complete(self.call, self.route, self.usage, self.reported_cost_usd)
        if self.ending() is Ending.NOT_DISPATCHED:
            return self._billing.not_dispatched()
        if isinstance(self.error, Rejected) and not self._came_after_content:
            return self._billing.refused()
        return self._billing.unproven(self.call, self.route, self.usage)

    def report(self, cost: Cost) -> AttemptReport:
        error = self.error if isinstance(self.error, ProviderError) else None
        return AttemptReport(
            number=self.number,
            route=self.route.report,
            status=self.status(),
            error_class=None if error is None else error.error_class.value,
            code=error.code if error is not None else ("unsupported_field" if self.error is not None else None),
            http_status=None if error is None else error.status,
            message=None if self.error is None else str(self.error),
            cost=cost,
        )

    def settlement(self, cost: Cost) -> Settlement:
        error = self.error if isinstance(self.error, ProviderError) else None
        record = Record(
            status=self.status(),
            ended=self._ended(),
            usd=None if cost.usd is None else decimal_string(cost.usd),
            upper_bound_usd=None if cost.upper_bound_usd is None else decimal_string(cost.upper_bound_usd),
            cost_reason=cost.reason,
            price_version=cost.price_version,
            input_total=self.usage.input_total,
            cache_read=self.usage.cache_read,
            cache_write_5m=self.usage.cache_write_5m,
            cache_write_1h=self.usage.cache_write_1h,
            output_total=self.usage.output_total,
            reasoning=self.usage.reasoning,
            served_model=_kept(self.served_model),
            provider_request_id=_kept(self.provider_request_id),
            error_class=None if error is None else error.error_class.value,
            error_code=None if error is None else _kept(error.code),
            http_status=None if error is None else error.status,
            queued_ms=round(self.lease.queued_s * 1000),
            first_byte_ms=None if self.first_byte_s is None else round(self.first_byte_s * 1000),
            total_ms=round((time.monotonic() - self.started_at) * 1000),
        )
        return Settlement(
            lease=self.lease,
            ending=self.ending(),
            verdict=self.verdict(),
            retry_after_s=error.retry_after_s if isinstance(error, Rejected) else None,
            received_at=time.monotonic(),
            cancel_confirms_after_s=self.route.provider.cancel_confirms_after_s,
            state=cost.state,
            record=msgspec.json.encode(record),
        )


class Attempts:
    """Opens attempts and settles them, all of one process."""

    def __init__(self, controller: Controller, billing: Billing, patience_s: float) -> None:
        """`patience_s`: how long `settle` waits for the store."""
        self._controller = controller
        self._billing = billing
        self._patience_s = patience_s

    @asynccontextmanager
    async def opened(
        self, call: Call, route: Route, lease: Lease, number: int, reports: list[AttemptReport]
    ) -> AsyncIterator[Attempt]:
        """
        The lease ends with the block, whatever ends the block; then the attempt is in `reports`.

        An attempt that ends by itself is settled with `settle` inside the block.
        """
        attempt = Attempt(call, route, lease, number, self._billing)
        try:
            async with attempt.connection:
                yield attempt
        finally:
            if not attempt.settled:
                # Taken back by the caller, or a fault of ours: nobody waits for this settlement.
                cost = attempt.cost()
                reports.append(attempt.report(cost))
                self._controller.settle_unheard(attempt.settlement(cost))

    async def settle(self, attempt: Attempt, reports: list[AttemptReport]) -> Receipt:
        """Settles an attempt by what is known of its end."""
        await attempt.connection.aclose()
        attempt.settled = True
        cost = attempt.cost()
        reports.append(attempt.report(cost))
        try:
            async with asyncio.timeout(self._patience_s):
                settled = await self._controller.settle(attempt.settlement(cost))
        except (TimeoutError, StoreRejected):
            return Receipt(acknowledged=False)
        if settled.counters is None:
            return Receipt(acknowledged=True)
        after = msgspec.json.decode(settled.counters, type=CountersAfter)
        counters = Counters(
            session_usd=None if after.session_usd is None else Decimal(after.session_usd),
            day_usd=Decimal(after.day_usd),
            total_usd=Decimal(after.total_usd),
            day=after.day,
        )
        return Receipt(acknowledged=True, counters=counters)


class Receipt(msgspec.Struct, frozen=True, kw_only=True):
    """Whether the store acknowledged a settlement in time, and the counters after it."""

    acknowledged: bool
    counters: Counters | None = None


def intent(
    call: Call, plan: Plan, route: Route, created_at: str, failed: AttemptReport | None, billing: Billing
) -> bytes:
    """What the ledger is to know of an attempt should nobody live to tell its end."""
    options = call.options
    bound, version = billing.bound(call, route)
    return msgspec.json.encode(
        Intent(
            request_id=call.request_id,
            transport=call.transport,
            created_at=created_at,
            requested_model=call.model,
            route_id=route.route_id,
            provider=route.provider.id,
            upstream_model=route.model,
            protocol=route.endpoint.protocol,
            fallback_index=route.fallback_index,
            is_fallback=route.fallback_index > 0,
            class_=options.klass.name.lower(),
            failed_provider=None if failed is None else failed.route.provider,
            failure_reason=None if failed is None else failed.code or failed.status,
            left_out=[{"provider": out.provider, "model": out.model, "reason": out.reason} for out in plan.left_out]
            or None,
            session_id=options.session_id,
            scope_id=options.scope_id,
            run_id=options.run_id,
            step_id=options.step_id,
            skill=options.skill,
            skill_version=options.skill_version,
            tool=options.tool,
            role=options.role,
            tags=options.tags or None,
            upper_bound_usd=None if bound is None else decimal_string(bound),
            price_version=version,
        )
    )


def _kept(text: str | None) -> str | None:
    """A provider's own word, safe to store: bounded, and without what PostgreSQL cannot hold."""
    return None if text is None else text[:200].replace("\x00", "").encode("utf-8", "replace").decode()
