"""
Who runs on which core: what is measured on one of its own, everything else on the others.

Without it the gateway's rate is what the load, the provider and PostgreSQL leave of its core, and no two runs agree. A
process inherits the cores of who starts it, so a place is chosen before the start: a thread would stay where it began.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator

import msgspec
import psutil

#: Before anything was placed: a second world has the same cores as the first.
ALLOWED = os.sched_getaffinity(0) if sys.platform == "linux" else set[int]()


class Cores(msgspec.Struct, frozen=True, kw_only=True):
    """Numbers of cores."""

    #: For the gateway and for what it is held against, one after the other.
    measured: frozenset[int]
    #: For the load, the provider, PostgreSQL and the benchmark itself.
    others: frozenset[int]


def divided(*, pin: bool) -> Cores | None:
    """None where nothing is pinned: by wish, with one core only, or on a system that has no such call."""
    if not pin or not ALLOWED:
        return None
    first, *others = sorted(ALLOWED)
    return Cores(measured=frozenset({first}), others=frozenset(others)) if others else None


@contextlib.contextmanager
def started_on(cores: frozenset[int] | None) -> Iterator[None]:
    """What is started inside runs on these, and so does the caller meanwhile. Nothing happens with None."""
    if cores is None or sys.platform != "linux":
        yield
        return
    mine = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, mine)


def move(pid: int, cores: frozenset[int]) -> None:
    """A process without threads and its children, and so all that they will start."""
    for process in (root := psutil.Process(pid), *root.children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.cpu_affinity(sorted(cores))
