"""The client against real sockets, in every way a provider can fail."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import socket
import threading
import time
import zlib
from collections.abc import AsyncIterator

import msgspec
import pytest

from adapters.chat import (
    ChatRequest,
    Event,
    Finished,
    Message,
    NativeRequest,
    Role,
    StopReason,
    Text,
    TextDelta,
    UsageReport,
)
from adapters.client import Upstream
from adapters.contract import Clocks, Endpoint, UpstreamCall
from adapters.errors import Broken, ErrorClass, NotSent, ProviderError, Rejected
from tests.fakes.certificates import self_signed
from tests.fakes.ports import refusing_port
from tests.fakes.raw_provider import Exchange, head, raw_provider

ANSWER = json.dumps(
    {
        "id": "chatcmpl-1",
        "model": "m-1",
        "choices": [{"index": 0, "message": {"role": "assistant", "content": "hello"}, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 3, "completion_tokens": 1},
    }
).encode()


def content(text: str) -> bytes:
    return f'data: {{"id":"x","choices":[{{"index":0,"delta":{{"content":"{text}"}}}}]}}\n\n'.encode()


FINISH = b'data: {"choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}\n\n'
DONE = b"data: [DONE]\n\n"


def call(port: int, *, deadline_s: float = 10.0, clocks: Clocks | None = None, **endpoint: object) -> UpstreamCall:
    url = str(endpoint.pop("base_url", f"http://127.0.0.1:{port}/v1"))
    return UpstreamCall(
        endpoint=Endpoint(
            provider="p",
            protocol="chat_completions",
            base_url=url,
            headers={"authorization": "Bearer key"},
            clocks=clocks or Clocks(first_byte_s=10, gap_s=10),
            **endpoint,  # type: ignore[arg-type]
        ),
        model="m",
        request=ChatRequest(messages=(Message(role=Role.USER, content=(Text(text="hi"),)),)),
        deadline=asyncio.get_running_loop().time() + deadline_s,
    )


@pytest.fixture
async def upstream() -> AsyncIterator[Upstream]:
    async with Upstream() as opened:
        yield opened


async def streamed(upstream: Upstream, of: UpstreamCall) -> list[Event]:
    async with upstream.stream(of) as batches:
        return [event async for batch in batches for event in batch]


async def failed(upstream: Upstream, of: UpstreamCall) -> tuple[list[Event], ProviderError]:
    events: list[Event] = []

    async def run() -> None:
        async with upstream.stream(of) as batches:
            async for batch in batches:
                events.extend(batch)

    with pytest.raises(ProviderError) as caught:
        await run()
    return events, caught.value


async def turns(count: int = 20) -> None:
    """Lets the loop go round, for what is on its way over the loopback to arrive."""
    for _ in range(count):
        await asyncio.sleep(0)


# ----------------------------------------------------------------- the good


async def test_a_whole_answer_is_parsed_and_the_request_is_what_the_provider_expects(upstream):
    async def answer(exchange: Exchange) -> None:
        await exchange.answer(ANSWER, headers={"set-cookie": "a=b"})

    async with raw_provider(answer) as provider:
        response = await upstream.complete(call(provider.port))
        await upstream.complete(call(provider.port))
    assert response.choices[0].text == "hello"
    lines = provider.requests[0].head.decode().lower().split("\r\n")
    assert lines[0] == "post /v1/chat/completions http/1.1"
    assert "authorization: bearer key" in lines
    assert "content-type: application/json" in lines
    assert any(line.startswith("user-agent: tollbridge/") for line in lines)
    assert not any(line.startswith("cookie") for line in provider.requests[1].head.decode().lower().split("\r\n"))
    assert json.loads(provider.requests[0].body) == {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
    assert provider.connections == 1


async def test_a_stream_is_given_as_it_comes_and_ends_with_finished(upstream):
    arrived = asyncio.Event()

    async def answer(exchange: Exchange) -> None:
        await exchange.begin()
        await exchange.chunk(content("a"))
        await arrived.wait()
        await exchange.chunk(content("b") + FINISH + DONE)
        await exchange.end()

    async with raw_provider(answer) as provider:
        async with upstream.stream(call(provider.port)) as batches:
            assert list(await anext(batches)) == [TextDelta("a")]
            arrived.set()
            rest = [event async for batch in batches for event in batch]
        assert rest[0] == TextDelta("b")
        assert isinstance(rest[-1], Finished)
        await streamed(upstream, call(provider.port))
        assert provider.connections == 1, "a stream that ended lets its connection be used again"


async def test_a_stream_that_comes_byte_by_byte_gives_the_same(upstream):
    async def answer(exchange: Exchange) -> None:
        await exchange.begin()
        for byte in content("Grüße") + FINISH + DONE:
            await exchange.chunk(bytes([byte]))
        await exchange.end()

    async with raw_provider(answer) as provider:
        events = await streamed(upstream, call(provider.port))
    assert [type(event) for event in events] == [TextDelta, Finished]
    assert events[0] == TextDelta("Grüße")


async def test_a_wait_that_is_cancelled_loses_nothing_wherever_in_the_stream_it_was(upstream):
    go = asyncio.Event()

    async def answer(exchange: Exchange) -> None:
        await exchange.begin()
        late = b'data: {"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":2}}\n\n'
        for byte in content("a") + content("b") + FINISH + DONE + late:
            await go.wait()
            go.clear()
            await exchange.chunk(bytes([byte]))
        await exchange.end()

    events: list[Event] = []
    async with raw_provider(answer) as provider, upstream.stream(call(provider.port)) as batches:
        cancelled = 0
        while not (events and isinstance(events[-1], Finished)):
            wait = asyncio.ensure_future(anext(batches))
            await turns()
            if not wait.done():
                wait.cancel()
                cancelled += 1
            with contextlib.suppress(asyncio.CancelledError):
                events.extend(await wait)
            go.set()
    assert cancelled > 100
    assert [type(event) for event in events] == [TextDelta, TextDelta, UsageReport, Finished]
    assert events[:2] == [TextDelta("a"), TextDelta("b")]


@pytest.mark.parametrize("kind", ["application/json", "text/event-stream", "application/octet-stream"])
async def test_a_provider_that_does_not_heed_stream_is_read_all_the_same(upstream, kind):
    async def answer(exchange: Exchange) -> None:
        await exchange.answer(b"\n\n" + ANSWER, headers={"content-type": kind})

    async with raw_provider(answer) as provider:
        events = await streamed(upstream, call(provider.port))
    assert [type(event) for event in events] == [TextDelta, UsageReport, Finished]


async def test_a_cost_behind_the_sentinel_comes_before_finished_and_content_does_not_wait_for_it(upstream):
    got = asyncio.Event()

    async def answer(exchange: Exchange) -> None:
        await exchange.begin()
        await exchange.chunk(content("a") + FINISH + DONE)
        await got.wait()
        await exchange.chunk(b'data: {"choices":[],"cost":"0.5"}\n\n')
        await exchange.end()

    async with raw_provider(answer) as provider, upstream.stream(call(provider.port)) as batches:
        assert list(await anext(batches)) == [TextDelta("a")]
        got.set()
        last = list(await anext(batches))
        assert [type(event) for event in last] == [UsageReport, Finished]
        with pytest.raises(StopAsyncIteration):
            await anext(batches)


async def test_a_provider_that_keeps_the_body_open_behind_the_sentinel_delays_the_end_only_briefly(upstream):
    async def answer(exchange: Exchange) -> None:
        await exchange.begin()
        await exchange.chunk(content("a") + FINISH + DONE)
        await exchange.closed()

    async with raw_provider(answer) as provider:
        start = asyncio.get_running_loop().time()
        events = await streamed(upstream, call(provider.port))
        assert asyncio.get_running_loop().time() - start < 2
    assert isinstance(events[-1], Finished)


async def test_a_provider_that_goes_on_and_on_behind_the_sentinel_is_cut_off(upstream):
    async def answer(exchange: Exchange) -> None:
        await exchange.begin()
        await exchange.chunk(content("a") + FINISH + DONE)
        with contextlib.suppress(ConnectionError):
            while True:
                await exchange.chunk(b": more\n" * 1000)

    async with raw_provider(answer) as provider:
        assert isinstance((await streamed(upstream, call(provider.port)))[-1], Finished)


@pytest.mark.parametrize("coding", ["gzip", "deflate"])
async def test_a_compressed_answer_is_read(upstream, coding):
    packed = gzip.compress(ANSWER) if coding == "gzip" else zlib.compress(ANSWER)

    async def answer(exchange: Exchange) -> None:
        await exchange.answer(packed, headers={"content-encoding": coding})

    async with raw_provider(answer) as provider:
        assert (await upstream.complete(call(provider.port))).choices[0].text == "hello"


# ----------------------------------------------------------------- not sent


async def not_sent(upstream: Upstream, of: UpstreamCall) -> set[str]:
    codes = set()
    with pytest.raises(NotSent) as caught:
        await upstream.complete(of)
    codes.add(caught.value.code)
    _, error = await failed(upstream, of)
    assert isinstance(error, NotSent)
    return codes | {error.code}


async def test_a_refused_connection_sent_nothing(upstream):
    with refusing_port() as port:
        assert await not_sent(upstream, call(port)) == {"connect_refused"}


async def test_a_name_that_does_not_resolve_sent_nothing(upstream):
    assert await not_sent(upstream, call(0, base_url="http://nowhere.invalid/v1")) == {"dns"}


@pytest.mark.parametrize("url", ["ftp://127.0.0.1/v1", "http://", "no url"])
async def test_a_base_url_that_is_none_sent_nothing(upstream, url):
    assert await not_sent(upstream, call(0, base_url=url)) == {"invalid_url"}


async def answer_well(exchange: Exchange) -> None:
    await exchange.answer(ANSWER)


async def test_a_port_without_tls_sent_nothing(upstream):
    async def refuse(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        writer.close()

    async with await asyncio.start_server(refuse, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        assert await not_sent(upstream, call(0, base_url=f"https://127.0.0.1:{port}/v1")) == {"tls"}


async def test_a_certificate_that_does_not_hold_sent_nothing(upstream, tmp_path):
    served, _ = self_signed(tmp_path, "elsewhere")
    async with raw_provider(answer_well, tls=served) as provider:
        assert await not_sent(upstream, call(0, base_url=f"https://127.0.0.1:{provider.port}/v1")) == {"tls"}
        assert provider.requests == []


async def test_a_connection_that_does_not_come_about_in_time_sent_nothing(upstream):
    # A listener whose backlog is full answers no handshake.
    with socket.socket() as listener, contextlib.ExitStack() as stack:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        port = listener.getsockname()[1]
        for _ in range(4):
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(("127.0.0.1", port))
        clocks = Clocks(connect_s=0.1, first_byte_s=10)
        assert await not_sent(upstream, call(port, clocks=clocks)) == {"connect_timeout"}
        assert await not_sent(upstream, call(port, deadline_s=0.1)) == {"deadline"}
        _, error = await failed(upstream, call(port, clocks=Clocks(connect_s=10, first_byte_s=0.1)))
        assert isinstance(error, NotSent)
        assert error.code == "connect_timeout"


async def test_a_deadline_that_has_passed_sends_nothing_also_on_an_open_connection(upstream):
    async def answer(exchange: Exchange) -> None:
        await exchange.answer(ANSWER)

    async with raw_provider(answer) as provider:
        await upstream.complete(call(provider.port))
        assert await not_sent(upstream, call(provider.port, deadline_s=-1)) == {"deadline"}
        assert len(provider.requests) == 1


# ----------------------------------------------------------------- rejected


async def test_a_complete_error_is_rejected_with_its_meaning(upstream):
    async def answer(exchange: Exchange) -> None:
        await exchange.answer(
            b'{"error":{"message":"slow","code":"rate_limit_exceeded"}}',
            status=429,
            headers={"Retry-After": "7", "X-Request-Id": "req_1"},
        )

    async with raw_provider(answer) as provider:
        _, error = await failed(upstream, call(provider.port))
        with pytest.raises(Rejected):
            await upstream.complete(call(provider.port))
        assert provider.connections == 1, "a complete error leaves the connection good"
    assert isinstance(error, Rejected)
    assert (error.rate_limited, error.retry_after_s, error.provider_request_id) == (True, 7.0, "req_1")


LEFT = {"X-RateLimit-Remaining-Requests": "5", "X-RateLimit-Remaining-Tokens": "77"}


async def test_what_the_provider_says_is_left_comes_with_every_kind_of_answer(upstream):
    async def whole(exchange: Exchange) -> None:
        await exchange.answer(ANSWER, headers=LEFT)

    async def in_pieces(exchange: Exchange) -> None:
        await exchange.begin(LEFT)
        await exchange.chunk(content("a") + FINISH)
        await exchange.chunk(DONE)
        await exchange.end()

    async def refused(exchange: Exchange) -> None:
        await exchange.answer(b'{"error":{"message":"slow"}}', status=429, headers=LEFT)

    async def broken(exchange: Exchange) -> None:
        await exchange.begin(LEFT)
        await exchange.chunk(content("a"))
        exchange.die()

    before = asyncio.get_running_loop().time()
    said = []
    async with raw_provider(whole) as provider:
        said.append((await upstream.complete(call(provider.port))).remaining)
        # A whole answer to a request for a stream.
        last = (await streamed(upstream, call(provider.port)))[-1]
        assert isinstance(last, Finished)
        said.append(last.remaining)
    async with raw_provider(in_pieces) as provider:
        last = (await streamed(upstream, call(provider.port)))[-1]
        assert isinstance(last, Finished)
        said.append(last.remaining)
    async with raw_provider(refused) as provider:
        said.append((await failed(upstream, call(provider.port)))[1].remaining)
        with pytest.raises(Rejected) as caught:
            await upstream.complete(call(provider.port))
        said.append(caught.value.remaining)
    async with raw_provider(broken) as provider:
        events, error = await failed(upstream, call(provider.port))
        assert events
        said.append(error.remaining)
    for left in said:
        assert left is not None
        assert (left.requests, left.tokens) == (5, 77)
        assert before <= left.told_at <= asyncio.get_running_loop().time()


async def test_an_answer_that_does_not_say_what_is_left_carries_nothing(upstream):
    async def answer(exchange: Exchange) -> None:
        await exchange.answer(ANSWER)

    async with raw_provider(answer) as provider:
        assert (await upstream.complete(call(provider.port))).remaining is None


async def test_what_the_profile_leaves_out_of_a_request_is_told_with_the_answer(upstream):
    async def whole(exchange: Exchange) -> None:
        await exchange.answer(ANSWER)

    async def in_pieces(exchange: Exchange) -> None:
        await exchange.begin()
        await exchange.chunk(content("a") + FINISH + DONE)
        await exchange.end()

    async with raw_provider(whole) as provider:
        of = call(provider.port, omit=frozenset({"seed", "user"}))
        of = msgspec.structs.replace(of, request=msgspec.structs.replace(of.request, seed=1))
        assert (await upstream.complete(of)).dropped == ("seed",)
        # A whole answer to a request for a stream.
        last = (await streamed(upstream, of))[-1]
        assert isinstance(last, Finished)
        assert last.dropped == ("seed",)
    async with raw_provider(in_pieces) as provider:
        of = msgspec.structs.replace(of, endpoint=call(provider.port, omit=frozenset({"seed"})).endpoint)
        last = (await streamed(upstream, of))[-1]
        assert isinstance(last, Finished)
        assert last.dropped == ("seed",)


async def test_an_error_that_was_cut_short_is_not_complete(upstream):
    async def answer(exchange: Exchange) -> None:
        await exchange.answer(b'{"error":{"message":"slow"}}', status=500, cut=10)

    async with raw_provider(answer) as provider:
        _, error = await failed(upstream, call(provider.port))
    assert isinstance(error, Broken)
    assert error.code == "connection_lost"


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
async def test_a_redirect_is_an_error_and_is_not_followed(upstream, status):
    async def elsewhere(exchange: Exchange) -> None:
        await exchange.answer(ANSWER)

    async def answer(exchange: Exchange) -> None:
        await exchange.answer(b"", status=status, headers={"location": f"http://127.0.0.1:{other.port}/v1"})

    async with raw_provider(elsewhere) as other, raw_provider(answer) as provider:
        with pytest.raises(Rejected) as caught:
            await upstream.complete(call(provider.port))
        _, error = await failed(upstream, call(provider.port))
        assert isinstance(error, Rejected)
        assert caught.value.error_class is ErrorClass.OURS
        assert other.connections == 0


async def test_an_error_in_a_stream_comes_after_the_content_before_it(upstream):
    async def answer(exchange: Exchange) -> None:
        await exchange.begin()
        await exchange.chunk(content("a") + b'data: {"error":{"message":"x","code":502}}\n\n' + DONE)
        await exchange.end()

    async with raw_provider(answer) as provider:
        events, error = await failed(upstream, call(provider.port))
    assert events == [TextDelta("a")]
    assert isinstance(error, Rejected)


# ----------------------------------------------------------------- broken


async def hang(exchange: Exchange) -> None:
    await exchange.closed()


async def hang_after_head(exchange: Exchange) -> None:
    await exchange.begin()
    await exchange.closed()


async def comment_for_ever(exchange: Exchange) -> None:
    await exchange.begin()
    with contextlib.suppress(ConnectionError):
        while True:
            await exchange.chunk(b": keep-alive\n\n")
            await asyncio.sleep(0.01)


async def role_then_hang(exchange: Exchange) -> None:
    await exchange.begin()
    await exchange.chunk(b'data: {"choices":[{"index":0,"delta":{"role":"assistant","content":""}}]}\n\n')
    await exchange.closed()


async def hang_in_content(exchange: Exchange) -> None:
    await exchange.begin()
    await exchange.chunk(content("a"))
    await exchange.closed()


async def comment_in_content(exchange: Exchange) -> None:
    await exchange.begin()
    await exchange.chunk(content("a"))
    with contextlib.suppress(ConnectionError):
        while True:
            await exchange.chunk(b": keep-alive\n\n")
            await asyncio.sleep(0.01)


async def hang_in_json(exchange: Exchange) -> None:
    await exchange.send(head(200, {"content-type": "application/json", "content-length": "1000"}), ANSWER)
    await exchange.closed()


async def hang_in_error(exchange: Exchange) -> None:
    await exchange.send(head(500, {"content-length": "1000"}), b"{")
    await exchange.closed()


async def die_before_head(exchange: Exchange) -> None:
    exchange.die()


async def reset_before_head(exchange: Exchange) -> None:
    exchange.reset()


async def die_in_content(exchange: Exchange) -> None:
    await exchange.begin()
    await exchange.chunk(content("a"))
    exchange.die()


async def die_after_finish(exchange: Exchange) -> None:
    await exchange.begin()
    await exchange.chunk(content("a") + FINISH)
    exchange.die()


async def end_without_terminal(exchange: Exchange) -> None:
    await exchange.begin()
    await exchange.chunk(content("a"))
    await exchange.end()


async def end_without_sentinel(exchange: Exchange) -> None:
    await exchange.begin()
    await exchange.chunk(content("a") + FINISH)
    await exchange.end()


async def no_framing(exchange: Exchange) -> None:
    await exchange.send(head(200, {"content-type": "text/event-stream", "connection": "close"}), content("a") + FINISH)
    exchange.die()


async def wrong_json(exchange: Exchange) -> None:
    await exchange.begin()
    await exchange.chunk(content("a") + b"data: {oops\n\n")
    await exchange.end()


async def not_http(exchange: Exchange) -> None:
    await exchange.send(b"SSH-2.0-OpenSSH_9.6\r\n\r\n")
    await exchange.closed()


async def a_line_without_end(exchange: Exchange) -> None:
    await exchange.begin()
    with contextlib.suppress(ConnectionError):
        await exchange.chunk(b"data: ")
        while True:
            await exchange.chunk(b"x" * 65536)


@pytest.mark.parametrize(
    ("handler", "code", "content_first"),
    [
        (hang, "first_byte_timeout", False),
        (hang_after_head, "first_byte_timeout", False),
        (comment_for_ever, "first_byte_timeout", False),
        (role_then_hang, "first_byte_timeout", False),
        (hang_in_json, "first_byte_timeout", False),
        (hang_in_error, "first_byte_timeout", False),
        (hang_in_content, "gap_timeout", True),
        (comment_in_content, "gap_timeout", True),
        (die_before_head, "connection_lost", False),
        (reset_before_head, "connection_lost", False),
        (die_in_content, "connection_lost", True),
        (die_after_finish, "connection_lost", True),
        (no_framing, "connection_lost", True),
        (end_without_terminal, "no_terminal", True),
        (end_without_sentinel, "no_terminal", True),
        (wrong_json, "malformed", True),
        (not_http, "malformed", False),
        (a_line_without_end, "response_too_large", False),
    ],
)
async def test_a_stream_that_was_sent_and_not_proven_is_broken(upstream, handler, code, content_first):
    async with raw_provider(handler) as provider:
        of = call(provider.port, clocks=Clocks(first_byte_s=1, gap_s=1), max_response_bytes=1024 * 1024)
        events, error = await failed(upstream, of)
        assert isinstance(error, Broken)
        assert error.code == code
        assert events == ([TextDelta("a")] if content_first else [])


@pytest.mark.parametrize(
    ("handler", "code"),
    [
        (hang, "deadline"),
        (hang_in_json, "deadline"),
        (hang_in_error, "deadline"),
        (die_before_head, "connection_lost"),
        (not_http, "malformed"),
    ],
)
async def test_a_plain_call_that_was_sent_and_not_proven_is_broken(upstream, handler, code):
    async with raw_provider(handler) as provider:
        with pytest.raises(Broken) as caught:
            await upstream.complete(call(provider.port, deadline_s=1, clocks=Clocks(first_byte_s=0.01, gap_s=0.01)))
        assert caught.value.code == code


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("body", "code"),
    [(ANSWER[:-9], "malformed"), (b"{}", "malformed"), (b'{"choices":[{"message":{}}]}', "no_terminal"), (b"", "any")],
)
async def test_a_body_that_is_no_answer_is_broken(upstream, stream, body, code):
    async def answer(exchange: Exchange) -> None:
        await exchange.answer(body)

    async with raw_provider(answer) as provider:
        with pytest.raises(Broken) as caught:
            await (streamed(upstream, call(provider.port)) if stream else upstream.complete(call(provider.port)))
        assert code in {caught.value.code, "any"}


async def test_the_deadline_ends_a_stream_that_is_well_alive(upstream):
    async def answer(exchange: Exchange) -> None:
        await exchange.begin()
        with contextlib.suppress(ConnectionError):
            while True:
                await exchange.chunk(content("a"))
                await asyncio.sleep(0.01)

    async with raw_provider(answer) as provider:
        events, error = await failed(upstream, call(provider.port, deadline_s=1))
    assert isinstance(error, Broken)
    assert error.code == "deadline"
    assert events


async def test_a_provider_without_sentinel_ends_by_its_framing_only(upstream):
    async with raw_provider(end_without_sentinel) as provider:
        assert isinstance((await streamed(upstream, call(provider.port, no_sentinel=True)))[-1], Finished)
    for handler in (die_after_finish, no_framing):
        async with raw_provider(handler) as provider:
            _, error = await failed(upstream, call(provider.port, no_sentinel=True))
            assert isinstance(error, Broken)


async def test_a_terminal_that_came_before_the_connection_broke_still_counts(upstream):
    read, dead = asyncio.Event(), asyncio.Event()

    async def answer(exchange: Exchange) -> None:
        await exchange.begin()
        await exchange.chunk(content("a"))
        await read.wait()
        await exchange.chunk(content("b") + FINISH + DONE)
        exchange.die()
        dead.set()

    async with raw_provider(answer) as provider, upstream.stream(call(provider.port)) as batches:
        assert list(await anext(batches)) == [TextDelta("a")]
        read.set()
        # The caller reads on only when all of it has arrived and the connection is gone.
        await dead.wait()
        await turns()
        events = [event async for batch in batches for event in batch]
    assert events[0] == TextDelta("b")
    assert isinstance(events[-1], Finished)


# ----------------------------------------------------------- bounds and clocks


@pytest.mark.parametrize("coding", ["gzip", "deflate"])
@pytest.mark.parametrize("stream", [True, False])
async def test_a_compressed_bomb_is_stopped_by_its_decoded_size(upstream, coding, stream):
    bomb = b'{"x":"' + b"0" * 40_000_000
    packer = zlib.compressobj(9, zlib.DEFLATED, 31 if coding == "gzip" else 15)
    packed = packer.compress(bomb) + packer.flush()
    del bomb

    async def answer(exchange: Exchange) -> None:
        with contextlib.suppress(ConnectionError):
            await exchange.answer(packed, headers={"content-encoding": coding})

    async with raw_provider(answer) as provider:
        of = call(provider.port, max_response_bytes=1024 * 1024)
        with pytest.raises(Broken) as caught:
            await (streamed(upstream, of) if stream else upstream.complete(of))
    assert caught.value.code == "response_too_large"


async def test_the_time_a_slow_caller_takes_runs_no_clock(upstream):
    async def answer(exchange: Exchange) -> None:
        await exchange.begin()
        for text in "abcd":
            await exchange.chunk(content(text))
        await exchange.chunk(FINISH + DONE)
        await exchange.end()

    clocks = Clocks(first_byte_s=0.2, gap_s=0.1)
    async with raw_provider(answer) as provider, upstream.stream(call(provider.port, clocks=clocks)) as batches:
        events: list[Event] = []
        await asyncio.sleep(0.3)
        async for batch in batches:
            events += batch
            await asyncio.sleep(0.15)
    assert isinstance(events[-1], Finished)


async def test_a_slow_caller_holds_the_provider_back(upstream):
    sent = 0

    async def answer(exchange: Exchange) -> None:
        nonlocal sent
        await exchange.begin()
        with contextlib.suppress(ConnectionError):
            for _ in range(20_000):
                await exchange.chunk(content("a" * 1000))
                sent += 1

    async with raw_provider(answer) as provider, upstream.stream(call(provider.port)) as batches:
        await anext(batches)
        before = -1
        while sent != before:
            before = sent
            await asyncio.sleep(0.1)
        assert sent < 20_000


async def test_payload_without_events_restarts_the_gap_clock_and_comments_do_not(upstream):
    async def answer(exchange: Exchange) -> None:
        await exchange.begin()
        await exchange.chunk(content("a"))
        for _ in range(6):
            await asyncio.sleep(0.15)
            await exchange.chunk(b'data: {"choices":[{"index":0,"delta":{}}]}\n\n')
        await exchange.chunk(FINISH + DONE)
        await exchange.end()

    async with raw_provider(answer) as provider:
        events = await streamed(upstream, call(provider.port, clocks=Clocks(first_byte_s=5, gap_s=0.6)))
    assert isinstance(events[-1], Finished)


# ------------------------------------------------------- connections and ends


async def test_a_kept_connection_that_the_provider_closed_is_not_used(upstream):
    closed = asyncio.Event()

    async def answer(exchange: Exchange) -> None:
        await exchange.answer(ANSWER)
        exchange.die()
        closed.set()

    async with raw_provider(answer) as provider:
        for _ in range(3):
            closed.clear()
            await upstream.complete(call(provider.port))
            await closed.wait()
            await turns()
        assert provider.connections == 3


async def test_a_kept_connection_that_closes_upon_the_request_is_uncertain_and_nothing_is_sent_again(upstream):
    async def answer(exchange: Exchange) -> None:
        if len(provider.requests) == 1:
            await exchange.answer(ANSWER)
        else:
            exchange.die()

    async with raw_provider(answer) as provider:
        await upstream.complete(call(provider.port))
        with pytest.raises(Broken) as caught:
            await upstream.complete(call(provider.port))
        assert caught.value.code == "connection_lost"
        assert len(provider.requests) == 2
        assert provider.connections == 1


@pytest.mark.parametrize("stage", ["before the head", "before content", "in content", "plain", "in a plain answer"])
async def test_cancelling_closes_the_socket_at_once(upstream, stage):
    reached, closed = asyncio.Event(), asyncio.Event()

    async def answer(exchange: Exchange) -> None:
        if stage in {"before content", "in content"}:
            await exchange.begin()
        if stage == "in content":
            await exchange.chunk(content("a"))
        if stage == "in a plain answer":
            await exchange.send(head(200, {"content-type": "application/json", "content-length": "1000"}), ANSWER)
        reached.set()
        await exchange.closed()
        closed.set()

    async with raw_provider(answer) as provider:
        of = call(provider.port)
        task = asyncio.ensure_future(upstream.complete(of) if "plain" in stage else streamed(upstream, of))
        await reached.wait()
        await turns()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.wait_for(closed.wait(), 20)


@pytest.mark.parametrize("kind", ["die", "reset"])
@pytest.mark.parametrize("stage", ["before the head", "before content", "in content", "plain", "in a plain answer"])
async def test_a_provider_that_goes_away_is_noticed_at_once_and_not_by_a_clock(upstream, stage, kind):
    async def answer(exchange: Exchange) -> None:
        if stage in {"before content", "in content"}:
            await exchange.begin()
        if stage == "in content":
            await exchange.chunk(content("a"))
        if stage == "in a plain answer":
            await exchange.send(head(200, {"content-type": "application/json", "content-length": "1000"}), ANSWER)
        await turns()
        exchange.die() if kind == "die" else exchange.reset()

    async with raw_provider(answer) as provider:
        of = call(provider.port, deadline_s=60, clocks=Clocks(first_byte_s=60, gap_s=60))
        start = asyncio.get_running_loop().time()
        with pytest.raises(Broken) as caught:
            await (upstream.complete(of) if "plain" in stage else streamed(upstream, of))
        assert caught.value.code == "connection_lost"
        assert asyncio.get_running_loop().time() - start < 5


async def test_leaving_a_stream_early_closes_its_connection(upstream):
    closed = asyncio.Event()

    async def answer(exchange: Exchange) -> None:
        await exchange.begin()
        await exchange.chunk(content("a"))
        await exchange.closed()
        closed.set()

    async with raw_provider(answer) as provider:
        async with upstream.stream(call(provider.port)) as batches:
            await anext(batches)
        await asyncio.wait_for(closed.wait(), 20)


async def test_many_calls_at_once_are_not_held_back_by_the_pool(upstream):
    everyone, count = asyncio.Event(), 0

    async def answer(exchange: Exchange) -> None:
        nonlocal count
        count += 1
        if count == 150:
            everyone.set()
        await everyone.wait()
        await exchange.answer(ANSWER)

    async with raw_provider(answer) as provider:
        answers = await asyncio.gather(*(upstream.complete(call(provider.port)) for _ in range(150)))
    assert len(answers) == 150


async def test_no_proxy_of_the_environment_is_used(upstream, monkeypatch):
    async def answer(exchange: Exchange) -> None:
        await exchange.answer(ANSWER)

    with refusing_port() as nobody:
        for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
            monkeypatch.setenv(name, f"http://127.0.0.1:{nobody}")
        async with raw_provider(answer) as provider:
            assert (await upstream.complete(call(provider.port))).choices


@pytest.mark.parametrize(
    ("first", "rest", "no_sentinel"),
    [
        (b"A", FINISH + DONE, False),
        # The end of the body is the proof.
        (b"A" + FINISH, b"", True),
    ],
    ids=["content", "end"],
)
async def test_a_pause_of_this_process_is_no_pause_of_the_provider(upstream, first, rest, no_sentinel):
    """What arrived in time while the loop was held up is read, though its clock has run out meanwhile."""
    listening = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        connection, _ = listening.accept()
        with connection:
            connection.recv(65536)
            connection.sendall(
                b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
            )
            begun = first.replace(b"A", content("a"))
            connection.sendall(b"%x\r\n%b\r\n" % (len(begun), begun))
            time.sleep(0.2)
            connection.sendall((b"%x\r\n%b\r\n" % (len(rest), rest) if rest else b"") + b"0\r\n\r\n")

    provider = threading.Thread(target=serve)
    provider.start()
    try:
        of = call(listening.getsockname()[1], clocks=Clocks(first_byte_s=2, gap_s=0.4), no_sentinel=no_sentinel)
        async with upstream.stream(of) as batches:
            await anext(batches)
            asyncio.get_running_loop().call_later(0.05, time.sleep, 0.9)
            assert [type(event) async for batch in batches for event in batch][-1] is Finished
    finally:
        provider.join()
        listening.close()


@pytest.mark.parametrize("body", [b'{"choices":[]', b"[]", b'{"choices":[{"index":0,"message":{"content":"x"}}]}'])
async def test_a_plain_answer_that_came_and_is_not_proven_says_that_it_came(upstream, body):
    async def answer(exchange: Exchange) -> None:
        await exchange.answer(body)

    async with raw_provider(answer) as provider:
        with pytest.raises(Broken) as broken:
            await upstream.complete(call(provider.port))
    assert broken.value.answered


@pytest.mark.parametrize(("cut", "answered"), [(False, False), (True, True)], ids=["whole", "cut"])
async def test_a_page_that_came_whole_is_no_answer_and_one_that_is_cut_may_have_been(upstream, cut, answered):
    async def answer(exchange: Exchange) -> None:
        await exchange.send(
            head(200, {"content-type": "text/html", "content-length": "30"}),
            b"<html>Welcome" if cut else b"<html>Welcome to our proxy</a>",
        )
        exchange.die()

    async with raw_provider(answer) as provider:
        with pytest.raises(Broken) as broken:
            await upstream.complete(call(provider.port))
    assert broken.value.answered is answered


async def test_a_plain_call_of_which_nothing_came_says_so(upstream):
    async with raw_provider(die_before_head) as provider:
        with pytest.raises(Broken) as broken:
            await upstream.complete(call(provider.port))
    assert not broken.value.answered


@pytest.mark.parametrize("body", [b'{"choices":[', b'{"choices":[]}', b"[1", ANSWER[:-9]])
async def test_a_stream_that_is_answered_by_json_that_is_no_proven_answer_says_that_it_came(upstream, body):
    async def answer(exchange: Exchange) -> None:
        await exchange.answer(body)

    async with raw_provider(answer) as provider:
        events, error = await failed(upstream, call(provider.port))
    assert not events
    assert isinstance(error, Broken)
    assert error.answered


@pytest.mark.parametrize("relay", [False, True])
@pytest.mark.parametrize("reads", ["an event each", "a byte each"])
async def test_a_character_that_is_cut_in_two_is_whole_and_a_half_that_stays_alone_is_told(upstream, relay, reads):
    stream = content("a \\ud83d") + content("\\ude00 b") + content("c\\ud83d") + FINISH + DONE

    async def answer(exchange: Exchange) -> None:
        await exchange.begin()
        for piece in stream.split(b"|") if reads == "an event each" else (bytes([byte]) for byte in stream):
            await exchange.chunk(piece)
        await exchange.end()

    stream = stream.replace(b"\n\n", b"\n\n|") if reads == "an event each" else stream
    async with raw_provider(answer) as provider:
        asked = call(provider.port)
        if relay:
            native = NativeRequest(protocol="chat_completions", fields={}, unmapped=())
            asked = msgspec.structs.replace(
                asked, relay=True, request=msgspec.structs.replace(asked.request, native=native)
            )
        events = await streamed(upstream, asked)
    assert "".join(event.text for event in events if isinstance(event, TextDelta)) == "a \U0001f600 bc\ufffd"
    assert any(isinstance(event, Finished) for event in events)
    passed_on = b"".join(getattr(event, "raw", b"") for event in events)
    said = [msgspec.json.decode(line[6:]) for line in passed_on.splitlines() if line.startswith(b"data: {")]
    assert len(said) == (4 if relay else 0)


@pytest.mark.parametrize("end", ["dies", "is reset", "hangs"])
async def test_what_came_before_a_stream_broke_is_given_also_where_its_last_character_is_half(upstream, end):
    async def answer(exchange: Exchange) -> None:
        await exchange.begin()
        await exchange.chunk(content("a \\ud83d"))
        await given.wait() if end == "is reset" else None
        match end:
            case "dies":
                exchange.die()
            case "is reset":
                exchange.reset()
            case "hangs":
                await exchange.closed()

    given = asyncio.Event()
    async with raw_provider(answer) as provider:
        asking = asyncio.ensure_future(failed(upstream, call(provider.port, clocks=Clocks(first_byte_s=1, gap_s=1))))
        # A reset overtakes what was not read yet.
        asyncio.get_running_loop().call_later(0.2, given.set)
        events, error = await asking
    assert events == [TextDelta("a \ufffd")]
    assert isinstance(error, Broken)
    assert error.code == ("first_byte_timeout" if end == "hangs" else "connection_lost")


@pytest.mark.parametrize("cut", [20, 60])
async def test_json_that_is_cut_has_been_an_answer_also_where_it_has_a_character_of_two_escapes(upstream, cut):
    async def answer(exchange: Exchange) -> None:
        await exchange.answer(b'{"id":"\\ud83d\\ude00"' + ANSWER[1:], cut=cut)

    async with raw_provider(answer) as provider:
        events, error = await failed(upstream, call(provider.port))
    assert not events
    assert isinstance(error, Broken)
    assert (error.code, error.answered) == ("connection_lost", True)


async def test_half_a_character_in_a_plain_answer_is_told(upstream):
    async def answer(exchange: Exchange) -> None:
        await exchange.answer(ANSWER.replace(b"hello", b"\\ud83d\\ude00 \\ude00"))

    async with raw_provider(answer) as provider:
        response = await upstream.complete(call(provider.port))
    assert response.choices[0].text == "\U0001f600 \ufffd"


# ------------------------------------------------------------------- health


@pytest.mark.parametrize(("status", "listed"), [(200, True), (404, False), (405, False)])
async def test_health_is_whether_the_model_list_answers_and_says_where_there_is_none(upstream, status, listed):
    async def answer(exchange: Exchange) -> None:
        await exchange.answer(b" {}", status=status)

    async with raw_provider(answer) as provider:
        assert await upstream.health_check(call(provider.port).endpoint) is listed
    assert provider.requests[0].head.startswith(b"GET /v1/models HTTP/1.1")


@pytest.mark.parametrize("status", [401, 503])
async def test_a_provider_that_refuses_its_model_list_is_not_healthy(upstream, status):
    async def answer(exchange: Exchange) -> None:
        await exchange.answer(b"{}", status=status)

    async with raw_provider(answer) as provider:
        with pytest.raises(Rejected):
            await upstream.health_check(call(provider.port).endpoint)


@pytest.mark.parametrize("page", [b"<html>log in</html>", b"", b"OK"])
async def test_what_is_no_json_is_no_model_list(upstream, page):
    async def answer(exchange: Exchange) -> None:
        await exchange.answer(page)

    async with raw_provider(answer) as provider:
        with pytest.raises(Broken) as broken:
            await upstream.health_check(call(provider.port).endpoint)
    assert broken.value.code == "malformed"


async def test_a_provider_that_hangs_is_not_healthy(upstream):
    async with raw_provider(hang) as provider:
        endpoint = call(provider.port, clocks=Clocks(connect_s=0.1, first_byte_s=0.1)).endpoint
        with pytest.raises(Broken):
            await upstream.health_check(endpoint)


@pytest.mark.parametrize(("limit", "end"), [(2, StopReason.LENGTH), (3, StopReason.STOP), (None, StopReason.STOP)])
async def test_an_answer_as_long_as_its_limit_was_cut_where_the_provider_has_no_word_for_it(upstream, limit, end):
    usage = b'"usage":{"prompt_tokens":5,"completion_tokens":2}'
    stream = b'data: {"response":"a"}\n\ndata: {"response":"",%b}\n\ndata: [DONE]\n\n' % usage

    async def answer(exchange: Exchange) -> None:
        if b'"stream":true' in exchange.body:
            await exchange.begin()
            await exchange.chunk(stream)
            await exchange.end()
        else:
            await exchange.answer(b'{"response":"a",%b}' % usage)

    async with raw_provider(answer) as provider:
        asked = call(provider.port)
        asked = msgspec.structs.replace(
            asked,
            endpoint=msgspec.structs.replace(asked.endpoint, protocol="workers_ai"),
            request=msgspec.structs.replace(asked.request, max_output_tokens=limit),
        )
        (choice,) = (await upstream.complete(asked)).choices
        assert choice.stop_reason is end
        finished = (await streamed(upstream, asked))[-1]
        assert isinstance(finished, Finished)
        assert [told.stop_reason for told in finished.ends] == [end]
