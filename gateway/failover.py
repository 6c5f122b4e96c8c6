"""
What has been tried for one request, and what may still be.

The policy of retries and failover, told apart from the line that follows it: which error lets a route be tried again,
which lets only another one be tried, and which ends it; how long to wait; and what the caller is told when nothing is
left.
"""

from __future__ import annotations

import asyncio
import operator
import random
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from decimal import Decimal
from types import TracebackType
from typing import Final, Self

import msgspec
import structlog

from adapters import classify
from adapters.errors import Broken, ErrorClass, ProviderError, Rejected, RequestNotExpressible
from admission.lease import Ending, Fence, Refusal, RefusalReason
from gateway import limits
from gateway.attempt import Attempt, Receipt
from gateway.billing import total
from gateway.call import Call, Resend
from gateway.errors import (
    AdmissionRefused,
    AllRoutesFailed,
    Cancelled,
    Code,
    GatewayError,
    InvalidRequest,
    Stopped,
    StreamBroken,
    UpstreamRejected,
)
from gateway.outcome import AttemptReport, LeftOut, Outcome
from gateway.router import Plan, Route, RoutingSettings
from gateway.standing import Hold
from gateway.stopping import Stopping
from metering.cost import decimal_string
from metering.usage import NOTHING

log: Final = structlog.get_logger("gateway")

#: A cancellation this close to the deadline is the deadline.
_SAME_MOMENT_S: Final = 0.1

_SETTLED: Final = Receipt(acknowledged=True)


class Run:
    """One request on the line: what has been tried, and what may still be. One line in the log, however it ends."""

    def __init__(self, call: Call, settings: RoutingSettings, stopping: Stopping) -> None:
        self.call = call
        self.settings = settings
        self._stopping = stopping
        self.debit_id = call.options.debit_id or call.request_id
        self.created_at = datetime.now(UTC).isoformat()
        self.started_at = time.monotonic()
        #: The attempt number last asked for. A ticket that was given up may have used one up, too.
        self.number = call.attempts_before
        self.reports: list[AttemptReport] = []
        #: The last that got a slot.
        self.attempt: Attempt | None = None
        #: Of a route that was asked for again, the last.
        self.refusals: list[tuple[Refusal, Route | None]] = []
        #: By `route_id`, the most that an attempt there may cost in USD, as admission was told. Of keys with
        #: limits, and of what is in a session.
        self.most_usd: dict[str, Decimal] = {}
        #: The groups whose attempts failed, in order.
        self.failed_in: list[str] = []
        #: By `route_id`, what a route could not be told.
        self._unsaid: dict[str, tuple[Route, RequestNotExpressible]] = {}
        self.pauses = 0
        self.floor_s = 0.0
        #: In queues, over all attempts that got a slot.
        self.queued_s = 0.0
        #: Of the attempt that answered, from its dispatch.
        self.first_byte_s: float | None = None
        self.done: Outcome | None = None
        options = call.options
        self.fence = (
            Fence(scope_id=options.scope_id or "", run_id=options.run_id, number=options.owner_fence)
            if options.owner_fence is not None and options.run_id is not None
            else None
        )
        #: The route whose cooldown is waited for. The others are left while they cool down.
        self.patient: Route | None = None
        #: Those it was before: none is waited for twice.
        self.waited_for: list[Route] = []
        #: In how many seconds a route is ready that was left since, and which.
        self.cooling: list[tuple[float, Route]] = []
        #: The place in each group's order that a retry after a rate limit keeps.
        self.places: dict[str, int] = {}
        #: Why routes were not tried, those of the plan first; with the id of one that was planned.
        self._left_out: list[tuple[str | None, LeftOut]] = []
        #: The refusal that came after the last attempt, where one did.
        self._stopped_by: Refusal | None = None
        self.warnings = tuple(f"tags.{name}: the API key's own value stands" for name in call.overruled_tags)
        if call.options.idempotency_key is not None and call.transport == "job":
            self.warnings += ("idempotency_key: kept for the record; what counts for jobs is that of the submission",)

    @property
    def failed(self) -> AttemptReport | None:
        return self.reports[-1] if self.reports else None

    def remaining_s(self) -> float | None:
        """What is left of the caller's deadline."""
        if self.call.deadline is None:
            return None
        return self.call.deadline - asyncio.get_running_loop().time()

    def planned(self, plan: Plan) -> Sequence[Route]:
        """The routes to be tried, in order. A single one is waited for, whatever keeps it back."""
        self.patient = plan.routes[0] if len(plan.routes) == 1 else None
        self._left_out = [(None, out) for out in plan.left_out]
        return plan.routes

    @property
    def left_out(self) -> tuple[LeftOut, ...]:
        """The routes that were not tried so far, and why: by the plan, or since admission had no slot there."""
        if not self._left_out:
            return ()
        tried = {report.route.route_id for report in self.reports}
        return tuple(out for route_id, out in self._left_out if route_id not in tried)

    def refused(self, refusal: Refusal, route: Route | None = None) -> None:
        """Takes note of a refusal, and of a route that may be waited for; raises where no other could do better."""
        if route is not None:
            self.refusals = [one for one in self.refusals if one[1] is None or one[1].route_id != route.route_id]
        self.refusals.append((refusal, route))
        self._stopped_by = refusal
        if route is not None:
            self._left_out = [(known, out) for known, out in self._left_out if known != route.route_id]
            out = LeftOut(provider=route.provider.id, model=route.model, reason=refusal.reason.value)
            self._left_out.append((route.route_id, out))
        if route is not None and route is not self.patient and refusal.reason is RefusalReason.COOLDOWN:
            self.cooling.append((refusal.retry_after_s or 0.0, route))
        if _code_of(refusal) in _SAME_EVERYWHERE:
            raise self._refusal(refusal, refusal.retry_after_s)

    def cannot_be_said(self, route: Route, error: RequestNotExpressible) -> None:
        """This route cannot be told what is asked: it is left out."""
        self._unsaid[route.route_id] = (route, error)
        self._left_out = [(known, out) for known, out in self._left_out if known != route.route_id]
        reason = f"{Code.UNSUPPORTED_FIELD}: {self.call.told_path(error.path)}"
        self._left_out.append((route.route_id, LeftOut(provider=route.provider.id, model=route.model, reason=reason)))

    def goes_on(self, attempt: Attempt, receipt: Receipt) -> bool:
        """After a failed attempt that is settled: may its route be tried again? Raises where nothing may."""
        error = attempt.error
        self._stopped_by = None
        self.failed_in.append(attempt.lease.group)
        if isinstance(error, Rejected) and error.error_class is ErrorClass.FATAL:
            said = classify.told(error.said or "", attempt.route.endpoint.headers.values()) or error.message
            param = self._param_of(error, attempt.route)
            if param is None and error.param is not None and error.param not in said:
                said = f"its field {error.param}: {said}"
            raise UpstreamRejected(
                f"{attempt.route.provider.id} refused the request: {said}",
                param=param,
                outcome=self.outcome("failed", receipt=receipt),
            )
        if not receipt.acknowledged:
            # Without its acknowledgement the slot may still be ours: a second one could pass the limit.
            raise AllRoutesFailed(
                "an attempt failed and the control store did not acknowledge its settlement",
                code=Code.CONTROL_STORE_UNAVAILABLE,
                outcome=self.outcome("failed", receipt=receipt),
                retry_after_s=1.0,
            )
        remaining = self.remaining_s()
        if remaining is not None and remaining <= 0:
            raise self.late()
        if isinstance(error, Broken) and error.answered:
            raise StreamBroken(
                f"{self._cause(attempt, error)}. Part of an answer came, or one that is not proven to be whole: the "
                "provider has worked on it, and it is not asked to do so twice",
                code=Code.UNCERTAIN,
                outcome=self.outcome("uncertain"),
            )
        if attempt.may_have_cost and not self._may_resend(attempt.route):
            raise StreamBroken(
                f"{self._cause(attempt, error)}. The request was sent and may have cost something; resend_uncertain "
                "forbids sending it again",
                code=Code.UNCERTAIN,
                outcome=self.outcome("uncertain"),
            )
        if isinstance(error, Rejected):
            self.floor_s = max(self.floor_s, error.retry_after_s or 0.0)
            if error.rate_limited:
                self.places[attempt.route.provider.group] = attempt.lease.number
                return True
        # What is no rate limit is backed off from: nothing else would hold the next attempt back.
        self.places.pop(attempt.route.provider.group, None)
        return not isinstance(error, Rejected) or error.error_class is ErrorClass.TRANSIENT

    @staticmethod
    def _cause(attempt: Attempt, error: Exception | None) -> str:
        """How the attempt failed, with the machine word that the ledger and the log have for it."""
        provider = attempt.route.provider.id
        return f"{provider}: {error.message} ({error.code})" if isinstance(error, ProviderError) else provider

    def _may_resend(self, route: Route) -> bool:
        wish = self.call.options.resend_uncertain or route.provider.resend_uncertain
        if wish is None:
            wish = Resend.NEVER if self.call.transport == "job" else Resend.BEFORE_FIRST_BYTE
        return wish is Resend.BEFORE_FIRST_BYTE

    def unadmitted(self, refusal: Refusal, *, lapsed: bool) -> AdmissionRefused:
        """
        The control store gave no answer to the ticket, or still holds what a lapse has lost.

        `lapsed`: the request had a place in the queue, and lost it with this process.
        """
        refusal = msgspec.structs.replace(refusal, reason=RefusalReason.STORE_UNAVAILABLE)
        self.refusals.append((refusal, None))
        if lapsed:
            told = (
                "the control store had not heard of this process for longer than its lease, and the request lost its "
                "place in the queue with it: nothing was dispatched"
            )
        else:
            told = "the control store does not answer: nothing was dispatched"
        return self._refusal(refusal, refusal.retry_after_s, told=told)

    async def pause(self, again: list[Route]) -> Sequence[Route]:
        """
        Every route was tried: waits before those that may do better. No slot is held. Raises where none may.

        After a rate limit the wait is in the queue, at the place that the request had: admission grants nothing there
        before the provider's time. Of several routes that cool down the one that is ready first is waited for, but not
        where another one is up and is refused for money: that is told at once.
        """
        cooling, self.cooling = self.cooling, []
        most = self.settings.most_attempts
        if len(self.reports) >= most:
            raise self._exhausted()
        for_money = {_code_of(refusal): refusal for refusal, _ in self._for_money}
        again = [route for route in again if self._can_pay(route)]
        if for_money and (not again or Code.BUDGET_RESERVED in for_money):
            self._stopped_by = for_money.get(Code.BUDGET_RESERVED, self._stopped_by)
            raise self._exhausted()
        remaining = self.remaining_s()
        if not again:
            waits = [(wait_s, route) for wait_s, route in cooling if route not in self.waited_for]
            wait_s, soonest = min(waits, key=operator.itemgetter(0), default=(0.0, None))
            if soonest is None or (remaining is not None and wait_s >= remaining):
                raise self._exhausted()
            self.patient = soonest
            self.waited_for.append(soonest)
            return [soonest, *(route for _, route in cooling if route is not soonest)]
        if self.pauses >= len(self.settings.backoff_s):
            raise self._exhausted()
        queues = all(route.provider.group in self.places for route in again)
        routes = [*again, *(route for _, route in cooling)] if queues else again
        alone = len(routes) == 1
        # Of several, admission knows best which is ready first: it refuses each with its time.
        floor_s = self.floor_s if alone or not queues else 0.0
        backoff_s = 0.0 if queues else self.settings.backoff_s[self.pauses] * random.uniform(1.0, 1.25)  # noqa: S311  jitter
        if for_money and floor_s > backoff_s:
            raise self._exhausted(retry_after_s=floor_s)
        delay = max(backoff_s, floor_s)
        self.pauses += 1
        self.floor_s = 0.0
        if remaining is not None and delay >= remaining:
            raise self._exhausted(retry_after_s=delay)
        if not queues:
            await asyncio.sleep(delay)
        self.patient = routes[0] if alone and not for_money else None
        return routes[: most - len(self.reports)]

    def late(self, receipt: Receipt = _SETTLED) -> GatewayError:
        kind = AdmissionRefused if not self.reports else AllRoutesFailed
        outcome = self.outcome("failed", receipt=receipt)
        return kind("the caller's deadline has passed", code=Code.DEADLINE_EXCEEDED, outcome=outcome)

    def _param_of(self, error: Rejected, route: Route) -> str | None:
        """The field that the provider names, where the caller's own request went out to it: others have other names."""
        native = (self.call.embedding or self.call.chat).native
        if error.param is None or native is None or native.protocol != route.endpoint.protocol:
            return None
        return self.call.told_path(error.param)

    def _refusal(
        self,
        refusal: Refusal,
        retry_after_s: float | None,
        *,
        told: str | None = None,
        cause: str | None = None,
        param: str | None = None,
    ) -> AdmissionRefused:
        code = _code_of(refusal)
        place = "" if refusal.position is None else f" at position {refusal.position}"
        told = told or limits.told(refusal) or _REFUSED[code].format(group=refusal.group, place=place)
        return AdmissionRefused(
            told if code in _OF_THE_KEY else told + self._beside(self._for_money),
            code=code,
            param=param,
            # What is too large stays so.
            retry_after_s=None if code in _FOR_EVER else retry_after_s,
            outcome=self.outcome("failed"),
            groups=self._groups() if code in _OF_THE_KEY else self._groups(refusal.group),
            cause=cause,
            limit=None if refusal.key_limit is None else refusal.key_limit.name,
        )

    def _groups(self, *first: str) -> tuple[str, ...]:
        elsewhere = _SAME_EVERYWHERE | _OF_THE_KEY
        refused = [refusal.group for refusal, _ in self.refusals if _code_of(refusal) not in elsewhere]
        return tuple(dict.fromkeys([*first, *refused, *self.failed_in]))

    @property
    def _for_money(self) -> Sequence[tuple[Refusal, Route | None]]:
        """The refusals of routes that are up, by a budget of the key or the session."""
        return [one for one in self.refusals if _code_of(one[0]) in _OF_MONEY]

    def _can_pay(self, route: Route | None) -> bool:
        """Whether the budget that does not suffice elsewhere does for this route, as far as has been told."""
        most_usd = None if route is None else self.most_usd.get(route.route_id)
        budgets = [refusal.key_limit for refusal, _ in self.refusals if refusal.reason is RefusalReason.BUDGET_EXCEEDED]
        return not most_usd or all(
            budget is None or budget.spent + budget.unknown + most_usd <= budget.most for budget in budgets
        )

    def _beside(self, refusals: Sequence[tuple[Refusal, Route | None]]) -> str:
        """Of these, and of what could not be said, the reasons, for the end of what is told of something else."""
        reasons = [
            f"{route.provider.id}/{route.model}: {limits.told(refusal) or refusal.reason.value}"
            for refusal, route in refusals
            if route is not None
        ]
        reasons += [
            f"{route.provider.id}/{route.model}: {Code.UNSUPPORTED_FIELD} "
            f"({self.call.told_path(error.path)}: {error.reason})"
            for route, error in self._unsaid.values()
        ]
        return f"; not tried: {'; '.join(reasons)}" if reasons else ""

    def _no_slot(self) -> AdmissionRefused:
        """
        Of several routes without a slot: the last that may have one later, and when the first of them may.

        What holds a route back that the key could not pay for anyway is not told.
        """
        apart = [one for one in self.refusals if one[0].reason not in _HELD_BACK or self._can_pay(one[1])]
        lasting = [one for one in apart if _code_of(one[0]) not in _FOR_EVER] or self.refusals
        passing = [one for one in lasting if _code_of(one[0]) is not Code.BUDGET_EXCEEDED] or lasting
        waits = [refusal.retry_after_s for refusal, _ in passing if refusal.retry_after_s is not None]
        reserved = [one for one in passing if _code_of(one[0]) is Code.BUDGET_RESERVED]
        refusal, route = (reserved or passing)[-1]
        if route is not None and refusal.reason is RefusalReason.TOO_LARGE:
            told = None if refusal.key_limit is not None else _too_large(refusal, route)
            return self._refusal(refusal, None, told=told, param=_what_is_large(self.call, refusal))
        hold = Hold.of(refusal)
        if route is None or hold is None:
            return self._refusal(refusal, min(waits, default=None))
        told = hold.told(group=refusal.group, provider=route.provider.id, model=route.model)
        return self._refusal(refusal, min(waits, default=None), told=told, cause=hold.cause.value)

    def _exhausted(self, retry_after_s: float | None = None) -> GatewayError:
        if not self.reports and not self.refusals:
            _, unsaid = list(self._unsaid.values())[-1]
            param = self.call.told_path(unsaid.path) or None
            return InvalidRequest(unsaid.reason, code=Code.UNSUPPORTED_FIELD, param=param)
        if not self.reports:
            return self._no_slot()
        tried = "; ".join(_tried(report) for report in self.reports)
        stopped_by = self._stopped_by
        if stopped_by is not None and _code_of(stopped_by) in _OF_THE_KEY:
            told = f"{limits.told(stopped_by)} Before that: {tried}"
            return self._refusal(stopped_by, stopped_by.retry_after_s, told=told)
        waits = [
            refusal.retry_after_s
            for refusal, _ in self.refusals
            if refusal.retry_after_s is not None and _code_of(refusal) not in _OF_THE_KEY
        ]
        known = {report.route.route_id for report in self.reports}
        untried = [one for one in self.refusals if one[1] is not None and one[1].route_id not in known]
        return AllRoutesFailed(
            f"every route failed ({tried}){self._beside(untried)}",
            retry_after_s=retry_after_s or max([self.floor_s, *waits]) or None,
            outcome=self.outcome("failed"),
            groups=self._groups(),
        )

    def broken(self, attempt: Attempt, receipt: Receipt) -> StreamBroken:
        """After content: no retry and no switch, but the truth."""
        late = attempt.late or (isinstance(attempt.error, Broken) and attempt.error.code == "deadline")
        proven = isinstance(attempt.error, Rejected)
        return StreamBroken(
            f"the answer is not complete: {attempt.error or 'the deadline passed before it was'}",
            code=Code.DEADLINE_EXCEEDED if late else Code.UPSTREAM_BROKEN,
            outcome=self.outcome("failed" if proven else "uncertain", attempt, receipt),
        )

    def outcome(self, ended: str, attempt: Attempt | None = None, receipt: Receipt = _SETTLED) -> Outcome:
        self.done = Outcome(
            request_id=self.call.request_id,
            debit_id=self.debit_id,
            ended=ended,
            attempts=tuple(self.reports),
            usage=NOTHING if attempt is None else attempt.usage,
            cost=total([report.cost for report in self.reports]),
            settlement=receipt.settlement,
            counters=receipt.counters,
            served_model=None if attempt is None else attempt.served_model,
            service_tier=None if attempt is None else attempt.service_tier,
            provider_request_id=None if attempt is None else attempt.provider_request_id,
            warnings=self.warnings if attempt is None else self.warnings + attempt.warnings,
            left_out=self.left_out if self.call.options.explain else (),
        )
        return self.done

    @property
    def _receipt(self) -> Receipt:
        """Of the last attempt: what was left of it may yet be read on."""
        return _SETTLED if self.attempt is None else self.attempt.receipt

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        code: str | None = None
        stopped = isinstance(error, asyncio.CancelledError) and self._stopping.ends()
        match error:
            case None:
                pass
            case _ if stopped:
                code = Code.SHUTTING_DOWN.value
            case GatewayError():
                code = error.code.value
                if self.call.options.explain and not error.left_out:
                    error.left_out = self.left_out
            case asyncio.CancelledError() | GeneratorExit() | ConnectionError():
                # The last is the caller's connection, found gone by who writes to it: none of ours comes out here. A
                # client whose deadline passes hangs up; that it was not a change of mind is for us to see.
                late = self.call.deadline is not None and (self.remaining_s() or 0.0) < _SAME_MOMENT_S
                code = (Code.DEADLINE_EXCEEDED if late else Code.CANCELLED).value
            case _:
                code = Code.INTERNAL.value
        if self.done is not None and self.done.ended == "complete":
            # The end was handed over: whoever goes away after it has its whole answer.
            code = None
        elif stopped:
            uncertain = self.attempt is not None and self.attempt.ending() is Ending.UNCERTAIN
            self.outcome("uncertain" if uncertain else "failed", receipt=self._receipt)
        elif code == Code.INTERNAL.value:
            self.outcome("failed", receipt=self._receipt)
        elif self.done is None or code == Cancelled.code.value:
            ended = "cancelled" if code in (None, Cancelled.code.value) else "failed"
            self.outcome(ended, receipt=self._receipt)
        self._log(code)
        # A job has no caller who waits: it hears of the stop as of any other who takes it back.
        if stopped and self.call.transport != "job" and self._stopping.caught():
            raise self._ended_by_the_stop() from None

    def _ended_by_the_stop(self) -> Stopped:
        assert self.done is not None
        if self.done.dispatched:
            told = (
                "the gateway is stopping and has ended this request, of which there is no whole answer: it was sent, "
                "and may have cost something"
            )
        else:
            told = "the gateway is stopping and has ended this request: nothing was sent, send it again"
        error = Stopped(told, outcome=self.done, retry_after_s=None if self.done.dispatched else 1.0)
        if self.call.options.explain:
            error.left_out = self.left_out
        return error

    def _log(self, code: str | None) -> None:
        assert self.done is not None
        route = self.done.route
        failed = None if self.done.ended == "complete" else self.failed
        log.info(
            "gateway.request_ended",
            request_id=self.call.request_id,
            debit_id=self.debit_id,
            key_id=str(self.call.caller.key_id),
            session_id=self.call.options.session_id,
            transport=self.call.transport,
            model=self.call.model,
            ended=self.done.ended,
            code=code,
            error_class=None if failed is None else failed.error_class,
            error_code=None if failed is None else failed.code,
            provider=None if route is None else route.provider,
            route_id=None if route is None else route.route_id,
            attempts=len(self.reports),
            input_tokens=self.done.usage.input_total,
            output_tokens=self.done.usage.output_total,
            cost_state=self.done.cost.state,
            cost_usd=None if self.done.cost.usd is None else decimal_string(self.done.cost.usd),
            settlement=self.done.settlement,
            queued_ms=round(self.queued_s * 1000),
            first_byte_ms=None if self.first_byte_s is None else round(self.first_byte_s * 1000),
            duration_ms=round((time.monotonic() - self.started_at) * 1000),
        )


def _tried(report: AttemptReport) -> str:
    """One attempt of those that failed."""
    told = f"{report.route.provider}/{report.route.model}: {report.http_status or report.status} {report.code or ''}"
    return told.rstrip()


_REFUSED: Final = {
    Code.QUEUE_FULL: "the queue of {group} is full",
    Code.QUEUE_TIMEOUT: "no slot of {group} came free in time{place}",
    Code.DEADLINE_EXCEEDED: "the caller's deadline passed while it waited for {group}{place}",
    # Where it is over already; `gateway.standing` tells it otherwise.
    Code.COOLDOWN: "{group} was held back after failures or for a rate limit",
    # A store that does not answer is told by `unadmitted`.
    Code.CONTROL_STORE_UNAVAILABLE: (
        "the control store answers, and was replaced: what it may have forgotten must end first, and nothing was "
        "dispatched"
    ),
    Code.DUPLICATE_DEBIT: "this debit_id is in use or has ended: nothing was dispatched again",
    Code.OWNER_FENCE: "a newer owner of this run has been seen: nothing was dispatched",
    Code.PROVIDER_UNAVAILABLE: "the provider of {group} rejected its credential, or its quota was exhausted",
    # Where the key has a limit in the way, `gateway.limits` tells it.
    Code.TOO_LARGE: "the request may use more tokens than {group} may in a minute",
    Code.INTERNAL: "this process lost its place with the control store: nothing was dispatched",
}


def _too_large(refusal: Refusal, route: Route) -> str | None:
    """Whose limit it is that it does not fit into. None where this process's configuration does not say."""
    limits = route.provider.tokens_per_minute
    for name, whose in ((route.model, f"the model {route.model} of {refusal.group}"), ("", refusal.group)):
        limit = limits.get(name)
        if limit is not None and refusal.tokens is not None and refusal.tokens > limit:
            return f"the request may use {refusal.tokens} tokens, and {whose} has {limit} in a minute"
    return None


def _what_is_large(call: Call, refusal: Refusal) -> str:
    """The field that is to be smaller: the limit of the answer, or the question where it is most of it."""
    if call.embedding is not None:
        return call.told_path("input")
    answer = (call.chat.max_output_tokens or 0) * (call.chat.n or 1)
    if refusal.tokens is not None and call.chat.max_output_tokens is not None and answer < refusal.tokens / 2:
        return call.told_path(call.chat.written("messages"))
    return call.told_path(call.chat.written("max_output_tokens"))


#: No other route could do better.
_SAME_EVERYWHERE: Final = frozenset(
    {
        Code.DEADLINE_EXCEEDED,
        Code.CONTROL_STORE_UNAVAILABLE,
        Code.DUPLICATE_DEBIT,
        Code.OWNER_FENCE,
        Code.KEY_LIMIT,
    }
)
#: Not a group has no room, but the caller's key.
_OF_THE_KEY: Final = frozenset({Code.KEY_LIMIT, Code.BUDGET_EXCEEDED, Code.BUDGET_RESERVED, Code.NO_ROUTE})
_OF_MONEY: Final = frozenset({Code.BUDGET_EXCEEDED, Code.BUDGET_RESERVED})
#: Given before the key's budget is looked at.
_HELD_BACK: Final = frozenset({RefusalReason.COOLDOWN, RefusalReason.UNAVAILABLE})
#: Asking again as it is cannot help.
_FOR_EVER: Final = frozenset({Code.TOO_LARGE, Code.OWNER_FENCE, Code.DUPLICATE_DEBIT, Code.NO_ROUTE})


def _code_of(refusal: Refusal) -> Code:
    match refusal.reason:
        case RefusalReason.LAPSED:
            # It is answered by asking again as another incarnation; one that gets here is a fault of ours.
            return Code.INTERNAL
        case RefusalReason.STORE_CLOSED:
            return Code.CONTROL_STORE_UNAVAILABLE
        case RefusalReason.NOT_BOUNDED:
            return Code.NO_ROUTE
        case reason:
            return Code(reason.value)
