"""
What protocols cost: the microseconds of a plain call's request and answer, and of each event of a stream that is handed
on as it came, or told in another format.

Beside each figure stands the least that could be done with the same bytes: for a body `msgspec` into plain objects, for
a stream a split and `msgspec` for each event. Run: `python -m tests.benchmarks.bench_codec [requests] [streams]`. All
are CPU time of the best of many rounds, by turns; trust the ratios.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from adapters.chat import ChatResponse, Finished
from adapters.contract import AnswerHead, Endpoint, UpstreamCall
from adapters.protocols import PROTOCOLS
from adapters.relay import RelayedStream
from gateway.naming import named
from tests.benchmarks.bench_parser import floor
from tests.benchmarks.load import question
from tests.stopping import command

#: Events of a stream, and how many of them come in one read, as in `tests.benchmarks.world`.
PIECES, BURST = 200, 10
ROUNDS, CALLS = 30, 200

_TEXT = "Both collect a toll from whoever passes, and neither cares where the road leads. " * 2
_STREAMS = Path(__file__).parent / "streams"

#: A usual request and its answer, in each format that callers speak.
BODIES: Mapping[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "chat_completions": (
        question("m"),
        {
            "id": "chatcmpl-BG7OTM3ub2HDuZ1PCj137Me5EGRPt",
            "object": "chat.completion",
            "created": 1743181369,
            "model": "gpt-4o-mini-2024-07-18",
            "choices": [
                {
                    "index": 0,
                    "message": {"role": "assistant", "content": _TEXT, "refusal": None, "annotations": []},
                    "logprobs": None,
                    "finish_reason": "stop",
                }
            ],
            "usage": {
                "prompt_tokens": 120,
                "completion_tokens": 40,
                "total_tokens": 160,
                "prompt_tokens_details": {"cached_tokens": 0, "audio_tokens": 0},
                "completion_tokens_details": {"reasoning_tokens": 0, "audio_tokens": 0},
            },
            "service_tier": "default",
            "system_fingerprint": "fp_f97eff32c5",
        },
    ),
    "anthropic_messages": (
        {
            "model": "m",
            "max_tokens": 1000,
            "system": "Be brief and exact.",
            "messages": question("m")["messages"][1:],
        },
        {
            "id": "msg_01T8kTq7cYyYJeQ5DxcVUc6D",
            "type": "message",
            "role": "assistant",
            "model": "claude-haiku-4-5-20251001",
            "content": [{"type": "text", "text": _TEXT}],
            "stop_reason": "end_turn",
            "stop_sequence": None,
            "usage": {
                "input_tokens": 120,
                "cache_creation_input_tokens": 0,
                "cache_read_input_tokens": 0,
                "output_tokens": 40,
                "service_tier": "standard",
            },
        },
    ),
    "responses": (
        {"model": "m", "instructions": "Be brief and exact.", "input": question("m")["messages"][1:]},
        {
            "id": "resp_00592e63e61b66660169fab1b9f8e481a2b321356198d7ac1b",
            "object": "response",
            "created_at": 1743181369,
            "status": "completed",
            "model": "gpt-4o-mini-2024-07-18",
            "output": [
                {
                    "id": "msg_00592e63e61b66660169fab1bada8481a28ef92eb62c168ead",
                    "type": "message",
                    "status": "completed",
                    "role": "assistant",
                    "content": [{"type": "output_text", "text": _TEXT, "annotations": [], "logprobs": []}],
                }
            ],
            "usage": {
                "input_tokens": 120,
                "input_tokens_details": {"cached_tokens": 0},
                "output_tokens": 40,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": 160,
            },
        },
    ),
}


def best(runs: Mapping[str, Callable[[], object]], calls: int) -> dict[str, float]:
    """Microseconds of CPU a call, of the best round. By turns, so that all meet one machine."""
    found = dict.fromkeys(runs, float("inf"))
    for _ in range(ROUNDS):
        for name, run in runs.items():
            start = time.process_time()
            for _ in range(calls):
                run()
            found[name] = min(found[name], (time.process_time() - start) / calls * 1e6)
    return found


def told(protocol: str, response: ChatResponse) -> bytes:
    """A provider's answer as its caller gets it."""
    return PROTOCOLS[protocol].render_response(named(response, protocol=protocol, answer_id="x", model="m"))


def requests() -> None:
    print("us a call            parse_request  bare   render_request   parse_response  bare   render_response")  # noqa: T201
    for name, (asked, answered) in BODIES.items():
        protocol, body, answer = PROTOCOLS[name], json.dumps(asked).encode(), json.dumps(answered).encode()
        request = protocol.parse_request(body)
        response = protocol.parse_response(200, {}, answer)
        endpoint = Endpoint(provider="p", protocol=name, base_url="")
        call = UpstreamCall(endpoint=endpoint, model="m", request=request, deadline=0.0)
        us = best(
            {
                "parse_request": partial(protocol.parse_request, body),
                "bare request": partial(msgspec.json.decode, body),
                "render_request": partial(protocol.render_request, call, stream=False),
                "parse_response": partial(protocol.parse_response, 200, {}, answer),
                "bare answer": partial(msgspec.json.decode, answer),
                "render_response": partial(told, name, response),
            },
            CALLS,
        )
        print(  # noqa: T201
            f"{name:20} {us['parse_request']:13.1f} {us['bare request']:5.1f}   {us['render_request']:14.1f}   "
            f"{us['parse_response']:14.1f} {us['bare answer']:5.1f}   {us['render_response']:15.1f}"
        )


def relayed(protocol: str, pieces: list[bytes]) -> None:
    relay = RelayedStream(PROTOCOLS[protocol].new_parser(Endpoint(provider="p", protocol=protocol, base_url=""), {}))
    batch = [event for piece in pieces for event in (relay.feed(piece), relay.take())[0]]
    if not relay.finished:
        batch = [*batch, *relay.close()]
    assert isinstance(batch[-1], Finished)


def translated(protocol: str, pieces: list[bytes]) -> None:
    """Into Chat Completions, which most callers speak."""
    parser = PROTOCOLS[protocol].new_parser(Endpoint(provider="p", protocol=protocol, base_url=""), {})
    renderer = PROTOCOLS["chat_completions"].new_renderer(AnswerHead(id="x", model="m", created=1))
    said = b"".join(renderer.feed(parser.feed(piece)) for piece in pieces)
    if not parser.finished:
        said += renderer.feed(parser.close())
    assert said.endswith(b"data: [DONE]\n\n")


def streams() -> None:
    print(f"us an event, {BURST} a read     relayed  translated   bare split + msgspec")  # noqa: T201
    for at in sorted(_STREAMS.glob("[a-z]*.py")):
        made = importlib.import_module(f"tests.benchmarks.streams.{at.stem}")
        protocol = getattr(made, "PROTOCOL", at.stem)
        events = [event + b"\n\n" for event in made.stream(PIECES).removesuffix(b"\n\n").split(b"\n\n")]
        pieces = [b"".join(events[start : start + BURST]) for start in range(0, len(events), BURST)]
        us = best(
            {
                "relayed": partial(relayed, protocol, pieces),
                "translated": partial(translated, protocol, pieces),
                "bare": partial(floor, pieces, msgspec.json.decode),
            },
            4,
        )
        each = {name: figure / PIECES for name, figure in us.items()}
        print(f"{at.stem:28} {each['relayed']:9.2f} {each['translated']:11.2f} {each['bare']:22.2f}")  # noqa: T201


def main() -> None:
    wanted = sys.argv[1:] or ["requests", "streams"]
    for name, show in (("requests", requests), ("streams", streams)):
        if name in wanted:
            show()


if __name__ == "__main__":
    command(main)
