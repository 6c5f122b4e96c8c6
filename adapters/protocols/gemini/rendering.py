"""
Answers and errors as a caller of Gemini's API is told them, whole and streamed.

A function call is told whole, since this protocol has no pieces of one: in a stream it waits for the end. Arguments
that are no JSON object cannot be told at all; the candidate then ends as Gemini itself says it, with
MALFORMED_FUNCTION_CALL, or with MAX_TOKENS where the limit cut them.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from adapters.chat import (
    ChatResponse,
    ChoiceEnd,
    Event,
    Finished,
    Image,
    ImageOutput,
    LogprobsDelta,
    ReasoningDelta,
    RefusalDelta,
    StopReason,
    TextDelta,
    TokenLogprob,
    ToolCallDelta,
    ToolCallStart,
    UsageReport,
    as_events,
)
from adapters.contract import AnswerHead, Batch, ToldError
from adapters.protocols.gemini import signatures
from adapters.protocols.gemini.answers import NAME, finish_reason
from adapters.protocols.gemini.requests import as_args
from metering.usage import NOTHING, Usage

#: google.rpc.Code by HTTP status.
_WORDS: dict[int, str] = {
    400: "INVALID_ARGUMENT",
    401: "UNAUTHENTICATED",
    402: "RESOURCE_EXHAUSTED",
    403: "PERMISSION_DENIED",
    404: "NOT_FOUND",
    408: "DEADLINE_EXCEEDED",
    409: "ABORTED",
    429: "RESOURCE_EXHAUSTED",
    499: "CANCELLED",
    500: "INTERNAL",
    501: "UNIMPLEMENTED",
    502: "UNAVAILABLE",
    503: "UNAVAILABLE",
    504: "DEADLINE_EXCEEDED",
}

_encode = msgspec.json.Encoder().encode


class _Call:
    __slots__ = ("id", "name", "pieces", "signature")

    def __init__(self, start: ToolCallStart) -> None:
        self.id = start.id
        self.name = start.name
        self.signature = start.signature
        self.pieces: list[str] = []

    def part(self) -> dict[str, Any] | None:
        """None where the arguments are no JSON object."""
        args = as_args("".join(self.pieces))
        if args is None:
            return None
        call = {"id": self.id, "name": self.name, "args": args}
        part: dict[str, Any] = {"functionCall": call if self.id else {"name": self.name, "args": args}}
        if self.signature:
            part["thoughtSignature"] = signatures.told(self.signature)
        return part


class _Candidate:
    """One choice on its way: the parts since the last chunk, and the calls that wait."""

    __slots__ = ("_length", "_waiting", "calls", "logprobs", "parts")

    def __init__(self) -> None:
        self.parts: list[dict[str, Any]] = []
        self.calls: dict[int, _Call] = {}
        self.logprobs: list[TokenLogprob] = []
        #: Characters of text so far, and signatures of text that is still to come: from, to, signature.
        self._length = 0
        self._waiting: list[tuple[int, int, str]] = []

    def text(self, text: str) -> None:
        while self._waiting and self._waiting[0][0] < self._length + len(text):
            start, end, signature = self._waiting[0]
            before = max(start - self._length, 0)
            if before:
                self._append(text[:before])
                text, self._length = text[before:], self._length + before
            if end > self._length + len(text):
                break
            piece, text = text[: end - self._length], text[end - self._length :]
            self.parts.append({"text": piece, "thoughtSignature": signature})
            self._length = end
            del self._waiting[0]
        self._length += len(text)
        if text:
            self._append(text)

    def _append(self, text: str, *, thought: bool = False) -> None:
        last = self.parts[-1] if self.parts else None
        if last is not None and "text" in last and last.get("thought", False) == thought and len(last) == 1 + thought:
            last["text"] += text
        else:
            self.parts.append({"text": text, "thought": True} if thought else {"text": text})

    def think(self, event: ReasoningDelta) -> None:
        if event.text:
            self._append(event.text, thought=True)
            if event.signature:
                self.parts[-1]["thoughtSignature"] = signatures.told(event.signature)
        elif event.signature:
            span = signatures.span_of(event.signature)
            if span is not None and span[1] > self._length:
                self._waiting.append((*span, signatures.told(event.signature)))
            else:
                self._sign(event.signature)

    def _sign(self, marked: str) -> None:
        """On the part it belongs to where that is still here, else on one of its own."""
        last = self.parts[-1] if self.parts else {}
        alone: dict[str, Any] = {"text": ""}
        if signatures.image_of(marked) is not None:
            found = "inlineData" in last
        elif signatures.span_of(marked) is not None:
            found = "text" in last and "thought" not in last
        else:
            # Of the thought that came before it.
            found = "thought" in last
            alone["thought"] = True
        if not found or "thoughtSignature" in last:
            self.parts.append(last := alone)
        last["thoughtSignature"] = signatures.told(marked)

    def image(self, image: Image) -> None:
        if image.data is not None:
            data = base64.b64encode(image.data).decode()
            self.parts.append({"inlineData": {"mimeType": image.media_type or "image/png", "data": data}})
        elif image.url is not None:
            self.parts.append({"fileData": {"fileUri": image.url, "mimeType": image.media_type or "image/png"}})

    def end(self, end: ChoiceEnd) -> dict[str, Any]:
        """The calls, and what the candidate says of its end."""
        said: dict[str, Any] = {}
        self.parts += [{"text": "", "thoughtSignature": signature} for _, _, signature in self._waiting]
        self._waiting.clear()
        reason = finish_reason(end.stop_reason, end.native_stop_reason)
        if end.stop_reason in {StopReason.OTHER, StopReason.PAUSE}:
            said["finishMessage"] = end.native_stop_reason
        for call in self.calls.values():
            part = call.part()
            if part is not None:
                self.parts.append(part)
            elif end.stop_reason is not StopReason.LENGTH:
                reason = "MALFORMED_FUNCTION_CALL"
                said["finishMessage"] = "the arguments of a function call are no JSON object"
        self.calls.clear()
        return {"finishReason": reason, **said}

    def take(self) -> dict[str, Any]:
        """What is to be told now."""
        told: dict[str, Any] = {"content": {"role": "model", "parts": self.parts}} if self.parts else {}
        if self.logprobs:
            told["logprobsResult"] = _render_logprobs(self.logprobs)
        self.parts, self.logprobs = [], []
        return told


class _Answer:
    """Events to candidates."""

    __slots__ = ("candidates", "usage")

    def __init__(self) -> None:
        self.candidates: dict[int, _Candidate] = {}
        self.usage = NOTHING

    def take(self, events: Iterable[Event]) -> tuple[list[dict[str, Any]], Finished | None]:
        """The candidates as they are to be told now, and how the answer ended where it did."""
        finished: Finished | None = None
        for event in events:
            if isinstance(event, UsageReport):
                self.usage = self.usage.merge(event.usage)
            elif isinstance(event, Finished):
                finished = event
            else:
                candidate = self.candidates.get(event.choice)
                if candidate is None:
                    candidate = self.candidates[event.choice] = _Candidate()
                match event:
                    case TextDelta() | RefusalDelta():
                        candidate.text(event.text)
                    case ReasoningDelta():
                        candidate.think(event)
                    case ToolCallStart():
                        candidate.calls[event.index] = _Call(event)
                    case ToolCallDelta():
                        candidate.calls[event.index].pieces.append(event.arguments)
                    case ImageOutput():
                        candidate.image(event.image)
                    case LogprobsDelta():
                        candidate.logprobs += event.tokens
        ends: dict[int, ChoiceEnd] = {end.choice: end for end in finished.ends} if finished else {}
        told = []
        for index in sorted({*self.candidates, *ends}):
            candidate = self.candidates.setdefault(index, _Candidate())
            said = candidate.end(ends[index]) if index in ends else {}
            if said or candidate.parts or candidate.logprobs:
                told.append({**candidate.take(), **said, "index": index})
        return told, finished


class ChunkRenderer:
    """One stream for a caller; a `StreamRenderer`. Every chunk is a whole answer with what is new in it."""

    def __init__(self, head: AnswerHead) -> None:
        self._head = head
        self._answer = _Answer()

    def feed(self, batch: Batch) -> bytes:
        candidates, finished = self._answer.take(batch)
        if not candidates and finished is None:
            return b""
        chunk: dict[str, Any] = {"candidates": candidates}
        if self._answer.usage != NOTHING:
            chunk["usageMetadata"] = render_usage(self._answer.usage)
        chunk["modelVersion"] = self._head.model
        chunk["responseId"] = self._head.id
        return _event(chunk)

    def fail(self, error: ToldError) -> bytes:
        return _event(_error(error))


def render_answer(response: ChatResponse) -> bytes:
    """A whole answer; the provider's own, untouched, where it spoke this protocol."""
    if response.native is not None and response.native_protocol == NAME:
        return bytes(response.native)
    candidates, _ = _Answer().take(as_events(response))
    body: dict[str, Any] = {"candidates": candidates}
    if response.usage != NOTHING:
        body["usageMetadata"] = render_usage(response.usage)
    body["modelVersion"] = response.served_model or ""
    body["responseId"] = response.response_id or ""
    return _encode(body)


def render_usage(usage: Usage) -> dict[str, int]:
    """Figures that are not known are left out, not told as zero. Thoughts are beside the candidates' tokens here."""
    said = usage.output_total
    figures = {
        "promptTokenCount": usage.input_total,
        "candidatesTokenCount": said if said is None else said - (usage.reasoning or 0),
        "cachedContentTokenCount": usage.cache_read,
        "thoughtsTokenCount": usage.reasoning,
        "totalTokenCount": None if usage.input_total is None or said is None else usage.input_total + said,
    }
    return {name: value for name, value in figures.items() if value is not None}


def render_error(error: ToldError) -> bytes:
    """A `google.rpc.Status`. Our code is in its `ErrorInfo`."""
    return _encode(_error(error))


def _error(error: ToldError) -> dict[str, Any]:
    fallback = "INVALID_ARGUMENT" if 400 <= error.status < 500 else "INTERNAL"
    metadata = {"code": error.code, "request_id": error.request_id}
    details: list[dict[str, Any]] = [
        {
            "@type": "type.googleapis.com/google.rpc.ErrorInfo",
            "reason": error.code.upper(),
            "domain": "tollbridge",
            "metadata": {name: value for name, value in metadata.items() if value is not None},
        }
    ]
    if error.param is not None:
        details.append(
            {
                "@type": "type.googleapis.com/google.rpc.BadRequest",
                "fieldViolations": [{"field": error.param, "description": error.message}],
            }
        )
    return {
        "error": {
            "code": error.status,
            "message": error.message,
            "status": _WORDS.get(error.status, fallback),
            "details": details,
        }
    }


def _event(content: dict[str, Any]) -> bytes:
    return b"data: " + _encode(content) + b"\r\n\r\n"


def _render_logprobs(tokens: Sequence[TokenLogprob]) -> dict[str, Any]:
    rendered: dict[str, Any] = {
        "chosenCandidates": [{"token": token.token, "logProbability": token.logprob} for token in tokens]
    }
    if any(token.top for token in tokens):
        rendered["topCandidates"] = [
            {"candidates": [{"token": top.token, "logProbability": top.logprob} for top in token.top]}
            for token in tokens
        ]
    return rendered
