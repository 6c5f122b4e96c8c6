"""
What proof and canonical events cost: our parser beside the least that could be done with the same bytes.

The floor splits on blank lines and decodes each event's JSON into plain objects; it proves nothing and would break on
half of what providers send. Run: `python -m tests.benchmarks.bench_parser`. Ours should reach half of its events a
second, whatever the size of a read.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec

from adapters.contract import Endpoint
from adapters.protocols.chat_completions import ChatCompletions

EVENTS = 4000
ROUNDS = 9


def stream() -> bytes:
    chunks: list[dict[str, Any]] = [
        {
            "id": "chatcmpl-BG7OTM3ub2HDuZ1PCj137Me5EGRPt",
            "object": "chat.completion.chunk",
            "created": 1743181369,
            "model": "gpt-4o-mini-2024-07-18",
            "service_tier": "default",
            "system_fingerprint": "fp_f97eff32c5",
            "choices": [{"index": 0, "delta": {"content": f" token{i}"}, "logprobs": None, "finish_reason": None}],
            "usage": None,
            "obfuscation": "AELkdaSG1tO5NZT",
        }
        for i in range(EVENTS - 2)
    ]
    chunks.append({"id": "x", "choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
    lines = [b"data: " + json.dumps(chunk, separators=(",", ":")).encode() for chunk in chunks]
    return b"\n\n".join([*lines, b"data: [DONE]", b""])


def floor(pieces: list[bytes], decode: Callable[[bytes], object]) -> None:
    rest = b""
    for piece in pieces:
        *events, rest = (rest + piece).split(b"\n\n")
        for event in events:
            if event != b"data: [DONE]":
                decode(event[6:])


def ours(pieces: list[bytes]) -> None:
    parser = ChatCompletions().new_parser(Endpoint(provider="p", protocol="chat_completions", base_url=""), {})
    for piece in pieces:
        parser.feed(piece)
    assert parser.finished


def rate(run: Callable[[], None]) -> float:
    """Events a second, of the best round: the others were disturbed."""
    best = float("inf")
    for _ in range(ROUNDS):
        start = time.perf_counter()
        run()
        best = min(best, time.perf_counter() - start)
    return EVENTS / best


def main() -> None:
    body = stream()
    print(f"{EVENTS} events, {len(body)} bytes")  # noqa: T201
    for name, size in (("one event a read", len(body) // EVENTS), ("16 KiB reads", 16384), ("64 KiB reads", 65536)):
        pieces = [body[start : start + size] for start in range(0, len(body), size)]
        mine = rate(partial(ours, pieces))
        for label, decode in (("json", json.loads), ("msgspec", msgspec.json.decode)):
            bare = rate(partial(floor, pieces, decode))
            print(f"{name:18} ours {mine:9,.0f}/s  bare split + {label:8} {bare:9,.0f}/s  ratio {mine / bare:.2f}")  # noqa: T201


if __name__ == "__main__":
    main()
