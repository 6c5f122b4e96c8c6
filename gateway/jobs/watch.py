"""
Waits for the end of jobs, for any number of callers at the cost of one.

Jobs that end in this process are told at once. Those that end in another are found by one query for all that are waited
for; a query for each caller would let a few hundred of them, polling, starve the work they wait for.
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import Iterable, Iterator

from gateway.database import StoreUnavailable
from gateway.jobs.settings import JobsSettings
from gateway.jobs.store import JobStore


class Watch:
    def __init__(self, store: JobStore, settings: JobsSettings) -> None:
        self._store = store
        self._interval_s = settings.watch_poll_s
        self._waiters: dict[uuid.UUID, set[asyncio.Event]] = {}
        self._poller: asyncio.Task[None] | None = None

    @contextlib.contextmanager
    def on(self, job_id: uuid.UUID) -> Iterator[asyncio.Event]:
        """An event that is set once the job has ended. Enter it before looking at the job, so that no end is missed."""
        event = asyncio.Event()
        self._waiters.setdefault(job_id, set()).add(event)
        if self._poller is None:
            self._poller = asyncio.create_task(self._poll(), name="jobs-watch")
        try:
            yield event
        finally:
            waiters = self._waiters.get(job_id)
            if waiters is not None:
                waiters.discard(event)
                if not waiters:
                    del self._waiters[job_id]

    def ended(self, job_ids: Iterable[uuid.UUID]) -> None:
        """These jobs have ended: tell whoever waits."""
        for job_id in job_ids:
            for event in self._waiters.pop(job_id, ()):
                event.set()

    async def close(self) -> None:
        """Let all waiters go."""
        self.ended(list(self._waiters))
        if self._poller is not None:
            self._poller.cancel()
            await asyncio.wait([self._poller])

    async def _poll(self) -> None:
        try:
            while self._waiters:
                await asyncio.sleep(self._interval_s)
                if self._waiters:
                    with contextlib.suppress(StoreUnavailable):
                        self.ended(await self._store.ended(self._waiters))
        finally:
            self._poller = None
