"""
Answers and errors as bytes, rendered before the first is written.

A rendering is played by the server frame by frame. What differs from one dispatch to the next (its number, the time)
is left open and filled in while playing. What a protocol says is its dialect's; how it is framed and how it breaks is
the same for all, and here.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Iterable, Sequence
from email.utils import formatdate
from http import HTTPStatus
from typing import Literal

import msgspec

from adapters.simulator.content import Answer
from adapters.simulator.dialect import NUMBER, TIME, Asked, Dialect, Frame
from adapters.simulator.faults import Faults
from adapters.simulator.ledger import Ended

_END = b"0\r\n\r\n"
_COMMENT = b": keep-alive\n\n"

After = Literal["done", "rst", "fin", "endless", "bomb"]


class Rendering(msgspec.Struct, frozen=True, kw_only=True):
    status: int
    #: Status line and headers, the closing empty line included.
    head: bytes
    frames: Sequence[Frame]
    #: What follows the last frame.
    after: After = "done"
    #: The index of the frame before which the server hangs.
    hang_at: int | None = None
    ended: Ended = Ended.COMPLETE
    chunked: bool = False
    #: Framed as one HTTP chunk, for waiting times.
    keepalive: bytes = b""


class Filling:
    """What fills the open places of one dispatch."""

    __slots__ = ("_created", "_number")

    def __init__(self, number: int) -> None:
        self._number = b"%016x" % number
        self._created = b"%010d" % int(time.time())

    def fill(self, data: bytes) -> bytes:
        return data.replace(NUMBER, self._number).replace(TIME, self._created)


def size(data: bytes) -> int:
    """In bytes, once its open places are filled."""
    return len(data) + 15 * data.count(NUMBER) + 9 * data.count(TIME)


def plain(dialect: Dialect, answer: Answer, faults: Faults) -> Rendering:
    """The whole answer as one JSON object."""
    if faults.compressed_bomb:
        return _bomb("application/json")
    data, ended = dialect.whole(answer, faults)
    content_type = "application/json"
    if faults.error_in_stream:
        message = "The simulated server had an error."
        data = dialect.error(500, message, param=None, code=None, faults=msgspec.structs.replace(faults, body="openai"))
        ended = Ended.ERROR_IN_STREAM
    if faults.json is not None:
        data, content_type = _malformed(data, faults)
        ended = Ended.MALFORMED
    head = _head(dialect, 200, content_type, size(data), dialect.left_headers(faults, limited=False))
    tokens = answer.completion_tokens
    if faults.endless_line:
        return Rendering(
            status=200,
            head=_head(dialect, 200, "application/json", None),
            frames=[Frame(_chunk(data[: len(data) // 2]))],
            after="endless",
            ended=Ended.MALFORMED,
            chunked=True,
        )
    half = len(data) // 2
    if faults.die in {"rst", "fin"}:
        frames = [Frame(data[:half])] if faults.die_after != 0 else []
        return Rendering(status=200, head=head, frames=frames, after=_death(faults), ended=Ended.DIED)
    if faults.hang == "mid":
        return Rendering(
            status=200, head=head, frames=[Frame(data[:half]), Frame(data[half:], tokens)], hang_at=1, ended=ended
        )
    return Rendering(status=200, head=head, frames=[Frame(data, tokens)], ended=ended)


def streamed(dialect: Dialect, answer: Answer, faults: Faults, asked: Asked) -> Rendering:
    """The answer as server-sent events."""
    if faults.compressed_bomb:
        return _bomb("text/event-stream; charset=utf-8")
    left = dialect.left_headers(faults, limited=False)
    head = _head(dialect, 200, "text/event-stream; charset=utf-8", None, left)
    if faults.json in {"html", "empty"}:
        data, content_type = _malformed(b"", faults)
        return Rendering(
            status=200, head=_head(dialect, 200, content_type, len(data)), frames=[Frame(data)], ended=Ended.MALFORMED
        )
    writer = dialect.writer(answer, faults, asked)
    opening, pieces = writer.opening(), writer.pieces()
    if faults.json is not None and pieces:
        at = min(2, len(pieces) - 1)
        pieces[at] = msgspec.structs.replace(pieces[at], data=_spoiled(pieces[at].data, faults))
    after: After = "done"
    ended = Ended.COMPLETE
    closing: list[Frame] = []
    if faults.die in {"rst", "fin"}:
        pieces, after, ended = pieces[: _or(faults.die_after, 3)], _death(faults), Ended.DIED
    elif faults.endless_line:
        pieces, after, ended = pieces[:2], "endless", Ended.MALFORMED
    elif faults.error_in_stream:
        pieces = pieces[: faults.error_after]
        closing, ended = writer.error(), Ended.ERROR_IN_STREAM
    else:
        closing, ended = writer.closing()
        if faults.json is not None:
            ended = Ended.MALFORMED
    if faults.die_after == 0 or (faults.error_in_stream and faults.error_after == 0):
        opening = []
    hang_at = len(opening) + min(faults.hang_after, len(pieces)) if faults.hang == "mid" else None
    return Rendering(
        status=200,
        head=head,
        frames=_framed([*opening, *pieces, *closing], faults, end=after == "done"),
        after=after,
        hang_at=hang_at,
        ended=ended,
        chunked=True,
        keepalive=_chunk(_newlines(_COMMENT, faults.newline)),
    )


def error(
    dialect: Dialect, status: int, message: str, faults: Faults, *, param: str | None = None, code: str | None = None
) -> Rendering:
    """A complete error response."""
    content_type = "application/json"
    match faults.body:
        case "text":
            content_type, data = "text/plain", b"upstream connect error or disconnect/reset before headers"
        case "html":
            content_type, data = "text/html", _page(status)
        case "empty":
            content_type, data = "text/plain", b""
        case _:
            data = dialect.error(status, message, param=param, code=faults.code or code, faults=faults)
    headers = [*dialect.left_headers(faults, limited=status == 429), *_retry_headers(faults)]
    status = dialect.statuses.get(status, status)
    half = len(data) // 2
    dying = faults.die in {"rst", "fin"}
    return Rendering(
        status=status,
        head=_head(dialect, status, content_type, size(data), headers),
        frames=[Frame(data[:half])] if dying else [Frame(data)],
        after=_death(faults) if dying else "done",
        ended=Ended.DIED if dying else Ended.ERROR,
    )


def document(status: int, data: bytes, content_type: str = "application/json") -> bytes:
    """A whole response that is no part of a conversation."""
    return _head(None, status, content_type, len(data)) + data


def _framed(frames: Sequence[Frame], faults: Faults, *, end: bool) -> list[Frame]:
    """
    Each frame as one HTTP chunk, bursts joined. What proves the end to a client goes out with the end of the body, so
    that no client knows of the end before the ledger does.
    """
    last = next((i for i, frame in enumerate(frames) if frame.proof), len(frames) - 1) if end else len(frames)
    made: list[Frame] = []
    held: list[Frame] = []

    def flush(ending: bytes = b"") -> None:
        if len(held) == 1 and not ending:
            made.append(held.pop())
        elif held or ending:
            data = b"".join(frame.data for frame in held) + ending
            made.append(Frame(data, sum(frame.tokens for frame in held), any(frame.piece for frame in held)))
            held.clear()

    for index, frame in enumerate(frames):
        held.append(_as_chunk(frame, faults.comments, faults.newline))
        if len(held) >= faults.burst and index < last:
            flush()
    flush(_END if end else b"")
    return made


@functools.lru_cache(maxsize=16_384)
def _as_chunk(frame: Frame, comments: bool, newline: str) -> Frame:
    data = _newlines(_COMMENT + frame.data if comments else frame.data, newline)
    return Frame(_chunk(data), frame.tokens, frame.piece)


def _head(
    dialect: Dialect | None, status: int, content_type: str, length: int | None, headers: Iterable[str] = ()
) -> bytes:
    lines = [
        f"HTTP/1.1 {status} {_phrase(status)}",
        f"content-type: {content_type}",
        "transfer-encoding: chunked" if length is None else f"content-length: {length}",
        "server: tollbridge-simulator",
        *headers,
        *([] if dialect is None else [f"{dialect.request_id_header}: req_{NUMBER.decode()}"]),
    ]
    return "\r\n".join(lines).encode() + b"\r\n\r\n"


def _phrase(status: int) -> str:
    try:
        return HTTPStatus(status).phrase
    except ValueError:
        return "Unknown"


def _retry_headers(faults: Faults) -> Iterable[str]:
    wait = faults.retry_after
    if wait is None:
        return
    yield f"x-ratelimit-reset-requests: {wait:g}s"
    match faults.retry_after_as:
        case "seconds":
            yield f"retry-after: {wait:g}"
        case "date":
            yield f"retry-after: {formatdate(time.time() + wait, usegmt=True)}"
        case "ms":
            yield f"retry-after-ms: {wait * 1000:g}"
        case "ms_and_zero":
            yield f"retry-after-ms: {wait * 1000:g}"
            yield "retry-after: 0"


def _page(status: int) -> bytes:
    title = f"{status} {_phrase(status)}"
    return f"<html><head><title>{title}</title></head><body><h1>{title}</h1></body></html>\n".encode()


def _malformed(data: bytes, faults: Faults) -> tuple[bytes, str]:
    match faults.json:
        case "html":
            return _page(200), "text/html"
        case "empty":
            return b"", "application/json"
        case "not_object":
            return b"[42]", "application/json"
        case "truncated":
            return data[: len(data) // 2], "application/json"
        case _:
            return data[:-1] + b",}", "application/json"


def _spoiled(event: bytes, faults: Faults) -> bytes:
    match faults.json:
        case "not_object":
            return b"data: [42]\n\n"
        case "truncated":
            return event[: len(event) * 2 // 3] + b"\n\n"
        case _:
            return event.rstrip()[:-1] + b",}\n\n"


def _bomb(content_type: str) -> Rendering:
    head = _head(None, 200, content_type, None, ["content-encoding: gzip"])
    return Rendering(status=200, head=head, frames=[], after="bomb", ended=Ended.MALFORMED, chunked=True)


def _death(faults: Faults) -> After:
    return "fin" if faults.die == "fin" else "rst"


def _or(value: int | None, otherwise: int) -> int:
    return otherwise if value is None else value


def _newlines(data: bytes, newline: str) -> bytes:
    match newline:
        case "crlf":
            return data.replace(b"\n", b"\r\n")
        case "cr":
            return data.replace(b"\n", b"\r")
        case _:
            return data


def _chunk(data: bytes) -> bytes:
    """One HTTP chunk. Its open places count with the size that they will have."""
    return b"%x\r\n%b\r\n" % (size(data), data)
