"""
Events to the chunks of a caller's stream, as OpenAI sends them.

The role comes first, in a chunk of its own for each choice, then deltas, the finish reasons, the usage where it was
asked for, and `[DONE]`. What OpenAI has no field for takes the one most clients know: `reasoning_content`,
OpenRouter's `reasoning_details`, `images` and `usage.cost`, and Gemini's `extra_content` on a tool call.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec

from adapters import openai_errors
from adapters.chat import (
    Finished,
    ImageOutput,
    LogprobsDelta,
    ReasoningDelta,
    RefusalDelta,
    TextDelta,
    ToolCallDelta,
    ToolCallStart,
    UsageReport,
)
from adapters.contract import AnswerHead, Batch, ToldError
from adapters.protocols.chat_completions import answers
from metering.usage import NOTHING

_encode = msgspec.json.Encoder().encode
_NUMBER = re.compile(r"\d{1,12}(\.\d{1,18})?", re.ASCII)


def render_error(error: ToldError) -> bytes:
    """OpenAI's envelope, with our stable code in it."""
    return _encode({"error": openai_errors.told(error)})


class ChunkRenderer:
    """One stream; a `StreamRenderer`."""

    def __init__(self, head: AnswerHead) -> None:
        told = {"id": head.id, "object": "chat.completion.chunk", "created": head.created, "model": head.model}
        #: Every chunk but its choices and usage.
        self._start = b"data: " + _encode(told)[:-1] + b',"choices":['
        self._end = b'],"usage":null}\n\n' if head.include_usage else b"]}\n\n"
        self._include_usage = head.include_usage
        self._usage = NOTHING
        self._cost: str | None = None
        #: How many images each choice has had; a choice is here once its role was told.
        self._images: dict[int, int] = {}

    def feed(self, batch: Batch) -> bytes:
        out: list[bytes] = []
        #: Text that waits for what may join it, and its choice.
        text: list[str] = []
        at = 0
        logprobs: list[dict[str, Any]] = []
        for event in batch:
            if isinstance(event, TextDelta | LogprobsDelta):
                if event.choice != at:
                    self._said(at, text, logprobs, out)
                    at = event.choice
                if isinstance(event, TextDelta):
                    text.append(event.text)
                else:
                    logprobs += map(answers.render_logprob, event.tokens)
                continue
            self._said(at, text, logprobs, out)
            match event:
                case UsageReport():
                    self._usage = self._usage.merge(event.usage)
                    self._cost = event.reported_cost_usd or self._cost
                case Finished():
                    self._finish(event, out)
                case RefusalDelta():
                    self._delta(event.choice, {"refusal": event.text}, out)
                case ReasoningDelta():
                    self._delta(event.choice, _reasoning(event), out)
                case ImageOutput():
                    number = self._images.get(event.choice, 0)
                    self._delta(event.choice, {"images": [answers.render_image(event.image, number)]}, out)
                    self._images[event.choice] = number + 1
                case ToolCallStart():
                    call = answers.render_call(event.id, event.name, "", event.signature)
                    self._delta(event.choice, {"tool_calls": [{"index": event.index, **call}]}, out)
                case ToolCallDelta():
                    piece = {"index": event.index, "function": {"arguments": event.arguments}}
                    self._delta(event.choice, {"tool_calls": [piece]}, out)
        self._said(at, text, logprobs, out)
        return b"".join(out)

    def fail(self, error: ToldError) -> bytes:
        return b"data: " + render_error(error) + b"\n\n"

    def _said(self, choice: int, text: list[str], logprobs: list[dict[str, Any]], out: list[bytes]) -> None:
        if text or logprobs:
            self._delta(choice, {"content": "".join(text)}, out, logprobs=logprobs)
            text.clear()
            logprobs.clear()

    def _delta(
        self, choice: int, delta: dict[str, Any], out: list[bytes], *, logprobs: list[dict[str, Any]] | None = None
    ) -> None:
        self._introduce(choice, out)
        told = {"content": logprobs, "refusal": None} if logprobs else None
        self._chunk({"index": choice, "delta": delta, "logprobs": told, "finish_reason": None}, out)

    def _introduce(self, choice: int, out: list[bytes]) -> None:
        if choice not in self._images:
            self._images[choice] = 0
            delta = {"role": "assistant", "content": "", "refusal": None}
            self._chunk({"index": choice, "delta": delta, "logprobs": None, "finish_reason": None}, out)

    def _chunk(self, choice: dict[str, Any], out: list[bytes]) -> None:
        out += (self._start, _encode(choice), self._end)

    def _finish(self, event: Finished, out: list[bytes]) -> None:
        for end in event.ends:
            self._introduce(end.choice, out)
            reason = answers.finish_reason(end.stop_reason)
            self._chunk({"index": end.choice, "delta": {}, "logprobs": None, "finish_reason": reason}, out)
        usage = answers.render_usage(self._usage) if self._include_usage else None
        if usage is not None:
            if self._cost is not None and _NUMBER.fullmatch(self._cost):
                # As it is, digit by digit: money is no float here.
                usage = {**usage, "cost": msgspec.Raw(self._cost.encode())}
            out += (self._start, b'],"usage":', _encode(usage), b"}\n\n")
        out.append(b"data: [DONE]\n\n")


def _reasoning(event: ReasoningDelta) -> dict[str, Any]:
    """The text where every client looks for it; blocks and signatures in the form in which they go back."""
    delta: dict[str, Any] = {"reasoning_content": event.text} if event.text else {}
    if event.block or event.signature is not None or event.redacted or event.id is not None:
        detail = answers.render_detail(
            event.text, event.signature, redacted=event.redacted, block_id=event.id, block=event.block
        )
        delta["reasoning_details"] = [detail]
    return delta
