"""
What the line itself costs a request: `python -m tests.benchmarks.bench_line`.

Router, controller, billing, settlement and log are the gateway's own. The store grants and settles at once and the
provider's answer is ready, so neither a socket nor a database is in the figure. Beside it, as a floor that moves with
the machine's mood, stands the least that any line has to do: a few hops of the event loop.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import tempfile
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import cast

import msgspec
from rich.console import Console
from typing_extensions import override

from adapters.chat import ChatResponse, Event, Finished, Native, TextDelta, UsageReport
from adapters.client import Upstream
from adapters.contract import Batch, UpstreamCall
from adapters.protocols import PROTOCOLS
from admission.contract import AdmissionStore, SettledRow, TicketRow
from admission.controller import Controller
from admission.ids import new_id
from admission.lease import Demand, Settlement
from admission.memory import MemoryStore
from gateway import config, logs, pricing
from gateway.billing import Billing
from gateway.call import Call, Caller, Options, Scope
from gateway.pipeline import Pipeline
from gateway.router import Router
from gateway.settling import Settling
from gateway.standing import Standing
from tests.benchmarks.load import question
from tests.stopping import command

CONFIGURATION = """
[providers.sim]
protocol = "chat_completions"
base_url = "http://127.0.0.1:9/v1"

[models.plain]
providers = [{ provider = "sim", model = "sim-fast" }]
price = { input = "0.15", output = "0.60" }
"""
ANSWER = (
    b'{"id":"chatcmpl-1","object":"chat.completion","created":1700000000,"model":"sim-fast","choices":[{"index":0,'
    b'"message":{"role":"assistant","content":"A bridge asks for a toll, and so does a gateway."},"finish_reason":'
    b'"stop"}],"usage":{"prompt_tokens":120,"completion_tokens":12,"total_tokens":132}}'
)
#: Of a stream.
DELTAS, READS = 200, 20
COUNTERS = '{"day":"2026-01-01","day_usd":"1.5","total_usd":"7.25"}'


class AtOnce(MemoryStore):
    """Grants what is asked for and settles what is ended, and keeps nothing of either."""

    @override
    async def acquire(self, group: str, owner: uuid.UUID, demands: Sequence[tuple[Demand, float]]) -> list[TicketRow]:
        now = datetime.now(UTC)
        return [
            TicketRow(d.ticket_id, "granted", owner, group, 1, 1, False, False, now, now.date(), 60_000)
            for d, _ in demands
        ]

    @override
    async def settle(self, shard: int, settlements: Sequence[Settlement], *, judged: bool) -> list[SettledRow]:
        return [SettledRow(s.lease.ticket_id, True, COUNTERS, s.lease.group, False) for s in settlements]


class Ready(Upstream):
    """Renders as always, and has the answer already."""

    def __init__(self) -> None:
        super().__init__()
        self._answer = PROTOCOLS["chat_completions"].parse_response(200, {}, ANSWER)

    @override
    async def complete(self, call: UpstreamCall) -> ChatResponse:
        await asyncio.sleep(0)
        return self._answer

    @override
    @asynccontextmanager
    async def stream(self, call: UpstreamCall) -> AsyncIterator[AsyncIterator[Batch]]:
        yield self._batches()

    async def _batches(self) -> AsyncIterator[Batch]:
        text = [TextDelta("toll ")] * (DELTAS // READS)
        for _ in range(READS):
            await asyncio.sleep(0)
            yield [*text, cast("Event", Native(b"data: {}\n\n"))]
        yield [UsageReport(usage=self._answer.usage), Finished(ends=()), cast("Event", Native(b"data: [DONE]\n\n"))]


@asynccontextmanager
async def opened(*, streamed: bool = False) -> AsyncIterator[Callable[[], Awaitable[object]]]:
    """The line, as a function that makes one request."""
    with tempfile.TemporaryDirectory(prefix="tollbridge-line-") as directory:
        path = Path(directory) / "tollbridge.toml"
        path.write_text(CONFIGURATION)
        settings = config.load(path, {"TOLLBRIDGE_DATA_DIR": directory})
    prices, _, _ = pricing.checked_at_start(settings, datetime.now(UTC))
    billing = Billing(prices.book)
    store = AtOnce(settings.admission)
    await store.configure()
    async with (
        Controller(cast("AdmissionStore", store), settings.admission).opened() as controller,
        Settling(controller, settings.routing.settlement_patience_s).opened() as settling,
    ):
        line = Pipeline(
            router=Router(settings.providers, settings.models, billing, settings.routing, settings.roles),
            controller=controller,
            adapter=Ready(),
            billing=billing,
            usable=lambda _: True,
            settings=settings.routing,
            standing=Standing(settings.admission),
            settling=settling,
        )
        caller = Caller(key_id=new_id(), name="bench", scopes=frozenset({Scope.CHAT}))
        chat = PROTOCOLS["chat_completions"].parse_request(msgspec.json.encode(question("plain")))

        def call() -> Call:
            return Call(
                request_id=new_id().hex,
                caller=caller,
                model="plain",
                chat=chat,
                options=Options(),
                transport="rest",
                relay=streamed,
            )

        async def plain() -> object:
            return await line.complete(call())

        async def stream() -> object:
            async with line.stream(call()) as items:
                return [item async for item in items][-1]

        yield stream if streamed else plain


async def hops() -> object:
    """As many turns of the loop as a request takes at least: one for each of its answers."""
    loop = asyncio.get_running_loop()
    for _ in range(3):
        future = loop.create_future()
        loop.call_soon(future.set_result, None)
        await future
    return None


async def measured(one: Callable[[], Awaitable[object]], requests: int, concurrency: int) -> float:
    """CPU microseconds of one."""
    left = requests

    async def work() -> None:
        nonlocal left
        while left > 0:
            left -= 1
            await one()

    began = time.process_time()
    await asyncio.gather(*(work() for _ in range(concurrency)))
    return (time.process_time() - began) / requests * 1e6


async def bench(rounds: int, requests: int, concurrency: int, *, streamed: bool) -> tuple[float, float]:
    """The medians, in CPU microseconds: of a request, and of the hops."""
    async with opened(streamed=streamed) as one:
        await measured(one, requests, concurrency)
        line, floor = [], []
        for _ in range(rounds):
            line.append(await measured(one, requests, concurrency))
            floor.append(await measured(hops, requests, concurrency))
    return statistics.median(line), statistics.median(floor)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--stream", action="store_true", help=f"{DELTAS} deltas in {READS} reads, relayed")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--concurrency", type=int, default=16)
    options = parser.parse_args()
    # Lines of the log are made and not kept: the sink is nothing of the line's.
    with Path(os.devnull).open("w") as sink:
        logs.configure(stream=sink, console=False)
        line, floor = asyncio.run(bench(options.rounds, options.requests, options.concurrency, streamed=options.stream))
    Console().print(f"{line:.1f} us a request, {floor:.1f} us for the hops alone: {line / floor:.1f} times")


if __name__ == "__main__":
    command(main)
