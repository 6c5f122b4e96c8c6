"""
Clients that people have, unmodified, against a running gateway: `make test-clients`, or with ARGS the names of some.

Clients whose pins agree share an environment (`.venv-clients/<environment>`, from `requirements-<environment>.txt`
here); none shares ours. Behind the gateway is the simulated provider. The vendors' own clients make it fail, and count
what reached it: they run one after the other. The frameworks ask for nothing of it, and run all at once beside another
gateway.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import shutil
import socket
import tempfile
from contextlib import AsyncExitStack
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

from tests.clients.running import NONE_CHOSEN
from tests.fakes.gateway_process import KEY, gateway_process
from tests.fakes.simulated import simulated_process
from tests.stopping import command

ROOT = Path(__file__).parents[2]
ENVIRONMENTS = ROOT / ".venv-clients"
HERE = Path(__file__).parent
#: Each client's environment and what runs in it.
CLIENTS = {
    "openai": ("openai", "with_openai.py"),
    "anthropic": ("anthropic", "with_anthropic.py"),
    "grpc-requests": ("grpc-requests", "with_grpc_requests.py"),
    "langchain": ("frameworks", "with_langchain.py"),
    "pydantic-ai": ("frameworks", "with_pydantic_ai.py"),
    "openai-agents": ("frameworks", "with_openai_agents.py"),
    "llm": ("frameworks", "with_llm.py"),
    "instructor": ("instructor", "with_instructor.py"),
    "ai-sdk": ("ai-sdk", "ai-sdk/with_ai_sdk.mjs"),
    "openai-waiting": ("openai", "with_openai_waiting.py"),
    "schemathesis": ("schemathesis", "with_schemathesis.py"),
}
ALONE = ("openai", "anthropic", "grpc-requests")
#: At the impatient gateway, one after the other. Schemathesis asks for as much as it can, so that the others would
#: wait: these come when they have ended.
LAST = ("openai-waiting", "schemathesis")
#: The oldest major version of Node that the packages of `ai-sdk` take.
NODE = 18
SKIPPED = -1
#: How much of an error is told again at the end, in characters, and how much of a gateway's log beside it.
TOLD = 1200
LOGGED = 3000
#: What the frameworks would tell to others is not told; the scenarios see to it that nobody else is reached.
SILENCE = {
    "DO_NOT_TRACK": "1",
    "LANGCHAIN_TRACING_V2": "false",
    "LANGSMITH_TRACING": "false",
    "OPENAI_AGENTS_DISABLE_TRACING": "1",
    "OTEL_SDK_DISABLED": "true",
}
#: Of one client, for all it does. `seconds=600` among the words gives it so much more.
PATIENCE_S = 300
HOOK_SECRET = "whsec_MDEyMzQ1Njc4OWFiY2RlZjAxMjM0NTY3ODlhYmNkZWY="

#: For those who look at what is said while a stream has nothing to say. Who looks at the status or the headers of a
#: stream cannot be there: on a slow machine the gateway has begun it before the provider answers.
IMPATIENT = """
[gateway]
stream_commit_after_s = 0.6
stream_keepalive_s = 0.2
"""
#: One provider for each protocol, at one simulated server; a second capacity group where a test needs its own.
CONFIGURATION = """{gateway}
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
first_byte_s = 15
cancel_confirms_after_s = 0
cancel_source = "none"

[providers.messages]
protocol = "anthropic_messages"
base_url = "{url}"
models = ["sim-fast"]
first_byte_s = 15
cancel_confirms_after_s = 0
cancel_source = "none"

[providers.responses]
protocol = "responses"
base_url = "{url}"
first_byte_s = 15
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

# Those of the examples in the published document.
[models."gpt-4o"]
providers = [{{ provider = "chat", model = "sim-fast" }}]
price = {{ input = "0.15", output = "0.60" }}

[models."claude-sonnet"]
providers = [{{ provider = "messages", model = "sim-fast" }}]
price = {{ input = "3", output = "15" }}

[models."text-embedding-3-small"]
providers = [{{ provider = "chat", model = "sim-embed" }}]
price = {{ input = "0.02", output = "0" }}

# It has said something when its connection is cut.
[models.cut]
providers = [{{ provider = "chat", model = "sim-fast?die=rst&die_after=4" }}]

[models.claude-cut]
providers = [{{ provider = "messages", model = "sim-fast?die=rst&die_after=4" }}]

[models.unwell]
providers = [{{ provider = "chat", model = "sim-fast?status=503" }}]

[groups."{group}"]
concurrency = 8
failure_threshold = 100
first_cooldown_s = 0.2

[routing]
backoff_s = []
"""


class Result(NamedTuple):
    client: str
    status: int
    rows: str

    @property
    def failed(self) -> bool:
        return self.status not in {0, NONE_CHOSEN, SKIPPED}

    def why(self) -> str:
        """The rows that failed with their errors, each error without its middle if it is long."""
        passed = re.compile(rf"{re.escape(self.client)} .* (ok +[0-9.]+ s|SKIPPED) +\S+")
        parts: list[list[str]] = []
        for line in self.rows.splitlines():
            if passed.fullmatch(line):
                parts.append([])
            elif not parts or line.startswith(f"{self.client} "):
                parts.append([line])
            else:
                parts[-1].append(line)
        texts = ["\n".join(part) for part in parts if part]
        short = [text if len(text) <= TOLD else f"{text[: TOLD // 2]}\n...\n{text[-TOLD // 2 :]}" for text in texts]
        return "\n".join([f"{self.client} ended with status {self.status}", *short])


async def scenarios(client: str, words: list[str], environ: dict[str, str], data: Path) -> Result:
    """All of one client, in a process of its own; the rows of the table come from there."""
    environment, script = CLIENTS[client]
    home = ENVIRONMENTS / environment
    if not (home / ".ready").exists():
        assert script.endswith(".mjs"), f"{home} is not set up: run make test-clients"
        why = f"all of them: {home.name} is not set up, which needs Node {NODE} or newer and npm"
        return Result(client, SKIPPED, f"{client:<14} {'-':<15} {'SKIPPED':<12} {why}\n")
    if script.endswith(".mjs"):
        # Node looks for packages beside the script.
        shutil.copy(HERE / script, home)
        command = ["node", str(home / Path(script).name)]
    else:
        command = [str(home / "bin/python"), "-m", f"tests.clients.{script.removesuffix('.py')}"]
    patience_s = PATIENCE_S + sum(int(word.partition("=")[2]) for word in words if word.startswith("seconds="))
    process = await asyncio.create_subprocess_exec(
        *command,
        *words,
        cwd=ROOT,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env={**environ, "CLIENTS_NAME": client, "CLIENTS_DATA": str(data)},
        pass_fds=[int(environ["CLIENTS_HOOK_FD"])],
    )
    assert process.stdout is not None
    said = bytearray()
    try:
        async with asyncio.timeout(patience_s):
            while more := await process.stdout.read(65536):
                said += more
            return Result(client, await process.wait(), said.decode())
    except TimeoutError:
        process.kill()
        await process.wait()
        return Result(client, 1, f"{said.decode()}{client} took longer than {patience_s} s\n")


async def beside(gateway: str, clients: list[str], words: list[str], *, at_once: bool) -> list[Result]:
    """What became of these clients at a gateway and a provider of their own; `gateway`: what it is told."""
    async with AsyncExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tollbridge-clients-")))
        provider = await stack.enter_async_context(simulated_process())
        url = urlsplit(provider.url)
        # Of the client that listens itself. Held from here on: a port that is only known to be free is soon another's.
        hook = stack.enter_context(socket.socket())
        hook.bind(("127.0.0.1", 0))
        group = f"{url.scheme}://{url.hostname}:{url.port}"
        toml = CONFIGURATION.format(gateway=gateway, url=provider.url, group=group, hook=hook.getsockname()[1])
        process = await stack.enter_async_context(gateway_process(directory, toml, HOOK_SECRET=HOOK_SECRET))
        environ = {
            "PATH": os.environ["PATH"],
            "PYTHONPATH": str(ROOT),
            "PYTHONPYCACHEPREFIX": str(ENVIRONMENTS / "__pycache__"),
            "CLIENTS_GATEWAY": process.rest_url,
            "CLIENTS_GRPC": process.grpc_target,
            "CLIENTS_KEY": KEY,
            "CLIENTS_HOOK_FD": str(hook.fileno()),
            "CLIENTS_HOOK_SECRET": HOOK_SECRET,
            "CLIENTS_PROVIDER": provider.url.removesuffix("/v1"),
            **SILENCE,
        }
        turns = asyncio.Semaphore(len(clients) if at_once else 1)

        def tell(result: Result) -> Result:
            print(result.rows, end="", flush=True)
            if result.failed:
                # What was logged until now: the clients that come after it have not yet been there.
                print(process.log.read_text()[-LOGGED:], flush=True)
            return result

        async def one(client: str) -> Result:
            async with turns:
                data = directory / f"{client}-data"
                data.mkdir()
                return tell(await scenarios(client, words, environ, data))

        results = await asyncio.gather(*map(one, clients))
        # Whatever a client made of it: a fault of the gateway's own is none of the answers that it may give.
        if faults := process.lines("gateway.request_fault"):
            results.append(tell(Result("gateway", 1, "".join(f"{json.dumps(fault)}\n" for fault in faults))))
        return results


async def run(names: list[str], words: list[str]) -> int:
    print(f"{'client':<14} {'version':<15} {'result':<12} scenario", flush=True)
    alone = [name for name in names if name in ALONE]
    last = [name for name in names if name in LAST]
    others = [name for name in names if name not in (*ALONE, *LAST)]
    sides = []
    if alone:
        sides.append(beside("", alone, words, at_once=False))
    if others:
        sides.append(beside("", others, words, at_once=True))
    results = [result for side in await asyncio.gather(*sides) for result in side]
    if last:
        results += await beside(IMPATIENT, last, words, at_once=False)
    statuses = {result.status for result in results}
    failed = [result for result in results if result.failed]
    if failed:
        # Last, where whoever keeps only the end of what was printed finds it.
        print(*(result.why() for result in failed), sep="\n")
        print(f"failed: {', '.join(result.client for result in failed)} (of {len(names)} clients)")
    elif 0 not in statuses:
        print("nothing was run" if SKIPPED in statuses else f"no scenario has {' or '.join(words)} in its name")
        return 1
    return len(failed)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="tests.clients", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "words", nargs="*", metavar="WORD", help=f"a client, or a part of a scenario's name:\n{', '.join(CLIENTS)}"
    )
    asked: list[str] = parser.parse_args().words
    names = [name for name in CLIENTS if name in asked] or list(CLIENTS)
    return asyncio.run(run(names, [word for word in asked if word not in CLIENTS]))


if __name__ == "__main__":
    command(main)
