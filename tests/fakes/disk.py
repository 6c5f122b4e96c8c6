"""A disk for the journal that fills up, fails, hangs, and loses on a crash what was not synced."""

from __future__ import annotations

import errno
import os
import random
import threading
from pathlib import Path

from metering.journal import Disk


class FakeDisk(Disk):
    def __init__(self) -> None:
        #: No file can grow. What lies within a file can still be written.
        self.full = False
        self.sync_fails = False
        self.answers = threading.Event()
        self.answers.set()
        self.syncs = 0
        #: By inode: where was written since the last sync, and what was there before.
        self._unsynced: dict[int, list[tuple[int, bytes, bytes]]] = {}
        #: What a failed sync was to write is dropped: no later one writes it.
        self._dropped: dict[int, list[tuple[int, bytes, bytes]]] = {}

    def write(self, file: int, data: bytes, at: int) -> None:
        found = os.fstat(file)
        if self.full and at + len(data) > found.st_size:
            raise OSError(errno.ENOSPC, "No space left on device")
        before = os.pread(file, len(data), at).ljust(len(data), b"\0")
        super().write(file, data, at)
        self._unsynced.setdefault(found.st_ino, []).append((at, before, data))

    def sync(self, file: int) -> None:
        self.answers.wait()
        if self.sync_fails:
            inode = os.fstat(file).st_ino
            self._dropped.setdefault(inode, []).extend(self._unsynced.pop(inode, []))
            raise OSError(errno.EIO, "Input/output error")
        self.syncs += 1
        super().sync(file)
        self._unsynced.pop(os.fstat(file).st_ino, None)

    def lose(self, directory: Path, chance: random.Random) -> None:
        """A power cut: of what was written since the last sync, some bytes are there and some are not."""
        for path in directory.glob("*"):
            with path.open("r+b") as file:
                inode = path.stat().st_ino
                for at, before, data in [*reversed(self._unsynced.pop(inode, [])), *self._dropped.pop(inode, [])]:
                    cut = chance.randrange(len(data) + 1)
                    lost = (before[:cut], at) if chance.random() < 0.5 else (before[cut:], at + cut)
                    os.pwrite(file.fileno(), *lost)
        self._unsynced.clear()
        self._dropped.clear()
