"""
The wire format of Gemini's answers, as far as something is read from it.

Unknown fields are ignored by these types, and what is told on but not looked into is left raw. Requests are read field
by field in `requests`, since Google takes every name in two spellings.

Source: https://ai.google.dev/api/generate-content
"""

from __future__ import annotations

from typing import Any

import msgspec

from adapters.body import ABSENT, Wire


class PartialArg(Wire, rename="camel"):
    """A piece of an argument that is streamed (Vertex): where it belongs, and one of the values."""

    json_path: str
    string_value: str | None = None
    number_value: int | float | None = None
    bool_value: bool | None = None


class FunctionCall(Wire, rename="camel"):
    name: str | None = None
    args: msgspec.Raw = ABSENT
    id: str | None = None
    partial_args: tuple[PartialArg, ...] | None = None
    will_continue: bool | None = None


class Blob(Wire, rename="camel"):
    mime_type: str | None = None
    data: bytes = b""


class Part(Wire, rename="camel"):
    text: str | None = None
    thought: bool | None = None
    thought_signature: str | None = None
    function_call: FunctionCall | None = None
    inline_data: Blob | None = None
    file_data: msgspec.Raw = ABSENT
    executable_code: msgspec.Raw = ABSENT
    code_execution_result: msgspec.Raw = ABSENT
    tool_call: msgspec.Raw = ABSENT
    tool_response: msgspec.Raw = ABSENT
    function_response: msgspec.Raw = ABSENT


class Content(Wire):
    parts: tuple[Part, ...] | None = None


class GroundingChunk(Wire):
    maps: msgspec.Raw = ABSENT


class Grounding(Wire, rename="camel"):
    web_search_queries: tuple[str, ...] | None = None
    grounding_chunks: tuple[GroundingChunk, ...] | None = None


class Candidate(Wire, rename="camel"):
    index: int = 0
    content: Content | None = None
    finish_reason: str | None = None
    logprobs_result: msgspec.Raw = ABSENT
    citation_metadata: msgspec.Raw = ABSENT
    grounding_metadata: msgspec.Raw = ABSENT
    url_context_metadata: msgspec.Raw = ABSENT
    continuation_token: msgspec.Raw = ABSENT


class LogprobsCandidate(Wire, rename="camel"):
    token: str = ""
    log_probability: float = 0.0


class TopCandidates(Wire):
    candidates: tuple[LogprobsCandidate, ...] = ()


class LogprobsResult(Wire, rename="camel"):
    chosen_candidates: tuple[LogprobsCandidate, ...] = ()
    top_candidates: tuple[TopCandidates, ...] = ()


class PromptFeedback(Wire, rename="camel"):
    block_reason: str | None = None


class ModalityCount(Wire, rename="camel"):
    modality: str | None = None
    token_count: int | None = None


class UsageMetadata(Wire, rename="camel"):
    prompt_token_count: int | None = None
    cached_content_token_count: int | None = None
    candidates_token_count: int | None = None
    thoughts_token_count: int | None = None
    tool_use_prompt_token_count: int | None = None
    prompt_tokens_details: tuple[ModalityCount, ...] | None = None
    cache_tokens_details: tuple[ModalityCount, ...] | None = None
    candidates_tokens_details: tuple[ModalityCount, ...] | None = None
    #: Words, where they are as documented.
    service_tier: Any = None
    traffic_type: Any = None


class LooseChunk(Wire, rename="camel"):
    """A whole answer, or one chunk of a stream, with nothing read that a good answer can do without."""

    candidates: tuple[Candidate, ...] | None = None
    prompt_feedback: PromptFeedback | None = None
    model_version: str | None = None
    response_id: str | None = None
    error: msgspec.Raw = ABSENT


class Chunk(LooseChunk, rename="camel"):
    """The same with its figures."""

    usage_metadata: UsageMetadata | None = None


class Embedding(Wire):
    values: tuple[float, ...] = ()


class EmbeddingUsage(Wire, rename="camel"):
    prompt_token_count: int | None = None


class EmbeddingsOut(Wire, rename="camel"):
    """Of `batchEmbedContents`, and of `embedContent` with its one."""

    embeddings: tuple[Embedding, ...] | None = None
    embedding: Embedding | None = None
    usage_metadata: EmbeddingUsage | None = None
    error: msgspec.Raw = ABSENT
