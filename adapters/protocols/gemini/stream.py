"""
A stream of Gemini to events, with proof of its end.

There is no sentinel. An answer is complete when the last chunk of every candidate gave a finish reason, or the prompt
was blocked, and then the body ended by its framing; so nothing counts as finished before `close`. Older models say
STOP on every chunk, and an error may follow one as bare JSON between the events.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec
from typing_extensions import override

from adapters.body import ABSENT, given
from adapters.chat import ChoiceEnd, Event, StopReason, UsageReport
from adapters.errors import Broken
from adapters.protocols.gemini import answers, failures
from adapters.sse import ServerSentEvent
from adapters.streams import ProvenStream
from metering.usage import Usage

_NAMES = frozenset({"", "message", "error"})
_payloads = msgspec.json.Decoder(list[msgspec.Raw])


class GeminiStream(ProvenStream):
    """
    One stream; a `StreamParser`.

    A body that is JSON is read too: an array of chunks, which is what a request without `alt=sse` gets, or one answer.
    """

    def __init__(self, headers: Mapping[str, str]) -> None:
        super().__init__(headers, keep_stray=True)
        self._readers: dict[int, answers.Reader] = {}
        self._omitted: dict[str, None] = {}
        self._figures = answers.Figures()
        self._blocked: str | None = None

    # -------------------------------------------------------------- events

    @override
    def _take(self, received: Iterable[ServerSentEvent], events: list[Event]) -> None:
        for event, data in received:
            if data[:1] == b"{" or (data.strip() not in {b"", b"[DONE]"} and event in _NAMES):
                self._payloads += 1
                self._take_payload(data, events)
                if self._failure is not None:
                    break

    @override
    def _take_whole(self, body: bytes, events: list[Event]) -> None:
        if body[:1] != b"[":
            self._take_payload(body, events)
        else:
            try:
                payloads = _payloads.decode(body)
            except (msgspec.DecodeError, RecursionError) as error:
                raise Broken("the stream ended within its array", code="no_terminal") from error
            for payload in payloads:
                self._take_payload(bytes(payload), events)
                if self._failure is not None:
                    return
        if self._failure is None:
            self._end(events)

    @override
    def _take_end(self, events: list[Event]) -> None:
        stray = self._body.stray
        if stray is None:
            self._end(events)
            return
        self._payloads += 1
        self._take_payload(stray, events)
        self._fail(Broken("the stream broke off with something that is no event", code="no_terminal"))

    def _take_payload(self, data: bytes, events: list[Event]) -> None:
        try:
            chunk = answers.decode_chunk(data)
            if chunk.usage_metadata is not None and self._figures.take(chunk.usage_metadata):
                events.append(UsageReport(usage=self._figures.usage))
            if chunk.error is not ABSENT and (error := given(chunk.error)) is not None:
                self._fail(failures.from_error(error, headers=self._headers))
                return
            if chunk.response_id:
                self._id = chunk.response_id
            if chunk.model_version:
                self._model = chunk.model_version
            if chunk.prompt_feedback is not None:
                self._blocked = answers.blocked_by(chunk) or self._blocked
            if chunk.candidates is not None:
                for candidate in chunk.candidates:
                    reader = self._readers.get(candidate.index)
                    if reader is None:
                        reader = self._readers[candidate.index] = answers.Reader(candidate.index, self._omitted)
                    reader.take(candidate, data, self._id, events)
        except Broken as broken:
            self._fail(broken)

    # ----------------------------------------------------------------- end

    def _end(self, events: list[Event]) -> None:
        ends = []
        for index, reader in sorted(self._readers.items()):
            native = reader.finish or self._blocked
            if native is not None and native in failures.FAILED_FINISH and reader.finish:
                self._fail(failures.from_finish_reason(native, headers=self._headers))
                return
            if native is None or (reader.pending and native == "STOP"):
                break
            reader.end_call(b"", self._id, events, whole=False)
            reason = answers.stop_reason(native, called=reader.called) if reader.finish else StopReason.CONTENT_FILTER
            ends.append(ChoiceEnd(choice=index, stop_reason=reason, native_stop_reason=native))
        if not self._readers and self._blocked is not None:
            ends.append(ChoiceEnd(choice=0, stop_reason=StopReason.CONTENT_FILTER, native_stop_reason=self._blocked))
        if not ends or len(ends) < len(self._readers):
            self._fail(Broken("the stream ended before each candidate had a finish reason", code="no_terminal"))
            return
        self._tier = answers.served_tier(self._headers, self._figures)
        if (units := answers.grounding_of(self._readers.values(), self._model)) is not None:
            events.append(UsageReport(usage=Usage(units=units)))
        self._finish(ends, events, self._omitted)
