"""What the REST endpoints read of the rest of the gateway: readiness, models, usage, groups, and why jobs wait."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Iterator, Mapping, Sequence
from datetime import date
from typing import Final

from admission.controller import Controller
from admission.lease import Waiting
from admission.store import Store
from admission.contract import StoreUnavailable as AdmissionStoreUnavailable
from gateway import database
from gateway.config import Settings
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

    async def groups(self) -> Sequence[object]:
        with _admission_errors():
            return await self._store.groups()

    async def waiting(self, debit_ids: Sequence[str]) -> Mapping[str, Waiting]:
        with _admission_errors():
            return await self._store.waits(debit_ids)


@contextlib.contextmanager
def _admission_errors() -> Iterator[None]:
    try:
        yield
    except AdmissionStoreUnavailable as error:
        raise database.StoreUnavailable("the control store does not answer") from error
