"""
What an endpoint is, and one request in hand while it is being answered.

Handlers get an `Exchange` and return a response; everything else (who may, which errors, which request id) is done
around them in `gateway.rest.app`, once. An endpoint says itself who may use it, so no spelling of a URL can reach a
handler past its check. Bodies are read here under a size limit and a receive deadline: a server that waits for slow
senders as long as they like can be held by a handful of them.
"""

from __future__ import annotations

import asyncio
import enum
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Mapping
from decimal import Decimal
from typing import Any, TypeAlias, TypeVar
from urllib.parse import parse_qsl, unquote

import msgspec
from aiohttp import web

from gateway.call import Caller, Scope
from gateway.errors import Code, GatewayError, InvalidRequest
from gateway.rest.answers import Whole
from gateway.rest.apis import Api
from gateway.rest.body import decode, storable
from gateway.rest.operation import UNTOLD, Operation
from metering.cost import decimal_string

_T = TypeVar("_T")

#: Bytes of JSON from which it is parsed in a thread: parsing must not hold up everyone else's tokens.
PARSE_ASIDE_BYTES = 128 * 1024
#: Query parameters in one URL.
MAX_PARAMETERS = 64

REQUEST_ID = "x-tollbridge-request-id"

#: What nearly all of an answer is.
_AS_IT_IS = frozenset({str, int, bool, float, type(None)})


class Access(enum.Enum):
    #: No key is asked for. Health, and the document of the API.
    PUBLIC = "public"
    #: Any valid key, whatever its scopes.
    ANY_KEY = "any_key"


class BodyLimits(msgspec.Struct, frozen=True, kw_only=True):
    """How much a caller may send, and how slowly."""

    #: Bytes of a body that is one JSON document. It is held in memory and parsed at once.
    max_json_bytes: int = 32 * 1024**2
    #: Bytes of a body that is read in pieces (NDJSON).
    max_body_bytes: int = 256 * 1024**2
    #: Seconds a body may take whatever its size.
    body_grace_s: float = 10.0
    #: Bytes per second it must bring on average after that.
    body_min_rate: int = 64 * 1024


class Exchange:
    """One request being answered."""

    __slots__ = ("_caller", "_limits", "_unread", "draining", "path_args", "request", "request_id")

    def __init__(
        self,
        request: web.BaseRequest,
        *,
        request_id: str,
        caller: Caller | None,
        path_args: Mapping[str, str],
        limits: BodyLimits,
        draining: asyncio.Event,
        unread: frozenset[str] = frozenset(),
    ) -> None:
        """`unread`: query parameters that may be there and are not looked at."""
        self.request = request
        self.request_id = request_id
        #: The `{name}` segments of the endpoint's path, decoded, without control characters.
        self.path_args = path_args
        #: Set when the process begins to stop: a handler that only waits should answer now.
        self.draining = draining
        self._caller = caller
        self._limits = limits
        self._unread = unread

    @property
    def caller(self) -> Caller:
        """The authenticated key. Not to be asked for on a public endpoint."""
        assert self._caller is not None
        return self._caller

    @property
    def media_type(self) -> str:
        """The content type without parameters, in lower case; empty where none was sent."""
        return self.request.headers.get("Content-Type", "").partition(";")[0].strip().lower()

    def query(self, allowed: Collection[str]) -> dict[str, str]:
        """The query parameters. One that is not in `allowed`, or is given twice, is refused with its name."""
        if not self.request.rel_url.raw_query_string:
            return {}
        return {name: value for name, [value] in self.queries(allowed, several=()).items()}

    def queries(self, allowed: Collection[str], *, several: Collection[str]) -> dict[str, list[str]]:
        """As `query`, where those in `several` may be given several times."""
        raw = self.request.rel_url.raw_query_string
        if not raw:
            return {}
        try:
            pairs = parse_qsl(
                raw, keep_blank_values=True, strict_parsing=True, errors="strict", max_num_fields=MAX_PARAMETERS
            )
        except ValueError as error:
            raise InvalidRequest("the query string is malformed", param="query") from error
        found: dict[str, list[str]] = {}
        for name, value in pairs:
            if name in self._unread:
                continue
            if name not in allowed:
                known = ", ".join(sorted(allowed)) or "none"
                raise InvalidRequest(f"unknown query parameter; known here: {known}", param=_shown(name))
            if name in found and name not in several:
                raise InvalidRequest("query parameter given twice", param=name)
            if not value.isprintable():
                raise InvalidRequest("query parameter with control characters", param=name)
            found.setdefault(name, []).append(value)
        return found

    async def chunks(self, limit: int | None = None) -> AsyncIterator[bytes]:
        """
        The body in pieces as it arrives, at most `limit` bytes in all (default: `max_body_bytes`).

        Raises `payload_too_large`, `request_timeout`, and InvalidRequest for a body that breaks off or is badly framed.
        """
        limit = self._limits.max_body_bytes if limit is None else limit
        content = self.request.content
        await self._begin(limit)
        began = asyncio.get_running_loop().time()
        received = 0
        while True:
            if content.is_eof():
                piece = content.read_nowait()
            else:
                deadline = began + self._limits.body_grace_s + received / self._limits.body_min_rate
                try:
                    async with asyncio.timeout_at(deadline):
                        piece = await content.readany()
                except TimeoutError as error:
                    raise GatewayError(
                        "the request body came too slowly", code=Code.REQUEST_TIMEOUT, param="body"
                    ) from error
                except web.RequestPayloadError as error:
                    raise InvalidRequest("the request body is badly framed", param="body") from error
            if not piece:
                return
            received += len(piece)
            if received > limit:
                raise _too_large(limit)
            yield piece

    async def body(self, limit: int | None = None) -> bytes:
        """The whole body, at most `limit` bytes (default: `max_json_bytes`). Errors as `chunks`."""
        limit = self._limits.max_json_bytes if limit is None else limit
        content = self.request.content
        if content.is_eof():
            # Nearly every body comes with its head, or with what is read next.
            await self._begin(limit)
            body = content.read_nowait()
            if len(body) > limit:
                raise _too_large(limit)
            return body
        pieces = [piece async for piece in self.chunks(limit)]
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    async def json(self, kind: type[_T]) -> _T:
        """The body as one JSON document of this type. Every fault is an InvalidRequest with the path of the field."""

        def parse(body: bytes) -> _T:
            value = decode(body, kind)
            storable(body)
            return value

        return await self.parsed(parse)

    async def parsed(self, parse: Callable[[bytes], _T]) -> _T:
        """What `parse` makes of the body, which is JSON; a large one is parsed in a thread."""
        if self.request.headers.get("Content-Type") != "application/json" and self.media_type != "application/json":
            raise GatewayError(
                "send `content-type: application/json`", code=Code.UNSUPPORTED_MEDIA_TYPE, param="content-type"
            )
        body = await self.body()
        if len(body) > PARSE_ASIDE_BYTES:
            return await asyncio.to_thread(parse, body)
        return parse(body)

    def answer(
        self, payload: object, *, status: int = 200, headers: Mapping[str, str] | None = None
    ) -> web.StreamResponse:
        """A JSON answer. Structs become objects. Give money as `usd(amount)`: a bare Decimal may get an exponent."""
        every = answer_headers(self.request_id)
        if headers:
            every.update(headers)
        return Whole(msgspec.json.encode(payload), every, status=status)

    def stream(self, content_type: str) -> web.StreamResponse:
        """
        An answer that is written in pieces: `await response.prepare(exchange.request)`, `write`, return it.

        An error raised after `prepare` breaks the connection off, so that no part passes for the whole.
        """
        return web.StreamResponse(headers=answer_headers(self.request_id, content_type=content_type))

    async def _begin(self, limit: int) -> None:
        """Refuses a body that says of itself that it cannot be taken, and invites the others."""
        if (self.request.content_length or 0) > limit:
            raise _too_large(limit)
        encoding = self.request.headers.get("Content-Encoding")
        if encoding is not None and encoding.strip().lower() != "identity":
            raise GatewayError(
                "compressed request bodies are not taken: send the body as it is",
                code=Code.UNSUPPORTED_MEDIA_TYPE,
                param="content-encoding",
            )
        if "Expect" in self.request.headers:
            await self._invite()

    async def _invite(self) -> None:
        """Answers `Expect: 100-continue`, without which some clients do not send a large body at all."""
        expect = self.request.headers.get("Expect")
        if expect is None or self.request.version < (1, 1):
            return
        if expect.lower() != "100-continue":
            raise InvalidRequest("an expectation that cannot be met", param="expect")
        if not self.request.content.is_eof():
            await self.request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            # The interim response is no part of the answer: `output_size` says whether that has begun.
            self.request.writer.output_size = 0


Handler: TypeAlias = Callable[[Exchange], Awaitable[web.StreamResponse]]


class Endpoint(msgspec.Struct, frozen=True, kw_only=True):
    """One method on one path, who may use it, and what answers it."""

    method: str
    #: `/v1/jobs/{job_id}`: a segment in braces takes any one non-empty segment. A literal path wins over it.
    path: str
    access: Scope | Access
    handler: Handler
    #: In whose words its errors are told, also those that come before the handler. Empty: in ours.
    apis: tuple[Api, ...] = ()
    #: What the document of the API says of it.
    told: Operation = UNTOLD


class Routes:
    """Finds the endpoint of a request. The cost of a literal path does not grow with the table."""

    def __init__(self, endpoints: Iterable[Endpoint]) -> None:
        self.endpoints = tuple(endpoints)
        self._literal: dict[str, dict[str, Endpoint]] = {}
        self._patterns: dict[tuple[str, ...], dict[str, Endpoint]] = {}
        for endpoint in self.endpoints:
            if "{" in endpoint.path:
                methods = self._patterns.setdefault(tuple(endpoint.path.split("/")), {})
            else:
                methods = self._literal.setdefault(endpoint.path, {})
            if endpoint.method in methods:
                raise ValueError(f"two endpoints for {endpoint.method} {endpoint.path}")
            methods[endpoint.method] = endpoint

    def methods(self, raw_path: str) -> tuple[Mapping[str, Endpoint], Mapping[str, str]] | None:
        """The endpoints of a path by method, with the values of its braces. `raw_path` is still percent-encoded."""
        literal = self._literal.get(raw_path)
        if literal is not None:
            return literal, {}
        segments = raw_path.split("/")
        for pattern, methods in self._patterns.items():
            if len(pattern) != len(segments):
                continue
            values: dict[str, str] = {}
            for expected, given in zip(pattern, segments, strict=True):
                if expected.startswith("{") and given:
                    values[expected[1:-1]] = segment(given)
                elif expected != given:
                    break
            else:
                return methods, values
        return None


def usd(amount: Decimal) -> str:
    """Money as JSON has it: a decimal string without an exponent or trailing zeros."""
    return decimal_string(amount)


def plain(value: object) -> Any:
    """JSON's own types, with money as text without an exponent."""
    return _spelled(msgspec.to_builtins(value, builtin_types=(Decimal,), str_keys=True))


def _spelled(value: object) -> object:
    kind = type(value)
    if kind is dict:
        assert isinstance(value, dict)
        return {name: item if type(item) in _AS_IT_IS else _spelled(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_spelled(item) for item in value]
    return usd(value) if isinstance(value, Decimal) else value


def json_response(
    payload: object, *, request_id: str, status: int = 200, headers: Mapping[str, str] | None = None
) -> web.Response:
    """A JSON answer outside of an exchange."""
    every = answer_headers(request_id)
    if headers:
        every.update(headers)
    return web.Response(body=msgspec.json.encode(payload), status=status, headers=every)


def answer_headers(
    request_id: str, api: Api | None = None, *, content_type: str = "application/json"
) -> dict[str, str]:
    """Those that every answer has; with the id of the request under the name that the API's clients know, too."""
    headers = {"Content-Type": content_type, REQUEST_ID: request_id, "Server": "tollbridge"}
    if api is not None:
        headers[api.request_id] = request_id
    return headers


def segment(raw: str) -> str:
    """One segment of a path, decoded. Raises InvalidRequest."""
    try:
        value = unquote(raw, errors="strict")
    except UnicodeDecodeError as error:
        raise InvalidRequest("the path is not UTF-8", param="path") from error
    if not value.isprintable():
        raise InvalidRequest("the path has control characters", param="path")
    return value


def _shown(name: str) -> str:
    """A caller's own name for something, fit to be sent back."""
    return name[:64] if name.isprintable() else "query"


def _too_large(limit: int) -> GatewayError:
    message = f"the request body is larger than {limit} bytes"
    return GatewayError(message, code=Code.PAYLOAD_TOO_LARGE, param="body")
