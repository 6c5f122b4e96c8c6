"""
The formats that jobs are written in, by the path a direct call of the same request would go to.

A job's body is read by the format of its `url`, and its answer is rendered by the same: what is collected later looks
as it would have looked at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Protocol, TypeAlias

import msgspec
from typing_extensions import override

from adapters.chat import ChatRequest, ChatResponse
from adapters.contract import EmbeddingProtocol, EmbeddingRequest, EmbeddingResponse, WireProtocol
from adapters.protocols.chat_completions import embedding_envelope
from gateway.call import size_of_embedding

Response: TypeAlias = ChatResponse | EmbeddingResponse


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """What a body asks for."""

    chat: ChatRequest
    #: In place of the chat, which then only tells its size.
    embedding: EmbeddingRequest | None = None


class Format(Protocol):
    """One format."""

    def read(self, body: bytes) -> Asked:
        """Raises MalformedRequest."""
        ...

    def render(self, response: Response, asked: Asked) -> bytes: ...

    def read_back(self, answer: bytes) -> Response:
        """What `render` wrote, perhaps in another version. Raises ProviderError."""
        ...


#: By the `url` of a line.
Formats: TypeAlias = Mapping[str, Format]

EMBEDDINGS = "/v1/embeddings"
RESPONSES = "/v1/responses"
MESSAGES = "/v1/messages"

#: The name of the wire protocol of each `url`.
PROTOCOL_OF: Mapping[str, str] = MappingProxyType(
    {
        "/v1/chat/completions": "chat_completions",
        RESPONSES: "responses",
        MESSAGES: "anthropic_messages",
        EMBEDDINGS: "chat_completions",
    }
)


def formats(protocols: Mapping[str, WireProtocol]) -> Formats:
    """From protocols by name."""
    return {
        url: _Embeddings(protocols[name]) if url == EMBEDDINGS else _Chat(protocols[name])
        for url, name in PROTOCOL_OF.items()
    }


class _Chat(Format):
    def __init__(self, protocol: WireProtocol) -> None:
        self._protocol = protocol

    @override
    def read(self, body: bytes) -> Asked:
        return Asked(chat=self._protocol.parse_request(body))

    @override
    def render(self, response: Response, asked: Asked) -> bytes:
        assert isinstance(response, ChatResponse)
        return self._protocol.render_response(response)

    @override
    def read_back(self, answer: bytes) -> Response:
        return self._protocol.parse_response(200, {}, answer)


class _Embeddings(Format):
    def __init__(self, protocol: WireProtocol) -> None:
        assert isinstance(protocol, EmbeddingProtocol)
        self._protocol = protocol

    @override
    def read(self, body: bytes) -> Asked:
        request = self._protocol.parse_embedding_request(body)
        return Asked(chat=size_of_embedding(request), embedding=request)

    @override
    def render(self, response: Response, asked: Asked) -> bytes:
        assert isinstance(response, EmbeddingResponse)
        assert asked.embedding is not None
        return self._protocol.render_embedding_response(response, base64=embedding_envelope(asked.embedding).base64)

    @override
    def read_back(self, answer: bytes) -> Response:
        response = self._protocol.parse_embedding_response(200, {}, answer)
        # Nobody tells it, since there can be none.
        usage = msgspec.structs.replace(response.usage, output_total=0)
        return msgspec.structs.replace(response, usage=usage)
