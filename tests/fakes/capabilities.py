"""
What each protocol can say, found by asking it: one thing at a time is written, and read back by the same protocol.

docs/protocols.md shows the result, and a test demands that it is the same.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, cast

import msgspec

from adapters.chat import (
    Audio,
    ChatRequest,
    ChatResponse,
    Choice,
    Document,
    Image,
    Message,
    Part,
    Reasoning,
    ResponseFormat,
    Role,
    StopReason,
    Text,
    TokenLogprob,
    Tool,
    ToolCall,
    ToolChoice,
)
from adapters.contract import EmbeddingProtocol, Endpoint, UpstreamCall, WireProtocol
from adapters.errors import MalformedRequest, ProviderError, RequestNotExpressible
from metering.usage import Usage
from tests.fakes.answers import gathered_response

_WIRE = Path(__file__).parents[1] / "wire"
_SCHEMA = msgspec.Raw(b'{"type":"object","properties":{"city":{"type":"string"}},"additionalProperties":false}')
_HI = Message(role=Role.USER, content=(Text(text="Hi"),))
_TOOL = Tool(name="get_weather", description="The weather.", parameters=_SCHEMA)
_CALL = ToolCall(id="call_1", name="get_weather", arguments='{"city":"Paris"}')
_PNG = b"\x89PNG\r\n\x1a\n"


def _user(*parts: Part, **more: Any) -> ChatRequest:
    return ChatRequest(messages=(Message(role=Role.USER, content=(Text(text="See:"), *parts), **more),))


def _with(**fields: Any) -> ChatRequest:
    return ChatRequest(**({"messages": (_HI,)} | fields))


def _called(result: Message, *reasoning: Reasoning, signature: str | None = None) -> ChatRequest:
    call = msgspec.structs.replace(_CALL, signature=signature)
    said = Message(role=Role.ASSISTANT, tool_calls=(call,), reasoning=reasoning)
    return ChatRequest(messages=(_HI, said, result), tools=(_TOOL,))


def _result(*parts: Part, **more: Any) -> Message:
    return Message(role=Role.TOOL, tool_call_id="call_1", content=parts or (Text(text="12 degrees"),), **more)


def _messages(request: ChatRequest) -> Any:
    return [
        {
            "role": m.role,
            "content": [_content(part) for part in m.content],
            # The result of a tool may be named after its function.
            "name": m.name if m.role is not Role.TOOL else None,
            "is_error": m.is_error,
            "reasoning": [(block.text, block.signature) for block in m.reasoning],
            "calls": [(call.name, call.arguments, call.signature) for call in m.tool_calls],
        }
        for m in request.messages
    ]


def _content(part: Part) -> Any:
    if isinstance(part, Image | Document) and part.url is not None:
        # What it is, who fetches it sees.
        part = msgspec.structs.replace(part, media_type=None)
    if isinstance(part, Image) and part.detail == "auto":
        part = msgspec.structs.replace(part, detail=None)
    return part


def _tools(request: ChatRequest) -> Any:
    return [
        (t.name, t.cache, t.strict is True, msgspec.json.decode(t.parameters) if t.parameters is not None else None)
        for t in request.tools
    ]


def _format(request: ChatRequest) -> Any:
    wanted = request.response_format
    schema = wanted.schema if wanted is not None else None
    return wanted and (wanted.kind, msgspec.json.decode(schema) if schema is not None else None)


_SYSTEM = Message(role=Role.SYSTEM, content=(Text(text="Be brief."),))
_SAID = Message(role=Role.ASSISTANT, content=(Text(text="Hello"),))

#: What is asked, and what of it must be read back.
REQUESTS: Mapping[str, tuple[ChatRequest, Callable[[ChatRequest], Any]]] = {
    "system message first": (_with(messages=(_SYSTEM, _HI)), _messages),
    "system message later": (_with(messages=(_HI, _SAID, _HI, _SYSTEM)), _messages),
    "developer message": (
        _with(messages=(msgspec.structs.replace(_SYSTEM, role=Role.DEVELOPER), _HI)),
        _messages,
    ),
    "several turns": (_with(messages=(_HI, _SAID, _HI)), _messages),
    "name of who speaks": (_user(name="ada"), _messages),
    "tools": (_with(tools=(_TOOL,)), _tools),
    "tool held to its schema (`strict`)": (_with(tools=(msgspec.structs.replace(_TOOL, strict=True),)), _tools),
    "some tool must be called": (
        _with(tools=(_TOOL,), tool_choice=ToolChoice(mode="required")),
        lambda r: r.tool_choice,
    ),
    "this tool must be called": (
        _with(tools=(_TOOL,), tool_choice=ToolChoice(mode="tool", tool="get_weather")),
        lambda r: r.tool_choice,
    ),
    "one call at a time": (_with(tools=(_TOOL,), parallel_tool_calls=False), lambda r: r.parallel_tool_calls),
    "result of a tool": (_called(_result()), _messages),
    "result that is an error": (_called(_result(is_error=True)), _messages),
    "result with an image": (
        _called(_result(Text(text="See:"), Image(data=_PNG, media_type="image/png"))),
        _messages,
    ),
    "image by URL": (_user(Image(url="https://example.com/a.png")), _messages),
    "image as data": (_user(Image(data=_PNG, media_type="image/png")), _messages),
    "detail of an image": (
        _user(Image(data=_PNG, media_type="image/png", detail="low")),
        _messages,
    ),
    "document as data": (_user(Document(data=b"%PDF-1.7", media_type="application/pdf")), _messages),
    "name of a document": (
        _user(Document(data=b"%PDF-1.7", media_type="application/pdf", filename="a.pdf")),
        _messages,
    ),
    "document by URL": (_user(Document(url="https://example.com/a.pdf", media_type="application/pdf")), _messages),
    "document by id": (_user(Document(file_id="file-1")), _messages),
    "sound": (_user(Audio(data=b"RIFF", format="wav")), _messages),
    "JSON mode": (_with(response_format=ResponseFormat(kind="json_object")), _format),
    "JSON schema": (
        _with(response_format=ResponseFormat(kind="json_schema", name="trip", schema=_SCHEMA, strict=True)),
        _format,
    ),
    "reasoning, by effort": (_with(reasoning_effort="low", max_output_tokens=4000), lambda r: r.reasoning_effort),
    "reasoning, by budget": (
        _with(reasoning_budget_tokens=2000, max_output_tokens=4000),
        lambda r: r.reasoning_budget_tokens,
    ),
    "reasoning sent back, with its signature": (_called(_result(), Reasoning(text="Hm.", signature="c2ln")), _messages),
    "reasoning sent back, without one": (_called(_result(), Reasoning(text="Hm.")), _messages),
    "signature of a call sent back": (_called(_result(), signature="gemini:call:c2lnbmVk"), _messages),
    "prompt-cache boundary": (
        ChatRequest(messages=(Message(role=Role.USER, content=(Text(text="Hi", cache="5m"),)),)),
        _messages,
    ),
    "prompt-cache key": (_with(prompt_cache_key="k"), lambda r: r.prompt_cache_key),
    "prompt-cache retention": (_with(prompt_cache_retention="24h"), lambda r: r.prompt_cache_retention),
    "output limit": (_with(max_output_tokens=100), lambda r: r.max_output_tokens),
    "temperature": (_with(temperature=0.5), lambda r: r.temperature),
    "top_p": (_with(top_p=0.5), lambda r: r.top_p),
    "top_k": (_with(top_k=5), lambda r: r.top_k),
    "stop sequences": (_with(stop=("END",)), lambda r: r.stop),
    "seed": (_with(seed=7), lambda r: r.seed),
    "several choices (`n`)": (_with(n=2), lambda r: r.n),
    "penalties": (
        _with(presence_penalty=0.5, frequency_penalty=0.5),
        lambda r: (r.presence_penalty, r.frequency_penalty),
    ),
    "log probabilities": (_with(logprobs=True, top_logprobs=2), lambda r: (r.logprobs, r.top_logprobs)),
    "logit bias": (_with(logit_bias={"5": 1.0}), lambda r: r.logit_bias),
    "verbosity": (_with(verbosity="low"), lambda r: r.verbosity),
    "service tier": (_with(service_tier="flex"), lambda r: r.service_tier),
    "store": (_with(store=True), lambda r: r.store),
    "metadata": (_with(metadata={"a": "b"}), lambda r: r.metadata),
    "end user": (_with(end_user="u1"), lambda r: r.end_user),
}

#: Ways in which a profile may let a protocol say more.
_PROFILES: tuple[dict[str, Any], ...] = (
    {"reasoning": "effort"},
    {"reasoning": "budget"},
    {"cache_control": True},
    {"reasoning_field": "reasoning_content"},
    {"reasoning_field": "reasoning_details"},
    {"reasoning_field": "extra_content"},
    {"reasoning_field": "content"},
)


def _asked(protocol: WireProtocol, asked: ChatRequest, part: Callable[[ChatRequest], Any], **profile: Any) -> str:
    endpoint = Endpoint(provider="p", protocol=protocol.name, base_url="", **profile)
    call = UpstreamCall(endpoint=endpoint, model="m", request=asked, deadline=0)
    try:
        sent = protocol.render_request(call, stream=False)
    except RequestNotExpressible:
        return "no"
    if sent.dropped:
        return "no"
    try:
        read = protocol.parse_request(sent.body)
    except MalformedRequest:
        return "sent"
    return "yes" if part(read) == part(asked) else "sent"


def _own(protocol: WireProtocol, asked: ChatRequest) -> ChatRequest:
    """A signature says in which protocol it was made, one of Gemini's where it belongs, too."""
    mark = "gemini:thought" if protocol.name == "gemini" else protocol.name
    return msgspec.structs.replace(
        asked,
        messages=tuple(
            msgspec.structs.replace(
                message,
                reasoning=tuple(
                    msgspec.structs.replace(block, signature=block.signature and f"{mark}:{block.signature}")
                    for block in message.reasoning
                ),
            )
            for message in asked.messages
        ),
    )


def of_request(protocol: WireProtocol, asked: ChatRequest, part: Callable[[ChatRequest], Any]) -> str:
    """`yes`, `sent`, `no`, or `profile` where only a profile that says so makes more of it than `no`."""
    asked = _own(protocol, asked)
    plain = _asked(protocol, asked, part)
    if plain == "no" and any(_asked(protocol, asked, part, **profile) != "no" for profile in _PROFILES):
        return "profile"
    return plain


def _answer(usage: Usage | None = None, cost: str | None = None, **choice: Any) -> ChatResponse:
    fields: dict[str, Any] = {
        "index": 0,
        "text": "Hi",
        "stop_reason": StopReason.STOP,
        "native_stop_reason": "stop",
    }
    return ChatResponse(
        choices=(Choice(**(fields | choice)),),
        usage=usage if usage is not None else Usage(input_total=100, output_total=50),
        reported_cost_usd=cost,
        response_id="a1",
        served_model="m",
    )


def _tokens(field: str, **more: int) -> ChatResponse:
    return _answer(usage=Usage(**cast("Any", {"input_total": 100, "output_total": 50, field: 20} | more)))


_CHOICES = _answer()
_SECOND = msgspec.structs.replace(_CHOICES.choices[0], index=1, text="Ho")

#: An answer, and what of it (as `gathered` tells it) must be read back.
ANSWERS: Mapping[str, tuple[ChatResponse, Callable[[dict[str, Any]], Any]]] = {
    "text": (_answer(), lambda told: _first(told).get("text")),
    "refusal, apart from text": (_answer(text="", refusal="No."), lambda told: _first(told).get("refusal")),
    "tool calls": (
        _answer(tool_calls=(_CALL, msgspec.structs.replace(_CALL, id="call_2"))),
        lambda told: [(call["name"], call["arguments"]) for call in _first(told).get("tool_calls", [])],
    ),
    "signature of a call": (
        _answer(tool_calls=(msgspec.structs.replace(_CALL, signature="gemini:call:c2lnbmVk"),)),
        lambda told: [call.get("signature") for call in _first(told).get("tool_calls", []) if "signature" in call],
    ),
    "reasoning": (_answer(reasoning=(Reasoning(text="Hm."),)), lambda told: _first(told).get("reasoning")),
    "signed reasoning": (
        _answer(reasoning=(Reasoning(text="Hm.", signature="responses:c2lnbmVk"),)),
        lambda told: [block["signature"] for block in _first(told).get("blocks", []) if block["signature"]],
    ),
    "images": (
        _answer(images=(Image(data=_PNG, media_type="image/png"),)),
        lambda told: len(_first(told).get("images", [])),
    ),
    "log probabilities": (
        _answer(logprobs=(TokenLogprob(token="Hi", logprob=-0.5),)),
        lambda told: len(_first(told).get("logprobs", [])),
    ),
    "several choices": (
        msgspec.structs.replace(_CHOICES, choices=(*_CHOICES.choices, _SECOND)),
        lambda told: len(told["choices"]) > 1,
    ),
    "stopped by a limit": (_answer(stop_reason=StopReason.LENGTH), lambda told: _ended(told, "length")),
    "stopped by a filter": (
        _answer(stop_reason=StopReason.CONTENT_FILTER),
        lambda told: _ended(told, "content_filter"),
    ),
    "tokens in and out": (
        _answer(),
        lambda told: "input_total" in told["usage"] and "output_total" in told["usage"],
    ),
    "tokens read from a cache": (_tokens("cache_read"), lambda told: bool(told["usage"].get("cache_read"))),
    "tokens written to a cache": (
        _tokens("cache_write_5m"),
        lambda told: bool(told["usage"].get("cache_write_5m")),
    ),
    "tokens of reasoning": (_tokens("reasoning"), lambda told: bool(told["usage"].get("reasoning"))),
    "cost": (_answer(cost="0.01"), lambda told: told["cost"] is not None),
}


def _first(told: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = next(iter(told["choices"].values()), {})
    return found


def _ended(told: dict[str, Any], reason: str) -> bool:
    return any(choice.get("end", [""])[0] == reason for choice in told["choices"].values())


def of_answer(protocol: WireProtocol, answer: ChatResponse, part: Callable[[dict[str, Any]], Any]) -> str:
    """`yes` where it is read and told, `read` where one of the hand-made cases has it, else `no`."""
    try:
        read = protocol.parse_response(200, {}, protocol.render_response(answer))
    except ProviderError:
        read = None
    if read is not None and part(gathered_response(read)) == part(gathered_response(answer)):
        return "yes"
    cases = [json.loads(path.read_text())["answer"] for path in (_WIRE / protocol.name).glob("*.json")]
    return "read" if any(part(told) for told in cases) else "no"


def table(first: str, protocols: Mapping[str, WireProtocol], rows: Iterable[tuple[str, list[str]]]) -> str:
    lines = [
        f"| {first} | " + " | ".join(f"`{name}`" for name in protocols) + " |",
        "|---" * (len(protocols) + 1) + "|",
    ]
    lines += [f"| {name} | " + " | ".join(cells) + " |" for name, cells in rows]
    return "\n".join(lines)


def requests_table(protocols: Mapping[str, WireProtocol]) -> str:
    return table(
        "of a request",
        protocols,
        ((name, [of_request(p, *probe) for p in protocols.values()]) for name, probe in REQUESTS.items()),
    )


def answers_table(protocols: Mapping[str, WireProtocol]) -> str:
    rows = [(name, [of_answer(p, *probe) for p in protocols.values()]) for name, probe in ANSWERS.items()]
    embeddings = ["yes" if isinstance(p, EmbeddingProtocol) else "no" for p in protocols.values()]
    return table("of an answer", protocols, [*rows, ("embeddings", embeddings)])
