"""
`tollbridge demo`: the whole gateway at work, against a simulated provider, and proof that what it says is true.

The provider keeps a ledger of its own. What the gateway reports about requests, tokens, cost and concurrency is
compared with it and with sums made here by hand, and only if all of it agrees is the exit status 0.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.resources
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import click
import httpx
import msgspec
from rich.console import Console

from adapters.simulator import server as simulator
from gateway import client
from gateway.cli import groups as groups_command
from gateway.cli import jobs, remote, tables
from gateway.cli import usage as usage_command
from gateway.cli.failure import Failed

PLACE = Path(remote.DEFAULT_DATA_DIR) / "demo"
SESSION = "demo"
LIMIT = 16
#: USD per million tokens, as they stand in the configuration that is written.
PRICES: Mapping[str, tuple[str, str]] = {"sim-small": ("0.15", "0.60"), "sim-large": ("2.50", "10.00")}
#: Slow enough to be seen, in the simulator's own words.
PACE: Mapping[str, Any] = {"latency": 0.05, "jitter": 0.1, "pace": 0.012}
#: Seconds the gateway may take to start, a new database included, and to stop.
START_S, STOP_S = 90.0, 30.0
QUESTION = "What does a toll bridge have in common with an API gateway?"

CONFIGURATION = """\
# Written by `tollbridge demo`. The same shape serves real providers: see README.md.
[providers.simulated]
name = "Simulated provider"
protocol = "chat_completions"
base_url = "{base_url}"
models = [{models}]

[groups."{group}"]
concurrency = {limit}
queue = 500
"""
MODEL = """
[models."{name}"]
providers = ["simulated"]
price = {{ input = "{input}", output = "{output}" }}
"""


@click.command("demo")
def command() -> None:
    """
    See it work. Needs no provider key, no configuration, and leaves nothing running.

    A gateway with an embedded PostgreSQL and a simulated provider are started on free ports. 200 requests are
    submitted as a JSONL file, one of them malformed, and followed to their end; one more is streamed. Then what the
    gateway says about capacity, tokens and cost is compared with the provider's own ledger. The exit status is 0 only
    if everything agrees.

    \b
    Example:
      tollbridge demo

    Next: `tollbridge serve` with a provider's key in the environment.
    """  # noqa: D301  a real backspace: click keeps the paragraph's lines
    out = tables.console()
    began = time.monotonic()
    # A supervisor's stop takes away what was begun, as Ctrl-C does.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        PLACE.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise Failed(f"{PLACE} cannot be made here: {error.strerror}", hint="Go to a directory of yours.") from error
    with contextlib.ExitStack() as stack:
        provider = stack.enter_context(_simulated())
        data_dir = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tollbridge-demo-")))
        gateway = stack.enter_context(_gateway(out, _configuration(provider), data_dir))
        checks = _tour(out, provider, gateway)
    out.print(f"stopped; {time.monotonic() - began:.1f} s in all", style="dim")
    for check in checks:
        mark = tables.text("yes", "green") if check.true else tables.text("NO ", "bold red")
        out.print(mark, tables.text(f"{check.claim}: {check.found}", ""))
    if wrong := sum(not check.true for check in checks):
        raise Failed(
            f"{wrong} of {len(checks)} claims did not hold", hint=f"The gateway's log: {PLACE / 'gateway.log'}"
        )
    out.print(f"\nAll {len(checks)} hold. Next: `tollbridge serve` with a provider's key in the environment.")


class Check(msgspec.Struct, frozen=True):
    claim: str
    true: bool
    found: str


class Running(msgspec.Struct, frozen=True):
    """The gateway of this demo."""

    rest: str
    grpc: str
    key: str


def _tour(out: Console, provider: str, running: Running) -> list[Check]:
    requests = importlib.resources.files("gateway.cli").joinpath("demo_requests.jsonl").read_bytes()
    lines = requests.splitlines()
    [malformed] = [number for number, line in enumerate(lines, 1) if _custom_id(line) is None]
    results_file = PLACE / "results.jsonl"

    gateway = remote.Remote(running.rest, running.key)
    with contextlib.closing(gateway):
        tables.heading(out, "jobs over REST")
        out.print(f"submitting {len(lines)} requests, {len(requests):,} bytes of JSONL, line {malformed} is malformed")
        receipt = gateway.post("/v1/jobs", jobs.with_session(requests, SESSION), media_type="application/x-ndjson")
        submission = receipt["submission_id"]
        out.print(f"submission {submission}: {receipt['accepted']} accepted, {receipt['rejected']} refused\n")
        occupied = _Occupied(gateway)
        counted = jobs.watch_submission(gateway, submission, len(lines), out=out, note=occupied.look)
        out.print()

        tables.heading(out, "a stream over gRPC")
        finished = asyncio.run(_stream(out, running))
        out.print("\n")

        tables.heading(out, "what it came to")
        jobs.show_statuses(out, counted)
        jobs.show_refused(out, receipt["errors"])
        jobs.write_results(gateway, results_file, submission_id=submission)
        done = list(jobs.all_jobs(gateway, {"submission_id": submission}))
        used = gateway.get("/v1/usage", session_id=SESSION)
        usage_command.show(out, used, session=SESSION)
        groups = gateway.get("/v1/groups")["groups"]
        groups_command.show(out, groups)
        out.print(f"results: {results_file}\n")

    ledger = _get(provider.removesuffix("/v1") + "/_control/ledger")
    by_line = {result["line"]: result for result in map(msgspec.json.decode, results_file.read_bytes().splitlines())}
    errors = [by_line[malformed]["error"]] if malformed in by_line else []
    spent = _by_hand(done)
    streamed = Decimal(finished.outcome.cost.usd) if finished is not None else Decimal(-1)
    tokens = _tokens(done, finished)
    good = len(lines) - 1
    session, day, total = (Decimal((used[name] or {}).get("charged_usd", -1)) for name in ("session", "day", "total"))
    return [
        Check("every good line succeeded", counted == {"succeeded": good, "failed": 1}, _counts(counted)),
        Check(
            "the malformed line came back as an error with its number",
            len(errors) == 1 and bool(errors[0]["code"]) and receipt["errors"][0]["line"] == malformed,
            "; ".join(f"line {malformed}: {error['code']}: {error['message']}" for error in errors) or "it did not",
        ),
        Check(
            "the results file answers every line, joined by custom_id",
            len(by_line) == len(lines)
            and all(by_line[number]["custom_id"] == _custom_id(line) for number, line in enumerate(lines, 1))
            and sum(result["response"] is not None for result in by_line.values()) == good,
            f"{len(by_line)} lines",
        ),
        Check(
            "the stream arrived token by token and proved its end",
            finished is not None and finished.outcome.settlement == "settled",
            f"cost {tables.usd(finished.outcome.cost.usd)}" if finished is not None else "it did not",
        ),
        Check(
            "the provider was called once for each, by its own ledger",
            ledger["dispatches"] == ledger["completed"] == good + 1,
            f"{ledger['dispatches']} calls",
        ),
        Check(
            "never more at once than the limit, by the provider's own ledger",
            0 < ledger["peak_concurrency"] <= LIMIT,
            f"at most {ledger['peak_concurrency']} of {LIMIT} (one is kept for interactive calls);"
            f" the gateway showed up to {occupied.most}",
        ),
        Check(
            "the tokens are the provider's",
            tokens == (ledger["tokens_in"], ledger["tokens_out"]),
            f"{tokens[0]:,} in, {tokens[1]:,} out",
        ),
        Check(
            "the jobs cost what usage times price makes by hand",
            spent == sum((Decimal(job["cost_usd"] or 0) for job in done), Decimal(0)) and spent > 0,
            tables.usd(spent),
        ),
        Check(
            "session, day and total are the sum of all charges",
            session == day == total == spent + streamed,
            f"{tables.usd(session)} = {tables.usd(spent)} + {tables.usd(streamed)}",
        ),
        Check(
            "nothing is occupied and nothing waits any more",
            all(group["active"] == group["quarantined"] == group["queued"] == 0 for group in groups) and bool(groups),
            f"{len(groups)} capacity group",
        ),
    ]


class _Occupied:
    """What the gateway says about its slots while the jobs run."""

    def __init__(self, gateway: remote.Remote) -> None:
        self._gateway = gateway
        self.most = 0

    def look(self) -> str:
        [group] = self._gateway.get("/v1/groups")["groups"]
        self.most = max(self.most, group["active"])
        return f"{group['active']} of {group['concurrency']} slots, {group['queued']} waiting"


async def _stream(out: Console, running: Running) -> Any:
    """Print the tokens of one answer as they come. What the gateway says at its end; None where it said nothing."""
    out.print(f"> {QUESTION}", style="bold")
    finished = None
    async with (
        client.AsyncClient(grpc=running.grpc, api_key=running.key) as gateway,
        gateway.stream(QUESTION, model="sim-large", session_id=SESSION, timeout_s=60) as chunks,
    ):
        async for chunk in chunks:
            match chunk.WhichOneof("chunk"):
                case "queued":
                    out.print(f"(queued at {chunk.queued.position}: {chunk.queued.reason})", style="dim")
                case "started":
                    route = chunk.started.route
                    out.print(f"(served by {route.provider}/{route.model})", style="dim")
                case "delta":
                    out.file.write("".join(c for c in client.text_of(chunk) if c.isprintable() or c == "\n"))
                    out.file.flush()
                case "finished":
                    finished = chunk.finished
                case _:
                    pass
    return finished


def _by_hand(done: Sequence[Mapping[str, Any]]) -> Decimal:
    """What the jobs cost by their usage and the prices, without asking the gateway."""
    total = Decimal(0)
    for job in done:
        if job["usage"] is not None:
            price_in, price_out = PRICES[job["model"]]
            total += job["usage"]["input_total"] * Decimal(price_in) + job["usage"]["output_total"] * Decimal(price_out)
    return total / 1_000_000


def _tokens(done: Sequence[Mapping[str, Any]], finished: Any) -> tuple[int, int]:
    found = Counter[str]()
    for job in done:
        if job["usage"] is not None:
            found.update({"in": job["usage"]["input_total"], "out": job["usage"]["output_total"]})
    if finished is not None:
        found.update({"in": finished.outcome.usage.input_tokens, "out": finished.outcome.usage.output_tokens})
    return found["in"], found["out"]


def _counts(counted: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {status}" for status, count in sorted(counted.items(), reverse=True))


def _custom_id(line: bytes) -> str | None:
    try:
        custom_id: str = msgspec.json.decode(line)["custom_id"]
    except msgspec.DecodeError:
        return None
    return custom_id


def _get(url: str) -> Any:
    return msgspec.json.decode(httpx.get(url, trust_env=False, timeout=10).content)


def _configuration(provider: str) -> Path:
    parts = urlsplit(provider)
    text = CONFIGURATION.format(
        base_url=provider,
        models=", ".join(f'"{name}"' for name in PRICES),
        group=f"{parts.scheme}://{parts.netloc}",
        limit=LIMIT,
    )
    for name, (price_in, price_out) in PRICES.items():
        text += MODEL.format(name=name, input=price_in, output=price_out)
    path = PLACE / "tollbridge.toml"
    path.write_text(text)
    return path


@contextlib.contextmanager
def _simulated() -> Iterator[str]:
    """The simulated provider, in a thread of this process, so that it cannot outlive it. Yields its base URL."""
    started: list[str] = []
    ready, leave = threading.Event(), threading.Event()

    async def serve() -> None:
        async with simulator.serve(simulator.Settings(faults=dict(PACE))) as url:
            started.append(url)
            ready.set()
            await asyncio.to_thread(leave.wait)

    def run() -> None:
        try:
            asyncio.run(serve())
        finally:
            ready.set()

    thread = threading.Thread(target=run, name="simulated provider", daemon=True)
    thread.start()
    ready.wait()
    if not started:
        raise Failed("the simulated provider did not start")
    try:
        yield started[0]
    finally:
        leave.set()
        thread.join()


@contextlib.contextmanager
def _gateway(out: Console, configuration: Path, data_dir: Path) -> Iterator[Running]:
    """A gateway in a process of its own, which ends with this one, however this one ends."""
    log_file = PLACE / "gateway.log"
    key = f"demo-{secrets.token_urlsafe(32)}"
    environ = {name: value for name, value in os.environ.items() if not name.startswith("TOLLBRIDGE_")}
    environ |= {
        "TOLLBRIDGE_API_KEY": key,
        "TOLLBRIDGE_REST_LISTEN": "127.0.0.1:0",
        "TOLLBRIDGE_GRPC_LISTEN": "127.0.0.1:0",
    }
    options = ["--config", str(configuration), "--data-dir", str(data_dir), "--stop-with-stdin"]
    out.print(f"starting a gateway with an embedded PostgreSQL; its log: {log_file}", style="dim")
    with log_file.open("wb") as log:
        process = subprocess.Popen(  # noqa: S603  the command is ours
            [sys.executable, "-m", "gateway", "serve", *options],
            env=environ,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            # A Ctrl-C is for the demo, which then stops the gateway in order.
            start_new_session=True,
        )
    assert process.stdin is not None
    assert process.stdout is not None
    overdue = threading.Timer(START_S, process.kill)
    overdue.daemon = True
    overdue.start()
    try:
        ready: dict[str, str] = {}
        for line in process.stdout:
            said = msgspec.json.decode(line)
            if said["event"] == "gateway.ready":
                ready = said
                break
        overdue.cancel()
        if not ready:
            tail = log_file.read_text(errors="replace").splitlines()[-5:]
            raise Failed("the gateway did not start", hint="\n  ".join([f"The end of {log_file}:", *tail]))
        out.print(f"serving REST on {ready['rest']}, gRPC on {ready['grpc']}\n", style="dim")
        yield Running(ready["rest"], ready["grpc"], key)
    finally:
        overdue.cancel()
        for number in (signal.SIGINT, signal.SIGTERM):
            # It is stopping; who asks again wants it at once.
            signal.signal(number, lambda *_: process.terminate())
        process.stdin.close()
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise Failed("the gateway did not stop in time") from None
        finally:
            process.stdout.close()
    if process.returncode != 0:
        raise Failed(f"the gateway ended with status {process.returncode}", hint=f"Its log: {log_file}")
