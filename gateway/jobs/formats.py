"""
The wire formats that jobs are written in, by the path a direct call of the same request would go to.

A job's body is read by the protocol of its `url`, and its answer is rendered by the same: what is collected later looks
as it would have looked at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Protocol, TypeAlias

from adapters.chat import ChatRequest, ChatResponse


class Format(Protocol):
    """One format. The wire protocols are it."""

    def parse_request(self, body: bytes) -> ChatRequest:
        """Raises MalformedRequest."""
        ...

    def render_response(self, response: ChatResponse) -> bytes: ...

    def parse_response(self, status: int, headers: Mapping[str, str], body: bytes) -> ChatResponse:
        """Of what `render_response` wrote, perhaps in another version. Raises ProviderError."""
        ...


#: By the `url` of a line.
Formats: TypeAlias = Mapping[str, Format]

#: The name of the wire protocol of each `url`.
PROTOCOL_OF: Mapping[str, str] = MappingProxyType(
    {
        "/v1/chat/completions": "chat_completions",
        "/v1/responses": "responses",
        "/v1/messages": "anthropic_messages",
    }
)


def formats(protocols: Mapping[str, Format]) -> Formats:
    """From protocols by name."""
    return {url: protocols[name] for url, name in PROTOCOL_OF.items()}
