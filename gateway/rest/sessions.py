"""
`/v1/sessions/{session_id}`: what a session has used, and what it may cost.

A key reads its own sessions, and can only lower what they may cost: what a key itself could raise would bound nobody.
"""

from __future__ import annotations

import uuid
from datetime import datetime
from decimal import Decimal
from typing import Annotated, Literal

import msgspec
import structlog
from aiohttp import web
from typing_extensions import TypedDict

from gateway.call import Scope
from gateway.database import StoreUnavailable
from gateway.errors import Code, GatewayError, InvalidRequest, NotFound, PermissionDenied
from gateway.keys.rights import is_money
from gateway.rest.endpoint import Access, Endpoint, Exchange
from gateway.rest.ids import as_uuid
from gateway.rest.operation import OF_CONTROL, Content, Operation
from gateway.sessions import MAX_SESSION_ID, LiveAttempt, Session, Sessions
from metering.cost import LIMIT_USD, decimal_string

log = structlog.get_logger("gateway")

#: Whoever spends may say how much.
_SPENDING = frozenset({Scope.CHAT, Scope.JOBS, Scope.ADMIN})


class _Query(msgspec.Struct, frozen=True, kw_only=True):
    #: Another key's session. For administrators.
    key_id: uuid.UUID | None = None


class SessionBudget(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of `PUT /v1/sessions/{session_id}`."""

    #: A decimal number, best as a string. Null: what was said before is taken back.
    budget_usd: Annotated[Decimal, msgspec.Meta(extra_json_schema={"type": ["string", "number"]})] | None


class Budgets(TypedDict):
    """Where the budget comes from: the least of `own_usd` and, where there is one, `set_usd`, else `key_usd`."""

    #: What the key has said of this session: it can only lower it.
    own_usd: str | None
    #: What an administrator has set for this session, in place of the key's limit.
    set_usd: str | None
    #: `budget_session_usd` of the key.
    key_usd: str | None


class AttemptAtWork(TypedDict):
    """An attempt that waits, is at work, or keeps its slot until its end is proven."""

    ticket_id: uuid.UUID
    debit_id: str
    attempt: int
    state: Literal["queued", "granted", "active", "quarantined"]
    group: str
    model: str
    reserved_usd: str | None
    queued_at: datetime
    granted_at: datetime | None


class SessionInUse(TypedDict):
    """A session of a key, at one moment."""

    id: str
    object: Literal["session"]
    key_id: uuid.UUID
    #: What it may cost; null: as much as its key.
    budget_usd: str | None
    #: What is left of that. Below zero where a charge has passed its bound or the budget was lowered.
    left_usd: str | None
    budgets: Budgets
    charged_usd: str
    unknown_attempts: int
    unknown_upper_bound_usd: str
    unbounded_attempts: int
    attempts: int
    input_tokens: int
    output_tokens: int
    #: What attempts at work can still cost, and how many of them have no bound.
    reserved_attempts: int
    reserved_usd: str
    unbounded_reserved: int
    first_attempt_at: datetime | None
    last_attempt_at: datetime | None
    #: The first hundred.
    live: list[AttemptAtWork]


def routes(*, sessions: Sessions) -> list[Endpoint]:
    """The endpoints of this module."""

    async def get(exchange: Exchange) -> web.StreamResponse:
        name = _name(exchange)
        try:
            session = await sessions.get(await _whose(exchange, name, sessions), name)
        except StoreUnavailable as error:
            raise _unavailable() from error
        if not session.known:
            raise NotFound("nothing is known of a session of this name")
        return exchange.answer(_shown(session))

    async def put(exchange: Exchange) -> web.StreamResponse:
        name, caller = _name(exchange), exchange.caller
        key_id = _key_id(exchange)
        if not caller.scopes & _SPENDING:
            raise PermissionDenied("a budget is set by a key that may spend, or by an administrator")
        asked = await exchange.json(SessionBudget)
        usd = asked.budget_usd
        if usd is not None and not is_money(usd):
            raise InvalidRequest(
                f"must be from 0 to less than {LIMIT_USD:,} USD, with at most 12 decimals", param="budget_usd"
            )
        own = key_id is None
        whose = caller.key_id if key_id is None else key_id
        try:
            if not own and not await sessions.known_key(whose):
                raise NotFound("no key has this id", param="key_id")
            most = await sessions.budget(whose, name, usd, own=own, raises=not caller.budgets_sessions)
            session = await sessions.get(whose, name)
        except StoreUnavailable as error:
            raise _unavailable() from error
        if most is not None:
            raise PermissionDenied(
                f"a session of this key may cost {decimal_string(most)} USD at most, and this key can only lower that",
                param="budget_usd",
            )
        log.info(
            "gateway.session_budget_set",
            session_id=name,
            key_id=str(whose),
            budget_usd=None if usd is None else decimal_string(usd),
            by=caller.name,
        )
        return exchange.answer(_shown(session))

    path = "/v1/sessions/{session_id}"
    looked_at = Operation(
        summary="A session: what it has used, and what it may cost",
        description="A session belongs to a key. An administrator names whose it means where several have one.",
        query=_Query,
        gives=(Content(type=SessionInUse),),
        errors=OF_CONTROL,
    )
    budgeted = Operation(
        summary="Set what a session may cost",
        description="A key can only lower it; an administrator sets it for any key with `key_id`.",
        query=_Query,
        takes=(Content(type=SessionBudget, example={"budget_usd": "5.00"}),),
        gives=(Content(type=SessionInUse),),
        errors=OF_CONTROL,
    )
    return [
        Endpoint(method="GET", path=path, access=Scope.USAGE_READ, handler=get, told=looked_at),
        Endpoint(method="PUT", path=path, access=Access.ANY_KEY, handler=put, told=budgeted),
    ]


async def _whose(exchange: Exchange, name: str, sessions: Sessions) -> uuid.UUID:
    key_id = _key_id(exchange)
    if key_id is not None or Scope.ADMIN not in exchange.caller.scopes:
        return exchange.caller.key_id if key_id is None else key_id
    having = await sessions.keys(name)
    if len(having) > 1:
        told = ", ".join(str(one) for one in having[:20])
        raise InvalidRequest(f"several keys have a session of this name, name one: {told}", param="key_id")
    return having[0] if having else exchange.caller.key_id


def _key_id(exchange: Exchange) -> uuid.UUID | None:
    text = exchange.query(("key_id",)).get("key_id")
    if text is None:
        return None
    if Scope.ADMIN not in exchange.caller.scopes:
        raise PermissionDenied("sessions of other keys are for administrators", param="key_id")
    try:
        return as_uuid(text)
    except ValueError as error:
        raise InvalidRequest("is no id of a key", param="key_id") from error


def _name(exchange: Exchange) -> str:
    name = exchange.path_args["session_id"]
    if not 1 <= len(name) <= MAX_SESSION_ID:
        raise InvalidRequest(f"must have 1 to {MAX_SESSION_ID} characters", param="session_id")
    return name


def _shown(session: Session) -> SessionInUse:
    return {
        "id": session.session_id,
        "object": "session",
        "key_id": session.key_id,
        "budget_usd": _usd(session.budget_usd),
        "left_usd": _usd(session.left_usd),
        "budgets": {
            "own_usd": _usd(session.own_usd),
            "set_usd": _usd(session.set_usd),
            "key_usd": _usd(session.key_usd),
        },
        "charged_usd": decimal_string(session.charged_usd),
        "unknown_attempts": session.unknown_attempts,
        "unknown_upper_bound_usd": decimal_string(session.unknown_upper_bound_usd),
        "unbounded_attempts": session.unbounded_attempts,
        "attempts": session.attempts,
        "input_tokens": session.input_tokens,
        "output_tokens": session.output_tokens,
        "reserved_attempts": session.live_attempts,
        "reserved_usd": decimal_string(session.reserved_usd),
        "unbounded_reserved": session.unbounded_reserved,
        "first_attempt_at": session.first_attempt_at,
        "last_attempt_at": session.last_attempt_at,
        "live": [_at_work(attempt) for attempt in session.live],
    }


def _at_work(attempt: LiveAttempt) -> AttemptAtWork:
    return {
        "ticket_id": attempt.ticket_id,
        "debit_id": attempt.debit_id,
        "attempt": attempt.attempt,
        "state": attempt.state,
        "group": attempt.group_id,
        "model": attempt.model,
        "reserved_usd": _usd(attempt.reserved_usd),
        "queued_at": attempt.queued_at,
        "granted_at": attempt.granted_at,
    }


def _usd(amount: Decimal | None) -> str | None:
    return None if amount is None else decimal_string(amount)


def _unavailable() -> GatewayError:
    return GatewayError("the control store cannot be reached", code=Code.CONTROL_STORE_UNAVAILABLE, retry_after_s=1.0)
