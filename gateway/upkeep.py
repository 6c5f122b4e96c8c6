"""
What the ledger needs from time to time: a partition for the months to come, and none for those that are over.

Every process does it each hour; who finds another one about it leaves it alone. It is no part of a request: what fails
is told and tried again an hour later.
"""

from __future__ import annotations

import asyncio
from typing import Final

import structlog

from gateway.database import StoreUnavailable, store_errors
from metering.retention import Locked, NotAllowed, Retention

log: Final = structlog.get_logger("gateway")

_PERIOD_S: Final = 3600.0


class Upkeep:
    def __init__(self, retention: Retention) -> None:
        self._retention = retention
        #: What was said to be forbidden: said once.
        self._forbidden: set[str] = set()

    async def hourly(self) -> None:
        """For ever, from an hour after the start on: a process that is started again and again drops nothing."""
        while True:
            await asyncio.sleep(_PERIOD_S)
            try:
                await self.partition()
                await self.retire()
            except StoreUnavailable:
                continue

    async def partition(self) -> None:
        """Makes the months to come. Raises `gateway.database.StoreUnavailable`."""
        try:
            with store_errors():
                await self._retention.partition()
        except NotAllowed:
            self._say_once("gateway.partitions_not_allowed", "invocations go to the default partition")
        except Locked:
            log.warning("gateway.partitions_postponed", hint="somebody reads the ledger for long")

    async def retire(self) -> None:
        """
        Drops a month that is over; where there is none, what goes after its month.

        Raises `gateway.database.StoreUnavailable`.
        """
        try:
            with store_errors():
                found = await self._retention.drop()
                if found.answer == "dropped" and found.month is not None:
                    log.info(
                        "gateway.invocations_dropped", month=f"{found.month:%Y-%m}", rows=found.had, kept=found.kept
                    )
                elif found.answer in ("clock", "young"):
                    log.warning("gateway.retention_postponed", reason=found.answer)
                elif found.answer == "nothing":
                    # Not before every month that is over has gone.
                    attempts, counters = await self._retention.forget()
                    if attempts or counters:
                        log.info("gateway.attempts_forgotten", attempts=attempts, counters=counters)
        except NotAllowed:
            self._say_once("gateway.retention_not_allowed", "the owner of the ledger's tables can drop its months")
        except Locked:
            log.warning("gateway.retention_postponed", reason="locked")

    def _say_once(self, event: str, hint: str) -> None:
        if event not in self._forbidden:
            self._forbidden.add(event)
            log.warning(event, hint=hint)
