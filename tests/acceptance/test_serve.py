"""`tollbridge serve` as an operator sees it: its start, its workers, its end."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import msgspec
import pytest

from gateway.embedded import EmbeddedPostgres
from tests.acceptance.processes import KEY, PATIENCE_S, served


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "it did not come about"
        time.sleep(0.01)


def alive(pid: int) -> bool:
    try:
        # A zombie whose parent is gone waits for whoever adopted it.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def nobody_listens(address: str) -> bool:
    host, _, port = address.removeprefix("http://").rpartition(":")
    with socket.socket() as probe:
        return probe.connect_ex((host, int(port))) != 0


@pytest.mark.parametrize("count", ["1", "2"], ids=["alone", "two workers"])
def test_it_says_once_where_it_serves_and_drains_at_sigterm(tmp_path, database_url, count):
    with served(tmp_path, "--workers", count, environ={"TOLLBRIDGE_DATABASE_URL": database_url}) as gateway:
        gateway.until_ready()
        assert gateway.get("/healthz", key=None).status_code == 200
        assert gateway.get("/v1/groups").status_code == 200
        assert msgspec.json.decode((tmp_path / "ready.json").read_bytes()) == {
            "event": "gateway.ready",
            "rest": gateway.rest,
            "grpc": gateway.grpc,
            "pid": gateway.process.pid,
        }
        assert gateway.end() == 0, gateway.log
        assert [line["event"] for line in gateway.lines] == ["gateway.ready"]
        assert not (tmp_path / "ready.json").exists()
        assert nobody_listens(gateway.rest)
        assert nobody_listens(gateway.grpc)
        assert len(gateway.events("gateway.stopped")) == int(count)


def test_a_worker_that_is_killed_comes_back_and_the_port_serves_on(tmp_path, database_url):
    with served(tmp_path, "--workers", "2", environ={"TOLLBRIDGE_DATABASE_URL": database_url}) as gateway:
        gateway.until_ready()
        first = gateway.events("gateway.worker_ready")[0]["pid"]
        os.kill(first, signal.SIGKILL)
        until(lambda: len(gateway.events("gateway.worker_ready")) == 3)
        assert not alive(first)
        assert gateway.get("/healthz", key=None).status_code == 200
        assert gateway.end() == 0, gateway.log


def test_workers_end_by_themselves_when_their_parent_is_killed(tmp_path, database_url):
    with served(tmp_path, "--workers", "2", environ={"TOLLBRIDGE_DATABASE_URL": database_url}) as gateway:
        gateway.until_ready()
        pids = [event["pid"] for event in gateway.events("gateway.worker_ready")]
        gateway.process.kill()
        until(lambda: not any(alive(pid) for pid in pids))
        assert len(gateway.events("gateway.stopped")) == 2
        assert nobody_listens(gateway.rest)


def test_the_first_start_shows_a_key_once_and_the_embedded_database_stops_with_it(tmp_path):
    with served(tmp_path, environ={"TOLLBRIDGE_API_KEY": None}) as gateway:
        key = gateway.until("gateway.first_key")["key"]
        gateway.until_ready()
        assert gateway.get("/v1/groups", key=key).status_code == 200
        assert gateway.get("/v1/groups", key=None).status_code == 401
        assert gateway.end() == 0, gateway.log
        assert key not in gateway.log
    with served(tmp_path, environ={"TOLLBRIDGE_API_KEY": None}) as again:
        again.until_ready()
        assert [line["event"] for line in again.lines] == ["gateway.ready"]
        assert again.get("/v1/groups", key=key).status_code == 200
        assert again.end() == 0, again.log
    with EmbeddedPostgres.start(tmp_path) as server:
        assert server.is_alive()
    assert not (tmp_path / "postgres" / "postmaster.pid").exists()


def test_an_address_that_is_taken_is_refused_in_one_line(tmp_path, database_url):
    with served(tmp_path / "one", environ={"TOLLBRIDGE_DATABASE_URL": database_url}) as first:
        first.until_ready()
        address = first.rest.removeprefix("http://")
        environ = {"TOLLBRIDGE_DATABASE_URL": database_url, "TOLLBRIDGE_REST_LISTEN": address}
        with served(tmp_path / "two", environ=environ) as second:
            assert second.process.wait(PATIENCE_S) == 1
            assert f"error: cannot listen on {address}" in second.log
            assert "Traceback" not in second.log
        assert first.get("/healthz", key=None).status_code == 200


def test_a_fault_in_the_configuration_is_refused_with_its_path_before_anything_starts(tmp_path):
    with served(tmp_path, configuration='[models."m"]\nproviders = ["nobody"]\nprize = 1\n') as gateway:
        assert gateway.process.wait(PATIENCE_S) == 1
        assert "models.m.prize" in gateway.log
        assert not (tmp_path / "postgres").exists()


@pytest.mark.parametrize(
    ("database", "number"), [("embedded", signal.SIGINT), ("away", signal.SIGTERM)], ids=["embedded", "away"]
)
def test_a_stop_while_it_waits_for_its_database_ends_it_without_a_word_too_many(tmp_path, database, number):
    # A port of which nothing is known but that nobody listens on it.
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        url = f"postgresql://nobody@127.0.0.1:{nobody.getsockname()[1]}/none"
        with served(tmp_path, environ={"TOLLBRIDGE_DATABASE_URL": url if database == "away" else None}) as gateway:
            until(lambda: bool(gateway.events("gateway.starting")))
            assert gateway.end(number) == 0, gateway.log
            assert "Traceback" not in gateway.log
            assert gateway.lines == []
            assert len(gateway.events("gateway.stopped")) == 1


def test_a_start_without_a_provider_says_how_to_have_one(tmp_path, database_url):
    # Where there is no configuration file, and nothing of the account that runs the tests.
    environ: dict[str, str | None] = {
        name: None for name in os.environ if name.endswith(("_API_KEY", "_API_TOKEN", "_BASE_URL"))
    }
    environ |= {"TOLLBRIDGE_DATABASE_URL": database_url, "TOLLBRIDGE_CONFIG": None, "TOLLBRIDGE_API_KEY": KEY}
    here = tmp_path / "empty"
    here.mkdir()
    with served(tmp_path, environ=environ, here=here) as gateway:
        gateway.until_ready()
        until(lambda: bool(gateway.events("gateway.no_provider_configured")))
        [told] = gateway.events("gateway.no_provider_configured")
        assert {"OPENAI_API_KEY", "ANTHROPIC_API_KEY"} <= set(told["set_one_of"])
        assert (told["or_write"], told["need_no_key"]) == ("tollbridge.toml", ["ollama"])
        assert gateway.get("/v1/models").status_code == 200
        assert gateway.end() == 0, gateway.log


def test_a_second_signal_does_not_wait_for_a_request_that_runs(tmp_path, database_url):
    with served(tmp_path, environ={"TOLLBRIDGE_DATABASE_URL": database_url}) as gateway:
        gateway.until_ready()
        host, _, port = gateway.rest.removeprefix("http://").rpartition(":")
        with socket.create_connection((host, int(port))) as slow:
            slow.sendall(
                b"POST /v1/jobs HTTP/1.1\r\nhost: x\r\nauthorization: Bearer acceptance-key-0123456789abcdef\r\n"
                b"content-type: application/json\r\ncontent-length: 1000\r\nexpect: 100-continue\r\n\r\n"
            )
            assert slow.recv(100).startswith(b"HTTP/1.1 100")
            began = time.monotonic()
            gateway.process.send_signal(signal.SIGTERM)
            until(lambda: bool(gateway.events("gateway.draining")))
            assert gateway.end() == 0, gateway.log
            assert time.monotonic() - began < 8
        with pytest.raises(httpx.ConnectError):
            gateway.get("/healthz", key=None)
