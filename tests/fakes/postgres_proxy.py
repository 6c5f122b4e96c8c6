"""
A proxy that understands PostgreSQL's message frames, so that a commit can be lost at a chosen side of the server.

A plain TCP proxy can cut a connection but not say whether the transaction had committed. This one knows where a
statement's messages end (`Sync`, or a simple query) and where its answer ends (`ReadyForQuery`), and strikes there by
rule. What the fault was is counted by kind. Rules choose with a seeded generator: a seed gives the same choices for the
same sequence of statements, though real processes never give the same sequence twice.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import enum
import random
import re
import socket
import struct
import urllib.parse
from collections import Counter, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

_SSL_REQUEST, _GSS_REQUEST, _CANCEL_REQUEST = 80877103, 80877104, 80877102
_CLOSE_BY_RESET: Final = struct.pack("ii", 1, 0)
#: Of a sliced answer, so many bytes go one by one; the rest in one piece, so that a large one does not take minutes.
_SLICED_BYTES: Final = 1024
_CONNECT_S: Final = 5.0
_BEGINS = re.compile(r"\s*(begin|start\s+transaction)\b", re.IGNORECASE)
_COMMITS = re.compile(r"\s*(commit|end)\b", re.IGNORECASE)


class Action(enum.StrEnum):
    #: Reset before the server has seen that the statement is complete: it did not commit.
    DROP_BEFORE = "commit dropped before the server"
    #: The server has committed; its answer is swallowed and the client sees a reset.
    DROP_AFTER = "commit's answer dropped"
    #: Reset right behind the statement: whether it commits is anybody's guess.
    RESET = "reset behind the statement"
    #: It reaches the server `delay_s` late.
    DELAY_BEFORE = "statement delayed"
    #: Its answer arrives `delay_s` late.
    DELAY_AFTER = "answer delayed"
    #: Its answer arrives byte by byte.
    SLICE = "answer in slices of one byte"
    #: Nothing is forwarded any more, in either direction; the sockets stay open.
    HALF_OPEN = "half-open"
    #: Executed, but the end of the transaction is withheld until `Proxy.release`: its locks are held meanwhile.
    STALL = "stalled before the commit"


TURNED_AWAY: Final = "connection turned away"
CUT: Final = "connection reset"


@dataclasses.dataclass(kw_only=True)
class Rule:
    """When to strike, and how. The first rule of a proxy that strikes is the one."""

    action: Action
    #: A regular expression, searched for in the statement's text.
    statement: str = ""
    probability: float = 1.0
    #: Only the nth that matches, from 1; None: each.
    nth: int | None = None
    #: So many strikes at most; None: no bound.
    times: int | None = None
    delay_s: float = 0.2
    #: Only where a commit hangs on it: a statement outside an explicit transaction, or the `COMMIT` of one.
    commits_only: bool = True
    seen: int = 0
    struck: int = 0

    def strikes(self, statement: str, *, commits: bool, chance: random.Random) -> bool:
        if self.commits_only and not commits:
            return False
        if not re.search(self.statement, statement, re.IGNORECASE):
            return False
        self.seen += 1
        if self.times is not None and self.struck >= self.times:
            return False
        if self.nth is not None and self.seen != self.nth:
            return False
        if chance.random() >= self.probability:
            return False
        self.struck += 1
        return True


@dataclasses.dataclass
class _Unit:
    """What the client sent up to a `Sync` or a simple query, and what is to happen to the answer."""

    frames: list[bytes] = dataclasses.field(default_factory=list)
    statement: str = ""
    executes: bool = False
    swallow: bool = False
    slices: bool = False
    delay_s: float = 0.0


class Proxy:
    """Listens on 127.0.0.1. Made by `postgres_proxy`."""

    def __init__(self, server: str, seed: object) -> None:
        #: Strike by these, in order. May be changed at any time.
        self.rules: list[Rule] = []
        self.counts: Counter[str] = Counter()
        #: While True new connections are reset as soon as they are accepted.
        self.refusing = False
        self.port = 0
        self.chance = random.Random(f"{seed}")
        self.released = asyncio.Event()
        self.links: set[Link] = set()
        self.retarget(server)

    def retarget(self, server: str) -> None:
        """New connections go to the server of this URL."""
        parts = urllib.parse.urlsplit(server)
        directory = urllib.parse.parse_qs(parts.query).get("host", [""])[0]
        self._socket = f"{directory}/.s.PGSQL.5432" if directory.startswith("/") else None
        self._address = (parts.hostname or "127.0.0.1", parts.port or 5432)

    def url(self, database: str) -> str:
        return f"postgresql://postgres@127.0.0.1:{self.port}/{database}"

    def cut(self) -> int:
        """Resets every connection there is."""
        links = list(self.links)
        for link in links:
            link.reset()
        self.counts[CUT] += len(links)
        return len(links)

    def release(self) -> None:
        """Lets what is stalled go on."""
        self.released.set()
        self.released = asyncio.Event()

    @property
    def stalled(self) -> int:
        return sum(link.stalled for link in self.links)

    def struck(self, statement: str, *, commits: bool) -> Rule | None:
        for rule in self.rules:
            if rule.strikes(statement, commits=commits, chance=self.chance):
                self.counts[rule.action.value] += 1
                return rule
        return None

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        async with asyncio.timeout(_CONNECT_S):
            if self._socket is not None:
                return await asyncio.open_unix_connection(self._socket)
            return await asyncio.open_connection(*self._address)


class Link:
    """One connection of a client, and the one to the server behind it."""

    def __init__(self, proxy: Proxy, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.stalled = False
        self._proxy = proxy
        self._client = (reader, writer)
        self._server: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self._statements: dict[bytes, str] = {}
        self._portals: dict[bytes, str] = {}
        self._sent: deque[_Unit] = deque()
        #: "I" outside of a transaction, "T" inside, "E" inside one that failed.
        self._status = b"I"
        self._frozen = False

    async def run(self) -> None:
        try:
            if self._proxy.refusing:
                self._proxy.counts[TURNED_AWAY] += 1
                return
            first = await self._opened()
            if first is None:
                return
            self._server = await self._proxy.connect()
            self._server[1].write(first)
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._up())
                tasks.create_task(self._down())
        except* (OSError, EOFError, TimeoutError):
            pass  # either side has gone, or both were cut
        finally:
            self.reset()

    def reset(self) -> None:
        for stream in (self._client, self._server):
            if stream is None or stream[1].is_closing():
                continue
            raw = stream[1].get_extra_info("socket")
            if raw.family != socket.AF_UNIX:
                raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _CLOSE_BY_RESET)
            stream[1].transport.abort()

    async def _opened(self) -> bytes | None:
        """The startup message. Encryption is declined; a request to cancel is passed on, and that is all."""
        reader, writer = self._client
        while True:
            head = await reader.readexactly(8)
            length, code = struct.unpack("!ii", head)
            rest = await reader.readexactly(length - 8)
            if code in (_SSL_REQUEST, _GSS_REQUEST):
                writer.write(b"N")
                continue
            if code == _CANCEL_REQUEST:
                _, server = await self._proxy.connect()
                server.write(head + rest)
                await server.drain()
                server.close()
                return None
            return head + rest

    async def _up(self) -> None:
        assert self._server is not None
        reader, server = self._client[0], self._server[1]
        unit = _Unit()
        while True:
            kind, body, frame = await _frame(reader)
            unit.frames.append(frame)
            match kind:
                case b"P":
                    name, statement, _ = body.split(b"\0", 2)
                    self._statements[name] = statement.decode(errors="replace")
                case b"B":
                    portal, name, _ = body.split(b"\0", 2)
                    self._portals[portal] = self._statements.get(name, "")
                case b"E":
                    unit.executes = True
                    unit.statement += self._portals.get(body.split(b"\0", 1)[0], "")
                case b"Q":
                    unit.executes = True
                    unit.statement = body.rstrip(b"\0").decode(errors="replace")
            if kind in (b"S", b"Q", b"F"):
                await self._play(unit)
                unit = _Unit()
            elif kind not in (b"P", b"B", b"D", b"E", b"C"):
                # Flush, a password, COPY's data, Terminate: nothing of theirs is to be held back.
                server.write(b"".join(unit.frames))
                unit.frames.clear()
                await server.drain()

    async def _play(self, unit: _Unit) -> None:
        assert self._server is not None
        server = self._server[1]
        commits = unit.executes and (
            _COMMITS.match(unit.statement) is not None
            or (self._status == b"I" and _BEGINS.match(unit.statement) is None)
        )
        rule = self._proxy.struck(unit.statement, commits=commits) if unit.executes else None
        match None if rule is None else rule.action:
            case Action.DROP_BEFORE:
                raise ConnectionResetError
            case Action.RESET:
                server.write(b"".join(unit.frames))
                await server.drain()
                raise ConnectionResetError
            case Action.HALF_OPEN:
                self._frozen = True
                await asyncio.get_running_loop().create_future()
            case Action.STALL:
                server.write(b"".join(unit.frames[:-1]))
                await server.drain()
                self.stalled = True
                await self._proxy.released.wait()
                self.stalled = False
                unit.frames = unit.frames[-1:]
            case Action.DROP_AFTER:
                unit.swallow = True
            case Action.DELAY_BEFORE:
                assert rule is not None
                await asyncio.sleep(rule.delay_s)
            case Action.DELAY_AFTER:
                assert rule is not None
                unit.delay_s = rule.delay_s
            case Action.SLICE:
                unit.slices = True
            case None:
                pass
        self._sent.append(unit)
        server.write(b"".join(unit.frames))
        await server.drain()

    async def _down(self) -> None:
        assert self._server is not None
        reader, client = self._server[0], self._client[1]
        while True:
            kind, body, frame = await _frame(reader)
            if self._frozen:
                continue
            unit = self._sent[0] if self._sent else None
            if unit is not None and unit.delay_s:
                await asyncio.sleep(unit.delay_s)
                unit.delay_s = 0.0
            if unit is not None and unit.slices:
                for place in range(min(len(frame), _SLICED_BYTES)):
                    client.write(frame[place : place + 1])
                    await client.drain()
                    await asyncio.sleep(0)
                client.write(frame[_SLICED_BYTES:])
            elif unit is None or not unit.swallow:
                client.write(frame)
            if kind == b"Z":
                self._status = body
                if unit is not None:
                    self._sent.popleft()
                    if unit.swallow:
                        raise ConnectionResetError
            await client.drain()


async def _frame(reader: asyncio.StreamReader) -> tuple[bytes, bytes, bytes]:
    """The kind, the body and the whole of the next message. Raises `EOFError`, `OSError`."""
    head = await reader.readexactly(5)
    body = await reader.readexactly(int.from_bytes(head[1:], "big") - 4)
    return head[:1], body, head + body


@asynccontextmanager
async def postgres_proxy(server: str, *, seed: object = 0) -> AsyncIterator[Proxy]:
    """A proxy in front of the server of this URL. `seed` fixes the choices of its rules."""
    proxy = Proxy(server, seed)
    tasks: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        link = Link(proxy, reader, writer)
        proxy.links.add(link)
        try:
            with contextlib.suppress(asyncio.CancelledError):
                await link.run()
        finally:
            proxy.links.discard(link)
            tasks.discard(task)

    listening = await asyncio.start_server(serve, "127.0.0.1", 0)
    proxy.port = listening.sockets[0].getsockname()[1]
    try:
        yield proxy
    finally:
        listening.close()
        for task in list(tasks):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        # What was aborted needs one turn of the loop to close its socket.
        await asyncio.sleep(0)
