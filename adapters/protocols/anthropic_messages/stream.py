"""
A stream of the Messages API to events, with proof of its end.

An answer is complete when a `message_delta` gave its stop reason, every block that was opened was stopped, and then
`message_stop` came. A limit cuts the block it falls into, which was recorded to have no stop then: complete as well. An
`error` event may take the place of any of these, of the very first event too, under HTTP 200.
https://platform.claude.com/docs/en/build-with-claude/streaming
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec
from typing_extensions import override

from adapters import signatures
from adapters.alike import Piece
from adapters.body import ABSENT, given
from adapters.chat import (
    ChoiceEnd,
    Event,
    ReasoningDelta,
    RefusalDelta,
    StopReason,
    TextDelta,
    ToolCallDelta,
    ToolCallStart,
)
from adapters.errors import Broken
from adapters.figures import cost_usd, later_cost
from adapters.protocols.anthropic_messages import answers, failures
from adapters.protocols.anthropic_messages.schema import (
    BareEventOut,
    BlockOut,
    DeltaOut,
    EventOut,
    StopDetails,
    TextEvent,
    UsageOut,
)
from adapters.sse import ServerSentEvent
from adapters.streams import ProvenStream

_event = msgspec.json.Decoder(EventOut)
_bare_event = msgspec.json.Decoder(BareEventOut)
_text_event = msgspec.json.Decoder(TextEvent)

#: Events without which an answer is not what it was; of any other name nothing needs to be known.
_NEEDED = frozenset(
    {
        "message_start",
        "content_block_start",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
        "error",
    }
)
#: Blocks open at a time; a stream was never seen to have more than one.
_MOST_OPEN = 256
_KNOWN_DELTAS = frozenset({"text_delta", "input_json_delta", "thinking_delta", "signature_delta"})


class _Block:
    """A content block that was opened and not yet stopped."""

    __slots__ = ("given", "is_text", "kind", "number", "said", "signature")

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.is_text = kind == "text"
        #: Which of its kind it is, counted from 0; None until something of it was told.
        self.number: int | None = None
        #: Some of it came in a delta.
        self.said = False
        self.signature: str | None = None
        #: Arguments that came with the start.
        self.given = "{}"


class MessageStream(ProvenStream):
    """One stream; a `StreamParser`."""

    def __init__(self, headers: Mapping[str, str]) -> None:
        super().__init__(headers)
        self._open: dict[int, _Block] = {}
        #: The block of text that goes on, by its index; -1 where the last event was none of its text.
        self._saying = -1
        self._calls = 0
        self._thoughts = 0
        #: Signatures of calls that are still to come, by their number.
        self._signed: dict[int, str] = {}
        self._omitted = answers.Omitted()
        self._tally = answers.Tally()
        self._stop: str | None = None
        self._refused = False

    # -------------------------------------------------------------- events

    @override
    def _take(self, received: Iterable[ServerSentEvent], events: list[Event]) -> None:
        texts: list[str] = []
        for name, data in received:
            if self._saying >= 0:
                try:
                    piece = _text_event.decode(data)
                except (msgspec.DecodeError, RecursionError):
                    self._saying = -1
                else:
                    if piece.index == self._saying:
                        self._payloads += 1
                        texts.append(piece.delta.text)
                        continue
                self._say(texts, 0, events)
                # What is like it means it only while this block goes on.
                self._alike = None
            try:
                wire = _event.decode(data)
            except (msgspec.DecodeError, RecursionError) as error:
                if (bare := self._bare(name, data, error)) is None:
                    if self._failure is not None:
                        return
                    continue
                wire = bare
            delta = wire.delta
            if delta is None or wire.type != "content_block_delta":
                self._take_one(wire.type or name, data, wire, events)
            else:
                self._payloads += 1
                if self._finished:
                    continue
                block = self._open.get(wire.index)
                if block is not None and block.is_text and delta.text and delta.type == "text_delta":
                    # So is nearly every event that follows.
                    self._saying = wire.index
                    block.said = True
                    events.append(TextDelta(delta.text))
                    continue
                self._take_delta(block, delta, events)
            if self._failure is not None:
                return
        self._say(texts, 0, events)

    @override
    def _piece(self, data: bytes) -> Piece | None:
        try:
            piece = _text_event.decode(data)
        except (msgspec.DecodeError, RecursionError):
            return None
        return Piece(piece.delta.text) if piece.index == self._saying else None

    def _bare(self, name: str, data: bytes, error: Exception) -> EventOut | None:
        """What is left of an event that is not as documented, where the answer can do without the rest."""
        try:
            bare = _bare_event.decode(data)
        except (msgspec.DecodeError, RecursionError):
            if name == "error":
                self._fail(failures.from_text(data, headers=self._headers), error)
            elif name in _NEEDED or (not name and data.strip()):
                self._fail(Broken("an event of the stream is not as documented", code="malformed"), error)
            return None
        kind = bare.type or name
        block, delta = bare.content_block, bare.delta
        if kind == "content_block_start" and block is not None and block.type not in answers.KNOWN_BLOCKS:
            return EventOut(type=kind, index=bare.index, content_block=BlockOut(type=block.type))
        if kind == "content_block_delta" and delta is not None and delta.type not in _KNOWN_DELTAS:
            return EventOut(type=kind, index=bare.index, delta=DeltaOut(type=delta.type))
        if kind in _NEEDED and kind != "error":
            self._fail(Broken("an event of the stream is not as documented", code="malformed"), error)
            return None
        return EventOut(type=kind, error=msgspec.Raw(data) if kind == "error" else ABSENT)

    def _take_one(self, kind: str, data: bytes, wire: EventOut, events: list[Event]) -> None:
        if kind != "ping":
            self._payloads += 1
        self._take_figures(answers.read_figures(wire.usage), wire.cost, events)
        if self._finished:
            return
        match kind:
            case "content_block_start":
                if wire.content_block is None:
                    self._fail(Broken("a block of the stream has no content", code="malformed"))
                    return
                try:
                    self._take_start(wire.index, wire.content_block, events)
                except Broken as error:
                    self._fail(error)
            case "content_block_delta":
                if wire.delta is None:
                    self._fail(Broken("a block of the stream goes on with nothing", code="malformed"))
                else:
                    self._take_delta(self._open.get(wire.index), wire.delta, events)
            case "content_block_stop":
                self._take_stop(self._open.pop(wire.index, None), events)
            case "message_start":
                self._take_message(wire.message, events)
            case "message_delta":
                if wire.delta is not None:
                    self._stop = wire.delta.stop_reason or self._stop
                    self._take_details(wire.delta.stop_details, events)
            case "message_stop":
                self._end(events)
            case "error":
                failed = given(wire.error)
                self._fail(failures.from_error(failed if failed is not None else data, headers=self._headers))
            case _:
                pass

    def _take_message(self, raw: msgspec.Raw, events: list[Event]) -> None:
        """
        A proxy was seen to send the start twice: what is known already stays. The output it counts is what there was
        when it was sent, not what the answer has: of a stream that is cut, the output is not known.
        """
        if raw is ABSENT:
            return
        try:
            message = answers.decode_message(raw)
        except Broken as error:
            self._fail(error)
            return
        self._id = self._id or message.id or None
        self._model = self._model or message.model or None
        figures = message.usage
        if figures is not None:
            figures = msgspec.structs.replace(figures, output_tokens=None, output_tokens_details=None)
        self._take_figures(figures, message.cost, events)

    def _take_figures(self, figures: UsageOut | None, cost: msgspec.Raw, events: list[Event]) -> None:
        if figures is None and cost is ABSENT:
            return
        self._tier = answers.tier_of(figures) or self._tier
        usage = self._usage if figures is None else self._usage.merge(self._tally.take(figures))
        self._report(usage, later_cost(self._cost, cost_usd(cost)), events)

    def _take_start(self, index: int, wire: BlockOut, events: list[Event]) -> None:
        known = self._open.get(index)
        if known is not None:
            if known.kind != wire.type or known.said:
                self._fail(Broken("a block of the stream was opened twice", code="malformed"))
            return
        if len(self._open) == _MOST_OPEN:
            self._fail(Broken("the stream has too many blocks open", code="malformed"))
            return
        block = self._open[index] = _Block(wire.type)
        match wire.type:
            case "text":
                if wire.text:
                    events.append(TextDelta(wire.text))
                if wire.citations:
                    self._omitted.add("citations")
            case "thinking":
                if wire.thinking:
                    self._think(block, wire.thinking, events)
                block.signature = wire.signature or None
            case "redacted_thinking" if (of_call := answers.signature_of_call(wire.data)) is not None:
                self._signed[of_call[0]] = of_call[1]
            case "redacted_thinking":
                events.append(
                    ReasoningDelta("", 0, signatures.heard(answers.NAME, wire.data), self._thoughts, redacted=True)
                )
                self._thoughts += 1
            case "tool_use":
                block.number, block.given = self._calls, answers.arguments_of(wire.input)
                self._calls += 1
                call_id = wire.id or answers.made_id(self._id or "", block.number)
                signature = self._signed.pop(block.number, None)
                events.append(ToolCallStart(block.number, call_id, wire.name or "", 0, signature))
            case kind:
                if kind == "fallback" and wire.to is not None:
                    self._model = wire.to.model or self._model
                self._omitted.add(kind)

    def _take_delta(self, block: _Block | None, delta: DeltaOut, events: list[Event]) -> None:
        if block is None:
            self._fail(Broken("the stream goes on with a block that is not open", code="malformed"))
            return
        match delta.type:
            case "text_delta":
                if block.is_text and delta.text:
                    block.said = True
                    events.append(TextDelta(delta.text))
            case "input_json_delta":
                if block.kind == "tool_use" and block.number is not None and delta.partial_json:
                    block.said = True
                    events.append(ToolCallDelta(block.number, delta.partial_json))
            case "thinking_delta":
                if block.kind == "thinking" and delta.thinking:
                    self._think(block, delta.thinking, events)
            case "signature_delta":
                if block.kind == "thinking":
                    block.signature = delta.signature or block.signature
            case "citations_delta":
                self._omitted.add("citations")
            case kind:
                if block.kind in answers.KNOWN_BLOCKS:
                    self._omitted.add(kind or "")

    def _think(self, block: _Block, text: str, events: list[Event]) -> None:
        block.said = True
        events.append(ReasoningDelta(text, 0, None, self._number(block)))

    def _number(self, block: _Block) -> int:
        if block.number is None:
            block.number = self._thoughts
            self._thoughts += 1
        return block.number

    def _take_stop(self, block: _Block | None, events: list[Event]) -> None:
        if block is None:
            return
        if block.kind == "tool_use" and block.number is not None and not block.said:
            events.append(ToolCallDelta(block.number, block.given))
        elif block.kind == "thinking" and block.signature is not None:
            events.append(ReasoningDelta("", 0, signatures.heard(answers.NAME, block.signature), self._number(block)))

    def _take_details(self, details: StopDetails | None, events: list[Event]) -> None:
        if details is not None and details.explanation and not self._refused:
            self._refused = True
            events.append(RefusalDelta(details.explanation))

    # ----------------------------------------------------------------- end

    def _end(self, events: list[Event]) -> None:
        if self._stop is None or (self._open and answers.stop_reason(self._stop) is not StopReason.LENGTH):
            self._fail(Broken("the stream ended before its stop reason and the end of each block", code="no_terminal"))
            return
        end = ChoiceEnd(choice=0, stop_reason=answers.stop_reason(self._stop), native_stop_reason=self._stop)
        self._finish((end,), events, self._omitted.words)

    @override
    def _take_whole(self, body: bytes, events: list[Event]) -> None:
        self._take_answer(answers.parse_answer(self._headers, body), events)
