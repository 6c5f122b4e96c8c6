"""
What the REST endpoints read of the rest of the gateway: readiness, models, usage, groups, and why jobs wait.

And the one thing that operators may do to a group from there: reset it.
"""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Iterator, Mapping, Sequence
from datetime import date
from typing import Any, Final

from admission.contract import StoreUnavailable as AdmissionStoreUnavailable
from admission.controller import Controller
from admission.lease import Waiting
from admission.store import Store
from gateway import database
from gateway.config import Settings, normalised_endpoint
from gateway.errors import NotFound
from gateway.keys import Keys
from gateway.rest import operators
from gateway.settling import Settling
from metering.ledger import Ledger

#: Seconds without an answer after which the store counts as away.
SILENCE_S: Final = 8.0


class Reading:
    """What the REST endpoints read of the rest of the gateway."""

    def __init__(
        self,
        settings: Settings,
        controller: Controller,
        store: Store,
        ledger: Ledger,
        keys: Keys,
        settling: Settling,
    ) -> None:
        self._settings = settings
        self._keys = keys
        self._controller = controller
        self._store = store
        self._ledger = ledger
        self._settling = settling

    def ready(self) -> tuple[bool, dict[str, str]]:
        # Admission's heartbeat is slow and trusts for long; the keys ask every second.
        available = self._controller.available and self._keys.silent_s < SILENCE_S
        kept = self._settling.fault is None
        return available and kept, {
            "control_store": "ok" if available else "unavailable",
            "journal": "ok" if kept else "unavailable",
        }

    def models(self) -> Sequence[operators.ModelEntry]:
        providers = self._settings.providers
        places: dict[str, list[str]] = {
            name: [target.provider for target in model.targets] for name, model in self._settings.models.items()
        }
        for provider in providers.values():
            for name in provider.models:
                places.setdefault(f"{provider.id}/{name}", [provider.id])
        return [
            operators.ModelEntry(
                name=name,
                providers=tuple(
                    operators.ModelProvider(id=p, ready=providers[p].ready and providers[p].enabled) for p in found
                ),
            )
            for name, found in sorted(places.items())
        ]

    async def read(
        self, *, session_id: str | None, day: date | None, key_id: uuid.UUID | None, session_key: uuid.UUID
    ) -> Mapping[str, object]:
        with database.store_errors():
            return await self._ledger.usage(session_id=session_id, day=day, key_id=key_id, session_key=session_key)

    async def groups(self) -> Sequence[Mapping[str, Any]]:
        with _admission_errors():
            found: Sequence[Mapping[str, Any]] = await self._store.groups()
        return [described(group) for group in found]

    async def reset(self, group: str) -> str:
        """The group that was reset: this name, or else the group of the endpoint that it is. Raises `NotFound`."""
        names = [group]
        with contextlib.suppress(ValueError):
            names.append(normalised_endpoint(group))
        for name in dict.fromkeys(names):
            with _admission_errors():
                found = await self._store.reset(name)
            if found:
                await self._controller.advance([name])
                return name
        raise NotFound("there is no such group: GET /v1/groups lists them", param="group")

    async def waiting(self, debit_ids: Sequence[str]) -> Mapping[str, Waiting]:
        with _admission_errors():
            return await self._store.waits(debit_ids)


def described(group: Mapping[str, Any]) -> dict[str, Any]:
    """
    A group as the store has it, with what follows: what quarantine costs it now, and who waits by class.

    `quarantine` says how many `slots` are in it, how many of them `held_back` from others, which `share` of the limit
    that is, and in how many seconds each comes free (`frees_in_s`, soonest first).
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
