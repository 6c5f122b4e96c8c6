"""The simulated provider over real sockets: what goes over the wire, and whether its ledger says the same."""

from __future__ import annotations

import asyncio
import email.utils
import gzip
import json
import os
import signal
import time
from collections.abc import AsyncIterator
from typing import Any

import httpx
import msgspec
import pytest

from adapters.simulator import tokens
from adapters.simulator.server import Settings
from tests.fakes import simulated as fakes
from tests.fakes.simulated import SimulatedProvider, simulated, simulated_process

simulator, simulator_process = fakes.simulator, fakes.simulator_process

QUESTION = "How do I plan a database migration?"


@pytest.fixture
async def client() -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(
        trust_env=False, verify=False, timeout=20, limits=httpx.Limits(max_connections=None)
    ) as client:
        yield client


def body(model: str = "sim-fast", **fields: Any) -> dict[str, Any]:
    return {"model": model, "messages": [{"role": "user", "content": QUESTION}], **fields}


class Reply(msgspec.Struct):
    """What came over the wire, as it came."""

    #: None where the connection ended before any header.
    status: int | None
    headers: dict[str, str]
    #: Without the chunked encoding.
    content: bytes
    #: The HTTP framing was ended properly.
    framed: bool
    reset: bool

    @property
    def events(self) -> list[str]:
        """The payload of each server-sent event."""
        text = self.content.decode().replace("\r\n", "\n").replace("\r", "\n")
        lines = (line for event in text.split("\n\n") for line in event.split("\n"))
        return [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]

    @property
    def chunks(self) -> list[dict[str, Any]]:
        return [json.loads(event) for event in self.events if event != "[DONE]"]

    @property
    def text(self) -> str:
        return "".join(
            choice["delta"].get("content") or "" for chunk in self.chunks for choice in chunk.get("choices", [])
        )

    @property
    def finishes(self) -> list[str]:
        found = (choice["finish_reason"] for chunk in self.chunks for choice in chunk.get("choices", []))
        return [reason for reason in found if reason is not None]

    @property
    def usages(self) -> list[dict[str, Any]]:
        return [chunk["usage"] for chunk in self.chunks if chunk.get("usage")]


async def exchange(simulator: SimulatedProvider, request: dict[str, Any], *, headers: str = "") -> Reply:
    """One request on a connection of its own, read to the end of the connection."""
    url = httpx.URL(simulator.url)
    reader, writer = await asyncio.open_connection(url.host, url.port)
    data = json.dumps(request).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\n{headers}content-length: {len(data)}"
    writer.write(head.encode() + b"\r\n\r\n" + data)
    received, reset = b"", False
    try:
        async with asyncio.timeout(30):
            while piece := await reader.read(65_536):
                received += piece
    except ConnectionResetError:
        reset = True
    writer.close()
    return _parsed(received, reset=reset)


def _parsed(received: bytes, *, reset: bool) -> Reply:
    if not received:
        return Reply(None, {}, b"", framed=False, reset=reset)
    head, _, rest = received.partition(b"\r\n\r\n")
    status, *lines = head.decode().split("\r\n")
    headers = dict(line.split(": ", 1) for line in lines)
    content, framed = rest, "content-length" in headers and len(rest) == int(headers["content-length"])
    if headers.get("transfer-encoding") == "chunked":
        content = b""
        while rest:
            size, _, rest = rest.partition(b"\r\n")
            length = int(size, 16)
            if not length:
                framed = rest == b"\r\n"
                break
            content, rest = content + rest[:length], rest[length + 2 :]
    return Reply(int(status.split()[1]), headers, content, framed=framed, reset=reset)


async def only_dispatch(simulator: SimulatedProvider) -> dict[str, Any]:
    await simulator.until()
    (dispatch,) = await simulator.dispatches()
    return dispatch


# ------------------------------------------------------------------ as a good provider


async def test_a_plain_answer_is_counted_as_it_says(simulator: SimulatedProvider, client: httpx.AsyncClient) -> None:
    response = await client.post(f"{simulator.url}/chat/completions", json=body(metadata={"request": "r1"}))
    answer = response.json()
    assert response.headers["x-request-id"] == "req_0000000000000001"
    assert answer["choices"][0]["finish_reason"] == "stop"
    said = answer["choices"][0]["message"]["content"]
    prompt = 3 + 3 + tokens.count("user") + tokens.count(QUESTION)
    assert (answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]) == (prompt, tokens.count(said))
    dispatch = await only_dispatch(simulator)
    assert (dispatch["tokens_in"], dispatch["tokens_out"]) == (prompt, tokens.count(said))
    assert (dispatch["correlation"], dispatch["status"], dispatch["ended"]) == ("r1", 200, "complete")
    assert dispatch["started"] <= dispatch["finished"] <= dispatch["released"] <= time.monotonic()
    assert QUESTION not in json.dumps(dispatch)


async def test_a_stream_says_what_the_plain_answer_says(
    simulator: SimulatedProvider, client: httpx.AsyncClient
) -> None:
    plain = (await client.post(f"{simulator.url}/chat/completions", json=body("sim-fast?unicode=1"))).json()
    reply = await exchange(simulator, body("sim-fast?unicode=1", stream=True, stream_options={"include_usage": True}))
    assert reply.text == plain["choices"][0]["message"]["content"]
    assert "\u2028" in reply.text
    assert reply.usages == [plain["usage"]]
    assert (reply.finishes, reply.events[-1], reply.framed) == (["stop"], "[DONE]", True)
    assert len({chunk["id"] for chunk in reply.chunks}) == 1
    content = [chunk for chunk in reply.chunks if chunk["choices"] and chunk["choices"][0]["delta"].get("content")]
    assert len(content) == plain["usage"]["completion_tokens"]


async def test_a_stream_without_usage_asked_for_has_none(simulator: SimulatedProvider) -> None:
    assert all("usage" not in chunk for chunk in (await exchange(simulator, body(stream=True))).chunks)


async def test_streamed_tool_calls_put_together_are_the_plain_ones(
    simulator: SimulatedProvider, client: httpx.AsyncClient
) -> None:
    parameters = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    request = {
        "model": "sim-fast",
        "n": 2,
        "messages": [{"role": "user", "content": "Weather in Paris and in Rome?"}],
        "tools": [{"type": "function", "function": {"name": "get_weather", "parameters": parameters}}],
    }
    plain = (await client.post(f"{simulator.url}/chat/completions", json=request)).json()
    reply = await exchange(simulator, {**request, "stream": True})
    calls: dict[tuple[int, int], dict[str, str]] = {}
    for chunk in reply.chunks:
        for choice in chunk["choices"]:
            for delta in choice["delta"].get("tool_calls", []):
                call = calls.setdefault((choice["index"], delta["index"]), {"arguments": ""})
                call["arguments"] += delta["function"]["arguments"]
                if "id" in delta:
                    call.update(id=delta["id"], name=delta["function"]["name"])
    for choice in plain["choices"]:
        assert choice["message"]["content"] is None
        for index, call in enumerate(choice["message"]["tool_calls"]):
            assert calls[choice["index"], index] == {"id": call["id"], **call["function"]}
    assert len(calls) == 4
    assert reply.finishes == ["tool_calls", "tool_calls"]


async def test_a_bad_request_is_a_400_in_the_protocols_shape(
    simulator: SimulatedProvider, client: httpx.AsyncClient
) -> None:
    response = await client.post(f"{simulator.url}/chat/completions", json={"model": "m"})
    assert response.status_code == 400
    assert response.json()["error"] == {
        "message": "Missing required parameter: 'messages'.",
        "type": "invalid_request_error",
        "param": "messages",
        "code": "missing_required_parameter",
    }
    wrong = await client.post(f"{simulator.url}/chat/completions", json=body("sim-fast?latncy=1"))
    assert (wrong.status_code, wrong.json()["error"]["code"]) == (400, "invalid_fault")
    assert (await simulator.ledger())["ended"] == {"error": 2}


async def test_only_its_key_and_its_models_are_known(client: httpx.AsyncClient) -> None:
    async with simulated(Settings(api_key="k", models=("only",))) as simulator:
        url = f"{simulator.url}/chat/completions"
        assert (await client.post(url, json=body("only"))).status_code == 401
        key = {"authorization": "Bearer k"}
        assert (await client.post(url, json=body("only"), headers=key)).status_code == 200
        unknown = await client.post(url, json=body(), headers=key)
        assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "model_not_found")
        assert (await client.get(f"{simulator.url}/models")).status_code == 401
        listed = (await client.get(f"{simulator.url}/models", headers=key)).json()
        assert [model["id"] for model in listed["data"]] == ["only"]


async def test_an_unknown_path_is_a_404(simulator: SimulatedProvider, client: httpx.AsyncClient) -> None:
    assert (await client.post(f"{simulator.url}/nothing", json={})).status_code == 404


async def test_fields_that_it_does_not_know_are_named_in_the_ledger(
    simulator: SimulatedProvider, client: httpx.AsyncClient
) -> None:
    await client.post(f"{simulator.url}/chat/completions", json=body(vendor_knob=1))
    assert (await only_dispatch(simulator))["fields"] == ["messages", "model", "vendor_knob"]


# ------------------------------------------------------------------ the three ways to ask for a fault


async def test_a_request_field_overrides_the_name_and_that_the_server(
    simulator: SimulatedProvider, client: httpx.AsyncClient
) -> None:
    url = f"{simulator.url}/chat/completions"

    async def status(model: str, **simulate: Any) -> int:
        return (await client.post(url, json=body(model, simulate=simulate))).status_code

    await simulator.set_faults(status=501)
    await simulator.set_faults(model="sim-large", status=502)
    assert await status("sim-fast") == 501
    assert await status("sim-large") == 502
    assert await status("sim-large?status=503") == 503
    assert await status("sim-large?status=503", status=504) == 504
    assert (await client.post(url, json=body(simulate={"nope": 1}))).status_code == 400
    await simulator.reset()
    assert await status("sim-large") == 200
    refused = await client.post(simulator.url.replace("/v1", "/_control/faults"), json={"nope": 1})
    assert refused.status_code == 400


async def test_the_first_of_a_request_fail_and_then_it_works(
    simulator: SimulatedProvider, client: httpx.AsyncClient
) -> None:
    url, request = f"{simulator.url}/chat/completions", body("sim-fast?fail_first=2&status=503", user="u1")
    assert [(await client.post(url, json=request)).status_code for _ in range(3)] == [503, 503, 200]
    rates = [(await client.post(url, json=body("sim-fast?rate=0.25"))).status_code for _ in range(8)]
    assert rates.count(500) == 2


# ------------------------------------------------------------------ errors


@pytest.mark.parametrize(
    ("kind", "content_type", "start"),
    [
        ("openai", "application/json", b'{"error":{"message"'),
        ("text", "text/plain", b"upstream connect error"),
        ("html", "text/html", b"<html>"),
        ("empty", "text/plain", b""),
        ("string", "application/json", b'{"code":"overloaded","error":"'),
        ("bare", "application/json", b'{"message"'),
        ("detail", "application/json", b'{"detail":['),
    ],
)
async def test_an_error_has_the_body_that_was_asked_for(
    simulator: SimulatedProvider, kind: str, content_type: str, start: bytes
) -> None:
    reply = await exchange(simulator, body(f"sim-fast?status=503&body={kind}"))
    assert (reply.status, reply.headers["content-type"], reply.framed) == (503, content_type, True)
    assert reply.content.startswith(start)
    assert (await only_dispatch(simulator))["ended"] == "error"


@pytest.mark.parametrize("how", ["", "&status=503"], ids=["an answer", "an error"])
@pytest.mark.parametrize("stream", [False, True], ids=["plain", "streamed"])
async def test_it_says_what_it_was_told_to_say_is_left(simulator: SimulatedProvider, how: str, stream: bool) -> None:
    asked = f"m?remaining_requests=7&remaining_tokens=0{how}"
    headers = (await exchange(simulator, body(asked, stream=stream))).headers
    assert (headers["x-ratelimit-remaining-requests"], headers["x-ratelimit-remaining-tokens"]) == ("7", "0")
    headers = (await exchange(simulator, body(f"m?latency=0{how}", stream=stream))).headers
    assert not any(name.startswith("x-ratelimit") for name in headers)


async def test_a_rate_limit_says_when_to_come_back(simulator: SimulatedProvider) -> None:
    async def headers(form: str) -> dict[str, str]:
        return (await exchange(simulator, body(f"m?status=429&retry_after=2&retry_after_as={form}"))).headers

    assert (await headers("seconds"))["retry-after"] == "2"
    assert (await headers("ms"))["retry-after-ms"] == "2000"
    both = await headers("ms_and_zero")
    assert (both["retry-after-ms"], both["retry-after"]) == ("2000", "0")
    date = email.utils.parsedate_to_datetime((await headers("date"))["retry-after"])
    assert 0 <= date.timestamp() - time.time() <= 3
    quota = await exchange(simulator, body("m?status=429&code=insufficient_quota"))
    assert json.loads(quota.content)["error"]["type"] == "insufficient_quota"


# ------------------------------------------------------------------ ends that are none


@pytest.mark.parametrize(("how", "reset"), [("rst", True), ("fin", False)])
@pytest.mark.parametrize("stream", [True, False], ids=["stream", "plain"])
async def test_it_dies_in_the_middle(simulator: SimulatedProvider, how: str, reset: bool, stream: bool) -> None:
    reply = await exchange(simulator, body(f"sim-fast?die={how}&die_after=4&pace=0.001", stream=stream))
    assert (reply.status, reply.framed, reply.reset) == (200, False, reset)
    if stream:
        assert tokens.count(reply.text) == 4
        assert reply.finishes == []
    dispatch = await only_dispatch(simulator)
    assert (dispatch["ended"], dispatch["tokens_out"]) == ("died", 4 if stream else 0)


@pytest.mark.parametrize(("how", "reset"), [("rst_before_headers", True), ("fin_before_headers", False)])
async def test_it_dies_before_it_says_anything(simulator: SimulatedProvider, how: str, reset: bool) -> None:
    reply = await exchange(simulator, body(f"sim-fast?die={how}", stream=True))
    assert (reply.status, reply.reset) == (None, reset)
    dispatch = await only_dispatch(simulator)
    assert (dispatch["ended"], dispatch["status"], dispatch["tokens_in"]) == ("died", None, 0)


@pytest.mark.parametrize(
    ("terminal", "finishes", "done", "ended"),
    [
        ("none", [], False, "unproven"),
        ("no_done", ["stop"], False, "unproven"),
        ("no_finish", [], True, "unproven"),
        ("two", ["stop", "stop"], True, "complete"),
        ("masked", ["stop"], True, "error_in_stream"),
        ("error_word", ["error"], True, "error_in_stream"),
    ],
)
async def test_a_stream_ends_as_asked(
    simulator: SimulatedProvider, terminal: str, finishes: list[str], done: bool, ended: str
) -> None:
    reply = await exchange(simulator, body(f"sim-fast?terminal={terminal}", stream=True))
    assert (reply.finishes, reply.events[-1] == "[DONE]", reply.framed) == (finishes, done, True)
    assert (await only_dispatch(simulator))["ended"] == ended


async def test_a_plain_answer_without_its_terminal_has_no_finish_reason(simulator: SimulatedProvider) -> None:
    reply = await exchange(simulator, body("sim-fast?terminal=none"))
    assert json.loads(reply.content)["choices"][0]["finish_reason"] is None
    assert (await only_dispatch(simulator))["ended"] == "unproven"


@pytest.mark.parametrize("kind", ["chunk", "event"])
async def test_an_error_comes_under_status_200(simulator: SimulatedProvider, kind: str) -> None:
    model = f"sim-fast?error_in_stream={kind}&error_after=2&error_done=1"
    reply = await exchange(simulator, body(model, stream=True))
    assert (reply.status, tokens.count(reply.text), reply.events[-1]) == (200, 2, "[DONE]")
    assert reply.chunks[-1]["error"]["code"] == "server_error"
    assert (b"event: error\n" in reply.content) == (kind == "event")
    assert "error" in json.loads((await exchange(simulator, body(model))).content)
    assert (await simulator.ledger())["ended"] == {"error_in_stream": 2}


@pytest.mark.parametrize("kind", ["bad", "truncated"])
@pytest.mark.parametrize("stream", [True, False], ids=["stream", "plain"])
async def test_json_is_broken_on_request(simulator: SimulatedProvider, kind: str, stream: bool) -> None:
    reply = await exchange(simulator, body(f"sim-fast?json={kind}", stream=stream))
    assert reply.framed
    broken = [event for event in reply.events if event != "[DONE]"] if stream else [reply.content]
    with pytest.raises(ValueError, match=r"Expecting|Unterminated|Illegal|delimiter"):
        [json.loads(one) for one in broken]
    assert (await only_dispatch(simulator))["ended"] == "malformed"


@pytest.mark.parametrize("kind", ["html", "empty", "not_object"])
async def test_a_200_is_no_answer_on_request(simulator: SimulatedProvider, kind: str) -> None:
    reply = await exchange(simulator, body(f"sim-fast?json={kind}"))
    assert (reply.status, reply.framed) == (200, True)
    assert reply.content in {b"", b"[42]"} or reply.headers["content-type"] == "text/html"
    assert (await only_dispatch(simulator))["ended"] == "malformed"


# ------------------------------------------------------------------ form


@pytest.mark.parametrize(
    "model",
    [
        "sim-fast?bytewise=1&chunks=5",
        "sim-fast?newline=crlf&chunks=5",
        "sim-fast?newline=cr&chunks=5",
        "sim-fast?comments=1&chunks=5",
        "sim-fast?burst=4&chunks=5",
        "sim-fast?pace=0.02&keepalive=0.005&chunks=5",
        "sim-fast?think=0.01&latency=0.01&jitter=0.01&chunks=5",
    ],
)
async def test_whatever_the_form_the_content_is_the_same(simulator: SimulatedProvider, model: str) -> None:
    request = {"stream": True, "stream_options": {"include_usage": True}}
    plain = await exchange(simulator, body("sim-fast?chunks=5", **request))
    formed = await exchange(simulator, body(model, **request))
    assert formed.framed
    assert (formed.text, formed.finishes, formed.usages) == (plain.text, ["stop"], plain.usages)
    if "keepalive" in model or "comments" in model:
        assert b": keep-alive\n\n" in formed.content
    assert (await simulator.ledger())["tokens_out"] == 10


@pytest.mark.parametrize(
    ("usage", "counts"),
    [
        ("none", []),
        ("early", [4]),
        ("late", [4]),
        ("twice", [4, 4]),
        ("on_finish", [4]),
        ("each", [0, 1, 2, 3, 4, 4]),
        ("zeros_after", [4, 0]),
    ],
)
async def test_usage_is_told_where_asked(simulator: SimulatedProvider, usage: str, counts: list[int]) -> None:
    reply = await exchange(simulator, body(f"sim-fast?chunks=4&usage={usage}", stream=True))
    assert [told["completion_tokens"] for told in reply.usages] == counts
    assert (reply.events[-1] == "[DONE]") == (usage != "late")
    assert (await simulator.ledger())["tokens_out"] == 4


async def test_reasoning_refusal_and_cached_tokens_are_told(
    simulator: SimulatedProvider, client: httpx.AsyncClient
) -> None:
    url = f"{simulator.url}/chat/completions"
    answer = (await client.post(url, json=body("sim-fast?reasoning=6&cached=3"))).json()
    assert tokens.count(answer["choices"][0]["message"]["reasoning_content"]) == 6
    assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] == 6
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 3
    refused = (await client.post(url, json=body("sim-fast?refusal=1"))).json()["choices"][0]["message"]
    assert (refused["content"], bool(refused["refusal"])) == (None, True)


async def test_a_huge_answer_arrives_whole_at_a_slow_reader(simulator: SimulatedProvider) -> None:
    reply = await exchange(simulator, body("sim-fast?huge=5000000", stream=True))
    assert len(reply.text) == 5_000_000
    assert (await only_dispatch(simulator))["ended"] == "complete"


async def test_a_bomb_unpacks_to_its_size(simulator: SimulatedProvider) -> None:
    reply = await exchange(simulator, body("sim-fast?compressed_bomb=8388608", stream=True))
    assert reply.headers["content-encoding"] == "gzip"
    assert len(reply.content) < 100_000
    assert len(gzip.decompress(reply.content)) > 8_388_608


async def test_a_line_has_no_end(simulator: SimulatedProvider) -> None:
    reply = await exchange(simulator, body("sim-fast?endless_line=1000000", stream=True))
    assert max(map(len, reply.content.split(b"\n"))) > 900_000


# ------------------------------------------------------------------ hanging, leaving, occupying


async def leave(simulator: SimulatedProvider, request: dict[str, Any], *, after: bytes | None = None) -> None:
    """Sends a request, waits until it is there (or until `after` was read), and closes the connection."""
    url = httpx.URL(simulator.url)
    reader, writer = await asyncio.open_connection(url.host, url.port)
    data = json.dumps(request).encode()
    writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%b" % (len(data), data))
    if after is None:
        await simulator.until(lambda ledger: ledger["active"] > 0)
    else:
        async with asyncio.timeout(30):
            await reader.readuntil(after)
    writer.close()
    await writer.wait_closed()


@pytest.mark.parametrize(
    ("hang", "after", "status"),
    [("before_headers", None, None), ("before_first_byte", b"\r\n\r\n", 200), ("mid", b"finish_reason", 200)],
)
@pytest.mark.parametrize("stream", [True, False], ids=["stream", "plain"])
async def test_it_hangs_until_the_client_leaves(
    simulator: SimulatedProvider, hang: str, after: bytes | None, status: int | None, stream: bool
) -> None:
    if hang == "mid" and not stream:
        after = b'"choices"'
    await leave(simulator, body(f"sim-fast?hang={hang}&hang_after=1", stream=stream), after=after)
    dispatch = await only_dispatch(simulator)
    assert (dispatch["ended"], dispatch["status"]) == ("hung", status)


async def test_what_is_held_goes_on_when_the_faults_are_set_again(simulator: SimulatedProvider) -> None:
    await simulator.set_faults(hold=True)
    held = [asyncio.create_task(exchange(simulator, body("sim-fast", stream=stream))) for stream in (True, False)]
    await simulator.until(lambda ledger: ledger["active"] == 2)
    await asyncio.sleep(0.1)
    assert not any(task.done() for task in held)
    await simulator.set_faults()
    assert [reply.status for reply in await asyncio.gather(*held)] == [200, 200]


async def test_a_hang_with_an_end_goes_on(simulator: SimulatedProvider) -> None:
    started = time.monotonic()
    reply = await exchange(simulator, body("sim-fast?hang=mid&hang_for=0.2", stream=True))
    assert time.monotonic() - started > 0.2
    assert (reply.finishes, reply.framed) == (["stop"], True)


async def test_a_client_that_leaves_is_known_with_what_it_got(simulator: SimulatedProvider) -> None:
    await leave(simulator, body("sim-fast?pace=0.02&chunks=1000", stream=True), after=b'"content":" a')
    dispatch = await only_dispatch(simulator)
    assert dispatch["ended"] == "client_gone"
    assert 0 < dispatch["tokens_out"] < 1000


async def test_work_goes_on_after_its_client_has_left(simulator: SimulatedProvider) -> None:
    await leave(simulator, body("sim-fast?hang=before_headers&work_continues=0.3"))
    ledger = await simulator.until(lambda ledger: ledger["ended"] == {"hung": 1})
    assert ledger["active"] == 1
    dispatch = await only_dispatch(simulator)
    assert dispatch["released"] - dispatch["finished"] == pytest.approx(0.3, abs=0.15)


async def test_more_than_its_capacity_is_refused_at_once(
    simulator: SimulatedProvider, client: httpx.AsyncClient
) -> None:
    await simulator.set_faults(capacity=3, latency=0.3, retry_after=1)
    url = f"{simulator.url}/chat/completions"
    responses = await asyncio.gather(*(client.post(url, json=body(user=str(n))) for n in range(10)))
    assert sorted(response.status_code for response in responses) == [200] * 3 + [429] * 7
    assert {response.headers.get("retry-after") for response in responses} == {None, "1"}


async def test_the_peak_is_exact_under_load(simulator: SimulatedProvider, client: httpx.AsyncClient) -> None:
    slots = asyncio.Semaphore(5)
    url = f"{simulator.url}/chat/completions"

    async def one(number: int) -> int:
        async with slots:
            request = body("sim-fast?latency=0.002&chunks=10", stream=number % 2 == 0, user=str(number))
            return (await client.post(url, json=request)).status_code

    assert set(await asyncio.gather(*(one(number) for number in range(120)))) == {200}
    ledger = await simulator.ledger()
    assert (ledger["peak_concurrency"], ledger["completed"], ledger["active"]) == (5, 120, 0)
    assert ledger["tokens_out"] == 1200


async def test_a_reset_starts_again(simulator: SimulatedProvider, client: httpx.AsyncClient) -> None:
    await client.post(f"{simulator.url}/chat/completions", json=body())
    await simulator.reset()
    assert await simulator.dispatches() == []
    assert (await simulator.ledger())["dispatches"] == 0


# ------------------------------------------------------------------ a process of its own


async def test_a_process_serves_and_ends_on_sigterm(
    simulator_process: SimulatedProvider, client: httpx.AsyncClient
) -> None:
    answer = (await client.post(f"{simulator_process.url}/chat/completions", json=body())).json()
    async with simulated() as here:
        same = (await client.post(f"{here.url}/chat/completions", json=body())).json()
    assert answer["choices"] == same["choices"]


async def test_sigterm_ends_it_while_it_hangs(client: httpx.AsyncClient) -> None:
    async with simulated_process("--faults", "hang=before_headers") as simulator:
        call = asyncio.create_task(client.post(f"{simulator.url}/chat/completions", json=body()))
        await simulator.until(lambda ledger: ledger["active"] == 1)
        os.kill(simulator.pid, signal.SIGTERM)
        with pytest.raises(httpx.TransportError):
            await call
