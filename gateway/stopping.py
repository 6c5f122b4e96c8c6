"""
What a process that stops does with what is still at work when its time is over: it ends it itself, and says so.

A task that is cancelled does not know by whom. Without this a caller whose call is ended by the stop would be taken for
one who went away, and be cut without a word.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any, Final

#: Seconds for what was ended to tell its caller. Who does not read is cut then.
TELL_S: Final = 2.0


class Stopping:
    """Which tasks of this process were ended by its stop. One for all that is at work in it."""

    def __init__(self) -> None:
        self._ended: set[asyncio.Task[Any]] = set()

    def end(self, tasks: Iterable[asyncio.Task[Any]]) -> None:
        """Cancels these, which may then ask whose doing it was."""
        for task in list(tasks):
            self.note(task)
            task.cancel()

    def note(self, task: asyncio.Task[Any]) -> None:
        """This one is cancelled for the stop, by whoever says so."""
        self._ended.add(task)

    def cut(self, tasks: Iterable[asyncio.Task[Any]]) -> None:
        """Cancels these, whatever they are doing. None of them has anything more to say."""
        for task in list(tasks):
            self._ended.discard(task)
            task.cancel()

    def ends(self) -> bool:
        """The stop ended the task that asks."""
        return bool(self._ended) and asyncio.current_task() in self._ended

    def caught(self) -> bool:
        """
        As `ends`, for a task that was cancelled and goes on, to tell its caller. It is asked once. False also where its
        caller went away in the same moment.
        """
        task = asyncio.current_task()
        if task is None or task not in self._ended:
            return False
        self._ended.discard(task)
        return task.uncancel() == 0
