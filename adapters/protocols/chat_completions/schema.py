"""
The wire format of Chat Completions, as far as something is read from it.

Unknown fields are ignored by these types, and what is known to come in several shapes is left raw, so that a vendor's
addition or deviation never fails an answer that is otherwise good.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from adapters.body import ABSENT, Wire

Count = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
Choices = Annotated[int, msgspec.Meta(ge=1, le=128)]
Int64 = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]

# ------------------------------------------------------------------ requests


class CacheControl(Wire):
    type: str = "ephemeral"
    ttl: str | None = None


class ImageUrl(Wire):
    url: str
    detail: str | None = None


class InputAudio(Wire):
    data: str
    format: str


class File(Wire):
    file_data: str | None = None
    file_id: str | None = None
    filename: str | None = None


class FunctionCall(Wire):
    name: str
    arguments: str = ""


class ToolCallIn(Wire):
    id: str | None = None
    type: str = "function"
    function: FunctionCall | None = None
    #: Gemini's: `google.thought_signature`.
    extra_content: Any = None


class MessageIn(Wire):
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | tuple[msgspec.Raw, ...] | None = None
    name: str | None = None
    tool_calls: tuple[ToolCallIn, ...] | None = None
    function_call: FunctionCall | None = None
    tool_call_id: str | None = None
    refusal: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    reasoning_details: Any = None


class PartIn(Wire):
    type: str
    text: str | None = None
    refusal: str | None = None
    image_url: ImageUrl | None = None
    input_audio: InputAudio | None = None
    file: File | None = None
    #: Mistral's, of an assistant.
    thinking: str | tuple[dict[str, Any], ...] | None = None
    cache_control: CacheControl | None = None


class FunctionIn(Wire):
    name: str
    description: str | None = None
    parameters: msgspec.Raw = ABSENT
    strict: bool | None = None
    cache_control: CacheControl | None = None


class ToolIn(Wire):
    type: str = "function"
    function: FunctionIn | None = None
    cache_control: CacheControl | None = None


class NamedFunction(Wire):
    name: str


class ToolChoiceIn(Wire):
    type: str
    function: NamedFunction | None = None


class JsonSchemaIn(Wire):
    name: str
    description: str | None = None
    schema: msgspec.Raw = ABSENT
    strict: bool | None = None


class ResponseFormatIn(Wire):
    type: str
    json_schema: JsonSchemaIn | None = None


class StreamOptions(Wire):
    include_usage: bool | None = None


class RequestIn(Wire):
    messages: Annotated[tuple[MessageIn, ...], msgspec.Meta(min_length=1)]
    model: Name | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    tools: tuple[ToolIn, ...] | None = None
    functions: tuple[FunctionIn, ...] | None = None
    tool_choice: str | ToolChoiceIn | None = None
    function_call: str | NamedFunction | None = None
    parallel_tool_calls: bool | None = None
    response_format: ResponseFormatIn | None = None
    max_completion_tokens: Count | None = None
    max_tokens: Count | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Count | None = None
    stop: str | tuple[str, ...] | None = None
    seed: Int64 | None = None
    n: Choices | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logprobs: bool | None = None
    top_logprobs: Count | None = None
    logit_bias: dict[str, float] | None = None
    reasoning_effort: str | None = None
    #: OpenRouter's: an effort or a number of tokens, and more.
    reasoning: Any = None
    verbosity: str | None = None
    service_tier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    store: bool | None = None
    metadata: dict[str, str] | None = None
    user: str | None = None
    #: OpenAI's newer word for it.
    safety_identifier: str | None = None


# ------------------------------------------------------------------ answers


class PromptDetails(Wire):
    cached_tokens: int | None = None
    cache_write_tokens: int | None = None
    audio_tokens: int | None = None
    image_tokens: int | None = None
    video_tokens: int | None = None


class CompletionDetails(Wire):
    reasoning_tokens: int | None = None
    audio_tokens: int | None = None
    image_tokens: int | None = None


class UsageOut(Wire):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: PromptDetails | None = None
    completion_tokens_details: CompletionDetails | None = None
    #: DeepSeek's and Moonshot's words for cached tokens.
    prompt_cache_hit_tokens: int | None = None
    cached_tokens: int | None = None
    #: A number (OpenRouter) or an object with a total (Perplexity).
    cost: msgspec.Raw = ABSENT
    #: Billed apart from tokens: searches (Perplexity), and sources of a search (xAI).
    num_search_queries: int | None = None
    num_sources_used: int | None = None


class FunctionOut(Wire):
    name: str | None = None
    #: JSON text; an object where a server forgot to make it text.
    arguments: str | dict[str, Any] | None = None


class ReasoningDetail(Wire):
    """OpenRouter's form of a block of reasoning, in answers and on its way back. Its type tells what it holds."""

    type: str | None = None
    text: str | None = None
    summary: str | None = None
    data: str | None = None
    signature: str | None = None
    id: str | None = None
    index: int | None = None


class CustomOut(Wire):
    name: str | None = None
    input: str | None = None


class ToolCallOut(Wire):
    index: int | None = None
    id: str | None = None
    function: FunctionOut | None = None
    custom: CustomOut | None = None
    #: Gemini's: `google.thought_signature`.
    extra_content: Any = None


class Content(Wire):
    """A `message` or a `delta`. What is left untyped is looked at with care: it never fails an answer."""

    #: A list of parts at Mistral.
    content: str | tuple[dict[str, Any], ...] | None = None
    refusal: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    reasoning_details: Any = None
    tool_calls: tuple[ToolCallOut, ...] | None = None
    function_call: FunctionOut | None = None
    #: OpenRouter's pictures.
    images: Any = None
    annotations: Any = None
    audio: Any = None
    #: Groq's own tools, already run.
    executed_tools: Any = None


class ChoiceOut(Wire):
    index: int = 0
    delta: Content | None = None
    message: Content | None = None
    finish_reason: str | None = None
    native_finish_reason: str | None = None
    logprobs: Any = None


class TopTokenOut(Wire):
    token: str
    logprob: float
    bytes: tuple[int, ...] | None = None


class TokenOut(TopTokenOut):
    top_logprobs: tuple[TopTokenOut, ...] | None = None


class LogprobsOut(Wire):
    content: tuple[TokenOut, ...] | None = None


class XGroq(Wire):
    usage: UsageOut | None = None
    error: Any = None


class LooseAnswer(Wire):
    """A whole answer, or one chunk of a stream, with nothing read that a good answer can do without."""

    id: str | None = None
    model: str | None = None
    choices: tuple[ChoiceOut, ...] | None = None
    error: Any = None
    #: Perplexity's sources.
    citations: Any = None
    search_results: Any = None
    #: A word, where it is as documented.
    service_tier: Any = None


class AnswerOut(LooseAnswer):
    """The same with its figures."""

    usage: UsageOut | None = None
    x_groq: XGroq | None = None
    cost: msgspec.Raw = ABSENT


# What nearly every chunk is: a piece of text of one choice. Each field that is read of any other chunk is here, as
# nothing.

Empty = tuple[()] | None


class TextContent(Wire):
    content: str
    refusal: None = None
    reasoning_content: Literal[""] | None = None
    reasoning: Literal[""] | None = None
    reasoning_details: Empty = None
    tool_calls: Empty = None
    function_call: None = None
    images: Empty = None
    annotations: Empty = None
    audio: None = None
    executed_tools: Empty = None


class TextChoice(Wire):
    delta: TextContent
    index: int = 0
    message: None = None
    finish_reason: None = None
    native_finish_reason: None = None
    logprobs: None = None


class TextChunk(Wire):
    choices: tuple[TextChoice]
    id: str | None = None
    model: str | None = None
    service_tier: str | None = None
    error: None = None
    citations: Empty = None
    search_results: Empty = None
    usage: None = None
    x_groq: None = None
    #: Of a cost every value counts, so that none is let by.
    cost: Literal["no cost"] = "no cost"
