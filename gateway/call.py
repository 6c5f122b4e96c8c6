"""
The canonical request of the gateway: a chat, plus who asks and how it may be served.

Every transport fills the same fields; `FIELDS` is the one table of their names on each of them.
"""

from __future__ import annotations

import enum
import uuid
from decimal import Decimal

import msgspec

from adapters.chat import ChatRequest, ChatResponse, Message, Role, Text
from adapters.contract import CountResponse, EmbeddingRequest, EmbeddingResponse
from admission.lease import Class
from gateway.errors import InvalidRequest
from gateway.outcome import Outcome
from gateway.policy import ANYTHING, Policy


class Resend(enum.StrEnum):
    """Whether a request that was sent and got no content may be sent again."""

    NEVER = "never"
    BEFORE_FIRST_BYTE = "before_first_byte"


class Order(enum.StrEnum):
    """In which order the routes of a model are tried. Ties keep the configured order."""

    #: As configured.
    PRIORITY = "priority"
    #: The cheapest for this request first; those whose price is not known last.
    COST = "cost"
    #: The one that began to answer soonest of late first; one that nobody has tried of late before all.
    LATENCY = "latency"
    #: Drawn: the more weight, the cheaper and the quicker, the sooner.
    WEIGHTED = "weighted"


class Unsupported(enum.StrEnum):
    """What becomes of a parameter that a route cannot be told."""

    REFUSE = "refuse"
    #: It is left out, and the answer says so.
    DROP = "drop"


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
    #: What it may use.
    policy: Policy = ANYTHING
    #: It has limits, of which admission keeps count.
    limited: bool = False
    #: Of money among them: what nobody can bound is not dispatched for it.
    budgeted: bool = False
    #: So it is for each of its sessions.
    budgets_sessions: bool = False
    #: On each of its calls; of two tags with one name, this is the one that counts.
    tags: dict[str, str] = {}


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
    #: Names of models, as a caller may ask for them; empty means any.
    allowed_models: tuple[str, ...] = ()
    #: None: as the model is configured.
    order: Order | None = None
    #: None: as the provider is configured.
    unsupported: Unsupported | None = None
    #: The answer says of each route that was not tried why.
    explain: bool = False

    def __post_init__(self) -> None:
        if self.owner_fence is not None and self.run_id is None:
            raise InvalidRequest("owner_fence counts the executors of a run: run_id is missing", param="owner_fence")


class Call(msgspec.Struct, frozen=True, kw_only=True):
    """One request, ready for the line."""

    request_id: str
    caller: Caller
    #: The model as the caller named it; empty only where `options.role` is asked for instead.
    model: str
    chat: ChatRequest
    options: Options
    #: The event loop's time by which the caller wants the answer; None where it set no deadline.
    deadline: float | None = None
    #: How the request came in: "grpc", "rest", "job".
    transport: str
    #: The number of attempts made for this debit before (by an earlier executor of a job).
    attempts_before: int = 0
    #: A streamed answer comes with the provider's own bytes beside it, where the provider speaks the caller's protocol:
    #: see `adapters.chat.Native`.
    relay: bool = False
    #: Betas of Anthropic's API that the caller wants; told to a provider of that protocol only.
    betas: tuple[str, ...] = ()
    #: What is asked for in place of a chat, which is then the one of `size_of_embedding`.
    embedding: EmbeddingRequest | None = None
    #: Only the tokens of the chat are asked for. That costs nothing.
    counts: bool = False

    @property
    def budgeted(self) -> bool:
        """A budget of its key is known to hold for it: what nobody can bound is not dispatched."""
        return self.caller.budgeted or (self.caller.budgets_sessions and self.options.session_id is not None)

    @property
    def policy(self) -> Policy:
        """What the key may use, beside what the configuration and the request itself say."""
        return self.caller.policy

    def told_path(self, path: str) -> str:
        """A path in the caller's own request, as an error or a warning names it: a job has the request in its body."""
        if self.transport != "job":
            return path
        return f"body.{path}" if path else "body"

    @property
    def tags(self) -> dict[str, str]:
        """The request's own and the key's."""
        return {**self.options.tags, **self.caller.tags}

    @property
    def overruled_tags(self) -> list[str]:
        """Names of tags for which the request has another value than its key, which is not kept."""
        return [name for name, tag in self.options.tags.items() if self.caller.tags.get(name, tag) != tag]


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """A whole answer with its outcome."""

    response: ChatResponse
    outcome: Outcome


class Embedded(msgspec.Struct, frozen=True, kw_only=True):
    """Vectors with their outcome."""

    response: EmbeddingResponse
    outcome: Outcome


class Counted(msgspec.Struct, frozen=True, kw_only=True):
    """A count of tokens with its outcome."""

    response: CountResponse
    outcome: Outcome


def size_of_embedding(request: EmbeddingRequest) -> ChatRequest:
    """A chat as large as the request and without an output, for whoever asks what a call may use."""
    text = Text(text="".join(item if isinstance(item, str) else " " * len(item) for item in request.inputs))
    return ChatRequest(
        messages=() if request.native is not None else (Message(role=Role.USER, content=(text,)),),
        max_output_tokens=0,
        native=request.native,
    )
