"""
A provider that costs almost nothing: ready-made bytes over a bare asyncio protocol.

    python -m tests.benchmarks.provider

On two cores the provider competes with what is measured, so it must not weigh. It speaks `chat_completions` and looks
at one field, `stream`. A whole answer is one write. A stream is `PIECES` deltas in writes of `BURST` events, `TICK_S`
apart, for tokens come one after the other: sent as fast as it can, most of a stream would be there before it is read,
and who only moves bytes would move them in three or four pieces. It counts no tokens and has no faults: the simulated
provider does. Prints one JSON line with its port.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Iterator, Sequence
from typing import cast

import msgspec
from typing_extensions import override

from tests.benchmarks.loops import run, until_told

#: One piece of text is one event of a stream, and so many events come in one write.
PIECES, BURST = 200, 10
#: Between the writes of a stream, in seconds: 40,000 events a second in each.
TICK_S = 0.00025
#: What the first piece says, and no other part of an answer: whoever sees it has seen content.
FIRST = "Toll"

_ABOUT = {"id": "chatcmpl-8f2c41d09b7e", "created": 1796083200, "model": "bench-1", "system_fingerprint": "fp_bench"}
_TEXT = FIRST + " and gateway both let through who has paid, one after the other, and keep a book of it. " * 6
_END = b"\r\n\r\n"


class _Asked(msgspec.Struct):
    stream: bool = False


def _usage(output: int) -> dict[str, object]:
    return {
        "prompt_tokens": 120,
        "completion_tokens": output,
        "total_tokens": 120 + output,
        "prompt_tokens_details": {"cached_tokens": 0},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }


def whole() -> bytes:
    """The body of a whole answer."""
    message = {"role": "assistant", "content": _TEXT, "refusal": None}
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": "stop"}
    return msgspec.json.encode(
        {**_ABOUT, "object": "chat.completion", "choices": [choice], "usage": _usage(120), "service_tier": "default"}
    )


def events() -> Iterator[bytes]:
    """The events of a stream: the role, the pieces, the end, the usage, the mark behind all."""

    def event(delta: dict[str, object] | None, finish: str | None = None, usage: object = None) -> bytes:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}
        said = {**_ABOUT, "object": "chat.completion.chunk", "choices": [] if delta is None else [choice]}
        return b"data: " + msgspec.json.encode({**said, "usage": usage}) + b"\n\n"

    yield event({"role": "assistant", "content": "", "refusal": None})
    for number in range(PIECES):
        yield event({"content": FIRST if number == 0 else f" word{number % 10}"})
    yield event({}, finish="stop")
    yield event(None, usage=_usage(PIECES))
    yield b"data: [DONE]\n\n"


def plain_answer() -> bytes:
    body = whole()
    return b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)


def streamed_answer() -> list[bytes]:
    """By writes: the head and the role are in the first, the end in the last."""
    every = list(events())
    bursts = [every[at : at + BURST] for at in range(1, 1 + PIECES, BURST)]
    bursts[0].insert(0, every[0])
    bursts[-1] += every[1 + PIECES :]
    writes = [b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in map(b"".join, bursts)]
    writes[0] = (
        b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
        + writes[0]
    )
    writes[-1] += b"0\r\n\r\n"
    return writes


class Streams:
    """All streams under way. One timer for all of them: at each tick every one writes what comes next."""

    def __init__(self, writes: Sequence[bytes]) -> None:
        self._writes = writes
        self._loop = asyncio.get_running_loop()
        self._open: list[tuple[asyncio.Transport, Iterator[bytes]]] = []

    def begin(self, transport: asyncio.Transport) -> None:
        writes = iter(self._writes)
        transport.write(next(writes))
        if not self._open:
            self._loop.call_later(TICK_S, self._tick, self._loop.time() + TICK_S)
        self._open.append((transport, writes))

    def _tick(self, due: float) -> None:
        still = []
        for stream in self._open:
            transport, writes = stream
            if (write := next(writes, None)) is not None and not transport.is_closing():
                transport.write(write)
                still.append(stream)
        self._open = still
        if still:
            # A tick that was late is not made up for.
            due = max(due + TICK_S, self._loop.time())
            self._loop.call_at(due, self._tick, due)


class Provider(asyncio.Protocol):
    """One connection, one request at a time; a body is framed by its `content-length`."""

    def __init__(self, plain: bytes, streams: Streams) -> None:
        self._plain = plain
        self._streams = streams
        self._asked = msgspec.json.Decoder(_Asked)
        self._received = b""

    @override
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    @override
    def data_received(self, data: bytes) -> None:
        received = self._received = self._received + data if self._received else data
        end = received.find(_END)
        if end < 0:
            return
        head = received[:end].lower()
        at = head.find(b"\r\ncontent-length:")
        if at < 0:
            self._transport.write(b"HTTP/1.1 411 Length Required\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
            self._transport.close()
            return
        after = end + 4 + int(head[at + 17 :].split(b"\r\n", 1)[0])
        if len(received) < after:
            return
        self._received = received[after:]
        if self._asked.decode(received[end + 4 : after]).stream:
            self._streams.begin(self._transport)
        else:
            self._transport.write(self._plain)


async def main() -> None:
    plain, streams = plain_answer(), Streams(streamed_answer())
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Provider(plain, streams), "127.0.0.1", 0, backlog=1024)
    sys.stdout.write(json.dumps({"port": server.sockets[0].getsockname()[1]}) + "\n")
    sys.stdout.flush()
    await until_told()
    server.close()


if __name__ == "__main__":
    # The leanest loops count milliseconds, and a tick is less.
    run(main(), "precise")
