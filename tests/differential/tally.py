"""What many schedules come to: the part of the runner that each of its processes does."""

from __future__ import annotations

import asyncio
import queue
from collections import Counter
from typing import Final

import msgspec
import structlog

from tests.differential.schedule import SOMETIMES, Failure, opened, play, shortest, steps

#: How many failures are made shorter, and shown.
SHOWN: Final = 5


class Tally(msgspec.Struct):
    schedules: int = 0
    seen: Counter[str] = msgspec.field(default_factory=Counter)
    #: Seed, and what is wrong.
    failures: list[tuple[int, str]] = msgspec.field(default_factory=list)

    def add(self, other: Tally) -> None:
        self.schedules += other.schedules
        self.seen.update(other.seen)
        self.failures.extend(other.failures)

    def never(self) -> list[str]:
        return [what for what in SOMETIMES if not self.seen[what]]


#: For each schedule its seed, and what is wrong with it, if anything is.
Told = queue.Queue[tuple[int, str | None]]


async def _run(url: str, seeds: range, many: int, told: Told) -> Tally:
    tally = Tally()
    async with opened(url) as both:
        for seed in seeds:
            schedule = steps(seed, many)
            tally.schedules += 1
            wrong: str | None = None
            try:
                tally.seen.update(await play(both, schedule))
            except Failure as failure:
                less = await shortest(both, schedule) if len(tally.failures) < SHOWN else None
                wrong = str(failure if less is None else less)
                tally.failures.append((seed, wrong))
            told.put((seed, wrong))
    return tally


def run(given: tuple[str, range, int, Told]) -> Tally:
    # What the migrations have to say would stand between the lines of progress.
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(50))
    return asyncio.run(_run(*given))
