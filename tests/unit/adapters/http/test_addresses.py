"""Names, and how often they are asked for."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator

import pytest

from adapters.http import addresses
from adapters.http.addresses import Addresses


class Resolver:
    """In place of the one of this machine, which a test must not need."""

    def __init__(self) -> None:
        self.asked = 0
        self.fails = False

    def __call__(self, host: str, port: int, *rest: int) -> list[tuple[object, ...]]:
        self.asked += 1
        if self.fails:
            raise socket.gaierror(socket.EAI_NONAME, "not known")
        kind = (socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP, "")
        return [(*kind, (f"192.0.2.{number}", port)) for number in (1, 2, 3)]


@pytest.fixture
def resolver(monkeypatch: pytest.MonkeyPatch) -> Resolver:
    made = Resolver()
    monkeypatch.setattr(socket, "getaddrinfo", made)
    return made


@pytest.fixture
async def names() -> AsyncIterator[Addresses]:
    opened = Addresses()
    yield opened
    await opened.close()


async def test_a_burst_asks_once_and_is_spread_over_the_addresses(names, resolver):
    found = await asyncio.gather(*(names.of("h.test", 80) for _ in range(6)))
    assert resolver.asked == 1
    assert [len(one) for one in found] == [3] * 6
    firsts = [one[0][4][0] for one in found]
    assert sorted(firsts) == sorted(2 * ["192.0.2.1", "192.0.2.2", "192.0.2.3"])
    await names.of("h.test", 80)
    assert resolver.asked == 1
    await names.of("h.test", 81)
    assert resolver.asked == 2


async def test_what_was_found_is_asked_again_after_a_while(names, resolver, monkeypatch):
    monkeypatch.setattr(addresses, "_KEPT_S", -1.0)
    for _ in range(3):
        await names.of("h.test", 80)
    assert resolver.asked == 3


async def test_a_name_that_is_not_known_is_that_for_all_who_asked_and_is_asked_again(names, resolver):
    resolver.fails = True
    found = await asyncio.gather(*(names.of("h.test", 80) for _ in range(3)), return_exceptions=True)
    assert [type(one) for one in found] == [socket.gaierror] * 3
    resolver.fails = False
    assert len(await names.of("h.test", 80)) == 3


async def test_who_leaves_does_not_take_the_answer_from_the_others(names, resolver):
    leaving = asyncio.ensure_future(names.of("h.test", 80))
    staying = asyncio.ensure_future(names.of("h.test", 80))
    await asyncio.sleep(0)
    leaving.cancel()
    assert len(await staying) == 3
    assert leaving.cancelled()
    assert resolver.asked == 1


@pytest.mark.parametrize(
    ("host", "address"), [("192.0.2.7", ("192.0.2.7", 80)), ("2001:db8::7", ("2001:db8::7", 80, 0, 0))]
)
async def test_an_address_is_asked_for_nowhere(names, resolver, host, address):
    assert [one[4] for one in await names.of(host, 80)] == [address]
    assert resolver.asked == 0
