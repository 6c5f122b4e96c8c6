"""
Bytes of an event stream to events, by the rules of the WHATWG standard, with no I/O.

Everything is done on bytes, and lines end at CR LF, LF or CR only. Splitting decoded text where Python thinks a line
ends would also cut at U+2028, U+0085 and form feeds, which are legal inside the JSON of an answer; and looking for a
sentinel in the text would find the one that a model wrote.

One rule departs from the standard: an event that the end of the body cut off before its blank line is given out by
`close`, since providers do end their last event so. The caller must know that the body ended by its framing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

#: Room for an image or sound inside one event; far above any text.
MAX_EVENT_BYTES = 8 * 1024 * 1024

#: Values in one piece of JSON, told by its commas: each costs up to some hundred bytes once it is decoded, a hundred
#: times what it costs as text. Far above any answer; one with as much text as this has commas is larger than any, too.
MAX_VALUES = 1_000_000
_FEW_BYTES = 64 * 1024

_BOM = b"\xef\xbb\xbf"
_WHITE = b" \t\r\n"
_OPENS_JSON = b"{["
_CR = 0x0D
_LF = 0x0A


#: An event's name, empty where the stream gave none, and its data lines joined by LF. A plain tuple: one is made for
#: every token of every stream.
ServerSentEvent: TypeAlias = tuple[str, bytes]


class EventTooLarge(Exception):
    """A line or an event is longer than the limit in bytes, or holds more values than `MAX_VALUES`."""

    def __init__(self, limit: int) -> None:
        super().__init__(f"an event of the stream is longer than {limit} bytes, or holds too many values")
        self.limit = limit


class EventDecoder:
    """
    One event stream. Any split of its bytes gives the same events.

    Comments, `id` and `retry` are dropped: a stream of an answer cannot be resumed. Memory is bounded by
    `max_event_bytes` and the size of one feed; time is linear in the bytes, also one at a time.

    With `keep_stray`, everything from the first line on that begins with a brace or a bracket is no event but kept in
    `stray`: a provider that breaks off its stream with a bare JSON value has said something.
    """

    __slots__ = (
        "_data",
        "_data_bytes",
        "_event",
        "_few",
        "_limit",
        "_more",
        "_name",
        "_name_bytes",
        "_plain",
        "_skip_lf",
        "_start",
        "_stray",
        "_stray_bytes",
        "_tail",
    )

    def __init__(self, *, max_event_bytes: int = MAX_EVENT_BYTES, keep_stray: bool = False) -> None:
        self._limit = max_event_bytes
        #: What a line may have without a look at the limits.
        self._few = min(_FEW_BYTES, max_event_bytes)
        self._stray: list[bytes] | None = [] if keep_stray else None
        self._stray_bytes = 0
        #: The unfinished last line, where it came in several pieces a bytearray. Not a list of them: of one byte each
        #: they would cost forty times as much.
        self._tail: bytes | bytearray = b""
        #: The first data line of the current event, and the others.
        self._data: bytes | None = None
        self._more: list[bytes] = []
        self._data_bytes = 0
        self._event = b""
        #: The last name that was read, and what it is as text.
        self._name_bytes = b""
        self._name = ""
        #: The last byte was a CR: an LF that follows belongs to it.
        self._skip_lf = False
        #: The first bytes, until it is known whether they are a byte order mark; None when that is over.
        self._start: bytes | None = b""
        #: Nothing of the two is open, as nearly everywhere.
        self._plain = False

    def feed(self, data: bytes) -> list[ServerSentEvent]:
        """The events that these bytes complete. Raises `EventTooLarge`; the stream is then of no more use."""
        if not self._plain or b"\r" in data:
            data = self._made_plain(data)
        end = data.rfind(b"\n")
        if end < 0:
            self._keep(data)
            return []
        tail = self._tail
        if tail:
            whole = tail + data[:end]
            lines = (whole if type(whole) is bytes else bytes(whole)).split(b"\n")
        else:
            lines = data[:end].split(b"\n")
        self._tail = tail = data[end + 1 :]
        if len(tail) > self._limit:
            raise EventTooLarge(self._limit)
        if len(lines) == 2 and not lines[1] and not self._event and self._data is None and not self._stray:
            # What nearly every read of a slow stream is: one event of one line, without a name.
            line = lines[0]
            if line[:6] == b"data: " and len(line) < self._few:
                return [("", line[6:])]
        return self._lines(lines)

    def _made_plain(self, data: bytes) -> bytes:
        """Without the byte order mark, and with LF for each line end. Bytes that may be half of one wait."""
        if self._start is not None:
            data = self._start + data
            if len(data) < len(_BOM) and _BOM.startswith(data):
                self._start = data
                return b""
            self._start = None
            data = data.removeprefix(_BOM)
        if not data:
            return data
        if self._skip_lf:
            self._skip_lf = False
            if data[0] == _LF:
                data = data[1:]
        if b"\r" in data:
            self._skip_lf = data[-1] == _CR
            data = data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        self._plain = not self._skip_lf
        return data

    def close(self) -> list[ServerSentEvent]:
        """The body ended: the event that was left without its blank line, if there is one."""
        lines = [self._start or bytes(self._tail), b""]
        self._start = None
        self._tail = b""
        return self._lines(lines)

    @property
    def between(self) -> bool:
        """No event is open, and every line has ended with an LF so far."""
        return self._plain and not self._tail and self._data is None and not self._event and not self._stray

    @property
    def stray(self) -> bytes | None:
        """The bare JSON value that took the place of the rest of the stream, as far as it came; None without one."""
        return b"\n".join(self._stray) if self._stray else None

    def _keep(self, piece: bytes) -> None:
        if not self._tail:
            self._tail = piece
        else:
            if type(self._tail) is bytes:
                self._tail = bytearray(self._tail)
            self._tail += piece
        if len(self._tail) + self._data_bytes > self._limit:
            raise EventTooLarge(self._limit)

    def _lines(self, lines: list[bytes]) -> list[ServerSentEvent]:
        events: list[ServerSentEvent] = []
        if self._stray:
            self._keep_stray(lines)
            return events
        data, size, event = self._data, self._data_bytes, self._event
        for line in lines:
            if line[:6] == b"data: ":
                value = line[6:]
            elif not line:
                if data is not None:
                    if self._more:
                        data = b"\n".join((data, *self._more))
                        self._more.clear()
                    if size > _FEW_BYTES and data.count(b",") > MAX_VALUES:
                        raise EventTooLarge(self._limit)
                    if event != self._name_bytes:
                        # Nearly every event of a stream has the name of the one before it.
                        self._name_bytes, self._name = event, event.decode(errors="replace")
                    events.append((self._name, data))
                    data = None
                    size = 0
                event = b""
                continue
            elif line[:7] == b"event: ":
                event = line[7:]
                continue
            elif line[:6] == b"event:":
                event = line[6:]
                continue
            elif line[:5] == b"data:" or line == b"data":
                value = line[5:]
            elif line == b"event":
                event = b""
                continue
            elif self._stray is not None and line[0] in _OPENS_JSON:
                self._keep_stray(lines[lines.index(line) :])
                break
            else:
                continue
            size += len(value) + 1
            if size > self._limit:
                raise EventTooLarge(self._limit)
            if data is None:
                data = value
            else:
                self._more.append(value)
        self._data, self._data_bytes, self._event = data, size, event
        return events

    def _keep_stray(self, lines: list[bytes]) -> None:
        assert self._stray is not None
        self._stray.append(b"\n".join(lines))
        self._stray_bytes += sum(map(len, lines)) + len(lines)
        if self._stray_bytes > self._limit:
            raise EventTooLarge(self._limit)


class EventsOrJson:
    """
    The body of an answer that was asked for as a stream: events, or one JSON value from a provider that did not heed
    that, or that answers so with an error.

    The first byte decides: no event stream begins with a brace or a bracket, nor does JSON otherwise. It is the one
    test that no header can spoil.
    """

    __slots__ = ("_decoder", "_held", "_is_json", "_limit", "_values", "feed")

    #: The events that these bytes complete; none where the body is JSON. Raises `EventTooLarge`. Once the body is known
    #: to be events this is the decoder's own: a call between costs as much as a short event.
    feed: Callable[[bytes], list[ServerSentEvent]]

    def __init__(self, *, max_event_bytes: int = MAX_EVENT_BYTES, keep_stray: bool = False) -> None:
        self._limit = max_event_bytes
        self._decoder = EventDecoder(max_event_bytes=max_event_bytes, keep_stray=keep_stray)
        #: The body so far, where it is JSON or not yet known; None once it is known to be events.
        self._held: bytearray | None = bytearray()
        self._is_json = False
        self._values = 0
        self.feed = self._begin

    def _begin(self, data: bytes) -> list[ServerSentEvent]:
        assert self._held is not None, "of events the decoder is asked"
        if not self._is_json:
            start = bytes(self._held) + data
            if _BOM.startswith(start):
                self._held = bytearray(start)
                return []
            data = start.removeprefix(_BOM).lstrip(_WHITE)
            if not data:
                # Of any number of blanks one does: whether a line had begun is all that matters to what follows.
                self._held = bytearray(start[-1:])
                return []
            if data[0] not in _OPENS_JSON:
                self._held = None
                self.feed = self._decoder.feed
                return self.feed(start)
            self._is_json, self._held = True, bytearray()
        self._held += data
        self._values += data.count(b",")
        if self._values > MAX_VALUES:
            raise EventTooLarge(self._limit)
        return []

    def close(self) -> list[ServerSentEvent]:
        """The body ended: the event that was left without its blank line, if there is one."""
        return [] if self._is_json else self._decoder.close()

    @property
    def json(self) -> bytes | None:
        """The JSON value so far; None where the body is events."""
        return bytes(self._held) if self._is_json and self._held is not None else None

    @property
    def between(self) -> bool:
        """As `EventDecoder.between`."""
        return self._held is None and self._decoder.between

    @property
    def stray(self) -> bytes | None:
        """As `EventDecoder.stray`."""
        return self._decoder.stray
