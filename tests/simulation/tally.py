"""Many schedules one after the other, and what they came to."""

from __future__ import annotations

from collections import Counter

import msgspec

from tests.simulation.invariants import Violation
from tests.simulation.world import SOMETIMES, run


class Tally(msgspec.Struct):
    """What schedules came to, added up."""

    schedules: int = 0
    steps: int = 0
    virtual_s: float = 0.0
    seen: Counter[str] = msgspec.field(default_factory=Counter)
    #: Seed, and what is wrong.
    failures: list[tuple[int, str]] = msgspec.field(default_factory=list)

    def add(self, other: Tally) -> None:
        self.schedules += other.schedules
        self.steps += other.steps
        self.virtual_s += other.virtual_s
        self.seen.update(other.seen)
        self.failures.extend(other.failures)

    def count(self, *words: str) -> int:
        """Schedules that failed with any of these words."""
        return sum(any(word in what for word in words) for _, what in self.failures)

    @property
    def broken(self) -> dict[str, int]:
        """Schedules that broke what is promised first of all."""
        return {
            "over-admissions": self.count("over-admission", "at a limit of", "came free", "a grant ", "probes"),
            "double settlements": self.count("settled again"),
            "budgets passed": self.count("a session can cost"),
            "lost settlements": self.count("lost settlement", "without a settlement"),
        }

    @property
    def settled(self) -> int:
        return sum(n for what, n in self.seen.items() if what.startswith("settled as "))

    def figures(self) -> dict[str, object]:
        """The sums, for machines."""
        return {
            "schedules": self.schedules,
            "steps": self.steps,
            "kills": self.seen["fault killed"],
            "faults": {what.removeprefix("fault "): n for what, n in self.seen.items() if what.startswith("fault ")},
            "settled": self.settled,
            "unknown": self.seen["settled as unknown"],
            **{what.replace("-", "_").replace(" ", "_"): n for what, n in self.broken.items()},
            "failures": len(self.failures) + len(self.never()),
        }

    def never(self) -> list[str]:
        return [what for what in SOMETIMES if not self.seen[what]]


def play(seeds: range) -> Tally:
    tally = Tally()
    for seed in seeds:
        tally.schedules += 1
        try:
            outcome = run(seed)
        except Exception as error:  # noqa: BLE001  # whatever it is, it is that seed's, and the others go on
            kind = "" if isinstance(error, Violation) else f"{type(error).__name__}: "
            tally.failures.append((seed, f"{kind}{error}"))
            continue
        tally.steps += outcome.steps
        tally.virtual_s += outcome.virtual_s
        tally.seen.update(outcome.seen)
    return tally
