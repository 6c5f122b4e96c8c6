"""
The seam between the gateway and the providers.

A `WireProtocol` knows a format and does no I/O. An `Endpoint` is where and as whom. `adapters.client.Upstream` is the
one thing that sends, and offers the three calls the gateway makes: `complete`, `stream`, `health_check`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Literal, Protocol, TypeAlias, runtime_checkable

import msgspec

from adapters.chat import ChatRequest, ChatResponse, Event, Native, NativeRequest
from adapters.errors import ProviderError
from adapters.limits import Remaining
from adapters.paths import CANONICAL, Paths
from metering.usage import NOTHING, Usage

#: Events that arrived together. Joining them downstream costs no delay.
Batch: TypeAlias = Sequence[Event]


def relayed(batch: Batch) -> tuple[Batch, bytes | None]:
    """The events of a batch, and the provider's own bytes beside them where the call asked for `relay` and has them."""
    last: object = batch[-1] if batch else None
    return (batch[:-1], last.raw) if isinstance(last, Native) else (batch, None)


class Clocks(msgspec.Struct, frozen=True, kw_only=True):
    """How long a call may take, in seconds. The time a slow caller takes to read runs none of them."""

    #: From dispatch to the first content or terminal of a stream. A plain call has only the execution limit.
    first_byte_s: float = 5.0
    #: Between two pieces of payload; comments and keep-alives do not count as payload.
    gap_s: float = 1.5
    connect_s: float = 5.0


class Endpoint(msgspec.Struct, frozen=True, kw_only=True):
    """One provider, resolved: variables expanded, credentials read. Never logged whole."""

    provider: str
    protocol: str
    base_url: str
    #: Authorization included.
    headers: Mapping[str, str] = {}
    clocks: Clocks = Clocks()
    #: Top-level request fields never sent to, and always sent to, this provider. `omit` may also name what a message
    #: holds and the protocol cannot say: "messages.cache", "messages.is_error", "messages.reasoning",
    #: "messages.name", "messages.detail", "messages.citations", and "messages.place": a system message in the midst of
    #: the others then joins those at the start. It is then dropped, not refused.
    omit: frozenset[str] = frozenset()
    #: The same words for one call: dropped only where the protocol cannot say it, and sent where it can.
    drops: frozenset[str] = frozenset()
    force: Mapping[str, msgspec.Raw] = {}
    #: The provider ends its streams without a sentinel; a clean end of the body is then its terminal.
    no_sentinel: bool = False
    #: The provider's only word for the output limit. None: the caller's own word is kept, and a request that has none
    #: uses the protocol's current one. A limit sent under a name the provider does not know would be lost in silence.
    max_tokens_field: str | None = None
    #: The limit of output tokens for a request that has none, where the protocol demands one. None: the protocol's.
    default_max_tokens: int | None = None
    #: The field of an assistant message in which this provider takes its reasoning back. None: it takes none. A field
    #: of text, or one of two with a shape of their own: "reasoning_details" (OpenRouter) and "content" (Mistral's
    #: `thinking` parts). "extra_content" takes the signatures of tool calls alone (Gemini's compatible endpoint).
    reasoning_field: str | None = None
    #: How reasoning is asked for here: "effort" in words, "budget" in tokens, "off" not at all, and switched off where
    #: the protocol can. None: as the protocol usually does. What "off" drops of a request is told as dropped.
    reasoning: str | None = None
    #: A quirk of Chat Completions: reasoning is asked for by an object, `reasoning: {effort}` or `{max_tokens}`.
    reasoning_object: bool = False
    #: A quirk of Chat Completions: the provider takes `cache_control` on parts of messages and on tools.
    cache_control: bool = False
    max_response_bytes: int = 32 * 1024 * 1024
    #: Seconds for which a connection without work is kept for the next request; 0: each is used once. Below the idle
    #: time after which common servers close (uvicorn and Node after 5 s), so that the race of their close with our
    #: request stays rare: a request that loses it is uncertain.
    keep_alive_s: float = 4.0
    #: What a health check asks, where the protocol's list of models tells less of this provider.
    check_path: str | None = None


class UpstreamCall(msgspec.Struct, frozen=True, kw_only=True):
    endpoint: Endpoint
    #: The upstream's name for the model.
    model: str
    request: ChatRequest
    #: The event loop's time at which the attempt must be over, whatever happens.
    deadline: float
    #: A caller of the endpoint's own protocol wants the provider's stream as it came: see `adapters.chat.Native`. Where
    #: the request is in another protocol, or the provider answers with no event stream, there are none of these.
    relay: bool = False
    #: As `Adapter.render` made it of the same call. None: it is made when it is sent.
    rendered: HttpRequest | None = None


class HttpRequest(msgspec.Struct, frozen=True, kw_only=True):
    #: Appended to the base URL.
    path: str
    headers: Mapping[str, str]
    body: bytes
    #: Paths of what the caller asked and this provider is not sent, as the caller wrote them: see `adapters.sending`.
    dropped: tuple[str, ...] = ()
    #: The limit of output tokens in it, where answers of the protocol may not say that it cut them: one that gives no
    #: reason for its end and has as many tokens was cut.
    silent_limit: int | None = None


class EmbeddingRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Texts, or texts as token numbers, to be turned into vectors."""

    inputs: tuple[str | tuple[int, ...], ...]
    dimensions: int | None = None
    #: What the vectors are for, where the provider asks: "query", "document", or a word of its own.
    purpose: str | None = None
    end_user: str | None = None
    native: NativeRequest | None = None
    paths: Paths = CANONICAL

    def written(self, path: str) -> str:
        """A canonical path as the caller wrote it."""
        if self.paths is CANONICAL:
            return path
        return self.paths.written(path, self.native.fields if self.native is not None else None, "")


class EmbeddingCall(msgspec.Struct, frozen=True, kw_only=True):
    endpoint: Endpoint
    model: str
    request: EmbeddingRequest
    deadline: float
    rendered: HttpRequest | None = None


class EmbeddingResponse(msgspec.Struct, frozen=True, kw_only=True):
    #: One for each input, in their order.
    vectors: tuple[tuple[float, ...], ...]
    usage: Usage = NOTHING
    served_model: str | None = None
    provider_request_id: str | None = None
    reported_cost_usd: str | None = None
    native: msgspec.Raw | None = None
    native_protocol: str | None = None
    dropped: tuple[str, ...] = ()
    remaining: Remaining | None = None


class CountResponse(msgspec.Struct, frozen=True, kw_only=True):
    """How many input tokens a request has, as its provider counts."""

    tokens: int
    dropped: tuple[str, ...] = ()
    remaining: Remaining | None = None


class AnswerHead(msgspec.Struct, frozen=True, kw_only=True):
    """What a rendered stream says of itself, apart from what the provider said."""

    id: str
    model: str
    #: Unix time, seconds.
    created: int
    #: The caller asked to be told the usage, where its protocol tells that on request only.
    include_usage: bool = True


class ToldError(msgspec.Struct, frozen=True, kw_only=True):
    """An error for a caller, before its protocol gave it a shape. Holds no secret, prompt or answer."""

    status: int
    #: Ours, stable.
    code: str
    message: str
    #: The field at fault.
    param: str | None = None
    request_id: str | None = None
    #: What kind of error it is, in OpenAI's words; None: what its status says.
    type: str | None = None


class StreamRenderer(Protocol):
    """
    Events to the bytes of a caller's stream. One per stream.

    Every call gives whole events of the stream; joined, they are a stream that this protocol's own parser proves
    complete after `Finished`, and never before.
    """

    def feed(self, batch: Batch) -> bytes: ...

    def fail(self, error: ToldError) -> bytes:
        """The error as this protocol tells it in a stream. Nothing follows it."""
        ...


class StreamParser(Protocol):
    """Bytes to events, at any split. One per stream."""

    def feed(self, data: bytes) -> Batch:
        """
        The events completed by these bytes.

        Raises `Rejected` on an error event of the protocol and `Broken` on what is not the protocol at all. Events
        that came before the error are returned first; the next call, of `feed(b"")` too, then raises.
        """
        ...

    def close(self) -> Batch:
        """The body ended cleanly. Raises `Broken` (code "no_terminal") unless the answer is proven complete."""
        ...

    @property
    def finished(self) -> bool:
        """Terminal proof was seen; bytes that follow can only add usage and cost."""
        ...

    @property
    def ended_at(self) -> tuple[int, int] | None:
        """
        What of its feed ended the stream, by proof or by a failure that may yet have to come out: behind how many
        bytes, which are whole events, and which event there, counted from 1. None while it goes on.
        """
        ...

    @property
    def payloads(self) -> int:
        """How many pieces of payload were read, those that gave no event too; comments and keep-alives are none."""
        ...

    @property
    def is_json(self) -> bool:
        """The body is one JSON text, so far, and no events: the provider did not heed `stream`."""
        ...


class WireProtocol(Protocol):
    """
    One format, both ways. `parse_request`, `render_response`, `new_renderer` and `render_error` face our callers, the
    others the providers.
    """

    @property
    def name(self) -> str: ...

    @property
    def models_path(self) -> str:
        """Where a provider lists its models for nothing; appended to the base URL."""
        ...

    @property
    def untold(self) -> frozenset[str]:
        """What of an answer this format cannot tell a caller, in the words of `adapters.telling`."""
        ...

    def parse_request(self, body: bytes) -> ChatRequest:
        """Raises `MalformedRequest` with the field's path."""
        ...

    def render_response(self, response: ChatResponse) -> bytes: ...

    def new_renderer(self, head: AnswerHead) -> StreamRenderer:
        """For one stream to a caller."""
        ...

    def render_error(self, error: ToldError) -> bytes:
        """The body of an error response, with our stable code in it."""
        ...

    def render_request(self, call: UpstreamCall, *, stream: bool) -> HttpRequest:
        """Raises `RequestNotExpressible` before anything is sent."""
        ...

    def parse_response(self, status: int, headers: Mapping[str, str], body: bytes) -> ChatResponse:
        """Raises `Rejected` for an error, whatever the status, and `Broken` for a body without its stop field."""
        ...

    def parse_error(self, status: int, headers: Mapping[str, str], body: bytes) -> ProviderError:
        """What an error response means, from its status, machine code and headers together."""
        ...

    def new_parser(self, endpoint: Endpoint, headers: Mapping[str, str]) -> StreamParser:
        """For one stream of this endpoint; `headers` are the response's, in lower case."""
        ...


@runtime_checkable
class EmbeddingProtocol(Protocol):
    """One format for embeddings, both ways; a wire protocol that has them offers these, too."""

    def parse_embedding_request(self, body: bytes) -> EmbeddingRequest:
        """Raises `MalformedRequest` with the field's path."""
        ...

    def render_embedding_response(self, response: EmbeddingResponse, *, base64: bool) -> bytes: ...

    def render_embedding_request(self, call: EmbeddingCall) -> HttpRequest:
        """Raises `RequestNotExpressible` before anything is sent."""
        ...

    def parse_embedding_response(self, status: int, headers: Mapping[str, str], body: bytes) -> EmbeddingResponse:
        """Raises `Rejected` for an error, and `Broken` for what is no vector for each input."""
        ...


@runtime_checkable
class CountingProtocol(Protocol):
    """A format in which a provider can be asked for nothing how many tokens a request has."""

    def render_count_request(self, call: UpstreamCall) -> HttpRequest:
        """Raises `RequestNotExpressible` before anything is sent."""
        ...

    def parse_count_response(self, status: int, headers: Mapping[str, str], body: bytes) -> int:
        """Raises `Rejected` for an error, `Broken` for what is no count."""
        ...


#: What is wanted of a provider: a method of `Adapter`.
Way: TypeAlias = Literal["complete", "embed", "count", "stream"]


class Adapter(Protocol):
    """How the gateway talks to providers. Every method raises `ProviderError` or `RequestNotExpressible`."""

    def render(self, call: UpstreamCall | EmbeddingCall, way: Way) -> HttpRequest:
        """What that method would send for this call. Nothing is sent. Raises `RequestNotExpressible` alone."""
        ...

    async def complete(self, call: UpstreamCall) -> ChatResponse:
        """A whole answer, or an error. Cancelling it closes the connection."""
        ...

    async def embed(self, call: EmbeddingCall) -> EmbeddingResponse:
        """A vector for each input, or an error. Cancelling it closes the connection."""
        ...

    async def count(self, call: UpstreamCall) -> CountResponse:
        """How many input tokens the request has, or an error. Costs nothing. Cancelling it closes the connection."""
        ...

    def stream(self, call: UpstreamCall) -> AbstractAsyncContextManager[AsyncIterator[Batch]]:
        """
        Dispatches on entry and yields batches of events; leaving closes the connection unless the body ended.

        The last event is `Finished`. A stream that ends without one raises `Broken`, one that the provider ends with
        an error raises `Rejected`; both also after content. Cancelling a wait for the next batch loses nothing: it may
        be asked for again.
        """
        ...

    async def health_check(self, endpoint: Endpoint) -> bool:
        """
        Asks a free endpoint of the provider (its model list). False where it has none, so that no more is known than
        that something answers there. Raises `ProviderError` when it does not answer, or not as a provider does.
        """
        ...
