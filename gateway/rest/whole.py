"""
An answer that is whole when it begins: its head and its body go out in one write.

aiohttp's own response is made for everything that could still be set, and takes a copy of the headers, three coroutines
and two dozen look-ups to say what is known here from the start. What a connection needs to hear of an answer is as it
was: the writer counts the bytes, knows a broken connection and waits for a slow reader, and `keep_alive` says whether
there will be another one.
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


class Whole(web.StreamResponse):
    """A status that has a body, headers that are all there, and the body."""

    def __init__(self, body: bytes, headers: Mapping[str, str], *, status: int = 200) -> None:
        # Without `super().__init__`: what it prepares is what a caller could still set.
        self._whole = body
        self._said = headers
        self._status = status

    @override
    async def prepare(self, request: web.BaseRequest) -> AbstractStreamWriter | None:
        if not self._eof_sent:
            self._req = request
            self._payload_writer = request.writer
        return self._payload_writer

    @override
    async def write_eof(self, data: bytes = b"") -> None:
        """Raises ConnectionError where the client is gone, and ValueError for a header that would not be one line."""
        assert not data
        request, writer = self._req, self._payload_writer
        if self._eof_sent:
            return
        assert request is not None
        assert writer is not None
        body, headers, version = self._whole, self._said, request.version
        if self._keep_alive is None:
            self._keep_alive = request.keep_alive
        lines = "".join([f"{name}: {value}\r\n" for name, value in headers.items()])
        if not lines.count("\n") == lines.count("\r") == len(headers):
            raise ValueError("a header that is more than one line")
        connection = ""
        if self._keep_alive != (version >= (1, 1)):
            connection = "Connection: keep-alive\r\n" if self._keep_alive else "Connection: close\r\n"
        head = (
            f"HTTP/{version[0]}.{version[1]} {_STATUS[self._status]}\r\n{lines}"
            f"Content-Length: {len(body)}\r\nDate: {_date(int(time.time()))}\r\n{connection}\r\n"
        ).encode()
        if request.method == "HEAD":
            await writer.write_eof(head)
        elif len(body) > _MOST_COPIED:
            await writer.write(head)
            await writer.write_eof(body)
        else:
            await writer.write_eof(head + body)
        self._eof_sent = True
        self._req = None
        self._payload_writer = None


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
