"""
What a provider cannot be told is named as its caller wrote it, or dropped where that is allowed, whoever asks whom.

Every field of every format is asked for, one at a time, of every provider's protocol. A caller who is refused a field
that it never wrote looks for it in vain, and a warning that names one is as good as none.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
import pytest
from google.protobuf.message import Message as AnyMessage

from adapters.chat import ChatRequest
from adapters.contract import Endpoint, HttpRequest, UpstreamCall
from adapters.errors import RequestNotExpressible
from adapters.protocols import PROTOCOLS
from gateway.needs import DROPPED_WORDS
from gateway.rpc import codec
from protos.tollbridge.v1 import gateway_pb2 as pb
from tests.fakes.conversations import PICTURE

_DATA_URL = f"data:image/png;base64,{PICTURE}"
_FUNCTION = {"name": "f", "parameters": {"type": "object"}}
_M = {"model": "m"}


def _chat(*messages: Any, **fields: Any) -> dict[str, Any]:
    return {**_M, "messages": [{"role": "user", "content": "Hi"}, *messages], **fields}


def _messages(*messages: Any, **fields: Any) -> dict[str, Any]:
    # A system prompt moves every message of the canonical form by one.
    return {**_chat(*messages, **fields), "max_tokens": 4000, "system": fields.get("system", "Be brief.")}


def _responses(*items: Any, **fields: Any) -> dict[str, Any]:
    return {**_M, "instructions": "Be brief.", "input": [{"role": "user", "content": "Hi"}, *items], **fields}


def _gemini(*contents: Any, config: Any = None, **fields: Any) -> dict[str, Any]:
    body = {"systemInstruction": {"parts": [{"text": "Be brief."}]}, "contents": [_said("user", {"text": "Hi"})]}
    body["contents"] += contents  # type: ignore[operator]
    return {**body, **fields, **({} if config is None else {"generationConfig": config})}


def _said(role: str, *parts: Any) -> dict[str, Any]:
    return {"role": role, "parts": list(parts)}


def _user(*parts: Any) -> dict[str, Any]:
    return {"role": "user", "content": [{"type": "text", "text": "See:"}, *parts]}


_CACHE = {"cache_control": {"type": "ephemeral"}}
_CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
_USE = {"type": "tool_use", "id": "c1", "name": "f", "input": {}}
_ITEM = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"}
_OUTPUT = {"type": "function_call_output", "call_id": "c1", "output": "12"}
_RESULT = {"role": "tool", "tool_call_id": "c1", "content": "12"}
_PDF = "JVBERi0xLjc="

#: Bodies of each format, by what is asked for.
ASKED: Mapping[str, Mapping[str, dict[str, Any]]] = {
    "chat_completions": {
        **{
            name: _chat(**{name: value})
            for name, value in {
                "stop": ["END"],
                "seed": 7,
                "n": 2,
                "top_k": 3,
                "presence_penalty": 0.5,
                "frequency_penalty": 0.5,
                "logprobs": True,
                "top_logprobs": 2,
                "logit_bias": {"5": 1},
                "verbosity": "low",
                "service_tier": "priority",
                "prompt_cache_key": "k",
                "store": True,
                "metadata": {"a": "b"},
                "safety_identifier": "u",
                "prompt_cache_retention": "24h",
                "user": "u",
                "temperature": 1.5,
                "reasoning_effort": "low",
                "reasoning": {"max_tokens": 2000},
                "response_format": {"type": "json_object"},
                "prediction": {"type": "content", "content": "x"},
                "modalities": ["text", "audio"],
            }.items()
        },
        "two users": _chat(safety_identifier="u", user="v"),
        "schema": _chat(
            response_format={"type": "json_schema", "json_schema": {"name": "s", "schema": True, "description": "d"}}
        ),
        "parallel": _chat(parallel_tool_calls=False, tools=[{"type": "function", "function": _FUNCTION}]),
        "strict": _chat(tools=[{"type": "function", "function": {**_FUNCTION, "strict": True}}]),
        "own tool": _chat(tools=[{"type": "function", "function": _FUNCTION}, {"type": "custom", "custom": {}}]),
        "tool cache": _chat(tools=[{"type": "custom"}, {"type": "function", "function": _FUNCTION, **_CACHE}]),
        "field of a tool": _chat(tools=[{"type": "function", "function": _FUNCTION, "defer_loading": True}]),
        "name": _chat({**_user(), "name": "ann"}),
        "cache": _chat(_user({"type": "text", "text": "x", **_CACHE})),
        "detail": _chat(_user({"type": "image_url", "image_url": {"url": _DATA_URL, "detail": "low"}})),
        "image of an assistant": _chat(
            {"role": "assistant", "content": [{"type": "image_url", "image_url": {"url": _DATA_URL}}]}
        ),
        "sound": _chat(_user({"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}})),
        "document": _chat(_user({"type": "file", "file": {"file_data": _PDF, "filename": "a.pdf"}})),
        "odd document": _chat(_user({"type": "file", "file": {"file_data": "data:video/x;base64,AAAA"}})),
        "unknown part": _chat(_user({"type": "hologram"})),
        "reasoning back": _chat({"role": "assistant", "content": "x", "reasoning_content": "Hm."}, _user()),
        "details back": _chat(
            {"role": "assistant", "content": "x", "reasoning_details": [{"type": "reasoning.encrypted", "data": "x"}]},
            _user(),
        ),
        "thinking part": _chat(
            {
                "role": "assistant",
                "content": [{"type": "thinking", "thinking": "Hm."}, {"type": "text", "text": "x", **_CACHE}],
            },
            _user(),
        ),
        "signed call": _chat(
            {
                "role": "assistant",
                "tool_calls": [{**_CALL, "extra_content": {"google": {"thought_signature": "c2ln"}}}],
            },
            _RESULT,
        ),
        "bad arguments": _chat(
            {"role": "assistant", "tool_calls": [{**_CALL, "function": {"name": "f", "arguments": "{"}}]}, _RESULT
        ),
        "old call": _chat(
            {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "{"}},
            {"role": "function", "name": "f", "content": "12"},
        ),
        "result without its call": _chat(_RESULT),
        "late system": _chat({"role": "system", "content": "x"}, {"role": "system", "content": "y"}, _user()),
        "only system": {**_M, "messages": [{"role": "system", "content": "x"}]},
        "refused part": _chat(
            {
                "role": "assistant",
                "content": [{"type": "refusal", "refusal": "No."}, {"type": "text", "text": "x", **_CACHE}],
            },
            _user(),
        ),
    },
    "anthropic_messages": {
        "stop_sequences": _messages(stop_sequences=["END"]),
        "top_k": _messages(top_k=3),
        "user": _messages(metadata={"user_id": "u"}),
        "more metadata": _messages(metadata={"user_id": "u", "x": 1}),
        "effort": _messages(output_config={"effort": "low"}),
        "budget": _messages(thinking={"type": "enabled", "budget_tokens": 2000}),
        "small budget": _messages(thinking={"type": "enabled", "budget_tokens": 20}),
        "schema": _messages(output_config={"format": {"type": "json_schema", "schema": True}}),
        "tier": _messages(service_tier="standard_only"),
        "parallel": _messages(
            tools=[{"name": "f", "input_schema": {}}], tool_choice={"type": "auto", "disable_parallel_tool_use": True}
        ),
        "system cache": _messages(system=[{"type": "text", "text": "x", **_CACHE}]),
        "unknown system": _messages(system=[{"type": "hologram"}]),
        "cache": _messages(_user({"type": "text", "text": "x", **_CACHE})),
        "top cache": _messages(**_CACHE),
        "tool cache": _messages(tools=[{"type": "web_search_1", "name": "w"}, {"name": "f", **_CACHE}]),
        "strict": _messages(tools=[{"name": "f", "strict": True}]),
        "own tool": _messages(tools=[{"name": "f"}, {"type": "web_search_20250305", "name": "web_search"}]),
        "field of a tool": _messages(tools=[{"name": "f", "defer_loading": True}]),
        "citations": _messages(
            {"role": "assistant", "content": [{"type": "text", "text": "x", "citations": [{"type": "x"}]}]}, _user()
        ),
        "thinking back": _messages(
            {
                "role": "assistant",
                "content": [{"type": "thinking", "thinking": "Hm.", "signature": "s"}, {"type": "text", "text": "x"}],
            },
            _user(),
        ),
        "unsigned back": _messages(
            {"role": "assistant", "content": [{"type": "thinking", "thinking": "Hm."}, _USE]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": "12"}]},
        ),
        "redacted back": _messages(
            {"role": "assistant", "content": [{"type": "redacted_thinking", "data": "s"}, _USE]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": "12"}]},
        ),
        "cached call": _messages(
            {"role": "assistant", "content": [{**_USE, **_CACHE}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": "12", **_CACHE}]},
        ),
        "failed result": _messages(
            {"role": "assistant", "content": [_USE]},
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "See:"},
                    {
                        "type": "tool_result",
                        "tool_use_id": "c1",
                        "is_error": True,
                        "content": [
                            {"type": "text", "text": "12", **_CACHE},
                            {
                                "type": "image",
                                "source": {"type": "base64", "media_type": "image/png", "data": PICTURE},
                            },
                        ],
                    },
                ],
            },
        ),
        "document": _messages(
            _user({"type": "document", "title": "a", "source": {"type": "url", "url": "https://example.com/a.pdf"}})
        ),
        "cited document": _messages(
            _user(
                {
                    "type": "document",
                    "citations": {"enabled": True},
                    "source": {"type": "url", "url": "https://example.com/a.pdf"},
                }
            )
        ),
        "late system": _messages({"role": "system", "content": "x"}, _user()),
        "context_management": _messages(context_management={"edits": []}),
    },
    "responses": {
        **{
            name: _responses(**{name: value})
            for name, value in {
                "top_logprobs": 2,
                "include": ["file_search_call.results"],
                "prompt_cache_key": "k",
                "prompt_cache_retention": "24h",
                "metadata": {"a": "b"},
                "safety_identifier": "u",
                "user": "u",
                "service_tier": "priority",
                "store": True,
                "truncation": "auto",
                "background": True,
                "previous_response_id": "resp_1",
                "temperature": 1.5,
                "max_tool_calls": 3,
            }.items()
        },
        "logprobs": _responses(include=["message.output_text.logprobs"]),
        "effort": _responses(reasoning={"effort": "low"}),
        "verbosity": _responses(text={"verbosity": "low"}),
        "json": _responses(text={"format": {"type": "json_object"}}),
        "schema": _responses(text={"format": {"type": "json_schema", "name": "s", "schema": True, "description": "d"}}),
        "parallel": _responses(parallel_tool_calls=False, tools=[{"type": "function", **_FUNCTION}]),
        "strict": _responses(tools=[{"type": "web_search"}, {"type": "function", **_FUNCTION, "strict": True}]),
        "own tool": _responses(tools=[{"type": "function", **_FUNCTION}, {"type": "web_search"}]),
        "cache": _responses(
            {
                "role": "user",
                "content": [
                    {"type": "input_text", "text": "x"},
                    {"type": "input_text", "text": "y", "prompt_cache_breakpoint": {"mode": "explicit"}},
                ],
            }
        ),
        "detail": _responses(
            {"role": "user", "content": [{"type": "input_image", "image_url": _DATA_URL, "detail": "low"}]}
        ),
        "stored image": _responses({"role": "user", "content": [{"type": "input_image", "file_id": "f"}]}),
        "document": _responses(
            {"role": "user", "content": [{"type": "input_file", "file_url": "https://example.com/a.pdf"}]}
        ),
        "stored document": _responses({"role": "user", "content": [{"type": "input_file", "file_id": "f"}]}),
        "reasoning back": _responses(
            {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "Hm."}]},
            {"role": "assistant", "content": "x"},
            _ITEM,
            _OUTPUT,
        ),
        "signed back": _responses(
            {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "s"}, _ITEM, _OUTPUT
        ),
        "signed call": _responses({**_ITEM, "signature": "c2ln"}, _OUTPUT),
        "bad arguments": _responses(
            {"role": "assistant", "content": "x"}, {**_ITEM, "arguments": "{"}, {**_OUTPUT, "output": "12"}
        ),
        "result with an image": _responses(
            _ITEM, {**_OUTPUT, "output": [{"type": "input_image", "image_url": _DATA_URL, "detail": "low"}]}
        ),
        "own item": _responses({"type": "web_search_call", "id": "w", "status": "completed"}),
        "late system": _responses({"role": "system", "content": "x"}, {"role": "user", "content": "y"}),
        "only text": {**_M, "input": "Hi", "top_logprobs": 2},
    },
    "gemini": {
        **{
            name: _gemini(config={name: value})
            for name, value in {
                "stopSequences": ["END"],
                "topK": 3,
                "seed": 7,
                "candidateCount": 2,
                "presencePenalty": 0.5,
                "frequencyPenalty": 0.5,
                "responseLogprobs": True,
                "logprobs": 2,
                "responseMimeType": "application/json",
                "responseJsonSchema": True,
                "thinkingConfig": {"thinkingBudget": 2000},
                "temperature": 1.5,
                "speechConfig": {},
            }.items()
        },
        "level": _gemini(config={"thinkingConfig": {"thinkingLevel": "LOW"}}),
        "other spelling": _gemini(generation_config={"stop_sequences": ["END"], "top_k": 3}),
        "tier": _gemini(serviceTier="priority"),
        "store": _gemini(store=True),
        "labels": _gemini(labels={"a": "b"}),
        "safety": _gemini(safetySettings=[]),
        "cached": _gemini(cachedContent="cachedContents/x"),
        "own tool": _gemini(tools=[{"functionDeclarations": [{"name": "f"}]}, {"googleSearch": {}}]),
        "validated": _gemini(
            tools=[{"functionDeclarations": [{"name": "f"}]}],
            toolConfig={"functionCallingConfig": {"mode": "VALIDATED"}},
        ),
        "late part": _gemini(_said("user", {"text": ""}, {"videoMetadata": {}})),
        "sound": _gemini(_said("user", {"inlineData": {"mimeType": "audio/wav", "data": "AAAA"}})),
        "document": _gemini(
            _said("user", {"inlineData": {"mimeType": "application/pdf", "data": _PDF, "displayName": "a.pdf"}})
        ),
        "linked document": _gemini(_said("user", {"fileData": {"fileUri": "https://example.com/a.pdf"}})),
        "thought": _gemini(
            _said("model", {"text": "Hm.", "thought": True}, {"text": "x"}), _said("user", {"text": "y"})
        ),
        "signed": _gemini(
            _said("model", {"text": "x", "thoughtSignature": "c2ln"}),
            _said("user", {"text": "y"}),
        ),
        "signed call": _gemini(
            _said("model", {"functionCall": {"name": "f", "args": {}}, "thoughtSignature": "c2ln"}),
            _said("user", {"functionResponse": {"name": "f", "response": {"error": "no"}}}),
        ),
        "image of a model": _gemini(
            _said("model", {"inlineData": {"mimeType": "image/png", "data": PICTURE}}), _said("user", {"text": "y"})
        ),
        "result with an image": _gemini(
            _said("model", {"functionCall": {"name": "f", "args": {}}}),
            _said(
                "user",
                {
                    "functionResponse": {
                        "name": "f",
                        "response": {"a": 1},
                        "parts": [{"inlineData": {"mimeType": "image/png", "data": PICTURE}}],
                    }
                },
            ),
        ),
    },
    "workers_ai": {
        "top_k": _chat(top_k=3),
        "raw": _chat(raw=True),
        "lora": _chat(lora="x"),
        "seed": _chat(seed=7),
        "json": _chat(response_format={"type": "json_object"}),
        "schema": _chat(response_format={"type": "json_schema", "json_schema": True}),
        "prompt": {"prompt": "Hi", "seed": 7},
        "own tool": _chat(tools=[{"type": "function", "function": _FUNCTION}, {"type": "other"}]),
        "detail": _chat(_user({"type": "image_url", "image_url": {"url": _DATA_URL, "detail": "low"}})),
        "unknown part": _chat(_user({"type": "hologram"})),
        "reasoning back": _chat({"role": "assistant", "content": "x", "reasoning_content": "Hm."}, _user()),
        "bad arguments": _chat(
            {"role": "assistant", "tool_calls": [{"id": "c1", "name": "f", "arguments": "{"}]}, _RESULT
        ),
    },
}

#: Whose loss would change what is asked, or what the answer must look like: some protocol refuses each of them,
#: whatever may be dropped. All others are dropped where they cannot be said.
REFUSED_ALWAYS: Mapping[str, frozenset[str]] = {
    "chat_completions": frozenset(
        {
            "bad arguments",
            "document",
            "field of a tool",
            "image of an assistant",
            "late system",
            "modalities",
            "n",
            "name",
            "odd document",
            "old call",
            "only system",
            "own tool",
            "prediction",
            "response_format",
            "result without its call",
            "schema",
            "sound",
            "stop",
            "strict",
            "tool cache",
            "unknown part",
        }
    ),
    "anthropic_messages": frozenset(
        {
            "cited document",
            "context_management",
            "document",
            "failed result",
            "field of a tool",
            "late system",
            "more metadata",
            "own tool",
            "stop_sequences",
            "strict",
            "tool cache",
            "unknown system",
        }
    ),
    "responses": frozenset(
        {
            "background",
            "bad arguments",
            "document",
            "json",
            "late system",
            "max_tool_calls",
            "own item",
            "own tool",
            "previous_response_id",
            "result with an image",
            "schema",
            "stored document",
            "stored image",
            "strict",
            "truncation",
        }
    ),
    "gemini": frozenset(
        {
            "cached",
            "candidateCount",
            "document",
            "image of a model",
            "late part",
            "linked document",
            "other spelling",
            "own tool",
            "responseMimeType",
            "result with an image",
            "safety",
            "sound",
            "speechConfig",
            "stopSequences",
            "validated",
        }
    ),
    "workers_ai": frozenset({"bad arguments", "json", "lora", "own tool", "raw", "unknown part"}),
}

#: The very field, where a nearby one would do for the rule that it is in the body.
NAMED = [
    ("anthropic_messages", "stop_sequences", "responses", "stop_sequences"),
    ("anthropic_messages", "system cache", "gemini", "system[0].cache_control"),
    ("anthropic_messages", "cache", "chat_completions", "messages[1].content[1].cache_control"),
    ("anthropic_messages", "user", "gemini", "metadata.user_id"),
    ("anthropic_messages", "failed result", "chat_completions", "messages[2].content[1].content[0].cache_control"),
    ("anthropic_messages", "parallel", "gemini", "tool_choice.disable_parallel_tool_use"),
    ("anthropic_messages", "cached call", "responses", "messages[1].content[0].cache_control"),
    ("responses", "cache", "chat_completions", "input[1].content[1].prompt_cache_breakpoint"),
    ("responses", "schema", "gemini", "text.format.schema"),
    ("responses", "bad arguments", "anthropic_messages", "input[2].arguments"),
    ("responses", "result with an image", "chat_completions", "input[2].output[0]"),
    ("responses", "verbosity", "gemini", "text.verbosity"),
    ("gemini", "other spelling", "responses", "generation_config.top_k"),
    ("gemini", "candidateCount", "anthropic_messages", "generationConfig.candidateCount"),
    ("gemini", "result with an image", "workers_ai", "contents[2].parts[0].functionResponse.parts[0]"),
    ("chat_completions", "thinking part", "gemini", "messages[1].content[1].cache_control"),
    ("chat_completions", "detail", "anthropic_messages", "messages[1].content[1].image_url.detail"),
    ("chat_completions", "user", "workers_ai", "user"),
    ("chat_completions", "old call", "gemini", "messages[1].function_call.arguments"),
]


def _pairs() -> Iterator[Any]:
    for caller, bodies in ASKED.items():
        for asked in bodies:
            yield pytest.param(caller, asked, id=f"{caller}-{asked}")


def _render(provider: str, request: ChatRequest, **profile: Any) -> HttpRequest:
    endpoint = Endpoint(provider="p", protocol=provider, base_url="", **profile)
    call = UpstreamCall(endpoint=endpoint, model="m", request=request, deadline=0)
    return PROTOCOLS[provider].render_request(call, stream=False)


def _there(path: str, body: Any) -> bool:
    """Whether the path leads to something in the body."""
    for step in path.replace("[", ".[").split("."):
        if step.startswith("["):
            if not isinstance(body, list) or int(step[1:-1]) >= len(body):
                return False
            body = body[int(step[1:-1])]
        elif not isinstance(body, dict) or step not in body:
            return False
        else:
            body = body[step]
    return body is not None


@pytest.mark.parametrize(("caller", "asked"), list(_pairs()))
def test_a_refusal_and_a_warning_name_what_the_caller_wrote(caller: str, asked: str) -> None:
    body = ASKED[caller][asked]
    request = PROTOCOLS[caller].parse_request(json.dumps(body).encode())
    for provider in PROTOCOLS:
        for drops in (frozenset[str](), DROPPED_WORDS):
            try:
                paths = _render(provider, request, drops=drops).dropped
            except RequestNotExpressible as refused:
                paths = (refused.path,)
            assert [path for path in paths if not _there(path, body)] == [], provider


def _refused(caller: str, provider: str, *, drops: frozenset[str]) -> dict[str, RequestNotExpressible]:
    found = {}
    for asked, body in ASKED[caller].items():
        request = PROTOCOLS[caller].parse_request(json.dumps(body).encode())
        try:
            _render(provider, request, drops=drops)
        except RequestNotExpressible as error:
            found[asked] = error
    return found


@pytest.mark.parametrize(
    ("caller", "asked", "provider", "path"),
    [
        ("chat_completions", "reasoning back", "anthropic_messages", "messages[1].reasoning_content"),
        ("anthropic_messages", "unsigned back", "workers_ai", "messages[1].content[0]"),
        ("responses", "reasoning back", "anthropic_messages", "input[1]"),
    ],
)
def test_what_was_thought_and_cannot_go_back_is_dropped_and_named(
    caller: str, asked: str, provider: str, path: str
) -> None:
    request = PROTOCOLS[caller].parse_request(json.dumps(ASKED[caller][asked]).encode())
    assert _render(provider, request).dropped == (path,)


@pytest.mark.parametrize(("caller", "asked", "provider", "path"), NAMED)
def test_the_field_that_is_named_is_the_one_that_was_asked_for(
    caller: str, asked: str, provider: str, path: str
) -> None:
    assert _refused(caller, provider, drops=frozenset())[asked].path == path


@pytest.mark.parametrize("caller", PROTOCOLS)
def test_what_may_be_dropped_is_dropped_by_every_protocol_and_nothing_else(caller: str) -> None:
    others = [provider for provider in PROTOCOLS if provider != caller]
    refused = {asked for provider in others for asked in _refused(caller, provider, drops=DROPPED_WORDS)}
    assert refused == REFUSED_ALWAYS[caller]


def test_a_tool_that_its_own_provider_runs_is_refused_by_a_sentence() -> None:
    refused = _refused("responses", "anthropic_messages", drops=frozenset())["own tool"]
    assert refused.path == "tools[1]"
    assert refused.reason == "a tool of the type web_search is responses's own, and p speaks anthropic_messages"


def test_over_grpc_the_names_are_those_of_its_messages() -> None:
    picture = pb.Image(data=b"\x89PNG", media_type="image/png", detail="low")
    document = pb.Document(url="https://example.com/a.pdf", filename="a.pdf")
    call = pb.ToolCall(id="c1", name="f", arguments="{}", signature=b"c2ln")
    marked = [
        pb.Message(role="system", text="Be brief."),
        pb.Message(role="user", parts=pb.Parts(parts=[pb.Part(text="x", cache="5m"), pb.Part(image=picture)])),
        pb.Message(role="assistant", text="y", reasoning=[pb.Reasoning(text="Hm.")], tool_calls=[call]),
        pb.Message(role="tool", tool_call_id="c1", text="12", is_error=True),
    ]
    said = [pb.Message(role="user", name="ann", parts=pb.Parts(parts=[part])) for part in (
        pb.Part(document=document),
        pb.Part(audio=pb.Audio(data=b"RIFF", format="wav")),
    )]  # fmt: skip
    told: set[str] = set()
    for fields in (
        {"messages": marked, "tools": [pb.Tool(name="f", cache="5m")], "seed": 7, "end_user": "u"},
        {"messages": said[:1]},
        {"messages": said[1:]},
        {"messages": marked[:2], "tools": [pb.Tool(name="f", strict=True)]},
        {"messages": marked[:2], "stop": ["END"]},
    ):
        asked = pb.CompletionRequest(model="m", **fields)
        request = codec.decode_request(asked).chat
        for provider in PROTOCOLS:
            for drops in (frozenset[str](), DROPPED_WORDS, DROPPED_WORDS | {"messages.name"}):
                try:
                    paths = _render(provider, request, drops=drops).dropped
                except RequestNotExpressible as refused:
                    paths = (refused.path,)
                assert [path for path in paths if not _in_message(path, asked)] == [], provider
                told.update(paths)
    assert told == {
        "end_user",
        "messages[0].name",
        "messages[0].parts.parts[0]",
        "messages[0].parts.parts[0].document.filename",
        "messages[0].parts.parts[0].document.url",
        "messages[1].parts.parts[0].cache",
        "messages[1].parts.parts[1].image.detail",
        "messages[2].reasoning[0]",
        "messages[2].tool_calls[0].signature",
        "seed",
        "stop",
        "tools[0].cache",
        "tools[0].strict",
    }


def _in_message(path: str, message: AnyMessage) -> bool:
    value: Any = message
    for step in path.replace("[", ".[").split("."):
        if step.startswith("["):
            if int(step[1:-1]) >= len(value):
                return False
            value = value[int(step[1:-1])]
        elif not isinstance(value, AnyMessage) or step not in {field.name for field, _ in value.ListFields()}:
            return False
        else:
            value = getattr(value, step)
    return True


# --------------------------------------------------------------- what counts as dropped

#: In each format a request that has this field, the field, and one that it does not have.
FIELDS = {
    "chat_completions": ("top_p", "seed"),
    "anthropic_messages": ("top_p", "top_k"),
    "responses": ("top_p", "max_output_tokens"),
    "gemini": ("generationConfig.topP", "labels"),
    "workers_ai": ("top_p", "seed"),
}


@pytest.mark.parametrize("native", [True, False], ids=["native", "canonical"])
@pytest.mark.parametrize("provider", PROTOCOLS)
def test_dropped_is_what_was_asked_for_and_not_sent_as_it_was_asked(provider: str, native: bool) -> None:
    bodies = {name: _chat(top_p=0.5) for name in PROTOCOLS} | {
        "anthropic_messages": _messages(top_p=0.5),
        "responses": _responses(top_p=0.5),
        "gemini": _gemini(config={"topP": 0.5}),
    }
    caller = provider if native else "chat_completions" if provider != "chat_completions" else "responses"
    request = PROTOCOLS[caller].parse_request(json.dumps(bodies[caller]).encode())
    there, absent = FIELDS[provider]
    named = FIELDS[caller][0]
    same, other = msgspec.Raw(b"0.5"), msgspec.Raw(b"0.25")

    assert _render(provider, request, omit=frozenset({there, absent})).dropped == (named,)
    assert _render(provider, request, force={absent: other}).dropped == ()
    assert _render(provider, request, omit=frozenset({absent}), force={absent: other}).dropped == ()
    if "." in there:
        return  # nothing is forced within a field
    assert _render(provider, request, force={there: same}).dropped == ()
    assert _render(provider, request, force={there: other}).dropped == (named,)
    assert _render(provider, request, omit=frozenset({there}), force={there: same}).dropped == ()
    assert _render(provider, request, omit=frozenset({there}), force={there: other}).dropped == (named,)


def test_a_field_by_another_name_is_told_by_the_callers() -> None:
    for provider, omitted in (("anthropic_messages", "stop_sequences"), ("gemini", "generationConfig.stopSequences")):
        request = PROTOCOLS["chat_completions"].parse_request(json.dumps(_chat(stop="END")).encode())
        assert _render(provider, request, omit=frozenset({omitted})).dropped == ("stop",)


@pytest.mark.parametrize(
    ("caller", "provider", "user"),
    [
        ("chat_completions", "responses", "safety_identifier"),
        ("responses", "chat_completions", "user"),
    ],
)
def test_what_both_apis_of_openai_have_is_carried_between_them(caller: str, provider: str, user: str) -> None:
    asked = {"safety_identifier": "u", "prompt_cache_retention": "24h", "prompt_cache_key": "k"}
    body = _chat(**asked) if caller == "chat_completions" else _responses(**asked)
    request = PROTOCOLS[caller].parse_request(json.dumps(body).encode())
    sent = _render(provider, request)
    fields = json.loads(sent.body)
    assert sent.dropped == ()
    assert {name: fields[name] for name in (user, "prompt_cache_retention", "prompt_cache_key")} == {
        user: "u",
        "prompt_cache_retention": "24h",
        "prompt_cache_key": "k",
    }


@pytest.mark.parametrize(
    ("caller", "body", "wish"),
    [
        ("responses", _responses(reasoning={"summary": "auto"}), "reasoning.summary"),
        ("responses", _responses(reasoning={"generate_summary": "concise"}), "reasoning.generate_summary"),
        ("anthropic_messages", _messages(thinking={"type": "adaptive", "display": "omitted"}), "thinking.display"),
    ],
)
def test_how_thoughts_are_to_be_shown_is_dropped_and_told_and_never_a_reason_to_refuse(
    caller: str, body: dict[str, Any], wish: str
) -> None:
    request = PROTOCOLS[caller].parse_request(json.dumps(body).encode())
    for provider in PROTOCOLS:
        dropped = _render(provider, request, reasoning="effort").dropped
        assert dropped == (() if provider == caller else (wish,)), provider


def _effort(provider: str, effort: str, reasoning: str | None, **asked: Any) -> tuple[dict[str, Any], tuple[str, ...]]:
    request = PROTOCOLS["responses"].parse_request(
        json.dumps(_responses(reasoning={"effort": effort}, **asked)).encode()
    )
    http = _render(provider, request, reasoning=reasoning)
    fields = json.loads(http.body)
    return fields.get("generationConfig", {}).get("thinkingConfig") or fields.get("thinking") or fields, http.dropped


def test_an_effort_that_nobody_knows_is_no_budget() -> None:
    for provider in ("gemini", "anthropic_messages", "chat_completions"):
        for limit in ({}, {"max_output_tokens": 2000}):
            with pytest.raises(RequestNotExpressible) as refused:
                _effort(provider, "silly", "budget", **limit)
            assert refused.value.path == "reasoning.effort"
        chat = PROTOCOLS["chat_completions"].parse_request(json.dumps(_chat(reasoning_effort="silly")).encode())
        with pytest.raises(RequestNotExpressible) as refused:
            _render(provider, chat, reasoning="budget")
        assert refused.value.path == "reasoning_effort"


def test_a_budget_leaves_room_for_the_answer_and_what_is_less_than_was_asked_is_told() -> None:
    changed = ("reasoning.effort",)
    assert _effort("gemini", "high", "budget", max_output_tokens=2000)[0]["thinkingBudget"] == 1000
    assert _effort("gemini", "high", "budget")[0]["thinkingBudget"] == 24576
    assert _effort("gemini", "xhigh", "budget")[1] == changed
    assert _effort("gemini", "xhigh", "effort")[0]["thinkingLevel"] == "HIGH"
    assert _effort("gemini", "xhigh", "effort")[1] == changed
    assert _effort("anthropic_messages", "high", "budget", max_output_tokens=4000)[0]["budget_tokens"] == 2000
    assert _effort("chat_completions", "high", "budget", max_output_tokens=4000)[0]["thinking_budget"] == 2000
    assert _effort("anthropic_messages", "minimal", "effort")[1] == changed
    budget = {"type": "enabled", "budget_tokens": 4000}
    asked = PROTOCOLS["anthropic_messages"].parse_request(
        json.dumps({**_messages(thinking=budget), "max_tokens": 2000}).encode()
    )
    sent = _render("gemini", asked, reasoning="budget")
    assert json.loads(sent.body)["generationConfig"]["thinkingConfig"]["thinkingBudget"] == 1000
    assert sent.dropped == ("thinking.budget_tokens",)


@pytest.mark.parametrize("word", ["auto", "default"])
def test_an_effort_that_is_left_to_the_provider_is_not_sent_to_one_that_has_no_such_word(word: str) -> None:
    for provider, reasoning in itertools.product(("gemini", "anthropic_messages", "workers_ai"), ("effort", "budget")):
        fields, dropped = _effort(provider, word, reasoning)
        assert word not in json.dumps(fields)
        assert dropped == ()


def test_that_an_answer_is_to_be_text_asks_for_nothing() -> None:
    request = PROTOCOLS["chat_completions"].parse_request(json.dumps(_chat(modalities=["text"])).encode())
    assert all(_render(provider, request).dropped == () for provider in PROTOCOLS)
    sound = PROTOCOLS["chat_completions"].parse_request(json.dumps(_chat(modalities=["text", "audio"])).encode())
    with pytest.raises(RequestNotExpressible, match="modalities"):
        _render("gemini", sound)
