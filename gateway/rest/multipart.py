"""
`multipart/form-data` in pieces, at any split, without I/O.

A file of 200 MB is passed on as it comes: what is held is one piece of the body and what may be the beginning of a
boundary. RFC 7578; the boundary and the framing are RFC 2046's.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Iterator
from typing import Final, TypeAlias

import msgspec

from gateway.errors import InvalidRequest

_MAX_HEADER_BYTES: Final = 8 * 1024
_MAX_PARTS: Final = 32
_BOUNDARY: Final = re.compile(r';\s*boundary=(?:"([^"]{1,70})"|([^\s";,]{1,70}))', re.IGNORECASE)
_PARAMETER: Final = re.compile(r';\s*(name|filename)="((?:[^"\\]|\\.)*)"', re.IGNORECASE)


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """A part begins. The bytes that follow are its content, up to the next part."""

    name: str
    #: None: a plain field.
    filename: str | None


Item: TypeAlias = Part | bytes


class _At(enum.Enum):
    START = "start"
    HEADERS = "headers"
    CONTENT = "content"
    BEHIND_BOUNDARY = "behind a boundary"
    END = "end"


def boundary_of(content_type: str) -> bytes:
    """From a Content-Type header. Raises InvalidRequest."""
    found = _BOUNDARY.search(content_type)
    if found is None:
        raise InvalidRequest("multipart/form-data without a boundary", param="content-type")
    return (found[1] or found[2]).encode("latin-1", "replace")


class FormParser:
    """One form. `feed` raises InvalidRequest where it is none."""

    def __init__(self, boundary: bytes) -> None:
        self._boundary = b"\r\n--" + boundary
        # The first boundary may stand at the very beginning.
        self._buffer = b"\r\n"
        self._at = _At.START
        self._parts = 0

    @property
    def ended(self) -> bool:
        """The closing boundary was seen."""
        return self._at is _At.END

    def feed(self, data: bytes) -> Iterator[Item]:
        self._buffer = self._buffer + data if self._buffer else data
        while True:
            match self._at:
                case _At.START | _At.CONTENT:
                    place = self._buffer.find(self._boundary)
                    sure = place if place >= 0 else len(self._buffer) - len(self._boundary) + 1
                    if self._at is _At.CONTENT and sure > 0:
                        yield self._buffer[:sure]
                    if place < 0:
                        self._buffer = self._buffer[max(sure, 0) :]
                        return
                    self._buffer = self._buffer[place + len(self._boundary) :]
                    self._at = _At.BEHIND_BOUNDARY
                case _At.BEHIND_BOUNDARY:
                    if self._buffer.startswith(b"--"):
                        self._buffer = b""
                        self._at = _At.END
                        return
                    line, found, rest = self._buffer.partition(b"\r\n")
                    if line.strip(b" \t") not in ((b"",) if found else (b"", b"\r", b"-")):
                        raise InvalidRequest("the form is badly framed", param="body")
                    if not found:
                        self._bounded()
                        return
                    # Kept, so that a part without headers ends its headers, too.
                    self._buffer = b"\r\n" + rest
                    self._at = _At.HEADERS
                case _At.HEADERS:
                    head, found, rest = self._buffer.partition(b"\r\n\r\n")
                    if not found:
                        self._bounded()
                        return
                    self._buffer = rest
                    self._at = _At.CONTENT
                    yield self._part(head)
                case _At.END:
                    return

    def _bounded(self) -> None:
        if len(self._buffer) > _MAX_HEADER_BYTES:
            raise InvalidRequest("the headers of a part are too long", param="body")

    def _part(self, head: bytes) -> Part:
        self._parts += 1
        if self._parts > _MAX_PARTS:
            raise InvalidRequest(f"a form may have {_MAX_PARTS} parts", param="body")
        for header in head.decode("utf-8", "replace").split("\r\n"):
            name, _, value = header.partition(":")
            if name.strip().lower() != "content-disposition":
                continue
            given = {key.lower(): _unquoted(text) for key, text in _PARAMETER.findall(value)}
            if value.strip().lower().startswith("form-data") and "name" in given:
                return Part(name=given["name"], filename=given.get("filename"))
        raise InvalidRequest("a part without a name", param="body")


def _unquoted(text: str) -> str:
    r"""Browsers and Python's clients write a quote as %22, others as \"."""
    return text.replace('\\"', '"').replace("%22", '"')
