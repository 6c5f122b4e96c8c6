"""The supervisor over stand-in workers: small real processes that print what a gateway would."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import msgspec
import pytest

from gateway import workers
from gateway.workers import PortTaken, Ready, Stop, Supervisor, WorkerFailed

#: Prints the ready line, notes its life in a file, ends at SIGTERM or at the end of its input.
STAND_IN = """
import os, pathlib, signal, sys
place = pathlib.Path(sys.argv[1])
number = os.environ["TOLLBRIDGE_WORKER"]
def end(*_):
    (place / f"drained-{number}-{os.getpid()}").touch()
    os._exit(0)
signal.signal(signal.SIGTERM, signal.SIG_IGN if "deaf" in sys.argv else end)
(place / f"life-{number}-{os.getpid()}").touch()
print('{"event":"gateway.ready","rest":"http://127.0.0.1:1","grpc":"127.0.0.1:2"}', flush=True)
sys.stdin.read()
end()
"""


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110  other processes give no event to wait for
            await asyncio.sleep(0.005)


def lives(place: Path, number: int) -> set[int]:
    return {int(path.name.rpartition("-")[2]) for path in place.glob(f"life-{number}-*")}


def drained(place: Path) -> int:
    return len(list(place.glob("drained-*")))


@contextlib.asynccontextmanager
async def supervised(place: Path, *options: str, drain_s: float = 10) -> AsyncIterator[Stop]:
    stop, ready = Stop(), asyncio.Event()
    supervisor = Supervisor(
        [sys.executable, "-c", STAND_IN, str(place), *options],
        count=2,
        environ=dict(os.environ),
        stop=stop,
        drain_s=drain_s,
        on_ready=ready.set,
    )
    running = asyncio.create_task(supervisor.run())
    async with asyncio.timeout(20):
        await ready.wait()
    yield stop
    stop.ask()
    async with asyncio.timeout(20):
        await running


async def test_a_worker_that_dies_is_started_again_and_the_others_go_on(tmp_path):
    async with supervised(tmp_path):
        [first], [other] = lives(tmp_path, 1), lives(tmp_path, 2)
        os.kill(first, signal.SIGKILL)
        await until(lambda: len(lives(tmp_path, 1)) == 2)
        assert lives(tmp_path, 2) == {other}
    assert drained(tmp_path) == 2


async def test_the_stop_drains_every_worker_once(tmp_path):
    async with supervised(tmp_path) as stop:
        stop.ask()
    assert drained(tmp_path) == 2


async def test_a_worker_that_does_not_drain_in_its_time_is_killed(tmp_path, monkeypatch):
    monkeypatch.setattr(workers, "LAST_GRACE_S", 0.05)
    async with supervised(tmp_path, "deaf", drain_s=0.05):
        pass
    assert drained(tmp_path) == 0
    for number in (1, 2):
        [pid] = lives(tmp_path, number)
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


async def test_a_second_stop_does_not_wait_for_the_drain_deadline(tmp_path, monkeypatch):
    monkeypatch.setattr(workers, "LAST_GRACE_S", 0.05)
    async with supervised(tmp_path, "deaf", drain_s=600) as stop:
        stop.ask()
    assert drained(tmp_path) == 0


async def test_workers_end_when_their_parent_is_killed(tmp_path):
    parent = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        "import asyncio, os, sys\n"
        "from gateway.workers import Stop, Supervisor\n"
        "async def main():\n"
        "    supervisor = Supervisor([sys.executable, '-c', *sys.argv[1:]], count=2, environ=dict(os.environ),\n"
        "                            stop=Stop(), drain_s=10, on_ready=lambda: None)\n"
        "    await supervisor.run()\n"
        "asyncio.run(main())\n",
        STAND_IN,
        str(tmp_path),
        stderr=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL,
    )
    await until(lambda: bool(lives(tmp_path, 1) and lives(tmp_path, 2)))
    parent.kill()
    await parent.wait()
    await until(lambda: drained(tmp_path) == 2)


async def test_a_worker_that_cannot_start_ends_them_all_with_an_error(tmp_path):
    supervisor = Supervisor(
        [sys.executable, "-c", "import os, sys; sys.exit(3) if os.environ['TOLLBRIDGE_WORKER'] == '2' else input()"],
        count=2,
        environ=dict(os.environ),
        stop=Stop(),
        drain_s=10,
        on_ready=lambda: pytest.fail("it is not ready"),
    )
    async with asyncio.timeout(20):
        with pytest.raises(WorkerFailed, match="worker 2 ended with status 3"):
            await supervisor.run()


def test_a_free_port_is_held_for_workers_to_listen_on():
    with workers.reserved("127.0.0.1", 0) as port, workers.reserved("127.0.0.1", 0) as another:
        assert port != another
        for _ in range(2):
            with socket.socket() as listener:
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
                listener.bind(("127.0.0.1", port))
                listener.listen()
                with socket.create_connection(("127.0.0.1", port)):
                    listener.accept()[0].close()


def test_a_port_that_another_program_listens_on_is_refused_even_where_it_would_share():
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        with pytest.raises(PortTaken, match="cannot listen on"), workers.reserved(*listener.getsockname()):
            pass


async def test_the_ready_file_appears_whole_and_goes_away(tmp_path):
    path = tmp_path / "ready.json"
    ready = Ready(rest="http://127.0.0.1:8080", grpc="127.0.0.1:50051", pid=7)
    with workers.ready_file(path, ready):
        assert msgspec.json.decode(path.read_bytes()) == {
            "event": "gateway.ready",
            "rest": "http://127.0.0.1:8080",
            "grpc": "127.0.0.1:50051",
            "pid": 7,
        }
    assert list(tmp_path.iterdir()) == []


async def test_the_ready_file_of_another_gateway_is_left_alone_and_replaced_when_it_goes(tmp_path, monkeypatch):
    monkeypatch.setattr(workers, "_KEEP_READY_S", 0.01)
    path = tmp_path / "ready.json"
    with workers.ready_file(path, Ready(rest="http://127.0.0.1:8080", grpc="127.0.0.1:50051", pid=7)):
        path.write_bytes(b"another")
        await asyncio.sleep(0.05)
        assert path.read_bytes() == b"another"
        path.unlink()
        await until(path.exists)
        path.write_bytes(b"another")
    assert path.read_bytes() == b"another"
