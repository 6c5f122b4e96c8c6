"""
Answers as they go out: one that is whole when it begins, and one that comes in pieces.

aiohttp's own responses are made for everything that could still be set. They take a copy of the headers, three
coroutines and two dozen look-ups to say what is known here from the start, and send the head and the end of a stream
apart from what is in it. What a connection needs to hear of an answer is as it was: the writer counts the bytes and
waits for a slow reader, a broken connection is a ConnectionError, and `keep_alive` says whether there will be another
answer on it.
"""

from __future__ import annotations

import asyncio
import fcntl
import socket
import struct
import termios
import time
from collections.abc import Mapping
from email.utils import formatdate
from http import HTTPStatus
from typing import Final

from aiohttp import web
from aiohttp.abc import AbstractStreamWriter
from typing_extensions import override

_STATUS: Final[Mapping[int, str]] = {status.value: f"{status.value} {status.phrase}" for status in HTTPStatus}
#: Bytes up to which a body is copied behind its head, which costs less than a second write.
_MOST_COPIED: Final = 64 * 1024
#: Seconds for the last of a broken stream to arrive, and between two looks whether it has.
_ARRIVAL_S: Final = 1.0
_LOOK_S: Final = 0.01


class _Answer(web.StreamResponse):
    """A status that has a body, and headers that are all there."""

    def __init__(self, headers: Mapping[str, str], status: int) -> None:
        # Without `super().__init__`: what it prepares is what a caller could still set.
        self._said = headers
        self._status = status

    @override
    async def prepare(self, request: web.BaseRequest) -> AbstractStreamWriter | None:
        if not self._eof_sent and self._req is None:
            self._req = request
            self._payload_writer = request.writer
            if self._keep_alive is None:
                self._keep_alive = request.keep_alive
        return self._payload_writer

    def _head(self, request: web.BaseRequest, framing: str) -> bytes:
        """`framing` is a header that says how long the body is, or nothing."""
        lines = "".join([f"{name}: {value}\r\n" for name, value in self._said.items()])
        if not lines.count("\n") == lines.count("\r") == len(self._said):
            raise ValueError("a header that is more than one line")
        version, connection = request.version, ""
        if self._keep_alive != (version >= (1, 1)):
            connection = "Connection: keep-alive\r\n" if self._keep_alive else "Connection: close\r\n"
        return (
            f"HTTP/{version[0]}.{version[1]} {_STATUS[self._status]}\r\n{lines}{framing}"
            f"Date: {_date(int(time.time()))}\r\n{connection}\r\n"
        ).encode()

    def _ended(self) -> None:
        self._eof_sent = True
        self._req = None
        self._payload_writer = None


class Whole(_Answer):
    """All of it in one write."""

    def __init__(self, body: bytes, headers: Mapping[str, str], *, status: int = 200) -> None:
        super().__init__(headers, status)
        self._whole = body

    @override
    async def write_eof(self, data: bytes = b"") -> None:
        """Raises ConnectionError where the client is gone, and ValueError for a header that would be two."""
        assert not data
        if self._eof_sent:
            return
        request, writer, body = self._req, self._payload_writer, self._whole
        assert request is not None
        assert writer is not None
        head = self._head(request, f"Content-Length: {len(body)}\r\n")
        if request.method == "HEAD":
            await writer.write_eof(head)
        elif len(body) > _MOST_COPIED:
            await writer.write(head)
            await writer.write_eof(body)
        else:
            await writer.write_eof(head + body)
        self._ended()


class Pieces(_Answer):
    """
    What is written goes out at once, the first piece with the head. Chunks frame it, or in HTTP/1.0 the end of the
    connection. There any end but `write_eof` resets the connection, be it the end of the process: a part would pass for
    the whole.
    """

    def __init__(self, headers: Mapping[str, str]) -> None:
        super().__init__(headers, 200)
        #: What goes out with what is written next.
        self._before = b""
        self._framed = False

    @override
    async def prepare(self, request: web.BaseRequest) -> AbstractStreamWriter | None:
        if self._req is None and not self._eof_sent:
            self._framed = request.version >= (1, 1)
            if not self._framed:
                self._keep_alive = False
                _resets(request.transport, True)
            await super().prepare(request)
            self._before = self._head(request, "Transfer-Encoding: chunked\r\n" if self._framed else "")
        return self._payload_writer

    @override
    async def write(self, data: bytes | bytearray | memoryview) -> None:
        """Returns when the caller has read enough of it. Raises ConnectionError where the caller is gone."""
        if self.put(bytes(data)):
            await self.drain()

    def put(self, data: bytes) -> bool:
        """As `write`, without waiting: whether there is something to wait for, which `drain` does."""
        assert self._req is not None
        self.hold(data)
        self._send(self._before)
        self._before = b""
        return self._req.protocol.writing_paused

    def hold(self, data: bytes) -> None:
        """It goes out with the next piece, or with the end."""
        # A chunk of nothing would be the end.
        if data:
            self._before += b"%x\r\n%b\r\n" % (len(data), data) if self._framed else data

    @override
    async def drain(self) -> None:
        assert self._payload_writer is not None
        await self._payload_writer.drain()

    @override
    async def write_eof(self, data: bytes = b"") -> None:
        assert not data
        if self._eof_sent:
            return
        # Also where it is nothing: of what was broken off there is no end.
        self._send(self._before + b"0\r\n\r\n" if self._framed else self._before)
        await self.drain()
        if not self._framed:
            assert self._req is not None
            _resets(self._req.transport, False)
        self._ended()

    async def break_off(self) -> None:
        """What was written is sent, and then the connection ends without the end of the body: it is not whole."""
        transport = None if self._req is None else self._req.transport
        if transport is None:
            return
        if not self._framed:
            await _arrived(transport)
        transport.close()

    def _send(self, data: bytes) -> None:
        request, writer = self._req, self._payload_writer
        assert request is not None
        assert writer is not None
        transport = request.transport
        if transport is None or transport.is_closing():
            raise ConnectionResetError("the client is gone")
        # Whether anything is out decides how an error can still be told.
        writer.output_size += len(data)
        transport.write(data)


def _resets(transport: asyncio.Transport | None, on: bool) -> None:
    """Whether the end of the connection is a reset, from whichever side of this process it comes."""
    if transport is not None:
        link: socket.socket = transport.get_extra_info("socket")
        link.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", on, 0))


async def _arrived(transport: asyncio.Transport) -> None:
    """Until the other side has what was written, which a reset would overtake; not for long, and where it is told."""
    link: socket.socket = transport.get_extra_info("socket")
    loop = asyncio.get_running_loop()
    until = loop.time() + _ARRIVAL_S
    while not transport.is_closing() and loop.time() < until:
        left = bytearray(4)
        try:
            fcntl.ioctl(link.fileno(), termios.TIOCOUTQ, left)
        except OSError:
            return
        if not any(left) and transport.get_write_buffer_size() == 0:
            return
        await asyncio.sleep(_LOOK_S)


class _Clock:
    """The date as HTTP has it, made once a second."""

    def __init__(self) -> None:
        self._second = 0
        self._text = ""

    def __call__(self, second: int) -> str:
        if second != self._second:
            self._second, self._text = second, formatdate(second, usegmt=True)
        return self._text


_date = _Clock()
