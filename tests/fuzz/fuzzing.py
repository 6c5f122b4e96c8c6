"""Runs mutations against the targets for a while, and makes what it finds small."""

from __future__ import annotations

import base64
import json
import math
import random
import time
from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from tests.fuzz.mutation import Mutator, smaller
from tests.fuzz.targets import Finding, Target

#: One input in so many is measured, too.
_WEIGHED = 600
_REDUCING_S = 20.0


class Found(msgspec.Struct, kw_only=True):
    """A reproducer."""

    target: str
    #: Of the choices that the check makes beside the input.
    seed: str
    data: bytes
    told: str
    weighed: bool = False


class Tally(msgspec.Struct):
    inputs: int = 0
    kinds: int = 0
    found: list[Found] = msgspec.field(default_factory=list)


def fuzz(target: Target, *, seed: int, seconds: float = math.inf, inputs: float = math.inf, most: int = 5) -> Tally:
    """Until the time is over, so many inputs are tried, or `most` findings are made."""
    rng = random.Random(f"{seed} {target.name}")
    mutator = Mutator(target.seeds, rng)
    tally, known, told = Tally(), set[Hashable](), set[str]()
    end = time.monotonic() + seconds
    while time.monotonic() < end and tally.inputs < inputs and len(tally.found) < most:
        data = target.seeds[tally.inputs] if tally.inputs < len(target.seeds) else mutator.make()
        tally.inputs += 1
        choices = f"{seed} {tally.inputs}"
        weighed = tally.inputs % _WEIGHED == 0
        try:
            kind = target.check(data, random.Random(choices))
            if weighed:
                target.weigh(data, random.Random(choices))
        except Finding as finding:
            what = str(finding)[:60]
            if what not in told:
                told.add(what)
                tally.found.append(_reduced(target, data, choices, finding))
            continue
        if kind not in known:
            known.add(kind)
            mutator.keep(data)
    tally.kinds = len(known)
    return tally


def _reduced(target: Target, data: bytes, choices: str, finding: Finding) -> Found:
    """Smaller for as long as it is the same finding. What was measured stays as it is: it would take too long."""
    what, end = str(finding)[:40], time.monotonic() + _REDUCING_S

    def fails(shorter: bytes) -> bool:
        if time.monotonic() > end:
            return False
        try:
            target.check(shorter, random.Random(choices))
        except Finding as found:
            return str(found)[:40] == what
        return False

    weighed = not fails(data)
    return Found(
        target=target.name,
        seed=choices,
        data=data if weighed else smaller(data, fails),
        told=str(finding)[:1000],
        weighed=weighed,
    )


def replay(found: Found, targets: Sequence[Target]) -> None:
    """Raises `Finding` where it is still so."""
    target = next(known for known in targets if known.name == found.target)
    target.check(found.data, random.Random(found.seed))
    if found.weighed:
        target.weigh(found.data, random.Random(found.seed))


def write(found: Found, folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    number = len(list(folder.glob(f"{found.target}-*.json"))) + 1
    path = folder / f"{found.target}-{number}.json"
    content: dict[str, Any] = msgspec.to_builtins(found) | {"data": base64.b64encode(found.data).decode()}
    path.write_text(json.dumps(content, indent=2) + "\n")
    return path


def read(path: Path) -> Found:
    return msgspec.json.decode(path.read_bytes(), type=Found)
