"""
Where the lines of a submission wait until all of them have come.

Nothing of a submission may reach the database before its last line is here: a transaction that grows at the pace of a
slow client would hold a connection and keep the database from cleaning up behind everyone else. Nor may a large one
stay in memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from collections.abc import AsyncIterator, Sequence
from typing import IO

import msgspec

from gateway.jobs.submission import Line

_lines = msgspec.msgpack.Decoder(list[Line])


class Spool:
    """A small submission stays in memory; of a larger one at most two batches do. Closing it deletes its file."""

    def __init__(self, *, batch_lines: int, batch_bytes: int) -> None:
        self._batch_lines = batch_lines
        self._batch_bytes = batch_bytes
        self._current: list[Line] = []
        self._current_bytes = 0
        self._file: IO[bytes] | None = None
        self._written: list[int] = []
        self._closing = contextlib.ExitStack()

    def close(self) -> None:
        self._closing.close()

    async def add(self, line: Line) -> None:
        full = len(self._current) >= self._batch_lines or self._current_bytes >= self._batch_bytes
        if self._current and full:
            batch, self._current, self._current_bytes = self._current, [], 0
            await asyncio.to_thread(self._write, batch)
        self._current.append(line)
        self._current_bytes += line.size

    @property
    def whole(self) -> Sequence[Line] | None:
        """All lines, where they fit into one batch."""
        return self._current if not self._written else None

    async def batches(self) -> AsyncIterator[Sequence[Line]]:
        """All lines in order, from the start. May be asked for again."""
        offset = 0
        for length in self._written:
            yield await asyncio.to_thread(self._read, offset, length)
            offset += length
        if self._current:
            yield self._current

    def _write(self, batch: list[Line]) -> None:
        if self._file is None:
            self._file = self._closing.enter_context(tempfile.TemporaryFile(prefix="tollbridge-"))  # noqa: SIM115  entered
        data = msgspec.msgpack.encode(batch)
        self._file.write(data)
        self._written.append(len(data))

    def _read(self, offset: int, length: int) -> list[Line]:
        assert self._file is not None
        self._file.seek(offset)
        return _lines.decode(self._file.read(length))
