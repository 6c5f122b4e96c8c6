"""Connections: made, kept, found stale, grown old; and what a failure to make one is called."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import time
from collections.abc import AsyncIterator

import pytest

from adapters.errors import Broken, NotSent
from adapters.http.clock import Clock
from adapters.http.connection import Answer, Connection
from adapters.http.pool import Pool
from adapters.http.request import Origin, head
from tests.fakes.certificates import self_signed
from tests.fakes.polling import until
from tests.fakes.raw_provider import Exchange, raw_provider


@pytest.fixture
async def pool() -> AsyncIterator[Pool]:
    opened = Pool()
    yield opened
    await opened.close()


def clock(deadline_s: float = 60) -> Clock:
    return Clock(asyncio.get_running_loop().time() + deadline_s)


async def asked(pool: Pool, url: str, *, keep_alive_s: float = 4.0) -> Answer:
    origin, start = head("POST", url, "/x", ())
    running = clock()
    connection = pool.free(origin) or await pool.connect(origin, running, 30.0)
    connection.keep_alive_s = keep_alive_s
    answer = connection.send(start, b"{}", running)
    try:
        await answer.head()
    except BaseException:
        answer.close()
        raise
    return answer


async def whole(answer: Answer) -> bytes:
    try:
        return b"".join([data async for data in pieces(answer)])
    finally:
        answer.close()


async def pieces(answer: Answer) -> AsyncIterator[bytes]:
    while data := await answer.read():
        yield data


async def keep_three(pool: Pool, port: int) -> None:
    """Connections, of a provider that answers when three requests are there."""
    asking = [asyncio.ensure_future(asked(pool, url(port))) for _ in range(3)]
    for each in asking:
        await whole(await each)
    (free,) = pool._free.values()
    assert len(free) == 3


async def answer_well(exchange: Exchange) -> None:
    await exchange.answer(b"hello")


def url(port: int) -> str:
    return f"http://127.0.0.1:{port}"


async def free_one(pool: Pool, port: int) -> Connection | None:
    """The connection that is free, when what the provider did to it was seen."""
    origin = Origin(tls=False, host="127.0.0.1", port=port)
    await until(lambda: not any(connection.usable for connection in pool._free[origin]))
    return pool.free(origin)


async def test_a_free_connection_that_the_provider_closes_is_not_used(pool):
    async def answer(exchange: Exchange) -> None:
        await exchange.answer(b"hello")
        exchange.die()

    async with raw_provider(answer) as provider:
        assert await whole(await asked(pool, url(provider.port))) == b"hello"
        assert await free_one(pool, provider.port) is None


async def test_a_free_connection_on_which_something_comes_is_not_used(pool):
    async def answer(exchange: Exchange) -> None:
        await exchange.answer(b"hello")
        await answered.wait()
        await exchange.send(b"HTTP/1.1 408 Request Timeout\r\ncontent-length: 0\r\n\r\n")

    answered = asyncio.Event()
    async with raw_provider(answer) as provider:
        assert await whole(await asked(pool, url(provider.port))) == b"hello"
        answered.set()
        assert await free_one(pool, provider.port) is None


async def test_what_came_in_this_very_moment_is_noticed_before_a_request_is_sent(pool):
    async def answer(exchange: Exchange) -> None:
        await exchange.answer(b"hello")
        await answered.wait()
        sending = asyncio.ensure_future(exchange.send(b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\n\r\nx"))
        # It is written at once, and the loop has no turn to read it.
        sending.add_done_callback(lambda _: found.append(pool.free(origin)))
        await sending

    found: list[Connection | None] = []
    answered = asyncio.Event()
    async with raw_provider(answer) as provider:
        origin = Origin(tls=False, host="127.0.0.1", port=provider.port)
        assert await whole(await asked(pool, url(provider.port))) == b"hello"
        (free,) = pool._free[origin]
        answered.set()
        await until(lambda: found)
        assert found == [None]
        assert not free.usable


async def test_a_connection_that_nobody_used_for_a_while_is_closed(pool):
    async def answer(exchange: Exchange) -> None:
        await exchange.answer(b"hello")
        await exchange.closed()
        closed.set()

    closed = asyncio.Event()
    async with raw_provider(answer) as provider:
        assert await whole(await asked(pool, url(provider.port), keep_alive_s=0.05)) == b"hello"
        await until(closed.is_set)
        assert pool._sweep is None


async def test_a_connection_that_is_too_old_is_not_used_though_nobody_has_closed_it_yet(pool):
    async with raw_provider(answer_well) as provider:
        assert await whole(await asked(pool, url(provider.port))) == b"hello"
        origin = Origin(tls=False, host="127.0.0.1", port=provider.port)
        (free,) = pool._free[origin]
        free.free_until = asyncio.get_running_loop().time()
        assert pool.free(origin) is None


@pytest.mark.parametrize(
    ("keep_alive_s", "said"), [(0.0, "timeout=60"), (4.0, "timeout=1"), (4.0, 'max=5, Timeout = "0"')]
)
async def test_a_connection_that_is_not_to_be_kept_serves_one_request(pool, keep_alive_s, said):
    async def answer(exchange: Exchange) -> None:
        await exchange.answer(b"hello", headers={"keep-alive": said})
        await exchange.closed()

    async with raw_provider(answer) as provider:
        for connections in (1, 2, 3):
            assert await whole(await asked(pool, url(provider.port), keep_alive_s=keep_alive_s)) == b"hello"
            assert provider.connections == connections
        await until(lambda: not pool._open)


async def test_where_a_kept_connection_closed_upon_a_request_the_others_are_not_tried(pool):
    async def answer(exchange: Exchange) -> None:
        number = len(provider.requests)
        if number == 4:
            exchange.die()
            return
        await until(lambda: len(provider.requests) >= 3)
        await exchange.answer(b"hello")

    async with raw_provider(answer) as provider:
        await keep_three(pool, provider.port)
        with pytest.raises(Broken) as caught:
            await asked(pool, url(provider.port))
        assert caught.value.code == "connection_lost"
        assert await whole(await asked(pool, url(provider.port))) == b"hello"
        assert provider.connections == 4


async def test_a_caller_who_leaves_before_there_is_an_answer_costs_no_connection_but_its_own(pool):
    async def answer(exchange: Exchange) -> None:
        if len(provider.requests) == 4:
            await exchange.closed()
            return
        await until(lambda: len(provider.requests) >= 3)
        await exchange.answer(b"hello")

    async with raw_provider(answer) as provider:
        await keep_three(pool, provider.port)
        leaving = asyncio.ensure_future(asked(pool, url(provider.port)))
        await until(lambda: len(provider.requests) == 4)
        leaving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leaving
        await until(lambda: len(pool._open) == 2)
        assert await whole(await asked(pool, url(provider.port))) == b"hello"
        assert provider.connections == 3


async def test_the_connection_that_was_used_last_is_used_next_so_that_the_others_grow_old(pool):
    async def answer(exchange: Exchange) -> None:
        await go.wait()
        await exchange.answer(b"hello")

    go = asyncio.Event()
    async with raw_provider(answer) as provider:
        asking = [asyncio.ensure_future(asked(pool, url(provider.port))) for _ in range(3)]
        await until(lambda: len(provider.requests) == 3)
        go.set()
        for each in asking:
            await whole(await each)
        (free,) = pool._free.values()
        last = free[-1]
        for _ in range(5):
            await whole(await asked(pool, url(provider.port)))
        assert free[-1] is last
        assert provider.connections == 3


async def test_a_pool_that_closes_ends_what_is_under_way():
    async def hang(exchange: Exchange) -> None:
        await exchange.closed()

    pool = Pool()
    async with raw_provider(hang) as provider:
        asking = asyncio.ensure_future(asked(pool, url(provider.port)))
        await until(lambda: provider.requests)
        await pool.close()
        with pytest.raises(Broken) as caught:
            await asking
        assert caught.value.code == "connection_lost"
        assert not pool._open


async def test_a_connection_that_is_made_while_the_pool_closes_is_cut():
    pool = Pool()
    async with raw_provider(answer_well) as provider:
        connecting = asyncio.ensure_future(asked(pool, url(provider.port)))
        await pool.close()
        with pytest.raises(NotSent):
            await connecting
        await until(lambda: not pool._open)
        assert not provider.requests


async def test_a_name_with_several_addresses_is_reached_by_the_one_that_answers(pool):
    async with raw_provider(answer_well) as provider:
        # Where a machine has another family of addresses for this name, nobody listens there.
        assert await whole(await asked(pool, f"http://localhost:{provider.port}")) == b"hello"


async def test_tls_is_spoken_with_who_can_prove_its_name_and_with_nobody_else(pool, tmp_path, monkeypatch):
    served, certificate = self_signed(tmp_path, "localhost")
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    async with raw_provider(answer_well, tls=served) as provider:
        for _ in range(2):
            assert await whole(await asked(pool, f"https://localhost:{provider.port}")) == b"hello"
        assert provider.connections == 1
        with pytest.raises(NotSent) as caught:
            await asked(pool, f"https://127.0.0.1:{provider.port}")
        assert caught.value.code == "tls"
        assert "certificate" in str(caught.value)
        assert len(provider.requests) == 2


async def test_a_handshake_that_does_not_end_is_given_up_in_time_and_its_socket_closed(pool):
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while await reader.read(65536):
                pass
        writer.close()
        closed.set()

    closed = asyncio.Event()
    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        origin = Origin(tls=True, host="127.0.0.1", port=server.sockets[0].getsockname()[1])
        for deadline_s, within_s, code in ((60, 0.2, "connect_timeout"), (0.2, 60, "deadline")):
            closed.clear()
            with pytest.raises(NotSent) as caught:
                await pool.connect(origin, clock(deadline_s), within_s)
            assert caught.value.code == code
            await until(closed.is_set)


async def test_a_provider_that_closes_what_it_has_just_accepted_leaves_nobody_waiting(pool, tmp_path, monkeypatch):
    """Its last word of the handshake and its end may come in one turn of the loop, before anybody can send."""
    served, certificate = self_signed(tmp_path, "localhost")
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    # In later versions the last word is the client's.
    served.maximum_version = ssl.TLSVersion.TLSv1_2
    tries = 4

    def serve() -> None:
        for _ in range(tries):
            accepted, _ = listening.accept()
            with served.wrap_socket(accepted, server_side=True):
                pass

    def hold_up() -> None:
        if not over.is_set():
            time.sleep(0.01)
            loop.call_soon(hold_up)

    loop, over = asyncio.get_running_loop(), asyncio.Event()
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.settimeout(20)
        provider = loop.run_in_executor(None, serve)
        loop.call_soon(hold_up)
        try:
            for _ in range(tries):
                with pytest.raises((NotSent, Broken)) as caught:
                    await asyncio.wait_for(asked(pool, f"https://localhost:{listening.getsockname()[1]}"), 20)
                assert caught.value.code in {"connect_failed", "connection_lost"}
        finally:
            over.set()
        await provider


async def test_who_leaves_while_a_connection_is_made_leaves_none_behind(pool):
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        reached.set()
        with contextlib.suppress(ConnectionError):
            while await reader.read(65536):
                pass
        writer.close()
        closed.set()

    reached, closed = asyncio.Event(), asyncio.Event()
    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        origin = Origin(tls=True, host="127.0.0.1", port=server.sockets[0].getsockname()[1])
        connecting = asyncio.ensure_future(pool.connect(origin, clock(), 60))
        await until(reached.is_set)
        connecting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await connecting
        await until(closed.is_set)


async def test_the_time_that_connecting_takes_is_the_providers(pool):
    running = Clock(asyncio.get_running_loop().time() + 60, 30.0, "first_byte_timeout")
    async with raw_provider(answer_well) as provider:
        await pool.connect(Origin(tls=False, host="127.0.0.1", port=provider.port), running, 30)
    now = running.now()
    assert running.until(now) < (now + 30.0, "first_byte_timeout")
