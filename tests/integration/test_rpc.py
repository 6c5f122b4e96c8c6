"""The gRPC transport as its clients meet it: a real server, a real channel, a line that does as it is told."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
import pytest
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2
from grpc_status import rpc_status

from adapters.chat import TextDelta
from admission.lease import Waiting
from gateway.answer import Item, Observer
from gateway.call import Call
from gateway.errors import AdmissionRefused, AllRoutesFailed, StreamBroken
from gateway.outcome import RouteReport
from gateway.rpc.server import SERVICE, RpcServer, RpcSettings, open_server
from protos.tollbridge.v1 import gateway_pb2 as pb
from protos.tollbridge.v1 import gateway_pb2_grpc
from tests.fakes.line import BACKUP, ENDED, ROUTE, FakeKeys, FakeLine, attempt, hello, outcome

GOOD = (("authorization", "Bearer good"),)
QUESTION = pb.CompletionRequest(model="gpt-4o", messages=[pb.Message(role="user", text="Hello?")])
pytestmark = pytest.mark.timeout(180)


@asynccontextmanager
async def serving(line: FakeLine, **settings) -> AsyncIterator[tuple[gateway_pb2_grpc.GatewayStub, RpcServer]]:
    chosen = RpcSettings(**{"port": 0, "drain_s": 0.0, **settings})
    async with (
        open_server(chosen, line=line, authenticator=FakeKeys()) as server,
        grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel,
    ):
        yield gateway_pb2_grpc.GatewayStub(channel), server


async def read_all(call) -> tuple[list[str], grpc.StatusCode]:
    """The kinds of chunks, and the status."""
    kinds = []
    while (chunk := await call.read()) is not grpc.aio.EOF:
        kinds.append(chunk.WhichOneof("chunk"))
    return kinds, await call.code()


async def details_of(call) -> tuple[error_details_pb2.ErrorInfo, error_details_pb2.RetryInfo, pb.Outcome]:
    info, retry, report = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo(), pb.Outcome()
    rich = await rpc_status.aio.from_call(call)
    assert rich is not None
    for detail in rich.details:
        for known in (info, retry, report):
            detail.Unpack(known)
    return info, retry, report


async def forever(call: Call, observer: Observer) -> None:
    await asyncio.Event().wait()


def waiting(position: int) -> Waiting:
    return Waiting(group="https://api.openai.com:443", position=position, reason="capacity")


async def hello_and_on() -> AsyncGenerator[Item, None]:
    yield (TextDelta("Hel"),)
    await asyncio.Event().wait()


async def flood() -> AsyncGenerator[Item, None]:
    while True:
        yield (TextDelta("x" * 65536),)


# ------------------------------------------------------------------ answers


async def test_a_whole_answer_comes_with_its_outcome_and_attribution() -> None:
    line = FakeLine()
    async with serving(line) as (stub, _):
        call = stub.Complete(QUESTION, metadata=GOOD)
        answer = await call
        trailing = dict(await call.trailing_metadata())
    assert answer.choices[0].text == "Hello"
    assert answer.outcome.cost.usd == "0.000125"
    assert trailing == {
        "x-tollbridge-request-id": line.calls[0].request_id,
        "x-tollbridge-route": "openai/gpt-4o",
        "x-tollbridge-attempts": "1",
        "x-tollbridge-cost-usd": "0.000125",
        "x-tollbridge-settlement": "settled",
        "x-tollbridge-day-usd": "10",
        "x-tollbridge-total-usd": "20.5",
    }
    assert line.calls[0].transport == "grpc"
    assert line.calls[0].caller.name == "good"
    assert line.calls[0].deadline is None


async def test_a_stream_is_its_deltas_and_then_finished() -> None:
    line = FakeLine()
    async with serving(line) as (stub, _):
        call = stub.Stream(QUESTION, metadata=GOOD)
        chunks = [chunk async for chunk in call]
        trailing = dict(await call.trailing_metadata())
        assert await line.exits.get() is None
    assert [chunk.WhichOneof("chunk") for chunk in chunks] == ["delta", "delta", "finished"]
    assert "".join(piece.text for chunk in chunks for piece in chunk.delta.pieces) == "Hello"
    assert chunks[-1].finished.ends[0].finish_reason == pb.FINISH_REASON_STOP
    assert trailing["x-tollbridge-route"] == "openai/gpt-4o"


async def test_queued_and_started_reach_the_client_while_it_still_waits() -> None:
    heard = asyncio.Event()

    async def wait_to_be_heard(call: Call, observer: Observer) -> None:
        observer.queued(waiting(3))
        await heard.wait()
        heard.clear()
        observer.started(ROUTE, 1)
        await heard.wait()

    async with serving(FakeLine(before=wait_to_be_heard)) as (stub, _):
        call = stub.Stream(QUESTION, metadata=GOOD)
        queued = await call.read()
        assert queued.queued.position == 3
        heard.set()
        started = await call.read()
        assert started.started.route.provider == "openai"
        heard.set()
        kinds, code = await read_all(call)
    assert kinds == ["delta", "delta", "finished"]
    assert code is grpc.StatusCode.OK


async def test_only_the_newest_place_in_the_queue_is_told() -> None:
    async def advance(call: Call, observer: Observer) -> None:
        for position in (9, 8, 7):
            observer.queued(waiting(position))
        observer.started(ROUTE, 1)
        observer.started(BACKUP, 2)

    async with serving(FakeLine(before=advance)) as (stub, _):
        chunks = [chunk async for chunk in stub.Stream(QUESTION, metadata=GOOD)]
    assert [chunk.WhichOneof("chunk") for chunk in chunks[:3]] == ["queued", "started", "started"]
    assert chunks[0].queued.position == 7
    assert [chunk.started.attempt for chunk in chunks[1:3]] == [1, 2]


# ------------------------------------------------------------------ errors


async def test_an_error_before_any_message_is_a_status_and_nothing_else() -> None:
    async def refuse(call: Call, observer: Observer) -> None:
        raise AdmissionRefused("the queue is full", retry_after_s=2.5)

    async with serving(FakeLine(before=refuse)) as (stub, _):
        call = stub.Stream(QUESTION, metadata=GOOD)
        with pytest.raises(grpc.aio.AioRpcError):
            await read_all(call)
        info, retry, _ = await details_of(call)
        assert await call.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert await call.details() == "the queue is full"
    assert (info.reason, info.domain) == ("queue_full", "tollbridge")
    assert retry.retry_delay.ToMilliseconds() == 2500


async def test_an_error_after_a_message_is_a_failed_chunk_and_a_status() -> None:
    attempts = (
        attempt(1, status="error", code="overloaded"),
        attempt(2, route=BACKUP, status="error", code="http_500"),
    )

    async def fail(call: Call, observer: Observer) -> None:
        observer.started(ROUTE, 1)
        raise AllRoutesFailed("every attempt failed", outcome=outcome(*attempts, ended="failed"))

    async with serving(FakeLine(before=fail)) as (stub, _):
        call = stub.Stream(QUESTION, metadata=GOOD)
        assert (await call.read()).WhichOneof("chunk") == "started"
        failed = (await call.read()).failed
        with pytest.raises(grpc.aio.AioRpcError):
            await call.read()
        info, _, report = await details_of(call)
        trailing = dict(await call.trailing_metadata())
        assert await call.code() is grpc.StatusCode.UNAVAILABLE
    assert failed.code == info.reason == "all_routes_failed"
    assert [made.code for made in failed.outcome.attempts] == ["overloaded", "http_500"]
    assert report == failed.outcome
    assert info.metadata["attempts"] == trailing["x-tollbridge-attempts"] == "2"
    assert trailing["x-tollbridge-failover-reason"] == "overloaded"
    assert trailing["x-tollbridge-request-id"] == info.metadata["request_id"]


async def test_a_stream_that_breaks_after_content_says_so() -> None:
    async def break_off() -> AsyncGenerator[Item, None]:
        yield (TextDelta("Hel"),)
        raise StreamBroken("no terminal", outcome=outcome(ended="uncertain"))

    async with serving(FakeLine(items=break_off)) as (stub, _):
        call = stub.Stream(QUESTION, metadata=GOOD)
        assert (await call.read()).delta.pieces[0].text == "Hel"
        assert (await call.read()).failed.code == "upstream_broken"
        with pytest.raises(grpc.aio.AioRpcError, match="no terminal"):
            await call.read()


async def test_an_error_of_a_whole_answer_lists_its_attempts_in_the_details() -> None:
    async def fail(call: Call, observer: Observer) -> None:
        raise AllRoutesFailed("every attempt failed", outcome=outcome(ended="failed"))

    async with serving(FakeLine(before=fail)) as (stub, _):
        call = stub.Complete(QUESTION, metadata=GOOD)
        with pytest.raises(grpc.aio.AioRpcError):
            await call
        _, _, report = await details_of(call)
    assert report.attempts[0].route.provider == "openai"


@pytest.mark.parametrize("method", ["Complete", "Stream"])
async def test_the_text_of_a_foreign_exception_stays_inside(method: str) -> None:
    async def choke(call: Call, observer: Observer) -> None:
        observer.started(ROUTE, 1)
        raise ValueError("a prompt")

    async with serving(FakeLine(before=choke)) as (stub, _):
        call = getattr(stub, method)(QUESTION, metadata=GOOD)
        with pytest.raises(grpc.aio.AioRpcError):
            await (call if method == "Complete" else read_all(call))
        assert await call.code() is grpc.StatusCode.INTERNAL
        assert "prompt" not in await call.details()


async def test_a_stream_that_stops_without_an_end_is_an_error() -> None:
    async def stop() -> AsyncGenerator[Item, None]:
        yield (TextDelta("Hel"),)

    async with serving(FakeLine(items=stop)) as (stub, _):
        call = stub.Stream(QUESTION, metadata=GOOD)
        with pytest.raises(grpc.aio.AioRpcError):
            await read_all(call)
        assert await call.code() is grpc.StatusCode.INTERNAL


async def test_a_bad_request_names_its_field() -> None:
    line = FakeLine()
    async with serving(line) as (stub, _):
        call = stub.Complete(pb.CompletionRequest(model="gpt-4o"), metadata=GOOD)
        with pytest.raises(grpc.aio.AioRpcError):
            await call
        info, _, _ = await details_of(call)
    assert (info.reason, info.metadata["param"]) == ("invalid_request", "messages")
    assert not line.calls


# ------------------------------------------------------------------ who may


@pytest.mark.parametrize(
    "metadata",
    [
        (),
        (("authorization", "Bearer wrong"),),
        (("authorization", "Basic good"),),
        (("authorization", "good"),),
        (("authorization", "Bearer "),),
        (*GOOD, *GOOD),
    ],
    ids=["absent", "unknown", "another scheme", "no scheme", "empty", "twice"],
)
async def test_a_call_without_one_valid_key_is_refused(metadata: tuple[tuple[str, str], ...]) -> None:
    line = FakeLine()
    async with serving(line) as (stub, _):
        for call in (stub.Complete(QUESTION, metadata=metadata), stub.Stream(QUESTION, metadata=metadata)):
            assert await call.code() is grpc.StatusCode.UNAUTHENTICATED
    assert not line.calls


async def test_a_key_without_the_chat_scope_is_refused() -> None:
    async with serving(FakeLine()) as (stub, _):
        call = stub.Complete(QUESTION, metadata=(("authorization", "bearer reader"),))
        assert await call.code() is grpc.StatusCode.PERMISSION_DENIED


# ------------------------------------------------------------------ cancellation, deadlines, slow clients


@pytest.mark.parametrize(
    "line", [FakeLine(before=forever), FakeLine(items=hello_and_on)], ids=["waiting", "mid-stream"]
)
async def test_a_cancelled_stream_cancels_the_line(line: FakeLine) -> None:
    async with serving(line) as (stub, _):
        call = stub.Stream(QUESTION, metadata=GOOD)
        await line.entered.wait()
        if line.items is hello_and_on:
            await call.read()
        call.cancel()
        async with asyncio.timeout(20):
            assert await line.exits.get() is asyncio.CancelledError


async def test_a_stream_cancelled_while_a_write_is_blocked_cancels_the_line() -> None:
    line = FakeLine(items=flood)
    async with serving(line) as (stub, _):
        call = stub.Stream(QUESTION, metadata=GOOD)
        await call.read()
        call.cancel()
        async with asyncio.timeout(20):
            assert await line.exits.get() is asyncio.CancelledError


async def test_a_whole_answer_that_is_cancelled_cancels_the_line() -> None:
    line = FakeLine(before=forever)
    async with serving(line) as (stub, _):
        call = stub.Complete(QUESTION, metadata=GOOD)
        waiting_for = asyncio.create_task(call.code())
        await line.entered.wait()
        call.cancel()
        async with asyncio.timeout(20):
            assert await line.exits.get() is asyncio.CancelledError
        assert await waiting_for is grpc.StatusCode.CANCELLED


@pytest.mark.parametrize("method", ["Complete", "Stream"])
async def test_the_clients_deadline_reaches_the_line_and_ends_it(method: str) -> None:
    line = FakeLine(before=forever)
    async with serving(line) as (stub, _):
        loop = asyncio.get_running_loop()
        began = loop.time()
        call = getattr(stub, method)(QUESTION, metadata=GOOD, timeout=1.5)
        assert await call.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        async with asyncio.timeout(20):
            assert await line.exits.get() is asyncio.CancelledError
        ended = loop.time()
    deadline = line.calls[0].deadline
    assert deadline is not None
    # It was 1.5 s from when the call arrived, and that was between these.
    assert began + 1 < deadline < ended + 1.5


async def test_a_client_that_does_not_read_ends_the_call() -> None:
    line = FakeLine(items=flood)
    async with serving(line, idle_consumer_s=0.2) as (stub, _):
        call = stub.Stream(QUESTION, metadata=GOOD)
        await call.read()
        async with asyncio.timeout(30):
            assert await line.exits.get() is asyncio.CancelledError
        with pytest.raises(grpc.aio.AioRpcError):
            await read_all(call)
        info, _, _ = await details_of(call)
        assert await call.code() is grpc.StatusCode.CANCELLED
    assert info.reason == "cancelled"


async def test_a_client_that_does_not_read_what_comes_before_content_ends_the_call() -> None:
    wordy = RouteReport(route_id="r", provider="p" * 65536, model="m", protocol="chat_completions")

    async def report(call: Call, observer: Observer) -> None:
        for number in range(1000):
            observer.started(wordy, number)
        await asyncio.Event().wait()

    line = FakeLine(before=report)
    async with serving(line, idle_consumer_s=0.2) as (stub, _):
        call = stub.Stream(QUESTION, metadata=GOOD)
        await call.read()
        async with asyncio.timeout(30):
            assert await line.exits.get() is asyncio.CancelledError
        with pytest.raises(grpc.aio.AioRpcError, match="read nothing"):
            await read_all(call)


# ------------------------------------------------------------------ sizes


@pytest.mark.parametrize("compression", [grpc.Compression.NoCompression, grpc.Compression.Gzip], ids=["plain", "gzip"])
async def test_a_request_is_bounded_also_after_decompression(compression: grpc.Compression) -> None:
    line = FakeLine()
    large = pb.CompletionRequest(model="gpt-4o", messages=[pb.Message(role="user", text="0" * 200_000)])
    async with serving(line, max_receive_bytes=100_000) as (stub, _):
        call = stub.Complete(large, metadata=GOOD, compression=compression)
        assert await call.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        await stub.Complete(QUESTION, metadata=GOOD, compression=compression)
    assert len(line.calls) == 1


# ------------------------------------------------------------------ the server


@pytest.mark.parametrize("version", ["v1alpha", "v1"])
async def test_reflection_lists_the_services(version: str) -> None:
    async with serving(FakeLine()) as (_, server), grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        ask = channel.stream_stream(
            f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo",
            request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
            response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
        )
        call = ask(
            iter(
                [
                    reflection_pb2.ServerReflectionRequest(list_services=""),
                    reflection_pb2.ServerReflectionRequest(file_containing_symbol=SERVICE),
                ]
            )
        )
        listed, described = [answer async for answer in call]
    names = {service.name for service in listed.list_services_response.service}
    assert {SERVICE, "grpc.health.v1.Health"} <= names
    assert described.file_descriptor_response.file_descriptor_proto


async def test_health_follows_what_the_gateway_says() -> None:
    serves, serves_not = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
    async with serving(FakeLine()) as (_, server), grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        for said, serving_now in ((serves, True), (serves_not, False), (serves, True)):
            await server.set_serving(serving_now)
            for service in ("", SERVICE):
                assert (await stub.Check(health_pb2.HealthCheckRequest(service=service))).status == said


async def test_a_draining_server_says_so_and_lets_streams_finish() -> None:
    last = asyncio.Event()

    async def slow() -> AsyncGenerator[Item, None]:
        yield (TextDelta("Hel"),)
        await last.wait()
        yield ENDED

    async with serving(FakeLine(items=slow)) as (stub, server):
        channel = grpc.aio.insecure_channel(f"127.0.0.1:{server.port}")
        health: Any = health_pb2_grpc.HealthStub(channel)
        watch = health.Watch(health_pb2.HealthCheckRequest(service=SERVICE))
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
        call = stub.Stream(QUESTION, metadata=GOOD)
        await call.read()
        drained = asyncio.create_task(server.drain(10))
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
        watch.cancel()
        last.set()
        assert await read_all(call) == (["finished"], grpc.StatusCode.OK)
        await channel.close()
        await drained


async def test_a_drain_that_runs_out_of_time_ends_what_runs_and_tells_it() -> None:
    line = FakeLine(items=hello_and_on)
    async with serving(line) as (stub, server):
        call = stub.Stream(QUESTION, metadata=GOOD)
        await call.read()
        await server.drain(0.1)
        # This line knows of no stop; what the real one says is in `tests/acceptance/test_last_words.py`.
        assert await line.exits.get() is asyncio.CancelledError
        assert await call.code() is grpc.StatusCode.UNAVAILABLE
        info, _, _ = await details_of(call)
        assert info.reason == "shutting_down"


async def test_two_servers_share_a_port_only_where_both_say_so() -> None:
    async with serving(FakeLine()) as (_, first):
        async with serving(FakeLine(), port=first.port) as (_, second):
            assert second.port == first.port
        with pytest.raises(OSError, match="cannot listen"):
            async with serving(FakeLine(), port=first.port, reuse_port=False):
                pass


async def test_calls_beside_each_other_do_not_mix() -> None:
    line = FakeLine(items=hello)
    async with serving(line) as (stub, _):
        answers = await asyncio.gather(*(read_all(stub.Stream(QUESTION, metadata=GOOD)) for _ in range(50)))
    assert all(answer == (["delta", "delta", "finished"], grpc.StatusCode.OK) for answer in answers)
    assert len({call.request_id for call in line.calls}) == 50


@pytest.mark.parametrize("method", ["Complete", "Stream"])
@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        (None, (grpc.StatusCode.UNAUTHENTICATED, "unauthenticated")),
        (GOOD, (grpc.StatusCode.INVALID_ARGUMENT, "invalid_request")),
    ],
    ids=["without a key", "with one"],
)
async def test_bytes_that_are_no_message_get_an_error_of_ours(method, metadata, expected) -> None:
    async with serving(FakeLine()) as (_, server), grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        path = f"/tollbridge.v1.Gateway/{method}"
        for content in (b"\xff\xff\xff", b"\x0a\x02\xff\xfe"):
            unary = method == "Complete"
            raw: Any = channel.unary_unary(path) if unary else channel.unary_stream(path)
            call = raw(content, metadata=metadata)
            code = await call.code()
            info, _, _ = await details_of(call)
            assert (code, info.reason) == expected
