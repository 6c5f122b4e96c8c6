"""Answers as they come from real sockets, good and bad, on both event loops that a gateway may run on."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
import uvloop

from adapters.errors import Broken
from adapters.http.clock import Clock
from adapters.http.connection import Answer
from adapters.http.pool import Pool
from adapters.http.request import head
from tests.fakes.polling import until
from tests.fakes.raw_provider import Exchange, RawProvider, raw_provider

LOOPS = {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}
OK = b"HTTP/1.1 200 OK\r\n"
HELLO = OK + b"content-length: 5\r\n\r\nhello"
CHUNKED = OK + b"transfer-encoding: chunked\r\n\r\n"


@pytest.fixture(params=LOOPS)
def run(request: pytest.FixtureRequest) -> Callable[[Awaitable[None]], None]:
    def run_it(test: Awaitable[None]) -> None:
        async def within() -> None:
            await asyncio.wait_for(test, 60)

        with asyncio.Runner(loop_factory=LOOPS[request.param]) as runner:
            runner.run(within())

    return run_it


@contextlib.asynccontextmanager
async def opened() -> AsyncIterator[Pool]:
    pool = Pool()
    try:
        yield pool
    finally:
        await pool.close()


async def asked(pool: Pool, port: int, body: bytes | None = b"{}", path: str = "/x") -> Answer:
    clock = Clock(asyncio.get_running_loop().time() + 60)
    origin, start = head("POST", f"http://127.0.0.1:{port}", path, ())
    connection = pool.free(origin) or await pool.connect(origin, clock, 30.0)
    connection.keep_alive_s = 4.0
    answer = connection.send(start, body, clock)
    try:
        await answer.head()
    except Broken:
        answer.close()
        raise
    return answer


async def read(answer: Answer) -> bytes:
    body = b""
    try:
        while data := await answer.read():
            body += data
    finally:
        answer.close()
    return body


def saying(*pieces: bytes, end: str = "stay") -> Callable[[Exchange], Awaitable[None]]:
    async def answer(exchange: Exchange) -> None:
        with contextlib.suppress(ConnectionError):
            for piece in pieces:
                await exchange.send(piece)
                if len(pieces) > 1:
                    await asyncio.sleep(0)
        if end == "die":
            exchange.die()
        if end == "reset":
            # What was sent before it has arrived.
            await asyncio.sleep(0.05)
            exchange.reset()

    return answer


async def connections(pool: Pool, provider: RawProvider, status: int, body: bytes, *, framed: bool) -> int:
    """How many there were after two requests that were answered so."""
    for _ in range(2):
        answer = await asked(pool, provider.port)
        assert answer.status == status
        assert await read(answer) == body
        assert answer.ended
        assert answer.framed is framed
    return provider.connections


@pytest.mark.parametrize(
    ("pieces", "status", "body"),
    [
        pytest.param([HELLO], 200, b"hello", id="with its length"),
        pytest.param([HELLO[i : i + 1] for i in range(len(HELLO))], 200, b"hello", id="byte by byte"),
        pytest.param([CHUNKED + b"3\r\nhel\r\n2\r\nlo\r\n0\r\n\r\n"], 200, b"hello", id="in chunks"),
        pytest.param(
            [CHUNKED + b"5;name=value\r\nhello\r\n0\r\nx-cost: 1\r\nx-more: 2\r\n\r\n"],
            200,
            b"hello",
            id="with extensions and trailers",
        ),
        pytest.param([CHUNKED, b"5  \r\nhel", b"lo\r\n0", b"\r\n\r\n"], 200, b"hello", id="with blanks behind a size"),
        pytest.param([OK + b"content-length: 0\r\n\r\n"], 200, b"", id="without content"),
        pytest.param([b"HTTP/1.1 204 No Content\r\ncontent-length: 5\r\n\r\n"], 204, b"", id="204"),
        pytest.param([b"HTTP/1.1 304 Not Modified\r\ntransfer-encoding: chunked\r\n\r\n"], 304, b"", id="304"),
        pytest.param([b"HTTP/1.1 200\r\ncontent-length: 1\r\n\r\na"], 200, b"a", id="without a reason"),
        pytest.param([b"HTTP/1.1 200 OK\ncontent-length: 1\n\na"], 200, b"a", id="lines without CR"),
        pytest.param(
            [b"HTTP/1.0 200 OK\r\nconnection: keep-alive\r\ncontent-length: 1\r\n\r\na"], 200, b"a", id="1.0, kept"
        ),
        pytest.param(
            [OK + b"upgrade: h2c\r\nconnection: upgrade, keep-alive\r\ncontent-length: 1\r\n\r\na"],
            200,
            b"a",
            id="another protocol offered",
        ),
        pytest.param(
            [b"HTTP/1.1 100 Continue\r\n\r\n", b"HTTP/1.1 103 Early Hints\r\nlink: a\r\n\r\n" + HELLO],
            200,
            b"hello",
            id="behind others that are none",
        ),
    ],
)
def test_an_answer_that_ends_by_itself_lets_its_connection_be_used_again(run, pieces, status, body):
    async def test() -> None:
        async with opened() as pool, raw_provider(saying(*pieces)) as provider:
            assert await connections(pool, provider, status, body, framed=True) == 1

    run(test())


@pytest.mark.parametrize(
    ("pieces", "end", "framed"),
    [
        pytest.param([OK + b"connection: close\r\ncontent-length: 5\r\n\r\nhello"], "stay", True, id="it says so"),
        pytest.param([b"HTTP/1.0 200 OK\r\ncontent-length: 5\r\n\r\nhello"], "stay", True, id="1.0"),
        pytest.param([HELLO + b"more"], "stay", True, id="bytes behind it"),
        pytest.param([HELLO + b"H"], "stay", True, id="the first byte of another one behind it"),
        pytest.param([HELLO + HELLO], "stay", True, id="another one behind it"),
        pytest.param([OK + b"\r\nhel", b"lo"], "die", False, id="no end but the connection's"),
        pytest.param([b"HTTP/1.0 200 OK\r\n\r\nhello"], "die", False, id="1.0, no end but the connection's"),
        pytest.param([OK + b"transfer-encoding: x\r\n\r\nhello"], "die", False, id="a coding without an end"),
    ],
)
def test_an_answer_behind_which_anything_may_come_costs_its_connection(run, pieces, end, framed):
    async def test() -> None:
        async with opened() as pool, raw_provider(saying(*pieces, end=end)) as provider:
            assert await connections(pool, provider, 200, b"hello", framed=framed) == 2

    run(test())


@pytest.mark.parametrize(
    ("pieces", "end", "code"),
    [
        pytest.param([b"SSH-2.0-OpenSSH_9.6\r\n"], "stay", "malformed", id="no HTTP"),
        pytest.param([CHUNKED[:-2] + b"content-length: 1\r\n\r\na"], "stay", "malformed", id="two framings"),
        pytest.param([OK + b"content-length: 1\r\ncontent-length: 2\r\n\r\na"], "stay", "malformed", id="two lengths"),
        pytest.param([OK + b"content-length: -1\r\n\r\na"], "stay", "malformed", id="a length below none"),
        pytest.param([CHUNKED + b"zz\r\n"], "stay", "malformed", id="a chunk without a size"),
        pytest.param([CHUNKED + b"f" * 20 + b"\r\n"], "stay", "malformed", id="a chunk beyond all bounds"),
        pytest.param([CHUNKED + b"1\r\nabc\r\n"], "stay", "malformed", id="a chunk longer than it says"),
        pytest.param([OK + b"a: b\x00c\r\n\r\n"], "stay", "malformed", id="a NUL in a field"),
        pytest.param([OK + b"a b: c\r\n\r\n"], "stay", "malformed", id="a blank in a name"),
        pytest.param([OK + b"a: b\r\n c\r\n\r\n"], "stay", "malformed", id="a folded field"),
        pytest.param([b"HTTP/1.1 099 Odd\r\n\r\n"], "stay", "malformed", id="a status that is none"),
        pytest.param(
            [b"HTTP/1.1 101 Switching\r\nupgrade: x\r\nconnection: upgrade\r\n\r\n"], "stay", "malformed", id="101"
        ),
        pytest.param([OK + b"a: " + b"b" * 8190 + b"\r\n\r\n"], "stay", "malformed", id="a long field"),
        pytest.param([OK + b"a: b\r\n" * 129 + b"\r\n"], "stay", "malformed", id="many fields"),
        pytest.param([OK + b"a: ", *[b"b" * 8192] * 32], "stay", "malformed", id="a field without end"),
        pytest.param([b"HTTP/1.1 ", *[b"2" * 8192] * 32], "stay", "malformed", id="a line without end"),
        pytest.param([b"HTTP/1.1 102 Wait\r\n\r\n" * 8192], "stay", "malformed", id="never an answer"),
        pytest.param([CHUNKED + b"1;", *[b"x" * 8192] * 32], "stay", "malformed", id="an extension without end"),
        pytest.param([CHUNKED + b"0\r\n", *[b"a: b\r\n" * 1024] * 16], "stay", "malformed", id="trailers without end"),
        pytest.param([OK + b"content-length: 5\r\n\r\nhel"], "die", "connection_lost", id="cut in its length"),
        pytest.param([CHUNKED + b"5\r\nhello\r\n"], "die", "connection_lost", id="cut between chunks"),
        pytest.param([CHUNKED + b"5\r\nhello\r\n0\r\n"], "die", "connection_lost", id="cut before its last line"),
        pytest.param([OK + b"content-le"], "die", "connection_lost", id="cut in its head"),
        pytest.param([b"HTTP/1.1 100 Continue\r\n\r\n"], "die", "connection_lost", id="cut before its head"),
        pytest.param([], "die", "connection_lost", id="none"),
        pytest.param([], "reset", "connection_lost", id="none, reset"),
        pytest.param([OK + b"\r\nhello"], "reset", "connection_lost", id="reset where its end was to be"),
    ],
)
def test_an_answer_that_is_none_or_is_not_whole_is_told_as_what_it_is_and_its_connection_is_closed(
    run, pieces, end, code
):
    async def test() -> None:
        async with opened() as pool, raw_provider(saying(*pieces, end=end)) as provider:
            for _ in range(2):
                with pytest.raises(Broken) as caught:
                    await read(await asked(pool, provider.port))
                assert caught.value.code == code
            assert provider.connections == 2

    run(test())


@pytest.mark.parametrize("status", [b"204 No Content", b"304 Not Modified"])
def test_what_ended_one_answer_ends_no_other_on_its_connection(run, status):
    async def answer(exchange: Exchange) -> None:
        if exchange.body == b"first":
            await exchange.send(b"HTTP/1.1 %b\r\n\r\n" % status)
        else:
            exchange.die()

    async def test() -> None:
        async with opened() as pool, raw_provider(answer) as provider:
            assert await read(await asked(pool, provider.port, b"first")) == b""
            with pytest.raises(Broken) as caught:
                await asked(pool, provider.port)
            assert caught.value.code == "connection_lost"
            assert provider.connections == 1

    run(test())


def test_what_came_before_a_connection_broke_is_read_first(run):
    async def test() -> None:
        said = saying(CHUNKED, b"3\r\nhel\r\n", b"2\r\nlo\r\n", end="reset")
        async with opened() as pool, raw_provider(said) as provider:
            answer = await asked(pool, provider.port)
            await until(lambda: answer._failure)
            assert await answer.read() == b"hello"
            for _ in range(2):
                with pytest.raises(Broken) as caught:
                    await answer.read()
                assert caught.value is answer._failure
            assert not answer.ended
            answer.close()

    run(test())


def test_an_answer_that_does_not_wait_for_the_request_is_read_and_its_connection_closed(run):
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 413 Too Large\r\ncontent-length: 5\r\n\r\nhello")
        await over.wait()
        writer.transport.abort()

    async def test() -> None:
        async with await asyncio.start_server(serve, "127.0.0.1", 0) as server, opened() as pool:
            port: int = server.sockets[0].getsockname()[1]
            answer = await asked(pool, port, b"x" * 20_000_000)
            assert (answer.status, await read(answer)) == (413, b"hello")
            origin, _ = head("POST", f"http://127.0.0.1:{port}", "/x", ())
            assert pool.free(origin) is None
            over.set()

    over = asyncio.Event()
    run(test())


def test_a_body_that_nobody_reads_holds_its_provider_back_and_goes_on_when_somebody_does(run):
    size = 64 * 1024 * 1024
    sent = 0

    async def answer(exchange: Exchange) -> None:
        nonlocal sent
        await exchange.send(OK + b"content-length: %d\r\n\r\n" % size)
        for _ in range(size // 65536):
            await exchange.send(b"x" * 65536)
            sent += 65536

    async def test() -> None:
        async with opened() as pool, raw_provider(answer) as provider:
            first = await asked(pool, provider.port)
            before = -1
            while sent != before:
                before = sent
                await asyncio.sleep(0.2)
            assert sent < size
            left = size
            while data := await first.read():
                left -= len(data)
            assert (left, sent) == (0, size)
            first.close()
            second = await asked(pool, provider.port)
            second.close()
            assert provider.connections == 1

    run(test())


def test_a_slow_reader_of_an_answer_that_is_all_there_keeps_no_connection_from_others(run):
    async def answer(exchange: Exchange) -> None:
        await exchange.send(OK + b"content-length: 300000\r\n\r\n" + exchange.body[:1] * 300000)

    async def test() -> None:
        async with opened() as pool, raw_provider(answer) as provider:
            first = await asked(pool, provider.port, b"a")
            held = b""
            while len(held) + first._held_bytes < 300000:
                # It is held back when there is more than that, so not all of it comes without a reader.
                if first._held_bytes > 64 * 1024:
                    held += await first.read()
                await asyncio.sleep(0.001)
            second = await asked(pool, provider.port, b"b")
            assert await read(second) == b"b" * 300000
            assert held + await read(first) == b"a" * 300000
            assert provider.connections == 1

    run(test())


@pytest.mark.parametrize("stage", ["head", "body"])
def test_who_leaves_closes_the_connection_and_its_timer(run, stage):
    async def answer(exchange: Exchange) -> None:
        if stage == "body":
            await exchange.begin()
            await exchange.chunk(b"hello")
        reached.set()
        await exchange.closed()
        closed.set()

    async def test() -> None:
        async with opened() as pool, raw_provider(answer) as provider:
            clock = Clock(asyncio.get_running_loop().time() + 60)
            origin, start = head("POST", f"http://127.0.0.1:{provider.port}", "/x", ())
            asking = (await pool.connect(origin, clock, 30.0)).send(start, b"{}", clock)
            reading = asyncio.ensure_future(read(asking))
            await reached.wait()
            await until(lambda: asking._waiter and bool(asking.status) is (stage == "body"))
            assert clock._alarm is not None
            reading.cancel()
            with pytest.raises(asyncio.CancelledError):
                await reading
            assert clock._alarm is None
            await asyncio.wait_for(closed.wait(), 20)
            assert pool.free(origin) is None

    reached, closed = asyncio.Event(), asyncio.Event()
    run(test())


def test_names_of_fields_are_read_in_any_case_and_of_several_the_first_counts(run):
    async def test() -> None:
        fields = b"X-Request-ID: one\r\nx-request-id: two\r\nx-odd: \xc3\xa4\xff\r\n"
        async with opened() as pool, raw_provider(saying(OK + fields + b"content-length: 0\r\n\r\n")) as provider:
            answer = await asked(pool, provider.port)
            assert await read(answer) == b""
            assert answer.headers["x-request-id"] == "one"
            assert answer.headers["x-odd"] == "ä\udcff"

    run(test())
