"""
What proof and canonical events cost: the parser of each protocol beside the least that could be done with its bytes.

The floor splits on blank lines and decodes each event's JSON into plain objects; it proves nothing and would break on
half of what providers send. Run: `python -m tests.benchmarks.bench_parser [protocol ...]`. Ours should reach half of
its events a second, whatever the size of a read. A protocol takes part by a file of its own in
`tests/benchmarks/streams`, which has `stream(events) -> bytes`.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import msgspec

from adapters.chat import Finished
from adapters.contract import Endpoint
from adapters.protocols import PROTOCOLS
from tests.stopping import command

EVENTS = 4000
ROUNDS = 40

_STREAMS = Path(__file__).parent / "streams"


def floor(pieces: list[bytes], decode: Callable[[bytes], object]) -> None:
    rest = b""
    for piece in pieces:
        *events, rest = (rest + piece).split(b"\n\n")
        for event in events:
            data = event[event.find(b"data: ") + 6 :]
            if data != b"[DONE]":
                decode(data)


def ours(protocol: str, pieces: list[bytes]) -> None:
    parser = PROTOCOLS[protocol].new_parser(Endpoint(provider="p", protocol=protocol, base_url=""), {})
    batch = [event for piece in pieces for event in parser.feed(piece)]
    if not parser.finished:
        batch = [*batch, *parser.close()]
    assert isinstance(batch[-1], Finished)


def rates(runs: Sequence[Callable[[], None]]) -> list[float]:
    """Events a second of CPU, of the best round: the others were disturbed. By turns, so that all meet one machine."""
    best = [float("inf")] * len(runs)
    for _ in range(ROUNDS):
        for number, run in enumerate(runs):
            start = time.process_time()
            run()
            best[number] = min(best[number], time.process_time() - start)
    return [EVENTS / seconds for seconds in best]


def measure(protocol: str) -> None:
    body: bytes = importlib.import_module(f"tests.benchmarks.streams.{protocol}").stream(EVENTS)
    print(f"{protocol}: {EVENTS} events, {len(body)} bytes")  # noqa: T201
    for name, size in (("one event a read", len(body) // EVENTS), ("16 KiB reads", 16384), ("64 KiB reads", 65536)):
        pieces = [body[start : start + size] for start in range(0, len(body), size)]
        decoders: dict[str, Callable[[bytes], object]] = {"json": json.loads, "msgspec": msgspec.json.decode}
        mine, *bare = rates(
            [partial(ours, protocol, pieces), *(partial(floor, pieces, decode) for decode in decoders.values())]
        )
        for label, rate in zip(decoders, bare, strict=True):
            print(f"{name:18} ours {mine:9,.0f}/s  bare split + {label:8} {rate:9,.0f}/s  ratio {mine / rate:.2f}")  # noqa: T201


def main() -> None:
    for protocol in sys.argv[1:] or [name for name in PROTOCOLS if (_STREAMS / f"{name}.py").exists()]:
        measure(protocol)


if __name__ == "__main__":
    command(main)
