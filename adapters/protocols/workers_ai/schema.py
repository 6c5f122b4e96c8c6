"""
The wire format of Workers AI's native API, as far as something is read from it.

Two shapes meet here. Most models answer with `response` and `tool_calls`, newer ones with the `choices` of OpenAI's
chat completions; either may lie in Cloudflare's envelope or bare. Both are read by the same types.

Sources: https://developers.cloudflare.com/workers-ai/models/ (the schema of each model),
https://developers.cloudflare.com/api/resources/ai/methods/run/
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from adapters.body import ABSENT, Wire

Count = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
Int64 = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]

# ------------------------------------------------------------------ requests


class Function(Wire):
    name: str
    description: str | None = None
    parameters: msgspec.Raw = ABSENT
    #: Of a call, not of a declaration: JSON text, or an object.
    arguments: msgspec.Raw = ABSENT
    strict: bool | None = None


class ToolIn(Wire):
    """A function in OpenAI's shape, or flat."""

    type: str = "function"
    function: Function | None = None
    name: str | None = None
    description: str | None = None
    parameters: msgspec.Raw = ABSENT


class ToolCallIn(Wire):
    id: str | None = None
    function: Function | None = None
    name: str | None = None
    arguments: msgspec.Raw = ABSENT


class ImageUrl(Wire):
    url: str
    detail: str | None = None


class PartIn(Wire):
    type: str
    text: str | None = None
    image_url: ImageUrl | None = None


class MessageIn(Wire):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | tuple[msgspec.Raw, ...] | None = None
    name: str | None = None
    tool_calls: tuple[ToolCallIn, ...] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None


class NamedFunction(Wire):
    name: str


class ToolChoiceIn(Wire):
    type: str
    function: NamedFunction | None = None


class ResponseFormatIn(Wire):
    type: str
    json_schema: msgspec.Raw = ABSENT


class RequestIn(Wire):
    messages: Annotated[tuple[MessageIn, ...], msgspec.Meta(min_length=1)] | None = None
    prompt: str | None = None
    model: str | None = None
    stream: bool | None = None
    max_tokens: Count | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Count | None = None
    seed: Int64 | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    tools: tuple[ToolIn, ...] | None = None
    tool_choice: str | ToolChoiceIn | None = None
    response_format: ResponseFormatIn | None = None


# ------------------------------------------------------------------- answers


class PromptDetails(Wire):
    cached_tokens: int | None = None


class CompletionDetails(Wire):
    reasoning_tokens: int | None = None


class UsageOut(Wire):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    #: The words of the Responses shape, where it does not use the others.
    input_tokens: int | None = None
    output_tokens: int | None = None
    prompt_tokens_details: PromptDetails | None = None
    completion_tokens_details: CompletionDetails | None = None


class FunctionOut(Wire):
    name: str | None = None
    arguments: msgspec.Raw = ABSENT


class ToolCallOut(Wire):
    """A call, or in a stream a piece of one; flat, or in OpenAI's shape."""

    index: int | None = None
    id: str | None = None
    name: str | None = None
    arguments: msgspec.Raw = ABSENT
    function: FunctionOut | None = None


class Content(Wire):
    """A `message` or a `delta`."""

    content: str | None = None
    refusal: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: tuple[ToolCallOut, ...] | None = None


class ChoiceOut(Wire):
    index: int = 0
    delta: Content | None = None
    message: Content | None = None
    finish_reason: str | None = None


class PieceOut(Wire):
    """A part of an item, or of its summary."""

    type: str = ""
    text: str | None = None
    refusal: str | None = None


class ItemOut(Wire):
    """A thought, a message or a call in the Responses shape."""

    type: str = ""
    content: tuple[PieceOut, ...] | None = None
    summary: tuple[PieceOut, ...] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None


class Incomplete(Wire):
    reason: str | None = None


class ItemsOut(Wire):
    """An answer in the Responses shape, which models of OpenAI's have."""

    output: tuple[ItemOut, ...]
    status: str | None = None
    incomplete_details: Incomplete | None = None


class LooseAnswer(Wire):
    """An answer or a chunk, in either shape, with nothing read that a good answer can do without."""

    #: Text; in JSON mode the value itself.
    response: msgspec.Raw = ABSENT
    tool_calls: tuple[ToolCallOut, ...] | None = None
    reasoning_content: str | None = None
    finish_reason: str | None = None
    choices: tuple[ChoiceOut, ...] | None = None
    #: The items of the Responses shape.
    output: msgspec.Raw = ABSENT
    id: str | None = None
    model: str | None = None
    #: Cloudflare's envelope, and others.
    result: msgspec.Raw = ABSENT
    success: bool | None = None
    errors: msgspec.Raw = ABSENT
    error: msgspec.Raw = ABSENT


class AnswerOut(LooseAnswer):
    """The same with its figures."""

    usage: UsageOut | None = None


class TextChunk(Wire, forbid_unknown_fields=True):
    """What nearly every event of a native stream is, and nothing else: for speed alone."""

    response: str
    #: Padding of random length.
    p: str | None = None


class EmbeddingsOut(Wire):
    data: tuple[tuple[float, ...], ...] | None = None
    usage: UsageOut | None = None


class EmbeddingsEnvelope(Wire):
    result: EmbeddingsOut | None = None
    data: tuple[tuple[float, ...], ...] | None = None
    success: bool | None = None
    errors: msgspec.Raw = ABSENT


class EmbeddingsIn(Wire):
    text: str | Annotated[tuple[str, ...], msgspec.Meta(min_length=1)]
