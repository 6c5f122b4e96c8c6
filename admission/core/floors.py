"""What puts a floor under a credential and model, and how a floor is told."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from admission.lease import Verdict
from admission.state import FloorKind

#: The verdicts that put a floor.
KINDS: Final[Mapping[Verdict, FloorKind]] = {
    Verdict.RATE_LIMITED: "rate_limit",
    Verdict.LIMITED_FOR_LONG: "long_rate_limit",
    Verdict.CREDENTIAL_REJECTED: "credential_rejected",
    Verdict.QUOTA_EXHAUSTED: "quota_exhausted",
}
#: What each is told as: a rate limit is one however long it is.
CAUSES: Final[Mapping[FloorKind, str]] = {
    "rate_limit": "rate_limited",
    "long_rate_limit": "rate_limited",
    "credential_rejected": "credential_rejected",
    "quota_exhausted": "quota_exhausted",
}


def last_of(floors: Iterable[tuple[int, FloorKind]]) -> tuple[int, str] | None:
    """The end of the one that ends last, and what it is told as."""
    last = min(floors, key=lambda floor: (-floor[0], floor[1]), default=None)
    return None if last is None else (last[0], CAUSES[last[1]])


def out_of_patience(floors: Iterable[tuple[int, FloorKind]]) -> list[tuple[int, FloorKind]]:
    """Those for whose end nobody waits."""
    return [floor for floor in floors if floor[1] != "rate_limit"]
