"""
The wire format of Anthropic's Messages API, as far as something is read from it.

Unknown fields are ignored by these types, and what is known to come in several shapes is left raw, so that a new kind
of block or event never fails an answer that is otherwise good. Sources: the API reference
(https://platform.claude.com/docs/en/api/messages) and the types of the vendor's own client.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from adapters.body import ABSENT, Wire

Count = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]

# ------------------------------------------------------------------ requests


class CacheControl(Wire):
    type: str = "ephemeral"
    #: "5m" or "1h".
    ttl: str | None = None


class SourceIn(Wire):
    """Of an image or a document."""

    type: str
    media_type: str | None = None
    data: str | None = None
    url: str | None = None
    file_id: str | None = None


class BlockIn(Wire):
    """A content block of a request, whatever its type; what a type must have is checked where it is read."""

    type: str
    cache_control: CacheControl | None = None
    text: str | None = None
    citations: msgspec.Raw = ABSENT
    source: SourceIn | None = None
    title: str | None = None
    context: str | None = None
    transformations: msgspec.Raw = ABSENT
    thinking: str | None = None
    signature: str | None = None
    data: str | None = None
    id: str | None = None
    name: str | None = None
    input: msgspec.Raw = ABSENT
    tool_use_id: str | None = None
    content: msgspec.Raw = ABSENT
    is_error: bool | None = None


class TypeOnly(Wire):
    type: str


class MessageIn(Wire):
    role: Literal["user", "assistant", "system"]
    content: str | tuple[msgspec.Raw, ...]


class ToolIn(Wire):
    type: str | None = None
    name: str | None = None
    description: str | None = None
    input_schema: msgspec.Raw = ABSENT
    cache_control: CacheControl | None = None
    strict: bool | None = None
    #: Whether its input is streamed before it is known to be valid. Another protocol has its own way, and no answer
    #: depends on it.
    eager_input_streaming: bool | None = None


class ToolChoiceIn(Wire):
    type: str
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class FormatIn(Wire):
    type: str
    schema: msgspec.Raw = ABSENT


class OutputConfigIn(Wire):
    effort: str | None = None
    format: FormatIn | None = None


class ThinkingIn(Wire):
    type: str
    budget_tokens: Count | None = None
    display: str | None = None


class MetadataIn(Wire):
    user_id: str | None = None


class RequestIn(Wire):
    messages: Annotated[tuple[MessageIn, ...], msgspec.Meta(min_length=1)]
    model: Name | None = None
    stream: bool | None = None
    max_tokens: Count | None = None
    system: str | tuple[msgspec.Raw, ...] | None = None
    tools: tuple[msgspec.Raw, ...] | None = None
    tool_choice: ToolChoiceIn | None = None
    output_config: OutputConfigIn | None = None
    output_format: FormatIn | None = None
    thinking: ThinkingIn | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Count | None = None
    stop_sequences: tuple[str, ...] | None = None
    metadata: MetadataIn | None = None
    service_tier: str | None = None


# ------------------------------------------------------------------- answers


class CacheCreation(Wire):
    ephemeral_5m_input_tokens: int | None = None
    ephemeral_1h_input_tokens: int | None = None


class OutputDetails(Wire):
    thinking_tokens: int | None = None


class Figures(Wire):
    input_tokens: int | None = None
    cache_creation_input_tokens: int | None = None
    cache_read_input_tokens: int | None = None
    cache_creation: CacheCreation | None = None
    output_tokens: int | None = None
    output_tokens_details: OutputDetails | None = None
    #: Requests by the kind of the provider's own tool.
    server_tool_use: msgspec.Raw = ABSENT


class Iteration(Figures):
    type: str | None = None


class UsageOut(Figures):
    iterations: tuple[Iteration, ...] | None = None
    #: Words, where they are as documented.
    service_tier: Any = None
    speed: Any = None
    inference_geo: Any = None


class StopDetails(Wire):
    explanation: str | None = None


class ServedModel(Wire):
    model: str | None = None


class BlockOut(Wire):
    """A content block of an answer; of a kind that is not known, only the type is read."""

    type: str
    text: str | None = None
    citations: tuple[msgspec.Raw, ...] | None = None
    thinking: str | None = None
    signature: str | None = None
    data: str | None = None
    id: str | None = None
    name: str | None = None
    input: msgspec.Raw = ABSENT
    #: Of a `fallback`: the model that goes on.
    to: ServedModel | None = None


class LooseMessageOut(Wire):
    """A whole answer, or what a stream begins with, with nothing read that a good answer can do without."""

    type: str | None = None
    id: str | None = None
    model: str | None = None
    content: tuple[msgspec.Raw, ...] | None = None
    stop_reason: str | None = None
    error: msgspec.Raw = ABSENT


class MessageOut(LooseMessageOut):
    """The same with its figures."""

    usage: UsageOut | None = None
    stop_details: StopDetails | None = None
    cost: msgspec.Raw = ABSENT


class DeltaOut(Wire):
    """Of a content block, or of the message."""

    type: str | None = None
    text: str | None = None
    partial_json: str | None = None
    thinking: str | None = None
    signature: str | None = None
    stop_reason: str | None = None
    stop_details: StopDetails | None = None


class EventOut(Wire):
    """One event of a stream, whatever its type."""

    type: str | None = None
    index: int = 0
    delta: DeltaOut | None = None
    content_block: BlockOut | None = None
    message: msgspec.Raw = ABSENT
    usage: msgspec.Raw = ABSENT
    cost: msgspec.Raw = ABSENT
    error: msgspec.Raw = ABSENT


class TextPiece(Wire, tag_field="type", tag="text_delta"):
    text: str


class TextEvent(Wire, tag_field="type", tag="content_block_delta"):
    """What nearly every event is, with just what is read of it: for speed alone."""

    index: int
    delta: TextPiece


class BareEventOut(Wire):
    """The same, when something in it is not as documented."""

    type: str | None = None
    index: int = 0
    delta: TypeOnly | None = None
    content_block: TypeOnly | None = None
