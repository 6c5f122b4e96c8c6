"""
The vocabulary of a chat: what is asked and what comes back, in no provider's words.

Everything a wire protocol reads or writes passes through these types, so a protocol never has to know another one.
Beside the canonical form a request keeps its native form: where the caller's format and the provider's are the same,
unknown fields then pass through untouched.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Iterator, Mapping
from typing import TypeAlias

import msgspec

from adapters.limits import Remaining
from adapters.paths import CANONICAL, Paths
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


_IN_PART = re.compile(r"messages\[([0-9]+)\]\.content\[([0-9]+)\]")

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
    """
    What a model thought, one block of it. The signature proves to its provider that it is its own, and may hold the
    thought itself, encrypted: sent back unchanged. `redacted`: there is no readable text, and never was.
    """

    text: str = ""
    signature: str | None = None
    redacted: bool = False
    #: The provider's name for the block, where it wants that back, too.
    id: str | None = None


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
    #: Prompt-cache boundary after this tool: "5m" or "1h".
    cache: str | None = None


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
    #: Paths of what the canonical form does not carry, as the caller wrote them. Another protocol refuses them, unless
    #: the endpoint omits them.
    unmapped: tuple[str, ...] = ()
    #: Paths of wishes that change nothing of the answer but how much is shown of its making. Another protocol is not
    #: told them, and never refuses for them: they are dropped, and told as such.
    wishes: tuple[str, ...] = ()
    #: By path, why another protocol cannot be told it, where there is more to say than that it has no such field.
    reasons: Mapping[str, str] = {}


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
    top_k: int | None = None
    stop: tuple[str, ...] = ()
    seed: int | None = None
    n: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    logit_bias: dict[str, float] | None = None
    #: "none", "minimal", "low", "medium", "high", or a word of the provider's own.
    reasoning_effort: str | None = None
    #: 0 asks for no reasoning at all.
    reasoning_budget_tokens: int | None = None
    #: "low", "medium" or "high".
    verbosity: str | None = None
    service_tier: str | None = None
    prompt_cache_key: str | None = None
    #: How long the provider's cache keeps what it read, in OpenAI's words.
    prompt_cache_retention: str | None = None
    #: The provider may keep the exchange.
    store: bool | None = None
    metadata: dict[str, str] | None = None
    end_user: str | None = None
    #: Top-level fields only the provider knows, sent as they are.
    extra: dict[str, msgspec.Raw] = {}
    native: NativeRequest | None = None
    paths: Paths = CANONICAL

    def written(self, path: str) -> str:
        """A canonical path as the caller wrote it: the most precise one that is in its body."""
        if self.paths is CANONICAL:
            return path
        return self.paths.written(path, self.native.fields if self.native is not None else None, self._kind_at(path))

    def _kind_at(self, path: str) -> str:
        """The kind of the part that the path is of; empty where it is of none."""
        found = _IN_PART.match(path)
        if found is None:
            return ""
        message, part = int(found[1]), int(found[2])
        known = self.messages[message].content if message < len(self.messages) else ()
        return str(known[part].__struct_config__.tag) if part < len(known) else ""


# ------------------------------------------------------------------ answer


class TokenLogprob(msgspec.Struct, frozen=True, kw_only=True):
    token: str
    logprob: float
    #: The token's UTF-8, where it is not a whole character.
    bytes: tuple[int, ...] | None = None
    top: tuple[TokenLogprob, ...] = ()


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    text: str = ""
    refusal: str = ""
    reasoning: tuple[Reasoning, ...] = ()
    tool_calls: tuple[ToolCall, ...] = ()
    #: Pictures the model made, in order.
    images: tuple[Image, ...] = ()
    #: Of the text, where they were asked for.
    logprobs: tuple[TokenLogprob, ...] | None = None
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
    #: The tier of its service that the provider says served this call, in its own word.
    service_tier: str | None = None
    #: The provider's own body, where the answer came as one.
    native: msgspec.Raw | None = None
    native_protocol: str | None = None
    #: Kinds of content in the provider's own answer that the canonical form does not carry ("citations",
    #: "web_search_call"): a caller of another protocol is told that it did not get them.
    omitted: tuple[str, ...] = ()
    #: Paths of the request that this provider was not sent, as its profile says. The client fills it in.
    dropped: tuple[str, ...] = ()
    #: What the provider says is left of its rate limits. The client fills it in.
    remaining: Remaining | None = None


# Of the deltas there is one for every token, and nothing in them can be part of a cycle: the collector need not look.


class TextDelta(msgspec.Struct, frozen=True, gc=False):
    text: str
    choice: int = 0


class ReasoningDelta(msgspec.Struct, frozen=True, gc=False):
    text: str
    choice: int = 0
    #: Of the whole block; comes at most once in it.
    signature: str | None = None
    #: Counts the blocks of one choice from 0: text of another block is another thought.
    block: int = 0
    redacted: bool = False
    id: str | None = None


class RefusalDelta(msgspec.Struct, frozen=True, gc=False):
    text: str
    choice: int = 0


class ToolCallStart(msgspec.Struct, frozen=True):
    #: Counts the calls of one choice from 0, whatever the provider counts from.
    index: int
    id: str
    name: str
    choice: int = 0
    signature: str | None = None


class ToolCallDelta(msgspec.Struct, frozen=True, gc=False):
    index: int
    #: A piece of JSON text.
    arguments: str
    choice: int = 0


class ImageOutput(msgspec.Struct, frozen=True):
    """A picture the model made, whole."""

    image: Image
    choice: int = 0


class LogprobsDelta(msgspec.Struct, frozen=True):
    """Of text that came in the same batch."""

    tokens: tuple[TokenLogprob, ...]
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
    #: As in `ChatResponse`, these four.
    service_tier: str | None = None
    omitted: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()
    remaining: Remaining | None = None


class Native(msgspec.Struct, frozen=True):
    """
    The provider's own bytes of the whole events of its stream since the last one of these: the last of every batch of a
    call that asked for `relay`, and of no other. Joined, they are what the provider sent up to its terminal.

    It is no `Event`, so that nobody else has to know it: who asked for it takes it off with `contract.relayed`.
    """

    raw: bytes


Delta: TypeAlias = (
    TextDelta | ReasoningDelta | RefusalDelta | ToolCallStart | ToolCallDelta | ImageOutput | LogprobsDelta
)
Event: TypeAlias = Delta | UsageReport | Finished


def as_events(response: ChatResponse) -> Iterator[Event]:
    """A whole answer as the stream it could have been."""
    for choice in response.choices:
        for block, thought in enumerate(choice.reasoning):
            yield ReasoningDelta(
                thought.text, choice.index, thought.signature, block, redacted=thought.redacted, id=thought.id
            )
        if choice.text:
            yield TextDelta(choice.text, choice.index)
        if choice.logprobs is not None:
            yield LogprobsDelta(choice.logprobs, choice.index)
        if choice.refusal:
            yield RefusalDelta(choice.refusal, choice.index)
        for image in choice.images:
            yield ImageOutput(image, choice.index)
        for number, call in enumerate(choice.tool_calls):
            yield ToolCallStart(number, call.id, call.name, choice.index, call.signature)
            if call.arguments:
                yield ToolCallDelta(number, call.arguments, choice.index)
    if response.usage != NOTHING or response.reported_cost_usd is not None:
        yield UsageReport(usage=response.usage, reported_cost_usd=response.reported_cost_usd)
    yield Finished(
        ends=tuple(
            ChoiceEnd(choice=c.index, stop_reason=c.stop_reason, native_stop_reason=c.native_stop_reason)
            for c in response.choices
        ),
        response_id=response.response_id,
        served_model=response.served_model,
        provider_request_id=response.provider_request_id,
        service_tier=response.service_tier,
        omitted=response.omitted,
        dropped=response.dropped,
    )
