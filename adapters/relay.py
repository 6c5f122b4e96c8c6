"""
A provider's stream passed on as it came, where the caller speaks the provider's own protocol.

The parser still reads everything: usage, proof of the end and errors come from it alone. Beside it this keeps the bytes
of each whole event until the caller gets what the parser made of it. An event that the parser found to be an error is
never passed on, nor is what follows the terminal. Where only the end of the body tells that the last event was an
error, as in Gemini's format, that one has been passed on; the error follows it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from adapters.chat import Event, Finished
from adapters.contract import Batch, StreamParser
from adapters.errors import Broken, ProviderError
from adapters.sse import MAX_EVENT_BYTES, EventDecoder

#: The line end of a line and the blank line behind it. Atomic: a CR LF is never taken for two.
_BLANK_LINE = re.compile(rb"(?>\r\n|\n|\r)(?>\r\n|\n|\r)")
#: What may stand before the first event, or before JSON in its place: white space and a byte order mark.
_BLANKS = b" \t\r\n\xef\xbb\xbf"


class Frames:
    """Bytes to whole events, as bytes; joined they are what was fed."""

    __slots__ = ("_plain", "_rest", "_seen")

    def __init__(self) -> None:
        self._rest = bytearray()
        #: So much of the rest was looked through; a line end may begin in its last three bytes.
        self._seen = 0
        #: Every line end so far was an LF, as nearly everywhere.
        self._plain = True

    def feed(self, data: bytes) -> bytes:
        """The events that these bytes complete."""
        self._plain = self._plain and b"\r" not in data
        if not self._plain:
            return self._torn(data)
        end = data.rfind(b"\n\n") + 2
        if self._rest:
            if end == 1 and not (data[:1] == b"\n" and self._rest[-1:] == b"\n"):
                self._rest += data
                self._seen = len(self._rest)
                return b""
            data = bytes(self._rest) + data
            end = data.rfind(b"\n\n") + 2
        if end == 1:
            end = 0
        if end < len(data) or self._rest:
            self._keep(bytearray(data[end:]))
            data = data[:end]
        return data

    def _torn(self, data: bytes) -> bytes:
        self._rest += data
        end = 0
        for found in _BLANK_LINE.finditer(self._rest, max(0, self._seen - 3)):
            end = found.end()
        whole = bytes(self._rest[:end])
        self._keep(self._rest[end:] if end else self._rest)
        return whole

    def _keep(self, rest: bytearray) -> None:
        self._rest = rest
        self._seen = len(rest)

    @property
    def too_large(self) -> bool:
        return self._seen > MAX_EVENT_BYTES

    @property
    def rest(self) -> bytes:
        """What is left of an event that has not ended."""
        return bytes(self._rest)

    def take_rest(self) -> bytes:
        """What is left of an event that has not ended; it is then gone from here."""
        rest, self._rest, self._seen = bytes(self._rest), bytearray(), 0
        return rest


def each(whole: bytes) -> Iterator[bytes]:
    """Whole events, each by itself."""
    if b"\r" not in whole:
        for frame in whole.split(b"\n\n")[:-1]:
            yield frame + b"\n\n"
        return
    start = 0
    for found in _BLANK_LINE.finditer(whole):
        yield whole[start : found.end()]
        start = found.end()


class RelayedStream:
    """A `StreamParser` around another one, which keeps what may be passed on."""

    def __init__(self, parser: StreamParser) -> None:
        self._parser = parser
        self._frames = Frames()
        #: Whether the body is an event stream at all; None while nothing but blanks came.
        self._is_stream: bool | None = None
        self._start = bytearray()
        self._whole: list[bytes] = []
        self._terminal = b""
        self._failure: ProviderError | None = None

    @property
    def finished(self) -> bool:
        return self._parser.finished

    @property
    def ended_at(self) -> tuple[int, int] | None:
        # An event that is too large has not ended: no other can follow it.
        return self._parser.ended_at if self._failure is None else (0, 1)

    @property
    def payloads(self) -> int:
        return self._parser.payloads

    @property
    def is_json(self) -> bool:
        return self._parser.is_json

    def feed(self, data: bytes) -> Batch:
        if self._failure is not None:
            raise self._failure
        if self._is_stream is None:
            self._start += data
            first = data.lstrip(_BLANKS)
            if not first:
                return ()
            self._is_stream = first[:1] not in {b"{", b"["}
            data = bytes(self._start)
            self._start.clear()
        if not self._is_stream or self._parser.finished:
            return self._parser.feed(data)
        whole = self._frames.feed(data)
        events = self._parser.feed(whole)
        ended_at = self._parser.ended_at
        if ended_at is not None:
            self._end(whole, *ended_at)
            if self._parser.finished:
                # A cost that came behind the terminal: Finished stays the last.
                return sorted([*events, *self._parser.feed(self._frames.take_rest())], key=_is_last)
        elif whole:
            self._whole.append(whole)
        if self._frames.too_large:
            self._failure = Broken("an event of the stream is too large", code="response_too_large")
            if not events:
                raise self._failure
        return events

    def _end(self, whole: bytes, before: int, number: int) -> None:
        """
        Of events of which that one ended the stream, what may be passed on: those before it, and the terminal.
        `number` is that of the event behind the bytes `before`.
        """
        self._whole.append(whole[:before])
        decoder = EventDecoder()
        for frame in each(whole[before:]):
            number -= len(decoder.feed(frame))
            if number <= 0:
                self._terminal = frame if self._parser.finished else b""
                return
            self._whole.append(frame)

    def close(self) -> Batch:
        if self._failure is not None:
            raise self._failure
        was_finished = self._parser.finished
        rest = bytes(self._start) or self._frames.take_rest()
        events = list(self._parser.feed(rest)) if rest and not was_finished else []
        try:
            events += self._parser.close()
        except ProviderError as error:
            if not events:
                raise
            self._failure = error
        if self._parser.finished and not was_finished and self._is_stream:
            self._terminal = rest
        return events

    def take(self) -> bytes | None:
        """The events since the last call, up to and without the terminal; None where the body is no event stream."""
        if not self._is_stream:
            return None
        whole = b"".join(self._whole)
        self._whole.clear()
        return whole

    @property
    def terminal(self) -> bytes:
        """The event that was the terminal; empty before it, and where the end of the body was."""
        return self._terminal


def _is_last(event: Event) -> bool:
    return isinstance(event, Finished)
