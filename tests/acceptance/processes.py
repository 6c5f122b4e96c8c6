"""Real gateway processes for acceptance tests: started as an operator would, never outliving their test."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec

#: An operator's key with every scope.
KEY = "acceptance-key-0123456789abcdef"
#: Seconds for a start or an end, on a machine that is busy with other tests.
PATIENCE_S = 60.0


class Process:
    """`tollbridge serve` in a process of its own."""

    def __init__(
        self, process: subprocess.Popen[bytes], *, log: Path, data_dir: Path, database_url: str | None
    ) -> None:
        self.process = process
        self.data_dir = data_dir
        #: None: it has an embedded one.
        self.database_url = database_url
        self._log = log
        self._said: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self.rest = ""
        self.grpc = ""
        #: Every machine line so far.
        self.lines: list[dict[str, Any]] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._said.put(msgspec.json.decode(line))
        self._said.put(None)

    def until(self, event: str) -> dict[str, Any]:
        """The next machine line of this name."""
        while True:
            said = self._said.get(timeout=PATIENCE_S)
            assert said is not None, f"it ended without {event}:\n{self.log}"
            self.lines.append(said)
            if said["event"] == event:
                return said

    def until_ready(self) -> Process:
        ready = self.until("gateway.ready")
        self.rest, self.grpc = ready["rest"], ready["grpc"]
        return self

    @property
    def log(self) -> str:
        return self._log.read_text()

    def events(self, name: str) -> list[dict[str, Any]]:
        """What it logged under this name."""
        found = [msgspec.json.decode(line) for line in self._log.read_bytes().splitlines() if line.startswith(b"{")]
        return [event for event in found if event["event"] == name]

    def get(self, path: str, *, key: str | None = KEY) -> httpx.Response:
        headers = {"authorization": f"Bearer {key}"} if key else {}
        return httpx.get(self.rest + path, headers=headers, trust_env=False, timeout=PATIENCE_S)

    def until_heard(self, key: str) -> None:
        """Until it accepts a key that was made elsewhere."""
        deadline = time.monotonic() + PATIENCE_S
        while self.get("/v1/models", key=key).status_code != 200:
            assert time.monotonic() < deadline, "the key is not accepted"
            time.sleep(0.02)

    def end(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Send the signal and wait for the end: the exit status."""
        self.process.send_signal(number)
        status = self.process.wait(PATIENCE_S)
        self._reader.join(PATIENCE_S)
        while (said := self._said.get(timeout=PATIENCE_S)) is not None:
            self.lines.append(said)
        return status


@contextlib.contextmanager
def served(
    data_dir: Path,
    *options: str,
    configuration: str = "",
    environ: dict[str, str | None] | None = None,
    here: Path | None = None,
) -> Iterator[Process]:
    """
    A gateway on free ports with this configuration file. Of the caller's environment it sees nothing of ours.

    `environ` adds variables, or with None takes away those that are set by default. `here` is where it is started.
    """
    data_dir.mkdir(exist_ok=True)
    file = data_dir / "tollbridge.toml"
    file.write_text(configuration)
    variables: dict[str, str | None] = {
        **{name: value for name, value in os.environ.items() if not name.startswith("TOLLBRIDGE_")},
        "TOLLBRIDGE_CONFIG": str(file),
        "TOLLBRIDGE_DATA_DIR": str(data_dir),
        "TOLLBRIDGE_REST_LISTEN": "127.0.0.1:0",
        "TOLLBRIDGE_GRPC_LISTEN": "127.0.0.1:0",
        "TOLLBRIDGE_API_KEY": KEY,
        **(environ or {}),
    }
    log = data_dir / f"gateway-{len(list(data_dir.glob('gateway-*.log')))}.log"
    with log.open("wb") as stderr:
        process = subprocess.Popen(
            [sys.executable, "-m", "gateway", "serve", *options],
            env={name: value for name, value in variables.items() if value is not None},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=stderr,
            cwd=here,
        )
    found = Process(process, log=log, data_dir=data_dir, database_url=variables.get("TOLLBRIDGE_DATABASE_URL"))
    try:
        yield found
    finally:
        process.kill()
        process.wait()
        found._reader.join(PATIENCE_S)
        assert process.stdout is not None
        process.stdout.close()
