"""
What a job is, and every way it may go: the state machine, and the decisions on it, as values.

    queued ---claim---> running ---finish---> succeeded | failed | cancelled | expired
      |  ^                 |
      |  `---give back-----'        refused for now, failed for reasons that may pass, or its process died unsent
      `--cancel, expire---> cancelled | expired

A job ends exactly once. The store's statements guard each transition with the state it leaves and the claim that holds
the job; this table is what they must agree with, and what the tests compare them to. Without one place for it, a late
writer (a reaper, a process thought dead, a cancel) sooner or later overwrites an end that a caller has already seen.
"""

from __future__ import annotations

import enum
import random
import uuid
from collections.abc import Mapping
from datetime import datetime
from decimal import Decimal
from types import MappingProxyType
from typing import TypeAlias

import msgspec

from gateway.call import Options, Resend
from gateway.errors import AttemptedError, Code, GatewayError, ShuttingDown
from gateway.jobs.settings import JobsSettings
from gateway.outcome import Cost, Outcome
from metering.usage import NOTHING


class Status(enum.StrEnum):
    QUEUED = "queued"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"
    EXPIRED = "expired"


class Event(enum.StrEnum):
    CLAIM = "claim"
    GIVE_BACK = "give_back"
    SUCCEED = "succeed"
    FAIL = "fail"
    CANCEL = "cancel"
    EXPIRE = "expire"


#: Every transition there is. An event that is not listed for a state changes nothing in it.
TRANSITIONS: Mapping[tuple[Status, Event], Status] = MappingProxyType(
    {
        (Status.QUEUED, Event.CLAIM): Status.RUNNING,
        (Status.QUEUED, Event.CANCEL): Status.CANCELLED,
        (Status.QUEUED, Event.EXPIRE): Status.EXPIRED,
        (Status.RUNNING, Event.GIVE_BACK): Status.QUEUED,
        (Status.RUNNING, Event.SUCCEED): Status.SUCCEEDED,
        (Status.RUNNING, Event.FAIL): Status.FAILED,
        (Status.RUNNING, Event.CANCEL): Status.CANCELLED,
        (Status.RUNNING, Event.EXPIRE): Status.EXPIRED,
    }
)

TERMINAL = frozenset(Status) - {state for state, _ in TRANSITIONS}


class Wait(enum.StrEnum):
    """
    Why a job that is not in anybody's hands waits. docs/operations.md has the table, with the words that admission has
    for one that a process holds.
    """

    #: It is due: every runner is busy, with what came before it.
    RUNNER = "runner"
    QUEUE_FULL = "queue_full"
    QUEUE_TIMEOUT = "queue_timeout"
    #: Its key has as much at work as it may, or has used up its minute.
    KEY_LIMIT = "key_limit"
    #: What is left of its key's budget is kept for attempts at work.
    BUDGET_RESERVED = "budget_reserved"
    COOLDOWN = "cooldown"
    RATE_LIMITED = "rate_limited"
    CREDENTIAL_REJECTED = "credential_rejected"
    QUOTA_EXHAUSTED = "quota_exhausted"
    PROVIDER_UNAVAILABLE = "provider_unavailable"
    PROVIDER_NOT_READY = "provider_not_ready"
    STORE_UNAVAILABLE = "store_unavailable"
    SHUTTING_DOWN = "shutting_down"
    #: An earlier executor of this very job is not over yet.
    DUPLICATE_DEBIT = "duplicate_debit"
    #: It failed for a reason that may pass.
    RETRY = "retry"


class Claimed(msgspec.Struct, frozen=True, kw_only=True):
    """A job in the hands of this process. `claims` grows with each claim, so it names this one for ever."""

    job_id: uuid.UUID
    key_id: uuid.UUID
    url: str
    model: str
    body: str
    options: Options
    claims: int
    returned: int
    runs: int
    attempts_allowed: int
    #: Attempts made under earlier claims.
    attempts: int
    #: Of earlier runs.
    outcome: Outcome | None
    remaining_s: float
    #: It was asked for as a response, and not as a job.
    background: bool = False


class Held(msgspec.Struct, frozen=True, kw_only=True):
    """A running job as recovery finds it after its process died."""

    job_id: uuid.UUID
    key_id: uuid.UUID
    url: str
    options: Options
    claims: int
    returned: int
    runs: int
    attempts_allowed: int
    attempts: int
    intent_attempt: int | None
    cancel_requested: bool
    outcome: Outcome | None
    result: str | None
    result_attempt: int | None


class JobView(msgspec.Struct, frozen=True, kw_only=True):
    """A job as its caller may see it. Times are those of the database's clock."""

    job_id: uuid.UUID
    submission_id: uuid.UUID
    line: int
    custom_id: str | None
    url: str | None
    model: str | None
    session_id: str | None
    options: Options
    status: Status
    created_at: datetime
    not_before: datetime
    deadline_at: datetime
    claimed_at: datetime | None
    attempts: int
    wait_reason: str | None
    #: The capacity groups it waits for, the one that its reason is about first.
    wait_groups: tuple[str, ...]
    outcome: Outcome | None
    error_code: str | None
    error_message: str | None
    error_param: str | None
    cancel_requested: bool
    ended_at: datetime | None
    expires_at: datetime | None
    result: str | None
    result_status: int | None


class ResponseView(msgspec.Struct, frozen=True, kw_only=True):
    """A job that was asked for as a response in the background, as its caller may see it."""

    job_id: uuid.UUID
    status: Status
    created_at: datetime
    model: str
    #: What it repeats of its request: JSON text.
    head: str
    outcome: Outcome | None
    error_code: str | None
    error_message: str | None
    error_param: str | None
    ended_at: datetime | None
    result: str | None


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """An ended job with its answer."""

    job_id: uuid.UUID
    submission_id: uuid.UUID
    line: int
    custom_id: str | None
    status: Status
    outcome: Outcome | None
    error_code: str | None
    error_message: str | None
    error_param: str | None
    result: str | None
    result_status: int | None


# ------------------------------------------------------------------ decisions


class End(msgspec.Struct, frozen=True, kw_only=True):
    """The job is over."""

    status: Status
    code: str | None = None
    message: str | None = None
    param: str | None = None


class GiveBack(msgspec.Struct, frozen=True, kw_only=True):
    """The job goes back to the queue."""

    delay_s: float
    #: What it waits out.
    reason: Wait | None
    #: The run counts among those the job may have.
    counts: bool
    #: Seconds in which this process takes no other job of the same model, or with `of_key` of the same key: it would
    #: fare no better.
    hold_s: float = 0.0
    of_key: bool = False
    #: The capacity groups that it was refused by, or failed in.
    groups: tuple[str, ...] = ()
    #: Given back by its own process. A claim that died with its process counts towards poison.
    in_order: bool = True


class Complete(msgspec.Struct, frozen=True, kw_only=True):
    """The answer is stored: settle it, then end the job."""


Decision: TypeAlias = End | GiveBack

SUCCEEDED = End(status=Status.SUCCEEDED)
CANCELLED = End(status=Status.CANCELLED, code=Code.CANCELLED.value, message="the caller took the job back")
EXPIRED = End(status=Status.EXPIRED, code=Code.EXPIRED.value, message="the job's deadline passed")
UNCERTAIN = End(
    status=Status.FAILED,
    code=Code.UNCERTAIN.value,
    message="the request was sent and its end is not known; it is not sent again unless `resend_uncertain` allows it",
)
POISON = End(
    status=Status.FAILED, code=Code.POISON.value, message="every process that ran the job died; it is not tried again"
)

#: Refusals that say nothing about the job: another time it may run.
NOT_NOW = frozenset(
    {
        Code.QUEUE_FULL,
        Code.QUEUE_TIMEOUT,
        Code.KEY_LIMIT,
        Code.BUDGET_RESERVED,
        Code.COOLDOWN,
        Code.CONTROL_STORE_UNAVAILABLE,
        Code.CONTENT_STORE_UNAVAILABLE,
        Code.PROVIDER_NOT_READY,
        Code.PROVIDER_UNAVAILABLE,
        Code.SHUTTING_DOWN,
    }
)

#: The HTTP statuses from here on do not blame the request.
_SERVER_FAULT = 500

#: Classes of failed attempts that may pass.
_PASSING = frozenset({"transient", "network"})


#: The limit of a key that is for each of its sessions apart.
_OF_A_SESSION = "budget_session_usd"

#: What no group has to do with.
_OF_NO_GROUP = frozenset({Wait.STORE_UNAVAILABLE, Wait.KEY_LIMIT, Wait.BUDGET_RESERVED})


def after_error(error: GatewayError, job: Claimed, *, sent: bool, settings: JobsSettings) -> Decision:
    """
    What a run that ended in an error means for its job.

    `sent`: an attempt was announced under this claim. Where an error of ours does not say how it ended, nobody knows.
    """
    outcome = error.outcome if isinstance(error, AttemptedError) else None
    # What is wrong with the request or its key is found with nothing in flight.
    unknown = _is_uncertain(outcome) if outcome is not None else sent and error.status.http >= _SERVER_FAULT
    if outcome is not None:
        sent = any(attempt.status != "not_dispatched" for attempt in outcome.attempts)
    reason = waits_for(error)
    groups = error.groups if isinstance(error, AttemptedError) and reason not in _OF_NO_GROUP else ()
    if unknown and error.code is not Code.CANCELLED and not may_resend(job.options):
        return UNCERTAIN
    match error.code:
        case Code.CANCELLED:
            return CANCELLED
        case Code.DEADLINE_EXCEEDED:
            return EXPIRED
        case Code.DUPLICATE_DEBIT if not sent and job.options.debit_id == str(job.job_id):
            # Nobody else uses the id: an earlier executor of this very job is not over yet.
            return GiveBack(delay_s=_refused_delay(error, settings), reason=reason, counts=False)
        case Code.QUEUE_FULL if not sent:
            # It keeps its place: what is full for one is full for those behind it.
            return GiveBack(delay_s=0.0, reason=reason, counts=False, hold_s=settings.full_hold_s, groups=groups)
        case Code.BUDGET_RESERVED if not sent and isinstance(error, AttemptedError) and error.limit == _OF_A_SESSION:
            # Other sessions of its key have room, and its own has when what it has at work has ended.
            return GiveBack(delay_s=_refused_delay(error, settings), reason=reason, counts=False)
        case Code.KEY_LIMIT | Code.BUDGET_RESERVED if not sent:
            # The others of its key have no room either, and those of other keys have.
            hold_s = max(settings.full_hold_s, error.retry_after_s or 0.0)
            return GiveBack(delay_s=0.0, reason=reason, counts=False, hold_s=hold_s, of_key=True)
        case code if code in NOT_NOW and not sent:
            # It has waited in the queue and does so again: what it was told is a guess, the queue knows better.
            told = code is not Code.QUEUE_TIMEOUT
            delay_s = _refused_delay(error, settings) if told else _spread(settings.refused_delay_s)
            return GiveBack(
                delay_s=delay_s,
                reason=reason,
                counts=False,
                hold_s=min(delay_s, settings.refused_hold_s),
                groups=groups,
            )
        case code if unknown or code in NOT_NOW or code is Code.INTERNAL or _may_pass(code, outcome):
            if job.runs + 1 >= job.attempts_allowed:
                return failed(error)
            return GiveBack(
                delay_s=_retry_delay(error, job, settings),
                # That it waits to be run again is what there is to know; why, its outcome says.
                reason=Wait.SHUTTING_DOWN if code is Code.SHUTTING_DOWN else Wait.RETRY,
                counts=True,
                groups=groups,
            )
        case _:
            return failed(error)


def after_stop(job: Claimed, known: Outcome | None, *, sent: bool) -> Decision:
    """This process may not, or cannot any longer, run the job. `known`: what became of its attempts."""
    if not sent:
        return GiveBack(delay_s=0.0, reason=Wait.SHUTTING_DOWN, counts=False)
    if (known is None or _is_uncertain(known) or _was_spent(known)) and not may_resend(job.options):
        return UNCERTAIN
    if job.runs + 1 >= job.attempts_allowed:
        return failed(ShuttingDown("the process that ran the job stopped, and it may not be run again"))
    return GiveBack(delay_s=0.0, reason=Wait.SHUTTING_DOWN, counts=True)


def after_crash(job: Held, settings: JobsSettings) -> Decision | Complete:
    """What the death of its process means for a job that was running there."""
    if job.result is not None:
        return Complete()
    sent = job.intent_attempt is not None
    if job.cancel_requested and not sent:
        return CANCELLED
    if sent and not (may_resend(job.options) and not job.cancel_requested):
        return UNCERTAIN
    if job.claims - job.returned >= settings.poison_claims:
        return POISON
    if sent and job.runs + 1 >= job.attempts_allowed:
        return UNCERTAIN
    return GiveBack(delay_s=0.0, reason=None, counts=sent, in_order=False)


_WAITS: Mapping[Code, Wait] = MappingProxyType(
    {
        Code.QUEUE_FULL: Wait.QUEUE_FULL,
        Code.QUEUE_TIMEOUT: Wait.QUEUE_TIMEOUT,
        Code.KEY_LIMIT: Wait.KEY_LIMIT,
        Code.BUDGET_RESERVED: Wait.BUDGET_RESERVED,
        Code.COOLDOWN: Wait.COOLDOWN,
        Code.CONTROL_STORE_UNAVAILABLE: Wait.STORE_UNAVAILABLE,
        Code.CONTENT_STORE_UNAVAILABLE: Wait.STORE_UNAVAILABLE,
        Code.PROVIDER_NOT_READY: Wait.PROVIDER_NOT_READY,
        Code.PROVIDER_UNAVAILABLE: Wait.PROVIDER_UNAVAILABLE,
        Code.SHUTTING_DOWN: Wait.SHUTTING_DOWN,
        Code.DUPLICATE_DEBIT: Wait.DUPLICATE_DEBIT,
    }
)


def waits_for(error: GatewayError) -> Wait:
    """What a job waits out that was refused with this, or failed with it."""
    if isinstance(error, AttemptedError) and error.cause is not None:
        return Wait(error.cause)
    return _WAITS.get(error.code, Wait.RETRY)


def wait_of(text: str | None) -> Wait:
    """As it is stored. Earlier versions stored the code of what was waited out."""
    if text is None:
        return Wait.RUNNER
    if text in frozenset(Wait):
        return Wait(text)
    return _WAITS.get(Code(text), Wait.RETRY) if text in frozenset(Code) else Wait.RETRY


def may_resend(options: Options) -> bool:
    return options.resend_uncertain is Resend.BEFORE_FIRST_BYTE


def failed(error: GatewayError) -> End:
    return End(status=Status.FAILED, code=error.code.value, message=error.message, param=error.param)


def _is_uncertain(outcome: Outcome) -> bool:
    return outcome.ended == "uncertain" or bool(outcome.attempts and outcome.attempts[-1].status == "unknown")


def _was_spent(outcome: Outcome) -> bool:
    """The last attempt was read to its end for its charge, after its run had been stopped: its answer is gone."""
    return bool(outcome.attempts and outcome.attempts[-1].cost.state == "charged")


def _may_pass(code: Code, outcome: Outcome | None) -> bool:
    """Whether every route failed, and at least one for a reason that may pass."""
    return code is Code.ALL_ROUTES_FAILED and (
        outcome is None or any(attempt.error_class in _PASSING for attempt in outcome.attempts)
    )


def _refused_delay(error: GatewayError, settings: JobsSettings) -> float:
    return _spread(max(settings.refused_delay_s, error.retry_after_s or 0.0))


def _retry_delay(error: GatewayError, job: Claimed, settings: JobsSettings) -> float:
    grown: float = min(settings.retry_longest_s, settings.retry_delay_s * 2 ** min(job.runs, 10))
    return _spread(max(grown, error.retry_after_s or 0.0))


def _spread(delay_s: float) -> float:
    """Never less than asked; jobs refused together do not come back together."""
    return delay_s * (1.0 + random.random() * 0.25)  # noqa: S311  not for secrecy


# ------------------------------------------------------------------ what several runs cost


def joined(earlier: Outcome | None, later: Outcome | None) -> Outcome | None:
    """The outcome of a job that ran more than once: the later one, with the attempts, usage and cost of both."""
    if earlier is None or later is None:
        return later or earlier
    seen = {attempt.number for attempt in later.attempts}
    before = tuple(attempt for attempt in earlier.attempts if attempt.number not in seen)
    if not before:
        return later
    return msgspec.structs.replace(
        later,
        attempts=before + later.attempts,
        usage=earlier.usage.plus(later.usage),
        cost=_sum_of_costs([attempt.cost for attempt in before + later.attempts]),
        warnings=tuple(dict.fromkeys(earlier.warnings + later.warnings)),
    )


def as_settled(written: Outcome, now: Outcome) -> Outcome:
    """
    What was written when the job ended, with what the ledger says `now` of the attempts whose cost was not known then:
    an answer that was read on after its caller had left, or what a journal held.
    """
    known = {attempt.number: attempt for attempt in now.attempts if attempt.cost.state != "unknown"}
    attempts = tuple(
        msgspec.structs.replace(known[attempt.number], message=attempt.message)
        if attempt.cost.state == "unknown" and attempt.number in known
        else attempt
        for attempt in written.attempts
    )
    if attempts == written.attempts:
        return written
    its_end = attempts[-1].number in known and attempts[-1].number == now.attempts[-1].number
    return msgspec.structs.replace(
        written,
        attempts=attempts,
        cost=_sum_of_costs([attempt.cost for attempt in attempts]),
        ended=now.ended if its_end and written.ended == "uncertain" else written.ended,
        settlement=now.settlement if its_end else written.settlement,
        usage=now.usage if its_end and written.usage == NOTHING else written.usage,
        served_model=written.served_model or (now.served_model if its_end else None),
        service_tier=written.service_tier or (now.service_tier if its_end else None),
    )


def _sum_of_costs(costs: list[Cost]) -> Cost:
    """Unknown if one of them is: a sum that leaves one out would pass for the whole."""
    version = next((cost.price_version for cost in reversed(costs) if cost.price_version), None)
    unknown = [cost for cost in costs if cost.state == "unknown"]
    if unknown:
        bounds = [cost.upper_bound_usd if cost.state == "unknown" else cost.usd for cost in costs]
        known = [bound for bound in bounds if bound is not None]
        bound = sum(known, Decimal(0)) if len(known) == len(bounds) else None
        return Cost(state="unknown", upper_bound_usd=bound, price_version=version, reason=unknown[-1].reason)
    usd = sum((cost.usd for cost in costs if cost.usd is not None), Decimal(0))
    if any(cost.state == "charged" for cost in costs):
        return Cost(state="charged", usd=usd, price_version=version)
    return costs[-1]
