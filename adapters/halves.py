"""
Characters that a provider cuts in two.

JSON writes a character beyond the basic plane as two escapes, a surrogate pair. A server that cuts a text between the
two sends each half in an event of its own, and neither event is JSON that a strict decoder reads (RFC 8259, section
8.2, leaves open what becomes of it). The answer is good all the same, and paid for. So bytes are mended before anybody
reads them, relayed ones too: two halves that belong together become one character in the later event, and a half that
stays alone becomes U+FFFD, which is what Unicode has for it (Unicode 16, section 3.9).
"""

from __future__ import annotations

import re
from typing import Final

from adapters.relay import Frames, each

_HIGH: Final = rb"u[dD][89abAB][0-9a-fA-F]{2}"
_LOW: Final = rb"u[dD][c-fC-F][0-9a-fA-F]{2}"
#: Every escape of a JSON text from its beginning on, so that an escaped backslash begins none.
_ESCAPE: Final = re.compile(
    rb"\\(?:(?P<pair>%b\\%b)|(?P<high>%b)|(?P<low>%b)|.)" % (_HIGH, _LOW, _HIGH, _LOW), re.DOTALL
)
_ALONE: Final = rb"\ufffd"
#: What the last bytes of a read are where it cut an escape before it can be told what it is.
_CUT: Final = (b"\\", b"\\u")


def mended(text: bytes) -> bytes:
    """A JSON text in which no half of a pair stands alone."""
    if not _may_hold_half(text):
        return text
    return _ESCAPE.sub(lambda found: _ALONE if found.lastgroup in {"high", "low"} else found[0], text)


class Halves:
    """
    Stands before whoever reads an event stream. Most reads go through as they are. What may hold a half is held until
    its event has ended, before which nobody could read it, and an event that may need the next one until that is there.
    """

    __slots__ = ("_frames", "_open")

    def __init__(self) -> None:
        #: What has not ended of an event, once there was half of a pair or what may become one; else None.
        self._frames: Frames | None = None
        #: An event whose text ends in the first half of a pair.
        self._open = b""

    def feed(self, data: bytes) -> bytes:
        """What of it, and of what was held, can be read."""
        frames = self._frames
        if frames is None:
            if not _may_hold_half(data):
                return data
            frames = self._frames = Frames()
        ended = frames.feed(data)
        if not ended:
            return self.take() if frames.too_large else b""
        whole, self._open = _joined(self._open + ended)
        # Once an event has ended in this read, what is left is no more than the end of it.
        if frames.too_large or not (self._open or _may_hold_half(frames.rest)):
            return whole + self.take()
        return whole

    def take(self) -> bytes:
        """What is held, as it is to be read where nothing follows."""
        held = self._open + (b"" if self._frames is None else self._frames.take_rest())
        self._frames, self._open = None, b""
        return mended(held)


def _may_hold_half(data: bytes) -> bool:
    """There is an escape of a surrogate in it, or the beginning of what may be one."""
    # One byte is looked for twenty times as fast as three.
    return b"\\" in data and (b"\\ud" in data or b"\\uD" in data or data.endswith(_CUT))


def _joined(whole: bytes) -> tuple[bytes, bytes]:
    """These events, and the last one apart where its text ends in a half that the next event may bring the other to."""
    done: list[bytes] = []
    #: Of the event before: what stands before its open half, the half, and what stands behind.
    before, high, behind = b"", b"", b""
    for frame in each(whole):
        halves = [found for found in _ESCAPE.finditer(frame) if found.lastgroup in {"high", "low"}]
        joins = bool(high and halves and halves[0].lastgroup == "low" and frame.startswith(b'"', halves[0].start() - 1))
        if high:
            done += [before, b"" if joins else _ALONE, behind]
        at, pieces = 0, []
        for found in halves:
            pieces += [frame[at : found.start()], _ALONE]
            at = found.end()
        if joins:
            pieces[1] = high + halves[0][0]
        before, high, behind = b"".join(pieces), b"", frame[at:]
        if halves and halves[-1].lastgroup == "high" and behind.startswith(b'"'):
            before, high = b"".join(pieces[:-1]), halves[-1][0]
        if not high:
            done += [before, behind]
    return b"".join(done), before + high + behind if high else b""
