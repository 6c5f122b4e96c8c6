"""
A stream of Workers AI to events, with proof of its end.

The native shape has no finish reason: `[DONE]` alone is the proof, and an object with `errors` is the failure, under
whatever status. Models that answer in the shape of chat completions stream so here, too.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec
from typing_extensions import override

from adapters.body import ABSENT
from adapters.chat import ChoiceEnd, Event
from adapters.errors import Broken
from adapters.protocols.workers_ai import answers, failures, schema
from adapters.sse import ServerSentEvent
from adapters.streams import ProvenStream

_SENTINEL = b"[DONE]"
_text_chunk = msgspec.json.Decoder(schema.TextChunk).decode
_NAMES = frozenset({"", "message", "error"})


class WorkersStream(ProvenStream):
    """One stream; a `StreamParser`. Some models do not heed `stream`, and none does in JSON mode."""

    def __init__(self, headers: Mapping[str, str]) -> None:
        super().__init__(headers)
        self._readers: dict[int, answers.Reader] = {}
        #: The one choice of the native shape has said something, and goes on.
        self._speaks = False

    # -------------------------------------------------------------- events

    @override
    def _take(self, received: Iterable[ServerSentEvent], events: list[Event]) -> None:
        texts: list[str] = []
        for event, data in received:
            if self._speaks and not event:
                # What nearly every event is; what it is not, is read again.
                try:
                    text = _text_chunk(data).response
                except (msgspec.DecodeError, RecursionError):
                    pass
                else:
                    self._payloads += 1
                    texts.append(text)
                    continue
            self._say(texts, 0, events)
            if data[:1] == b"{":
                self._take_payload(event, data, events)
            elif data.strip() == _SENTINEL:
                self._payloads += 1
                if not self._finished:
                    self._end(events)
            elif data.strip() and event in _NAMES and not self._finished:
                self._payloads += 1
                self._fail(Broken("what came is no event of this protocol", code="malformed"))
            if self._failure is not None:
                return
        self._say(texts, 0, events)

    def _take_payload(self, event: str, data: bytes, events: list[Event]) -> None:
        self._payloads += 1
        try:
            chunk = answers.decode_answer(data)
        except Broken as error:
            if not self._finished:
                self._fail(error)
            return
        if chunk.usage is not None:
            self._report(self._usage.merge(answers.read_usage(chunk.usage)), None, events)
        if self._finished:
            return
        if event == "error" or answers.is_failed(chunk):
            self._fail(failures.from_body(data, headers=self._headers))
            return
        if chunk.id:
            self._id = chunk.id
        if chunk.model:
            self._model = chunk.model
        try:
            self._take_chunk(chunk, data, events)
        except Broken as error:
            self._fail(error)

    def _take_chunk(self, chunk: schema.AnswerOut, data: bytes, events: list[Event]) -> None:
        if chunk.choices is not None:
            for choice in chunk.choices:
                reader = self._reader(choice.index)
                content = choice.delta
                if content is None and choice.message is not None and not reader.said:
                    content = choice.message
                if content is not None:
                    reader.take(content, data, self._id, events)
                self._end_choice(reader, choice.finish_reason)
            return
        if chunk.response is ABSENT and chunk.tool_calls is None and chunk.reasoning_content is None:
            self._end_choice(self._reader(0) if chunk.finish_reason else None, chunk.finish_reason)
            return
        reader = self._reader(0)
        reader.think(chunk.reasoning_content, events)
        if chunk.response is not ABSENT:
            reader.text(answers.json_text(chunk.response), events)
            self._speaks = reader.said
        if chunk.tool_calls:
            reader.call(chunk.tool_calls, data, self._id, events)
        self._end_choice(reader, chunk.finish_reason)

    def _reader(self, index: int) -> answers.Reader:
        reader = self._readers.get(index)
        if reader is None:
            reader = self._readers[index] = answers.Reader(index)
        return reader

    def _end_choice(self, reader: answers.Reader | None, reason: str | None) -> None:
        if reader is None or reason is None:
            return
        if answers.is_failed_finish(reason):
            self._fail(failures.from_finish_reason(reason, headers=self._headers))
        reader.finish = reason

    # ----------------------------------------------------------------- end

    def _end(self, events: list[Event]) -> None:
        if not any(reader.said or reader.called or reader.finish for reader in self._readers.values()):
            self._fail(Broken("the stream ended without an answer in it", code="no_terminal"))
            return
        for reader in self._readers.values():
            reader.end(b"", self._id, events)
        self._speaks = False
        ends = (
            ChoiceEnd(
                choice=index,
                stop_reason=answers.stop_reason(reader.finish or "", refused=reader.refused, called=reader.called),
                native_stop_reason=reader.finish or "",
            )
            for index, reader in sorted(self._readers.items())
        )
        self._finish(ends, events)

    @override
    def _take_whole(self, body: bytes, events: list[Event]) -> None:
        self._take_answer(answers.parse_answer(self._headers, body), events)
