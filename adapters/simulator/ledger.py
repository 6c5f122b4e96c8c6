"""
The simulated provider's own account of every dispatch: the judge over the gateway's.

A dispatch begins when its request has been read completely. It occupies until its response has been written completely
or its connection is known to be gone, and then for as long as the work is said to go on. It holds no content: of a
question only a hash of its end.
"""

from __future__ import annotations

import enum
import time
from collections import Counter, deque
from collections.abc import Iterator
from typing import Any

import msgspec


class Ended(enum.StrEnum):
    #: An answer with its protocol's terminal.
    COMPLETE = "complete"
    #: A complete error response.
    ERROR = "error"
    #: A complete response that carries an error under status 200.
    ERROR_IN_STREAM = "error_in_stream"
    #: A complete response without its protocol's terminal.
    UNPROVEN = "unproven"
    #: A complete response that is not the protocol.
    MALFORMED = "malformed"
    #: We cut the connection.
    DIED = "died"
    #: The client left while we were hanging.
    HUNG = "hung"
    #: The client left before everything was written.
    CLIENT_GONE = "client_gone"
    #: The server was stopped.
    STOPPED = "stopped"


class Dispatch:
    """One request that arrived."""

    __slots__ = (
        "correlation",
        "ended",
        "fields",
        "finished",
        "hanging",
        "model",
        "number",
        "question",
        "received",
        "released",
        "request_id",
        "started",
        "status",
        "stream",
        "tokens_in",
        "tokens_out",
    )

    def __init__(
        self,
        *,
        number: int,
        model: str,
        correlation: str | None,
        question: str | None,
        fields: list[str],
        stream: bool,
    ) -> None:
        self.number = number
        self.request_id = f"req_{number:016x}"
        self.model = model
        self.correlation = correlation
        #: A hash of the last characters of the last user message.
        self.question = question
        #: Names of the request's top-level fields.
        self.fields = fields
        self.stream = stream
        #: Wall clock, seconds since the epoch.
        self.received = time.time()
        #: `time.monotonic`, which processes of one machine share.
        self.started = time.monotonic()
        self.finished: float | None = None
        self.released: float | None = None
        #: None until the response's headers were written.
        self.status: int | None = None
        self.tokens_in = 0
        self.tokens_out = 0
        self.ended: Ended | None = None
        self.hanging = False

    def record(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__ if name != "hanging"}


class Tally:
    """Sums over dispatches, and how many there are at once."""

    def __init__(self) -> None:
        self.dispatches = 0
        self.active = 0
        self.peak = 0
        self._ended: Counter[str] = Counter()
        self._statuses: Counter[str] = Counter()
        self._tokens = [0, 0]
        self._unfinished_tokens = [0, 0]

    def begin(self) -> None:
        self.dispatches += 1
        self.active += 1
        self.peak = max(self.peak, self.active)

    def end(self, dispatch: Dispatch) -> None:
        self._ended[str(dispatch.ended)] += 1
        self._statuses[str(dispatch.status or "none")] += 1
        tokens = self._tokens if dispatch.ended is Ended.COMPLETE else self._unfinished_tokens
        tokens[0] += dispatch.tokens_in
        tokens[1] += dispatch.tokens_out

    def release(self) -> None:
        self.active -= 1

    def summary(self) -> dict[str, Any]:
        return {
            "dispatches": self.dispatches,
            "completed": self._ended[Ended.COMPLETE],
            "active": self.active,
            "peak_concurrency": self.peak,
            # Of complete answers: what their usage said, told or not.
            "tokens_in": self._tokens[0],
            "tokens_out": self._tokens[1],
            # Of the others: what was worked before they ended.
            "unfinished_tokens_in": self._unfinished_tokens[0],
            "unfinished_tokens_out": self._unfinished_tokens[1],
            "ended": dict(self._ended),
            "statuses": dict(self._statuses),
        }


class Ledger:
    """Sums are kept for all dispatches, single records for the newest `keep` of those that ended."""

    def __init__(self, *, keep: int = 200_000) -> None:
        self._number = 0
        self._open: dict[int, Dispatch] = {}
        self._closed: deque[Dispatch] = deque(maxlen=keep)
        self._total = Tally()
        self._by_model: dict[str, Tally] = {}

    @property
    def active(self) -> int:
        return self._total.active

    def active_of(self, model: str) -> int:
        tally = self._by_model.get(model)
        return tally.active if tally is not None else 0

    def begin(
        self, *, model: str, correlation: str | None, question: str | None, fields: list[str], stream: bool
    ) -> Dispatch:
        self._number += 1
        dispatch = Dispatch(
            number=self._number,
            model=model,
            correlation=correlation,
            question=question,
            fields=fields,
            stream=stream,
        )
        self._begin(dispatch)
        return dispatch

    def _begin(self, dispatch: Dispatch) -> None:
        self._open[dispatch.number] = dispatch
        self._total.begin()
        tally = self._by_model.get(dispatch.model)
        if tally is None:
            tally = self._by_model[dispatch.model] = Tally()
        tally.begin()

    def end(self, dispatch: Dispatch, ended: Ended) -> None:
        """How it ended. It occupies until `release`."""
        assert dispatch.ended is None
        dispatch.ended = ended
        dispatch.finished = time.monotonic()
        self._total.end(dispatch)
        self._by_model[dispatch.model].end(dispatch)

    def release(self, dispatch: Dispatch) -> None:
        assert dispatch.ended is not None
        dispatch.released = time.monotonic()
        del self._open[dispatch.number]
        self._closed.append(dispatch)
        self._total.release()
        self._by_model[dispatch.model].release()

    def reset(self) -> None:
        """Forgets what no longer occupies. What still does is counted as if it began now."""
        self._closed.clear()
        self._total = Tally()
        self._by_model = {}
        for dispatch in list(self._open.values()):
            self._begin(dispatch)
            if dispatch.ended is not None:
                self._total.end(dispatch)
                self._by_model[dispatch.model].end(dispatch)

    def summary(self) -> dict[str, Any]:
        return {
            **self._total.summary(),
            "by_model": {model: tally.summary() for model, tally in self._by_model.items()},
        }

    def closed(self) -> list[Dispatch]:
        """Those that ended, as many as are kept, in the order of their ends."""
        return list(self._closed)

    @property
    def whole(self) -> bool:
        """None of them was forgotten."""
        return self._total.dispatches == len(self._closed) + len(self._open)

    def lines(self) -> Iterator[bytes]:
        """JSONL, one line a dispatch, in order of arrival."""
        for dispatch in sorted([*self._closed, *self._open.values()], key=lambda one: one.number):
            yield msgspec.json.encode(dispatch.record()) + b"\n"
