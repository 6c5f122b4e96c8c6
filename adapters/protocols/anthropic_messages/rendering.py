"""Events to a stream of the Messages API, for a caller."""

from __future__ import annotations

from typing import Any

import msgspec

from adapters import signatures
from adapters.chat import (
    Event,
    Finished,
    ReasoningDelta,
    RefusalDelta,
    TextDelta,
    ToolCallDelta,
    ToolCallStart,
    UsageReport,
)
from adapters.contract import AnswerHead, Batch, ToldError
from adapters.protocols.anthropic_messages import answers, failures
from metering.usage import NOTHING

_encode = msgspec.json.Encoder().encode


class MessageRenderer:
    """
    One stream; a `StreamRenderer`.

    Text and thoughts are one block after the other. The blocks of tool calls stay open to the end, since another
    protocol may give the arguments of several calls by turns and says of none that it is over.
    """

    __slots__ = (
        "_blocks",
        "_calls",
        "_head",
        "_open",
        "_over",
        "_refusal",
        "_signed",
        "_started",
        "_thought",
        "_usage",
    )

    def __init__(self, head: AnswerHead) -> None:
        self._head = head
        self._usage = NOTHING
        self._started = False
        self._over = False
        #: How many blocks there are; the index of the next one.
        self._blocks = 0
        #: The block of text or thought that is open: its kind and its index.
        self._open: tuple[str, int] | None = None
        #: Which thought that is, in the events' own count.
        self._thought: int | None = None
        self._signed = False
        #: The events' index of a call to the index of its block.
        self._calls: dict[int, int] = {}
        self._refusal: list[str] = []

    def feed(self, batch: Batch) -> bytes:
        out: list[bytes] = []
        for event in batch:
            if isinstance(event, UsageReport):
                self._usage = self._usage.merge(event.usage)
            elif not self._over:
                self._take(event, out)
        return b"".join(out)

    def fail(self, error: ToldError) -> bytes:
        self._over = True
        return b"event: error\ndata: %b\n\n" % failures.render_error(error)

    def _take(self, event: Event, out: list[bytes]) -> None:
        self._start(out)
        match event:
            case TextDelta(text=text, choice=0):
                self._write("text", {"type": "text", "text": ""}, {"type": "text_delta", "text": text}, out)
            case ReasoningDelta(choice=0):
                self._think(event, out)
            case ToolCallStart(choice=0):
                self._close(out)
                if event.signature is not None:
                    signed = answers.call_signature(event.index, event.signature)
                    _told("content_block_stop", {"index": self._begin(signed, out)}, out)
                block = {"type": "tool_use", "id": event.id, "name": event.name, "input": {}}
                self._calls[event.index] = self._begin(block, out)
            case ToolCallDelta(choice=0):
                delta = {"type": "input_json_delta", "partial_json": event.arguments}
                self._delta(self._calls[event.index], delta, out)
            case RefusalDelta(choice=0):
                self._refusal.append(event.text)
            case Finished():
                self._end(event, out)
            case _:
                pass  # a picture or figures of probability: this API has no place for them

    def _start(self, out: list[bytes]) -> None:
        if self._started:
            return
        self._started = True
        message: dict[str, Any] = {
            "id": self._head.id,
            "type": "message",
            "role": "assistant",
            "model": self._head.model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "stop_details": None,
            "usage": answers.render_usage(self._usage),
        }
        _told("message_start", {"message": message}, out)

    def _think(self, event: ReasoningDelta, out: list[bytes]) -> None:
        if event.redacted:
            self._close(out)
            block = {"type": "redacted_thinking", "data": signatures.told(answers.NAME, event.signature) or ""}
            _told("content_block_stop", {"index": self._begin(block, out)}, out)
            return
        if self._open is not None and self._thought != event.block:
            self._close(out)
        empty = {"type": "thinking", "thinking": "", "signature": ""}
        if self._open is None or self._open[0] != "thinking":
            self._signed = False
        if event.text or event.signature is None:
            self._write("thinking", empty, {"type": "thinking_delta", "thinking": event.text}, out)
        signature = signatures.told(answers.NAME, event.signature)
        if signature is not None:
            self._write("thinking", empty, {"type": "signature_delta", "signature": signature}, out)
            self._signed = True
        self._thought = event.block

    def _write(self, kind: str, empty: dict[str, Any], delta: dict[str, Any], out: list[bytes]) -> None:
        """Goes on with the open block of this kind, or opens one."""
        if self._open is None or self._open[0] != kind:
            self._close(out)
            self._open = (kind, self._begin(empty, out))
        self._delta(self._open[1], delta, out)

    def _begin(self, block: dict[str, Any], out: list[bytes]) -> int:
        index = self._blocks
        self._blocks += 1
        _told("content_block_start", {"index": index, "content_block": block}, out)
        return index

    @staticmethod
    def _delta(index: int, delta: dict[str, Any], out: list[bytes]) -> None:
        _told("content_block_delta", {"index": index, "delta": delta}, out)

    def _close(self, out: list[bytes]) -> None:
        if self._open is not None:
            if self._open[0] == "thinking" and not self._signed:
                self._delta(self._open[1], {"type": "signature_delta", "signature": signatures.NONE}, out)
            _told("content_block_stop", {"index": self._open[1]}, out)
            self._open = None
            self._thought = None

    def _end(self, event: Finished, out: list[bytes]) -> None:
        self._close(out)
        for index in self._calls.values():
            _told("content_block_stop", {"index": index}, out)
        # A provider may have numbered its only choice otherwise.
        end = next((end for end in event.ends if end.choice == 0), event.ends[0])
        told = answers.told_end(end.stop_reason, end.native_stop_reason, "".join(self._refusal))
        _told("message_delta", {"delta": told, "usage": answers.render_usage(self._usage)}, out)
        _told("message_stop", {}, out)
        self._over = True


def _told(kind: str, fields: dict[str, Any], out: list[bytes]) -> None:
    out.append(b"event: %b\ndata: %b\n\n" % (kind.encode(), _encode({"type": kind, **fields})))
