"""A record that is said to be on the disk is there for whoever comes after, whole, until it is acknowledged."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from metering import journal as module
from metering.journal import PARKED, Adopted, Disk, Journal, JournalUnavailable
from tests.fakes.disk import FakeDisk


async def until(holds) -> None:
    async with asyncio.timeout(30):
        while not holds():  # noqa: ASYNC110  it is set in a thread, or by nobody here
            await asyncio.sleep(0.005)


async def die(journal: Journal) -> None:
    """As after kill -9: nothing is written any more, and the lock is free."""
    assert journal._writer is not None
    journal._writer.cancel()
    journal._closing = True
    await asyncio.wait((journal._writer,))
    await journal._in_thread(lambda: None)
    for entry in journal._entries.values():
        entry.written.cancel()
    if journal._file is not None:
        journal._file.close()
        journal._file = None


@asynccontextmanager
async def dying(directory: Path, **changes) -> AsyncIterator[Journal]:
    """A journal whose process is killed at the end of the block."""
    journal = Journal(directory, **changes)
    async with journal.opened():
        yield journal
        await die(journal)


async def taken(directory: Path) -> list[bytes]:
    """Everything that dead processes left, taken up and acknowledged."""
    records: list[bytes] = []
    while (adopted := await Journal(directory).adopt()) is not None:
        records += adopted.pending.values()
        await adopted.acknowledge(list(adopted.pending))
        await adopted.close()
    return records


def files(directory: Path) -> list[str]:
    return sorted(path.suffix for path in directory.iterdir())


async def test_a_record_is_there_for_the_next_process_until_it_is_acknowledged(tmp_path):
    async with dying(tmp_path) as journal:
        entries = [journal.append(f"record {number}".encode()) for number in range(5)]
        await asyncio.gather(*(entry.written for entry in entries))
        journal.acknowledge(entries[1])
        journal.acknowledge(entries[3])
        await until(lambda: not journal._done)
        assert journal.outstanding == 3
    assert await taken(tmp_path) == [b"record 0", b"record 2", b"record 4"]
    assert await taken(tmp_path) == []
    assert files(tmp_path) == []


async def test_the_file_of_a_living_process_is_nobody_elses(tmp_path):
    async with Journal(tmp_path).opened() as one, Journal(tmp_path).opened() as two:
        await one.append(b"mine").written
        assert await two.adopt() is None
        assert await one.adopt() is None
        assert files(tmp_path) == [".journal", ".journal"]


async def test_a_process_that_ends_leaves_a_file_only_where_something_is_left_in_it(tmp_path):
    async with Journal(tmp_path).opened() as journal:
        entry = journal.append(b"done")
        await entry.written
        journal.acknowledge(entry)
    assert files(tmp_path) == []
    async with Journal(tmp_path).opened() as journal:
        journal.append(b"left")  # nobody waits for it: the end does
    assert await taken(tmp_path) == [b"left"]


async def test_one_adopter_gets_a_file_and_another_what_the_first_left(tmp_path):
    async with dying(tmp_path) as journal:
        await asyncio.gather(*(journal.append(bytes([number])).written for number in range(3)))
    one, two = Journal(tmp_path), Journal(tmp_path)
    adopted = await one.adopt()
    assert adopted is not None
    assert await two.adopt() is None
    await adopted.acknowledge([number for number, record in adopted.pending.items() if record != b"\1"])
    await adopted.close()
    assert await two.adopt({adopted.name}) is None
    assert await taken(tmp_path) == [b"\1"]


async def test_records_that_come_together_are_synced_together(tmp_path):
    disk = FakeDisk()
    async with Journal(tmp_path, disk=disk).opened() as journal:
        before = disk.syncs
        entries = [journal.append(b"x" * 100) for _ in range(500)]
        await asyncio.gather(*(entry.written for entry in entries))
        assert disk.syncs - before == 1
        for entry in entries:
            journal.acknowledge(entry)
        await until(lambda: not journal._done)
        await asyncio.sleep(0)
        assert disk.syncs - before == 1


async def test_a_disk_that_hangs_stops_nobody_and_is_a_fault(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "STALL_S", 0.05)
    disk = FakeDisk()
    async with Journal(tmp_path, disk=disk).opened() as journal:
        assert journal.fault is None
        disk.answers.clear()
        entry = journal.append(b"slow")
        began = time.monotonic()
        await until(lambda: journal.fault == "the disk does not answer")
        assert time.monotonic() - began < 2
        assert not entry.written.done()
        disk.answers.set()
        await entry.written
        await until(lambda: journal.fault is None)


async def test_a_full_disk_is_a_fault_while_there_is_room_for_what_is_under_way(tmp_path):
    disk = FakeDisk()
    async with dying(tmp_path, room=1000, disk=disk) as journal:
        disk.full = True
        kept = []
        while journal.fault is None:
            kept.append(journal.append(b"a" * 100))
            await kept[-1].written
        assert journal.fault == "No space left on device"
        room = [journal.append(bytes([number]) * 100) for number in range(2)]
        await asyncio.gather(*(entry.written for entry in room))
        with pytest.raises(JournalUnavailable, match="No space left"):
            await journal.append(b"b" * 700).written
        disk.full = False
        await until(lambda: journal.fault is None)
        assert journal.outstanding == len(kept) + 3
    # What was refused is kept as soon as it can be.
    assert [record[:1] for record in await taken(tmp_path)] == [b"a"] * len(kept) + [b"\0", b"\1", b"b"]


async def test_a_full_disk_is_no_fault_any_more_when_everything_is_acknowledged(tmp_path):
    disk = FakeDisk()
    async with dying(tmp_path, room=1000, disk=disk) as journal:
        disk.full = True
        entries = []
        while journal.fault is None:
            entries.append(journal.append(b"a" * 100))
            await entries[-1].written
        for entry in entries:
            journal.acknowledge(entry)
        await until(lambda: journal.fault is None)
        await journal.append(b"next").written
    assert await taken(tmp_path) == [b"next"]


async def test_after_a_failed_sync_everything_is_written_anew(tmp_path):
    disk = FakeDisk()
    async with dying(tmp_path, disk=disk) as journal:
        await journal.append(b"before").written
        disk.sync_fails = True
        refused = journal.append(b"meanwhile")
        with pytest.raises(JournalUnavailable, match="Input/output"):
            await refused.written
        assert journal.fault is not None
        assert journal.outstanding == 2
        disk.sync_fails = False
        await until(lambda: journal.fault is None)
        await journal.append(b"after").written
        assert files(tmp_path) == [".journal"]
    assert await taken(tmp_path) == [b"before", b"meanwhile", b"after"]


async def test_a_directory_that_cannot_be_had_is_a_fault_until_it_can(tmp_path):
    place = tmp_path / "journal"
    place.write_text("in the way")
    async with dying(place) as journal:
        assert journal.fault is not None
        entry = journal.append(b"early")
        with pytest.raises(JournalUnavailable):
            await entry.written
        with pytest.raises(JournalUnavailable):
            await journal.park([b"{}"])
        place.unlink()
        await until(lambda: journal.fault is None)
    assert await taken(place) == [b"early"]


async def test_a_file_that_somebody_deletes_is_made_again_with_all_that_was_in_it(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_LOOK_S", 0.01)
    async with dying(tmp_path) as journal:
        await journal.append(b"kept").written
        [path] = tmp_path.iterdir()
        path.unlink()
        await until(lambda: files(tmp_path) == [".journal"])
        await journal.append(b"more").written
    assert await taken(tmp_path) == [b"kept", b"more"]


async def test_more_than_it_may_hold_is_refused_and_a_fault_before_that(tmp_path):
    async with dying(tmp_path, most=1000) as journal:
        entries = [journal.append(b"x" * 100) for _ in range(10)]
        await asyncio.gather(*(entry.written for entry in entries))
        assert journal.fault == "it holds 10 records that are not acknowledged"
        for refused in (b"x", b"x" * (module.LARGEST + 1)):
            with pytest.raises(JournalUnavailable, match="full"):
                await journal.append(refused).written
        for entry in entries[:5]:
            journal.acknowledge(entry)
        assert journal.fault is None
        await journal.append(b"again").written
    assert await taken(tmp_path) == [b"x" * 100] * 5 + [b"again"]


@pytest.mark.parametrize("held", [0, 1, 20], ids=["nothing left", "one left", "many left"])
async def test_the_file_does_not_grow_with_what_has_gone_through_it(tmp_path, held):
    async with dying(tmp_path, room=4000) as journal:
        stay = [journal.append(f"stays {number}".encode()) for number in range(held)]
        for _ in range(30):
            burst = [journal.append(b"x" * 200) for _ in range(10)]
            await asyncio.gather(*(entry.written for entry in burst))
            for entry in burst:
                journal.acknowledge(entry)
        await until(lambda: not journal._done)
        [path] = tmp_path.iterdir()
        assert path.stat().st_size <= 12000
        assert journal.outstanding == held
    left = await taken(tmp_path)
    assert left[:held] == [entry.record for entry in stay]


@pytest.mark.parametrize("damage", ["cut", "flipped"])
async def test_a_damaged_file_gives_what_came_before_and_never_a_wrong_record(tmp_path, damage):
    records = [bytes([number]) * (number * 7 + 1) for number in range(5)]
    async with dying(tmp_path / "whole", room=300) as journal:
        for record in records:
            await journal.append(record).written
    [path] = (tmp_path / "whole").iterdir()
    whole = path.read_bytes()
    seen = set()
    for at in range(len(whole.rstrip(b"\0")) + 20):
        rest = b"" if damage == "cut" else bytes([whole[at] ^ 0x41]) + whole[at + 1 :]
        data = whole[:at] + rest
        broken = tmp_path / f"{at}.journal"
        broken.write_bytes(data)
        file = module._File.adopted(broken, Disk())
        assert file is not None
        found = list(file.read().values())
        file.close()
        assert found == records[: len(found)]
        seen.add(len(found))
    assert seen == {0, 1, 2, 3, 4, 5}


async def test_a_torn_file_is_put_aside_after_its_good_part_was_taken_up(tmp_path):
    async with dying(tmp_path, room=300) as journal:
        await asyncio.gather(*(journal.append(record).written for record in (b"good", b"torn")))
    [path] = tmp_path.iterdir()
    data = path.read_bytes()
    path.write_bytes(data.replace(b"torn", b"t\0\0\0"))
    adopted = await Journal(tmp_path).adopt()
    assert isinstance(adopted, Adopted)
    assert adopted.torn
    assert list(adopted.pending.values()) == [b"good"]
    await adopted.acknowledge(list(adopted.pending))
    await adopted.close()
    assert files(tmp_path) == [".torn"]
    assert await taken(tmp_path) == []


async def test_a_new_file_that_an_adopter_takes_for_a_dead_ones_is_made_again(tmp_path, monkeypatch):
    lock = module._File._lock
    tries = []

    def slow(file: module._File) -> bool:
        tries.append(file.path)
        if len(tries) == 1:
            file.path.unlink()  # an adopter found it empty
        return lock(file)

    monkeypatch.setattr(module._File, "_lock", slow)
    async with dying(tmp_path) as journal:
        assert journal.fault is None
        await journal.append(b"safe").written
        assert len(tries) == 2
    assert await taken(tmp_path) == [b"safe"]


async def test_what_is_parked_is_a_line_each_whatever_was_there_before(tmp_path):
    journal = Journal(tmp_path)
    await journal.park([b'{"a":1}', b'{"b":2}'])
    with (tmp_path / PARKED).open("ab") as file:
        file.write(b'{"torn":')
    await journal.park([b'{"c":3}'])
    assert (tmp_path / PARKED).read_bytes().split(b"\n") == [b'{"a":1}', b'{"b":2}', b'{"torn":', b'{"c":3}', b""]


async def test_nobody_else_can_read_what_it_keeps(tmp_path):
    place = tmp_path / "journal"
    async with Journal(place).opened() as journal:
        await journal.park([b"{}"])
        modes = [path.stat().st_mode & 0o077 for path in (place, *place.iterdir())]
        assert modes == [0, 0, 0]
    assert [path.name for path in place.iterdir()] == [PARKED]


async def test_who_is_cancelled_while_it_looks_keeps_nothing_locked(tmp_path, monkeypatch):
    async with dying(tmp_path) as journal:
        await journal.append(b"left").written
    looks, goes_on = threading.Event(), threading.Event()
    adopt = Journal._adopt

    def slowly(*arguments) -> Adopted | None:
        looks.set()
        goes_on.wait(5)
        return adopt(*arguments)

    monkeypatch.setattr(Journal, "_adopt", slowly)
    looking = asyncio.create_task(Journal(tmp_path).adopt())
    await until(looks.is_set)
    looking.cancel()
    await asyncio.wait((looking,))
    assert looking.cancelled()
    goes_on.set()
    monkeypatch.undo()
    found: list[bytes] = []
    async with asyncio.timeout(30):
        while not found:
            found = await taken(tmp_path)
    assert found == [b"left"]
