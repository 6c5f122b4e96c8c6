"""
Both faces of the Python client under one test body: the asynchronous one as it is, the other in threads of its own.

Nothing here knows what a method does, only how it is called: awaited, entered, or iterated over.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, asynccontextmanager
from typing import Any, TypeVar

import pytest

from gateway.client import AsyncClient, Client

T = TypeVar("T")

ENTERED = frozenset({"stream", "results"})
ITERATED = frozenset({"as_completed", "list", "text"})
END = object()


class InThreads:
    """Something of the synchronous face, called as its sibling is."""

    def __init__(self, real: Any, threads: ThreadPoolExecutor) -> None:
        self._real = real
        self._threads = threads

    async def _apart(self, function: Callable[..., T], *arguments: Any, **named: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, lambda: function(*arguments, **named))

    def __getattr__(self, name: str) -> Any:
        real = getattr(self._real, name)
        if not callable(real):
            return InThreads(real, self._threads)
        if name in ENTERED:
            return lambda *arguments, **named: self._entered(real(*arguments, **named))
        if name in ITERATED:
            return lambda *arguments, **named: self._each(real(*arguments, **named))
        return lambda *arguments, **named: self._apart(real, *arguments, **named)

    @asynccontextmanager
    async def _entered(self, manager: AbstractContextManager[Any]) -> AsyncIterator[InThreads]:
        inner = await self._apart(manager.__enter__)
        try:
            yield InThreads(inner, self._threads)
        finally:
            await self._apart(manager.__exit__, None, None, None)

    async def _each(self, items: Iterator[Any]) -> AsyncGenerator[Any, None]:
        while (item := await self._apart(next, items, END)) is not END:
            yield item

    def __aiter__(self) -> InThreads:
        return self

    async def __anext__(self) -> Any:
        item = await self._apart(next, self._real, END)
        if item is END:
            raise StopAsyncIteration
        return item


@asynccontextmanager
async def in_threads(**address: Any) -> AsyncIterator[Any]:
    with ThreadPoolExecutor(4, thread_name_prefix="client") as threads, Client(**address) as client:
        yield InThreads(client, threads)


@asynccontextmanager
async def in_the_loop(**address: Any) -> AsyncIterator[Any]:
    async with AsyncClient(**address) as client:
        yield client


FACES = {"async": in_the_loop, "sync": in_threads}


@pytest.fixture(params=list(FACES))
def connect(request: pytest.FixtureRequest) -> Callable[..., Any]:
    """`async with connect(grpc=..., rest=..., api_key=...) as client`, for each face."""
    return FACES[request.param]
