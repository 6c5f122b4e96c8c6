"""
A stream of Gemini to events, with proof of its end.

There is no sentinel. An answer is complete when the last chunk of every candidate gave a finish reason, or the prompt
was blocked, and then the body ended by its framing; so nothing counts as finished before `close`. Older models say
STOP on every chunk, and an error may follow one as bare JSON between the events.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from adapters.body import ABSENT, given
from adapters.chat import ChoiceEnd, Event, Finished, StopReason, UsageReport
from adapters.classify import request_id
from adapters.contract import Batch
from adapters.errors import Broken, ProviderError
from adapters.protocols.gemini import answers, failures
from adapters.sse import EventsOrJson, EventTooLarge, ServerSentEvent

_NAMES = frozenset({"", "message", "error"})
_payloads = msgspec.json.Decoder(list[msgspec.Raw])


class GeminiStream:
    """
    One stream; a `StreamParser`.

    A body that is JSON is read too: an array of chunks, which is what a request without `alt=sse` gets, or one answer.
    """

    def __init__(self, headers: Mapping[str, str]) -> None:
        self._headers = headers
        self._body = EventsOrJson(keep_stray=True)
        self._readers: dict[int, answers.Reader] = {}
        self._omitted: dict[str, None] = {}
        self._figures = answers.Figures()
        self._blocked: str | None = None
        self._id: str | None = None
        self._model: str | None = None
        self._failure: ProviderError | None = None
        self._finished = False
        self._payloads = 0

    @property
    def finished(self) -> bool:
        return self._finished

    @property
    def payloads(self) -> int:
        return self._payloads

    def feed(self, data: bytes) -> Batch:
        if self._failure is not None:
            raise self._failure
        if not data or self._finished:
            return ()
        events: list[Event] = []
        try:
            self._take(self._body.feed(data), events)
        except EventTooLarge as error:
            self._fail(Broken("an event of the stream is too large", code="response_too_large"), error)
        return self._given(events)

    def close(self) -> Batch:
        if self._failure is not None:
            raise self._failure
        if self._finished:
            return ()
        events: list[Event] = []
        whole = self._body.json
        try:
            if whole is not None:
                self._take_whole(whole, events)
            else:
                self._take(self._body.close(), events)
                if isinstance(self._failure, Broken):
                    # The event that was left open was cut short, and no more can be said of it.
                    self._failure = Broken("the stream ended within an event", code="no_terminal")
                self._take_stray(events)
        except EventTooLarge as error:
            self._fail(Broken("an event of the stream is too large", code="response_too_large"), error)
        if self._failure is None:
            self._end(events)
        return self._given(events)

    def _given(self, events: list[Event]) -> Batch:
        if self._failure is not None and not events:
            raise self._failure
        return events

    def _fail(self, failure: ProviderError, cause: BaseException | None = None) -> None:
        if self._failure is None:
            failure.__cause__ = cause
            self._failure = failure

    # -------------------------------------------------------------- events

    def _take(self, received: list[ServerSentEvent], events: list[Event]) -> None:
        for event, data in received:
            if data[:1] == b"{" or (data.strip() not in {b"", b"[DONE]"} and event in _NAMES):
                self._take_payload(data, events)
                if self._failure is not None:
                    break

    def _take_whole(self, body: bytes, events: list[Event]) -> None:
        if body[:1] != b"[":
            self._take_payload(body, events)
            return
        try:
            payloads = _payloads.decode(body)
        except (msgspec.DecodeError, RecursionError) as error:
            self._fail(Broken("the stream ended within its array", code="no_terminal"), error)
            return
        for payload in payloads:
            self._take_payload(bytes(payload), events)
            if self._failure is not None:
                return

    def _take_stray(self, events: list[Event]) -> None:
        stray = self._body.stray
        if stray is None or self._failure is not None:
            return
        self._take_payload(stray, events)
        self._fail(Broken("the stream broke off with something that is no event", code="no_terminal"))

    def _take_payload(self, data: bytes, events: list[Event]) -> None:
        self._payloads += 1
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
        self._finished = True
        events.append(
            Finished(
                ends=tuple(ends),
                response_id=self._id,
                served_model=self._model,
                provider_request_id=request_id(self._headers),
                omitted=tuple(self._omitted),
            )
        )
