"""
Where each thing of a request stood in its caller's own words.

Between the protocols a field has its canonical name: `stop`, `messages[1].content[0].cache`. A caller who is refused
one must be told of its own body, `stop_sequences` or `input[0].content[0].prompt_cache_breakpoint`, or it looks for a
field that it never wrote. What is read therefore keeps where it was read, and here one becomes the other.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import msgspec

#: Canonical names to the caller's: the first that is in its body counts. Of what is in messages and tools the last
#: steps, and "{kind}" stands for the kind of a part.
Words: TypeAlias = Mapping[str, tuple[str, ...]]

_ITEM = re.compile(r"(messages|tools)\[([0-9]+)\](?:\.(content|tool_calls|reasoning)(?:\[([0-9]+)\])?)?(?:\.(.+))?")
_STEP = re.compile(r"([^.\[\]]+)|\[([0-9]+)\]")


class Spot(msgspec.Struct, frozen=True):
    """Where one message was, and what it holds, each in its canonical order."""

    at: str
    content: Sequence[str] = ()
    tool_calls: Sequence[str] = ()
    reasoning: Sequence[str] = ()


class Paths(msgspec.Struct, frozen=True, kw_only=True):
    """How one request was written. What is not told here has its canonical place and name."""

    messages: Sequence[Spot] = ()
    tools: Sequence[str] = ()
    words: Words = {}

    def written(self, path: str, fields: Mapping[str, msgspec.Raw] | None, kind: str) -> str:
        """
        A canonical path as its caller wrote it: the most precise one that is in its body, of which these are the
        `fields`. `kind` is that of the part, where the path is of one.
        """
        candidates = list(self._candidates(path, kind))
        if fields is None:
            return candidates[0]
        best = ""
        for candidate in candidates:
            found, whole = existing(candidate, fields)
            if whole:
                return found
            best = max(best, found, key=len)
        return best or candidates[0]

    def _candidates(self, path: str, kind: str) -> Iterator[str]:
        found = _ITEM.fullmatch(path)
        if found is None:
            name, bracket, place = path.partition("[")
            yield from (f"{word}{bracket}{place}" for word in self._named(name, kind))
            return
        whole, number, inner, place, last = found.groups()
        bases = self._bases(whole, int(number), inner, place, kind)
        if last is None:
            yield from bases
        else:
            yield from (f"{base}.{word}" for base in bases for word in self._named(last, kind))

    def _bases(self, whole: str, number: int, inner: str | None, place: str | None, kind: str) -> list[str]:
        spot = Spot(at=f"{next(self._named(whole, kind))}[{number}]")
        if whole == "tools":
            spot = Spot(at=self.tools[number]) if number < len(self.tools) else spot
        elif number < len(self.messages):
            spot = self.messages[number]
        if inner is None:
            return [spot.at]
        at = int(place) if place is not None else 0
        known: Sequence[str] = getattr(spot, inner)
        if place is not None and at < len(known):
            return [known[at]]
        index = f"[{place}]" if place is not None else ""
        bases = [f"{spot.at}.{word}{index}" for word in self._named(inner, kind)]
        # Of all of them together, where they have no common place, the first.
        return [*bases, known[0], spot.at] if place is None and known else bases

    def _named(self, name: str, kind: str) -> Iterator[str]:
        for word in self.words.get(name, (name,)):
            yield word.replace("{kind}", kind)


#: Of a request that nobody wrote as text.
CANONICAL = Paths()


def existing(path: str, fields: Mapping[str, msgspec.Raw]) -> tuple[str, bool]:
    """As much of a path as is there, in the caller's own spelling, and whether that is all. A null is not there."""
    taken = ""
    value: Any = fields
    for name, number in _STEP.findall(path):
        spelled, value = _step(value, name, number)
        if isinstance(value, msgspec.Raw):
            value = msgspec.json.decode(value)
        if value is None:
            return taken, False
        taken += f"[{number}]" if number else f".{spelled}" if taken else spelled
    return taken, True


def _step(value: Any, name: str, number: str) -> tuple[str, Any]:
    if number:
        return "", value[int(number)] if isinstance(value, list) and int(number) < len(value) else None
    if not isinstance(value, Mapping):
        return "", None
    if name in value:
        return name, value[name]
    # Google takes every name in two spellings.
    plain = name.replace("_", "").lower()
    return next(((n, v) for n, v in value.items() if n.replace("_", "").lower() == plain), ("", None))
