"""
One socket to a provider, and the answer that comes on it.

A connection serves one request at a time. It is used again only where nothing can be left of the last answer on it: the
answer ended by its own framing, nothing came behind it, and all of the request was taken. In any other case it is cut,
and never shut down in good order, which could still deliver the rest of a request that nobody waits for.
"""

from __future__ import annotations

import asyncio
import re
import select
import socket
from collections.abc import Awaitable, Callable, Mapping
from typing import Protocol, cast

import httptools
from typing_extensions import override

from adapters.errors import Broken
from adapters.http.clock import Clock
from adapters.http.coding import Decoder, Unreadable, decoder
from adapters.http.request import Origin

#: As long as one field of a head may be, name and value together, and so many of them, trailers included.
_MAX_FIELD_BYTES = 8190
_MAX_FIELDS = 128
#: So much may come in a row of which nothing is an answer's body: a head with what was said before it, the extensions
#: of chunks, trailers.
_MAX_SILENT_BYTES = 64 * 1024
#: How long a server says that it keeps a connection (RFC 2068, 19.7.1.1), and by how much less it is kept here.
_TIMEOUT = re.compile(r"\btimeout\s*=\s*\"?(\d{1,9})", re.ASCII | re.IGNORECASE)
_SOONER_S = 1.0
#: What is held for a reader who is slower than the provider, before the provider is held back.
_HELD_BYTES = 64 * 1024


class Keeper(Protocol):
    """Who has the connections that are free."""

    def opened(self, connection: Connection) -> None: ...

    def freed(self, connection: Connection) -> None:
        """It may be used again."""
        ...

    def stale(self, connection: Connection) -> None:
        """It was kept, and closed upon a request: others that are kept may be closed as well."""
        ...

    def lost(self, connection: Connection) -> None:
        """Its socket is closed."""
        ...


class Answer:
    """What a provider answers to one request, as it comes."""

    __slots__ = (
        "_clock",
        "_connection",
        "_decoder",
        "_failure",
        "_held",
        "_held_bytes",
        "_loop",
        "_over",
        "_waiter",
        "framed",
        "headers",
        "status",
    )

    def __init__(self, connection: Connection, clock: Clock, loop: asyncio.AbstractEventLoop) -> None:
        self._clock = clock
        #: None once the connection has nothing more for it.
        self._connection: Connection | None = connection
        self._loop = loop
        self._waiter: asyncio.Future[None] | None = None
        self._held: list[bytes] = []
        self._held_bytes = 0
        self._over = False
        self._failure: Broken | None = None
        self._decoder: Decoder | Unreadable | None = None
        #: 0 until the head has come.
        self.status = 0
        #: Names in lower case. Of several fields of one name the first.
        self.headers: Mapping[str, str] = {}
        #: Its end was told by itself, and not by a connection that closed.
        self.framed = False

    async def head(self) -> None:
        """Waits until there is a status, and headers. Raises `Broken`."""
        while not self.status:
            if self._failure is not None:
                raise self._failure
            await self._more()

    async def read(self) -> bytes:
        """
        What has arrived of the body, or what arrives next; empty at the end. Raises `Broken`, where that is of the
        connection once all that came before was read.
        """
        decoder = self._decoder
        while decoder is None or not (data := decoder.take()):
            while not self._held:
                if self._failure is not None:
                    raise self._failure
                if self._over:
                    return b""
                await self._more()
            if decoder is None:
                return self._taken()
            decoder.feed(self._taken())
        return data

    def _taken(self) -> bytes:
        held = self._held
        data = held[0] if len(held) == 1 else b"".join(held)
        held.clear()
        if self._held_bytes > _HELD_BYTES and self._connection is not None:
            self._connection.resume()
        self._held_bytes = 0
        return data

    def _more(self) -> Awaitable[None]:
        """To be awaited at once."""
        waiter = self._waiter = self._loop.create_future()
        return self._clock.wait(waiter)

    @property
    def ended(self) -> bool:
        """All of it was read, to an end that is none of a failure."""
        return self._over and not self._held and (self._decoder is None or self._decoder.drained)

    def close(self) -> None:
        """Nobody reads on: what has not come by now is cut off. To be called in any case."""
        self._clock.stop()
        if self._connection is not None:
            self._connection.cut()
            self._connection = None

    # ------------------------------------------------- what the connection says

    def begins(self, status: int, headers: Mapping[str, str]) -> None:
        self.status = status
        self.headers = headers
        coding = headers.get("content-encoding")
        if coding is not None:
            self._decoder = decoder(coding)
        self.wake()

    def takes(self, data: bytes) -> bool:
        """False where that is enough for now."""
        self._held.append(data)
        self._held_bytes += len(data)
        self.wake()
        return self._held_bytes <= _HELD_BYTES

    def ends(self, *, framed: bool) -> None:
        self._connection = None
        self.framed = framed
        self._over = True
        self.wake()

    def fails(self, failure: Broken) -> None:
        self._connection = None
        self._failure = failure
        self.wake()

    def wake(self) -> None:
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)


class _NotAnAnswer(Exception):
    """What came is HTTP, and no answer to what was asked."""


class Connection(asyncio.Protocol):
    """One socket. Used by `Keeper` and `Answer`."""

    __slots__ = (
        "_answer",
        "_complete",
        "_ear",
        "_fields",
        "_gone",
        "_keeper",
        "_kept",
        "_loop",
        "_parser",
        "_paused",
        "_pieces",
        "_silent_bytes",
        "_transport",
        "_until_closed",
        "_used",
        "free_until",
        "keep_alive_s",
        "on_body",
        "origin",
    )

    #: The parser's: a piece of a body.
    on_body: Callable[[bytes], None]

    def __init__(self, origin: Origin, keeper: Keeper) -> None:
        self.origin = origin
        #: How long it may be kept without work, in seconds, as who has it says before each request, and the provider
        #: may shorten; and until when that is, on the event loop's clock.
        self.keep_alive_s = 0.0
        self.free_until = 0.0
        self._keeper = keeper
        self._loop = asyncio.get_running_loop()
        self._answer: Answer | None = None
        self._fields: list[tuple[bytes, bytes]] = []
        self._pieces: list[bytes] = []
        self.on_body = self._pieces.append
        self._silent_bytes = 0
        #: The body has no other end.
        self._until_closed = False
        #: The answer has ended, and whether it lets the connection be used again.
        self._complete = False
        self._kept = False
        self._paused = False
        #: It has served a request.
        self._used = False
        #: Its end has come, or was made here.
        self._gone = False

    @override
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        opened = self._transport.get_extra_info("socket")
        opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._ear = select.poll()
        self._ear.register(opened.fileno(), select.POLLIN)
        self._parser = httptools.HttpResponseParser(self)
        # RFC 9112 (2.2) lets a line end without its CR; blanks behind the size of a chunk are an old habit of servers.
        # Nothing can be smuggled by either where no answer may follow another one.
        self._parser.set_dangerous_leniencies(lenient_optional_cr_before_lf=True, lenient_spaces_after_chunk_size=True)
        self._keeper.opened(self)

    @property
    def usable(self) -> bool:
        """Nothing is known of its end yet."""
        # A transport of TLS may be lost and not say that it closes.
        return not (self._gone or self._transport.is_closing())

    @property
    def heard(self) -> bool:
        """
        Of one that is usable and serves no request: something has come, its end or what nobody asked for, that the
        event loop has yet to read.
        """
        return bool(self._ear.poll(0))

    def send(self, start: bytes, body: bytes | None, clock: Clock) -> Answer:
        """A request with this start of its head. From here on it is not known whether any of it has left."""
        answer = self._answer = Answer(self, clock, self._loop)
        if body is None:
            self._transport.write(start + b"\r\n")
        else:
            self._transport.write(b"%bcontent-length: %d\r\n\r\n%b" % (start, len(body), body))
        return answer

    def cut(self) -> None:
        """Closes the socket; what was not sent yet is not sent, and an answer that was awaited fails."""
        self._gone = True
        self._transport.abort()

    def resume(self) -> None:
        if self._paused and not self._transport.is_closing():
            self._paused = False
            self._transport.resume_reading()

    # ----------------------------------------------------- what the socket says

    @override
    def data_received(self, data: bytes) -> None:
        answer = self._answer
        if answer is None:
            # Nobody asked: an answer that is late, or none.
            self._transport.abort()
            return
        malformed: httptools.HttpParserError | None = None
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            malformed = error
        pieces = self._pieces
        if pieces:
            enough = not answer.takes(pieces[0] if len(pieces) == 1 else b"".join(pieces))
            pieces.clear()
            self._silent_bytes = 0
            if enough and not self._paused and not self._complete:
                self._paused = True
                self._transport.pause_reading()
        else:
            self._silent_bytes += len(data)
        if self._complete:
            self._finish(answer, reusable=malformed is None)
        elif malformed is not None or self._silent_bytes > _MAX_SILENT_BYTES:
            failure = Broken("the answer is not HTTP", code="malformed")
            failure.__cause__ = malformed
            self._answer = None
            self._transport.abort()
            answer.fails(failure)

    def _finish(self, answer: Answer, *, reusable: bool) -> None:
        self._complete = False
        self._answer = None
        answer.ends(framed=True)
        transport = self._transport
        # Where the answer was quicker than the request, the rest of the request is still to come.
        if not reusable or not self._kept or transport.get_write_buffer_size():
            transport.abort()
            return
        self._silent_bytes = 0
        self._fields.clear()
        self._until_closed = False
        self._used = True
        self.resume()
        if not transport.is_closing():
            self._keeper.freed(self)

    @override
    def eof_received(self) -> None:
        self._transport.abort()
        self._ends(None)

    @override
    def connection_lost(self, exc: Exception | None) -> None:
        self._ends(exc)
        self._keeper.lost(self)
        # It knows this connection, too.
        del self._parser

    def _ends(self, error: Exception | None) -> None:
        ours, self._gone = self._gone, True
        answer, self._answer = self._answer, None
        if answer is None:
            return
        if self._until_closed and error is None:
            answer.ends(framed=False)
            return
        failure = Broken("the connection broke before the answer was complete", code="connection_lost")
        failure.__cause__ = error
        if self._used and not ours and not answer.status:
            self._keeper.stale(self)
        answer.fails(failure)

    # ----------------------------------------------------- what the parser says

    def on_message_begin(self) -> None:
        if self._complete:
            raise _NotAnAnswer

    def on_header(self, name: bytes, value: bytes) -> None:
        if len(name) + len(value) > _MAX_FIELD_BYTES or len(self._fields) == _MAX_FIELDS:
            raise _NotAnAnswer
        self._fields.append((name, value))

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if status < 200:
            # Said before the answer. There is no other protocol to switch to.
            if status < 100 or status == 101:
                raise _NotAnAnswer
            self._fields.clear()
            return
        headers: dict[str, str] = {}
        for name, value in self._fields:
            headers.setdefault(name.decode("ascii").lower(), value.decode(errors="surrogateescape"))
        self._until_closed = (
            "content-length" not in headers and "chunked" not in headers.get("transfer-encoding", "").lower()
        )
        if (said := headers.get("keep-alive")) is not None and (told := _TIMEOUT.search(said)) is not None:
            self.keep_alive_s = min(self.keep_alive_s, int(told[1]) - _SOONER_S)
        assert self._answer is not None
        self._answer.begins(status, headers)

    def on_message_complete(self) -> None:
        # What was said before the answer has an end, too.
        if self._answer is not None and self._answer.status:
            self._complete = True
            self._kept = self._parser.should_keep_alive()
