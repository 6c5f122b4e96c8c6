"""
How far a long run has come, as lines that a person and `tests.prove` can read: `12/40  what, how it went`.

A run that says nothing for minutes looks like one that hangs. What goes wrong is told at once; the rest now and then.
"""

from __future__ import annotations

import re
import sys
import time
from typing import Final

import msgspec

#: In what is told, a sign that something does not hold.
FAILED: Final = "FAILED"
_LINE = re.compile(r"\s*([\d,]+)/([\d,]+)  \s*(.*)")
_WRONG = re.compile(r"\b(FAILED|SURVIVED|BROKEN|STUCK)\b")


class Step(msgspec.Struct, frozen=True):
    """One such line."""

    done: int
    total: int
    said: str

    @property
    def wrong(self) -> bool:
        return _WRONG.search(self.said) is not None


def read(line: str) -> Step | None:
    """None where the line is no such line."""
    found = _LINE.fullmatch(line.rstrip("\n"))
    if found is None:
        return None
    return Step(int(found[1].replace(",", "")), int(found[2].replace(",", "")), found[3])


class Progress:
    """Tells on standard output, at most each `every_s` seconds where nothing is wrong."""

    def __init__(self, total: int, *, every_s: float = 2.0) -> None:
        self._total = total
        self._every_s = every_s
        self._told_at = time.monotonic()

    def tell(self, done: int, said: str = "", *, wrong: bool = False, always: bool = False) -> None:
        now = time.monotonic()
        if not wrong and not always and now - self._told_at < self._every_s:
            return
        self._told_at = now
        [first, *_] = said.splitlines() or [""]
        sys.stdout.write(f"{done:>7,}/{self._total:,}  {f'{FAILED} ' if wrong else ''}{first}\n")
        sys.stdout.flush()
