"""What passes between a vendor's client and a provider: the whole line on real sockets, a provider of raw bytes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from structlog.testing import capture_logs

from gateway.rest import chat, counting, embeddings
from gateway.rest.app import RestSettings, serve
from gateway.rest.streams import StreamSettings
from tests.fakes.line import FakeKeys, not_here
from tests.fakes.raw_provider import Exchange, Handler, RawProvider, raw_provider
from tests.fakes.whole_line import WholeLine, whole_line

TOML = """
[providers.p]
protocol = "{protocol}"
base_url = "http://127.0.0.1:{port}/v1"
headers = {{ authorization = "Bearer provider-canary-key", "Anthropic-Beta" = "ours-2025-01-01" }}

[providers.q]
protocol = "chat_completions"
base_url = "http://127.0.0.1:{port}/second"

[providers.other]
protocol = "anthropic_messages"
base_url = "http://127.0.0.1:{port}/v1"

[models.m]
providers = [{{ provider = "p", model = "upstream" }}]
price = {{ input = "2.50", output = "10.00" }}

[models.e]
providers = [
    {{ provider = "other", model = "upstream" }},
    {{ provider = "p", model = "upstream" }},
    {{ provider = "q", model = "upstream" }},
]
price = {{ input = "0.02", output = "0" }}
"""
KEY = {"authorization": "Bearer good"}
QUESTION = "the-quick-brown-canary"
CHAT = {
    "model": "m",
    "messages": [{"role": "user", "content": QUESTION, "future": [1]}],
    "unheard_of": {"b": 1.50, "a": "\u00e9"},
}
ANSWER = (
    b'{"id":"theirs","object":"chat.completion","created":1,"model":"upstream-2026","unheard_of": {"x" :1},"choices":'
    b'[{"index":0,"message":{"role":"assistant","content":"Hi"},"finish_reason":"stop"}],'
    b'"usage":{"prompt_tokens":3,"completion_tokens":1,"total_tokens":4}}'
)
EVENTS = [
    b'data: {"id":"theirs","choices":[{"index":0,"delta":{"role":"assistant","content":""}}],"new":1}\n\n',
    b'data: {"id":"theirs","choices":[{"index":0,"delta":{"content":"Hi"}}],"new":2}\n\n',
    b'data: {"id":"theirs","choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}\n\n',
    b'data: {"id":"theirs","choices":[],"usage":{"prompt_tokens":3,"completion_tokens":1,"total_tokens":4}}\n\n',
]
DONE = b"data: [DONE]\n\n"


class World:
    def __init__(self, line: WholeLine, provider: RawProvider, client: aiohttp.ClientSession) -> None:
        self.line = line
        self.provider = provider
        self.client = client

    async def ask(
        self, path: str, body: Any, headers: Mapping[str, str] = {}, **given: Any
    ) -> tuple[int, bytes, Mapping[str, str]]:
        async with self.client.post(path, json=body, headers={**KEY, **headers}, **given) as response:
            return response.status, await response.read(), response.headers


@asynccontextmanager
async def world(
    url: str, tmp_path: Path, handler: Handler, *, protocol: str = "chat_completions"
) -> AsyncIterator[World]:
    async with AsyncExitStack() as stack:
        provider = await stack.enter_async_context(raw_provider(handler))
        toml = TOML.format(port=provider.port, protocol=protocol)
        line = await stack.enter_async_context(whole_line(url, tmp_path, toml))
        routes = [
            *chat.routes(line=line.pipeline, settings=StreamSettings(), in_background=not_here),
            *embeddings.routes(line=line.pipeline),
            *counting.routes(line=line.pipeline),
        ]
        server = await stack.enter_async_context(serve(RestSettings(port=0, drain_s=1.0), routes, FakeKeys()))
        client = await stack.enter_async_context(aiohttp.ClientSession(f"http://127.0.0.1:{server.port}"))
        yield World(line, provider, client)


async def whole(exchange: Exchange) -> None:
    await exchange.answer(ANSWER)


async def streamed(exchange: Exchange) -> None:
    await exchange.begin()
    joined = b"".join(EVENTS) + DONE
    # At splits that are none of its own.
    for at in range(0, len(joined), 37):
        await exchange.chunk(joined[at : at + 37])
        await asyncio.sleep(0)
    await exchange.end()


async def test_bodies_of_one_protocol_pass_untouched_in_both_directions(database_url, tmp_path):
    async with world(database_url, tmp_path, whole) as there:
        status, body, headers = await there.ask("/v1/chat/completions", CHAT)
        [sent] = there.provider.requests
        await there.line.settled()
        [row] = await there.line.invocations()
    assert (status, body) == (200, ANSWER)
    received = json.loads(sent.body)
    assert received == {**CHAT, "model": "upstream"}
    assert b'"unheard_of":{"b": 1.5, "a": "\\u00e9"}' in sent.body
    assert headers["x-tollbridge-cost-usd"] == "0.0000175"
    assert (row["state"], str(row["usd"].normalize()), row["input_total"]) == ("charged", "0.0000175", 3)


async def test_a_deployment_in_the_path_is_the_model_whatever_the_body_says(database_url, tmp_path):
    async with world(database_url, tmp_path, whole) as there:
        for model in ({"model": "gpt-4o"}, {"model": None}, {}):
            body = {"messages": CHAT["messages"], **model}
            status, answer, _ = await there.ask("/openai/deployments/m/chat/completions?api-version=2024-10-21", body)
            assert (status, answer) == (200, ANSWER), answer
        assert {json.loads(sent.body)["model"] for sent in there.provider.requests} == {"upstream"}
        status, answer, _ = await there.ask("/openai/deployments/no%2Fbody/chat/completions", CHAT)
        assert (status, json.loads(answer)["error"]["code"]) == (404, "model_not_found")
        status, answer, _ = await there.ask("/openai/deployments/a%00b/chat/completions", CHAT)
        assert (status, json.loads(answer)["error"]["param"]) == (400, "path")


async def test_what_no_route_has_is_told_with_the_field_that_chose_it_and_never_an_empty_one(database_url, tmp_path):
    async with world(database_url, tmp_path, whole, protocol="anthropic_messages") as there:
        status, answer, _ = await there.ask("/v1/embeddings", {"model": "m", "input": "x"})
        error = json.loads(answer)["error"]
        assert (status, error["code"], error["param"]) == (400, "unsupported_field", "model")
        for body in (b"{", b"[]"):
            async with there.client.post(
                "/v1/embeddings", data=body, headers={**KEY, "content-type": "application/json"}
            ) as response:
                assert (await response.json())["error"]["param"] is None
        assert there.provider.requests == []


async def test_a_refusal_has_the_providers_words_for_the_caller_alone_and_never_our_key(database_url, tmp_path):
    words = f"Invalid 'temperature' beside '{QUESTION}' under provider-canary-key: at most 2"

    async def refuses(exchange: Exchange) -> None:
        body = {"error": {"message": words, "type": "invalid_request_error", "param": "temperature", "code": None}}
        await exchange.answer(json.dumps(body).encode(), status=400)

    async with world(database_url, tmp_path, refuses) as there:
        with capture_logs() as logs:
            for path, body in (("/v1/chat/completions", CHAT), ("/v1/messages", {**CHAT, "max_tokens": 9})):
                status, answer, _ = await there.ask(path, {k: v for k, v in body.items() if k != "unheard_of"})
                error = json.loads(answer)["error"]
                message = error["message"]
                assert status == 400
                # The provider's name for the field is also the caller's only where their formats are the same.
                assert error.get("param") == ("temperature" if path == "/v1/chat/completions" else None)
                assert "Invalid 'temperature' beside" in message
                assert "at most 2" in message
                assert b"provider-canary-key" not in answer
        await there.line.settled()
        rows = await there.line.rows("select row_to_json(i)::text as kept from control.invocation i")
    assert rows
    for kept in (str(logs), str([row["kept"] for row in rows])):
        assert QUESTION not in kept
        assert "temperature' beside" not in kept


async def test_a_field_that_the_provider_names_apart_is_in_the_message_too(database_url, tmp_path):
    """Many clients show nothing but the message; and in another format than the provider's it is no `param`."""

    async def refuses(exchange: Exchange) -> None:
        body = {"error": {"message": "Expected at most 2.", "type": "invalid_request_error", "param": "temperature"}}
        await exchange.answer(json.dumps(body).encode(), status=400)

    async with world(database_url, tmp_path, refuses) as there:
        for path, body in (
            ("/v1/chat/completions", {"model": "m", "messages": CHAT["messages"]}),
            ("/v1/messages", {"model": "m", "messages": CHAT["messages"], "max_tokens": 9}),
            ("/v1/responses", {"model": "m", "input": "hi"}),
        ):
            status, answer, _ = await there.ask(path, body)
            message = json.loads(answer)["error"]["message"]
            assert status == 400
            assert "temperature" in message
            assert "Expected at most 2." in message


async def test_a_stream_of_one_protocol_passes_in_the_providers_own_bytes(database_url, tmp_path):
    async with world(database_url, tmp_path, streamed) as there:
        options = {"stream": True, "stream_options": {"include_usage": True}}
        status, body, _ = await there.ask("/v1/chat/completions", {**CHAT, **options})
        _, without_usage, _ = await there.ask("/v1/chat/completions", {**CHAT, "stream": True})
        await there.line.settled()
        rows = await there.line.invocations()
        await there.line.audit()
    assert status == 200
    before, comment, end = body.partition(b": tollbridge ")
    assert before == b"".join(EVENTS)
    assert comment
    assert end.endswith(b"\n\n" + DONE)
    assert without_usage.partition(b": tollbridge ")[0] == b"".join(EVENTS[:3])
    # What the caller did not ask to be told is known all the same.
    assert [row["input_total"] for row in rows] == [3, 3]


async def test_nothing_of_the_callers_headers_reaches_a_provider_but_plain_betas(database_url, tmp_path):
    answer = (
        b'{"id":"m","type":"message","role":"assistant","model":"x","content":[{"type":"text","text":"Hi"}],'
        b'"stop_reason":"end_turn","stop_sequence":null,"usage":{"input_tokens":3,"output_tokens":1}}'
    )

    async def messages(exchange: Exchange) -> None:
        await exchange.answer(answer)

    body = {"model": "m", "max_tokens": 10, "messages": [{"role": "user", "content": "hi"}]}
    async with world(database_url, tmp_path, messages, protocol="anthropic_messages") as there:
        headers = {
            "anthropic-version": "2023-06-01",
            "anthropic-beta": "theirs-2026-01-01,ours-2025-01-01",
            "cookie": "canary=1",
            "x-forwarded-host": "canary.example",
            "x-stainless-canary": "1",
            "openai-organization": "canary",
            "te": "trailers",
        }
        status, got, _ = await there.ask("/v1/messages", body, headers)
        [sent] = there.provider.requests
    assert (status, got) == (200, answer)
    head = sent.head.lower()
    assert b"canary" not in head.replace(b"provider-canary-key", b"")
    assert b"good" not in head
    betas = [line for line in head.split(b"\r\n") if line.startswith(b"anthropic-beta:")]
    assert betas == [b"anthropic-beta: ours-2025-01-01,theirs-2026-01-01"]


@pytest.mark.parametrize("path", chat.PATHS)
async def test_no_word_of_a_caller_makes_the_gateway_call_elsewhere(database_url, tmp_path, path):
    """Canary: a listener that nobody may connect to."""
    connected: list[object] = []

    async def canary(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connected.append(writer)
        writer.close()

    listener = await asyncio.start_server(canary, "127.0.0.1", 0)
    port = listener.sockets[0].getsockname()[1]
    spellings = [
        f"http://{host}:{port}/v1"
        for host in (
            "127.0.0.1",
            "localhost",
            "2130706433",
            "0x7f000001",
            "0177.1",
            "[::ffff:127.0.0.1]",
            "x@127.0.0.1",
        )
    ]
    names = ("base_url", "api_base", "api_url", "endpoint", "host", "proxy", "url", "api_key", "custom_llm_provider")
    bodies: Mapping[str, dict[str, Any]] = {
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
        "/v1/responses": {"input": "hi"},
        "/v1/messages": {"max_tokens": 10, "messages": [{"role": "user", "content": "hi"}]},
    }

    async def refuses(exchange: Exchange) -> None:
        await exchange.answer(b'{"error":{"message":"no","code":"bad"}}', status=400)

    async def redirects(exchange: Exchange) -> None:
        await exchange.answer(b"", status=307, headers={"location": f"http://127.0.0.1:{port}/v1/chat/completions"})

    async with listener:
        async with world(database_url, tmp_path, refuses) as there:
            for spelling in spellings:
                overrides: dict[str, Any] = dict.fromkeys(names, spelling)
                body = {"model": "m", **bodies[path], **overrides, "extra_body": overrides, "litellm_params": overrides}
                assert (await there.ask(path, body))[0] == 400
                for model in (spelling, f"p/{spelling}", f"openai/{spelling}"):
                    assert (await there.ask(path, {**bodies[path], "model": model}))[0] == 404
                for name in ("base-url", "api-base", "endpoint", "proxy", "provider-url"):
                    headers = {f"x-tollbridge-{name}": spelling}
                    assert (await there.ask(path, {"model": "m", **bodies[path]}, headers))[0] == 400
                for name in ("forwarded", "x-forwarded-host", "x-original-url", "x-rewrite-url", "host"):
                    status, _, _ = await there.ask(path, {"model": "m", **bodies[path]}, {name: spelling})
                    assert status == 400  # by the provider
                status, _, _ = await there.ask(path, {"model": "m", **bodies[path]}, params={"api_base": spelling})
                assert status == 400
        async with world(database_url, tmp_path, redirects) as there:
            assert (await there.ask(path, {"model": "m", **bodies[path]}))[0] == 502
    assert connected == []


async def test_a_providers_error_is_told_without_its_key_and_without_the_question(database_url, tmp_path):
    async def leaks(exchange: Exchange) -> None:
        said = f"invalid: {QUESTION} for Bearer provider-canary-key at sk-provider-canary-key"
        await exchange.answer(json.dumps({"error": {"message": said, "code": "bad"}}).encode(), status=400)

    with capture_logs() as logs:
        async with world(database_url, tmp_path, leaks) as there:
            answers = [await there.ask("/v1/chat/completions", {**CHAT, "stream": stream}) for stream in (False, True)]
            await there.line.settled()
            rows = await there.line.invocations()
    for status, body, headers in answers:
        assert status == 400
        assert b"provider-canary-key" not in body
        assert "canary" not in str(headers)
    assert "provider-canary-key" not in str(logs)
    assert "canary" not in str([dict(row) for row in rows])


async def test_embeddings_fail_over_and_pass_over_who_has_none_and_are_settled(database_url, tmp_path):
    vectors = (
        b'{"object":"list","data":[{"object":"embedding","index":0,"embedding":[0.5,-0.25]}],"model":"u",'
        b'"usage":{"prompt_tokens":1000,"total_tokens":1000}}'
    )

    async def second_alone(exchange: Exchange) -> None:
        if b"/second/embeddings" in exchange.head:
            await exchange.answer(vectors)
        else:
            await exchange.answer(b'{"error":{"message":"busy"}}', status=503)

    async with world(database_url, tmp_path, second_alone) as there:
        body = {"model": "e", "input": "hello"}
        status, got, headers = await there.ask("/v1/embeddings", body)
        packed = json.loads((await there.ask("/v1/embeddings", {**body, "encoding_format": "base64"}))[1])
        await there.line.settled()
        rows = await there.line.invocations()
        await there.line.audit()
    assert (status, got) == (200, vectors)
    assert headers["x-tollbridge-route"] == "q/upstream"
    assert headers["x-tollbridge-attempts"] == "2"
    assert headers["x-tollbridge-cost-usd"] == "0.00002"
    assert packed["data"][0]["embedding"] == "AAAAPwAAgL4="
    assert [(row["provider"], row["state"]) for row in rows[:2]] == [("p", "zero"), ("q", "charged")]
    assert "unsupported_field: model" in rows[0]["left_out"]
    assert (rows[1]["input_total"], rows[1]["output_total"]) == (1000, 0)


async def test_a_count_of_tokens_is_the_providers_and_is_settled_as_zero(database_url, tmp_path):
    async def counts(exchange: Exchange) -> None:
        if b"/messages/count_tokens" in exchange.head:
            await exchange.answer(b'{"input_tokens": 2095}')
        else:
            exchange.reset()

    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
    async with world(database_url, tmp_path, counts, protocol="anthropic_messages") as there:
        status, got, headers = await there.ask("/v1/messages/count_tokens", body)
        [sent] = there.provider.requests
        free = await there.ask("/v1/messages/count_tokens", body, {"x-tollbridge-max-cost-usd": "0"})
        await there.line.settled()
        rows = await there.line.invocations()
        slots = await there.line.slots()
        await there.line.audit()
    assert (status, json.loads(got)) == (200, {"input_tokens": 2095})
    assert json.loads(sent.body) == {**body, "model": "upstream"}
    assert headers["x-tollbridge-cost-usd"] == "0"
    assert free[0] == 200
    assert [(row["state"], row["cost_reason"], row["status"]) for row in rows] == [
        ("zero", "free_of_charge", "success")
    ] * 2
    assert set(slots) <= {"released", "ended"}
