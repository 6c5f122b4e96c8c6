"""
What admission asks of its store, and what it is told.

The controller knows this and no more, so that the same controller runs over PostgreSQL and, in tests and simulations,
over memory. Both stores pass one conformance suite.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from datetime import date, datetime
from typing import Any, Protocol

import msgspec

from admission.lease import Demand, Fence, KeyLimit, Settlement, Waiting


class StoreUnavailable(Exception):
    """The store did not answer, so what was asked of it may or may not have happened."""


class Rejected(Exception):
    """The store refused a batch for what is in it, definitely: nothing of it was applied."""


class TicketRow(msgspec.Struct, frozen=True):
    """What the store says of a ticket. `ticket_id` is None in a "next" and a "breaker" row."""

    ticket_id: uuid.UUID | None
    #: "granted", "queued", "notify", "next", "breaker", or why not: sql/functions/20_acquire.sql lists them.
    answer: str
    owner_id: uuid.UUID | None = None
    #: The group it has a slot of or waits for; with "moved", the one it belongs to.
    group_id: str | None = None
    number: int | None = None
    generation: int | None = None
    probe: bool | None = None
    judged: bool | None = None
    granted_at: datetime | None = None
    day: date | None = None
    #: To the hard deadline.
    remaining_ms: int | None = None
    #: Tickets before it, at most 100; None where it was not looked for.
    ahead: int | None = None
    wait_reason: str | None = None
    #: With a refusal, when asking again may help; with "queued", when the cooldown ends; with "next", the next event.
    wait_ms: int | None = None
    expected_ms: int | None = None
    #: With a refusal for a limit of the ticket's key.
    key_limit: KeyLimit | None = None


class BreakerEvent(msgspec.Struct, frozen=True, kw_only=True):
    """A breaker has changed. Told to one process of all."""

    group: str
    #: "closed", "open" or "half_open".
    was: str
    became: str
    #: From here on.
    generation: int
    #: Opened: "transient", "slow", "probe_undecided" or "probe_lost". Half-open: "cooldown_over". Closed: what the
    #: probe's verdict was, "first_content" or "reset".
    cause: str
    #: By the store's clock.
    at: datetime
    #: When the cooldown ends; None where it has none.
    until: datetime | None = None


class SettledRow(msgspec.Struct, frozen=True):
    ticket_id: uuid.UUID
    #: False where the attempt had been settled before: nothing was written again.
    applied: bool
    counters: str | None
    group_id: str | None
    #: Somebody waits for the group, in whatever process.
    waiters: bool
    #: With the first of a statement: breakers have changed, and nobody has taken note of it yet.
    untold: bool = False


class AdmissionStore(Protocol):
    """Every method raises `StoreUnavailable`, or `Rejected` where the store refused definitely."""

    async def configure(self) -> list[str]:
        """Makes the configured groups known. Answers those for which other limits than these are in force."""

    async def acquire(self, group: str, owner: uuid.UUID, demands: Sequence[tuple[Demand, float]]) -> list[TicketRow]:
        """Enqueues and grants, in one transaction. With each demand, the seconds it has waited here already."""

    async def rescan(self, owner: uuid.UUID, demands: Sequence[Demand]) -> list[TicketRow]:
        """Confirms what other processes granted, reads the positions of the rest, and tells which were let go."""

    async def settle(self, shard: int, settlements: Sequence[Settlement], *, judged: bool) -> list[SettledRow]:
        """Ends attempts. Judged: under the lock of their groups, so that the outcomes move breakers and allowances."""

    async def decide(self, group: str, ticket: uuid.UUID, generation: int) -> None:
        """The probe of a half-open breaker has given valid content."""

    async def abandon(self, shard: int, tickets: Sequence[uuid.UUID], *, tombstone: bool) -> list[str]:
        """Takes tickets back. Answers the groups in which a slot came free."""

    async def renew(self, owner: uuid.UUID, process: uuid.UUID, *, first: bool) -> float | None:
        """The heartbeat: the seconds the owner now lives, or None where it had lapsed."""

    async def bury(self, owners: Sequence[uuid.UUID]) -> list[str]:
        """Declares owners dead whose process is proven gone. Answers their groups."""

    async def dead(self, owners: Sequence[uuid.UUID]) -> set[uuid.UUID]:
        """Which of these owners have lapsed, or were buried, and are not merely unheard."""

    async def overdue(self) -> list[str]:
        """The groups in which time alone has changed something."""

    async def breaker_events(self) -> list[BreakerEvent]:
        """
        Changes of breakers that nobody has taken note of yet, in their order: they are the caller's to tell.

        At most a hundred: there may be more then.
        """

    async def oldest_snapshot(self) -> tuple[str, float] | None:
        """Who holds the oldest snapshot, and for how many seconds: while it is held, nothing that died is cleared."""

    async def fenced(self, key_id: uuid.UUID, fence: Fence) -> bool:
        """A newer executor of the run has been seen."""

    async def reset(self, group: str) -> bool:
        """Closes the group's breaker and takes its floors away. False: there is no such group."""

    async def groups(self) -> list[dict[str, Any]]:
        """Who occupies and who waits, for operators."""

    async def waits(self, debits: Sequence[str]) -> Mapping[str, Waiting]:
        """Why these debits wait, where they do."""

    async def notify(self, owners: Sequence[uuid.UUID]) -> None:
        """A hint to other processes, after the commit it tells of. Losing it costs them a rescan's delay."""

    def listen(self, hear: Callable[[str], None]) -> AbstractAsyncContextManager[asyncio.Event]:
        """Calls `hear` with every owner that is notified. The event is set when the connection is lost."""

    async def close(self) -> None: ...
