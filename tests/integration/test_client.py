"""Both faces of the Python client against a real gRPC server and a real HTTP server."""

from __future__ import annotations

import asyncio
import itertools
import json
import shutil
import ssl
import subprocess
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from aiohttp import web
from typing_extensions import override

from admission.lease import Waiting
from gateway.answer import Observer
from gateway.call import Call
from gateway.client import (
    Answer,
    AsyncClient,
    Busy,
    CallFailed,
    Cancelled,
    Client,
    CompletionRequest,
    Conflict,
    InvalidRequest,
    Message,
    NotFound,
    OutOfTime,
    ProviderFailed,
    Unauthenticated,
    Unreachable,
)
from gateway.errors import AdmissionRefused, AllRoutesFailed
from gateway.rpc.server import RpcSettings, open_server
from protos.tollbridge.v1 import gateway_pb2, gateway_pb2_grpc
from tests.fakes.line import FakeKeys, FakeLine, outcome
from tests.fakes.ports import refusing_port

QUESTION = {"asked": "Hello?", "model": "gpt-4o"}
pytestmark = pytest.mark.timeout(400)
Connect = Callable[..., Any]


@asynccontextmanager
async def chatting(
    connect: Connect, line: FakeLine, *, api_key: str = "good", retry_for_s: float = 0.0
) -> AsyncIterator[Any]:
    settings = RpcSettings(port=0, drain_s=0.0)
    async with (
        open_server(settings, line=line, authenticator=FakeKeys()) as server,
        connect(grpc=f"127.0.0.1:{server.port}", api_key=api_key, retry_for_s=retry_for_s) as client,
    ):
        yield client


async def forever(call: Call, observer: Observer) -> None:
    await asyncio.Event().wait()


async def answered(client: Any, way: str, **parameters: Any) -> Answer:
    if way == "complete":
        answer: Answer = await client.complete(**QUESTION, **parameters)
    else:
        async with client.stream(**QUESTION, **parameters) as chunks:
            answer = await chunks.answer()
    return answer


async def test_a_whole_answer(connect: Connect) -> None:
    line = FakeLine()
    async with chatting(connect, line) as client:
        answer = await client.complete(**QUESTION, session_id="s1", klass="batch")
    assert (answer.text, answer.finish_reason, str(answer.cost_usd)) == ("Hello", "stop", "0.000125")
    assert answer.message == Message(role="assistant", text="Hello")
    assert (line.calls[0].options.session_id, line.calls[0].options.klass.name) == ("s1", "BATCH")


async def test_a_whole_request_is_taken_as_it_is(connect: Connect) -> None:
    request = CompletionRequest(model="gpt-4o", messages=[Message(role="user", text="Hello?")])
    line = FakeLine()
    async with chatting(connect, line) as client:
        assert (await client.complete(request, seed=7)).text == "Hello"
    assert line.calls[0].chat.seed == 7
    assert not request.HasField("seed")


async def test_a_stream_ends_with_finished(connect: Connect) -> None:
    async with chatting(connect, FakeLine()) as client:
        async with client.stream(**QUESTION) as chunks:
            kinds = [chunk.WhichOneof("chunk") async for chunk in chunks]
        async with client.stream(**QUESTION) as chunks:
            pieces = [text async for text in chunks.text()]
            answer = await chunks.answer()
    assert kinds == ["delta", "delta", "finished"]
    assert pieces == ["Hel", "lo"]
    assert (answer.text, answer.finish_reason) == ("Hello", "stop")


async def test_an_error_carries_its_code_and_when_to_come_back(connect: Connect) -> None:
    async def refuse(call: Call, observer: Observer) -> None:
        raise AdmissionRefused("the queue is full", retry_after_s=2.5)

    line = FakeLine(before=refuse)
    async with chatting(connect, line) as client:
        with pytest.raises(Busy) as failed:
            await client.complete(**QUESTION)
    assert (failed.value.code, failed.value.status) == ("queue_full", "RESOURCE_EXHAUSTED")
    assert (failed.value.retry_after_s, failed.value.request_id) == (2.5, line.calls[0].request_id)
    assert (failed.value.attempts, failed.value.dispatched, failed.value.outcome) == (0, False, None)


@pytest.mark.parametrize("way", ["complete", "stream"])
async def test_what_was_not_dispatched_is_asked_again_when_the_gateway_says(connect: Connect, way: str) -> None:
    refusals = iter([0.1, 0.1])
    began: list[float] = []

    async def refuse_twice(call: Call, observer: Observer) -> None:
        began.append(asyncio.get_running_loop().time())
        observer.queued(Waiting(group="g", position=1, reason="capacity"))
        if (after := next(refusals, None)) is not None:
            raise AdmissionRefused("the queue is full", retry_after_s=after)

    async with chatting(connect, FakeLine(before=refuse_twice), retry_for_s=60) as client:
        answer = await answered(client, way)
    assert answer.text == "Hello"
    assert len(began) == 3
    # Never before the time that the gateway told.
    assert all(later - earlier >= 0.1 for earlier, later in itertools.pairwise(began))


@pytest.mark.parametrize("way", ["complete", "stream"])
async def test_what_was_dispatched_is_never_asked_again(connect: Connect, way: str) -> None:
    async def fail(call: Call, observer: Observer) -> None:
        raise AllRoutesFailed("every attempt failed", outcome=outcome(ended="failed"), retry_after_s=0.01)

    line = FakeLine(before=fail)
    async with chatting(connect, line, retry_for_s=60) as client:
        with pytest.raises(ProviderFailed) as failed:
            await answered(client, way, idempotency_key="k")
    assert (failed.value.dispatched, failed.value.attempts) == (True, 1)
    assert len(line.calls) == 1


async def test_a_wait_that_would_outlast_the_deadline_is_not_begun(connect: Connect) -> None:
    async def refuse(call: Call, observer: Observer) -> None:
        raise AdmissionRefused("the queue is full", retry_after_s=3600)

    line = FakeLine(before=refuse)
    async with chatting(connect, line, retry_for_s=86_400) as client:
        with pytest.raises(Busy):
            await client.complete(**QUESTION, timeout_s=30)
    assert len(line.calls) == 1


async def test_an_error_names_the_field_that_is_at_fault(connect: Connect) -> None:
    async with chatting(connect, FakeLine()) as client:
        with pytest.raises(InvalidRequest) as failed:
            await client.complete([], model="gpt-4o")
        assert (failed.value.code, failed.value.param) == ("invalid_request", "messages")
        with pytest.raises(InvalidRequest) as failed:
            await client.complete([{"role": "user", "contents": "Hello?"}], model="gpt-4o")
    assert (failed.value.code, failed.value.param) == ("unsupported_field", "messages[0].contents")


async def test_a_stream_that_fails_gives_what_came_before_and_raises_with_the_attempts(connect: Connect) -> None:
    async def fail(call: Call, observer: Observer) -> None:
        observer.queued(Waiting(group="g", position=1, reason="capacity"))
        raise AllRoutesFailed("every attempt failed", outcome=outcome(ended="failed"))

    async with chatting(connect, FakeLine(before=fail)) as client, client.stream(**QUESTION) as chunks:
        assert (await anext(chunks)).HasField("queued")
        with pytest.raises(ProviderFailed) as failed:
            await anext(chunks)
        with pytest.raises(RuntimeError, match="did not finish"):
            await chunks.answer()
    assert (failed.value.code, failed.value.attempts) == ("all_routes_failed", 1)
    assert failed.value.outcome is not None
    assert failed.value.outcome.attempts[0].route.provider == "openai"


async def test_a_wrong_key_is_said_to_be_one(connect: Connect) -> None:
    async with chatting(connect, FakeLine(), api_key="wrong") as client:
        with pytest.raises(Unauthenticated):
            await client.complete(**QUESTION)


async def test_leaving_a_stream_early_takes_the_request_back(connect: Connect) -> None:
    async def queue(call: Call, observer: Observer) -> None:
        observer.queued(Waiting(group="g", position=1, reason="capacity"))
        await asyncio.Event().wait()

    line = FakeLine(before=queue)
    async with chatting(connect, line) as client:
        async with client.stream(**QUESTION) as chunks:
            async for _ in chunks:
                break
        async with asyncio.timeout(60):
            assert await line.exits.get() is asyncio.CancelledError


async def test_leaving_the_client_takes_what_runs_back(connect: Connect) -> None:
    line = FakeLine(before=forever)
    async with open_server(RpcSettings(port=0, drain_s=0.0), line=line, authenticator=FakeKeys()) as server:
        async with connect(grpc=f"127.0.0.1:{server.port}", api_key="good") as client:
            running = asyncio.create_task(client.complete(**QUESTION))
            await line.entered.wait()
        async with asyncio.timeout(60):
            assert await line.exits.get() is asyncio.CancelledError
        with pytest.raises(Cancelled):
            await running


async def test_a_client_that_was_not_entered_or_was_left_says_so() -> None:
    client, sibling = Client(grpc="127.0.0.1:9", api_key="good"), AsyncClient(grpc="127.0.0.1:9", api_key="good")
    for _ in range(2):
        with pytest.raises(RuntimeError, match="use it within `with`"):
            client.complete("Hello?", model="gpt-4o")
        with pytest.raises(RuntimeError, match="use it within `with`"):
            await sibling.complete("Hello?", model="gpt-4o")
        with client:
            pass
        async with sibling:
            pass


async def test_a_deadline_is_a_code_too(connect: Connect) -> None:
    async with chatting(connect, FakeLine(before=forever)) as client:
        with pytest.raises(OutOfTime) as failed:
            await client.complete(**QUESTION, timeout_s=0.2)
    assert failed.value.code == "deadline_exceeded"


async def test_nobody_there_is_unreachable(connect: Connect) -> None:
    with refusing_port() as port:
        address = {"grpc": f"127.0.0.1:{port}", "rest": f"http://127.0.0.1:{port}"}
        async with connect(**address, api_key="good", retry_for_s=0.1) as client:
            with pytest.raises(Unreachable):
                await client.complete(**QUESTION, timeout_s=60)
            with pytest.raises(Unreachable):
                await client.jobs.get("00000000-0000-0000-0000-000000000001")


class Canned(gateway_pb2_grpc.GatewayServicer):
    @override
    async def Complete(self, request, context):
        return gateway_pb2.CompletionResponse(choices=[gateway_pb2.Choice(text="Hello")])


@pytest.fixture
def own_certificate(tmp_path: Path) -> tuple[Path, Path]:
    """A key, and a certificate for localhost that nobody else has signed."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("no openssl here to make a certificate with")
    key, certificate = tmp_path / "key.pem", tmp_path / "cert.pem"
    made = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=localhost"
    names = "-addext subjectAltName=DNS:localhost,IP:127.0.0.1"
    files = ["-keyout", str(key), "-out", str(certificate)]
    subprocess.run([openssl, *made.split(), *names.split(), *files], check=True, capture_output=True)
    return key, certificate


async def test_both_parts_speak_tls_and_trust_only_whom_they_are_told_to(
    connect: Connect, own_certificate: tuple[Path, Path]
) -> None:
    key, certificate = own_certificate
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    server = grpc.aio.server()
    gateway_pb2_grpc.add_GatewayServicer_to_server(Canned(), server)
    credentials = grpc.ssl_server_credentials([(key.read_bytes(), certificate.read_bytes())])
    rpc_port = server.add_secure_port("127.0.0.1:0", credentials)

    async def state(request: web.Request) -> web.Response:
        return web.json_response(job("queued"))

    app = web.Application()
    app.router.add_get("/v1/jobs/{job_id}", state)
    runner = web.AppRunner(app)
    await runner.setup()
    await server.start()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=context).start()
        address = {"grpc": f"localhost:{rpc_port}", "rest": f"https://localhost:{runner.addresses[0][1]}"}
        trusted = {
            "credentials": grpc.ssl_channel_credentials(certificate.read_bytes()),
            "ssl_context": ssl.create_default_context(cafile=str(certificate)),
        }
        async with connect(**address, **trusted, api_key="good", retry_for_s=0) as client:
            assert (await client.complete(**QUESTION)).text == "Hello"
            assert (await client.jobs.get(JOB_ID)).status == "queued"
        strangers = {"credentials": grpc.ssl_channel_credentials()}
        async with connect(**address, **strangers, api_key="good", retry_for_s=0) as client:
            with pytest.raises(Unreachable):
                await client.complete(**QUESTION, timeout_s=60)
            with pytest.raises(Unreachable):
                await client.jobs.get(JOB_ID)
    finally:
        await runner.cleanup()
        await server.stop(None)


async def test_a_part_without_an_address_says_so(connect: Connect) -> None:
    async with connect(rest="http://127.0.0.1:9", api_key="good") as client:
        with pytest.raises(RuntimeError, match="gRPC"):
            await client.complete(**QUESTION)
    async with connect(grpc="127.0.0.1:9", api_key="good") as client:
        with pytest.raises(RuntimeError, match="REST"):
            await client.batches.get("batch_1")


# ------------------------------------------------------------------ jobs

JOB_ID = "00000000-0000-0000-0000-000000000007"


def job(status: str, *, number: int = 7, **fields: Any) -> dict[str, Any]:
    return {
        "id": f"00000000-0000-0000-0000-{number:012}",
        "submission_id": "00000000-0000-0000-0000-000000000000",
        "line": number,
        "status": status,
        "something": "new",
        **fields,
    }


def receipt(count: int) -> dict[str, Any]:
    jobs = [{"id": job("queued", number=number)["id"], "custom_id": None, "line": number} for number in range(count)]
    return {"submission_id": "s", "accepted": count, "rejected": 0, "jobs": jobs, "errors": []}


@asynccontextmanager
async def working(connect: Connect, *routes: web.RouteDef, retry_for_s: float = 0.0) -> AsyncIterator[Any]:
    app = web.Application()
    app.router.add_routes(routes)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        host, port = runner.addresses[0][:2]
        async with connect(rest=f"http://{host}:{port}", api_key="good", retry_for_s=retry_for_s) as client:
            yield client
    finally:
        await runner.cleanup()


async def test_jobs_are_submitted_as_lines_under_an_idempotency_key(connect: Connect) -> None:
    bodies: list[list[Any]] = []

    async def accept(request: web.Request) -> web.Response:
        assert request.headers["authorization"] == "Bearer good"
        assert request.headers["content-type"] == "application/x-ndjson"
        assert request.headers["idempotency-key"] == "k1"
        bodies.append([json.loads(line) for line in (await request.text()).splitlines()])
        return web.json_response(receipt(2), status=202)

    async with working(connect, web.post("/v1/jobs", accept)) as client:
        lines = ({"custom_id": custom_id} for custom_id in ("a", "ü"))
        received = await client.jobs.submit(lines, idempotency_key="k1")
        await client.jobs.submit({"custom_id": "b", "url": "/v1/messages"}, idempotency_key="k1")
    assert [accepted.line for accepted in received.jobs] == [0, 1]
    chat = "/v1/chat/completions"
    assert bodies == [
        [{"custom_id": "a", "url": chat}, {"custom_id": "ü", "url": chat}],
        [{"custom_id": "b", "url": "/v1/messages"}],
    ]


async def test_a_submission_is_repeated_under_the_same_key_until_it_is_answered(connect: Connect) -> None:
    """First the connection breaks, then something in front of the gateway answers, then its store is away."""
    keys: list[str] = []
    bodies: list[str] = []

    async def accept(request: web.Request) -> web.StreamResponse:
        keys.append(request.headers["idempotency-key"])
        bodies.append(await request.text())
        if len(keys) == 1:
            assert request.transport is not None
            request.transport.close()
        if len(keys) == 2:
            return web.Response(status=502, text="<html>")
        if len(keys) == 3:
            error = {"code": "content_store_unavailable", "message": "away", "dispatched": False}
            return web.json_response({"error": error}, status=503)
        return web.json_response(receipt(1), status=202)

    async with working(connect, web.post("/v1/jobs", accept), retry_for_s=60) as client:
        received = await client.jobs.submit({"custom_id": "a"})
    assert received.accepted == 1
    assert len(keys) == 4
    assert len(set(keys)) == len(set(bodies)) == 1


async def test_waiting_for_a_job_asks_until_it_has_ended(connect: Connect) -> None:
    states = iter(["queued", "running", "succeeded"])

    async def state(request: web.Request) -> web.Response:
        assert request.query["wait"] == "30.000"
        response = {"status_code": 200, "request_id": "r", "body": {"a": 1}}
        return web.json_response(job(next(states), cost_usd="0.10", response=response))

    async with working(connect, web.get("/v1/jobs/{job_id}", state)) as client:
        ended = await client.jobs.wait(JOB_ID)
    assert (ended.id, ended.status, str(ended.cost_usd), ended.answer()) == (JOB_ID, "succeeded", "0.10", {"a": 1})


async def test_waiting_for_a_job_has_a_limit(connect: Connect) -> None:
    async def hold(request: web.Request) -> web.Response:
        return web.json_response(job("running"))

    async with working(connect, web.get("/v1/jobs/{job_id}", hold)) as client:
        with pytest.raises(TimeoutError):
            await client.jobs.wait(JOB_ID, timeout_s=0.1)


async def test_a_gateway_that_does_not_answer_in_time_is_a_timeout_too(connect: Connect) -> None:
    over = asyncio.Event()

    async def hold(request: web.Request) -> web.Response:
        await over.wait()
        return web.json_response(job("running"))

    async with working(connect, web.get("/v1/jobs/{job_id}", hold)) as client:
        with pytest.raises(TimeoutError):
            await client.jobs.wait(JOB_ID, timeout_s=0.1)
        over.set()


async def test_a_job_without_an_answer_raises_why(connect: Connect) -> None:
    async def state(request: web.Request) -> web.Response:
        error = {"code": "uncertain", "message": "nobody knows", "param": None, "dispatched": True}
        return web.json_response(job("failed", error=error, attempts=2))

    async with working(connect, web.get("/v1/jobs/{job_id}", state)) as client:
        ended = await client.jobs.get(JOB_ID)
    with pytest.raises(CallFailed) as failed:
        ended.answer()
    assert (type(failed.value).__name__, failed.value.code, failed.value.status) == ("Uncertain", "uncertain", "failed")
    assert (failed.value.attempts, failed.value.dispatched) == (2, True)


async def test_results_are_split_at_line_feeds_only(connect: Connect) -> None:
    async def results(request: web.Request) -> web.StreamResponse:
        assert request.query["session_id"] == "s1"
        response = web.StreamResponse()
        await response.prepare(request)
        line = '{"id":"1","job_id":"1","line":1,"status":"succeeded","custom_id":"%s"}'
        for piece in (line % "x\u2028y" + "\n\n", (line % "b")[:20], (line % "b")[20:] + "\n", line % "c"):
            await response.write(piece.encode())
        return response

    async with working(connect, web.get("/v1/jobs/results", results)) as client:
        async with client.jobs.results(session_id="s1") as found:
            assert [result.custom_id async for result in found] == ["x\u2028y", "b", "c"]
        async with client.jobs.results(session_id="s1") as found:
            async for result in found:
                assert result.custom_id == "x\u2028y"
                break


async def test_an_error_of_rest_is_the_same_kind_of_error(connect: Connect) -> None:
    async def refuse(request: web.Request) -> web.Response:
        error = {"code": "not_found", "message": "no such job", "type": "x", "param": None, "request_id": "f00"}
        return web.json_response({"error": error}, status=404, headers={"retry-after": "7"})

    routes = (web.get("/v1/jobs/{job_id}", refuse), web.get("/v1/jobs/results", refuse))
    async with working(connect, *routes) as client:
        with pytest.raises(NotFound) as failed:
            await client.jobs.get(JOB_ID)
        with pytest.raises(NotFound):
            async with client.jobs.results() as results:
                await anext(results)
    assert (failed.value.code, failed.value.status, failed.value.request_id) == ("not_found", "404", "f00")
    assert failed.value.retry_after_s == 7


async def test_an_answer_that_is_no_gateways_is_unreachable(connect: Connect) -> None:
    async def wander(request: web.Request) -> web.Response:
        return web.Response(status=502, text="<html>")

    async def lost(request: web.Request) -> web.Response:
        return web.Response(text="<html>")

    async def moved(request: web.Request) -> web.Response:
        raise web.HTTPFound("/elsewhere")

    async def garbled(request: web.Request) -> web.Response:
        return web.Response(body=b"no gzip", headers={"content-encoding": "gzip"})

    routes = (
        web.post("/v1/jobs/{job_id}/cancel", wander),
        web.get("/v1/jobs/results", moved),
        web.get("/v1/jobs/{job_id}", lost),
        web.get("/v1/batches/batch_1", moved),
        web.get("/v1/batches/batch_2", garbled),
    )
    async with working(connect, *routes) as client:
        for batch_id in ("batch_1", "batch_2"):
            with pytest.raises(Unreachable):
                await client.batches.get(batch_id)
        with pytest.raises(Unreachable):
            async with client.jobs.results() as results:
                await anext(results)
        with pytest.raises(Unreachable):
            await client.jobs.cancel(JOB_ID)
        with pytest.raises(Unreachable):
            await client.jobs.get(JOB_ID)


async def test_an_id_is_never_another_path(connect: Connect) -> None:
    async with connect(rest="http://127.0.0.1:9", api_key="good") as client:
        with pytest.raises(NotFound):
            await client.jobs.get("results")
        with pytest.raises(NotFound):
            await client.batches.cancel("../jobs")


async def test_a_batch_that_has_not_ended_has_no_results(connect: Connect) -> None:
    async def state(request: web.Request) -> web.Response:
        return web.json_response({"id": "batch_1", "status": "in_progress", "endpoint": "/v1/chat/completions"})

    async with working(connect, web.get("/v1/batches/{batch_id}", state)) as client:
        with pytest.raises(Conflict):
            async with client.batches.results("batch_1") as results:
                await anext(results)


async def test_a_batch_that_was_never_run_says_which_line_is_at_fault(connect: Connect) -> None:
    async def state(request: web.Request) -> web.Response:
        faults = [{"code": "invalid_request", "message": "is required", "param": "custom_id", "line": 3}]
        failed = {"id": "batch_1", "status": "failed", "endpoint": "/v1/chat/completions", "errors": {"data": faults}}
        return web.json_response(failed)

    async with working(connect, web.get("/v1/batches/{batch_id}", state)) as client:
        batch = await client.batches.wait("batch_1")
        assert [fault.line for fault in batch.faults] == [3]
        with pytest.raises(InvalidRequest) as failed:
            async with client.batches.results(batch) as results:
                await anext(results)
    assert (failed.value.param, failed.value.dispatched) == ("custom_id", False)
