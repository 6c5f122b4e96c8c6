"""
The same conversation from every caller's protocol to every provider's: what comes back is the same.

The simulated provider answers by what it was asked, whatever the protocol: one word lost or added on the way, and the
answer is another. Each answer is then told in the caller's own protocol and read again.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any

import msgspec
import pytest

from adapters.chat import ChatRequest, ChatResponse
from adapters.client import Upstream
from adapters.contract import AnswerHead, EmbeddingCall, EmbeddingProtocol, Endpoint, UpstreamCall
from adapters.protocols import PROTOCOLS
from tests.fakes import simulated as fakes
from tests.fakes.answers import gathered, gathered_response, parsed
from tests.fakes.conversations import ASKED, BODIES, RESULT
from tests.fakes.simulated import SimulatedProvider

simulator = fakes.simulator

#: Where each protocol is spoken at the simulated provider.
BASES = {
    "chat_completions": "/v1",
    "responses": "/v1",
    "anthropic_messages": "/v1",
    "gemini": "/v1beta",
    "workers_ai": "/client/v4/accounts/abc/ai",
}
#: What a provider's protocol has no words for.
NO_WORDS = {("image", "workers_ai"), ("reasoning", "workers_ai")}
#: Asked for reasoning, this model thinks whether asked or not.
MODELS = {"reasoning": "sim-reasoning"}


def _pairs() -> Iterator[Any]:
    for kind, bodies in BODIES.items():
        for caller in bodies:
            for provider in PROTOCOLS:
                if caller in PROTOCOLS and (kind, provider) not in NO_WORDS:
                    yield pytest.param(kind, caller, provider, id=f"{kind}-{caller}-to-{provider}")


class Ask(msgspec.Struct):
    upstream: Upstream
    simulator: SimulatedProvider

    def call(self, kind: str, provider: str, request: ChatRequest) -> UpstreamCall:
        endpoint = Endpoint(
            provider="simulated",
            protocol=provider,
            base_url=self.simulator.url.removesuffix("/v1") + BASES[provider],
            reasoning="budget" if provider in {"anthropic_messages", "gemini"} else None,
        )
        return UpstreamCall(
            endpoint=endpoint,
            model=MODELS.get(kind, "sim-fast"),
            request=request,
            deadline=asyncio.get_running_loop().time() + 20,
        )

    async def whole(self, call: UpstreamCall) -> ChatResponse:
        return await self.upstream.complete(call)

    async def streamed(self, call: UpstreamCall) -> list[Any]:
        async with self.upstream.stream(call) as batches:
            return [event async for batch in batches for event in batch]


@pytest.fixture
async def ask(simulator: SimulatedProvider) -> AsyncIterator[Ask]:
    async with Upstream(PROTOCOLS) as upstream:
        yield Ask(upstream, simulator)


def _meaning(told: dict[str, Any]) -> dict[str, Any]:
    """What must be the same whoever told it: not ids, not a provider's own words."""
    choice = told["choices"]["0"]
    return {
        "text": choice["text"],
        "refusal": choice["refusal"],
        "reasoning": choice["reasoning"],
        "calls": [(call["name"], call["arguments"]) for call in choice["tool_calls"]],
        "end": choice["end"][0],
        "input": told["usage"]["input_total"],
        "output": told["usage"]["output_total"],
    }


def _request(kind: str, caller: str) -> ChatRequest:
    return PROTOCOLS[caller].parse_request(msgspec.json.encode(BODIES[kind][caller]))


async def _expected(ask: Ask, kind: str) -> dict[str, Any]:
    request = _request(kind, "chat_completions")
    return _meaning(gathered_response(await ask.whole(ask.call(kind, "chat_completions", request))))


@pytest.mark.parametrize(("kind", "caller", "provider"), list(_pairs()))
async def test_whoever_asks_and_whoever_answers_the_answer_is_the_same(
    ask: Ask, kind: str, caller: str, provider: str
) -> None:
    expected = await _expected(ask, kind)
    call = ask.call(kind, provider, _request(kind, caller))
    whole = await ask.whole(call)
    events = await ask.streamed(call) if (kind, provider) != ("json_schema", "workers_ai") else None
    assert _meaning(gathered_response(whole)) == expected
    if events is not None:
        assert _meaning(gathered(events)) == expected
    protocol = PROTOCOLS[caller]
    rendered = protocol.render_response(msgspec.structs.replace(whole, native=None))
    assert _meaning(gathered_response(protocol.parse_response(200, {}, rendered))) == expected
    if events is None:
        return
    renderer = protocol.new_renderer(AnswerHead(id="x1", model="m", created=1767225600))
    stream = [renderer.feed([event]) for event in events]
    again, error = parsed(protocol.new_parser(call.endpoint, {}), stream)
    assert error is None
    assert _meaning(gathered(again)) == expected


# ------------------------------------------------------------------ embeddings

TEXTS = ["Begin with a copy of the data.", "東京 too"]
EMBEDDING = {name: protocol for name, protocol in PROTOCOLS.items() if isinstance(protocol, EmbeddingProtocol)}
#: One question in the words of every protocol that has embeddings: of two texts, and of one.
EMBEDDED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "chat_completions": ({"model": "m", "input": TEXTS}, {"model": "m", "input": TEXTS[0]}),
    "gemini": (
        {"requests": [{"model": "models/m", "content": {"parts": [{"text": text}]}} for text in TEXTS]},
        {"content": {"parts": [{"text": TEXTS[0]}]}},
    ),
    "workers_ai": ({"text": TEXTS}, {"text": TEXTS[0]}),
}


@pytest.mark.parametrize("provider", EMBEDDING)
@pytest.mark.parametrize("caller", EMBEDDING)
async def test_whoever_embeds_the_vectors_are_the_same(ask: Ask, caller: str, provider: str) -> None:
    reading, told = EMBEDDING[caller], []
    for one, body in enumerate(EMBEDDED[caller]):
        request = reading.parse_embedding_request(msgspec.json.encode(body))
        for name in dict.fromkeys((provider, "chat_completions")):
            chat = ask.call("text", name, _request("text", "chat_completions"))
            call = EmbeddingCall(endpoint=chat.endpoint, model="sim-fast", request=request, deadline=chat.deadline)
            answer = await ask.upstream.embed(call)
            assert answer.dropped == ()
            rendered = reading.render_embedding_response(msgspec.structs.replace(answer, native=None), base64=False)
            again = reading.parse_embedding_response(200, {}, rendered)
            assert (again.vectors, again.usage.input_total) == (answer.vectors, answer.usage.input_total)
            told.append((one, answer.vectors, answer.usage.input_total))
    assert len(set(told)) == 2
    assert [len(vectors) for _, vectors, _ in dict.fromkeys(told)] == [2, 1]


async def test_a_gemini_provider_cuts_vectors_to_the_size_that_was_asked_for(ask: Ask) -> None:
    body = {"model": "m", "input": TEXTS, "dimensions": 3}
    request = EMBEDDING["chat_completions"].parse_embedding_request(msgspec.json.encode(body))
    chat = ask.call("text", "gemini", _request("text", "chat_completions"))
    call = EmbeddingCall(endpoint=chat.endpoint, model="sim-fast", request=request, deadline=chat.deadline)
    assert [len(vector) for vector in (await ask.upstream.embed(call)).vectors] == [3, 3]


# ------------------------------------------------------------------ from one provider to another

#: Whose models sign what they think, or the calls they make.
SIGNING = ("anthropic_messages", "responses", "gemini")
#: Whose callers are given signatures, and how they ask for them.
CARRYING: dict[str, dict[str, Any]] = {
    "chat_completions": {},
    "anthropic_messages": {},
    "responses": {"include": ["reasoning.encrypted_content"]},
    "gemini": {},
}


def _thinking(call: UpstreamCall) -> UpstreamCall:
    if call.endpoint.protocol == "workers_ai":
        return call  # it has no place for thoughts
    effort = {"reasoning": "effort"} if call.endpoint.protocol == "responses" else {}
    endpoint = msgspec.structs.replace(call.endpoint, **effort)
    return msgspec.structs.replace(call, endpoint=endpoint, model="sim-reasoning")


def _gone_on(caller: str, answered: bytes) -> ChatRequest:
    """What a client sends next: its question, the answer as it was told, and the result of the call in it."""
    body = {**BODIES["tool_forced"][caller], **CARRYING[caller]}
    answer = msgspec.json.decode(answered)
    match caller:
        case "chat_completions":
            said = answer["choices"][0]["message"]
            result = {"role": "tool", "tool_call_id": said["tool_calls"][0]["id"], "content": RESULT}
            body["messages"] = [*body["messages"], said, result]
        case "responses":
            (called,) = [item["call_id"] for item in answer["output"] if item["type"] == "function_call"]
            result = {"type": "function_call_output", "call_id": called, "output": RESULT}
            body["input"] = [{"role": "user", "content": ASKED}, *answer["output"], result]
        case "anthropic_messages":
            (called,) = [block["id"] for block in answer["content"] if block["type"] == "tool_use"]
            result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": called, "content": RESULT}]}
            body["messages"] = [*body["messages"], {"role": "assistant", "content": answer["content"]}, result]
        case _:
            said = answer["candidates"][0]["content"]
            (called,) = [part["functionCall"] for part in said["parts"] if "functionCall" in part]
            told = {"name": called["name"], "response": {"output": RESULT}}
            told |= {"id": called["id"]} if "id" in called else {}
            body["contents"] = [*body["contents"], said, {"role": "user", "parts": [{"functionResponse": told}]}]
    for name in ("tool_choice", "toolConfig"):
        body.pop(name, None)
    return PROTOCOLS[caller].parse_request(msgspec.json.encode(body))


def _signatures(answer: ChatResponse) -> list[str]:
    """Without the mark that says whose they are."""
    (choice,) = answer.choices
    signed = [thought.signature for thought in choice.reasoning] + [call.signature for call in choice.tool_calls]
    return [signature.rpartition(":")[2] for signature in signed if signature is not None]


@pytest.mark.parametrize("first", SIGNING)
@pytest.mark.parametrize("caller", CARRYING)
async def test_what_one_provider_signed_goes_back_to_it_and_to_no_other(ask: Ask, caller: str, first: str) -> None:
    body = {**BODIES["tool_forced"][caller], **CARRYING[caller]}
    request = PROTOCOLS[caller].parse_request(msgspec.json.encode(body))
    call = _thinking(ask.call("tool_forced", first, request))
    answer = await ask.whole(call)
    signed = _signatures(answer)
    assert signed
    for native in (True, False):
        told = answer if native else msgspec.structs.replace(answer, native=None)
        again = _gone_on(caller, PROTOCOLS[caller].render_response(told))
        for second in PROTOCOLS:
            call = _thinking(ask.call("tool_answered", second, again))
            sent = PROTOCOLS[second].render_request(call, stream=False)
            # The simulated provider refuses what another one signed.
            assert RESULT in (await ask.whole(call)).choices[0].text, (caller, first, second)
            if first == second:
                assert all(signature.encode() in sent.body for signature in signed)
                assert sent.dropped == ()
            else:
                assert not any(signature.encode() in sent.body for signature in signed), (caller, first, second)
                assert sent.dropped, (caller, first, second)


@pytest.mark.parametrize("first", SIGNING)
@pytest.mark.parametrize("caller", CARRYING)
async def test_a_stream_tells_the_same_signatures_as_a_whole_answer(ask: Ask, caller: str, first: str) -> None:
    body = {**BODIES["tool_forced"][caller], **CARRYING[caller]}
    call = _thinking(ask.call("tool_forced", first, PROTOCOLS[caller].parse_request(msgspec.json.encode(body))))
    renderer = PROTOCOLS[caller].new_renderer(AnswerHead(id="x1", model="m", created=1767225600))
    stream = [renderer.feed([event]) for event in await ask.streamed(call)]
    again, error = parsed(PROTOCOLS[caller].new_parser(call.endpoint, {}), stream)
    assert error is None
    whole = msgspec.structs.replace(await ask.whole(call), native=None)
    rendered = PROTOCOLS[caller].parse_response(200, {}, PROTOCOLS[caller].render_response(whole))
    said, expected = gathered(again)["choices"]["0"], gathered_response(rendered)["choices"]["0"]
    assert [block["signature"] for block in said.get("blocks", [])] == [
        block["signature"] for block in expected.get("blocks", [])
    ]
    assert [c.get("signature") for c in said["tool_calls"]] == [c.get("signature") for c in expected["tool_calls"]]


async def test_the_matrix_leaves_no_protocol_out() -> None:
    told = {(caller, provider) for param in _pairs() for _, caller, provider in [param.values]}
    assert told == {(caller, provider) for caller in PROTOCOLS for provider in PROTOCOLS}


@pytest.mark.parametrize("caller", [name for name in PROTOCOLS if name in BODIES["text"]])
@pytest.mark.parametrize("cut", [1, 5])
async def test_a_stream_told_before_its_end_is_not_proven(ask: Ask, caller: str, cut: int) -> None:
    events = await ask.streamed(ask.call("text", "chat_completions", _request("text", "chat_completions")))
    protocol = PROTOCOLS[caller]
    renderer = protocol.new_renderer(AnswerHead(id="x1", model="m", created=1767225600))
    stream = [renderer.feed([event]) for event in events[:-cut]]
    endpoint = Endpoint(provider="x", protocol=caller, base_url="http://127.0.0.1")
    _, error = parsed(protocol.new_parser(endpoint, {}), stream)
    assert error is not None
    assert error.code == "no_terminal"


@pytest.mark.parametrize(
    ("provider", "fields"),
    [
        ("workers_ai", {"tool_choice": {"type": "function", "function": {"name": "get_weather"}}}),
        ("gemini", {"store": False}),
        ("responses", {"store": False, "prompt_cache_key": "k"}),
    ],
)
async def test_what_a_protocol_is_said_to_carry_its_provider_takes(
    ask: Ask, provider: str, fields: dict[str, Any]
) -> None:
    body = {**BODIES["tool_forced"]["chat_completions"], **fields}
    request = PROTOCOLS["chat_completions"].parse_request(msgspec.json.encode(body))
    assert (await ask.whole(ask.call("tool_forced", provider, request))).choices[0].tool_calls


async def test_a_prompt_cache_boundary_arrives_at_a_responses_provider(ask: Ask) -> None:
    body = {
        "model": "m",
        "max_tokens": 200,
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}}]}
        ],
    }
    request = PROTOCOLS["anthropic_messages"].parse_request(msgspec.json.encode(body))
    assert (await ask.whole(ask.call("text", "responses", request))).choices[0].text
