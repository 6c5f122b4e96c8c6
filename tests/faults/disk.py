"""A file system with little room, to be filled and emptied. It takes root, on Linux: nobody else may mount one."""

from __future__ import annotations

import contextlib
import errno
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

_BLOCK: Final = 1 << 16


class NoSmallDisk(Exception):
    """No file system can be mounted here."""


class SmallDisk:
    """Made by `small_disk`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._ballast = path / "ballast"

    def fill(self) -> None:
        """To the last block."""
        file = os.open(self._ballast, os.O_CREAT | os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            size = _BLOCK
            while size:
                try:
                    os.write(file, bytes(size))
                except OSError as error:
                    if error.errno != errno.ENOSPC:
                        raise
                    size //= 16
        finally:
            os.close(file)

    def empty(self) -> None:
        self._ballast.unlink(missing_ok=True)


def require_small_disk() -> None:
    """Raises `NoSmallDisk` where `small_disk` would."""
    with contextlib.ExitStack() as stack:
        place = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tollbridge-disk-")))
        stack.enter_context(small_disk(place, megabytes=1))


@contextmanager
def small_disk(path: Path, *, megabytes: int) -> Iterator[SmallDisk]:
    """Raises `NoSmallDisk`."""
    if sys.platform != "linux" or os.geteuid() != 0:
        raise NoSmallDisk("a small file system can be mounted by root on Linux only")
    path.mkdir(parents=True, exist_ok=True, mode=0o700)
    options = f"size={megabytes}m,mode=0700"
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", options, "tollbridge-faults", str(path)],
        capture_output=True,
        text=True,
        check=False,
    )
    if mounted.returncode != 0:
        raise NoSmallDisk(f"no small file system can be mounted here: {mounted.stderr.strip()}")
    try:
        yield SmallDisk(path)
    finally:
        # Lazily: what still runs there is on its way out, and its test has said what it had to.
        subprocess.run(["umount", "--lazy", str(path)], capture_output=True, check=False)
