"""
CPU time of groups of processes, their children included.

The clock of the CPU is the figure that counts: on a shared machine seconds on the wall say more about the neighbours
than about the code.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Mapping, Sequence

import psutil


def spent(pids: Sequence[int]) -> float:
    """Seconds so far, of these processes, of all their descendants, and of those of them that have ended."""
    total = 0.0
    for pid in pids:
        root = psutil.Process(pid)
        for process in (root, *root.children(recursive=True)):
            with contextlib.suppress(psutil.NoSuchProcess):
                total += _of(process)
                if process is root:
                    # PostgreSQL's backends come and go; a process that was waited for is in here.
                    times = process.cpu_times()
                    total += times.children_user + times.children_system
    return total


def _of(process: psutil.Process) -> float:
    """To the nanosecond where the system has a clock of each process, whose number is made of the id; or to 10 ms."""
    if sys.platform == "linux":
        try:
            return time.clock_gettime((~process.pid << 3) | 2)
        except OSError:
            raise psutil.NoSuchProcess(process.pid) from None
    times = process.cpu_times()
    return times.user + times.system


def snapshot(groups: Mapping[str, Sequence[int]]) -> dict[str, float]:
    return {name: spent(pids) for name, pids in groups.items()}


def machine() -> tuple[float, float]:
    """Seconds of all CPUs together so far: busy, and in all."""
    times = psutil.cpu_times()
    every = sum(times) - getattr(times, "guest", 0.0) - getattr(times, "guest_nice", 0.0)
    return every - times.idle - getattr(times, "iowait", 0.0), every
