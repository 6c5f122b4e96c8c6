"""
OpenAI's Responses (https://platform.openai.com/docs/api-reference/responses), and everyone who speaks it.

    schema     the wire format, as far as something is read from it
    requests   requests of a caller
    writing    requests to a provider
    answers    whole answers, both ways; usage and cost
    stream     events to events, with proof of the end
    rendering  events to a caller's stream; errors
    failures   the error table and its envelopes
    kept       responses that are made in the background and looked up by their id

What the canonical form does not carry of an answer (calls of built-in tools, citations) is named in it as omitted. Of
a message that a caller sends back, its `status`, `phase` and annotations are marks of the provider that made it and
ask nothing of another one: they are kept for a provider of this protocol, and are nothing to refuse.
"""

from __future__ import annotations

from collections.abc import Mapping

from adapters import telling
from adapters.chat import ChatRequest, ChatResponse, StopReason
from adapters.contract import AnswerHead, Endpoint, HttpRequest, StreamParser, StreamRenderer, ToldError, UpstreamCall
from adapters.envelope import Envelope, envelope
from adapters.errors import ProviderError
from adapters.protocols.responses import answers, failures, rendering, requests, writing
from adapters.protocols.responses.stream import ResponseStream

__all__ = ["Envelope", "Responses", "envelope"]


class Responses:
    """The protocol; a `WireProtocol`. It holds nothing and does no I/O."""

    name = answers.NAME
    models_path = "/models"
    untold = frozenset({telling.CHOICE}) | telling.endings(StopReason.OTHER)

    def parse_request(self, body: bytes) -> ChatRequest:
        return requests.parse_request(body)

    def render_response(self, response: ChatResponse) -> bytes:
        return answers.render_answer(response)

    def new_renderer(self, head: AnswerHead) -> StreamRenderer:
        return rendering.EventRenderer(head)

    def render_error(self, error: ToldError) -> bytes:
        return rendering.render_error(error)

    def render_request(self, call: UpstreamCall, *, stream: bool) -> HttpRequest:
        return writing.render_request(call, stream=stream)

    def parse_response(self, status: int, headers: Mapping[str, str], body: bytes) -> ChatResponse:
        if not 200 <= status < 300:
            raise self.parse_error(status, headers, body)
        return answers.parse_answer(headers, body)

    def parse_error(self, status: int, headers: Mapping[str, str], body: bytes) -> ProviderError:
        return failures.from_response(status, headers, body)

    def new_parser(self, endpoint: Endpoint, headers: Mapping[str, str]) -> StreamParser:  # noqa: ARG002 one for all
        return ResponseStream(headers)
