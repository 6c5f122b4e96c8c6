"""A PgBouncer of the test's own, which hands out sessions by transaction."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

#: Sessions of the server for everybody: fewer than connections of the gateways, so that each is handed to and fro.
SESSIONS: Final = 8


class PoolerMissing(Exception):
    """PgBouncer is not on this machine."""


def pgbouncer() -> str:
    """The program. Raises `PoolerMissing`."""
    found = shutil.which("pgbouncer") or shutil.which("pgbouncer", path="/usr/sbin:/usr/local/sbin:/opt/homebrew/bin")
    if found is None:
        raise PoolerMissing("PgBouncer is needed for the pooler scenario; on Debian: apt-get install pgbouncer")
    return found


class Pooler:
    """Made by `pooler`. It can be killed and started again at the same port."""

    def __init__(self, directory: Path, server_port: int) -> None:
        self._program = pgbouncer()
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            self.port: int = taken.getsockname()[1]
        directory.mkdir(parents=True, exist_ok=True)
        self.log = directory / "pgbouncer.log"
        self._config = directory / "pgbouncer.ini"
        # No startup parameter is ignored: a setting that a pooler would swallow is an error here.
        self._config.write_text(
            f"""
            [databases]
            * = host=127.0.0.1 port={server_port} user=postgres
            [pgbouncer]
            listen_addr = 127.0.0.1
            listen_port = {self.port}
            unix_socket_dir =
            auth_type = any
            pool_mode = transaction
            default_pool_size = {SESSIONS}
            max_client_conn = 500
            server_login_retry = 1
            server_idle_timeout = 5
            """.replace("\n            ", "\n")
        )
        self._process: asyncio.subprocess.Process | None = None

    @property
    def url(self) -> str:
        return f"postgresql://postgres@127.0.0.1:{self.port}/postgres"

    async def start(self) -> None:
        """Returns when it can be connected to. Raises `TimeoutError`."""
        # It refuses to run as root.
        account = ["-u", "nobody"] if os.geteuid() == 0 else []
        with self.log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                self._program, *account, str(self._config), stdout=log, stderr=subprocess.STDOUT
            )
        deadline = time.monotonic() + 10
        while True:
            with contextlib.suppress(OSError):
                _, writer = await asyncio.open_connection("127.0.0.1", self.port)
                writer.close()
                return
            if time.monotonic() > deadline or self._process.returncode is not None:
                raise TimeoutError(f"PgBouncer does not answer: {self.log.read_text()[-2000:]}")
            await asyncio.sleep(0.02)

    async def kill(self) -> None:
        """kill -9."""
        assert self._process is not None
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGKILL)
        await self._process.wait()


@asynccontextmanager
async def pooler(directory: Path, server_port: int) -> AsyncIterator[Pooler]:
    """One in front of the server at this port of 127.0.0.1. Raises `PoolerMissing`."""
    made = Pooler(directory, server_port)
    await made.start()
    try:
        yield made
    finally:
        await made.kill()
