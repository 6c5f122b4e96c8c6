"""
Answers and errors as bytes of `chat_completions`, rendered before the first is written.

A rendering is played by the server frame by frame. What differs from one dispatch to the next (its id, the time) is
left open as one NUL byte, which JSON text cannot hold, and filled in while playing.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Iterable, Sequence
from email.utils import formatdate
from http import HTTPStatus
from typing import Any, Literal

import msgspec

from adapters.simulator.content import Answer, Choice, Piece
from adapters.simulator.faults import Faults
from adapters.simulator.ledger import Ended

#: Stands for `"id":"chatcmpl-...","created":...` in a frame and for the request id in a head.
OPEN = b"\0"
_IDENTITY = '"id":"chatcmpl-{number:016x}","created":{created:010d}'
_IDENTITY_SIZE = len(_IDENTITY.format(number=0, created=0))
_FINGERPRINT = '"service_tier":"default","system_fingerprint":"fp_simulated"'
_END = b"0\r\n\r\n"
_DONE = b"data: [DONE]\n\n"
_COMMENT = b": keep-alive\n\n"

After = Literal["done", "rst", "fin", "endless", "bomb"]


class Frame(msgspec.Struct, frozen=True):
    """What is written at a time."""

    data: bytes
    #: Tokens of output that it carries.
    tokens: int = 0
    #: Only a piece of content waits for the pace.
    piece: bool = False


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


def identity(number: int) -> bytes:
    """What fills the open place of a dispatch's frames."""
    return _IDENTITY.format(number=number, created=int(time.time())).encode()


def plain(answer: Answer, faults: Faults) -> Rendering:
    """The whole answer as one JSON object."""
    if faults.compressed_bomb:
        return _bomb("application/json")
    finish = _Finish.of(faults)
    body: dict[str, Any] = {
        "object": "chat.completion",
        "model": answer.model,
        "choices": [_choice(choice, index, faults, finish) for index, choice in enumerate(answer.choices)],
    }
    if faults.usage != "none" and not finish.masked:
        body["usage"] = _usage(answer)
    data = b"{" + OPEN + b"," + msgspec.json.encode(body)[1:-1] + b"," + _FINGERPRINT.encode() + b"}"
    ended = finish.ended if faults.terminal != "no_done" else Ended.COMPLETE
    content_type = "application/json"
    if faults.error_in_stream:
        data = _error_body(None, "The simulated server had an error.", "server_error", "server_error")
        ended = Ended.ERROR_IN_STREAM
    if faults.json is not None:
        data, content_type = _malformed(data, faults)
        ended = Ended.MALFORMED
    size = len(data) + (_IDENTITY_SIZE - 1) * data.count(OPEN)
    head = _head(200, content_type, size, _left_headers(faults))
    tokens = answer.completion_tokens
    if faults.endless_line:
        return Rendering(
            status=200,
            head=_head(200, "application/json", None),
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


def streamed(answer: Answer, faults: Faults, *, include_usage: bool) -> Rendering:
    """The answer as server-sent events."""
    if faults.compressed_bomb:
        return _bomb("text/event-stream; charset=utf-8")
    head = _head(200, "text/event-stream; charset=utf-8", None, _left_headers(faults))
    if faults.json in {"html", "empty"}:
        data, content_type = _malformed(b"", faults)
        return Rendering(
            status=200, head=_head(200, content_type, len(data)), frames=[Frame(data)], ended=Ended.MALFORMED
        )
    writer = _Stream(answer, faults, include_usage=include_usage)
    opening, pieces = writer.opening(), writer.pieces()
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


def error(status: int, message: str, faults: Faults, *, param: str | None = None, code: str | None = None) -> Rendering:
    """A complete error response."""
    kind, known_code, known_message = _ERRORS.get(status, ("server_error", None, None))
    code = faults.code or code or known_code
    message = _MESSAGES.get(code or "", message or known_message or HTTPStatus(status).phrase)
    content_type = "application/json"
    match faults.body:
        case "openai":
            data = _error_body(param, message, kind if code != "insufficient_quota" else "insufficient_quota", code)
        case "text":
            content_type, data = "text/plain", b"upstream connect error or disconnect/reset before headers"
        case "html":
            content_type, data = "text/html", _page(status)
        case "empty":
            content_type, data = "text/plain", b""
        case "string":
            data = msgspec.json.encode({"code": code, "error": message})
        case "bare":
            data = msgspec.json.encode({"message": message, "type": kind, "param": param, "code": code})
        case _:
            data = msgspec.json.encode({"detail": [{"type": code, "loc": ["body", param], "msg": message}]})
    headers = [*_left_headers(faults, limited=status == 429), *_retry_headers(faults)]
    half = len(data) // 2
    dying = faults.die in {"rst", "fin"}
    return Rendering(
        status=status,
        head=_head(status, content_type, len(data), headers),
        frames=[Frame(data[:half])] if dying else [Frame(data)],
        after=_death(faults) if dying else "done",
        ended=Ended.DIED if dying else Ended.ERROR,
    )


def document(status: int, data: bytes, content_type: str = "application/json") -> bytes:
    """A whole response that is no part of a conversation."""
    return _head(status, content_type, len(data)).replace(OPEN, b"req_control") + data


# ------------------------------------------------------------------ pieces of a stream


class _Finish(msgspec.Struct, frozen=True):
    word: str | None
    native: str | None
    ended: Ended

    @property
    def masked(self) -> bool:
        return self.native is not None

    @classmethod
    def of(cls, faults: Faults) -> _Finish:
        match faults.terminal:
            case "none" | "no_finish":
                return cls(None, None, Ended.UNPROVEN)
            case "no_done":
                return cls(faults.finish, None, Ended.UNPROVEN)
            case "masked":
                return cls("stop", "network_error", Ended.ERROR_IN_STREAM)
            case "error_word":
                return cls("error", None, Ended.ERROR_IN_STREAM)
            case "two" | None:
                return cls(faults.finish, None, Ended.COMPLETE)

    def reason(self, choice: Choice, faults: Faults) -> str | None:
        return None if faults.terminal in {"none", "no_finish"} else self.word or choice.finish_reason


class _Stream:
    def __init__(self, answer: Answer, faults: Faults, *, include_usage: bool) -> None:
        self._answer = answer
        self._faults = faults
        self._asked = include_usage
        self._usage = faults.usage or ("normal" if include_usage else "none")
        self._finish = _Finish.of(faults)
        tail = f',"object":"chat.completion.chunk","model":{_json(answer.model)},{_FINGERPRINT},"choices":['
        self._before = b"data: {" + OPEN + tail.encode()
        self._told = 0

    def _event(self, choices: bytes, usage: bytes | None = None) -> bytes:
        if usage is None and self._usage == "each":
            usage = msgspec.json.encode(_usage(self._answer, completion=self._told))
        elif usage is None and self._asked:
            usage = b"null"
        return b"".join((self._before, choices, b"]" if usage is None else b'],"usage":' + usage, b"}\n\n"))

    def _delta(self, index: int, delta: bytes, finish: str | None = None, extra: bytes = b"") -> bytes:
        return b'{"index":%d,"delta":%b,"logprobs":null,"finish_reason":%b%b}' % (
            index,
            delta,
            _json(finish).encode(),
            extra,
        )

    def opening(self) -> list[Frame]:
        frames = []
        for index, choice in enumerate(self._answer.choices):
            content = b"null" if choice.runs and choice.runs[0].kind == "call" else b'""'
            early = msgspec.json.encode(_usage(self._answer)) if self._usage == "early" and index == 0 else None
            delta = b'{"role":"assistant","content":%b,"refusal":null}' % content
            frames.append(Frame(self._event(self._delta(index, delta), early)))
        return frames

    def pieces(self) -> list[Frame]:
        """One frame a token; the choices take turns."""
        queues = [list(_joined(choice, self._faults)) for choice in self._answer.choices]
        bad = {"bad", "truncated", "not_object"}
        frames: list[Frame] = []
        for turn in range(max(map(len, queues), default=0)):
            for index, queue in enumerate(queues):
                if turn < len(queue):
                    piece, tokens = queue[turn]
                    self._told += tokens
                    data = self._piece(index, piece)
                    if self._faults.json in bad and len(frames) == min(2, len(queue) - 1):
                        data = _spoiled(data, self._faults)
                    frames.append(Frame(data, tokens, piece=True))
        return frames

    def _piece(self, index: int, piece: Piece) -> bytes:
        if piece.kind == "text" and self._usage != "each":
            return _text_event(self._before, index, piece.text, self._asked)
        return self._event(self._delta(index, _delta(piece)))

    def error(self) -> list[Frame]:
        prefix = b"event: error\n" if self._faults.error_in_stream == "event" else b""
        body = _error_body(None, "The simulated server had an error while answering.", "server_error", "server_error")
        frames = [Frame(prefix + b"data: " + body + b"\n\n")]
        return [*frames, Frame(_DONE)] if self._faults.error_done else frames

    def closing(self) -> tuple[list[Frame], Ended]:
        faults, finish = self._faults, self._finish
        ended = Ended.MALFORMED if faults.json is not None else finish.ended
        if faults.terminal == "none":
            return [], ended
        usage = msgspec.json.encode(_usage(self._answer))
        frames: list[Frame] = []
        if faults.terminal != "no_finish":
            extra = b',"native_finish_reason":"network_error"' if finish.masked else b""
            for _ in range(2 if faults.terminal == "two" else 1):
                for index, choice in enumerate(self._answer.choices):
                    here = usage if self._usage == "on_finish" and index == len(self._answer.choices) - 1 else None
                    reason = finish.reason(choice, faults)
                    frames.append(Frame(self._event(self._delta(index, b"{}", reason, extra), here)))
        total = Frame(self._event(b"", usage))
        done = [] if faults.terminal == "no_done" else [Frame(_DONE)]
        if finish.masked or self._usage in {"none", "early", "on_finish", "each"}:
            return [*frames, *done], ended
        if self._usage == "late":
            return [*frames, *done, total], ended
        if self._usage == "twice":
            return [*frames, total, total, *done], ended
        if self._usage == "zeros_after":
            zeros = msgspec.json.encode({"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0})
            return [*frames, total, Frame(self._event(b"", zeros)), *done], ended
        return [*frames, total, *done], ended


def _joined(choice: Choice, faults: Faults) -> Iterable[tuple[Piece, int]]:
    """The pieces with their tokens; the arguments of one call together, where that is asked for."""
    if not faults.whole_arguments:
        return ((piece, 1) for piece in choice.pieces())
    return (
        (Piece(run.kind, "".join(texts), run.call, run.call_id), len(texts))
        for run in choice.runs
        for texts in ([run.tokens] if run.kind == "arguments" else [[text] for text in run.tokens])
    )


@functools.lru_cache(maxsize=16_384)
def _text_event(before: bytes, index: int, text: str, usage_null: bool) -> bytes:
    """The commonest event. The same few hundred words make up most answers."""
    after = b'],"usage":null}\n\n' if usage_null else b"]}\n\n"
    return b'%b{"index":%d,"delta":{"content":%b},"logprobs":null,"finish_reason":null}%b' % (
        before,
        index,
        msgspec.json.encode(text),
        after,
    )


def _delta(piece: Piece) -> bytes:
    text = _json(piece.text).encode()
    match piece.kind:
        case "text":
            return b'{"content":' + text + b"}"
        case "reasoning":
            return b'{"reasoning_content":' + text + b"}"
        case "refusal":
            return b'{"refusal":' + text + b"}"
        case "call":
            return b'{"tool_calls":[{"index":%d,"id":%b,"type":"function","function":{"name":%b,"arguments":""}}]}' % (
                piece.call,
                _json(piece.call_id).encode(),
                text,
            )
        case "arguments":
            return b'{"tool_calls":[{"index":%d,"function":{"arguments":%b}}]}' % (piece.call, text)


def _framed(frames: Sequence[Frame], faults: Faults, *, end: bool) -> list[Frame]:
    """
    Each frame as one HTTP chunk, bursts joined. What proves the end to a client goes out with the end of the body, so
    that no client knows of the end before the ledger does.
    """
    last = next((i for i, frame in enumerate(frames) if frame.data == _DONE), len(frames) - 1) if end else len(frames)
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


# ------------------------------------------------------------------ shared forms


def _choice(choice: Choice, index: int, faults: Faults, finish: _Finish) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": choice.text("text"), "refusal": None}
    if reasoning := choice.text("reasoning"):
        message["reasoning_content"] = reasoning
    if refusal := choice.text("refusal"):
        message.update(content=None, refusal=refusal)
    calls = [
        {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
        for call_id, name, arguments in choice.calls()
    ]
    if calls:
        message.update(content=None, tool_calls=calls)
    made = {"index": index, "message": message, "logprobs": None, "finish_reason": finish.reason(choice, faults)}
    if finish.masked:
        made["native_finish_reason"] = finish.native
    return made


def _usage(answer: Answer, *, completion: int | None = None) -> dict[str, Any]:
    output = answer.completion_tokens if completion is None else completion
    return {
        "prompt_tokens": answer.prompt_tokens,
        "completion_tokens": output,
        "total_tokens": answer.prompt_tokens + output,
        "prompt_tokens_details": {"cached_tokens": answer.cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": min(answer.reasoning_tokens, output)},
    }


def _head(status: int, content_type: str, size: int | None, headers: Iterable[str] = ()) -> bytes:
    lines = [
        f"HTTP/1.1 {status} {_phrase(status)}",
        f"content-type: {content_type}",
        "transfer-encoding: chunked" if size is None else f"content-length: {size}",
        "server: tollbridge-simulator",
        *headers,
        "x-request-id: ",
    ]
    return "\r\n".join(lines).encode() + OPEN + b"\r\n\r\n"


def _phrase(status: int) -> str:
    try:
        return HTTPStatus(status).phrase
    except ValueError:
        return "Unknown"


def _left_headers(faults: Faults, *, limited: bool = False) -> Iterable[str]:
    requests = 0 if limited and faults.remaining_requests is None else faults.remaining_requests
    if requests is not None:
        yield "x-ratelimit-limit-requests: 500"
        yield f"x-ratelimit-remaining-requests: {requests}"
    if faults.remaining_tokens is not None:
        yield f"x-ratelimit-remaining-tokens: {faults.remaining_tokens}"


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


_ERRORS: dict[int, tuple[str, str | None, str | None]] = {
    400: ("invalid_request_error", None, None),
    401: ("invalid_request_error", "invalid_api_key", "Incorrect API key provided."),
    403: ("permission_error", "permission_denied", "You are not allowed to do this."),
    404: ("invalid_request_error", "model_not_found", "The model does not exist or you do not have access to it."),
    429: ("requests", "rate_limit_exceeded", "Rate limit reached for requests. Please try again later."),
    500: ("server_error", "server_error", "The simulated server had an error."),
    503: ("server_error", "overloaded", "The simulated engine is currently overloaded. Please try again later."),
    529: ("overloaded_error", "overloaded", "Overloaded."),
}
_MESSAGES = {
    "insufficient_quota": "You exceeded your current quota, please check your plan and billing details.",
    "request_too_large": "Request too large for this model on tokens per min (TPM): Limit 30000, Requested 61342.",
    "context_length_exceeded": "This model's maximum context length is 8192 tokens. Please reduce the messages.",
}


def _error_body(param: str | None, message: str, kind: str, code: str | None) -> bytes:
    return msgspec.json.encode({"error": {"message": message, "type": kind, "param": param, "code": code}})


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
    head = _head(200, content_type, None, ["content-encoding: gzip"])
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
    """One HTTP chunk. The open place counts with the size that it will have."""
    return b"%x\r\n%b\r\n" % (len(data) + (_IDENTITY_SIZE - 1) * data.count(OPEN), data)


def _json(value: str | None) -> str:
    return msgspec.json.encode(value).decode()
