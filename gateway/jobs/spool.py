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
from typing import IO, TypeAlias

import msgspec

#: A line's number and its text; None in place of one that is too long.
NumberedLine: TypeAlias = tuple[int, bytes | None]

_lines = msgspec.msgpack.Decoder(list[NumberedLine])


class Spool:
    """In memory is the beginning of a submission, and of the rest one batch. Closing it deletes its file."""

    def __init__(self, *, batch_lines: int, batch_bytes: int, memory_bytes: int) -> None:
        self._batch_lines = batch_lines
        self._batch_bytes = batch_bytes
        self._memory_bytes = memory_bytes
        self._current: list[NumberedLine] = []
        self._current_bytes = 0
        self._kept: list[Sequence[NumberedLine]] = []
        self._file: IO[bytes] | None = None
        self._written: list[int] = []
        self._closing = contextlib.ExitStack()

    def close(self) -> None:
        self._closing.close()

    async def add(self, number: int, text: bytes | None) -> None:
        if len(self._current) >= self._batch_lines or self._current_bytes >= self._batch_bytes:
            await self._put_away()
        self._current.append((number, text))
        self._current_bytes += len(text or b"")

    @property
    def whole(self) -> Sequence[NumberedLine] | None:
        """All lines, where they fit into one batch."""
        return self._current if not self._kept and not self._written else None

    async def batches(self) -> AsyncIterator[Sequence[NumberedLine]]:
        """All lines in order, from the start. May be asked for again."""
        for batch in self._kept:
            yield batch
        offset = 0
        for length in self._written:
            yield await asyncio.to_thread(self._read, offset, length)
            offset += length
        if self._current:
            yield self._current

    async def _put_away(self) -> None:
        batch, size = self._current, self._current_bytes
        self._current, self._current_bytes = [], 0
        self._memory_bytes -= size
        if self._memory_bytes >= 0:
            self._kept.append(batch)
        else:
            await asyncio.to_thread(self._write, batch)

    def _write(self, batch: list[NumberedLine]) -> None:
        if self._file is None:
            self._file = self._closing.enter_context(tempfile.TemporaryFile(prefix="tollbridge-"))  # noqa: SIM115  entered
        data = msgspec.msgpack.encode(batch)
        self._file.write(data)
        self._written.append(len(data))

    def _read(self, offset: int, length: int) -> list[NumberedLine]:
        assert self._file is not None
        self._file.seek(offset)
        return _lines.decode(self._file.read(length))
