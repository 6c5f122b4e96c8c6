"""
Arguments of a function call that are streamed value by value, put together again.

Only Vertex sends them so, and only to a caller that asked for it: each piece names its place by a JSON path, and a
string may come in several. Nothing is guessed: what does not fit together is not an answer.

Source: https://cloud.google.com/vertex-ai/generative-ai/docs/multimodal/function-calling#streaming-fc
"""

from __future__ import annotations

import itertools
import re
from typing import Any

import msgspec

from adapters.errors import Broken
from adapters.protocols.gemini.schema import PartialArg

_STEP = re.compile(r"\.([^.\[\]'\"]+)|\['((?:[^'\\]|\\.)*)'\]|\[\"((?:[^\"\\]|\\.)*)\"\]|\[([0-9]{1,6})\]")
_ESCAPE = re.compile(r"\\(.)")
_MOST_STEPS = 64
_MOST_PIECES = 100_000


class _String(list[str]):
    """A string in pieces."""


class PartialCall:
    """One function call whose arguments come in pieces."""

    __slots__ = ("_pieces", "_root", "id", "name", "signature")

    def __init__(self, name: str, call_id: str | None, signature: str | None) -> None:
        self.name = name
        self.id = call_id
        self.signature = signature
        self._root: dict[str, Any] = {}
        self._pieces = 0

    def take(self, piece: PartialArg) -> None:
        """Raises `Broken` for a piece that fits nowhere."""
        self._pieces += 1
        steps = _steps(piece.json_path)
        if not steps or self._pieces > _MOST_PIECES:
            raise Broken("a piece of a function call fits nowhere", code="malformed")
        value: Any = None
        if piece.string_value is not None:
            value = _String([piece.string_value])
        elif piece.number_value is not None:
            value = piece.number_value
        elif piece.bool_value is not None:
            value = piece.bool_value
        place: Any = self._root
        for step, following in itertools.pairwise(steps):
            place = _within(place, step, [] if isinstance(following, int) else {})
        last = steps[-1]
        there = _within(place, last, value)
        if there is value:
            return
        if isinstance(there, _String) and isinstance(value, _String):
            there.extend(value)
        else:
            place[last] = value

    def arguments(self) -> str:
        return msgspec.json.encode(_joined(self._root)).decode()


def _steps(path: str) -> list[str | int]:
    """Raises `Broken` for a path this does not understand."""
    steps: list[str | int] = []
    at = 1
    while at < len(path) and len(steps) < _MOST_STEPS:
        found = _STEP.match(path, at)
        if found is None:
            break
        name, single, double, index = found.groups()
        steps.append(int(index) if index is not None else _ESCAPE.sub(r"\1", name or single or double or ""))
        at = found.end()
    if path[:1] != "$" or at < len(path):
        raise Broken("a piece of a function call names no place", code="malformed")
    return steps


def _within(place: Any, step: str | int, fresh: Any) -> Any:
    """What is at a step of a place, which is put there where nothing is."""
    if isinstance(step, int) and type(place) is list and step <= len(place):
        if step == len(place):
            place.append(fresh)
        return place[step]
    if isinstance(step, str) and type(place) is dict:
        return place.setdefault(step, fresh)
    raise Broken("a piece of a function call fits nowhere", code="malformed")


def _joined(value: Any) -> Any:
    if isinstance(value, _String):
        return "".join(value)
    if isinstance(value, dict):
        return {key: _joined(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_joined(inner) for inner in value]
    return value
