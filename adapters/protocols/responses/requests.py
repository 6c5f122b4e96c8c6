"""
Requests of Responses from a caller.

A request keeps its own top-level fields byte for byte, so that a field we never heard of arrives at a provider of the
same protocol. The canonical form is filled beside it, for routing and for other protocols.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from adapters import signatures
from adapters.body import data_url, from_base64, given, read_fields, typed
from adapters.chat import (
    ChatRequest,
    Document,
    Image,
    Message,
    NativeRequest,
    Opaque,
    Part,
    Reasoning,
    ResponseFormat,
    Role,
    Text,
    Tool,
    ToolCall,
    ToolChoice,
)
from adapters.errors import MalformedRequest
from adapters.paths import Paths, Spot, Words
from adapters.protocols.responses import schema
from adapters.protocols.responses.answers import MADE_THOUGHT, NAME, PARTS_APART

#: Top-level fields that the canonical form carries.
_MAPPED = frozenset(field.name for field in msgspec.structs.fields(schema.RequestIn))
#: What may stand for the input: it is kept at the provider.
_INSTEAD_OF_INPUT = ("previous_response_id", "conversation", "prompt")
#: Why what only the provider that made it can look up is for no other.
_KEPT_ELSEWHERE = (
    "answers are not kept here, and this provider speaks another protocol, in which it cannot look one up: set "
    "`store` to false and send the items of earlier turns themselves in `input`"
)
_LOOKED_UP = frozenset({"previous_response_id", "conversation"})
#: How the reasoning is to be summed up. Every protocol tells what its provider shows of it, as that provider does it.
_SUMMARIES = frozenset({"summary", "generate_summary"})
_REASONING_MAPPED = _SUMMARIES | {"effort"}
_TEXT_MAPPED = frozenset({"format", "verbosity"})

#: Canonical names to those of this format.
WORDS: Words = {
    "messages": ("input",),
    "end_user": ("safety_identifier", "user"),
    "response_format": ("text.format",),
    "response_format.schema": ("text.format.schema",),
    "response_format.description": ("text.format.description",),
    "verbosity": ("text.verbosity",),
    "reasoning_effort": ("reasoning.effort",),
    "reasoning_budget_tokens": (),
    "logprobs": ("top_logprobs", "include"),
    "cache": ("prompt_cache_breakpoint",),
    "url": ("image_url", "file_url"),
    "data": ("file_data", "image_url"),
    "media_type": ("image_url", "file_data"),
    "signature": ("signature", "encrypted_content"),
    "tool_call_id": ("call_id",),
}

LOGPROBS = "message.output_text.logprobs"
ENCRYPTED = "reasoning.encrypted_content"


# ------------------------------------------------------------------- reading


def parse_request(body: bytes) -> ChatRequest:
    """Raises `MalformedRequest`, which names the field and repeats none of its content."""
    fields = read_fields(body)
    wire = typed(body, schema.RequestIn, "")
    unmapped = [name for name, raw in fields.items() if name not in _MAPPED and given(raw) is not None]
    inner = _inner(fields, "reasoning")
    unmapped += [f"reasoning.{name}" for name in inner if name not in _REASONING_MAPPED]
    unmapped += [f"text.{name}" for name in _inner(fields, "text") if name not in _TEXT_MAPPED]
    if wire.background:
        unmapped.append("background")
    if wire.truncation not in {None, "disabled"}:
        unmapped.append("truncation")
    if wire.safety_identifier and wire.user and wire.user != wire.safety_identifier:
        unmapped.append("user")
    include = wire.include or ()
    if any(asked not in {LOGPROBS, ENCRYPTED} for asked in include):
        unmapped.append("include")
    if (wire.input is None or wire.input == ()) and not any(name in unmapped for name in _INSTEAD_OF_INPUT):
        raise MalformedRequest("input", "is required")
    turns = _messages(wire, unmapped)
    tools = [(f"tools[{i}]", _tool(raw, f"tools[{i}]", unmapped)) for i, raw in enumerate(wire.tools or ())]
    return ChatRequest(
        messages=tuple(turns.messages),
        tools=tuple(tool for _, tool in tools if tool is not None),
        tool_choice=_tool_choice(wire.tool_choice, unmapped),
        parallel_tool_calls=wire.parallel_tool_calls,
        response_format=_response_format(wire.text.format if wire.text else None, unmapped),
        max_output_tokens=wire.max_output_tokens,
        temperature=wire.temperature,
        top_p=wire.top_p,
        logprobs=True if LOGPROBS in include or wire.top_logprobs else None,
        top_logprobs=wire.top_logprobs or None,
        reasoning_effort=wire.reasoning.effort if wire.reasoning else None,
        verbosity=wire.text.verbosity if wire.text else None,
        service_tier=wire.service_tier,
        prompt_cache_key=wire.prompt_cache_key,
        prompt_cache_retention=wire.prompt_cache_retention,
        store=wire.store,
        metadata=wire.metadata,
        end_user=wire.safety_identifier or wire.user,
        native=NativeRequest(
            protocol=NAME,
            fields=fields,
            unmapped=tuple(unmapped),
            wishes=tuple(f"reasoning.{name}" for name in inner if name in _SUMMARIES),
            reasons=dict.fromkeys((_LOOKED_UP & fields.keys()) | turns.references, _KEPT_ELSEWHERE),
        ),
        paths=Paths(messages=turns.spots, tools=[at for at, tool in tools if tool is not None], words=WORDS),
    )


def _inner(fields: Mapping[str, msgspec.Raw], name: str) -> list[str]:
    """The names of what is given within a field."""
    raw = given(fields[name]) if name in fields else None
    if raw is None:
        return []
    inner = msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
    return [key for key, value in inner.items() if given(value) is not None]


class _Turns:
    """
    Items to messages. What a model said in one turn is one message, so that its calls stand right before their
    results; a second text without a call between is a message of its own.
    """

    def __init__(self) -> None:
        self.messages: list[Message] = []
        #: Where each of them was.
        self.spots: list[Spot] = []
        #: Where items are that only name one of an earlier answer.
        self.references: set[str] = set()
        self._content: list[Part] = []
        self._refusals: list[str] = []
        self._reasoning: list[Reasoning] = []
        self._calls: list[ToolCall] = []
        #: Of the turn that is not over, where its first item was, its parts, its calls and its thoughts.
        self._first: str | None = None
        self._said: list[str] = []
        self._called: list[str] = []
        self._thought: list[str] = []

    def add(self, message: Message, spot: Spot) -> None:
        self.flush()
        self.messages.append(message)
        self.spots.append(spot)

    def think(self, thought: Reasoning, path: str) -> None:
        self._begin()
        self._reasoning.append(thought)
        self._thought.append(path)
        self._first = self._first or path

    def say(self, content: Sequence[Part], refusal: str, path: str, places: Sequence[str]) -> None:
        self._begin()
        self._content += content
        self._said += places
        self._first = self._first or path
        if refusal:
            self._refusals.append(refusal)

    def call(self, call: ToolCall, path: str) -> None:
        self._calls.append(call)
        self._called.append(path)
        self._first = self._first or path

    def flush(self) -> None:
        if self._content or self._refusals or self._reasoning or self._calls:
            message = Message(
                role=Role.ASSISTANT,
                content=tuple(self._content),
                refusal="".join(self._refusals) or None,
                reasoning=tuple(self._reasoning),
                tool_calls=tuple(self._calls),
            )
            self.messages.append(message)
            self.spots.append(Spot(self._first or "input", self._said, self._called, self._thought))
        self._content, self._refusals, self._reasoning, self._calls = [], [], [], []
        self._first, self._said, self._called, self._thought = None, [], [], []

    def _begin(self) -> None:
        if (self._content or self._refusals) and not self._calls:
            self.flush()


def _messages(wire: schema.RequestIn, unmapped: list[str]) -> _Turns:
    turns = _Turns()
    if wire.instructions:
        said = Message(role=Role.SYSTEM, content=(Text(text=wire.instructions),))
        turns.add(said, Spot("instructions", ["instructions"]))
    if isinstance(wire.input, str):
        turns.add(Message(role=Role.USER, content=_text(wire.input)), Spot("input", ["input"]))
    else:
        for i, raw in enumerate(wire.input or ()):
            _take_item(turns, raw, f"input[{i}]", unmapped)
    turns.flush()
    return turns


def _take_item(turns: _Turns, raw: msgspec.Raw, path: str, unmapped: list[str]) -> None:
    kind = typed(raw, schema.Kind, path)
    match kind.type or ("message" if kind.role else None):
        case "message":
            message = typed(raw, schema.MessageIn, path)
            content, refusal, places = _content(message.content, f"{path}.content")
            if message.role == "assistant":
                turns.say(content, refusal, path, places)
            elif refusal:
                raise MalformedRequest(f"{path}.content", "only an assistant refuses")
            else:
                turns.add(Message(role=Role(message.role), content=content), Spot(path, places))
        case "function_call":
            call = typed(raw, schema.CallIn, path)
            turns.call(
                ToolCall(id=call.call_id, name=call.name, arguments=call.arguments, signature=call.signature), path
            )
        case "function_call_output":
            result = typed(raw, schema.CallOutputIn, path)
            content, _, places = _content(result.output, f"{path}.output")
            turns.add(Message(role=Role.TOOL, content=content, tool_call_id=result.call_id), Spot(path, places))
        case "reasoning":
            turns.think(_reasoning(typed(raw, schema.ReasoningIn, path)), path)
        case None:
            raise MalformedRequest(f"{path}.type", "is required")
        case "item_reference":
            unmapped.append(path)
            turns.references.add(path)
        case _:
            unmapped.append(path)


def _reasoning(wire: schema.ReasoningIn) -> Reasoning:
    """As it was before it was told to the caller: an id that was made for that is taken off again."""
    own = wire.id is not None and not wire.id.startswith(MADE_THOUGHT)
    parts = wire.content or wire.summary or ()
    text = PARTS_APART.join(part.text for part in parts)
    return Reasoning(
        text=text,
        signature=signatures.heard(NAME, wire.encrypted_content),
        redacted=not parts,
        id=wire.id if own else None,
    )


def _text(text: str) -> tuple[Part, ...]:
    return (Text(text=text),) if text else ()


def _content(content: str | Iterable[msgspec.Raw], path: str) -> tuple[tuple[Part, ...], str, list[str]]:
    """The parts, what of them is a refusal, and where each part was."""
    if isinstance(content, str):
        return _text(content), "", [path]
    parts: list[Part] = []
    places: list[str] = []
    refusals: list[str] = []
    for i, raw in enumerate(content):
        at = f"{path}[{i}]"
        wire = typed(raw, schema.PartIn, at)
        cache = _cache(wire.prompt_cache_breakpoint)
        match wire:
            case schema.PartIn(type="input_text" | "output_text" | "text", text=str() as text):
                parts.append(Text(text=text, cache=cache))
            case schema.PartIn(type="refusal", refusal=str() as refusal):
                refusals.append(refusal)
            case schema.PartIn(type="input_image", image_url=str() as url):
                parts.append(_image(url, wire.detail, cache, f"{at}.image_url"))
            case schema.PartIn(type="input_image", file_id=None):
                raise MalformedRequest(at, "needs image_url or file_id")
            case schema.PartIn(type="input_file"):
                parts.append(_file(wire, cache, at))
            case schema.PartIn(type="input_text" | "output_text" | "text"):
                raise MalformedRequest(f"{at}.text", "is required")
            case schema.PartIn(type="refusal"):
                raise MalformedRequest(f"{at}.refusal", "is required")
            case _:
                parts.append(Opaque(protocol=NAME, raw=raw))
        if len(parts) > len(places):
            places.append(at)
    return tuple(parts), "".join(refusals), places


def _cache(wire: schema.Breakpoint | None) -> str | None:
    """Kept for half an hour at least, or for twelve: the shorter and the longer of the two there are."""
    if wire is None:
        return None
    return "5m" if wire.ttl in {None, "30m"} else "1h"


def _image(url: str, detail: str | None, cache: str | None, path: str) -> Image:
    if not url.startswith("data:"):
        return Image(url=url, detail=detail, cache=cache)
    media_type, data = data_url(url, path)
    return Image(data=data, media_type=media_type, detail=detail, cache=cache)


def _file(wire: schema.PartIn, cache: str | None, path: str) -> Document:
    if wire.file_id is not None:
        return Document(file_id=wire.file_id, filename=wire.filename, cache=cache)
    if wire.file_url is not None:
        return Document(url=wire.file_url, filename=wire.filename, cache=cache)
    if wire.file_data is None:
        raise MalformedRequest(path, "needs file_id, file_url or file_data")
    if wire.file_data.startswith("data:"):
        media_type, data = data_url(wire.file_data, f"{path}.file_data")
    else:
        media_type, data = None, from_base64(wire.file_data, f"{path}.file_data")
    return Document(data=data, media_type=media_type, filename=wire.filename, cache=cache)


def _tool(raw: msgspec.Raw, path: str, unmapped: list[str]) -> Tool | None:
    if typed(raw, schema.Kind, path).type != "function":
        unmapped.append(path)
        return None
    wire = typed(raw, schema.FunctionIn, path)
    return Tool(name=wire.name, description=wire.description, parameters=given(wire.parameters), strict=wire.strict)


def _tool_choice(choice: str | schema.ToolChoiceIn | None, unmapped: list[str]) -> ToolChoice | None:
    match choice:
        case None:
            return None
        case "auto" | "none" | "required" as mode:
            return ToolChoice(mode=mode)
        case schema.ToolChoiceIn(type="function", name=str() as tool):
            return ToolChoice(mode="tool", tool=tool)
        case schema.ToolChoiceIn(type="function"):
            raise MalformedRequest("tool_choice.name", "is required")
        case schema.ToolChoiceIn():
            unmapped.append("tool_choice")
            return None
        case _:
            raise MalformedRequest("tool_choice", "is not one of the allowed values")


def _response_format(wire: schema.FormatIn | None, unmapped: list[str]) -> ResponseFormat | None:
    if wire is None:
        return None
    if wire.type not in {"text", "json_object", "json_schema"}:
        unmapped.append("text.format")
        return None
    if wire.type != "json_schema":
        return ResponseFormat(kind=wire.type)
    if given(wire.schema) is None:
        raise MalformedRequest("text.format.schema", "is required")
    return ResponseFormat(
        kind=wire.type, name=wire.name, description=wire.description, schema=given(wire.schema), strict=wire.strict
    )
