"""What the runs with other people's clients stand on: they stay on this machine, and what they install is known."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

from tests.clients.__main__ import TOLD, Result

ROOT = Path(__file__).parents[2]
STRAYING = """
import socket, urllib.request
from tests.clients import loopback

loopback.stay()
own = socket.create_server(("127.0.0.1", 0))
socket.create_connection(own.getsockname()).close()
for reach in (
    lambda: socket.create_connection(("192.0.2.1", 80), 1),
    lambda: urllib.request.urlopen("http://telemetry.invalid/", timeout=1),
    lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b"x", ("192.0.2.2", 9)),
):
    try:
        reach()
    except OSError:
        pass
print(*loopback.strangers)
"""


def test_a_client_that_would_reach_another_machine_is_stopped_and_told():
    done = subprocess.run([sys.executable, "-c", STRAYING], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["192.0.2.1", "telemetry.invalid", "192.0.2.2"]


def test_each_package_of_a_client_is_locked_by_its_hash_and_no_index_is_named():
    for requirements in ROOT.glob("tests/clients/requirements-*.txt"):
        text = requirements.read_text()
        assert "://" not in text, requirements
        for package in text.replace("\\\n", " ").splitlines():
            assert "==" in package, package
            assert "--hash=sha256:" in package, package
    packages = json.loads((ROOT / "tests/clients/ai-sdk/package-lock.json").read_text())["packages"]
    for name, package in packages.items():
        assert "resolved" not in package, name
        assert not name or package["integrity"].startswith("sha512-"), name


def test_the_versions_in_the_documents_are_those_that_are_tried():
    told = dict(re.findall(r"^\| `([\w@/-]+)` \| ([\d.]+) \|", (ROOT / "docs/drop-in.md").read_text(), re.MULTILINE))
    packages = json.loads((ROOT / "tests/clients/ai-sdk/package-lock.json").read_text())["packages"]
    tried = {name.removeprefix("node_modules/"): package.get("version", "") for name, package in packages.items()}
    # Another environment may hold an older one of a vendor's own client.
    for environment in ("instructor", "frameworks", "openai", "anthropic"):
        text = (ROOT / f"tests/clients/requirements-{environment}.txt").read_text()
        tried.update(re.findall(r"^([\w-]+)==([\d.]+)", text, re.MULTILINE))
    assert len(told) == 12
    assert told == {name: tried[name] for name in told}


def test_what_failed_is_told_again_with_its_errors_and_without_the_rows_that_passed():
    rows = [
        "RuntimeWarning: before the first row",
        "openai         2.46.0          ok  0.03 s   a_chat_is_answered",
        "openai         2.46.0          FAILED       a_stream_is_cut",
        "    AssertionError: no APIError",
        "openai         2.46.0          ok  1.13 s   models_are_listed",
        "openai         2.46.0          FAILED       a_batch_is_run",
        f"    {'x' * 2 * TOLD}",
        "    ValueError: at its end",
        "openai took longer than 300 s",
    ]
    told = Result("openai", 1, "\n".join(rows)).why().splitlines()
    assert told[0] == "openai ended with status 1"
    assert told[1:5] == [rows[0], *rows[2:4], rows[5]]
    assert told[-2:] == rows[-2:]
    assert len("\n".join(told)) < 2 * TOLD
    assert not any(" ok " in line for line in told)


def test_a_client_that_died_without_a_word_is_told_by_its_status():
    assert Result("llm", -9, "").why() == "llm ended with status -9"
    assert [Result("llm", status, "").failed for status in (0, 1, -9)] == [False, True, True]
