"""A TCP relay in front of a server that comes and goes: one address for its clients, and a cable that can be cut."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Relay:
    """Listens on 127.0.0.1. Made by `relay`."""

    def __init__(self, target: str) -> None:
        #: host:port of the server; new connections go there.
        self.target = target
        #: host:port for clients.
        self.address = ""
        #: So many answers are swallowed as they begin, and their connections reset: the server has done its work.
        self.swallows = 0
        self.swallowed = 0

    async def run(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        host, _, port = self.target.rpartition(":")
        writers = [writer]
        try:
            upstream, up = await asyncio.open_connection(host, int(port))
            writers.append(up)
            pumps = [
                asyncio.create_task(self._pump(reader, up)),
                asyncio.create_task(self._pump(upstream, writer, True)),
            ]
            try:
                await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for pump in pumps:
                    pump.cancel()
                await asyncio.gather(*pumps, return_exceptions=True)
        except OSError:
            # Nobody is there: the client learns it by the end of its connection.
            pass
        finally:
            for one in writers:
                one.transport.abort()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, answers: bool = False) -> None:
        while data := await reader.read(65536):
            if answers and self.swallows:
                self.swallows -= 1
                self.swallowed += 1
                return
            writer.write(data)
            await writer.drain()


@asynccontextmanager
async def relay(target: str) -> AsyncIterator[Relay]:
    made = Relay(target)
    links: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        link = asyncio.current_task()
        assert link is not None
        links.add(link)
        try:
            # The end of the test is no error of a link.
            with contextlib.suppress(asyncio.CancelledError):
                await made.run(reader, writer)
        finally:
            links.discard(link)

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()[:2]
    made.address = f"{host}:{port}"
    try:
        yield made
    finally:
        server.close()
        for link in links:
            link.cancel()
        await asyncio.gather(*links, return_exceptions=True)
