"""
Lines on their way to stderr, without the event loop ever waiting for whoever reads them.

Lines of one turn of the loop go out in one write. A reader that does not read (a pager, a collector of logs that hangs)
would hold up every request at the first write to a full pipe: so the pipe is asked first whether it takes anything, and
where it does not, a thread writes what waits, in order. What waits is bounded; lines beyond that are lost, and counted.
"""

from __future__ import annotations

import asyncio
import io
import os
import select
import stat
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Final, TextIO

#: Bytes that are free in a pipe which says that it can be written, and that it takes whole: lines of other processes
#: come before or after them.
_AT_ONCE: Final = select.PIPE_BUF
#: Bytes of lines that may wait for the reader.
MOST_WAITING: Final = 4 * 1024**2
#: Seconds for which the end of the process waits for the reader.
END_S: Final = 5.0


class Lines:
    """Where the lines of one process go, from any of its threads. Each line has its newline."""

    def __init__(self, stream: TextIO, lost: Callable[[int], bytes], *, most: int = MOST_WAITING) -> None:
        """`lost` makes the line that says how many were lost; `most` is bytes that may wait."""
        stream.flush()
        self._stream = stream
        self._lost_line = lost
        self._most = most
        # Entered again where a collection of garbage logs in the midst of it.
        self._lock = threading.RLock()
        self._turn: list[bytes] = []
        self._flushes: asyncio.AbstractEventLoop | None = None
        self._late: deque[bytes] = deque()
        self._late_bytes = 0
        self._lost = 0
        self._writer: threading.Thread | None = None
        try:
            self._fd = stream.fileno()
        except io.UnsupportedOperation:
            self._fd = -1
        # A file takes everything, and at once.
        self._file = self._fd >= 0 and stat.S_ISREG(os.fstat(self._fd).st_mode)
        self._room = select.poll()
        if self._fd >= 0:
            self._room.register(self._fd, select.POLLOUT)

    def write(self, line: bytes) -> None:
        """It goes out when this turn of the loop is over; at once in a thread without one."""
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            self.write_now(line)
            return
        with self._lock:
            self._turn.append(line)
            if self._flushes is not loop:
                self._flushes = loop
                loop.call_soon(self.flush)

    def write_now(self, line: bytes) -> None:
        """It goes out before this returns, behind all that were written before it."""
        with self._lock:
            self._turn.append(line)
            self.flush()

    def flush(self) -> None:
        with self._lock:
            self._flushes = None
            lines, self._turn = self._turn, []
            if not lines:
                return
            if self._fd < 0:
                self._stream.buffer.write(b"".join(lines))
                self._stream.buffer.flush()
            elif self._file:
                self._put(b"".join(lines))
            else:
                self._offer(lines)

    def end(self) -> None:
        """What waits is written, or the reader has not taken it within END_S."""
        self.flush()
        writer = self._writer
        if writer is not None:
            writer.join(END_S)

    def _offer(self, lines: Sequence[bytes]) -> None:
        """Writes what the reader has room for; the rest waits."""
        pieces = deque(_pieces(lines))
        while pieces and self._writer is None and self._room.poll(0):
            piece = pieces.popleft()
            if rest := piece[self._put(piece) :]:
                pieces.appendleft(rest)
                break
        for piece in pieces:
            if self._late_bytes + len(piece) > self._most:
                self._lost += piece.count(b"\n")
            else:
                self._late.append(piece)
                self._late_bytes += len(piece)
        if self._late and self._writer is None:
            self._writer = threading.Thread(target=self._write_late, name="log", daemon=True)
            self._writer.start()

    def _write_late(self) -> None:
        while True:
            with self._lock:
                if not self._late:
                    if not self._lost:
                        self._writer = None
                        return
                    piece, self._lost = self._lost_line(self._lost), 0
                else:
                    piece = self._late.popleft()
                    self._late_bytes -= len(piece)
            while piece:
                self._room.poll()
                piece = piece[self._put(piece) :]

    def _put(self, piece: bytes) -> int:
        """How many bytes of it are done with. Where nobody can read any more, that is all."""
        try:
            return os.write(self._fd, piece)
        except BlockingIOError:
            return 0
        except OSError:
            return len(piece)


def _pieces(lines: Sequence[bytes]) -> Iterator[bytes]:
    """Whole lines together, as many as are taken at once; a longer line in parts."""
    piece = b""
    for line in lines:
        if piece and len(piece) + len(line) > _AT_ONCE:
            yield piece
            piece = b""
        if len(line) > _AT_ONCE:
            yield from (line[at : at + _AT_ONCE] for at in range(0, len(line), _AT_ONCE))
        else:
            piece += line
    if piece:
        yield piece
