"""
Events of a stream that differ in nothing but one text.

A provider sends the same hundreds of bytes around every token. Read one by one, each event costs a decoding of its
JSON; but once it is known what stands before the text and after it, what comes next is compared as bytes, and all that
is left to be read is JSON strings. Nothing is guessed: bytes that are not the same, or a text that is no JSON string,
are read as any other event.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

#: Stands between the texts of two events while they are read as one. A control character that may stand in a JSON
#: string, so that no escape and no character of several bytes can reach from one text into the next.
_MARK = "\x7f"
_MARK_BYTES = _MARK.encode()
#: Takes the place of a text while it is tried whether that is all the event says.
_PROBE = "text of another event"
#: Of a text from which the others are learned, in characters.
_MOST = 512

_encode = msgspec.json.Encoder().encode
_string = msgspec.json.Decoder(str)


class Piece(msgspec.Struct, frozen=True):
    """What is taken from an event that says some text and nothing else."""

    text: str
    choice: int = 0
    id: str | None = None
    model: str | None = None
    tier: str | None = None


class Alike:
    """The events that are as one was, but for their text."""

    __slots__ = ("_after", "_before", "_between", "_line", "_lines", "_text", "piece")

    def __init__(self, name: bytes, before: bytes, after: bytes, piece: Piece) -> None:
        """The event's name, and all of its data before the text, the quote included, and after it."""
        #: What each of them says beside its text.
        self.piece = piece
        self._before = (b"event: " + name + b"\n" if name else b"") + b"data: " + before
        self._after = after + b"\n\n"
        self._between = self._after + self._before
        #: Of how many lines one is, the blank one included, which of them has the text, and where.
        self._lines = 3 if name else 2
        self._line = 1 if name else 0
        self._text = slice(len(b"data: " + before), -len(after))

    def read(self, data: bytes) -> tuple[str, int, int]:
        """
        What those say with which `data` begins, joined; how many they are, and of how many bytes. `data` begins where
        an event does.
        """
        size = data.rfind(self._after) + len(self._after)
        whole = data[:size]
        texts = [line[self._text] for line in whole.split(b"\n")[self._line : -1 : self._lines]]
        # Put together again they must be what came: so nothing else was cut away.
        if not texts or self._before + self._between.join(texts) + self._after != whole:
            return "", 0, 0
        try:
            text = _string.decode(b'"' + _MARK_BYTES.join(texts) + b'"')
        except msgspec.DecodeError:
            return "", 0, 0
        if text.count(_MARK) != len(texts) - 1:
            return "", 0, 0
        return text.replace(_MARK, ""), len(texts), size


def learned(name: str, data: bytes, read: Callable[[bytes], Piece | None]) -> Alike | None:
    """
    What is like the event of this name and data; None where it says more than a text, or it cannot be told where its
    text stands. `read` says what is taken from an event, None where that is more than a text.
    """
    piece = read(data)
    if piece is None or not 0 < len(piece.text) <= _MOST or piece.text == _PROBE:
        return None
    text = _encode(piece.text)
    at = data.rfind(text)
    if at < 0:
        return None
    before, after = data[: at + 1], data[at + len(text) - 1 :]
    # Only where this was the text, and nothing else was it too, another one in its place is all that changes.
    if read(before + _PROBE.encode() + after) != msgspec.structs.replace(piece, text=_PROBE):
        return None
    return Alike(name.encode(), before, after, piece)
