"""
Bodies that come compressed, unfolded no further than somebody reads.

A few kilobytes can unfold to gigabytes. So a piece of what unfolds is bounded whatever it was made from, and whoever
counts what it reads counts it before the next piece is made.
"""

from __future__ import annotations

import zlib

from adapters.errors import Broken

#: Of one piece.
_PIECE_BYTES = 64 * 1024
#: What `zlib` calls a gzip stream, a zlib stream and a bare one.
_GZIP, _ZLIB, _BARE = 16 + zlib.MAX_WBITS, zlib.MAX_WBITS, -zlib.MAX_WBITS


class Decoder:
    """One body in gzip or deflate. Its end is not looked for: what a body says is proven by its protocol."""

    __slots__ = ("_folded", "_gzip", "_more", "_over", "_unfolding")

    def __init__(self, *, gzip: bool) -> None:
        self._gzip = gzip
        self._unfolding: zlib._Decompress | None = zlib.decompressobj(_GZIP) if gzip else None
        self._folded = b""
        #: The last piece was as long as one may be: there can be more of what is unfolded already.
        self._more = False
        #: The end came; what follows is of no meaning.
        self._over = False

    @property
    def drained(self) -> bool:
        """There is nothing to take."""
        return not (self._folded or self._more)

    def feed(self, data: bytes) -> None:
        if not self._over:
            self._folded += data

    def take(self) -> bytes:
        """The next piece; empty where more must be fed first. Raises `Broken`."""
        while self._folded or self._more:
            if self._unfolding is None:
                # Some send a zlib stream for deflate, as the standard says, and some a bare one. Only the former begins
                # with the number of its method.
                self._unfolding = zlib.decompressobj(_ZLIB if self._folded[0] & 0x0F == 8 else _BARE)
            try:
                piece = self._unfolding.decompress(self._folded, _PIECE_BYTES)
            except zlib.error as error:
                raise Broken("the answer is not compressed as it says", code="malformed") from error
            self._folded = self._unfolding.unconsumed_tail
            self._more = len(piece) == _PIECE_BYTES
            if self._unfolding.eof:
                self._more = False
                if self._gzip:  # another member may follow
                    self._folded, self._unfolding = self._unfolding.unused_data, zlib.decompressobj(_GZIP)
                else:
                    self._folded, self._over = b"", True
            if piece:
                return piece
        return b""


class Unreadable:
    """A body in a coding that was not asked for. Nothing of it can be read; that there is none can."""

    __slots__ = ()

    drained = True

    def feed(self, _: bytes) -> None:
        raise Broken("the answer is in a coding that was not asked for", code="malformed")

    def take(self) -> bytes:
        return b""


def decoder(coding: str) -> Decoder | Unreadable | None:
    """For a body in this coding. None where it is read as it comes."""
    match coding.strip().lower():
        case "" | "identity":
            return None
        case "gzip" | "x-gzip":
            return Decoder(gzip=True)
        case "deflate":
            return Decoder(gzip=False)
        case _:
            return Unreadable()
