"""What a serving process asks of the interpreter and of its sockets."""

from __future__ import annotations

import contextlib
import gc
import os
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import urlsplit

import grpc.aio
import httpx

from gateway import app, config, runtime
from protos.tollbridge.v1 import gateway_pb2_grpc
from tests.fakes.gateway_process import KEY, METADATA, bearer, completion
from tests.fakes.simulated import simulated_process

CONFIGURATION = """
[providers.sim]
protocol = "chat_completions"
base_url = "{url}"

[models.m]
providers = [{{ provider = "sim", model = "sim-fast" }}]
price = {{ input = "1", output = "1" }}
"""


@contextlib.contextmanager
def sockets() -> Iterator[list[socket.socket]]:
    """Every TCP socket of this process, as copies: also those that belong to a library in C."""
    with contextlib.ExitStack() as stack:
        found = []
        for path in Path("/dev/fd").iterdir():
            try:
                number = os.dup(int(path.name))
            except OSError:
                # What listed them.
                continue
            try:
                copy = stack.enter_context(socket.socket(fileno=number))
            except OSError:
                os.close(number)
                continue
            if copy.family in (socket.AF_INET, socket.AF_INET6) and copy.type == socket.SOCK_STREAM:
                found.append(copy)
        yield found


def port(one: socket.socket, *, of_peer: bool) -> int | None:
    """None where it has no peer: it listens, or is not connected any more."""
    try:
        address: tuple[str, int] = one.getpeername() if of_peer else one.getsockname()
    except OSError:
        return None
    return address[1]


def test_no_socket_holds_back_small_writes_and_both_ports_can_be_shared(tmp_path, database_url):
    """TCP_NODELAY towards callers and providers: without it a piece of a stream may wait for 40 ms."""

    async def run() -> None:
        async with simulated_process() as simulator:
            upstream = urlsplit(simulator.url).port
            file = tmp_path / "tollbridge.toml"
            file.write_text(CONFIGURATION.format(url=simulator.url))
            environ = {
                "TOLLBRIDGE_DATA_DIR": str(tmp_path / "data"),
                "TOLLBRIDGE_REST_LISTEN": "127.0.0.1:0",
                "TOLLBRIDGE_GRPC_LISTEN": "127.0.0.1:0",
                "TOLLBRIDGE_API_KEY": KEY,
            }
            settings = config.load(file, environ)
            await app.bootstrap_keys(database_url, settings)
            async with (
                app.open_gateway(settings, database_url) as gateway,
                httpx.AsyncClient(base_url=f"http://127.0.0.1:{gateway.rest_port}", trust_env=False) as client,
                grpc.aio.insecure_channel(f"127.0.0.1:{gateway.grpc_port}") as channel,
            ):
                body = {"model": "m", "messages": [{"role": "user", "content": "what is a bridge?"}]}
                asked = await client.post("/v1/chat/completions", json=body, headers=bearer(KEY), timeout=60)
                asked.raise_for_status()
                stub = gateway_pb2_grpc.GatewayStub(channel)
                assert (await stub.Complete(completion("m"), metadata=METADATA, timeout=60)).choices
                with sockets() as found:
                    for served in (gateway.rest_port, gateway.grpc_port):
                        ours = [one for one in found if port(one, of_peer=False) == served]
                        accepted = [one for one in ours if port(one, of_peer=True) is not None]
                        listeners = [one for one in ours if one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)]
                        assert accepted, served
                        assert listeners, served
                        assert all(one.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) for one in accepted), served
                        assert all(one.getsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT) for one in listeners), served
                    calling = [one for one in found if port(one, of_peer=True) == upstream]
                    assert calling
                    assert all(one.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) for one in calling)

    def serve() -> None:
        with runtime.runner(serving=True) as runner:
            runner.run(run())

    with ThreadPoolExecutor(1) as thread:
        thread.submit(serve).result()


def test_what_was_there_at_the_start_is_not_looked_at_again():
    before = gc.get_threshold()
    try:
        runtime.settle_memory()
        assert gc.get_freeze_count() > 10_000
        assert gc.get_threshold() == runtime.THRESHOLD
    finally:
        gc.unfreeze()
        gc.set_threshold(*before)
