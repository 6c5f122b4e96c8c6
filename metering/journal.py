"""
What must not be lost while its store is away: records on this host's disk, for whoever comes after.

A record is on the disk when `append` says so, and stays until it is acknowledged. A process that ends with records
left, however it ends, lets go of its file's lock; any process of the same directory then adopts the file and does what
was to be done with them. Without this a process that dies while the database is away takes its settlements with it.

The room for the next records is on the disk before it is needed, so that a disk that fills up is noticed while what is
under way can still be kept. What the records mean is not this file's business.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import struct
import time
import uuid
import zlib
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final, TypeVar

T = TypeVar("T")

#: Another format needs another name: an older process takes what it cannot read for a torn end.
_SUFFIX: Final = ".journal"
#: A file whose end could not be read, after everything before it was done. For people.
_TORN: Final = ".torn"
PARKED: Final = "parked.jsonl"

#: Length and CRC-32 of what follows: the kind, the record's number, the record.
_HEAD: Final = struct.Struct("<II")
_BODY: Final = struct.Struct("<cQ")
_RECORD: Final = b"R"
_DONE: Final = b"D"

#: A file begins with this much room, and has at least half of it before the next record.
ROOM: Final = 2 << 20
#: What is not acknowledged may take this much, on disk and in memory.
MOST: Final = 64 << 20
#: Bytes of one record.
LARGEST: Final = 1 << 20

#: Seconds between attempts to be able to write again, and between looks whether the file is still there.
_RETRY_S: Final = 1.0
_LOOK_S: Final = 5.0
#: A disk that takes longer than this for one write does not answer.
STALL_S: Final = 5.0


class JournalUnavailable(Exception):
    """The record is not on the disk."""


class Disk:
    """The system calls that can fail for want of room. A test has another one."""

    def write(self, file: int, data: bytes, at: int) -> None:
        """All of it, or `OSError`."""
        view = memoryview(data)
        while view:
            written = os.pwrite(file, view, at)
            view = view[written:]
            at += written

    def sync(self, file: int) -> None:
        _sync(file)


#: macOS has no other.
_sync: Final = getattr(os, "fdatasync", os.fsync)


class _File:
    """One file of records, locked for as long as it is open. Synchronous; every method may raise `OSError`."""

    def __init__(self, path: Path, file: int, disk: Disk) -> None:
        self.path = path
        self._file = file
        self._disk = disk
        #: Where the next frame goes, and how far the room reaches.
        self.end = 0
        self.size = 0
        #: Something that is no whole frame comes after the last one.
        self.torn = False

    @classmethod
    def made(cls, directory: Path, disk: Disk) -> _File:
        while True:
            path = directory / f"{uuid.uuid4().hex}{_SUFFIX}"
            made = cls(path, os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600), disk)
            # Between these two lines an adopter may take it for a dead one's, and then it removes it.
            if made._lock() and made.is_linked():
                return made
            made.close()

    @classmethod
    def adopted(cls, path: Path, disk: Disk) -> _File | None:
        """None where its process lives, or another one has been quicker."""
        try:
            found = cls(path, os.open(path, os.O_RDWR | os.O_CLOEXEC), disk)
        except FileNotFoundError:
            return None
        if found._lock() and found.is_linked():
            found.size = os.fstat(found._file).st_size
            return found
        found.close()
        return None

    def _lock(self) -> bool:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def is_linked(self) -> bool:
        """It can still be found in the directory."""
        return os.fstat(self._file).st_nlink > 0

    @property
    def room(self) -> int:
        return self.size - self.end

    def extend(self, bytes_: int) -> None:
        """Zeros, written: a hole would be room that the disk has not promised."""
        self._disk.write(self._file, bytes(bytes_), self.size)
        self.sync()
        self.size += bytes_

    def add(self, frames: bytes, *, sync: bool) -> None:
        self._disk.write(self._file, frames, self.end)
        if sync:
            self.sync()
        self.end += len(frames)

    def clear(self) -> None:
        """Nothing in it is needed any more."""
        self._disk.write(self._file, bytes(self.end), 0)
        self.end = 0

    def sync(self) -> None:
        self._disk.sync(self._file)

    def sync_name(self) -> None:
        for directory in (self.path.parent, self.path.parent.parent):
            opened = os.open(directory, os.O_RDONLY | os.O_CLOEXEC)
            try:
                self._disk.sync(opened)
            finally:
                os.close(opened)

    def read(self) -> dict[int, bytes]:
        """The records that are not done. Reading ends at the first frame that is not whole, and so does the file."""
        pending: dict[int, bytes] = {}
        data = self._whole()
        at = 0
        while at + _HEAD.size + _BODY.size <= len(data):
            length, crc = _HEAD.unpack_from(data, at)
            body = data[at + _HEAD.size : at + _HEAD.size + length]
            if not _BODY.size <= length <= LARGEST + _BODY.size or len(body) < length or zlib.crc32(body) != crc:
                break
            kind, number = _BODY.unpack_from(body)
            if kind == _RECORD:
                pending[number] = body[_BODY.size :]
            else:
                pending.pop(number, None)
            at += _HEAD.size + length
        self.end = at
        self.torn = data.count(0, at) < len(data) - at
        return pending

    def _whole(self) -> bytes:
        chunks: list[bytes] = []
        at = 0
        while chunk := os.pread(self._file, 1 << 20, at):
            chunks.append(chunk)
            at += len(chunk)
        return b"".join(chunks)

    def remove(self) -> None:
        """For good. Gives the lock back."""
        try:
            if self.torn:
                self.path.rename(self.path.with_suffix(_TORN))
            else:
                self.path.unlink(missing_ok=True)
        finally:
            self.close()

    def close(self) -> None:
        """Gives the lock back. What is in it is anybody's then."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def _frame(kind: bytes, number: int, record: bytes = b"") -> bytes:
    body = _BODY.pack(kind, number) + record
    return _HEAD.pack(len(body), zlib.crc32(body)) + body


class Entry:
    """A record of this process that is not acknowledged."""

    __slots__ = ("number", "record", "written")

    def __init__(self, number: int, record: bytes) -> None:
        self.number = number
        self.record = record
        #: Ends when the record is on the disk; raises `JournalUnavailable`, and the record is then tried again.
        self.written: asyncio.Future[None] = asyncio.get_running_loop().create_future()


class Journal:
    """One per process. Open it with `opened`; a disk that refuses is a fault, and not an error."""

    def __init__(self, directory: Path, *, room: int = ROOM, most: int = MOST, disk: Disk | None = None) -> None:
        self._directory = directory
        self._room = room
        self._most = most
        self._disk = disk or Disk()
        #: Never the event loop's own: a disk that hangs must not hold up what else runs in threads.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="journal")
        self._file: _File | None = None
        #: What a file holds after a failed sync is not known: everything is written anew into another.
        self._doubtful = False
        self._entries: dict[int, Entry] = {}
        self._bytes = 0
        self._number = 0
        self._fresh: dict[int, Entry] = {}
        self._done: list[int] = []
        self._wake = asyncio.Event()
        self._closing = False
        self._writer: asyncio.Task[None] | None = None
        self._refused: str | None = None
        self._began: float | None = None

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[Journal]:
        """On leaving the file goes away, unless it holds records that are not acknowledged."""
        await self._round()
        self._writer = writer = asyncio.create_task(self._write(), name="journal")
        try:
            yield self
        finally:
            self._closing = True
            self._wake.set()
            await asyncio.wait((writer,), timeout=STALL_S)
            if writer.done():
                await self._in_thread(self._leave)
            # A disk that hangs keeps its thread; the end of the process frees the lock.
            writer.cancel()
            await asyncio.wait((writer,))
            self._thread.shutdown(wait=False)

    @property
    def fault(self) -> str | None:
        """Why the next record might not be kept; None where it will be."""
        if self._refused is not None:
            return self._refused
        if self._began is not None and time.monotonic() - self._began > STALL_S:
            return "the disk does not answer"
        if self._writer is None or self._writer.done():
            return "its writer has ended"
        if self._bytes > self._most // 2:
            # The other half is for what is under way.
            return f"it holds {len(self._entries)} records that are not acknowledged"
        return None

    @property
    def outstanding(self) -> int:
        """Records that are not acknowledged."""
        return len(self._entries)

    def append(self, record: bytes) -> Entry:
        """Keeps a record. It is on the disk when the entry's `written` has ended well; records are written together."""
        self._number += 1
        entry = Entry(self._number, record)
        if len(record) > LARGEST or self._bytes + len(record) > self._most or self._closing:
            _refuse(entry, "it is full")
            return entry
        self._entries[entry.number] = self._fresh[entry.number] = entry
        self._bytes += len(record)
        self._wake.set()
        return entry

    def acknowledge(self, entry: Entry) -> None:
        """The record is needed no more. Not synced: one that comes back after a power cut is replayed in vain."""
        if self._entries.pop(entry.number, None) is None:
            return
        self._bytes -= len(entry.record)
        if self._fresh.pop(entry.number, None) is None:
            self._done.append(entry.number)
            self._wake.set()
        elif not entry.written.done():
            entry.written.set_result(None)

    # ---------------------------------------------------------------- the files of the dead

    async def adopt(self, besides: Collection[str] = ()) -> Adopted | None:
        """
        A file with records whose process is gone, if there is one besides these. Files that hold nothing are removed.

        Raises `JournalUnavailable`.
        """
        looking = asyncio.ensure_future(asyncio.to_thread(self._adopt, besides))
        try:
            return await asyncio.shield(looking)
        except asyncio.CancelledError:
            # The thread goes on. What it finds must not stay locked, with nobody to do anything about it.
            looking.add_done_callback(_let_go)
            raise

    def _adopt(self, besides: Collection[str]) -> Adopted | None:
        try:
            for path in sorted(self._directory.glob(f"*{_SUFFIX}")):
                if path.name in besides:
                    continue
                file = _File.adopted(path, self._disk)
                if file is None:
                    continue
                pending = file.read()
                if pending or file.torn:
                    return Adopted(file, pending)
                file.remove()
        except OSError as error:
            raise JournalUnavailable(error.strerror or str(error)) from error
        return None

    async def park(self, lines: Iterable[bytes]) -> None:
        """Puts lines aside for people, in `parked.jsonl`. Raises `JournalUnavailable`."""
        await asyncio.to_thread(self._park, b"".join(line + b"\n" for line in lines))

    def _park(self, lines: bytes) -> None:
        try:
            file = os.open(self._directory / PARKED, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(file, fcntl.LOCK_EX)
                size = os.fstat(file).st_size
                torn = size > 0 and os.pread(file, 1, size - 1) != b"\n"
                self._disk.write(file, b"\n" * torn + lines, size)
                self._disk.sync(file)
            finally:
                os.close(file)
        except OSError as error:
            raise JournalUnavailable(error.strerror or str(error)) from error

    # ---------------------------------------------------------------- the writer

    async def _write(self) -> None:
        while not (self._closing and not self._fresh and not self._done):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_RETRY_S if self._refused is not None else _LOOK_S):
                    await self._wake.wait()
            self._wake.clear()
            await self._round()
            if self._closing and self._refused is not None:
                return

    async def _round(self) -> None:
        """Writes what has come together since the last one, with one sync."""
        fresh, done = list(self._fresh.values()), self._done
        self._fresh, self._done = {}, []
        everything = list(self._entries.values())
        try:
            await self._in_thread(lambda: self._keep(fresh, done, everything))
        except OSError as error:
            self._doubtful = True
            self._refused = error.strerror or str(error)
            for entry in fresh:
                _refuse(entry, self._refused)
            return
        for entry in fresh:
            if not entry.written.done():
                entry.written.set_result(None)
        try:
            await self._in_thread(lambda: self._make_room(everything))
        except OSError as error:
            # What is kept is kept, and there is some room yet.
            self._refused = error.strerror or str(error)
        else:
            self._refused = None

    async def _in_thread(self, work: Callable[[], T]) -> T:
        self._began = time.monotonic()
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, work)
        finally:
            self._began = None

    def _keep(self, fresh: Sequence[Entry], done: Sequence[int], everything: Sequence[Entry]) -> None:
        file = self._file
        if file is None or self._doubtful or not file.is_linked():
            self._renew(everything)
            return
        frames = [_frame(_RECORD, entry.number, entry.record) for entry in fresh]
        frames += [_frame(_DONE, number) for number in done]
        if not frames:
            return
        data = b"".join(frames)
        if len(data) > file.room:
            self._make_room(everything, besides=len(data))
            if self._file is not file:
                return  # everything has just been written, these among it
        file.add(data, sync=bool(fresh))

    def _make_room(self, everything: Sequence[Entry], *, besides: int = 0) -> None:
        file = self._file
        assert file is not None
        if file.room >= self._room // 2 + besides:
            return
        needed = sum(len(entry.record) for entry in everything)
        if not everything:
            file.clear()
        elif needed < file.end // 2:
            self._renew(everything)
        else:
            file.extend(self._room + besides)

    def _renew(self, everything: Sequence[Entry]) -> None:
        """Another file with everything in it, and then the old one goes."""
        self._directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        frames = b"".join(_frame(_RECORD, entry.number, entry.record) for entry in everything)
        file = _File.made(self._directory, self._disk)
        try:
            file.extend(len(frames) + self._room)
            file.add(frames, sync=True)
            file.sync_name()
        except OSError:
            file.remove()
            raise
        old, self._file, self._doubtful = self._file, file, False
        if old is not None:
            old.remove()

    def _leave(self) -> None:
        if self._file is None:
            return
        if self._entries:
            self._file.close()
        else:
            with contextlib.suppress(OSError):  # an adopter removes it then
                self._file.remove()


class Adopted:
    """The records that a dead process left, locked. Each is acknowledged once something has been made of it."""

    def __init__(self, file: _File, pending: dict[int, bytes]) -> None:
        self._file = file
        #: By number, in the order in which they were written.
        self.pending = pending

    @property
    def name(self) -> str:
        return self._file.path.name

    @property
    def torn(self) -> bool:
        """The file ends in something that cannot be read: a write was broken off, or the disk is bad. It is kept."""
        return self._file.torn

    async def acknowledge(self, numbers: Sequence[int]) -> None:
        await asyncio.to_thread(self._acknowledge, numbers)

    def _acknowledge(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            self.pending.pop(number, None)
        if self.torn:
            return
        # On a full disk they come back after a crash, and are replayed in vain.
        with contextlib.suppress(OSError):
            self._file.add(b"".join(_frame(_DONE, number) for number in numbers), sync=False)

    def let_go(self) -> None:
        """As it was found: another may adopt it."""
        self._file.close()

    async def close(self) -> None:
        """The file goes if nothing is left in it; else another may adopt it."""
        await asyncio.to_thread(self._close)

    def _close(self) -> None:
        if self.pending:
            self._file.close()
            return
        with contextlib.suppress(OSError):
            self._file.remove()
        self._file.close()


def _let_go(looking: asyncio.Future[Adopted | None]) -> None:
    if not looking.cancelled() and looking.exception() is None and (adopted := looking.result()) is not None:
        adopted.let_go()


def _refuse(entry: Entry, reason: str) -> None:
    if not entry.written.done():
        entry.written.set_exception(JournalUnavailable(reason))
        entry.written.exception()  # nobody has to wait for it
