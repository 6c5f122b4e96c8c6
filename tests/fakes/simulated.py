"""
The simulated provider as fixtures: `simulator` in this process, `simulator_process` in one of its own.

Both give a `SimulatedProvider`; both are fresh for each test and on a free port.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import pytest

from adapters.simulator.server import Settings, Simulator, serve


class SimulatedProvider:
    """A running simulated provider. `url` is the base URL that a provider's configuration takes."""

    def __init__(self, url: str, client: httpx.AsyncClient, *, pid: int) -> None:
        self.url = url
        self.pid = pid
        self._client = client
        self._control = url.removesuffix("/v1") + "/_control"

    async def ledger(self) -> dict[str, Any]:
        """The sums: dispatches, completed, active, peak_concurrency, tokens_in, tokens_out, by_model, ..."""
        response = await self._client.get(f"{self._control}/ledger")
        sums: dict[str, Any] = response.raise_for_status().json()
        return sums

    async def dispatches(self) -> list[dict[str, Any]]:
        """A record of each dispatch, in order of arrival."""
        response = await self._client.get(f"{self._control}/ledger", params={"detail": "1"})
        return [json.loads(line) for line in response.raise_for_status().text.split("\n") if line]

    async def set_faults(self, *, model: str | None = None, **faults: Any) -> None:
        """Replaces the faults of the whole server, or of one model; without any, takes them away."""
        params = {"model": model} if model else {}
        (await self._client.post(f"{self._control}/faults", params=params, json=faults)).raise_for_status()

    async def reset(self) -> None:
        (await self._client.post(f"{self._control}/reset")).raise_for_status()

    async def until(
        self, reached: Callable[[dict[str, Any]], bool] = lambda ledger: ledger["active"] == 0, *, within: float = 60.0
    ) -> dict[str, Any]:
        """The ledger once it is so. Raises `TimeoutError` after `within` seconds."""
        async with asyncio.timeout(within):
            while not reached(ledger := await self.ledger()):  # noqa: ASYNC110  it may be another process
                await asyncio.sleep(0.005)
            return ledger


@contextlib.asynccontextmanager
async def simulated(settings: Settings | None = None) -> AsyncIterator[SimulatedProvider]:
    """One in this process, with settings of its own."""
    async with serve(simulator=Simulator(settings)) as url, httpx.AsyncClient(trust_env=False, verify=False) as client:
        yield SimulatedProvider(url, client, pid=os.getpid())


@contextlib.asynccontextmanager
async def simulated_process(*arguments: str) -> AsyncIterator[SimulatedProvider]:
    """One in a process of its own; the arguments are those of `python -m adapters.simulator`."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "adapters.simulator", *arguments, stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    try:
        ready = json.loads(await asyncio.wait_for(process.stdout.readline(), 120))
        assert ready["event"] == "simulator.ready"
        async with httpx.AsyncClient(trust_env=False, verify=False) as client:
            yield SimulatedProvider(ready["url"], client, pid=process.pid)
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGTERM)
        await process.communicate()


@pytest.fixture
async def simulator() -> AsyncIterator[SimulatedProvider]:
    async with simulated() as provider:
        yield provider


@pytest.fixture
async def simulator_process() -> AsyncIterator[SimulatedProvider]:
    async with simulated_process() as provider:
        yield provider
