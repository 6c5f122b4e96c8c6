"""A gateway whose time to drain is over: whoever still waits is told so, and nobody holds it."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
from collections import Counter
from typing import Any, cast

import asyncpg
import grpc
import httpx
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from tests.fakes.gateway_process import KEY, METADATA, GatewayProcess, batch_line, completion, gateway_process

PATIENCE_S = 60.0
#: Of those that get a slot, and of those that wait for one.
DISPATCHED, WAITING = 11, 2


def toml(url: str, drain_s: int) -> str:
    endpoint = "/".join(url.split("/")[:3])
    clocks = "first_byte_s = 300\ngap_s = 300\nexecution_limit_s = 600"
    return f"""
        [gateway]
        drain_delay_s = 0
        drain_s = {drain_s}
        [providers.read_on]
        protocol = "chat_completions"
        base_url = "{url}"
        on_cancel = "drain"
        {clocks}
        [providers.closed]
        protocol = "chat_completions"
        base_url = "{url}"
        on_cancel = "close"
        {clocks}
        [models]
        plain.providers = ["read_on"]
        streamed.providers = ["closed"]
        endless.providers = ["closed"]
        [groups."{endpoint}"]
        concurrency = {DISPATCHED}
        queue = 100
    """


def chat(model: str, **fields: Any) -> dict[str, Any]:
    return {"model": model, "messages": [{"role": "user", "content": "Say hello."}], **fields}


class Streamed:
    """An answer that comes in pieces, as a client without a library sees it."""

    def __init__(self, link: socket.socket) -> None:
        self._link = link
        self.seen = b""

    @classmethod
    async def ask(cls, gateway: GatewayProcess, path: str, body: dict[str, Any], version: str = "1.1") -> Streamed:
        url = httpx.URL(gateway.rest_url)
        link = socket.socket()
        link.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(link, (url.host, url.port))
        content = json.dumps(body).encode()
        head = (
            f"POST {path} HTTP/{version}\r\nhost: gateway\r\nauthorization: Bearer {KEY}\r\n"
            f"content-type: application/json\r\ncontent-length: {len(content)}\r\n\r\n"
        )
        await loop.sock_sendall(link, head.encode() + content)
        return cls(link)

    async def _read(self) -> bytes:
        async with asyncio.timeout(PATIENCE_S):
            piece = await asyncio.get_running_loop().sock_recv(self._link, 65536)
        self.seen += piece
        return piece

    async def until(self, text: bytes) -> None:
        while text not in self.seen:
            assert await self._read(), self.seen

    async def rest(self) -> type[Exception] | None:
        """Reads to the end, which may be an error."""
        with self._link:
            try:
                while await self._read():
                    pass
            except ConnectionError as error:
                return type(error)
        return None


async def refused(call: Any) -> tuple[grpc.StatusCode, str, dict[str, str]]:
    """The status of a call that fails, and its details."""
    with pytest.raises(grpc.aio.AioRpcError) as failed:
        await call
    status = rpc_status.from_call(cast("Any", failed.value))
    assert status is not None
    info = error_details_pb2.ErrorInfo()
    assert any(detail.Unpack(info) for detail in status.details)
    return failed.value.code(), info.reason, dict(info.metadata)


async def collect(stream: Any, seen: list[Any]) -> None:
    async for chunk in stream:
        seen.append(chunk)  # noqa: PERF401  what came before the error counts


async def until(condition: Any) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not await condition():  # noqa: ASYNC110  it is another process
            await asyncio.sleep(0.02)


async def rows(url: str, query: str) -> list[asyncpg.Record]:
    connection = await asyncpg.connect(url)
    try:
        return list(await connection.fetch(query))
    finally:
        await connection.close()


async def test_whoever_waits_when_the_drain_is_over_is_told_in_its_own_words(database_url, simulator, tmp_path):
    await simulator.set_faults(model="plain", hang="before_headers")
    await simulator.set_faults(model="streamed", hang="mid")
    await simulator.set_faults(model="endless", chunks=200_000)
    async with (
        gateway_process(tmp_path, toml(simulator.url, 1), TOLLBRIDGE_DATABASE_URL=database_url) as gateway,
        gateway.rest() as client,
        gateway.stub() as stub,
    ):
        work = asyncio.create_task

        def post(path: str, body: dict[str, Any]) -> asyncio.Task[httpx.Response]:
            return work(client.post(path, json=body, timeout=PATIENCE_S))

        # A job is taken by itself; the first of all, so that it has a slot.
        [job] = (await client.post("/v1/jobs", json=batch_line("plain", 1))).json()["jobs"]
        await simulator.until(lambda ledger: ledger["active"] == 1)
        plain = {
            "/v1/chat/completions": post("/v1/chat/completions", chat("plain")),
            "/v1/responses": post("/v1/responses", {"model": "plain", "input": "Say hello."}),
            "/v1/messages": post("/v1/messages", chat("plain", max_tokens=20)),
        }
        streams = {
            "chat": await Streamed.ask(gateway, "/v1/chat/completions", chat("streamed", stream=True)),
            "messages": await Streamed.ask(gateway, "/v1/messages", chat("streamed", stream=True, max_tokens=20)),
            "responses": await Streamed.ask(
                gateway, "/v1/responses", {"model": "streamed", "input": "Say hello.", "stream": True}
            ),
            "old": await Streamed.ask(gateway, "/v1/chat/completions", chat("streamed", stream=True), "1.0"),
        }
        stuck = await Streamed.ask(gateway, "/v1/chat/completions", chat("endless", stream=True))
        complete = work(refused(stub.Complete(completion("plain"), metadata=METADATA)))
        chunks: list[Any] = []
        streaming = work(refused(collect(stub.Stream(completion("streamed"), metadata=METADATA), chunks)))
        await simulator.until(lambda ledger: ledger["active"] == DISPATCHED)
        for stream in (*streams.values(), stuck):
            await stream.until(b'"delta"')
        await until(lambda: asyncio.sleep(0, any(chunk.HasField("delta") for chunk in chunks)))

        queued = post("/v1/chat/completions", chat("plain"))
        queued_call = work(refused(stub.Complete(completion("plain"), metadata=METADATA)))

        async def all_wait() -> bool:
            [group] = (await client.get("/v1/groups")).json()["groups"]
            return bool(group["queued"] == WAITING)

        await until(all_wait)
        url = httpx.URL(gateway.rest_url)
        slow, slow_writer = await asyncio.open_connection(url.host, url.port)
        slow_writer.write(
            f"POST /v1/messages HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {KEY}\r\nexpect: 100-continue\r\n"
            "content-type: application/json\r\ncontent-length: 1000\r\n\r\n".encode()
        )
        assert (await slow.readline()).startswith(b"HTTP/1.1 100")

        assert not gateway.lines("gateway.no_provider_configured")
        gateway.send(signal.SIGTERM)

        # Plain callers, whose request was sent and may be paid, are not to repeat it.
        for path, task in plain.items():
            answer = await task
            assert answer.status_code == 503, path
            said = answer.json()
            assert (said.get("type") == "error") is (path == "/v1/messages")
            assert said["error"]["code"] == answer.headers["x-tollbridge-code"] == "shutting_down"
            assert answer.headers["x-should-retry"] == "false"
            assert answer.headers["x-tollbridge-dispatched"] == "true"
            assert answer.headers["x-tollbridge-attempts"] == "1"
            assert "retry-after" not in answer.headers
        # Those for whom nothing was sent may.
        answer = await queued
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "shutting_down")
        assert (answer.headers["x-tollbridge-dispatched"], answer.headers["retry-after"]) == ("false", "1")
        assert "x-should-retry" not in answer.headers
        async with asyncio.timeout(PATIENCE_S):
            late = await slow.read()
        assert b"HTTP/1.1 503" in late
        assert b'"code":"shutting_down"' in late
        assert b'"type":"error"' in late
        assert b"x-should-retry" not in late
        slow_writer.close()
        # A stream has the error event of its protocol, and not the look of a whole one.
        ends = {name: await stream.rest() for name, stream in streams.items()}
        assert ends == {"chat": None, "messages": None, "responses": None, "old": ConnectionResetError}
        for name, stream in streams.items():
            assert b"shutting_down" in stream.seen, name
            assert b"[DONE]" not in stream.seen, name
            assert b"message_stop" not in stream.seen, name
            assert b"response.completed" not in stream.seen, name
            assert not stream.seen.endswith(b"\r\n0\r\n\r\n"), name
        assert b"event: error\n" in streams["messages"].seen
        # Calls have the status with our details, streams the last message as well.
        code, reason, details = await complete
        assert (code, reason, details["dispatched"]) == (grpc.StatusCode.UNAVAILABLE, "shutting_down", "true")
        assert (details["ended"], details["cost_state"]) == ("uncertain", "unknown")
        code, reason, details = await streaming
        assert (code, reason, details["dispatched"]) == (grpc.StatusCode.UNAVAILABLE, "shutting_down", "true")
        assert chunks[-1].failed.code == "shutting_down"
        code, reason, details = await queued_call
        assert (code, reason, details["dispatched"]) == (grpc.StatusCode.UNAVAILABLE, "shutting_down", "false")
        # Who does not read does not hold it, and what it reads later is no whole answer.
        assert await gateway.ended() == 0
        await stuck.rest()
        assert b"[DONE]" not in stuck.seen

        # The log and the ledger say whose doing it was.
        lines = gateway.lines("gateway.request_ended")
        assert Counter((line["code"], line["ended"], line["cost_state"]) for line in lines) == {
            ("shutting_down", "uncertain", "unknown"): DISPATCHED,
            ("shutting_down", "failed", "zero"): WAITING,
        }
        [ended] = gateway.lines("jobs.ended")
        assert (ended["job_id"], ended["status"], ended["code"]) == (job["id"], "failed", "uncertain")
    found = await rows(database_url, "select status, ended, error_code, state from control.invocation")
    assert Counter(map(tuple, found)) == {("unknown", "stopped", "shutting_down", "unknown"): DISPATCHED}
    slots = await rows(database_url, "select state from control.ticket")
    assert Counter(row["state"] for row in slots) == {"quarantined": DISPATCHED}


async def test_a_second_signal_does_not_take_the_last_word_away(database_url, simulator, tmp_path):
    await simulator.set_faults(model="plain", hang="before_headers")
    await simulator.set_faults(model="streamed", hang="mid")
    async with (
        gateway_process(tmp_path, toml(simulator.url, 600), TOLLBRIDGE_DATABASE_URL=database_url) as gateway,
        gateway.rest() as client,
        gateway.stub() as stub,
    ):
        plain = asyncio.create_task(client.post("/v1/chat/completions", json=chat("plain"), timeout=PATIENCE_S))
        call = asyncio.create_task(refused(stub.Complete(completion("plain"), metadata=METADATA)))
        stream = await Streamed.ask(gateway, "/v1/chat/completions", chat("streamed", stream=True))
        await stream.until(b'"delta"')
        await simulator.until(lambda ledger: ledger["active"] == 3)
        gateway.send(signal.SIGTERM)
        await until(lambda: asyncio.sleep(0, bool(gateway.lines("gateway.draining"))))
        gateway.send(signal.SIGTERM)
        answer = await plain
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "shutting_down")
        assert answer.headers["x-should-retry"] == "false"
        assert (await call)[:2] == (grpc.StatusCode.UNAVAILABLE, "shutting_down")
        assert await stream.rest() is None
        assert b"shutting_down" in stream.seen
        assert not stream.seen.endswith(b"\r\n0\r\n\r\n")
        await gateway.ended()
        assert gateway.lines("gateway.drain_cut_short")
        codes = [line["code"] for line in gateway.lines("gateway.request_ended")]
        assert codes == ["shutting_down"] * 3
