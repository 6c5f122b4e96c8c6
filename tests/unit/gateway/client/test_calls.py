"""The synchronous face's calls, on a channel of grpcio-testing: the test is the server."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from typing import Any

import grpc
import grpc_testing
import pytest
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from gateway.client import Busy, Cancelled, Unreachable, flow
from gateway.client.sync import Driver, Stream
from protos.tollbridge.v1 import gateway_pb2 as pb

SERVICE = pb.DESCRIPTOR.services_by_name["Gateway"]
COMPLETE, STREAM = SERVICE.methods_by_name["Complete"], SERVICE.methods_by_name["Stream"]
QUESTION = pb.CompletionRequest(model="m", messages=[pb.Message(role="user", text="Hello?")])
RESPONSE = pb.CompletionResponse(choices=[pb.Choice(text="Hello")])
METADATA = (("authorization", "Bearer good"),)
OK, UNAVAILABLE = grpc.StatusCode.OK, grpc.StatusCode.UNAVAILABLE
pytestmark = pytest.mark.timeout(400)


@pytest.fixture
def channel() -> Any:
    return grpc_testing.channel([SERVICE], grpc_testing.strict_real_time())


@pytest.fixture
def driver(channel: Any) -> Driver:
    driver = Driver(METADATA)
    driver.use(channel)
    return driver


@pytest.fixture
def apart() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as threads:
        yield threads


def refusal(*, dispatched: str, retry_after_s: float) -> tuple[Any, grpc.StatusCode, str]:
    """Trailing metadata, code and details of a full queue."""
    rich = status_pb2.Status(code=grpc.StatusCode.RESOURCE_EXHAUSTED.value[0], message="full")
    info = error_details_pb2.ErrorInfo(reason="queue_full", domain="tollbridge")
    info.metadata.update({"dispatched": dispatched, "attempts": "0", "request_id": "r"})
    retry = error_details_pb2.RetryInfo()
    retry.retry_delay.FromNanoseconds(round(retry_after_s * 1e9))
    for detail in (info, retry):
        rich.details.add().Pack(detail)
    status = rpc_status.to_status(rich)
    return status.trailing_metadata, grpc.StatusCode.RESOURCE_EXHAUSTED, "full"


def asked(driver: Driver, apart: ThreadPoolExecutor, budget_s: float) -> Future[pb.CompletionResponse]:
    return apart.submit(driver.run, flow.complete(QUESTION, None, budget_s))


def test_a_call_bears_the_key_and_the_request(channel: Any, driver: Driver, apart: ThreadPoolExecutor) -> None:
    answer = asked(driver, apart, 0.0)
    metadata, request, rpc = channel.take_unary_unary(COMPLETE)
    assert METADATA[0] in metadata
    assert request == QUESTION
    rpc.terminate(RESPONSE, (), OK, "")
    assert answer.result() == RESPONSE


def test_a_refusal_is_repeated_and_a_dispatched_one_is_not(
    channel: Any, driver: Driver, apart: ThreadPoolExecutor
) -> None:
    answer = asked(driver, apart, 3600.0)
    for _ in range(2):
        _, request, rpc = channel.take_unary_unary(COMPLETE)
        assert request == QUESTION
        rpc.terminate(None, *refusal(dispatched="false", retry_after_s=0.01))
    _, _, rpc = channel.take_unary_unary(COMPLETE)
    rpc.terminate(None, *refusal(dispatched="true", retry_after_s=0.01))
    with pytest.raises(Busy) as failed:
        answer.result()
    told = (failed.value.dispatched, failed.value.retry_after_s, failed.value.attempts, failed.value.request_id)
    assert told == (True, 0.01, 0, "r")


def test_a_connection_that_breaks_is_not_tried_again(channel: Any, driver: Driver, apart: ThreadPoolExecutor) -> None:
    answer = asked(driver, apart, 3600.0)
    _, _, rpc = channel.take_unary_unary(COMPLETE)
    rpc.terminate(None, (), UNAVAILABLE, "connection reset")
    with pytest.raises(Unreachable):
        answer.result()


def test_leaving_a_stream_cancels_its_call(channel: Any, driver: Driver, apart: ThreadPoolExecutor) -> None:
    heard = threading.Event()

    def read_one() -> str:
        chunks = driver.iterate(flow.stream(QUESTION, None, 0.0))
        with closing(chunks):
            for text in Stream(chunks).text():
                heard.set()
                return text
        raise AssertionError("no text")

    text = apart.submit(read_one)
    _, _, rpc = channel.take_unary_stream(STREAM)
    rpc.send_response(pb.CompletionChunk(delta=pb.Delta(pieces=[pb.Piece(text="Hel")])))
    rpc.cancelled()
    assert text.result() == "Hel"
    assert heard.is_set()


def test_a_stream_is_asked_again_only_before_content(channel: Any, driver: Driver, apart: ThreadPoolExecutor) -> None:
    answer = apart.submit(lambda: Stream(driver.iterate(flow.stream(QUESTION, None, 3600.0))).answer())
    _, _, rpc = channel.take_unary_stream(STREAM)
    rpc.send_response(pb.CompletionChunk(queued=pb.Queued(position=1)))
    rpc.terminate(*refusal(dispatched="false", retry_after_s=0.01))
    _, _, rpc = channel.take_unary_stream(STREAM)
    rpc.send_response(pb.CompletionChunk(delta=pb.Delta(pieces=[pb.Piece(text="Hello")])))
    rpc.terminate((), grpc.StatusCode.CANCELLED, "")
    with pytest.raises(Cancelled):
        answer.result()
