"""
Whether a request costs the same with one worker and with two: `python -m tests.benchmarks.workers [--rounds 7]`.

Two gateways, each with a PostgreSQL of its own, take the same load in turn, on all cores: one is a single process, the
other `serve --workers 2`. It gets twice the load: so many at once for each worker, as what arrives together shares a
wake-up and a transaction. The CPU is that of the gateway's whole process tree, parent and all, for each request; the
ratio is the median of the rounds' ratios. Throughput says little where the load has the same cores.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
from collections import defaultdict

from tests.benchmarks.load import Measured
from tests.benchmarks.world import CONFIGURATION, Place, opened
from tests.fakes.gateway_process import gateway_process
from tests.stopping import command

ONE, TWO = "gateway", "two workers"
WORKERS = {ONE: 1, TWO: 2}
#: The kind of request and how many at once for each worker.
LOADS = (("http", 16), ("http", 64), ("http_stream", 16))


async def measured(rounds: int, seconds: float) -> dict[tuple[str, int], list[dict[str, Measured]]]:
    found: dict[tuple[str, int], list[dict[str, Measured]]] = defaultdict(list)
    async with (
        opened(pin=False, yardsticks=False) as world,
        gateway_process(
            world.directory,
            CONFIGURATION.format(url=world.places["direct"].target),
            name="two",
            arguments=("--workers", "2"),
        ) as two,
    ):
        world.places[TWO] = Place(target=two.rest_url, pid=two.pid)
        for number in range(-1, rounds):
            for load in LOADS:
                kind, concurrency = load
                # Whoever comes first meets other neighbours than who comes second.
                turns = (ONE, TWO) if number % 2 else (TWO, ONE)
                answers = {}
                for place in turns:
                    at_once = concurrency * WORKERS[place]
                    answers[place] = await world.measure(kind, place, Measured, concurrency=at_once, seconds=seconds)
                if number >= 0:
                    found[load].append(answers)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=1.5)
    given = parser.parse_args()
    found = asyncio.run(measured(given.rounds, given.seconds))
    for (kind, concurrency), rounds in found.items():
        cost = {
            place: [1000 * answers[place].cpu_s[place] / answers[place].count for answers in rounds]
            for place in (ONE, TWO)
        }
        ratios = [two / one for one, two in zip(cost[ONE], cost[TWO], strict=True)]
        one, two = (statistics.median(cost[place]) for place in (ONE, TWO))
        spread = f"{min(ratios):.2f} to {max(ratios):.2f}"
        sys.stdout.write(
            f"{kind:12} at {concurrency:2} a worker: CPU ms a request {one:.3f} with one worker, {two:.3f} with two,"
            f" ratio {statistics.median(ratios):.2f} ({spread})\n"
        )


if __name__ == "__main__":
    command(main)
