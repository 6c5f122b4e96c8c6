"""
What the line hands to a transport while a request is served, and how the transport listens in.

The line itself is `gateway.pipeline`. These are the words it speaks to its callers.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Protocol, TypeAlias

import msgspec

from adapters.chat import ChatResponse, ChoiceEnd, Delta
from adapters.contract import EmbeddingResponse
from admission.lease import Waiting
from gateway.call import Call, Completion, Counted, Embedded
from gateway.outcome import AttemptReport, Outcome, RouteReport


class Ended(msgspec.Struct, frozen=True, kw_only=True):
    """The last item of a streamed answer: it is complete, settled, and this is what it cost."""

    ends: tuple[ChoiceEnd, ...]
    outcome: Outcome
    #: The last event of the provider's own stream, where the call asked for `relay` and got it. All that came before it
    #: was the last of each of the items.
    native: bytes | None = None


#: Deltas that arrived together, or the end. An answer that does not complete raises instead of ending. For a call that
#: asked for `relay` deltas are those of `adapters.contract.relayed`.
Item: TypeAlias = Sequence[Delta] | Ended


class Observer(Protocol):
    """Hears of a request's progress before its commit point. Its methods must be quick and must not raise."""

    def queued(self, waiting: Waiting) -> None: ...

    def started(self, route: RouteReport, attempt: int) -> None:
        """A provider is about to get the request: the slot is held and everything was rechecked."""
        ...

    def failed(self, report: AttemptReport) -> None:
        """An attempt ended without content. Another may follow."""
        ...

    async def dispatching(self, attempt: int) -> None:
        """Awaited just before the request is sent. A job records its intent here."""
        ...

    async def completed(self, response: ChatResponse | EmbeddingResponse, attempt: int) -> None:
        """Awaited for a whole answer (`complete`, `embed`) before it is settled. A job stores its result here."""
        ...


class Silent:
    """An observer for callers who do not listen."""

    def queued(self, waiting: Waiting) -> None: ...

    def started(self, route: RouteReport, attempt: int) -> None: ...

    def failed(self, report: AttemptReport) -> None: ...

    async def dispatching(self, attempt: int) -> None: ...

    async def completed(self, response: ChatResponse | EmbeddingResponse, attempt: int) -> None: ...


SILENT = Silent()


class Line(Protocol):
    """
    The seam between the transports and the line. `gateway.pipeline.Pipeline` is it.

    Both methods raise `gateway.errors.GatewayError` and nothing else, apart from `asyncio.CancelledError`. Cancelling
    either at any point settles what was dispatched.
    """

    async def complete(self, call: Call, observer: Observer = SILENT) -> Completion: ...

    def stream(self, call: Call, observer: Observer = SILENT) -> AbstractAsyncContextManager[AsyncIterator[Item]]:
        """
        Entering returns once the first content (or the end) is there: until then everything may be retried, after
        it nothing is. Leaving early takes the request back.
        """
        ...


class EmbeddingLine(Protocol):
    """The same line for embeddings."""

    async def embed(self, call: Call, observer: Observer = SILENT) -> Embedded:
        """Of a call with `embedding`. Raises as `Line` does."""
        ...


class CountingLine(Protocol):
    """The same line for counts of tokens."""

    async def count(self, call: Call) -> Counted:
        """Of a call that `counts`. Raises as `Line` does."""
        ...
