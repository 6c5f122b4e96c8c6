"""The simulated provider in each protocol it speaks: what it answers, what it refuses, and how it fails."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import msgspec
import pytest

from tests.fakes import simulated as fakes
from tests.fakes.simulated import SimulatedProvider

simulator = fakes.simulator

QUESTION = "How do I plan a database migration?"
WEATHER = "What is the weather in Paris?"
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}


class Spoken(msgspec.Struct, frozen=True, kw_only=True):
    """One protocol, as a client writes and reads it."""

    path: Callable[[str, bool], str]
    ask: Callable[[str, bool], dict[str, Any]]
    #: The text in a whole answer, and in one event of a stream.
    text: Callable[[Any], str]
    delta: Callable[[Any], str]
    #: Input and output tokens of a whole answer.
    usage: Callable[[Any], tuple[int, int]]
    tools: dict[str, Any]
    #: Name and arguments of the first tool call of a whole answer.
    call: Callable[[Any], tuple[str, Any]]
    #: What the last payload of a proven stream shows.
    proof: Callable[[str], bool]


def _gemini_path(model: str, stream: bool) -> str:
    method = "streamGenerateContent?alt=sse" if stream else "generateContent"
    return f"/v1beta/models/{model.replace('?', '%3F')}:{method}"


def _gemini_parts(body: Any) -> list[Any]:
    return [
        p for c in body.get("candidates", ()) for p in c.get("content", {}).get("parts", ()) if not p.get("thought")
    ]


def _gemini_text(body: Any) -> str:
    return "".join(part.get("text", "") for part in _gemini_parts(body))


DECLARED = {"name": "get_weather", "description": "the weather of a city", "parameters": SCHEMA}

SPOKEN: dict[str, Spoken] = {
    "chat_completions": Spoken(
        path=lambda model, stream: "/v1/chat/completions",
        ask=lambda text, stream: {"messages": [{"role": "user", "content": text}], "stream": stream},
        text=lambda body: body["choices"][0]["message"]["content"],
        delta=lambda body: "".join(c["delta"].get("content") or "" for c in body["choices"]),
        usage=lambda body: (body["usage"]["prompt_tokens"], body["usage"]["completion_tokens"]),
        tools={"tools": [{"type": "function", "function": DECLARED}], "tool_choice": "required"},
        call=lambda body: (
            (f := body["choices"][0]["message"]["tool_calls"][0]["function"])["name"],
            json.loads(f["arguments"]),
        ),
        proof=lambda last: last == "[DONE]",
    ),
    "responses": Spoken(
        path=lambda model, stream: "/v1/responses",
        ask=lambda text, stream: {"input": text, "stream": stream},
        text=lambda body: body["output"][-1]["content"][0]["text"],
        delta=lambda body: body["delta"] if body["type"] == "response.output_text.delta" else "",
        usage=lambda body: (body["usage"]["input_tokens"], body["usage"]["output_tokens"]),
        tools={"tools": [{"type": "function", **DECLARED}], "tool_choice": "required"},
        call=lambda body: (body["output"][0]["name"], json.loads(body["output"][0]["arguments"])),
        proof=lambda last: json.loads(last)["type"] == "response.completed",
    ),
    "anthropic_messages": Spoken(
        path=lambda model, stream: "/v1/messages",
        ask=lambda text, stream: {
            "max_tokens": 4000,
            "messages": [{"role": "user", "content": text}],
            "stream": stream,
        },
        text=lambda body: body["content"][-1]["text"],
        delta=lambda body: body["delta"].get("text", "") if body["type"] == "content_block_delta" else "",
        usage=lambda body: (
            body["usage"]["input_tokens"] + body["usage"]["cache_read_input_tokens"],
            body["usage"]["output_tokens"],
        ),
        tools={
            "tools": [{"name": "get_weather", "description": "the weather of a city", "input_schema": SCHEMA}],
            "tool_choice": {"type": "any"},
        },
        call=lambda body: (body["content"][0]["name"], body["content"][0]["input"]),
        proof=lambda last: json.loads(last)["type"] == "message_stop",
    ),
    "gemini": Spoken(
        path=_gemini_path,
        ask=lambda text, stream: {"contents": [{"role": "user", "parts": [{"text": text}]}]},
        text=_gemini_text,
        delta=_gemini_text,
        usage=lambda body: (
            body["usageMetadata"]["promptTokenCount"],
            body["usageMetadata"]["candidatesTokenCount"] + body["usageMetadata"].get("thoughtsTokenCount", 0),
        ),
        tools={
            "tools": [{"functionDeclarations": [DECLARED]}],
            "toolConfig": {"functionCallingConfig": {"mode": "ANY"}},
        },
        call=lambda body: ((c := _gemini_parts(body)[0]["functionCall"])["name"], c["args"]),
        proof=lambda last: json.loads(last)["candidates"][0].get("finishReason") == "STOP",
    ),
    "workers_ai": Spoken(
        path=lambda model, stream: f"/client/v4/accounts/abc/ai/run/{model}",
        ask=lambda text, stream: {
            "messages": [{"role": "user", "content": text}],
            "max_tokens": 4000,
            "stream": stream,
        },
        text=lambda body: body["result"]["response"],
        delta=lambda body: body["response"] or "",
        usage=lambda body: (body["result"]["usage"]["prompt_tokens"], body["result"]["usage"]["completion_tokens"]),
        tools={"tools": [{"type": "function", "function": DECLARED}], "tool_choice": "required"},
        call=lambda body: ((c := body["result"]["tool_calls"][0])["name"], c["arguments"]),
        proof=lambda last: last == "[DONE]",
    ),
}

each_protocol = pytest.mark.parametrize("protocol", SPOKEN)


@pytest.fixture
async def client() -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(trust_env=False, verify=False, timeout=20) as client:
        yield client


class Asking(msgspec.Struct):
    client: httpx.AsyncClient
    simulator: SimulatedProvider
    protocol: str

    async def post(self, text: str, *, model: str = "sim-fast", stream: bool = False, **fields: Any) -> httpx.Response:
        spoken = SPOKEN[self.protocol]
        body = {**spoken.ask(text, stream), **fields}
        if self.protocol not in {"gemini", "workers_ai"}:
            body["model"] = model
        return await self.client.post(self.simulator.url.removesuffix("/v1") + spoken.path(model, stream), json=body)

    async def answer(self, text: str, **fields: Any) -> Any:
        return (await self.post(text, **fields)).raise_for_status().json()

    async def payloads(self, text: str, **fields: Any) -> list[str]:
        reply = (await self.post(text, stream=True, **fields)).raise_for_status().text
        return [line.removeprefix("data: ") for line in reply.split("\n") if line.startswith("data: ")]

    async def ended(self) -> str:
        await self.simulator.until()
        last = (await self.simulator.dispatches())[-1]["ended"]
        assert isinstance(last, str)
        return last


@pytest.fixture
def asking(client: httpx.AsyncClient, simulator: SimulatedProvider, protocol: str) -> Asking:
    return Asking(client, simulator, protocol)


@each_protocol
async def test_the_answer_is_the_same_in_every_protocol_whole_and_streamed(asking: Asking) -> None:
    chat = Asking(asking.client, asking.simulator, "chat_completions")
    expected = SPOKEN["chat_completions"].text(await chat.answer(QUESTION))
    spoken = SPOKEN[asking.protocol]
    assert spoken.text(await asking.answer(QUESTION)) == expected
    payloads = await asking.payloads(QUESTION)
    assert "".join(spoken.delta(json.loads(p)) for p in payloads if p != "[DONE]") == expected
    assert spoken.proof(payloads[-1])
    assert await asking.ended() == "complete"


@each_protocol
async def test_usage_is_what_the_ledger_counts(asking: Asking) -> None:
    told = SPOKEN[asking.protocol].usage(await asking.answer(QUESTION, model="sim-cached"))
    ledger = await asking.simulator.ledger()
    assert told == (ledger["tokens_in"], ledger["tokens_out"])


@each_protocol
async def test_a_tool_that_must_be_called_is_called_whole_and_streamed(asking: Asking) -> None:
    spoken = SPOKEN[asking.protocol]
    assert spoken.call(await asking.answer(WEATHER, **spoken.tools)) == ("get_weather", {"city": "Paris"})
    assert "get_weather" in "".join(await asking.payloads(WEATHER, **spoken.tools))
    assert await asking.ended() == "complete"


@each_protocol
@pytest.mark.parametrize("status", [400, 401, 403, 404, 429, 500, 503])
async def test_an_error_has_the_protocols_own_form(asking: Asking, status: int) -> None:
    reply = await asking.post(QUESTION, simulate={"status": status, "retry_after": 3})
    body = reply.json()
    # Gemini says 400 of a bad key.
    assert reply.status_code == (400 if (asking.protocol, status) == ("gemini", 401) else status)
    match asking.protocol:
        case "gemini":
            assert body["error"]["code"] == reply.status_code
            reasons = [detail.get("reason") for detail in body["error"].get("details", ())]
            assert ("API_KEY_INVALID" in reasons) is (status == 401)
            assert body["error"]["status"].isupper()
        case "workers_ai":
            assert body["success"] is False
            assert isinstance(body["errors"][0]["code"], int)
        case "anthropic_messages":
            assert body["type"] == "error"
            assert body["error"]["type"].endswith("_error")
        case _:
            assert set(body["error"]) == {"message", "type", "param", "code"}
    assert await asking.ended() == "error"


@each_protocol
@pytest.mark.parametrize(
    ("fault", "ended"),
    [
        ({"terminal": "none"}, "unproven"),
        ({"error_in_stream": "event"}, "error_in_stream"),
        ({"error_in_stream": "chunk"}, "error_in_stream"),
        ({"json": "bad"}, "malformed"),
        ({"json": "truncated"}, "malformed"),
        ({"json": "empty"}, "malformed"),
    ],
    ids=str,
)
async def test_a_stream_that_fails_never_shows_the_proof(asking: Asking, fault: dict[str, Any], ended: str) -> None:
    reply = await asking.post(QUESTION, stream=True, simulate=fault)
    assert await asking.ended() == ended
    if "json" not in fault:
        payloads = [line.removeprefix("data: ") for line in reply.text.split("\n") if line.startswith("data: ")]
        assert not any(_proves(asking.protocol, payload) for payload in payloads)


def _proves(protocol: str, payload: str) -> bool:
    try:
        return SPOKEN[protocol].proof(payload)
    except (ValueError, KeyError):
        return False


@each_protocol
async def test_a_stream_can_be_cut(asking: Asking) -> None:
    with pytest.raises(httpx.RemoteProtocolError):
        await asking.payloads(QUESTION, simulate={"die": "fin", "die_after": 4})
    assert await asking.ended() == "died"


@pytest.mark.parametrize(
    ("protocol", "fault"),
    [
        ("responses", {"usage": "twice"}),
        ("anthropic_messages", {"terminal": "masked"}),
        ("gemini", {"body": "bare"}),
        ("workers_ai", {"refusal": True}),
        ("gemini", {"error_done": True}),
    ],
)
async def test_a_fault_that_a_protocol_cannot_show_is_refused(asking: Asking, fault: dict[str, Any]) -> None:
    reply = await asking.post(QUESTION, simulate=fault)
    assert reply.status_code == 400
    assert next(iter(fault)) in reply.text


@pytest.mark.parametrize(
    ("protocol", "fields"),
    [
        ("responses", {"stop": ["x"]}),
        ("responses", {"input": [{"type": "function_call_output", "call_id": "c", "output": "x"}]}),
        ("responses", {"input": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}]}),
        ("responses", {"input": [{"type": "reasoning", "id": "rs_1", "summary": []}]}),
        (
            "responses",
            {"input": [{"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "forged"}]},
        ),
        ("responses", {"previous_response_id": "resp_1"}),
        ("anthropic_messages", {"seed": 1}),
        ("anthropic_messages", {"temperature": 1.5}),
        ("anthropic_messages", {"thinking": {"type": "enabled", "budget_tokens": 5000}}),
        (
            "anthropic_messages",
            {"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": "x"}]}]},
        ),
        (
            "anthropic_messages",
            {
                "messages": [
                    {"role": "user", "content": "x"},
                    {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "f", "input": {}}]},
                    {"role": "user", "content": "and?"},
                ]
            },
        ),
        (
            "anthropic_messages",
            {
                "messages": [
                    {"role": "user", "content": "x"},
                    {
                        "role": "assistant",
                        "content": [{"type": "thinking", "thinking": "hm", "signature": "forged"}],
                    },
                ]
            },
        ),
        ("gemini", {"unknown": 1}),
        ("gemini", {"generationConfig": {"temperature": 3}}),
        (
            "gemini",
            {
                "contents": [
                    {"role": "user", "parts": [{"text": "x"}]},
                    {"role": "model", "parts": [{"functionCall": {"name": "f", "args": {}}}]},
                    {"role": "user", "parts": [{"text": "and?"}]},
                ]
            },
        ),
        (
            "gemini",
            {
                "contents": [
                    {
                        "role": "model",
                        "parts": [{"functionCall": {"name": "f", "args": {}}, "thoughtSignature": "forged"}],
                    }
                ]
            },
        ),
        ("workers_ai", {"messages": [], "prompt": None}),
        ("workers_ai", {"temperature": 9}),
    ],
)
async def test_it_is_as_strict_as_the_real_one(asking: Asking, fields: dict[str, Any]) -> None:
    reply = await asking.post(QUESTION, **fields)
    assert reply.status_code == 400, reply.text


@pytest.mark.parametrize("protocol", ["anthropic_messages", "gemini", "responses"])
async def test_what_was_thought_may_come_back_with_the_results(asking: Asking) -> None:
    spoken = SPOKEN[asking.protocol]
    first = await asking.answer(WEATHER, model="sim-reasoning", **spoken.tools)
    later = {name: value for name, value in spoken.tools.items() if name not in {"tool_choice", "toolConfig"}}
    asked: Any
    match asking.protocol:
        case "anthropic_messages":
            assert first["content"][0]["type"] == "thinking"
            result = {"type": "tool_result", "tool_use_id": first["content"][1]["id"], "content": "sunny"}
            asked = {
                "messages": [
                    {"role": "user", "content": WEATHER},
                    {"role": "assistant", "content": first["content"]},
                    {"role": "user", "content": [result]},
                ]
            }
        case "gemini":
            parts = first["candidates"][0]["content"]["parts"]
            assert parts[0]["thought"]
            assert parts[1]["thoughtSignature"]
            answered = {"functionResponse": {"name": "get_weather", "response": {"output": "sunny"}}}
            asked = {
                "contents": [
                    {"role": "user", "parts": [{"text": WEATHER}]},
                    {"role": "model", "parts": parts},
                    {"role": "user", "parts": [answered]},
                ]
            }
        case _:
            thought, call = first["output"]
            assert thought["encrypted_content"]
            output = {"type": "function_call_output", "call_id": call["call_id"], "output": "sunny"}
            asked = {"input": [{"role": "user", "content": WEATHER}, thought, call, output]}
    assert "sunny" in spoken.text(await asking.answer(WEATHER, **asked, **later))


_CONTENT = {"parts": [{"text": "x"}]}
_ENTRY = {"model": "models/sim-fast", "content": _CONTENT}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("v1beta/models/sim-fast:batchEmbedContents", {"requests": [{"content": _CONTENT}]}),
        ("v1beta/models/sim-fast:batchEmbedContents", {"requests": [{**_ENTRY, "model": "models/another"}]}),
        ("v1beta/models/sim-fast:batchEmbedContents", {"requests": []}),
        ("v1beta/models/sim-fast:batchEmbedContents", {"requests": [_ENTRY] * 101}),
        ("v1beta/models/sim-fast:embedContent", {"content": {"parts": []}}),
        ("v1beta/models/sim-fast:embedContent", {"content": _CONTENT, "taskType": "query"}),
        ("v1beta/models/sim-fast:embedContent", {"content": _CONTENT, "dimensions": 3}),
        ("v1beta/models/sim-fast:embedContent", {"content": _CONTENT, "simulate": {"terminal": "none"}}),
        ("client/v4/accounts/abc/ai/run/sim-fast", {"text": []}),
        ("client/v4/accounts/abc/ai/run/sim-fast", {"text": ["x"] * 101}),
        ("client/v4/accounts/abc/ai/run/sim-fast", {"text": "x", "dimensions": 3}),
    ],
)
async def test_embeddings_are_as_strict_as_the_real_ones(
    client: httpx.AsyncClient, simulator: SimulatedProvider, path: str, body: dict[str, Any]
) -> None:
    reply = await client.post(f"{simulator.url.removesuffix('/v1')}/{path}", json=body)
    assert reply.status_code == 400, reply.text


async def test_embeddings_are_told_in_the_form_of_the_method_that_was_called(
    client: httpx.AsyncClient, simulator: SimulatedProvider
) -> None:
    root = simulator.url.removesuffix("/v1")
    one = (await client.post(f"{root}/v1beta/models/sim-fast:embedContent", json={"content": _CONTENT})).json()
    many = (await client.post(f"{root}/v1beta/models/sim-fast:batchEmbedContents", json={"requests": [_ENTRY]})).json()
    workers = (await client.post(f"{root}/client/v4/accounts/abc/ai/run/sim-fast", json={"text": "x"})).json()
    assert many["embeddings"] == [one["embedding"]]
    assert workers["result"]["data"] == [one["embedding"]["values"]]
    assert workers["result"]["shape"] == [1, 8]


async def test_each_protocol_lists_the_models(client: httpx.AsyncClient, simulator: SimulatedProvider) -> None:
    root = simulator.url.removesuffix("/v1")
    openai = (await client.get(f"{root}/v1/models")).json()["data"]
    gemini = (await client.get(f"{root}/v1beta/models")).json()["models"]
    workers = (await client.get(f"{root}/client/v4/accounts/abc/ai/models/search")).json()["result"]
    assert {m["id"] for m in openai} == {m["name"].removeprefix("models/") for m in gemini}
    assert {m["id"] for m in openai} == {m["name"] for m in workers}


@pytest.mark.parametrize("protocol", ["gemini"])
async def test_a_gemini_error_tells_the_wait_in_its_details(asking: Asking) -> None:
    reply = await asking.post(QUESTION, simulate={"status": 429, "retry_after": 2.5})
    details = reply.json()["error"]["details"]
    assert [d["retryDelay"] for d in details if "retryDelay" in d] == ["2.5s"]
