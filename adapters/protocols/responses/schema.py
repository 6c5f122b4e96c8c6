"""
The wire format of OpenAI's Responses, as far as something is read from it.

Unknown fields are ignored by these types. Items are left raw until their kind is known: two kinds use one name for
different things, and a kind that is new must not fail an answer that is otherwise good.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from adapters.body import ABSENT, Wire

Count = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]

# ------------------------------------------------------------------ requests


class Breakpoint(Wire):
    ttl: str | None = None


class Kind(Wire):
    """What an item, a part or a tool is. A message of the short form has a role and no type."""

    type: str | None = None
    role: msgspec.Raw = ABSENT


class Named(Wire):
    id: str | None = None


class MessageIn(Wire):
    role: Literal["system", "developer", "user", "assistant"]
    content: str | tuple[msgspec.Raw, ...]


class PartIn(Wire):
    type: str
    text: str | None = None
    refusal: str | None = None
    image_url: str | None = None
    file_id: str | None = None
    detail: str | None = None
    file_data: str | None = None
    file_url: str | None = None
    filename: str | None = None
    prompt_cache_breakpoint: Breakpoint | None = None


class CallIn(Wire):
    call_id: str
    name: str
    arguments: str
    #: Ours, for a provider that signs its calls.
    signature: str | None = None


class CallOutputIn(Wire):
    call_id: str
    output: str | tuple[msgspec.Raw, ...]


class TextOf(Wire):
    """A piece of a summary or of reasoning itself."""

    text: str = ""


class ReasoningIn(Wire):
    id: str | None = None
    summary: tuple[TextOf, ...] | None = None
    content: tuple[TextOf, ...] | None = None
    encrypted_content: str | None = None


class FunctionIn(Wire):
    name: Name
    description: str | None = None
    parameters: msgspec.Raw = ABSENT
    strict: bool | None = None


class ToolChoiceIn(Wire):
    type: str
    name: str | None = None


class FormatIn(Wire):
    type: str
    name: str | None = None
    description: str | None = None
    schema: msgspec.Raw = ABSENT
    strict: bool | None = None


class TextIn(Wire):
    format: FormatIn | None = None
    verbosity: str | None = None


class EffortIn(Wire):
    effort: str | None = None


class RequestIn(Wire):
    input: str | tuple[msgspec.Raw, ...] | None = None
    instructions: str | None = None
    model: Name | None = None
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None
    background: bool | None = None
    tools: tuple[msgspec.Raw, ...] | None = None
    tool_choice: str | ToolChoiceIn | None = None
    parallel_tool_calls: bool | None = None
    text: TextIn | None = None
    reasoning: EffortIn | None = None
    max_output_tokens: Count | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_logprobs: Count | None = None
    include: tuple[str, ...] | None = None
    store: bool | None = None
    metadata: dict[str, str] | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    service_tier: str | None = None
    truncation: str | None = None
    user: str | None = None
    safety_identifier: str | None = None


# ------------------------------------------------------------------ answers


class TopLogprobOut(Wire):
    token: str = ""
    logprob: float = 0.0
    bytes: tuple[int, ...] | None = None


class LogprobOut(Wire):
    token: str
    logprob: float
    bytes: tuple[int, ...] | None = None
    top_logprobs: tuple[TopLogprobOut, ...] | None = None


class PartOut(Wire):
    type: str = ""
    text: str | None = None
    refusal: str | None = None
    annotations: tuple[msgspec.Raw, ...] | None = None
    logprobs: msgspec.Raw = ABSENT


class MessageOut(Wire):
    #: Text without its list, from a server that took the short way.
    content: str | tuple[PartOut, ...] | None = None


class CallOut(Wire):
    id: str | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    signature: str | None = None


class ReasoningOut(ReasoningIn):
    pass


class PictureOut(Wire):
    result: str | None = None
    output_format: str | None = None
    #: Ours, for a picture that has an address only.
    image_url: str | None = None


class InputDetails(Wire):
    cached_tokens: int | None = None
    cache_write_tokens: int | None = None
    image_tokens: int | None = None
    audio_tokens: int | None = None


class OutputDetails(Wire):
    reasoning_tokens: int | None = None
    image_tokens: int | None = None
    audio_tokens: int | None = None


class UsageOut(Wire):
    input_tokens: int | None = None
    input_tokens_details: InputDetails | None = None
    output_tokens: int | None = None
    output_tokens_details: OutputDetails | None = None
    #: In USD; OpenRouter.
    cost: msgspec.Raw = ABSENT


class IncompleteOut(Wire):
    reason: str | None = None


class ResponseOut(Wire):
    id: str | None = None
    model: str | None = None
    status: str | None = None
    output: tuple[msgspec.Raw, ...] | None = None
    incomplete_details: IncompleteOut | None = None
    error: Any = None
    usage: msgspec.Raw = ABSENT
    cost: msgspec.Raw = ABSENT
    #: A word, where it is as documented.
    service_tier: Any = None


class EventOut(Wire):
    """One event of a stream: the fields of every kind that is read."""

    type: str = ""
    delta: str | None = None
    output_index: int | None = None
    content_index: int | None = None
    summary_index: int | None = None
    item_id: str | None = None
    logprobs: msgspec.Raw = ABSENT
    text: str | None = None
    refusal: str | None = None
    arguments: str | None = None
    name: str | None = None
    item: msgspec.Raw = ABSENT
    part: msgspec.Raw = ABSENT
    response: msgspec.Raw = ABSENT
    usage: msgspec.Raw = ABSENT
    cost: msgspec.Raw = ABSENT


class TextPiece(Wire, tag_field="type", tag="response.output_text.delta"):
    """What nearly every event is, with just what is read of it."""

    delta: str
    output_index: int
    content_index: int
    logprobs: tuple[LogprobOut, ...] | None = None
