"""
Sessions: what the requests under one name of one key have used together, and what they may cost.

A session begins with the first request that names it, and belongs to the key of that request: another key's session of
the same name is another one. Admission holds its budget; here it is read and set.
"""

from __future__ import annotations

import importlib.resources
import uuid
from collections.abc import Sequence
from datetime import datetime
from decimal import Decimal
from typing import Final, Literal

import msgspec

from gateway.database import Pool, store_errors

#: Characters of a session id.
MAX_SESSION_ID: Final = 256

_SQL: Final = importlib.resources.files("gateway.sessions").joinpath("sql")
_GET: Final = _SQL.joinpath("get.sql").read_text()
_KEYS: Final = _SQL.joinpath("keys.sql").read_text()
_BUDGET: Final = _SQL.joinpath("budget.sql").read_text()
_KNOWN: Final = _SQL.joinpath("known.sql").read_text()


class LiveAttempt(msgspec.Struct, frozen=True, kw_only=True):
    """An attempt that waits, is at work, or keeps its slot until its end is proven."""

    ticket_id: uuid.UUID
    debit_id: str
    attempt: int
    state: Literal["queued", "granted", "active", "quarantined"]
    group_id: str
    #: The provider's name for it.
    model: str
    #: None: its cost is in the sums by now, or no bound is known.
    reserved_usd: Decimal | None
    queued_at: datetime
    granted_at: datetime | None


class Session(msgspec.Struct, frozen=True, kw_only=True):
    """One session at one moment. Amounts are USD."""

    key_id: uuid.UUID
    session_id: str
    charged_usd: Decimal
    attempts: int
    unknown_attempts: int
    unknown_upper_bound_usd: Decimal
    unbounded_attempts: int
    input_tokens: int
    output_tokens: int
    live_attempts: int
    reserved_usd: Decimal
    unbounded_reserved: int
    #: As far back as the ledger's log reaches.
    first_attempt_at: datetime | None
    last_attempt_at: datetime | None
    #: What its key has said, what an administrator has, and what the key has for each of its sessions.
    own_usd: Decimal | None
    set_usd: Decimal | None
    key_usd: Decimal | None
    #: The first hundred.
    live: tuple[LiveAttempt, ...]

    @property
    def budget_usd(self) -> Decimal | None:
        """What it may cost; None: as much as its key."""
        given = self.key_usd if self.set_usd is None else self.set_usd
        bounds = [usd for usd in (self.own_usd, given) if usd is not None]
        return min(bounds, default=None)

    @property
    def left_usd(self) -> Decimal | None:
        """Less than nothing where a charge has passed its bound, or the budget was lowered."""
        budget = self.budget_usd
        return None if budget is None else budget - self.charged_usd - self.unknown_upper_bound_usd - self.reserved_usd

    @property
    def known(self) -> bool:
        """Anything is known of it."""
        return bool(self.attempts or self.live_attempts) or (self.own_usd, self.set_usd) != (None, None)


class Sessions:
    """The statements. All raise `gateway.database.StoreUnavailable`."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool

    async def get(self, key_id: uuid.UUID, session_id: str) -> Session:
        with store_errors():
            row = await self._pool.fetchrow(_GET, key_id, session_id)
        assert row is not None
        found = {**row, "live": msgspec.json.decode(row["live"], type=tuple[LiveAttempt, ...])}
        return Session(key_id=key_id, session_id=session_id, **found)

    async def keys(self, session_id: str) -> Sequence[uuid.UUID]:
        """Whose sessions of this name anything is known of."""
        with store_errors():
            return [row["key_id"] for row in await self._pool.fetch(_KEYS, session_id)]

    async def known_key(self, key_id: uuid.UUID) -> bool:
        with store_errors():
            return bool(await self._pool.fetchval(_KNOWN, key_id))

    async def budget(
        self, key_id: uuid.UUID, session_id: str, usd: Decimal | None, *, own: bool, raises: bool
    ) -> Decimal | None:
        """
        What the session may cost from here on, as its key says (`own`) or an administrator; None takes it back.

        Answers None where it is done, and what the session may cost at most where this would raise it and may not:
        its key never may, another where it `raises`.
        """
        with store_errors():
            most: Decimal | None = await self._pool.fetchval(_BUDGET, key_id, session_id, usd, own, raises)
        return most
