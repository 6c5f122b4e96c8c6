"""Lines on their way to a pipe: in order, together, and never in anybody's way."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Iterator

import pytest

from gateway.lines import Lines


class Pipe:
    """A stderr that is read when a test says so."""

    def __init__(self) -> None:
        self._out, into = os.pipe()
        self.into = os.fdopen(into, "w")

    def now(self) -> bytes:
        """What is in it at this moment."""
        os.set_blocking(self._out, False)
        try:
            return os.read(self._out, 1 << 20)
        except BlockingIOError:
            return b""

    def rest(self) -> list[bytes]:
        """All that comes until everybody who writes has closed."""
        os.set_blocking(self._out, True)
        return b"".join(iter(lambda: os.read(self._out, 1 << 16), b"")).splitlines()

    def close(self) -> None:
        os.close(self._out)
        self._out = -1

    def end(self) -> None:
        self.into.close()
        if self._out >= 0:
            self.close()


@pytest.fixture
def pipe() -> Iterator[Pipe]:
    made = Pipe()
    yield made
    made.end()


def lost(count: int) -> bytes:
    return b"lost %d\n" % count


async def test_lines_of_one_turn_go_out_together_when_it_is_over_and_what_is_urgent_at_once(pipe):
    lines = Lines(pipe.into, lost)
    lines.write(b"a\n")
    lines.write(b"b\n")
    assert pipe.now() == b""
    lines.write_now(b"c\n")
    assert pipe.now() == b"a\nb\nc\n"
    lines.write(b"d\n")
    await asyncio.sleep(0)
    assert pipe.now() == b"d\n"


async def test_a_thread_without_a_loop_writes_at_once_and_behind_what_came_before(pipe):
    lines = Lines(pipe.into, lost)
    lines.write(b"a\n")
    await asyncio.to_thread(lines.write, b"b\n")
    await asyncio.sleep(0)
    assert pipe.now() == b"a\nb\n"


def test_what_a_loop_left_behind_is_written_at_the_end_and_by_the_next_loop(pipe):
    lines = Lines(pipe.into, lost)

    async def say(line: bytes) -> None:
        lines.write(line)

    first, second = asyncio.new_event_loop(), asyncio.new_event_loop()
    first.run_until_complete(say(b"a\n"))
    first.close()
    second.run_until_complete(say(b"b\n"))
    second.run_until_complete(asyncio.sleep(0))
    assert pipe.now() == b"a\nb\n"
    second.run_until_complete(say(b"c\n"))
    second.close()
    lines.end()
    assert pipe.now() == b"c\n"


async def test_a_reader_that_does_not_read_holds_nobody_up_and_what_is_too_much_is_counted(pipe, monkeypatch):
    monkeypatch.setattr("gateway.lines.END_S", 60.0)
    most, count = 256 * 1024, 20_000
    lines = Lines(pipe.into, lost, most=most)
    # More than a pipe holds and may wait: this returns although nobody reads.
    for number in range(count):
        lines.write(b"%050d\n" % number)
        if number % 100 == 0:
            await asyncio.sleep(0)
    lines.write_now(b"x" * 50_000 + b"\n")
    found: list[bytes] = []
    reader = threading.Thread(target=lambda: found.extend(pipe.rest()))
    reader.start()
    async with asyncio.timeout(60):
        await asyncio.to_thread(lines.end)
        pipe.into.close()
        await asyncio.to_thread(reader.join)
    numbers = [int(line) for line in found if line.isdigit()]
    said = [int(line.removeprefix(b"lost ")) for line in found if line.startswith(b"lost ")]
    long = [line for line in found if line.startswith(b"x")]
    assert numbers == sorted(numbers)
    assert numbers[0] == 0
    assert len(numbers) + len(long) + sum(said) == count + 1
    assert said


async def test_lines_that_nobody_can_read_any_more_are_no_fault_of_whoever_writes_them(pipe):
    lines = Lines(pipe.into, lost)
    pipe.close()
    lines.write_now(b"a\n")
    lines.write(b"b\n")
    await asyncio.sleep(0)
    lines.end()


def test_a_file_gets_all_of_it_in_order(tmp_path):
    with (tmp_path / "log").open("w") as file:
        lines = Lines(file, lost)
        for number in range(1000):
            lines.write(b"%0100d\n" % number)
        lines.end()
    assert (tmp_path / "log").read_bytes().splitlines() == [b"%0100d" % number for number in range(1000)]
