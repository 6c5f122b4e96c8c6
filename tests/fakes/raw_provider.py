"""A provider of raw bytes on a real socket: says exactly what a test wants, when it wants it."""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
import ssl
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping


class Exchange:
    """One request that came in, and the socket to answer it on."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, head: bytes, body: bytes) -> None:
        self.head = head
        self.body = body
        self._reader = reader
        self._writer = writer

    async def send(self, *pieces: bytes) -> None:
        for piece in pieces:
            self._writer.write(piece)
            await self._writer.drain()

    async def answer(
        self, body: bytes, *, status: int = 200, headers: Mapping[str, str] | None = None, cut: int | None = None
    ) -> None:
        """A whole answer with its length; `cut` closes after so many bytes of the body."""
        lines = {"content-type": "application/json", **(headers or {}), "content-length": str(len(body))}
        await self.send(head(status, lines) + body[:cut])
        if cut is not None:
            self.die()

    async def begin(self, headers: Mapping[str, str] | None = None) -> None:
        lines = {"content-type": "text/event-stream", **(headers or {}), "transfer-encoding": "chunked"}
        await self.send(head(200, lines))

    async def chunk(self, data: bytes) -> None:
        await self.send(b"%x\r\n%s\r\n" % (len(data), data))

    async def end(self) -> None:
        await self.send(b"0\r\n\r\n")

    def die(self) -> None:
        """Closes the connection; data that was sent arrives first."""
        self._writer.close()

    def reset(self) -> None:
        """The other side gets an error in place of an end."""
        at_once = struct.pack("ii", 1, 0)
        self._writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, at_once)
        self._writer.transport.abort()

    async def closed(self) -> None:
        """Until the other side has closed."""
        with contextlib.suppress(ConnectionError):
            while await self._reader.read(65536):
                pass


def head(status: int, headers: Mapping[str, str]) -> bytes:
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    return f"HTTP/1.1 {status} Said So\r\n{lines}\r\n".encode()


Handler = Callable[[Exchange], Awaitable[None]]


class RawProvider:
    def __init__(self, port: int) -> None:
        self.port = port
        self.connections = 0
        self.requests: list[Exchange] = []


@contextlib.asynccontextmanager
async def raw_provider(handler: Handler, *, tls: ssl.SSLContext | None = None) -> AsyncIterator[RawProvider]:
    """Serves requests one after another on each connection, until a handler closes it."""
    tasks: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        provider.connections += 1
        try:
            while not writer.is_closing():
                head = await reader.readuntil(b"\r\n\r\n")
                length = re.search(rb"(?i)content-length: (\d+)", head)
                exchange = Exchange(reader, writer, head, await reader.readexactly(int(length[1]) if length else 0))
                provider.requests.append(exchange)
                await handler(exchange)
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass  # the other side left, or the test is over
        finally:
            writer.close()
            tasks.discard(task)

    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=tls)
    provider = RawProvider(server.sockets[0].getsockname()[1])
    try:
        yield provider
    finally:
        server.close()
        for task in list(tasks):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
