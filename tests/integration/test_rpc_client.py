"""The Python client against a real gRPC server and a real HTTP server."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from aiohttp import web

from admission.lease import Waiting
from gateway.answer import Observer
from gateway.call import Call
from gateway.client import CallFailed, CompletionRequest, GatewayClient, Message, Unreachable
from gateway.errors import AdmissionRefused, AllRoutesFailed
from gateway.rpc.server import RpcSettings, open_server
from tests.fakes.line import FakeKeys, FakeLine, outcome

QUESTION = CompletionRequest(model="gpt-4o", messages=[Message(role="user", text="Hello?")])
pytestmark = pytest.mark.timeout(20)


@asynccontextmanager
async def chatting(line: FakeLine, *, api_key: str = "good") -> AsyncIterator[GatewayClient]:
    settings = RpcSettings(port=0, drain_s=0.0)
    async with (
        open_server(settings, line=line, authenticator=FakeKeys()) as server,
        GatewayClient(grpc=f"127.0.0.1:{server.port}", api_key=api_key) as client,
    ):
        yield client


def unused_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port: int = taken.getsockname()[1]
        return port


async def forever(call: Call, observer: Observer) -> None:
    await asyncio.Event().wait()


async def test_a_whole_answer() -> None:
    async with chatting(FakeLine()) as client:
        answer = await client.complete(QUESTION)
    assert answer.choices[0].text == "Hello"


async def test_a_stream_ends_with_finished() -> None:
    async with chatting(FakeLine()) as client, client.stream(QUESTION) as chunks:
        kinds = [chunk.WhichOneof("chunk") async for chunk in chunks]
    assert kinds == ["delta", "delta", "finished"]


async def test_an_error_carries_its_code_and_when_to_come_back() -> None:
    async def refuse(call: Call, observer: Observer) -> None:
        raise AdmissionRefused("the queue is full", retry_after_s=2.5)

    line = FakeLine(before=refuse)
    async with chatting(line) as client:
        with pytest.raises(CallFailed) as failed:
            await client.complete(QUESTION)
    assert (failed.value.code, failed.value.status) == ("queue_full", "RESOURCE_EXHAUSTED")
    assert (failed.value.retry_after_s, failed.value.request_id) == (2.5, line.calls[0].request_id)
    assert failed.value.outcome is None


async def test_an_error_names_the_field_that_is_at_fault() -> None:
    async with chatting(FakeLine()) as client:
        with pytest.raises(CallFailed) as failed:
            await client.complete(CompletionRequest(model="gpt-4o"))
    assert (failed.value.code, failed.value.param) == ("invalid_request", "messages")


async def test_a_stream_that_fails_gives_what_came_before_and_raises_with_the_attempts() -> None:
    async def fail(call: Call, observer: Observer) -> None:
        observer.queued(Waiting(group="g", position=1, reason="capacity"))
        raise AllRoutesFailed("every attempt failed", outcome=outcome(ended="failed"))

    async with chatting(FakeLine(before=fail)) as client, client.stream(QUESTION) as chunks:
        assert (await anext(chunks)).HasField("queued")
        assert (await anext(chunks)).failed.code == "all_routes_failed"
        with pytest.raises(CallFailed) as failed:
            await anext(chunks)
    assert failed.value.outcome is not None
    assert failed.value.outcome.attempts[0].route.provider == "openai"


async def test_a_wrong_key_is_said_to_be_one() -> None:
    async with chatting(FakeLine(), api_key="wrong") as client:
        with pytest.raises(CallFailed) as failed:
            await client.complete(QUESTION)
    assert failed.value.code == "unauthenticated"


async def test_leaving_a_stream_early_takes_the_request_back() -> None:
    line = FakeLine(before=forever)
    async with chatting(line) as client:
        async with client.stream(QUESTION):
            await line.entered.wait()
        async with asyncio.timeout(1):
            assert await line.exits.get() is asyncio.CancelledError


async def test_a_deadline_is_a_code_too() -> None:
    async with chatting(FakeLine(before=forever)) as client:
        with pytest.raises(CallFailed) as failed:
            await client.complete(QUESTION, timeout_s=0.2)
    assert failed.value.code == "deadline_exceeded"


async def test_nobody_there_is_unreachable() -> None:
    port = unused_port()
    async with GatewayClient(grpc=f"127.0.0.1:{port}", rest=f"http://127.0.0.1:{port}", api_key="good") as client:
        with pytest.raises(Unreachable):
            await client.complete(QUESTION, timeout_s=5)
        with pytest.raises(Unreachable):
            await client.jobs.get("j1")


# ------------------------------------------------------------------ jobs


@asynccontextmanager
async def working(*routes: web.RouteDef) -> AsyncIterator[GatewayClient]:
    app = web.Application()
    app.router.add_routes(routes)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        host, port = runner.addresses[0][:2]
        async with GatewayClient(rest=f"http://{host}:{port}", api_key="good") as client:
            yield client
    finally:
        await runner.cleanup()


async def test_jobs_are_submitted_as_lines_under_an_idempotency_key() -> None:
    async def accept(request: web.Request) -> web.Response:
        assert request.headers["authorization"] == "Bearer good"
        assert request.headers["content-type"] == "application/x-ndjson"
        assert request.headers["idempotency-key"] == "k1"
        return web.json_response({"lines": (await request.text()).splitlines()}, status=202)

    async with working(web.post("/v1/jobs", accept)) as client:
        receipt = await client.jobs.submit([{"custom_id": "a"}, {"custom_id": "ü"}], idempotency_key="k1")
    assert receipt == {"lines": ['{"custom_id":"a"}', '{"custom_id":"ü"}']}


async def test_waiting_for_a_job_asks_until_it_has_ended() -> None:
    states = iter(["queued", "running", "succeeded"])

    async def state(request: web.Request) -> web.Response:
        assert request.query["wait"] == "30"
        return web.json_response({"id": request.match_info["job_id"], "status": next(states)})

    async with working(web.get("/v1/jobs/{job_id}", state)) as client:
        job = await client.jobs.wait("j1")
    assert job == {"id": "j1", "status": "succeeded"}


async def test_waiting_for_a_job_has_a_limit() -> None:
    over = asyncio.Event()

    async def hold(request: web.Request) -> web.Response:
        await over.wait()
        return web.json_response({"status": "running"})

    async with working(web.get("/v1/jobs/{job_id}", hold)) as client:
        with pytest.raises(TimeoutError):
            await client.jobs.wait("j1", timeout_s=0.1)
        over.set()


async def test_results_are_split_at_line_feeds_only() -> None:
    async def results(request: web.Request) -> web.StreamResponse:
        assert request.query["session_id"] == "s1"
        response = web.StreamResponse()
        await response.prepare(request)
        for piece in ('{"a":"x\u2028', 'y"}\n\n{"a"', ":2}\n", '{"a":3}'):
            await response.write(piece.encode())
        return response

    async with working(web.get("/v1/jobs/results", results)) as client, client.jobs.results(session_id="s1") as found:
        assert [result async for result in found] == [{"a": "x\u2028y"}, {"a": 2}, {"a": 3}]


async def test_an_error_of_rest_is_the_same_kind_of_error() -> None:
    async def refuse(request: web.Request) -> web.Response:
        error = {"code": "not_found", "message": "no such job", "type": "x", "param": None, "request_id": "f00"}
        return web.json_response({"error": error}, status=404, headers={"retry-after": "7"})

    async with working(web.get("/v1/jobs/{job_id}", refuse)) as client:
        with pytest.raises(CallFailed) as failed:
            await client.jobs.get("j1")
        with pytest.raises(CallFailed):
            async with client.jobs.results():
                pass
    assert (failed.value.code, failed.value.status, failed.value.request_id) == ("not_found", "404", "f00")
    assert failed.value.retry_after_s == 7


async def test_an_answer_that_is_no_gateways_is_unreachable() -> None:
    async def wander(request: web.Request) -> web.Response:
        return web.Response(status=502, text="<html>")

    async with working(web.post("/v1/jobs/{job_id}/cancel", wander)) as client:
        with pytest.raises(Unreachable):
            await client.jobs.cancel("j1")
