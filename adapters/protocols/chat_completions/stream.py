"""
A stream of Chat Completions to events, with proof of its end.

No client library proves that a stream is complete: 16 recorded streams that were cut, or that hid an error behind a
`stop`, pass for good answers in the vendors' own. Here an answer is complete when every choice that was seen has a
finish reason that is no error, and then `[DONE]` came; or, at a provider that is known to send none, the body ended
by its framing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import msgspec
from typing_extensions import override

from adapters.alike import Piece
from adapters.body import ABSENT
from adapters.chat import (
    ChoiceEnd,
    Event,
    Image,
    ImageOutput,
    LogprobsDelta,
    ReasoningDelta,
    RefusalDelta,
    TextDelta,
    ToolCallDelta,
    ToolCallStart,
)
from adapters.contract import Endpoint
from adapters.errors import Broken
from adapters.figures import later_cost, service_tier
from adapters.protocols.chat_completions import answers, failures
from adapters.protocols.chat_completions.schema import AnswerOut, ChoiceOut, Content, TextChunk, ToolCallOut
from adapters.sse import ServerSentEvent
from adapters.streams import ProvenStream

_SENTINEL = b"[DONE]"
_text_chunk = msgspec.json.Decoder(TextChunk).decode


class _Call:
    """A tool call as it comes in."""

    __slots__ = ("held", "id", "index", "signature", "started")

    def __init__(self, call_id: str) -> None:
        #: Counted from 0 in the order in which calls are told, whatever the provider counts from.
        self.index = -1
        self.id = call_id
        #: Arguments that came before the name.
        self.held: list[str] = []
        self.signature: str | None = None
        self.started = False


class _Choice:
    """What is known of one choice."""

    __slots__ = ("blocks", "calls", "current", "finish", "refused", "said", "started")

    def __init__(self) -> None:
        self.finish: str | None = None
        self.calls: list[_Call] = []
        #: Calls that were told.
        self.started = 0
        #: The provider's index of a tool call to the call it now stands for.
        self.current: dict[int, _Call] = {}
        self.refused = False
        self.said = False
        self.blocks = answers.Blocks()


class ChatStream(ProvenStream):
    """One stream; a `StreamParser`."""

    def __init__(self, endpoint: Endpoint, headers: Mapping[str, str]) -> None:
        super().__init__(headers)
        self._no_sentinel = endpoint.no_sentinel
        self._choices: dict[int, _Choice] = {}
        #: The choice whose text goes on; -1 where the last chunk was none of its text.
        self._saying = -1
        self._told_tier: object = None
        #: What the canonical form does not carry, in the order it came: words of ours, so they are few.
        self._omitted: dict[str, None] = {}

    # -------------------------------------------------------------- events

    @override
    def _take(self, received: Iterable[ServerSentEvent], events: list[Event]) -> None:
        texts: list[str] = []
        for event, data in received:
            if self._saying >= 0 and not event:
                try:
                    chunk = _text_chunk(data)
                except (msgspec.DecodeError, RecursionError):
                    pass
                else:
                    choice = chunk.choices[0]
                    if (
                        choice.index == self._saying
                        and chunk.id == self._id
                        and chunk.model == self._model
                        and chunk.service_tier == self._told_tier
                    ):
                        # What nearly every chunk is: all that is new in it is its text.
                        self._payloads += 1
                        texts.append(choice.delta.content)
                        continue
            self._say(texts, self._saying, events)
            self._saying = -1
            self._take_one(event, data, events)
            if self._failure is not None:
                return
        self._say(texts, self._saying, events)

    def _take_one(self, event: str, data: bytes, events: list[Event]) -> None:
        if data[:1] != b"{":
            if data.strip() == _SENTINEL:
                self._payloads += 1
                if not self._finished:
                    self._end(events)
                return
            if not data.strip() or event not in {"", "message", "error"}:
                return  # a keep-alive, or an event of a name we do not know that is no chunk
        self._payloads += 1
        try:
            chunk = answers.decode_answer(data)
        except Broken as error:
            if not self._finished:
                self._fail(error)
            return
        if chunk.usage is not None or chunk.x_groq is not None or chunk.cost is not ABSENT:
            self._take_usage(chunk, events)
        if self._finished:
            return
        if chunk.error is not None or chunk.x_groq is not None or event == "error":
            failed = self._error_in(event, data, chunk)
            if failed is not None:
                self._fail(failures.from_error(failed, headers=self._headers))
                return
        if chunk.id:
            self._id = chunk.id
        if chunk.model:
            self._model = chunk.model
        self._told_tier = chunk.service_tier
        if chunk.service_tier is not None:
            self._tier = service_tier(chunk.service_tier) or self._tier
        if chunk.citations or chunk.search_results:
            answers.note_sources(chunk, self._omitted)
        for choice in chunk.choices or ():
            self._take_choice(choice, events)
        if self._saying >= 0 and (chunk.id != self._id or chunk.model != self._model):
            self._saying = -1

    @override
    def _piece(self, data: bytes) -> Piece | None:
        try:
            chunk = answers.decode_answer(data)
        except Broken:
            return None
        match chunk.choices:
            case (ChoiceOut(index=index, delta=Content(content=str() as text)),):
                pass
            case _:
                return None
        alone = AnswerOut(
            id=chunk.id,
            model=chunk.model,
            service_tier=chunk.service_tier,
            choices=(ChoiceOut(index=index, delta=Content(content=text)),),
        )
        return Piece(text, index, chunk.id, chunk.model, service_tier(chunk.service_tier)) if chunk == alone else None

    @staticmethod
    def _error_in(event: str, data: bytes, chunk: AnswerOut) -> object:
        if chunk.error is not None:
            return chunk.error
        if chunk.x_groq is not None and chunk.x_groq.error is not None:
            return chunk.x_groq.error
        if event != "error":
            return None
        try:
            # The data is the error itself.
            return msgspec.json.decode(data)
        except (msgspec.DecodeError, RecursionError):
            return {}

    def _take_usage(self, chunk: AnswerOut, events: list[Event]) -> None:
        usage, cost = self._usage, self._cost
        for wire in (chunk.x_groq.usage if chunk.x_groq else None, chunk.usage):
            reported, reported_cost = answers.read_usage(wire)
            usage = usage.merge(reported)
            cost = later_cost(cost, reported_cost)
        cost = later_cost(cost, answers.read_cost(chunk.cost))
        self._report(usage, cost, events)

    def _take_choice(self, wire: ChoiceOut, events: list[Event]) -> None:
        choice = self._choices.get(wire.index)
        if choice is None:
            choice = self._choices[wire.index] = _Choice()
        content = wire.delta
        if content is None and wire.message is not None and not choice.said:
            content = wire.message
        if content is not None:
            self._take_content(wire.index, choice, content, events)
        if wire.logprobs is not None:
            tokens = answers.read_logprobs(wire.logprobs, self._omitted)
            if tokens:
                events.append(LogprobsDelta(tokens, wire.index))
        if wire.finish_reason is None:
            return
        for reason in (wire.finish_reason, wire.native_finish_reason):
            if reason is not None and failures.is_failed_finish(reason):
                self._fail(failures.from_finish_reason(reason, headers=self._headers))
                return
        choice.finish = wire.finish_reason

    def _take_content(self, index: int, choice: _Choice, content: Content, events: list[Event]) -> None:
        text = answers.text_alone(content)
        if text is not None:
            if text:
                choice.said = True
                self._saying = index
                events.append(TextDelta(text, index))
        else:
            for piece in answers.pieces_of(content, self._omitted):
                choice.said = True
                if isinstance(piece, str):
                    events.append(TextDelta(piece, index))
                elif isinstance(piece, Image):
                    events.append(ImageOutput(piece, index))
                elif (block := choice.blocks.block_of(piece)) is not None:
                    events.append(
                        ReasoningDelta(piece.text, index, piece.signature, block, redacted=piece.redacted, id=piece.id)
                    )
        if content.refusal:
            choice.said = choice.refused = True
            events.append(RefusalDelta(content.refusal, index))
        if content.tool_calls or content.function_call:
            choice.said = True
            for call in answers.all_calls(content):
                events.extend(self._take_call(index, choice, call))

    def _take_call(self, choice_index: int, choice: _Choice, wire: ToolCallOut) -> Iterator[Event]:
        name, piece, signed = answers.call_parts(wire, self._omitted)
        call = self._call_of(choice_index, choice, wire, name)
        call.signature = signed or call.signature
        if not call.started:
            if not name:
                call.held.append(piece)
                return
            yield self._start(choice_index, choice, call, name)
            piece = "".join((*call.held, piece))
        elif signed is not None:
            self._omitted["late_signature"] = None
        if piece:
            yield ToolCallDelta(call.index, piece, choice_index)

    @staticmethod
    def _start(choice_index: int, choice: _Choice, call: _Call, name: str) -> ToolCallStart:
        call.started, call.index = True, choice.started
        choice.started += 1
        return ToolCallStart(call.index, call.id, name, choice_index, call.signature)

    def _call_of(self, choice_index: int, choice: _Choice, wire: ToolCallOut, name: str | None) -> _Call:
        """
        The call a piece belongs to: the one of its index, unless it brings a name and an id of its own. Some servers
        number every call 0 or not at all, and joining two calls' arguments would spoil both.
        """
        key = wire.index if wire.index is not None else max(choice.current, default=0)
        call = choice.current.get(key)
        if call is None or (call.started and name and wire.id and wire.id != call.id):
            number = len(choice.calls)
            call = _Call(wire.id or answers.made_id(self._made_seed(), choice_index, number))
            choice.calls.append(call)
            choice.current[key] = call
        elif not call.started and wire.id:
            call.id = wire.id
        return call

    # ----------------------------------------------------------------- end

    @override
    def _take_end(self, events: list[Event]) -> None:
        if self._no_sentinel:
            self._end(events)

    def _end(self, events: list[Event]) -> None:
        if not self._choices or any(choice.finish is None for choice in self._choices.values()):
            self._fail(Broken("the stream ended before each choice had a finish reason", code="no_terminal"))
            return
        for index, choice in self._choices.items():
            for call in choice.calls:
                if not call.started:
                    events.append(self._start(index, choice, call, ""))
                    events.extend(ToolCallDelta(call.index, piece, index) for piece in call.held if piece)
        ends = (
            ChoiceEnd(
                choice=index,
                stop_reason=answers.stop_reason(choice.finish or "", refused=choice.refused, called=bool(choice.calls)),
                native_stop_reason=choice.finish or "",
            )
            for index, choice in sorted(self._choices.items())
        )
        self._finish(ends, events, self._omitted)

    @override
    def _take_whole(self, body: bytes, events: list[Event]) -> None:
        self._take_answer(answers.parse_answer(self._headers, body), events)
