"""
Google's Gemini: `generateContent`, `streamGenerateContent` and embeddings, of the Gemini API and of Vertex.

    schema      the wire format of answers, as far as something is read from it
    requests    requests, both ways
    openapi     the older form of schemas, read
    signatures  what a model signed, and where that belongs
    answers     a provider's answers, whole ones, and what they share with chunks
    partial     arguments of a function call that come in pieces
    stream      a provider's chunks to events, with proof of the end
    rendering   answers, chunks and errors as a caller is told them
    embeddings  embeddings, both ways
    failures    the error table, and google.rpc.Status
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
from adapters.protocols.gemini import answers, embeddings, failures, rendering, requests
from adapters.protocols.gemini.requests import envelope
from adapters.protocols.gemini.stream import GeminiStream

__all__ = ["Envelope", "Gemini", "envelope"]


class Gemini:
    """The protocol; a `WireProtocol` and an `EmbeddingProtocol`. It holds nothing and does no I/O."""

    name = answers.NAME
    models_path = "/models"
    untold = telling.endings(StopReason.REFUSAL)

    def parse_request(self, body: bytes) -> ChatRequest:
        return requests.parse_request(body)

    def render_response(self, response: ChatResponse) -> bytes:
        return rendering.render_answer(response)

    def new_renderer(self, head: AnswerHead) -> StreamRenderer:
        return rendering.ChunkRenderer(head)

    def render_error(self, error: ToldError) -> bytes:
        return rendering.render_error(error)

    def render_request(self, call: UpstreamCall, *, stream: bool) -> HttpRequest:
        return requests.render_request(call, stream=stream)

    def parse_response(self, status: int, headers: Mapping[str, str], body: bytes) -> ChatResponse:
        if not 200 <= status < 300:
            raise self.parse_error(status, headers, body)
        return answers.parse_answer(headers, body)

    def parse_error(self, status: int, headers: Mapping[str, str], body: bytes) -> ProviderError:
        return failures.from_response(status, headers, body)

    def new_parser(self, endpoint: Endpoint, headers: Mapping[str, str]) -> StreamParser:  # noqa: ARG002 - no quirk
        return GeminiStream(headers)

    def parse_embedding_request(self, body: bytes) -> EmbeddingRequest:
        return embeddings.parse_request(body)

    def render_embedding_response(self, response: EmbeddingResponse, *, base64: bool) -> bytes:  # noqa: ARG002
        """`base64` is a wish of another protocol's callers; vectors are numbers here."""
        return embeddings.render_response(response)

    def render_embedding_request(self, call: EmbeddingCall) -> HttpRequest:
        return embeddings.render_request(call)

    def parse_embedding_response(self, status: int, headers: Mapping[str, str], body: bytes) -> EmbeddingResponse:
        if not 200 <= status < 300:
            raise self.parse_error(status, headers, body)
        return embeddings.parse_response(headers, body)
