"""
Which processes of this host are dead, for certain.

Every process holds a lock on a file of its own in the data directory. The kernel lets go of it when the process ends,
however it ends, so whoever can take the lock knows: what that process held is nobody's. Without this a job whose
process was killed would wait out a whole heartbeat before anyone dared to touch it.
"""

from __future__ import annotations

import contextlib
import fcntl
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Final

DIRECTORY: Final = "owners"


class Liveness:
    """The lock files of one data directory. Synchronous, and quick: a few system calls a file."""

    def __init__(self, data_dir: Path) -> None:
        self._directory = data_dir / DIRECTORY
        self._held: dict[uuid.UUID, BinaryIO] = {}

    @contextlib.contextmanager
    def opened(self) -> Iterator[Liveness]:
        """On leaving, this process's own files go away."""
        self._directory.mkdir(parents=True, exist_ok=True)
        try:
            yield self
        finally:
            for owner, file in self._held.items():
                (self._directory / str(owner)).unlink(missing_ok=True)
                file.close()

    def hold(self, owner: uuid.UUID) -> None:
        """This process is that owner for as long as it lives. Calling it again does nothing."""
        if owner in self._held:
            return
        # Locked before it has its name: a file that can be found is never an unlocked one of a living process.
        nameless = self._directory / f"{owner}.new"
        file = nameless.open("wb")
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        nameless.rename(self._directory / str(owner))
        self._held[owner] = file

    def dead(self) -> list[uuid.UUID]:
        """The owners whose process is gone."""
        return [owner for owner in self._others() if self._is_dead(owner)]

    def forget(self, owner: uuid.UUID) -> None:
        """What a dead owner held has been taken up."""
        (self._directory / str(owner)).unlink(missing_ok=True)

    def _others(self) -> Iterator[uuid.UUID]:
        for path in self._directory.iterdir():
            with contextlib.suppress(ValueError):
                owner = uuid.UUID(path.name)
                if owner not in self._held:
                    yield owner

    def _is_dead(self, owner: uuid.UUID) -> bool:
        try:
            with (self._directory / str(owner)).open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except (FileNotFoundError, BlockingIOError):
            return False
        return True
