"""
The simulated provider's server: reads a request, enters it in the ledger, plays what was rendered for it.

It writes to the transport itself. A response object would hide when the last byte went out, which is what the ledger
is about, and could not write what is no proper response.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import hashlib
import hmac
import signal
import socket
import struct
import sys
import time
import zlib
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any
from urllib.parse import parse_qs

import msgspec
from aiohttp import web
from aiohttp.abc import AbstractStreamWriter
from typing_extensions import override

from adapters.simulator import content, dialects, exports, faults, wire
from adapters.simulator.dialect import Asked, Dialect
from adapters.simulator.faults import Faults, Selector
from adapters.simulator.ledger import Dispatch, Ended, Ledger
from adapters.simulator.requests import BadRequest

_MAX_REQUEST_BYTES = 64 * 1024 * 1024
_QUESTION_TAIL = 64
#: Rendered answers are kept for requests that come again byte for byte, as in a benchmark.
_KEPT_PLANS = 2048
_KEPT_PLAN_BYTES = 64 * 1024
_KEPT_TOKENS = 1000
_YIELD_EVERY = 8
_BACKLOG = 4096
_BLOCK = 64 * 1024
#: What still runs when the server stops is cut off: a simulated provider has nothing to finish. 0 would be for ever.
_GRACE_S = 0.02


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """How the server is started."""

    host: str = "127.0.0.1"
    #: 0: any free one.
    port: int = 0
    #: The one bearer token that is accepted. None: any, or none.
    api_key: str | None = None
    #: The faults that apply from the start and again after a reset, in the words of `faults.Faults`.
    faults: dict[str, Any] = {}
    #: The models that exist. Empty: all, and the presets are listed.
    models: tuple[str, ...] = ()


class _Gone(Exception):
    """The client's connection is no more."""


class _Written(web.StreamResponse):
    """Tells aiohttp that the response is on the wire already."""

    def __init__(self, *, keep_alive: bool) -> None:
        super().__init__()
        self._stays = keep_alive

    @property
    @override
    def keep_alive(self) -> bool:
        return self._stays

    @override
    async def prepare(self, request: web.BaseRequest) -> AbstractStreamWriter | None:
        return None

    @override
    async def write_eof(self, data: bytes = b"") -> None:
        return None


class _Plan(msgspec.Struct, kw_only=True):
    """What follows from a request's bytes alone."""

    dialect: Dialect
    model: str
    #: None where it could not be read.
    asked: Asked | None = None
    correlation: str | None = None
    question: str | None = None
    faults: Faults = faults.NONE
    answer: content.Answer | None = None
    refused: BadRequest | None = None
    #: Of a dispatch that is not struck; made when it is first needed.
    rendering: wire.Rendering | None = None


class _Connection:
    """The bytes of one response."""

    def __init__(self, request: web.BaseRequest) -> None:
        transport = request.transport
        if transport is None:
            raise _Gone
        self.transport = transport
        self._writer = request.writer
        self.bytewise = False

    async def write(self, data: bytes) -> None:
        """Returns when the client has taken enough of it. Raises `_Gone`."""
        if self.bytewise:
            for at in range(len(data)):
                self._write(data[at : at + 1])
                await asyncio.sleep(0)
        else:
            self._write(data)
        if self.transport.get_write_buffer_size():
            await self._drain()

    def _write(self, data: bytes) -> None:
        if self.transport.is_closing():
            raise _Gone
        self.transport.write(data)
        if self.transport.is_closing():
            raise _Gone

    async def flush(self) -> None:
        """Returns when the last byte has left. Does not yield where it has already."""
        if self.transport.get_write_buffer_size():
            self.transport.set_write_buffer_limits(high=0)
            await self._drain()
            self.transport.set_write_buffer_limits()
        if self.transport.is_closing() and self.transport.get_write_buffer_size():
            raise _Gone

    async def _drain(self) -> None:
        try:
            await self._writer.drain()
        except ConnectionError:
            raise _Gone from None
        if self.transport.is_closing():
            raise _Gone

    async def close(self, *, reset: bool) -> None:
        """Ends the connection before its time."""
        if reset:
            linger_not = struct.pack("ii", 1, 0)
            self.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger_not)
            self.transport.abort()
        else:
            await self.flush()
            self.transport.close()


class Simulator:
    """One simulated provider: its settings, its faults and its ledger."""

    def __init__(self, settings: Settings | None = None) -> None:
        self.settings = settings or Settings()
        self.ledger = Ledger()
        self.stopping = False
        self._initial = faults.read(self.settings.faults, param="faults")
        self._faults: dict[str | None, Mapping[str, Any]] = {None: self._initial}
        self._selector = Selector(time.monotonic())
        self._plans: OrderedDict[tuple[str, str, bytes], _Plan] = OrderedDict()
        self._released = asyncio.Event()

    # -------------------------------------------------------------- control

    def set_faults(self, asked: Mapping[str, Any], *, model: str | None = None) -> None:
        """Replaces the faults of the server, or of one model of it. Raises `BadRequest`."""
        self._faults[model] = faults.read(asked, param="faults")
        self._start_over()

    def reset(self) -> None:
        """The ledger is emptied, the faults are those of the start, and counting starts again."""
        self._faults = {None: self._initial}
        self._start_over()
        self.ledger.reset()

    def _start_over(self) -> None:
        self._plans.clear()
        self._selector = Selector(time.monotonic())
        self._released.set()
        self._released = asyncio.Event()

    # -------------------------------------------------------------- requests

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answers any request of a client."""
        method = request.method
        path, _, query_string = request.path_qs.partition("?")
        if method == "POST" and (dialect := dialects.of_call(path)) is not None:
            return await self._call(request, dialect, path, query_string)
        if method == "GET" and (dialect := dialects.of_models(path)) is not None:
            return await self._models(request, dialect)
        query = parse_qs(query_string)
        match method, path:
            case "POST", "/_control/faults":
                return await self._set_faults(request, query)
            case "GET", "/_control/faults":
                return await self._send(request, wire.document(200, self._described_faults()))
            case "POST", "/_control/reset":
                self.reset()
                return await self._send(request, wire.document(200, b"{}"))
            case "GET", "/_control/ledger" if "detail" in query:
                lines = b"".join(self.ledger.lines())
                return await self._send(request, wire.document(200, lines, "application/x-ndjson"))
            case "GET", "/_control/export":
                return await self._export(request, query)
            case "GET", "/_control/ledger":
                return await self._send(request, wire.document(200, msgspec.json.encode(self.ledger.summary())))
            case _:
                await request.read()
                refusal = wire.error(_OTHER, 404, f"Unknown request: {method}", faults.NONE, code="unknown_url")
                return await self._send(request, _whole(refusal))

    async def _models(self, request: web.BaseRequest, dialect: Dialect) -> web.StreamResponse:
        if not self._authorized(request):
            return await self._send(request, _whole(_unauthorized(dialect)))
        names = self.settings.models or tuple(faults.PRESETS)
        return await self._send(request, wire.document(200, dialect.models(names)))

    async def _set_faults(self, request: web.BaseRequest, query: dict[str, list[str]]) -> web.StreamResponse:
        try:
            asked = msgspec.json.decode(await request.read() or b"{}", type=dict[str, Any])
            self.set_faults(asked, model=query.get("model", [None])[0])
        except msgspec.MsgspecError:
            refusal = wire.error(_OTHER, 400, "The faults must be a JSON object.", faults.NONE, param="faults")
            return await self._send(request, _whole(refusal))
        except BadRequest as error:
            refusal = wire.error(_OTHER, 400, error.message, faults.NONE, param=error.param, code=error.code)
            return await self._send(request, _whole(refusal))
        return await self._send(request, wire.document(200, self._described_faults()))

    async def _export(self, request: web.BaseRequest, query: dict[str, list[str]]) -> web.StreamResponse:
        try:
            page = exports.export(self.ledger.closed(), query, whole=self.ledger.whole)
        except BadRequest as error:
            refusal = wire.error(_OTHER, 400, error.message, faults.NONE, param=error.param, code=error.code)
            return await self._send(request, _whole(refusal))
        return await self._send(request, wire.document(200, page))

    def _described_faults(self) -> bytes:
        models = {name: asked for name, asked in self._faults.items() if name is not None}
        return msgspec.json.encode({"faults": self._faults[None], "models": models})

    async def _send(self, request: web.BaseRequest, response: bytes) -> web.StreamResponse:
        with contextlib.suppress(_Gone):
            connection = _Connection(request)
            await connection.write(response)
            await connection.flush()
            return _KEEP if request.keep_alive else _CLOSE
        return _CLOSE

    def _authorized(self, request: web.BaseRequest) -> bool:
        key = self.settings.api_key
        if key is None:
            return True
        headers = request.headers
        given = [headers.get("authorization", "").removeprefix("Bearer ").strip()]
        given += [headers.get(name, "") for name in ("x-api-key", "x-goog-api-key", "api-key")]
        return any(hmac.compare_digest(one.encode(errors="replace"), key.encode()) for one in given if one)

    # -------------------------------------------------------------- one dispatch

    async def _call(self, request: web.BaseRequest, dialect: Dialect, path: str, query: str) -> web.StreamResponse:
        if request.headers.get("expect", "").lower() == "100-continue" and request.transport is not None:
            request.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        body = await request.read()
        plan = self._plan(dialect, path, query, body)
        busy, busy_model = self.ledger.active, self.ledger.active_of(plan.model)
        dispatch = self.ledger.begin(
            model=plan.model,
            correlation=plan.correlation,
            question=plan.question,
            fields=[] if plan.asked is None else plan.asked.fields,
            stream=plan.asked is not None and plan.asked.stream,
        )
        try:
            connection = _Connection(request)
            rendering, wanted = self._respond(request, plan, dispatch, busy, busy_model)
            ended = await self._play(connection, rendering, wanted, dispatch, keep_alive=request.keep_alive)
        except (_Gone, asyncio.CancelledError) as gone:
            ended = Ended.STOPPED if self.stopping else Ended.HUNG if dispatch.hanging else Ended.CLIENT_GONE
            self._end(dispatch, ended, 0.0 if self.stopping else plan.faults.work_continues)
            if isinstance(gone, asyncio.CancelledError):
                raise
            return _CLOSE
        except BaseException:
            self._end(dispatch, Ended.STOPPED)
            raise
        self._end(dispatch, ended)
        return _KEEP if request.keep_alive and not connection.transport.is_closing() else _CLOSE

    def _end(self, dispatch: Dispatch, ended: Ended, continues: float = 0.0) -> None:
        self.ledger.end(dispatch, ended)
        if continues:
            asyncio.get_running_loop().call_later(continues, self.ledger.release, dispatch)
        else:
            self.ledger.release(dispatch)

    def _plan(self, dialect: Dialect, path: str, query: str, body: bytes) -> _Plan:
        key = (path, query, body)
        kept = self._plans.get(key)
        if kept is not None:
            return kept
        plan = self._new_plan(dialect, path, query, body)
        if len(body) <= _KEPT_PLAN_BYTES and (plan.answer is None or plan.answer.completion_tokens <= _KEPT_TOKENS):
            self._plans[key] = plan
            if len(self._plans) > _KEPT_PLANS:
                self._plans.popitem(last=False)
        return plan

    def _new_plan(self, dialect: Dialect, path: str, query: str, body: bytes) -> _Plan:
        try:
            asked = dialect.parse(path, query, body)
        except BadRequest as error:
            return _Plan(dialect=dialect, model="(unreadable)", refused=error)
        request, dialect = asked.request, asked.dialect or dialect
        tail = content.last_question(request.messages)[-_QUESTION_TAIL:]
        plan = _Plan(
            dialect=dialect,
            model=request.model,
            asked=asked,
            correlation=request.correlation,
            question=hashlib.blake2b(tail.encode(errors="replace"), digest_size=8).hexdigest(),
        )
        try:
            name, of_model = faults.split_model(request.model)
            of_request = faults.read(request.simulate or {}, param="simulate")
            of_server = (faults.PRESETS.get(name, {}), self._faults[None], self._faults.get(name, {}))
            plan.faults = faults.merge(*of_server, of_model, of_request)
            dialect.check(plan.faults)
            plan.answer = content.answer(request, name, plan.faults.shape)
        except BadRequest as error:
            plan.refused = error
        else:
            if self.settings.models and name not in self.settings.models:
                plan.refused = BadRequest(
                    "The model does not exist.", param="model", code="model_not_found", status=404
                )
        return plan

    def _respond(
        self, request: web.BaseRequest, plan: _Plan, dispatch: Dispatch, busy: int, busy_model: int
    ) -> tuple[wire.Rendering, Faults]:
        """What to play, and how."""
        if not self._authorized(request):
            return _unauthorized(plan.dialect), faults.NONE
        if plan.refused is not None or plan.answer is None:
            refused = plan.refused or BadRequest("no answer")
            error = wire.error(
                plan.dialect, refused.status, refused.message, faults.NONE, param=refused.param, code=refused.code
            )
            return error, faults.NONE
        asked = plan.faults
        full = (asked.capacity is not None and busy >= asked.capacity) or (
            asked.model_capacity is not None and busy_model >= asked.model_capacity
        )
        if full:
            at_once = msgspec.structs.replace(asked.spared(), body="openai", latency=0.0, jitter=0.0, bytewise=False)
            return wire.error(plan.dialect, 429, "Too many requests at once.", at_once), at_once
        if asked is faults.NONE:
            wanted = asked
        else:
            strikes = self._selector.strikes(
                asked, model=plan.model, correlation=plan.correlation, now=time.monotonic()
            )
            wanted = asked.struck() if strikes else asked.spared()
        if wanted.status is not None:
            return wire.error(plan.dialect, wanted.status, "", wanted), wanted
        dispatch.tokens_in = plan.answer.prompt_tokens
        if wanted.breaks:
            return _rendered(plan, wanted), wanted
        if plan.rendering is None:
            plan.rendering = _rendered(plan, wanted)
        return plan.rendering, wanted

    async def _play(
        self,
        connection: _Connection,
        rendering: wire.Rendering,
        wanted: Faults,
        dispatch: Dispatch,
        *,
        keep_alive: bool,
    ) -> Ended:
        if wanted.hold:
            await self._released.wait()
        delay = wanted.latency + (wanted.jitter * faults.uniform(str(dispatch.number)) if wanted.jitter else 0.0)
        if delay:
            await asyncio.sleep(delay)
        if wanted.hang == "before_headers":
            await self._hang(dispatch, wanted)
        if wanted.die in {"rst_before_headers", "fin_before_headers"}:
            dispatch.tokens_in = 0
            await connection.close(reset=wanted.die == "rst_before_headers")
            return Ended.DIED
        connection.bytewise = wanted.bytewise
        filling = wire.Filling(dispatch.number)
        head = filling.fill(rendering.head)
        if not keep_alive:
            head = head[:-2] + b"connection: close\r\n\r\n"
        dispatch.status = rendering.status
        if wanted.think or wanted.hang == "before_first_byte":
            await connection.write(head)
            head = b""
            await self._wait(connection, rendering, wanted, wanted.think)
            if wanted.hang == "before_first_byte":
                await self._hang(dispatch, wanted)
        await self._frames(connection, rendering, wanted, dispatch, filling, head)
        return rendering.ended

    async def _frames(
        self,
        connection: _Connection,
        rendering: wire.Rendering,
        wanted: Faults,
        dispatch: Dispatch,
        filling: wire.Filling,
        head: bytes,
    ) -> None:
        pieces = 0
        for index, frame in enumerate(rendering.frames):
            if index == rendering.hang_at:
                if head:
                    await connection.write(head)
                    head = b""
                await self._hang(dispatch, wanted)
            if frame.piece:
                if wanted.pace and pieces:
                    await self._wait(connection, rendering, wanted, wanted.pace)
                elif pieces % _YIELD_EVERY == _YIELD_EVERY - 1:
                    await asyncio.sleep(0)
                pieces += 1
            data = filling.fill(frame.data)
            await connection.write(head + data if head else data)
            head = b""
            dispatch.tokens_out += frame.tokens
        if head:
            await connection.write(head)
        match rendering.after:
            case "done":
                await connection.flush()
            case "rst" | "fin":
                await connection.close(reset=rendering.after == "rst")
            case "endless":
                await self._endless(connection, wanted.endless_line or 0)
            case "bomb":
                await self._bomb(connection, wanted.compressed_bomb or 0)

    async def _hang(self, dispatch: Dispatch, wanted: Faults) -> None:
        dispatch.hanging = True
        if wanted.hang_for is None:
            await asyncio.get_running_loop().create_future()
        else:
            await asyncio.sleep(wanted.hang_for)
        dispatch.hanging = False

    async def _wait(self, connection: _Connection, rendering: wire.Rendering, wanted: Faults, seconds: float) -> None:
        left = seconds
        if wanted.keepalive is not None and rendering.keepalive:
            while left > wanted.keepalive:
                await asyncio.sleep(wanted.keepalive)
                await connection.write(rendering.keepalive)
                left -= wanted.keepalive
        await asyncio.sleep(left)

    async def _endless(self, connection: _Connection, size: int) -> None:
        await connection.write(b'7\r\ndata: "\r\n')
        block = b"x" * _BLOCK
        for _ in range(max(1, size // _BLOCK)):
            await connection.write(b"%x\r\n%b\r\n" % (len(block), block))
            await asyncio.sleep(0)
        await connection.write(b"0\r\n\r\n")
        await connection.flush()
        connection.transport.close()

    async def _bomb(self, connection: _Connection, size: int) -> None:
        packer = zlib.compressobj(9, zlib.DEFLATED, 31)
        packed = packer.compress(b'data: {"choices":[{"index":0,"delta":{"content":"')
        block = b"x" * (1 << 20)
        for _ in range(max(1, size >> 20)):
            packed += packer.compress(block)
            if packed:
                await connection.write(b"%x\r\n%b\r\n" % (len(packed), packed))
                packed = b""
            await asyncio.sleep(0)
        packed += packer.compress(b'"}}]}\n\n') + packer.flush()
        await connection.write(b"%x\r\n%b\r\n0\r\n\r\n" % (len(packed), packed))
        await connection.flush()
        connection.transport.close()


_KEEP = _Written(keep_alive=True)
_CLOSE = _Written(keep_alive=False)


#: Whose words answer what is nobody's path.
_OTHER = dialects.CHAT_COMPLETIONS


def _rendered(plan: _Plan, wanted: Faults) -> wire.Rendering:
    assert plan.answer is not None, "what was refused is not rendered"
    assert plan.asked is not None, "an answer is one to a request"
    if plan.asked.stream:
        return wire.streamed(plan.dialect, plan.answer, wanted, plan.asked)
    return wire.plain(plan.dialect, plan.answer, wanted)


def _unauthorized(dialect: Dialect) -> wire.Rendering:
    return wire.error(dialect, 401, "", faults.NONE)


def _whole(rendering: wire.Rendering) -> bytes:
    return wire.Filling(0).fill(rendering.head + b"".join(frame.data for frame in rendering.frames))


@contextlib.asynccontextmanager
async def serve(settings: Settings | None = None, *, simulator: Simulator | None = None) -> AsyncIterator[str]:
    """
    A server that answers until the block is left; gives its base URL (`http://host:port/v1`).

    Pass a `Simulator` to have its ledger and faults at hand without a request. Raises `OSError` where the port is
    taken.
    """
    simulator = simulator or Simulator(settings)
    loop = asyncio.get_running_loop()

    def request_factory(
        message: Any, payload: Any, protocol: Any, writer: Any, task: asyncio.Task[None]
    ) -> web.BaseRequest:
        return web.BaseRequest(message, payload, protocol, writer, task, loop, client_max_size=_MAX_REQUEST_BYTES)

    handler: Callable[[web.BaseRequest], Awaitable[web.StreamResponse]] = simulator.handle
    server = web.Server(handler, request_factory=request_factory, handler_cancellation=True, access_log=None)
    listening = await loop.create_server(server, simulator.settings.host, simulator.settings.port, backlog=_BACKLOG)
    host, port = listening.sockets[0].getsockname()[:2]
    try:
        yield f"http://[{host}]:{port}/v1" if ":" in host else f"http://{host}:{port}/v1"
    finally:
        simulator.stopping = True
        listening.close()
        server.pre_shutdown()
        await server.shutdown(timeout=_GRACE_S)
        await listening.wait_closed()


async def run(settings: Settings) -> None:
    """Serves until SIGTERM or SIGINT. Prints one JSON line with the URL once it can be reached."""
    # Ledger rows only ever grow in number; going through all of them again and again would cost a fifth of the speed.
    gc.freeze()
    gc.set_threshold(100_000, 20, 100)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    async with serve(settings) as url:
        sys.stdout.write(msgspec.json.encode({"event": "simulator.ready", "url": url}).decode() + "\n")
        sys.stdout.flush()
        await stop.wait()
