"""A provider's stream passed on as it came: whole events only, up to its terminal, and never an error."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adapters.chat import Event, Finished, TextDelta, UsageReport
from adapters.client import Upstream
from adapters.contract import Clocks, Endpoint, StreamParser, UpstreamCall, relayed
from adapters.errors import Broken, ProviderError, Rejected
from adapters.protocols import PROTOCOLS
from adapters.relay import Frames, RelayedStream, each
from adapters.sse import MAX_EVENT_BYTES
from tests.fakes.answers import gathered, parsed
from tests.fakes.raw_provider import Exchange, raw_provider

_FOLDER = Path(__file__).parents[2] / "wire"
CASES = [(protocol, path.stem) for protocol in sorted(PROTOCOLS) for path in sorted((_FOLDER / protocol).glob("*.sse"))]
ENDPOINT = Endpoint(provider="p", protocol="chat_completions", base_url="")
DONE = b"data: [DONE]\n\n"
FINISH = b'data: {"choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}\n\n'
COMMENT = b": hello\n\n"


def content(text: str) -> bytes:
    return f'data: {{"id":"x","choices":[{{"index":0,"delta":{{"content":"{text}"}}}}]}}\n\n'.encode()


# --------------------------------------------------------------------- frames

_end = st.sampled_from([b"\n", b"\r\n", b"\r"])


@given(st.lists(st.tuples(st.sampled_from([b"data: a", b": c", b"", b"x"]), _end), max_size=12), st.data())
@settings(deadline=None)
def test_frames_joined_are_the_bytes_and_each_ends_with_a_blank_line(lines, data):
    body = b"".join(line + end for line, end in lines)
    cuts = sorted(data.draw(st.sets(st.integers(0, len(body)), max_size=8)))
    frames = Frames()
    found: list[bytes] = []
    for start, stop in zip([0, *cuts], [*cuts, len(body)], strict=True):
        found += each(frames.feed(body[start:stop]))
    assert b"".join(found) + frames.take_rest() == body
    assert all(re.search(rb"(?:\r\n?|\n)(?:\r\n?|\n)\Z", frame) for frame in found)
    # A CR LF is never torn into a line end and a blank line.
    for frame in found:
        assert not re.search(rb"[^\r\n]\r\n\Z", frame)


def test_an_event_without_end_is_cut_off_in_linear_time():
    relay = RelayedStream(PROTOCOLS["chat_completions"].new_parser(ENDPOINT, {}))

    def run() -> None:
        for _ in range(200):
            relay.feed(b"data: " + b"x" * 65536)

    with pytest.raises(Broken) as caught:
        run()
    assert caught.value.code == "response_too_large"


def test_that_an_event_is_too_large_comes_out_behind_what_came_before_it_and_is_known_meanwhile():
    relay = RelayedStream(PROTOCOLS["chat_completions"].new_parser(ENDPOINT, {}))
    assert relay.feed(content("a") + b"data: " + b"x" * MAX_EVENT_BYTES) == [TextDelta("a")]
    assert relay.ended_at is not None
    with pytest.raises(Broken) as caught:
        relay.feed(b"")
    assert caught.value.code == "response_too_large"


# --------------------------------------------------------------------- streams


def relay_all(parser: StreamParser, pieces: list[bytes]) -> tuple[list[Event], bytes | None, ProviderError | None]:
    """Events, the bytes that may be passed on, and the error."""
    relay = RelayedStream(parser)
    events, error = parsed(relay, pieces)
    whole = relay.take()
    return events, None if whole is None else whole + relay.terminal, error


@pytest.mark.parametrize(("protocol", "case"), CASES)
@pytest.mark.parametrize("size", [1, 7, 1 << 20])
def test_every_hand_made_stream_gives_the_same_events_and_a_prefix_of_its_bytes(protocol, case, size):
    at = _FOLDER / protocol / f"{case}.sse"
    expected = json.loads(at.with_suffix(".json").read_text())
    endpoint = Endpoint(provider="p", protocol=protocol, base_url="", **expected["endpoint"])
    body = at.read_bytes()
    pieces = [body[i : i + size] for i in range(0, len(body), size)]
    new = PROTOCOLS[protocol].new_parser
    plain, plain_error = parsed(new(endpoint, {}), [body])
    events, raw, error = relay_all(new(endpoint, {}), pieces)
    assert gathered(events) == gathered(plain)
    assert str(error) == str(plain_error)
    if raw is None:
        assert body.lstrip()[:1] in {b"", b"{", b"["}
        return
    assert body.startswith(raw)
    if error is None:
        # What may be passed on is complete by itself, with nothing behind its terminal.
        again, error = parsed(new(endpoint, {}), [raw])
        assert error is None
        assert gathered(again)["choices"] == gathered(plain)["choices"]
    elif isinstance(error, Rejected) and protocol != "gemini":
        # Of the event that was the error nothing is passed on. Gemini's last event is judged by the end of the body.
        _, error = parsed(new(endpoint, {}), [raw])
        assert isinstance(error, Broken)


# -------------------------------------------------------------------- sockets


@pytest.fixture
async def upstream() -> AsyncIterator[Upstream]:
    async with Upstream() as opened:
        yield opened


def call(port: int, *, relay: bool = True) -> UpstreamCall:
    return UpstreamCall(
        endpoint=Endpoint(
            provider="p",
            protocol="chat_completions",
            base_url=f"http://127.0.0.1:{port}/v1",
            clocks=Clocks(first_byte_s=10, gap_s=10),
        ),
        model="m",
        request=PROTOCOLS["chat_completions"].parse_request(b'{"messages":[{"role":"user","content":"hi"}]}'),
        deadline=asyncio.get_running_loop().time() + 10,
        relay=relay,
    )


async def test_every_batch_ends_with_the_bytes_of_its_events_and_the_last_with_the_terminal(upstream):
    seen = asyncio.Event()
    late = b'data: {"choices":[],"cost":"0.5"}\n\n'

    async def answer(exchange: Exchange) -> None:
        await exchange.begin()
        await exchange.chunk(COMMENT + content("a") + content("b")[:20])
        await seen.wait()
        await exchange.chunk(content("b")[20:] + COMMENT + FINISH + DONE + late)
        await exchange.end()

    async with raw_provider(answer) as provider, upstream.stream(call(provider.port)) as batches:
        first, raw = relayed(await anext(batches))
        assert (list(first), raw) == ([TextDelta("a")], COMMENT + content("a"))
        seen.set()
        rest = [relayed(batch) async for batch in batches]
    events = [event for batch, _ in rest for event in batch]
    assert [type(event) for event in events] == [TextDelta, UsageReport, Finished]
    assert b"".join(raw or b"" for _, raw in rest) == content("b") + COMMENT + FINISH + DONE


async def test_an_error_event_is_not_passed_on(upstream):
    async def answer(exchange: Exchange) -> None:
        await exchange.begin()
        await exchange.chunk(content("a") + b'data: {"error":{"message":"x","code":502}}\n\n' + DONE)
        await exchange.end()

    async with raw_provider(answer) as provider, upstream.stream(call(provider.port)) as batches:
        assert relayed(await anext(batches)) == ([TextDelta("a")], content("a"))
        with pytest.raises(Rejected):
            await anext(batches)


@pytest.mark.parametrize("relay", [True, False])
async def test_an_error_behind_content_is_told_though_nothing_more_comes(upstream, relay):
    told = asyncio.Event()

    async def answer(exchange: Exchange) -> None:
        await exchange.begin()
        await exchange.chunk(content("a") + b'data: {"error":{"message":"x","code":502}}\n\n')
        await told.wait()

    async with raw_provider(answer) as provider, upstream.stream(call(provider.port, relay=relay)) as batches:
        assert list(relayed(await anext(batches))[0]) == [TextDelta("a")]
        with pytest.raises(Rejected):
            await anext(batches)
        told.set()


async def test_who_did_not_ask_or_speaks_another_protocol_or_gets_json_sees_no_bytes(upstream):
    async def stream(exchange: Exchange) -> None:
        await exchange.begin()
        await exchange.chunk(content("a") + FINISH + DONE)
        await exchange.end()

    async def whole(exchange: Exchange) -> None:
        message = {"choices": [{"index": 0, "message": {"content": "a"}, "finish_reason": "stop"}]}
        await exchange.answer(json.dumps(message).encode())

    async def raws(of: UpstreamCall) -> list[bytes | None]:
        async with upstream.stream(of) as batches:
            return [relayed(batch)[1] async for batch in batches]

    async with raw_provider(stream) as provider:
        of = call(provider.port)
        assert b"".join(raw or b"" for raw in await raws(of)) == content("a") + FINISH + DONE
        assert set(await raws(call(provider.port, relay=False))) == {None}
        foreign = msgspec.structs.replace(of, request=msgspec.structs.replace(of.request, native=None))
        assert set(await raws(foreign)) == {None}
    async with raw_provider(whole) as provider:
        assert set(await raws(call(provider.port))) == {None}
