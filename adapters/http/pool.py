"""
The connections to all providers: made when there is none free, and kept for a while when they are.

How many there are is not bounded here: admission counts calls, and a pool that did it again would hold calls back that
have a slot.
"""

from __future__ import annotations

import asyncio
import functools
import ssl

import aiohappyeyeballs

from adapters.errors import NotSent
from adapters.http.addresses import Addresses
from adapters.http.clock import Clock
from adapters.http.connection import Connection
from adapters.http.request import Origin

#: How long an address is waited for before the next one is tried beside it (RFC 8305).
_NEXT_ADDRESS_S = 0.25


class Pool:
    """To be closed. A `Keeper` of connections."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._addresses = Addresses()
        #: The one used last is at the end, so that those which nobody needs grow old.
        self._free: dict[Origin, list[Connection]] = {}
        self._open: set[Connection] = set()
        self._sweep: asyncio.TimerHandle | None = None
        self._closed = False
        self._closing: asyncio.Future[None] | None = None

    def free(self, origin: Origin) -> Connection | None:
        """
        One that is open, and on which nothing has come that nobody asked for. It is the caller's now, who must send on
        it or cut it.
        """
        free = self._free.get(origin)
        if not free:
            return None
        now = self._loop.time()
        while free:
            connection = free.pop()
            if connection.usable and connection.free_until > now and not connection.heard:
                return connection
            connection.cut()
        return None

    async def connect(self, origin: Origin, clock: Clock, within_s: float) -> Connection:
        """
        A new one, TLS included. Raises `NotSent`: no byte of a request was written.

        The code is "dns", "tls", "connect_refused", "connect_timeout" or "connect_failed", or "deadline" where that
        comes first.
        """
        start = self._loop.time()
        until, code = clock.until(start)
        if until > start + within_s or code != "deadline":
            until, code = min(until, start + within_s), "connect_timeout"
        patience = asyncio.timeout_at(until)
        try:
            async with patience:
                connection = await self._connected(origin)
        except ssl.SSLError as error:
            raise NotSent(f"no connection to the provider: {_why(error)}", code="tls") from error
        except OSError as error:
            if patience.expired():
                raise NotSent("no connection in time", code=code) from error
            code = "connect_refused" if isinstance(error, ConnectionRefusedError) else "connect_failed"
            raise NotSent("no connection to the provider", code=code) from error
        finally:
            clock.spend(self._loop.time() - start)
        if not connection.usable:
            # What is sent on it now goes nowhere, and nobody would say so: its end was told before there was an answer.
            raise NotSent("the provider closed the connection at once", code="connect_failed")
        return connection

    async def _connected(self, origin: Origin) -> Connection:
        try:
            addresses = await self._addresses.of(origin.host, origin.port)
        except (OSError, UnicodeError) as error:
            raise NotSent("the provider's name has no address", code="dns") from error
        opened = await aiohappyeyeballs.start_connection(addresses, happy_eyeballs_delay=_NEXT_ADDRESS_S, interleave=1)
        _, connection = await self._loop.create_connection(
            functools.partial(Connection, origin, self),
            sock=opened,
            ssl=self._verified if origin.tls else None,
            server_hostname=origin.host if origin.tls else None,
        )
        return connection

    @functools.cached_property
    def _verified(self) -> ssl.SSLContext:
        """Reading the certificates of this machine takes a while, and is done where there is need of them."""
        context = ssl.create_default_context()
        context.set_alpn_protocols(["http/1.1"])
        return context

    async def close(self) -> None:
        """Cuts every connection, those at work too, and those that are only being made as soon as they are."""
        self._closed = True
        await self._addresses.close()
        if self._sweep is not None:
            self._sweep.cancel()
        if self._open:
            self._closing = self._loop.create_future()
            for connection in list(self._open):
                connection.cut()
            await self._closing
        self._free.clear()

    # ------------------------------------------------ what the connections say

    def opened(self, connection: Connection) -> None:
        self._open.add(connection)
        if self._closed:
            connection.cut()

    def freed(self, connection: Connection) -> None:
        if connection.keep_alive_s <= 0:
            connection.cut()
            return
        connection.free_until = self._loop.time() + connection.keep_alive_s
        self._free.setdefault(connection.origin, []).append(connection)
        if self._sweep is None:
            self._sweep = self._loop.call_at(connection.free_until, self._cut_old)

    def stale(self, connection: Connection) -> None:
        for other in self._free.pop(connection.origin, ()):
            other.cut()

    def lost(self, connection: Connection) -> None:
        self._open.discard(connection)
        if self._closing is not None and not self._open and not self._closing.done():
            self._closing.set_result(None)

    def _cut_old(self) -> None:
        """Those that were not used for too long, and what the provider closed."""
        now = self._loop.time()
        kept: dict[Origin, list[Connection]] = {}
        for origin, free in self._free.items():
            for connection in free:
                if connection.usable and connection.free_until > now:
                    kept.setdefault(origin, []).append(connection)
                else:
                    connection.cut()
        self._free = kept
        until = min((connection.free_until for free in kept.values() for connection in free), default=None)
        self._sweep = None if until is None else self._loop.call_at(until, self._cut_old)


def _why(error: ssl.SSLError) -> str:
    """What TLS says of it, in the library's words: of a certificate what is wrong with it."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return error.verify_message
    return (error.reason or "TLS failed").lower().replace("_", " ")
