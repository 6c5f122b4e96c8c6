"""
A JSON value that satisfies a JSON Schema, with values that come from the prompt where they can.

Covers what tools and structured outputs are written in: objects, arrays, strings with formats and lengths, bounded
numbers, enumerations, unions, `allOf`, and `$ref` within the schema, recursive ones too. Of `pattern` it knows only a
few common shapes. The same schema and prompt give the same value.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Mapping
from typing import Any

import msgspec

#: From here on, optional properties are left out and arrays are as short as they may be: a recursive schema ends.
_DEEP = 5
#: A `$ref` that only leads to itself is refused here.
_DEEPEST = 40

_CAPITALISED = re.compile(r"(?<![.!?]\s)(?<!^)\b[^\W\d_a-z][\w'-]*(?:\s+[^\W\d_a-z][\w'-]*)*")
_QUOTED = re.compile(r"[\"“”'‘’«»]([^\"“”'‘’«»]{1,60})[\"“”'‘’«»]")  # noqa: RUF001
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")
_CODE = re.compile(r"\b(?:[A-Z]+-)?\d[\w.-]*\w|\b\d\b")
_CURRENCY = re.compile(r"\b[A-Z]{3}\b")
_WORD = re.compile(r"\w+")
#: Properties whose text is more likely to be a number of some kind than a name.
_CODED = ("number", "id", "code", "order", "sku", "date", "year", "phone", "quantity")
#: Sums come last in a sentence.
_MONEY = ("total", "amount", "price", "cost")
_WORDY = ("query", "question", "prompt", "text", "message", "summary", "body")

_FORMATS = {
    "date": "2026-03-14",
    "time": "09:30:00Z",
    "date-time": "2026-03-14T09:30:00Z",
    "duration": "PT45M",
    "email": "alex@example.com",
    "hostname": "host.example.com",
    "ipv4": "192.0.2.17",
    "ipv6": "2001:db8::17",
    "uri": "https://example.com/item/17",
    "url": "https://example.com/item/17",
    "uuid": "3f2b8c1e-7d54-4a69-9b0f-1c2d3e4f5a6b",
}
_PATTERN_CANDIDATES = (
    *_FORMATS.values(),
    "A",
    "AB",
    "ABC",
    "AB12",
    "ABC-123",
    "abc",
    "a1",
    "1",
    "12",
    "123",
    "1234",
    "12345",
    "09:30",
    "#a1b2c3",
    "+14155550123",
    "a-b",
    "a_b",
)


class Unsatisfiable(ValueError):
    """No value is known that satisfies the schema."""


class Clues(msgspec.Struct, frozen=True):
    """What a prompt offers to fill in."""

    names: list[str]
    #: What has digits in it, as it is written.
    codes: list[str]
    numbers: list[float]
    words: list[str]
    prompt: str

    @classmethod
    def of(cls, prompt: str) -> Clues:
        quoted = _QUOTED.findall(prompt)
        capitalised = [name for name in _CAPITALISED.findall(prompt) if name[0].isupper() and name != "I"]
        return cls(
            names=[name for name in dict.fromkeys([*quoted, *capitalised]) if len(name) > 2],
            codes=_CODE.findall(prompt)[:8],
            numbers=[float(number) for number in _NUMBER.findall(prompt)[:8]],
            words=[word for word in _WORD.findall(prompt)[:200] if len(word) > 2 and not word.isdigit()],
            prompt=prompt,
        )


def instance(schema: Mapping[str, Any] | bool, clues: Clues, *, salt: str = "") -> Any:
    """A value for the schema. Raises `Unsatisfiable`."""
    return _Writer(schema, clues).value(schema, salt, 0)


class _Writer:
    def __init__(self, root: Mapping[str, Any] | bool, clues: Clues) -> None:
        self._root = root
        self._clues = clues

    def value(self, schema: Any, path: str, depth: int) -> Any:
        if depth > _DEEPEST or schema is False:
            raise Unsatisfiable
        if schema is True or not schema:
            return self._text({}, path)
        if not isinstance(schema, Mapping):
            raise Unsatisfiable
        schema = self._flatten(schema, depth)
        if "const" in schema:
            return schema["const"]
        if "enum" in schema:
            return self._one_of(schema["enum"], path)
        for union in ("anyOf", "oneOf"):
            if union in schema:
                return self._first(schema, union, path, depth)
        kind = schema.get("type") or _implied_type(schema)
        if isinstance(kind, list):
            kind = next((one for one in kind if one != "null"), "null")
        match kind:
            case "object":
                return self._object(schema, path, depth)
            case "array":
                return self._array(schema, path, depth)
            case "integer" | "number":
                return self._number(schema, path, whole=kind == "integer")
            case "boolean":
                return _draw(path, self._clues.prompt) % 2 == 0
            case "null":
                return None
            case _:
                return self._text(schema, path)

    def _flatten(self, schema: Mapping[str, Any], depth: int) -> Mapping[str, Any]:
        """Without `$ref` and `allOf`."""
        for _ in range(_DEEPEST):
            if "$ref" in schema:
                rest = {key: value for key, value in schema.items() if key != "$ref"}
                schema = _merged(self._resolve(schema["$ref"]), rest)
            elif "allOf" in schema:
                rest = {key: value for key, value in schema.items() if key != "allOf"}
                for part in schema["allOf"]:
                    rest = _merged(rest, self._flatten(part, depth + 1))
                schema = rest
            else:
                return schema
        raise Unsatisfiable

    def _resolve(self, reference: str) -> Mapping[str, Any]:
        found: Any = self._root
        if reference not in {"#", "#/"}:
            for step in reference.removeprefix("#/").split("/"):
                name = step.replace("~1", "/").replace("~0", "~")
                if not isinstance(found, Mapping) or name not in found:
                    raise Unsatisfiable
                found = found[name]
        if not isinstance(found, Mapping):
            raise Unsatisfiable
        return found

    def _first(self, schema: Mapping[str, Any], union: str, path: str, depth: int) -> Any:
        base = {key: value for key, value in schema.items() if key != union}
        options = schema[union]
        nulls_last = sorted(options, key=lambda one: isinstance(one, Mapping) and one.get("type") == "null")
        for option in reversed(nulls_last) if depth > _DEEP else nulls_last:
            try:
                return self.value(_merged(base, option) if isinstance(option, Mapping) else option, path, depth + 1)
            except Unsatisfiable:
                continue
        raise Unsatisfiable

    def _object(self, schema: Mapping[str, Any], path: str, depth: int) -> dict[str, Any]:
        properties: Mapping[str, Any] = schema.get("properties") or {}
        required = list(schema.get("required") or ())
        made: dict[str, Any] = {}
        for name, inner in properties.items():
            if name in required:
                made[name] = self.value(inner, f"{path}.{name}", depth + 1)
            elif depth < _DEEP and len(made) < schema.get("maxProperties", math.inf):
                try:
                    made[name] = self.value(inner, f"{path}.{name}", depth + 1)
                except Unsatisfiable:
                    continue
        other = schema.get("additionalProperties", True)
        for name in required:
            if name not in made:
                made[name] = self.value(other, f"{path}.{name}", depth + 1)
        while len(made) < schema.get("minProperties", 0):
            name = f"item_{len(made) + 1}"
            made[name] = self.value(other, f"{path}.{name}", depth + 1)
        return made

    def _array(self, schema: Mapping[str, Any], path: str, depth: int) -> list[Any]:
        least = int(schema.get("minItems", 0))
        length = least if depth >= _DEEP else max(least, 2)
        length = min(length, int(schema.get("maxItems", length)))
        prefix = schema.get("prefixItems") or []
        items = schema.get("items", not prefix)
        made: list[Any] = []
        for index in range(1000):
            if len(made) >= length:
                return made
            inner = prefix[index] if index < len(prefix) else items
            if inner is False:
                break
            try:
                value = self.value(inner, f"{path}[{index}]", depth + 1)
            except Unsatisfiable:
                break
            if not schema.get("uniqueItems") or value not in made:
                made.append(value)
        if len(made) < least:
            raise Unsatisfiable
        return made

    def _number(self, schema: Mapping[str, Any], path: str, *, whole: bool) -> float:
        step = schema.get("multipleOf") or (1 if whole else None)
        low, high = schema.get("minimum"), schema.get("maximum")
        nudge = step or 1e-3
        for name, sign in (("exclusiveMinimum", 1), ("exclusiveMaximum", -1)):
            bound = schema.get(name)
            if bound is None or isinstance(bound, bool):
                continue
            if sign > 0:
                low = bound + nudge if low is None else max(low, bound + nudge)
            else:
                high = bound - nudge if high is None else min(high, bound - nudge)
        fits = [
            number
            for number in self._clues.numbers
            if (low is None or number >= low) and (high is None or number <= high) and (not step or number % step == 0)
        ]
        if fits:
            chosen = fits[_draw(path, "number") % len(fits)]
        else:
            start = low if low is not None else (min(high, 1) if high is not None else 1)
            span = (high - start) if high is not None else 20
            if span < 0:
                raise Unsatisfiable
            chosen = start + (_draw(path, self._clues.prompt) % 101) / 100 * span
            if step:
                chosen = math.floor(chosen / step) * step
                if low is not None and chosen < low:
                    chosen += step
                if high is not None and chosen > high:
                    raise Unsatisfiable
        return int(chosen) if whole or float(chosen).is_integer() else round(chosen, 6)

    def _text(self, schema: Mapping[str, Any], path: str) -> str:
        clues = self._clues
        least, most = int(schema.get("minLength", 0)), schema.get("maxLength")
        given = _FORMATS.get(str(schema.get("format")))
        if given is not None:
            return given
        index = int(re.findall(r"\[(\d+)\]", path)[-1]) if "[" in path else 0
        name = path.rpartition(".")[2].lower()
        pool = self._pool(name)
        text = pool[index % len(pool)]
        if index >= len(pool):
            text = f"{text} {index + 1}"
        if any(hint in name for hint in _WORDY):
            text = " ".join(clues.prompt.split()[:12]) or text
        pattern = schema.get("pattern")
        if pattern is not None:
            text = _matching(pattern, (text, *clues.words), text)
        while len(text) < least:
            text = f"{text} {text}" if text else "x"
        return text if most is None else text[: int(most)]

    def _pool(self, name: str) -> list[str]:
        """What a text property of this name may hold, the best first."""
        clues = self._clues
        if "currency" in name and (currencies := _CURRENCY.findall(clues.prompt)):
            return currencies
        if clues.codes and any(hint in name for hint in _MONEY):
            return clues.codes[::-1]
        if clues.codes and set(re.findall(r"[a-z]+", name)) & set(_CODED):
            return clues.codes
        longest = sorted(dict.fromkeys(clues.words[1:] or clues.words), key=len, reverse=True)
        return clues.names or longest or ["example"]

    def _one_of(self, options: list[Any], path: str) -> Any:
        if not options:
            raise Unsatisfiable
        prompt = self._clues.prompt.lower()
        for option in options:
            if isinstance(option, str) and option and option.lower() in prompt:
                return option
        return options[_draw(path, self._clues.prompt) % len(options)]


def _matching(pattern: str, own: tuple[str, ...], otherwise: str) -> str:
    try:
        compiled = re.compile(pattern)
    except re.error:
        return otherwise
    return next((text for text in (*own, *_PATTERN_CANDIDATES) if compiled.search(text)), otherwise)


def _merged(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    merged = {**first, **second}
    if "properties" in first and "properties" in second:
        merged["properties"] = {**first["properties"], **second["properties"]}
    if "required" in first and "required" in second:
        merged["required"] = [*first["required"], *second["required"]]
    return merged


def _implied_type(schema: Mapping[str, Any]) -> str:
    if "properties" in schema or "required" in schema or "additionalProperties" in schema:
        return "object"
    if "items" in schema or "prefixItems" in schema:
        return "array"
    if "minimum" in schema or "maximum" in schema or "multipleOf" in schema:
        return "number"
    return "string"


def _draw(path: str, prompt: str) -> int:
    return int.from_bytes(hashlib.blake2b(f"{path}\n{prompt}".encode(errors="replace"), digest_size=4).digest(), "big")
