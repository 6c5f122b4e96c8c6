"""What the load says must be so, or every ratio made of it is wrong."""

from __future__ import annotations

import asyncio
import random
from contextlib import asynccontextmanager

import pytest

from adapters.chat import Finished, TextDelta, UsageReport
from adapters.contract import Endpoint
from adapters.protocols import PROTOCOLS
from tests.benchmarks import provider
from tests.benchmarks.load import Order as LoadOrder
from tests.benchmarks.load import _Connection, http_paced, http_stream, percentile, schedule
from tests.fakes.answers import parsed

#: Requests a second of the paced load, and how long its server does nothing at all, in seconds.
RATE, STALL_S = 200.0, 0.4


def test_a_percentile_is_the_least_value_that_so_large_a_share_does_not_pass() -> None:
    hundred = list(range(1, 101))

    assert [percentile(hundred, share) for share in (0.5, 0.99, 1.0)] == [50, 99, 100]
    assert percentile([7.0], 0.5) == percentile([7.0], 0.99) == 7.0
    assert percentile([1.0, 2.0, 3.0], 0.5) == 2.0


def test_a_paced_load_has_one_time_for_each_request_and_they_are_evenly_apart() -> None:
    assert list(schedule(10.0, rate=4, seconds=1.5)) == [10.0, 10.25, 10.5, 10.75, 11.0, 11.25]
    assert list(schedule(10.0, rate=0.1, seconds=1)) == [10.0], "a rate of almost nothing is one request"


class _Stalling(asyncio.Protocol):
    """Answers at once, but for one stall in which it answers nobody."""

    stall_at = 20

    def __init__(self, seen: list[int]) -> None:
        self._seen = seen

    def connection_made(self, transport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._seen.append(len(data))
        if len(self._seen) == self.stall_at:
            asyncio.get_running_loop().call_later(STALL_S, self._answer)
        else:
            self._answer()

    def _answer(self) -> None:
        self._transport.write(provider.plain_answer())


@asynccontextmanager
async def _served(protocol):
    server = await asyncio.get_running_loop().create_server(protocol, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        await server.wait_closed()


async def test_a_stall_is_counted_for_every_request_that_was_due_in_it() -> None:
    seen: list[int] = []
    async with _served(lambda: _Stalling(seen)) as target:
        measured = await http_paced(
            LoadOrder(kind="http_paced", target=target, watch={}, concurrency=1, rate=RATE, seconds=0.5)
        )

    # The one before the clock began is not counted.
    assert measured.count == RATE * 0.5 == len(seen) - 1
    # Eighty were due in the stall, and half of all waited for some of it. By the times of their sending only one did.
    assert measured.p50_ms > 50
    assert measured.p99_ms > 1e3 * STALL_S * 0.9


@pytest.mark.parametrize("size", [1, 7, 4096, None], ids=str)
async def test_an_answer_is_read_whatever_the_size_of_a_read(size: int | None) -> None:
    for sent, length in (
        (provider.plain_answer(), len(provider.whole())),
        (b"".join(provider.streamed_answer()), None),
    ):
        connection = _Connection()
        connection.connection_made(_Nowhere())
        answered = connection.ask(b"")
        for at in range(0, len(sent), size or len(sent)):
            assert not answered.done()
            connection.data_received(sent[at : at + (size or len(sent))])

        assert (await answered) > 0
        body = connection.body()
        assert len(body) == length if length is not None else body == b"".join(provider.events())


class _Nowhere(asyncio.Transport):
    def write(self, data) -> None:
        assert data == b""


@pytest.mark.parametrize(
    ("sent", "said"),
    [
        (b"HTTP/1.1 429 Too Many Requests\r\ncontent-length: 4\r\n\r\nbusy", "429"),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\nhm\n\r\n0\r\n\r\n", "did not complete"),
    ],
    ids=["not 200", "a stream without an end"],
)
async def test_what_is_no_answer_ends_the_load(sent: bytes, said: str) -> None:
    connection = _Connection()
    connection.connection_made(_Nowhere())
    answered = connection.ask(b"")
    connection.data_received(sent)

    with pytest.raises(RuntimeError, match=said):
        await answered


async def test_an_answer_that_breaks_off_ends_the_load() -> None:
    connection = _Connection()
    connection.connection_made(_Nowhere())
    answered = connection.ask(b"")
    connection.data_received(b"".join(provider.streamed_answer())[:-5])
    connection.connection_lost(None)

    with pytest.raises(RuntimeError, match="closed the connection"):
        await answered


async def test_the_provider_streams_what_a_client_of_the_protocol_reads() -> None:
    streams = provider.Streams(provider.streamed_answer())
    async with _served(lambda: provider.Provider(provider.plain_answer(), streams)) as target:
        measured = await http_stream(
            LoadOrder(kind="http_stream", target=target, watch={}, concurrency=3, seconds=0.01)
        )
    endpoint = Endpoint(provider="p", protocol="chat_completions", base_url="")
    parser = PROTOCOLS["chat_completions"].new_parser(endpoint, {})
    events, error = parsed(parser, provider.events())
    text = [event.text for event in events if isinstance(event, TextDelta)]

    assert error is None
    assert isinstance(events[-1], Finished)
    assert len(text) == provider.PIECES == sum(e.usage.output_total or 0 for e in events if isinstance(e, UsageReport))
    assert measured.count >= 3
    assert measured.characters == len("".join(text))
    assert [provider.FIRST in piece for piece in text] == [True] + [False] * (provider.PIECES - 1)


async def test_the_provider_reads_a_request_in_any_pieces() -> None:
    seed = random.randrange(2**32)
    chosen = random.Random(seed)
    body = b'{"model": "m", "messages": [], "stream": false}'
    request = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body
    written: list[bytes] = []

    class Kept(asyncio.Transport):
        def write(self, data) -> None:
            written.append(data)

    there = provider.Provider(b"whole", provider.Streams([]))
    there.connection_made(Kept())
    twice = request * 2
    while twice:
        size = chosen.randrange(1, 30)
        # Nobody asks again before the answer.
        size = min(size, len(twice) - len(request) if len(twice) > len(request) else size)
        there.data_received(twice[:size])
        twice = twice[size:]

    assert written == [b"whole", b"whole"], f"seed {seed}"
