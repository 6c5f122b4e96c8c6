"""
Whatever comes in whatever order, and wherever a crash cuts it: a record that was said to be on the disk is found until
it is acknowledged, and nothing is found that was never written.
"""

from __future__ import annotations

import asyncio
import random
import tempfile
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from metering.journal import Entry, Journal
from tests.fakes.disk import FakeDisk
from tests.unit.metering.test_journal import die, until

STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("append"), st.integers(1, 30)),
        st.tuples(st.just("append"), st.integers(1, 30)),
        st.tuples(st.just("written"), st.just(0)),
        st.tuples(st.just("acknowledge"), st.integers(0, 1000)),
        st.tuples(st.just("acknowledge"), st.integers(0, 1000)),
        st.tuples(st.just("full"), st.booleans()),
        st.tuples(st.just("failing"), st.booleans()),
        st.tuples(st.just("kill"), st.integers(0, 2**32)),
        st.tuples(st.just("power cut"), st.integers(0, 2**32)),
        st.tuples(st.just("end"), st.integers(0, 2**32)),
    ),
    min_size=5,
    max_size=80,
)


class World:
    """A directory, one process after the other that writes into it, and what has to be found there."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.number = 0
        #: On the disk for certain and not acknowledged; anything that may be there; acknowledged, also on the disk.
        self.due: set[bytes] = set()
        self.ever: set[bytes] = set()
        self.gone: set[bytes] = set()
        self.orderly = True

    async def start(self) -> None:
        self.disk = FakeDisk()
        self.entries: list[Entry] = []
        self.journal = Journal(self.directory, room=300, most=5_000, disk=self.disk)
        self.opening = self.journal.opened()
        await self.opening.__aenter__()

    async def step(self, what: str, value: int) -> None:
        match what:
            case "append":
                self.number += 1
                record = self.number.to_bytes(4, "big") * value
                self.ever.add(record)
                self.entries.append(self.journal.append(record))
            case "written":
                await self.written()
            case "acknowledge" if self.entries:
                entry = self.entries.pop(value % len(self.entries))
                self.journal.acknowledge(entry)
                self.gone.add(entry.record)
            case "full":
                self.disk.full = bool(value)
            case "failing":
                self.disk.sync_fails = bool(value)
                self.orderly = False
            case "kill" | "power cut" | "end":
                await self.stop(what, random.Random(value))

    async def written(self) -> None:
        if self.entries:
            await asyncio.wait([entry.written for entry in self.entries])

    async def stop(self, how: str, chance: random.Random) -> None:
        if how == "end":
            await self.opening.__aexit__(None, None, None)
        else:
            if chance.random() < 0.5:
                await self.written()
            if how == "kill" and self.journal.fault is None:
                await until(lambda: not self.journal._done or self.journal.fault)
            # Cut off between the writing of a burst and its sync, too.
            self.orderly = self.orderly and how == "kill" and not self.journal._done
        kept = {entry.record for entry in self.entries if entry.written.done() and not entry.written.exception()}
        if how != "end":
            await die(self.journal)
            await self.opening.__aexit__(None, None, None)
        if how == "power cut":
            self.disk.lose(self.directory, chance)
        self.due |= kept
        await self.take_up(chance)
        await self.start()

    async def take_up(self, chance: random.Random) -> None:
        journal = Journal(self.directory)
        seen: set[str] = set()
        found: set[bytes] = set()
        left: set[bytes] = set()
        gone = set(self.gone)
        while (adopted := await journal.adopt(seen)) is not None:
            seen.add(adopted.name)
            assert adopted.pending or adopted.torn
            found |= set(adopted.pending.values())
            if self.orderly:
                assert not adopted.torn
                assert not set(adopted.pending.values()) & gone
            done = [number for number in adopted.pending if chance.random() < 0.7]
            self.gone |= {adopted.pending[number] for number in done}
            await adopted.acknowledge(done)
            left |= set(adopted.pending.values())
            await adopted.close()
        assert found <= self.ever
        assert self.due <= found
        self.due = left - self.gone


async def run(steps: list[tuple[str, int]]) -> None:
    with tempfile.TemporaryDirectory(prefix="tollbridge-journal-") as directory:
        world = World(Path(directory))
        await world.start()
        for what, value in steps:
            await world.step(what, value)
        world.disk.full = world.disk.sync_fails = False
        await world.stop("end", random.Random(0))
        await die(world.journal)
        await world.opening.__aexit__(None, None, None)


@settings(max_examples=150, deadline=None)
@given(STEPS)
def test_no_record_is_lost_and_none_is_made_up(steps):
    asyncio.run(run(steps))
