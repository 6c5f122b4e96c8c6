"""
Whether the bytes of a stream hold the proof of its end, read a second time in the plainest way there is.

Independent of the parsers: an event stream is taken apart here by a few lines of its own, which also judge
`adapters.sse`, and JSON is read by the standard library. The proof asked for is the least a parser may accept, so a
parser that says Finished without it has a fault.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

_WHITE = b" \t\r\n"


def events_of(body: bytes) -> list[tuple[str, bytes]]:
    """The WHATWG standard, line by line; the event that the end of the body cut off is given, too."""
    found: list[tuple[str, bytes]] = []
    name, data = b"", list[bytes]()
    for line in [*re.split(rb"\r\n|\r|\n", body.removeprefix(b"\xef\xbb\xbf")), b""]:
        field, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if not line:
            if data:
                found.append((name.decode(errors="replace"), b"\n".join(data)))
            name, data = b"", []
        elif field == b"data":
            data.append(value)
        elif field == b"event":
            name = value
    return found


def is_json(body: bytes) -> bool:
    return body.removeprefix(b"\xef\xbb\xbf").lstrip(_WHITE)[:1] in {b"{", b"["}


def _values(body: bytes) -> Iterator[tuple[str, Any]]:
    """Each event's name, and its data as JSON or else as text; of a JSON body that alone."""
    pieces = [("", body.removeprefix(b"\xef\xbb\xbf"))] if is_json(body) else events_of(body)
    for name, data in pieces:
        try:
            yield name, json.loads(data.decode(errors="replace"))
        except (ValueError, RecursionError):
            yield name, data.strip().decode(errors="replace")


def _said(value: Any, field: str) -> bool:
    """Whether this field is anywhere in the value with something in it that is not null."""
    left = [value]
    while left:
        inner = left.pop()
        if isinstance(inner, dict):
            if inner.get(field) is not None:
                return True
            left.extend(inner.values())
        elif isinstance(inner, list):
            left.extend(inner)
    return False


def _chat_completions(body: bytes, no_sentinel: bool) -> bool:
    values = [value for _, value in _values(body)]
    ended = any(_said(value, "finish_reason") for value in values)
    return ended and (no_sentinel or is_json(body) or "[DONE]" in values)


def _anthropic_messages(body: bytes, _: bool) -> bool:
    values = list(_values(body))
    stopped = is_json(body) or any(
        name == "message_stop" or (isinstance(value, dict) and value.get("type") == "message_stop")
        for name, value in values
    )
    return stopped and any(_said(value, "stop_reason") for _, value in values)


def _responses(body: bytes, _: bool) -> bool:
    ends = {"response.completed", "response.incomplete"}
    return any(
        isinstance(value, dict)
        and (is_json(body) or not ends.isdisjoint({name, str(value.get("type"))}))
        and _said(value, "status")
        for name, value in _values(body)
    )


def _gemini(body: bytes, _: bool) -> bool:
    return any(_said(value, "finishReason") or _said(value, "blockReason") for _, value in _values(body))


def _workers_ai(body: bytes, _: bool) -> bool:
    return is_json(body) or any(value == "[DONE]" for _, value in _values(body))


def _skeleton(body: bytes, _: bool) -> bool:
    return any(isinstance(value, dict) and value.get("end") is not None for _, value in _values(body))


#: Of the body of an answer, and whether its provider is known to send no sentinel.
PROOF: Mapping[str, Callable[[bytes, bool], bool]] = {
    "chat_completions": _chat_completions,
    "anthropic_messages": _anthropic_messages,
    "responses": _responses,
    "gemini": _gemini,
    "workers_ai": _workers_ai,
    "skeleton": _skeleton,
}
