"""A PostgreSQL of the test's own: to be killed, restarted, given another clock, and put back to an earlier state."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import urllib.parse
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import psutil

from gateway import database
from gateway.embedded import EmbeddedPostgres

#: Processes are killed here, never the machine: what was written survives without being flushed.
SETTINGS: Mapping[str, str] = {"fsync": "off", "max_connections": "120"}
_PACKAGE = "faketime"


class FaketimeMissing(Exception):
    """libfaketime is not on this machine. Debian's package is called `faketime` (its library `libfaketime`)."""


def faketime_library() -> str:
    """The library to preload. Raises `FaketimeMissing`."""
    named = os.environ.get("FAKETIME_LIBRARY")
    places = [Path(named)] if named else []
    for prefix in ("/usr/lib", "/usr/lib64", "/usr/local/lib", "/opt/homebrew/lib"):
        # The library for threads: an interpreter has some.
        places += sorted(Path(prefix).glob("**/faketime/libfaketimeMT.so*"))
    for place in places:
        if place.is_file():
            return str(place)
    raise FaketimeMissing(
        f"libfaketime is needed for the clock scenarios: apt-get install {_PACKAGE} (or set FAKETIME_LIBRARY)"
    )


class Clock:
    """A clock that a file moves: seconds off the machine's, for every process that was started with `environ`."""

    def __init__(self, directory: Path) -> None:
        self._file = directory / "clock"
        self.environ = {
            "LD_PRELOAD": faketime_library(),
            "FAKETIME_TIMESTAMP_FILE": str(self._file),
            "FAKETIME_NO_CACHE": "1",
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        }
        # Another account reads it, and the way to it.
        directory.chmod(0o755)
        self.step(0)

    def step(self, seconds: int) -> None:
        new = self._file.with_suffix(".new")
        new.write_text(f"{seconds:+d}\n")
        new.chmod(0o644)
        new.replace(self._file)


class Server:
    """Blocking calls; made by `postgres_server`."""

    def __init__(self, directory: Path, settings: Mapping[str, str], environ: Mapping[str, str]) -> None:
        self._directory = directory
        self._settings = settings
        self._environ = environ
        with _environment(environ):
            self._embedded = EmbeddedPostgres.start(directory, settings=settings)

    def url(self, name: str = "postgres") -> str:
        return urllib.parse.urlsplit(self._embedded.url)._replace(path=f"/{name}").geturl()

    @property
    def postmaster(self) -> int:
        return int((self._directory / "postgres" / "postmaster.pid").read_text().split("\n")[0])

    def kill(self, *, backends: bool = True) -> None:
        """SIGKILL, to the postmaster alone or to all it has; returns when it no longer runs."""
        postmaster = psutil.Process(self.postmaster)
        processes = [postmaster, *(postmaster.children(recursive=True) if backends else [])]
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(processes, timeout=10)

    def immediate(self) -> None:
        """What `pg_ctl stop -m immediate` does."""
        postmaster = psutil.Process(self.postmaster)
        postmaster.send_signal(signal.SIGQUIT)
        psutil.wait_procs([postmaster], timeout=10)

    def start(self) -> None:
        """Back again, recovered."""
        with _environment(self._environ):
            self._embedded.restart_if_dead(timeout_s=60)

    def stop(self) -> None:
        self._embedded.stop()

    def copied(self, directory: Path) -> Path:
        """
        A copy of what it has on disk, made while it stands still; it runs on afterwards.

        Started with `promoted`, it is what a standby is that was cut off at this moment and promoted later.
        """
        self.immediate()
        # The owner stays the same: the server runs as that account.
        directory.mkdir(parents=True, mode=0o700)
        subprocess.run(
            ["cp", "-a", str(self._directory / "postgres"), str(directory / "postgres")], check=True, timeout=60
        )
        self.start()
        return directory


def promoted(directory: Path, settings: Mapping[str, str] = SETTINGS) -> Server:
    """Starts a copy on a timeline of its own."""
    cluster = directory / "postgres"
    signal_file = cluster / "recovery.signal"
    signal_file.touch()
    owner = cluster.stat()
    os.chown(signal_file, owner.st_uid, owner.st_gid)
    # An archive that has nothing: recovery ends where the copy does, and the server goes its own way from there.
    return Server(directory, {**settings, "restore_command": "/bin/false"}, {})


@contextlib.contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """For the processes started inside. The embedded server passes on what is preloaded."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@asynccontextmanager
async def postgres_server(
    directory: Path, *, settings: Mapping[str, str] | None = None, environ: Mapping[str, str] | None = None
) -> AsyncIterator[Server]:
    server = await asyncio.to_thread(Server, directory, {**SETTINGS, **(settings or {})}, environ or {})
    try:
        yield server
    finally:
        await asyncio.to_thread(server.stop)
        shutil.rmtree(directory, ignore_errors=True)


async def fresh_database(server: Server, name: str) -> None:
    """A migrated database of this name."""
    async with database.open_connection(server.url(), name="faults", wait_s=20) as connection:
        await connection.execute(f"create database {name}")
    await database.migrate(server.url(name))
