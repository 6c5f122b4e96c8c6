"""
The one place that sends to a provider: what a protocol rendered goes out, and what comes back is fed to its parser.

It keeps three facts straight that a plain HTTP client does not. Whether a request can have reached the provider: only
where no byte of it was written is a failure `NotSent`; every other one is uncertain. Whether an answer ended: by the
protocol's proof, on a body that ended by its framing, and never because a connection closed. And whose time passes:
the clocks run while the provider is awaited, never while a slow caller reads.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import AsyncIterator, Callable, Mapping
from importlib.metadata import version
from types import TracebackType
from typing import Self, TypeVar, cast

import msgspec

from adapters.chat import ChatResponse, Choice, ChoiceEnd, Event, Finished, Native, StopReason, UsageReport
from adapters.contract import (
    Batch,
    CountingProtocol,
    CountResponse,
    EmbeddingCall,
    EmbeddingProtocol,
    EmbeddingResponse,
    Endpoint,
    HttpRequest,
    StreamParser,
    UpstreamCall,
    Way,
    WireProtocol,
)
from adapters.errors import Broken, NotSent, ProviderError, RequestNotExpressible
from adapters.halves import Halves, mended
from adapters.http.clock import Clock
from adapters.http.connection import Answer
from adapters.http.pool import Pool
from adapters.http.request import head
from adapters.limits import Remaining, remaining
from adapters.protocols import PROTOCOLS
from adapters.relay import RelayedStream
from adapters.sse import MAX_VALUES
from metering.usage import NOTHING, Usage

#: After the terminal of a stream: how long and how far to read on for a late cost and the end of the body, which lets
#: the connection be used again.
_TRAIL_S = 0.25
_TRAIL_BYTES = 64 * 1024
#: So many heads of requests are kept ready: an endpoint has one for each of its paths, and these may name a model.
_HEADS = 512
_WHITE = b" \t\r\n\xef\xbb\xbf"
#: As `MAX_VALUES`, with room for the numbers of 2,048 embeddings.
_MAX_NUMBERS = 8_000_000


_A = TypeVar("_A", ChatResponse, Finished, EmbeddingResponse, CountResponse)


class Upstream:
    """
    The adapter for every protocol in `protocols`, over one pool of connections. An async context manager.

    No request is ever sent twice. A kept connection that the provider closes upon a request is uncertain: what the
    socket took before the close may have been read.
    """

    def __init__(self, protocols: Mapping[str, WireProtocol] = PROTOCOLS) -> None:
        self._protocols = protocols
        self._pool: Pool | None = None
        self._head = functools.lru_cache(_HEADS)(head)
        self._agent = ("user-agent", f"tollbridge/{version('tollbridge')}")

    async def __aenter__(self) -> Self:
        self._pool = Pool()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pool, self._pool = self._pool, None
        if pool is not None:
            await pool.close()

    def render(self, call: UpstreamCall | EmbeddingCall, way: Way) -> HttpRequest:
        """
        What that method would send. Raises `RequestNotExpressible`, also where the endpoint's protocol has no
        embeddings, or no way to ask for a count.
        """
        if isinstance(call, EmbeddingCall):
            return self._embedding(call.endpoint).render_embedding_request(call)
        if way == "count":
            return self._counting(call.endpoint).render_count_request(call)
        return self._protocols[call.endpoint.protocol].render_request(call, stream=way == "stream")

    def _embedding(self, endpoint: Endpoint) -> EmbeddingProtocol:
        protocol = self._protocols[endpoint.protocol]
        if not isinstance(protocol, EmbeddingProtocol):
            raise RequestNotExpressible("model", f"{endpoint.protocol} has no embeddings")
        return protocol

    def _counting(self, endpoint: Endpoint) -> CountingProtocol:
        protocol = self._protocols[endpoint.protocol]
        if not isinstance(protocol, CountingProtocol):
            raise RequestNotExpressible("model", f"{endpoint.protocol} does not count tokens")
        return protocol

    async def complete(self, call: UpstreamCall) -> ChatResponse:
        """A whole answer. Runs only the clock for connecting and the deadline."""
        protocol = self._protocols[call.endpoint.protocol]
        request = call.rendered or self.render(call, "complete")
        return await self._whole(call, request, protocol.parse_response)

    async def embed(self, call: EmbeddingCall) -> EmbeddingResponse:
        """
        A vector for each input. As `complete`, and raises `RequestNotExpressible` where the endpoint's protocol has no
        embeddings.
        """
        protocol = self._embedding(call.endpoint)
        request = call.rendered or self.render(call, "embed")
        answer = await self._whole(call, request, protocol.parse_embedding_response, _MAX_NUMBERS)
        if len(answer.vectors) != len(call.request.inputs):
            raise Broken("the answer has not one embedding for each input", code="malformed")
        return answer

    async def count(self, call: UpstreamCall) -> CountResponse:
        """
        How many input tokens a request has. As `complete`, and raises `RequestNotExpressible` where the endpoint's
        protocol has no way to ask.
        """
        parse = self._counting(call.endpoint).parse_count_response
        request = call.rendered or self.render(call, "count")
        return await self._whole(call, request, lambda *answer: CountResponse(tokens=parse(*answer)))

    async def _whole(
        self,
        call: UpstreamCall | EmbeddingCall,
        request: HttpRequest,
        parse: Callable[[int, Mapping[str, str], bytes], _A],
        max_values: int = MAX_VALUES,
    ) -> _A:
        """Sends, and gives what `parse` makes of the whole answer."""
        clock = Clock(call.deadline)
        answer = await self._send(
            call.endpoint, "POST", request.path, request.headers, request.body, clock, encoding="gzip, deflate"
        )
        left = remaining(answer.headers, clock.now())
        body = _Body(answer, call.endpoint)
        said: bytes | None = None
        try:
            said = await body.whole(max_values)
            with _shallow:
                read = parse(answer.status, answer.headers, said)
        except ProviderError as error:
            error.remaining = left
            if isinstance(error, Broken):
                error.answered = body.begun and 200 <= answer.status < 300 and not (body.framed and _is_page(said))
            raise
        finally:
            answer.close()
        told = _Told(remaining=left, dropped=request.dropped, silent_limit=request.silent_limit)
        return _completed(_cut_told(read, told), told)

    @contextlib.asynccontextmanager
    async def stream(self, call: UpstreamCall) -> AsyncIterator[AsyncIterator[Batch]]:
        """Dispatches on entry; an answer's head was received and is no error when it yields."""
        protocol = self._protocols[call.endpoint.protocol]
        request = call.rendered or self.render(call, "stream")
        native = call.request.native
        clocks = call.endpoint.clocks
        clock = Clock(call.deadline, clocks.first_byte_s, "first_byte_timeout")
        answer = await self._send(
            # Compression would only hold events back.
            call.endpoint,
            "POST",
            request.path,
            request.headers,
            request.body,
            clock,
            encoding="identity",
        )
        try:
            left = remaining(answer.headers, clock.now())
            body = _Body(answer, call.endpoint)
            if not 200 <= answer.status < 300:
                said = await body.whole()
                with _shallow:
                    error = protocol.parse_error(answer.status, answer.headers, said)
                error.remaining = left
                raise error
            parser = protocol.new_parser(call.endpoint, answer.headers)
            if call.relay and native is not None and native.protocol == call.endpoint.protocol:
                parser = RelayedStream(parser)
            told = _Told(remaining=left, dropped=request.dropped, silent_limit=request.silent_limit)
            yield _Batches(parser, body, clock, clocks.gap_s, told)
        finally:
            answer.close()

    async def health_check(self, endpoint: Endpoint) -> bool:
        """
        GET of the model list, or of what the endpoint names. False where the provider answers that it has none: it is
        up, and no more was tried. Raises `Broken` for an answer that is no JSON.
        """
        clocks = endpoint.clocks
        clock = Clock(asyncio.get_running_loop().time() + clocks.connect_s + clocks.first_byte_s)
        accept = {"accept": "application/json"}
        path = endpoint.check_path or self._protocols[endpoint.protocol].models_path
        answer = await self._send(endpoint, "GET", path, accept, None, clock, encoding="gzip, deflate")
        try:
            body = await _Body(answer, endpoint).whole()
        finally:
            answer.close()
        if answer.status in {404, 405}:
            return False
        if not 200 <= answer.status < 300:
            raise self._protocols[endpoint.protocol].parse_error(answer.status, answer.headers, body)
        if body.lstrip(_WHITE)[:1] not in {b"{", b"["}:
            raise Broken("what came is no list of models: it is not JSON", code="malformed", status=answer.status)
        return True

    async def _send(
        self,
        endpoint: Endpoint,
        method: str,
        path: str,
        headers: Mapping[str, str],
        body: bytes | None,
        clock: Clock,
        *,
        encoding: str,
    ) -> Answer:
        """Sends, and waits for the head of the answer. Raises `NotSent` and `Broken`."""
        pool = self._pool
        if pool is None:
            raise RuntimeError("an Upstream is used inside its own `async with`")
        fields = (self._agent, ("accept-encoding", encoding), *headers.items(), *endpoint.headers.items())
        origin, start = self._head(method, endpoint.base_url, path, fields)
        kept = pool.free(origin) if endpoint.keep_alive_s else None
        connection = kept or await pool.connect(origin, clock, endpoint.clocks.connect_s)
        connection.keep_alive_s = endpoint.keep_alive_s
        now = clock.now()
        until, code = clock.until(now)
        if until <= now:
            pool.freed(connection)
            raise NotSent("no connection in time", code="deadline" if code == "deadline" else "connect_timeout")
        answer = connection.send(start, body, clock)
        try:
            await answer.head()
        except BaseException:
            answer.close()
            raise
        return answer


class _Body:
    """The decoded body of one answer, bounded."""

    __slots__ = ("_answer", "_left", "_most")

    def __init__(self, answer: Answer, endpoint: Endpoint) -> None:
        self._answer = answer
        self._left = self._most = endpoint.max_response_bytes

    @property
    def begun(self) -> bool:
        """Some of it has come."""
        return self._left < self._most

    @property
    def framed(self) -> bool:
        """It has ended, and not by a connection that closed."""
        return self._answer.framed

    @property
    def ended(self) -> bool:
        return self._answer.ended

    def close(self) -> None:
        self._answer.close()

    async def read(self) -> bytes:
        """What has arrived, or what arrives next; empty at the end. Raises `Broken`."""
        data = await self._answer.read()
        self._left -= len(data)
        if self._left < 0:
            raise Broken("the answer is too large", code="response_too_large")
        return data

    async def whole(self, max_values: int = MAX_VALUES) -> bytes:
        """All of it. Not kept in pieces: of one byte each they would cost forty times as much."""
        data = await self.read()
        values = data.count(b",")
        if data and not self._answer.ended:
            body = bytearray(data)
            while data and values <= max_values:
                data = await self.read()
                body += data
                values += data.count(b",")
            data = bytes(body)
        if values > max_values:
            raise Broken("the answer holds too many values", code="response_too_large")
        return mended(data)


def _is_page(said: bytes | None) -> bool:
    """
    What came whole is no beginning of an answer in any protocol, JSON or events, but somebody's page or text. A stream
    that brings this has given nothing either.
    """
    return said is not None and not said.lstrip(_WHITE).startswith((b"{", b"[", b"data:", b"event:", b"id:", b":"))


class _Told(msgspec.Struct, frozen=True, kw_only=True):
    """What an answer tells beside what its protocol read in it."""

    remaining: Remaining | None
    dropped: tuple[str, ...]
    silent_limit: int | None


def _is_cut(end: Choice | ChoiceEnd, usage: Usage, limit: int) -> bool:
    silent = not end.native_stop_reason and end.stop_reason is StopReason.STOP
    return silent and usage.output_total is not None and usage.output_total >= limit


def _cut_told(answer: _A, told: _Told) -> _A:
    """That the limit cut the answer, where the provider has no word for it."""
    limit = told.silent_limit
    if limit is None or not isinstance(answer, ChatResponse):
        return answer
    choices = tuple(
        msgspec.structs.replace(choice, stop_reason=StopReason.LENGTH)
        if _is_cut(choice, answer.usage, limit)
        else choice
        for choice in answer.choices
    )
    return msgspec.structs.replace(answer, choices=choices)


def _completed(answer: _A, told: _Told) -> _A:
    if told.remaining is None and not told.dropped:
        return answer
    return msgspec.structs.replace(answer, remaining=told.remaining, dropped=told.dropped)


class _Batches:
    """
    The events of one stream, in the batches they came in. `Finished` is the last one, or an error is raised.

    A wait for the next batch that is cancelled loses nothing: whoever asks again reads on where it was.
    """

    __slots__ = (
        "_body",
        "_broke",
        "_clock",
        "_ended",
        "_finished",
        "_gap_s",
        "_halves",
        "_over",
        "_parser",
        "_payloads",
        "_relay",
        "_started",
        "_told",
        "_trail",
        "_usage",
    )

    def __init__(self, parser: StreamParser, body: _Body, clock: Clock, gap_s: float, told: _Told) -> None:
        self._parser = parser
        self._relay = parser if isinstance(parser, RelayedStream) else None
        self._body = body
        self._halves = Halves()
        #: How the body broke, where that is yet to come out.
        self._broke: Broken | None = None
        self._clock = clock
        self._gap_s = gap_s
        self._told = told
        self._finished: Finished | None = None
        #: Content was seen: the gap clock has taken over.
        self._started = False
        self._payloads = 0
        self._ended = False
        self._over = False
        #: Events that came behind the terminal.
        self._trail: list[Event] = []
        self._usage = NOTHING

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Batch:
        if self._over:
            raise StopAsyncIteration
        try:
            # An error that was waiting behind the last batch comes out.
            waiting = self._ended or self._broke is not None or self._parser.ended_at is not None
            given = self._read(b"") if waiting else ()
            while not given and self._finished is None:
                try:
                    data = await self._body.read()
                except Broken as error:
                    # What was held came before it.
                    given = self._read(self._halves.take())
                    if not given and self._finished is None:
                        raise
                    self._broke = error
                else:
                    given = self._read(self._halves.feed(data)) if data else self._closed()
            return given or await self._last()
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            if isinstance(error, ProviderError):
                error.remaining = self._told.remaining
            if isinstance(error, Broken):
                # As of a plain call: it had begun to answer, whatever form it chose.
                error.answered = self._parser.is_json
            self._over = True
            self._body.close()
            raise

    def _read(self, data: bytes) -> Batch:
        """What the parser makes of that, as far as it is to be given out now."""
        if self._finished is not None:
            return ()
        try:
            batch = self._parser.close() if self._ended else self._parser.feed(data)
        except RecursionError as error:
            raise _too_deep() from error
        if batch:
            return self._given(batch)
        if self._broke is not None:
            raise self._broke
        if self._ended:
            raise Broken("the stream ended without proof that it is complete", code="no_terminal")
        self._run_clock(batch)
        return ()

    def _closed(self) -> Batch:
        """What the parser makes of the end of the body, and before that of what was held."""
        if (held := self._halves.take()) and ((given := self._read(held)) or self._finished is not None):
            return given
        if not self._body.framed:
            raise Broken("the connection closed before the answer was complete", code="connection_lost")
        self._ended = True
        return self._read(b"")

    def _given(self, batch: Batch) -> Batch:
        """Nothing where it is the terminal and no more, and the end of the body is still to come."""
        last = batch[-1]
        limit = self._told.silent_limit
        if limit is not None:
            for event in batch:
                if isinstance(event, UsageReport):
                    self._usage = self._usage.merge(event.usage)
        if not isinstance(last, Finished):
            self._run_clock(batch)
            return self._with_raw(batch)
        completed = _completed(last, self._told)
        if limit is not None and any(_is_cut(end, self._usage, limit) for end in last.ends):
            cut = tuple(msgspec.structs.replace(end, stop_reason=StopReason.LENGTH) for end in last.ends)
            completed = msgspec.structs.replace(completed, ends=cut)
        if completed is not last:
            last = completed
            batch = [*batch[:-1], last]
        if self._body.ended:
            self._over = True
            return self._with_raw(batch, last=True)
        self._finished = last
        # Content is not held back for what may follow the terminal.
        return self._with_raw(batch[:-1]) if len(batch) > 1 else ()

    def _with_raw(self, batch: Batch, *, last: bool = False) -> Batch:
        if self._relay is None or (raw := self._relay.take()) is None:
            return batch
        native = Native(raw + self._relay.terminal if last else raw)
        return [*batch, cast("Event", native)]

    def _run_clock(self, batch: Batch) -> None:
        if not self._started:
            self._started = any(not isinstance(event, UsageReport) for event in batch)
        if self._started and self._parser.payloads != self._payloads:
            self._payloads = self._parser.payloads
            self._clock.restart(self._gap_s, "gap_timeout")

    async def _last(self) -> Batch:
        """Reads on to the end of the body, within bounds; nothing that goes wrong there undoes the proof."""
        assert self._finished is not None, "there is proof"
        self._clock.restart(_TRAIL_S, "gap_timeout")
        left = _TRAIL_BYTES
        with contextlib.suppress(ProviderError):
            while left > 0 and (data := await self._body.read()):
                left -= len(data)
                self._trail.extend(self._parser.feed(data))
        self._over = True
        if not self._body.ended:
            self._body.close()
        return self._with_raw([*self._trail, self._finished], last=True)


def _too_deep() -> Broken:
    return Broken("the answer is nested too deep", code="malformed")


class _Shallow:
    """Around a protocol's reading: JSON that is nested too deep for a decoder is an answer that is none."""

    __slots__ = ()

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, RecursionError):
            raise _too_deep() from error


_shallow = _Shallow()
