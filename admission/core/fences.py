"""Which executor of a run is the newest: those before it get nothing any more."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence

from admission.core.work import Work
from admission.lease import Fence
from admission.state import Element


def raise_fences(w: Work, elements: Sequence[Element]) -> None:
    """The newest executor of each run is known from here on, and the waiters of its predecessors are gone."""
    raised: set[tuple[uuid.UUID, str, str]] = set()
    for asked in elements:
        fence = asked.demand.fence
        if fence is not None:
            run = (asked.demand.key_id, fence.scope_id, fence.run_id)
            newest = w.fences.view.get(run)
            if newest is None or fence.number > newest:
                w.fences.put(run, fence.number)
                raised.add(run)
    if raised:
        for ticket in list(w.tickets.view.values()):
            if ticket.state == "queued" and ticket.fence is not None:
                run = (ticket.key_id, ticket.fence[0], ticket.fence[1])
                if run in raised and ticket.fence[2] < w.fences.view[run]:
                    w.tickets.drop(ticket.ticket_id)


def is_fenced(fences: Mapping[tuple[uuid.UUID, str, str], int], key_id: uuid.UUID, fence: Fence) -> bool:
    return fence.number < fences.get((key_id, fence.scope_id, fence.run_id), fence.number)
