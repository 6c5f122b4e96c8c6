"""`tollbridge check --live` against providers that listen: what works, what answers anybody, what fails."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

from click.testing import CliRunner, Result

from gateway.cli import main
from tests.fakes.ports import refusing_port
from tests.fakes.simulated import simulated

FILE = """
[providers.good]
protocol = "chat_completions"
base_url = "{url}"
[providers.open]
protocol = "chat_completions"
base_url = "{url}"
check_is_open = true
[providers.refused]
protocol = "chat_completions"
base_url = "http://127.0.0.1:{closed}/v1"
enabled = {on}
[providers.off]
protocol = "chat_completions"
base_url = "http://127.0.0.1:{closed}/v1"
enabled = false
[providers.bare]
protocol = "chat_completions"
base_url = "{url}"
credentials = ["NOT_SET_ANYWHERE"]
[models.m]
providers = ["good"]
"""


async def check(tmp_path: Path, url: str, closed: int, *arguments: str, on: bool) -> Result:
    file = tmp_path / "tollbridge.toml"
    file.write_text(FILE.format(url=url, closed=closed, on=str(on).lower()))
    # A loop of its own, as on a command line.
    return await asyncio.to_thread(CliRunner().invoke, main, ["check", "--config", str(file), "--live", *arguments])


async def test_every_ready_provider_is_asked_and_a_failing_one_fails_the_check(tmp_path: Path) -> None:
    with refusing_port() as closed:
        async with simulated() as provider:
            told = await check(tmp_path, provider.url, closed, "--json", on=True)
            assert told.exit_code == 1
            found: dict[str, Any] = {entry["provider"]: entry for entry in json.loads(told.stdout)["live"]}
            assert {name: entry["result"] for name, entry in found.items()} == {
                "good": "works",
                "open": "answers",
                "refused": "fails",
            }
            assert found["good"]["latency_ms"] >= 0
            assert "--spend" in found["open"]["hint"]
            assert f"nothing was reached at http://127.0.0.1:{closed}" in found["refused"]["hint"]
            assert "refused: see the table above" in told.stderr
            well = await check(tmp_path, provider.url, closed, on=False)
            assert well.exit_code == 0, well.output
            assert "works" in well.stdout
            # Nothing of it was a call.
            assert await provider.dispatches() == []
