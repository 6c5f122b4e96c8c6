"""
No caller makes the gateway connect anywhere: security checklist, item 1, on a whole gateway as a process.

A canary listens on loopback under IPv4 and IPv6. Every spelling of its address is put wherever a request has room for
one: bodies, nested overrides, headers, queries, paths, request lines, URLs of images, files and webhooks, redirects of
the provider, and the proxy variables of the gateway's own environment. However each is answered, the canary must not
have been connected to; at the end it is shown to count connections.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import urllib.parse
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

from tests.fakes.gateway_process import KEY, GatewayProcess, batch_line, gateway_process
from tests.fakes.raw_provider import Exchange, raw_provider

#: Spellings of a loopback address, with what parsers have been seen to take for one.
HOSTS = [
    "127.0.0.1",
    "127.1",
    "127.0.1",
    "2130706433",
    "0x7f000001",
    "0x7f.0.0.1",
    "0177.0.0.1",
    "017700000001",
    "127.0.0.1.",
    "0.0.0.0",
    "0",
    "[::1]",
    "[::]",
    "[::ffff:127.0.0.1]",
    "[::ffff:7f00:1]",
    "[0:0:0:0:0:ffff:127.0.0.1]",
    "[64:ff9b::7f00:1]",
    "localhost",
    "LOCALHOST",
    "localhost.",
    "user@127.0.0.1",
    "user:pass@localhost",
    "hooks.example.com@127.0.0.1",
    "hooks.example.com%2540127.0.0.1",
    "127.0.0.1%00.example.com",
    "%31%32%37.0.0.1",
    "\u2460\u2461\u2466.0.0.1",
    "127\u30020\u30020\u30021",
    "0x7F000001",
    "00000177.0.0.1",
    "0x7f.1",
    "127.0.0.1.nip.io@127.0.0.1",
    "[::127.0.0.1]",
    "[0:0:0:0:0:0:0:1]",
    "[::1%25lo]",
    "[::ffff:0:127.0.0.1]",
    "[2002:7f00:1::]",
    "localhost.localdomain",
    "LocalHost%2e",
    "127.0.0.1%2523",
]
URLS = [
    "http://{host}:{port}/",
    "https://{host}:{port}/v1",
    "//{host}:{port}",
    "http:\\\\{host}:{port}\\",
    "{host}:{port}",
]
FIELDS = [
    "api_base",
    "base_url",
    "endpoint",
    "url",
    "host",
    "proxy",
    "azure_endpoint",
    "custom_llm_provider",
    "webhook_url",
    "callback_url",
    "metadata.api_base",
    "litellm_params.api_base",
    "extra_body.api_base",
    "extra_headers.host",
    "provider.base_url",
    "user_config.model_list.api_base",
    "model",
]
HEADERS = [
    "host",
    "x-api-base",
    "x-base-url",
    "api-base",
    "openai-base-url",
    "x-litellm-api-base",
    "x-tollbridge-api-base",
    "x-tollbridge-base-url",
    "x-tollbridge-allowed-providers",
    "x-portkey-custom-host",
    "helicone-target-url",
    "x-forwarded-host",
    "x-original-url",
    "x-rewrite-url",
    "forwarded",
    "proxy",
    "referer",
]
QUERIES = ["api_base", "base_url", "url", "api-version", "proxy", "beta"]
#: What is under way at once.
AT_ONCE = 8
ANSWERS = {
    "/chat/v1/chat/completions": {
        "id": "x",
        "object": "chat.completion",
        "created": 1,
        "model": "up",
        "choices": [{"index": 0, "message": {"role": "assistant", "content": "Hi"}, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 3, "completion_tokens": 1, "total_tokens": 4},
    },
    "/messages/v1/messages": {
        "id": "msg_1",
        "type": "message",
        "role": "assistant",
        "model": "up",
        "content": [{"type": "text", "text": "Hi"}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {"input_tokens": 3, "output_tokens": 1},
    },
}
TOML = """
[providers.chat]
protocol = "chat_completions"
base_url = "http://127.0.0.1:{port}/chat/v1"
[providers.messages]
protocol = "anthropic_messages"
base_url = "http://127.0.0.1:{port}/messages/v1"
[providers.third]
protocol = "gemini"
base_url = "http://127.0.0.1:{port}/gemini"
[providers.redirects]
protocol = "chat_completions"
base_url = "http://127.0.0.1:{port}/redirects"
[models.chat]
providers = ["chat"]
[models.messages]
providers = ["messages"]
[models.gemini]
providers = ["third"]
[models.redirects]
providers = ["redirects"]
[groups."http://127.0.0.1:{port}"]
concurrency = 50
queue = 500
failure_threshold = 100000
[routing]
backoff_s = []
[webhooks]
allowed_hosts = [{hosts}]
secret_env = "HOOK_SECRET"
allow_http = true
poll_s = 0.1
"""
#: Names that the system's resolver takes for loopback, where an operator allows them.
REBOUND = ["localhost", "127.1", "2130706433", "0x7f000001", "0"]


class Canary:
    def __init__(self) -> None:
        self.port = 0
        self.connections = 0

    def count(self, _reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        writer.close()


@asynccontextmanager
async def canary() -> AsyncIterator[Canary]:
    found = Canary()
    four = await asyncio.start_server(found.count, "127.0.0.1", 0)
    found.port = four.sockets[0].getsockname()[1]
    servers = [four]
    with contextlib.suppress(OSError):
        # A machine without IPv6 has nothing there to connect to.
        servers.append(await asyncio.start_server(found.count, "::1", found.port))
    try:
        yield found
    finally:
        for server in servers:
            server.close()
            await server.wait_closed()


def spellings(port: int) -> list[str]:
    return [form.format(host=host, port=port) for host, form in itertools.product(HOSTS, URLS)]


def nested(field: str, value: str) -> dict[str, Any]:
    head, dot, rest = field.partition(".")
    return {head: nested(rest, value) if dot else value}


def chat(model: str = "chat", **fields: Any) -> dict[str, Any]:
    return {"model": model, "messages": [{"role": "user", "content": "what is a bridge?"}], **fields}


def with_files(url: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Requests that name a URL as a part of what is asked: it is the provider's to fetch."""
    for model in ("chat", "messages", "gemini"):
        image = {"type": "image_url", "image_url": {"url": url}}
        yield "/v1/chat/completions", {"model": model, "messages": [{"role": "user", "content": [image]}]}
        source = {"type": "image", "source": {"type": "url", "url": url}}
        yield "/v1/messages", {"model": model, "max_tokens": 9, "messages": [{"role": "user", "content": [source]}]}
        parts = [{"type": "input_image", "image_url": url}, {"type": "input_file", "file_url": url}]
        yield "/v1/responses", {"model": model, "input": [{"role": "user", "content": parts}]}


def attempts(port: int) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Where it stands, the path, and the request. Each spelling several times, at places that change."""
    every = spellings(port)
    places: list[tuple[str, str]] = [
        *(("body", name) for name in FIELDS),
        *(("header", name) for name in HEADERS),
        *(("query", name) for name in QUERIES),
        *(("job", name) for name in ("webhook_url", "url", "model")),
    ]
    for number, url in enumerate(every):
        for step in range(1 + number % 2):
            kind, name = places[(number * 2 + step) % len(places)]
            match kind:
                case "body":
                    yield kind, "/v1/chat/completions", {"json": chat() | nested(name, url)}
                case "header":
                    sent = url.encode() if name != "host" else url.encode("ascii", "ignore") or b"x"
                    yield kind, "/v1/chat/completions", {"json": chat(), "headers": [(name.encode(), sent)]}
                case "query":
                    query = urllib.parse.urlencode({name: url})
                    yield kind, f"/v1/chat/completions?{query}", {"json": chat()}
                case _ if name == "model":
                    yield kind, "/v1/jobs", {"json": batch_line(url, number)}
                case _:
                    yield kind, "/v1/jobs", {"json": batch_line("chat", number) | {name: url}}
    for number, url in enumerate(every):
        for path, body in itertools.islice(with_files(url), number % 9, number % 9 + 1):
            yield "file", path, {"json": body}


async def raw(gateway: GatewayProcess, line: str) -> int:
    """The status that a request line gets."""
    at = urllib.parse.urlsplit(gateway.rest_url)
    reader, writer = await asyncio.open_connection(at.hostname, at.port)
    try:
        writer.write(f"{line}\r\nhost: x\r\nauthorization: Bearer {KEY}\r\nconnection: close\r\n\r\n".encode())
        answer = await asyncio.wait_for(reader.read(), 30)
    finally:
        writer.close()
    return int(answer.split(b" ")[1]) if answer else 0


async def test_no_spelling_of_an_address_anywhere_in_a_request_makes_the_gateway_connect_there(database_url, tmp_path):
    async with canary() as listener:
        redirects = itertools.cycle(spellings(listener.port))

        async def provider(exchange: Exchange) -> None:
            path = exchange.head.split(b" ")[1].decode()
            if path.startswith("/redirects"):
                where = next(redirects).encode("ascii", "ignore").decode()
                status = next(statuses)
                await exchange.answer(b"", status=status, headers={"location": where})
            elif path in ANSWERS:
                await exchange.answer(json.dumps(ANSWERS[path]).encode())
            else:
                await exchange.answer(b'{"error":{"message":"no"}}', status=400)

        statuses = itertools.cycle((301, 302, 303, 307, 308))
        proxy = f"http://127.0.0.1:{listener.port}"
        hosts = ", ".join(f'"{host}:{listener.port}"' for host in REBOUND)
        async with (
            raw_provider(provider) as upstream,
            gateway_process(
                tmp_path,
                TOML.format(port=upstream.port, hosts=hosts),
                TOLLBRIDGE_DATABASE_URL=database_url,
                HOOK_SECRET="whsec_MDEyMzQ1Njc4OWFiY2RlZjAxMjM0NTY3ODlhYmNkZWY=",
                NO_PROXY="",
                no_proxy="",
                HTTP_PROXY=proxy,
                http_proxy=proxy,
                HTTPS_PROXY=proxy,
                ALL_PROXY=proxy,
                all_proxy=proxy,
            ) as gateway,
            gateway.rest() as client,
        ):
            answered: Counter[tuple[str, int]] = Counter()
            waiting = iter(list(attempts(listener.port)))

            async def asks() -> None:
                for kind, path, request in waiting:
                    headers = [(b"authorization", f"Bearer {KEY}".encode()), *request.pop("headers", [])]
                    answer = await client.post(path, headers=headers, **request)
                    answered[kind, answer.status_code] += 1
                    assert answer.status_code < 500 or kind == "file", (kind, path, request, answer.text)

            await asyncio.gather(*(asks() for _ in range(AT_ONCE)))
            for url in spellings(listener.port)[::10]:
                for line in (f"GET {url}", f"POST {url}v1/chat/completions", f"CONNECT {url}"):
                    sent = line.encode("ascii", "ignore").decode()
                    answered["line", await raw(gateway, f"{sent} HTTP/1.1")] += 1
            for _ in range(len(HOSTS)):
                answer = await client.post("/v1/chat/completions", json=chat("redirects"))
                answered["redirect", answer.status_code] += 1
            # Allowed by name, and not public once the name is looked up: nothing is sent, and it is tried in earnest.
            for host in REBOUND:
                told = batch_line("chat", 1, webhook_url=f"http://{host}:{listener.port}/hook")
                answered["rebound", (await client.post("/v1/jobs", json=told)).status_code] += 1
            taken = answered["rebound", 202]
            async with asyncio.timeout(60):
                while len({line["webhook_id"] for line in gateway.lines("webhooks.failed")}) < taken:  # noqa: ASYNC110
                    await asyncio.sleep(0.1)

        assert listener.connections == 0, answered
        # It was no empty exercise: some of each kind were answered, and the provider got what is its to fetch.
        assert sum(answered.values()) > 450
        assert sum(count for (kind, status), count in answered.items() if (kind, status) == ("body", 200)) > 50
        for kind in ("body", "header", "query", "job", "line"):
            assert any(got == kind and 400 <= status < 500 for got, status in answered), kind
        assert not any(kind == "redirect" and status == 200 for kind, status in answered)
        assert taken >= 1
        given = [request.body for request in upstream.requests if b"image" in request.body]
        assert sum(str(listener.port).encode() in body for body in given) > 20
        # And the canary counts.
        _, writer = await asyncio.open_connection("localhost", listener.port)
        writer.close()
        async with asyncio.timeout(20):
            while listener.connections == 0:  # noqa: ASYNC110
                await asyncio.sleep(0.01)


def test_the_spellings_are_many_and_no_two_are_the_same():
    every = spellings(8080)
    assert len(every) == len(set(every)) >= 200
    assert len(list(attempts(8080))) > 400
