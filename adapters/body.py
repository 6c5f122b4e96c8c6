"""
A caller's JSON body, read within bounds.

Every protocol reads its callers through these: what a field we never look at holds is passed on to a provider, so a
fault in it must be found here; and a refusal names the field and repeats none of its content.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
from typing import Any, NoReturn, TypeVar

import msgspec

from adapters.errors import Broken, MalformedRequest

#: Deeper than any JSON schema in use; shallow enough for every parser on the way.
MAX_DEPTH = 96

#: Values in one body. Reading so many holds up everybody else for about a fifth of a second. No conversation has as
#: many; the token numbers of the largest request for embeddings are fewer.
MAX_VALUES = 400_000

#: Of a path that a refusal names.
_PATH_CHARACTERS = 128

#: What a raw field is when it was not there; to be compared by identity.
ABSENT = msgspec.Raw()

_DATA_URL = re.compile(r"data:([\w.+-]+/[\w.+-]+)?((?:;[\w-]+=[^;,]*)*);base64,", re.ASCII)
_EXPECTED_AT = re.compile(r"(?s)(.*) - at `(?:key in )?\$\.?(.*)`$")

#: One that is never closed goes to the end: to look for it anew from each of its quotes would take for ever.
_STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+"?', re.DOTALL)
_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])
_any = msgspec.json.Decoder()
_encode = msgspec.json.Encoder().encode

T = TypeVar("T")


class Wire(msgspec.Struct, kw_only=True, gc=False):
    """Decoded and read, never changed: from JSON no cycle can come, so the collector need not look."""


def read_fields(body: bytes) -> dict[str, msgspec.Raw]:
    """
    The top-level fields of a JSON object, byte for byte. Raises `MalformedRequest` for what is no object in UTF-8, is
    nested too deep or holds too many values, holds a NUL, or gives a member of an object twice.
    """
    return read_object(body)[0]


def read_object(body: bytes) -> tuple[dict[str, msgspec.Raw], dict[str, Any]]:
    """As `read_fields`, and beside them all that is in them, decoded."""
    if len(body) > MAX_VALUES:
        refuse_flood(body)
    content = _decoded(body)
    if not isinstance(content, dict):
        raise MalformedRequest("", "a JSON object is needed")
    if body.count(b"{") + body.count(b"[") > MAX_DEPTH:
        _refuse_depth(content)
    if _may_repeat(body, content) and (twice := _twice(body)) is not None:
        raise MalformedRequest(twice, "is given twice")
    return _fields.decode(body), content


def refuse_flood(body: bytes, most: int = MAX_VALUES) -> None:
    """Raises `MalformedRequest` for a body of more values than that, before they are made."""
    if body.count(b",") <= most:
        return
    # A table that somebody asks about has its commas inside a string.
    if _STRING.sub(b"", body).count(b",") > most:
        raise MalformedRequest("", f"holds more than {most} values")


def _decoded(body: bytes) -> Any:
    """The whole body, so that a fault in a field we do not read is found too: it would be passed on unseen."""
    try:
        content = _any.decode(body)
    except msgspec.ValidationError as error:
        raise MalformedRequest("", "a number is out of range") from error
    except msgspec.DecodeError as error:
        raise MalformedRequest("", "the body is not valid JSON in UTF-8") from error
    except RecursionError as error:
        raise MalformedRequest("", f"the JSON is nested more than {MAX_DEPTH} deep") from error
    if b"\\u0000" in body:
        refuse_nul(content)
    return content


def _refuse_depth(content: Any) -> None:
    """The decoder gives up on deep nesting by itself; this draws a line that does not move with its stack."""
    level = [content]
    for _ in range(MAX_DEPTH):
        inner = []
        for value in level:
            values = value.values() if type(value) is dict else value
            inner += [one for one in values if type(one) is dict or type(one) is list]
        if not inner:
            return
        level = inner
    raise MalformedRequest("", f"the JSON is nested more than {MAX_DEPTH} deep")


def refuse_nul(content: Any) -> None:
    """Raises `MalformedRequest`: PostgreSQL stores no NUL, and no model reads one."""
    left: list[tuple[str, Any]] = [("", content)]
    while left:
        path, value = left.pop()
        if isinstance(value, str):
            if "\0" in value:
                raise MalformedRequest(path, "a NUL character is not allowed")
        elif isinstance(value, list):
            left.extend((f"{path}[{i}]", inner) for i, inner in enumerate(value))
        elif isinstance(value, dict):
            if any("\0" in key for key in value):
                raise MalformedRequest(path, "a NUL character is not allowed")
            left.extend((f"{path}.{key}" if path else key, inner) for key, inner in value.items())


def _may_repeat(body: bytes, content: dict[str, Any]) -> bool:
    """
    Whether a member may be given twice, at any depth: which one counts would depend on who reads it. The decoder keeps
    one of them, so that the text has more colons than what was decoded has when it is written again. Only such a body,
    or one that writes a colon as an escape, is read by a parser that shows every pair.
    """
    if b"\\" in body and (b"\\u003a" in body or b"\\u003A" in body):
        return True
    return body.count(b":") != _encode(content).count(b":")


class _Pairs(list[tuple[str, Any]]):
    """An object, with all of its members."""


def _twice(body: bytes) -> str | None:
    """The path of the first member that is there twice."""
    left: list[tuple[str, Any]] = [("", json.loads(body, object_pairs_hook=_Pairs))]
    for path, value in left:
        if not isinstance(value, _Pairs):
            left += [(f"{path}[{place}]", one) for place, one in enumerate(value) if isinstance(one, list)]
            continue
        seen: set[str] = set()
        for name, one in value:
            at = f"{path}.{name}" if path else name
            if name in seen:
                return at[:_PATH_CHARACTERS]
            seen.add(name)
            if isinstance(one, list):
                left.append((at, one))
    return None


def typed(body: bytes | msgspec.Raw, kind: type[T], path: str) -> T:
    """Raises `MalformedRequest` with the path of the field, which begins with `path`."""
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        _refuse(error, path)


def _refuse(error: msgspec.ValidationError, path: str) -> NoReturn:
    found = _EXPECTED_AT.match(str(error))
    reason, inner = found.groups() if found else (str(error), "")
    if reason.startswith("Invalid"):
        reason = "is not one of the allowed values"  # the original repeats the value
    elif missing := re.fullmatch(r"Object missing required field `(\w+)`", reason):
        inner = f"{inner}.{missing.group(1)}" if inner else missing.group(1)
        reason = "is required"
    joined = inner if not path else f"{path}{inner}" if inner.startswith("[") else f"{path}.{inner}".rstrip(".")
    raise MalformedRequest(joined, reason) from error


def data_url(url: str, path: str) -> tuple[str | None, bytes]:
    """Media type and content of a base64 data URL. Raises `MalformedRequest`."""
    head = _DATA_URL.match(url[:256])
    if head is None:
        raise MalformedRequest(path, "is not a base64 data URL")
    return head.group(1), from_base64(url[head.end() :], path)


def from_base64(text: str, path: str) -> bytes:
    """Raises `MalformedRequest`."""
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise MalformedRequest(path, "is not valid base64") from error


def says_something(value: object) -> bool:
    """A decoded field of JSON is not null, false, or empty."""
    return value is not None and value is not False and value not in ("", [], {})


def given(raw: msgspec.Raw) -> msgspec.Raw | None:
    """A raw field, None where it was absent or null."""
    return None if raw is ABSENT or bytes(raw) == b"null" else raw


def raw_text(raw: msgspec.Raw) -> str:
    """
    A raw field of an answer as text. Raises `Broken` (code "malformed") where it is not UTF-8: whoever decoded what is
    around it had not to look.
    """
    try:
        return bytes(raw).decode()
    except UnicodeDecodeError as error:
        raise Broken("what came is not UTF-8", code="malformed") from error


def to_data_url(media_type: str, data: bytes) -> str:
    return f"data:{media_type};base64,{base64.b64encode(data).decode()}"
