"""OpenAI's Chat Completions, as the simulated provider speaks it."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from adapters.simulator.content import Answer, Choice, Piece, taking_turns
from adapters.simulator.dialect import (
    AS_ASKED,
    NUMBER,
    TIME,
    Asked,
    Frame,
    event,
    text_of,
)
from adapters.simulator.dialects import openai
from adapters.simulator.faults import Faults
from adapters.simulator.ledger import Ended
from adapters.simulator.requests import parse

_IDENTITY = b'"id":"chatcmpl-' + NUMBER + b'","created":' + TIME
_END = Frame(b"data: [DONE]\n\n", proof=True)


class ChatCompletions:
    """The protocol; a `Dialect`."""

    request_id_header = "x-request-id"
    statuses = AS_ASKED

    def check(self, faults: Faults) -> None:
        """It can show them all."""

    def parse(self, path: str, query: str, body: bytes) -> Asked:  # noqa: ARG002 - the same of every dialect
        request, fields = parse(body)
        return Asked(
            request=request,
            fields=fields,
            stream=bool(request.stream),
            include_usage=bool(request.stream_options and request.stream_options.include_usage),
        )

    def models(self, names: Sequence[str]) -> bytes:
        return openai.models(names)

    def whole(self, answer: Answer, faults: Faults) -> tuple[bytes, Ended]:
        finish = _Finish.of(faults)
        body: dict[str, Any] = {
            "object": "chat.completion",
            "model": answer.model,
            "choices": [_choice(choice, index, faults, finish) for index, choice in enumerate(answer.choices)],
        }
        if faults.usage != "none" and not finish.masked:
            body["usage"] = _usage(answer)
        data = b"{" + _IDENTITY + b"," + text_of(body)[1:-1] + b"," + _served(answer) + b"}"
        return data, finish.ended if faults.terminal != "no_done" else Ended.COMPLETE

    def writer(self, answer: Answer, faults: Faults, asked: Asked) -> _Stream:
        return _Stream(answer, faults, include_usage=asked.include_usage)

    def error(self, status: int, message: str, *, param: str | None, code: str | None, faults: Faults) -> bytes:
        return openai.error_body(status, message, param=param, code=code, faults=faults)

    def left_headers(self, faults: Faults, *, limited: bool) -> Iterable[str]:
        return openai.left_headers(faults, limited=limited)


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
        tail = b',"object":"chat.completion.chunk","model":%b,%b,"choices":[' % (
            text_of(answer.model),
            _served(answer),
        )
        self._before = b"data: {" + _IDENTITY + tail
        self._told = 0

    def _event(self, choices: bytes, usage: bytes | None = None) -> bytes:
        if usage is None and self._usage == "each":
            usage = text_of(_usage(self._answer, completion=self._told))
        elif usage is None and self._asked:
            usage = b"null"
        return b"".join((self._before, choices, b"]" if usage is None else b'],"usage":' + usage, b"}\n\n"))

    def _delta(self, index: int, delta: bytes, finish: str | None = None, extra: bytes = b"") -> bytes:
        return b'{"index":%d,"delta":%b,"logprobs":null,"finish_reason":%b%b}' % (
            index,
            delta,
            text_of(finish),
            extra,
        )

    def opening(self) -> list[Frame]:
        frames = []
        for index, choice in enumerate(self._answer.choices):
            content = b"null" if choice.runs and choice.runs[0].kind == "call" else b'""'
            early = text_of(_usage(self._answer)) if self._usage == "early" and index == 0 else None
            delta = b'{"role":"assistant","content":%b,"refusal":null}' % content
            frames.append(Frame(self._event(self._delta(index, delta), early)))
        return frames

    def pieces(self) -> list[Frame]:
        frames: list[Frame] = []
        for index, piece, tokens in taking_turns(self._answer, whole_arguments=self._faults.whole_arguments):
            self._told += tokens
            frames.append(Frame(self._piece(index, piece), tokens, piece=True))
        return frames

    def _piece(self, index: int, piece: Piece) -> bytes:
        if piece.kind == "text" and self._usage != "each":
            return _text_event(self._before, index, piece.text, self._asked)
        return self._event(self._delta(index, _delta(piece)))

    def error(self) -> list[Frame]:
        body = text_of(
            {
                "error": {
                    "message": "The simulated server had an error while answering.",
                    "type": "server_error",
                    "param": None,
                    "code": "server_error",
                }
            }
        )
        frames = [Frame(event(body, "error" if self._faults.error_in_stream == "event" else None))]
        return [*frames, _END] if self._faults.error_done else frames

    def closing(self) -> tuple[list[Frame], Ended]:
        faults, finish = self._faults, self._finish
        ended = finish.ended
        if faults.terminal == "none":
            return [], ended
        usage = text_of(_usage(self._answer))
        frames: list[Frame] = []
        if faults.terminal != "no_finish":
            extra = b',"native_finish_reason":"network_error"' if finish.masked else b""
            for _ in range(2 if faults.terminal == "two" else 1):
                for index, choice in enumerate(self._answer.choices):
                    here = usage if self._usage == "on_finish" and index == len(self._answer.choices) - 1 else None
                    reason = finish.reason(choice, faults)
                    frames.append(Frame(self._event(self._delta(index, b"{}", reason, extra), here)))
        total = Frame(self._event(b"", usage))
        done = [] if faults.terminal == "no_done" else [_END]
        if finish.masked or self._usage in {"none", "early", "on_finish", "each"}:
            return [*frames, *done], ended
        if self._usage == "late":
            return [*frames, *done, total], ended
        if self._usage == "twice":
            return [*frames, total, total, *done], ended
        if self._usage == "zeros_after":
            zeros = text_of({"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0})
            return [*frames, total, Frame(self._event(b"", zeros)), *done], ended
        return [*frames, total, *done], ended


@functools.lru_cache(maxsize=16_384)
def _text_event(before: bytes, index: int, text: str, usage_null: bool) -> bytes:
    """The commonest event. The same few hundred words make up most answers."""
    after = b'],"usage":null}\n\n' if usage_null else b"]}\n\n"
    return b'%b{"index":%d,"delta":{"content":%b},"logprobs":null,"finish_reason":null}%b' % (
        before,
        index,
        text_of(text),
        after,
    )


def _delta(piece: Piece) -> bytes:
    text = text_of(piece.text)
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
                text_of(piece.call_id),
                text,
            )
        case "arguments":
            return b'{"tool_calls":[{"index":%d,"function":{"arguments":%b}}]}' % (piece.call, text)


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


def _served(answer: Answer) -> bytes:
    return b'"service_tier":%b,"system_fingerprint":"fp_simulated"' % text_of(answer.service_tier or "default")


def _usage(answer: Answer, *, completion: int | None = None) -> dict[str, Any]:
    output = answer.completion_tokens if completion is None else completion
    told: dict[str, Any] = {
        "prompt_tokens": answer.prompt_tokens,
        "completion_tokens": output,
        "total_tokens": answer.prompt_tokens + output,
        "prompt_tokens_details": {
            "cached_tokens": answer.cached_tokens,
            **({"image_tokens": answer.image_tokens} if answer.image_tokens else {}),
            **({"audio_tokens": answer.audio_tokens} if answer.audio_tokens else {}),
        },
        "completion_tokens_details": {
            "reasoning_tokens": min(answer.reasoning_tokens, output),
            **({"audio_tokens": min(answer.audio_out_tokens, output)} if answer.audio_out_tokens else {}),
        },
    }
    if answer.searches:
        told["num_search_queries"] = answer.searches
    return told
