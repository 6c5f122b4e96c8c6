"""
The vendors' own clients, unmodified, against a running gateway: `make test-clients`, or with ARGS the names of some.

Each client runs in an environment of its own (`.venv-clients/<client>`, from `requirements-<client>.txt` here), since
their pins need not agree with ours or with each other's. Behind the gateway is the simulated provider.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
import tempfile
from contextlib import AsyncExitStack
from pathlib import Path
from urllib.parse import urlsplit

from tests.fakes.gateway_process import KEY, gateway_process
from tests.fakes.simulated import simulated_process

ROOT = Path(__file__).parents[2]
CLIENTS = {"openai": "with_openai", "anthropic": "with_anthropic", "grpc-requests": "with_grpc_requests"}
#: Of one client, for all it does.
PATIENCE_S = 180
HOOK_SECRET = "whsec_MDEyMzQ1Njc4OWFiY2RlZjAxMjM0NTY3ODlhYmNkZWY="

#: One provider for each protocol, at one simulated server; a second capacity group where a test needs its own.
CONFIGURATION = """
[gateway]
stream_commit_after_s = 0.6
stream_keepalive_s = 0.2

[jobs]
batch_poll_s = 0.2

[webhooks]
allowed_hosts = ["127.0.0.1:{hook}"]
secret_env = "HOOK_SECRET"
allow_http = true
allow_private = true
poll_s = 0.2

[providers.chat]
protocol = "chat_completions"
base_url = "{url}"
models = ["sim-embed"]
first_byte_s = 3
cancel_confirms_after_s = 0
cancel_source = "none"

[providers.messages]
protocol = "anthropic_messages"
base_url = "{url}"
models = ["sim-fast"]
first_byte_s = 3
cancel_confirms_after_s = 0
cancel_source = "none"

[providers.responses]
protocol = "responses"
base_url = "{url}"
first_byte_s = 3
cancel_confirms_after_s = 0
cancel_source = "none"

[providers.down]
protocol = "chat_completions"
base_url = "http://127.0.0.1:9/v1"

[models.chat]
providers = [{{ provider = "chat", model = "sim-fast" }}]
price = {{ input = "0.15", output = "0.60" }}

[models.claude]
providers = [{{ provider = "messages", model = "sim-fast" }}]
price = {{ input = "3", output = "15" }}

[models.claude-thinking]
providers = [{{ provider = "messages", model = "sim-reasoning" }}]
price = {{ input = "3", output = "15" }}

[models.responses]
providers = [{{ provider = "responses", model = "sim-fast" }}]
price = {{ input = "0.15", output = "0.60" }}

[models.over]
providers = [{{ provider = "down", model = "sim-fast" }}, {{ provider = "chat", model = "sim-fast" }}]
price = {{ input = "0.15", output = "0.60" }}

[models.embed]
providers = [{{ provider = "chat", model = "sim-embed" }}]
price = {{ input = "0.02", output = "0" }}

[models.late]
providers = [{{ provider = "chat", model = "sim-late" }}]
price = {{ input = "0.15", output = "0.60" }}

[groups."{group}"]
concurrency = 8
failure_threshold = 100
first_cooldown_s = 0.2

[routing]
backoff_s = []
"""


def free_port() -> int:
    """For a client that listens itself."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


async def run(names: list[str], words: list[str]) -> int:
    async with AsyncExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tollbridge-clients-")))
        provider = await stack.enter_async_context(simulated_process())
        url = urlsplit(provider.url)
        hook = free_port()
        toml = CONFIGURATION.format(url=provider.url, group=f"{url.scheme}://{url.hostname}:{url.port}", hook=hook)
        gateway = await stack.enter_async_context(gateway_process(directory, toml, HOOK_SECRET=HOOK_SECRET))
        failed = 0
        for name in names:
            print(f"{name}:", flush=True)
            client = await asyncio.create_subprocess_exec(
                str(ROOT / ".venv-clients" / name / "bin/python"),
                "-m",
                f"tests.clients.{CLIENTS[name]}",
                *words,
                cwd=ROOT,
                env={
                    "PATH": os.environ["PATH"],
                    "PYTHONPATH": str(ROOT),
                    "PYTHONDONTWRITEBYTECODE": "1",
                    "CLIENTS_GATEWAY": gateway.rest_url,
                    "CLIENTS_GRPC": gateway.grpc_target,
                    "CLIENTS_KEY": KEY,
                    "CLIENTS_HOOK_PORT": str(hook),
                    "CLIENTS_HOOK_SECRET": HOOK_SECRET,
                    "CLIENTS_PROVIDER": provider.url.removesuffix("/v1"),
                },
            )
            try:
                failed += await asyncio.wait_for(client.wait(), PATIENCE_S) != 0
            except TimeoutError:
                client.kill()
                await client.wait()
                print(f"{name} took longer than {PATIENCE_S} s")
                failed += 1
        if failed:
            print(gateway.log.read_text()[-3000:])
        return failed


def main() -> None:
    asked = sys.argv[1:]
    names = [name for name in CLIENTS if name in asked] or list(CLIENTS)
    sys.exit(asyncio.run(run(names, [word for word in asked if word not in CLIENTS])))


if __name__ == "__main__":
    main()
