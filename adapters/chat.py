"""
The vocabulary of a chat: what is asked and what comes back, in no provider's words.

Everything a wire protocol reads or writes passes through these types, so a protocol never has to know another one.
Beside the canonical form a request keeps its native form: where the caller's format and the provider's are the same,
unknown fields then pass through untouched.
"""

from __future__ import annotations

import enum
from typing import TypeAlias

import msgspec

from adapters.limits import Remaining
from metering.usage import NOTHING, Usage


class Role(enum.StrEnum):
    SYSTEM = "system"
    DEVELOPER = "developer"
    USER = "user"
    ASSISTANT = "assistant"
    TOOL = "tool"


class StopReason(enum.StrEnum):
    """Why a choice ended, from the provider's own word for it."""

    STOP = "stop"
    LENGTH = "length"
    TOOL_CALLS = "tool_calls"
    CONTENT_FILTER = "content_filter"
    REFUSAL = "refusal"
    #: Send the same content again to go on.
    PAUSE = "pause"
    #: A word we do not know; the native one is kept beside it.
    OTHER = "other"


# ------------------------------------------------------------------ request


class Text(msgspec.Struct, frozen=True, kw_only=True, tag="text"):
    text: str
    #: Prompt-cache boundary after this part: "5m" or "1h".
    cache: str | None = None


class Image(msgspec.Struct, frozen=True, kw_only=True, tag="image"):
    """Either `url` or `data` with `media_type`."""

    url: str | None = None
    data: bytes | None = None
    media_type: str | None = None
    detail: str | None = None
    cache: str | None = None


class Document(msgspec.Struct, frozen=True, kw_only=True, tag="document"):
    """One of `url`, `data` with `media_type`, or the provider's own `file_id`."""

    url: str | None = None
    data: bytes | None = None
    file_id: str | None = None
    media_type: str | None = None
    filename: str | None = None
    cache: str | None = None


class Audio(msgspec.Struct, frozen=True, kw_only=True, tag="audio"):
    data: bytes
    format: str


class Opaque(msgspec.Struct, frozen=True, kw_only=True, tag="opaque"):
    """A part that only its own protocol knows, as it came. Every other protocol refuses it by its path."""

    protocol: str
    raw: msgspec.Raw


Part: TypeAlias = Text | Image | Document | Audio | Opaque


class Reasoning(msgspec.Struct, frozen=True, kw_only=True):
    """What a model thought. The signature proves to its provider that it is its own: sent back unchanged."""

    text: str = ""
    signature: str | None = None
    redacted: bool = False


class ToolCall(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    name: str
    #: JSON text as the model wrote it. It may not parse, and is never repaired.
    arguments: str
    signature: str | None = None


class Message(msgspec.Struct, frozen=True, kw_only=True):
    role: Role
    content: tuple[Part, ...] = ()
    name: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    #: On a tool message: the call this is the result of.
    tool_call_id: str | None = None
    is_error: bool = False
    refusal: str | None = None
    reasoning: tuple[Reasoning, ...] = ()


class Tool(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    description: str | None = None
    #: JSON Schema of the arguments, as it came.
    parameters: msgspec.Raw | None = None
    strict: bool | None = None


class ToolChoice(msgspec.Struct, frozen=True, kw_only=True):
    #: "auto", "none", "required" or "tool".
    mode: str
    #: The one tool that must be called, where mode is "tool".
    tool: str | None = None


class ResponseFormat(msgspec.Struct, frozen=True, kw_only=True):
    #: "text", "json_object" or "json_schema".
    kind: str
    name: str | None = None
    description: str | None = None
    schema: msgspec.Raw | None = None
    strict: bool | None = None


class NativeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The request's own top-level JSON fields, byte for byte, and the protocol they are written in."""

    protocol: str
    fields: dict[str, msgspec.Raw]
    #: Paths of what the canonical form does not carry. Another protocol refuses them, unless the endpoint omits them.
    unmapped: tuple[str, ...] = ()


class ChatRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What a caller asks of a model. An absent parameter is None and is not sent."""

    messages: tuple[Message, ...]
    tools: tuple[Tool, ...] = ()
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    response_format: ResponseFormat | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    stop: tuple[str, ...] = ()
    seed: int | None = None
    n: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    logit_bias: dict[str, float] | None = None
    reasoning_effort: str | None = None
    reasoning_budget_tokens: int | None = None
    end_user: str | None = None
    #: Top-level fields only the provider knows, sent as they are.
    extra: dict[str, msgspec.Raw] = {}
    native: NativeRequest | None = None


# ------------------------------------------------------------------ answer


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    text: str = ""
    refusal: str = ""
    reasoning: tuple[Reasoning, ...] = ()
    tool_calls: tuple[ToolCall, ...] = ()
    stop_reason: StopReason
    native_stop_reason: str


class ChatResponse(msgspec.Struct, frozen=True, kw_only=True):
    """A complete answer: its protocol's mandatory stop field was present."""

    choices: tuple[Choice, ...]
    usage: Usage = NOTHING
    #: The provider's id of the answer, and the model it says it used.
    response_id: str | None = None
    served_model: str | None = None
    provider_request_id: str | None = None
    #: What the provider says this call cost in USD, as a decimal number, where it says so.
    reported_cost_usd: str | None = None
    #: The provider's own body, where the answer came as one.
    native: msgspec.Raw | None = None
    native_protocol: str | None = None
    #: What the provider says is left of its rate limits. The client fills it in.
    remaining: Remaining | None = None


class TextDelta(msgspec.Struct, frozen=True):
    text: str
    choice: int = 0


class ReasoningDelta(msgspec.Struct, frozen=True):
    text: str
    choice: int = 0
    signature: str | None = None


class RefusalDelta(msgspec.Struct, frozen=True):
    text: str
    choice: int = 0


class ToolCallStart(msgspec.Struct, frozen=True):
    #: Counts the calls of one choice from 0, whatever the provider counts from.
    index: int
    id: str
    name: str
    choice: int = 0
    signature: str | None = None


class ToolCallDelta(msgspec.Struct, frozen=True):
    index: int
    #: A piece of JSON text.
    arguments: str
    choice: int = 0


class UsageReport(msgspec.Struct, frozen=True, kw_only=True):
    """Cumulative: merge it with what was known."""

    usage: Usage = NOTHING
    reported_cost_usd: str | None = None


class ChoiceEnd(msgspec.Struct, frozen=True, kw_only=True):
    choice: int
    stop_reason: StopReason
    native_stop_reason: str


class Finished(msgspec.Struct, frozen=True, kw_only=True):
    """Terminal proof: the provider's protocol says that the answer is complete. The last event of a stream."""

    ends: tuple[ChoiceEnd, ...]
    response_id: str | None = None
    served_model: str | None = None
    provider_request_id: str | None = None
    #: As in `ChatResponse`.
    remaining: Remaining | None = None


Delta: TypeAlias = TextDelta | ReasoningDelta | RefusalDelta | ToolCallStart | ToolCallDelta
Event: TypeAlias = Delta | UsageReport | Finished
