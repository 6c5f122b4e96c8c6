"""
Strict JSON: what a caller sends means one thing or is refused.

msgspec is fast and exact about types, but takes the last of two members with the same name; other parsers take the
first, and a check made on one reading then guards the other. So duplicates are looked for separately.
"""

from __future__ import annotations

import json
import re
from decimal import Decimal
from typing import Any, TypeVar

import msgspec

from adapters.body import refuse_nul
from adapters.errors import MalformedRequest
from gateway.errors import Code, InvalidRequest, not_json

_T = TypeVar("_T")

#: Where msgspec says what is wrong: "Expected `int`, got `str` - at `$.jobs[0].deadline_s`".
_FAULT = re.compile(r"^(?P<what>.*?)(?: - at `(?P<path>[^`]*)`)?$", re.DOTALL)
_UNKNOWN = re.compile(r"^Object contains unknown field `(?P<name>.*)`$", re.DOTALL)

#: Numbers that stand nowhere in a type keep their exact decimal value.
_EXACT = msgspec.json.Decoder(float_hook=Decimal)


def decode(body: bytes, kind: type[_T], *, at: str = "") -> _T:
    """
    One JSON document of this type. `at` is put before the paths of faults.

    Raises InvalidRequest: `invalid_json` for what is not JSON (or nests deeper than the parser goes), `invalid_request`
    with the path for what has another shape. Text of the document is never part of the message.
    """
    try:
        value = msgspec.json.decode(body, type=kind)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise _refusal(error, at) from error
    unique_members(body, at=at)
    return value


def storable(body: bytes) -> None:
    """Raises InvalidRequest with the path where the text of a JSON document has a NUL: PostgreSQL stores none."""
    if b"\\u0000" not in body:
        return
    try:
        refuse_nul(msgspec.json.decode(body))
    except MalformedRequest as error:
        raise InvalidRequest(error.reason, param=error.path or None) from error


def decode_exact(raw: bytes | msgspec.Raw) -> object:
    """Any JSON value, with every non-integer number as a Decimal. Errors as `decode`."""
    try:
        return _EXACT.decode(bytes(raw))
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError, ArithmeticError) as error:
        raise _refusal(error, "") from error


def unique_members(body: bytes, *, at: str = "") -> None:
    """Refuses a document in which an object has two members of one name, and one that is not UTF-8 all through."""
    try:
        # Bytes it would take in other encodings too, and with halves of surrogates, which msgspec does not see in raw
        # fields.
        json.loads(body.decode(), object_pairs_hook=_distinct, parse_float=_nothing, parse_int=_nothing)
    except _TwiceError as error:
        name = str(error)
        raise InvalidRequest(
            "a member is there twice", code=Code.INVALID_JSON, param=_join(at, name[:64] if name.isprintable() else "")
        ) from None
    except (ValueError, RecursionError) as error:
        raise _refusal(error, at) from error


class _TwiceError(Exception):
    """Two members of one object have this name."""


def _nothing(_text: str) -> None:
    """Numbers are not of interest, and a long one would cost time."""


def _distinct(pairs: list[tuple[str, Any]]) -> None:
    if len(pairs) > 1:
        seen: set[str] = set()
        for name, _ in pairs:
            if name in seen:
                raise _TwiceError(name)
            seen.add(name)


def _refusal(error: Exception, at: str) -> InvalidRequest:
    if isinstance(error, RecursionError):
        return InvalidRequest("the JSON is nested too deeply", code=Code.INVALID_JSON, param=at or None)
    if not isinstance(error, msgspec.ValidationError):
        return not_json("the body", error, param=at or None)
    fault = _FAULT.match(str(error))
    assert fault is not None
    what, path = fault["what"], (fault["path"] or "$").removeprefix("$").removeprefix(".")
    unknown = _UNKNOWN.match(what)
    if unknown is not None:
        name = unknown["name"]
        return InvalidRequest("unknown field", param=_join(at, path, name[:64] if name.isprintable() else ""))
    # An enum's message quotes the value; the rest speak of types and bounds only.
    what = "not one of the values allowed here" if what.startswith("Invalid enum value") else what
    return InvalidRequest(what, param=_join(at, path) or None)


def _join(*parts: str) -> str:
    return ".".join(part for part in parts if part)
