"""
Answers as they go out: one that is whole when it begins, and one that comes in pieces.

aiohttp's own responses are made for everything that could still be set. They take a copy of the headers, three
coroutines and two dozen look-ups to say what is known here from the start, and send the head and the end of a stream
apart from what is in it. What a connection needs to hear of an answer is as it was: the writer counts the bytes and
waits for a slow reader, a broken connection is a ConnectionError, and `keep_alive` says whether there will be another
answer on it.
"""

from __future__ import annotations

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
    connection.
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
        last = self._before + b"0\r\n\r\n" if self._framed else self._before
        if last:
            self._send(last)
            await self.drain()
        self._ended()

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
