"""
What admission decides upon, and what it is asked: the state, its rows, the events and their answers.

Plain frozen values. `decision` says what an event makes of a state. Times and durations are whole microseconds on the
store's clock, which is the UNIX time; what is told to people is in milliseconds, as the SQL tells it.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from datetime import date
from decimal import Decimal
from typing import Final, Literal, TypeAlias

import msgspec
from msgspec.structs import replace

from admission.breaker import Breaker, BreakerLimits, BreakerState
from admission.clock import SECOND, microseconds, milliseconds
from admission.contract import SettledRow, TicketRow
from admission.lease import Class, Demand, Settlement
from admission.settings import AdmissionSettings, GroupSettings, KeyLimits

TicketState: TypeAlias = Literal["queued", "granted", "active", "quarantined"]
AttemptState: TypeAlias = Literal["charged", "zero", "unknown"]
#: Who asks for what is under a floor of the first kind may wait for its end; under the others nobody does.
FloorKind: TypeAlias = Literal["rate_limit", "long_rate_limit", "credential_rejected", "quota_exhausted"]


class UnknownGroup(LookupError):
    """No configuration has named this group."""


# ------------------------------------------------------------------ state


class Ticket(msgspec.Struct, frozen=True, kw_only=True):
    """A live ticket: it waits, or it occupies a slot."""

    ticket_id: uuid.UUID
    group: str
    number: int
    klass: Class
    model: str
    endpoint: str
    credential: str
    tokens: int
    #: Of the budgets of its key and its session, in USD, until the ledger has its cost or its bound. None where the key
    #: has no limits and there is no session, or no bound is known.
    reserved: Decimal | None
    session: str | None
    owner: uuid.UUID
    key_id: uuid.UUID
    debit_id: str
    attempt: int
    #: "granted": by another owner's event, not confirmed yet.
    state: TicketState
    waits_for_cooldown: bool
    execution_limit: int
    isolation: int
    queued_at: int
    queue_deadline: int
    caller_deadline: int | None
    #: Scope, run and number of its fence.
    fence: tuple[str, str, int] | None
    generation: int | None = None
    granted_at: int | None = None
    grant_expires_at: int | None = None
    hard_deadline: int | None = None
    quarantined_until: int | None = None

    @property
    def place(self) -> tuple[int, int]:
        return self.number, self.ticket_id.int


class Attempt(msgspec.Struct, frozen=True, kw_only=True):
    """How a ticket ended. Without a key it is a tombstone: the ticket was given up before it was known."""

    state: AttemptState
    key_id: uuid.UUID | None = None
    debit_id: str | None = None
    attempt: int | None = None
    group: str | None = None
    owner: uuid.UUID | None = None
    granted_at: int | None = None
    #: "unknown" was corrected, which happens once.
    corrected: bool = False


class Floor(msgspec.Struct, frozen=True, kw_only=True):
    """Nothing of a credential and model is granted before `until`."""

    since: int
    until: int
    #: Rate limits in a row that did not say for how long.
    strikes: int = 0


class Allowance(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of one model in its group, or (model "") of the whole group. Buckets hold a minute's worth."""

    concurrency: int | None = None
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    requests_left: float = 0.0
    tokens_left: float = 0.0
    filled_at: int = 0

    @property
    def rated(self) -> bool:
        return self.requests_per_minute is not None or self.tokens_per_minute is not None

    def at(self, now: int) -> Allowance:
        """Filled up to now."""
        if now <= self.filled_at or not self.rated:
            return self
        seconds = (now - self.filled_at) / SECOND
        return replace(
            self,
            requests_left=_filled(self.requests_left, self.requests_per_minute, seconds),
            tokens_left=_filled(self.tokens_left, self.tokens_per_minute, seconds),
            filled_at=now,
        )

    def with_back(self, requests: int, tokens: int) -> Allowance:
        """With these put back; negative ones are taken out. Call it on one that is filled."""
        left = self.requests_left + requests
        tokens_left = self.tokens_left + tokens
        return replace(
            self,
            requests_left=left if self.requests_per_minute is None else min(float(self.requests_per_minute), left),
            tokens_left=tokens_left
            if self.tokens_per_minute is None
            else min(float(self.tokens_per_minute), tokens_left),
        )

    def told(self, left: tuple[int | None, int | None], ago: int, since: Sequence[Ticket]) -> Allowance:
        """
        With no more than a provider said was left of its requests and tokens, so long ago: filled since then, and less
        what the tickets took that were granted since. Call it on one that is filled.
        """
        seconds = ago / SECOND
        requests, tokens = left
        took = sum(ticket.tokens for ticket in since)
        return replace(
            self,
            requests_left=_told(self.requests_left, self.requests_per_minute, requests, len(since), seconds),
            tokens_left=_told(self.tokens_left, self.tokens_per_minute, tokens, took, seconds),
        )

    def lacks(self, tokens: int) -> bool:
        return (self.requests_per_minute is not None and self.requests_left < 1) or (
            self.tokens_per_minute is not None and self.tokens_left < tokens
        )

    def fits_in(self, tokens: int) -> int:
        """How long until one request of so many tokens fits."""
        waits = [0.0]
        if self.requests_per_minute is not None:
            waits.append((1 - self.requests_left) / self.requests_per_minute)
        if self.tokens_per_minute is not None:
            waits.append((tokens - self.tokens_left) / self.tokens_per_minute)
        return round(max(waits) * 60 * SECOND)


class Pace(msgspec.Struct, frozen=True, kw_only=True):
    """How long calls of a group held their slots of late, in seconds together, and how many they were."""

    held: float = 0.0
    ended: float = 0.0


class Bucket(msgspec.Struct, frozen=True, kw_only=True):
    """What a key had left of a minute's worth."""

    requests_left: float = 0.0
    tokens_left: float = 0.0
    #: The key's tokens in the ledger when it was filled.
    tokens_seen: int = 0
    filled_at: int = 0


class LimitedKey(msgspec.Struct, frozen=True, kw_only=True):
    limits: KeyLimits
    bucket: Bucket


class Spent(msgspec.Struct, frozen=True, kw_only=True):
    """What the ledger has of a key and a day, or of a session."""

    usd: Decimal = Decimal(0)
    #: Bounds of attempts whose cost is unknown.
    unknown: Decimal = Decimal(0)
    tokens: int = 0


class SessionBudget(msgspec.Struct, frozen=True, kw_only=True):
    """What was said of one session, in USD."""

    #: By its key itself: it can only lower what the session may cost.
    own: Decimal | None = None
    #: By an administrator, in place of the key's limit.
    given: Decimal | None = None


class Charge(msgspec.Struct, frozen=True, kw_only=True):
    """What the record of a settlement tells. None: nothing."""

    usd: Decimal | None = None
    bound: Decimal | None = None
    tokens: int = 0


UNTOLD: Final = Charge()


class Group(msgspec.Struct, frozen=True, kw_only=True):
    settings: GroupSettings
    version: int
    limits: BreakerLimits
    breaker: Breaker = Breaker()
    next_number: int = 1
    #: Interactive grants made while batch waited, since the last batch grant.
    batch_credit: int = 0
    #: How often its breaker has opened in all, why the last time, and since when it is not closed.
    opened_total: int = 0
    opened_for: str | None = None
    open_since: int | None = None


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """A breaker has changed, and nobody has taken note of it yet."""

    group: str
    was: BreakerState
    became: BreakerState
    generation: int
    cause: str
    at: int
    until: int | None = None


class State(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that is decided upon. The mappings are never changed, only replaced."""

    zone: str = "UTC"
    #: How far the store's time is before its server's clock, by which days are told.
    ahead: int = 0
    unconfirmed_grant: int = 2 * SECOND
    unavailable: int = 300 * SECOND
    groups: Mapping[str, Group] = {}
    #: By group and model; "" is the whole group.
    allowances: Mapping[tuple[str, str], Allowance] = {}
    #: By group, credential, model ("" is all of them) and kind.
    floors: Mapping[tuple[str, str, str, FloorKind], Floor] = {}
    endpoints: Mapping[str, str] = {}
    #: Every setting of a group or an endpoint that was ever started with, in the order it was first seen.
    versions: Mapping[tuple[str, bytes], int] = {}
    tickets: Mapping[uuid.UUID, Ticket] = {}
    attempts: Mapping[uuid.UUID, Attempt] = {}
    #: The highest attempt that ended, by key and debit.
    ended: Mapping[tuple[uuid.UUID, str], int] = {}
    #: When each owner's heartbeat expires.
    owners: Mapping[uuid.UUID, int] = {}
    #: Nobody is dead before this: it may have been the store that was away.
    reclaim_not_before: int = 0
    #: The newest executor by key, scope and run.
    fences: Mapping[tuple[uuid.UUID, str, str], int] = {}
    #: Keys that have limits.
    limited: Mapping[uuid.UUID, LimitedKey] = {}
    #: By key and day of grant.
    spent: Mapping[tuple[uuid.UUID, date], Spent] = {}
    #: By key and name.
    sessions: Mapping[tuple[uuid.UUID, str], Spent] = {}
    session_budgets: Mapping[tuple[uuid.UUID, str], SessionBudget] = {}
    #: Whose cost is unknown: key, day, session and bound.
    unknown: Mapping[uuid.UUID, tuple[uuid.UUID, date, str | None, Decimal]] = {}
    #: Nothing is granted before this: the store may have forgotten grants.
    closed_until: int = 0
    #: By group; only of those whose calls ended while others waited.
    paces: Mapping[str, Pace] = {}
    #: In their order.
    changes: tuple[Change, ...] = ()


def initial(settings: AdmissionSettings) -> State:
    """A store that nobody has used. Configure it next."""
    return State(
        zone=settings.zone,
        unconfirmed_grant=microseconds(settings.unconfirmed_grant_s),
        unavailable=microseconds(settings.unavailable_s),
    )


# ------------------------------------------------------------------ events


class Element(msgspec.Struct, frozen=True):
    """A demand, and what remains of its times when it is sent, in milliseconds."""

    demand: Demand
    queue_ms: int
    caller_ms: int | None


def element(demand: Demand, waited_s: float = 0.0) -> Element:
    """`waited_s`: what the demand has waited in its process already."""
    caller = None if demand.caller_deadline_s is None else milliseconds(demand.caller_deadline_s - waited_s)
    return Element(demand, milliseconds(max(demand.queue_timeout_s - waited_s, 0)), caller)


class Acquire(msgspec.Struct, frozen=True):
    """Enqueue these, then grant what fits. Without elements it only lets the queue move on."""

    group: str
    owner: uuid.UUID
    elements: Sequence[Element] = ()


class Rescan(msgspec.Struct, frozen=True):
    """Confirm what others granted, and tell of the rest."""

    owner: uuid.UUID
    demands: Sequence[Demand]


class Outcome(msgspec.Struct, frozen=True):
    """A settlement, its Retry-After as it is now, and how long ago the provider said what is left."""

    settlement: Settlement
    retry_after_ms: int | None = None
    told_ms: int = 0
    charge: Charge = UNTOLD


class Settle(msgspec.Struct, frozen=True):
    elements: Sequence[Outcome]
    #: The outcomes move breakers, floors and allowances.
    judged: bool = False


class Decide(msgspec.Struct, frozen=True):
    """A probe has given its first content."""

    group: str
    ticket: uuid.UUID
    generation: int


class Abandon(msgspec.Struct, frozen=True):
    tickets: Sequence[uuid.UUID]
    #: Their acquire was never acknowledged: what commits late must not revive them.
    tombstone: bool = False


class Renew(msgspec.Struct, frozen=True):
    owner: uuid.UUID
    process: uuid.UUID
    ttl_ms: int
    first: bool = False


class Bury(msgspec.Struct, frozen=True):
    """These owners are proven dead."""

    owners: Sequence[uuid.UUID]


class Overdue(msgspec.Struct, frozen=True):
    """The sweep."""


class Take(msgspec.Struct, frozen=True):
    """Whoever asks takes note of the changes of breakers."""


class Configure(msgspec.Struct, frozen=True):
    groups: Mapping[str, GroupSettings]
    revision: int = 1


class Reset(msgspec.Struct, frozen=True):
    """An operator says that all is well again: the breaker closes, its floors are gone."""

    group: str


class LimitKey(msgspec.Struct, frozen=True):
    """The limits of a key from here on."""

    key_id: uuid.UUID
    limits: KeyLimits


class LimitSession(msgspec.Struct, frozen=True, kw_only=True):
    """What one session may cost from here on; None: what was said is taken back."""

    key_id: uuid.UUID
    session_id: str
    usd: Decimal | None
    #: Its key says so, which can only lower it.
    own: bool
    #: Another may raise it.
    raises: bool = False


class Close(msgspec.Struct, frozen=True):
    """The store is another than before: nothing is granted for so long."""

    for_ms: int


Event: TypeAlias = (
    Acquire | Rescan | Settle | Decide | Abandon | Renew | Bury | Overdue | Take | Configure | Reset | LimitKey
    | LimitSession | Close
)  # fmt: skip


class Answers(msgspec.Struct, frozen=True, kw_only=True):
    """What the event is answered with; each event fills its own part."""

    #: Acquire, Rescan.
    tickets: tuple[TicketRow, ...] = ()
    #: Settle, in the order of its elements.
    settled: tuple[SettledRow, ...] = ()
    #: Abandon, Bury and Overdue: to be advanced. Configure: those with other limits in force.
    groups: tuple[str, ...] = ()
    #: Take.
    changes: tuple[Change, ...] = ()
    #: Renew: how long the owner now lives; None where it had lapsed.
    lives_ms: int | None = None
    #: LimitSession, where it is refused: what the session may cost at most.
    most_usd: Decimal | None = None


def _filled(left: float, per_minute: int | None, seconds: float) -> float:
    # In the order in which SQL multiplies and divides, so that both come to the same number.
    return left if per_minute is None else min(float(per_minute), left + per_minute * seconds / 60)


def _told(level: float, per_minute: int | None, left: int | None, took: int, seconds: float) -> float:
    if left is None or per_minute is None:
        return level
    return min(level, max(_filled(left, per_minute, seconds) - took, 0.0))
