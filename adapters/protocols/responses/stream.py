"""
A stream of Responses to events, with proof of its end.

An answer is complete when `response.completed` or `response.incomplete` came with a response whose status says the
same. `[DONE]`, which some servers send, proves nothing.

An event that says a whole piece is done repeats what its deltas said. It counts only where there were none: then the
text, the arguments or the item are taken from it. The output of the last event counts only where no item was told of
before. Nothing is compared and nothing is put right: what was streamed is the answer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import ClassVar

import msgspec
from typing_extensions import override

from adapters.body import ABSENT, given
from adapters.chat import (
    ChoiceEnd,
    Event,
    ImageOutput,
    LogprobsDelta,
    ReasoningDelta,
    RefusalDelta,
    TextDelta,
    ToolCallDelta,
    ToolCallStart,
)
from adapters.errors import Broken, ProviderError
from adapters.figures import cost_usd, later_cost, service_tier
from adapters.protocols.responses import answers, failures
from adapters.protocols.responses.schema import (
    CallOut,
    EventOut,
    Kind,
    MessageOut,
    Named,
    PartOut,
    PictureOut,
    ReasoningOut,
    ResponseOut,
    TextPiece,
)
from adapters.sse import ServerSentEvent
from adapters.streams import ProvenStream

_SENTINEL = b"[DONE]"
_TEXT = "response.output_text.delta"
#: What keeps a connection open and says nothing.
_IDLE = frozenset({"keepalive", "ping", "response.heartbeat"})
#: Names under which an error may come, beside a name of the protocol.
_UNNAMED = frozenset({"", "message", "error"})

_event = msgspec.json.Decoder(EventOut)
_kind = msgspec.json.Decoder(Kind)
_piece = msgspec.json.Decoder(TextPiece)
_named = msgspec.json.Decoder(Named)
_part = msgspec.json.Decoder(PartOut)

#: What names an item in the events of a stream: its place, or its id where a server gives no place.
_Key = int | str


class _Item:
    """An output item as it comes in."""

    __slots__ = ("block", "call", "done", "id", "part", "parts", "way")

    def __init__(self, item_id: str | None) -> None:
        self.id = item_id
        self.done = False
        #: Of a message: the parts whose content has come.
        self.parts: set[int] = set()
        #: Of reasoning: its number among the blocks; which way its text comes, and the part that came last.
        self.block: int | None = None
        self.way = ""
        self.part = 0
        self.call: _Call | None = None


class _Call:
    """A tool call as it comes in."""

    __slots__ = ("held", "id", "index", "said", "started")

    def __init__(self, call_id: str) -> None:
        #: Counted from 0 in the order in which calls are told.
        self.index = -1
        self.id = call_id
        #: Arguments that came before the name.
        self.held: list[str] = []
        self.said = False
        self.started = False


class ResponseStream(ProvenStream):
    """One stream; a `StreamParser`."""

    def __init__(self, headers: Mapping[str, str]) -> None:
        super().__init__(headers)
        self._items: dict[_Key, _Item] = {}
        #: The item and the part that the last piece of text was of.
        self._saying = self._saying_part = -1
        self._calls: list[_Call] = []
        self._units = answers.Units()
        #: Calls that were told.
        self._started = 0
        self._blocks = 0
        self._refused = False
        self._omitted = answers.Omitted()

    # -------------------------------------------------------------- events

    @override
    def _take(self, received: Iterable[ServerSentEvent], events: list[Event]) -> None:
        texts: list[str] = []
        for name, data in received:
            if name == _TEXT and not self._finished and self._take_text(data, texts, events):
                continue
            self._say(texts, 0, events)
            if data[:1] == b"{" or data.lstrip()[:1] == b"{":
                self._take_one(name, data, events)
            elif data.strip() == _SENTINEL:
                self._payloads += 1
            elif data.strip() and (name in _UNNAMED or name in self._HANDLERS):
                self._payloads += 1
                self._fail(Broken("what came is not JSON", code="malformed"))
            if self._failure is not None:
                return
        self._say(texts, 0, events)

    def _take_text(self, data: bytes, texts: list[str], events: list[Event]) -> bool:
        """What nearly every event is, by the short way. Not what is not quite so: False, and nothing was done."""
        try:
            piece = _piece.decode(data)
        except (msgspec.DecodeError, RecursionError):
            return False
        self._payloads += 1
        if piece.output_index != self._saying or piece.content_index != self._saying_part:
            self._saying, self._saying_part = piece.output_index, piece.content_index
            self._item_at(piece.output_index, None).parts.add(piece.content_index)
        texts.append(piece.delta)
        if piece.logprobs:
            self._say(texts, 0, events)
            events.append(LogprobsDelta(answers.tokens_of(piece.logprobs)))
        return True

    def _take_one(self, name: str, data: bytes, events: list[Event]) -> None:
        try:
            wire = _event.decode(data)
        except (msgspec.DecodeError, RecursionError) as error:
            self._payloads += 1
            self._take_odd(name, data, error)
            return
        kind = wire.type = wire.type or name
        if kind in _IDLE:
            return
        self._payloads += 1
        if wire.usage is not ABSENT or wire.cost is not ABSENT:
            self._take_usage(wire.usage, wire.cost, events)
        if self._finished:
            return
        handler = self._HANDLERS.get(kind)
        try:
            if handler is not None:
                handler(self, wire, events)
            elif kind in _UNNAMED:
                self._take_error(kind, data)
        except ProviderError as failure:
            self._fail(failure)

    def _take_odd(self, name: str, data: bytes, error: Exception) -> None:
        """An event whose fields are not of the usual types: of no concern where its kind is not one that is read."""
        try:
            kind = _kind.decode(data).type or name
        except msgspec.ValidationError:
            kind = name
        except (msgspec.DecodeError, RecursionError):
            self._fail(Broken("what came is not JSON", code="malformed"), error)
            return
        if kind in _UNNAMED:
            self._take_error(kind, data)
        elif kind in self._HANDLERS:
            self._fail(Broken("an event of the stream is not what it says it is", code="malformed"), error)

    def _take_error(self, kind: str, data: bytes) -> None:
        """`type: error` comes with the error inside, and as the error itself; without a type, only inside."""
        content = _decoded(data)
        inner = content.get("error") if isinstance(content, dict) else None
        if inner is not None or kind == "error":
            self._fail(failures.from_error(content if inner is None else inner, headers=self._headers))

    def _take_usage(self, usage: msgspec.Raw, cost: msgspec.Raw, events: list[Event]) -> None:
        reported, reported_cost = answers.read_usage(usage)
        latest = later_cost(later_cost(self._cost, reported_cost), cost_usd(cost))
        self._report(self._usage.merge(reported), latest, events)

    def _item(self, wire: EventOut) -> _Item:
        return self._item_at(wire.output_index if wire.output_index is not None else wire.item_id or "", wire.item_id)

    def _item_at(self, key: _Key, item_id: str | None) -> _Item:
        item = self._items.get(key)
        if item is None:
            item = self._items[key] = _Item(item_id)
        return item

    # ---------------------------------------------------------------- text

    def _text_delta(self, wire: EventOut, events: list[Event]) -> None:
        item = self._item(wire)
        item.parts.add(wire.content_index or 0)
        if wire.delta:
            events.append(TextDelta(wire.delta))
        if wire.logprobs is not ABSENT:
            self._take_logprobs(wire.logprobs, events)

    @staticmethod
    def _take_logprobs(raw: msgspec.Raw, events: list[Event]) -> None:
        tokens = answers.read_logprobs(raw)
        if tokens:
            events.append(LogprobsDelta(tokens))

    def _text_done(self, wire: EventOut, events: list[Event]) -> None:
        part = PartOut(type="output_text", text=wire.text, logprobs=wire.logprobs)
        self._part_content(self._item(wire), wire.content_index or 0, part, events)

    def _refusal_delta(self, wire: EventOut, events: list[Event]) -> None:
        self._item(wire).parts.add(wire.content_index or 0)
        self._refused = True
        if wire.delta:
            events.append(RefusalDelta(wire.delta))

    def _refusal_done(self, wire: EventOut, events: list[Event]) -> None:
        part = PartOut(type="refusal", refusal=wire.refusal)
        self._part_content(self._item(wire), wire.content_index or 0, part, events)

    def _part_done(self, wire: EventOut, events: list[Event]) -> None:
        try:
            part = _part.decode(wire.part)
        except (msgspec.DecodeError, RecursionError):
            return
        if part.type == "reasoning_text":
            self._thought(self._item(wire), "content", wire.content_index or 0, part.text, events, whole=True)
        else:
            self._part_content(self._item(wire), wire.content_index or 0, part, events)

    def _part_content(self, item: _Item, index: int, part: PartOut, events: list[Event]) -> None:
        """A part that is done: its content where no delta brought it, and what is never streamed."""
        if part.annotations:
            self._omitted.add("citations")
        if part.type == "refusal":
            self._refused = True
            if index not in item.parts and part.refusal:
                events.append(RefusalDelta(part.refusal))
        elif part.text is None:
            self._omitted.add(part.type or "unknown")
        elif index not in item.parts:
            if part.text:
                events.append(TextDelta(part.text))
            self._take_logprobs(part.logprobs, events)
        if part.text or part.refusal:
            item.parts.add(index)

    # ----------------------------------------------------------- reasoning

    def _summary_delta(self, wire: EventOut, events: list[Event]) -> None:
        self._thought(self._item(wire), "summary", wire.summary_index or 0, wire.delta, events)

    def _summary_done(self, wire: EventOut, events: list[Event]) -> None:
        self._thought(self._item(wire), "summary", wire.summary_index or 0, wire.text, events, whole=True)

    def _reasoning_delta(self, wire: EventOut, events: list[Event]) -> None:
        self._thought(self._item(wire), "content", wire.content_index or 0, wire.delta, events)

    def _reasoning_done(self, wire: EventOut, events: list[Event]) -> None:
        self._thought(self._item(wire), "content", wire.content_index or 0, wire.text, events, whole=True)

    def _thought(
        self, item: _Item, way: str, index: int, text: str | None, events: list[Event], *, whole: bool = False
    ) -> None:
        """
        A piece of reasoning, or a `whole` part of it that is done. Where a server tells both the reasoning and a
        summary of it, the one that comes first is taken.
        """
        if not text or item.done:
            return
        if item.way and item.way != way:
            self._omitted.add("reasoning_summary" if way == "summary" else "reasoning_text")
            return
        if whole and item.way and index <= item.part:
            return
        if item.way and index != item.part:
            text = answers.PARTS_APART + text
        item.way, item.part = way, index
        events.append(ReasoningDelta(text, 0, None, self._block_of(item), id=item.id))

    def _block_of(self, item: _Item) -> int:
        if item.block is None:
            item.block = self._blocks
            self._blocks += 1
        return item.block

    # --------------------------------------------------------------- calls

    def _arguments_delta(self, wire: EventOut, events: list[Event]) -> None:
        if wire.delta:
            self._arguments(self._call_of(self._item(wire), None), wire.delta, events)

    def _arguments_done(self, wire: EventOut, events: list[Event]) -> None:
        call = self._call_of(self._item(wire), None)
        if wire.name:
            self._start(call, wire.name, None, events)
        if wire.arguments and not call.said:
            self._arguments(call, wire.arguments, events)

    @staticmethod
    def _arguments(call: _Call, piece: str, events: list[Event]) -> None:
        call.said = True
        if call.started:
            events.append(ToolCallDelta(call.index, piece))
        else:
            call.held.append(piece)

    def _call_of(self, item: _Item, call_id: str | None) -> _Call:
        call = item.call
        if call is None:
            number = len(self._calls)
            call = item.call = _Call(call_id or item.id or answers.made_id(self._made_seed(), number))
            self._calls.append(call)
        elif call_id and not call.started:
            call.id = call_id
        return call

    def _start(self, call: _Call, name: str, signature: str | None, events: list[Event]) -> None:
        if call.started:
            return
        call.started, call.index = True, self._started
        self._started += 1
        events.append(ToolCallStart(call.index, call.id, name, 0, signature))
        events.extend(ToolCallDelta(call.index, piece) for piece in call.held)
        call.held.clear()

    # --------------------------------------------------------------- items

    def _item_added(self, wire: EventOut, events: list[Event]) -> None:
        if given(wire.item) is None:
            return
        kind, content = answers.read_item(wire.item)
        item = self._item(wire)
        item.id = item.id or _id_of(wire.item)
        if isinstance(content, CallOut):
            call = self._call_of(item, content.call_id)
            if content.name:
                self._start(call, content.name, content.signature, events)
        elif content is None:
            self._omitted.add(kind or "unknown")

    def _item_done(self, wire: EventOut, events: list[Event]) -> None:
        item = self._item(wire)
        if not item.done and given(wire.item) is not None:
            item.id = item.id or _id_of(wire.item)
            self._take_item(item, wire.item, events)
            item.done = True

    def _take_item(self, item: _Item, raw: msgspec.Raw, events: list[Event]) -> None:
        """An item that is done: of it what did not come before."""
        kind, content = answers.read_item(raw)
        self._units.note(kind, raw)
        match content:
            case MessageOut():
                for index, part in enumerate(answers.parts_of(content)):
                    self._part_content(item, index, part, events)
            case CallOut():
                call = self._call_of(item, content.call_id)
                if content.name:
                    self._start(call, content.name, content.signature, events)
                if content.arguments and not call.said:
                    self._arguments(call, content.arguments, events)
            case ReasoningOut():
                self._take_reasoning(item, content, events)
            case PictureOut():
                image = answers.picture_of(content)
                if image is None:
                    self._omitted.add(kind)
                else:
                    events.append(ImageOutput(image))
            case None:
                self._omitted.add(kind or "unknown")

    def _take_reasoning(self, item: _Item, content: ReasoningOut, events: list[Event]) -> None:
        thought = answers.reasoning_of(content, self._omitted)
        if thought is None:
            return
        text = "" if item.way else thought.text
        if text or thought.signature is not None:
            event = ReasoningDelta(
                text,
                0,
                thought.signature,
                self._block_of(item),
                redacted=thought.redacted and not item.way,
                id=item.id or thought.id,
            )
            events.append(event)

    # ----------------------------------------------------------------- end

    def _begun(self, wire: EventOut, events: list[Event]) -> None:
        try:
            self._know(answers.decode_response(wire.response), events)
        except Broken:
            return  # it tells nothing that the last event does not

    def _know(self, response: ResponseOut, events: list[Event]) -> None:
        self._id = response.id or self._id
        self._model = response.model or self._model
        self._tier = service_tier(response.service_tier) or self._tier
        if response.usage is not ABSENT or response.cost is not ABSENT:
            self._take_usage(response.usage, response.cost, events)

    def _failed(self, wire: EventOut, events: list[Event]) -> None:
        response = ResponseOut() if wire.response is ABSENT else answers.decode_response(wire.response)
        self._know(response, events)
        response.status = "failed"
        self._fail(answers.failure_of(response, self._headers) or failures.ended("failed", headers=self._headers))

    def _ended(self, wire: EventOut, events: list[Event]) -> None:
        response = answers.decode_response(wire.response)
        self._know(response, events)
        failure = answers.failure_of(response, self._headers)
        if failure is None and wire.type != f"response.{response.status}":
            failure = Broken("the end of the stream and the status of its response differ", code="no_terminal")
        if failure is not None:
            self._fail(failure)
            return
        if not self._items:
            for raw in response.output or ():
                self._take_item(_Item(_id_of(raw)), raw, events)
        for call in self._calls:
            self._start(call, "", None, events)
        self._report(self._units.added_to(self._usage), self._cost, events)
        reason, native = answers.stop_reason(response, refused=self._refused, called=bool(self._calls))
        end = ChoiceEnd(choice=0, stop_reason=reason, native_stop_reason=native)
        self._finish((end,), events, self._omitted.words())

    @override
    def _take_whole(self, body: bytes, events: list[Event]) -> None:
        self._take_answer(answers.parse_answer(self._headers, body), events)

    _HANDLERS: ClassVar[Mapping[str, Callable[[ResponseStream, EventOut, list[Event]], None]]] = {
        "response.output_text.delta": _text_delta,
        "response.output_text.done": _text_done,
        "response.refusal.delta": _refusal_delta,
        "response.refusal.done": _refusal_done,
        "response.content_part.done": _part_done,
        "response.reasoning_summary_text.delta": _summary_delta,
        "response.reasoning_summary_text.done": _summary_done,
        "response.reasoning_text.delta": _reasoning_delta,
        "response.reasoning_text.done": _reasoning_done,
        "response.function_call_arguments.delta": _arguments_delta,
        "response.function_call_arguments.done": _arguments_done,
        "response.output_item.added": _item_added,
        "response.output_item.done": _item_done,
        "response.created": _begun,
        "response.completed": _ended,
        "response.incomplete": _ended,
        "response.failed": _failed,
    }


def _decoded(data: bytes) -> object:
    try:
        return msgspec.json.decode(data)
    except (msgspec.DecodeError, RecursionError):
        return None


def _id_of(raw: msgspec.Raw) -> str | None:
    try:
        return _named.decode(raw).id
    except (msgspec.DecodeError, RecursionError):
        return None
