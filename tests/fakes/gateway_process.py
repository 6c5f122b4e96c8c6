"""Real gateway processes, started as a person starts them, and the clients that talk to them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import httpx

from protos.tollbridge.v1 import gateway_pb2, gateway_pb2_grpc

KEY = "acceptance-test-key-0123456789"
METADATA = (("authorization", f"Bearer {KEY}"),)


def bearer(secret: str) -> dict[str, str]:
    return {"authorization": f"Bearer {secret}"}


class NotStarted(AssertionError):
    """The gateway has ended before it was ready. The message is the end of its log."""


class GatewayProcess:
    """`python -m gateway serve` in a data directory of its own."""

    def __init__(self, data_dir: Path, config: Path, environ: dict[str, str], arguments: tuple[str, ...]) -> None:
        self.data_dir = data_dir
        self._config = config
        self._environ = environ
        self._arguments = arguments
        self._process: asyncio.subprocess.Process | None = None
        self.rest_url = ""
        self.grpc_target = ""
        self.log = data_dir.with_suffix(".log")

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    async def start(self) -> None:
        with self.log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "gateway",
                "serve",
                "--config",
                str(self._config),
                *self._arguments,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                env={
                    **{name: value for name, value in os.environ.items() if not name.startswith("TOLLBRIDGE_")},
                    "TOLLBRIDGE_DATA_DIR": str(self.data_dir),
                    "TOLLBRIDGE_REST_LISTEN": "127.0.0.1:0",
                    "TOLLBRIDGE_GRPC_LISTEN": "127.0.0.1:0",
                    "TOLLBRIDGE_API_KEY": KEY,
                    **self._environ,
                },
            )
        assert self._process.stdout is not None
        async with asyncio.timeout(120):
            while line := await self._process.stdout.readline():
                said = json.loads(line)
                if said["event"] == "gateway.ready":
                    self.rest_url, self.grpc_target = said["rest"], said["grpc"]
                    return
        await self._process.wait()
        raise NotStarted(f"the gateway did not start:\n{self.log.read_text()[-4000:]}")

    def send(self, number: signal.Signals) -> None:
        assert self._process is not None
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(number)

    async def ended(self, within_s: float = 90) -> int:
        assert self._process is not None
        async with asyncio.timeout(within_s):
            await self._process.communicate()
        assert self._process.returncode is not None
        return self._process.returncode

    async def kill(self) -> None:
        """kill -9."""
        self.send(signal.SIGKILL)
        await self.ended()

    async def stop(self) -> int:
        self.send(signal.SIGTERM)
        return await self.ended()

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.returncode is None

    @asynccontextmanager
    async def rest(self) -> AsyncIterator[httpx.AsyncClient]:
        async with httpx.AsyncClient(
            base_url=self.rest_url, headers={"authorization": f"Bearer {KEY}"}, timeout=60, trust_env=False
        ) as client:
            yield client

    @asynccontextmanager
    async def stub(self) -> AsyncIterator[gateway_pb2_grpc.GatewayStub]:
        async with grpc.aio.insecure_channel(self.grpc_target) as channel:
            yield gateway_pb2_grpc.GatewayStub(channel)

    def lines(self, event: str) -> list[dict[str, Any]]:
        """What it has logged under this name."""
        found = [json.loads(line) for line in self.log.read_text().splitlines() if line.startswith("{")]
        return [line for line in found if line["event"] == event]


@asynccontextmanager
async def gateway_process(
    tmp_path: Path, toml: str, *, name: str = "gateway", arguments: tuple[str, ...] = (), **environ: str
) -> AsyncIterator[GatewayProcess]:
    """One gateway; killed at the end if the test has not ended it."""
    config = tmp_path / f"{name}.toml"
    config.write_text(toml)
    gateway = GatewayProcess(tmp_path / name, config, environ, arguments)
    try:
        await gateway.start()
        yield gateway
    finally:
        if gateway.running:
            gateway.send(signal.SIGTERM)
            try:
                await gateway.ended(20)
            except TimeoutError:
                await gateway.kill()


def completion(model: str, text: str = "what is a bridge?", **fields: Any) -> gateway_pb2.CompletionRequest:
    return gateway_pb2.CompletionRequest(model=model, messages=[gateway_pb2.Message(role="user", text=text)], **fields)


def batch_line(model: str, number: int, **fields: Any) -> dict[str, Any]:
    return {
        "custom_id": f"line-{number}",
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": {
            "model": model,
            "messages": [{"role": "user", "content": f"question {number}"}],
            "metadata": {"request": f"line-{number}"},
        },
        **fields,
    }
