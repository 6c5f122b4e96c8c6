"""
What the stream parsers of all protocols have in common: a body is fed in pieces, and its end has to be proven.

A protocol says what its own events mean, in `_take`, and calls `_finish` when it has its proof and `_fail` when the
provider failed. When an error comes out, which event is the last, and what a body that is cut, too large or no event
stream at all means, is the same for all of them and stands here.
"""

from __future__ import annotations

import secrets
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping

from adapters.chat import ChatResponse, ChoiceEnd, Event, Finished, UsageReport, as_events
from adapters.classify import request_id
from adapters.contract import Batch
from adapters.errors import Broken, ProviderError
from adapters.sse import EventsOrJson, EventTooLarge, ServerSentEvent
from metering.usage import NOTHING, Usage


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

    @property
    def finished(self) -> bool:
        return self._finished

    @property
    def payloads(self) -> int:
        return self._payloads

    def feed(self, data: bytes) -> Batch:
        if self._failure is not None:
            raise self._failure
        if not data:
            return ()
        events: list[Event] = []
        try:
            received = self._body.feed(data)
        except EventTooLarge as error:
            self._fail(_too_large(), error)
        else:
            self._take(received, events)
        return self._given(events) if self._finished or self._failure is not None else events

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
    def _take(self, received: list[ServerSentEvent], events: list[Event]) -> None:
        """Adds to `events` what these mean. Called once a feed; ends at a failure, and counts payloads."""

    @abstractmethod
    def _take_whole(self, body: bytes, events: list[Event]) -> None:
        """The same of a body that is one JSON value and has ended. May raise `ProviderError`."""

    def _take_end(self, events: list[Event]) -> None:  # noqa: B027 - most protocols need no word for it
        """The body ended by its framing, with nothing cut and no proof yet: none, unless a protocol knows better."""

    # ------------------------------------------------- what it says it with

    def _fail(self, failure: ProviderError, cause: BaseException | None = None) -> None:
        """The first failure counts, and none behind the proof does."""
        if self._failure is None and not self._finished:
            if cause is not None:
                failure.__cause__ = cause
            self._failure = failure

    def _report(self, usage: Usage, cost: str | None, events: list[Event]) -> None:
        """What the call cost so far, where that is news."""
        if usage != self._usage or cost != self._cost:
            self._usage, self._cost = usage, cost
            events.append(UsageReport(usage=usage, reported_cost_usd=cost))

    def _finish(self, ends: Iterable[ChoiceEnd], events: list[Event], omitted: Iterable[str] = ()) -> None:
        """The answer is proven complete."""
        self._finished = True
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
