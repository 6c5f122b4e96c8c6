"""
What the REST endpoints read of the rest of the gateway: readiness, usage, groups, and why jobs wait.

And what operators may do from there: reset a group, and tell what attempts have cost.
"""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, date, datetime, timedelta
from typing import Any, Final, Protocol

from admission.contract import StoreUnavailable as AdmissionStoreUnavailable
from admission.controller import Controller
from admission.lease import Waiting
from admission.store import Store
from gateway import database
from gateway.config import Settings, normalised_endpoint
from gateway.errors import Code, GatewayError, InvalidRequest, NotFound
from gateway.keys import Keys
from gateway.settling import Settling
from metering.grouping import Grouped, Question
from metering.ledger import Ledger
from metering.resolving import Resolution, Resolved, Resolving

#: Seconds without an answer after which the store counts as away.
SILENCE_S: Final = 8.0


class Jobs(Protocol):
    """The jobs of this gateway. `gateway.jobs.runner` is it."""

    async def release(self, group: str) -> int:
        """Those that were told to come back later for this group are due. Raises `StoreUnavailable`."""
        ...


class Reading:
    """What the REST endpoints read of the rest of the gateway."""

    def __init__(
        self,
        settings: Settings,
        controller: Controller,
        store: Store,
        ledger: Ledger,
        resolving: Resolving,
        keys: Keys,
        settling: Settling,
        jobs: Jobs,
    ) -> None:
        self._settings = settings
        self._keys = keys
        self._controller = controller
        self._store = store
        self._ledger = ledger
        self._resolving = resolving
        self._settling = settling
        self._jobs = jobs

    def ready(self) -> tuple[bool, dict[str, str]]:
        # Admission's heartbeat is slow and trusts for long; the keys ask every second.
        available = self._controller.available and self._keys.silent_s < SILENCE_S
        kept = self._settling.fault is None
        return available and kept, {
            "control_store": "ok" if available else "unavailable",
            "journal": "ok" if kept else "unavailable",
        }

    def providers(self) -> dict[str, str]:
        return {
            provider.id: "disabled" if not provider.enabled else "ready" if provider.ready else "not_ready"
            for provider in self._settings.providers.values()
        }

    async def read(
        self, *, session_id: str | None, day: date | None, key_id: uuid.UUID | None, session_key: uuid.UUID
    ) -> Mapping[str, object]:
        with database.store_errors():
            return await self._ledger.usage(session_id=session_id, day=day, key_id=key_id, session_key=session_key)

    async def resolve(self, resolutions: Sequence[Resolution], *, by: uuid.UUID) -> list[Resolved]:
        with database.store_errors():
            return await self._resolving.resolve(resolutions, by=by)

    @property
    def zone(self) -> str:
        return self._ledger.zone

    async def grouped(self, question: Question) -> Grouped:
        with database.store_errors():
            return await self._ledger.grouped(question)

    async def groups(self) -> Sequence[Mapping[str, Any]]:
        with _admission_errors():
            found: Sequence[Mapping[str, Any]] = await self._store.groups()
        now = datetime.now(UTC)
        return [described(group, self._floors(group, now)) for group in found]

    def _floors(self, group: Mapping[str, Any], now: datetime) -> list[dict[str, Any]]:
        """What is held back, of whom, why and until when."""
        return [
            {
                "credential": floor["credential"],
                "providers": sorted(
                    place["provider"]
                    for place in map(_place, group["endpoints"])
                    if (known := self._settings.providers.get(place["provider"] or "")) is not None
                    and known.credential == floor["credential"]
                ),
                "model": floor["model"],
                "cause": floor["cause"],
                "until": now + timedelta(seconds=floor["remaining_s"]),
                "remaining_s": floor["remaining_s"],
            }
            for floor in group.get("floors", ())
        ]

    async def reset(self, group: str) -> str:
        """
        Resets the group of this name, or the one that this endpoint belongs to; jobs that were told to come back for it
        later are due. Answers its name. Raises `NotFound`, `InvalidRequest`.
        """
        name = await self._reset(group)
        await self._controller.advance([name])
        try:
            await self._jobs.release(name)
        except database.StoreUnavailable as error:
            raise GatewayError(
                "the group is reset, but the store of jobs does not answer: jobs may go on to wait for it; repeat this",
                code=Code.CONTENT_STORE_UNAVAILABLE,
                retry_after_s=1.0,
            ) from error
        return name

    async def _reset(self, group: str) -> str:
        names = [group]
        with contextlib.suppress(ValueError):
            names.append(normalised_endpoint(group))
        with _admission_errors():
            for name in dict.fromkeys(names):
                if await self._store.reset(name):
                    return name
            having = [
                each["group"]
                for each in await self._store.groups()
                if any(_place(endpoint)["endpoint"] in names for endpoint in each["endpoints"])
            ]
            if len(having) > 1:
                raise InvalidRequest(f"is an endpoint of several groups, name one: {', '.join(having)}", param="group")
            if having and await self._store.reset(having[0]):
                return str(having[0])
        raise NotFound("there is no such group: GET /v1/groups lists them", param="group")

    async def waiting(self, debit_ids: Sequence[str]) -> Mapping[str, Waiting]:
        """Why each of these waits in a queue, where it does."""
        with _admission_errors():
            return await self._store.waits(debit_ids)


def _place(endpoint: str) -> dict[str, str | None]:
    """An endpoint as admission knows it, in its two parts. Before there were two, it was the URL alone."""
    origin, _, provider = endpoint.partition("#")
    return {"endpoint": origin, "provider": provider or None}


def described(group: Mapping[str, Any], floors: Sequence[Mapping[str, Any]] = ()) -> dict[str, Any]:
    """
    A group as the store has it, with what follows: what quarantine costs it now, who waits by class, and why.

    `endpoints` are given with the provider that uses each. `quarantine` says how many `slots` are in it, how many of
    them `held_back` from others, which `share` of the limit that is, and in how many seconds each comes free
    (`frees_in_s`, soonest first).
    """
    slots, limit = group.get("slots", []), group["concurrency"]
    quarantined = [slot for slot in slots if slot["state"] == "quarantined"]
    held_back = max(0, len(quarantined) - group.get("quarantine_headroom", 0))
    remaining = [slot.get("quarantined_s") for slot in quarantined]
    waiting = group.get("waiting")
    by_class = group.get("queued_by_class")
    if by_class is None and waiting is not None and len(waiting) == group["queued"]:
        by_class = {name: sum(w["class"] == name for w in waiting) for name in ("interactive", "batch")}
    return {
        **group,
        "endpoints": [_place(endpoint) for endpoint in group.get("endpoints", ())],
        "floors": floors,
        "waiting": waiting,
        "quarantine": {
            "slots": len(quarantined),
            "held_back": held_back,
            "share": round(held_back / limit, 4) if limit else None,
            "frees_in_s": sorted(seconds for seconds in remaining if seconds is not None),
        },
        "queued_by_class": by_class,
    }


@contextlib.contextmanager
def _admission_errors() -> Iterator[None]:
    try:
        yield
    except AdmissionStoreUnavailable as error:
        raise database.StoreUnavailable("the control store does not answer") from error
