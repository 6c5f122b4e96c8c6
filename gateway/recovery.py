"""
What is to be done for processes that died: their tickets, their attempts, the cost of answers they had stored.

Satisfies `gateway.jobs.runner.Recovery`. A process proves by its lock file that it lives, on this host; elsewhere by
its heartbeat.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Collection, Mapping, Sequence
from decimal import Decimal
from typing import Any, Final

import msgspec
import structlog

from adapters.chat import ChatResponse
from adapters.contract import EmbeddingResponse
from admission.contract import StoreUnavailable as AdmissionStoreUnavailable
from admission.controller import Controller
from admission.lease import Ending, Lease, Settlement, Verdict
from admission.store import Store
from gateway.billing import Billing, total
from gateway.call import Options
from gateway.database import StoreUnavailable, store_errors
from gateway.liveness import Liveness
from gateway.outcome import AttemptReport, Cost, Outcome, RouteReport
from gateway.provider import Provider
from metering.cost import Reason, decimal_string
from metering.ledger import Ledger, LedgerAttempt, Record
from metering.usage import Usage

log: Final = structlog.get_logger("gateway")

#: What of an answer may cost more than was reckoned before it was asked for.
_BEYOND_THE_INTENT: Final = frozenset({Reason.UNPRICED_UNITS, Reason.UNPRICED_SERVICE_TIER})

#: How long a settlement is waited for before the job is left for the next round.
_PATIENCE_S: Final = 2.0
#: Between looks at the lock files of this host.
_WATCH_S: Final = 1.0


class Recovery:
    def __init__(
        self,
        *,
        liveness: Liveness,
        controller: Controller,
        store: Store,
        ledger: Ledger,
        billing: Billing,
        providers: dict[str, Provider],
    ) -> None:
        self._liveness = liveness
        self._controller = controller
        self._store = store
        self._ledger = ledger
        self._billing = billing
        self._providers = providers

    async def watch(self) -> None:
        """For ever: holds this process's own locks, and buries the owners of this host that are dead."""
        while True:
            await self.look()
            await asyncio.sleep(_WATCH_S)

    async def look(self) -> None:
        """Once. Where the store is away, the dead wait for the next time."""
        try:
            await self.bury_dead()
        except AdmissionStoreUnavailable:
            log.info("gateway.burial_postponed")

    async def bury_dead(self) -> None:
        """Raises `admission.store.StoreUnavailable`."""
        for owner in self._controller.incarnations:
            self._liveness.hold(owner)
        dead = self._liveness.dead()
        if dead:
            await self._controller.bury(dead)
            for owner in dead:
                self._liveness.forget(owner)
            log.warning("gateway.process_found_dead", owners=[str(owner) for owner in dead])

    async def dead(self, owners: Sequence[uuid.UUID]) -> Collection[uuid.UUID]:
        """Which of these will never write again."""
        try:
            return await self._store.dead(owners)
        except AdmissionStoreUnavailable as error:
            raise StoreUnavailable(str(error)) from error

    async def outcome_of(self, *, key_id: uuid.UUID, debit_id: str) -> Outcome | None:
        """What became of the attempts of a debit, as far as is known. None where none was granted."""
        return (await self.outcomes_of(key_id=key_id, debit_ids=[debit_id])).get(debit_id)

    async def outcomes_of(self, *, key_id: uuid.UUID, debit_ids: Sequence[str]) -> Mapping[str, Outcome]:
        """What became of the attempts of these debits. Those of which none was granted are left out."""
        with store_errors():
            attempts = await self._ledger.attempts_of(key_id, debit_ids)
        found: dict[str, list[LedgerAttempt]] = {}
        for attempt in attempts:
            found.setdefault(attempt.debit_id, []).append(attempt)
        return {debit_id: _outcome(debit_id, of_debit) for debit_id, of_debit in found.items()}

    async def settle_stored(
        self, *, key_id: uuid.UUID, options: Options, attempt: int, response: ChatResponse | EmbeddingResponse
    ) -> Outcome | None:
        """Charges an attempt whose process died after its answer was stored."""
        assert options.debit_id is not None
        with store_errors():
            attempts = await self._ledger.attempts_of(key_id, [options.debit_id])
        found = next((entry for entry in attempts if entry.attempt == attempt), None)
        if found is None:
            return None
        if found.state in ("open", "unknown"):
            try:
                async with asyncio.timeout(_PATIENCE_S):
                    await self._controller.settle(self._settlement(found, response))
            except TimeoutError as error:
                raise StoreUnavailable("the settlement was not acknowledged in time") from error
        return await self.outcome_of(key_id=key_id, debit_id=options.debit_id)

    def _settlement(self, found: LedgerAttempt, response: ChatResponse | EmbeddingResponse) -> Settlement:
        facts = found.facts
        served_tier = response.service_tier if isinstance(response, ChatResponse) else None
        cost = self._billing.complete_elsewhere(
            requested=facts["requested_model"],
            provider=self._providers.get(facts["provider"]),
            upstream=facts["upstream_model"],
            usage=response.usage,
            reported_cost_usd=response.reported_cost_usd,
            asked_tier=facts.get("asked_tier"),
            served_tier=served_tier,
        )
        usage = response.usage
        record = Record(
            status="success",
            ended="complete",
            usd=None if cost.usd is None else decimal_string(cost.usd),
            upper_bound_usd=None if cost.reason in _BEYOND_THE_INTENT else msgspec.UNSET,
            cost_reason=cost.reason,
            price_version=cost.price_version,
            input_total=usage.input_total,
            cache_read=usage.cache_read,
            cache_write_5m=usage.cache_write_5m,
            cache_write_1h=usage.cache_write_1h,
            output_total=usage.output_total,
            reasoning=usage.reasoning,
            served_model=response.served_model,
            service_tier=served_tier,
        )
        lease = Lease(
            ticket_id=found.ticket_id,
            group=found.group_id,
            generation=0,
            probe=False,
            hard_deadline=time.monotonic(),
            granted_at=found.granted_at,
            day=found.day,
            queued_s=0.0,
        )
        return Settlement(
            lease=lease,
            ending=Ending.CONFIRMED,
            verdict=Verdict.NONE,
            state=cost.state,
            record=msgspec.json.encode(record),
        )


def _outcome(debit_id: str, attempts: Sequence[LedgerAttempt]) -> Outcome:
    reports = tuple(_report(attempt) for attempt in attempts)
    last = attempts[-1]
    ended = {"charged": "complete", "unknown": "uncertain", "open": "uncertain"}.get(last.state, "failed")
    return Outcome(
        request_id=last.facts.get("request_id") or "",
        debit_id=debit_id,
        ended="complete" if last.facts.get("ended") == "complete" else ended,
        attempts=reports,
        usage=Usage(**{name: last.facts.get(name) for name in Usage.__struct_fields__}),
        cost=total([report.cost for report in reports]),
        settlement="pending" if last.state == "open" else "settled",
        served_model=last.facts.get("served_model"),
        service_tier=last.facts.get("service_tier"),
    )


def _report(attempt: LedgerAttempt) -> AttemptReport:
    facts = attempt.facts
    return AttemptReport(
        number=attempt.attempt,
        route=RouteReport(
            route_id=facts.get("route_id") or "",
            provider=facts.get("provider") or "",
            model=facts.get("upstream_model") or "",
            protocol=facts.get("protocol") or "",
        ),
        status=facts.get("status") or "unknown",
        error_class=facts.get("error_class"),
        code=facts.get("error_code"),
        http_status=facts.get("http_status"),
        cost=Cost(
            state="unknown" if attempt.state == "open" else attempt.state,
            usd=_decimal(facts.get("usd")),
            upper_bound_usd=_decimal(facts.get("upper_bound_usd")) if attempt.state in ("open", "unknown") else None,
            price_version=facts.get("price_version"),
            reason=facts.get("cost_reason"),
        ),
    )


def _decimal(value: Any) -> Decimal | None:
    return None if value is None else Decimal(str(value))
