"""
Answers and errors as a caller of Workers AI's native API is told them, whole and streamed.

One choice is told in the native shape, others in that of chat completions, which this API has for newer models.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from adapters.chat import (
    ChatResponse,
    Choice,
    ChoiceEnd,
    Event,
    Finished,
    ReasoningDelta,
    RefusalDelta,
    TextDelta,
    ToolCall,
    ToolCallDelta,
    ToolCallStart,
    UsageReport,
)
from adapters.contract import AnswerHead, Batch, ToldError
from adapters.protocols.workers_ai.answers import NAME, finish_reason
from metering.usage import NOTHING, Usage

#: Cloudflare's number for an HTTP status; what has none has the number of an unknown error.
_NUMBERS = {400: 3003, 401: 10000, 403: 3023, 404: 3042, 408: 3007, 413: 3006, 422: 5004, 429: 3040, 504: 3007}
_UNKNOWN = 1000

_encode = msgspec.json.Encoder().encode
_object = msgspec.json.Decoder(dict[str, msgspec.Raw])


class ChunkRenderer:
    """One stream for a caller; a `StreamRenderer`."""

    def __init__(self, head: AnswerHead) -> None:
        self._head = head
        self._usage = NOTHING
        #: Nothing was told yet; the first chunk names the answer.
        self._fresh = True

    def feed(self, batch: Batch) -> bytes:
        return b"".join(self._told(event) for event in batch)

    def fail(self, error: ToldError) -> bytes:
        return b"data: " + render_error(error) + b"\n\n"

    def _told(self, event: Event) -> bytes:
        match event:
            case TextDelta() | RefusalDelta():
                return self._piece(event.choice, {"response": event.text}, {"content": event.text})
            case ReasoningDelta():
                if not event.text:
                    return b""
                thought = {"reasoning_content": event.text}
                return self._piece(event.choice, thought, thought)
            case ToolCallStart():
                function = {"name": event.name, "arguments": ""}
                call = {"index": event.index, "id": event.id, "type": "function", "function": function}
                return self._piece(event.choice, {"tool_calls": [call]}, {"tool_calls": [call]})
            case ToolCallDelta():
                call = {"index": event.index, "function": {"arguments": event.arguments}}
                return self._piece(event.choice, {"tool_calls": [call]}, {"tool_calls": [call]})
            case UsageReport():
                self._usage = self._usage.merge(event.usage)
                return b""
            case Finished():
                chunks = [self._end(end) for end in event.ends]
                return b"".join(chunks) + b"data: [DONE]\n\n"
            case _:
                # Pictures and log probabilities have no place here.
                return b""

    def _piece(self, choice: int, native: dict[str, Any], delta: dict[str, Any]) -> bytes:
        return self._event(native if choice == 0 else {"choices": [{"index": choice, "delta": delta}]})

    def _end(self, end: ChoiceEnd) -> bytes:
        reason = finish_reason(end.stop_reason)
        if end.choice:
            return self._event({"choices": [{"index": end.choice, "delta": {}, "finish_reason": reason}]})
        usage = {"usage": render_usage(self._usage)} if self._usage != NOTHING else {}
        return self._event({"response": "", "finish_reason": reason, **usage})

    def _event(self, content: dict[str, Any]) -> bytes:
        if self._fresh:
            self._fresh = False
            content = {"id": self._head.id, "model": self._head.model, **content}
        return b"data: " + _encode(content) + b"\n\n"


def render_answer(response: ChatResponse) -> bytes:
    """A whole answer in its envelope; the provider's own, untouched, where it spoke this protocol."""
    if response.native is not None and response.native_protocol == NAME:
        return bytes(response.native)
    result: dict[str, Any] = {}
    if len(response.choices) == 1 and response.choices[0].index == 0:
        (choice,) = response.choices
        result["response"] = choice.text + choice.refusal
        if choice.tool_calls:
            result["tool_calls"] = [_call(call) for call in choice.tool_calls]
        if thought := "".join(block.text for block in choice.reasoning):
            result["reasoning_content"] = thought
        result["finish_reason"] = finish_reason(choice.stop_reason)
    else:
        result["choices"] = [_choice(choice) for choice in response.choices]
    if response.usage != NOTHING:
        result["usage"] = render_usage(response.usage)
    named = {"id": response.response_id, "model": response.served_model}
    result |= {name: value for name, value in named.items() if value is not None}
    return _encode({"result": result, "success": True, "errors": [], "messages": []})


def _call(call: ToolCall) -> dict[str, Any]:
    """With its arguments as an object, byte for byte; as text where they are none."""
    arguments: Any = call.arguments
    try:
        _object.decode(arguments or "{}")
        arguments = msgspec.Raw((arguments.strip() or "{}").encode())
    except (msgspec.DecodeError, RecursionError):
        pass
    return {"id": call.id, "name": call.name, "arguments": arguments}


def _choice(choice: Choice) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": choice.text}
    if choice.refusal:
        message["refusal"] = choice.refusal
    if thought := "".join(block.text for block in choice.reasoning):
        message["reasoning_content"] = thought
    if choice.tool_calls:
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in choice.tool_calls
        ]
    return {"index": choice.index, "message": message, "finish_reason": finish_reason(choice.stop_reason)}


def render_usage(usage: Usage) -> dict[str, Any]:
    """Figures that are not known are left out, not told as zero."""
    known = dict(_figures(usage))
    if usage.input_total is not None and usage.output_total is not None:
        known["total_tokens"] = usage.input_total + usage.output_total
    return known


def _figures(usage: Usage) -> Iterator[tuple[str, Any]]:
    if usage.input_total is not None:
        yield "prompt_tokens", usage.input_total
    if usage.output_total is not None:
        yield "completion_tokens", usage.output_total
    if usage.cache_read is not None:
        yield "prompt_tokens_details", {"cached_tokens": usage.cache_read}
    if usage.reasoning is not None:
        yield "completion_tokens_details", {"reasoning_tokens": usage.reasoning}


def render_error(error: ToldError) -> bytes:
    """Cloudflare's envelope, with a number of theirs and our own code beside it."""
    told: dict[str, Any] = {
        "code": _NUMBERS.get(error.status, _UNKNOWN),
        "message": error.message,
        "type": error.code,
    }
    if error.param is not None:
        told["source"] = {"pointer": error.param}
    if error.request_id is not None:
        told["request_id"] = error.request_id
    return _encode({"result": None, "success": False, "errors": [told], "messages": []})
