"""One server a data directory, whatever happens to the processes that use it and to the server itself."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gateway import database, embedded
from gateway.embedded import EmbeddedPostgres, StartFailed, Unusable, running
from tests.postgres import TEST_SETTINGS, run_apart

USER = """
import sys, pathlib
from gateway.embedded import EmbeddedPostgres
with EmbeddedPostgres.start(pathlib.Path(sys.argv[1]), settings={"fsync": "off"}) as server:
    print(server.url, flush=True)
    sys.stdin.read()
"""

#: A process with a gRPC server and channels that are in use, as a gateway is, whose server is killed again and again.
#: It counts what `fork` runs: the handlers that a library registers with libc, of which gRPC's are the dangerous ones.
RESTARTS = """
import asyncio, concurrent.futures.thread, ctypes, os, pathlib, signal, sys, threading, time
# Whatever is imported later too: the interpreter may be where another user cannot read it.
import grpc, grpc.aio, grpc._channel
from gateway import embedded

data_dir, uid, times = pathlib.Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
if uid != os.geteuid():
    os.setgroups([])
    os.setgid(uid)
    os.setuid(uid)
forks = 0

@ctypes.CFUNCTYPE(None)
def forking():
    global forks
    forks += 1

if sys.platform == "linux":
    assert ctypes.CDLL(None).__register_atfork(forking, None, None, None) == 0
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    assert forks == 1, "the count does not count"
    forks = 0

class Echo(grpc.GenericRpcHandler):
    def service(self, details):
        async def echo(request, context):
            return request
        return grpc.unary_unary_rpc_method_handler(echo)

def calls(port, over):
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        echo, count = channel.unary_unary("/echo/Echo"), 0
        while not over.is_set():
            assert echo(b"x", timeout=30) == b"x"
            count += 1
        return count

async def main():
    server = grpc.aio.server()
    server.add_generic_rpc_handlers([Echo()])
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    over = threading.Event()
    with concurrent.futures.ThreadPoolExecutor(2) as threads:
        calling = [threads.submit(calls, port, over) for _ in range(2)]
        try:
            async with embedded.running(data_dir, settings={"fsync": "off"}) as postgres:
                for _ in range(times):
                    pid = int((data_dir / "postgres" / "postmaster.pid").read_text().split()[0])
                    os.kill(pid, signal.SIGKILL)
                    deadline = time.monotonic() + 20
                    while postgres.is_alive():
                        assert time.monotonic() < deadline
                        await asyncio.sleep(0.01)
                    assert await asyncio.to_thread(postgres.restart_if_dead, timeout_s=30)
        finally:
            over.set()
            counts = [await asyncio.wrap_future(one) for one in calling]
    await server.stop(0)
    assert min(counts) > times, counts

asyncio.run(main())
assert forks == 0, f"{forks} forks"
print("restarted", times)
"""


@pytest.fixture(scope="session")
def initialised(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data directory whose server has run once and was stopped."""
    data_dir = tmp_path_factory.mktemp("initialised") / "data"
    EmbeddedPostgres.start(data_dir, settings=TEST_SETTINGS).stop()
    return data_dir


@pytest.fixture
def data_dir(initialised: Path) -> Iterator[Path]:
    yield initialised
    if a_process_of_the_server_is_left(initialised):  # after a failed test
        EmbeddedPostgres.start(initialised).stop()


@contextlib.contextmanager
def moved(data_dir: Path, elsewhere: Path) -> Iterator[Path]:
    data_dir.rename(elsewhere)
    try:
        yield elsewhere
    finally:
        elsewhere.rename(data_dir)


def query(server: EmbeddedPostgres | str, statement: str) -> object:
    async def run() -> object:
        url = server if isinstance(server, str) else server.url
        async with database.open_connection(url, name="test") as connection:
            return await connection.fetchval(statement)

    return run_apart(run())


def server_pid(data_dir: Path) -> int:
    return int((data_dir / "postgres" / "postmaster.pid").read_text().split("\n")[0])


def a_process_of_the_server_is_left(data_dir: Path) -> bool:
    with (data_dir / "postgres.server").open("ab") as guard:
        try:
            fcntl.flock(guard, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        return False


def wait_until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def wait_until_no_process_is_left(data_dir: Path) -> None:
    wait_until(lambda: not a_process_of_the_server_is_left(data_dir))


class OtherUser:
    """Another process that uses the server until told to leave, or killed."""

    def __init__(self, data_dir: Path) -> None:
        command = [sys.executable, "-c", USER, str(data_dir)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def url(self) -> str:
        assert self.process.stdout is not None
        return str(self.process.stdout.readline().strip())

    def leave(self) -> None:
        self.process.communicate(timeout=30)
        assert self.process.returncode == 0

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate(timeout=30)


def test_a_first_start_makes_a_cluster_and_a_later_one_keeps_its_data(tmp_path: Path) -> None:
    with EmbeddedPostgres.start(tmp_path / "deep" / "data") as server:
        query(server, "create table kept (n integer)")
        assert query(server, "show fsync") == "on"
        assert query(server, "show synchronous_commit") == "on"
        assert query(server, "show listen_addresses") == ""
        assert query(server, "show server_encoding") == "UTF8"
        assert not list((tmp_path / "deep" / "data").glob("postgres.new*"))
    with EmbeddedPostgres.start(tmp_path / "deep" / "data") as server:
        assert query(server, "select count(*) from kept") == 0


def test_the_socket_is_closed_to_other_accounts(data_dir: Path) -> None:
    with EmbeddedPostgres.start(data_dir, settings=TEST_SETTINGS):
        assert stat.S_IMODE((data_dir / "postgres").stat().st_mode) == 0o700
        assert stat.S_IMODE((data_dir / "postgres" / ".s.PGSQL.5432").stat().st_mode) == 0o700


def test_the_server_has_a_session_of_its_own_and_none_of_our_secrets(
    data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "canary")
    with EmbeddedPostgres.start(data_dir, settings=TEST_SETTINGS):
        pid = server_pid(data_dir)
        assert os.getsid(pid) != os.getsid(0)
        environment = Path(f"/proc/{pid}/environ")
        if environment.exists():
            assert b"canary" not in environment.read_bytes()


def test_settings_are_given_to_the_server(data_dir: Path) -> None:
    with EmbeddedPostgres.start(data_dir, settings={"max_connections": "17"}) as server:
        assert query(server, "show max_connections") == "17"


def test_two_processes_share_one_server_and_the_last_one_stops_it(data_dir: Path) -> None:
    other = OtherUser(data_dir)
    other_url = other.url()
    with EmbeddedPostgres.start(data_dir, settings=TEST_SETTINGS) as server:
        pid = server_pid(data_dir)
        other.leave()
        assert server_pid(data_dir) == pid
        assert server.is_alive()
        assert query(other_url, "select 1") == 1
    assert not a_process_of_the_server_is_left(data_dir)
    assert not (data_dir / "postgres" / "postmaster.pid").exists()


def test_many_processes_that_start_at_once_get_one_server(tmp_path: Path) -> None:
    others = [OtherUser(tmp_path / "data") for _ in range(4)]
    starts = {query(other.url(), "select pg_postmaster_start_time()") for other in others}
    assert len(starts) == 1
    for other in others:
        other.leave()
    assert not a_process_of_the_server_is_left(tmp_path / "data")


def test_stopping_twice_is_stopping_once(data_dir: Path) -> None:
    with (
        EmbeddedPostgres.start(data_dir, settings=TEST_SETTINGS) as server,
        EmbeddedPostgres.start(data_dir, settings=TEST_SETTINGS) as second,
    ):
        server.stop()
        server.stop()
        assert second.is_alive()


def test_the_server_of_a_killed_process_is_adopted_and_then_stopped(data_dir: Path) -> None:
    other = OtherUser(data_dir)
    other.url()
    pid = server_pid(data_dir)
    other.kill()
    with EmbeddedPostgres.start(data_dir, settings=TEST_SETTINGS) as server:
        assert server_pid(data_dir) == pid
        assert query(server, "select 1") == 1
    assert not a_process_of_the_server_is_left(data_dir)


def test_a_killed_server_comes_back_with_what_was_committed(data_dir: Path) -> None:
    with EmbeddedPostgres.start(data_dir, settings=TEST_SETTINGS) as server:
        query(server, "create table kept as select 7 as n")
        assert not server.restart_if_dead()
        os.kill(server_pid(data_dir), signal.SIGKILL)
        wait_until_no_process_is_left(data_dir)
        assert not server.is_alive()
        assert server.restart_if_dead()
        assert query(server, "select n from kept") == 7
        assert not server.restart_if_dead()


def test_a_restart_waits_for_the_orphans_of_a_killed_server(data_dir: Path) -> None:
    with EmbeddedPostgres.start(data_dir, settings=TEST_SETTINGS) as server:
        orphan = int(str(query(server, "select pid from pg_stat_activity where backend_type = 'checkpointer'")))
        os.kill(orphan, signal.SIGSTOP)
        try:
            os.kill(server_pid(data_dir), signal.SIGKILL)
            wait_until(lambda: not server.is_alive())
            with pytest.raises(StartFailed, match="not ready in time"):
                server.restart_if_dead(timeout_s=0.3)
        finally:
            os.kill(orphan, signal.SIGCONT)
        assert server.restart_if_dead()
        assert query(server, "select 1") == 1


def test_a_process_id_that_belongs_to_another_program_now_is_not_believed(data_dir: Path) -> None:
    owner = (data_dir / "postgres").stat()
    with subprocess.Popen(as_owner(owner, ["/bin/sleep", "60"])) as stranger:
        pid_file = data_dir / "postgres" / "postmaster.pid"
        pid_file.write_text(f"{stranger.pid}\n{data_dir}/postgres\n1700000000\n5432\n.\n\n 1 2\nready   \n")
        socket_lock = data_dir / "postgres" / ".s.PGSQL.5432.lock"
        socket_lock.write_text(pid_file.read_text())
        for file in (pid_file, socket_lock):
            os.chown(file, owner.st_uid, owner.st_gid)
        with EmbeddedPostgres.start(data_dir, settings=TEST_SETTINGS) as server:
            assert query(server, "select 1") == 1
        assert stranger.poll() is None
        stranger.kill()


def test_a_half_written_process_id_file_is_not_believed(data_dir: Path) -> None:
    (data_dir / "postgres" / "postmaster.pid").write_text("12")
    with EmbeddedPostgres.start(data_dir, settings=TEST_SETTINGS) as server:
        assert query(server, "select 1") == 1


def test_a_path_too_long_for_a_socket_gets_a_short_private_name(data_dir: Path, tmp_path: Path) -> None:
    deep = tmp_path / ("long" * 30)
    deep.mkdir()
    with moved(data_dir, deep / "with 'quotes' & ünïcode") as elsewhere:
        with EmbeddedPostgres.start(elsewhere, settings=TEST_SETTINGS) as server:
            link = server._link
            assert link is not None
            assert stat.S_IMODE(link.parent.stat().st_mode) == 0o700
            assert len(str(link / ".s.PGSQL.5432")) < 104
            assert query(server, "select 1") == 1
        assert not link.parent.exists()


def test_special_characters_in_the_path_reach_the_url_quoted(data_dir: Path) -> None:
    with (
        tempfile.TemporaryDirectory() as short,
        moved(data_dir, Path(short) / "a b&c=ü%") as elsewhere,
        EmbeddedPostgres.start(elsewhere, settings=TEST_SETTINGS) as server,
    ):
        assert server._link is None
        assert query(server, "select 1") == 1


async def test_a_start_that_is_cancelled_leaves_no_server(data_dir: Path) -> None:
    async def use() -> None:
        async with running(data_dir, settings=TEST_SETTINGS):
            raise AssertionError

    task = asyncio.create_task(use())
    await asyncio.to_thread(wait_until, (data_dir / "postgres" / "postmaster.pid").exists)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not a_process_of_the_server_is_left(data_dir)


async def test_async_code_enters_and_leaves_it(data_dir: Path) -> None:
    async with running(data_dir, settings=TEST_SETTINGS) as server:
        assert server.is_alive()
    assert not a_process_of_the_server_is_left(data_dir)


def test_a_server_that_cannot_start_is_reported_with_the_end_of_its_log(data_dir: Path) -> None:
    with pytest.raises(StartFailed, match=r"(?s)ended while it started.*no_such_setting"):
        EmbeddedPostgres.start(data_dir, settings={"no_such_setting": "1"})
    with EmbeddedPostgres.start(data_dir, settings=TEST_SETTINGS) as server:
        assert query(server, "select 1") == 1


def test_a_data_directory_that_cannot_be_made_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(Unusable, match="cannot run in"):
        EmbeddedPostgres.start(tmp_path / "file" / "data")


def restarted(data_dir: Path, uid: int, times: int = 10) -> None:
    command = [sys.executable, "-c", RESTARTS, str(data_dir), str(uid), str(times)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180, check=False)
    assert (done.returncode, done.stdout) == (0, f"restarted {times}\n"), done.stderr


def test_it_is_restarted_in_a_process_with_grpc_in_use_and_nothing_is_forked(data_dir: Path) -> None:
    restarted(data_dir, os.geteuid())


def as_owner(owner: os.stat_result, command: list[str]) -> list[str]:
    if os.geteuid() != 0:
        return command
    return embedded._as(embedded._Account(owner.st_uid, owner.st_gid), command, {})[0]


root_only = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")


@root_only
def test_root_has_it_run_by_another_account_from_a_directory_closed_to_that_account(tmp_path: Path) -> None:
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o700)
    with EmbeddedPostgres.start(closed / "data", settings=TEST_SETTINGS) as server:
        assert (closed / "data" / "postgres").stat().st_uid != 0
        assert query(server, "select 1") == 1
    assert stat.S_IMODE(closed.stat().st_mode) == 0o700


@root_only
def test_root_copies_the_binaries_where_the_way_to_the_wheel_is_closed(
    data_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tempfile.TemporaryDirectory() as open_directory:
        Path(open_directory).chmod(0o755)
        monkeypatch.setattr(tempfile, "tempdir", open_directory)
        monkeypatch.setattr(embedded, "_runs", lambda command, account: False)
        with EmbeddedPostgres.start(data_dir, settings=TEST_SETTINGS) as server:
            assert query(server, "select 1") == 1
            (copy,) = Path(open_directory).iterdir()
            assert Path(f"/proc/{server_pid(data_dir)}/exe").readlink().is_relative_to(copy)
        with EmbeddedPostgres.start(data_dir, settings=TEST_SETTINGS) as server:
            assert list(Path(open_directory).iterdir()) == [copy]
        copy.chmod(0o777)
        with pytest.raises(Unusable, match="is not ours"):
            EmbeddedPostgres.start(data_dir, settings=TEST_SETTINGS)


@root_only
def test_an_ordinary_user_restarts_it_in_a_process_with_grpc_in_use_and_nothing_is_forked() -> None:
    nobody = 65534
    with tempfile.TemporaryDirectory() as directory:
        os.chown(directory, nobody, nobody)
        restarted(Path(directory) / "data", nobody)
        assert (Path(directory) / "data" / "postgres").stat().st_uid == nobody


@root_only
def test_an_account_that_cannot_be_taken_is_told(data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded, "_BECOME", "import sys; sys.exit('nobody can be somebody else here')")
    monkeypatch.setattr(embedded, "_runs", lambda command, account: True)
    with pytest.raises(StartFailed, match=r"(?s)ended with status 1.*nobody can be somebody else here"):
        EmbeddedPostgres.start(data_dir, settings=TEST_SETTINGS)


@root_only
def test_a_command_is_the_account_and_nothing_of_root_is_left(tmp_path: Path) -> None:
    account = embedded._account_for(tmp_path / "absent")
    assert account is not None
    given = {"LD_PRELOAD": "/nowhere/of-ours.so", "OF_OURS": "1"}
    shown = "grep -E '^(Uid|Gid|Groups):' /proc/self/status; echo $LD_PRELOAD $OF_OURS"
    command, environment = embedded._as(account, ["/bin/sh", "-c", shown], given)
    assert environment == {"OF_OURS": "1"}, "the interpreter that is still root gets it, too"
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    ids = ["Uid:", *[str(account.uid)] * 4, "Gid:", *[str(account.gid)] * 4, "Groups:"]
    assert done.stdout.split() == [*ids, "/nowhere/of-ours.so", "1"]
    missing = str(tmp_path / "absent")
    command, _ = embedded._as(account, [missing], {})
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.strip().startswith(f"cannot run {missing} as user {account.uid}: ")


@root_only
def test_an_ordinary_user_needs_no_account() -> None:
    nobody = 65534
    with tempfile.TemporaryDirectory() as directory:
        os.chown(directory, nobody, nobody)
        data_dir = Path(directory) / "data"
        child = os.fork()
        if child == 0:  # Not a new interpreter: this one may be where another user cannot read it.
            try:
                os.setgroups([])
                os.setgid(nobody)
                os.setuid(nobody)
                with EmbeddedPostgres.start(data_dir, settings=TEST_SETTINGS) as server:
                    os._exit(0 if query(server, "show data_directory") == str(data_dir / "postgres") else 3)
            finally:
                os._exit(4)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert (data_dir / "postgres").stat().st_uid == nobody
        # Adopted, since `os._exit` left no one to stop it: and root runs it as the owner of the data.
        with EmbeddedPostgres.start(data_dir, settings=TEST_SETTINGS) as server:
            os.kill(server_pid(data_dir), signal.SIGKILL)
            wait_until_no_process_is_left(data_dir)
            server.restart_if_dead()
            assert Path(f"/proc/{server_pid(data_dir)}").stat().st_uid == nobody
