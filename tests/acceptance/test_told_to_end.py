"""Commands of the tests that start servers: told to end, they leave none of them, and no file."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest


@pytest.mark.parametrize("told", [signal.SIGTERM, signal.SIGINT], ids=lambda told: told.name)
@pytest.mark.parametrize("words", ["tests.benchmarks.startup", "tests.clients ai-sdk"])
def test_a_command_that_is_told_to_end_leaves_nothing_behind(tmp_path: Path, told: signal.Signals, words: str) -> None:
    with subprocess.Popen(
        [sys.executable, "-m", *words.split()],
        env={**os.environ, "TMPDIR": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as command:
        _until_it_serves(command, tmp_path)
        command.send_signal(told)
        _, said = command.communicate(timeout=60)

    assert command.returncode == 128 + signal.SIGINT
    assert said.splitlines()[-1:] == [b"stopped"]
    assert not _at_work(tmp_path)
    assert not list(tmp_path.iterdir())


def _until_it_serves(command: subprocess.Popen[bytes], directory: Path) -> None:
    """Until one of those that work in the directory is a gateway."""
    until = time.monotonic() + 60
    while time.monotonic() < until and command.poll() is None:
        if any("serve" in process.info["cmdline"] for process in _at_work(directory)):
            return
        time.sleep(0.05)
    raise AssertionError("no gateway was started")


def _at_work(directory: Path) -> list[psutil.Process]:
    """Processes of which a word, or their own directory, is in it."""
    return [
        process
        for process in psutil.process_iter(["cmdline", "cwd"])
        if str(directory) in " ".join([*(process.info["cmdline"] or ()), process.info["cwd"] or ""])
    ]
