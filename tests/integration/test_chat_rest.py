"""The endpoints for clients of OpenAI and Anthropic, over real sockets, with a line that does what a test says."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import socket
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from decimal import Decimal
from typing import Any

import aiohttp
import msgspec
import pytest
from structlog.testing import capture_logs
from typing_extensions import override

from adapters.chat import ChatResponse, Choice, Native, StopReason, TextDelta, ToolCall
from admission.lease import Waiting
from gateway.answer import Ended, Item, Observer
from gateway.call import Call, Completion
from gateway.errors import (
    AdmissionRefused,
    AllRoutesFailed,
    Code,
    Conflict,
    GatewayError,
    ModelNotFound,
    NoRoute,
    StreamBroken,
    UpstreamRejected,
)
from gateway.outcome import AttemptReport, Cost, LeftOut
from gateway.rest import chat
from gateway.rest.app import RestSettings, serve
from gateway.rest.endpoint import BodyLimits
from gateway.rest.streams import StreamSettings
from tests.fakes.line import (
    BACKUP,
    CHARGED,
    COMPLETION,
    ENDED,
    ENDS,
    ROUTE,
    FakeKeys,
    FakeLine,
    attempt,
    not_here,
    outcome,
)

PATHS = tuple(chat.PATHS)
KEY = {"authorization": "Bearer good"}
BODIES: Mapping[str, dict[str, Any]] = {
    "/v1/chat/completions": {"model": "m", "messages": [{"role": "user", "content": "hi"}]},
    "/v1/responses": {"model": "m", "input": "hi"},
    "/v1/messages": {"model": "m", "max_tokens": 100, "messages": [{"role": "user", "content": "hi"}]},
}
QUICK = StreamSettings(commit_after_s=0.1, keepalive_s=0.05, idle_reader_s=0.3)
PATIENT = StreamSettings(commit_after_s=30.0)
UNKNOWN = Cost(state="unknown", upper_bound_usd=Decimal(1))


class Server:
    def __init__(self, line: FakeLine, client: aiohttp.ClientSession, port: int) -> None:
        self.line = line
        self.client = client
        self.port = port
        #: Of the last `raw`.
        self.writer: asyncio.StreamWriter
        self.writers: list[asyncio.StreamWriter] = []
        self.closes = True

    async def ask(
        self, path: str, *, stream: bool = False, headers: Mapping[str, str] = KEY, **fields: Any
    ) -> tuple[int, bytes, Mapping[str, str]]:
        body = {**BODIES[path], **fields} | ({"stream": True} if stream else {})
        async with self.client.post(path, json=body, headers=headers) as response:
            return response.status, await response.read(), response.headers

    async def raw(self, path: str, *, stream: bool = True, **fields: Any) -> asyncio.StreamReader:
        """The bytes of an answer as they come."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        self.writer = writer
        self.writers.append(writer)
        body = json.dumps({**BODIES[path], "stream": stream, **fields}).encode()
        writer.write(
            f"POST {path} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer good\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\n\r\n".encode()
            + body
        )
        await writer.drain()
        return reader


@asynccontextmanager
async def serving(line: FakeLine, settings: StreamSettings = PATIENT) -> AsyncIterator[Server]:
    rest = RestSettings(port=0, drain_s=2.0, body=BodyLimits(max_json_bytes=100_000, body_grace_s=0.3))
    async with (
        serve(rest, chat.routes(line=line, settings=settings, in_background=not_here), FakeKeys()) as server,
        aiohttp.ClientSession(f"http://127.0.0.1:{server.port}") as client,
    ):
        asked = Server(line, client, server.port)
        try:
            yield asked
        finally:
            # At once, unless the drain is what a test is about.
            if asked.closes:
                for writer in asked.writers:
                    writer.close()


def raising(error: Exception) -> Callable[[Call, Observer], Awaitable[None]]:
    async def before(call: Call, observer: Observer) -> None:
        raise error

    return before


async def started(call: Call, observer: Observer) -> None:
    observer.started(ROUTE, 1)


def inner(path: str, body: bytes) -> dict[str, Any]:
    """The error object in the API's own envelope."""
    told = json.loads(body)
    if path == "/v1/messages":
        assert told["type"] == "error"
        assert told["request_id"]
    error: dict[str, Any] = told["error"]
    return error


def failing(status: int, code: str, *, error_class: str = "transient", cost: Cost = CHARGED) -> AttemptReport:
    return AttemptReport(
        number=1, route=ROUTE, status="error", error_class=error_class, code=code, http_status=status, cost=cost
    )


# ------------------------------------------------------------------ plain


@pytest.mark.parametrize("path", PATHS)
async def test_an_answer_has_the_shape_of_its_api_and_says_who_served_it(path: str):
    async with serving(FakeLine()) as server:
        status, body, headers = await server.ask(path)
    assert status == 200
    assert "Hello" in body.decode()
    assert json.loads(body)["object" if path != "/v1/messages" else "type"] in {
        "chat.completion",
        "response",
        "message",
    }
    assert headers["x-tollbridge-route"] == "openai/gpt-4o"
    assert headers["x-tollbridge-attempts"] == "1"
    assert headers["x-tollbridge-cost-usd"] == "0.000125"
    assert headers["request-id" if path == "/v1/messages" else "x-request-id"] == headers["x-tollbridge-request-id"]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("stream", [False, True])
async def test_what_is_not_settled_yet_has_no_counters(path: str, stream: bool):
    pending = msgspec.structs.replace(outcome(), settlement="pending", counters=None)

    async def unsettled() -> AsyncGenerator[Item, None]:
        yield (TextDelta("Hello"),)
        yield Ended(ends=ENDS, outcome=pending)

    line = FakeLine(items=unsettled, completion=msgspec.structs.replace(COMPLETION, outcome=pending))
    async with serving(line) as server:
        _, body, headers = await server.ask(path, stream=stream)
    told = body.decode() if stream else str(headers)
    assert "pending" in told
    assert not re.search("(session|day|total)[-_]usd", told)


@pytest.mark.parametrize("path", PATHS)
async def test_an_answer_whose_provider_told_no_id_and_no_model_has_both(path: str):
    async with serving(FakeLine()) as server:
        _, body, headers = await server.ask(path)
    answer = json.loads(body)
    assert answer["id"].endswith(headers["x-tollbridge-request-id"])
    assert answer["model"] == "gpt-4o"


async def test_the_caller_fields_come_from_headers():
    line = FakeLine()
    async with serving(line) as server:
        headers = {**KEY, "x-tollbridge-session-id": "s1", "x-tollbridge-allow-failover": "false"}
        await server.ask("/v1/chat/completions", headers=headers)
    [call] = line.calls
    assert (call.options.session_id, call.options.allow_failover, call.model) == ("s1", False, "m")
    assert call.transport == "rest"


async def test_a_role_may_be_asked_for_in_place_of_a_model_and_nothing_at_all_may_not():
    line = FakeLine()
    async with serving(line) as server:
        for path in PATHS:
            await server.ask(path, model=None, headers={**KEY, "x-tollbridge-role": "planner"})
            status, body, _ = await server.ask(path, model=None)
            assert (status, inner(path, body)["param"]) == (400, "model")
    assert [(call.model, call.options.role) for call in line.calls] == [("", "planner")] * len(PATHS)


async def test_betas_are_of_anthropics_api_alone_and_are_plain_words():
    line = FakeLine()
    async with serving(line) as server:
        headers = {**KEY, "anthropic-version": "2023-06-01", "anthropic-beta": "one-2025-01-01, two"}
        assert (await server.ask("/v1/messages", headers=headers))[0] == 200
        assert (await server.ask("/v1/chat/completions", headers=headers))[0] == 200
        for wrong in ("a b", "x" * 65, "a,,b", "é", ",".join(f"b{n}" for n in range(33))):
            status, body, _ = await server.ask("/v1/messages", headers={**KEY, "anthropic-beta": wrong})
            assert (status, inner("/v1/messages", body)["param"]) == (400, "anthropic-beta"), wrong
    assert [call.betas for call in line.calls] == [("one-2025-01-01", "two"), ()]


# ------------------------------------------------------------------ errors


REFUSALS: list[tuple[GatewayError, int, str | None, bool]] = [
    # error, status, Retry-After, whether the client may repeat it by itself
    (ModelNotFound("none", param="model"), 404, None, False),
    (AdmissionRefused("full", code=Code.QUEUE_FULL, retry_after_s=2.1), 429, "3", True),
    (AdmissionRefused("late", code=Code.QUEUE_TIMEOUT, retry_after_s=1), 503, "1", True),
    (AdmissionRefused("cooling", code=Code.COOLDOWN, retry_after_s=30), 503, "30", True),
    (AdmissionRefused("an hour", code=Code.COOLDOWN, retry_after_s=3600), 503, "3600", False),
    (AdmissionRefused("again", code=Code.DUPLICATE_DEBIT), 409, None, False),
    (AdmissionRefused("too large", code=Code.TOO_LARGE), 400, None, False),
    (Conflict("no"), 409, None, False),
    (NoRoute("nobody"), 403, None, False),
    (NoRoute("no key", code=Code.PROVIDER_NOT_READY), 503, None, False),
    (AllRoutesFailed("faults", outcome=outcome(failing(500, "x")), retry_after_s=1), 502, "1", True),
    (AllRoutesFailed("limits", outcome=outcome(failing(429, "x")), retry_after_s=1), 429, "1", True),
    (AllRoutesFailed("once", outcome=outcome(failing(500, "x"))), 502, None, True),
    (AllRoutesFailed("tried to the end", outcome=outcome(failing(500, "x"), failing(503, "y"))), 502, None, False),
    (AllRoutesFailed("later", outcome=outcome(failing(429, "x"), failing(429, "y")), retry_after_s=7), 429, "7", True),
    (AllRoutesFailed("quota", outcome=outcome(failing(429, "x", error_class="ours"))), 502, None, False),
    (AllRoutesFailed("unknown", outcome=outcome(failing(500, "x"), cost=UNKNOWN)), 502, None, False),
    (UpstreamRejected("bad", outcome=outcome(failing(422, "x", error_class="fatal"))), 422, None, False),
    (UpstreamRejected("law", outcome=outcome(failing(451, "x", error_class="fatal"))), 400, None, False),
    (StreamBroken("cut", outcome=outcome(cost=UNKNOWN)), 502, None, False),
]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("stream", [False, True], ids=["plain", "streamed"])
@pytest.mark.parametrize(
    ("error", "status", "retry_after", "repeats"), REFUSALS, ids=[f"{e.code}-{e.message}" for e, *_ in REFUSALS]
)
async def test_an_error_before_the_first_content_has_a_status_of_its_own_and_the_shape_of_its_api(
    path: str, stream: bool, error: GatewayError, status: int, retry_after: str | None, repeats: bool
):
    async with serving(FakeLine(before=raising(error))) as server:
        got, body, headers = await server.ask(path, stream=stream)
    told = inner(path, body)
    message = error.message if error.param is None else f"{error.param}: {error.message}"
    assert (got, told["code"], told["message"]) == (status, error.code.value, message)
    assert headers.get("Retry-After") == retry_after
    assert (headers.get("x-should-retry") != "false") is repeats
    assert headers["Content-Type"] == "application/json"


async def test_an_error_says_which_routes_were_left_out_where_that_was_asked_for():
    error = NoRoute("nobody")
    error.left_out = (
        LeftOut(provider="a", model="m", reason="not_ready"),
        LeftOut(provider="b", model="m", reason="x"),
    )
    async with serving(FakeLine(before=raising(error))) as server:
        _, _, headers = await server.ask(PATHS[0], stream=False)
    assert headers["x-tollbridge-left-out"] == "a/m: not_ready; b/m: x"
    async with serving(FakeLine(before=raising(NoRoute("nobody")))) as server:
        _, _, headers = await server.ask(PATHS[0], stream=False)
    assert "x-tollbridge-left-out" not in headers


@pytest.mark.parametrize("path", PATHS)
async def test_what_never_reaches_the_line_is_told_in_the_words_of_the_api_too(path: str):
    line = FakeLine()
    async with serving(line) as server:

        async def refused(method: str = "POST", headers: Mapping[str, str] = KEY, **given: Any) -> tuple[int, Any]:
            async with server.client.request(method, path, headers=headers, **given) as response:
                body = await response.read()
                assert response.headers["x-tollbridge-request-id"]
                return response.status, inner(path, body)

        good = json.dumps(BODIES[path]).encode()
        typed = {**KEY, "content-type": "application/json"}
        for headers in ({}, {"authorization": "Bearer bad"}, {"x-api-key": "bad"}):
            status, told = await refused(headers=headers, json=BODIES[path])
            assert (status, told["code"], told["type"]) == (401, "unauthenticated", "authentication_error")
        status, told = await refused(headers={"authorization": "Bearer reader"}, json=BODIES[path])
        assert (status, told["code"], told["type"]) == (403, "permission_denied", "permission_error")
        assert (await refused("GET"))[0] == 405
        assert (await refused(data=good, headers={**KEY, "content-type": "text/plain"}))[0] == 415
        assert (await refused(data=b"x" * 100_001, headers=typed))[0] == 413
        assert (await refused(data=good, headers={**typed, "content-encoding": "gzip"}))[0] == 415
        for wrong in (b"", b"{", b"[]", b'{"model": NaN}', b'{"model":"\xff"}', b"[" * 5000, b'{"a":1e999}'):
            status, told = await refused(data=wrong, headers=typed)
            assert (status, told["code"]) == (400, "invalid_json"), wrong
        for name, value in (("x-tollbridge-nonsense", "1"), ("x-tollbridge-max-cost-usd", "lots")):
            status, told = await refused(data=good, headers={**typed, name: value})
            assert (status, told["param"]) == (400, name)
        status, told = await refused(data=good[:-1] + b', "model": "twice"}', headers=typed)
        assert (status, told["param"]) == (400, "model")
    assert line.calls == []


async def test_a_fault_of_our_own_is_told_without_its_text():
    async with serving(FakeLine(before=raising(RuntimeError("a secret")))) as server:
        for path in PATHS:
            status, body, headers = await server.ask(path)
            assert (status, inner(path, body)["code"]) == (500, "internal")
            assert headers["x-should-retry"] == "false"
            assert b"a secret" not in body


# ------------------------------------------------------------------ streams


def events(body: bytes) -> list[str]:
    return [event for event in body.decode().split("\n\n") if event]


@pytest.mark.parametrize("path", PATHS)
async def test_a_stream_says_at_its_start_what_is_known_and_before_its_end_what_became_known(path: str):
    async def before(call: Call, observer: Observer) -> None:
        observer.started(BACKUP, 1)
        observer.failed(attempt(1, route=BACKUP, status="error", code="overloaded"))
        observer.started(ROUTE, 2)

    async def items() -> AsyncGenerator[Item, None]:
        yield (TextDelta("Hello"),)
        yield Ended(ends=ENDS, outcome=outcome(attempt(1, route=BACKUP, status="error", code="overloaded"), attempt(2)))

    async with serving(FakeLine(before=before, items=items)) as server:
        status, body, headers = await server.ask(path, stream=True)
    assert status == 200
    assert headers["Content-Type"] == "text/event-stream"
    assert headers["x-tollbridge-route"] == "openai/gpt-4o"
    assert headers["x-tollbridge-attempts"] == "2"
    assert headers["x-tollbridge-failover-reason"] == "overloaded"
    told = events(body)
    [at] = [n for n, event in enumerate(told) if event.startswith(": tollbridge ")]
    late = json.loads(told[at].removeprefix(": tollbridge "))
    assert (late["cost_usd"], late["cost_state"], late["settlement"]) == ("0.000125", "charged", "settled")
    terminal = {"/v1/chat/completions": "[DONE]", "/v1/responses": "response.completed", "/v1/messages": "message_stop"}
    assert terminal[path] in told[-1]
    assert all(terminal[path] not in event for event in told[:at])


@pytest.mark.parametrize("path", PATHS)
async def test_a_stream_that_breaks_after_content_ends_with_an_error_and_without_its_end(path: str):
    async def items() -> AsyncGenerator[Item, None]:
        yield (TextDelta("Hel"),)
        raise StreamBroken("cut", outcome=outcome(cost=UNKNOWN))

    async with serving(FakeLine(before=started, items=items)) as server:
        reader = await server.raw(path)
        async with asyncio.timeout(30):
            whole = await reader.read()
    assert whole.startswith(b"HTTP/1.1 200 ")
    assert b"Hel" in whole
    assert b"upstream_broken" in whole
    # Neither the API's own end nor that of the body.
    for end in (b"[DONE]", b"response.completed", b"message_stop", b"\r\n0\r\n\r\n"):
        assert end not in whole


async def test_a_caller_of_the_providers_protocol_gets_its_very_bytes():
    first = b'data: {"id":"theirs","choices":[{"index":0,"delta":{"content":"Hi"}}],"new_field":1}\n\n'
    usage = b'data: {"id":"theirs","choices":[],"usage":{"prompt_tokens":1,"total_tokens":2}}\n\n'

    async def items() -> AsyncGenerator[Item, None]:
        yield [TextDelta("Hi"), Native(first)]  # type: ignore[list-item]
        yield [Native(usage)]  # type: ignore[list-item]
        yield Ended(ends=ENDS, outcome=outcome(), native=b"data: [DONE]\n\n")

    line = FakeLine(before=started, items=items)
    async with serving(line) as server:
        _, body, _ = await server.ask("/v1/chat/completions", stream=True, stream_options={"include_usage": True})
        assert body.startswith(first + usage + b": tollbridge ")
        assert body.endswith(b"\n\ndata: [DONE]\n\n")
        # One that did not ask for usage would trip over an event without choices.
        _, body, _ = await server.ask("/v1/chat/completions", stream=True)
        assert body.startswith(first + b": tollbridge ")
    assert all(call.relay for call in line.calls)


async def test_a_stream_whose_provider_left_the_sentinel_out_gets_one():
    last = b'data: {"choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}\n\n'

    async def items() -> AsyncGenerator[Item, None]:
        yield [TextDelta("Hi"), Native(b"data: {}\n\n")]  # type: ignore[list-item]
        yield Ended(ends=ENDS, outcome=outcome(), native=last)

    async with serving(FakeLine(before=started, items=items)) as server:
        _, body, _ = await server.ask("/v1/chat/completions", stream=True)
    assert body.endswith(last + b"data: [DONE]\n\n")


@pytest.mark.parametrize("path", PATHS)
async def test_a_relayed_stream_that_breaks_does_not_begin_again(path: str):
    async def items() -> AsyncGenerator[Item, None]:
        yield [TextDelta("Hi"), Native(b"event: theirs\ndata: {}\n\n")]  # type: ignore[list-item]
        raise StreamBroken("cut", outcome=outcome(cost=UNKNOWN))

    async with serving(FakeLine(before=started, items=items)) as server:
        reader = await server.raw(path)
        async with asyncio.timeout(30):
            whole = await reader.read()
    assert b"upstream_broken" in whole
    assert b"response.created" not in whole
    assert b"message_start" not in whole


async def test_a_stream_that_waits_keeps_its_status_for_a_while_and_then_is_kept_open_by_comments():
    go = asyncio.Event()

    async def before(call: Call, observer: Observer) -> None:
        observer.queued(Waiting(group="g", position=3, reason="capacity"))
        await go.wait()
        observer.started(ROUTE, 1)

    async with serving(FakeLine(before=before), QUICK) as server:
        reader = await server.raw("/v1/chat/completions")
        async with asyncio.timeout(30):
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200 ")
            assert b"x-tollbridge-route" not in head
            for _ in range(3):
                await reader.readuntil(b": queued, position 3\n\n")
            go.set()
            rest = await reader.readuntil(b"0\r\n\r\n")
        assert b"Hel" in rest
        assert b'"route":"openai/gpt-4o"' in rest
        assert b"[DONE]" in rest


@pytest.mark.parametrize("path", PATHS)
async def test_an_error_after_the_status_was_sent_is_told_in_the_stream(path: str):
    async def before(call: Call, observer: Observer) -> None:
        await asyncio.sleep(0.25)
        raise AdmissionRefused("full", code=Code.QUEUE_FULL, retry_after_s=2)

    async with serving(FakeLine(before=before), QUICK) as server:
        reader = await server.raw(path)
        async with asyncio.timeout(30):
            whole = await reader.read()
    assert whole.startswith(b"HTTP/1.1 200 ")
    assert b": waiting\n\n" in whole
    assert b"queue_full" in whole
    assert b"\r\n0\r\n\r\n" not in whole


# ------------------------------------------------------------------ who goes away, and who does not read


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "streamed"])
async def test_a_caller_who_goes_away_before_the_first_byte_takes_the_request_back_at_once(stream: bool):
    async def before(call: Call, observer: Observer) -> None:
        await asyncio.Event().wait()

    line = FakeLine(before=before)
    async with serving(line) as server:
        await server.raw("/v1/messages", stream=stream)
        async with asyncio.timeout(20):
            await line.entered.wait()
            server.writer.close()
            assert await line.exits.get() is asyncio.CancelledError


async def test_a_caller_who_goes_away_after_comments_or_in_the_middle_takes_the_request_back():
    hang = asyncio.Event()

    async def before(call: Call, observer: Observer) -> None:
        observer.started(ROUTE, 1)
        if call.model == "waits":
            await hang.wait()

    async def items() -> AsyncGenerator[Item, None]:
        yield (TextDelta("Hel"),)
        await hang.wait()

    line = FakeLine(before=before, items=items)
    async with serving(line, QUICK) as server:
        for model, seen in (("waits", b": waiting"), ("m", b"Hel")):
            reader = await server.raw("/v1/chat/completions", model=model)
            async with asyncio.timeout(20):
                await reader.readuntil(seen)
                server.writer.close()
                assert await line.exits.get() is asyncio.CancelledError


class Endless(FakeLine):
    """Its stream has no end; counts what was taken from it."""

    def __init__(self) -> None:
        self.taken = 0
        super().__init__(before=started, items=self.content)

    async def content(self) -> AsyncGenerator[Item, None]:
        while True:
            self.taken += 1
            yield (TextDelta("word " * 2000),)
            await asyncio.sleep(0)

    @override
    async def complete(self, call: Call, observer: Observer = ...) -> Any:
        raise NotImplementedError


async def test_who_does_not_read_holds_the_provider_back_and_is_cut_in_the_end():
    line = Endless()
    with capture_logs() as logs:
        async with serving(line, QUICK) as server:
            reader = await server.raw("/v1/chat/completions")
            await reader.readuntil(b"word")
            async with asyncio.timeout(30):
                left = await line.exits.get()
            taken = line.taken
    assert left is not None
    # The buffers of two sockets, not an endless stream.
    assert taken < 1500
    assert [one["event"] for one in logs if one["event"] == "gateway.idle_reader_cut"]


async def over_http_1_0(port: int, *, pause: asyncio.Event | None = None) -> tuple[bytes, bool]:
    """A stream without chunks, and whether the connection was reset at its end."""
    body = json.dumps({**BODIES["/v1/chat/completions"], "stream": True}).encode()
    head = (
        "POST /v1/chat/completions HTTP/1.0\r\nauthorization: Bearer good\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\n\r\n"
    )
    loop, got = asyncio.get_running_loop(), b""
    # Of a stream of asyncio a reset takes away what was not read yet.
    with socket.socket() as link:
        link.setblocking(False)
        async with asyncio.timeout(30):
            await loop.sock_connect(link, ("127.0.0.1", port))
            await loop.sock_sendall(link, head.encode() + body)
            if pause is not None:
                await pause.wait()
            try:
                while piece := await loop.sock_recv(link, 65536):
                    got += piece
            except ConnectionResetError:
                return got, True
    return got, False


async def test_over_http_1_0_a_stream_that_is_cut_is_reset_after_its_error_and_a_whole_one_is_not():
    breaks = True

    async def items() -> AsyncGenerator[Item, None]:
        yield (TextDelta("Hel"),)
        if breaks:
            raise StreamBroken("cut", outcome=outcome(cost=UNKNOWN))
        yield ENDED

    async with serving(FakeLine(before=started, items=items)) as server:
        got, reset = await over_http_1_0(server.port)
        assert (b"Hel" in got, b"upstream_broken" in got, b"[DONE]" in got, reset) == (True, True, False, True)
        breaks = False
        got, reset = await over_http_1_0(server.port)
        assert (b"Hel" in got, b"[DONE]" in got, reset) == (True, True, False)


async def test_over_http_1_0_a_caller_who_does_not_read_is_reset_too():
    line, cut = Endless(), asyncio.Event()
    async with serving(line, QUICK) as server:
        asking = asyncio.create_task(over_http_1_0(server.port, pause=cut))
        async with asyncio.timeout(30):
            await line.exits.get()
        cut.set()
        _, reset = await asking
    assert reset


async def test_a_drain_lets_a_stream_end():
    go = asyncio.Event()

    async def items() -> AsyncGenerator[Item, None]:
        yield (TextDelta("Hel"),)
        await go.wait()
        yield ENDED

    line = FakeLine(before=started, items=items)
    async with contextlib.AsyncExitStack() as stack:
        server = await stack.enter_async_context(serving(line))
        server.closes = False
        reader = await server.raw("/v1/chat/completions")
        await reader.readuntil(b"Hel")
        asyncio.get_running_loop().call_later(0.1, go.set)
        closing = asyncio.create_task(stack.aclose())
        async with asyncio.timeout(30):
            assert b"[DONE]" in await reader.read()
            await closing
        server.writer.close()


async def test_arguments_that_a_format_cannot_tell_are_an_error_and_no_others():
    broken = ToolCall(id="c", name="f", arguments='{"a": ')
    choice = Choice(index=0, tool_calls=(broken,), stop_reason=StopReason.TOOL_CALLS, native_stop_reason="tool_calls")
    line = FakeLine(completion=Completion(response=ChatResponse(choices=(choice,)), outcome=outcome()))
    async with serving(line) as server:
        status, body, headers = await server.ask("/v1/messages")
        assert (status, headers["x-tollbridge-code"]) == (502, "upstream_broken")
        assert b"INVALID_JSON" not in body
        status, body, _ = await server.ask("/v1/chat/completions")
        assert (status, json.loads(body)["choices"][0]["message"]["tool_calls"][0]["function"]["arguments"]) == (
            200,
            '{"a": ',
        )
