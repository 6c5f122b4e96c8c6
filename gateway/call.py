"""
The canonical request of the gateway: a chat, plus who asks and how it may be served.

Every transport fills the same fields; `FIELDS` is the one table of their names on each of them.
"""

from __future__ import annotations

import enum
import uuid
from decimal import Decimal

import msgspec

from adapters.chat import ChatRequest, ChatResponse
from admission.lease import Class
from gateway.errors import InvalidRequest
from gateway.outcome import Outcome


class Resend(enum.StrEnum):
    """Whether a request that was sent and got no content may be sent again."""

    NEVER = "never"
    BEFORE_FIRST_BYTE = "before_first_byte"


class Scope(enum.StrEnum):
    CHAT = "chat"
    JOBS = "jobs"
    USAGE_READ = "usage:read"
    ADMIN = "admin"


class Caller(msgspec.Struct, frozen=True, kw_only=True):
    """An authenticated API key."""

    key_id: uuid.UUID
    name: str
    scopes: frozenset[Scope]


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """The caller fields of every transport (design section 7)."""

    session_id: str | None = None
    debit_id: str | None = None
    idempotency_key: str | None = None
    scope_id: str | None = None
    run_id: str | None = None
    step_id: str | None = None
    skill: str | None = None
    skill_version: str | None = None
    role: str | None = None
    tool: str | None = None
    tags: dict[str, str] = {}
    owner_fence: int | None = None
    klass: Class = Class.INTERACTIVE
    max_cost_usd: Decimal | None = None
    #: Provider ids; empty means any.
    allowed_providers: tuple[str, ...] = ()
    allow_failover: bool = True
    resend_uncertain: Resend | None = None
    spill_after_s: float | None = None

    def __post_init__(self) -> None:
        if self.owner_fence is not None and self.run_id is None:
            raise InvalidRequest("owner_fence counts the executors of a run: run_id is missing", param="owner_fence")


class Call(msgspec.Struct, frozen=True, kw_only=True):
    """One request, ready for the line."""

    request_id: str
    caller: Caller
    #: The model as the caller named it.
    model: str
    chat: ChatRequest
    options: Options
    #: The event loop's time by which the caller wants the answer; None where it set no deadline.
    deadline: float | None = None
    #: How the request came in: "grpc", "rest", "job".
    transport: str
    #: The number of attempts made for this debit before (by an earlier executor of a job).
    attempts_before: int = 0


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """A whole answer with its outcome."""

    response: ChatResponse
    outcome: Outcome
