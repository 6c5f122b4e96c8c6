"""
OpenAI's Chat Completions, and everyone who speaks it.

    schema     the wire format, as far as something is read from it
    requests   requests, both ways
    answers    whole answers, both ways; usage and cost
    stream     a provider's chunks to events, with proof of the end
    chunks     events to a caller's chunks, and errors as a caller is told them
    embeddings their requests and answers, both ways
    failures   the error table and its envelopes

Differences between vendors are handled by tolerance in reading, and in writing by the quirks an `Endpoint` carries: no
vendor has a name here.
"""

from __future__ import annotations

from collections.abc import Mapping

from adapters import telling
from adapters.chat import ChatRequest, ChatResponse, StopReason
from adapters.contract import (
    AnswerHead,
    EmbeddingCall,
    EmbeddingRequest,
    EmbeddingResponse,
    Endpoint,
    HttpRequest,
    StreamParser,
    StreamRenderer,
    ToldError,
    UpstreamCall,
)
from adapters.envelope import Envelope
from adapters.errors import ProviderError
from adapters.protocols.chat_completions import answers, embeddings, failures, requests
from adapters.protocols.chat_completions.chunks import ChunkRenderer, render_error
from adapters.protocols.chat_completions.embeddings import EmbeddingEnvelope, embedding_envelope
from adapters.protocols.chat_completions.requests import envelope
from adapters.protocols.chat_completions.stream import ChatStream

__all__ = ["ChatCompletions", "EmbeddingEnvelope", "Envelope", "embedding_envelope", "envelope"]


class ChatCompletions:
    """The protocol; a `WireProtocol` and an `EmbeddingProtocol`. It holds nothing and does no I/O."""

    name = answers.NAME
    models_path = "/models"
    untold = telling.endings(StopReason.REFUSAL, StopReason.PAUSE, StopReason.OTHER)

    def parse_request(self, body: bytes) -> ChatRequest:
        return requests.parse_request(body)

    def render_response(self, response: ChatResponse) -> bytes:
        return answers.render_answer(response)

    def new_renderer(self, head: AnswerHead) -> StreamRenderer:
        return ChunkRenderer(head)

    def render_error(self, error: ToldError) -> bytes:
        return render_error(error)

    def render_request(self, call: UpstreamCall, *, stream: bool) -> HttpRequest:
        return requests.render_request(call, stream=stream)

    def parse_response(self, status: int, headers: Mapping[str, str], body: bytes) -> ChatResponse:
        if not 200 <= status < 300:
            raise self.parse_error(status, headers, body)
        return answers.parse_answer(headers, body)

    def parse_error(self, status: int, headers: Mapping[str, str], body: bytes) -> ProviderError:
        return failures.from_response(status, headers, body)

    def new_parser(self, endpoint: Endpoint, headers: Mapping[str, str]) -> StreamParser:
        return ChatStream(endpoint, headers)

    def parse_embedding_request(self, body: bytes) -> EmbeddingRequest:
        return embeddings.parse_request(body)

    def render_embedding_response(self, response: EmbeddingResponse, *, base64: bool) -> bytes:
        return embeddings.render_response(response, base64_wanted=base64)

    def render_embedding_request(self, call: EmbeddingCall) -> HttpRequest:
        return embeddings.render_request(call)

    def parse_embedding_response(self, status: int, headers: Mapping[str, str], body: bytes) -> EmbeddingResponse:
        if not 200 <= status < 300:
            raise self.parse_error(status, headers, body)
        return embeddings.parse_response(headers, body)
