"""
The REST server: one way in for every endpoint.

A single wrapper routes, authenticates, answers and turns errors into the one body shape, so no endpoint can forget
one of these. It stands directly on aiohttp's low-level server: an application object with its own router and
middlewares would cost more per request than everything done here, and could not say when its requests have ended.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Any, Final

import msgspec
import structlog
from aiohttp import StreamReader, web
from aiohttp.abc import AbstractStreamWriter
from aiohttp.http import HttpVersion10, HttpVersion11
from aiohttp.http_exceptions import HttpProcessingError, InvalidURLError, LineTooLong
from aiohttp.http_parser import RawRequestMessage
from aiohttp.web_protocol import ERROR
from typing_extensions import override

from admission.ids import new_id
from gateway.errors import (
    Cancelled,
    Code,
    GatewayError,
    Internal,
    InvalidRequest,
    NotFound,
    ShuttingDown,
    Stopped,
    Unauthenticated,
)
from gateway.rest import openapi, paths
from gateway.rest.apis import Api, error_headers, spoken
from gateway.rest.auth import Authenticator, authorize
from gateway.rest.endpoint import REQUEST_ID, Access, BodyLimits, Endpoint, Exchange, Routes, segment
from gateway.rest.status import error_body, error_response
from gateway.stopping import TELL_S, Stopping

log = structlog.get_logger(__name__)

_SPOKEN: Final = (HttpVersion11, HttpVersion10)
#: Words of the parser, and what they mean. The first that fits.
_FAULTS: Final = {
    "HTTP version": "HTTP/1.1 and HTTP/1.0 are spoken here",
    "PRI/Upgrade": "HTTP/1.1 and HTTP/1.0 are spoken here",
    "HTTPS traffic": "this is TLS, which is not spoken on this port",
    "Missing 'Host'": "it has no `Host` header",
    "Duplicate 'Host'": "it has more than one `Host` header",
    "Transfer-Encoding can't": "it has both `Content-Length` and `Transfer-Encoding`",
    "Content-Length": "its `Content-Length` is not one number",
    "Transfer-Encoding": "its `Transfer-Encoding` is not `chunked`",
    "after header value": "a header goes on in a second line",
    "header value": "a header has a character that it may not have",
    "Too many headers": "it has too many headers",
    "method": "it begins with no known method",
}
#: Methods of requests that change nothing and cost nothing, and what stands for what is none.
_READS = frozenset({"GET", "HEAD", "OPTIONS", ERROR.method})
#: Seconds that these get after their client has shut its side. Its whole connection may be gone.
_HALF_CLOSED_S = 1.0
#: Query parameters that the vendors' clients send by themselves, and nobody reads: the version of Azure's API.
_UNREAD = frozenset({"api-version"})
#: Seconds for which what a client still sends is read and thrown away after a last answer. Closing at once would reset
#: the connection, and the client would often lose the answer.
LINGER_S = 2.0
#: Seconds a handler may take to put things in order after it was cut.
SETTLE_S = 8.0


class RestSettings(msgspec.Struct, frozen=True, kw_only=True):
    host: str = "127.0.0.1"
    #: 0 takes a free one; `RestServer.port` says which.
    port: int = 8080
    #: Several processes listen on one port.
    reuse_port: bool = False
    body: BodyLimits = BodyLimits()
    #: Seconds from the connection to the end of the first request's headers.
    header_timeout_s: float = 10.0
    #: Seconds an idle connection is kept, and in which the headers of a later request must have come. Longer than the
    #: idle time of the usual load balancers (60 s), which would otherwise send into a connection that is closing.
    keepalive_s: float = 75.0
    #: Bytes of the request line, and of one header.
    max_header_bytes: int = 16 * 1024
    max_headers: int = 100
    #: Connections of this process. One more is told so and closed.
    max_connections: int = 4096
    backlog: int = 1024
    #: Seconds for which all is still served once stopping has begun, while /readyz says no.
    drain_delay_s: float = 0.0
    #: Seconds for requests in flight to end after that; then they are ended, and told so.
    drain_s: float = 30.0


class RestServer:
    """A listening server. Made by `serve`."""

    def __init__(
        self, settings: RestSettings, endpoints: Iterable[Endpoint], keys: Authenticator, stopping: Stopping
    ) -> None:
        self._settings = settings
        self._stopping = stopping
        self._routes = Routes(openapi.routes(tuple(endpoints)))
        self._keys = keys
        self._draining = asyncio.Event()
        #: The port is closed, and what still comes on open connections is refused.
        self._closed = False
        self._in_flight: set[asyncio.Task[object]] = set()
        self._server = _Server(
            self._serve,
            draining=self._draining,
            api_of=self._api_of,
            most=settings.max_connections,
            header_timeout_s=settings.header_timeout_s,
            keepalive_timeout=settings.keepalive_s,
            max_line_size=settings.max_header_bytes,
            max_field_size=settings.max_header_bytes,
            max_headers=settings.max_headers,
            lingering_time=LINGER_S,
            # Compressed bodies are refused by whoever reads them; a bomb must not be unpacked before that.
            auto_decompress=False,
            access_log=None,
        )
        self._listener: asyncio.Server | None = None

    @property
    def port(self) -> int:
        """The port it listens on."""
        assert self._listener is not None
        port: int = self._listener.sockets[0].getsockname()[1]
        return port

    @property
    def endpoints(self) -> tuple[Endpoint, ...]:
        return self._routes.endpoints

    async def listen(self) -> None:
        """Raises OSError where the address cannot be had."""
        self._listener = await asyncio.get_running_loop().create_server(
            self._server,
            self._settings.host,
            self._settings.port,
            backlog=self._settings.backlog,
            reuse_address=True,
            reuse_port=self._settings.reuse_port or None,
        )

    async def drain(self) -> None:
        """
        Serves for `drain_delay_s` more, then stops accepting, lets requests in flight end, and ends those that have
        not when `drain_s` is over, or when the drain is cancelled: their callers are told. Returns when no handler runs
        any more. Calling it again does nothing.

        From the first moment each answer closes its connection. One that is idle stays open to the end: a request may
        be on its way on it, and closing would lose that. What comes after the delay is refused.
        """
        if self._listener is None or self._draining.is_set():
            return
        self._draining.set()
        try:
            await self._let_end()
        finally:
            await self._end()

    async def _let_end(self) -> None:
        assert self._listener is not None
        loop = asyncio.get_running_loop()
        try:
            await asyncio.sleep(self._settings.drain_delay_s)
            # Closing resets connections that the kernel has made and nobody has taken yet.
            await _arrivals()
        finally:
            self._closed = True
            self._listener.close()
        await _arrivals()
        until = loop.time() + self._settings.drain_s
        while self._in_flight and (left_s := until - loop.time()) > 0:
            await asyncio.wait(self._in_flight, timeout=left_s)
            await _arrivals()

    async def _end(self) -> None:
        if late := set(self._in_flight):
            self._stopping.end(late)
            _, stuck = await asyncio.wait(late, timeout=TELL_S)
            log.warning("gateway.rest_drain_deadline", ended=len(late) - len(stuck), cut=len(stuck))
            if stuck:
                self._stopping.cut(stuck)
                await asyncio.wait(stuck, timeout=SETTLE_S)
        self._server.pre_shutdown()
        await self._server.shutdown(LINGER_S)

    async def _serve(self, request: web.BaseRequest) -> web.StreamResponse:
        task = asyncio.current_task()
        assert task is not None
        if task not in self._in_flight:
            self._in_flight.add(task)
            task.add_done_callback(self._in_flight.discard)
        request_id = new_id().hex
        assert isinstance(request, _Request)
        request.id = request_id
        api: Api | None = None
        methods: Mapping[str, Endpoint] = {}
        refusal: GatewayError
        try:
            methods, path_args = self._served(request.rel_url.raw_path)
            api = spoken(next(iter(methods.values())).apis, request.headers)
            response = await self._answer(request, request_id, methods, path_args)
        except _NoSuchPath as error:
            api = paths.api_of(request.rel_url.raw_path, request.headers)
            refusal = error
        except GatewayError as error:
            refusal = error
        except asyncio.CancelledError:
            if not self._stopping.caught():
                raise
            refusal = _interrupted(methods.get(request.method))
        except Exception as error:
            if isinstance(error, ConnectionError) and (request.transport is None or request.transport.is_closing()):
                # The client is gone; writing this fails quietly.
                return web.Response(status=499)
            log.exception("gateway.request_fault", request_id=request_id)
            refusal = Internal("the gateway failed; its log has the details under this request id")
        else:
            return response
        log.info("gateway.request_refused", request_id=request_id, code=refusal.code.value, method=request.method)
        if request.writer.output_size > 0:
            # Part of an answer is out: only a broken connection can say now that it is not whole.
            if request.transport is not None:
                request.transport.abort()
            return web.Response(status=499)
        answer = error_response(refusal, request_id, api)
        if isinstance(refusal, _MethodNotAllowed):
            answer.headers["Allow"] = refusal.allow
        if request.fault is not None or not request.content.is_eof():
            answer.force_close()
        return answer

    def _api_of(self, raw_path: str, headers: Mapping[str, str]) -> Api | None:
        try:
            methods, _ = self._served(raw_path)
        except GatewayError:
            return paths.api_of(raw_path, headers)
        return spoken(next(iter(methods.values())).apis, headers)

    def _served(self, raw_path: str) -> tuple[Mapping[str, Endpoint], Mapping[str, str]]:
        """The endpoints of a path, and what its braces stand for. Raises `_NoSuchPath`, InvalidRequest."""
        found = self._routes.methods(raw_path)
        if found is not None:
            return found
        other = paths.meant(raw_path)
        if other is not None and (found := self._routes.methods(other.path)) is not None:
            methods, path_args = found
            if other.deployment is not None:
                path_args = {**path_args, paths.DEPLOYMENT: segment(other.deployment)}
            return methods, path_args
        raise _NoSuchPath(self._advice(raw_path))

    def _advice(self, raw_path: str) -> str:
        """What to say of a path that is not served. It repeats no more of it than our own patterns have."""
        if (why := paths.elsewhere(raw_path)) is not None:
            return f"no such path: {why}"
        plainer = paths.plainer(raw_path)
        other = paths.meant(plainer)
        found = self._routes.methods(plainer if other is None else other.path)
        if found is None:
            return "no such path"
        methods, _ = found
        return f"no such path: {next(iter(methods.values())).path} may be meant"

    async def _answer(
        self,
        request: _Request,
        request_id: str,
        methods: Mapping[str, Endpoint],
        path_args: Mapping[str, str],
    ) -> web.StreamResponse:
        if request.fault is not None:
            raise request.fault
        endpoint = methods.get("GET" if request.method == "HEAD" else request.method)
        if endpoint is None:
            allow = ", ".join(sorted({*methods, "OPTIONS"} | ({"HEAD"} if "GET" in methods else set())))
            if request.method == "OPTIONS":
                return web.Response(
                    status=204, headers={"Allow": allow, REQUEST_ID: request_id, "Server": "tollbridge"}
                )
            raise _MethodNotAllowed(allow)
        if self._closed and endpoint.access is not Access.PUBLIC:
            raise ShuttingDown("this process is stopping: nothing was sent, send it again", retry_after_s=1.0)
        caller = await authorize(endpoint, request.headers, self._keys)
        return await endpoint.handler(
            Exchange(
                request,
                request_id=request_id,
                caller=caller,
                path_args=path_args,
                limits=self._settings.body,
                draining=self._draining,
                unread=_UNREAD if endpoint.apis else frozenset(),
            )
        )


@asynccontextmanager
async def serve(
    settings: RestSettings, endpoints: Iterable[Endpoint], keys: Authenticator, stopping: Stopping | None = None
) -> AsyncIterator[RestServer]:
    """
    Listens while entered, and drains on the way out. Raises OSError where the address cannot be had. `stopping` is that
    of the line.
    """
    server = RestServer(settings, endpoints, keys, stopping or Stopping())
    await server.listen()
    try:
        yield server
    finally:
        await server.drain()


class _NoSuchPath(NotFound):
    """No endpoint has this path."""


class _MethodNotAllowed(GatewayError):
    """The path has no such method; the message lists those it has."""

    code = Code.METHOD_NOT_ALLOWED

    def __init__(self, allow: str) -> None:
        super().__init__(f"allowed here: {allow}")
        self.allow = allow


def _interrupted(endpoint: Endpoint | None) -> GatewayError:
    """What the stop has ended before or beside the line, which tells of itself."""
    if endpoint is None or endpoint.method == "GET" or endpoint.told.calls:
        return ShuttingDown("this process is stopping: nothing was sent, send it again", retry_after_s=1.0)
    return Stopped("this process is stopping, and whether this was carried out is not known: look before repeating")


async def _arrivals() -> None:
    """Returns when what has arrived at this moment has been taken by the loop, and has become a task."""
    for _ in range(3):
        await asyncio.sleep(0)


class _Request(web.BaseRequest):
    """A request whose answer closes the connection where the server is stopping, as late as its head is written."""

    def __init__(
        self,
        message: RawRequestMessage,
        payload: StreamReader,
        protocol: web.RequestHandler,
        writer: AbstractStreamWriter,
        task: asyncio.Task[None],
        loop: asyncio.AbstractEventLoop,
        *,
        draining: asyncio.Event,
    ) -> None:
        #: What the parser lets through and nobody here should answer.
        self.fault: InvalidRequest | None = None
        if message.version not in _SPOKEN:
            told = f"HTTP/{message.version.major}.{message.version.minor} is not spoken here: HTTP/1.1 and HTTP/1.0 are"
            self.fault = InvalidRequest(told)
            message = message._replace(version=HttpVersion11)
        elif message.chunked and message.headers["Transfer-Encoding"].strip().lower() != "chunked":
            self.fault = InvalidRequest(
                "this transfer coding is not understood here: send `chunked` alone", param="transfer-encoding"
            )
        super().__init__(message, payload, protocol, writer, task, loop)
        self._stopping = draining
        #: The one it is answered under; empty until it is being answered.
        self.id = ""

    @property
    @override
    def keep_alive(self) -> bool:
        return super().keep_alive and not self._stopping.is_set()


class _Server(web.Server):
    """Counts connections, and makes connections and requests of our kind."""

    def __init__(
        self,
        handler: Callable[[web.BaseRequest], Awaitable[web.StreamResponse]],
        *,
        draining: asyncio.Event,
        api_of: Callable[[str, Mapping[str, str]], Api | None],
        most: int,
        header_timeout_s: float,
        **settings: Any,
    ) -> None:
        # A client that is gone cancels its handler, which takes the work back.
        super().__init__(handler, handler_cancellation=True, request_factory=self._request, **settings)
        #: In whose words a request is answered that has no answer of its own.
        self.api_of = api_of
        self.most = most
        self.header_timeout_s = header_timeout_s
        self.open = 0
        self._draining = draining
        self._settings = settings
        self._own_loop = asyncio.get_running_loop()

    def _request(
        self,
        message: RawRequestMessage,
        payload: StreamReader,
        protocol: web.RequestHandler,
        writer: AbstractStreamWriter,
        task: asyncio.Task[None],
    ) -> web.BaseRequest:
        request = _Request(message, payload, protocol, writer, task, self._own_loop, draining=self._draining)
        assert isinstance(protocol, _Connection)
        protocol.latest = request
        return request

    @override
    def __call__(self) -> web.RequestHandler:
        return _Connection(self, loop=self._own_loop, **self._settings)


class _Connection(web.RequestHandler):
    """aiohttp's connection, with a cap, a deadline for the first headers, and errors in our words."""

    def __init__(self, server: _Server, *, loop: asyncio.AbstractEventLoop, **settings: Any) -> None:
        super().__init__(server, loop=loop, **settings)
        self._own_server = server
        self._own_loop = loop
        self._counted = False
        self._held = False
        self._header_deadline: asyncio.TimerHandle | None = None
        self._gone: asyncio.Event | None = None
        self._taking_back: asyncio.TimerHandle | None = None
        #: The request that came last.
        self.latest: _Request | None = None

    @override
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        server = self._own_server
        if server.open >= server.most:
            assert isinstance(transport, asyncio.WriteTransport)
            transport.write(_full())
            self.close()
            transport.close()
            return
        server.open += 1
        self._counted = True
        self._header_deadline = self._own_loop.call_later(server.header_timeout_s, self._check_headers)
        super().connection_made(transport)

    @override
    def pause_reading(self) -> None:
        self._held = True
        super().pause_reading()

    @override
    def resume_reading(self, resume_parser: bool = True) -> None:
        """Called for each piece of a body that is read; there is something to resume only after a pause."""
        if self._held:
            self._held = False
            super().resume_reading(resume_parser)

    @override
    def connection_lost(self, exc: BaseException | None) -> None:
        if self._counted:
            self._counted = False
            self._own_server.open -= 1
        if self._header_deadline is not None:
            self._header_deadline.cancel()
        if self._taking_back is not None:
            self._taking_back.cancel()
        if self._gone is not None:
            self._gone.set()
        super().connection_lost(exc)

    @override
    def eof_received(self) -> bool:  # type: ignore[override]  # asyncio's own protocol says bool, aiohttp's None
        """
        The client sends no more, or is gone: nobody can tell these apart before something is written. What only reads
        has a moment for its answer. Whatever else is under way is taken back, and a client that still listens is told.
        """
        asked = self._unanswered()
        if asked is not None and asked[0] in _READS:
            # It is the last one.
            self.close()
            self._taking_back = self._own_loop.call_later(_HALF_CLOSED_S, self._take_back)
            return True
        self._take_back()
        return False

    def _unanswered(self) -> tuple[str, str, Mapping[str, str]] | None:
        """Method, path and headers of the request under way of whose answer nothing is out."""
        request = self.latest
        if request is not None and request.writer.output_size == 0:
            return request.method, request.rel_url.raw_path, request.headers
        if not self._messages or self._current_request is not None:
            return None
        message = self._messages[0][0]
        if not isinstance(message, RawRequestMessage):
            return ERROR.method, "", {}
        return message.method, message.url.raw_path, message.headers

    def _take_back(self) -> None:
        if self.transport is None:
            return
        if (asked := self._unanswered()) is not None:
            _, path, headers = asked
            request_id = (self.latest.id if self.latest is not None else "") or new_id().hex
            self.transport.write(_taken_back(request_id, self._own_server.api_of(path, headers)))
        self.transport.close()

    def _check_headers(self) -> None:
        """No whole request yet: the client sends its headers too slowly, or nothing."""
        if self._request_count == 0:
            self.force_close()

    @override
    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Called where there is no request to speak of: what came is not HTTP, or its head is too large."""
        error: GatewayError
        if isinstance(exc, LineTooLong):
            error = InvalidRequest("the request line or a header is too long", param="headers")
            if bytes(exc.args[0][:7]).lower() == b"bearer ":
                # A token too long to be read is a wrong token like any other.
                error = Unauthenticated()
        else:
            error = InvalidRequest(f"this is not a well-formed HTTP request{_why(exc)}")
        request_id = new_id().hex
        log.info("gateway.request_refused", request_id=request_id, code=error.code.value)
        # What still comes is thrown away unparsed.
        self.close()
        return _LastWord(error, request_id, self)

    async def linger(self) -> None:
        """Until the client has closed, or LINGER_S."""
        transport = self.transport
        if transport is None or transport.is_closing():
            return
        self._gone = asyncio.Event()
        if transport.can_write_eof():
            transport.write_eof()
        with suppress(TimeoutError):
            async with asyncio.timeout(LINGER_S):
                await self._gone.wait()


def _why(error: BaseException | None) -> str:
    """Why it is none, as far as the parser says so. What it cites of the request is not repeated."""
    if not isinstance(error, HttpProcessingError) or isinstance(error, InvalidURLError):
        return ""
    said = error.message.partition("b'")[0]
    return next((f": {why}" for word, why in _FAULTS.items() if word in said), "")


class _LastWord(web.Response):
    """An answer to something that was not read to its end."""

    def __init__(self, error: GatewayError, request_id: str, connection: _Connection) -> None:
        super().__init__(
            body=msgspec.json.encode(error_body(error, request_id)),
            status=error.status.http,
            headers={
                "Content-Type": "application/json",
                REQUEST_ID: request_id,
                "Server": "tollbridge",
                **error_headers(error),
            },
        )
        self.force_close()
        self._connection = connection

    @override
    async def write_eof(self, data: bytes = b"") -> None:
        await super().write_eof(data)
        await self._connection.linger()


def _taken_back(request_id: str, api: Api | None) -> bytes:
    error = Cancelled(
        "the connection was closed on the client's side before there was an answer, which takes the request back: "
        "leave it open for sending until the answer has come"
    )
    answer = error_response(error, request_id, api)
    assert isinstance(answer.body, bytes)
    headers = {**answer.headers, "Content-Length": str(len(answer.body)), "Connection": "close"}
    head = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    return f"HTTP/1.1 {error.status.http} Client Closed Request\r\n{head}\r\n".encode() + answer.body


def _full() -> bytes:
    error = GatewayError("this process serves as many connections as it may", code=Code.QUEUE_FULL, retry_after_s=1.0)
    request_id = new_id().hex
    body = msgspec.json.encode(error_body(error, request_id))
    head = (
        f"HTTP/1.1 {error.status.http} Too Many Requests\r\n"
        f"content-type: application/json\r\ncontent-length: {len(body)}\r\n"
        f"retry-after: 1\r\n{REQUEST_ID}: {request_id}\r\nconnection: close\r\n\r\n"
    )
    return head.encode() + body
