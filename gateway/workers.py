"""
`serve --workers N`: one parent, N gateways on the same two ports, and nobody left behind.

The kernel spreads connections over every socket that listens on a port with SO_REUSEPORT. The parent holds such a
socket for each port and never listens on it, so the number stays taken while workers die and return. Each worker is a
whole gateway process; they share nothing but PostgreSQL, so any of them may be killed at any time.

A worker ends when it is told to (SIGTERM), and also when its standard input ends: the other end is the parent's, so a
parent that is killed outright takes its workers along, drained, instead of leaving them to serve with nobody in charge.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import structlog

from gateway import app, config, logs, runtime
from gateway.keys import Bootstrap, EnvironmentKey

log = structlog.get_logger()

#: Set for a worker: its number, from 1. Absent in the process that a person started.
WORKER = "TOLLBRIDGE_WORKER"

#: Seconds before a dead worker is started again: doubled at each death up to the maximum, and back to the first one
#: after a life that long. A worker that dies at once must not use up the machine.
FIRST_BACKOFF_S, MAX_BACKOFF_S, STABLE_LIFE_S = 0.2, 10.0, 30.0
#: Seconds a worker gets for its unwinding after the second signal, and past the drain deadline.
LAST_GRACE_S = 5.0
#: Seconds past the drain deadline for what was cancelled by it to be settled.
SETTLE_S = 15.0


#: Seconds between looks whether ready.json is still there.
_KEEP_READY_S = 1.0


class DataDirUnusable(Exception):
    """The data directory cannot be made or written."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(f"the data directory {path} cannot be used: {reason}")


class PortTaken(Exception):
    """Another program listens on this address, or the address is not this machine's."""

    def __init__(self, host: str, port: int, reason: str) -> None:
        super().__init__(f"cannot listen on {host}:{port}: {reason}")


class WorkerFailed(Exception):
    """A worker ended before all of them were ready once: starting it again would end the same way."""

    def __init__(self, number: int, status: int) -> None:
        super().__init__(f"worker {number} ended with status {status} while it started; its log says why")


class Ready(msgspec.Struct, frozen=True, kw_only=True, tag_field="event", tag="gateway.ready"):
    """What `ready.json` holds while the gateway serves."""

    #: "http://127.0.0.1:8080"
    rest: str
    #: "127.0.0.1:50051"
    grpc: str
    pid: int


@contextlib.contextmanager
def reserved(host: str, port: int) -> Iterator[int]:
    """
    Hold the port for this process and those it starts; 0 asks for a free one. Yields the number.

    Raises PortTaken.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        # With SO_REUSEPORT two gateways of one user could share a port by mistake: ask without it first.
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
        holder = socket.socket(family, kind, protocol)
    except OSError as error:
        raise PortTaken(host, port, error.strerror or "unknown address") from error
    with holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        try:
            holder.bind(address)
        except OSError as error:
            raise PortTaken(host, port, error.strerror or "unknown address") from error
        yield holder.getsockname()[1]


@contextlib.contextmanager
def ready_file(path: Path, ready: Ready) -> Iterator[None]:
    """
    Tell other programs of this machine where the gateway is: `ready.json` appears whole and goes away at the end,
    unless another gateway has put its own there meanwhile. When that one takes it away, it is put there again. Needs a
    running event loop.
    """
    content = msgspec.json.encode(ready)
    whole = path.with_name(f"{path.name}.{os.getpid()}")

    def put() -> None:
        whole.write_bytes(content)
        whole.replace(path)

    async def keep() -> None:
        while True:
            await asyncio.sleep(_KEEP_READY_S)
            if not await asyncio.to_thread(path.exists):
                put()

    put()
    keeper = asyncio.get_running_loop().create_task(keep(), name="ready.json")
    try:
        yield
    finally:
        keeper.cancel()
        with contextlib.suppress(FileNotFoundError):
            if path.read_bytes() == content:
                path.unlink()


class Stop:
    """
    What has been asked for: `gently` by the first SIGTERM or SIGINT (drain), `at_once` by the second. A task that only
    starts is cancelled by the first.
    """

    def __init__(self) -> None:
        self.gently = asyncio.Event()
        self.at_once = asyncio.Event()
        self._starting: asyncio.Task[Any] | None = None

    def ask(self) -> None:
        if self.gently.is_set():
            self.at_once.set()
        self.gently.set()
        if self._starting is not None:
            self._starting.cancel()
            self._starting = None

    def starts(self) -> None:
        """The current task serves nobody yet."""
        self._starting = asyncio.current_task()

    def started(self) -> None:
        self._starting = None


@contextlib.contextmanager
def stopped_by_signals(*, and_by_stdin: bool) -> Iterator[Stop]:
    """Hear SIGTERM and SIGINT, and the end of standard input where a parent holds the other end of it."""
    loop = asyncio.get_running_loop()
    stop = Stop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.ask)
    if and_by_stdin:
        loop.add_reader(sys.stdin, lambda: _parent_is_gone(loop, stop))
    try:
        yield stop
    finally:
        if and_by_stdin:
            loop.remove_reader(sys.stdin)
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)


def _parent_is_gone(loop: asyncio.AbstractEventLoop, stop: Stop) -> None:
    if os.read(sys.stdin.fileno(), 1024) == b"":
        loop.remove_reader(sys.stdin)
        # Where the stop was asked for already, the end of the parent is no second signal.
        if not stop.gently.is_set():
            stop.ask()


def load(path: Path | None, data_dir: Path | None) -> config.Settings:
    """The settings, with what was said on the command line over environment and file. Raises config.ConfigFaults."""
    environ = dict(os.environ)
    if data_dir is not None:
        environ["TOLLBRIDGE_DATA_DIR"] = str(data_dir)
    return config.load(path, environ)


async def serve(settings: config.Settings, *, count: int, stop_with_stdin: bool) -> bool:
    """
    Serve in this process, or in `count` workers of it, until a signal asks for the end. False: the end was forced.

    Raises DataDirUnusable, PortTaken, WorkerFailed, `gateway.database.DatabaseError`,
    `gateway.embedded.EmbeddedPostgresError`, `gateway.errors.GatewayError` for an unusable TOLLBRIDGE_API_KEY, OSError.
    """
    with contextlib.ExitStack() as stack:
        stop = stack.enter_context(stopped_by_signals(and_by_stdin=stop_with_stdin))
        try:
            settings.data_dir.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise DataDirUnusable(settings.data_dir, error.strerror or type(error).__name__) from error
        if not os.access(settings.data_dir, os.W_OK | os.X_OK):
            raise DataDirUnusable(settings.data_dir, "it is not writable")
        log.info(
            "gateway.starting",
            data_dir=str(settings.data_dir),
            database="given" if settings.database_url else "embedded",
            loop=runtime.name() if count == 1 else "asyncio",
        )
        if WORKER not in os.environ:
            # Both servers listen with SO_REUSEPORT: that nobody else does is made sure here.
            rest = stack.enter_context(reserved(settings.rest.host, settings.rest.port))
            grpc = stack.enter_context(reserved(settings.grpc.host, settings.grpc.port))
            settings = msgspec.structs.replace(
                settings,
                rest=config.Listen(settings.rest.host, rest),
                grpc=config.Listen(settings.grpc.host, grpc),
            )
        async with _database(settings, stop) as url:
            if url is None:
                log.info("gateway.stopped")
                return True
            if WORKER in os.environ:
                return await _serve_here(settings, url, stop, lambda: _announce(settings))
            _show_keys(await app.bootstrap_keys(url, settings))

            def ready() -> None:
                stack.enter_context(ready_file(settings.data_dir / "ready.json", _ready(settings)))
                _announce(settings)
                _advise(settings)

            if count == 1:
                return await _serve_here(settings, url, stop, ready)
            supervisor = Supervisor(
                [sys.executable, "-m", "gateway", "serve", "--stop-with-stdin"],
                count=count,
                environ=_environment(settings, url),
                stop=stop,
                drain_s=settings.drain_delay_s + settings.drain_s + SETTLE_S,
                on_ready=ready,
            )
            await supervisor.run()
            return True


@contextlib.asynccontextmanager
async def _database(settings: config.Settings, stop: Stop) -> AsyncIterator[str | None]:
    """The database's URL, migrated. None: the stop came before there was one."""
    async with contextlib.AsyncExitStack() as stack:
        url: str | None
        stop.starts()
        try:
            url = await stack.enter_async_context(app.open_database(settings))
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or not stop.gently.is_set() or task.uncancel() > 0:
                raise
            url = None
        finally:
            stop.started()
        yield url


async def _serve_here(settings: config.Settings, url: str, stop: Stop, on_ready: Callable[[], None]) -> bool:
    async def until_asked() -> None:
        async with app.open_gateway(settings, url):
            runtime.settle_memory()
            on_ready()
            await stop.gently.wait()
            log.info("gateway.draining", for_at_most_s=settings.drain_delay_s + settings.drain_s)
        log.info("gateway.stopped")

    serving = asyncio.create_task(until_asked(), name="gateway")
    forced = asyncio.create_task(stop.at_once.wait(), name="second signal")
    try:
        await asyncio.wait({serving, forced}, return_when=asyncio.FIRST_COMPLETED)
        if not serving.done():
            log.warning("gateway.drain_cut_short")
            serving.cancel()
            await asyncio.wait({serving}, timeout=LAST_GRACE_S)
    finally:
        forced.cancel()
    if not serving.done():
        log.error("gateway.end_forced")
        return False
    with contextlib.suppress(asyncio.CancelledError):
        serving.result()
    return True


def _environment(settings: config.Settings, url: str) -> dict[str, str]:
    """A worker reads the same configuration, and is told what its parent has found out. The URL may hold a password."""
    environ = {
        **os.environ,
        "TOLLBRIDGE_DATABASE_URL": url,
        "TOLLBRIDGE_DATA_DIR": str(settings.data_dir),
        "TOLLBRIDGE_REST_LISTEN": _address(settings.rest),
        "TOLLBRIDGE_GRPC_LISTEN": _address(settings.grpc),
    }
    if settings.file is not None:
        environ["TOLLBRIDGE_CONFIG"] = str(settings.file)
    return environ


def _address(listen: config.Listen) -> str:
    host = f"[{listen.host}]" if ":" in listen.host else listen.host
    return f"{host}:{listen.port}"


def _ready(settings: config.Settings) -> Ready:
    return Ready(rest=f"http://{_address(settings.rest)}", grpc=_address(settings.grpc), pid=os.getpid())


def _announce(settings: config.Settings) -> None:
    ready = _ready(settings)
    logs.announce("gateway.ready", rest=ready.rest, grpc=ready.grpc)


def _advise(settings: config.Settings) -> None:
    """Who has configured no provider is told how."""
    enabled = [provider for provider in settings.providers.values() if provider.enabled]
    ready = {provider.id for provider in enabled if provider.ready}
    # Without a file, those that need nothing are there for everybody.
    given = set() if settings.file is not None else {p.id for p in config.load(None, {}).providers.values() if p.ready}
    if ready - given:
        return
    log.warning(
        "gateway.no_provider_configured",
        set_one_of=sorted(" and ".join(provider.missing) for provider in enabled if not provider.ready),
        or_write=str(settings.file or "tollbridge.toml"),
        need_no_key=sorted(ready),
        see="docs/configuration.md; tollbridge check",
    )


def _show_keys(found: Bootstrap) -> None:
    if found.first_secret is not None:
        # The only place a secret is ever written to, and the only time.
        logs.announce("gateway.first_key", key=found.first_secret)
    match found.environment:
        case EnvironmentKey.ADDED | EnvironmentKey.REPLACED:
            log.info("gateway.environment_key", became=found.environment.value)
        case EnvironmentKey.REFUSED:
            log.warning("gateway.environment_key", became="refused", why="revoked or expired: choose another value")
        case _:
            pass


class Supervisor:
    """Keeps `count` workers running."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        count: int,
        environ: Mapping[str, str],
        stop: Stop,
        drain_s: float,
        on_ready: Callable[[], None],
    ) -> None:
        """
        `on_ready` is called once, when every worker has printed its `gateway.ready` line. `drain_s`: how long a worker
        may take to end after SIGTERM.
        """
        self._command = command
        self._count = count
        self._environ = environ
        self._stop = stop
        self._drain_s = drain_s
        self._on_ready = on_ready
        self._ready: set[int] = set()
        self._started = False

    async def run(self) -> None:
        """
        Until the stop is asked for and every worker has ended. Raises WorkerFailed where one cannot even start; the
        others are drained before.
        """
        failures: list[WorkerFailed] = []
        async with asyncio.TaskGroup() as group:
            for number in range(1, self._count + 1):
                group.create_task(self._keep(number, failures), name=f"worker {number}")
        if failures:
            raise failures[0]

    async def _keep(self, number: int, failures: list[WorkerFailed]) -> None:
        backoff_s = FIRST_BACKOFF_S
        while not self._stop.gently.is_set():
            began = time.monotonic()
            status = await self._live(number)
            self._ready.discard(number)
            if self._stop.gently.is_set():
                return
            if not self._started:
                failures.append(WorkerFailed(number, status))
                self._stop.gently.set()
                return
            if time.monotonic() - began > STABLE_LIFE_S:
                backoff_s = FIRST_BACKOFF_S
            log.error("gateway.worker_died", worker=number, status=status, restart_in_s=backoff_s)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stop.gently.wait(), backoff_s)
            backoff_s = min(2 * backoff_s, MAX_BACKOFF_S)

    async def _live(self, number: int) -> int:
        """One life of a worker, to its end. Its exit status, negative for a signal."""
        worker = await asyncio.create_subprocess_exec(
            *self._command,
            env={**self._environ, WORKER: str(number)},
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            # A Ctrl-C in the terminal is for the parent, which passes it on once.
            process_group=0,
        )
        log.info("gateway.worker_started", worker=number, pid=worker.pid)
        hearer = asyncio.create_task(self._hear(number, worker), name=f"output of worker {number}")
        ender = asyncio.create_task(self._end_when_asked(worker), name=f"end of worker {number}")
        try:
            return await worker.wait()
        finally:
            if worker.returncode is None:
                worker.kill()
                await worker.wait()
            ender.cancel()
            hearer.cancel()
            await asyncio.gather(hearer, ender, return_exceptions=True)

    async def _hear(self, number: int, worker: asyncio.subprocess.Process) -> None:
        assert worker.stdout is not None
        async for line in worker.stdout:
            if _event(line) != "gateway.ready":
                sys.stdout.write(line.decode(errors="replace"))
                sys.stdout.flush()
                continue
            self._ready.add(number)
            log.info("gateway.worker_ready", worker=number, pid=worker.pid)
            if len(self._ready) == self._count and not self._started and not self._stop.gently.is_set():
                self._started = True
                self._on_ready()

    async def _end_when_asked(self, worker: asyncio.subprocess.Process) -> None:
        await self._stop.gently.wait()
        _send(worker, signal.SIGTERM)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._stop.at_once.wait(), self._drain_s)
        _send(worker, signal.SIGTERM)
        await asyncio.sleep(LAST_GRACE_S)
        log.error("gateway.worker_killed", pid=worker.pid)
        _send(worker, signal.SIGKILL)


def _send(worker: asyncio.subprocess.Process, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        worker.send_signal(number)


def _event(line: bytes) -> str | None:
    try:
        said: Any = msgspec.json.decode(line)
    except msgspec.DecodeError:
        return None
    return said.get("event") if isinstance(said, dict) else None
