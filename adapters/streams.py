"""
What the stream parsers of all protocols have in common: a body is fed in pieces, and its end has to be proven.

A protocol says what its own events mean, in `_take`, and calls `_finish` when it has its proof and `_fail` when the
provider failed. When an error comes out, which event is the last, and what a body that is cut, too large or no event
stream at all means, is the same for all of them and stands here.
"""

from __future__ import annotations

import secrets
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from operator import length_hint

from adapters.alike import Alike, Piece, learned
from adapters.chat import ChatResponse, ChoiceEnd, Event, Finished, TextDelta, UsageReport, as_events
from adapters.classify import request_id
from adapters.contract import Batch
from adapters.errors import Broken, ProviderError
from adapters.sse import MAX_VALUES, EventsOrJson, EventTooLarge, ServerSentEvent
from metering.usage import NOTHING, Usage

#: How often it is learned in vain what the events have in common, before it is left.
_LESSONS = 4
#: Of so many events it is learned, where a read of more than so many bytes has more of them.
_LESSON = 3
_WORTH_A_LESSON = 1024
#: Bytes of which no event can be too large, in any way: they hold fewer values than one may have.
_SMALL = MAX_VALUES


class ProvenStream(ABC):
    """
    One stream; a `StreamParser`.

    An answer that came as one JSON body, since the provider did not heed `stream`, is read as if it had been streamed.
    """

    def __init__(self, headers: Mapping[str, str], *, keep_stray: bool = False) -> None:
        self._headers = headers
        self._body = EventsOrJson(keep_stray=keep_stray)
        self._usage = NOTHING
        self._cost: str | None = None
        self._id: str | None = None
        self._model: str | None = None
        self._tier: str | None = None
        self._seed: str | None = None
        #: Held back until the events before it were given.
        self._failure: ProviderError | None = None
        self._finished = False
        self._payloads = 0
        #: The events that are being taken, how many they are, and so many bytes of their feed came before them.
        self._received: Iterator[ServerSentEvent] = iter(())
        self._count = 0
        self._before = 0
        self._ended_at: tuple[int, int] | None = None
        #: Where it was learned, what the events have in common that say a text and nothing else.
        self._alike: Alike | None = None
        self._lessons = _LESSONS

    @property
    def finished(self) -> bool:
        return self._finished

    @property
    def payloads(self) -> int:
        return self._payloads

    @property
    def ended_at(self) -> tuple[int, int] | None:
        return self._ended_at

    @property
    def is_json(self) -> bool:
        return self._body.json is not None

    def feed(self, data: bytes) -> Batch:
        if self._failure is not None:
            raise self._failure
        if not data:
            return ()
        events: list[Event] = []
        self._before = 0
        likely = self._alike is not None or (self._lessons and len(data) > _WORTH_A_LESSON)
        if likely and not self._finished and len(data) < _SMALL:
            data = self._take_alike(data, events)
        if data:
            self._read(data, events)
        return self._given(events) if self._finished or self._failure is not None else events

    def _read(self, data: bytes, events: list[Event]) -> None:
        """Bytes to what they mean, each event by itself."""
        self._received, self._count = iter(()), 0
        try:
            received = self._body.feed(data)
        except EventTooLarge as error:
            self._fail(_too_large(), error)
            return
        self._received, self._count = iter(received), len(received)
        self._take(self._received, events)
        self._before += len(data)
        if received and self._lessons and self._ended_at is None and events and type(events[-1]) is TextDelta:
            self._lessons -= 1
            self._alike = learned(*received[-1], self._piece) or self._alike

    def _take_alike(self, data: bytes, events: list[Event]) -> bytes:
        """
        The same of the events that are like one that was read before; and where that is not known, or nothing is like
        it any more, of as many others as it takes to learn it. What is left to be read.
        """
        if self._alike is not None and not self._body.between:
            end = data.find(b"\n\n") + 2
            if end == 1:
                return data
            self._read(data[:end], events)
            data = data[end:]
        while self._ended_at is None:
            known = self._alike
            size = self._repeat(known, data, events) if known is not None else 0
            data = data[size:]
            if not self._lessons:
                break
            end = _lesson(data)
            if end == 0:
                break
            self._read(data[:end], events)
            data = data[end:]
            if self._alike is known:
                break
        return data if self._failure is None else b""

    def _repeat(self, alike: Alike, data: bytes, events: list[Event]) -> int:
        """Takes what is like that, at the beginning of `data`; of how many bytes it was."""
        if not self._body.between:
            return 0
        text, count, size = alike.read(data)
        if not count:
            if not self._lessons:
                self._alike = None
            return 0
        self._lessons = _LESSONS
        self._payloads += count
        self._before += size
        piece = alike.piece
        self._id, self._model = piece.id or self._id, piece.model or self._model
        self._tier = piece.tier or self._tier
        if text:
            events.append(TextDelta(text, piece.choice))
        return size

    def close(self) -> Batch:
        if self._failure is not None:
            raise self._failure
        events: list[Event] = []
        whole = self._body.json
        if whole is None:
            self._take_rest(events)
        elif not self._finished:
            self._payloads += 1
            try:
                self._take_whole(whole, events)
            except ProviderError as error:
                self._fail(error)
        if not self._finished:
            self._fail(Broken("the stream ended without proof that it is complete", code="no_terminal"))
        return self._given(events)

    def _take_rest(self, events: list[Event]) -> None:
        try:
            received = self._body.close()
        except EventTooLarge as error:
            self._fail(_too_large(), error)
            return
        self._take(received, events)
        if isinstance(self._failure, Broken):
            # The event that was left open was cut short, and no more can be said of it.
            self._failure = None
        elif self._failure is None and not self._finished:
            self._take_end(events)

    def _given(self, events: list[Event]) -> Batch:
        if self._failure is not None and not events:
            raise self._failure
        if self._finished and len(events) > 1:
            # A cost that came behind the terminal, in the same bytes: Finished stays the last event.
            events.sort(key=_is_last)
        return events

    # -------------------------------------------- what a protocol says itself

    @abstractmethod
    def _take(self, received: Iterable[ServerSentEvent], events: list[Event]) -> None:
        """Adds to `events` what these mean. Called at least once a feed; ends at a failure, and counts payloads."""

    @abstractmethod
    def _take_whole(self, body: bytes, events: list[Event]) -> None:
        """The same of a body that is one JSON value and has ended. May raise `ProviderError`."""

    def _take_end(self, events: list[Event]) -> None:  # noqa: B027 - most protocols need no word for it
        """The body ended by its framing, with nothing cut and no proof yet: none, unless a protocol knows better."""

    def _piece(self, data: bytes) -> Piece | None:  # noqa: ARG002 - a protocol that has such events reads it
        """
        What is taken from an event's data that is a text, and nothing else. None where there is more in it, or where
        another event that differs in its text alone may have to be taken otherwise.
        """
        return None

    # ------------------------------------------------- what it says it with

    def _fail(self, failure: ProviderError, cause: BaseException | None = None) -> None:
        """The first failure counts, and none behind the proof does."""
        if self._failure is None and not self._finished:
            if cause is not None:
                failure.__cause__ = cause
            self._failure = failure
            self._ended_at = self._before, self._count - length_hint(self._received)

    def _report(self, usage: Usage, cost: str | None, events: list[Event]) -> None:
        """What the call cost so far, where that is news."""
        if usage != self._usage or cost != self._cost:
            self._usage, self._cost = usage, cost
            events.append(UsageReport(usage=usage, reported_cost_usd=cost))

    @staticmethod
    def _say(texts: list[str], choice: int, events: list[Event]) -> None:
        """Pieces of text that came together and are told together; then there are none."""
        if texts:
            if text := "".join(texts):
                events.append(TextDelta(text, choice))
            texts.clear()

    def _finish(self, ends: Iterable[ChoiceEnd], events: list[Event], omitted: Iterable[str] = ()) -> None:
        """The answer is proven complete."""
        self._finished = True
        self._ended_at = self._before, self._count - length_hint(self._received)
        events.append(
            Finished(
                ends=tuple(ends),
                response_id=self._id,
                served_model=self._model,
                provider_request_id=request_id(self._headers),
                service_tier=self._tier,
                omitted=tuple(omitted),
            )
        )

    def _take_answer(self, answer: ChatResponse, events: list[Event]) -> None:
        """A whole answer, which is proven by having been read."""
        events.extend(as_events(answer))
        self._finished = True

    def _made_seed(self) -> str:
        """What the ids that are made up for calls without one begin from: the same all through a stream."""
        if self._seed is None:
            self._seed = self._id or secrets.token_hex(12)
        return self._seed


def _too_large() -> Broken:
    return Broken("an event of the stream is too large", code="response_too_large")


def _is_last(event: Event) -> bool:
    return isinstance(event, Finished)


def _lesson(data: bytes) -> int:
    """Where the events end from which it is to be learned what those behind them have in common; 0 for too few."""
    end = 0
    for _ in range(_LESSON):
        end = data.find(b"\n\n", end) + 2
        if end == 1:
            return 0
    return end if end < len(data) else 0
