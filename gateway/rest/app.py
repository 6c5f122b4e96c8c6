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
from typing import Any

import msgspec
import structlog
from aiohttp import StreamReader, web
from aiohttp.abc import AbstractStreamWriter
from aiohttp.http_exceptions import LineTooLong
from aiohttp.http_parser import RawRequestMessage
from typing_extensions import override

from admission.ids import new_id
from gateway.errors import Code, GatewayError, Internal, InvalidRequest, NotFound, ShuttingDown, Unauthenticated
from gateway.rest import openapi, paths
from gateway.rest.apis import Api, error_headers, spoken
from gateway.rest.auth import Authenticator, authorize
from gateway.rest.endpoint import REQUEST_ID, Access, BodyLimits, Endpoint, Exchange, Routes, segment
from gateway.rest.status import error_body, error_response

log = structlog.get_logger(__name__)

#: Query parameters that the vendors' clients send by themselves, and nobody reads: the version of Azure's API.
_UNREAD = frozenset({"api-version"})
#: Seconds for which what a client still sends is read and thrown away after a last answer. Closing at once would reset
#: the connection, and the client would often lose the answer.
LINGER_S = 2.0
#: Seconds a handler may take to put things in order after it was cancelled by the drain deadline.
SETTLE_S = 10.0


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
    #: Seconds for requests in flight to end after that; then they are cancelled.
    drain_s: float = 30.0


class RestServer:
    """A listening server. Made by `serve`."""

    def __init__(self, settings: RestSettings, endpoints: Iterable[Endpoint], keys: Authenticator) -> None:
        self._settings = settings
        self._routes = Routes(openapi.routes(tuple(endpoints)))
        self._keys = keys
        self._draining = asyncio.Event()
        #: The port is closed, and what still comes on open connections is refused.
        self._closed = False
        self._in_flight: set[asyncio.Task[object]] = set()
        self._server = _Server(
            self._serve,
            draining=self._draining,
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
        Serves for `drain_delay_s` more, then stops accepting, lets requests in flight end, and cancels those that have
        not when `drain_s` is over. Returns when no handler runs any more. Calling it again does nothing.

        From the first moment each answer closes its connection. One that is idle stays open to the end: a request may
        be on its way on it, and closing would lose that. What comes after the delay is refused.
        """
        if self._listener is None or self._draining.is_set():
            return
        loop = asyncio.get_running_loop()
        self._draining.set()
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
        late = set(self._in_flight)
        if late:
            log.warning("gateway.rest_drain_deadline", cancelled=len(late))
            for task in late:
                task.cancel()
            await asyncio.wait(late, timeout=SETTLE_S)
        self._server.pre_shutdown()
        await self._server.shutdown(LINGER_S)

    async def _serve(self, request: web.BaseRequest) -> web.StreamResponse:
        task = asyncio.current_task()
        assert task is not None
        if task not in self._in_flight:
            self._in_flight.add(task)
            task.add_done_callback(self._in_flight.discard)
        request_id = new_id().hex
        api: Api | None = None
        refusal: GatewayError
        try:
            methods, path_args = self._found(request)
            api = spoken(next(iter(methods.values())).apis, request.headers)
            response = await self._answer(request, request_id, methods, path_args)
        except _NoSuchPath as error:
            api = paths.api_of(request.rel_url.raw_path, request.headers)
            refusal = error
        except GatewayError as error:
            refusal = error
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
        if not request.content.is_eof():
            answer.force_close()
        return answer

    def _found(self, request: web.BaseRequest) -> tuple[Mapping[str, Endpoint], Mapping[str, str]]:
        raw_path = request.rel_url.raw_path
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
        request: web.BaseRequest,
        request_id: str,
        methods: Mapping[str, Endpoint],
        path_args: Mapping[str, str],
    ) -> web.StreamResponse:
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
    settings: RestSettings, endpoints: Iterable[Endpoint], keys: Authenticator
) -> AsyncIterator[RestServer]:
    """Listens while entered, and drains on the way out. Raises OSError where the address cannot be had."""
    server = RestServer(settings, endpoints, keys)
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


async def _arrivals() -> None:
    """Returns when what has arrived at this moment has been taken by the loop, and has become a task."""
    for _ in range(3):
        await asyncio.sleep(0)


class _Request(web.BaseRequest):
    """A request whose answer closes the connection where the server is stopping, as late as its head is written."""

    def __init__(self, *parts: Any, draining: asyncio.Event) -> None:
        super().__init__(*parts)
        self._stopping = draining

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
        most: int,
        header_timeout_s: float,
        **settings: Any,
    ) -> None:
        # A client that is gone cancels its handler, which takes the work back.
        super().__init__(handler, handler_cancellation=True, request_factory=self._request, **settings)
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
        return _Request(message, payload, protocol, writer, task, self._own_loop, draining=self._draining)

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
        if self._gone is not None:
            self._gone.set()
        super().connection_lost(exc)

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
            error = InvalidRequest("this is not a well-formed HTTP request")
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
