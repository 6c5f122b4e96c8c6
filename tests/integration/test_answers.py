"""Answers in fewer writes are, on the wire, what aiohttp's own responses would have been."""

from __future__ import annotations

import asyncio

import pytest
from aiohttp import web

from gateway.rest.answers import Pieces, Whole

HEADERS = {"Content-Type": "application/json", "Server": "tollbridge", "x-tollbridge-route": "a/b"}
BODIES = {"/small": b'{"a":1}', "/large": b"x" * 300_000}


async def served(made) -> tuple[asyncio.Server, int]:
    server = web.Server(made, access_log=None)
    listening = await asyncio.get_running_loop().create_server(server, "127.0.0.1", 0)
    return listening, listening.sockets[0].getsockname()[1]


async def ours(request: web.BaseRequest) -> web.StreamResponse:
    return Whole(BODIES[request.path], HEADERS, status=202)


async def theirs(request: web.BaseRequest) -> web.StreamResponse:
    return web.Response(body=BODIES[request.path], headers=HEADERS, status=202)


async def told(port: int, asked: bytes) -> tuple[list[bytes], bytes]:
    """Status line and headers, sorted and without the date; and all that comes behind them until the end."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(asked)
    async with asyncio.timeout(30):
        status, *headers = (await reader.readuntil(b"\r\n\r\n"))[:-4].split(b"\r\n")
        kept = b"close" not in asked and b"HTTP/1.0\r\nHost" not in asked
        length = next(int(header[16:]) for header in headers if header.lower().startswith(b"content-length: "))
        if asked.startswith(b"HEAD"):
            length = 0
        body = await reader.readexactly(length) if kept else await reader.read()
        if kept:
            # The connection is at the beginning of another answer.
            writer.write(b"GET /small HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
            assert (await reader.read()).startswith(b"HTTP/1.1 202")
    writer.close()
    return [status, *sorted(header for header in headers if not header.startswith(b"Date: "))], body


@pytest.mark.parametrize(
    "asked",
    [
        b"GET /small HTTP/1.1\r\nHost: a\r\n\r\n",
        b"GET /large HTTP/1.1\r\nHost: a\r\n\r\n",
        b"HEAD /small HTTP/1.1\r\nHost: a\r\n\r\n",
        b"HEAD /large HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n",
        b"GET /small HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n",
        b"GET /small HTTP/1.0\r\nHost: a\r\n\r\n",
        b"GET /small HTTP/1.0\r\nConnection: keep-alive\r\nHost: a\r\n\r\n",
        b"POST /small HTTP/1.1\r\nHost: a\r\nContent-Length: 3\r\n\r\nabc",
    ],
    ids=["plain", "large", "head", "head, last", "last", "1.0", "1.0, kept", "post"],
)
async def test_a_whole_answer_is_what_aiohttps_own_response_is(asked):
    (one, its_port), (other, another) = await served(ours), await served(theirs)
    try:
        assert await told(its_port, asked) == await told(another, asked)
    finally:
        one.close()
        other.close()


async def test_a_header_of_two_lines_is_not_sent():
    async def split(request: web.BaseRequest) -> web.StreamResponse:
        answer = Whole(b"{}", {"x-tollbridge-route": "a\r\nset-cookie: b"})
        await answer.prepare(request)
        with pytest.raises(ValueError, match="more than one line"):
            await answer.write_eof()
        return await theirs(request)

    listening, port = await served(split)
    try:
        headers, _ = await told(port, b"GET /small HTTP/1.1\r\nHost: a\r\n\r\n")
    finally:
        listening.close()
    assert not any(b"set-cookie" in header for header in headers)


PIECES = [b"data: 1\n\n", b"x" * 300_000, b"data: 2\n\n"]


async def pieces(request: web.BaseRequest) -> web.StreamResponse:
    answer = Pieces(HEADERS)
    await answer.prepare(request)
    for piece in PIECES:
        await answer.write(piece)
    answer.hold(b"")
    answer.hold(b"data: 3\n\n")
    answer.hold(b"data: 4\n\n")
    return answer


async def their_pieces(request: web.BaseRequest) -> web.StreamResponse:
    answer = web.StreamResponse(headers=HEADERS)
    await answer.prepare(request)
    for piece in [*PIECES, b"data: 3\n\n", b"data: 4\n\n"]:
        await answer.write(piece)
    return answer


@pytest.mark.parametrize(("version", "connection"), [(b"1.1", b"keep-alive"), (b"1.1", b"close"), (b"1.0", b"close")])
async def test_pieces_are_what_aiohttps_own_response_makes_of_them(version, connection):
    answers = []
    for made in (pieces, their_pieces):
        listening, port = await served(made)
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 20)
        writer.write(b"GET / HTTP/%b\r\nHost: a\r\nConnection: %b\r\n\r\n" % (version, connection))
        async with asyncio.timeout(30):
            status, *headers = (await reader.readuntil(b"\r\n\r\n"))[:-4].split(b"\r\n")
            if version == b"1.1" and connection == b"keep-alive":
                body = await reader.readuntil(b"\r\n0\r\n\r\n")
                writer.write(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
                assert (await reader.readline()) == status + b"\r\n"
            else:
                body = await reader.read()
        writer.close()
        listening.close()
        answers.append((status, sorted(header for header in headers if not header.startswith(b"Date: ")), body))
    assert answers[0] == answers[1]


async def test_pieces_without_chunks_end_the_connection_though_it_was_to_be_kept():
    listening, port = await served(pieces)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET / HTTP/1.0\r\nHost: a\r\nConnection: keep-alive\r\n\r\n")
    async with asyncio.timeout(30):
        assert (await reader.read()).endswith(b"data: 2\n\ndata: 3\n\ndata: 4\n\n")
    writer.close()
    listening.close()


async def test_an_answer_of_no_piece_at_all_ends():
    async def none(request: web.BaseRequest) -> web.StreamResponse:
        return Pieces(HEADERS)

    listening, port = await served(none)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
    async with asyncio.timeout(30):
        assert (await reader.readuntil(b"\r\n0\r\n\r\n")).startswith(b"HTTP/1.1 200 OK\r\n")
    writer.close()
    listening.close()


async def test_whoever_writes_to_a_caller_that_is_gone_is_told():
    told_so: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

    async def wait(request: web.BaseRequest) -> web.StreamResponse:
        answer = Pieces(HEADERS)
        await answer.prepare(request)
        await answer.write(b"data: 1\n\n")
        assert request.transport is not None
        request.transport.abort()
        with pytest.raises(ConnectionError):
            await answer.write(b"data: 2\n\n")
        told_so.set_result(True)
        return answer

    listening, port = await served(wait)
    _, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
    async with asyncio.timeout(30):
        assert await told_so
    writer.close()
    listening.close()
