"""
Anthropic's Messages API, and everyone who speaks it.

    schema     the wire format, as far as something is read from it
    requests   requests from a caller
    writing    requests to a provider
    answers    whole answers, both ways; usage
    stream     a provider's stream to events, with proof of the end
    rendering  events to a caller's stream
    failures   the error table and the envelope of errors, both ways

The key goes into `x-api-key` and betas into `anthropic-beta`: both are the profile's headers, not written here.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from adapters import telling
from adapters.chat import ChatRequest, ChatResponse, StopReason
from adapters.contract import AnswerHead, Endpoint, HttpRequest, StreamParser, StreamRenderer, ToldError, UpstreamCall
from adapters.envelope import Envelope, envelope
from adapters.errors import Broken, ProviderError
from adapters.protocols.anthropic_messages import answers, failures, requests, writing
from adapters.protocols.anthropic_messages.rendering import MessageRenderer
from adapters.protocols.anthropic_messages.stream import MessageStream

__all__ = ["AnthropicMessages", "Envelope", "envelope"]


class _Counted(msgspec.Struct):
    input_tokens: int


class AnthropicMessages:
    """The protocol; a `WireProtocol`. It holds nothing and does no I/O."""

    name = answers.NAME
    models_path = "/models"
    untold = frozenset(
        {telling.IMAGE, telling.LOGPROBS, telling.CHOICE, telling.NO_USAGE, telling.BROKEN_CALL}
    ) | telling.endings(StopReason.OTHER)

    def parse_request(self, body: bytes) -> ChatRequest:
        return requests.parse_request(body)

    def render_response(self, response: ChatResponse) -> bytes:
        return answers.render_answer(response)

    def render_error(self, error: ToldError) -> bytes:
        return failures.render_error(error)

    def new_renderer(self, head: AnswerHead) -> StreamRenderer:
        return MessageRenderer(head)

    def render_request(self, call: UpstreamCall, *, stream: bool) -> HttpRequest:
        return writing.render_request(call, stream=stream)

    def parse_response(self, status: int, headers: Mapping[str, str], body: bytes) -> ChatResponse:
        if not 200 <= status < 300:
            raise self.parse_error(status, headers, body)
        return answers.parse_answer(headers, body)

    def parse_error(self, status: int, headers: Mapping[str, str], body: bytes) -> ProviderError:
        return failures.from_response(status, headers, body)

    def new_parser(self, endpoint: Endpoint, headers: Mapping[str, str]) -> StreamParser:
        del endpoint  # no quirk of one changes how this protocol is read
        return MessageStream(headers)

    # ------------------------------------------------------ counting tokens

    def render_count_request(self, call: UpstreamCall) -> HttpRequest:
        """Asks how many input tokens a request has. Raises `RequestNotExpressible`."""
        return writing.render_count(call)

    def parse_count_response(self, status: int, headers: Mapping[str, str], body: bytes) -> int:
        """Raises `Rejected` for an error, `Broken` for what is no count."""
        if not 200 <= status < 300:
            raise self.parse_error(status, headers, body)
        try:
            counted = msgspec.json.decode(body, type=_Counted).input_tokens
        except (msgspec.DecodeError, RecursionError) as error:
            raise Broken("what came is no count of tokens", code="malformed") from error
        if counted < 0:
            raise Broken("what came is no count of tokens", code="malformed")
        return counted

    def render_count_response(self, tokens: int) -> bytes:
        return msgspec.json.encode({"input_tokens": tokens})
