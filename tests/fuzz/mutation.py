"""
Bytes near to real ones: what a broken or hostile provider could send.

A mutation is one of three kinds: of bytes (what any network or proxy may do), of lines and events (what a stream may
do), and of JSON values (what a server with another mind may do). `CANARY` stands for content; no message of an error
may hold it.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from typing import Any

#: No identifier, so that no machine code and no path of a field can be it.
CANARY = "the canary, sung aloud"

_TOKENS = (
    b"\r",
    b"\n",
    b"\r\n",
    b"\n\n",
    b"\xef\xbb\xbf",
    b"\xff",
    b"\x00",
    b"data:",
    b"data: [DONE]\n\n",
    b"event: error\n",
    b": ping\n\n",
    b"event\n",
    b"data\n",
    b"[DONE]",
    b"{",
    b"}",
    b"[",
    b'"',
    b"\\",
    b'\\ud800"',
    b"\\u0000",
    b"\xe2\x80\xa8",
    b"\xc2\x85",
    b"1e999",
    b"-0",
    b"NaN",
    b"null",
    b"[" * 1200,
    b'{"a":' * 300,
)
_VALUES: tuple[Any, ...] = (
    None,
    True,
    False,
    0,
    -1,
    1,
    2**31,
    2**53 + 1,
    2**63,
    2**64,
    -(2**70),
    0.5,
    1e300,
    "",
    "stop",
    "error",
    "null",
    "0",
    "\x00",
    "\u2028",
    "🦑" * 3,
    CANARY,
    "x" * 300,
    [],
    {},
    [None],
    [[]],
    [{}],
    {"": {}},
    {"text": CANARY},
    {"error": {"message": CANARY, "code": "c"}},
    {"message": CANARY, "type": "error", "code": 429},
)


class Mutator:
    """Makes new inputs out of `seeds` and what was worth keeping; the same for the same generator."""

    def __init__(self, seeds: Sequence[bytes], rng: random.Random) -> None:
        assert seeds
        self._rng = rng
        self.pool = list(seeds)

    def make(self) -> bytes:
        # The shorter of two, mostly: what fails in a long one fails in a short one, too, and sooner.
        data = min(self._rng.choices(self.pool, k=self._rng.choice((1, 2, 3))), key=len)
        for _ in range(self._rng.choice((1, 1, 1, 2, 3, 6))):
            data = self._rng.choice(_KINDS)(self, data)
        return data[: 64 * 1024]

    def keep(self, data: bytes) -> None:
        if len(self.pool) < 4000:
            self.pool.append(data)

    def _span(self, data: bytes) -> tuple[int, int]:
        start = self._rng.randint(0, len(data))
        return start, min(len(data), start + int(self._rng.paretovariate(0.7)))

    def _change(self, data: bytes) -> bytes:
        if not data:
            return bytes([self._rng.randrange(256)])
        at = self._rng.randrange(len(data))
        return data[:at] + bytes([data[at] ^ (1 << self._rng.randrange(8))]) + data[at + 1 :]

    def _cut(self, data: bytes) -> bytes:
        start, end = self._span(data)
        return data[:start] + data[end:]

    def _repeat(self, data: bytes) -> bytes:
        start, end = self._span(data)
        return data[:end] + data[start:end] * self._rng.choice((1, 1, 2, 30)) + data[end:]

    def _insert(self, data: bytes) -> bytes:
        at = self._rng.randint(0, len(data))
        return data[:at] + self._rng.choice(_TOKENS) + data[at:]

    def _splice(self, data: bytes) -> bytes:
        other = self._rng.choice(self.pool)
        return data[: self._rng.randint(0, len(data))] + other[self._rng.randint(0, len(other)) :]

    def _truncate(self, data: bytes) -> bytes:
        return data[: self._rng.randint(0, len(data))]

    def _line_ends(self, data: bytes) -> bytes:
        return data.replace(b"\r\n", b"\n").replace(b"\n", self._rng.choice((b"\r\n", b"\r")))

    def _events(self, data: bytes) -> bytes:
        """Swaps, drops, repeats or borrows whole events."""
        events = data.split(b"\n\n")
        at = self._rng.randrange(len(events))
        match self._rng.randrange(4):
            case 0:
                other = self._rng.randrange(len(events))
                events[at], events[other] = events[other], events[at]
            case 1:
                del events[at]
            case 2:
                events.insert(self._rng.randint(0, len(events)), events[at])
            case _:
                events.insert(at, self._rng.choice(self._rng.choice(self.pool).split(b"\n\n")))
        return b"\n\n".join(events)

    def _json(self, data: bytes) -> bytes:
        """Another value, or another key, in one of the JSON texts that the lines hold."""
        lines = data.split(b"\n")
        at = self._rng.randrange(len(lines))
        start = lines[at].find(b"{")
        whole = start < 0 and b"{" in data
        text = data if whole else lines[at][max(start, 0) :]
        try:
            content = json.loads(text)
        except (ValueError, RecursionError):
            return data
        content = self._changed(content)
        ascii_only = self._rng.random() < 0.5
        compact = (",", ":") if self._rng.random() < 0.5 else None
        new = json.dumps(content, ensure_ascii=ascii_only, separators=compact).encode(errors="replace")
        if whole:
            return new
        lines[at] = lines[at][: max(start, 0)] + new
        return b"\n".join(lines)

    def _changed(self, content: Any) -> Any:
        places: list[tuple[Any, Any]] = []
        left = [content]
        while left:
            inner = left.pop()
            keys: Any = inner if isinstance(inner, dict) else range(len(inner)) if isinstance(inner, list) else ()
            for key in keys:
                places.append((inner, key))
                left.append(inner[key])
        if not places:
            return self._rng.choice(_VALUES)
        holder, key = self._rng.choice(places)
        match self._rng.randrange(6):
            case 0:
                del holder[key]
            case 1:
                source, other = self._rng.choice(places)
                # Text, so that no value comes to hold itself.
                if key in holder or isinstance(holder, list):
                    holder[key] = json.loads(json.dumps(source[other])) if source is not holder else None
            case 2 if isinstance(holder, dict):
                holder[str(self._rng.choice(places)[1]) if self._rng.random() < 0.9 else "new"] = holder.pop(key)
            case 3 if isinstance(holder[key], str):
                holder[key] = CANARY
            case _:
                holder[key] = self._rng.choice(_VALUES)
        return content


_KINDS: tuple[Callable[[Mutator, bytes], bytes], ...] = (
    Mutator._change,
    Mutator._cut,
    Mutator._repeat,
    Mutator._insert,
    Mutator._splice,
    Mutator._truncate,
    Mutator._line_ends,
    Mutator._events,
    Mutator._events,
    Mutator._json,
    Mutator._json,
    Mutator._json,
    Mutator._json,
)


def smaller(data: bytes, fails: Callable[[bytes], bool], *, tries: int = 2000) -> bytes:
    """A shorter input that still fails: pieces are left out, ever smaller ones."""
    size = max(1, len(data) // 2)
    while size:
        start = 0
        while start < len(data):
            shorter = data[:start] + data[start + size :]
            tries -= 1
            if tries < 0:
                return data
            if fails(shorter):
                data = shorter
            else:
                start += size
        size //= 2
    return data
