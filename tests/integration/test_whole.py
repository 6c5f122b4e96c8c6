"""A whole answer in one write is, on the wire, what aiohttp's own response would have been."""

from __future__ import annotations

import asyncio

import pytest
from aiohttp import web

from gateway.rest.whole import Whole

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
