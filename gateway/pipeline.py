"""
THE LINE. Every request of every transport goes through here: route -> admit -> recheck -> call -> settle -> answer.

Read `Pipeline.stream` first. Everything that may be retried happens before its `yield`, everything the caller has seen
happens after: the commit point is that place in the text. As a plain generator the same line would keep the lease of
a caller that stops early; as a context manager it cannot. A lease outlives its caller only in `gateway.attempt`, where
a task that `drain` waits for reads the answer on.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Sequence
from contextlib import aclosing, asynccontextmanager
from decimal import Decimal
from typing import Any, TypeAlias, TypeVar

from adapters.chat import ChatResponse, Delta
from adapters.contract import Adapter, CountResponse, EmbeddingResponse, Way
from adapters.errors import Broken, ProviderError, Rejected, RequestNotExpressible
from admission.contract import StoreUnavailable
from admission.controller import Controller
from admission.ids import new_id
from admission.lease import Demand, Fence, Lease, Refusal, RefusalReason, Waiting
from gateway.answer import SILENT, Ended, Item, Observer
from gateway.attempt import Asking, Attempt, Attempts, Late, intent
from gateway.billing import Billing
from gateway.call import Call, Completion, Counted, Embedded
from gateway.errors import AdmissionRefused, Code, PermissionDenied
from gateway.failover import Run
from gateway.router import Route, Router, RoutingSettings
from gateway.settling import Settling
from gateway.standing import Standing
from gateway.stopping import Stopping

T = TypeVar("T")
#: How an attempt is dispatched: returns at its first content, raises `ProviderError` before it.
Dispatch: TypeAlias = Callable[[Attempt], Coroutine[Any, Any, T]]


class Pipeline:
    """Satisfies `Line`, `EmbeddingLine` and `CountingLine` of `gateway.answer`."""

    def __init__(
        self,
        *,
        router: Router,
        controller: Controller,
        adapter: Adapter,
        billing: Billing,
        usable: Callable[[Call], bool],
        settings: RoutingSettings,
        standing: Standing,
        settling: Settling | None = None,
        stopping: Stopping | None = None,
    ) -> None:
        """
        `usable` says, right before dispatch, whether the caller's key still is. No `settling`: no journal. No
        `stopping`: nobody but its caller ends a call.
        """
        self._router = router
        self._controller = controller
        self._adapter = adapter
        self._billing = billing
        self._usable = usable
        self._settings = settings
        self._standing = standing
        self._settling = settling or Settling(controller, settings.settlement_patience_s)
        self._stopping = stopping or Stopping()
        self._attempts = Attempts(self._settling, self._stopping)

    async def drain(self, until: float) -> None:
        """After the last call: answers that are read on for callers who left get to that time of the event loop."""
        await self._attempts.close(until)

    # ---------------------------------------------------------------- its faces

    @asynccontextmanager
    async def stream(self, call: Call, observer: Observer = SILENT) -> AsyncIterator[AsyncIterator[Item]]:
        with Run(call, self._settings, self._stopping) as run:
            attempt, first = await self._serve(run, observer, self._first_content, "stream")
            async with attempt, aclosing(self._items(run, attempt, first)) as items:
                yield items

    async def complete(self, call: Call, observer: Observer = SILENT) -> Completion:
        with Run(call, self._settings, self._stopping) as run:
            attempt, response = await self._serve(run, observer, self._whole_answer, "complete")
            async with attempt:
                await observer.completed(response, attempt.number)
                receipt = await self._attempts.settle(attempt)
                return Completion(response=response, outcome=run.outcome("complete", attempt, receipt))

    async def embed(self, call: Call, observer: Observer = SILENT) -> Embedded:
        with Run(call, self._settings, self._stopping) as run:
            attempt, response = await self._serve(run, observer, self._vectors, "embed")
            async with attempt:
                await observer.completed(response, attempt.number)
                receipt = await self._attempts.settle(attempt)
                return Embedded(response=response, outcome=run.outcome("complete", attempt, receipt))

    async def count(self, call: Call) -> Counted:
        with Run(call, self._settings, self._stopping) as run:
            attempt, response = await self._serve(run, SILENT, self._tokens, "count")
            async with attempt:
                receipt = await self._attempts.settle(attempt)
                return Counted(response=response, outcome=run.outcome("complete", attempt, receipt))

    # ---------------------------------------------------------------- before the commit point

    async def _serve(self, run: Run, observer: Observer, dispatch: Dispatch[T], way: Way) -> tuple[Attempt, T]:
        """
        The first route that gets to content. Its attempt holds a slot: open it at once.

        What a route cannot be told is found before a slot is asked for: it takes no place, no probe and no rate.
        """
        streamed = way == "stream"
        plan = self._router.plan(run.call, streamed=streamed)
        routes = run.planned(plan)
        while True:
            again: list[Route] = []
            for place, route in enumerate(routes):
                last = place == len(routes) - 1 and not again
                asking = Asking(run.call, route, self._billing)
                try:
                    asking.render(self._adapter, way)
                except RequestNotExpressible as error:
                    run.cannot_be_said(route, error)
                    continue
                lease = await self._admit(run, asking, observer, last=last)
                if isinstance(lease, Refusal):
                    run.refused(lease, route)
                    continue
                run.queued_s += lease.queued_s
                async with self._attempts.opened(asking, lease, run.number, run.reports, streamed=streamed) as attempt:
                    run.attempt = attempt
                    await observer.dispatching(attempt.number)
                    await self._recheck(run, lease)
                    observer.started(route.report, attempt.number)
                    try:
                        begun = await attempt.begin(dispatch)
                    except Late:
                        attempt.late = True
                        await self._attempts.leave(attempt)
                        raise run.late(attempt.receipt) from None
                    except (ProviderError, RequestNotExpressible) as error:
                        attempt.error = error
                        self._note(attempt)
                    else:
                        self._controller.content_seen(lease)
                        run.first_byte_s = attempt.first_byte_s
                        self._router.seen(route, attempt.start_s, streamed=streamed)
                        return attempt.passed_on(), begun
                    self._router.seen(route, attempt.start_s, streamed=streamed)
                    receipt = await self._attempts.settle(attempt)
                observer.failed(run.reports[-1])
                if run.goes_on(attempt, receipt):
                    again.append(route)
            routes = await run.pause(again)

    async def _admit(self, run: Run, asking: Asking, observer: Observer, *, last: bool) -> Lease | Refusal:
        """One ticket for one route. Only the patient one waits through a cooldown: others leave it to the next."""
        call, route = run.call, asking.route
        provider = route.provider

        def queued(waiting: Waiting) -> None:
            asking.waits(waiting)
            observer.queued(waiting)

        patience = provider.queue_timeout_s
        if not last and call.options.spill_after_s is not None:
            patience = min(patience, call.options.spill_after_s)
        session_id = call.options.session_id
        held = call.caller.limited or session_id is not None
        most_usd = asking.quote.most if held else None
        reserved_usd = (most_usd or Decimal(0)) if call.caller.limited else None
        if held:
            run.most_usd[route.route_id] = most_usd or Decimal(0)
        lapsed = False
        while True:
            self._journal_holds(run)
            run.number += 1
            answer = await self._controller.admit(
                Demand(
                    ticket_id=new_id(),
                    group=provider.group,
                    endpoint=provider.capacity_key,
                    model=route.model,
                    credential=provider.credential,
                    tokens=self._billing.tokens(call, route)
                    if provider.tokens_per_minute or call.caller.limited
                    else 0,
                    reserved_usd=reserved_usd,
                    session_id=session_id,
                    # Whether the session has a budget is the store's to know.
                    most_usd=most_usd if session_id is not None else None,
                    place=run.places.get(provider.group),
                    fence=run.fence,
                    klass=call.options.klass,
                    key_id=call.caller.key_id,
                    debit_id=run.debit_id,
                    attempt=run.number,
                    execution_limit_s=provider.limit_s(route.model, call.chat.max_output_tokens),
                    isolation_s=provider.isolation_s,
                    queue_timeout_s=patience,
                    caller_deadline_s=run.remaining_s(),
                    waits_for_cooldown=route is run.patient,
                    intent=intent(asking, left_out=run.left_out, created_at=run.created_at, reports=run.reports),
                ),
                queued,
            )
            asking.waited()
            if isinstance(answer, Refusal):
                run.number -= not answer.used
                if answer.reason is RefusalReason.LAPSED:
                    # This process is another one: the same question again, as that one.
                    lapsed = True
                    continue
                # Where the store has not let go of the place that was lost, it is that which holds the debit.
                kept = lapsed and answer.reason is RefusalReason.DUPLICATE_DEBIT
                if kept or answer.reason is RefusalReason.STORE_UNAVAILABLE:
                    raise run.unadmitted(answer, lapsed=lapsed)
            return answer

    def _note(self, attempt: Attempt) -> None:
        if isinstance(attempt.error, Rejected):
            self._standing.refused(attempt.route, attempt.lease.group, attempt.error)

    async def _recheck(self, run: Run, lease: Lease) -> None:
        """Between grant and dispatch much may have changed. Raising here settles as not dispatched."""
        if run.fence is not None:
            await self._not_fenced(run, run.fence)
        if not self._usable(run.call):
            raise PermissionDenied("the API key was revoked while the request waited: nothing was sent")
        remaining = run.remaining_s()
        if remaining is not None and remaining <= 0:
            raise run.late()
        self._journal_holds(run)
        if not self._controller.valid(lease):
            raise AdmissionRefused(
                "the control store has not confirmed lately that this process may dispatch: nothing was sent",
                code=Code.CONTROL_STORE_UNAVAILABLE,
                retry_after_s=1.0,
                outcome=run.outcome("failed"),
            )

    async def _not_fenced(self, run: Run, fence: Fence) -> None:
        """A newer executor of the run may have come to any process while this one's request waited."""
        try:
            newer = await self._controller.fenced(run.call.caller.key_id, fence)
        except StoreUnavailable:
            raise AdmissionRefused(
                "the control store does not answer: nothing was sent",
                code=Code.CONTROL_STORE_UNAVAILABLE,
                retry_after_s=1.0,
                outcome=run.outcome("failed"),
            ) from None
        if newer:
            raise AdmissionRefused(
                "a newer owner of this run has been seen: nothing was sent",
                code=Code.OWNER_FENCE,
                outcome=run.outcome("failed"),
            )

    def _journal_holds(self, run: Run) -> None:
        """What cannot be kept must not be spent."""
        if (fault := self._settling.fault) is not None:
            raise AdmissionRefused(
                f"the journal of this process cannot be written ({fault}): nothing was sent",
                code=Code.CONTROL_STORE_UNAVAILABLE,
                retry_after_s=1.0,
                outcome=run.outcome("failed"),
            )

    async def _first_content(self, attempt: Attempt) -> Sequence[Delta]:
        async for batch in await attempt.connect(self._adapter.stream(attempt.upstream)):
            deltas = attempt.observe(batch)
            if deltas or attempt.finished:
                return deltas
        raise Broken("the stream ended without a terminal", code="no_terminal")

    async def _whole_answer(self, attempt: Attempt) -> ChatResponse:
        response = await self._adapter.complete(attempt.upstream)
        attempt.answered(response)
        return response

    async def _vectors(self, attempt: Attempt) -> EmbeddingResponse:
        response = await self._adapter.embed(attempt.embedding)
        attempt.answered(response)
        return response

    async def _tokens(self, attempt: Attempt) -> CountResponse:
        response = await self._adapter.count(attempt.upstream)
        attempt.counted(response)
        return response

    # ---------------------------------------------------------------- after the commit point

    async def _items(self, run: Run, attempt: Attempt, first: Sequence[Delta]) -> AsyncGenerator[Item]:
        if item := attempt.item(first):
            yield item
        try:
            while attempt.finished is None:
                if item := attempt.passed(await attempt.next_batch()):
                    yield item
        except Late:
            attempt.late = True
            await self._attempts.leave(attempt)
            raise run.broken(attempt, attempt.receipt) from None
        except ProviderError as error:
            attempt.error = error
            self._note(attempt)
            receipt = await self._attempts.settle(attempt)
            raise run.broken(attempt, receipt) from error
        receipt = await self._attempts.settle(attempt)
        yield Ended(
            ends=attempt.finished.ends,
            outcome=run.outcome("complete", attempt, receipt),
            native=attempt.native_end,
        )
