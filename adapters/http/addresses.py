"""
Names to addresses, kept for a few seconds.

A burst of new connections asks for one name many times at once, and each question occupies a thread.
"""

from __future__ import annotations

import asyncio
import socket
from functools import partial

from aiohappyeyeballs import AddrInfoType as Address

#: A name that is moved is found again this soon.
_KEPT_S = 10.0


class Addresses:
    """Asks the resolver of this machine, once for all who want to know at a time."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, int], tuple[float, list[Address]]] = {}
        self._asking: dict[tuple[str, int], asyncio.Task[list[Address]]] = {}

    async def of(self, host: str, port: int) -> list[Address]:
        """In turn another one of them comes first. Raises `OSError`."""
        literal = _literal(host, port)
        if literal is not None:
            return [literal]
        loop = asyncio.get_running_loop()
        until, found = self._known.get((host, port), (0.0, []))
        if until <= loop.time():
            asking = self._asking.get((host, port))
            if asking is None:
                asking = self._asking[host, port] = loop.create_task(_ask(host, port), name="resolve")
                asking.add_done_callback(partial(self._asked, (host, port)))
            # Who leaves does not take the answer from the others.
            found = await asyncio.shield(asking)
        found.append(found.pop(0))
        return list(found)

    def _asked(self, name: tuple[str, int], asking: asyncio.Task[list[Address]]) -> None:
        del self._asking[name]
        if not asking.cancelled() and asking.exception() is None:
            self._known[name] = (asking.get_loop().time() + _KEPT_S, asking.result())

    async def close(self) -> None:
        asking = list(self._asking.values())
        for task in asking:
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)


def _literal(host: str, port: int) -> Address | None:
    """Of what is an address already."""
    for family in (socket.AF_INET, socket.AF_INET6):
        try:
            socket.inet_pton(family, host)
        except OSError:
            continue
        address = (host, port) if family is socket.AF_INET else (host, port, 0, 0)
        return family, socket.SOCK_STREAM, socket.IPPROTO_TCP, "", address
    return None


async def _ask(host: str, port: int) -> list[Address]:
    found = await asyncio.get_running_loop().getaddrinfo(
        host, port, type=socket.SOCK_STREAM, proto=socket.IPPROTO_TCP, flags=socket.AI_ADDRCONFIG
    )
    if not found:
        raise OSError(f"{host} has no address")
    return list(found)
