"""
Every shipped provider, as its row says, on a real socket: where the request goes, with which credential, what is in it,
and an answer in that provider's own manner, hand-made after what it is known to send.

A row without a case here fails. Recorded traffic of the same providers runs in `test_wire_corpus.py` where it is there.
"""

from __future__ import annotations

import asyncio
import json
import urllib.parse
from decimal import Decimal
from pathlib import Path
from typing import Any

import msgspec
import pytest

from adapters.chat import ChatRequest, Message, Role, Text
from adapters.client import Upstream
from adapters.contract import Endpoint, UpstreamCall
from adapters.protocols import PROTOCOLS
from gateway import config
from gateway.provider import Provider
from tests.fakes.answers import gathered
from tests.fakes.raw_provider import Exchange, raw_provider

ROOT = Path(__file__).parents[2]
#: What a row must say whether it has to or not: a default there would be a guess.
TOLD = ("name", "protocol", "base_url", "first_byte_s", "gap_s", "reasoning_models", "cancel_source")
#: Its own word for a deployment, so that none can be listed.
NAMELESS = {"azure", "vllm"}
KEYLESS = {"ollama", "vllm"}

ENVIRON = {
    "AZURE_OPENAI_RESOURCE": "res",
    "CLOUDFLARE_ACCOUNT_ID": "acc",
    "CLOUDFLARE_API_TOKEN": "the-key",
    "VLLM_BASE_URL": "http://gpu.example:8000/v1",
    **{
        f"{name}_API_KEY": "the-key"
        for name in ("OPENAI", "AZURE_OPENAI", "ANTHROPIC", "GEMINI", "GROQ", "OPENROUTER", "TOGETHER", "MISTRAL")
    },
    **{f"{name}_API_KEY": "the-key" for name in ("DEEPSEEK", "CEREBRAS", "XAI", "NVIDIA", "OLLAMA", "OPENCODE")},
}


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """What one provider is asked and what it answers."""

    #: The upstream's name for a model, and the protocol that its route speaks.
    model: str
    protocol: str = "chat_completions"
    #: The request's path and its credential's header.
    path: str = "/v1/chat/completions"
    auth: str | None = "authorization: Bearer the-key"
    #: The host that its base URL names.
    host: str
    #: Its name for the limit of output tokens, dotted where it is inside.
    limit: str = "max_tokens"
    #: Fields that it is not sent, though they were asked for.
    without: tuple[str, ...] = ()
    answer: str
    input_tokens: int = 7
    output_tokens: int = 2
    cost: str | None = None
    reasoning: str = ""


def data(*chunks: str, done: str = "data: [DONE]\n\n") -> str:
    return "".join(f"data: {chunk}\n\n" for chunk in chunks) + done


HELLO = (
    '{"id":"c","model":"x","choices":[{"index":0,"delta":{"role":"assistant","content":"Hello"},"finish_reason":null}]}'
)
STOP = '{"id":"c","model":"x","choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}'
USAGE = '{"id":"c","model":"x","choices":[],"usage":{"prompt_tokens":7,"completion_tokens":2,"total_tokens":9}}'
PLAIN = data(HELLO, STOP, USAGE)
THOUGHT = '{"choices":[{"index":0,"delta":{"%s":"Hm."},"finish_reason":null}]}'

MESSAGES = "".join(
    f"event: {json.loads(body)['type']}\ndata: {body}\n\n"
    for body in (
        '{"type":"message_start","message":{"id":"m","model":"x","usage":{"input_tokens":7,"output_tokens":1}}}',
        '{"type":"content_block_start","index":0,"content_block":{"type":"text","text":""}}',
        '{"type":"ping"}',
        '{"type":"content_block_delta","index":0,"delta":{"type":"text_delta","text":"Hello"}}',
        '{"type":"content_block_stop","index":0}',
        '{"type":"message_delta","delta":{"stop_reason":"end_turn","stop_sequence":null},"usage":{"output_tokens":2}}',
        '{"type":"message_stop"}',
    )
)

CASES: dict[str, Case] = {
    "openai": Case(model="gpt-4o", host="api.openai.com", limit="max_completion_tokens", answer=PLAIN),
    "azure": Case(
        model="my-deployment",
        host="res.openai.azure.com",
        path="/openai/v1/chat/completions",
        auth="api-key: the-key",
        limit="max_completion_tokens",
        # The filter's verdict on the prompt comes first, without a choice.
        answer=data(
            '{"id":"","model":"","choices":[],"prompt_filter_results":[{"prompt_index":0}]}', HELLO, STOP, USAGE
        ),
    ),
    "anthropic": Case(
        model="claude-haiku-4-5",
        protocol="anthropic_messages",
        host="api.anthropic.com",
        path="/v1/messages",
        auth="x-api-key: the-key",
        answer=MESSAGES,
    ),
    "gemini": Case(
        model="gemini-2.5-flash",
        protocol="gemini",
        host="generativelanguage.googleapis.com",
        path="/v1beta/models/gemini-2.5-flash:streamGenerateContent?alt=sse",
        auth="x-goog-api-key: the-key",
        limit="generationConfig.maxOutputTokens",
        answer='data: {"candidates":[{"index":0,"content":{"role":"model","parts":[{"text":"Hel"}]}}],'
        '"usageMetadata":{"promptTokenCount":7}}\r\n\r\n'
        'data: {"candidates":[{"index":0,"content":{"role":"model","parts":[{"text":"lo"}]},"finishReason":"STOP"}],'
        '"usageMetadata":{"promptTokenCount":7,"candidatesTokenCount":2,"totalTokenCount":9},"modelVersion":"x"}\r\n\r\n',
    ),
    "groq": Case(
        model="llama-3.1-8b-instant",
        host="api.groq.com",
        path="/openai/v1/chat/completions",
        limit="max_completion_tokens",
        answer=data(
            HELLO.replace('"id":"c"', '"id":"c","x_groq":{"id":"req_1"}'),
            STOP.replace(
                '"id":"c"',
                '"id":"c","x_groq":{"id":"req_1","usage":{"prompt_tokens":7,"completion_tokens":2,"total_tokens":9}}',
            ),
            USAGE,
        ),
    ),
    "openrouter": Case(
        model="openai/gpt-4o-mini",
        host="openrouter.ai",
        path="/api/v1/chat/completions",
        answer=": OPENROUTER PROCESSING\n\n"
        + data(HELLO, STOP, USAGE.replace('"total_tokens":9', '"total_tokens":9,"cost":0.00014')),
        cost="0.00014",
    ),
    "nvidia": Case(model="openai/gpt-oss-20b", host="integrate.api.nvidia.com", answer=PLAIN),
    "cerebras": Case(
        model="gpt-oss-120b",
        host="api.cerebras.ai",
        limit="max_completion_tokens",
        answer=data(
            THOUGHT % "reasoning", HELLO, STOP, USAGE.replace('"choices":[]', '"choices":[],"time_info":{"t":1}')
        ),
        reasoning="Hm.",
    ),
    "deepseek": Case(
        model="deepseek-v4-flash",
        host="api.deepseek.com",
        path="/chat/completions",
        # It waits under load, and tells the usage with the end.
        answer=": keep-alive\n\n"
        + data(
            THOUGHT % "reasoning_content",
            HELLO,
            STOP[:-1] + ',"usage":{"prompt_tokens":7,"completion_tokens":2,"prompt_cache_hit_tokens":0}}',
        ),
        reasoning="Hm.",
    ),
    "mistral": Case(
        model="mistral-small-latest",
        host="api.mistral.ai",
        without=("stream_options", "user", "store"),
        answer=data(HELLO, STOP[:-1] + ',"usage":{"prompt_tokens":7,"completion_tokens":2,"total_tokens":9}}'),
    ),
    "together": Case(model="openai/gpt-oss-120b", host="api.together.xyz", answer=PLAIN),
    "xai": Case(model="grok-4.5", host="api.x.ai", limit="max_completion_tokens", answer=PLAIN),
    "ollama": Case(
        model="llama3.2",
        host="127.0.0.1",
        auth=None,
        answer=data(THOUGHT % "reasoning", HELLO, STOP, USAGE),
        reasoning="Hm.",
    ),
    "ollama_cloud": Case(model="gpt-oss:120b", host="ollama.com", answer=PLAIN),
    "vllm": Case(
        model="served",
        host="gpu.example",
        auth=None,
        answer=data(HELLO, STOP.replace('"finish_reason"', '"stop_reason":151645,"finish_reason"'), USAGE),
    ),
    "workers_ai": Case(
        model="@cf/meta/llama-3.3-70b-instruct-fp8-fast",
        host="api.cloudflare.com",
        protocol="workers_ai",
        path="/client/v4/accounts/acc/ai/run/@cf/meta/llama-3.3-70b-instruct-fp8-fast",
        # Padded, without a word for its end.
        answer=data(
            '{"response":"Hel","p":"abdehjlmopq"}',
            '{"response":"lo","p":"abd"}',
            '{"response":"","usage":{"prompt_tokens":7,"completion_tokens":2,"total_tokens":9}}',
        ),
    ),
    "opencode_zen": Case(
        model="deepseek-v4-flash-free",
        host="opencode.ai",
        path="/zen/v1/chat/completions",
        # The cost comes after the end.
        answer=data(HELLO, STOP, USAGE) + 'data: {"choices":[],"cost":"0"}\n\n',
        cost="0",
    ),
}

#: Models of a provider that its row gives another protocol.
IN_OTHER_WORDS: dict[str, Case] = {
    "opencode_zen": Case(
        model="claude-sonnet-4-5",
        protocol="anthropic_messages",
        host="opencode.ai",
        path="/zen/v1/messages",
        answer=MESSAGES,
    ),
}


def shipped() -> dict[str, Any]:
    return config._shipped()


def providers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Provider]:
    monkeypatch.chdir(tmp_path)
    return dict(config.load(None, ENVIRON).providers)


def test_every_row_has_a_case_and_every_case_a_row() -> None:
    assert set(CASES) == set(shipped())


@pytest.mark.parametrize("name", shipped())
def test_a_row_says_what_a_default_would_only_guess(name: str) -> None:
    row = shipped()[name]
    assert [key for key in TOLD if not row.get(key)] == []
    assert name in NAMELESS or row["models"]
    assert name in KEYLESS or row["credentials"]
    assert all(variable.isupper() for variable in row.get("credentials", []))
    assert row["protocol"] in PROTOCOLS
    # Who says so is told with what is said.
    assert "cancel_confirms_after_s" not in row or row["cancel_source"].startswith("https://")
    assert "free" not in row or row["free_source"].startswith("https://")
    # A hosted endpoint is not spoken to in the clear.
    assert row["base_url"].startswith(("https://", "http://127.0.0.1", "{"))


@pytest.mark.parametrize("name", shipped())
def test_every_provider_is_in_the_table_of_the_docs(name: str) -> None:
    row = shipped()[name]
    table = (ROOT / "docs/providers.md").read_text()
    [line] = [line for line in table.splitlines() if line.startswith(f"| `{name}` |")]
    for word in (row["name"], f"`{row['protocol']}`", *(f"`{v}`" for v in row.get("credentials", []))):
        assert word in line


async def ask(endpoint: Endpoint, case: Case) -> tuple[Exchange, dict[str, Any]]:
    async def answer(exchange: Exchange) -> None:
        await exchange.begin()
        await exchange.chunk(case.answer.encode())
        await exchange.end()

    request = ChatRequest(
        messages=(Message(role=Role.USER, content=(Text(text="Hi", cache="5m"),)),),
        max_output_tokens=50,
        end_user="u",
        store=False if case.without else None,
    )
    async with raw_provider(answer) as provider, Upstream() as upstream:
        path = urllib.parse.urlsplit(endpoint.base_url).path
        there = msgspec.structs.replace(endpoint, base_url=f"http://127.0.0.1:{provider.port}{path}")
        deadline = asyncio.get_running_loop().time() + 5
        call = UpstreamCall(endpoint=there, model=case.model, request=request, deadline=deadline)
        events: list[Any] = []
        async with upstream.stream(call) as batches:
            async for batch in batches:
                events += batch
        return provider.requests[0], gathered(events)


@pytest.mark.parametrize(
    ("name", "case"),
    [
        pytest.param(name, case, id=f"{name}-{case.model}")
        for table in (CASES, IN_OTHER_WORDS)
        for name, case in table.items()
    ],
)
async def test_a_provider_is_asked_as_its_row_says_and_its_answer_is_read_to_its_proof(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, case: Case
) -> None:
    provider = providers(tmp_path, monkeypatch)[name].for_model(case.model)
    endpoint = provider.endpoint
    assert endpoint is not None, provider.missing
    assert endpoint.protocol == case.protocol
    assert urllib.parse.urlsplit(endpoint.base_url).hostname == case.host
    sent, got = await ask(endpoint, case)
    head = sent.head.decode().lower()
    assert head.startswith(f"post {case.path.lower()} ")
    if case.auth is None:
        assert "authorization" not in head
    else:
        assert f"\r\n{case.auth.lower()}\r\n" in head
        # In one header and nowhere else: neither path nor body.
        assert head.count("the-key") == 1
        assert b"the-key" not in sent.body
    body = json.loads(sent.body)
    found = body
    for part in case.limit.split("."):
        found = found[part]
    assert found == 50
    assert [field for field in case.without if field in body] == []
    assert got["finished"]
    choice = got["choices"]["0"]
    assert (choice["text"], choice["reasoning"]) == ("Hello", case.reasoning)
    assert choice["end"][0] == "stop"
    assert (got["usage"]["input_total"], got["usage"]["output_total"]) == (case.input_tokens, case.output_tokens)
    assert (None if got["cost"] is None else Decimal(got["cost"])) == (
        None if case.cost is None else Decimal(case.cost)
    )


async def test_another_provider_is_configuration_only_as_the_docs_show_it(tmp_path: Path) -> None:
    shown = (ROOT / "docs/providers.md").read_text().partition("## Another provider")[2]
    text = shown.partition("```toml\n")[2].partition("```")[0]
    file = tmp_path / "tollbridge.toml"
    file.write_text(text)
    settings = config.load(file, {"ACME_API_KEY": "the-key", "ACME_HOST": "acme.example"})
    case = Case(
        model="acme-large",
        host="acme.example",
        path="/api/v1/chat/completions",
        auth="x-acme-key: the-key",
        answer=PLAIN,
    )
    endpoint = settings.providers["acme"].endpoint
    assert endpoint is not None
    assert endpoint.base_url == "https://acme.example/api/v1"
    sent, got = await ask(endpoint, case)
    head = sent.head.decode().lower()
    assert head.startswith("post /api/v1/chat/completions ")
    assert "x-acme-key: the-key" in head
    body = json.loads(sent.body)
    assert body["max_tokens"] == 50
    assert "store" not in body
    assert got["finished"]
    assert got["choices"]["0"]["text"] == "Hello"
    small = settings.providers["acme"].for_model("acme-small")
    assert small.cannot == {"audio", "n", "images", "tools"}
