"""
The vocabulary of admission: what is asked for, what is given, how it ends.

Admission speaks of slots, numbers and outcomes. It answers for one ticket: it never retries and never chooses a route.
"""

from __future__ import annotations

import enum
import uuid
from collections.abc import Callable
from datetime import date, datetime
from decimal import Decimal
from typing import TypeAlias

import msgspec


class Class(enum.IntEnum):
    INTERACTIVE = 0
    BATCH = 1


class Fence(msgspec.Struct, frozen=True, kw_only=True):
    """Which executor of a run asks. A lower number than the newest seen is refused."""

    scope_id: str
    run_id: str
    number: int


class Demand(msgspec.Struct, frozen=True, kw_only=True):
    """One request to occupy one slot. All times are in seconds from now."""

    ticket_id: uuid.UUID
    #: The group as this process's configuration has it. Which group an endpoint belongs to is the store's to say.
    group: str
    #: Empty: the group is the endpoint.
    endpoint: str = ""
    #: The upstream model, for limits inside the group.
    model: str
    #: Whose account at the provider it uses: a name, never the secret.
    credential: str = ""
    #: The most tokens it can use, for limits of tokens per minute. Corrected by what was used at the settlement.
    tokens: int = 0
    #: Where its key has limits, the most it can cost in USD, 0 where no bound is known: it is kept of the key's budgets
    #: until the ledger has the cost. None: the key has no limits.
    reserved_usd: Decimal | None = None
    #: A session of its key, and the most that the attempt can cost, which is kept of the session's budget where it has
    #: one; None: no bound is known.
    session_id: str | None = None
    most_usd: Decimal | None = None
    #: A retry keeps the place in the order that its first ticket had: that lease's `number`.
    place: int | None = None
    fence: Fence | None = None
    klass: Class
    #: The debit this is an attempt of, and which attempt: 1 for the first, else one more than the last that ended.
    key_id: uuid.UUID
    debit_id: str
    attempt: int
    #: How long the attempt may run once dispatched: fixes the hard deadline.
    execution_limit_s: float
    #: How long after the hard deadline an unproven attempt keeps its slot.
    isolation_s: float
    #: How long the ticket may wait in the queue.
    queue_timeout_s: float
    #: What remains of the caller's own deadline; None where it set none.
    caller_deadline_s: float | None = None
    #: Queue through a cooldown of the breaker, or be refused and go elsewhere.
    waits_for_cooldown: bool = False
    #: JSON for the ledger: what is to be written of this attempt should nobody live to tell its end.
    intent: bytes = b"{}"


class Waiting(msgspec.Struct, frozen=True, kw_only=True):
    """Told to whoever waits: when it begins to wait, and when something about it changes."""

    group: str
    #: 1 is next. Exact to 100.
    position: int
    #: "capacity", "model_capacity", "rate", "cooldown", "quarantine", "stopped" or "store", or why a floor is there:
    #: "rate_limited", "credential_rejected" or "quota_exhausted".
    reason: str
    #: By how long calls of the group held their slots of late, or until its rate allows it. None: nobody knows.
    expected_wait_s: float | None = None
    #: When a cooldown or a floor ends, or the first slot comes out of quarantine.
    until_s: float | None = None


Observer: TypeAlias = Callable[[Waiting], None]


class Lease(msgspec.Struct, frozen=True, kw_only=True):
    """A granted ticket. It is used up by exactly one settlement."""

    ticket_id: uuid.UUID
    #: The group it has a slot of.
    group: str
    #: Its place in the group's order.
    number: int = 0
    #: The breaker's generation at grant: a result acts on the breaker only while this is current.
    generation: int
    #: This is the one probe of a half-open breaker.
    probe: bool
    #: Its outcome moves the breaker or an allowance, so its settlement takes the group's lock.
    judged: bool = False
    #: On this process's monotonic clock (`time.monotonic`): past it the attempt is over, whatever happens.
    hard_deadline: float
    granted_at: datetime
    #: The day a charge of this attempt belongs to, in the declared zone.
    day: date
    queued_s: float


class RefusalReason(enum.StrEnum):
    #: The group's queue is at its bound.
    QUEUE_FULL = "queue_full"
    #: The queue's own time limit passed.
    QUEUE_TIMEOUT = "queue_timeout"
    #: The caller's deadline passed, or would before the slot could come free.
    DEADLINE_EXCEEDED = "deadline_exceeded"
    #: The group's breaker is open, or another request is its probe, or the provider limits the rate.
    COOLDOWN = "cooldown"
    #: The control store does not answer: nothing is dispatched.
    STORE_UNAVAILABLE = "control_store_unavailable"
    #: The control store answers and was replaced: what it may have forgotten must end before anything is dispatched.
    STORE_CLOSED = "control_store_closed"
    #: The debit has a live ticket, or that attempt of it has already been made.
    DUPLICATE_DEBIT = "duplicate_debit"
    #: A newer executor of the same run has been seen.
    FENCED = "owner_fence"
    #: The credential is rejected, or its quota exhausted, or the provider asks for a longer pause than anybody should
    #: wait: the route is left out until it is looked at again.
    UNAVAILABLE = "provider_unavailable"
    #: Its key has as much at work as it may, or has used up its requests or tokens of a minute.
    KEY_LIMIT = "key_limit"
    #: What its key may spend in a period, or in a session, is spent, or too much of it for this request.
    BUDGET_EXCEEDED = "budget_exceeded"
    #: As before, but for what attempts at work may cost: when they have ended, more may be left.
    BUDGET_RESERVED = "budget_reserved"
    #: Its session has a budget, and nobody knows the most that it can cost.
    NOT_BOUNDED = "cost_not_bounded"
    #: It needs more tokens than the group, the model or its key may use in a minute.
    TOO_LARGE = "too_large"
    #: This process had lapsed, or lapsed while the ticket waited: the ticket is gone, and another may be asked for.
    LAPSED = "lapsed"


class KeyLimit(msgspec.Struct, frozen=True, kw_only=True):
    """The limit of a key that a request would pass, and what has been used of it."""

    #: A field of `settings.KeyLimits`; that of sessions also where the budget is of one session alone.
    name: str
    most: Decimal
    #: Of a budget, in USD: what was charged, the bounds of attempts whose cost is unknown, those of attempts at work,
    #: and of this one.
    spent: Decimal = Decimal(0)
    unknown: Decimal = Decimal(0)
    reserved: Decimal = Decimal(0)
    wanted: Decimal = Decimal(0)


class Refusal(msgspec.Struct, frozen=True, kw_only=True):
    """No slot. Nothing was dispatched."""

    reason: RefusalReason
    group: str
    #: When asking again may help.
    retry_after_s: float | None = None
    #: With COOLDOWN and UNAVAILABLE, in the words of `Waiting.reason`; None where it is over already.
    cause: str | None = None
    #: When that ends, on this process's monotonic clock (`time.monotonic`); None while a probe is out.
    ends_at: float | None = None
    #: With KEY_LIMIT, BUDGET_EXCEEDED, BUDGET_RESERVED and NOT_BOUNDED, and with TOO_LARGE where it is the key's tokens
    #: per minute.
    key_limit: KeyLimit | None = None
    position: int | None = None
    #: With TOO_LARGE: how many it was said to need.
    tokens: int | None = None
    #: The ticket may have been granted before it was given up: its attempt number is used up.
    used: bool = False


class Ending(enum.StrEnum):
    """What is known of the remote end of an attempt."""

    #: A protocol terminal, a complete error response, or an in-stream error event: the slot is free.
    CONFIRMED = "confirmed"
    #: No byte of the request was written: the slot is free.
    NOT_DISPATCHED = "not_dispatched"
    #: Anything else: the slot stays occupied, in quarantine, until it is safe.
    UNCERTAIN = "uncertain"


class Verdict(enum.StrEnum):
    """What an outcome says about the group, for its breaker."""

    #: A complete answer of any kind but a transient failure; a refusal of the request's own fault is one, too.
    ANSWERED = "answered"
    #: An attributable transient failure.
    TRANSIENT = "transient"
    #: A rate limit: its credential and model wait, for at least `retry_after_s`.
    RATE_LIMITED = "rate_limited"
    #: A good answer, later than the provider's first-byte objective.
    SLOW = "slow"
    #: A rate limit for longer than anybody should wait: its credential and model are left out for a while. Stores make
    #: it out of a rate limit; nobody else says it.
    LIMITED_FOR_LONG = "limited_for_long"
    #: A rejected credential, or an exhausted quota of its account: the credential is left out for a while.
    CREDENTIAL_REJECTED = "credential_rejected"
    QUOTA_EXHAUSTED = "quota_exhausted"
    #: Says nothing: client cancel, store loss.
    NONE = "none"


class Settlement(msgspec.Struct, frozen=True, kw_only=True):
    """The single final accounting of an attempt."""

    lease: Lease
    ending: Ending
    verdict: Verdict
    #: With a rate limit, a rejected credential or an exhausted quota: seconds the provider asks to wait, from
    #: `received_at` (`time.monotonic`).
    retry_after_s: float | None = None
    received_at: float | None = None
    #: The rate limit, the refused credential, or what is said to be left is the account's, not the model's.
    account_wide: bool = False
    #: What the attempt really used; None where it was not told.
    used_tokens: int | None = None
    #: What the provider said was left of its requests and tokens per minute, and when, on the event loop's clock. It
    #: only ever lowers an allowance: the model's, and with `account_wide` the group's too.
    requests_left: int | None = None
    tokens_left: int | None = None
    told_at: float | None = None
    #: For UNCERTAIN: seconds after which a closed connection is known to have stopped the work, from its closing;
    #: None where it is not known, and the slot then waits for hard deadline plus isolation.
    cancel_confirms_after_s: float | None = None
    #: "charged", "zero" or "unknown".
    state: str
    #: JSON for the ledger. Admission does not look inside.
    record: bytes


class Settled(msgspec.Struct, frozen=True, kw_only=True):
    """What the store made of a settlement."""

    #: False where the attempt had been settled before: nothing was written again.
    applied: bool
    #: The ledger's answer to the record, as JSON: the counters after it.
    counters: str | None = None
